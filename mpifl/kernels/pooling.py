"""2x2 pooling by the C kernels (reductions.c); in PyTorch it takes a fifth of a step of a small CNN.

Outputs and gradients have the same bits as those of PyTorch's layers, so results do not depend on whether the
kernels were built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mpifl.core.module_checks import untouched

from . import bindings
from .bindings import call, image_pointer, pointer

LAST = torch.channels_last
MAX_POOL_WIDTH = 2048  # pixels in a row of an image
MIN_NUMEL = 1 << 14  # elements; below, PyTorch's function costs less than one written in Python


def _image_shape(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the shape of images [n, c, H, W].

    Raises:
        ValueError: a side is odd, or rows are longer than `MAX_POOL_WIDTH`.
    """
    n, c, h, w = x.shape
    if h % 2 or w % 2 or w > MAX_POOL_WIDTH:
        raise ValueError(
            f"images of {h}x{w} pixels: both sides must be even, the second at most {MAX_POOL_WIDTH}"
        )
    return n, c, h, w


def max_pool2x2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each 2x2 window and its index in the window (uint8), both [n, c, H/2, W/2].

    Args:
        x: float32 [n, c, H, W], contiguous, both sides even, W at most `MAX_POOL_WIDTH`.

    Raises:
        ValueError: `x` has the wrong type, device, layout or shape.
    """
    n, c, h, w = _image_shape(x)
    images = pointer(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    index = torch.empty_like(out, dtype=torch.uint8)
    if out.numel():
        call("max_pool2x2", images, out.data_ptr(), index.data_ptr(), n * c * (h // 2), w // 2)
    return out, index


def max_pool2x2_backward(grad: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `max_pool2x2`.

    Args:
        grad: gradient of the output, float32 [n, c, H/2, W/2].
        index: as returned by `max_pool2x2`.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    n, c, h, w = grad.shape
    arguments = pointer(grad, "a gradient"), pointer(index, "index", torch.uint8, grad.numel())
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    call("max_pool2x2_backward", *arguments, out.data_ptr(), n * c * h, w)
    return out


def max_pool2x2_last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `max_pool2x2`, both channels last.

    Args:
        x: float32 [n, c, H, W], channels last, both sides even, W at most `MAX_POOL_WIDTH`.

    Raises:
        ValueError: `x` has the wrong type, device, layout or shape.
    """
    n, c, h, w = _image_shape(x)
    images = image_pointer(x, "images", x.shape)
    out = torch.empty((n, c, h // 2, w // 2), dtype=torch.float32, memory_format=torch.channels_last)
    index = torch.empty_like(out, dtype=torch.uint8)
    if out.numel():
        call("max_pool2x2_last", images, out.data_ptr(), index.data_ptr(), n * (h // 2), w // 2, c)
    return out, index


def max_pool2x2_last_backward(grad: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `max_pool2x2_last`, channels last.

    Args:
        grad: gradient of the output, float32 [n, c, H/2, W/2], channels last.
        index: as returned by `max_pool2x2_last`.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    n, c, h, w = index.shape
    arguments = (
        image_pointer(grad, "a gradient", index.shape),
        image_pointer(index, "index", index.shape, torch.uint8),
    )
    out = torch.empty((n, c, 2 * h, 2 * w), dtype=torch.float32, memory_format=torch.channels_last)
    call("max_pool2x2_last_backward", *arguments, out.data_ptr(), n * h, w, c)
    return out


def avg_pool2x2(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each 2x2 window [n, c, H/2, W/2]; `x` and errors as for `max_pool2x2`."""
    n, c, h, w = _image_shape(x)
    images = pointer(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    call("avg_pool2x2", images, out.data_ptr(), n * c * (h // 2), w // 2)
    return out


def avg_pool2x2_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] of the input of `avg_pool2x2` from that of its output."""
    n, c, h, w = grad.shape
    address = pointer(grad, "a gradient")
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    call("avg_pool2x2_backward", address, out.data_ptr(), n * c * h, w)
    return out


def _repeat2x2(grad: torch.Tensor) -> torch.Tensor:
    """Repeat each element of [n, c, h, w] for the four pixels of its window; return [n, c, 2h, 2w]."""
    return grad.repeat_interleave(2, -1).repeat_interleave(2, -2)


class _MaxPool2x2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.last = not x.is_contiguous()
        out, index = max_pool2x2_last(x) if ctx.last else max_pool2x2(x)
        ctx.save_for_backward(index)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (index,), grad = ctx.saved_tensors, grads[0]
        if not torch.is_grad_enabled():
            if ctx.last:
                return max_pool2x2_last_backward(grad.contiguous(memory_format=LAST), index)
            return max_pool2x2_backward(grad.contiguous(), index)
        h, w = index.shape[2:]  # the gradient will be differentiated again
        pixel = torch.arange(4, dtype=torch.uint8).view(2, 2).repeat(h, w)
        return _repeat2x2(grad) * (_repeat2x2(index) == pixel)


class _AvgPool2x2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return avg_pool2x2(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return avg_pool2x2_backward(grads[0].contiguous())
        return _repeat2x2(grads[0]) * 0.25


def _fits(x: torch.Tensor, last: bool = False) -> bool:
    """Return whether the kernels support `x`: large contiguous float32 [n, c, H, W] on CPU, even sides.

    Args:
        x: images.
        last: whether channels-last images are supported, too.
    """
    return (
        x.numel() >= MIN_NUMEL
        and not is_functorch_wrapped_tensor(x)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() == 4
        and x.shape[2] % 2 == x.shape[3] % 2 == 0
        and 0 < x.shape[3] <= MAX_POOL_WIDTH
        and (x.is_contiguous() or (last and x.is_contiguous(memory_format=LAST)))
    )


class MaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d(2)`, by the kernels if they support the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, c, H//2, W//2]."""
        if not _fits(x, last=True):
            return cast(torch.Tensor, super().forward(x))
        return cast(torch.Tensor, _MaxPool2x2.apply(x))  # type: ignore[no-untyped-call]


class AvgPool(nn.AvgPool2d):
    """`nn.AvgPool2d(2)`, by the kernels if they support the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, c, H//2, W//2]."""
        if not _fits(x):
            return super().forward(x)
        return cast(torch.Tensor, _AvgPool2x2.apply(x))  # type: ignore[no-untyped-call]


REPLACEMENTS: dict[type, type[nn.Module]] = {nn.MaxPool2d: MaxPool, nn.AvgPool2d: AvgPool}


def use_fast_pooling(module: nn.Module) -> nn.Module:
    """Replace the 2x2 pooling layers inside a model, if the kernels were built; return the model.

    Max pooling is moved in front of the ReLU that it follows: ReLU then computes the same numbers on a
    quarter of the elements. A layer with hooks, or with methods set on the instance, is neither replaced nor
    moved. Inside modules of other code, which may apply their layers one by one, layers keep their order.
    """
    if bindings.AVAILABLE:
        for layers in _applied_whole(module):
            _put_relu_behind_maxima(layers)
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                replacement = REPLACEMENTS.get(type(layer))
                if replacement is not None and plain(layer) and untouched(layer):
                    setattr(owner, name, replacement(2))
    return module


def _applied_whole(module: nn.Module) -> Iterator[nn.Sequential]:
    """Yield the `nn.Sequential` modules of a model that are only ever applied as a whole."""
    if type(module) is nn.Sequential:
        yield module
        parts: Iterable[nn.Module] = module
    else:
        parts = module.sequence if declares_sequence(module) else ()  # type: ignore[assignment]
    for part in parts:
        yield from _applied_whole(part)


def declares_sequence(module: nn.Module) -> bool:
    """Return whether the property `sequence` lists the modules that `forward` applies one after the other.

    `sequence`, `embed` and `forward` must all be defined by the module's own class, as in `Net` of models,
    because a subclass may override only one of them.
    """
    return all(_defined_in(type(module), name) for name in ("sequence", "embed", "forward"))


def _defined_in(cls: type, name: str) -> bool:
    """Return whether a method or property was defined in the class statement: not inherited, not assigned."""
    method = vars(cls).get(name)
    method = method.fget if isinstance(method, property) else method
    found = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return found == (cls.__module__, f"{cls.__qualname__}.{name}")


def _put_relu_behind_maxima(layers: nn.Sequential) -> None:
    """Swap each ReLU with the 2x2 max pooling that follows it; layers keep their names."""
    named = dict(layers.named_children())
    order = list(named)
    for i, (first, second) in enumerate(pairwise(order[:])):
        relu, pool = named[first], named[second]
        known = type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and plain(pool)
        if known and untouched(relu) and untouched(pool):
            order[i : i + 2] = second, first
    if order == list(named) or len(named) < len(layers):  # a layer that occurs twice has one name here
        return
    for name in named:
        delattr(layers, name)
    for name in order:
        layers.add_module(name, named[name])


def plain(layer: nn.Module) -> bool:
    """Return whether a pooling layer has 2x2 windows, stride 2, no padding and no other option."""
    assert isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
    if any(s not in (2, (2, 2)) for s in (layer.kernel_size, layer.stride)):
        return False
    if layer.padding not in (0, (0, 0)) or layer.ceil_mode:
        return False
    if isinstance(layer, nn.MaxPool2d):
        return layer.dilation in (1, (1, 1)) and not layer.return_indices
    return layer.divisor_override is None
