"""Skew that is not a Dirichlet draw: shards of sorted labels, and clients of very different size."""

from __future__ import annotations

import numpy as np

from mpifl.core.errors import require
from mpifl.data.partition.cut import bounds


def owners_by_shards(
    labels: np.ndarray, num_clients: int, shards: int, rng: np.random.Generator
) -> np.ndarray:
    """Sort by label, cut into N * `shards` pieces and deal each client `shards` of them (McMahan et al.,
    2017).

    Returns the owner of each sample, int64 [n].
    """
    mixed = rng.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    ends = bounds(len(labels), num_clients * shards, spread=True)
    dealt = rng.permutation(num_clients * shards) // shards
    owner = np.empty(len(labels), np.int64)
    owner[order] = np.repeat(dealt, np.diff(ends))
    return owner


def owners_by_weight(n: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give `n` samples out at random, client k getting a share in proportion to weights[k]; int64 [n]."""
    ends = np.rint(np.cumsum(weights) / weights.sum() * n).astype(np.int64)
    ends[-1] = n
    return rng.permutation(np.repeat(np.arange(len(weights)), np.diff(ends, prepend=0)))


def exponential_sizes(total: int, num_clients: int) -> tuple[np.ndarray, float]:
    """Return (sizes int64 [N], x) of FLT's scenario 4: s_i = floor(F + exp(x i^2)), F = floor(total / (2 N)).

    x makes the sum `total` before rounding down; client 1 gets what rounding leaves. 12,000 images over 240
    clients: x = 9.477e-5, sizes from 26 to 259.
    """
    from scipy.optimize import brentq

    require(
        num_clients <= total // 4,
        "clients",
        num_clients,
        f"too many for a cluster of {total} images; take fewer",
    )
    floor = total // (2 * num_clients)
    squares = np.arange(1, num_clients + 1, dtype=np.float64) ** 2

    def excess(x: float) -> float:
        return float(np.exp(np.minimum(x * squares, 700.0)).sum()) + num_clients * floor - total

    top = np.log(total) / squares[-1] + 1e-12  # there the last client alone has the total
    x = float(brentq(excess, 0.0, top, xtol=1e-15)) if excess(0.0) < 0 else 0.0
    sizes = np.floor(floor + np.exp(x * squares)).astype(np.int64)
    sizes[0] += total - sizes.sum()
    return sizes, x
