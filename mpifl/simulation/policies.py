"""When the server steps, and who visits next: one object per kind of federation.

Which methods can run without rounds, and under which policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import UserError, require
from mpifl.core.federation import Federation
from mpifl.core.rng import Key

from .clock import Clock, DrawnClock, Replay, ReplayClock, VirtualClock, WallClock, WallTime
from .durations import VisitDuration
from .trace import Trace
from .upload_triggers import OneEachStep, Uploads
from .visits import DispatchState, Start

RATE = "take a rate in (0, 1]; 1 takes a step in full"


class Policy(ABC):
    """What drives a federation.

    Attributes:
        max_staleness: uploads that lag more server steps than this are refused; None refuses none.
        rate, staleness_a: for methods that have no rule of their own for stale or single uploads: a step goes
            `rate * (1 + lag)^-staleness_a` of the way from the old rows to what the method wants.
    """

    max_staleness: int | None
    rate: float
    staleness_a: float

    def __post_init__(self) -> None:
        late = self.max_staleness
        require(late is None or late >= 0, "max_staleness", late, "take 0 or more steps, or null for any")
        require(0 < self.rate <= 1, "rate", self.rate, RATE)
        require(self.staleness_a >= 0, "staleness_a", self.staleness_a, "take 0 (ignore lag) or more")

    @abstractmethod
    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return how many visits are under way at a time."""

    @abstractmethod
    def ready(self, waiting: int, in_flight: int) -> bool:
        """Return whether the server steps now, with `waiting` uploads at hand and `in_flight` visits under
        way.
        """

    @property
    def singly(self) -> bool:
        """Whether each step takes one upload."""
        return False

    @property
    def fresh(self) -> bool:
        """Whether every upload was trained on the rows that it meets."""
        return False

    @property
    def versions(self) -> int:
        """How many versions of the rows the server keeps."""
        return 1

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is made of seconds, and visits last as long as delays and links say; if not,
        it is the number of steps.
        """
        return True

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Return who starts now. Default: the cohort of the first step at first, then anyone idle."""
        chosen: list[int] = []
        if not dispatch.number:
            chosen = [k for k in self.first(dispatch) if dispatch.here is None or dispatch.here(k)]
        while len(dispatch.busy) + len(chosen) < dispatch.places:
            client = dispatch.draw(chosen, dispatch.number + len(chosen))
            if client is None:
                break
            chosen.append(client)
        return [(k, dispatch.version) for k in chosen]

    def first(self, dispatch: DispatchState) -> list[int]:
        """Return who starts first."""
        cohort: list[int] = dispatch.sampler(1).tolist()
        return cohort

    def begin(self, federation: Federation) -> None:
        """Prepare the clients' data; every rank calls."""
        return

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return the duration of visits, `duration` being that of devices and links."""
        return duration

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time. Default: the duration decides."""
        return VirtualClock(duration)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time."""
        return WallClock(duration, scale)

    def rates(self, lag: np.ndarray) -> np.ndarray:
        """Return how far a step goes for uploads that lag so many steps [m]."""
        return np.asarray(self.rate * (1.0 + lag) ** -self.staleness_a)


class OneByOne(Policy):
    """The server steps at every upload."""

    @property
    def singly(self) -> bool:
        """One upload a step."""
        return True

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Step at once."""
        return waiting >= 1


@dataclass(frozen=True)
class Synchronous:
    """Synchronous rounds by the engine that reduces over ranks; every method runs under it."""


@dataclass(frozen=True)
class Barrier(Policy):
    """Synchronous rounds, message by message: a cohort starts together, the server waits for all of it. The
    cohort is `participation` or `cohort_size`.
    """

    max_staleness: int | None = None
    rate: float = 1.0
    staleness_a: float = 0.0

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the cohort's size."""
        return num_sampled

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Step when everybody is back."""
        return in_flight == 0

    @property
    def fresh(self) -> bool:
        """Nobody steps while others train."""
        return True

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Start the next cohort when nobody is under way."""
        if dispatch.busy:
            return []
        return [(k, dispatch.version) for k in dispatch.sampler(dispatch.version + 1).tolist()]


@dataclass(frozen=True)
class EveryArrival(OneByOne):
    """Fully asynchronous: the server steps at every arrival, a cohort of visits is under way.

    Attributes:
        max_staleness, rate, staleness_a: see `Policy`; the rates are FedAsync's.
    """

    max_staleness: int | None = None
    rate: float = 0.6
    staleness_a: float = 0.5

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the configured number of visits."""
        return num_sampled


@dataclass(frozen=True)
class Buffer(Policy):
    """Semi-asynchronous (FedBuff): the server steps when `size` uploads are at hand.

    Attributes:
        size: B. max_staleness, rate, staleness_a: see `Policy`.
    """

    size: int = 10
    max_staleness: int | None = None
    rate: float = 1.0
    staleness_a: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "a buffer needs at least one report; use every_arrival for none"
        require(self.size >= 1, "size", self.size, remedy)

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Return the configured number of visits, which must fill the buffer."""
        remedy = f"only {num_sampled} visits are under way at a time: the server would wait for ever"
        require(self.size <= num_sampled, "policy.size", self.size, remedy)
        return num_sampled

    def ready(self, waiting: int, in_flight: int) -> bool:
        """Step when the buffer is full."""
        return waiting >= self.size


