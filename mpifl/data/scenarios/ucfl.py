"""The scenarios of UCFL ("User-Centric Federated Learning"): label, covariate and concept shift.

Counts and recipes: algorithms.md section 7.3. Pixels are divided by 255 and nothing else. A, B and the
batch-size study use EMNIST byclass, C CIFAR-10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out, train_val_test
from mpifl.data.partition.dirichlet import at_least, owners_by_class, owners_by_shares
from mpifl.data.partition.shards import cut
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_clients, check_groups, grouped
from mpifl.data.scenarios.relations import different_orders
from mpifl.data.scenarios.rotated import angle_names, same_angle
from mpifl.data.transforms import PermuteLabels, Rotate


@dataclass(frozen=True)
class LabelShift(Scenario):
    """Images drawn at random and divided among users; each block of users may have its own angle.

    Attributes:
        clients: number of clients N, a multiple of the number of angles, if there are any.
        points: number of training images of all users together (12,500 are drawn for 10,000); up to one less
            for each user, because its share for testing is rounded up.
        alpha: concentration of the Dirichlet distribution.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each user's images set aside for testing.
    """

    clients: PositiveInt = 20
    points: int = 10_000
    alpha: PositiveFloat | None = 0.4
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"{self.clients} users need at least two images each"
        require(self.points >= 2 * self.clients, "points", self.points, remedy)
        check_groups(self.clients, max(1, len(self._angles)))

    @property
    def _angles(self) -> tuple[float, ...]:
        """The rotation of each block of users; empty: none."""
        return ()

    @property
    def _drawn(self) -> bool:
        """Whether `points` counts the images for testing, too."""
        return False

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and rotation."""
        angles, count = self._angles, self.points
        if not self._drawn:
            count = math.ceil(self.points / (1.0 - self.test_share) - 1e-6)
        remedy = f"needs {count} training images but the source has {pool.num_train}; use fewer points"
        require(count <= pool.num_train, "points", self.points, remedy)
        check_clients(self.clients, count)
        blocks = grouped(self.clients, len(angles)) if angles else None
        group_of = same_angle(angles, 0.0, pool.shape)
        return ScenarioSpec(
            lambda: self._splits(pool, key, count),
            None if blocks is None else group_of[blocks],
            blocks,
            ops=(Rotate(angles),) if angles else (),
            materialize=bool(angles),
            normalise="unit",
            names=angle_names(angles, group_of),
        )

    def _splits(self, pool: Pool, key: Key, count: int) -> dict[str, Csr]:
        samples = key.of("drawn").numpy().permutation(pool.num_train)[:count]
        rng = key.of("users").numpy()
        owner = self._owners(np.asarray(pool.labels)[samples], rng)
        whole, test = hold_out(from_owner(owner, samples, self.clients, rng), self.test_share)
        return train_val_test(whole, test, self.validation)

    def _owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each sample: each class is cut by Dir(alpha 1_N) over users."""
        assert self.alpha is not None
        owner = owners_by_class(labels, self.clients, self.alpha, rng)
        return at_least(owner, self.clients, 2, rng)  # one to train, one to test


@dataclass(frozen=True)
class DrawnOrTrained(LabelShift):
    """Label shift whose `points` are training images or all images.

    Attributes:
        drawn: true: the other reading of the paper, in which `points` counts drawn images, 80 % of them for
            training.
    """

    alpha: PositiveFloat = 0.4
    drawn: bool = False

    @property
    def _drawn(self) -> bool:
        return self.drawn


@dataclass(frozen=True)
class UcflA(DrawnOrTrained):
    """Label shift: random images, each class cut by Dir(alpha 1_N) over users, 80 / 20 train / test."""

    paper = "mestoukirdi2023user"


@dataclass(frozen=True)
class UcflB(DrawnOrTrained):
    """Label and covariate shift: as A, and each block of users has its images rotated by its own angle.

    Attributes:
        drawn: see `ucfl_a`.
        angles: rotation in degrees, one for each block of users; blocks with equal angles are one group.
    """

    paper = "mestoukirdi2023user"

    clients: PositiveInt = 100
    points: int = 100_000
    alpha: PositiveFloat = 8.0
    angles: Annotated[tuple[float, ...], MinLen(1)] = (90.0, 180.0, 270.0, 0.0)

    @property
    def _angles(self) -> tuple[float, ...]:
        return self.angles


@dataclass(frozen=True)
class UcflC(Scenario):
    """Concept shift: IID images, but each group of users has its own random permutation of the labels.

    No two groups have the same permutation: draws are repeated until all differ.

    Attributes:
        clients: number of clients N, a multiple of `permutations`.
        permutations: number of groups, each with its own permutation; at most the number that exist.
        test_images: number of test images: all users are tested on the first ones of the source, with the
            labels of their group.
        validation: share of each client's training samples set aside for validation.
    """

    paper = "mestoukirdi2023user"

    tested_on: ClassVar[str] = "the paper tests all users on the first 1000 test images; leave it out"

    clients: PositiveInt = 20
    permutations: PositiveInt = 4
    test_images: NonNegativeInt = 1000
    validation: ShareBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.clients, self.permutations)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and label permutations."""
        check_clients(self.clients, pool.num_train)
        few = f"the test part has {len(pool.test)} images; use fewer"
        require(self.test_images <= len(pool.test), "test_images", self.test_images, few)
        present = np.unique(pool.labels)
        tables = label_permutations(pool.num_classes, self.permutations, key, present)
        groups = grouped(self.clients, self.permutations)
        return ScenarioSpec(
            lambda: self._splits(pool, key),
            groups,
            ops=(PermuteLabels(tables),),
            normalise="unit",
            names=tuple(f"permutation {g} of the labels" for g in range(self.permutations)),
            facts={"labels": tables},
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        whole = from_lists(cut(key.of("train").numpy().permutation(pool.train), self.clients))
        return train_val_test(whole, everyone(pool.test[: self.test_images], self.clients), self.validation)


@dataclass(frozen=True)
class UcflBatch(LabelShift):
    """The batch-size study, figure 7: as B, but all users have one size, 1000 training images each.

    The classes of user k follow q_k, where q_k[c] is proportional to n_c p_c[k] with p_c ~ Dir(alpha 1_N)
    over users: B's label shift in expectation. A class that is used up is no longer drawn.

    Attributes:
        alpha: concentration of the label shift; null: no label shift.
        angles: rotation in degrees, one for each block of users; blocks with equal angles are one group; []:
            no covariate shift.
    """

    paper = "mestoukirdi2023user"

    clients: PositiveInt = 100
    points: int = 100_000
    alpha: PositiveFloat | None = 8.0
    angles: tuple[float, ...] = (90.0, 180.0, 270.0, 0.0)

    @property
    def _angles(self) -> tuple[float, ...]:
        return self.angles

    def _owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each sample; sizes differ by at most one."""
        place = np.arange(len(labels)) % self.clients
        if self.alpha is None:
            return rng.permutation(place)
        sizes = np.bincount(place, minlength=self.clients)
        return owners_by_shares(labels, sizes, self.alpha, rng)


def label_permutations(
    num_classes: int, count: int, key: Key, present: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return different random permutations of the labels: entry [g][y] is the name of class y in group g.

    Args:
        num_classes: L.
        count: number of permutations.
        key: addresses the draws.
        present: the classes that have samples, on which the permutations differ; None: all classes.

    Raises:
        UserError: there are fewer permutations.
    """
    parts = None if present is None else [present]
    of = f"{num_classes} classes; use fewer"
    permuted = [True] * count
    orders = different_orders(key.of("labels"), num_classes, permuted, "permutations", of, parts, as_is=True)
    return tuple(map(tuple, orders.tolist()))
