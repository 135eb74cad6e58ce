"""UMAP: a projection to few dimensions that keeps neighbours together."""

from __future__ import annotations

import warnings

import numpy as np


def umap_plane(
    points: np.ndarray, new: np.ndarray | None = None, dims: int = 2, seed: int = 42
) -> np.ndarray:
    """Project points by a UMAP that is fitted to them.

    The parameters are umap-learn's defaults (15 neighbours, minimum distance 0.1, Euclidean), with fewer
    neighbours for fewer points. The first call of a process compiles for some seconds.

    Args:
        points: [n, e].
        new: further points [m, e] to project; None for none.
        dims: dimensions of the projection.
        seed: seed of the optimisation.

    Returns:
        The projections of `points`, then of `new`, float64 [n + m, dims].
    """
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # one thread because of the seed; few points
        from umap import UMAP

        neighbours = max(2, min(15, len(points) - 1))
        start = "spectral" if len(points) > 2 * dims + 2 else "random"
        plane = UMAP(neighbours, dims, random_state=seed, init=start, n_jobs=1)
        out = plane.fit_transform(np.asarray(points, np.float32))
        if new is not None and len(new):
            out = np.vstack([out, plane.transform(np.asarray(new, np.float32))])
    return np.asarray(out, np.float64)
