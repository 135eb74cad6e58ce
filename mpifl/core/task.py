"""The interface of a task: the loss of a model, and the metrics it is scored by.

A task works on one batch: the model's output and the labels of its samples. Metrics come from sums over
samples (numbers of hits, squared errors), never from means of means. They therefore do not depend on the
sizes of batches or the number of ranks, and the sums of several clients give the metrics of all their
samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from mpifl.core.options import Options

from .errors import is_ours, name_of, require
from .federation import DataInfo
from .metric import Metric
from .rng import Key
from .types import shape_or_type

SUMS = "sums."  # prefix of the names of sums among scores; they give the metrics of all samples together

Sums = Mapping[str, "torch.Tensor | np.ndarray"]


class Task(Options, ABC):
    """A task. Subclasses are frozen dataclasses; their fields are the options under `task`.

    A task of your own: `task.name: file.py:Class`, with `labels`, `known`, `losses`, `sums` and `figures`.

    Attributes:
        labels: the kinds of labels that it takes (`DataInfo.labels`).
        known: its metrics, by name.
        cross_entropy: whether its loss is the cross-entropy of classes, which the kernels in C compute. It
            does not count in a subclass that overrides the loss without setting it again.
        called: its name in a configuration; empty for your own task, whose `name` is its import path.
    """

    labels: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Metric]]
    cross_entropy: ClassVar[bool] = False
    called: ClassVar[str] = ""

    # -- training

    @property
    def redraws(self) -> bool:
        """Whether `redrawn` changes batches. Default: False."""
        return False

    def prepared(self, info: DataInfo) -> Task:
        """Return the task for samples as in `info`. Default: itself."""
        return self

    def redrawn(self, x: torch.Tensor, y: torch.Tensor, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch as it is trained on, with as many terms of the loss. Default: as it is.

        Args:
            x: samples [b, ...].
            y: labels [b, ...].
            key: random key of the batch.
        """
        return x, y

    @abstractmethod
    def losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample [n].

        Args:
            output: output of the model, [n, ...]; its last axis has `num_classes` numbers.
            labels: [n] or [n, ...].
        """

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, a scalar. Default: the mean of `losses`."""
        return self.losses(output, labels).mean()

    def total_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the terms whose mean is `loss`, a scalar. Default: the sum of `losses`."""
        return self.losses(output, labels).sum()

    def count(self, labels: torch.Tensor) -> int:
        """Return the number of terms that `total_loss` sums up. Default: the samples."""
        return len(labels)

    def terms(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many terms each sample has [n]. Default: `count` of one sample after the other."""
        return torch.tensor([self.count(labels[i : i + 1]) for i in range(len(labels))], device=labels.device)

    @cached_property
    def by_samples(self) -> bool:
        """Whether `loss` is a mean over samples, each of them one term, as far as the task says."""
        return not self.has_total or type(self).count is Task.count

    @cached_property
    def has_total(self) -> bool:
        """Whether `loss` is `total_loss` / `count`: False for a class that overrides only `loss`."""
        return self._declares("total_loss", ("loss",))

    @cached_property
    def for_kernels(self) -> bool:
        """Whether the kernels can compute its loss: the cross-entropy of classes."""
        return self.cross_entropy and self._declares("cross_entropy", ("losses", "loss", "total_loss"))

    @cached_property
    def _sums_its_loss(self) -> bool:
        """Whether `figures` gives its loss: False for a class that overrides only `loss`."""
        return self._declares("sums", ("loss",)) or self._declares("figures", ("loss",))

    def _declares(self, name: str, others: Sequence[str]) -> bool:
        """Return whether no subclass of the class that defines `name` overrides one of the others."""
        first = {n: i for i, c in reversed([*enumerate(type(self).__mro__)]) for n in vars(c)}
        return all(first[name] <= first[other] for other in others)

    # -- evaluation

    @abstractmethod
    def sums(self, output: torch.Tensor, labels: torch.Tensor) -> Sums:
        """Return sums over the samples, from which `figures` computes all metrics; any names and shapes.

        They must be additive: adding those of two sets of samples gives those of both sets together. A sum
        `n`, if there is one, is the number of terms of the loss: without any, scores may be NaN.
        """

    @abstractmethod
    def figures(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the value of each metric of `metrics`, and `loss`, from sums."""

    def evaluate(self, output: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the scores of samples: metrics, `loss`, and the sums behind them, prefixed by SUMS.

        A class that overrides `loss`, but neither `sums` nor `figures`, has its own loss in place of theirs.
        """
        found = self.sums(output, labels)
        sums = _in_float64(found)
        scores = self.figures(sums)
        if not self._sums_its_loss:
            like = labels.to(output.dtype) if labels.is_floating_point() else labels  # `mix` gives float64
            scores = {**scores, "loss": float(self.loss(output, like))}
        return {**scores, **{SUMS + name: value for name, value in sums.items()}}

    def mix(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return the output of a mixture of models: their weighted predictions, float64 [n, ...]. FedEM.

        Args:
            outputs: outputs of the K models, each [n, ...].
            weights: [K], summing to one.
        """
        stacked = torch.stack(list(outputs)).double()
        return torch.einsum("k,k...->...", weights.double().to(stacked.device), stacked)

    def evaluate_mixed(self, mixed: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the scores of samples from the output of `mix`. Default: as `evaluate`."""
        return self.evaluate(self._readable(mixed), labels)

    def _readable(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the output of `mix`, in float32 for a class of a user: its losses may hold such weights."""
        return mixed if is_ours(self) else mixed.float()

    # -- name and metrics

    @property
    def chosen(self) -> tuple[Metric, ...]:
        """The metrics in use; the first one is used in curves, tables and targets.

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
        """Raise `UserError` if the task does not take such labels. Default: those not in `labels`."""
        remedy = f"labels of this source are {info.labels}; use {SUITABLE[info.labels]}, or another source"
        require(info.labels in self.labels, "task.name", self.name, remedy)

    def check_results(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Raise `UserError` unless the task makes a loss and all scores of a model's output [n, ...]."""

        def good(fits: bool, hook: str, found: Any, remedy: str) -> None:
            require(fits, "task.name", self.name, f"{hook} gives {shape_or_type(found)}; {remedy}")

        losses: Any = self.losses(output, labels)
        fits = isinstance(losses, torch.Tensor) and losses.shape == labels.shape[:1]
        good(fits, "losses", losses, f"give one for each of {len(labels)} samples, [{len(labels)}]")
        if is_ours(self) or not len(labels):  # figures of nothing are never asked
            return
        with torch.enable_grad():
            loss: Any = self.loss(output.detach().requires_grad_(), labels)
        fits = isinstance(loss, torch.Tensor) and not loss.shape and loss.requires_grad
        remedy = "give a number with a gradient: a tensor [] that is computed from the output"
        good(fits, "loss", loss, remedy)
        sums: Any = self.sums(output, labels)
        remedy = "give a mapping from names to sums, which are numbers or arrays of numbers"
        good(isinstance(sums, Mapping) and all(map(_numbers, sums.values())), "sums", sums, remedy)
        figures: Any = self.figures(_in_float64(sums))
        wanted = [*(metric.name for metric in self.scored), "loss"]
        fits = isinstance(figures, Mapping) and all(_numbers(figures.get(name, "")) for name in wanted)
        good(fits, "figures", figures, f"give a mapping with numbers {', '.join(wanted)}")

    @property
    def name(self) -> str:
        """Its name in section `task` of a configuration."""
        called: str = vars(type(self)).get("called", "")  # a class derived from it has another name
        return called or name_of(self)

    def check_metrics(self) -> None:
        """Raise `UserError` unless `known` names metrics, and `metrics` some of them, each of them once."""
        described: Any = self.known
        good = isinstance(described, Mapping) and bool(described) and "loss" not in described
        good = good and all(isinstance(m, Metric) and m.name == name for name, m in described.items())
        remedy = "its `known` maps the name of each metric, not `loss`, to a Metric of that name"
        require(good, "name", self.name, remedy)
        names = getattr(self, "metrics", ())
        known = ", ".join(self.known)
        require(set(names) <= set(self.known), "metrics", list(names), f"use some of {known}")
        require(len(set(names)) == len(names), "metrics", list(names), "name each of them once")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_metrics()
        known = self._declares("loss", ("total_loss",)) or self._declares("losses", ("total_loss",))
        remedy = "a total_loss of its own would differ from the loss that is trained; define losses, or loss"
        require(known, "name", self.name, remedy)


def _in_float64(sums: Sums) -> dict[str, np.ndarray]:
    """Return sums as float64 arrays."""
    return {name: np.asarray(_on_cpu(value), np.float64) for name, value in sums.items()}


def _on_cpu(value: Any) -> Any:
    """Return a tensor in main memory and without its gradient; any other value as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _numbers(value: Any) -> bool:
    """Return whether a value is a number or an array of numbers."""
    return np.asarray(_on_cpu(value)).dtype.kind in "biuf"


SUITABLE = {
    "classes": "classification",
    "multi_hot": "multi_label",
    "numbers": "regression",
    "tokens": "next_token",
    "masked_tokens": "masked_token",
    "tags": "token_classification",
    "masks": "segmentation",
}  # kind of labels -> the task that is made for them
