"""Seconds of a rank by named phase, and the timeline that is told of them.

A rank has one `Timeline`. The stopwatch tells it of each phase, the transport of each MPI call and message,
the engines of each command. That of a run without a trace ignores all of it, so callers need not ask whether
there is a trace; that of a run with one is a `core.timeline.Recording`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import TypeAlias

import numpy as np

# of a client, or of clients that are trained in one call; a text, so that no import needs NumPy
Numbers: TypeAlias = "int | Sequence[int] | np.ndarray"
NOBODY = -1  # the client and visit of what concerns no single client
WAIT = "wait"
PHASES = (
    WAIT,
    "select",
    "broadcast",
    "visits",
    "load",
    "train",
    "report",
    "collect",
    "cluster",
    "reduce",
    "update",
    "evaluate",
    "record",
    "checkpoint",
    "recover",
    "engine",
)


class Timeline:
    """What a rank does and when; this one keeps nothing."""

    def at_step(self, step: int) -> None:
        """Note the server step that the following events belong to."""

    def command(self, name: str) -> AbstractContextManager[None]:
        """Note that the block carries out a command of the engine."""
        return nullcontext()

    def enter(self, phase: str, start: float, client: Numbers, visit: Numbers) -> None:
        """Note that a phase begins; see `leave`."""

    def leave(self, phase: str, start: float, end: float, client: Numbers, visit: Numbers) -> None:
        """Note a phase that ends.

        Args:
            phase: name of the phase; the same as in the table of seconds.
            start: when it began, by `perf_counter`.
            end: when it ended.
            client: number of the client, or of several; `NOBODY` for none.
            visit: number of its visit; of several clients, that of each.
        """

    def call(self, name: str, purpose: str, start: float, end: float, sent: int, messages: int) -> None:
        """Note an MPI call that ends.

        Args:
            name: name of the call.
            purpose: what it is for.
            start: when it began, by `perf_counter`.
            end: when it ended.
            sent: bytes that left this rank.
            messages: number of messages that left this rank.
        """

    def calls_before(self, name: str, purpose: str, sent: int, messages: int) -> None:
        """Note MPI calls from before the recording, so that its bytes are those of `mpi_traffic.csv`."""

    def sent(self, message: int) -> None:
        """Note that a message leaves; it has the same number on the rank that receives it."""

    def received(self, message: int) -> None:
        """Note that a message has arrived."""

    def lost(self, rank: int) -> None:
        """Note that a rank is lost, by its number when the run began."""


NO_TIMELINE = Timeline()


@dataclass(frozen=True)
class ClockReading:
    """The clock of this rank beside that of rank 0.

    Attributes:
        at: when the two were compared, by `perf_counter` of this rank.
        offset: seconds to add to `perf_counter` of this rank for that of rank 0.
        error: largest error of the offset, in seconds; 0 if both ranks read the same clock.
        began: `perf_counter` of rank 0 when the comparison began; the same on every rank.
    """

    at: float
    offset: float = 0.0
    error: float = 0.0
    began: float = 0.0


class _Phase:
    """A block timed as one phase; a plain class, because event-driven runs open several per arrival."""

    def __init__(self, watch: Stopwatch, name: str, client: Numbers, visit: Numbers) -> None:
        self.watch, self.name, self.client, self.visit = watch, name, client, visit

    def __enter__(self) -> None:
        watch, self.start = self.watch, perf_counter()
        watch.until(self.start)
        watch.open.append(self.name)
        watch.timeline.enter(self.name, self.start, self.client, self.visit)

    def __exit__(self, *error: object) -> None:
        watch, end = self.watch, perf_counter()
        watch.until(end)
        watch.open.pop()
        watch.timeline.leave(self.name, self.start, end, self.client, self.visit)


class Stopwatch:
    """Seconds spent per phase. Phases may nest: the time of an inner one does not count for the outer.

    Args:
        timeline: is told of each phase.

    Attributes:
        seconds: phase -> seconds since the last `take`; those in no phase are under an empty name.
        open: the phases that are under way, the outermost first, after an empty name.
    """

    def __init__(self, timeline: Timeline = NO_TIMELINE) -> None:
        self.timeline = timeline
        self.seconds: dict[str, float] = defaultdict(float)
        self.open = [""]
        self._cpu, self._start = process_time(), perf_counter()
        self._last = self._start  # until when seconds are counted

    def __call__(self, phase: str, client: Numbers = NOBODY, visit: Numbers = NOBODY) -> _Phase:
        """Count the time of the block as `phase`.

        Args:
            phase: one of `PHASES`.
            client: the client that the block is about, or several; none by default.
            visit: its visit; of several clients, that of each.
        """
        return _Phase(self, phase, client, visit)

    def until(self, now: float) -> None:
        """Count the time until now for the innermost phase that is under way."""
        self.seconds[self.open[-1]] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase so far, and start again from zero.

        Beside the phases, `cpu` is the processor time of this process, and `elapsed` all its seconds.
        """
        now, cpu = perf_counter(), process_time()
        self.until(now)
        out = {phase: self.seconds.get(phase, 0.0) for phase in PHASES}
        out |= {"cpu": cpu - self._cpu, "elapsed": now - self._start}
        self._cpu, self._start = cpu, now
        self.seconds.clear()
        return out


def now() -> np.ndarray:
    """Return the wall-clock time and the CPU time of this process, in seconds."""
    return np.array([perf_counter(), process_time()])
