"""A fake GPU: tensors that claim to be on a device, and have their numbers in main memory.

The device is `meta`. Inside `FakeDevice()`, tensors created on it or moved to it are `FakeTensor`s. What
fails on a GPU fails on such tensors, too: `.numpy()`, and arithmetic that mixes them with tensors in main
memory. MPI reads them through DLPack, as it would read tensors on a GPU. So code for GPUs can run without
one, with a CPU's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from support import toy
from torch.utils._python_dispatch import TorchDispatchMode

from mpifl.core.devices import CPU
from mpifl.runtime import worker as visits

DEVICE = torch.device("meta")
MIXES = {"_to_copy", "copy_", "_foreach_copy_", "index", "index_put_"}  # may mix them, as on a GPU


class FakeTensor(torch.Tensor):
    """A tensor that claims to be on the device.

    Attributes:
        inner: the numbers, in main memory.
        lent: how often a tensor was handed out through DLPack.
    """

    inner: torch.Tensor
    lent = 0

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> FakeTensor:
        """Return a tensor of the same shape, strides and type, without memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; setting it gives a model's parameters other memory."""
        return self.detach()

    @data.setter
    def data(self, value: FakeTensor) -> None:
        self.inner.data = value.inner

    def tolist(self) -> Any:
        """Return the numbers; PyTorch has this on any device, but not for subclasses."""
        return self.inner.tolist()

    def __dlpack__(self, **options: Any) -> Any:
        FakeTensor.lent += 1
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()

    def __repr__(self) -> str:
        return f"FakeTensor({self.inner})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Multiply vector and matrix without `squeeze_`, which cannot change the shape of a wrapper."""
        if function.__name__ in ("matmul", "__matmul__") and [a.dim() for a in args] == [1, 2]:
            return args[0][None].mm(args[1])[0]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Iterable[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator that PyTorch was asked for."""
        return _call(function, list(args), dict(named or {}))


class FakeDevice(TorchDispatchMode):
    """While active, tensors can be created on the device or moved to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch would load its compiler, which takes a second

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Iterable[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator that PyTorch was asked for."""
        return _call(function, list(args), dict(named or {}))


def on_device(value: torch.Tensor) -> FakeTensor:
    """Return a copy of a tensor on the device."""
    return FakeTensor(value.clone())


def _call(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    """Call an operator in main memory; wrap what would be on the device."""
    name, away, home = function.overloadpacket.__name__, [], []

    def inner(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            away.append(value)
            return value.inner
        if isinstance(value, torch.Tensor) and value.dim():
            home.append(value)
        return CPU if value == DEVICE and isinstance(value, torch.device) else value

    asked = named.get("device")
    got = function(*_each(inner, args), **{key: _each(inner, value) for key, value in named.items()})
    assert name in MIXES or not (away and home), f"{name} mixes a device's tensors with those of main memory"
    if name.endswith("_") and isinstance(args[0], torch.Tensor):
        return args[0]
    if "out" in named:
        return named["out"]
    if asked == DEVICE if asked is not None else away:
        return _each(lambda value: FakeTensor(value) if isinstance(value, torch.Tensor) else value, got)
    return got


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to all inside a list or tuple."""
    if isinstance(value, (list, tuple)):
        return [_each(function, v) for v in value]
    return function(value)


@contextmanager
def gpu(room: int = 1 << 40) -> Iterator[None]:
    """Train everything inside on the device, which has room for so many bytes of a round's uploads."""

    has_room = mock.patch.object(visits, "upload_budget", return_value=room)
    with FakeDevice(), has_room, mock.patch.object(toy, "device_of", return_value=DEVICE):
        yield
