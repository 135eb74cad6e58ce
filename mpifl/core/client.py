"""What a method may ask of a client while it visits: train, evaluate, embed. Implemented in `training/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from .federation import ClientData, Split
from .parameters import Layout, Part
from .rng import Key
from .task import Task
from .types import Report, State, Vector

Direction = Callable[
    [torch.Tensor, torch.Tensor], torch.Tensor
]  # (gradient [p], weights [p]) -> gradient [p]
Loss = (
    Callable[  # (module, images [b, C, H, W], labels [b], their numbers in the training data [b]) -> scalar
        [nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
    ]
)

T = TypeVar("T")


@dataclass(frozen=True)
class WeightedLoss:
    """The mean loss of a batch in which each training sample has a weight; a `Loss`. FedEM and FedRC.

    Attributes:
        weights: of the client's training samples, float32 [n].
        task: whose loss it is.
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
        loss: mean training loss over the steps.
        lr: learning rate of these steps.
        momentum: of these steps; 0 for Adam.
    """

    vector: Vector
    steps: int
    loss: float
    lr: float
    momentum: float = 0.0


class Client(ABC):
    """One client at one visit.

    Attributes:
        id: 0..N-1.
        visit: number of visits it made before this one.
        num_samples: training samples at this visit.
        layout: of the model's flat vector.
        init: the common initial vector [d], which all know from the seed.
        task: what its model is trained for: gives loss and metrics.
    """

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
    @abstractmethod
    def auxiliary(self) -> Client:
        """The same client with the network beside the model (`Algorithm.auxiliary`)."""

    def load_optimizer(self, memory: State) -> None:
        """Let the trainings of this visit go on with the optimisers of the last one (`local.keep_optimizer`).

        Args:
            memory: what `optimizer_memory` returned after it; empty before the first visit.
        """
        raise NotImplementedError

    def optimizer_memory(self) -> State:
        """Return what the optimisers of this visit's trainings remember, in order."""
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
            start: [d].
            key: addresses the order of the batches.
            direction: changes the gradient before each step (FedProx: `lambda g, w: g + mu * (w - x)`).
            loss: replaces the loss of the task.
            part: the only part of the vector that moves; whole tensors.
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
        """Return metrics and `loss` of `vector` on `split` (default: the test data): `accuracy` of classes.

        Names that begin with `sums.` are the sums behind metrics that are no means over samples.
        """

    def measure(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return the figures of `evaluation.metrics`, which `evaluate` adds to the task's.

        For methods that evaluate by something else than one vector. Default: none.

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
        return Report(self.id, self.num_samples, vectors, notes or {}, metrics or {}, unsent, based_on or {})


@dataclass(frozen=True)
class TrainedVisits:
    """The outcome of several visits that only train.

    Attributes:
        num_samples: training samples, int64 [m].
        loss: mean training loss over the steps, float64 [m].
        max_abs: largest absolute value of each vector that was written, float64 [m].
    """

    num_samples: np.ndarray
    loss: np.ndarray
    max_abs: np.ndarray


class ClientHost(ABC):
    """Makes the clients of this rank. Implemented in `training/`.

    Attributes:
        device: where clients train.
        layout: of the model's flat vector.
        keeps_optimizer: whether clients keep their optimisers between visits.
        metric_names: of the figures of `evaluation.metrics`.
        metric_directions: of each, 1 where higher is better, -1 where lower is, 0 where neither is said.
        task: what models are trained for.
    """

    keeps_optimizer: bool = False
    metric_names: tuple[str, ...] = ()
    metric_directions: tuple[int, ...] = ()
    task: Task
    device: torch.device
    layout: Layout

    @abstractmethod
    def num_steps(self, k: int, visit: int) -> tuple[int, int]:
        """Return the mini-batches of a client's visit, and those of one pass over its training data."""

    @abstractmethod
    def client(
        self, k: int, visit: int = 0, step: int = 1, work: Fraction | None = None, **changes: Any
    ) -> Client:
        """Return a client at a visit.

        Args:
            k: its number.
            visit: number of its visits before this one.
            step: the server step, from 1.
            work: share of its mini-batches after which each of its trainings ends; None takes them all.
            changes: fields of `LocalConfig` that differ for this client.
        """

    @abstractmethod
    def public_clients(self) -> Sequence[Client]:
        """Return the labelled sets that the server owns, each as a client."""

    def best_models(
        self, visits: tuple[np.ndarray, np.ndarray], models: Sequence[torch.Tensor]
    ) -> np.ndarray | None:
        """Return the model of lowest `Client.loss` of each visit, int64 [m]; None where that cannot be.

        Args:
            visits: client and visit of each, int64 [m] both.
            models: those of each visit [K, d].
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
        """Train clients at visits that do nothing else, as `Client.sgd` does; None where that cannot be.

        What is in `out` counts only where an outcome is returned.

        Args:
            visits: client and visit of each, int64 [m] both.
            starts: the vector [d] that each starts from.
            out: vectors [d] in main memory for what is trained, or for its change.
            key: above those of the visits, which are `key.of(client, visit)`.
            step: the server step, from 1.
            mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
            change: write w - start to `out`.
        """
        return None

    @abstractmethod
    def run_lockstep(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return what several visits make; they train side by side, in one stack where that is possible."""


class Peer(ABC):
    """Another client, reached through the server during a probe. What is exchanged is counted by itself.

    Attributes:
        id: its number.
        wanted: False where `SecondLook.pairs` leaves this pair out: nothing is exchanged.
    """

    id: int
    wanted: bool = True

    @abstractmethod
    def send(self, payload: torch.Tensor) -> None:
        """Send `payload` to the server for the comparison with this peer."""

    @abstractmethod
    def ask(
        self, payload: torch.Tensor, answer: Callable[[Client, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Send `payload` to this peer and return its answer.

        Args:
            payload: any shape.
            answer: what the peer computes from its client and the payload.
        """
