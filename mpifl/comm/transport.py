"""Communication between ranks: the interface, its implementation for one process, and traffic counts.

Rank 0 is the server; ranks 1..P-1 are workers; a single process is both. Methods are named after MPI calls:
lower case for picklable objects, upper case for blocks of numbers. `scatter_rows` and `gather_rows` send an
object and rows of numbers in one message. Every rank must call collectives in the same order.
"""

from __future__ import annotations

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
from mpifl.core.timing import NO_TIMELINE, WAIT, ClockReading, Stopwatch, Timeline

T = TypeVar("T")
WAITS = ("receive", "barrier")  # calls that only wait for other ranks


class RankLost(Exception):
    """A rank died or does not answer; the others can continue once all of them have called `regroup`."""


class Mismatch(CodeFailed):
    """A block of numbers is not what the ranks have agreed on; MPI would damage memory, or wait forever.

    Args:
        what: the block, and what was agreed.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; please report this as a fault of mpifl")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what,)


def check_block(
    block: torch.Tensor, purpose: str, dtype: torch.dtype, shape: Sequence[int | None] = (), who: str = ""
) -> None:
    """Check a block before MPI reads or writes it, in about a microsecond.

    Args:
        block: the block.
        purpose: label under which its traffic is counted.
        dtype: the type that all ranks have agreed on.
        shape: its shape, with None for a length that is not known here; empty if nothing is known.
        who: whose block it is.

    Raises:
        Mismatch: it is of another type or shape, or not contiguous.
    """
    fits = block.dtype is dtype and block.is_contiguous()
    if shape and fits:
        fits = len(shape) == block.ndim and all(
            b in (None, a) for a, b in zip(block.shape, shape, strict=True)
        )
    if not fits:
        found = f"{block.dtype} {list(block.shape)}{'' if block.is_contiguous() else ', not contiguous'}"
        agreed = ["any" if n is None else n for n in shape]
        wanted = f"{dtype} {agreed}".replace("'", "") if shape else str(dtype)
        text = f"{purpose}: {who or 'a block'} has {found}, the ranks have agreed on {wanted}"
        raise Mismatch(text.replace("torch.", ""))


class CannotRecover(RuntimeError):
    """State was lost that no other rank holds; the run can be resumed from a checkpoint.

    Args:
        what: beginning of the message; says what was lost.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; go on from the last checkpoint: mpifl resume RUN")


