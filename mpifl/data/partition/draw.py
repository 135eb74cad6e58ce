"""Draws that stay finite for every parameter."""

from __future__ import annotations

import numpy as np


def dirichlet(rng: np.random.Generator, alpha: float, size: tuple[int, ...]) -> np.ndarray:
    """Return symmetric Dirichlet(alpha) draws of shape `size`, each last axis summing to one.

    Gamma(alpha) is drawn as Gamma(alpha + 1) U^(1 / alpha) in logarithms, so a tiny alpha gives a one-hot
    vector instead of 0 / 0.
    """
    uniform = np.maximum(rng.random(size), np.finfo(np.float64).tiny)
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size)) + np.log(uniform) / alpha
    weights = np.exp(log_gamma - log_gamma.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def at_least(owner: np.ndarray, num_rows: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
    """Return `owner` changed as little as needed for every row to own `minimum` samples.

    The richest rows give: all are cut down to one water level, just low enough. Needs len(owner) >= num_rows
    * minimum.

    Args:
        owner: row of each sample, int [n], none negative.
        num_rows: number of rows.
        minimum: samples each row must own.
        rng: chooses which samples of the rich move, and to whom.
    """
    sizes = np.bincount(owner, minlength=num_rows)
    missing = np.maximum(minimum - sizes, 0)
    wanted = int(missing.sum())
    if wanted == 0:
        return owner
    assert len(owner) >= num_rows * minimum
    level = _water_level(sizes, wanted, minimum)
    mixed = rng.permutation(len(owner))
    order = mixed[np.argsort(owner[mixed], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = order[place >= level]
    given = rng.choice(spare, wanted, replace=False) if len(spare) > wanted else spare
    changed = owner.copy()
    changed[given] = np.repeat(np.arange(num_rows), missing)
    return changed


def _water_level(sizes: np.ndarray, wanted: int, minimum: int) -> int:
    """Return the highest level >= minimum above which at least `wanted` samples lie."""
    low, high = minimum, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low
