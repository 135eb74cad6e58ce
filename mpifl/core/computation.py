"""What clients and the server compute, counted: passes of networks over batches, their samples and FLOPs.

Counts follow from what is asked for: a training of so many samples in batches of such a size, the loss of a
model on so many samples. They do not depend on which backend computes it. A rank counts inside
`ComputationCounter.counting` only; `traffic/computation.py` adds up what all ranks counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Purpose = Literal["training", "choice", "statistics", "evaluation", "server"]
Call = Literal["sgd", "gradient", "loss", "losses", "logits", "embed", "evaluate"]  # of `Client`
PURPOSES: tuple[Purpose, ...] = ("training", "choice", "statistics", "evaluation", "server")
SERVER = -1  # number of the server among the clients

OF_CALL: Mapping[Call, Purpose] = {
    **dict.fromkeys(("sgd", "gradient"), "training"),
    **dict.fromkeys(("loss", "losses", "logits"), "choice"),
    "embed": "statistics",
    "evaluate": "evaluation",
}
"""Purpose of a call in `local_update`; other hooks have one purpose for all calls."""


class Work(NamedTuple):
    """Computation, in integers.

    Attributes:
        forward_passes: batches that pass forward only.
        forward_samples: samples in these batches.
        backward_passes: batches that pass forward and backward.
        backward_samples: samples in these batches.
        flops: floating-point operations of the networks' layers in all passes, as PyTorch counts them: two
            for a multiplication and an addition.
    """

    forward_passes: int = 0
    forward_samples: int = 0
    backward_passes: int = 0
    backward_samples: int = 0
    flops: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum of two."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Work:
        """Return this computation, `count` times."""
        return Work(*(count * n for n in self))


class Held(NamedTuple):
    """How many samples of each split a client holds at a visit."""

    train: int
    val: int
    test: int


@dataclass(frozen=True)
class Asked:
    """What a method asks a client for, known before a visit (`Algorithm.visit_passes`).

    Attributes:
        call: the method of `Client` that is called.
        samples: the samples of a call.
        times: number of such calls.
        changes: fields of `LocalConfig` that differ in a training.
        part: name of the part of the model that is trained (`Layout.part`).
        auxiliary: whether it is asked of the auxiliary network.
        at_most: whether some visits ask for less.
    """

    call: Call
    samples: int
    times: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    part: str = "all"
    auxiliary: bool = False
    at_most: bool = False


FIGURES = Work._fields
NOTHING = Work()
COLUMNS = ("client", "purpose", *FIGURES)  # of `Computation.table`; the purpose by its place in `PURPOSES`


class Computation:
    """Computation by client and purpose."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, Purpose], list[int]] = {}
        self._tables: list[np.ndarray] = []

    def add(self, client: int, purpose: Purpose, work: Work) -> None:
        """Add the work of a client, or of the server."""
        found = self._counts.get((client, purpose))
        if found is None:
            self._counts[client, purpose] = [*work]
            return
        for i, n in enumerate(work):
            found[i] += n

    def add_clients(self, clients: np.ndarray, purpose: Purpose, work: np.ndarray) -> None:
        """Add the work of several clients: int64 [m], and their figures int64 [m, 5]."""
        heads = np.stack([clients, np.full(len(clients), PURPOSES.index(purpose))], 1)
        self._tables.append(np.concatenate([heads, work], 1))

    def add_all(self, other: Computation, client: int | None = None) -> None:
        """Add what another one has counted; of one client only, if given."""
        for (k, purpose), work in other._counts.items():
            if client in (None, k):
                self.add(k, purpose, Work(*work))
        self._tables += [t if client is None else t[t[:, 0] == client] for t in other._tables]

    @staticmethod
    def of(table: np.ndarray) -> Computation:
        """Return the computation of a table, see `table`."""
        found = Computation()
        for client, purpose, *work in table.tolist():
            found.add(client, PURPOSES[purpose], Work(*work))
        return found

    @property
    def table(self) -> np.ndarray:
        """The counts, int64 [rows, 7] with the columns `COLUMNS`; a client may have several rows."""
        ordered = sorted((k, PURPOSES.index(p), *work) for (k, p), work in self._counts.items())
        single = np.array(ordered, np.int64).reshape(-1, len(COLUMNS))
        return np.concatenate([single, *self._tables]) if self._tables else single


class ComputationCounter:
    """Counts what the clients of a rank compute, and its server, while a block asks for it."""

    def __init__(self) -> None:
        self._open: list[tuple[Computation, Purpose | None]] = []

    @property
    def is_open(self) -> bool:
        """Whether anything is counted now."""
        return bool(self._open)

    @contextmanager
    def counting(
        self, purpose: Purpose | None = None, into: Computation | None = None
    ) -> Iterator[Computation]:
        """Count what is computed in a block, and in no block inside of it.

        Args:
            purpose: purpose of all calls; None: that of each call (`OF_CALL`).
            into: where to add the counts; None: a new one.
        """
        found = Computation() if into is None else into
        self._open.append((found, purpose))
        try:
            yield found
        finally:
            self._open.pop()

    @contextmanager
    def during(self, purpose: Purpose) -> Iterator[None]:
        """Give all calls in a block one purpose; counts go where they go outside of the block."""
        if not self._open:
            yield
            return
        with self.counting(purpose, self._open[-1][0]):
            yield

    def add(self, client: int, purpose: Purpose, work: Work) -> None:
        """Count work of a client whose call would have this purpose in a visit."""
        found, fixed = self._open[-1]
        found.add(client, SERVER_PURPOSE if client == SERVER else fixed or purpose, work)

    def apart(self) -> AbstractContextManager[Computation]:
        """Count what is computed in a block apart, with the purpose that it has outside of the block."""
        return self.counting(self._open[-1][1] if self._open else None)

    def add_all(self, found: Computation, client: int | None = None) -> None:
        """Count what was counted apart, of one client only if given, if anything is counted now."""
        if self._open:
            self._open[-1][0].add_all(found, client)

    def add_clients(self, clients: np.ndarray, purpose: Purpose, work: np.ndarray) -> None:
        """Count the work of several clients; see `Computation.add_clients`."""
        if self._open:
            found, fixed = self._open[-1]
            found.add_clients(clients, fixed or purpose, work)


SERVER_PURPOSE: Purpose = "server"
