"""Convolutions of wide networks by the C kernels (channels_last.c), inside PyTorch's own loop.

While `ChannelsLast` is active, the kernels compute the calls of `torch.conv2d` that they support. Modules and
autograd stay unchanged. From the first convolution on, images are in the channels-last layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from . import bindings, convolutions

MIN_TILES = {3: 32, 5: 64}  # by side of the kernels; with fewer, their transform costs more than it saves
LAST = torch.channels_last
_scratch = threading.local()


def _workspace(channels: int, out_channels: int) -> torch.Tensor:
    """Return float32 workspace of this thread for a convolution; a fresh one would cost page faults."""
    size = convolutions.convolve_workspace(channels, out_channels)
    if len(getattr(_scratch, "floats", ())) < size:
        _scratch.floats = torch.empty(size, dtype=torch.float32, device="cpu")
    return cast(torch.Tensor, _scratch.floats)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, margin: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.margin = margin
        return convolutions.convolve(x, weight, bias, margin, _workspace(*weight.shape[:2]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, grad, margin = ctx.needs_input_grad[:3], grads[0], ctx.margin
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            whole = [len(weight)], [1, 1], [margin, margin], [1, 1], False, [0, 0], 1
            made = torch.ops.aten.convolution_backward(grad, x, weight, *whole, list(wanted))
            return *(g if asked else None for g, asked in zip(made, wanted, strict=True)), None
        grad, workspace = grad.contiguous(memory_format=LAST), _workspace(*weight.shape[:2])
        return (
            _input_grad(x.shape, grad, weight, margin, workspace) if wanted[0] else None,
            convolutions.convolve_kernels_grad(x, grad, weight.shape[-1], margin, workspace)
            if wanted[1]
            else None,
            grad.sum((0, 2, 3)) if wanted[2] else None,
            None,
        )


def _input_grad(
    shape: torch.Size, grad: torch.Tensor, weight: torch.Tensor, margin: int, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the input, computed from the tiles of the output if these are fewer."""
    taps = weight.shape[-1]
    if _tiles(grad.shape, taps) < _tiles(shape, taps):
        return convolutions.convolve_input_grad(grad, weight, shape, margin, workspace)
    return convolutions.convolve(grad, weight, None, taps - 1 - margin, workspace, flip=True)


def _tiles(shape: Sequence[int], taps: int) -> int:
    """Return how many tiles cover images of shape [n, c, H, W]."""
    side = convolutions.TILE_SIDES[taps]
    return shape[0] * -(-shape[2] // side) * -(-shape[3] // side)


def _plain(x: torch.Tensor) -> bool:
    """Return whether `x` is a plain float32 tensor or parameter on the CPU, not wrapped by functorch."""
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and not is_functorch_wrapped_tensor(x)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
    )


def _margin(taps: int, stride: Any, padding: Any, dilation: Any, groups: int) -> int | None:
    """Return the zero padding of a convolution on each side; None if the kernels do not support it."""
    if groups != 1 or any(option not in (1, (1, 1), [1, 1]) for option in (stride, dilation)):
        return None
    named = {"same": taps // 2, "valid": 0}
    margin = named.get(padding) if isinstance(padding, str) else padding
    if isinstance(margin, Sequence):
        margin = margin[0] if len(set(margin)) == 1 else None
    return margin if margin in range(taps) else None


def _is_wide(weight: torch.Tensor) -> bool:
    """Return whether the kernels support convolutions with a weight [o, c, ...]."""
    o, c, *side = weight.shape
    known = side in ([taps, taps] for taps in convolutions.TILE_SIDES)
    return known and o % convolutions.STRIP == 0 and c % convolutions.STRIP == 0


def _enough(shape: Sequence[int], taps: int, margin: int) -> bool:
    """Return whether a convolution of images [n, c, H, W] has enough tiles for the kernels to be faster."""
    n, c, *sides = shape
    made = [side + 2 * margin + 1 - taps for side in sides]
    return min(made) > 0 and _tiles([n, c, *made], taps) >= MIN_TILES[taps]


def _conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return the result of `torch.conv2d`, computed in the channels-last layout where possible."""
    options = stride, padding, dilation, groups
    if not (_plain(input) and _plain(weight) and input.dim() == 4) or torch.is_autocast_enabled("cpu"):
        return torch.conv2d(input, weight, bias, *options)
    channels, h, w = input.shape[1:]
    known = _is_wide(weight) and channels == weight.shape[1] and weight.is_contiguous()
    if known and (bias is None or _plain(bias)):
        taps = weight.shape[-1]
        margin = _margin(taps, stride, padding, dilation, groups)
        if margin is not None and _enough(input.shape, taps, margin):
            images = input.contiguous(memory_format=LAST)
            return cast(torch.Tensor, _Convolve.apply(images, weight, bias, margin))  # type: ignore[no-untyped-call]
    if channels == 1 and not input.requires_grad:  # its layout is ambiguous, and the output would inherit it
        input = input.contiguous().as_strided(input.shape, (h * w, 1, w, 1))
    return torch.conv2d(input.contiguous(memory_format=LAST), weight, bias, *options)


class ChannelsLast(TorchFunctionMode):
    """While active, the kernels compute the convolutions of this thread where they are faster."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its replacement."""
        if func is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def has_wide_convolutions(module: nn.Module) -> bool:
    """Return whether the kernels may compute some convolution of a model."""
    return bindings.TRAINING_AVAILABLE and any(
        isinstance(m, nn.Conv2d)
        and _is_wide(m.weight)
        and _margin(m.kernel_size[0], m.stride, m.padding, m.dilation, m.groups) is not None
        for m in module.modules()
    )
