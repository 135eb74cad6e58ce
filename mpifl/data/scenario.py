"""The interface of scenarios: who holds which samples, how they are transformed, what the server owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval

from mpifl.core.errors import UserError, is_ours, is_whole, name_of, require
from mpifl.core.federation import CLASSES, SPLITS
from mpifl.core.options import Options
from mpifl.core.process import check_memory
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr

from .pool import Pool
from .transforms import Op

LONGEST_SIDE = 10_000  # pixels of an image
ImageSide = Annotated[int, Interval(ge=1, le=LONGEST_SIDE)]
TEST_SHARE = 0.2  # of a client's samples, if it is tested on samples of its own
TRIED_GROUPS = 10  # groups on whose samples a user's operations are tried
CLIENT_BYTES = 50  # approximate memory of a registered client at rank 0 (docs/performance.md)


@dataclass(frozen=True)
class SampleIndex:
    """Samples of one client in one split.

    Attributes:
        index: addresses in the pool, int [n] or a slice.
        group: the group of each sample, int [n], or one group for all samples.
        regime: what drift does to all samples beside the scenario's operations (`mpifl/data/drift.py`); 0:
            nothing.
    """

    index: np.ndarray | slice
    group: np.ndarray | int
    regime: int = 0


class Partition(ABC):
    """Which samples each client holds at each visit.

    Attributes:
        sizes: int64 [N, 3], number of training, validation and test samples of each client (at its first
            visit, if they change).
        static: whether every client holds the same samples at every visit; set by the subclass.
    """

    sizes: np.ndarray
    static: bool = False

    @abstractmethod
    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples of client `k` in `split` at its `visit`-th visit; depends on nothing else."""

    def of_all(self, clients: np.ndarray, split: str, visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of several clients: joined addresses, int64 [n], and sizes, int64 [m].

        Args:
            clients: int64 [m].
            split: the same for all clients.
            visits: visit of each client, int64 [m].
        """
        found = [self.of(k, split, v).index for k, v in zip(clients.tolist(), visits.tolist(), strict=True)]
        parts = [np.arange(i.start, i.stop) if isinstance(i, slice) else i for i in found]
        index = np.concatenate(parts) if parts else np.zeros(0)
        return index.astype(np.int64), np.array([len(part) for part in parts], np.int64)

    def num_samples(self, k: int, visit: int) -> int:
        """Return the number of training samples of client `k` at a visit.

        Default: `sizes` at the first visit or if the partition is static, otherwise the size of what `of`
        returns. Every average over clients is weighted by this number: override it if `of` is slow.
        """
        return int(self.sizes[k, 0]) if self.static or not visit else self._counted(k, "train", visit)

    def num_held(self, k: int, split: str, visit: int) -> int:
        """Return the number of samples of client `k` in `split` at a visit.

        Default: `num_samples` for the training split, otherwise the size of what `of` returns. Unless the
        partition is static, rank 0 asks at each evaluation for the number of test samples of each evaluated
        client: override this method if `of` is slow.
        """
        return self.num_samples(k, visit) if split == "train" else self._counted(k, split, visit)

    def _counted(self, k: int, split: str, visit: int) -> int:
        index = self.of(k, split, visit).index
        return index.stop - index.start if isinstance(index, slice) else len(index)

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of several clients, int64 [m].

        Args:
            split: the same for all clients.
            clients: int64 [m].
            visits: visit of each client, int64 [m].
        """
        pairs = zip(clients.tolist(), visits.tolist(), strict=True)
        return np.array([self.num_held(k, split, visit) for k, visit in pairs], np.int64)

    def addresses(self, clients: np.ndarray) -> np.ndarray | None:
        """Return all samples that some clients hold in any split, int64 ascending; None if they change.

        Args:
            clients: int64 [m].
        """
        return None

    def mixture(self, k: int, visit: int) -> np.ndarray | None:
        """Return the true group shares [groups] of client `k`; None if each client has one group."""
        return None

    def cycle(self, k: int, visit: int) -> int:
        """Return the index, from 0, of client `k`'s data set at a visit, in its sequence of data sets."""
        return visit

    def num_samples_in(self, k: int, cycle: int) -> int:
        """Return the number of training samples in client `k`'s data set number `cycle`."""
        return self.num_samples(k, cycle)

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together."""
        return int(self.sizes[:, 2].sum())


class FixedPartition(Partition):
    """A partition that never changes.

    Args:
        splits: one `Csr` for each split, by name.
        groups: int [N], the group of each client, or None for one group.
        test_pool: number of different test samples; None: the number of different addresses, which is too
            large if the pool stores copies.
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
        """Return the samples of several clients, the same at every visit."""
        return self.splits[split].of_all(clients)

    def addresses(self, clients: np.ndarray) -> np.ndarray:
        """Return all samples that some clients hold in any split, each once, int64 ascending."""
        return np.unique(np.concatenate([held.of_all(clients)[0] for held in self.splits.values()]))

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of several clients, the same at every visit."""
        return np.asarray(self.splits[split].sizes[clients], np.int64)

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples: clients may share them (FLT, UCFL C)."""
        return self.different("test") if self._test_pool is None else self._test_pool

    def different(self, split: str) -> int:
        """Return the number of different addresses of all clients' samples in a split."""
        held = self.splits[split]
        return int(held.offsets[-1] - held.offsets[0]) if held.index is None else len(np.unique(held.index))


@dataclass(frozen=True)
class ScenarioSpec:
    """A scenario for one pool and one seed. Everything but `splits()` is cheap.

    Attributes:
        splits: returns partitions by name: train, val, test and further test sets. Called once; its result is
            kept in the cache. Not used if `drift` is given instead.
        groups: int64 [N], hidden group of each client, or None.
        blocks: int64 [N], the group that the operations use, if that is finer than `groups`.
        ops: operations on the samples of every split, in order.
        split_ops: operations of single splits, in place of `ops`; names other than train, val and test are
            further test sets.
        materialize: whether to store transformed images in the cache instead of transforming at every visit;
            not done where there are `public` or `group_test_sets`.
        drift: a partition that depends on the visit and is never stored. Samples, groups and sizes of any
            client may change at any visit. If they never do, its `static` is True, and clients are cached.
        resize: side in pixels of the images that clients get; None keeps their size.
        normalise: the normalisation that the scenario's paper uses; None for the source's own.
        public: addresses of the samples that the server owns, one array for each group.
        group_test_sets: addresses of the test samples of whole groups, one array for each group.
        names: short description of each group.
        targets: the group whose accuracy is reported separately, or None.
        facts: facts that the scenario reports about itself, beyond counts. A list of N under `clients` or
            `origins` names the clients, in `clients.csv` and `clusters.csv`.
        remarks: returns lines for the user about the partitions from `splits`; printed at every start.
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
        """Return the group that the operations use for each client, int64 [N]."""
        return self.groups if self.blocks is None else self.blocks


def check_splits(spec: ScenarioSpec, splits: Mapping[str, Csr], pool: Pool, name: str) -> None:
    """Refuse splits that contradict the specification or the pool.

    Args:
        spec: the specification.
        splits: its splits.
        pool: the samples.
        name: the scenario, for error messages.
    """
    remedy = f"its splits are a {type(splits).__name__}; return a mapping of names to partitions"
    require(isinstance(splits, Mapping), "name", name, remedy)
    wrong = next((type(csr).__name__ for csr in splits.values() if not isinstance(csr, Csr)), None)
    remedy = f"a split is a {wrong}; make a Csr of it: from_lists, from_owner (mpifl.data.partition.csr)"
    require(wrong is None, "name", name, remedy)
    known = list(dict.fromkeys([*SPLITS, *spec.split_ops]))
    remedy = f"give {', '.join(known)}; further ones need an entry in split_ops"
    require({*splits} == {*known}, "name", name, f"its splits are {', '.join(splits)}: {remedy}")
    for split, csr in splits.items():
        _check_rows(csr, split, name)
    counts = [len(csr.sizes) for csr in splits.values()]
    remedy = f"its splits have rows for {', '.join(map(str, counts))} clients: give each client one in all"
    require(len(set(counts)) == 1, "name", name, remedy)
    _check_groups(spec, counts[0], name)
    for split, csr in splits.items():
        index = csr.offsets[[0, -1]] - [0, 1] if csr.index is None else csr.index
        out = index[(index < 0) | (index >= len(pool.labels))] if csr.offsets[-1] else index[:0]
        first = out[0] if len(out) else 0
        remedy = f"names sample {first} in {split}: the source has 0 to {len(pool.labels) - 1}"
        require(not len(out), "name", name, remedy)


def _check_rows(csr: Csr, split: str, name: str) -> None:
    """Refuse arrays of a split that are no partition."""
    offsets, index, row = csr.offsets, csr.index, csr.row
    whole = isinstance(offsets, np.ndarray) and offsets.dtype == np.int64 and offsets.shape > (1,)
    most = index.size if isinstance(index, np.ndarray) else int(offsets[-1]) if whole else 0
    rising = whole and bool((np.diff(offsets) >= 0).all()) and 0 <= offsets[0] <= offsets[-1] <= most
    remedy = f"offsets of {split} must be an int64 array [clients + 1] that rises up to {most}, its samples"
    require(rising, "name", name, f"{remedy}; see from_lists in mpifl.data.partition.csr")
    for what, array in (("index", index), ("row", row)):
        remedy = f"{what} of {split} must be an array of whole numbers, one after the other"
        require(array is None or _whole(array), "name", name, remedy)
    remedy = f"row of {split} must lie between 0 and {len(offsets) - 2}, the last row"
    inside = row is None or (len(row) > 0 and _whole(row, len(offsets) - 1))
    require(inside, "name", name, remedy)


def _whole(array: object, limit: int | None = None) -> bool:
    """Return whether something is an array [n] of whole numbers, from 0 to below `limit` if there is one."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        return False
    return limit is None or bool(((array >= 0) & (array < limit)).all())


def check_spec(spec: ScenarioSpec, pool: Pool, name: str) -> None:
    """Refuse a specification whose fields have other types, or values that nothing can use.

    Args:
        spec: what `compose` returned.
        pool: the samples.
        name: the scenario, for error messages.
    """
    what = f"compose returns a {type(spec).__name__}; return a ScenarioSpec"
    require(isinstance(spec, ScenarioSpec), "name", name, what)
    what = f"splits is a {type(spec.splits).__name__}; give a function that returns it, as lambda: splits"
    require(callable(spec.splits), "name", name, what)
    named_ops = {"ops": spec.ops, **{f"split_ops[{split!r}]": ops for split, ops in spec.split_ops.items()}}
    for field_name, ops in named_ops.items():
        what = f"{field_name} must be a tuple of operations, objects of classes derived from Op"
        good = isinstance(ops, (tuple, list)) and all(isinstance(op, Op) for op in ops)
        require(good, "name", name, f"{what} (mpifl.data.transforms)")
    for field_name in ("groups", "blocks"):
        held = getattr(spec, field_name)
        what = f"{field_name} must be an array [clients] of whole numbers from 0"
        require(held is None or (_whole(held) and bool((held >= 0).all())), "name", name, what)
    for field_name in ("public", "group_test_sets"):
        what = f"{field_name} must hold arrays of samples of the source, 0 to {len(pool.labels) - 1}"
        inside = all(_whole(held, len(pool.labels)) for held in getattr(spec, field_name))
        require(inside, "name", name, what)
    what = f"targets is {spec.targets}, a group without clients; give one that groups holds, or None"
    aimed = spec.targets is None or (spec.groups is not None and spec.targets in spec.groups)
    require(aimed, "name", name, what)
    fits = spec.resize is None or (is_whole(spec.resize) and 0 < spec.resize <= LONGEST_SIDE)
    require(fits, "resize", spec.resize, f"give a whole number of pixels, 1 to {LONGEST_SIDE}")


def check_ops(spec: ScenarioSpec, pool: Pool, name: str) -> None:
    """Refuse operations of a user's scenario that break the rules of `Op`, by trying them on a few samples.

    Args:
        spec: the specification.
        pool: the samples; one of each class is tried, or the first two.
        name: the scenario, for error messages.
    """
    few = np.unique(pool.labels[pool.train], return_index=True)[1] if pool.label_kind == CLASSES else slice(2)
    for ops in (spec.ops, *spec.split_ops.values()):
        for group in (0,) if spec.op_groups is None else np.unique(spec.op_groups)[:TRIED_GROUPS].tolist():
            x, y = np.array(pool.inputs[few]), np.array(pool.labels[few])
            for op in ops:
                x, y = _tried(op, x, y, group, pool, name)


def _tried(
    op: Op, x: np.ndarray, y: np.ndarray, group: int, pool: Pool, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return what an operation makes of samples of a group, after checking it."""
    at = f"its operation {type(op).__name__}, for group {group},"
    try:
        made, again = (op(x.copy(), y.copy(), np.full(len(y), group)) for _ in range(2))
    except (LookupError, ValueError, TypeError) as error:
        if not is_ours(op):
            raise
        what = f"{at} fails ({type(error).__name__}: {error})"
        raise UserError("name", name, f"{what}; does it have an entry for each group and label?") from error
    pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, np.ndarray) for part in made)
    require(pair, "name", name, f"{at} returns no pair of arrays; return (x, y)")
    for what, given, found in (("samples", x, made[0]), ("labels", y, made[1])):
        remedy = f"{at} returns {found.dtype} {what} for {given.dtype} ones; keep the type"
        require(found.dtype.kind == given.dtype.kind, "name", name, remedy)
    what = f"{at} returns {len(made[0])} samples and {len(made[1])} labels for {len(y)}"
    same = len(made[0]) == len(made[1]) == len(y)
    require(same, "name", name, f"{what}; return one for each")
    if pool.label_kind == CLASSES:
        what = f"{at} returns labels from {made[1].min()} to {made[1].max()}"
        inside = _whole(made[1], pool.num_classes)
        require(inside, "name", name, f"{what}; classes are 0 to {pool.num_classes - 1}")
    same = all(np.array_equal(one, other) for one, other in zip(made, again, strict=True))
    remedy = f"{at} returns other numbers when it is called again; they must depend on its arguments alone"
    require(same, "name", name, remedy)
    return made


def check_drift(spec: ScenarioSpec, drift: Partition, pool: Pool, name: str) -> None:
    """Refuse a drift that contradicts the specification, the pool or itself for its first or last client.

    Args:
        spec: the specification.
        drift: its drift.
        pool: the samples.
        name: the scenario, for error messages.
    """
    remedy = f"drift is a {type(drift).__name__}; give an object of a class derived from Partition"
    require(isinstance(drift, Partition), "name", name, remedy)
    sizes = getattr(drift, "sizes", None)
    remedy = f"its drift needs `sizes`, an array of whole numbers [clients, {len(SPLITS)}]"
    table = isinstance(sizes, np.ndarray) and np.issubdtype(sizes.dtype, np.integer) and sizes.size > 0
    require(table and drift.sizes.shape[1:] == (len(SPLITS),), "name", name, remedy)
    count = len(drift.sizes)
    _check_groups(spec, count, name)
    for k in range(0, count, max(1, count - 1)):
        for split, said in zip(SPLITS, drift.sizes[k].tolist(), strict=True):
            holds = _drawn(drift, k, split, 0, pool, name)
            remedy = f"sizes counts {said} samples of client {k} in {split}, and `of` returns {holds}"
            require(said == holds, "name", name, f"{remedy}: count those of the first visit")
            _drawn(drift, k, split, 1, pool, name)


def _drawn(drift: Partition, k: int, split: str, visit: int, pool: Pool, name: str) -> int:
    """Return how many samples a client has at a visit, after checking them."""
    at = f"`of` of client {k} in {split} at visit {visit}"
    one, other = drift.of(k, split, visit), drift.of(k, split, visit)
    remedy = f"{at} returns a {type(one).__name__}; return a SampleIndex"
    require(isinstance(one, SampleIndex), "name", name, remedy)
    if isinstance(one.index, slice):
        return len(range(*one.index.indices(len(pool.labels))))
    remedy = f"{at} must give whole numbers from 0 to {len(pool.labels) - 1}, an array or a slice"
    require(_whole(one.index, len(pool.labels)), "name", name, remedy)
    remedy = f"{at} returns other samples when it is called again; draw from the key that compose gets"
    require(np.array_equal(one.index, np.asarray(other.index)), "name", name, remedy)
    return len(one.index)


def _check_groups(spec: ScenarioSpec, count: int, name: str) -> None:
    """Refuse groups or blocks of another number of clients than `count`."""
    for field_name in ("groups", "blocks"):
        held = getattr(spec, field_name)
        remedy = f"{field_name} has {0 if held is None else len(held)} entries for {count} clients"
        require(held is None or len(held) == count, "name", name, f"{remedy}: give one for each")


class Scenario(Options, ABC):
    """Options of one scenario; a frozen dataclass whose fields are configuration keys.

    Attributes:
        by_class: whether it reads the classes of the samples; sources with other labels are then refused.
        of_images: whether it changes images; sources of other samples are then refused.
        of_masks: whether, although it reads classes, it takes labels that are masks, and changes them with
            their images.
        tested_on: message for users who set `test_share`, if the paper or the nature of the scenario
            determines what clients are tested on; empty if the scenario has that key.
    """

    by_class: ClassVar[bool] = True
    of_images: ClassVar[bool] = True
    of_masks: ClassVar[bool] = False
    tested_on: ClassVar[str] = ""

    @property
    def changes(self) -> bool:
        """Whether clients hold other samples at each visit. Default: they do not."""
        return False

    def option(self, key: str) -> tuple[str, Any]:
        """Return an option and its value for a message; `name` and its name if it has no such option."""
        return (key, vars(self)[key]) if key in vars(self) else ("name", name_of(self))

    def files(self) -> list[Path]:
        """Return the files that it reads; the partition is prepared again when one of them changes."""
        return []

    @abstractmethod
    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Return the specification for `pool`; all randomness is addressed below `key`."""


def check_clients(num_clients: int, samples: int, needed: int | None = None) -> None:
    """Refuse more clients than samples.

    Args:
        num_clients: number of clients that the user asked for.
        samples: number of samples that they divide.
        needed: number of samples that these clients need; None: one for each. Fewer are needed if groups
            divide copies of the samples, more if each client needs several.
    """
    needed = num_clients if needed is None else needed
    remedy = f"more clients than the {samples} samples there are"
    if needed != num_clients:
        remedy = f"{needed} samples are needed, and there are {samples}"
    require(needed <= samples, "clients", num_clients, f"{remedy}; use fewer clients or a larger source")


def check_part(samples: np.ndarray) -> None:
    """Refuse to divide a part of the source that is empty; only the test part can be empty."""
    remedy = "clients are tested on it here; use another source, or test_share of source or scenario"
    require(len(samples) > 0, "data.source", "no test part", remedy)


def check_test_share(test: str | None, share: float) -> None:
    """Refuse a share for testing that is set although clients set none aside."""
    remedy = f"has no effect with test: {test or 'like'}; use test: own, or leave it out"
    require(test == "own" or share == TEST_SHARE, "test_share", share, remedy)


def check_groups(num_clients: int, num_groups: int) -> None:
    """Refuse groups that do not divide the clients."""
    check_memory("clients", num_clients, CLIENT_BYTES)
    remedy = f"must be a multiple of the {num_groups} groups, so that all groups are of one size"
    require(num_clients > 0 and num_clients % num_groups == 0, "clients", num_clients, remedy)


def grouped(num_clients: int, num_groups: int) -> np.ndarray:
    """Return int64 [N], the group of each client in equal blocks; refuse groups that do not divide N."""
    check_groups(num_clients, num_groups)
    return np.repeat(np.arange(num_groups), num_clients // num_groups)
