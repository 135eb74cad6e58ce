"""What a model is trained for: its loss, the metrics that it is scored by, and which of them are better.

A task works on one batch: the model's output and the labels of its samples. Metrics come from sums over
samples (numbers of hits, squared errors), never from means of means, so they are the same whatever the sizes
of batches and the number of ranks, and sums of several clients give the metrics of all their samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from .errors import require
from .federation import DataInfo
from .metric import Metric

SUMS = "sums."  # begins the names of sums among scores, which metrics of all samples together are made of

Sums = Mapping[str, "torch.Tensor | np.ndarray"]


class Task(ABC):
    """A task. Subclasses are frozen dataclasses; their fields are the options under `task`.

    A task of your own: `task.name: file.py:Class`, with `labels`, `known`, `losses`, `sums` and `figures`.

    Attributes:
        labels: the kinds of labels that it takes (`DataInfo.labels`).
        known: its metrics, by name.
        cross_entropy: whether its loss is the cross-entropy of classes, which the kernels in C compute; of a
            class derived from one where it is, only where the loss is not its own.
        called: its name in a configuration; of a task of your own, the path by which it was imported.
    """

    labels: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Metric]]
    cross_entropy: ClassVar[bool] = False
    called: ClassVar[str] = ""

    # -- training

    @abstractmethod
    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample [n].

        Args:
            output: of the model, [n, ...]; its last axis has `num_classes` numbers.
            labels: [n] or [n, ...].
        """

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, a scalar. Default: the mean of `losses`."""
        return self.losses(output, labels).mean()

    def total_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of what `loss` is the mean of, a scalar. Default: that of `losses`."""
        return self.losses(output, labels).sum()

    def count(self, labels: torch.Tensor) -> int:
        """Return the number of terms that `total_loss` sums up. Default: the samples."""
        return len(labels)

    @cached_property
    def has_total(self) -> bool:
        """Whether `loss` is `total_loss` over `count`: not where a class says only what `loss` is."""
        return self._declares("total_loss", ("loss",))

    @cached_property
    def for_kernels(self) -> bool:
        """Whether its loss is the cross-entropy of classes."""
        return self.cross_entropy and self._declares("cross_entropy", ("losses", "loss", "total_loss"))

    def _declares(self, name: str, others: Sequence[str]) -> bool:
        """Return whether no class derived from the one that says `name` says one of the others."""
        first = {n: i for i, c in reversed([*enumerate(type(self).__mro__)]) for n in vars(c)}
        return all(first[name] <= first[other] for other in others)

    # -- evaluation

    @abstractmethod
    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return sums over the samples, from which `figures` makes all metrics; any names and shapes.

        Two sets of samples together have the sums of both.
        """

    @abstractmethod
    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the value of each metric of `metrics`, and `loss`, from sums."""

    def evaluate(self, output: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return what samples score: metrics, `loss`, and the sums behind them, their names with SUMS."""
        found = self.sums(output, labels)
        here = {n: v.detach().cpu() if isinstance(v, torch.Tensor) else v for n, v in found.items()}
        sums = {name: np.asarray(value, np.float64) for name, value in here.items()}
        return {**self.figures(sums), **{SUMS + name: value for name, value in sums.items()}}

    def mix(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the output of a mixture of models: their weighted predictions, float64 [n, ...]. FedEM.

        Args:
            outputs: of each of K models, [n, ...].
            weights: [K], summing to one.
        """
        stacked = torch.stack(list(outputs)).double()
        return torch.einsum("k,k...->...", weights.double().to(stacked.device), stacked)

    def evaluate_mixed(self, mixed: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return what samples score, given what `mix` returned. Default: as `evaluate`."""
        return self.evaluate(mixed, labels)

    # -- what it is

    @property
    def chosen(self) -> tuple[Metric, ...]:
        """The metrics in use, the first of them that of curves, tables and targets.

        Default: those that the option `metrics` names, or all that are known.
        """
        names = getattr(self, "metrics", ()) or tuple(self.known)
        return tuple(self.known[name] for name in names)

    @property
    def metric(self) -> Metric:
        """The first metric."""
        return self.chosen[0]

    @property
    def scored(self) -> tuple[Metric, ...]:
        """The metrics that `evaluate` returns. Default: those in use."""
        return self.chosen

    def check(self, info: DataInfo) -> None:
        """Raise `UserError` where the labels are none of this task's. Default: by `labels`."""
        fits = info.labels in self.labels
        remedy = f"labels of this source are {info.labels}; take {SUITABLE[info.labels]}, or another source"
        require(fits, "task.name", self.name, remedy)

    @property
    def name(self) -> str:
        """What `task` calls it in a configuration."""
        called: str = vars(type(self)).get("called", "")  # a class derived from it has another name
        return called or getattr(type(self), "imported_as", type(self).__name__)

    def check_metrics(self) -> None:
        """Raise `UserError` where the option `metrics` names what is not known, or names it twice."""
        names = getattr(self, "metrics", ())
        known = ", ".join(self.known)
        require(set(names) <= set(self.known), "metrics", list(names), f"take some of {known}")
        require(len(set(names)) == len(names), "metrics", list(names), "name each of them once")

    def __post_init__(self) -> None:
        self.check_metrics()
        known = self._declares("loss", ("total_loss",)) or self._declares("losses", ("total_loss",))
        remedy = (
            "a total_loss of its own would be another loss than the one that is trained; say losses, or loss"
        )
        require(known, "task.name", self.name, remedy)


SUITABLE = {
    "classes": "classification",
    "multi_hot": "multi_label",
    "numbers": "regression",
    "tokens": "next_token",
}  # kind of labels -> the task that is made for them
