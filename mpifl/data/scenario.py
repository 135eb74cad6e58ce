"""What a scenario specifies: who holds which samples, how they are transformed, what the server owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import SPLITS
from mpifl.core.process import check_memory
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr

from .pool import Pool
from .transforms import Op

LONGEST_SIDE = 10_000  # pixels of an image
CLIENT_BYTES = 50  # of a registered client at rank 0, about (docs/performance.md)


@dataclass(frozen=True)
class SampleIndex:
    """Samples of one client in one split.

    Attributes:
        index: addresses in the pool, int [n] or a slice.
        group: the group of each sample, int [n], or of all.
    """

    index: np.ndarray | slice
    group: np.ndarray | int


class Partition(ABC):
    """Which samples each client holds at each visit.

    Attributes:
        sizes: int64 [N, 3], training, validation and test samples (at the first visit, where they change).
        static: whether every client holds the same samples at every visit; a partition says so itself.
    """

    sizes: np.ndarray
    static: bool = False

    @abstractmethod
    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return what client `k` holds in `split` at its `visit`-th visit, a pure function of the three."""

    def of_all(self, clients: np.ndarray, split: str, visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what several clients hold: addresses one after the other, int64 [n], and sizes, int64 [m].

        Args:
            clients: int64 [m].
            split: of all.
            visits: of each client, int64 [m].
        """
        found = [self.of(k, split, v).index for k, v in zip(clients.tolist(), visits.tolist(), strict=True)]
        parts = [np.arange(i.start, i.stop) if isinstance(i, slice) else i for i in found]
        index = np.concatenate(parts) if parts else np.zeros(0)
        return index.astype(np.int64), np.array([len(part) for part in parts], np.int64)

    def num_samples(self, k: int, visit: int) -> int:
        """Return the number of training samples of client `k` at a visit.

        Default: `sizes` at the first visit and where the partition is static, else what `of` returns is
        counted. Every average over clients is weighted with it: where `of` takes long, count them here.
        """
        return int(self.sizes[k, 0]) if self.static or not visit else self._counted(k, "train", visit)

    def num_held(self, k: int, split: str, visit: int) -> int:
        """Return the number of samples of client `k` in `split` at a visit.

        Default: `num_samples` of training samples; others are counted in what `of` returns. Rank 0 asks at
        each evaluation for the test samples of each evaluated client, unless the partition is static: where
        `of` takes long, count them here without it.
        """
        return self.num_samples(k, visit) if split == "train" else self._counted(k, split, visit)

    def _counted(self, k: int, split: str, visit: int) -> int:
        index = self.of(k, split, visit).index
        return index.stop - index.start if isinstance(index, slice) else len(index)

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of several clients, int64 [m].

        Args:
            split: of all.
            clients: int64 [m].
            visits: of each client, int64 [m].
        """
        pairs = zip(clients.tolist(), visits.tolist(), strict=True)
        return np.array([self.num_held(k, split, visit) for k, visit in pairs], np.int64)

    def mixture(self, k: int, visit: int) -> np.ndarray | None:
        """Return the true group shares [groups] of client `k`; None where each client has one group."""
        return None

    def cycle(self, k: int, visit: int) -> int:
        """Return which of its successive data sets client `k` has at a visit, from 0."""
        return visit

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return int(self.sizes[:, 2].sum())


class FixedPartition(Partition):
    """A partition that never changes.

    Args:
        splits: one `Csr` for each split, by name.
        groups: int [N], the group of each client, or None for one group.
        test_pool: number of different test samples; None: that of different addresses, which of stored
            copies is too large.
    """

    static = True

    def __init__(
        self, splits: Mapping[str, Csr], groups: np.ndarray | None, test_pool: int | None = None
    ) -> None:
        self.splits, self._test_pool = splits, test_pool
        self.groups = groups
        self.sizes = np.stack([splits[name].sizes for name in SPLITS], axis=1).astype(np.int64)

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples of client `k`, the same at every visit."""
        return SampleIndex(self.splits[split].of(k), 0 if self.groups is None else int(self.groups[k]))

    def of_all(self, clients: np.ndarray, split: str, visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what several clients hold, the same at every visit."""
        return self.splits[split].of_all(clients)

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of several clients, the same at every visit."""
        return np.asarray(self.splits[split].sizes[clients], np.int64)

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples: clients may share them (FLT, UCFL C)."""
        if self._test_pool is not None:
            return self._test_pool
        test = self.splits["test"]
        return int(test.offsets[-1] - test.offsets[0]) if test.index is None else len(np.unique(test.index))


@dataclass(frozen=True)
class ScenarioSpec:
    """A scenario for one pool and one seed. Everything but `splits()` is cheap.

    Attributes:
        splits: partitions by name: train, val, test and further test sets. Called once; its result is
            kept in the cache. Empty where `drift` is given instead.
        groups: int64 [N], hidden group of each client, or None.
        blocks: int64 [N], the group the operations see, where that is finer than `groups`.
        ops: what is done to the samples of each split, in order.
        split_ops: operations of the splits that have their own; names beyond train, val, test are further
            test sets.
        materialize: store transformed images in the cache instead of transforming at every visit.
        drift: a partition that depends on the visit and is never stored. Samples, groups and sizes may change
            at any visit, of any client; where none ever does, its `static` is True, and clients are cached.
        resize: side of the images a client sees, None to keep theirs.
        normalise: the normalisation this scenario's paper uses, None for the source's own.
        public: addresses of the samples the server owns, one array for each group.
        group_test_sets: addresses of the test samples of whole groups, one array for each.
        names: what each group is, in a few words.
        targets: the group whose accuracy is reported separately, or None.
        facts: what the scenario reports about itself beyond counts.
        remarks: returns lines for the user about the partitions that `splits` returned; said at every start.
    """

    splits: Callable[[], Mapping[str, Csr]] = dict
    groups: np.ndarray | None = None
    blocks: np.ndarray | None = None
    ops: tuple[Op, ...] = ()
    split_ops: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    materialize: bool = False
    drift: Partition | None = None
    resize: int | None = None
    normalise: str | None = None
    public: tuple[np.ndarray, ...] = ()
    group_test_sets: tuple[np.ndarray, ...] = ()
    names: tuple[str, ...] = ()
    targets: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remarks: Callable[[Mapping[str, Csr]], Sequence[str]] = lambda splits: ()

    @property
    def op_groups(self) -> np.ndarray | None:
        """Return the group that the operations see for each client, int64 [N]."""
        return self.groups if self.blocks is None else self.blocks


class Scenario(ABC):
    """Options of one scenario; a frozen dataclass whose fields are configuration keys.

    Attributes:
        by_class: whether it reads the classes of the samples; a source with other labels is then refused.
        of_images: whether it changes images; a source of other samples is then refused.
        tested_on: the answer to `test_share` where the paper, or the nature of the scenario, decides what
            clients are tested on; empty where the key is known.
    """

    by_class: ClassVar[bool] = True
    of_images: ClassVar[bool] = True
    tested_on: ClassVar[str] = ""

    def files(self) -> list[Path]:
        """Return the files that it reads; the partition is prepared anew when one of them changes."""
        return []

    @abstractmethod
    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Return the specification for `pool`; all randomness is addressed below `key`."""


def check_clients(num_clients: int, samples: int, needed: int | None = None) -> None:
    """Refuse more clients than samples.

    Args:
        num_clients: as the user gave them.
        samples: that they divide.
        needed: how many samples these clients need, where it is not one for each: some divide a copy of their
            own, or want several.
    """
    needed = num_clients if needed is None else needed
    remedy = f"more clients than the {samples} samples there are"
    if needed != num_clients:
        remedy = f"{needed} samples are needed, and there are {samples}"
    require(needed <= samples, "clients", num_clients, f"{remedy}; take fewer clients or a larger source")


def check_part(samples: np.ndarray) -> None:
    """Refuse to cut a part of the source that is empty: only the test part may be."""
    remedy = "clients are tested on it here; take another source, or test_share of source or scenario"
    require(len(samples) > 0, "data.source", "no test part", remedy)


def check_fraction(name: str, value: float | None) -> None:
    """Refuse a share outside [0, 1)."""
    if value is not None and not 0.0 <= value < 1.0:
        raise UserError(name, value, "a share of the samples lies in [0, 1)")


def check_side(name: str, side: int | None) -> None:
    """Refuse a side of images in pixels that none has."""
    require(side is None or 0 < side <= LONGEST_SIDE, name, side, f"a side in pixels, 1 to {LONGEST_SIDE}")


def grouped(num_clients: int, num_groups: int) -> np.ndarray:
    """Return int64 [N], the group of each client in contiguous blocks; refuse groups that do not divide."""
    check_memory("clients", num_clients, CLIENT_BYTES)
    require(
        num_clients > 0 and num_clients % num_groups == 0,
        "clients",
        num_clients,
        f"must be a multiple of the {num_groups} groups, so that all groups are of one size",
    )
    return np.repeat(np.arange(num_groups), num_clients // num_groups)
