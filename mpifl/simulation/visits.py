"""Visits of an asynchronous run, and the state from which a policy decides which visits start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mpifl.core.rng import Key

from .sampling import Sampler

Start = tuple[int, int]  # (client, version of the rows that it reads)


@dataclass(frozen=True, order=True)
class Visit:
    """A visit under way; visits are ordered by due time, then by number.

    Attributes:
        due: earliest arrival, in seconds on the run's clock.
        number: number of visits of the run that started before.
        client: number of the client.
        visit: number of this client's visits before this one.
        version: server version that it reads.
        start: start time in seconds on the run's clock.
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
            time: arrival in seconds on the run's clock.
            version: server version at the arrival.
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
    """The state from which a policy decides which visits start.

    Attributes:
        busy: clients whose visits are under way.
        num_started: number of visits started so far.
        version: current server version.
        concurrency: number of visits that may be under way at a time.
        sampler: draws cohorts.
        key: random key of the draws of single clients.
        available: client -> whether it is available now; None if all clients are always available.
        waiting: number of uploads that have arrived since the last step.
        filled: server version at the last start of visits; -1 before the first.
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
        """Return whether a client is available now."""
        return self.available is None or self.available(client)

    def draw(self, taken: Collection[int], number: int) -> int | None:
        """Return the client of visit `number`, uniform over idle available clients; None if there is none.

        Args:
            taken: clients that start at the same instant.
            number: number of the visit; determines the draw.
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
