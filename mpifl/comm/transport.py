"""The verbs by which ranks speak, and their meaning for one process alone.

Rank 0 is the server; ranks 1..P-1 are workers; alone, rank 0 is both. Every rank walks every verb, in the
same order. Small objects are dealt and collected, blocks of numbers are shared, reduced, gathered and
scattered.

What this program's own communication moved: bytes, messages, seconds per call and purpose.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch

from mpifl.core.errors import UserError


class RankLost(Exception):
    """A rank died or no longer answers; the others can go on once all of them have regrouped."""


class CannotGoOn(RuntimeError):
    """What was lost is not held by any rank that is left: only a checkpoint helps."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; go on from the last checkpoint: mpifl resume RUN")


class Transport(ABC):
    """A group of ranks.

    Attributes:
        rank, size: of this process.
        nodes: node number of each rank.
        names: what each rank is called in messages: its first number, host, process.
        lost: names of the ranks that died on the way.
        wire: what this rank sent.
        started: stage -> seconds from the start of the process to its end.
        alive: when a verb last came to its end (`time.monotonic`).
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    names: tuple[str, ...]
    lost: list[str]
    started: Mapping[str, float] = MappingProxyType({})
    alive: float = 0.0
    traffic: MpiTraffic

    @property
    def is_server(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that host clients."""
        return tuple(range(1, self.size)) or (0,)

    @property
    def is_worker(self) -> bool:
        """Whether this rank hosts clients."""
        return self.rank in self.workers

    @abstractmethod
    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Give `values[r]` of rank 0 to rank r; return this rank's."""

    @abstractmethod
    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None elsewhere. The server waits
        politely.
        """

    @abstractmethod
    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return on rank 0 what all ranks sent, this call included: a row per rank, call and purpose."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait, politely, until all ranks are here."""

    @abstractmethod
    def final_barrier(self) -> bool:
        """Wait a little for all ranks to leave together; return whether all came.

        A launcher kills the others as soon as one rank leaves with an error.
        """

    @abstractmethod
    def Bcast(self, block: torch.Tensor, purpose: str) -> None:
        """Fill `block` of every rank with that of rank 0."""

    @abstractmethod
    def Reduce(self, block: torch.Tensor, purpose: str) -> None:
        """Add `block` of all ranks into that of rank 0."""

    @abstractmethod
    def Gatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor | None:
        """Return the rows [sum counts, b] of all ranks in rank order on rank 0; `block` is this rank's
        [counts, b].
        """

    @abstractmethod
    def Reduce_scatter(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return this worker's rows [counts[rank], b] of the sum of all workers' `block` [sum counts, b].

        The workers call, rank 0 only where it is one.
        """

    @abstractmethod
    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Send a small object and a flat float32 block to a rank, without waiting for it to be taken."""

    @abstractmethod
    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return (rank, header, block) of a posted message that has arrived, None while there is none."""

    @abstractmethod
    def regroup(self) -> tuple[int, ...]:
        """Go on with the ranks that are left after `RankLost`: return the old number of each. All of them
        call.

        Raises:
            CannotGoOn: rank 0 is gone.
        """

    def missing(self) -> list[str]:
        """Return the names of ranks that are lost."""
        return []

    def watch(self, limit: float) -> None:
        """From now on, end ranks that are stopped (SIGSTOP) for so many seconds; 0 for none."""
        return

    def awaited(self) -> list[str]:
        """Return the names of the ranks whose word rank 0 waits for, in `collect`; from any thread."""
        return []

    def give_up(self, code: int) -> None:
        """End every rank, and the launcher, though hosts may be out of reach; from any thread."""
        self.abort(code)

    def leave(self, code: int) -> None:
        """The work is done; the process may end here, with this exit code."""
        return

    def fail(self, error: Exception) -> None:
        """Have the others raise `error` too, where they wait next for a word: rank 0 if a worker calls, all
        workers if rank 0 does. They may be elsewhere, and then do not hear of it.
        """
        return

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank, now."""

    def bcast(self, value: Any, purpose: str) -> Any:
        """Return rank 0's `value` on every rank."""
        return self.scatter([value] * self.size if self.is_server else None, purpose)


class Single(Transport):
    """One process: every verb is the identity."""

    def __init__(self) -> None:
        self.rank, self.size, self.nodes, self.traffic = 0, 1, (0,), MpiTraffic()
        self.names, self.lost = (f"pid {os.getpid()}",), []
        self.alive = time.monotonic()

    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Return the only parcel."""
        self.alive = time.monotonic()
        assert values is not None
        return values[0]

    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the only value."""
        self.alive = time.monotonic()
        return [value]

    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return the own counts."""
        return self.traffic.rows(self.rank)

    def barrier(self) -> None:
        """Nobody else to wait for."""

    def final_barrier(self) -> bool:
        """Nobody else to wait for."""
        return True

    def Bcast(self, block: torch.Tensor, purpose: str) -> None:
        """Nobody else to share with."""

    def Reduce(self, block: torch.Tensor, purpose: str) -> None:
        """Nothing to add."""

    def Gatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor | None:
        """Return the block."""
        return block

    def Reduce_scatter(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return the block."""
        return block

    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Nobody to send to: a process alone runs its tasks itself."""
        raise NotImplementedError

    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return nothing: nobody sends."""
        return None

    def regroup(self) -> tuple[int, ...]:
        """Nobody else to lose."""
        raise NotImplementedError

    def abort(self, code: int) -> None:
        """End the process."""
        os._exit(code)


def on_server(transport: Transport, work: Callable[[], Any], everywhere: bool = True) -> Any:
    """Do something on rank 0 only, and return the result on every rank.

    Args:
        transport: every rank calls.
        work: called on rank 0.
        everywhere: False returns the result on rank 0 only, and None elsewhere.

    Raises:
        UserError: on every rank, where `work` raises one, or an OSError that names a file.
    """
    answer: tuple[Any, UserError | None] = (None, None)
    if transport.is_server:
        try:
            answer = (work(), None)
        except UserError as error:
            answer = (None, error)
        except OSError as error:
            if error.filename is None:
                raise
            remedy = f"cannot be read or written ({error.strerror})"
            answer = (None, UserError("file", str(error.filename), remedy))
    told, problem = transport.bcast(answer if everywhere else (None, answer[1]), "start")
    if problem is not None:
        raise problem
    return told if everywhere else answer[0]


@dataclass
class Count:
    """A running count."""

    calls: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class _Call:
    """A block whose time is that of a call."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.count.seconds += perf_counter() - self.start


class MpiTraffic:
    """Counts of one rank, by (call, purpose). Each byte is counted once, at the rank that sends it."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)

    def __call__(self, call: str, purpose: str, sent: int = 0, messages: int = 0) -> _Call:
        """Count one call that sends `sent` bytes in `messages` messages, and the time of the block."""
        count = self.counts[call, purpose]
        count.calls += 1
        count.messages += messages
        count.bytes += sent
        return _Call(count)

    def clear(self) -> None:
        """Count from nothing."""
        self.counts.clear()

    @property
    def bytes(self) -> int:
        """All bytes sent by this rank."""
        return sum(c.bytes for c in self.counts.values())

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """Return one row per (call, purpose), ready for `mpi_traffic.csv`."""
        return [
            {"rank": rank, "call": call, "purpose": why, **vars(c)} for (call, why), c in self.counts.items()
        ]
