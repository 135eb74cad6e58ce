"""The interface of a trainer: what trains a client's module in a visit (`local.trainer`).

A trainer trains a module in place, in the way that it likes: with another optimiser, with the loop of a
library, without gradients. mpifl gives it the module with the weights that the client starts from, the
client's samples in the order of the visit, and what the visit asks for; afterwards it reads the trained
weights from the module. So what travels is what the module declares: its parameters and running statistics
that are not frozen. Frozen tensors and buffers that are not persistent stay where they are.

Methods differ in what they ask of a training. A trainer says in `gives` what it can do beside training a
model; a method that asks for more is refused before the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn

from .errors import name_of
from .federation import InputPart, unpacked
from .metric import Metric
from .module_calls import task_output
from .options import Options
from .rng import Key
from .task import Task

if TYPE_CHECKING:
    import numpy as np

    from .client import Loss

Gift = Literal["direction", "loss", "part", "rate", "sgd", "gradient", "outputs"]
GIFTS: Mapping[Gift, str] = {
    "direction": "adds a term of its own to the gradient of each step",
    "loss": "replaces the loss",
    "part": "trains a part of the model alone",
    "rate": "computes with the learning rate and momentum of SGD",
    "sgd": "sets the options of SGD itself",
    "gradient": "takes gradients at a point",
    "outputs": "takes losses and outputs of models",
}
"""What a method may ask of a trainer beside a trained model, in words."""

Change: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]"
Given: TypeAlias = "torch.Tensor | Mapping[str, torch.Tensor]"  # samples: one input, or several by name
EVALUATION_BATCH = 256  # samples


class Samples:
    """Samples of one client: a data set with items (sample, label), batches, a DataLoader, or arrays.

    Samples of several inputs (`DataInfo.parts`) are mappings from their names to tensors [b, *shape].

    Args:
        x: samples [n, ...]; several inputs are packed in them, [n, F].
        y: labels [n, ...].
        task: the task; defines loss and metrics.
        order: yields the sample indices of each batch, int64 [b]; None: batches in the order of the samples.
        change: (samples of a batch, its labels, number of the batch) -> samples and labels as they are
            trained on (`local.augment`, masks that are drawn anew).
        parts: the inputs, if there are several.
    """

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        task: Task,
        order: Callable[[], Iterator[torch.Tensor]] | None = None,
        change: Change | None = None,
        parts: tuple[InputPart, ...] = (),
    ) -> None:
        self.x, self.y, self.task, self.parts = x, y, task, parts
        self._order, self._change = order, change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: Any) -> tuple[Given, torch.Tensor]:
        return self._given(self.x[i]), self.y[i]

    def _given(self, x: torch.Tensor) -> Given:
        """Return samples as a trainer gets them."""
        return unpacked(x, self.parts) if self.parts else x

    def indices(self) -> Iterator[torch.Tensor]:
        """Yield the sample indices of each batch, int64 [b]: all batches of the visit, pass after pass."""
        if self._order is None:
            return iter(torch.arange(len(self), device=self.x.device).split(EVALUATION_BATCH))
        return self._order()

    def batches(self) -> Iterator[tuple[Given, torch.Tensor, torch.Tensor]]:
        """Yield samples [b, ...], labels [b, ...] and indices [b] of each batch, on the device.

        In training these are the batches of mpifl's own loop under the same key, with its augmentation.
        """
        for number, index in enumerate(self.indices()):
            x, y = self.changed(number, index)
            yield x, y, index

    def changed(self, number: int, index: torch.Tensor) -> tuple[Given, torch.Tensor]:
        """Return samples and labels of a batch, by its number and its indices int64 [b]."""
        x, y = self.x.index_select(0, index), self.y.index_select(0, index)
        x, y = (x, y) if self._change is None else self._change(x, y, number)
        return self._given(x), y

    def loader(self, **options: Any) -> torch.utils.data.DataLoader[Any]:
        """Return a DataLoader over `batches`, samples and labels of each; for libraries that want one.

        Args:
            options: further arguments of `torch.utils.data.DataLoader`, such as `num_workers`.
        """
        batches: Any = _Batches(self)  # a data set, as far as PyTorch asks
        return torch.utils.data.DataLoader(
            batches, batch_size=None, shuffle=False, generator=torch.Generator(), **options
        )

    def arrays(self) -> tuple[Any, np.ndarray]:
        """Return samples and labels as NumPy arrays; changes of them do not reach the client's data."""
        x, y = self._given(self.x), self.y.cpu().numpy().copy()
        if isinstance(x, torch.Tensor):
            return x.cpu().numpy().copy(), y
        return {name: part.cpu().numpy().copy() for name, part in x.items()}, y


