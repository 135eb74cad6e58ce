"""Pooling of 2x2 windows, a fifth of the step of a small convolutional network in PyTorch, by our own loops.

The bits are PyTorch's, forward and backward, so it does not matter where the loops are at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mpifl.core.module_checks import untouched

from . import bindings

LEAST = 1 << 14  # numbers; below, PyTorch's function costs less than one of ours


def _by_pairs(grad: torch.Tensor) -> torch.Tensor:
    """Return [n, c, 2h, 2w]: each number of [n, c, h, w] for all four pixels of its window."""
    return grad.repeat_interleave(2, -1).repeat_interleave(2, -2)


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out, where = bindings.max_pool(x)
        ctx.save_for_backward(where)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (where,), grad = ctx.saved_tensors, grads[0]
        if not torch.is_grad_enabled():
            return bindings.max_pool_backward(grad.contiguous(), where)
        h, w = where.shape[2:]  # a gradient of this gradient is asked for
        pixel = torch.arange(4, dtype=torch.uint8).view(2, 2).repeat(h, w)
        return _by_pairs(grad) * (_by_pairs(where) == pixel)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return bindings.mean_pool(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return bindings.mean_pool_backward(grads[0].contiguous())
        return _by_pairs(grads[0]) * 0.25


def _fits(x: torch.Tensor) -> bool:
    """Return whether our loops take `x`: large, contiguous float32 [n, c, H, W] of even sides on the CPU."""
    return (
        x.numel() >= LEAST
        and not is_functorch_wrapped_tensor(x)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() == 4
        and x.shape[2] % 2 == x.shape[3] % 2 == 0
        and 0 < x.shape[3] <= bindings.WIDEST
        and x.is_contiguous()
    )


class MaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d(2)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, c, H//2, W//2]."""
        return _Max.apply(x) if _fits(x) else super().forward(x)


class MeanPool(nn.AvgPool2d):
    """`nn.AvgPool2d(2)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, c, H//2, W//2]."""
        return _Mean.apply(x) if _fits(x) else super().forward(x)


OURS: dict[type, type[nn.Module]] = {nn.MaxPool2d: MaxPool, nn.AvgPool2d: MeanPool}


def use_fast_pooling(module: nn.Module) -> nn.Module:
    """Replace what pools windows of 2x2 in a model, where our loops were built; return the model.

    What hooks or methods were added to stays as it is.
    """
    if bindings.AVAILABLE:
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                ours = OURS.get(type(layer))
                if ours is not None and plain(layer) and untouched(layer):
                    setattr(owner, name, ours(2))
    return module


def plain(layer: nn.Module) -> bool:
    """Return whether windows of a pooling layer are 2x2, side by side, without margin, and only pooled."""
    assert isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
    if any(s not in (2, (2, 2)) for s in (layer.kernel_size, layer.stride)):
        return False
    if layer.padding not in (0, (0, 0)) or layer.ceil_mode:
        return False
    if isinstance(layer, nn.MaxPool2d):
        return layer.dilation in (1, (1, 1)) and not layer.return_indices
    return layer.divisor_override is None
