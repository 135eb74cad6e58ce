"""Label statistics of a federation: class histograms, and their distance from the overall distribution."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .federation import PoolFederation


def histogram(
    federation: PoolFederation, split: str = "train", visit: int = 0, clients: Iterable[int] | None = None
) -> np.ndarray:
    """Return how many samples of each class each client has, int64 [n, L], without reading samples.

    Args:
        federation: the clients.
        split: train, val, test or a further test set.
        visit: number of the visit, the same for all clients.
        clients: numbers of the clients; None for all.
    """
    chosen = range(federation.num_clients) if clients is None else clients
    labels = (federation.labels(int(k), split, visit) for k in chosen)
    return np.array([np.bincount(y, minlength=federation.num_classes) for y in labels])


def label_distance(counts: np.ndarray) -> np.ndarray:
    """Return sum_c |p_k(c) - p(c)| for each client k, p being the shares of all, float64 [N] in [0, 2].

    Papers on label skew call it "EMD" (Zhao et al., 2018). It serves to compare FedCUAU's groups.

    Args:
        counts: number of samples of each client and class [N, L].
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return np.asarray(np.abs(share - counts.sum(axis=0) / counts.sum()).sum(axis=1))
