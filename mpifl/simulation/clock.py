"""Clocks of asynchronous runs: the current time, and the next upload to arrive.

The virtual clock knows the end of a visit when it starts. The order of arrivals is therefore known without
any training, so visits train in parallel on all workers and the server processes them in virtual order. The
wall clock uses real arrivals, and holds slow clients back until they are due. The replay clock follows a
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
from typing import Any, ClassVar, Protocol

import numpy as np

from mpifl.comm.liveness import wait_until
from mpifl.core.errors import require
from mpifl.core.options import NonNegativeFloat, Options
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.traffic.ledger import Moves

from .availability import Presence
from .durations import LookLoads, VisitDuration
from .trace import Trace
from .visits import DispatchState, Start, Visit


class TrainingPool(Protocol):
    """The interface to clocks of the pool in which visits are trained (`comm.task_pool.Pool`)."""

    def finished(self) -> list[int]:
        """Return the numbers of the visits whose training is finished, in their order of arrival."""

    def poll(self) -> None:
        """Receive the visits that have arrived."""


class ClockMaker(Protocol):
    """The interface of a policy to clocks."""

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is in seconds; if not, it counts steps."""

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time."""

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time."""


class ClockConfig(Options, ABC):
    """The section `clock` of a configuration."""

    @abstractmethod
    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run.

        Args:
            policy: creates the clock; it may have its own kind of clock.
            duration: how long clients take from a download to an upload.
            num_clients: N, number of clients.
            key: random key of the system seed.
        """

    def ignores_delays(self, in_seconds: bool) -> str:
        """Return why delay, network and availability have no effect; empty if they have one.

        Args:
            in_seconds: whether the policy's virtual time is in seconds.
        """
        return ""

    def lacks_computing(self, in_seconds: bool) -> str:
        """Return why no seconds of computing are known, as `costs` and watts need; empty if they are.

        Args:
            in_seconds: whether the policy's virtual time is in seconds.
        """
        return self.ignores_delays(in_seconds)

    @property
    def remark(self) -> str:
        """A message to print at the start of a run; empty for none."""
        return ""


@dataclass(frozen=True)
class VirtualTime(ClockConfig):
    """The delay model determines the order of arrivals: the same on any number of ranks."""

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the policy's virtual clock."""
        return policy.virtual_clock(duration, num_clients, key)

    def ignores_delays(self, in_seconds: bool) -> str:
        """Return a message that names policies with virtual time in seconds; empty under such a policy."""
        if in_seconds:
            return ""
        why = "the policy's virtual time is made of steps"
        return f"{why}; leave it out, or use policy every_arrival, or client_decides with uploads when_done"


@dataclass(frozen=True)
class WallTime(ClockConfig):
    """Uploads arrive in real time.

    Attributes:
        scale: real seconds per simulated second, to hold slow clients back; 0 holds no client back.
    """

    scale: NonNegativeFloat = 0.0

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the policy's wall clock."""
        return policy.wall_clock(duration, self.scale)

    def ignores_delays(self, in_seconds: bool) -> str:
        """Return a message that asks for a scale; empty if there is one."""
        return (
            "" if self.scale else "clock wall holds nobody back with scale 0; leave it out, or give a scale"
        )


