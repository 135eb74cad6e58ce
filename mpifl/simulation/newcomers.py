"""Which clients are absent at first or leave for good, and when each of them joins or leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def times_of(
    clients: Iterable[int], step: tuple[int, int], second: tuple[float | None, float], key: Key
) -> dict[int, float]:
    """Return when each client joins or leaves.

    Args:
        clients: the clients.
        step: the earliest step, and the most steps by which a client does so after it: uniform.
        second: the earliest time in seconds on the run's clock, and the seconds by which a client does so
            after it at most: uniform; None for steps.
        key: random key of these draws.
    """
    (first, spread), (first_s, spread_s) = step, second
    if first_s is None:
        return {k: first + (key.of(k).below(spread + 1) if spread else 0) for k in clients}
    return {k: first_s + spread_s * float(key.of(k).numpy().random()) for k in clients}


def line_on_leavers(leaves: Mapping[int, float], num_clients: int, by_step: bool) -> str:
    """Return a line for the user: how many of `num_clients` clients leave, and when (`times_of`)."""
    first, last = (
        f"step {t:g}" if by_step else f"{t:.4g} s" for t in (min(leaves.values()), max(leaves.values()))
    )
    when = f"at {first}" if first == last else f"from {first} to {last}"
    return f"leavers: {len(leaves)} of {num_clients} clients leave, {when}"
