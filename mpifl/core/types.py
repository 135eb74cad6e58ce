"""Messages, reports, notes and the server: what the hooks of a method take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from .errors import Missing
from .parameters import Layout

Vector: TypeAlias = "torch.Tensor"  # float32 [d] or [C, d]
State: TypeAlias = "Mapping[str, torch.Tensor]"  # what a client keeps between visits; empty before the first
Reads = Mapping[
    str, "tuple[int, ...] | np.ndarray"
]  # table -> rows to download, or weights [K] of one mixture


class CohortReads(Mapping[int, Reads]):
    """The downloads of several clients: a mapping from clients to reads, in which equal reads are one object.

    Args:
        clients: int64 [m], each once.
        distinct: the different reads, in the order of the first client of each.
        which: index in `distinct` of each client's reads, int64 [m].
    """

    def __init__(self, clients: np.ndarray, distinct: Sequence[Reads], which: np.ndarray) -> None:
        self.clients, self.distinct, self.which = clients, distinct, which

    @staticmethod
    def of(pairs: Iterable[tuple[int, Reads]]) -> CohortReads:
        """Return the reads of clients; mixtures are not compared and count as different."""
        clients, which, distinct, known = list[int](), list[int](), list[Reads](), dict[Any, int]()
        for client, reads in pairs:
            try:
                number = known.setdefault(tuple(reads.items()), len(distinct))
            except (AttributeError, TypeError):  # an array or a list of rows; or no mapping, which is refused
                number = len(distinct)
            if number == len(distinct):
                distinct.append(reads)
            clients.append(client)
            which.append(number)
        return CohortReads(np.array(clients, np.int64), distinct, np.array(which, np.int64))

    @property
    def first(self) -> list[int]:
        """The first client of each of the distinct reads."""
        if len(self.distinct) == 1:
            return [int(k) for k in self.clients[:1]]
        new = np.flatnonzero(np.diff(np.maximum.accumulate(self.which), prepend=-1))
        return [int(k) for k in self.clients[new]]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return dict(zip(self.clients.tolist(), self.which.tolist(), strict=True))

    def __getitem__(self, client: int) -> Reads:
        return self.distinct[self._numbers[client]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __len__(self) -> int:
        return len(self.clients)


ASKED_FOR = {  # notes that the engine adds -> how to ask for them
    "gram": "inherit from ComparedUploads and name an upload in gram (before training: statistics_gram)",
    "row_distance": "inherit from ComparedUploads and name an upload and its table in row_distance",
}


def shape_or_type(value: Any) -> list[int] | str:
    """Return the shape of a tensor; of anything else, the name of its type."""
    return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


@dataclass(frozen=True)
class Message:
    """What a client downloads.

    Attributes:
        vectors: table -> the rows it reads [r, width].
        rows: table -> their numbers, in the same order.
        version: server version at which they were read.
        step: number of the server step this visit belongs to, from 1.
    """

    vectors: Mapping[str, torch.Tensor]
    rows: Mapping[str, tuple[int, ...] | np.ndarray]
    version: int = 0
    step: int = 1

    def __getitem__(self, table: str) -> torch.Tensor:
        if table not in self.vectors:
            there = ", ".join(self.vectors) or "nothing"
            raise Missing(f"no table {table!r} was downloaded", f"reads() names {there}; name it there")
        return self.vectors[table]


@dataclass(frozen=True)
class Report:
    """The result of a client's visit.

    Attributes:
        client: number of the client.
        num_samples: training samples at this visit.
        vectors: large results by name, [d] or [C, d]; they stay where they were made until a mixing moves
            them.
        notes: small numbers or arrays the server needs; part of the federation's traffic.
        metrics: numbers for the observer only; no federation would send them.
        unsent: names of vectors and notes that no federation would send, because the server can compute them
            from what it has or because only the observer needs them; they are not counted as traffic.
        based_on: for uploads that are not models of the table of their name: the vector, [d] or [C, d], to
            which an upload is relative when it is compressed, attacked or clipped; None: the upload is a
            change already. Under privacy it is a row that was downloaded, or None.
    """

    client: int
    num_samples: int
    vectors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    unsent: tuple[str, ...] = ()
    based_on: Mapping[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """The light columns of m reports, ordered by (client, visit): the same for any number of ranks.

    Attributes:
        client: int64 [m].
        num_samples: int64 [m].
        staleness: int64 [m], server steps since the rows were read.
        fresh: bool [m], False for the remembered upload of a client outside the cohort (`RememberedUploads`).
        columns: notes of the reports, stacked over reports, and the results of `ComparedUploads`: `gram`
            [m, m], `row_distance` [m, K].
        arrival: indices of the reports in the order in which they arrived, int64 [m]; in rounds, where all
            arrive at once, the order is drawn at random. None: the order of the columns.
    """

    client: np.ndarray
    num_samples: np.ndarray
    staleness: np.ndarray
    fresh: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    arrival: np.ndarray | None = None

    @staticmethod
    def of_nobody() -> Notes:
        """Return the notes of a step without reports."""
        none = np.zeros(0, np.int64)
        return Notes(none, none, none, np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            there = ", ".join(self.columns) or "no notes"
            noted = f"clients send {there}; note it: client.report({{{name!r}: ...}})"
            raise Missing(f"no note {name!r}", ASKED_FOR.get(name, noted))
        return self.columns[name]

    def having(self, **columns: np.ndarray) -> Notes:
        """Return these notes with more columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Server:
    """Everything the server remembers.

    Attributes:
        tables: name -> rows [K, width] float32; `model` is the one that clients are evaluated by unless
            a method says otherwise.
        assign: int64 [N], the row each client uses.
        algorithm_state: small arrays of the method.
        version: number of server steps taken.
    """

    tables: Mapping[str, torch.Tensor]
    assign: np.ndarray
    algorithm_state: Mapping[str, np.ndarray] = field(default_factory=dict)
    version: int = 0


