"""Clocks of asynchronous runs: what time it is, and which upload arrives next.

The virtual clock knows when a visit ends the moment it starts. The order of arrivals is fixed without any
training, so visits train in parallel on all workers and the server takes them in virtual order. The wall
clock takes what has arrived, and holds slow clients back until they are due. The replay clock follows a
trace.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf, nextafter
from typing import Any, Protocol

from mpifl.comm.liveness import wait_until
from mpifl.core.errors import require
from mpifl.core.rng import Key
from mpifl.traffic.ledger import Moves

from .durations import VisitDuration
from .trace import Trace
from .visits import DispatchState, Start, Visit


class TrainingPool(Protocol):
    """The pool in which visits are trained (`comm.task_pool.Pool`), as far as clocks know it."""

    def finished(self) -> list[int]:
        """Return the numbers of the visits that are trained, in their order of arrival."""

    def poll(self) -> None:
        """Receive the visits that have arrived."""


class ClockMaker(Protocol):
    """A policy, as far as clocks know it."""

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is in seconds; if not, it counts steps."""

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time."""

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time."""


class ClockConfig(ABC):
    """The section `clock` of a configuration."""

    @abstractmethod
    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run.

        Args:
            policy: may bring a clock of its own.
            duration: how long clients take from a download to an upload.
            num_clients: N.
            key: of the system's draws.
        """

    def ignores_delays(self, in_seconds: bool) -> str:
        """Return why delay, network and availability have no effect; empty where they have one.

        Args:
            in_seconds: whether the policy's virtual time is in seconds.
        """
        return ""

    @property
    def remark(self) -> str:
        """What is said at the start of a run; empty for nothing."""
        return ""


@dataclass(frozen=True)
class VirtualTime(ClockConfig):
    """Arrivals are ordered by the delay model: the same on any number of ranks."""

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the policy's virtual clock."""
        return policy.virtual_clock(duration, num_clients, key)

    def ignores_delays(self, in_seconds: bool) -> str:
        """Name policies whose virtual time is in seconds."""
        if in_seconds:
            return ""
        why = "the policy's virtual time is made of steps"
        return f"{why}; leave it out, or take policy every_arrival, or client_decides with uploads when_done"


@dataclass(frozen=True)
class WallTime(ClockConfig):
    """Arrivals are real.

    Attributes:
        scale: real seconds per simulated second for which slow clients are held back; 0 holds nobody back.
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        require(self.scale >= 0, "scale", self.scale, "take 0 or more")

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the policy's wall clock."""
        return policy.wall_clock(duration, self.scale)

    def ignores_delays(self, in_seconds: bool) -> str:
        """Ask for a scale."""
        return (
            "" if self.scale else "clock wall holds nobody back with scale 0; leave it out, or give a scale"
        )


