"""What time it is, and whose upload comes next.

The virtual clock knows when a visit ends the moment it starts: the order of arrivals is fixed without
computing anything, so visits train in parallel on all workers and the server takes them in virtual order. The
wall clock takes what is there; slow clients are held back until they are due. A replay follows a trace.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

from mpifl.comm import Pool
from mpifl.comm.liveness import patiently
from mpifl.core.errors import require
from mpifl.core.rng import Key

from .durations import VisitDuration
from .trace import Trace
from .visits import DispatchState, Start, Visit


@dataclass(frozen=True)
class VirtualTime:
    """Arrivals are ordered by the delay model: the same on any number of ranks."""


@dataclass(frozen=True)
class WallTime:
    """Arrivals are real.

    Attributes:
        scale: real seconds per simulated second for which slow clients are held back; 0 holds nobody back.
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "take 0 or more")


@dataclass(frozen=True)
class Replay:
    """Starts and arrivals are those of an earlier run.

    Attributes:
        trace: its `events.csv`.
    """

    trace: str = ""


CLOCKS: dict[str, type] = {"virtual": VirtualTime, "wall": WallTime, "replay": Replay}


class Clock(ABC):
    """Decides which visit arrives next.

    Attributes:
        now: time of the last arrival.
        in_seconds: whether that is in seconds; if not, it is the number of steps.
    """

    in_seconds = True

    def __init__(self) -> None:
        self.heap: list[Visit] = []
        self.now = 0.0

    def begin(self) -> None:
        """The run starts."""
        return

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self.heap

    def state(self) -> dict[str, Any]:
        """Return what it remembers besides the visits under way; what JSON can hold."""
        return {"now": self.now}

    def restore(self, state: Mapping[str, Any], visits: Sequence[Visit]) -> None:
        """Go on from a state, with visits under way."""
        self.now = state["now"]
        for visit in visits:
            self.add(visit)

    @abstractmethod
    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return when a visit that starts now, and moves so many bytes, is over."""

    def add(self, visit: Visit) -> None:
        """Take note of a visit that has started."""
        heapq.heappush(self.heap, visit)

    @abstractmethod
    def next(self, pool: Pool) -> Visit:
        """Return the next visit to arrive, and set the time to its arrival."""

    def more(self) -> bool:
        """Return whether another visit arrives at this very instant: places are filled after the last."""
        return bool(self.heap) and self.heap[0].due == self.now

    def starts(self, dispatch: DispatchState) -> list[Start] | None:
        """Return who starts now; None leaves it to the policy."""
        return None

    @property
    def here(self) -> Callable[[int], bool] | None:
        """Whether a client is there now; None: all are, always."""
        return None

    @property
    def counts_bytes(self) -> bool:
        """Whether it asks for the sizes of messages."""
        return False

    def skip(self, num_clients: int) -> None:
        """Nobody is there and nobody is under way: go on to when that changes."""
        raise AssertionError("somebody is always there")


class VirtualClock(Clock):
    """Visits arrive when the delay model says so."""

    def __init__(self, duration: VisitDuration) -> None:
        super().__init__()
        self.duration = duration

    @property
    def counts_bytes(self) -> bool:
        """Whether links have a rate."""
        return self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the end that the duration gives."""
        return self.duration.end(client, visit, self.now, down, up)

    def next(self, pool: Pool) -> Visit:
        """Return the earliest."""
        visit = heapq.heappop(self.heap)
        self.now = visit.due
        return visit

    @property
    def here(self) -> Callable[[int], bool] | None:
        """As the model of availability has it."""
        presence = self.duration.presence
        return (lambda k: presence.here(k, self.now)) if presence.model.off_s else None

    def skip(self, num_clients: int) -> None:
        """Go on to the first return."""
        self.now = min(self.duration.presence.back(k, self.now) for k in range(num_clients))


