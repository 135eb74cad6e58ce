"""The scenarios of EMD-CFL ("Clustered Federated Learning via Embedding Distributions"), with equal counts.

Counts and recipes: algorithms.md section 7.1, from the notebooks of ooo-ctrl/emdcfl. Random draws differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import PositiveInt, PositiveShare, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_lists, hold_out
from mpifl.data.partition.shards import balanced, cut, cut_by_class
from mpifl.data.pool import Pool
from mpifl.data.scenario import ImageSide, Scenario, ScenarioSpec, check_part, grouped
from mpifl.data.scenarios.rotated import Rotated
from mpifl.data.transforms import Colour, Patch

VERSIONS = {
    "max": (0.0, 90.0, 180.0, 270.0),  # K = 4
    "min": (-3.0, -1.0, 1.0, 3.0),  # K = 1
    "two": (-3.0, 3.0, 177.0, 183.0),  # K = 2
    "base": (0.0, 0.0, 0.0, 0.0),  # K = 1
}
SAME_GROUP_DEGREES = 6.0

GREEN, PURPLE = (0.26, 0.63, 0.40), (149 / 255, 52 / 255, 235 / 255)
SUMMER = tuple(
    (d / 39, 0.5 + d / 78, 0.4) for d in range(10)
)  # levels 0..9 of matplotlib's summer in 40 levels
TAB10 = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189))

TESTED_ON = "the paper divides the source's test part among the clients; leave it out"


@dataclass(frozen=True)
class EmdCflMnist(Scenario):
    """Rotated MNIST: 4 x 10 clients, balanced classes, each group a copy; 4878 / 542 / 220 images a client.

    Attributes:
        version: max (0, 90, 180, 270 degrees: 4 groups), min (-3, -1, 1, 3 degrees: 1 group), two (-3, 3,
            177, 183 degrees: 2 groups) or base (no rotation: 1 group).
        clients: number of clients N.
        validation: share of each client's training samples set aside for validation.
    """

    tested_on: ClassVar[str] = TESTED_ON

    version: Literal["max", "min", "two", "base"] = "max"
    clients: PositiveInt = 40
    validation: ShareBelowOne = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped(self.clients, 4)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotated groups, cut as in the notebooks."""
        return Rotated(
            clients=self.clients,
            angles=VERSIONS[self.version],
            tolerance=SAME_GROUP_DEGREES,
            validation=self.validation,
            test_parts="population",
            spread=False,
        ).compose(pool, key)


