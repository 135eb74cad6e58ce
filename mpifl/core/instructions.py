"""The vector instructions that PyTorch, NumPy and the libraries below them use.

Each library uses the widest instructions of the processor, and rounds differently with others. mpifl's own
kernels give the same bits with all of them. Adam is an exception: it uses PyTorch's square roots, which come
from MKL.
"""

from __future__ import annotations

import os

from .errors import require
from .textfiles import readable

VARIABLE = "MPIFL_INSTRUCTIONS"  # asks for no wider instructions than these, on every rank
LIMITS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",  # loops of PyTorch
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # its convolutions and LSTM
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # its matrix products
        # NumPy, which has other names since 2.4; it ignores names that it does not know
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512_SKX AVX512_ICL AVX512_SPR X86_V4",
        "OPENBLAS_CORETYPE": "Haswell",  # matrix products of NumPy and SciPy
        "OPENBLAS_L2_SIZE": "512",  # kB
        "NUMBA_CPU_NAME": "haswell",  # UMAP
        "NUMBA_CPU_FEATURES": "+avx2,+fma",
    }
}
OTHERS = (  # other variables that change what the libraries compute
    *("DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "NPY_ENABLE_CPU_FEATURES"),
)


def limit() -> None:
    """Set the variables of the libraries for `MPIFL_INSTRUCTIONS`; they read them when they are imported."""
    for name, value in LIMITS.get(os.environ.get(VARIABLE, ""), {}).items():
        os.environ.setdefault(name, value)


def limited() -> bool:
    """Return whether this process was given a limit."""
    return bool(os.environ.get(VARIABLE))


def check() -> None:
    """Check that the libraries keep the limit, if there is one.

    Raises:
        UserError: the limit is unknown, a variable of a library has another value, a library was imported
            before mpifl, or the processor does not have AVX2.
    """
    if not limited():
        return
    asked = os.environ[VARIABLE]
    require(asked in LIMITS, VARIABLE, asked, f"use {', '.join(LIMITS)}, or unset it")
    for name, value in LIMITS[asked].items():
        found = os.environ.get(name)
        require(found is not None, VARIABLE, asked, "set it before mpifl is imported")
        remedy = f"{VARIABLE}={asked} makes it {value}; unset one of the two"
        require(found == value, name, found, remedy)
    used = {"PyTorch": _of_pytorch(), "NumPy": _of_numpy()}
    kept = used["PyTorch"] == "AVX2" and not any(wide in used["NumPy"] for wide in ("AVX512", "X86_V4"))
    remedy = f"{' and '.join(f'{name} uses {one}' for name, one in used.items())}: import mpifl before them"
    require(kept, VARIABLE, asked, f"{remedy}, or unset it on a processor without AVX2")


def in_use() -> str:
    """Return the instructions that this process uses, and whether a limit decided them."""
    return f"{_of_pytorch()} ({VARIABLE})" if limited() else _of_pytorch()


def variables() -> str:
    """Return the set variables that change what libraries compute, with values, except those of a limit."""
    of_limit = LIMITS.get(os.environ.get(VARIABLE, ""), {})
    names = [name for name in (*LIMITS["avx2"], *OTHERS) if name not in of_limit]
    return ", ".join(f"{name}={readable(os.environ[name])}" for name in names if name in os.environ)


def tells_limit(found: str) -> bool:
    """Return whether a text that `in_use` returned names the instructions of a limit."""
    return f"({VARIABLE})" in found


def _of_pytorch() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _of_numpy() -> str:
    """Return the instructions of `numpy.exp`, which has a version for each kind of processor."""
    from numpy.lib.introspect import opt_func_info

    return str(opt_func_info(func_name="^exp$")["exp"]["dd"]["current"])
