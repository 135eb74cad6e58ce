"""What a rank does and when, kept for the trace of a run (`results/trace_file.py` writes it)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from .timing import NOBODY, Numbers, Timeline

ROW = struct.Struct("=ddiiqq")  # start, end, number of the kind, step, two numbers that depend on the kind
FIRST_ROWS = 4096  # room of a new recording; it grows
MOST_ROWS = 2_000_000  # of the recordings of all ranks together
ROWS_OF_RANK = 20_000, 500_000  # fewest and most rows that one rank keeps, whatever the number of ranks
MORE = 0  # number of the kind of rows that continue the row before: further clients of one call


class Kind(NamedTuple):
    """What a row of a recording is about.

    Attributes:
        what: `phase`, `command`, `mpi`, `before` (MPI calls before the recording), `sent`, `received` or
            `lost`.
        name: name of the phase, command or MPI call.
        purpose: what an MPI call is for.
    """

    what: str
    name: str
    purpose: str = ""


class Event(NamedTuple):
    """An event of a recording.

    Attributes:
        kind: what it is.
        start: when it began, by `time.perf_counter` of this rank.
        end: when it ended; nan if it has not.
        step: the server step that it belongs to.
        first: the client; for an MPI call the bytes that left this rank; for a message its number; for a lost
            rank its number.
        second: the visit of the client; for an MPI call its messages.
        more: further (client, visit) of the same call.
    """

    kind: Kind
    start: float
    end: float
    step: int
    first: int
    second: int
    more: Sequence[tuple[int, int]] = ()


class Ranges(Protocol):
    """A profiler's named ranges: the interface of `torch.cuda.nvtx`."""

    def range_push(self, name: str) -> object:
        """Begin a range."""

    def range_pop(self) -> object:
        """End the range that began last."""


class Recording(Timeline):
    """Keeps the last events of a rank, 40 bytes each, in a ring.

    Args:
        most: number of rows that are kept; older ones are overwritten.
        ranges: ranges of a profiler that get the names of the phases; None for none.

    Attributes:
        dropped: number of rows that were overwritten.
        start: when the recording began, by `perf_counter`.
    """

    def __init__(self, most: int = ROWS_OF_RANK[1], ranges: Ranges | None = None) -> None:
        self.most, self.ranges = most, ranges
        self.dropped, self.start = 0, perf_counter()
        self._room = min(FIRST_ROWS, most)
        self._rows = bytearray(self._room * ROW.size)
        self._next = 0  # place of the next row
        self._kinds: dict[tuple[str, str, str], int] = {("", "", ""): MORE}  # those of `Kind`
        self._step = 0
        self._open: list[tuple[str, float, Numbers, Numbers]] = []  # phases that have not ended

    @classmethod
    def of_rank(cls, size: int, ranges: Ranges | None = None) -> Recording:
        """Return a recording of one of `size` ranks."""
        least, most = ROWS_OF_RANK
        return cls(max(least, min(most, MOST_ROWS // size)), ranges)

    def at_step(self, step: int) -> None:
        """Note the server step that the following events belong to."""
        self._step = step

    @contextmanager
    def command(self, name: str) -> Iterator[None]:
        """Note that the block carries out a command of the engine."""
        start = perf_counter()
        try:
            yield
        finally:
            self._add(start, perf_counter(), ("command", name, ""), NOBODY, NOBODY)

    def enter(self, phase: str, start: float, client: Numbers, visit: Numbers) -> None:
        """Note that a phase begins."""
        self._open.append((phase, start, client, visit))
        if self.ranges is not None:
            self.ranges.range_push(phase)

    def leave(self, phase: str, start: float, end: float, client: Numbers, visit: Numbers) -> None:
        """Note a phase that ends."""
        if self.ranges is not None:
            self.ranges.range_pop()
        self._open.pop()
        kind = ("phase", phase, "")
        if isinstance(client, int) or isinstance(visit, int):
            self._add(start, end, kind, client, visit)
            return
        for k, v in zip(np.asarray(client).tolist(), np.asarray(visit).tolist(), strict=True):
            self._add(start, end, kind, k, v)
            kind = ("", "", "")

    def call(self, name: str, purpose: str, start: float, end: float, sent: int, messages: int) -> None:
        """Note an MPI call that ends."""
        self._add(start, end, ("mpi", name, purpose), sent, messages)

    def calls_before(self, name: str, purpose: str, sent: int, messages: int) -> None:
        """Note MPI calls from before the recording."""
        self._add(self.start, self.start, ("before", name, purpose), sent, messages)

    def sent(self, message: int) -> None:
        """Note that a message leaves."""
        now = perf_counter()
        self._add(now, now, ("sent", "message", ""), message, 0)

    def received(self, message: int) -> None:
        """Note that a message has arrived."""
        now = perf_counter()
        self._add(now, now, ("received", "message", ""), message, 0)

    def lost(self, rank: int) -> None:
        """Note that a rank is lost."""
        now = perf_counter()
        self._add(now, now, ("lost", "lost", ""), rank, 0)

    def _add(
        self, start: float, end: float, kind: tuple[str, str, str], first: Numbers, second: Numbers
    ) -> None:
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds)
        place = self._next % self.most
        if place == self._room:
            more = min(self._room, self.most - self._room)
            self._rows.extend(bytes(more * ROW.size))
            self._room += more
        self.dropped += self._next >= self.most
        ROW.pack_into(self._rows, place * ROW.size, start, end, number, self._step, first, second)
        self._next += 1

    def events(self) -> list[Event]:
        """Return the events that are kept, those that contain others before them; callable from any thread.

        Phases that have not ended come with an `end` of nan.
        """
        written = self._next  # in this order: the thread that records may go on meanwhile
        rows = bytes(self._rows)
        kinds, nan = [Kind(*kind) for kind in [*self._kinds]], float("nan")
        last = written % self.most if written >= self.most else 0  # place of the oldest row
        count = min(written, self.most)
        found, more = list[Event](), list[tuple[int, int]]()
        for i in reversed(range(count)):  # so that rows come before the one that they continue
            row = ROW.unpack_from(rows, (last + i) % self.most * ROW.size)
            start, end, number, step, first, second = row
            if number == MORE:
                more.append((first, second))
            else:
                found.append(Event(kinds[number], start, end, step, first, second, tuple(more[::-1])))
                more.clear()
        found.reverse()
        for phase, start, client, visit in [*self._open]:
            who = (client, visit) if isinstance(client, int) and isinstance(visit, int) else (NOBODY, NOBODY)
            found.append(Event(Kind("phase", phase), start, nan, self._step, *who))
        return sorted(found, key=lambda e: (e.start, -e.end if e.end == e.end else float("-inf")))
