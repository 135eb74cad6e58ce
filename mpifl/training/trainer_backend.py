"""Trains requests with a trainer (`local.trainer`) in place of mpifl's own loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpifl.core.client import Loss, Trained
from mpifl.core.errors import MethodError, require
from mpifl.core.federation import InputPart, packed
from mpifl.core.module_calls import all_outputs
from mpifl.core.torch_state import kept
from mpifl.core.trainer import GIFTS, Fit, FitContext, Gift, Given, Samples, Trainer
from mpifl.core.types import shape_or_type

from .augmentation import change_of
from .backend import Backend, Request
from .model_context import ModelContext
from .pytorch_backend import loss_of


def check_gives(trainer: Trainer, gift: Gift) -> None:
    """Raise `MethodError` if a method asks a trainer for what it does not give, without having said so."""
    if gift not in trainer.gives:
        remedy = f"trainer {trainer.name} does not give it; say so in the method: asks = ({gift!r},)"
        raise MethodError("local_update", f"the method {GIFTS[gift]}", remedy)


class TrainerBackend(Backend):
    """Trains any request with a trainer.

    Args:
        context: the model; its vector changes.
        trainer: the trainer.
        rounds: number of server steps of the run.
        parts: the inputs of a sample, if there are several.
    """

    def __init__(
        self, context: ModelContext, trainer: Trainer, rounds: int, parts: tuple[InputPart, ...] = ()
    ) -> None:
        self.context, self.trainer, self.rounds, self.parts = context, trainer, rounds, parts

    def accepts(self, request: Request) -> bool:
        """Return True."""
        return True

    def train(self, request: Request) -> Trained:
        """Train the module in place and read its weights.

        Raises:
            MethodError: the method asks for what the trainer does not give.
            UserError: the trainer returns no `Fit`, or resizes or removes tensors of the module.
        """
        context, config, flat = self.context, request.config, self.context.flat
        self._check(request)
        num_steps = config.num_steps(len(request.split), context.drop_single)
        if num_steps:
            context.check_free(request.part)
        module = flat.load(request.start, train=True)
        fit = self._fit(module, request, num_steps) if num_steps else Fit(math.nan, 0, 0)
        trained = request.outcome(flat.vector.clone(), fit.steps, fit.loss)
        return replace(trained, lr=fit.lr, momentum=fit.momentum, samples=fit.samples, metrics=fit.metrics)

    def _fit(self, module: nn.Module, request: Request, num_steps: int) -> Fit:
        """Return the outcome of the trainer's `fit`, after which the module's tensors lie in the vector."""
        context, config, part = self.context, request.config, request.part
        stage = request.stage
        asked = FitContext(
            key=request.key,
            device=context.device,
            step=request.step,
            rounds=self.rounds,
            epochs=config.epochs,
            pass_steps=config.pass_steps(len(request.split), context.drop_single),
            num_steps=num_steps,
            batch_size=config.batch_size,
            rate_factor=config.lr_at(request.step) / config.lr,
            loss=self._loss(request.loss or loss_of(context)),
            directed=request.direction is not None,
            direct=partial(_direct, context, request),
            done=(lambda count: None) if stage is None else partial(setattr, stage, "done"),
        )
        only = nullcontext() if part is None else context.only(part)
        try:
            # a gradient that is None keeps frozen parameters from an optimiser's weight decay
            context.flat.without_gradients()
            with kept(), request.key.of("dropout").seeded(), only, all_outputs(module):
                fit: Any = self.trainer.fit(module, self._samples(request), asked)
        finally:
            context.flat.reattach()
        self._check_kept(request)
        remedy = f"its fit returns {shape_or_type(fit)}; return a mpifl.Fit of loss, steps and samples"
        require(isinstance(fit, Fit), "local.trainer", self.trainer.name, remedy)
        told = "rate" not in self.trainer.gives or not fit.steps or math.isfinite(fit.lr)
        remedy = "has `rate` among its gifts, but its fit tells no lr; return Fit(..., lr=...)"
        require(told, "local.trainer", self.trainer.name, remedy)
        checked: Fit = fit
        return checked

    def _loss(self, loss: Loss) -> Loss:
        """Return a loss that takes samples as trainers get them, of what the task takes of the outputs."""

        def of_given(module: nn.Module, x: Given, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            with all_outputs(module, everything=False):
                return loss(module, packed(x, self.parts) if isinstance(x, Mapping) else x, y, index)

        return of_given

    def _check(self, request: Request) -> None:
        """Raise `MethodError` if a method asks for what the trainer does not give."""
        asked: dict[Gift, bool] = {
            "direction": request.direction is not None,
            "loss": request.loss is not None,
            "part": request.part is not None,
        }
        for gift, given in asked.items():
            if given:
                check_gives(self.trainer, gift)

    def _check_kept(self, request: Request) -> None:
        """Raise `UserError` if the trainer has moved parameters that it was not to train."""
        context = self.context
        moving = {id(p) for p in context.moving(request.part).params}
        for name, p in context.flat.module.named_parameters():
            if id(p) in moving:
                continue
            before = request.start[context.layout.slices[name]].view(p.shape).to(p.device)
            remedy = "moves it, although requires_grad is False; give its optimiser the others alone"
            require(torch.equal(p, before), "local.trainer", f"{self.trainer.name}: {name}", remedy)

    def _samples(self, request: Request) -> Samples:
        """Return the client's samples in the batches of the visit."""
        config, split, context = request.config, request.split, self.context
        order = partial(context.batches, split, config, request.key)
        task = context.task
        change = change_of(task, config.augment, request.key)
        return Samples(split.x, split.y, task, order, change, self.parts)


def _direct(context: ModelContext, request: Request) -> None:
    """Change the gradients in `p.grad` of the module's parameters as the method asks."""
    if request.direction is None:
        return
    flat, moving = context.flat, context.moving(request.part)
    with torch.no_grad():
        flat.grad.zero_()
        for param, gradient in zip(moving.params, moving.gradients, strict=True):
            if param.grad is not None:
                gradient.copy_(param.grad)
        flat.gather()
        directed = request.direction(flat.grad, flat.weights)
        for param, gradient in zip(moving.params, moving.gradients, strict=True):
            place = slice(gradient.storage_offset(), gradient.storage_offset() + gradient.numel())
            param.grad = directed[place].view(gradient.shape).clone()
