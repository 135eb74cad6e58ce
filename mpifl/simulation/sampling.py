"""Who takes part in a step: every method trains the same clients in the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

import numpy as np

from mpifl.core.errors import require
from mpifl.core.rng import Key
from mpifl.traffic.ledger import StatisticsSize


@dataclass(frozen=True)
class RoundPlan:
    """Who takes part in a round, and how much each client trains.

    Attributes:
        cohort: clients that train and whose uploads are mixed, int64 ascending.
        late: clients that download but are left out, int64 ascending.
        late_send: whether the late clients upload nevertheless.
        statistics: late client that is new -> what it moves for one-shot statistics before it trains.
        work: client -> fraction of its mini-batches, for clients that do not train on all of them.
        until: earliest end of the round, which also waits for the whole cohort.
    """

    cohort: np.ndarray
    late: np.ndarray = field(default_factory=lambda: np.arange(0))
    late_send: bool = False
    statistics: Mapping[int, StatisticsSize] = field(default_factory=dict)
    work: Mapping[int, Fraction] = field(default_factory=dict)
    until: float = -inf

    @property
    def metrics(self) -> dict[str, float]:
        """The plan's values in `metrics.csv`."""
        shares = [float(self.work.get(k, 1)) for k in self.cohort.tolist()]
        return {"late_clients": float(len(self.late)), "work_mean": float(np.mean(shares)) if shares else 0.0}


@dataclass(frozen=True)
class Sampler:
    """Draws m of N clients uniformly without replacement, or each client independently.

    Attributes:
        num_clients: N, number of clients.
        num_sampled: m, size of a cohort.
        key: random key of the draws.
        joins: client -> its first step, for clients that are absent at first.
        poisson: draw each client independently with probability m / N, so that cohort sizes vary.
        leaves: client -> the first step in which it takes no part any more, for clients that leave.
    """

    num_clients: int
    num_sampled: int
    key: Key
    joins: Mapping[int, int] = field(default_factory=dict)
    poisson: bool = False
    leaves: Mapping[int, int] = field(default_factory=dict)

    def __call__(self, step: int) -> np.ndarray:
        """Return the cohort of `step`, int64 [m] ascending; with `poisson` of any size, including 0."""
        if self.poisson:
            draws = self.key.of("poisson", step).numpy().random(self.num_clients)
            return np.flatnonzero(draws * self.num_clients < self.num_sampled)
        rng = self.key.of("cohort", step).numpy()
        absent = [k for k, first in self.joins.items() if step < first]
        absent += [k for k, last in self.leaves.items() if step >= last]
        if not absent:
            if self.num_sampled >= self.num_clients:
                return np.arange(self.num_clients)
            return np.sort(rng.choice(self.num_clients, self.num_sampled, replace=False))
        present = np.setdiff1d(np.arange(self.num_clients), absent)
        if self.num_sampled >= len(present):
            return present
        return np.sort(rng.choice(present, self.num_sampled, replace=False))


def cohort_size(participation: float, size: int | None, num_clients: int) -> int:
    """Return m, the number of clients in a cohort.

    Args:
        participation: fraction of the clients in (0, 1]; rounded to at least one client.
        size: number of clients instead of a fraction; None uses the fraction.
        num_clients: N, number of clients.

    Raises:
        UserError: `size` is larger than N.
    """
    if size is None:
        return max(1, round(participation * num_clients))
    remedy = f"there are {num_clients} clients; use at most that many, or leave the key out for all"
    require(size <= num_clients, "cohort_size", size, remedy)
    return size