class _Batches:
    """The batches of samples as the items of a data set, for a DataLoader."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.orders = samples, list(samples.indices())

    def __len__(self) -> int:
        return len(self.orders)

    def __getitem__(self, number: int) -> tuple[Given, torch.Tensor]:
        return self.samples.changed(number, self.orders[number])


@dataclass
class FitContext:
    """What a visit asks of a trainer.

    Attributes:
        key: random key of the training; `key.torch()` and `key.numpy()` open generators. The global ones of
            PyTorch, NumPy and Python are seeded with it, so that their draws are those of this visit, too.
        device: device of the module and the samples.
        step: the server step, from 1.
        rounds: number of server steps of the run.
        epochs: passes over the samples.
        pass_steps: mini-batches of one pass.
        num_steps: mini-batches of the visit: those of `epochs`, or `local.steps`, and less where the visit
            does a share of the work.
        batch_size: samples of a mini-batch.
        rate_factor: what `local.lr_decay` and `local.milestones` multiply the learning rate by at this step.
        loss: (module, samples, labels, indices of the samples) -> loss of a batch, a scalar: that of the
            method, if it has its own, or that of the task. A trainer with `loss` among its gifts calls it.
        directed: whether the method changes gradients.
        direct: changes the gradients that are in `p.grad` as the method asks. A trainer with `direction`
            among its gifts calls it between backward pass and step; it does nothing for most methods.
        done: is told the number of mini-batches done so far, for the progress; optional.
    """

    key: Key
    device: torch.device
    step: int
    rounds: int
    epochs: int
    pass_steps: int
    num_steps: int
    batch_size: int
    rate_factor: float
    loss: Loss
    directed: bool
    direct: Callable[[], None]
    done: Callable[[int], None]


@dataclass(frozen=True)
class Fit:
    """The outcome of a training.

    Attributes:
        loss: mean training loss of the samples of the steps; NaN if it is unknown.
        steps: optimiser steps taken.
        samples: samples in these steps; each pass counts them again.
        metrics: further numbers, of which each round has the mean over clients, weighted by samples, in
            metrics.csv under `fit_` and their name.
        lr: learning rate of the steps, of a trainer with `rate` among its gifts.
        momentum: momentum of the steps.
    """

    loss: float
    steps: int
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    lr: float = nan
    momentum: float = 0.0


class LocalTrainer(Options):
    """What trains a client's module: mpifl's own loop, or a `Trainer`."""

    @property
    def name(self) -> str:
        """Its name in `local.trainer`."""
        return name_of(self)


@dataclass(frozen=True)
class OwnLoop(LocalTrainer):
    """mpifl's own training loop: SGD or Adam as the other keys of `local` say; the fastest."""

    called: ClassVar[str] = "own"


class Trainer(LocalTrainer, ABC):
    """A trainer of your own: `local.trainer: file.py:Class`, a frozen dataclass whose fields are its options.

    The same visit must give the same weights whenever and wherever it is made: draw random numbers from
    `context.key` or the global generators, and keep nothing between visits. `mpifl check` tries it.

    Attributes:
        uses: keys of `local` that it uses beside `trainer`, `epochs`, `steps`, `batch_size` and `augment`.
            A run that sets another key prints a line.
        metrics: metrics that `evaluate` returns beside those of the task.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[Metric, ...]] = ()

    @property
    def gives(self) -> tuple[Gift, ...]:
        """What it gives beside a trained model.

        Override it by a class attribute, `gives = ("direction", "outputs")`, or a `property` if fields change
        it. Default: losses, outputs and gradients of the task, for a module that returns one tensor.
        """
        return "outputs", "gradient"

    def check(self, task: Task, asked: tuple[Gift, ...]) -> None:
        """Raise `UserError` where the trainer fits the task or the method not. Default: it fits.

        Args:
            task: the task.
            asked: what the method asks for beside a trained model.
        """
        return

    def check_module(self, module: nn.Module) -> None:
        """Raise `UserError` where the trainer cannot train a module; before the run. Default: it can.

        Args:
            module: the model.
        """
        return

    @property
    def evaluates(self) -> bool:
        """Whether it evaluates models itself: its class defines `evaluate`."""
        return type(self).evaluate is not Trainer.evaluate

    @abstractmethod
    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        """Train a module in place and return the outcome.

        Args:
            module: the client's model, in training mode; a parameter that is not to be trained has
                `requires_grad` False.
            data: the training samples.
            context: what the visit asks for.
        """

    def evaluate(self, module: nn.Module, data: Samples) -> Mapping[str, float]:
        """Return `loss`, the task's metrics and those of `metrics`. Default: the task computes its metrics.

        Args:
            module: the model to evaluate, in evaluation mode.
            data: the samples, at least one.
        """
        outputs = torch.cat([self.outputs(module, x) for x, _, _ in data.batches()])
        return data.task.evaluate(outputs, data.y)

    def outputs(self, module: nn.Module, x: Given) -> torch.Tensor:
        """Return what the task takes as the outputs [b, ...] of samples [b, ...].

        Default: `module(x)`, and of several outputs the one that `model.output` names.
        """
        found: torch.Tensor = task_output(module, module(x))
        return found


def trainer_of(local: LocalTrainer) -> Trainer | None:
    """Return the trainer; None for mpifl's own loop."""
    return local if isinstance(local, Trainer) else None
