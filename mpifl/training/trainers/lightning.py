"""The trainer `lightning`: a LightningModule's own steps, optimisers, schedulers and hooks."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mpifl.core.errors import require
from mpifl.core.optional_packages import optional
from mpifl.core.options import PositiveFloat, PositiveInt
from mpifl.core.trainer import Fit, FitContext, Gift, Samples, Trainer

KEY = "local.trainer"
LOGGERS = ("lightning.pytorch", "lightning.fabric")


@dataclass(frozen=True)
class Lightning(Trainer):
    """A LightningModule's own `training_step` and `configure_optimizers`, by `lightning.Trainer`.

    The model is a LightningModule whose batches are pairs of samples and labels; samples of several inputs
    are mappings from their names. What its `training_step`
    logs becomes columns `fit_NAME` of metrics.csv. Its `forward` gives the outputs that the task scores. Its
    optimisers are made anew at every visit. With manual optimisation it has all steps to itself, so that no
    method can add to its gradients.

    Attributes:
        clip_norm: largest norm of a gradient (`gradient_clip_val`); null does not clip.
        accumulate: mini-batches whose gradients are averaged for one step (`accumulate_grad_batches`).
        precision: number format of the steps: `32-true`, `bf16-mixed` or `16-mixed`.
    """

    called: ClassVar[str] = "lightning"
    gives: ClassVar[tuple[Gift, ...]] = ("direction", "part", "gradient", "outputs")

    clip_norm: PositiveFloat | None = None
    accumulate: PositiveInt = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"

    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        """Train the module with a `lightning.Trainer` of its own.

        Raises:
            UserError: Lightning is not installed, the module is no LightningModule, or it optimises by hand
                under a method that adds to gradients.
        """
        self.check_module(module)
        pl = optional("lightning.pytorch", "lightning", KEY, self.called)
        environments = optional("lightning.pytorch.plugins.environments", "lightning", KEY, self.called)
        net: Any = module
        remedy = "the method adds to gradients, and the module has manual optimisation; use another method"
        require(net.automatic_optimization or not context.directed, KEY, self.called, remedy)
        batches, watch = _Passes(data, context), _watch(pl, context, self.accumulate)
        on_gpu = context.device.type == "cuda"
        with _quiet():
            trainer = pl.Trainer(
                accelerator="gpu" if on_gpu else "cpu",
                devices=[context.device.index or 0] if on_gpu else 1,
                plugins=[environments.LightningEnvironment()],  # or it would take the ranks for its own
                max_epochs=math.ceil(context.num_steps / context.pass_steps),
                precision=self.precision,
                gradient_clip_val=self.clip_norm,
                accumulate_grad_batches=self.accumulate,
                callbacks=[watch],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
            )
            try:
                trainer.fit(module, batches)
            finally:
                net.trainer = None  # it belongs to this visit
        told = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return Fit(watch.mean_loss, trainer.global_step, watch.samples, told)

    def check_module(self, module: nn.Module) -> None:
        """Raise `UserError` if Lightning is not installed, or the module is no LightningModule."""
        pl = optional("lightning.pytorch", "lightning", KEY, self.called)
        remedy = "trains a LightningModule, and the model is none; give one as model custom, which may hold "
        remedy += "a network of any library"
        require(isinstance(module, pl.LightningModule), KEY, self.called, remedy)


class _Passes:
    """The batches of a visit as a loader that Lightning goes through once for each pass.

    Args:
        data: the training samples.
        context: gives the number of batches.
    """

    def __init__(self, data: Samples, context: FitContext) -> None:
        self._batches, self._size = data.batches(), min(context.pass_steps, context.num_steps)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[list[Any]]:
        for x, y, _ in islice(self._batches, self._size):
            yield [x, y]


def _watch(pl: Any, context: FitContext, accumulate: int) -> Any:
    """Return a callback of Lightning that adds a method's term to the gradients, and adds up losses.

    Args:
        pl: the package, which may not be imported with this module.
        context: what the visit asks for.
        accumulate: mini-batches a step, by which Lightning divides the losses.
    """

    class Watch(pl.Callback):  # type: ignore[misc]  # a class of a package that is imported late
        def __init__(self) -> None:
            self.samples, self.batches = 0, 0
            self.total = torch.zeros((), dtype=torch.float64, device=context.device)

        @property
        def mean_loss(self) -> float:
            return float(self.total) / self.samples if self.samples else math.nan

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            context.direct()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            value = loss.detach().double() * accumulate if isinstance(loss, torch.Tensor) else math.nan
            self.total = self.total + value * len(batch[1])
            self.samples, self.batches = self.samples + len(batch[1]), self.batches + 1
            context.done(self.batches)

    return Watch()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from printing what it finds on the machine, and its advice, at every visit."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
