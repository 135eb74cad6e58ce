"""Groups of clients that differ in their partition and in the operations on their samples."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import UserError, nearest, require
from mpifl.core.federation import CLASSES, IMAGES
from mpifl.core.options import ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_lists
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_clients, check_test_share
from mpifl.data.scenarios.composed import different_permutations
from mpifl.data.scenarios.rotated import same_angle
from mpifl.data.scenarios.skewed import LabelQuantity, Quantile, noise_of
from mpifl.data.scenarios.usual import (
    Dirichlet,
    Iid,
    LogNormal,
    PartitionedScenario,
    PowerLaw,
    Shards,
    parts_of_copies,
)
from mpifl.data.transforms import Op, PermuteLabels, Rotate

KINDS: dict[str, type[PartitionedScenario]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "lognormal": LogNormal,
    "powerlaw": PowerLaw,
    "label_quantity": LabelQuantity,
    "quantile": Quantile,
}
OF_ALL = ("validation", "test", "test_share", "groups")  # keys of a partition that a group cannot set
CHANGES: dict[str, Any] = {"angle": 0.0, "permute_labels": False, "noise": 0.0}  # key -> value for no change


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
        for g in range(len(self.groups)):
            self._partition(g)
            self._changes(g)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partitions and changes."""
        inner, changes = self._partitions, [self._changes(g) for g in range(len(self.groups))]
        for g, partition in enumerate(inner):
            remedy = f"it divides the samples by class, but labels of this source are {pool.label_kind}"
            fits = pool.label_kind == CLASSES or not (partition.by_class or changes[g]["permute_labels"])
            require(fits, f"groups[{g}].name", self.groups[g].get("name", "iid"), remedy)
            fits = pool.kind == IMAGES or not changes[g]["angle"]
            remedy = f"samples of this source are {pool.kind}, which cannot be rotated"
            require(fits, f"groups[{g}].angle", changes[g]["angle"], remedy)
        check_clients(max(p.clients for p in inner) if self.copies else self._clients, pool.num_train)
        ops = self._ops(pool, changes, key)
        blocks = np.repeat(np.arange(len(inner)), [partition.clients for partition in inner])
        group_of, first = self._truth(pool, changes)
        return ScenarioSpec(
            lambda: self._splits(pool, key),
            group_of[blocks],
            blocks,
            ops=ops,
            materialize=bool(ops),
            names=tuple(self._name(g) for g in first),
        )

    def _truth(self, pool: Pool, changes: list[dict[str, Any]]) -> tuple[np.ndarray, list[int]]:
        """Return the ground-truth group of each group, int64, and the first group in each of these."""
        angles = tuple(float(change["angle"]) for change in changes)
        turn = same_angle(angles, 0.0, pool.shape if pool.kind == IMAGES else ())
        kinds = [
            (
                replace(p, clients=1) if isinstance(p, Iid) and not self.copies else p,
                turn[g],
                g if changes[g]["permute_labels"] else None,
                changes[g]["noise"],
            )
            for g, p in enumerate(self._partitions)
        ]
        first = [kinds.index(kind) for kind in kinds]
        known = sorted(set(first))
        return np.array([known.index(g) for g in first]), known

    @property
    def _partitions(self) -> list[PartitionedScenario]:
        return [self._partition(g) for g in range(len(self.groups))]

    @property
    def _clients(self) -> int:
        return sum(partition.clients for partition in self._partitions)

    def _partition(self, g: int) -> PartitionedScenario:
        """Return the partition of group `g`."""
        given = {key: value for key, value in self.groups[g].items() if key not in CHANGES}
        name = given.pop("name", "iid")
        if name not in KINDS:
            raise UserError(f"groups[{g}].name", name, f"unknown name; {nearest(str(name), list(KINDS))}")
        known = {f.name: f.default for f in fields(KINDS[name]) if f.name not in OF_ALL}
        for key, value in given.items():
            below = f"groups[{g}].{key}"
            names = [*known, *CHANGES]
            require(key in known, below, value, f"unknown key; {nearest(str(key), names)}")
            _check_type(below, value, known[key])
        of_all: dict[str, Any] = {
            "validation": self.validation,
            "test": self.test,
            "test_share": self.test_share,
        }
        try:
            return KINDS[name](**of_all, **given)
        except UserError as error:
            raise error.under(f"groups[{g}]") from None

    def _changes(self, g: int) -> dict[str, Any]:
        """Return the operations on the samples of group `g`."""
        found = {key: self.groups[g].get(key, plain) for key, plain in CHANGES.items()}
        for key, value in found.items():
            _check_type(f"groups[{g}].{key}", value, CHANGES[key])
        noise = found["noise"]
        require(noise >= 0, f"groups[{g}].noise", noise, "a standard deviation, not negative")
        return found

    def _ops(self, pool: Pool, changes: list[dict[str, Any]], key: Key) -> tuple[Op, ...]:
        ops: list[Op] = []
        if any(change["angle"] % 360 for change in changes):
            ops.append(Rotate(tuple(float(change["angle"]) for change in changes)))
        if any(change["permute_labels"] for change in changes):
            permuted = [change["permute_labels"] for change in changes]
            ops.append(PermuteLabels(different_permutations(pool, permuted, key, "groups")))
        if any(change["noise"] for change in changes):
            ops.append(noise_of(pool, tuple(float(change["noise"]) for change in changes), key))
        return tuple(ops)

    def _name(self, g: int) -> str:
        words = [str(self.groups[g].get("name", "iid"))]
        words += [f"{k} {v}" for k, v in self.groups[g].items() if k not in ("name", "clients", *CHANGES)]
        change = self._changes(g)
        words += [f"{change['angle']:g} degrees"] if change["angle"] else []
        words += ["labels permuted"] if change["permute_labels"] else []
        words += [f"noise {change['noise']:g}"] if change["noise"] else []
        return ", ".join(words)

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        inner, share = self._partitions, self.test_share if self.test == "own" else None
        copies, most = len(inner) if self.copies else 1, max(partition.clients for partition in inner)
        parts, own = parts_of_copies(pool, share, copies, most, key)
        if own != share:  # test samples are set aside already
            inner = [replace(partition, test="like", test_share=TEST_SHARE) for partition in inner]
        shares = [self._shares(part, key.of("share", i)) for i, part in enumerate(parts)]
        rows: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for g, partition in enumerate(inner):
            train, test = (share[g] for share in shares)
            place = np.concatenate([train, test])
            reads = isinstance(partition, Quantile) and partition.by != "target"
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


def _check_type(key: str, value: Any, like: Any) -> None:
    """Refuse a value whose type differs from that of the default `like`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = {
        bool: isinstance(value, bool),
        int: number and isinstance(value, int),
        float: number and np.isfinite(value),
        str: isinstance(value, str),
    }.get(type(like), True)
    require(bool(good), key, value, f"must be of type {type(like).__name__}")
