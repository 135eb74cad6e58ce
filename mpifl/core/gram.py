"""Cosines and distances of n vectors from their Gram matrix [n, n], the matrix of inner products."""

from __future__ import annotations

import numpy as np


def cosine_matrix(gram: np.ndarray, floor: float = 1e-12) -> np.ndarray:
    """Return the cosines [n, n] of n vectors from their inner products [n, n]; a zero vector has cosine 0."""
    norms = np.sqrt(np.diag(gram).astype(np.float64))
    return gram / (np.outer(norms, norms) + floor)


def squared_distances(gram: np.ndarray) -> np.ndarray:
    """Return the squared Euclidean distances [n, n] of n vectors from their inner products [n, n].

    The diagonal is exactly zero and no entry is negative. Distances of nearly equal vectors lose digits: the
    error is about 1e-16 times the squared norms.
    """
    squares = np.diag(gram).astype(np.float64)
    out = squares[:, None] + squares[None, :]  # in place from here on: n may be ten thousand
    for row, products in zip(out, gram, strict=True):
        row -= 2 * products
    np.maximum(out, 0.0, out=out)
    np.fill_diagonal(out, 0.0)
    return out
