"""Layers of wide networks by the kernels (channels_last.c), inside whatever PyTorch computes.

While `ChannelsLast` is active, calls of `torch.conv2d` that the kernels know are theirs: modules stay as they
are, and so does autograd. Images keep their channels side by side from the first convolution on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from . import bindings

MIN_TILES = 32  # tiles of 4 x 4 pixels; below, transforming the kernels costs more than the tiles save
LAST = torch.channels_last
_scratch = threading.local()


def _workspace(channels: int, out_channels: int) -> torch.Tensor:
    """Return float32 workspace of this thread for a convolution; a fresh one would cost page faults."""
    size = bindings.convolve3x3_workspace(channels, out_channels)
    if len(getattr(_scratch, "floats", ())) < size:
        _scratch.floats = torch.empty(size, dtype=torch.float32, device="cpu")
    return cast(torch.Tensor, _scratch.floats)


class _Convolve3x3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return bindings.convolve3x3(x, weight, bias, _workspace(*weight.shape[:2]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, grad = ctx.needs_input_grad, grads[0]
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            whole = [len(weight)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1
            made = torch.ops.aten.convolution_backward(grad, x, weight, *whole, list(wanted))
            return tuple(g if asked else None for g, asked in zip(made, wanted, strict=True))
        grad, workspace = grad.contiguous(memory_format=LAST), _workspace(*weight.shape[:2])
        return (
            bindings.convolve3x3(grad, weight, None, workspace, back=True) if wanted[0] else None,
            bindings.convolve3x3_backward(x, grad, workspace) if wanted[1] else None,
            grad.sum((0, 2, 3)) if wanted[2] else None,
        )


def _plain(x: torch.Tensor) -> bool:
    """Return whether `x` is a float32 tensor on the CPU that nothing wraps."""
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and not is_functorch_wrapped_tensor(x)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
    )


def _keeps_size(stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Return whether a 3x3 convolution with such options takes every pixel, with a margin of one."""
    once = all(option in (1, (1, 1), [1, 1]) for option in (stride, dilation))
    return once and groups == 1 and padding in (1, (1, 1), [1, 1], "same")


def _is_wide(weight: torch.Tensor) -> bool:
    """Return whether the kernels know convolutions with a weight [o, c, ...]."""
    o, c, *side = weight.shape
    return side == [3, 3] and o % bindings.STRIP == 0 and c % bindings.STRIP == 0


def _conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return what `torch.conv2d` returns, of images with their channels side by side."""
    options = stride, padding, dilation, groups
    if not (_plain(input) and _plain(weight) and input.dim() == 4) or torch.is_autocast_enabled("cpu"):
        return torch.conv2d(input, weight, bias, *options)
    n, channels, h, w = input.shape
    known = _is_wide(weight) and channels == weight.shape[1] and weight.is_contiguous()
    known = known and _keeps_size(*options) and (bias is None or _plain(bias))
    if known and n * -(-h // 4) * -(-w // 4) >= MIN_TILES:
        return cast(torch.Tensor, _Convolve3x3.apply(input.contiguous(memory_format=LAST), weight, bias))  # type: ignore[no-untyped-call]
    if channels == 1 and not input.requires_grad:  # its layout is ambiguous, and would be that of the output
        input = input.contiguous().as_strided(input.shape, (h * w, 1, w, 1))
    return torch.conv2d(input.contiguous(memory_format=LAST), weight, bias, *options)


class ChannelsLast(TorchFunctionMode):
    """While active, convolutions of this thread are the kernels' where they are faster."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it."""
        if func is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def has_wide_convolutions(module: nn.Module) -> bool:
    """Return whether some convolution of a model may be the kernels'."""
    return bindings.TRAINING_AVAILABLE and any(
        isinstance(m, nn.Conv2d)
        and _is_wide(m.weight)
        and _keeps_size(m.stride, m.padding, m.dilation, m.groups)
        for m in module.modules()
    )
