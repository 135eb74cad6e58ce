"""The libraries of C kernels, and the calls of exact sums (reductions.c).

`pooling` calls the rest of reductions.c, `training_calls` and `convolutions` the others. They are built if
a C compiler is available when mpifl is installed. Check `AVAILABLE` before calling the exact sums here or
`pooling`: they return the same bits as the PyTorch code that replaces them elsewhere. Check
`TRAINING_AVAILABLE` before calling `training_calls` or `convolutions`: their last bits differ from
PyTorch's. Libraries built from sources other than the ones beside this file are not used; `BUILD` describes
the libraries in use, and `PROBLEM` says why there are none.

Every function checks the type, device, memory layout and length of its tensors and raises `ValueError` if
they do not fit, because C code that reads beyond the end of a tensor returns wrong numbers without an error.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_float, c_int
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpifl.core.devices import CPU

FOLDER = Path(__file__).parent
SOURCES = (  # setup.py hashes them in this order
    *("common.h", "dispatch.h", "reductions.c", "training.c", "training_simd.inc"),
    *("channels_last.c", "channels_last_simd.inc"),
)
SUFFIXES = (".so", *EXTENSION_SUFFIXES)  # of one Python's: older builds of the same sources
VERSION = 10  # version of the signatures below; as in common.h
REINSTALL = "install mpifl again where there is a C compiler (pip install -e . in a checkout)"

Pointer, Size = ctypes.c_void_p, ctypes.c_ssize_t
Signature = tuple[Any, list[Any]]  # result, arguments
Signatures = Mapping[str, Signature]

# Names lack the prefix mpifl_; the comments list C's parameter names.
COMMON: Signatures = {"version": (c_int, []), "build": (ctypes.c_char_p, [])}
REDUCTIONS: Signatures = {
    # sums, uploads, weights, magic; rows, num, width
    "exact_sum_add": (None, [Pointer, Pointer, Pointer, Pointer, Size, Size, Size]),
    # sums, spacing, kept, out, count
    "exact_sum_finish": (None, [Pointer, c_double, Pointer, Pointer, Size]),
    # x, count
    "max_abs": (c_float, [Pointer, Size]),
    # x, out, index, lines, width
    "max_pool2x2": (None, [Pointer, Pointer, Pointer, Size, Size]),
    # grad, index, out, lines, width
    "max_pool2x2_backward": (None, [Pointer, Pointer, Pointer, Size, Size]),
    # x, out, index, lines, width, channels
    "max_pool2x2_last": (None, [Pointer, Pointer, Pointer, Size, Size, Size]),
    # grad, index, out, lines, width, channels
    "max_pool2x2_last_backward": (None, [Pointer, Pointer, Pointer, Size, Size, Size]),
    # x, out, lines, width
    "avg_pool2x2": (None, [Pointer, Pointer, Size, Size]),
    # grad, out, lines, width
    "avg_pool2x2_backward": (None, [Pointer, Pointer, Size, Size]),
}
NETWORK = [Pointer, Size]  # layers, num_layers
RATES = [c_float, c_float, c_float]  # lr, momentum_factor, weight_decay
WORKSPACE = [Pointer, Size]  # workspace, size
TRAINING: Signatures = {
    "supported": (c_int, []),
    # on
    "use_narrow_vectors": (None, [c_int]),
    "layer_size": (Size, []),
    # layers, num_layers, max_batch
    "workspace_size": (Size, [*NETWORK, Size]),
    # layers, num_layers; weights, x, y; count, batch; workspace, size
    "forward": (c_int, [*NETWORK, Pointer, Pointer, Pointer, Size, Size, *WORKSPACE]),
    # layers, num_layers; weights, momentum, grad; x, labels, sample_weights, samples; order, factors, count,
    # batch; lr, momentum_factor, weight_decay; steps_done, last; workspace, size; loss
    "train": (
        c_int,
        [
            *NETWORK,
            *(Pointer, Pointer, Pointer),
            *(Pointer, Pointer, Pointer, Size),
            *(Pointer, Pointer, Size, Size),
            *RATES,
            *(Size, c_int),
            *WORKSPACE,
            Pointer,
        ],
    ),
    "visit_size": (Size, []),
    # layers, num_layers; parameters, visits, num_visits; table, channels; order, batch;
    # lr, momentum_factor, weight_decay; proximal, mu, change; momentum; workspace, size
    "train_visits": (
        c_int,
        [
            *(*NETWORK, Size, Pointer, Size, Pointer, Size, Pointer, Size),
            *(*RATES, c_int, c_float, c_int, Pointer, *WORKSPACE),
        ],
    ),
    # layers, num_layers; visits, num_visits; weights, num_models; table, channels; order, batch; outputs;
    # workspace, size
    "visit_outputs": (
        c_int,
        [*NETWORK, Pointer, Size, Pointer, Size, Pointer, Size, Pointer, Size, Pointer, *WORKSPACE],
    ),
    # entropy, sizes, count, out
    "permutations": (None, [Pointer, Pointer, Size, Pointer]),
    # weights, momentum, grad, count; lr, momentum_factor, weight_decay; steps_done
    "sgd_step": (None, [Pointer, Pointer, Pointer, Size, *RATES, Size]),
}
CONVOLUTION = [Size] * 7  # n, height, width, in, out, taps, margin
CHANNELS_LAST: Signatures = {
    "supported": (c_int, []),
    # on
    "use_narrow_vectors": (None, [c_int]),
    # in, out
    "convolve_workspace": (Size, [Size, Size]),
    # x, w, bias, y; n, height, width, in, out, taps, margin; flip, workspace
    "convolve": (None, [Pointer, Pointer, Pointer, Pointer, *CONVOLUTION, c_int, Pointer]),
    # g, w, gx; n, height, width, in, out, taps, margin; workspace
    "convolve_input_grad": (None, [Pointer, Pointer, Pointer, *CONVOLUTION, Pointer]),
    # x, g, gw; n, height, width, in, out, taps, margin; workspace
    "convolve_kernels_grad": (None, [Pointer, Pointer, Pointer, *CONVOLUTION, Pointer]),
}


class Layer(NamedTuple):
    """One layer of a network, as `struct layer` in training.c.

    Attributes:
        kind: one of `CONV`, `RELU`, `MAX_POOL`, `AVG_POOL`, `RELU_AVG_POOL` (ReLU, then average pooling),
            `FLATTEN`, `DENSE`, `DROPOUT`.
        in_channels: channels of the input; inputs of a dense layer.
        in_height: pixels; 1 for a dense layer.
        in_width: pixels; 1 for a dense layer.
        out_channels: channels of the output of a convolution; outputs of a dense layer; for dropout, the
            factors drawn per sample: one for each number of a row, or one for each channel of an image.
        kernel: side of the kernel of a convolution.
        padding: pixels on each side of the input of a convolution.
        weight_offset: index of the first weight in the flat parameter vector.
        bias_offset: index of the first bias in the flat parameter vector.
        trainable: 1 if the layer is trained, 0 if it is frozen.
    """

    kind: int
    in_channels: int
    in_height: int = 1
    in_width: int = 1
    out_channels: int = 0
    kernel: int = 1
    padding: int = 0
    weight_offset: int = 0
    bias_offset: int = 0
    trainable: int = 0


LAYER = np.dtype([(field, np.int64) for field in Layer._fields])
VISIT = np.dtype(  # as `struct visit` in training.c, which explains the fields
    [
        *((field, np.int64) for field in ("start", "weights", "x", "labels")),  # addresses
        *((field, np.int64) for field in ("samples", "first", "count", "epoch")),
        *((field, np.float64) for field in ("loss", "max_abs")),
    ]
)


class Unavailable(Exception):
    """A library is not used; the message says why."""


def hash_of_sources(folder: Path = FOLDER) -> str:
    """Return the hash of the C sources in a folder; empty if they are missing, as in an installed wheel."""
    files = [folder / name for name in SOURCES]
    if not all(file.is_file() for file in files):
        return ""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _open(name: str, signatures: Signatures, sources: str) -> ctypes.CDLL:
    """Load a library and declare its signatures.

    Args:
        name: file name without suffix.
        signatures: the functions to declare.
        sources: hash of the sources it must be built from; empty for any.

    Raises:
        Unavailable: the library is missing, does not load, or was built from other sources.
    """
    path = next((p for s in SUFFIXES if (p := FOLDER / f"{name}{s}").is_file()), None)
    if path is None:
        raise Unavailable(f"the C kernels were not built: {REINSTALL}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the C kernels do not load ({error}): {REINSTALL}") from error
    try:
        for function, (result, arguments) in {**COMMON, **signatures}.items():
            entry = getattr(library, f"mpifl_{function}")
            entry.restype, entry.argtypes = result, arguments
        same = library.mpifl_version() == VERSION and sources in ("", _build_of(library)["sources"])
        if "layer_size" in signatures:
            sizes = library.mpifl_layer_size(), library.mpifl_visit_size()
            same = same and sizes == (LAYER.itemsize, VISIT.itemsize)
    except AttributeError:
        same = False
    if not same:
        raise Unavailable(f"the C kernels were built from other sources than those in use: {REINSTALL}")
    return library


def _build_of(library: ctypes.CDLL) -> dict[str, str]:
    """Return what a library was built from: `sources` (their hash), `flags`, `compiler`."""
    sources, _, rest = library.mpifl_build().decode(errors="replace").partition("|")
    flags, _, compiler = rest.rpartition("|")
    compiler = f"gcc {compiler}" if compiler[:1].isdigit() else compiler  # other compilers name themselves
    return {"sources": sources, "flags": flags, "compiler": compiler}


def _open_all() -> tuple[dict[str, ctypes.CDLL], str]:
    """Return all libraries by name, or none and the reason."""
    try:
        sources = hash_of_sources()
        return {name: _open(name, signatures, sources) for name, signatures in LIBRARIES.items()}, ""
    except Unavailable as why:
        return {}, str(why)


LIBRARIES = {"reductions": REDUCTIONS, "training": TRAINING, "channels_last": CHANNELS_LAST}
_OPEN, PROBLEM = _open_all()
BUILD: dict[str, str] = _build_of(_OPEN["training"]) if _OPEN else {}  # sources, flags, compiler
AVAILABLE = bool(_OPEN)
TRAINING_AVAILABLE = AVAILABLE and bool(_OPEN["training"].mpifl_supported())
_FUNCTIONS = {
    name: getattr(library, f"mpifl_{name}")
    for of, library in _OPEN.items()
    for name in LIBRARIES[of]
    if name not in ("supported", "use_narrow_vectors")
}
if AVAILABLE and not TRAINING_AVAILABLE:
    PROBLEM = "this processor has no fused multiply-add, which the training kernels need"


def call(name: str, *arguments: object) -> Any:
    """Return the result of a C function, by its name without the prefix `mpifl_`."""
    assert AVAILABLE, "check AVAILABLE or TRAINING_AVAILABLE first"
    return _FUNCTIONS[name](*arguments)


def pointer(x: torch.Tensor, name: str, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
    """Return the address of a tensor.

    Raises:
        ValueError: it is not a contiguous CPU tensor of `dtype` with `numel` elements.
    """
    fits = x.dtype is dtype and x.device == CPU and x.is_contiguous() and numel in (None, x.numel())
    if not fits:
        length = "" if numel is None else f" of {numel} numbers"
        found = f"{x.dtype} {list(x.shape)} on {x.device}{'' if x.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be a contiguous {dtype} tensor{length} on the CPU, got {found}")
    return x.data_ptr()


def array_pointer(x: np.ndarray, name: str, dtype: type | np.dtype, size: int | None = None) -> int:
    """Return the address of an array.

    Raises:
        ValueError: it is not a contiguous array of `dtype` with `size` elements.
    """
    if x.dtype != dtype or not x.flags.c_contiguous or size not in (None, x.size):
        length = "" if size is None else f" of {size} numbers"
        wanted = "Layer" if dtype is LAYER else np.dtype(dtype)
        raise ValueError(f"{name} must be a contiguous {wanted} array{length}, got {x.dtype} {x.shape}")
    return x.ctypes.data


def image_pointer(
    x: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> int:
    """Return the address of images.

    Raises:
        ValueError: `x` is not a channels-last CPU tensor of `dtype` and `shape`.
    """
    found = x.dtype is dtype and x.device == CPU and x.is_contiguous(memory_format=torch.channels_last)
    if not found or x.shape != tuple(shape):
        got = f"{x.dtype} {list(x.shape)} with steps {list(x.stride())} on {x.device}"
        raise ValueError(f"{name} must be {dtype} {list(shape)} on the CPU, channels last, got {got}")
    return x.data_ptr()


# -- exact sums ----------------------------------------------------------------------------------------------


def exact_sum_add(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magic: np.ndarray
) -> None:
    """Add weighted uploads to grid sums, each term rounded to its row's grid; see `aggregation.exact_sum`.

    Args:
        sums: int64 [K, b], contiguous; updated in place.
        uploads: m tensors, float32 [b].
        weights: float64 [K, m].
        magic: 1.5 * 2^52 times the grid spacing of each row, float64 [K].

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    weights, magic = np.ascontiguousarray(weights, np.float64), np.ascontiguousarray(magic, np.float64)
    rows, width = sums.shape
    uploads = [u.contiguous() for u in uploads]
    pointers = (Pointer * len(uploads))(*(pointer(u, "an upload", numel=width) for u in uploads))
    arguments = (
        pointer(sums, "sums", torch.int64),
        pointers,
        array_pointer(weights, "weights", np.float64, rows * len(uploads)),
        array_pointer(magic, "magic", np.float64, rows),
    )
    call("exact_sum_add", *arguments, rows, len(uploads), width)


