"""Which clients are absent at first, and when each of them joins."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpifl.core.rng import Key


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


def join_steps(late: Iterable[int], first: int, spread: int, key: Key) -> dict[int, int]:
    """Return the first step of each client that joins later, uniform on first..first + spread.

    Args:
        late: the clients.
        first: the earliest step.
        spread: the most steps by which a client joins after it.
        key: random key of the system seed.
    """
    return {k: first + (key.of("joins", k).below(spread + 1) if spread else 0) for k in late}


def join_seconds(late: Iterable[int], first_s: float, spread_s: float, key: Key) -> dict[int, float]:
    """Return when each client that joins later does so, uniform on [first_s, first_s + spread_s).

    Args:
        late: the clients.
        first_s: the earliest time in seconds on the run's clock.
        spread_s: seconds by which a client joins after it at most.
        key: random key of the system seed.
    """
    return {k: first_s + spread_s * float(key.of("joins", k).numpy().random()) for k in late}
