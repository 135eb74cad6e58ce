"""Points drawn close together on a plane when they are neighbours: UMAP."""

from __future__ import annotations

import warnings

import numpy as np


def umap_plane(
    points: np.ndarray, new: np.ndarray | None = None, dims: int = 2, seed: int = 42
) -> np.ndarray:
    """Return the images [n, dims] of `points` [n, e] under a UMAP fitted to them, those of `new` [m, e]
    below.

    umap-learn's defaults (15 neighbours, least distance 0.1, Euclidean), fewer neighbours where there are not
    as many points. The first call of a process compiles for some seconds.
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
