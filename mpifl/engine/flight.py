"""Visits under way, and who may be next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mpifl.core.rng import Key

from .sampler import Sampler

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
class Flight:
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
