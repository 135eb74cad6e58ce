"""One optimiser step on flat memory.

SGD follows PyTorch's definition of momentum (no dampening, the buffer starts at the first gradient) and of
weight decay (added to the gradient). It reads gradient, momentum and weights once and writes the last two
once. Adam is that of Kingma and Ba (ICLR 2015), with bias correction.

As in PyTorch, a parameter on which the loss does not depend is left alone: it has no gradient, and so neither
weight decay nor momentum move it. A method's direction does, but without weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.autograd.graph import _engine_run_backward

from mpifl.core.client import Direction
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part

from .config import LocalConfig
from .model_context import ModelContext


def gradients(loss: torch.Tensor, params: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of a scalar with respect to each parameter; None if it does not depend on it."""
    # torch.autograd.grad makes this call after checks that take a tenth of the time of a small step
    one = torch.ones_like(loss)
    found = _engine_run_backward((loss,), (one,), False, False, tuple(params), True, accumulate_grad=False)
    # the fused step runs over memory in order: another memory format would add gradients to wrong weights
    return tuple(None if g is None else g.contiguous() for g in found)


def fused_sgd(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor] | tuple[torch.Tensor, ...],
    momenta: list[torch.Tensor],
    config: LocalConfig,
    lr: float | torch.Tensor,
    first: bool,
) -> None:
    """Take an SGD step on all tensors at once, in place.

    Args:
        weights: the tensors to update.
        grads: their gradients.
        momenta: their momentum buffers; unused if `config` has no momentum.
        config: gives momentum and weight decay.
        lr: learning rate.
        first: set the momentum buffers to the gradients, whatever they contained before.
    """
    torch._fused_sgd_(
        weights,
        grads,
        momenta if config.momentum else [],
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=first and bool(config.momentum),  # without momentum PyTorch warns about it on a GPU
    )


def adam(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    first_moments: list[torch.Tensor],
    second_moments: list[torch.Tensor],
    config: LocalConfig,
    lr: float,
    t: int,
) -> None:
    """Take an Adam step on each tensor, in place.

    Args:
        weights: the tensors to update.
        grads: their gradients.
        first_moments: the running means of the gradients.
        second_moments: the running means of their squares.
        config: gives the weight decay.
        lr: learning rate.
        t: the number of this step, from 1.
    """
    b1, b2 = 0.9, 0.999
    for w, g, m, v in zip(weights, grads, first_moments, second_moments, strict=True):
        if config.weight_decay:
            g = g.add(w, alpha=config.weight_decay)
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        scale = (v / (1 - b2**t)).sqrt_().add_(1e-8)
        w.addcdiv_(m, scale, value=-lr / (1 - b1**t))


class OptimizerStep:
    """Updates the weights of a model from the gradient of a loss.

    Args:
        context: the model; its flat vectors change.
        config: optimiser, momentum and weight decay.
        lr: learning rate; a tensor is read at every step (SGD only).
        part: the slices that are trained; None for all parameters.
        direction: changes the flat gradient [p] before each step; None leaves it as it is.
        steps: number of steps already taken; step 1 sets SGD's momentum to the gradient.
        kept: optimiser state to continue from and to update; None for a new optimiser.
    """

    def __init__(
        self,
        context: ModelContext,
        config: LocalConfig,
        lr: float | torch.Tensor,
        part: Part | None,
        direction: Direction | None,
        steps: int = 0,
        kept: KeptOptimizer | None = None,
    ) -> None:
        if context.device.type == "cuda" and not isinstance(lr, torch.Tensor):
            lr = float(np.float32(lr))  # rounded as in a captured step, so both give the same bits
        self.config, self.lr, self.direction, self.steps = config, lr, direction, steps
        self.context, self.moving = context, context.moving(part)
        self.adam, self.kept = config.optimizer == "adam", kept
        self.before = 0 if kept is None else kept.steps  # steps of earlier visits
        if self.adam or (kept is not None and kept.momentum is None):  # clear what other clients left
            context.momentum.zero_()
            context.square.zero_()
        self.load()
        if sum(s.stop - s.start for s in self.moving.slices) < len(context.flat.grad):
            context.flat.grad.zero_()  # parameters that are not trained have gradient 0

    def load(self) -> None:
        """Load the kept optimiser state."""
        kept = self.kept
        if kept is not None and kept.momentum is not None:
            self.context.momentum.copy_(kept.momentum)
        if kept is not None and kept.square is not None:
            self.context.square.copy_(kept.square)

    def save(self) -> None:
        """Save the optimiser state for the next visit."""
        if self.kept is None or not self.steps:
            return
        self.kept.steps, self.kept.momentum = self.before + self.steps, self.context.momentum.clone()
        self.kept.square = self.context.square.clone() if self.adam else None

    @torch.no_grad()
    def __call__(self, loss: torch.Tensor) -> None:
        """Take one step."""
        moving = self.moving
        found = gradients(loss, moving.params)
        grads = [g for g in found if g is not None]
        self.steps += 1
        if len(grads) < len(found):
            self._step_without_some(found)
            return
        if self.direction is None and not self.adam:
            fused_sgd(moving.weights, grads, moving.momenta, self.config, self.lr, self._first)
            return
        torch._foreach_copy_(moving.gradients, grads)
        self._step(self._directed(), moving.slices, self.config)

    @property
    def _first(self) -> bool:
        return self.before + self.steps == 1

    def _directed(self) -> torch.Tensor:
        """Return the flat gradient [p] after a method's change."""
        flat = self.context.flat
        return flat.grad if self.direction is None else self.direction(flat.grad, flat.weights)

    def _step(self, gradient: torch.Tensor, slices: Sequence[slice], config: LocalConfig) -> None:
        """Take a step on some slices of the flat vectors."""
        context = self.context
        vectors = context.flat.weights, gradient, context.momentum, context.square
        w, g, m, v = ([x[s] for s in slices] for x in vectors)
        if self.adam:
            adam(w, g, m, v, config, float(self.lr), self.before + self.steps)
        else:
            fused_sgd(w, g, m, config, self.lr, self._first)

    def _step_without_some(self, found: Sequence[torch.Tensor | None]) -> None:
        """Take a step in which some parameters have no gradient (None)."""
        weights, view = self.context.flat.weights, self.moving.weights
        starts = [w.storage_offset() - weights.storage_offset() for w in view]
        places = [slice(a, a + w.numel()) for a, w in zip(starts, view, strict=True)]
        for g, gradient, momentum in zip(found, self.moving.gradients, self.moving.momenta, strict=True):
            gradient.zero_() if g is None else gradient.copy_(g)
            if g is None and self._first:
                momentum.zero_()  # its first gradient may still come
        directed = self._directed()
        used = [s for s, g in zip(places, found, strict=True) if g is not None]
        if used:
            self._step(directed, used, self.config)
        if self.direction is not None:
            others = [s for s, g in zip(places, found, strict=True) if g is None]
            self._step(directed, others, replace(self.config, weight_decay=0.0))