@dataclass(frozen=True)
class ClientDecides(OneByOne):
    """Client-centred (CCFL): all clients are under way all the time and each uploads when it chooses.

    Attributes:
        uploads: when a client uploads: one drawn for each step, when its visit is over, at a rate of its own,
            or when its data drift.
        max_staleness, rate, staleness_a: see `Policy`.
    """

    uploads: Uploads = field(default_factory=OneEachStep)
    max_staleness: int | None = None
    rate: float = 0.6
    staleness_a: float = 0.5

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """All clients are always under way."""
        return num_clients

    def first(self, dispatch: DispatchState) -> list[int]:
        """Start everyone."""
        return list(range(dispatch.sampler.num_clients))

    @property
    def in_seconds(self) -> bool:
        """As the reason for uploads has it."""
        return self.uploads.in_seconds

    def begin(self, federation: Federation) -> None:
        """As the reason for uploads has it."""
        self.uploads.begin(federation)

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """As the reason for uploads has it."""
        return self.uploads.paced(duration, federation)

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """As the reason for uploads has it."""
        return self.uploads.virtual_clock(duration, num_clients, key)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """As the reason for uploads has it."""
        return self.uploads.wall_clock(duration, scale)


@dataclass(frozen=True)
class DrawnStaleness(OneByOne):
    """Staleness by decree, as the original FedAsync simulates it: the upload of each step was trained on rows
    that are s steps old, s drawn uniformly from 0..most; virtual time is the number of steps.

    Attributes:
        most: largest staleness drawn. rate, staleness_a: see `Policy`.
    """

    most: int = 4
    rate: float = 0.6
    staleness_a: float = 0.5
    max_staleness = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.most >= 0, "most", self.most, "take 0 (always fresh) or more steps")

    @property
    def in_seconds(self) -> bool:
        """Steps take no time."""
        return False

    @property
    def versions(self) -> int:
        """As many as may be asked for."""
        return self.most + 1

    def concurrency(self, num_clients: int, num_sampled: int) -> int:
        """Visits that may be under way before the oldest one arrives; needs as many clients."""
        remedy = f"up to {self.most + 1} visits are under way, and there are {num_clients} clients"
        require(self.most < num_clients, "policy.most", self.most, remedy)
        return self.most + 1

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Visits arrive in the order they start."""
        return DrawnClock()

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Real arrivals would not have the staleness that was drawn."""
        raise UserError("clock.name", "wall", "policy drawn_staleness fixes the order; take clock virtual")

    def starts(self, dispatch: DispatchState) -> list[Start]:
        """Start every next visit whose rows are there already."""
        out: list[Start] = []
        while len(out) <= self.most:
            number = dispatch.number + len(out)
            version = max(0, number - dispatch.key.of("staleness", number).below(self.most + 1))
            client = None if version > dispatch.version else dispatch.draw([k for k, _ in out], number)
            if client is None:
                break
            out.append((client, version))
        return out


def open_clock(kind: object, policy: Policy, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
    """Return the clock of a run; `kind` is one of `CLOCKS`."""
    if isinstance(kind, WallTime):
        return policy.wall_clock(duration, kind.scale)
    clock: Clock
    if isinstance(kind, Replay):
        clock = ReplayClock(Trace(kind.trace, num_clients))
    else:
        clock = policy.virtual_clock(duration, num_clients, key)
    clock.in_seconds = policy.in_seconds
    return clock


POLICIES: dict[str, type] = {
    "rounds": Synchronous,
    "barrier": Barrier,
    "every_arrival": EveryArrival,
    "buffer": Buffer,
    "client_decides": ClientDecides,
    "drawn_staleness": DrawnStaleness,
}


def check(algorithm: Algorithm, policy: Policy) -> None:
    """Raise `UserError` for a method that cannot run without rounds."""
    needs, name = algorithm.needs, type(algorithm).__name__
    remedy = f"{name} takes one upload at a time; take policy every_arrival or client_decides"
    require(not needs.one_by_one or policy.singly, "policy.name", "buffer or barrier", remedy)
    remedy = f"{name} looks at all clients of a round at once; it runs under policy rounds only"
    require(not (needs.probe or needs.memory or needs.rounds), "policy.name", "asynchronous", remedy)
    remedy = f"{name} compares the uploads of a step; take policy rounds, barrier or buffer"
    fresh = policy.fresh or not needs.together
    require(fresh, "policy.name", "stale uploads", f"{name} needs fresh uploads; take rounds or barrier")
    several = needs.several or needs.gram is not None
    require(not (several and policy.singly), "policy.name", "one upload at a time", remedy)
