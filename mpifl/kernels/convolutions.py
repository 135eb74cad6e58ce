"""Bindings of channels_last.c: convolutions of wide networks, whose images are stored channels last.

Check `bindings.TRAINING_AVAILABLE` first; the last bits differ from PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bindings import call, image_pointer, pointer

STRIP = 32  # numbers of channels are multiples of it; as in channels_last.c
TILE_SIDES = {3: 4, 5: 2}  # side of the kernels -> side of a tile in pixels; as in channels_last.c


def _convolution(
    images: Sequence[int], out_channels: int, taps: int, margin: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a convolution in the kernels' order, and the shape of its output [n, o, H', W'].

    Args:
        images: shape of the input, [n, c, H, W].
        out_channels: o.
        taps: side of the kernels.
        margin: zero padding around the images, in pixels.

    Raises:
        ValueError: there are no pixels, a number of channels is not a multiple of `STRIP`, or the size of the
            kernels or the margin is not supported.
    """
    n, channels, height, width = images
    if taps not in TILE_SIDES or not 0 <= margin < taps:
        raise ValueError(f"kernels must be 3x3 or 5x5, and margins smaller: {taps}x{taps} and {margin}")
    out = n, out_channels, height + 2 * margin + 1 - taps, width + 2 * margin + 1 - taps
    shape = n, height, width, channels, out_channels, taps, margin
    if min(*images, *out) < 1 or channels % STRIP or out_channels % STRIP:
        raise ValueError(f"{shape}: there must be pixels, and channels in multiples of {STRIP}")
    return shape, out


def convolve_workspace(channels: int, out_channels: int) -> int:
    """Return how many floats of workspace a convolution and its gradients need."""
    return int(call("convolve_workspace", channels, out_channels))


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    margin: int,
    workspace: torch.Tensor,
    flip: bool = False,
) -> torch.Tensor:
    """Return a convolution of stride 1, [n, o, H + 2 margin + 1 - k, W + 2 margin + 1 - k], channels last.

    Args:
        x: float32 [n, c, H, W], channels last; c and o are multiples of `STRIP`.
        weight: float32 [o, c, k, k], contiguous; k is 3 or 5.
        bias: float32 [o]; None for none.
        margin: zero padding around the images, in pixels; less than k.
        workspace: float32, at least `convolve_workspace` elements.
        flip: whether to flip the kernels and read them as [c, o, k, k]. With a margin of k - 1 minus that of
            the forward pass, this turns the gradient of the output into the gradient of the input.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    out_channels, taps = len(weight[0] if flip else weight), weight.shape[-1]
    shape, out = _convolution(x.shape, out_channels, taps, margin)
    y = torch.empty(out, dtype=torch.float32, memory_format=torch.channels_last)
    tensors = (
        image_pointer(x, "images", x.shape),
        pointer(weight, "weights", numel=x.shape[1] * out_channels * taps * taps),
        None if bias is None else pointer(bias, "a bias", numel=out_channels),
        y.data_ptr(),
    )
    space = _workspace(workspace, x.shape[1], out_channels)
    call("convolve", *tensors, *shape, flip, space)
    return y


def convolve_input_grad(
    grad: torch.Tensor, weight: torch.Tensor, images: Sequence[int], margin: int, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `convolve`, channels last.

    Args:
        grad: gradient of the output, float32 [n, o, H', W'], channels last.
        weight: as for `convolve`.
        images: shape of the input, [n, c, H, W].
        margin: as for `convolve`.
        workspace: float32, at least `convolve_workspace` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    out_channels, taps = len(weight), weight.shape[-1]
    shape, out = _convolution(images, out_channels, taps, margin)
    tensors = (
        image_pointer(grad, "a gradient", out),
        pointer(weight, "weights", numel=images[1] * out_channels * taps * taps),
    )
    space = _workspace(workspace, images[1], out_channels)
    x = torch.empty(tuple(images), dtype=torch.float32, memory_format=torch.channels_last)
    call("convolve_input_grad", *tensors, x.data_ptr(), *shape, space)
    return x


def convolve_kernels_grad(
    x: torch.Tensor, grad: torch.Tensor, taps: int, margin: int, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [o, c, k, k] of the weights of `convolve`.

    Args:
        x: input of `convolve`, float32 [n, c, H, W], channels last.
        grad: gradient of the output, float32 [n, o, H', W'], channels last.
        taps: k.
        margin: as for `convolve`.
        workspace: float32, at least `convolve_workspace` elements.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    channels, out_channels = x.shape[1], grad.shape[1]
    shape, out = _convolution(x.shape, out_channels, taps, margin)
    tensors = image_pointer(x, "images", x.shape), image_pointer(grad, "a gradient", out)
    weight = torch.empty((out_channels, channels, taps, taps), dtype=torch.float32)
    space = _workspace(workspace, channels, out_channels)
    call("convolve_kernels_grad", *tensors, weight.data_ptr(), *shape, space)
    return weight


def _workspace(workspace: torch.Tensor, channels: int, out_channels: int) -> int:
    """Return the address of a workspace.

    Raises:
        ValueError: it is too small for the convolution, or not a contiguous float32 tensor on the CPU.
    """
    needed = convolve_workspace(channels, out_channels)
    if workspace.numel() < needed:
        raise ValueError(f"{workspace.numel()} floats of workspace are fewer than {needed}")
    return pointer(workspace, "workspace")