@dataclass(frozen=True)
class Replay(ClockConfig):
    """Starts and arrivals are those of an earlier run.

    Attributes:
        trace: its `events.csv`.
    """

    trace: str = ""

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return a clock that follows the trace."""
        return ReplayClock(Trace(self.trace, num_clients), policy.in_seconds)

    @property
    def remark(self) -> str:
        """Say where times come from, and what is not in the trace."""
        left = "downloads that its run began and never uploaded are not repeated"
        return f"times are those of {self.trace}, not of delay, network and availability; {left}"


CLOCKS: dict[str, type[ClockConfig]] = {"virtual": VirtualTime, "wall": WallTime, "replay": Replay}


class Clock(ABC):
    """Decides which visit arrives next.

    Attributes:
        in_seconds: whether time is in seconds; if not, it is the number of steps.
        now: time of the last arrival.
    """

    def __init__(self, in_seconds: bool = True) -> None:
        self.in_seconds = in_seconds
        self.now = 0.0

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Go on to the time when one-shot statistics have arrived. Default: they take no time.

        Args:
            moved: what each client downloaded and uploaded for them; nothing where there are none.
            pool: where visits are trained.
        """
        return

    def start(self) -> None:
        """Start the time; called once, before the first visit starts."""
        return

    @property
    @abstractmethod
    def visits(self) -> Collection[Visit]:
        """The visits under way."""

    def state_dict(self) -> dict[str, Any]:
        """Return what JSON can hold of the state, without the visits under way."""
        return {"now": self.now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the visits under way are added afterwards."""
        self.now = state["now"]

    @abstractmethod
    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return when a visit that starts now is over.

        Args:
            client: who trains.
            visit: how many visits it made before.
            down: bytes of its download.
            up: bytes of its upload.
        """

    @abstractmethod
    def add(self, visit: Visit) -> None:
        """Add a visit that has started."""

    @abstractmethod
    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        """Remove the next visit to arrive and return it; set the time to its arrival.

        Args:
            pool: where visits are trained.
            until: a time; where nothing arrives before or at it, the time is set to it, and None returned.
        """

    def check_length(self, steps: int, uploads: int) -> None:
        """Raise `UserError` where it is known that a run will not come to its end. Default: it will.

        Args:
            steps: of the server.
            uploads: that each of them takes at least.
        """
        return

    @abstractmethod
    def is_tied(self) -> bool:
        """Return whether another visit arrives at this very instant; new ones start after the last."""

    def starts(self, dispatch: DispatchState) -> list[Start] | None:
        """Return the visits that start now; None leaves it to the policy."""
        return None

    def goes_to_start(self, until: float) -> bool:
        """Go on to the next start that is known, before the next arrival; return whether there is one.

        Args:
            until: a time; starts at it or later do not count.
        """
        return False

    @property
    def available(self) -> Callable[[int], bool] | None:
        """Whether a client is there now; None: all are, always."""
        return None

    @property
    def needs_bytes(self) -> bool:
        """Whether the sizes of messages matter to `due`."""
        return False

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Go on to the time when a client can start: nobody is there and no visit is under way.

        Args:
            num_clients: N.
            pool: where visits are trained.
        """
        raise AssertionError("all clients are always there")


class _QueueClock(Clock):
    """Visits arrive in the order in which they are due."""

    def __init__(self, in_seconds: bool = True) -> None:
        super().__init__(in_seconds)
        self._queue: list[Visit] = []

    @property
    def visits(self) -> Collection[Visit]:
        return self._queue

    def add(self, visit: Visit) -> None:
        heapq.heappush(self._queue, visit)

    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        if until < inf and (not self._queue or self._queue[0].due > until):
            self.now = until
            return None
        visit = heapq.heappop(self._queue)
        self.now = visit.due
        return visit

    def is_tied(self) -> bool:
        return bool(self._queue) and self._queue[0].due == self.now


class VirtualClock(_QueueClock):
    """Visits arrive when the delay model says so.

    Args:
        duration: how long clients take from a download to an upload.
    """

    def __init__(self, duration: VisitDuration) -> None:
        super().__init__()
        self.duration = duration

    @property
    def needs_bytes(self) -> bool:
        """Whether links have a rate."""
        return self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the end by delay, network and availability."""
        return self.duration.end(client, visit, self.now, down, up)

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Go on by their messages."""
        self.now = self.duration.statistics_end(moved)

    @property
    def available(self) -> Callable[[int], bool] | None:
        """As the model of availability says."""
        presence = self.duration.presence
        return None if presence.always else (lambda k: presence.is_available(k, self.now))

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Go on to the first return of a client."""
        presence = self.duration.presence
        self.now = min(presence.next_available(k, self.now) for k in range(num_clients))


class DrawnClock(_QueueClock):
    """One upload a step: by a client drawn for that step, or in the order of the starts.

    Args:
        num_clients: N.
        key: address of the draws; None: visits arrive in the order in which they start.
    """

    AHEAD = 1024  # steps drawn at a time

    def __init__(self, num_clients: int = 0, key: Key | None = None) -> None:
        super().__init__(in_seconds=False)
        self.num_clients, self.key = num_clients, key
        self.drawn = self.started = 0
        self.turns: list[deque[int]] = [deque() for _ in range(num_clients)]

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the next step that was drawn for the client."""
        self.started += 1
        if self.key is None:
            return float(self.started)
        while not self.turns[client]:
            order = self.key.of(self.drawn).numpy().integers(self.num_clients, size=self.AHEAD)
            for step, k in enumerate(order.tolist(), self.drawn * self.AHEAD + 1):
                self.turns[k].append(step)
            self.drawn += 1
        return float(self.turns[client].popleft())

    def state_dict(self) -> dict[str, Any]:
        """Return the time and what was drawn."""
        drawn = {"drawn": self.drawn, "started": self.started, "turns": [[*t] for t in self.turns]}
        return super().state_dict() | drawn

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the time and what was drawn."""
        super().load_state_dict(state)
        self.drawn, self.started = state["drawn"], state["started"]
        self.turns = [deque(turns) for turns in state["turns"]]


class PlannedClock(_QueueClock):
    """One upload a step: each visit is planned for a step, and where it fails, another takes its place.

    Args:
        reads: (step, from 0, address of the draws) -> version of the rows that its visit reads.
    """

    def __init__(self, reads: Callable[[int, Key], int]) -> None:
        super().__init__(in_seconds=False)
        self.reads = reads
        self._version = 0  # of the server when visits started last

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the number, from 1, of the first step that has no visit."""
        return 1.0 + next(self._open_steps())

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return visits for the next steps that have none, up to one whose rows do not exist yet."""
        self._version, out = dispatch.version, list[Start]()
        for step in self._open_steps():
            version = self.reads(step, dispatch.key)
            taken, number = [k for k, _ in out], dispatch.num_started + len(out)
            client = None if version > dispatch.version else dispatch.draw(taken, number)
            if client is None:
                return out
            out.append((client, version))
        raise AssertionError("steps have no end")

    def _open_steps(self) -> Iterator[int]:
        planned = {visit.due for visit in self._queue}
        return (step for step in count(self._version) if step + 1 not in planned)


class WallClock(Clock):
    """Visits arrive when they are trained, and not before they are due.

    Args:
        duration: how long simulated clients take from a download to an upload.
        scale: real seconds per simulated second; 0 holds nobody back.
    """

    def __init__(self, duration: VisitDuration, scale: float = 0.0) -> None:
        super().__init__()
        self.duration, self.scale = duration, scale
        self._origin = time.perf_counter()
        self._visits: dict[int, Visit] = {}  # by number

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Wait until they are due."""
        self.now = self.scale * self.duration.statistics_end(moved)
        end = time.perf_counter() + self.now

        def due() -> bool:
            pool.poll()  # for the watchdog
            return time.perf_counter() >= end

        wait_until(due)

    def start(self) -> None:
        """Count time from here."""
        self._origin = time.perf_counter() - self.now

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self._visits.values()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the time of the last arrival, and count from there."""
        super().load_state_dict(state)
        self.start()

    def _time(self) -> float:
        """Return the seconds since the start, later than any before: a trace must have no ties."""
        return max(time.perf_counter() - self._origin, nextafter(self.now, inf))

    @property
    def needs_bytes(self) -> bool:
        """Whether links have a rate and clients are held back."""
        return self.scale > 0 and self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the real time until which the visit is held back."""
        if not self.scale:
            return self.now
        return self.scale * self.duration.end(client, visit, self.now / self.scale, down, up)

    def add(self, visit: Visit) -> None:
        """Add a visit that has started."""
        self._visits[visit.number] = visit

    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        """Wait for the first visit that is trained and due."""

        def due(now: float) -> Visit | None:
            return next((v for n in pool.finished() if (v := self._visits[n]).due <= now), None)

        def arrived() -> tuple[float, Visit | None] | None:
            for look in (False, True):
                if look:
                    pool.poll()  # in one process, it trains
                now = self._time()
                if now >= until:
                    return until, None
                if (visit := due(now)) is not None:
                    return now, visit
            return None

        now, visit = wait_until(arrived)
        self.now = now
        return None if visit is None else self._visits.pop(visit.number)

    def is_tied(self) -> bool:
        """Return False: no two visits arrive at the same instant."""
        return False

    @property
    def available(self) -> Callable[[int], bool] | None:
        """As the model of availability says, where clients are held back."""
        if not self.scale or self.duration.presence.always:
            return None
        return lambda k: self.duration.presence.is_available(k, self.now / self.scale)

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Wait for the first return of a client."""
        presence, now = self.duration.presence, self.now / self.scale
        first = min(presence.next_available(k, now) for k in range(num_clients))

        def back() -> bool:
            pool.poll()  # for the watchdog
            return self._time() >= first * self.scale

        wait_until(back)
        self.now = self._time()


class ReplayClock(Clock):
    """Visits start and arrive when a trace says so.

    Args:
        trace: of an earlier run.
        in_seconds: whether its times are in seconds.
    """

    def __init__(self, trace: Trace, in_seconds: bool = True) -> None:
        super().__init__(in_seconds)
        self.trace = trace
        self._ended = False
        self._version = 0  # of the server when visits started last
        self._visits: dict[tuple[int, int], Visit] = {}  # by client and visit

    def check_length(self, steps: int, uploads: int) -> None:
        """Refuse more steps than the trace has arrivals for."""
        there, needed = len(self.trace.rows), steps * uploads
        fewer = f"take {there // uploads} rounds at most" if uploads and there >= uploads else "take another"
        remedy = f"the trace ends before the run: it has {there} arrivals, and {steps} rounds take {needed}"
        require(needed <= there, "clock.trace", self.trace.path, f"{remedy}; {fewer}")

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Go on to the first start."""
        if len(moved) and self.trace.rows:
            self.now = self.trace.next_start()

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self._visits.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the time and the position in the trace."""
        return super().state_dict() | self.trace.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the time and the position in the trace."""
        super().load_state_dict(state)
        self.trace.load_state_dict(state)

    def due(self, client: int, visit: int, down: int, up: int) -> float:
        """Return the time in the trace."""
        return self.trace.arrival(client, visit)

    def add(self, visit: Visit) -> None:
        """Add a visit that has started."""
        self._visits[visit.client, visit.visit] = visit

    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        """Return the next visit in the trace."""
        last = self.trace.next_time() is None and until < inf and not self._ended  # the end of the last wave
        if last or self._is_after(until):
            self.now, self._ended = until, last
            return None
        row = self.trace.pop()
        remedy = f"client {row.client} uploads a visit that it has not begun: this is no trace of such a run"
        if row.read_version > self._version:
            there = f"reads version {row.read_version}, and the server is at {self._version}"
            remedy = f"client {row.client} {there}: no trace of such a run"
        require((row.client, row.visit) in self._visits, "clock.trace", row.place, remedy)
        self.now = row.time
        return self._visits.pop((row.client, row.visit))

    def _is_after(self, tick: float) -> bool:
        """Return whether the next arrival comes after a step at `tick`: later, or with rows that it makes."""
        following = self.trace.next_time()
        if following is None or following < tick:
            return False
        return following > tick or self.trace.rows[self.trace.at].read_version > self._version

    def is_tied(self) -> bool:
        """Return False: the versions in the trace say which visits start between arrivals of an instant."""
        return False

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return the visits that start at this instant in the trace."""
        self._version = dispatch.version
        return self.trace.starting(self.now, dispatch.version, dispatch.busy)

    def goes_to_start(self, until: float) -> bool:
        """Go on to a start before the next arrival, or to that of a visit of no duration that arrives next.

        The original dropped a visit then.
        """
        start, following = self.trace.next_start(), self.trace.next_time()
        if start >= until or following is None or start > following:
            return False
        row = self.trace.rows[self.trace.at]
        if start == following and (row.client, row.visit) in self._visits:
            return False
        self.now = start
        return True

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Go on to the next start in the trace."""
        start = self.trace.next_start()
        if start == inf:
            raise self.trace.ended()
        self.now = start
