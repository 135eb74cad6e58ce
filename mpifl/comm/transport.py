"""Communication between ranks: the interface, its implementation for one process, and the count of its bytes.

Rank 0 is the server; ranks 1..P-1 are workers; a process alone is both. Methods are named after MPI's calls:
lower case for picklable objects, upper case for blocks of numbers; `scatter_rows` and `gather_rows` send an
object and rows of numbers in one message. Collectives are called by every rank, in the same order.
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
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch

from mpifl.core.errors import CodeFailed, UserError

T = TypeVar("T")


class RankLost(Exception):
    """A rank died or does not answer; the others can go on once all of them have called `regroup`."""


class CannotRecover(RuntimeError):
    """State was lost that no other rank holds; the run can be resumed from a checkpoint.

    Args:
        what: was lost.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; go on from the last checkpoint: mpifl resume RUN")


class Transport(ABC):
    """A group of ranks.

    Attributes:
        rank: of this process.
        size: number of ranks.
        nodes: node number of each rank.
        local_rank: number of this rank among those of the job on its node.
        device_rank: number by which this rank takes one of its node's devices in turn.
        names: of each rank in messages: its number at the start, host and process.
        numbers: of each rank when the run began.
        lost: names of the ranks that were lost during the run.
        started: stage of the start -> seconds from the start of the process to the end of the stage.
        last_call: when a call last returned, by `time.monotonic`.
        traffic: what this rank sent.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    local_rank: int = 0
    device_rank: int = 0
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    lost: list[str]
    started: Mapping[str, float] = MappingProxyType({})
    last_call: float = 0.0
    traffic: MpiTraffic

    def begin_run(self) -> None:
        """Number the ranks and list the lost ones anew; every rank calls."""
        self.numbers = tuple(range(self.size))
        self.lost.clear()

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
        """Send `values[r]` of rank 0 to rank r, and return this rank's.

        Args:
            values: on rank 0; None elsewhere.
            purpose: under which it is counted.
        """

    @abstractmethod
    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None elsewhere.

        Rank 0 polls with growing pauses, so that its core stays free.

        Args:
            value: of this rank.
            purpose: under which it is counted.
        """

    @abstractmethod
    def scatter_rows(
        self, values: Sequence[Any] | None, rows: np.ndarray | None, counts: Sequence[int], purpose: str
    ) -> tuple[Any, memoryview]:
        """Send rank r `values[r]` and `counts[r]` rows of a block; return this rank's value and rows.

        Both travel in one message, and a value that several ranks get is pickled once: what a rank costs is
        a message. As in `scatter`, a rank that waits polls.

        Args:
            values: on rank 0; None elsewhere.
            rows: contiguous, by rank [sum counts, ...]; on rank 0, None elsewhere.
            counts: rows of each rank; on rank 0.
            purpose: under which it is counted.

        Returns:
            The value, and the bytes of the rows.
        """

    @abstractmethod
    def gather_rows(self, value: Any, rows: bytes, purpose: str) -> tuple[list[Any], list[memoryview]] | None:
        """Return the values and the bytes of all ranks, in rank order, on rank 0; None elsewhere.

        Values that are equal once pickled are one object.

        Args:
            value: of this rank.
            rows: of this rank.
            purpose: under which it is counted.
        """

    @abstractmethod
    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return a row for each rank, call and purpose, this call included, on rank 0; None elsewhere."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks have called; the core stays free meanwhile."""

    @abstractmethod
    def final_barrier(self) -> bool:
        """Block for a few seconds at most until all ranks have called; return whether all did.

        Called before a process exits: a launcher kills the others as soon as one rank exits with an error.
        """

    @abstractmethod
    def Bcast(self, block: torch.Tensor, purpose: str) -> None:
        """Overwrite `block` of every rank with that of rank 0.

        Args:
            block: contiguous; of the same shape and type on all ranks.
            purpose: under which it is counted.
        """

    @abstractmethod
    def Reduce(self, block: torch.Tensor, purpose: str) -> None:
        """Overwrite `block` of rank 0 with the sum of all ranks' blocks.

        Args:
            block: contiguous; of the same shape and type on all ranks.
            purpose: under which it is counted.
        """

    @abstractmethod
    def Gatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor | None:
        """Return the rows [sum counts, b] of all ranks, in rank order, on rank 0; None elsewhere.

        Args:
            block: rows [counts[rank], b] of this rank, contiguous.
            counts: rows of each rank.
            purpose: under which it is counted.
        """

    @abstractmethod
    def Reduce_scatter(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return this worker's rows [counts[rank], b] of the sum of all workers' blocks; only workers call.

        Args:
            block: [sum counts, b], contiguous.
            counts: rows that each rank receives.
            purpose: under which it is counted.
        """

    @abstractmethod
    def Alltoallv(
        self, block: torch.Tensor, sent: Sequence[int], received: Sequence[int], purpose: str
    ) -> torch.Tensor:
        """Give every rank its part of this rank's block; return what all ranks gave, in rank order, flat.

        Args:
            block: flat and contiguous: the part of each rank, in rank order.
            sent: numbers that each rank gets from this one.
            received: numbers that this rank gets from each.
            purpose: under which it is counted.
        """

    @abstractmethod
    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Send an object and a flat float32 block to a rank, without waiting until they are received.

        Args:
            rank: of the receiver.
            header: any picklable object.
            block: may be empty; not to be written to afterwards.
            purpose: under which it is counted.
        """

    @abstractmethod
    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return (rank, header, block) of a message of `isend` that has arrived; None where there is none.

        Args:
            purpose: under which it is counted.
        """

    @abstractmethod
    def regroup(self) -> tuple[int, ...]:
        """Form a group of the ranks that are left after `RankLost`; all of them call.

        Returns:
            The former number of each rank.

        Raises:
            CannotRecover: rank 0 was lost.
        """

    def split(self, count: int) -> Transport:
        """Return the transport of this rank's group, where the ranks form so many groups; every rank calls.

        `divided` says which ranks form a group. This transport stays as it is, beside those of the groups.

        Args:
            count: of groups, from 1 to the number of ranks.
        """
        assert count == 1, "one process is one group"
        return self

    def failed_ranks(self) -> list[str]:
        """Return the names of ranks that MPI knows to have failed, and that are still in the group."""
        return []

    def watch_stopped(self, limit: float) -> None:
        """Kill ranks that are stopped (SIGSTOP) for longer than a limit.

        Args:
            limit: seconds; 0 turns it off.
        """
        return

    def waiting_for(self) -> list[str]:
        """Return the names of the ranks whose values rank 0 waits for in `gather`; from any thread."""
        return []

    def abort_from_any_thread(self, code: int) -> None:
        """Kill every rank and the launcher, though hosts may be unreachable; callable from any thread."""
        self.abort(code)

    def finalize(self, code: int) -> None:
        """Close communication before the process exits; may end the process here.

        Args:
            code: of its exit.
        """
        return

    def raise_on_others(self, error: Exception) -> None:
        """Raise an error on other ranks too: on rank 0 if a worker calls, on all workers if rank 0 does.

        They raise it in their next call that waits for a message. A rank that makes none does not raise it.
        """
        return

    @abstractmethod
    def abort(self, code: int) -> None:
        """Kill every rank."""

    def bcast(self, value: Any, purpose: str) -> Any:
        """Return the value of rank 0 on every rank.

        Args:
            value: on rank 0; ignored elsewhere.
            purpose: under which it is counted.
        """
        return self.scatter([value] * self.size if self.is_server else None, purpose)


class Single(Transport):
    """One process: collectives return their argument."""

    def __init__(self) -> None:
        self.rank, self.size, self.nodes, self.traffic = 0, 1, (0,), MpiTraffic()
        self.names, self.numbers, self.lost = (f"pid {os.getpid()}",), (0,), []
        self.last_call = time.monotonic()

    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Return the only value."""
        self.last_call = time.monotonic()
        assert values is not None
        return values[0]

    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the only value."""
        self.last_call = time.monotonic()
        return [value]

    def scatter_rows(
        self, values: Sequence[Any] | None, rows: np.ndarray | None, counts: Sequence[int], purpose: str
    ) -> tuple[Any, memoryview]:
        """Return the only value, and all rows."""
        assert rows is not None
        return self.scatter(values, purpose), bytes_of(rows)

    def gather_rows(self, value: Any, rows: bytes, purpose: str) -> tuple[list[Any], list[memoryview]] | None:
        """Return the only value, and its rows."""
        self.last_call = time.monotonic()
        return [value], [memoryview(rows)]

    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return the rows of this process."""
        return self.traffic.rows(self.rank)

    def barrier(self) -> None:
        """Return at once."""

    def final_barrier(self) -> bool:
        """Return True."""
        return True

    def Bcast(self, block: torch.Tensor, purpose: str) -> None:
        """Leave the block as it is."""

    def Reduce(self, block: torch.Tensor, purpose: str) -> None:
        """Leave the block as it is."""

    def Gatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor | None:
        """Return the block."""
        return block

    def Reduce_scatter(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return the block."""
        return block

    def Alltoallv(
        self, block: torch.Tensor, sent: Sequence[int], received: Sequence[int], purpose: str
    ) -> torch.Tensor:
        """Return the block."""
        return block

    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Raise: one process has no other rank."""
        raise NotImplementedError

    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return None."""
        return None

    def regroup(self) -> tuple[int, ...]:
        """Raise: one process has no other rank."""
        raise NotImplementedError

    def abort(self, code: int) -> None:
        """End the process."""
        os._exit(code)


def bytes_of(rows: np.ndarray) -> memoryview:
    """Return the bytes of an array, of a contiguous one without a copy."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def divided(nodes: Sequence[int], count: int) -> list[list[int]]:
    """Return the ranks of each group, neighbours on a node together where that is possible.

    The sizes differ by one at most. The first rank of a group is its server; that of the first group is
    rank 0.

    Args:
        nodes: node number of each rank.
        count: of groups, at most that of the ranks.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    size, larger = divmod(len(order), count)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(count)]
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def device_ranks(nodes: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of each rank by which it takes a device: workers first, so that they share none.

    Args:
        nodes: node number of each rank.
        groups: as `divided` returned them. The first rank of a group trains only where it is alone.
    """
    servers = {ranks[0] for ranks in groups if len(ranks) > 1}
    out = [0] * len(nodes)
    for node in set(nodes):
        near = [rank for rank in range(len(nodes)) if nodes[rank] == node]
        for number, rank in enumerate(sorted(near, key=lambda rank: (rank in servers, rank))):
            out[rank] = number
    return out


@overload
def on_server(
    transport: Transport, work: Callable[[], T], everywhere: Literal[True] = True, purpose: str = "start"
) -> T: ...
@overload
def on_server(
    transport: Transport, work: Callable[[], T], everywhere: Literal[False], purpose: str = "start"
) -> T | None: ...
def on_server(
    transport: Transport, work: Callable[[], T], everywhere: bool = True, purpose: str = "start"
) -> T | None:
    """Do something on rank 0 only, and return the result on every rank.

    Args:
        transport: every rank calls.
        work: called on rank 0.
        everywhere: False returns the result on rank 0 only, and None elsewhere.
        purpose: under which it is counted.

    Raises:
        UserError: on every rank, where `work` raises one, or an OSError that names a file.
        CodeFailed: on every rank, where `work` raises one.
    """
    answer: tuple[T | None, UserError | CodeFailed | None] = (None, None)
    if transport.is_server:
        try:
            answer = (work(), None)
        except (UserError, CodeFailed) as error:
            answer = (None, error)
        except OSError as error:
            if error.filename is None:
                raise
            remedy = f"cannot be read or written ({error.strerror})"
            answer = (None, UserError("file", str(error.filename), remedy))
    told: tuple[T | None, UserError | CodeFailed | None]
    told = transport.bcast(answer if everywhere else (None, answer[1]), purpose)
    if told[1] is not None:
        raise told[1]
    return told[0] if everywhere else answer[0]


@dataclass
class Count:
    """Calls, messages, bytes and seconds of one call and purpose."""

    calls: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class _Call:
    """A context that adds its time to a count."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.count.seconds += perf_counter() - self.start


class MpiTraffic:
    """Counts of one rank, by (call, purpose); each byte is counted once, at its sender."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)

    def __call__(self, call: str, purpose: str, sent: int = 0, messages: int = 0) -> _Call:
        """Count a call; the time is that of the `with` block.

        Args:
            call: name of the MPI call.
            purpose: what it is for.
            sent: bytes that leave this rank.
            messages: how many leave this rank.
        """
        count = self.counts[call, purpose]
        count.calls += 1
        count.messages += messages
        count.bytes += sent
        return _Call(count)

    def clear(self) -> None:
        """Set all counts to 0."""
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