@dataclass(frozen=True)
class EmdCflCifar(Scenario):
    """Rotated CIFAR-10: 4 x 10 clients, each group a copy, canvas expanded; 4500 / 500 / 1000 a client.

    Attributes:
        version: as for rotated MNIST; min adds a border of two black pixels before rotating.
        clients: number of clients N.
        resize: side in pixels of the images that clients get; 224 for ImageNet's ResNet18, 32 or 40 for a
            model of your own.
        validation: share of each client's training samples set aside for validation.
    """

    tested_on: ClassVar[str] = TESTED_ON

    version: Literal["max", "min", "two", "base"] = "max"
    clients: PositiveInt = 40
    resize: ImageSide = 224
    validation: ShareBelowOne = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped(self.clients, 4)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotated groups, cut as in the notebooks."""
        rotated = Rotated(
            clients=self.clients,
            angles=VERSIONS[self.version],
            tolerance=SAME_GROUP_DEGREES,
            balance=False,
            validation=self.validation,
            expand=True,
            border=2 if self.version == "min" else 0,
            resize=self.resize,
        )
        return replace(rotated.compose(pool, key), normalise="imagenet")


@dataclass(frozen=True)
class BackdoorMnist(Scenario):
    """Coloured MNIST with a backdoor.

    Group 0 are the targets (green), group 1 the attackers (coloured by label), group 2 bystanders (purple).
    Groups 0 and 2 keep a random half of their training images. The further test set `backdoor` gives digit d
    the attackers' colour of digit 9 - d, in every group; accuracy on it is reported for group 0.

    Attributes:
        clients: number of clients N, a third of them in each group.
        validation: share of each client's training samples set aside for validation.
        kept: share of the training images that groups 0 and 2 keep.
    """

    tested_on: ClassVar[str] = TESTED_ON

    clients: PositiveInt = 30
    validation: ShareBelowOne = 0.1
    kept: PositiveShare = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped(self.clients, 3)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and colours."""
        require(pool.shape[0] == 1, "name", "emdcfl_backdoor_mnist", "paints grey images; use source mnist")
        require(
            pool.num_classes == 10, "name", "emdcfl_backdoor_mnist", "needs ten classes; use source mnist"
        )
        clean = Colour(((GREEN,) * 10, SUMMER, (PURPLE,) * 10))
        reverse = Colour((SUMMER[::-1],) * 3)
        groups = grouped(self.clients, 3)
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=groups,
            ops=(clean,),
            split_ops={"backdoor": (reverse,)},
            materialize=True,
            normalise="imagenet",
            names=("targets, green", "attackers, coloured by label", "bystanders, purple"),
            targets=0,
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        train = from_lists(self._rows(pool, pool.train, key.of("train")))
        test = from_lists(self._rows(pool, pool.test, key.of("test")))
        whole, val = hold_out(train, self.validation)
        groups = grouped(self.clients, 3)
        rows = [
            np.asarray(whole.of(k)) for k in range(self.clients)
        ]  # in random order: its first part is random
        kept = [
            row if g == 1 else row[: int(self.kept * len(row))] for row, g in zip(rows, groups, strict=True)
        ]
        return {"train": from_lists(kept), "val": val, "test": test, "backdoor": test}

    def _rows(self, pool: Pool, samples: np.ndarray, key: Key) -> list[np.ndarray]:
        check_part(samples)
        rows: list[np.ndarray] = []
        for group in range(3):
            rng = key.of(group).numpy()
            mixed = rng.permutation(balanced(pool, samples))
            rows += cut_by_class(mixed, pool.labels[mixed], self.clients // 3, rng, spread=False)
        return rows


@dataclass(frozen=True)
class BackdoorCifar(Scenario):
    """CIFAR-10 with a backdoor.

    Group 0 are the targets (classes 0-4, clean), group 1 the attackers (0-4, with a patch), group 2
    bystanders (5-9, clean). The attackers' training and validation images have a 3 x 3 patch in the colour of
    their label; test images are clean. The further test set `backdoor` gives every test image the patch of
    the next label.

    Attributes:
        clients: number of clients N, a third of them in each group.
        validation: share of each client's training samples set aside for validation.
        resize: side in pixels of the images that clients get; the patch is painted before resizing.
    """

    tested_on: ClassVar[str] = TESTED_ON

    clients: PositiveInt = 15
    validation: ShareBelowOne = 0.1
    resize: ImageSide | None = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped(self.clients, 3)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and patches."""
        suits = pool.shape[0] == 3 and pool.num_classes == 10
        require(suits, "name", "emdcfl_backdoor_cifar", "needs ten classes in colour; use source cifar10")
        none = (None,) * 10
        following = tuple(TAB10[(label + 1) % 5] for label in range(10))
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=grouped(self.clients, 3),
            ops=(Patch((none, (*TAB10, *none[:5]), none)),),
            split_ops={"test": (), "backdoor": (Patch((following,) * 3),)},
            resize=self.resize,
            normalise="imagenet",
            names=("targets, classes 0-4", "attackers, classes 0-4 with a patch", "bystanders, classes 5-9"),
            targets=0,
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        train, test = (self._cut(pool, part, key.of(i)) for i, part in enumerate((pool.train, pool.test)))
        kept, val = hold_out(train, self.validation)
        return {"train": kept, "val": val, "test": test, "backdoor": test}

    def _cut(self, pool: Pool, samples: np.ndarray, key: Key) -> Csr:
        rows: list[np.ndarray] = []
        for group in range(3):
            chosen = samples[(pool.labels[samples] >= 5) == (group == 2)]
            rows += cut(key.of(group).numpy().permutation(chosen), self.clients // 3)
        return from_lists(rows)
