"""Settings of PyTorch and NumPy that change numbers: pinned during a run, and kept by the user's code.

A run begins with the defaults, whatever the calling code has set (`pinned`). Visits, evaluations, hooks on
rank 0 and callbacks leave the settings, and the working folder, as they found them (`kept`): which rank ran
them, and what ran before them, changes no number. Functions and modes that nobody can put back are named
(`replaced`), or refused where they change during a run (`Originals`).
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.linalg
from torch.nn import functional, init
from torch.nn.modules import module

from .errors import UserError
from .files import change_folder, working_folder

C: Any = torch._C  # its getters take tens of nanoseconds, those of `torch.backends` up to two microseconds
CPU = torch.device("cpu")
MKLDNN: Any = torch.backends.mkldnn  # its attributes are not declared
CUDNN: Any = torch.backends.cudnn
EINSUM: Any = torch.backends.opt_einsum
EINSUM_STATE = EINSUM.m  # the module behind it, whose attributes are read at once
EINSUM_HERE = EINSUM.is_available()
BY_OPERATION = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # `fp32_precision` exists
OWN = str(Path(torch.__file__).parent)
PACKAGES = "site-packages", "dist-packages"
TINY = sys.float_info.min
MIXED = "mixed"  # matrix products have another precision than `torch.set_float32_matmul_precision` has set
HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


class Setting(NamedTuple):
    """A setting of the process.

    Attributes:
        get: returns its value.
        set: sets it.
        default: the value that runs use; None leaves the one that is set when the run begins.
    """

    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any


def _product_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return MIXED


def _set_product_precision(value: str) -> None:
    if value == MIXED:  # of the calling code, after the run
        return
    torch.set_float32_matmul_precision(value)


def _device() -> torch.device:
    """Return the default device; fast if it was never set, as PyTorch keeps it as a function mode."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else CPU


def _set_device(value: torch.device) -> None:
    torch.set_default_device(None if value.type == "cpu" else value)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_autocast_type(device: str) -> Callable[[torch.dtype], None]:
    return lambda dtype: torch.set_autocast_dtype(device, dtype)


def _precision(backend: str, operation: str, owner: Any, default: str = "none") -> Setting:
    """Return the setting of the float32 precision of an operation."""
    return Setting(
        partial(C._get_fp32_precision_getter, backend, operation),
        lambda value: setattr(owner, "fp32_precision", value),
        default,
    )


def _inherited() -> dict[str, Setting]:
    """Return the setting whose value operations without one of their own take."""
    return {"fp32_precision": _precision("generic", "all", torch.backends)} if BY_OPERATION else {}


def _of_operations() -> dict[str, Setting]:
    """Return the settings of the float32 precision of single operations."""
    if not BY_OPERATION:
        return {"cudnn.allow_tf32": Setting(C._get_cudnn_allow_tf32, C._set_cudnn_allow_tf32, True)}
    return {
        "mkldnn.matmul.fp32_precision": _precision("mkldnn", "matmul", MKLDNN.matmul, "ieee"),
        "mkldnn.conv.fp32_precision": _precision("mkldnn", "conv", MKLDNN.conv),
        "mkldnn.rnn.fp32_precision": _precision("mkldnn", "rnn", MKLDNN.rnn),
        "mkldnn.deterministic": Setting(C._get_mkldnn_deterministic, C._set_mkldnn_deterministic, False),
        "cudnn.conv.fp32_precision": _precision("cuda", "conv", CUDNN.conv, "tf32"),
        "cudnn.rnn.fp32_precision": _precision("cuda", "rnn", CUDNN.rnn, "tf32"),
    }


def _flushes() -> bool:
    """Return whether the processor takes denormal numbers as 0 in this thread."""
    return TINY * 0.5 == 0.0


def _kernels_of_attention() -> tuple[bool, ...]:
    """Return which kernels of scaled_dot_product_attention may be used."""
    return (
        C._get_flash_sdp_enabled(),
        C._get_mem_efficient_sdp_enabled(),
        C._get_math_sdp_enabled(),
        C._get_cudnn_sdp_enabled(),
    )


