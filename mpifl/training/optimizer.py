"""One optimiser step, on flat memory.

SGD follows PyTorch's definition of momentum (no dampening, the buffer starts at the first gradient) and of
weight decay (added to the gradient); it reads gradient, momentum and weights once and writes the last two
once. Adam is Kingma and Ba's, with bias correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import _engine_run_backward

from mpifl.core.client import Direction
from mpifl.core.parameters import Part

from .config import LocalConfig

if TYPE_CHECKING:
    from .learner import Learner


@dataclass(frozen=True)
class Moving:
    """What moves when a part of a model is trained.

    Attributes:
        part: slices of the parameters [p].
        params: the module's parameters inside them.
        views: for weights, gradient and momentum: a view of the flat vector for each parameter.
    """

    part: list[slice]
    params: list[torch.Tensor]
    views: list[list[torch.Tensor]]

    @classmethod
    def of(cls, learner: Learner, part: Part | None) -> Moving:
        """Return what moves of a learner's model: of `part` (None: of all) what its user has not frozen."""
        flat, p = learner.flat, learner.layout.num_parameters
        slices = (
            [slice(0, p)] if part is None else [slice(s.start, min(s.stop, p)) for s in part if s.start < p]
        )
        places = flat.layout.slices
        moving = [
            (places[name], param)
            for name, param in flat.module.named_parameters()
            if param.requires_grad and any(s.start <= places[name].start < s.stop for s in slices)
        ]
        if not all(param.requires_grad for param in flat.module.parameters()):
            slices = [s for s, _ in moving]
        vectors = (flat.weights, flat.grad, learner.momentum)
        views = [[v[s].view(q.shape) for s, q in moving] for v in vectors]
        return cls(slices, [param for _, param in moving], views)


def gradients(loss: torch.Tensor, params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradient of a scalar by each parameter, zeros where it does not depend on one."""
    # torch.autograd.grad is this call behind checks that cost a tenth of a small step
    one = torch.ones_like(loss)
    found = _engine_run_backward((loss,), (one,), False, False, tuple(params), True, accumulate_grad=False)
    # the fused update walks through memory: a gradient in another memory format would be added crosswise
    return tuple(
        torch.zeros_like(p) if g is None else g.contiguous() for g, p in zip(found, params, strict=True)
    )


def fused_sgd(
    weights: list[torch.Tensor],
    grads: list[torch.Tensor] | tuple[torch.Tensor, ...],
    momenta: list[torch.Tensor],
    config: LocalConfig,
    lr: float | torch.Tensor,
    first: bool,
) -> None:
    """Take a step of SGD on all tensors at once.

    Args:
        first: the momentum becomes the gradient, whatever was there.
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
        is_first_step=first,
    )


class Update:
    """Moves the weights of a learner's model against the gradient of a loss.

    Args:
        part: the slices that move; None for all parameters.
        lr: learning rate; a tensor is read at every step (SGD only).
        direction: changes the flat gradient before each step.
    """

    def __init__(
        self,
        learner: Learner,
        config: LocalConfig,
        lr: float | torch.Tensor,
        part: Part | None,
        direction: Direction | None,
    ) -> None:
        self.config, self.lr, self.direction, self.steps = config, lr, direction, 0
        moving = learner.moving(part)
        self.part, self.params, self.views = moving.part, moving.params, moving.views
        self.w, self.g, self.m, self.v = (
            learner.flat.weights,
            learner.flat.grad,
            learner.momentum,
            learner.square,
        )
        self.adam = config.optimizer == "adam"
        if self.adam:
            self.m.zero_()
            self.v.zero_()
        if sum(s.stop - s.start for s in self.part) < len(self.g):
            self.g.zero_()  # what does not move has no gradient

    @torch.no_grad()
    def __call__(self, loss: torch.Tensor) -> None:
        """Take one step."""
        grads = gradients(loss, self.params)
        self.steps += 1
        if self.direction is None and not self.adam:
            self._sgd(self.views[0], grads, self.views[2])
            return
        torch._foreach_copy_(self.views[1], grads)
        flat = self.g if self.direction is None else self.direction(self.g, self.w)
        w, g, m, v = ([x[s] for s in self.part] for x in (self.w, flat, self.m, self.v))
        if self.adam:
            self._adam(w, g, m, v)
        else:
            self._sgd(w, g, m)

    def _sgd(
        self, w: list[torch.Tensor], g: list[torch.Tensor] | tuple[torch.Tensor, ...], m: list[torch.Tensor]
    ) -> None:
        fused_sgd(w, g, m, self.config, self.lr, self.steps == 1)

    def _adam(
        self, w: list[torch.Tensor], g: list[torch.Tensor], m: list[torch.Tensor], v: list[torch.Tensor]
    ) -> None:
        b1, b2, t = 0.9, 0.999, self.steps
        for wi, gi, mi, vi in zip(w, g, m, v, strict=True):
            if self.config.weight_decay:
                gi = gi.add(wi, alpha=self.config.weight_decay)
            mi.mul_(b1).add_(gi, alpha=1 - b1)
            vi.mul_(b2).addcmul_(gi, gi, value=1 - b2)
            scale = (vi / (1 - b2**t)).sqrt_().add_(1e-8)
            wi.addcdiv_(mi, scale, value=-float(self.lr) / (1 - b1**t))
