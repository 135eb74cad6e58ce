"""A model whose state is one flat vector in memory."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from .errors import UserError
from .parameters import Layout, constant_names, flatten, floating_buffers, frozen_names, infinite_names


class FlatModel:
    """A module whose parameters, gradients and floating buffers are views into flat buffers.

    Constants (`constant_names`) are reset to their initial values whenever a vector is loaded: the counts of
    integer buffers, and what a module writes into buffers that are not persistent, belong to another client.

    Attributes:
        module: the module.
        layout: layout of its flat vector.
        vector: its state [d].
        weights: the trainable prefix [p] of `vector`.
        grad: its gradient [p].
    """

    def __init__(self, module: nn.Module, device: str | torch.device = "cpu") -> None:
        self.module = module.to(device)
        self._modules = list(module.modules())
        self.layout = Layout.of(module)
        self.vector = flatten(module)
        self.weights = self.vector[: self.layout.num_parameters]
        self.grad = torch.zeros_like(self.weights)
        slices = self.layout.slices
        self._params = [
            (name, p, self.vector[slices[name]].view(p.shape), self.grad[slices[name]].view(p.shape))
            for name, p in module.named_parameters()
        ]
        for _, p, value, gradient in self._params:
            p.data, p.grad = value, gradient
        buffers = floating_buffers(module)
        views = {id(b): self.vector[slices[name]].view(b.shape) for name, b in buffers}
        places = [
            (owner._buffers, f"{prefix}.{key}" if prefix else key, key)
            for prefix, owner in module.named_modules()
            for key in owner._buffers
        ]
        for place, _, key in places:  # several modules may hold the same one
            place[key] = views.get(id(place[key]), place[key])
        self._buffers = [(*place, b) for place in places if (b := place[0][place[2]]) is not None]
        constant, infinite = constant_names(module) - frozen_names(module), infinite_names(module)
        self._counters = [
            (b, b.clone())
            for n, b in module.named_buffers()
            if n in constant and n not in infinite and not n.endswith("num_batches_tracked")
        ]  # num_batches_tracked has no effect
        self._infinite = [(n, b, b._version) for n, b in module.named_buffers() if n in infinite]

    def check_buffers(self) -> None:
        """Check that the module writes its buffers in place, where the vector and the next client find them.

        Raises:
            UserError: it has replaced a buffer by another tensor, or changed one that no vector can hold.
        """
        for place, name, key, buffer in self._buffers:
            if place.get(key) is not buffer:
                place[key] = buffer
                remedy = f"its code replaces the buffer; write into it: self.{key}.copy_(...)"
                raise UserError("model", name, remedy)
        for name, buffer, version in self._infinite:
            if buffer._version != version:
                remedy = (
                    "begins with infinity or NaN and changes in training, so that no mean of it is defined"
                )
                raise UserError(
                    "model", name, f"{remedy}; start it from a finite number, or persistent=False"
                )

    def without_gradients(self) -> None:
        """Take the gradients off the parameters, for code that makes its own; `reattach` puts them back."""
        for _, p, _, _ in self._params:
            p.grad = None

    def gather(self) -> None:
        """Copy weights that foreign code has put into other tensors to their places in the vector."""
        for _, p, value, _ in self._params:
            if p.data_ptr() != value.data_ptr() and p.shape == value.shape:
                value.copy_(p.data)

    def reattach(self) -> None:
        """Make parameters and their gradients parts of the vectors again after foreign code has trained them.

        Weights that the code has put into other tensors are copied.

        Raises:
            UserError: the module has other parameters than before, or of another size, or a buffer is
                replaced.
        """
        found = dict(self.module.named_parameters())
        for name, p, value, gradient in self._params:
            remedy = "the trainer replaces or resizes this parameter; train it in place"
            if found.get(name) is not p or p.shape != value.shape:
                raise UserError("local.trainer", name, remedy)
            p.grad = gradient
        self.gather()
        for _, p, value, _ in self._params:
            p.data = value
        self.check_buffers()

    def load(self, vector: torch.Tensor, train: bool | None = None) -> nn.Module:
        """Copy `vector` [d] into the module and return it, in training mode or not (None: unchanged).

        Raises:
            ValueError: it has another length; a single number would be broadcast to all places.
            UserError: the module has replaced a buffer.
        """
        self.check_buffers()
        if vector.shape != self.vector.shape:
            raise ValueError(f"expected {len(self.vector)} numbers, got a tensor of {list(vector.shape)}")
        self.vector.copy_(vector)
        for counter, initial in self._counters:
            counter.copy_(initial)
        if train is not None:
            for module in self._modules:  # faster than Module.train, which sets every module
                if module.training is not train:
                    module.training = train
        return self.module


def copy_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module whose tensors are on a device; without their numbers on `meta`."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to(device, copy=True), requires_grad=p.requires_grad)
    computed = (value for m in module.modules() for value in vars(m).values() if _is_computed(value))
    for b in (*module.buffers(), *computed):
        memo[id(b)] = b.detach().to(device, copy=True)
    return deepcopy(module, memo)


def _is_computed(value: Any) -> bool:
    """Return whether a module's attribute is a tensor that it computes of others, as spectral norm does."""
    return isinstance(value, torch.Tensor) and not value.is_leaf