def _set_kernels_of_attention(value: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    calls = cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp
    for call, on in zip(calls, value, strict=True):
        call(on)


SETTINGS = {
    "autocast of the CPU": Setting(
        partial(torch.is_autocast_enabled, "cpu"), lambda on: torch.set_autocast_enabled("cpu", on), False
    ),
    "autocast of GPUs": Setting(
        partial(torch.is_autocast_enabled, "cuda"), lambda on: torch.set_autocast_enabled("cuda", on), False
    ),
    "type of autocast on the CPU": Setting(
        partial(torch.get_autocast_dtype, "cpu"), _set_autocast_type("cpu"), torch.bfloat16
    ),
    "type of autocast on GPUs": Setting(
        partial(torch.get_autocast_dtype, "cuda"), _set_autocast_type("cuda"), torch.float16
    ),
    **_inherited(),
    "float32_matmul_precision": Setting(_product_precision, _set_product_precision, "highest"),
    "mkldnn.enabled": Setting(C._get_mkldnn_enabled, lambda on: MKLDNN.set_flags(on), True),
    "nnpack.enabled": Setting(C._get_nnpack_enabled, torch.backends.nnpack.set_flags, True),
    "opt_einsum.enabled": Setting(
        lambda: EINSUM_STATE.enabled, lambda on: setattr(EINSUM, "enabled", on), EINSUM_HERE
    ),
    "opt_einsum.strategy": Setting(
        lambda: EINSUM_STATE.strategy,
        lambda name: setattr(EINSUM, "strategy", name),
        "auto" if EINSUM_HERE else None,
    ),
    "mha.fastpath": Setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, True
    ),
    "kernels of attention (flash, mem_efficient, math, cudnn)": Setting(
        _kernels_of_attention, _set_kernels_of_attention, (True, True, True, True)
    ),
    "cudnn.enabled": Setting(C._get_cudnn_enabled, C._set_cudnn_enabled, True),
    "cudnn.benchmark": Setting(C._get_cudnn_benchmark, C._set_cudnn_benchmark, False),
    "cudnn.deterministic": Setting(C._get_cudnn_deterministic, C._set_cudnn_deterministic, False),
    **_of_operations(),
    "default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "default_device": Setting(_device, _set_device, CPU),
    "grad_enabled": Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    "deterministic_algorithms": Setting(
        lambda: (C._get_deterministic_algorithms(), C._get_deterministic_algorithms_warn_only()),
        _set_deterministic,
        (False, False),
    ),
    "denormal numbers as 0": Setting(_flushes, torch.set_flush_denormal, False),
    "errors of NumPy": Setting(np.geterr, lambda kinds: np.seterr(**kinds), np.geterr()),
    "num_threads": Setting(torch.get_num_threads, torch.set_num_threads, None),
    "working folder": Setting(working_folder, change_folder, None),  # relative paths stay what they are
}
_GETTERS = tuple(setting.get for setting in SETTINGS.values())
State = list[Any]


def state() -> State:
    """Return the values of all `SETTINGS`, in a few microseconds."""
    return [get() for get in _GETTERS]


def restore(before: State, now: State | None = None) -> None:
    """Set those of `SETTINGS` that differ from what `state` returned before.

    Args:
        before: what `state` returned.
        now: what it returns now, if known.
    """
    if (state() if now is None else now) != before:
        for setting, old in zip(SETTINGS.values(), before, strict=True):
            if setting.get() != old:  # read now: some change others
                setting.set(old)


class kept:  # named as `suppress` and other contexts of contextlib are
    """Leave the settings, and the working folder, after a block as they were before it."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = state()

    def __exit__(self, *error: object) -> None:
        restore(self._before)


@contextmanager
def pinned(say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Run a block with the default settings, and restore those of the calling code afterwards.

    Args:
        say: called with a line that names the settings that differ, if any.
    """
    before, told = state(), list[str]()
    for name, setting in SETTINGS.items():
        value = setting.get()  # read now: some change others
        # the legacy and the new names of one precision overlap: "none" is the default before any is set
        other = setting.default is not None and value not in (setting.default, "none")
        if other:
            told.append(f"{name} is {value}, a run uses {setting.default}")
            setting.set(setting.default)
            if setting.get() != setting.default:
                restore(before)
                raise UserError(f"torch {name}", value, f"a run uses {setting.default}; start it elsewhere")
    if told:
        say(f"settings of PyTorch and NumPy that the calling code has changed: {'; '.join(told)}")
    try:
        with torch.inference_mode(False):
            yield
    finally:
        restore(before)


# -- what cannot be put back ---------------------------------------------------------------------------------