@dataclass(frozen=True)
class ProblemInfo:
    """What a method may know when it sets up the server.

    Attributes:
        num_clients: N.
        num_classes: L, the width of the model's output.
        num_samples: int64 [N], training samples of each client, at its first visit where they change.
        groups: int64 [N], the hidden true groups; only given to methods that declare `Needs.groups`.
        regrouped: server step -> the true groups [N] from that step on, where they change (section `drift`);
            also only given to those methods. Steps that depend on the clock are told by
            `Algorithm.with_groups`.
        layout: layout of the model's flat vector.
        public: the labelled sets the server owns, each as a client (`public[g].sgd`, `public[g].loss`).
        init: j -> the j-th independent initial vector [d]; `init(0)` is the common one.
    """

    num_clients: int
    num_classes: int
    num_samples: np.ndarray
    layout: Layout
    init: Callable[[int], torch.Tensor]
    groups: np.ndarray | None = None
    regrouped: Mapping[int, np.ndarray] = field(default_factory=dict)
    public: Sequence[Any] = ()

    def server(
        self,
        models: int | torch.Tensor = 1,
        assign: np.ndarray | None = None,
        algorithm_state: Mapping[str, np.ndarray] | None = None,
        **tables: torch.Tensor,
    ) -> Server:
        """Return a first server.

        Args:
            models: the rows of table `model` [K, d]; a number: so many independent initial vectors.
            assign: the row each client uses, int64 [N]; None: row 0.
            algorithm_state: small arrays of the method.
            **tables: further tables.
        """
        if isinstance(models, int):
            models = torch.stack([self.init(j) for j in range(models)])
        assign = np.zeros(self.num_clients, np.int64) if assign is None else assign
        return Server({"model": models, **tables}, assign, algorithm_state or {})

    def alike(self, num_rows: int) -> torch.Tensor:
        """Return so many equal rows [K, d], the common initial vector."""
        return self.init(0)[None].expand(num_rows, -1)
