"""What this process is doing now, for a display to look at: stages, the outermost first.

A process has one terminal and does one thing at a time, so the stages belong to the process, as the handlers
of `logging` do. Code that takes long says so by `doing`; nobody has to look. The display
(`results.progress`) looks from a thread of its own, so saying it costs nothing but a counter.

The ranks of a node count their visits in memory that they share, each in a number of its own: no message, no
lock, one write a visit. Rank 0 adds up the numbers of its node while it waits for the reports; of other nodes
it knows nothing before.
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
        what: in words.
        total: how many of `unit` there are; 0 where that is not known.
        unit: what is counted; empty: `what` itself is numbered, as in `round 3/10`.
        count: returns how many are done; None: whoever works changes `done`.
        done: how many are done, where nobody counts.
        first: how many were done when it began, in a run that goes on.
        main: whether it is the larger part of each of the things that the stage around it counts, so that
            half of it is half of one of those.
        ends_at_once: whether a request to stop need not wait for its end, because nothing of it is kept.
        start: `time.monotonic` of its beginning.
    """

    what: str
    total: int = 0
    unit: str = ""
    count: Callable[[], int] | None = None
    done: int = 0
    first: int = 0
    main: bool = False
    ends_at_once: bool = False
    start: float = field(default_factory=lambda: time.monotonic())

    @property
    def number(self) -> int:
        """How many are done, at most `total` where that is known."""
        done = self.done if self.count is None else self.count()
        return min(done, self.total) if self.total else done

    def share(self, part: float = 0.0) -> float:
        """Return the part that is done since it began, in [0, 1]; 0 where that is not known.

        Args:
            part: of the present one that is done.
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
    """Return what this process is doing, the outermost stage first; from any thread."""
    return _stages.copy()


@contextmanager
def doing(
    what: str,
    total: int = 0,
    unit: str = "",
    count: Callable[[], int] | None = None,
    first: int = 0,
    main: bool = False,
    ends_at_once: bool = False,
) -> Iterator[Stage]:
    """Say that the block does something; see `Stage`. Stages may nest."""
    stage = Stage(what, total, unit, count, first, first, main, ends_at_once)
    _stages.append(stage)
    try:
        yield stage
    finally:
        _stages.remove(stage)


def each(items: Collection[T], what: str, unit: str) -> Iterator[T]:
    """Yield items; they are a stage, counted as they are done.

    Args:
        items: what is worked on, one after the other.
        what: is done with them, in words.
        unit: what they are.
    """
    with doing(what, len(items), unit) as stage:
        for item in items:
            yield item
            stage.done += 1


def shared(path: Path, size: int) -> mmap.mmap:
    """Return a file as memory that all processes which ask for it share; new bytes are 0.

    Raises:
        OSError: there is no such folder, or no room for it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # a file with holes would end the process where memory is full
        return mmap.mmap(file, size)
    finally:
        os.close(file)


class VisitCounter:
    """The visits of one rank; on any rank of the node the sum of all.

    Args:
        folder: that all ranks of the node see; None counts this rank alone.
        rank: this one.
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
        """Note that this rank starts on its visits. Here nobody wants to know."""
        return

    def advance(self, visits: int = 1) -> None:
        """Count visits of this rank."""
        self._mine += visits
        self._numbers[self._rank] = self._mine

    def total(self) -> int:
        """Return the visits that the ranks of this node have finished since the start."""
        return sum(self._numbers)

    def by_rank(self) -> list[int]:
        """Return the visits of each rank that this node's ranks have finished; 0 for those of other nodes."""
        return [*self._numbers]
