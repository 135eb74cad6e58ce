"""The interface of a client during a visit: train, evaluate, embed. Implemented in `training/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from .computation import ComputationCounter
from .federation import ClientData, Split
from .parameters import Layout, Part
from .rng import Key
from .task import Task
from .types import Report, State, Vector

# (gradient [p], weights [p]) -> gradient [p]
Direction: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
# (module, images [b, C, H, W], labels [b], their indices in the training data [b]) -> scalar
Loss: TypeAlias = "Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"

T = TypeVar("T")


@dataclass(frozen=True)
class WeightedLoss:
    """The mean loss of a batch in which each training sample has a weight; a `Loss`. FedEM and FedRC.

    Attributes:
        weights: one for each of the client's training samples, float32 [n].
        task: the task whose loss is weighted.
    """

    weights: torch.Tensor
    task: Task

    def __call__(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean of weight times loss over the samples `index`."""
        return (self.weights[index] * self.task.losses(module(x), y)).mean()


@dataclass(frozen=True)
class Trained:
    """The outcome of local training.

    Attributes:
        vector: [d] trained model.
        steps: optimiser steps taken.
        loss: mean training loss of the samples of these steps (of their tokens in texts); NaN without a step.
        lr: learning rate of these steps; NaN where a trainer does not tell it.
        momentum: momentum of these steps; 0 for Adam.
        samples: samples in these steps, as a trainer counted them; None: those of the batches.
        metrics: further numbers of a trainer (`Fit.metrics`).
    """

    vector: Vector
    steps: int
    loss: float
    lr: float
    momentum: float = 0.0
    samples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Client(ABC):
    """One client at one visit.

    Attributes:
        id: 0..N-1.
        visit: number of its visits before this one.
        num_samples: training samples at this visit.
        layout: layout of the model's flat vector.
        init: the common initial vector [d], which server and clients derive from the seed.
        task: the task of its model; defines loss and metrics.
        told: metrics that its trainer tells, which are part of every report.
    """

    told: Mapping[str, float] = MappingProxyType({})
    task: Task
    id: int
    visit: int
    num_samples: int
    layout: Layout
    init: Vector

    @property
    @abstractmethod
    def data(self) -> ClientData:
        """The client's own data at this visit."""

    def pixels(self, split: str = "train") -> Split:
        """Return `train`, `val` or `test` at this visit with the images as they are stored, in main memory.

        Stored images are uint8 [n, C, H, W], neither resized nor normalised. Default: those of `data`, for
        clients whose data are stored as tensors.
        """
        found: Split = getattr(self.data, split)
        return found

    @property
    def augments(self) -> bool:
        """Whether training changes the images of each batch (`local.augment`). Default: False."""
        return False

    @property
    @abstractmethod
    def auxiliary(self) -> Client:
        """The same client with the auxiliary network in place of the model (`Algorithm.auxiliary`)."""

    def load_optimizer(self, memory: State) -> None:
        """Continue this visit's trainings with the optimisers of the last visit (`local.keep_optimizer`).

        Args:
            memory: result of `optimizer_memory` after the last visit; empty before the first one.
        """
        raise NotImplementedError

    def optimizer_memory(self) -> State:
        """Return the states of the optimisers of this visit's trainings, in order."""
        raise NotImplementedError

    @abstractmethod
    def sgd(
        self,
        start: Vector,
        key: Key,
        *,
        direction: Direction | None = None,
        loss: Loss | None = None,
        part: Part | None = None,
        split: Split | None = None,
        **changes: Any,
    ) -> Trained:
        """Train from `start` [d] on the client's training data and return the outcome.

        Args:
            start: initial vector [d].
            key: random key that determines the order of the batches.
            direction: changes the gradient before each step (FedProx: `lambda g, w: g + mu * (w - x)`);
                neither it nor `loss` may train this client; both may evaluate it under other vectors.
            loss: replaces the loss of the task.
            part: the only part of the vector that is trained; consists of whole tensors.
            split: replaces the training data.
            changes: fields of `LocalConfig` that differ for this call (`epochs=5`, `lr=0.1`); `epochs` also
                replaces `local.steps`.
        """

    @abstractmethod
    def batches(self, key: Key, **changes: Any) -> Iterator[Split]:
        """Yield the training data of a visit batch by batch, as `sgd` takes them under the same key.

        For methods whose step needs more than one gradient: each step is then an `sgd` on one batch.
        """

    @abstractmethod
    def loss(self, vector: Vector, split: Split | None = None) -> float:
        """Return the mean loss of `vector` on `split` (default: the training data)."""

    @abstractmethod
    def losses(self, vector: Vector, split: Split | None = None) -> torch.Tensor:
        """Return the loss of each sample [n] of `split` (default: the training data)."""

    @abstractmethod
    def gradient(self, vector: Vector, split: Split | None = None) -> Vector:
        """Return the gradient [p] of the mean loss at `vector`, in evaluation mode."""

    @abstractmethod
    def logits(self, vector: Vector, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, ...] of samples `x` [n, ...] under `vector`: logits [n, L] of classes."""

    @abstractmethod
    def embed(self, vector: Vector, x: torch.Tensor, *, train_mode: bool = False) -> torch.Tensor:
        """Return the embeddings [n, e] of samples `x` [n, ...] under the extractor of `vector`."""

    @abstractmethod
    def evaluate(self, vector: Vector, split: Split | None = None) -> dict[str, float]:
        """Return metrics and `loss` of `vector` on `split` (default: the test data); `accuracy` for classes.

        Entries whose names begin with `sums.` are the sums behind metrics that are not means over samples.
        """

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return the metrics of `evaluation.metrics`, which `evaluate` adds to those of the task.

        For methods that evaluate something other than one vector. Default: none.

        Args:
            logits: outputs of a model [n, ...].
            labels: [n] or [n, ...].
        """
        return {}

    def report(
        self,
        notes: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        unsent: tuple[str, ...] = (),
        based_on: Mapping[str, Vector | None] | None = None,
        **vectors: Vector,
    ) -> Report:
        """Return a report of this visit with the named vectors; see `Report`."""
        metrics = {**self.told, **(metrics or {})} if self.told else metrics or {}
        return Report(self.id, self.num_samples, vectors, notes or {}, metrics, unsent, based_on or {})