ADDED = frozenset(("torch.nn.Module.smart_apply",))  # by transformers; PyTorch never calls it
METHODS = "forward", "__call__", "_call_impl", "_conv_forward"
_LAYERS = tuple(k for k in vars(torch.nn).values() if isinstance(k, type) and issubclass(k, torch.nn.Module))
_OWNERS: dict[str, Mapping[str, Any]] = {
    "torch.nn.functional": vars(functional),
    "torch": vars(torch),
    "torch.Tensor": vars(torch.Tensor),
    "torch.autograd": vars(torch.autograd),
    "torch.linalg": vars(torch.linalg),
    "torch.nn.init": vars(init),
    **{f"torch.nn.{kind.__name__}": vars(kind) for kind in _LAYERS},
}
_HOOKS = {f"torch.nn.modules.module.{name}": vars(module)[name] for name in HOOKS}


def replaced() -> list[str]:
    """Return the names of replaced functions of PyTorch, of hooks on all modules, and of modes that are on.

    The loop of PyTorch calls them and compiled code stands back, so that they decide a run's numbers.
    """
    found = [name for name, hooks in _HOOKS.items() if hooks]
    for owner, members in _OWNERS.items():
        found += _replaced_in(owner, members)
    return found + _modes()


_SOUND: dict[str, tuple[Any, ...]] = {}  # the members of owners in which none was replaced, as last seen


def _replaced_in(owner: str, members: Mapping[str, Any]) -> list[str]:
    """Return the names of an owner's replaced functions; owners change rarely, and runs ask several times."""
    values, sound = (*members.values(),), _SOUND.get(owner, ())
    if len(values) == len(sound) and all(map(is_, values, sound)):
        return []
    found = [
        f"{owner}.{name}"
        for name, value in members.items()
        if isinstance(value, FunctionType) and _is_foreign(value) and f"{owner}.{name}" not in ADDED
    ]
    if not found:
        _SOUND[owner] = values
    return found


def _modes() -> list[str]:
    """Return the names of the modes that are on in this thread."""
    modes = {
        "torch.overrides.TorchFunctionMode": C._len_torch_function_stack() > (_device() != CPU),
        "torch.utils._python_dispatch.TorchDispatchMode": C._len_torch_dispatch_stack() > 0,
        "torch.autograd.graph.saved_tensors_hooks": C._autograd._top_saved_tensors_default_hooks(True)
        is not None,
        "torch.inference_mode": torch.is_inference_mode_enabled(),
    }
    return [name for name, on in modes.items() if on]


def _is_foreign(function: FunctionType) -> bool:
    """Return whether a function is neither PyTorch's nor the standard library's."""
    file = function.__code__.co_filename
    if file.startswith(OWN) or file.endswith("typing_extensions.py"):
        return False
    return not file.startswith(STANDARD) or any(part in PACKAGES for part in Path(file).parts)


COMPILER = str(Path(OWN, "_dynamo"))
STANDARD = sysconfig.get_path("stdlib")


class Originals:
    """PyTorch's functions, hooks on all modules and modes, as they are when the object is made."""

    def __init__(self) -> None:
        self._members = [(owner, members, dict(members)) for owner, members in _OWNERS.items()]
        self._hooks, self._on = self._hooks_now(), _modes()

    def _hooks_now(self) -> list[list[Any]]:
        return [list(hooks.values()) for hooks in _HOOKS.values()]

    def changed(self) -> list[str]:
        """Return the names of what is another now, in some ten microseconds if nothing is."""
        found = [name for name in _modes() if name not in self._on]
        now = self._hooks_now()
        if now != self._hooks:
            found += [name for name, a, b in zip(_HOOKS, self._hooks, now, strict=True) if a != b]
        for owner, members, before in self._members:
            if members != before:
                names = [name for name in members if _differs(name, before.get(name), members[name])]
                found += [f"{owner}.{name}" for name in names]
                if not names:  # PyTorch itself adds members when they are first used
                    before.update(members)
        return found

    def check(self, where: str) -> None:
        """Raise an error if anything is another now.

        Args:
            where: whose code ran, or which place it is.

        Raises:
            UserError: something is.
        """
        if found := self.changed():
            remedy = f"{where} has changed this for all code of the process; do it before the run"
            raise UserError("PyTorch", ", ".join(found), remedy)


def _differs(name: str, old: Any, new: Any) -> bool:
    """Return whether a member of PyTorch has been replaced by something that is not its own."""
    if new is old:
        return False
    if isinstance(new, FunctionType):
        file = new.__code__.co_filename  # the first torch.compile wraps members itself
        swapped = callable(old) and new.__name__ != name and not file.startswith(COMPILER)
        return _is_foreign(new) or swapped
    return callable(old) and not isinstance(old, type)
