"""Helpers for steps worked out by hand: a client with a quadratic loss, small notes and servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpifl.core.client import Client, Trained
from mpifl.core.federation import ClientData, Split
from mpifl.core.parameters import Layout, Part, put, take
from mpifl.core.rng import Key, key
from mpifl.core.types import Message, Notes, ProblemInfo, Server
from mpifl.training.tasks import Classification

KEY = key(0)
# a body of one number, a head of two
FLAT = Layout(("body.w", "head.weight"), ((1,), (2, 1)), 3, ("head",), num_outputs=2)


@dataclass(frozen=True)
class Call:
    """How a client was asked to train: from where, under which key, which part, with which changes."""

    start: torch.Tensor
    key: Key
    part: Part | None
    changes: dict[str, Any]


class Quadratic(Client):
    """A client with F(w) = 1/2 ||w - target||^2, whose gradient is w - target on every mini-batch.

    Validation and test data have their own targets, so that a method which reads the wrong split gives wrong
    results. An image is one number that says which split it belongs to: 0, 1 or 2.

    Args:
        target: target of the training data (10 samples), [d].
        lr: learning rate of plain SGD.
        steps: mini-batches of an epoch, and of a visit.
        init: the common initial vector; zeros by default.
        val: target of the validation data (8 samples); by default 100 in each coordinate.
        test: target of the test data (6 samples); by default -100 in each coordinate.
        momentum: momentum of SGD.

    Attributes:
        calls: the calls of `sgd`.
    """

    def __init__(
        self,
        target: list[float],
        lr: float = 0.5,
        steps: int = 1,
        init: list[float] | None = None,
        val: list[float] | None = None,
        test: list[float] | None = None,
        momentum: float = 0.0,
    ) -> None:
        self.id, self.visit, self.num_samples, self.calls = 0, 0, 10, []
        self.momentum = momentum
        self.task = Classification()
        self.target, self.lr, self.steps = torch.tensor(target), lr, steps
        others = val or [100.0] * len(target), test or [-100.0] * len(target)
        self.targets = self.target, *(torch.tensor(t) for t in others)
        self.layout = Layout(("w",), ((len(target),),), len(target))
        self.init = torch.tensor(init) if init is not None else torch.zeros(len(target))

    @property
    def data(self) -> ClientData:
        """Samples that say which split they belong to."""
        return ClientData(*(images(kind, n) for kind, n in enumerate((10, 8, 6))))

    def _target(self, split: Split | None) -> torch.Tensor:
        return self.targets[0 if split is None else int(split.x.reshape(-1)[0])]

    def sgd(self, start, key, *, direction=None, loss=None, part=None, split=None, **changes: Any) -> Trained:
        """Take `steps` steps an epoch, or one on a given split; only `part` moves."""
        self.calls.append(Call(start.clone(), key, part, changes))
        w, lr, target = start.clone(), changes.get("lr", self.lr), self._target(split)
        buffer = torch.zeros_like(w)
        steps = changes.get("steps", changes.get("epochs", 1) * (self.steps if split is None else 1))
        for _ in range(steps):
            g = w - target
            g = direction(g, w) if direction else g
            buffer = self.momentum * buffer + g + changes.get("weight_decay", 0.0) * w
            new = w - lr * buffer
            w = new if part is None else put(w, part, take(new, part))
        return Trained(w, steps, 0.0, lr, self.momentum)

    def batches(self, key, **changes: Any) -> Iterator[Split]:
        """Yield `steps` batches an epoch, or as many as a call asks for; none if `steps` is 0."""
        epoch = self.steps * changes.get("epochs", 1)
        for _ in range(changes.get("steps", epoch) if self.steps else 0):
            yield images(0, 2)

    def gradient(self, vector, split=None):
        """Return w - target."""
        return vector - self._target(split)

    def loss(self, vector, split=None) -> float:
        """Return F(w)."""
        return float((vector - self._target(split)).square().sum() / 2)

    def losses(self, vector, split=None):
        """Return F(w), the same for each sample."""
        return torch.full((10 if split is None else len(split),), self.loss(vector, split))

    def evaluate(self, vector, split=None) -> dict[str, float]:
        """Return F(w), on the test data unless said otherwise, and 1 / (1 + F(w)) as accuracy."""
        loss = self.loss(vector, self.data.test if split is None else split)
        return {"accuracy": 1 / (1 + loss), "loss": loss}


Quadratic.__abstractmethods__ = frozenset()  # methods about images and classes are left out


class Told(Quadratic):
    """A client with given losses and probabilities; a model's first number is its index among the K models.

    Args:
        losses: loss of each model on each training sample, [K, n].
        chances: probability of each label, [K, n, L], for any images.
        val: loss of each model on each validation sample, [K, n].
    """

    def __init__(
        self,
        losses: list[list[float]],
        chances: list[list[list[float]]] | None = None,
        val: list[list[float]] | None = None,
    ) -> None:
        super().__init__([0.0])
        self.given = torch.tensor(losses), torch.tensor(val or [])
        self.chances = torch.tensor(chances or [])

    def losses(self, vector, split=None):
        """Return the given losses of a model."""
        kind = 0 if split is None else int(split.x.reshape(-1)[0])
        return self.given[kind][int(vector[0])]

    def logits(self, vector, x):
        """Return the given probabilities of a model, as logits."""
        return self.chances[int(vector[0])].log()


def images(kind: int, n: int, labels: list[int] | None = None) -> Split:
    """Return `n` images of one number, `kind`, labelled 0 unless said otherwise."""
    return Split(torch.full((n, 1), float(kind)), torch.tensor(labels or [0] * n))


def message(step: int = 1, **tables: list[list[float]]) -> Message:
    """Return a message with the given rows."""
    vectors = {name: torch.tensor(rows) for name, rows in tables.items()}
    return Message(vectors, {name: tuple(range(len(rows))) for name, rows in tables.items()}, step - 1, step)


def notes(n: list[int], client: list[int] | None = None, **columns: Any) -> Notes:
    """Return the notes of reports with `n` samples, of clients 0, 1, ... unless said otherwise."""
    who = np.arange(len(n)) if client is None else np.array(client)
    blank = np.zeros(len(n), np.int64)
    return Notes(who, np.array(n), blank, np.ones(len(n), bool), {k: np.array(v) for k, v in columns.items()})


def server(
    num_clients: int, algorithm_state: dict[str, Any] | None = None, version: int = 0, **tables: Any
) -> Server:
    """Return a server with the given rows."""
    arrays = {name: np.array(value) for name, value in (algorithm_state or {}).items()}
    rows = {name: torch.tensor(value) for name, value in tables.items()}
    return Server(rows, np.zeros(num_clients, np.int64), arrays, version)


def problem(n: list[int], layout: Layout = FLAT) -> ProblemInfo:
    """Return clients with `n` samples whose j-th initial vector is (j, j, ...)."""
    return ProblemInfo(len(n), 2, np.array(n), layout, lambda j: torch.full((layout.size,), float(j)))


def gram(points: list[list[float]]) -> np.ndarray:
    """Return the products [n, n] of `points`."""
    x = np.array(points)
    return x @ x.T
