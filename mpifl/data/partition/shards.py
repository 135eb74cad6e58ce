"""Other partitions: shards of sorted labels, unequal sizes, equal parts with or without equal classes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mpifl.core.errors import require


def owners_by_shards(
    labels: np.ndarray, num_clients: int, shards: int, rng: np.random.Generator
) -> np.ndarray:
    """Sort by label, cut into N * `shards` pieces and give each client `shards` of them.

    McMahan et al., AISTATS 2017.

    Args:
        labels: [n].
        num_clients: N.
        shards: number of pieces of each client.
        rng: orders the samples of a class, and assigns the pieces.

    Returns:
        The owner of each sample, int64 [n].
    """
    mixed = rng.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    ends = bounds(len(labels), num_clients * shards, spread=True)
    dealt = rng.permutation(num_clients * shards) // shards
    owner = np.empty(len(labels), np.int64)
    owner[order] = np.repeat(dealt, np.diff(ends))
    return owner


def owners_by_label_count(
    labels: np.ndarray, num_clients: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Give each client `count` different labels, and divide each label equally among its clients.

    Li et al., ICDE 2022: client i has label i mod L; its other labels are drawn.

    Args:
        labels: [n].
        num_clients: N.
        count: number of labels of each client, at most L.
        rng: draws labels, and orders the samples of each.

    Returns:
        The owner of each sample, int64 [n]; -1 for labels that no client has.
    """
    present = np.unique(labels)
    holders: list[list[int]] = [[] for _ in present]
    for k in range(num_clients):
        first = k % len(present)
        others = np.delete(np.arange(len(present)), first)
        for c in (first, *rng.choice(others, min(count, len(present)) - 1, replace=False)):
            holders[int(c)].append(k)
    owner = np.full(len(labels), -1, np.int64)
    for c, clients in zip(present, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == c))
        if clients:
            owner[members] = np.array(clients)[np.arange(len(members)) % len(clients)]
    return owner


def owners_by_weight(n: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random owners of `n` samples, int64 [n]; the share of client k is proportional to weights[k]."""
    ends = np.rint(np.cumsum(weights) / weights.sum() * n).astype(np.int64)
    ends[-1] = n
    return rng.permutation(np.repeat(np.arange(len(weights)), np.diff(ends, prepend=0)))


def exponential_sizes(total: int, num_clients: int) -> tuple[np.ndarray, float]:
    """Return (sizes int64 [N], x) of FLT's scenario 4: s_i = floor(F + exp(x i^2)), F = floor(total / (2 N)).

    x is such that the sizes add up to `total` before rounding down; client 1 gets what rounding leaves. For
    12,000 images over 240 clients, x = 9.477e-5 and sizes are 26 to 259.
    """
    from scipy.optimize import brentq

    remedy = f"too many for a cluster of {total} images; use fewer"
    require(num_clients <= total // 4, "clients", num_clients, remedy)
    floor = total // (2 * num_clients)
    squares = np.arange(1, num_clients + 1, dtype=np.float64) ** 2

    def excess(x: float) -> float:
        return float(np.exp(np.minimum(x * squares, 700.0)).sum()) + num_clients * floor - total

    top = np.log(total) / squares[-1] + 1e-12  # at this x the last client alone has `total`
    x = float(brentq(excess, 0.0, top, xtol=1e-15)) if excess(0.0) < 0 else 0.0
    sizes = np.floor(floor + np.exp(x * squares)).astype(np.int64)
    sizes[0] += total - sizes.sum()
    return sizes, x


def bounds(n: int, parts: int, spread: bool) -> np.ndarray:
    """Return where `parts` contiguous parts of `n` samples begin and end, int64 [parts + 1].

    Each part has floor(n / parts) samples. The last parts get one sample each of the remainder (`spread`), or
    the very last part gets all of it (as in EMD-CFL's notebooks: 5421 in 10 parts are nine of 542 and one of
    543).
    """
    size, rest = divmod(n, parts)
    sizes = np.full(parts, size)
    if spread:
        sizes[parts - rest :] += 1
    else:
        sizes[-1] += rest
    return np.concatenate([[0], np.cumsum(sizes)])


def cut(samples: np.ndarray, parts: int, spread: bool = True) -> list[np.ndarray]:
    """Return `samples` in `parts` contiguous parts."""
    ends = bounds(len(samples), parts, spread)
    return [samples[a:b] for a, b in pairwise(ends)]


def cut_by_class(
    samples: np.ndarray, labels: np.ndarray, parts: int, rng: np.random.Generator, spread: bool = True
) -> list[np.ndarray]:
    """Return `samples` in `parts` parts with equal class histograms (up to remainders), each in random order.

    Args:
        samples: addresses [n], already in random order.
        labels: labels of these samples [n].
        parts: number of parts.
        rng: orders the samples inside each part.
        spread: see `bounds`.
    """
    by_class = [cut(samples[labels == c], parts, spread) for c in np.unique(labels)]
    return [rng.permutation(np.concatenate(pieces)) for pieces in zip(*by_class, strict=True)]


def balanced(labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the first n_min samples of each class present; n_min is the size of the rarest class.

    Args:
        labels: classes of these samples [n].
        samples: addresses [n].
    """
    present, counts = np.unique(labels, return_counts=True)
    return np.concatenate([samples[np.flatnonzero(labels == c)[: counts.min()]] for c in present])
