"""Upload triggers: when the clients of policy `client_decides` upload.

Clients upload one per step, when their visits are over, at their own rates, or after drift. Each trigger is a
model of the delay between two uploads of a client. In virtual time the order of uploads is therefore known
before any training, and is the same on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Annotated

import numpy as np
from annotated_types import Interval

from mpifl.core.errors import UserError, require
from mpifl.core.federation import Federation
from mpifl.core.options import FinitePositive, Options, PositiveInt, UnitInterval
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.textfiles import check_per_client, read_per_client

from .client_devices import Cycle
from .clock import Clock, DrawnClock, VirtualClock, WallClock
from .delays import MOST_SIGMA, Delay
from .durations import VisitDuration


class UploadTrigger(Options, ABC):
    """Decides when a client uploads."""

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is in seconds, determined by delays and links; if not, it counts steps."""
        return True

    def prepare(self, federation: Federation) -> None:
        """Prepare the clients' data; called on every rank."""
        return

    @abstractmethod
    def interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return how long a client takes from a download to its upload.

        Args:
            duration: duration of computing and transfers on the clients' devices and links.
            federation: the clients.
        """

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time.

        Args:
            duration: result of `interval`.
            num_clients: N, number of clients.
            key: random key of the system seed.
        """
        return VirtualClock(duration)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time.

        Args:
            duration: result of `interval`.
            scale: real seconds per simulated second.
        """
        return WallClock(duration, scale)


@dataclass(frozen=True)
class OneEachStep(UploadTrigger):
    """In every server step one client, drawn uniformly, uploads; virtual time is the number of steps."""

    @property
    def in_seconds(self) -> bool:
        """Return False: steps take no time."""
        return False

    def interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return `duration`, which has no effect."""
        return duration

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return a clock that draws a client for each step."""
        return DrawnClock(num_clients, key.of("uploads"), duration.presence)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Raise `UserError`: real arrivals would not be those of the drawn clients."""
        remedy = "uploads one_each_step draws who uploads; use policy.uploads when_done, or clock virtual"
        raise UserError("clock.name", "wall", remedy)


@dataclass(frozen=True)
class WhenDone(UploadTrigger):
    """A client uploads as soon as its visit is over, and starts the next one immediately.

    The delay model gives the time of computing, the links that of transfers; both pause while the client is
    away.
    """

    def interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return `duration`."""
        return duration


@dataclass(frozen=True)
class PoissonRates(UploadTrigger):
    """Every client uploads according to a Poisson process with its own rate.

    A visit lasts until the client's next event, but at least as long as the delay model says.

    Attributes:
        mean_s: mean seconds between two uploads of a client; this is the median over clients.
        sigma: standard deviation of the logarithm of the clients' means; 0 gives all clients the same rate.
        file: a CSV file with the columns `client` and `mean_s`, one row for each client, instead of draws.
    """

    mean_s: FinitePositive = 10.0
    sigma: Annotated[float, Interval(ge=0, le=MOST_SIGMA)] = 1.0
    file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect beside file; leave one of them out"
        for name in ("mean_s", "sigma"):
            given = getattr(self, name)
            require(not self.file or given == getattr(PoissonRates, name), name, given, remedy)

    def mean(self, client: int, key: Key) -> float:
        """Return the mean seconds between two uploads of a client."""
        if self.file:
            return _means(self.file)[client][0]
        return self.mean_s * float(np.exp(self.sigma * key.of("rate", client).numpy().standard_normal()))

    def interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return a duration that lasts until the client's next event."""
        if self.file:
            check_per_client(_means(self.file), federation.num_clients, self.file, "policy.uploads.file")
        return replace(duration, delay=_AtRates(self, duration.delay))

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock; raise `UserError` for scale 0, because rates are per simulated second."""
        remedy = "rates need simulated seconds; use a scale above 0, or clock virtual"
        require(scale > 0, "clock.scale", scale, remedy)
        return super().wall_clock(duration, scale)


@lru_cache(maxsize=4)
def _means(file: str) -> dict[int, list[float]]:
    def parse(row: Mapping[str, str], place: str) -> float:
        seconds = float(row["mean_s"])
        require(0 < seconds < inf, place, seconds, "use a positive number of seconds")
        return seconds

    needs = "a client and the mean seconds between its uploads"
    return read_per_client(file, "policy.uploads.file", "client, mean_s", needs, parse)


@dataclass(frozen=True)
class _AtRates(Delay):
    rates: PoissonRates
    work: Delay

    def seconds(self, client: int, visit: int, key: Key) -> float:
        mean = self.rates.mean(client, key)
        gap = float(key.of("gap", client, visit).numpy().exponential(mean))
        return max(gap, self.work.seconds(client, visit, key))


@dataclass(frozen=True)
class Drift(UploadTrigger):
    """A client trains and uploads when its data have drifted since its last upload.

    It gets new data in cycles, whose length the delay model gives. If the new data differ by less than
    `threshold` from those of its last upload, it keeps its model and sends nothing. FedConD (Chen et al.,
    IEEE Big Data 2021) detects drift locally from losses, Fielding (arXiv:2411.01580) from label
    distributions. Here the true shares of the groups replace a detector without errors.

    Attributes:
        threshold: total variation distance in [0, 1] between the shares of the groups in the data, from which
            a client uploads; with 0 it uploads in every cycle.
        longest: number of cycles after which a client uploads in any case.
    """

    threshold: UnitInterval = 0.1
    longest: PositiveInt = 100

    def prepare(self, federation: Federation) -> None:
        """Skip the cycles in which a client does not train."""
        federation.await_drift(self.threshold, self.longest)

    def interval(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return a duration that lasts until the client's data have drifted."""
        cycle, delay = federation.cycle, duration.delay
        return replace(duration, delay=_AfterDrift(cycle, delay), computing=_LastCycle(cycle, delay))


@dataclass(frozen=True)
class _AfterDrift(Delay):
    cycle: Cycle
    work: Delay

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the total seconds of all cycles since the client's last visit; `work` takes cycles."""
        last = self.cycle(client, visit - 1) if visit else -1
        cycles = range(last + 1, self.cycle(client, visit) + 1)
        return sum(self.work.seconds(client, c, key) for c in cycles)


@dataclass(frozen=True)
class _LastCycle(Delay):
    cycle: Cycle
    work: Delay

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the seconds of the cycle in which the client trains."""
        return self.work.seconds(client, self.cycle(client, visit), key)


UPLOAD_TRIGGERS: Registry[type[UploadTrigger]] = Registry(
    "uploads",
    UploadTrigger,
    {"one_each_step": OneEachStep, "when_done": WhenDone, "rates": PoissonRates, "drift": Drift},
)
