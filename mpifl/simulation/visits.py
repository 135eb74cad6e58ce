"""Visits under way, and who may be next.

What an asynchronous run says of itself at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpifl.core.rng import Key

from .sampling import Sampler

Start = tuple[int, int]  # (client, version of the rows that it reads)


@dataclass(frozen=True, order=True)
class Visit:
    """A visit under way; ordered by when it is due, ties by its number.

    Attributes:
        due, start: seconds on the run's clock.
        number: counts visits. client, visit: who, and how many visits it made before.
        version: server version it reads.
    """

    due: float
    number: int
    client: int
    visit: int
    version: int
    start: float

    def row(self, time: float, version: int) -> dict[str, Any]:
        """Return what is written of its arrival at the server of a version."""
        return {
            "time": time,
            "client": self.client,
            "visit": self.visit,
            "start": self.start,
            "read_version": self.version,
            "arrival_version": version,
            "staleness": version - self.version,
            "weight": 0.0,
            "accepted": 0,
        }


@dataclass(frozen=True)
class DispatchState:
    """What a policy knows when it fills free places.

    Attributes:
        busy: clients under way.
        number: visits started so far. version: of the server now. places: visits that may be under way.
        sampler, key: who is drawn. here: whether a client is there now; None: all are, always.
    """

    busy: Collection[int]
    number: int
    version: int
    places: int
    sampler: Sampler
    key: Key
    here: Callable[[int], bool] | None = None

    def draw(self, taken: Collection[int], number: int) -> int | None:
        """Return who starts visit `number`: uniform over the clients that are idle and there."""
        out = {*self.busy, *taken}
        address = self.key.of("start", number)
        if self.here is not None:
            idle = [k for k in range(self.sampler.num_clients) if k not in out and self.here(k)]
            return idle[address.below(len(idle))] if idle else None
        if len(out) == self.sampler.num_clients:
            return None
        k = address.below(self.sampler.num_clients - len(out))
        for other in sorted(out):  # the k-th idle client, without a list of all
            k += int(other <= k)
        return k


@dataclass
class AsyncStats:
    """Counts arrivals.

    Attributes:
        lags: staleness in server steps -> arrivals.
        refused: arrivals that changed nothing. busy_seconds: visits under way, times the seconds they were.
    """

    lags: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    busy_seconds: float = 0.0
    _then: float = 0.0

    def passed(self, now: float, under_way: int) -> None:
        """Time went on to `now` with so many visits under way."""
        self.busy_seconds += (now - self._then) * under_way
        self._then = now

    def add(self, lag: int, accepted: bool) -> None:
        """Count an arrival."""
        self.lags[lag] += 1
        self.refused += not accepted

    def so_far(self) -> dict[str, Any]:
        """Return the figures that are written at each evaluation."""
        arrivals = self.lags.total()
        return {
            "arrivals": arrivals,
            "refusal_rate": self.refused / max(arrivals, 1),
            "staleness_mean": sum(lag * n for lag, n in self.lags.items()) / max(arrivals, 1),
        }

    def summary(
        self, steps: int, virtual: float, real: float, idle: Sequence[float], server: float
    ) -> dict[str, Any]:
        """Return the figures of the run.

        Args:
            steps: of the server. virtual, real: seconds on the run's clock, and real ones without evaluation.
            idle: share of its time for which each worker had no visit; empty for one process.
            server: share of the real seconds for which rank 0 used a processor.
        """
        return {
            **self.so_far(),
            "refused": self.refused,
            "staleness_max": max(self.lags, default=0),
            "staleness_histogram": {str(lag): self.lags[lag] for lag in sorted(self.lags)},
            "concurrency": self.busy_seconds / virtual if virtual else 0.0,
            "clock_seconds": virtual,
            "updates_per_clock_second": steps / virtual if virtual else None,
            "updates_per_second": steps / real if real else None,
            "arrivals_per_second": self.lags.total() / real if real else None,
            "worker_idle_share": [round(share, 4) for share in idle],
            "server_cpu_share": round(server, 4),
        }