class DrawnClock(Clock):
    """One upload a second: by a client drawn for that second, or in the order of the starts.

    Args:
        num_clients, key: who is drawn and from where; None: visits arrive in the order they start.
    """

    AHEAD = 1024  # seconds drawn at a time

    def __init__(self, num_clients: int = 0, key: Key | None = None) -> None:
        super().__init__()
        self.num_clients, self.key = num_clients, key
        self.drawn = self.started = 0
        self.turns: list[deque[int]] = [deque() for _ in range(num_clients)]

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the client's next turn."""
        self.started += 1
        if self.key is None:
            return float(self.started)
        while not self.turns[client]:
            order = self.key.of(self.drawn).numpy().integers(self.num_clients, size=self.AHEAD)
            for second, k in enumerate(order.tolist(), self.drawn * self.AHEAD + 1):
                self.turns[k].append(second)
            self.drawn += 1
        return float(self.turns[client].popleft())

    def next(self, pool: Pool) -> Visit:
        """Return the earliest."""
        visit = heapq.heappop(self.heap)
        self.now = visit.due
        return visit

    def state(self) -> dict[str, Any]:
        """Return also what was drawn."""
        drawn = {"drawn": self.drawn, "started": self.started, "turns": [[*t] for t in self.turns]}
        return super().state() | drawn

    def restore(self, state: Mapping[str, Any], visits: Sequence[Visit]) -> None:
        """Go on with what was drawn."""
        super().restore(state, visits)
        self.drawn, self.started = state["drawn"], state["started"]
        self.turns = [deque(turns) for turns in state["turns"]]


class WallClock(Clock):
    """Visits arrive when they are trained, not before they are due.

    Args:
        duration: of the simulated devices.
        scale: real seconds per simulated second; 0 holds nobody back.
    """

    def __init__(self, duration: VisitDuration, scale: float = 0.0) -> None:
        super().__init__()
        self.duration, self.scale = duration, scale
        self.origin = time.perf_counter()
        self.under_way: dict[int, Visit] = {}

    def begin(self) -> None:
        """Time counts from here."""
        self.origin = time.perf_counter()

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self.under_way.values()

    def restore(self, state: Mapping[str, Any], visits: Sequence[Visit]) -> None:
        """Go on at the time of the last arrival."""
        super().restore(state, visits)
        self.origin = time.perf_counter() - self.now

    def _time(self) -> float:
        """Return the seconds since the start: later than any before, so that a trace has no ties."""
        return max(time.perf_counter() - self.origin, nextafter(self.now, inf))

    @property
    def counts_bytes(self) -> bool:
        """Whether links have a rate and real time is scaled."""
        return self.scale > 0 and self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the real time before which the visit is held back."""
        if not self.scale:
            return self.now
        return self.scale * self.duration.end(client, visit, self.now / self.scale, down, up)

    def add(self, visit: Visit) -> None:
        """Take note of a visit that has started."""
        self.under_way[visit.number] = visit

    def next(self, pool: Pool) -> Visit:
        """Return the first that is trained and due."""

        def due() -> Visit | None:
            now = self._time()
            return next((v for n in pool.finished() if (v := self.under_way[n]).due <= now), None)

        def arrived() -> Visit | None:
            return due() or pool.look() or due()

        visit: Visit = patiently(arrived)
        self.now = self._time()
        return self.under_way.pop(visit.number)

    def more(self) -> bool:
        """No two arrive at the same instant."""
        return False

    @property
    def here(self) -> Callable[[int], bool] | None:
        """As the model of availability has it, where real time is scaled."""
        if not self.scale or not self.duration.presence.model.off_s:
            return None
        return lambda k: self.duration.presence.here(k, self.now / self.scale)

    def skip(self, num_clients: int) -> None:
        """Wait for the first return."""
        back = min(self.duration.presence.back(k, self.now / self.scale) for k in range(num_clients))
        patiently(lambda: self._time() >= back * self.scale)
        self.now = self._time()


class ReplayClock(Clock):
    """Visits start and arrive when a trace says so."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.under_way: dict[tuple[int, int], Visit] = {}

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self.under_way.values()

    def state(self) -> dict[str, Any]:
        """Return also the place in the trace."""
        return super().state() | self.trace.state()

    def restore(self, state: Mapping[str, Any], visits: Sequence[Visit]) -> None:
        """Go on from a place in the trace."""
        super().restore(state, visits)
        self.trace.restore(state)

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the time in the trace."""
        return self.trace.arrival(client, visit)

    def add(self, visit: Visit) -> None:
        """Take note of a visit that has started."""
        self.under_way[visit.client, visit.visit] = visit

    def next(self, pool: Pool) -> Visit:
        """Return the next in the trace."""
        row = self.trace.pop()
        require(
            (row.client, row.visit) in self.under_way,
            "clock.trace",
            row.place,
            f"client {row.client} uploads a visit that it has not begun: this is no trace of such a run",
        )
        self.now = row.time
        return self.under_way.pop((row.client, row.visit))

    def more(self) -> bool:
        """As the trace has it."""
        return bool(self.under_way) and self.trace.next_time() == self.now

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return those that start at this instant in the trace."""
        return self.trace.starting(self.now)

    def skip(self, num_clients: int) -> None:
        """Go on to the next start."""
        self.now = self.trace.next_start()
