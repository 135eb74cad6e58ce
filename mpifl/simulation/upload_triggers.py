"""When the clients of policy `client_decides` upload: one a step, when visits are over, at rates of their
own, or after drift.

The last two say how long a client lets pass between two uploads, as a model of delays: in virtual time the
order of uploads is known before anything is trained, and the same on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from mpifl.core.errors import require
from mpifl.core.federation import Federation
from mpifl.core.rng import Key
from mpifl.core.textfiles import check_per_client, read_per_client

from .clock import Clock, DrawnClock, VirtualClock, WallClock
from .delays import MOST_SIGMA, Delay
from .durations import VisitDuration

Cycle = Callable[[int, int], int]  # (client, visit) -> number of the data it meets then


class Uploads(ABC):
    """Why a client uploads."""

    @property
    def in_seconds(self) -> bool:
        """Whether virtual time is made of seconds, and visits last as long as delays and links say."""
        return True

    def begin(self, federation: Federation) -> None:
        """Prepare the clients' data; every rank calls."""
        return

    @abstractmethod
    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Return the duration at which clients upload, `duration` being that of their devices and links."""

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Return the clock of a run in virtual time."""
        return VirtualClock(duration)

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Return the clock of a run in real time."""
        return WallClock(duration, scale)


@dataclass(frozen=True)
class OneEachStep(Uploads):
    """In every server step one client, drawn uniformly, uploads; virtual time is the number of steps."""

    @property
    def in_seconds(self) -> bool:
        """Steps take no time."""
        return False

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Devices and links make no difference."""
        return duration

    def virtual_clock(self, duration: VisitDuration, num_clients: int, key: Key) -> Clock:
        """Draw a client for each step."""
        return DrawnClock(num_clients, key.of("uploads"))


@dataclass(frozen=True)
class WhenDone(Uploads):
    """A client uploads as soon as its visit is over, and the next one begins at once: computing takes as long
    as the delay model says, transfers as long as the links do, and both wait while the client is away.
    """

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Take the duration of devices and links as it is."""
        return duration


@dataclass(frozen=True)
class Rates(Uploads):
    """Every client uploads at random times, at a rate of its own: a Poisson process for each.

    A visit lasts until its client's next time, and at least as long as the delay model says.

    Attributes:
        mean_s: seconds between two uploads of a client in the mean; the median over clients.
        sigma: of the logarithm of the clients' means; 0: all upload at one rate.
        file: a CSV file with the columns `client` and `mean_s`, one row for each client, instead of drawing.
    """

    mean_s: float = 10.0
    sigma: float = 1.0
    file: str = ""

    def __post_init__(self) -> None:
        require(0 < self.mean_s < inf, "mean_s", self.mean_s, "take a positive number of seconds")
        remedy = f"take 0 (equal rates) to {MOST_SIGMA:g}"
        require(0 <= self.sigma <= MOST_SIGMA, "sigma", self.sigma, remedy)

    def mean(self, client: int, key: Key) -> float:
        """Return the mean seconds between two uploads of a client."""
        if self.file:
            return _means(self.file)[client][0]
        return self.mean_s * float(np.exp(self.sigma * key.of("rate", client).numpy().standard_normal()))

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Let every visit wait for its client's next time."""
        if self.file:
            check_per_client(_means(self.file), federation.num_clients, self.file, "policy.uploads.file")
        return replace(duration, delay=_AtRates(self, duration.delay))

    def wall_clock(self, duration: VisitDuration, scale: float) -> Clock:
        """Rates are per simulated second."""
        remedy = "rates need simulated seconds; take a scale above 0, or clock virtual"
        require(scale > 0, "clock.scale", scale, remedy)
        return super().wall_clock(duration, scale)


@lru_cache(maxsize=4)
def _means(file: str) -> dict[int, list[float]]:
    def parse(row: Mapping[str, str], place: str) -> float:
        seconds = float(row["mean_s"])
        require(0 < seconds < inf, place, seconds, "take a positive number of seconds")
        return seconds

    needs = "a client and the mean seconds between its uploads"
    return read_per_client(file, "policy.uploads.file", "client, mean_s", needs, parse)


@dataclass(frozen=True)
class _AtRates(Delay):
    rates: Rates
    work: Delay

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the longer of the time to the client's next upload and that of its work."""
        mean = self.rates.mean(client, key)
        gap = float(key.of("gap", client, visit).numpy().exponential(mean))
        return max(gap, self.work.seconds(client, visit, key))


@dataclass(frozen=True)
class Drift(Uploads):
    """A client trains and uploads when its data have drifted since its last upload.

    It gets new data in cycles that last as long as the delay model says. Where they differ by less than
    `threshold` from those of its last upload it keeps the model that it has, and nothing is sent. Local
    detection of drift in place of a schedule: FedConD (Chen et al., IEEE Big Data 2021) goes by losses,
    Fielding (arXiv:2411.01580) by label distributions; here by the true shares of the groups, which stand for
    a detector that does not err.

    Attributes:
        threshold: total variation distance in [0, 1] between the shares of the groups in the data; with 0 a
            client uploads in every cycle.
        longest: cycles after which a client uploads in any case.
    """

    threshold: float = 0.1
    longest: int = 100

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "take a distance of shares in [0, 1]")
        require(self.longest >= 1, "longest", self.longest, "take 1 (every cycle) or more cycles")

    def begin(self, federation: Federation) -> None:
        """Visits meet drifted data only."""
        federation.await_drift(self.threshold, self.longest)

    def paced(self, duration: VisitDuration, federation: Federation) -> VisitDuration:
        """Let every visit wait for its data."""
        return replace(duration, delay=_AfterDrift(federation.cycle, duration.delay))


@dataclass(frozen=True)
class _AfterDrift(Delay):
    cycle: Cycle
    work: Delay

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return the seconds of all cycles since the client's last visit."""
        last = self.cycle(client, visit - 1) if visit else -1
        cycles = range(last + 1, self.cycle(client, visit) + 1)
        return sum(self.work.seconds(client, c, key) for c in cycles)


UPLOADS: dict[str, type[Uploads]] = {
    "one_each_step": OneEachStep,
    "when_done": WhenDone,
    "rates": Rates,
    "drift": Drift,
}