class Transport(ABC):
    """A group of ranks that communicate.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        nodes: node number of each rank.
        local_rank: number of this rank among the ranks of the job on its node.
        device_rank: number by which this rank chooses a device of its node, round-robin.
        names: name of each rank in messages: its number at the start of the job, host and process id.
        numbers: number that each rank had when the run began.
        lost: names of the ranks that were lost during the run.
        started: stage of the start-up -> seconds from the start of the process to the end of the stage.
        last_call: time at which a call last returned, by `time.monotonic`.
        traffic: counts of what this rank sent.
        library: name and version of the MPI; None without one.
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
    library: str | None = None

    def begin_run(self) -> None:
        """Number the ranks anew and clear the list of lost ones; every rank calls."""
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
    def num_workers_here(self) -> int:
        """The number of ranks on this rank's node that host clients."""
        return sum(self.nodes[r] == self.nodes[self.rank] for r in self.workers)

    @property
    def is_worker(self) -> bool:
        """Whether this rank hosts clients."""
        return self.rank in self.workers

    @abstractmethod
    def scatter(self, values: Sequence[Any] | None, purpose: str) -> Any:
        """Send `values[r]` from rank 0 to each rank r, and return this rank's value.

        Args:
            values: value for each rank, on rank 0; None elsewhere.
            purpose: label under which the traffic is counted.
        """

    @abstractmethod
    def gather(self, value: Any, purpose: str) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None elsewhere.

        Rank 0 polls with growing pauses, so that its core stays free.

        Args:
            value: value of this rank.
            purpose: label under which the traffic is counted.
        """

    def allgather(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; see `gather`."""
        found: list[Any] = self.bcast(self.gather(value, purpose), purpose)
        return found

    @abstractmethod
    def scatter_rows(
        self, values: Sequence[Any] | None, rows: np.ndarray | None, counts: Sequence[int], purpose: str
    ) -> tuple[Any, memoryview]:
        """Send rank r `values[r]` and `counts[r]` rows of a block; return this rank's value and rows.

        Both travel in one message, and a value that several ranks receive is pickled once, so each further
        rank costs only a message. As in `scatter`, a waiting rank polls.

        Args:
            values: value for each rank, on rank 0; None elsewhere.
            rows: rows in rank order [sum counts, ...], contiguous, on rank 0; None elsewhere.
            counts: number of rows for each rank; used on rank 0.
            purpose: label under which the traffic is counted.

        Returns:
            The value, and the bytes of the rows.
        """

    @abstractmethod
    def gather_rows(self, value: Any, rows: bytes, purpose: str) -> tuple[list[Any], list[memoryview]] | None:
        """Return the values and the bytes of all ranks, in rank order, on rank 0; None elsewhere.

        Received values whose pickles are equal become one object.

        Args:
            value: value of this rank.
            rows: bytes of the rows of this rank.
            purpose: label under which the traffic is counted.
        """

    @abstractmethod
    def gather_traffic(self) -> list[dict[str, Any]] | None:
        """Return a row for each rank, call and purpose, including this call, on rank 0; None elsewhere."""

    def compare_clocks(self) -> ClockReading:
        """Return this rank's clock beside that of rank 0; every rank calls. Its traffic is not counted."""
        now = perf_counter()
        return ClockReading(now, began=now)

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks have called; the core stays free meanwhile."""

    @abstractmethod
    def final_barrier(self) -> bool:
        """Block until all ranks have called, at most for a few seconds; return whether all did.

        Call it before a process exits: a launcher kills the others as soon as one rank exits with an error.
        """

    @abstractmethod
    def Bcast(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Overwrite `block` on every rank with the block of rank 0.

        Args:
            block: contiguous tensor; same shape on all ranks.
            purpose: label under which the traffic is counted.
            dtype: type of the block on all ranks.

        Raises:
            Mismatch: the block is not what the arguments say; here and in all calls below.
        """

    @abstractmethod
    def Reduce(self, block: torch.Tensor, purpose: str, dtype: torch.dtype = torch.float32) -> None:
        """Overwrite `block` on rank 0 with the sum of the blocks of all ranks.

        Args:
            block: contiguous tensor; same shape on all ranks.
            purpose: label under which the traffic is counted.
            dtype: type of the block on all ranks.
        """

    @abstractmethod
    def Gatherv(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | None:
        """Return the rows [sum counts, b] of all ranks, in rank order, on rank 0; None elsewhere.

        Args:
            block: rows [counts[rank], b] of this rank, contiguous.
            counts: number of rows of each rank; may be empty elsewhere than on rank 0.
            purpose: label under which the traffic is counted.
            dtype: type of the rows of all ranks.
        """

    @abstractmethod
    def Reduce_scatter(
        self, block: torch.Tensor, counts: Sequence[int], purpose: str, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return this worker's rows [counts[rank], b] of the sum of all workers' blocks; only workers call.

        Args:
            block: [sum counts, b], contiguous.
            counts: number of rows that each rank receives.
            purpose: label under which the traffic is counted.
            dtype: type of the blocks of all ranks.
        """

    @abstractmethod
    def Alltoallv(
        self,
        block: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        purpose: str,
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Send each rank a part of a block; return the parts received from all ranks, in rank order, flat.

        Args:
            block: flat, float32 and contiguous: the parts for all ranks.
            sent: how many numbers this rank sends to each rank.
            received: how many numbers this rank receives from each rank.
            purpose: label under which the traffic is counted.
            starts: where in the block the part for each rank starts; parts may overlap. None: the parts fill
                the block in rank order.
        """

    @abstractmethod
    def Allgatherv(self, block: torch.Tensor, counts: Sequence[int], purpose: str) -> torch.Tensor:
        """Return the blocks of all workers, in rank order, flat, on each worker; only workers call.

        Args:
            block: flat, float32 and contiguous: [counts[rank]].
            counts: how many numbers each rank gives.
            purpose: label under which the traffic is counted.
        """

    @abstractmethod
    def isend(self, rank: int, header: Any, block: torch.Tensor, purpose: str) -> None:
        """Send an object and a flat float32 block to a rank, without waiting until they are received.

        Args:
            rank: rank of the receiver.
            header: any picklable object.
            block: flat float32 tensor, possibly empty; do not write to it afterwards.
            purpose: label under which the traffic is counted.
        """

    @abstractmethod
    def poll(self, purpose: str) -> tuple[int, Any, torch.Tensor] | None:
        """Return (rank, header, block) of a message from `isend` that has arrived; None if there is none.

        Args:
            purpose: label under which the traffic is counted.
        """

    @abstractmethod
    def regroup(self) -> tuple[int, ...]:
        """Form a group of the remaining ranks after `RankLost`; all of them call.

        Returns:
            The former rank of each remaining rank.

        Raises:
            CannotRecover: rank 0 was lost.
        """

    def split(self, count: int) -> Transport:
        """Divide the ranks into `count` groups; return the transport of this rank's group; every rank calls.

        `divided` decides which ranks form a group. This transport stays usable beside those of the groups.

        Args:
            count: number of groups, from 1 to the number of ranks.
        """
        assert count == 1, "one process is one group"
        return self

    def failed_ranks(self) -> list[str]:
        """Return the names of the ranks that MPI knows to have failed and that are still in the group."""
        return []

    def watch_stopped(self, limit: float) -> None:
        """Kill ranks that are stopped (SIGSTOP) for longer than a limit.

        Args:
            limit: seconds; 0 turns the watcher off.
        """
        return

    def waiting_for(self) -> list[str]:
        """Return the names of the ranks that rank 0 waits for in `gather`; callable from any thread."""
        return []

    def ask_to_stop(self) -> None:
        """Tell rank 0 that this rank was asked to stop; callable from a handler of signals."""
        return

    def stop_asked(self) -> bool:
        """Return whether a rank has called `ask_to_stop` since the last call; on rank 0."""
        return False

    def abort_from_any_thread(self, code: int) -> None:
        """Kill every rank and the launcher, even if hosts are unreachable; callable from any thread."""
        self.abort(code)

    def finalize(self, code: int) -> None:
        """Close communication before the process exits; may itself end the process.

        Args:
            code: exit code of the process.
        """
        return

    def raise_on_others(self, error: Exception) -> None:
        """Raise an error on other ranks too: on rank 0 if a worker calls, on all workers if rank 0 calls.

        They raise it in their next call that waits for a message. A rank without such a call does not.
        """
        return

    @abstractmethod
    def abort(self, code: int) -> None:
        """Kill every rank."""

    def bcast(self, value: Any, purpose: str) -> Any:
        """Return the value of rank 0 on every rank.

        Args:
            value: value to send, on rank 0; ignored elsewhere.
            purpose: label under which the traffic is counted.
        """
        return self.scatter([value] * self.size if self.is_server else None, purpose)


def check_parts(length: int, sent: Sequence[int], starts: Sequence[int], purpose: str, who: str = "") -> None:
    """Check that the parts of a block that are sent lie inside it.

    Args:
        length: how many numbers the block has.
        sent: how many numbers each part has.
        starts: where each part starts.
        purpose: label under which its traffic is counted.
        who: whose block it is.

    Raises:
        Mismatch: a part ends behind the block.
    """
    if any(start < 0 or start + count > length for start, count in zip(starts, sent, strict=True)):
        raise Mismatch(f"{purpose}: {who or 'a block'} has {length} numbers, parts end behind them")


def bytes_of(rows: np.ndarray) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def divided(nodes: Sequence[int], count: int) -> list[list[int]]:
    """Return the ranks of each group, keeping ranks of a node together where possible.

    Group sizes differ by at most one. The first rank of a group is its server; the server of the first group
    is rank 0.

    Args:
        nodes: node number of each rank.
        count: number of groups, at most the number of ranks.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    size, larger = divmod(len(order), count)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(count)]
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def device_ranks(nodes: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the number by which each rank chooses a device; workers come first, so that they share none.

    Args:
        nodes: node number of each rank.
        groups: ranks of each group, from `divided`. The first rank of a group trains only if it is alone.
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
    """Do something on rank 0 only, and return the result on every rank; every rank calls.

    Args:
        transport: connects the ranks.
        work: function that is called on rank 0.
        everywhere: False returns the result on rank 0 only, and None elsewhere.
        purpose: label under which the traffic is counted.

    Raises:
        UserError: on every rank, if `work` raises one, or an OSError that names a file.
        CodeFailed: on every rank, if `work` raises one.
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


def on_all(transport: Transport, work: Callable[[], T], purpose: str = "end") -> T:
    """Return the result of `work` on this rank, after all ranks have theirs; every rank calls.

    Args:
        transport: connects the ranks.
        work: function that is called on every rank, and calls no other.
        purpose: label under which the traffic is counted.

    Raises:
        UserError, CodeFailed: on every rank, that of the first rank on which `work` failed.
    """
    made, fault = list[T](), None
    try:
        made.append(work())
    except (UserError, CodeFailed) as error:
        fault = error
    faults = transport.gather(fault, purpose) or []
    first = transport.bcast(next((f for f in faults if f is not None), None), purpose)
    if first is not None:
        raise first
    return made[0]


@dataclass
class Count:
    """Calls, messages, bytes and seconds of one call and purpose."""

    calls: int = 0
    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class _Call:
    """A context manager that adds the time of its block to a count, and tells a timeline of the call."""

    def __init__(
        self, count: Count, timeline: Timeline, call: str, purpose: str, sent: int, messages: int
    ) -> None:
        self.count, self.timeline, self.call, self.purpose = count, timeline, call, purpose
        self.sent, self.messages = sent, messages

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, *error: object) -> None:
        end = perf_counter()
        self.count.seconds += end - self.start
        self.timeline.call(self.call, self.purpose, self.start, end, self.sent, self.messages)


class _Wait(_Call):
    """A call that only waits for other ranks: its time counts for the phase `wait`."""

    def __init__(self, watch: Stopwatch, *about: Any) -> None:
        super().__init__(*about)
        self.phase = watch(WAIT)

    def __enter__(self) -> None:
        self.phase.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.phase.__exit__(*error)


class MpiTraffic:
    """Counts of one rank, by (call, purpose); each byte is counted once, at its sender.

    Attributes:
        counts: the counts.
        timeline: is told of each call.
        watch: counts the seconds of calls that only wait; None if nobody reads them.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)
        self.timeline = NO_TIMELINE
        self.watch: Stopwatch | None = None

    def __call__(self, call: str, purpose: str, sent: int = 0, messages: int = 0) -> _Call:
        """Count a call; its time is that of the `with` block.

        Args:
            call: name of the MPI call.
            purpose: what the call is for, such as `plan` or `mix:model`.
            sent: bytes that leave this rank.
            messages: number of messages that leave this rank.
        """
        count = self.counts[call, purpose]
        count.calls += 1
        count.messages += messages
        count.bytes += sent
        about = count, self.timeline, call, purpose, sent, messages
        watch = self.watch if call in WAITS else None
        return _Call(*about) if watch is None or watch.open[-1] == WAIT else _Wait(watch, *about)

    def tell(self, timeline: Timeline) -> None:
        """Tell a timeline of each call from now on, and of what was counted so far."""
        self.timeline = timeline
        for (call, purpose), count in self.counts.items():
            timeline.calls_before(call, purpose, count.bytes, count.messages)

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
