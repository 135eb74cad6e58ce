"""Sampling of cohorts by step: every method trains the same clients in the same step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.errors import require
from mpifl.core.rng import Key


@dataclass(frozen=True)
class Sampler:
    """Draws m of N clients uniformly without replacement, or each client independently.

    Attributes:
        num_clients: N, number of clients.
        num_sampled: m, size of a cohort.
        key: random key of the draws.
        late: clients that take part from step `joins` on.
        joins: the first step of the clients in `late`.
        poisson: draw each client independently with probability m / N, so that cohort sizes vary.
    """

    num_clients: int
    num_sampled: int
    key: Key
    late: tuple[int, ...] = ()
    joins: int = 1
    poisson: bool = False

    def __call__(self, step: int) -> np.ndarray:
        """Return the cohort of `step`, int64 [m] ascending; with `poisson` of any size, including 0."""
        if self.poisson:
            draws = self.key.of("poisson", step).numpy().random(self.num_clients)
            return np.flatnonzero(draws * self.num_clients < self.num_sampled)
        rng = self.key.of("cohort", step).numpy()
        if not self.late or step >= self.joins:
            if self.num_sampled >= self.num_clients:
                return np.arange(self.num_clients)
            return np.sort(rng.choice(self.num_clients, self.num_sampled, replace=False))
        present = np.setdiff1d(np.arange(self.num_clients), self.late)
        if self.num_sampled >= len(present):
            return present
        return np.sort(rng.choice(present, self.num_sampled, replace=False))


def newcomers(share: float, num_clients: int, key: Key) -> tuple[int, ...]:
    """Return the clients that join later, ascending: a fraction of all clients, at most N - 1.

    Args:
        share: fraction of the clients.
        num_clients: N, number of clients.
        key: random key of the system seed.
    """
    count = min(round(share * num_clients), num_clients - 1)
    if not count:
        return ()
    return tuple(np.sort(key.of("newcomers").numpy().permutation(num_clients)[:count]).tolist())


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
