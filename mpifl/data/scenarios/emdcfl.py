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
from mpifl.data.partition.csr import Csr, from_lists, train_val_test
from mpifl.data.partition.shards import cut
from mpifl.data.pool import Pool
from mpifl.data.scenario import ImageSide, Scenario, ScenarioSpec, check_groups, grouped
from mpifl.data.scenarios.rotated import Rotated
from mpifl.data.scenarios.usual import cut_copies
from mpifl.data.transforms import Colour, Patch

VERSIONS = {
    "max": (0.0, 90.0, 180.0, 270.0),  # K = 4
    "min": (-3.0, -1.0, 1.0, 3.0),  # K = 1
    "two": (-3.0, 3.0, 177.0, 183.0),  # K = 2
    "base": (0.0, 0.0, 0.0, 0.0),  # K = 1
}
SAME_GROUP_DEGREES = 6.0

GREEN, PURPLE = (0.26, 0.63, 0.40), (149 / 255, 52 / 255, 235 / 255)
SUMMER = tuple((d / 39, 0.5 + d / 78, 0.4) for d in range(10))  # levels 0..9 of matplotlib's summer in 40
TAB10 = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189))

TESTED_ON = "the paper divides the source's test part among the clients; leave it out"


@dataclass(frozen=True)
class RotatedVersions(Scenario):
    """Four blocks of clients with the same images rotated by different angles, cut as in the notebooks.

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
        check_groups(self.clients, 4)

    def _rotated(self) -> Rotated:
        """Return the blocks."""
        angles = VERSIONS[self.version]
        return Rotated(self.clients, angles, SAME_GROUP_DEGREES, validation=self.validation)


@dataclass(frozen=True)
class EmdCflMnist(RotatedVersions):
    """Rotated MNIST: 4 x 10 clients, balanced classes, a copy for each group; 4878 / 542 / 220 a client."""

    paper = "zhang2025clustered"

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotated groups."""
        return replace(self._rotated(), test_parts="population", spread=False).compose(pool, key)


@dataclass(frozen=True)
class EmdCflCifar(RotatedVersions):
    """Rotated CIFAR-10: 4 x 10 clients, each group a copy, canvas expanded; 4500 / 500 / 1000 a client.

    Version min adds a border of two black pixels before rotating.

    Attributes:
        resize: side in pixels of the images that clients get; 224 for ImageNet's ResNet18, 32 or 40 for a
            model of your own.
    """

    paper = "zhang2025clustered"

    resize: ImageSide = 224

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotated groups."""
        border = 2 if self.version == "min" else 0
        turned = replace(self._rotated(), balance=False, expand=True, border=border, resize=self.resize)
        return replace(turned.compose(pool, key), normalise="imagenet")


@dataclass(frozen=True)
class Backdoor(Scenario):
    """Targets, attackers and bystanders, and a further test set `backdoor`.

    Accuracy on it is reported for the targets.

    Attributes:
        clients: number of clients N, a third of them in each group.
        validation: share of each client's training samples set aside for validation.
    """

    tested_on: ClassVar[str] = TESTED_ON

    clients: PositiveInt = 30
    validation: ShareBelowOne = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.clients, 3)

    def _groups(self) -> np.ndarray:
        return grouped(self.clients, 3)


@dataclass(frozen=True)
class BackdoorMnist(Backdoor):
    """Coloured MNIST with a backdoor.

    Group 0 are the targets (green), group 1 the attackers (coloured by label), group 2 bystanders (purple).
    Groups 0 and 2 keep a random half of their training images. The further test set `backdoor` gives digit d
    the attackers' colour of digit 9 - d, in every group; accuracy on it is reported for group 0.

    Attributes:
        kept: share of the training images that groups 0 and 2 keep.
    """

    paper = "zhang2025clustered"

    kept: PositiveShare = 0.5

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and colours."""
        require(pool.shape[0] == 1, "name", "emdcfl_backdoor_mnist", "paints grey images; use source mnist")
        remedy = "needs ten classes; use source mnist"
        require(pool.num_classes == 10, "name", "emdcfl_backdoor_mnist", remedy)
        return ScenarioSpec(
            lambda: self._splits(pool, key),
            self._groups(),
            ops=(Colour(((GREEN,) * 10, SUMMER, (PURPLE,) * 10)),),
            split_ops={"backdoor": (Colour((SUMMER[::-1],) * 3),)},
            materialize=True,
            normalise="imagenet",
            names=("targets, green", "attackers, coloured by label", "bystanders, purple"),
            targets=0,
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        train, test = (
            cut_copies(pool, part, self.clients, 3, key.of(name), balance=True, spread=False)
            for name, part in (("train", pool.train), ("test", pool.test))
        )
        splits = train_val_test(train, test, self.validation)
        rows = [np.asarray(splits["train"].of(k)) for k in range(self.clients)]  # in random order
        share = [1.0 if group == 1 else self.kept for group in self._groups()]
        kept = [row[: int(part * len(row))] for row, part in zip(rows, share, strict=True)]
        return {**splits, "train": from_lists(kept), "backdoor": test}


@dataclass(frozen=True)
class BackdoorCifar(Backdoor):
    """CIFAR-10 with a backdoor.

    Group 0 are the targets (classes 0-4, clean), group 1 the attackers (0-4, with a patch), group 2
    bystanders (5-9, clean). The attackers' training and validation images have a 3 x 3 patch in the colour of
    their label; test images are clean. The further test set `backdoor` gives every test image the patch of
    the next label.

    Attributes:
        resize: side in pixels of the images that clients get; the patch is painted before resizing.
    """

    paper = "zhang2025clustered"

    clients: PositiveInt = 15
    resize: ImageSide | None = 224

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and patches."""
        suits = pool.shape[0] == 3 and pool.num_classes == 10
        require(suits, "name", "emdcfl_backdoor_cifar", "needs ten classes in colour; use source cifar10")
        none = (None,) * 10
        following = tuple(TAB10[(label + 1) % 5] for label in range(10))
        return ScenarioSpec(
            lambda: self._splits(pool, key),
            self._groups(),
            ops=(Patch((none, (*TAB10, *none[:5]), none)),),
            split_ops={"test": (), "backdoor": (Patch((following,) * 3),)},
            resize=self.resize,
            normalise="imagenet",
            names=("targets, classes 0-4", "attackers, classes 0-4 with a patch", "bystanders, classes 5-9"),
            targets=0,
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        train, test = (self._cut(pool, part, key.of(i)) for i, part in enumerate((pool.train, pool.test)))
        return {**train_val_test(train, test, self.validation), "backdoor": test}

    def _cut(self, pool: Pool, samples: np.ndarray, key: Key) -> Csr:
        rows: list[np.ndarray] = []
        for group in range(3):
            chosen = samples[(pool.labels[samples] >= 5) == (group == 2)]
            rows += cut(key.of(group).numpy().permutation(chosen), self.clients // 3)
        return from_lists(rows)