@dataclass(frozen=True)
class Replay(ClockConfig):
    """Starts and arrivals are those of an earlier run.

    Attributes:
        trace: path of the earlier run's `events.csv`.
    """

    trace: str = ""

    def open(self, policy: ClockMaker, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return a clock that follows the trace."""
        return ReplayClock(Trace(self.trace, num_clients), policy.in_seconds)

    def lacks_computing(self, in_seconds: bool) -> str:
        """Return that a trace has the times of uploads only."""
        return "a trace has the times of uploads, not those of computing"

    @property
    def remark(self) -> str:
        """A message that says where times come from, and what the trace does not contain."""
        left = "downloads that its run began and never uploaded are not repeated"
        return f"times are those of {self.trace}, not of delay, network, availability and newcomers; {left}"


CLOCKS: Registry[type[ClockConfig]] = Registry(
    "clocks", ClockConfig, {"virtual": VirtualTime, "wall": WallTime, "replay": Replay}
)


class Clock(ABC):
    """Decides which visit arrives next.

    Attributes:
        in_seconds: whether time is in seconds; if not, it is the number of steps.
        now: time of the last arrival.
        knows_visits: whether it knows all visits under way; a trace lacks those that never arrive.
    """

    knows_visits: ClassVar[bool] = True

    def __init__(self, in_seconds: bool = True) -> None:
        self.in_seconds = in_seconds
        self.now = 0.0

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Advance to the time when all one-shot statistics have arrived. Default: they take no time.

        Args:
            moved: bytes that each client downloaded and uploaded for them; empty if there are none.
            pool: the pool in which visits are trained.
        """
        return

    def start(self) -> None:
        """Start the time; called once, before the first visit starts."""
        return

    @property
    def energy(self) -> VisitDuration | None:
        """What gives the energy of visits; None (default) where none is counted."""
        return None

    @property
    def looks(self) -> LookLoads | None:
        """What second looks compute; None (default) where it takes no time."""
        return None

    @property
    @abstractmethod
    def visits(self) -> Collection[Visit]:
        """The visits under way."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in a form that JSON can store, without the visits under way."""
        return {"now": self.now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the visits under way are added afterwards."""
        self.now = state["now"]

    @abstractmethod
    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the time at which a visit that starts now is over.

        Args:
            client: number of the client.
            visit: number of its visits before this one.
            down: bytes of its download.
            up: bytes of its upload.
            look: work in second looks beside it, in units of one local training.
        """

    @abstractmethod
    def add(self, visit: Visit) -> None:
        """Add a visit that has started."""

    @abstractmethod
    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        """Remove the next visit to arrive and return it; set the time to its arrival.

        Args:
            pool: the pool in which visits are trained.
            until: a time; if nothing arrives up to it, the clock is set to it and None is returned.
        """

    def check_length(self, steps: int, uploads: int) -> None:
        """Raise `UserError` if it is known that a run cannot reach its end. Default: accept every run.

        Args:
            steps: number of server steps.
            uploads: smallest number of uploads that a step takes.
        """
        return

    @abstractmethod
    def is_tied(self) -> bool:
        """Return whether another visit arrives at the same instant; new visits start after the last one."""

    def starts(self, dispatch: DispatchState) -> list[Start] | None:
        """Return the visits that start now; None leaves it to the policy."""
        return None

    def goes_to_start(self, until: float, awaited: Collection[int], pool: TrainingPool) -> bool:
        """Advance to the next start, if it is before the next arrival; return whether there was one.

        Default: False.

        Args:
            until: a time; starts at this time or later do not count.
            awaited: absent clients that may start as soon as they come back.
            pool: pool in which visits are trained.
        """
        return False

    @property
    def available(self) -> Callable[[int], bool] | None:
        """Client -> whether it is available now; None if all clients are always available."""
        return None

    @property
    def needs_bytes(self) -> bool:
        """Whether the sizes of messages matter to `due`."""
        return False

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Advance to the time when a client can start, if none is available and no visit is under way.

        Args:
            num_clients: N, number of clients.
            pool: the pool in which visits are trained.
        """
        raise AssertionError("all clients are always there")


class _QueueClock(Clock):
    """Visits arrive in the order in which they are due.

    Args:
        in_seconds: whether time is in seconds; if not, it is the number of steps.
        presence: when clients are available, on this clock; None: always.
    """

    def __init__(self, in_seconds: bool = True, presence: Presence | None = None) -> None:
        super().__init__(in_seconds)
        self._queue: list[Visit] = []
        self.presence = presence

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

    @property
    def available(self) -> Callable[[int], bool] | None:
        presence = self.presence
        if presence is None or presence.always:
            return None
        return lambda k: presence.is_available(k, self.now)


class VirtualClock(_QueueClock):
    """Visits arrive at the times of the delay model.

    Args:
        duration: how long clients take from a download to an upload.
    """

    def __init__(self, duration: VisitDuration) -> None:
        super().__init__(presence=duration.presence)
        self.duration = duration

    @property
    def energy(self) -> VisitDuration | None:
        """The durations, if devices have watts."""
        return self.duration if self.duration.watts else None

    @property
    def looks(self) -> LookLoads | None:
        """Those of the durations."""
        return self.duration.looks

    @property
    def needs_bytes(self) -> bool:
        """Whether links have a rate."""
        return self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the end of the visit by delay, network and availability."""
        return self.duration.end(client, visit, self.now, down, up, look=look)

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Advance by the duration of the messages."""
        self.now = self.duration.statistics_end(moved)

    def goes_to_start(self, until: float, awaited: Collection[int], pool: TrainingPool) -> bool:
        """Advance to the first return of a client, if it is before the next arrival."""
        first = self.return_of(awaited)
        if not self._queue or not self.now < first < min(until, self._queue[0].due):
            return False
        self.now = first
        return True

    def return_of(self, clients: Collection[int]) -> float:
        """Return the time of the first return of an absent client; infinity if none is absent."""
        return first_return(self.duration.presence, clients, self.now)

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Advance to the first return of a client."""
        self.now = self.return_of(range(num_clients))


def first_return(presence: Presence, clients: Collection[int], now: float) -> float:
    """Return the time of the first return of an absent client; infinity if none is absent."""
    return min((t for k in clients if (t := presence.next_available(k, now)) > now), default=inf)


class DrawnClock(_QueueClock):
    """One upload per step: by a client drawn for that step, or in the order of the starts.

    Args:
        num_clients: N, number of clients.
        key: random key of the draws; None: visits arrive in the order in which they start.
        presence: from which step on newcomers are there, to be drawn for the next; None: all are from the
            first.
    """

    AHEAD = 1024  # steps drawn at a time

    def __init__(
        self, num_clients: int = 0, key: Key | None = None, presence: Presence | None = None
    ) -> None:
        super().__init__(in_seconds=False, presence=presence)
        self.num_clients, self.key = num_clients, key
        self.drawn = self.started = 0
        self.turns: list[deque[int]] = [deque() for _ in range(num_clients)]

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the next step drawn for the client, or without a key the number of visits started.

        It is infinite, and the visit never arrives, if the client leaves before.
        """
        self.started += 1
        if self.key is None:
            return float(self.started)
        leaves = inf if self.presence is None else self.presence.leaves.get(client, inf)
        while not self.turns[client]:
            if self.drawn * self.AHEAD >= leaves:
                return inf
            for step, k in enumerate(self._draw(self.key.of(self.drawn)), self.drawn * self.AHEAD + 1):
                self.turns[k].append(step)
            self.drawn += 1
        return float(self.turns[client].popleft())

    def _draw(self, key: Key) -> list[int]:
        """Return who uploads in each of the next steps, uniform over the clients that are there."""
        rng, presence = key.numpy(), self.presence
        joins, leaves = ({}, {}) if presence is None else (presence.joins, presence.leaves)
        if leaves:
            joined, left = (
                np.array([when.get(k, default) for k in range(self.num_clients)])
                for when, default in ((joins, 0.0), (leaves, inf))
            )
            steps = range(self.drawn * self.AHEAD, (self.drawn + 1) * self.AHEAD)  # before each of the steps
            there = (np.flatnonzero((joined <= step) & (step < left)) for step in steps)
            return [int(rng.choice(some)) for some in there]
        if not joins:
            drawn: list[int] = rng.integers(self.num_clients, size=self.AHEAD).tolist()
            return drawn
        joined = np.array([joins.get(k, 0.0) for k in range(self.num_clients)])
        order = np.argsort(joined, kind="stable")  # of their joining
        before = np.arange(self.AHEAD) + self.drawn * self.AHEAD  # steps before each of these steps
        present = np.searchsorted(joined[order], before, side="right")
        return order[rng.integers(present)].tolist()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return the time and the drawn steps."""
        drawn = {"drawn": self.drawn, "started": self.started, "turns": [[*t] for t in self.turns]}
        return super().state_dict() | drawn

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the time and the drawn steps."""
        super().load_state_dict(state)
        self.drawn, self.started = state["drawn"], state["started"]
        self.turns = [deque(turns) for turns in state["turns"]]


class PlannedClock(_QueueClock):
    """One upload a step: each visit is planned for a step, and where it fails, another takes its place.

    Args:
        reads: (step, from 0, address of the draws) -> version of the rows that its visit reads.
        presence: from which step on newcomers are there; None: all are from the first.
    """

    def __init__(self, reads: Callable[[int, Key], int], presence: Presence | None = None) -> None:
        super().__init__(in_seconds=False, presence=presence)
        self.reads = reads
        self._version = 0  # of the server when visits started last

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
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
    """Visits arrive when their training is finished, but not before they are due.

    Args:
        duration: how long simulated clients take from a download to an upload.
        scale: real seconds per simulated second; 0 holds no client back.
    """

    def __init__(self, duration: VisitDuration, scale: float = 0.0) -> None:
        super().__init__()
        self.duration, self.scale = duration, scale
        self._origin = time.perf_counter()
        self._visits: dict[int, Visit] = {}  # by number

    @property
    def energy(self) -> VisitDuration | None:
        """The durations, if devices have watts and time is simulated."""
        return self.duration if self.duration.watts and self.scale else None

    @property
    def looks(self) -> LookLoads | None:
        """Those of the durations, if time is simulated."""
        return self.duration.looks if self.scale else None

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Wait until the statistics are due."""
        self.now = self.scale * self.duration.statistics_end(moved)
        end = time.perf_counter() + self.now

        def due() -> bool:
            pool.poll()  # keeps the watchdog informed
            return time.perf_counter() >= end

        wait_until(due)

    def start(self) -> None:
        """Start to count the time."""
        self._origin = time.perf_counter() - self.now

    @property
    def visits(self) -> Collection[Visit]:
        """The visits under way."""
        return self._visits.values()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the time of the last arrival and count from it."""
        super().load_state_dict(state)
        self.start()

    def _time(self) -> float:
        """Return the seconds since the start, strictly increasing: a trace must have no ties."""
        return max(time.perf_counter() - self._origin, nextafter(self.now, inf))

    @property
    def needs_bytes(self) -> bool:
        """Whether links have a rate and clients are held back."""
        return self.scale > 0 and self.duration.network.counts_bytes

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the real time until which the visit is held back."""
        if not self.scale:
            return self.now
        return self.scale * self.duration.end(client, visit, self.now / self.scale, down, up, look=look)

    def add(self, visit: Visit) -> None:
        """Add a visit that has started."""
        self._visits[visit.number] = visit

    def pop(self, pool: TrainingPool, until: float = inf) -> Visit | None:
        """Wait for the first visit that is finished and due."""

        def arrived() -> tuple[float, Visit | None] | None:
            for look in (False, True):
                if look:
                    pool.poll()  # in a run with one process, this trains
                now = self._time()
                if now >= until:
                    return until, None
                if (visit := self._arrived(pool, now)) is not None:
                    return now, visit
            return None

        now, visit = wait_until(arrived)
        self.now = now
        return None if visit is None else self._visits.pop(visit.number)

    def _arrived(self, pool: TrainingPool, now: float) -> Visit | None:
        """Return the first visit that is finished and due."""
        return next((v for n in pool.finished() if (v := self._visits[n]).due <= now), None)

    def is_tied(self) -> bool:
        """Return False: no two visits arrive at the same instant."""
        return False

    @property
    def available(self) -> Callable[[int], bool] | None:
        """Client -> whether it is available now; None if all always are, or if no client is held back."""
        if not self.scale or self.duration.presence.always:
            return None
        return lambda k: self.duration.presence.is_available(k, self.now / self.scale)

    def goes_to_start(self, until: float, awaited: Collection[int], pool: TrainingPool) -> bool:
        """Wait for the first return of a client, or the first arrival; return whether a client came back."""
        if not awaited or not self._visits:
            return False
        first = self.return_of(awaited)
        if first >= until:
            return False

        def ended() -> bool:
            pool.poll()
            now = self._time()
            return now >= first or self._arrived(pool, now) is not None

        wait_until(ended)
        if self._arrived(pool, self._time()) is not None:
            return False
        self.now = self._time()
        return True

    def return_of(self, clients: Collection[int]) -> float:
        """Return the real time of the first return of an absent client; infinity if none is absent."""
        return self.scale * first_return(self.duration.presence, clients, self.now / self.scale)

    def advance(self, num_clients: int, pool: TrainingPool) -> None:
        """Wait for the first return of a client."""
        first = self.return_of(range(num_clients))

        def back() -> bool:
            pool.poll()  # keeps the watchdog informed
            return self._time() >= first

        wait_until(back)
        self.now = self._time()


class ReplayClock(Clock):
    """Visits start and arrive at the times of a trace.

    Args:
        trace: trace of an earlier run.
        in_seconds: whether its times are in seconds.
    """

    knows_visits = False

    def __init__(self, trace: Trace, in_seconds: bool = True) -> None:
        super().__init__(in_seconds)
        self.trace = trace
        self._ended = False
        self._version = 0  # server version at the last start of visits
        self._visits: dict[tuple[int, int], Visit] = {}  # by client and visit

    def check_length(self, steps: int, uploads: int) -> None:
        """Raise `UserError` if the trace has too few arrivals for the steps."""
        there, needed = len(self.trace.rows), steps * uploads
        fewer = f"use {there // uploads} rounds at most" if uploads and there >= uploads else "use another"
        remedy = f"the trace ends before the run: it has {there} arrivals, and {steps} rounds take {needed}"
        require(needed <= there, "clock.trace", self.trace.path, f"{remedy}; {fewer}")

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Advance to the first start in the trace."""
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

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the arrival time in the trace."""
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
        remedy = (
            f"client {row.client} uploads a visit that it has not begun: this is not a trace of such a run"
        )
        if row.read_version > self._version:
            there = f"reads version {row.read_version}, and the server is at {self._version}"
            remedy = f"client {row.client} {there}: this is not a trace of such a run"
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
        """Return False: the versions in the trace tell which visits start between simultaneous arrivals."""
        return False

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return the visits that start at this instant in the trace."""
        self._version = dispatch.version
        return self.trace.starting(self.now, dispatch.version, dispatch.busy, self.in_seconds)

    def goes_to_start(self, until: float, awaited: Collection[int], pool: TrainingPool) -> bool:
        """Advance to a start before the next arrival, or to that of a visit of no duration that arrives next.

        The original dropped a visit then, or a client came back.
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
        """Advance to the next start in the trace."""
        start = self.trace.next_start()
        if start == inf:
            raise self.trace.ended()
        self.now = start
