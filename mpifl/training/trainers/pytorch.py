"""The trainer `torch`: any optimiser of `torch.optim`, with what trainings of networks usually add to it."""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mpifl.core.errors import UserError, nearest, require
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.task import Task
from mpifl.core.trainer import Fit, FitContext, Gift, Samples, Trainer

CLOSURES = ("LBFGS",)  # optimisers that evaluate a batch several times a step


@cache
def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimisers of `torch.optim` that take one gradient a step, by name."""
    base = torch.optim.Optimizer
    found = {
        name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and cls is not base
    }
    return {name: cls for name, cls in found.items() if issubclass(cls, base) and name not in CLOSURES}


@dataclass(frozen=True)
class Torch(Trainer):
    """Mini-batches with an optimiser of PyTorch, made anew at every visit.

    Attributes:
        optimizer: a class of `torch.optim`, such as SGD, AdamW, RMSprop or NAdam.
        lr: learning rate at the first server step; `local.lr_decay` and `local.milestones` change it later.
        options: further arguments of the optimiser, such as `{weight_decay: 0.01, betas: [0.9, 0.95]}`.
        scheduler: learning rate over the steps of a visit, after the warm-up: `constant`, `linear` (to 0 at
            the end) or `cosine` (half a period, to 0 at the end).
        schedule_over: `visit`: the schedule runs through in each visit; `run`: once in all rounds, so that it
            is constant within a visit.
        warmup: share of the schedule in which the rate grows linearly from 0.
        clip_norm: largest norm of a gradient, which is scaled down to it; null does not clip.
        label_smoothing: share of each label that is spread over all classes, in the cross-entropy of classes.
        autocast: number format of the operations that PyTorch may compute in it; weights stay float32.
        accumulate: mini-batches whose gradients are averaged for one step; a rest at the end of the visit is
            a step, too.
        workers: processes of a DataLoader that load batches; 0 loads them in the rank itself.
    """

    called: ClassVar[str] = "torch"
    uses: ClassVar[tuple[str, ...]] = ("lr_decay", "milestones", "gamma")

    optimizer: str = "SGD"
    lr: PositiveFloat = 0.01
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    schedule_over: Literal["visit", "run"] = "visit"
    warmup: ShareBelowOne = 0.0
    clip_norm: PositiveFloat | None = None
    label_smoothing: ShareBelowOne = 0.0
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    accumulate: PositiveInt = 1
    workers: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        known = optimizers()
        require(self.optimizer in known, "optimizer", self.optimizer, nearest(self.optimizer, sorted(known)))
        arguments = inspect.signature(known[self.optimizer]).parameters
        for name in self.options:
            allowed = name in arguments and name not in ("params", "lr")
            remedy = f"{self.optimizer} takes {', '.join(n for n in arguments if n not in ('params', 'lr'))}"
            require(allowed, f"options.{name}", self.options[name], remedy)
        try:
            self._optimizer(nn.Linear(1, 1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                "options", self.options, f"{self.optimizer} does not take them: {error}"
            ) from error
        constant = self.scheduler == "constant" and not self.warmup
        remedy = "has no effect on a constant rate without warm-up; leave it out"
        require(not constant or self.schedule_over == "visit", "schedule_over", self.schedule_over, remedy)

    @property
    def gives(self) -> tuple[Gift, ...]:
        """Everything but the options of SGD; the rate only of SGD whose rate is one number in a visit."""
        plain = self.optimizer == "SGD" and self.accumulate == 1 and self.clip_norm is None
        plain = plain and not any(self.options.get(name) for name in ("nesterov", "dampening", "maximize"))
        told = plain and ((self.scheduler == "constant" and not self.warmup) or self.schedule_over == "run")
        rate: tuple[Gift, ...] = ("rate",) if told else ()
        return ("direction", "loss", "part", *rate, "gradient", "outputs")

    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        """Train the module mini-batch by mini-batch."""
        optimizer, lr = self._optimizer(module), self.lr * context.rate_factor
        steps = math.ceil(context.num_steps / self.accumulate)
        total = torch.zeros((), dtype=torch.float64, device=context.device)
        loss, scaler = self._loss(context, data.task), self._scaler(context.device)
        samples = taken = held = 0
        rate = lr
        for number, (x, y, index) in enumerate(self._batches(data)):
            last = number + 1 == context.num_steps
            with self._autocast(context.device):
                value = loss(module, x, y, index)
            in_step = min(self.accumulate, context.num_steps - number + held)
            scaler.scale(value / in_step if in_step > 1 else value).backward()
            total += value.detach().double() * len(y)
            samples, held = samples + len(y), held + 1
            context.done(number + 1)
            if held < self.accumulate and not last:
                continue
            rate = lr * self._share(taken, steps, context)
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.unscale_(optimizer)
            context.direct()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), self.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            taken, held = taken + 1, 0
        momentum = float(self.options.get("momentum", 0.0)) if self.optimizer == "SGD" else 0.0
        mean = float(total) / samples if samples else math.nan
        return Fit(mean, taken, samples, lr=rate if "rate" in self.gives else math.nan, momentum=momentum)

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimiser of the parameters that are trained."""
        trained = [p for p in module.parameters() if p.requires_grad]
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in self.options.items()}
        make: Any = optimizers()[self.optimizer]
        made: torch.optim.Optimizer = make(trained, lr=self.lr, **options)
        return made

    def _batches(self, data: Samples) -> Any:
        """Return the batches of a visit: samples, labels, indices."""
        if not self.workers:
            return data.batches()
        loader = data.loader(num_workers=self.workers)
        return ((x, y, index) for (x, y), index in zip(loader, data.indices(), strict=True))

    def _share(self, taken: int, steps: int, context: FitContext) -> float:
        """Return the share of the learning rate at a step, after `taken` steps of `steps` of this visit."""
        if self.schedule_over == "run":
            taken, steps = context.step - 1, context.rounds
        rising = math.ceil(self.warmup * steps)
        if taken < rising:
            return (taken + 1) / (rising + 1)
        done = min((taken - rising) / max(steps - rising, 1), 1.0)
        if self.scheduler == "linear":
            return 1 - done
        return 0.5 * (1 + math.cos(math.pi * done)) if self.scheduler == "cosine" else 1.0

    def _loss(self, context: FitContext, task: Task) -> Any:
        """Return the loss of a batch, with smoothed labels if asked for."""
        if not self.label_smoothing:
            return context.loss
        criterion = nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)
        return lambda module, x, y, index: criterion(self.outputs(module, x).movedim(-1, 1), y)

    def check(self, task: Task, asked: tuple[Gift, ...]) -> None:
        """Raise `UserError` where an option does not fit the task, or what the method asks for."""
        smooths = bool(self.label_smoothing)
        remedy = f"smooths the cross-entropy of classes, and the loss of task {task.name} is another; use 0"
        require(not smooths or task.cross_entropy, "label_smoothing", self.label_smoothing, remedy)
        remedy = "the method has a loss of its own, without smoothed labels; use 0"
        require(not smooths or "loss" not in asked, "label_smoothing", self.label_smoothing, remedy)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast == "none":
            return nullcontext()
        return torch.autocast(device.type, getattr(torch, self.autocast))

    def _scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return what scales the loss, so that gradients in float16 do not vanish; otherwise does nothing."""
        return torch.amp.GradScaler(device.type, enabled=self.autocast == "float16")
