"""Visits of an asynchronous run: those under way, and what a policy knows when it starts others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mpifl.core.rng import Key

from .sampling import Sampler

Start = tuple[int, int]  # (client, version of the rows that it reads)


@dataclass(frozen=True, order=True)
class Visit:
    """A visit under way; ordered by when it is due, ties by its number.

    Attributes:
        due: when it arrives at the earliest, in seconds on the run's clock.
        number: how many visits of the run started before.
        client: who trains.
        visit: how many visits this client made before.
        version: server version that it reads.
        start: when it started, in seconds on the run's clock.
    """

    due: float
    number: int
    client: int
    visit: int
    version: int
    start: float

    def row(self, time: float, version: int) -> dict[str, Any]:
        """Return its row of `events.csv`; the engine fills in `weight` and `accepted`.

        Args:
            time: of its arrival, in seconds on the run's clock.
            version: of the server when it arrives.
        """
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
    """What a policy knows when it starts visits.

    Attributes:
        busy: clients whose visits are under way.
        num_started: visits started so far.
        version: of the server now.
        concurrency: visits that may be under way at a time.
        sampler: draws cohorts.
        key: address of the draws of single clients.
        available: whether a client is there now; None: all are, always.
        waiting: uploads that have arrived since the last step.
        filled: version at which visits were started last; -1 before the first.
    """

    busy: Collection[int]
    num_started: int
    version: int
    concurrency: int
    sampler: Sampler
    key: Key
    available: Callable[[int], bool] | None = None
    waiting: int = 0
    filled: int = -1

    def is_available(self, client: int) -> bool:
        """Return whether a client is there now."""
        return self.available is None or self.available(client)

    def draw(self, taken: Collection[int], number: int) -> int | None:
        """Return the client of visit `number`, uniform over those that are idle and there; None: nobody is.

        Args:
            taken: clients that start at this instant too.
            number: of the visit; addresses the draw.
        """
        out = {*self.busy, *taken}
        address = self.key.of("start", number)
        if self.available is not None:
            idle = [k for k in range(self.sampler.num_clients) if k not in out and self.available(k)]
            return idle[address.below(len(idle))] if idle else None
        if len(out) == self.sampler.num_clients:
            return None
        k = address.below(self.sampler.num_clients - len(out))
        for other in sorted(out):  # the k-th idle client, without a list of all
            k += int(other <= k)
        return k
