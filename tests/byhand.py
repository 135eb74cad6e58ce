"""What steps worked by hand need: a client with a quadratic loss, notes and servers of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mpifl.core.client import Client, Trained
from mpifl.core.federation import ClientData, Split
from mpifl.core.params import Layout
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, Server

KEY = key(0)


class Quadratic(Client):
    """A client with F(w) = 1/2 ||w - target||^2, whose gradient is w - target on every mini-batch.

    Args:
        target: [d]. lr: rate of plain SGD. steps: mini-batches of one visit.
    """

    def __init__(
        self, target: list[float], lr: float = 0.5, steps: int = 1, init: list[float] | None = None
    ) -> None:
        self.id, self.visit, self.num_samples = 0, 0, 10
        self.target, self.lr, self.steps = torch.tensor(target), lr, steps
        self.layout = Layout(("w",), ((len(target),),), len(target))
        self.init = torch.tensor(init) if init is not None else torch.zeros(len(target))

    @property
    def data(self) -> ClientData:
        """Samples without content."""
        split = Split(torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64))
        return ClientData(split, split, split)

    def sgd(self, start, key, *, direction=None, loss=None, part=None, split=None, **changes: Any) -> Trained:
        """Take `steps` steps, or one for each epoch on a given split."""
        w, lr = start.clone(), changes.get("lr", self.lr)
        steps = changes.get("steps", self.steps if split is None else changes.get("epochs"))
        for _ in range(steps):
            g = w - self.target
            g = direction(g, w) if direction else g
            w = w - lr * (g + changes.get("weight_decay", 0.0) * w)
        return Trained(w, steps, 0.0, lr)

    def batches(self, key, **changes: Any) -> Iterator[Split]:
        """Yield `steps` batches an epoch."""
        for _ in range(self.steps * changes.get("epochs", 1)):
            yield Split(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))

    def gradient(self, vector, split=None):
        """Return w - target."""
        return vector - self.target

    def loss(self, vector, split=None) -> float:
        """Return F(w)."""
        return float((vector - self.target).square().sum() / 2)

    def losses(self, vector, split=None):
        """Return F(w), the same for each sample."""
        return torch.full((10,), self.loss(vector))

    def judge(self, vector, split=None) -> dict[str, float]:
        """Return F(w)."""
        return {"accuracy": 0.0, "loss": self.loss(vector)}


Quadratic.__abstractmethods__ = frozenset()  # what a quadratic has no use for is left out: images, classes


class Told(Quadratic):
    """A client whose losses and chances are told: a model's first number says which."""

    def __init__(self, losses: list[list[float]], chances: list[list[list[float]]] | None = None) -> None:
        super().__init__([0.0])
        self.told, self.chances = torch.tensor(losses), torch.tensor(chances or [])

    def losses(self, vector, split=None):
        """Return the told losses of a model."""
        return self.told[int(vector[0])]

    def logits(self, vector, x):
        """Return the told chances of a model, as logits."""
        return self.chances[int(vector[0])].log()


def message(step: int = 1, **tables: list[list[float]]) -> Message:
    """Return a message with the given rows."""
    vectors = {name: torch.tensor(rows) for name, rows in tables.items()}
    return Message(vectors, {name: tuple(range(len(rows))) for name, rows in tables.items()}, step - 1, step)


def notes(n: list[int], client: list[int] | None = None, **columns: Any) -> Notes:
    """Return the notes of reports with `n` samples, of clients 0, 1, ... unless said otherwise."""
    who = np.arange(len(n)) if client is None else np.array(client)
    blank = np.zeros(len(n), np.int64)
    return Notes(who, np.array(n), blank, np.ones(len(n), bool), {k: np.array(v) for k, v in columns.items()})


def server(num_clients: int, memo: dict[str, Any] | None = None, version: int = 0, **tables: Any) -> Server:
    """Return a server with the given rows."""
    arrays = {name: np.array(value) for name, value in (memo or {}).items()}
    rows = {name: torch.tensor(value) for name, value in tables.items()}
    return Server(rows, np.zeros(num_clients, np.int64), arrays, version)