@dataclass(frozen=True)
class TrainedVisits:
    """The outcome of several visits that only train.

    Attributes:
        num_samples: training samples, int64 [m].
        loss: mean training loss of the samples of the steps, float64 [m]; NaN without a step.
        max_abs: largest absolute value of each vector that was written, float64 [m].
    """

    num_samples: np.ndarray
    loss: np.ndarray
    max_abs: np.ndarray


class ClientHost(ABC):
    """Creates the clients of this rank. Implemented in `training/`.

    Attributes:
        device: device on which clients train.
        layout: layout of the model's flat vector.
        keeps_optimizer: whether clients keep their optimisers between visits.
        metric_names: names of the metrics of `evaluation.metrics`.
        metric_directions: for each, 1 where higher is better, -1 where lower is, 0 where it is unknown.
        task: the task that models are trained for.
        computation: counts what its clients compute.
    """

    computation: ComputationCounter
    keeps_optimizer: bool = False
    metric_names: tuple[str, ...] = ()
    metric_directions: tuple[int, ...] = ()
    task: Task
    device: torch.device
    layout: Layout

    @abstractmethod
    def num_steps(self, k: int, visit: int) -> tuple[int, int]:
        """Return the numbers of mini-batches in a client's visit and in one pass over its training data."""

    @abstractmethod
    def client(
        self, k: int, visit: int = 0, step: int = 1, work: Fraction | None = None, **changes: Any
    ) -> Client:
        """Return a client at a visit.

        Args:
            k: its number.
            visit: number of its visits before this one.
            step: the server step, from 1.
            work: fraction of the mini-batches after which each of its trainings ends; None: all of them.
            changes: fields of `LocalConfig` that differ for this client.
        """

    def host(self, clients: np.ndarray, ranks: int) -> None:
        """Keep the samples of the clients that this rank hosts, and those alone. Default: nothing changes.

        Args:
            clients: their numbers, int64 ascending; called again with more when another rank is lost.
            ranks: number of workers of this node, which share its devices.
        """
        return

    def state(self, client: int, visit: int, load: Callable[[], State]) -> State:
        """Return a client's state after `visit` visits on the device; `load` reads it from its file."""
        from .devices import state_on  # needs torch

        return state_on(load(), self.device)

    def keep_state(self, client: int, visit: int, state: State) -> None:
        """Keep a client's state after `visit` visits on the device if there is room. Default: do not."""
        return

    @abstractmethod
    def public_clients(self) -> Sequence[Client]:
        """Return the labelled sets that the server owns, each as a client."""

    def best_models(
        self, visits: tuple[np.ndarray, np.ndarray], models: Sequence[torch.Tensor], step: int
    ) -> np.ndarray | None:
        """Return the index of the model with the lowest `Client.loss` in each visit, int64 [m].

        None where the host cannot do this in one call.

        Args:
            visits: client and visit number of each, both int64 [m].
            models: the models to compare in each visit, [K, d].
            step: the server step.
        """
        return None

    def train_visits(
        self,
        visits: tuple[np.ndarray, np.ndarray],
        starts: Sequence[Vector],
        out: Sequence[Vector],
        key: Key,
        step: int,
        mu: float | None = None,
        change: bool = False,
    ) -> TrainedVisits | None:
        """Train clients at visits that only train, as `Client.sgd` does.

        Returns None where the host cannot do this in one call; the contents of `out` are then undefined.

        Args:
            visits: client and visit number of each, both int64 [m].
            starts: the vector [d] that each starts from.
            out: vectors [d] in main memory that receive the trained models, or their changes.
            key: parent of the keys of the visits, which are `key.of(client, visit)`.
            step: the server step, from 1.
            mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
            change: write w - start to `out` instead of w.
        """
        return None

    @abstractmethod
    def run_lockstep(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Run visits side by side and return their results; they train in one stack if that is possible."""


class ClientStates(Protocol):
    """What clients keep between visits, as tensors, under (kind, client, visit).

    Attributes:
        folder: node-local folder of its files.
    """

    folder: Path

    def name(self, kind: str, k: int, visit: int) -> str:
        """Return the file name of client `k` after `visit` visits."""

    def load(self, kind: str, k: int, visit: int) -> dict[str, torch.Tensor]:
        """Return the tensors that client `k` saved for `visit`; empty for visit 0, or if it saved none."""

    def save(self, kind: str, k: int, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save the tensors of client `k` for `visit`."""

    def keep(self, names: Sequence[str], folder: Path) -> dict[str, tuple[int, str]]:
        """Copy files to a folder that outlives this node; return file name -> (bytes, SHA-256)."""


def proximal(mu: float, anchor: Vector) -> Direction:
    """Return the direction of F(w) + mu/2 ||w - anchor||^2.

    Args:
        mu: weight of the term.
        anchor: [d] or [p]; its buffers are ignored.
    """

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return g + mu * (w - anchor[: len(w)])

    return direction
