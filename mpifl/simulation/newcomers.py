"""Which clients are absent at first or leave for good, and when each of them joins or leaves."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpifl.core.rng import Key

JOINS, LEAVES = "joins", "leaves"  # addresses of the draws of times


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


def leavers(share: float, num_clients: int, present: np.ndarray, key: Key) -> tuple[int, ...]:
    """Return the clients that leave, ascending: of those that are there at first, all but one at most.

    Args:
        share: fraction of all clients.
        num_clients: N, number of clients.
        present: the clients that are there at first, int64 ascending.
        key: random key of the system seed.
    """
    count = min(round(share * num_clients), len(present) - 1)
    if count < 1:
        return ()
    return tuple(np.sort(key.of("leavers").numpy().permutation(present)[:count]).tolist())


def steps_of(clients: Iterable[int], first: int, spread: int, key: Key) -> dict[int, int]:
    """Return the step in which each client joins or leaves, uniform on first..first + spread.

    Args:
        clients: the clients.
        first: the earliest step.
        spread: the most steps by which a client does so after it.
        key: random key of these draws.
    """
    return {k: first + (key.of(k).below(spread + 1) if spread else 0) for k in clients}


def seconds_of(clients: Iterable[int], first_s: float, spread_s: float, key: Key) -> dict[int, float]:
    """Return when each client joins or leaves, uniform on [first_s, first_s + spread_s).

    Args:
        clients: the clients.
        first_s: the earliest time in seconds on the run's clock.
        spread_s: seconds by which a client does so after it at most.
        key: random key of these draws.
    """
    return {k: first_s + spread_s * float(key.of(k).numpy().random()) for k in clients}
