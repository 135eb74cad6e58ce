"""Visits that wait for drift: each meets the first data that differ enough from those of the one before."""

from __future__ import annotations

import numpy as np

from mpifl.data.world import Allotment, Draw


class Drifted(Allotment):
    """The data of `inner` without those that drifted too little to be visited for.

    Args:
        threshold: least total variation distance between the shares of the groups in the data of two visits
            that follow each other. longest: a visit meets one of the next so many data at the latest.
    """

    def __init__(self, inner: Allotment, threshold: float, longest: int) -> None:
        self.inner, self.threshold, self.longest = inner, threshold, longest
        self.sizes = inner.sizes
        self._cycles: dict[int, list[int]] = {}  # client -> numbers of the data of its visits

    def cycle(self, k: int, visit: int) -> int:
        """Return the number of the data that client `k` meets at a visit."""
        cycles = self._cycles.setdefault(k, [0])
        while len(cycles) <= visit:
            cycles.append(self._after(k, cycles[-1]))
        return cycles[visit]

    def _after(self, k: int, last: int) -> int:
        old, latest = self.inner.mixture(k, last), last + self.longest
        return next((c for c in range(last + 1, latest) if self._far(old, self.inner.mixture(k, c))), latest)

    def _far(self, p: np.ndarray | None, q: np.ndarray | None) -> bool:
        assert p is not None
        assert q is not None
        return bool(np.abs(p - q).sum() / 2 >= self.threshold)

    def of(self, k: int, split: str, visit: int) -> Draw:
        """Return what client `k` holds at its visit."""
        return self.inner.of(k, split, self.cycle(k, visit))

    def num_samples(self, k: int, visit: int) -> int:
        """Return how many training samples that are."""
        return self.inner.num_samples(k, self.cycle(k, visit))

    def mixture(self, k: int, visit: int) -> np.ndarray | None:
        """Return the shares of the groups in that."""
        return self.inner.mixture(k, self.cycle(k, visit))

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples."""
        return self.inner.test_pool
