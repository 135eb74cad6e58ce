"""Groups of clients that differ in their partition and in the operations on their samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from annotated_types import Interval, MinLen

from mpifl.core.errors import UserError, nearest, require
from mpifl.core.federation import CLASSES, IMAGES, MASKS
from mpifl.core.options import FiniteNonNegative, Options, Remedy, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_lists
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_clients, check_test_share
from mpifl.data.scenarios import usual
from mpifl.data.scenarios.rotated import different_permutations, same_angle
from mpifl.data.transforms import Op, PermuteLabels, Rotate

KINDS: dict[str, type[usual.PartitionedScenario]] = {
    "iid": usual.Iid,
    "dirichlet": usual.Dirichlet,
    "shards": usual.Shards,
    "lognormal": usual.LogNormal,
    "powerlaw": usual.PowerLaw,
    "label_quantity": usual.LabelQuantity,
    "quantile": usual.Quantile,
}
Made = TypeVar("Made", bound=Options)
OF_ALL = ("validation", "test", "test_share", "groups")  # keys of a partition that a group cannot set


@dataclass(frozen=True)
class Change(Options):
    """What is done to the samples of a group, see `Mixed`."""

    angle: Annotated[float, Interval(gt=-math.inf, lt=math.inf), Remedy("must be finite")] = 0.0
    permute_labels: bool = False
    noise: FiniteNonNegative = 0.0


CHANGES = tuple(f.name for f in fields(Change))


@dataclass(frozen=True)
class Mixed(Scenario):
    """Groups of clients, each with its own partition and operations on its samples: a known ground truth.

    A group is a mapping: `name` (iid, dirichlet, shards, lognormal, powerlaw, label_quantity or quantile),
    `clients` and the other keys of that scenario, and operations on its samples: `angle` (degrees
    counter-clockwise), `permute_labels: true` (a permutation of its own), `noise` (standard deviation of
    Gaussian noise, for pixels in [0, 1] or for features in units of their deviation). Groups that do not
    differ in anything are one group in the ground truth.

    Attributes:
        groups: list of the groups, in the order of their clients.
        copies: true: every group divides the whole source; false: a share in proportion to its clients.
        validation: share of each client's training samples set aside for validation.
        test: how clients are tested: `like`, `own` or `all`, as in scenario iid; with all, on their group's
            share of the test part.
        test_share: share of the samples set aside for testing if test is own. Copies set the same samples
            aside, and divide them as `like` divides the source's test part.
    """

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    groups: Annotated[tuple[dict[str, Any], ...], MinLen(1)] = (
        {"name": "dirichlet", "alpha": 0.1, "clients": 10},
        {"name": "iid", "clients": 10, "angle": 90.0},
    )
    copies: bool = False
    validation: ShareBelowOne = 0.0
    test: Literal["like", "own", "all"] = "like"
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_test_share(self.test, self.test_share)
        _ = self._partitions, self._changes  # checked when they are made

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partitions and changes."""
        inner, changes = self._partitions, self._changes
        for g, (partition, change) in enumerate(zip(inner, changes, strict=True)):
            remedy = f"it divides the samples by class, but labels of this source are {pool.label_kind}"
            fits = pool.label_kind == CLASSES or not partition.by_class
            require(fits, f"groups[{g}].name", self.groups[g].get("name", "iid"), remedy)
            remedy = f"it permutes classes, but labels of this source are {pool.label_kind}"
            fits = pool.label_kind in (CLASSES, MASKS) or not change.permute_labels
            require(fits, f"groups[{g}].permute_labels", change.permute_labels, remedy)
            remedy = f"samples of this source are {pool.kind}, which cannot be rotated"
            require(pool.kind == IMAGES or not change.angle, f"groups[{g}].angle", change.angle, remedy)
        clients = [partition.clients for partition in inner]
        check_clients(max(clients) if self.copies else sum(clients), pool.num_train)
        ops = self._ops(pool, changes, key)
        blocks = np.repeat(np.arange(len(inner)), clients)
        group_of, first = self._truth(pool, inner, changes)
        return ScenarioSpec(
            lambda: self._splits(pool, key),
            group_of[blocks],
            blocks,
            ops=ops,
            materialize=bool(ops),
            names=tuple(self._name(g, changes[g]) for g in first),
        )

    def _truth(
        self, pool: Pool, inner: list[usual.PartitionedScenario], changes: list[Change]
    ) -> tuple[np.ndarray, list[int]]:
        """Return the ground-truth group of each group, int64, and the first group in each of these."""
        angles = tuple(change.angle for change in changes)
        turn = same_angle(angles, 0.0, pool.shape if pool.kind == IMAGES else ())
        plain = [replace(p, clients=1) if isinstance(p, usual.Iid) and not self.copies else p for p in inner]
        own = [g if change.permute_labels else None for g, change in enumerate(changes)]
        kinds = list(zip(plain, turn.tolist(), own, (change.noise for change in changes), strict=True))
        first = [kinds.index(kind) for kind in kinds]
        known = sorted(set(first))
        return np.array([known.index(g) for g in first]), known

    @property
    def _partitions(self) -> list[usual.PartitionedScenario]:
        return [self._partition(g) for g in range(len(self.groups))]

    @property
    def _changes(self) -> list[Change]:
        """What is done to the samples of each group."""
        given = ({key: group[key] for key in CHANGES if key in group} for group in self.groups)
        return [_made(Change, changes, g) for g, changes in enumerate(given)]

    def _partition(self, g: int) -> usual.PartitionedScenario:
        """Return the partition of group `g`."""
        given = {key: value for key, value in self.groups[g].items() if key not in CHANGES}
        name = given.pop("name", "iid")
        if name not in KINDS:
            raise UserError(f"groups[{g}].name", name, f"unknown name; {nearest(str(name), list(KINDS))}")
        known = [f.name for f in fields(KINDS[name]) if f.name not in OF_ALL]
        for key, value in given.items():
            remedy = f"unknown key; {nearest(str(key), [*known, *CHANGES])}"
            require(key in known, f"groups[{g}].{key}", value, remedy)
        of_all = {"validation": self.validation, "test": self.test, "test_share": self.test_share}
        return _made(KINDS[name], {**of_all, **given}, g)

    def _ops(self, pool: Pool, changes: list[Change], key: Key) -> tuple[Op, ...]:
        ops: list[Op] = []
        if any(change.angle % 360 for change in changes):
            ops.append(Rotate(tuple(change.angle for change in changes)))
        permuted = [change.permute_labels for change in changes]
        if any(permuted):
            ops.append(PermuteLabels(different_permutations(pool, permuted, key, "groups")))
        if any(change.noise for change in changes):
            ops.append(usual.noise_of(pool, tuple(change.noise for change in changes), key))
        return tuple(ops)

    def _name(self, g: int, change: Change) -> str:
        words = [str(self.groups[g].get("name", "iid"))]
        words += [f"{k} {v}" for k, v in self.groups[g].items() if k not in ("name", "clients", *CHANGES)]
        words += [f"{change.angle:g} degrees"] if change.angle else []
        words += ["labels permuted"] if change.permute_labels else []
        words += [f"noise {change.noise:g}"] if change.noise else []
        return ", ".join(words)

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        inner, share = self._partitions, self.test_share if self.test == "own" else None
        copies, most = len(inner) if self.copies else 1, max(partition.clients for partition in inner)
        parts, own = usual.parts_of_copies(pool, share, copies, most, key)
        if own != share:  # test samples are set aside already
            inner = [replace(partition, test="like", test_share=TEST_SHARE) for partition in inner]
        shares = [self._shares(part, key.of("share", i)) for i, part in enumerate(parts)]
        rows: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for g, partition in enumerate(inner):
            train, test = (share[g] for share in shares)
            place = np.concatenate([train, test])
            reads = isinstance(partition, usual.Quantile) and partition.by != "target"
            blank = np.broadcast_to(np.zeros((), pool.inputs.dtype), (len(place), *pool.shape))
            inputs = pool.inputs[place] if reads else blank  # other partitions read labels only
            labels = np.asarray(pool.labels)[place]
            mine = replace(pool, inputs=inputs, labels=labels, num_train=len(train), origin=None)
            try:
                splits = partition.compose(mine, key.of("group", g)).splits()
            except UserError as error:
                raise error.under(f"groups[{g}]") from None
            for name, held in rows.items():
                held += [place[splits[name].of(k)] for k in range(partition.clients)]
        return {name: from_lists(held) for name, held in rows.items()}

    def _shares(self, samples: np.ndarray, key: Key) -> list[np.ndarray]:
        """Return the samples of each group."""
        if self.copies:
            return [samples] * len(self.groups)
        sizes = np.cumsum([partition.clients for partition in self._partitions])
        ends = np.rint(sizes / sizes[-1] * len(samples)).astype(np.int64)
        return np.split(key.numpy().permutation(samples), ends[:-1])


def _made(cls: type[Made], options: Mapping[str, Any], g: int) -> Made:
    """Return an object of the options of group `g`."""
    try:
        return cls(**options)
    except UserError as error:
        raise error.under(f"groups[{g}]") from None
