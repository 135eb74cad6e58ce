"""A federation made of a pool of samples, a partition and operations on the samples; read lazily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mpifl.core.errors import UserError, require
from mpifl.core.federation import (
    CLASSES,
    IMAGES,
    MASKS,
    SPLITS,
    ClientData,
    DataInfo,
    Federation,
    LazyClient,
    Split,
    StoredSamples,
)
from mpifl.core.mapped_arrays import release
from mpifl.core.process import machine_bytes
from mpifl.core.rng import Key

from .drift import DataSet, Drift, DriftingPartition, drifting
from .pool import Pool
from .sample_cache import SampleCache
from .scenario import Partition, SampleIndex, ScenarioSpec
from .transforms import Op, ToInputs, labels_as_tensor

MIN_CACHED_SHARE = 8  # the cache must hold at least 1 / MIN_CACHED_SHARE of all training samples
OWN_SHARE = 0.25  # of the machine's memory: limit of the copies of hosted samples of all its processes
BLOCK_BYTES = 1 << 24  # copied at a time


@dataclass(frozen=True)
class OwnSamples:
    """A copy of some rows of a pool in this process.

    Attributes:
        inputs: the stored samples [n, ...].
        labels: their labels [n, ...].
        place: for each row of the pool, its row here, int32 [S]; -1 for rows that are not here.
    """

    inputs: np.ndarray
    labels: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, pool: Pool, rows: np.ndarray) -> OwnSamples:
        """Copy rows of a pool, block by block, so that little of the pool is in memory at a time.

        Args:
            pool: samples and labels, mapped from files.
            rows: their addresses, int64 ascending, without repetition.
        """
        place = np.full(len(pool.labels), -1, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)

        def copied(held: np.ndarray) -> np.ndarray:
            copy = np.empty((len(rows), *held.shape[1:]), held.dtype)
            width = max(1, copy.nbytes // max(1, len(rows)))
            for start in range(0, len(rows), max(1, BLOCK_BYTES // width)):
                part = slice(start, start + max(1, BLOCK_BYTES // width))
                copy[part] = held[rows[part]]
                release(held)
            return copy

        return cls(copied(pool.inputs), copied(pool.labels), place)

    def places(self, index: np.ndarray | slice) -> np.ndarray | None:
        """Return the rows here of addresses in the pool, int64 [n]; None if some are not here."""
        found = self.place[index].astype(np.int64)
        return None if found.size and found.min() < 0 else found


class PoolFederation(Federation):
    """Clients whose samples are addresses in one memory-mapped pool.

    Args:
        pool: samples and labels of the source.
        spec: the specification that the scenario composed.
        partition: which client holds which samples.
        to_tensor: converts stored samples to a model's inputs.
        content: identity of the data, see `Federation.content`.
        cache_bytes: maximum size of the cache of splits as tensors; callers must not modify tensors they get.
            Nothing is cached if fewer than one in `MIN_CACHED_SHARE` of all training samples would fit,
            because most would be dropped before their client is trained again.

    Attributes:
        names: short description of each group; may be empty.
        facts: facts that the scenario reports about itself.
        extra: names of the further test sets.
    """

    def __init__(
        self,
        pool: Pool,
        spec: ScenarioSpec,
        partition: Partition,
        to_tensor: ToInputs,
        content: Mapping[str, str] = MappingProxyType({}),
        cache_bytes: int = 0,
    ) -> None:
        self.pool, self.content = pool, content
        self.partition: Partition = partition
        self.to_tensor = to_tensor
        self.sizes = partition.sizes
        self.num_clients = len(self.sizes)
        self.num_classes, self.class_names = pool.num_classes, pool.class_names
        self.groups, self.names = spec.groups, spec.names
        if spec.targets is not None and spec.groups is not None:
            self.targets = np.flatnonzero(spec.groups == spec.targets)
        self.facts: dict[str, Any] = dict(spec.facts)
        named = (self.facts.get(name) for name in ("clients", "origins"))
        lists = (names for names in named if isinstance(names, (list, tuple)))
        self.client_names = next((names for names in lists if len(names) == self.num_clients), ())
        self._ops: dict[str, tuple[Op, ...]] = {name: spec.ops for name in SPLITS} | dict(spec.split_ops)
        self.extra = tuple(name for name in spec.split_ops if name not in SPLITS)
        self._public, self._group_test_sets = spec.public, spec.group_test_sets
        self._wrong: np.ndarray | None = None  # [L], the label that attackers give to samples of each label
        self._drift: DriftingPartition | None = None
        self._regimes: Op | None = None  # changes the samples of regimes 1, 2, ... of a drift
        self.shape = self._shape_of_all_groups(spec.op_groups)
        self._limit = cache_bytes
        self._samples = SampleCache(cache_bytes * self.caches(cache_bytes))
        self._own: OwnSamples | None = None

    @property
    def info(self) -> DataInfo:
        """Description of samples and labels."""
        return replace(self.pool.info, shape=self.shape)

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of client `k` at its `visit`-th visit."""
        return LazyClient.reading(lambda split: self._split(k, split, visit), self.extra)

    def num_samples(self, k: int, visit: int = 0) -> int:
        """Return the number of training samples of client `k` at its `visit`-th visit."""
        return self.partition.num_samples(k, 0 if self.partition.static else visit)

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of clients in a split at given visits, int64 [m]; reads none."""
        if split in SPLITS and self.partition.static:
            return super().sizes_of(split, clients, visits)
        return self.partition.sizes_of(split, clients, visits)

    def drift(self, options: Drift, key: Key) -> None:
        """Let clients change their data during the run; must be called before any data are read.

        Args:
            options: the section `drift`, with a kind.
            key: address of the draws.

        Raises:
            UserError: the kind does not fit the samples, the groups or the scenario.
        """
        found, op = drifting(options, self.partition, self.groups, self.pool, key)
        self.partition, self._drift, self._regimes = found, found, op

    @property
    def data_sets(self) -> Sequence[Sequence[DataSet]]:
        """The data sets of each client in order of time; empty without drift."""
        return () if self._drift is None else self._drift.sets

    def data_set(self, k: int, visit: int, step: int) -> int:
        """Return the number of client `k`'s data set: under drift that of the step, otherwise the visit's."""
        return visit if self._drift is None else self._drift.number(k, step)

    def data_sets_of(self, clients: np.ndarray, visits: np.ndarray, step: int) -> np.ndarray:
        """Return the numbers of several clients' data sets, int64 [m], see `data_set`."""
        if self._drift is None:
            return visits
        return np.array([self._drift.number(k, step) for k in clients.tolist()], np.int64)

    @property
    def changes_by_time(self) -> bool:
        """Whether data change at times in seconds on the run's clock."""
        return self._drift is not None and bool(self._drift.options.at_s)

    @property
    def change_steps(self) -> Sequence[int]:
        """The server step with which each change begins, as far as it is known; empty without drift."""
        return () if self._drift is None else self._drift.steps

    @property
    def settled(self) -> Sequence[int]:
        """The server step of each moment at which clients change, as far as it is known; see `drift.at_s`."""
        return () if self._drift is None else self._drift.settled

    def settle_changes(self, steps: Sequence[int]) -> None:
        """Set the server step of each moment at which clients change, as far as it is known."""
        if self._drift is not None:
            self._drift.settle(steps)

    def change_is_due(self, seconds: float) -> bool:
        """Return whether clients change at a time in seconds that has come, in a step that is not set yet."""
        return self._drift is not None and self._drift.is_due(seconds)

    @property
    def regroups(self) -> Sequence[int]:
        """The server steps from which on some client is in another hidden group, ascending."""
        return () if self._drift is None or self.groups is None else self._drift.regroups

    def groups_at(self, step: int) -> np.ndarray | None:
        """Return the hidden group of each client at a server step, int64 [N]."""
        if self._drift is None or self.groups is None:
            return self.groups
        return self._drift.groups_at(step)

    def attack(self, clients: Sequence[int], labels: np.ndarray | None) -> None:
        """Make some clients attackers; must be called before any data are read.

        Args:
            clients: the attackers.
            labels: [L], the label that attackers give to their training and validation samples of each label;
                None: the true labels.
        """
        self.attackers = np.asarray(clients, np.int64)
        self._wrong = labels

    def _given(self, k: int, split: str, y: np.ndarray) -> np.ndarray:
        """Return the labels that client `k` gives to samples of a split whose labels are `y`."""
        wrong, attackers = self._wrong, self.attackers
        if wrong is None or attackers is None or split not in ("train", "val") or k not in attackers:
            return y
        return np.asarray(wrong[y])

    def caches(self, limit: int, clients: np.ndarray | None = None) -> bool:
        """Return whether splits of some clients (default: all) are cached under a limit in bytes."""
        return self._finished_bytes(clients) <= MIN_CACHED_SHARE * limit

    @property
    def finished_bytes(self) -> int:
        """Return the bytes of the training samples of all clients as float32 tensors."""
        return self._finished_bytes(None)

    def _finished_bytes(self, clients: np.ndarray | None) -> int:
        sizes = self.sizes[:, 0] if clients is None else self.sizes[clients, 0]
        return 4 * int(sizes.sum()) * int(np.prod(self.shape))

    def hosted_bytes(self, clients: np.ndarray, ranks: int) -> tuple[int, int]:
        """Return the bytes that a process holds of the clients that it hosts.

        Args:
            clients: their numbers, int64 ascending.
            ranks: number of processes of this machine that host clients.

        Returns:
            Bytes of their training samples as float32 tensors, and of the copy of their stored samples; that
            is 0 where `host` copies none.
        """
        rows = self._copied_rows(clients, ranks)
        return self._finished_bytes(clients), 0 if rows is None else len(rows) * self._row_bytes

    def _copied_rows(self, clients: np.ndarray, ranks: int) -> np.ndarray | None:
        """Return the rows of the pool that `host` copies; None for none."""
        if len(clients) == self.num_clients:
            return None
        rows = self.partition.addresses(clients)
        fits = rows is not None and len(rows) * self._row_bytes <= OWN_SHARE * machine_bytes() / ranks
        return rows if fits else None

    def host(self, clients: np.ndarray, ranks: int = 1) -> None:
        """Copy the stored samples of some clients into this process and let go of the mapped pool.

        Nothing is copied where all clients are hosted, where data change from visit to visit, or where the
        copy takes more than its part of a share of the machine's memory (`OWN_SHARE`): samples are read from
        the pool then, as those of other clients always are.

        Args:
            clients: their numbers, int64 ascending.
            ranks: number of processes of this machine that host clients.
        """
        self._samples.limit = self._limit * self.caches(self._limit, clients)
        self._own = None  # before new memory is taken
        if (rows := self._copied_rows(clients, ranks)) is not None:
            self._own = OwnSamples.of(self.pool, rows)

    @property
    def _row_bytes(self) -> int:
        """The bytes of a stored sample."""
        return int(np.prod(self.pool.shape)) * self.pool.inputs.itemsize

    @property
    def changes(self) -> bool:
        """Return whether the data of a client may differ between visits, as the partition declares."""
        return not self.partition.static

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return self.partition.test_pool

    def public(self) -> tuple[Split, ...]:
        """Return the server's labelled sets, one for each group."""
        return self._whole_groups(self._public)

    def group_test_sets(self) -> tuple[Split, ...]:
        """Return test sets of whole groups, one for each."""
        return self._whole_groups(self._group_test_sets)

    def _whole_groups(self, sets: tuple[np.ndarray, ...]) -> tuple[Split, ...]:
        draws = (SampleIndex(index, group) for group, index in enumerate(sets))
        return tuple(self._read(draw, self._ops["test"]) for draw in draws)

    def mixture(self, k: int, visit: int = 0) -> np.ndarray | None:
        """Return the true share [groups] of each group in client `k`'s training data."""
        if self._drift is not None:
            return None
        share = self.partition.mixture(k, visit)
        return super().mixture(k, visit) if share is None else share

    def cycle(self, k: int, visit: int) -> int:
        """Return the index, from 0, of client `k`'s data set at a visit, in its sequence of data sets."""
        return self.partition.cycle(k, visit)

    def num_samples_in(self, k: int, cycle: int) -> int:
        """Return the number of training samples in client `k`'s data set number `cycle`."""
        return self.partition.num_samples_in(k, 0 if self.partition.static else cycle)

    def await_drift(self, threshold: float, longest: int) -> None:
        """Skip data sets that differ too little from those of the previous visit.

        Args:
            threshold: minimum total variation distance between the group shares of successive visits.
            longest: a visit skips fewer data sets than this.

        Raises:
            UserError: the data never change, or have no group shares.
        """
        if self.partition.static or self.partition.mixture(0, 0) is None:
            super().await_drift(threshold, longest)
        self.partition = PartitionUntilDrift(self.partition, threshold, longest)

    def samples(self, k: int, split: str = "train", visit: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return client `k`'s samples in their stored type (images: uint8 [n, C, H, W]), and its labels."""
        x, y = self._pixels(self.partition.of(k, split, visit), self._ops[split])
        return np.array(x), np.array(self._given(k, split, y))

    def pixels(self, k: int, split: str = "train", visit: int = 0) -> Split:
        """Return a split of client `k` with images uint8 [n, C, H, W], neither resized nor normalised."""
        x, y = self.samples(k, split, visit)
        return Split(torch.from_numpy(x), labels_as_tensor(y))

    def labels(self, k: int, split: str = "train", visit: int = 0) -> np.ndarray:
        """Return client `k`'s labels, int64 [n] for classes, without reading any sample."""
        draw = self.partition.of(k, split, visit)
        y = self.pool.labels[draw.index]
        blank = np.broadcast_to(np.zeros((), self.pool.inputs.dtype), (len(y), *self.pool.shape))
        _, y = self._changed(draw, blank, y, self._ops[split])
        return self._given(k, split, y)

    def stored(self, clients: np.ndarray, visits: np.ndarray) -> StoredSamples | None:
        """Return where training samples of some visits are stored; None if clients train on other values."""
        pool, table = self.pool, self._table
        if table is None or self._wrong is not None:
            return None
        if self._drift is not None and self._drift.changed(clients, visits):
            return None
        index, sizes = self.partition.of_all(clients, "train", visits)
        if self._own is not None and (places := self._own.places(index)) is not None:
            return StoredSamples(self._own.inputs, self._own.labels, table, places, sizes)
        return StoredSamples(pool.inputs, pool.labels, table, index, sizes)

    @cached_property
    def _table(self) -> torch.Tensor | None:
        """The model input for each value of a pixel; None if that table does not determine the inputs."""
        pool = self.pool
        plain = not self._ops["train"] and pool.kind == IMAGES and pool.label_kind == CLASSES
        plain = plain and pool.inputs.flags.c_contiguous and pool.labels.dtype == np.int64
        return self.to_tensor.table(pool.shape) if plain and pool.labels.flags.c_contiguous else None

    def _split(self, k: int, split: str, visit: int) -> Split:
        address = (k, split, 0 if self.partition.static else visit)

        def read() -> Split:
            found = self._read(self.partition.of(k, split, visit), self._ops[split])
            if self._wrong is None:
                return found
            return Split(found.x, torch.from_numpy(np.array(self._given(k, split, found.y.numpy()))))

        return self._samples.get(address, read)

    def _read(self, draw: SampleIndex, ops: tuple[Op, ...]) -> Split:
        x, y = self._pixels(draw, ops)  # may be views of the mapped cache: never return them
        return Split(self.to_tensor(x), labels_as_tensor(y))

    def _pixels(self, draw: SampleIndex, ops: tuple[Op, ...]) -> tuple[np.ndarray, np.ndarray]:
        return self._changed(draw, *self._rows(draw.index), ops)

    def _changed(
        self, draw: SampleIndex, x: np.ndarray, y: np.ndarray, ops: tuple[Op, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return stored samples and labels after the scenario's operations and that of the draw's regime."""
        for op in ops:
            x, y = op(x, y, self._group(draw, len(y)))
        if draw.regime and self._regimes is not None:
            x, y = self._regimes(x, y, np.full(len(y), draw.regime))
        return x, y

    def _rows(self, index: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return stored samples and their labels, from this process's copy if it has all of them."""
        if self._own is not None and (places := self._own.places(index)) is not None:
            return self._own.inputs[places], self._own.labels[places]
        return self.pool.inputs[index], self.pool.labels[index]

    @staticmethod
    def _group(draw: SampleIndex, n: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(draw.group), (n,))

    def _shape_of_all_groups(self, groups: np.ndarray | None) -> tuple[int, ...]:
        some = [0] if groups is None or not len(groups) else np.unique(groups).tolist()
        blank = np.zeros((1, *self.pool.shape), self.pool.inputs.dtype)
        label = np.zeros((1, *self.pool.labels.shape[1:]), self.pool.labels.dtype)
        shapes = set()
        for group in some:
            x, y = blank, label
            for op in self._ops["train"]:
                x, y = op(x, y, np.array([group]))
            shape = tuple(self.to_tensor(x).shape[1:])
            shapes.add(shape)
            sides, last = tuple(y.shape[1:]), shape[-2:]
            remedy = f"labels are masks of {list(sides)} pixels, which are not resized: leave it out"
            fits = self.pool.label_kind != MASKS or sides == last
            require(fits, "data.scenario.resize", list(last), remedy)
        if len(shapes) > 1:
            remedy = "the groups' samples would differ in size; set resize to one size for all"
            raise UserError("data.scenario.resize", sorted(shapes), remedy)
        return shapes.pop()


class PartitionUntilDrift(Partition):
    """Another partition without the data sets that drifted too little.

    Args:
        inner: the partition some of whose data sets are skipped.
        threshold: minimum total variation distance between the group shares of two successive visits.
        longest: a visit takes one of the next `longest` data sets, the last if none differs enough.
    """

    def __init__(self, inner: Partition, threshold: float, longest: int) -> None:
        self.inner, self.threshold, self.longest = inner, threshold, longest
        self.sizes = inner.sizes
        self._cycles: dict[int, list[int]] = {}  # client -> data set of each visit

    def cycle(self, k: int, visit: int) -> int:
        """Return the index, from 0, of client `k`'s data set at a visit, in its sequence of data sets."""
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

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples of client `k` at its visit."""
        return self.inner.of(k, split, self.cycle(k, visit))

    def num_samples(self, k: int, visit: int) -> int:
        """Return the number of training samples of client `k` at its visit."""
        return self.inner.num_samples(k, self.cycle(k, visit))

    def num_samples_in(self, k: int, cycle: int) -> int:
        """Return the number of training samples in client `k`'s data set number `cycle`, skipped or not."""
        return self.inner.num_samples(k, cycle)

    def num_held(self, k: int, split: str, visit: int) -> int:
        """Return the number of samples of client `k` in `split` at its visit."""
        return self.inner.num_held(k, split, self.cycle(k, visit))

    def mixture(self, k: int, visit: int) -> np.ndarray | None:
        """Return the group shares [groups] in the data of client `k` at its visit."""
        return self.inner.mixture(k, self.cycle(k, visit))

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples."""
        return self.inner.test_pool
