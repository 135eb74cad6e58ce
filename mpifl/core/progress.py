"""What this process is doing now, as stages that a display can read, the outermost first.

A process has one terminal and does one thing at a time, so the stages belong to the process, as the handlers
of `logging` do. Code that takes long announces itself with `doing`; a display is optional. The display
(`supervision.progress`) reads the stages in a thread of its own, so the working code pays only for a counter.

The ranks of a node count their visits in shared memory, each in its own number: no message, no lock, one
write per visit. Rank 0 adds up the numbers of its node while it waits for the reports. Of other nodes it
knows nothing until their reports arrive.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROUND = "round"  # the stage of an engine, which counts its steps
BYTES = 8  # of a count


@dataclass(eq=False)
class Stage:
    """Something that takes a while.

    Attributes:
        what: description in words.
        total: number of units; 0 if it is unknown.
        unit: name of the units that are counted; empty: `what` itself is numbered, as in `round 3/10`.
        count: returns how many units are done; None: the working code updates `done`.
        done: number of units that are done, if `count` is None.
        first: number of units that were done when it began, in a run that is resumed.
        main: whether it is most of the work of one unit of the enclosing stage, so that half of it counts as
            half of such a unit.
        ends_at_once: whether a request to stop may interrupt it, because none of its work is saved.
        alike: whether its units take about the same time, so that those that are done tell how long the
            present one takes.
        after: enclosing stage with whose units other ranks may be busy; until these are done, `stages` leaves
            this one out.
        start: `time.monotonic()` when it began.
    """

    what: str
    total: int = 0
    unit: str = ""
    count: Callable[[], int] | None = None
    done: int = 0
    first: int = 0
    main: bool = False
    ends_at_once: bool = False
    alike: bool = True
    after: Stage | None = None
    start: float = field(default_factory=lambda: time.monotonic())

    @property
    def number(self) -> int:
        """Number of units that are done, at most `total` if that is known."""
        done = self.done if self.count is None else self.count()
        return min(done, self.total) if self.total else done

    def share(self, part: float = 0.0) -> float:
        """Return the fraction that was done since it began, in [0, 1]; 0 if it is unknown.

        Args:
            part: fraction of the present unit that is done.
        """
        left = self.total - self.first
        return min(1.0, (self.number - self.first + part) / left) if left > 0 else 0.0

    def __str__(self) -> str:
        number = self.number
        if not self.unit:
            return f"{self.what} {min(number + 1, self.total)}/{self.total}" if self.total else self.what
        if not self.total:
            return f"{self.what}, {number:,} {self.unit}" if number else self.what
        return f"{self.what}, {number:,} of {self.total:,} {self.unit}"


_stages: list[Stage] = []


def stages() -> list[Stage]:
    """Return the present stages of this process, the outermost first; callable from any thread."""
    now = _stages.copy()
    return [stage for stage in now if stage.after is None or stage.after.number >= stage.after.total]


@contextmanager
def doing(
    what: str,
    total: int = 0,
    unit: str = "",
    count: Callable[[], int] | None = None,
    first: int = 0,
    main: bool = False,
    ends_at_once: bool = False,
    alike: bool = True,
    after: Stage | None = None,
) -> Iterator[Stage]:
    """Announce that the block is a stage; see `Stage`. Stages may nest."""
    stage = Stage(what, total, unit, count, first, first, main, ends_at_once, alike, after)
    _stages.append(stage)
    try:
        yield stage
    finally:
        _stages.remove(stage)


def each(items: Collection[T], what: str, unit: str) -> Iterator[T]:
    """Yield items within a stage that counts each of them when it is done.

    Args:
        items: the items to work on, one after the other.
        what: what is done with them, in words.
        unit: what the items are called.
    """
    with doing(what, len(items), unit) as stage:
        for item in items:
            yield item
            stage.done += 1


def shared(path: Path, size: int) -> mmap.mmap:
    """Return a file mapped as memory, which all processes that map it share; new bytes are 0.

    Raises:
        OSError: the folder does not exist, or there is no room for the file.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # writing to a sparse file would end the process if memory is full
        return mmap.mmap(file, size)
    finally:
        os.close(file)


class VisitCounter:
    """Counts the visits of one rank; any rank of the node can read the sum over its ranks.

    Args:
        folder: folder that all ranks of the node share; None counts this rank alone.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, size: int = 1) -> None:
        self._rank, self._mine = rank, 0
        room: bytearray | mmap.mmap = bytearray(BYTES * size)
        if folder is not None and size > 1:
            with suppress(OSError):  # it is full, or a rank that failed has removed it: count this rank alone
                room = shared(folder / "visits", BYTES * size)
        self._numbers = memoryview(room).cast("q")

    def begin(self) -> None:
        """Note that this rank starts its visits. Here it does nothing."""
        return

    def advance(self, visits: int = 1) -> None:
        """Count visits of this rank."""
        self._mine += visits
        self._numbers[self._rank] = self._mine

    def total(self) -> int:
        """Return the visits that the ranks of this node have finished since the start."""
        return sum(self._numbers)

    def by_rank(self) -> list[int]:
        """Return the finished visits of each rank of this node; 0 for ranks of other nodes."""
        return [*self._numbers]