def exact_sum_finish(sums: torch.Tensor, spacing: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return sums * spacing + kept, computed in float64, as float32 [K, b].

    Args:
        sums: int64 [K, b], contiguous.
        spacing: float64 [K].
        kept: float64 [K, b], contiguous, or None.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    rows, width = sums.shape
    pointer(sums, "sums", torch.int64)
    if kept is not None:
        pointer(kept, "kept", torch.float64, sums.numel())
    if len(spacing) != rows:
        raise ValueError(f"spacing must have {rows} numbers, got {len(spacing)}")
    out = torch.empty(sums.shape, dtype=torch.float32, device=CPU)
    for k, g in enumerate(spacing.tolist()):
        old = None if kept is None else kept[k].data_ptr()
        call("exact_sum_finish", sums[k].data_ptr(), g, old, out[k].data_ptr(), width)
    return out


def max_abs(x: torch.Tensor) -> float:
    """Return the largest absolute value of a contiguous float32 vector; NaN if it contains NaN.

    Raises:
        ValueError: the tensor has the wrong type, device or layout.
    """
    return float(call("max_abs", pointer(x, "a vector"), x.numel()))


def use_narrow_vectors(on: bool) -> None:
    """Use AVX2 even on a processor with AVX-512, or the widest vectors again; the bits are the same."""
    for name in ("training", "channels_last"):
        _OPEN[name].mpifl_use_narrow_vectors(on)
