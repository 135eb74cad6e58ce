"""PyTorch's settings of a process that change numbers: pinned during a run, and kept by the user's code.

A run begins with PyTorch's defaults, whatever the calling code has set (`pinned`). Visits, evaluations, hooks
on rank 0 and callbacks leave the settings as they found them (`kept`): which rank ran them, and what ran
before them, changes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.modules import module

from .errors import UserError

CPU = torch.device("cpu")
MKLDNN: Any = torch.backends.mkldnn  # its attributes are not declared
OWN = str(Path(torch.__file__).parent)
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
    """A setting of PyTorch.

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


SETTINGS = {
    "autocast of the CPU": Setting(
        lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), False
    ),
    "autocast of GPUs": Setting(
        lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), False
    ),
    "float32_matmul_precision": Setting(_product_precision, _set_product_precision, "highest"),
    "mkldnn.matmul.fp32_precision": Setting(
        lambda: MKLDNN.matmul.fp32_precision,
        lambda value: setattr(MKLDNN.matmul, "fp32_precision", value),
        "ieee",
    ),
    "mkldnn.conv.fp32_precision": Setting(
        lambda: MKLDNN.conv.fp32_precision,
        lambda value: setattr(MKLDNN.conv, "fp32_precision", value),
        "none",
    ),
    "mkldnn.enabled": Setting(
        lambda: MKLDNN.enabled,
        lambda on: MKLDNN.set_flags(on),
        True,
    ),
    "default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "default_device": Setting(_device, _set_device, CPU),
    "grad_enabled": Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    "deterministic_algorithms": Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
        (False, False),
    ),
    "num_threads": Setting(torch.get_num_threads, torch.set_num_threads, None),
}
_GETTERS = tuple(setting.get for setting in SETTINGS.values())
State = tuple[Any, ...]


def state() -> State:
    """Return the values of all `SETTINGS`, in a few microseconds."""
    return tuple(get() for get in _GETTERS)


def restore(before: State) -> None:
    """Set those of `SETTINGS` that differ from what `state` returned before."""
    now = state()
    if now != before:
        for setting, value, old in zip(SETTINGS.values(), now, before, strict=True):
            if value != old:
                setting.set(old)


@contextmanager
def kept() -> Iterator[None]:
    """Leave PyTorch's settings after a block as they were before it."""
    before = state()
    try:
        yield
    finally:
        restore(before)


@contextmanager
def pinned(say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Run a block with PyTorch's default settings, and restore those of the calling code afterwards.

    Args:
        say: called with a line that names the settings that differ, if any.
    """
    before, told = state(), list[str]()
    for (name, setting), value in zip(SETTINGS.items(), before, strict=True):
        # the legacy and the new names of one precision overlap: "none" is the default before any is set
        other = setting.default is not None and value not in (setting.default, "none")
        if other:
            told.append(f"{name} is {value}, a run uses {setting.default}")
            setting.set(setting.default)
            if setting.get() != setting.default:
                restore(before)
                raise UserError(f"torch {name}", value, f"a run uses {setting.default}; start it elsewhere")
    if told:
        say(f"settings of PyTorch that the calling code has changed: {'; '.join(told)}")
    try:
        with torch.inference_mode(False):
            yield
    finally:
        restore(before)


def replaced() -> list[str]:
    """Return the names of PyTorch's functions that other code has replaced, and of hooks on all modules.

    The loop of PyTorch calls them and compiled code stands back, so that they decide a run's numbers.
    """
    found = [f"torch.nn.modules.module.{name}" for name in HOOKS if vars(module).get(name)]
    owners = {"torch.nn.functional": vars(functional)}
    owners |= {f"torch.nn.{kind.__name__}": _methods(kind) for kind in _LAYERS}
    for owner, members in owners.items():
        found += [f"{owner}.{name}" for name, function in members.items() if _is_foreign(function)]
    others = torch._C._len_torch_function_stack() - (_device() != CPU)
    return found + ["torch.overrides.TorchFunctionMode"] * (others > 0)


def _methods(kind: type) -> dict[str, Any]:
    return {name: vars(kind)[name] for name in METHODS if name in vars(kind)}


def _is_foreign(function: object) -> bool:
    return isinstance(function, FunctionType) and not function.__code__.co_filename.startswith(OWN)


METHODS = "forward", "__call__", "_call_impl", "_conv_forward"
_LAYERS = tuple(k for k in vars(torch.nn).values() if isinstance(k, type) and issubclass(k, torch.nn.Module))
