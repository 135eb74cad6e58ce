"""The federation everybody else sees: a pool, an allotment, operations; nothing is computed unasked.

Visits that wait for drift: each meets the first data that differ enough from those of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData, Federation, Split

from .pool import Pool
from .sample_cache import Recent
from .scenario import SPLITS, Allotment, Draw, ScenarioSpec
from .transforms import Finish, Op

SELDOM = 8  # see `keep`


class LazyClient(ClientData):
    """A client whose splits are read when first looked at: training does not pay for test images."""

    @classmethod
    def reading(cls, read: Callable[[str], Split], extra: tuple[str, ...]) -> LazyClient:
        """Return a client that reads a split by name, `extra` naming its further test sets."""
        self = object.__new__(cls)
        self.__dict__.update(_read=read, _extra=extra)
        return self

    @cached_property
    def train(self) -> Split:
        """Training samples."""
        return self.__dict__["_read"]("train")

    @cached_property
    def val(self) -> Split:
        """Validation samples."""
        return self.__dict__["_read"]("val")

    @cached_property
    def test(self) -> Split:
        """Test samples."""
        return self.__dict__["_read"]("test")

    @cached_property
    def extra(self) -> Mapping[str, Split]:
        """Further test sets by name."""
        return {name: self.__dict__["_read"](name) for name in self.__dict__["_extra"]}


class PoolFederation(Federation):
    """Clients whose samples are addresses in one memory-mapped pool.

    Attributes:
        names: what each group is, in a few words; empty where nobody says.
        facts: what the scenario tells about itself.
        extra: names of the further test sets.
    """

    def __init__(self, pool: Pool, world: ScenarioSpec, allotment: Allotment, finish: Finish) -> None:
        self.pool = pool
        self._recent, self._static = Recent(0), world.drift is None
        self.allotment: Allotment = allotment
        self.finish = finish
        self.sizes = allotment.sizes
        self.num_clients = len(self.sizes)
        self.num_classes = pool.num_classes
        self.groups, self.names = world.groups, world.names
        if world.targets is not None and world.groups is not None:
            self.targets = np.flatnonzero(world.groups == world.targets)
        self.facts: dict[str, Any] = dict(world.facts)
        self._ops: dict[str, tuple[Op, ...]] = {name: world.ops for name in SPLITS} | dict(world.special)
        self.extra = tuple(name for name in world.special if name not in SPLITS)
        self._public, self._group_test_sets = world.public, world.group_test_sets
        self.shape = self._shape_of_all_groups(world.op_groups)

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of client `k` at its `visit`-th visit."""
        return LazyClient.reading(lambda split: self._split(k, split, visit), self.extra)

    def num_samples(self, k: int, visit: int = 0) -> int:
        """Return the number of training samples of client `k` at its `visit`-th visit."""
        return self.allotment.num_samples(k, 0 if self._static else visit)

    def keep(self, megabytes: int) -> None:
        """Keep so much of finished samples at hand for their next use; whoever reads must not change them.

        Nothing is kept where that would hold less than one in `SELDOM` of all training samples: they would
        mostly be gone before their client comes back.
        """
        self._static = self._static or not self.changes
        self._recent = Recent(megabytes * 10**6 * self.keeps(megabytes * 10**6))

    def keeps(self, limit: int) -> bool:
        """Return whether it keeps samples at hand within a limit of so many bytes."""
        return self.finished_bytes <= SELDOM * limit

    @property
    def finished_bytes(self) -> int:
        """Return the bytes of the finished training samples of all clients."""
        return 4 * int(self.sizes[:, 0].sum()) * int(np.prod(self.shape))

    @property
    def changes(self) -> bool:
        """Return whether the data of client 0 differ between its first two visits."""
        first, second = (self.allotment.of(0, "train", visit).index for visit in (0, 1))
        return not np.array_equal(np.r_[first], np.r_[second])

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return self.allotment.test_pool

    def public(self) -> tuple[Split, ...]:
        """Return the server's labelled sets, one for each group."""
        return self._whole_groups(self._public)

    def group_test_sets(self) -> tuple[Split, ...]:
        """Return test sets of whole groups, one for each."""
        return self._whole_groups(self._group_test_sets)

    def _whole_groups(self, sets: tuple[np.ndarray, ...]) -> tuple[Split, ...]:
        draws = (Draw(index, group) for group, index in enumerate(sets))
        return tuple(self._read(draw, self._ops["test"]) for draw in draws)

    def mixture(self, k: int, visit: int = 0) -> np.ndarray | None:
        """Return the true share [groups] of each group in client `k`'s training data."""
        share = self.allotment.mixture(k, visit)
        return super().mixture(k, visit) if share is None else share

    def cycle(self, k: int, visit: int) -> int:
        """Return the number of the data that client `k` meets at a visit."""
        return self.allotment.cycle(k, visit)

    def await_drift(self, threshold: float, longest: int) -> None:
        """Let a visit meet the first data that differ enough from those of the visit before."""
        if self._static or not self.changes or self.allotment.mixture(0, 0) is None:
            super().await_drift(threshold, longest)
        self.allotment = Drifted(self.allotment, threshold, longest)

    def samples(self, k: int, split: str = "train", visit: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return client `k`'s images as uint8 [n, C, H, W], not yet normalised, and its labels int64 [n]."""
        x, y = self._pixels(self.allotment.of(k, split, visit), self._ops[split])
        return np.array(x), np.array(y)

    def labels(self, k: int, split: str = "train", visit: int = 0) -> np.ndarray:
        """Return client `k`'s labels int64 [n] without reading any image."""
        draw = self.allotment.of(k, split, visit)
        y = self.pool.labels[draw.index]
        blank = np.zeros((len(y), self.pool.shape[0], 1, 1), np.uint8)
        for op in self._ops[split]:
            blank, y = op(blank, y, self._group(draw, len(y)))
        return y

    def _split(self, k: int, split: str, visit: int) -> Split:
        address = (k, split, 0 if self._static else visit)
        return self._recent.get(
            address, lambda: self._read(self.allotment.of(k, split, visit), self._ops[split])
        )

    def _read(self, draw: Draw, ops: tuple[Op, ...]) -> Split:
        x, y = self._pixels(draw, ops)  # may be the cache itself: never hand it out
        return Split(self.finish(x), torch.from_numpy(np.array(y)))

    def _pixels(self, draw: Draw, ops: tuple[Op, ...]) -> tuple[np.ndarray, np.ndarray]:
        x, y = self.pool.images[draw.index], self.pool.labels[draw.index]
        for op in ops:
            x, y = op(x, y, self._group(draw, len(y)))
        return x, y

    @staticmethod
    def _group(draw: Draw, n: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(draw.group), (n,))

    def _shape_of_all_groups(self, groups: np.ndarray | None) -> tuple[int, int, int]:
        count = 1 if groups is None or not len(groups) else int(groups.max()) + 1
        blank, label = np.zeros((1, *self.pool.shape), np.uint8), np.zeros(1, np.int64)
        shapes = set()
        for group in range(count):
            x, y = blank, label
            for op in self._ops["train"]:
                x, y = op(x, y, np.array([group]))
            channels, height, width = self.finish(x).shape[1:]
            shapes.add((channels, height, width))
        if len(shapes) > 1:
            remedy = "the groups' images would differ in size; set resize to one size for all"
            raise UserError("data.scenario.resize", sorted(shapes), remedy)
        return shapes.pop()


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
