"""Cuts into equal parts: the whole at once, or class by class so that every part has the same histogram."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mpifl.data.pool import Pool


def bounds(n: int, parts: int, spread: bool) -> np.ndarray:
    """Return where `parts` contiguous parts of `n` samples begin and end, int64 [parts + 1].

    Each part has floor(n / parts) samples; the remainder goes one each to the last parts (`spread`) or all
    of it to the very last (as EMD-CFL's notebooks do: 5421 in 10 parts are nine of 542 and one of 543).
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


def balanced(pool: Pool, samples: np.ndarray) -> np.ndarray:
    """Return the first n_min samples of each class present; n_min is the size of the rarest."""
    labels = pool.labels[samples]
    present, counts = np.unique(labels, return_counts=True)
    return np.concatenate([samples[np.flatnonzero(labels == c)[: counts.min()]] for c in present])
