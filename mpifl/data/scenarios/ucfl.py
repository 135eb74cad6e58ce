"""The scenarios of UCFL ("User-Centric Federated Learning"): label, covariate and concept shift.

Counts and recipes: algorithms.md section 7.3. Pixels are divided by 255 and nothing else. A, B and the
batch-size study use EMNIST byclass, C CIFAR-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out
from mpifl.data.partition.dirichlet import at_least, owners_by_class, owners_by_shares
from mpifl.data.partition.shards import cut
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, check_clients, grouped
from mpifl.data.scenarios.relations import different_orders
from mpifl.data.scenarios.rotated import angle_names, same_angle
from mpifl.data.transforms import PermuteLabels, Rotate

TEST_SHARE = 0.2
Owners = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class UcflA(Scenario):
    """Label shift: images drawn at random, each class cut by Dir(alpha 1_N) over users, 80 / 20 train / test.

    Attributes:
        clients: number of clients N.
        points: number of training images of all users together (12,500 are drawn for 10,000); up to one less
            for each user, because its share for testing is rounded up.
        drawn: true: the other reading of the paper, in which `points` counts drawn images, 80 % of them for
            training.
        alpha: concentration of the Dirichlet distribution.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each user's images set aside for testing.
    """

    clients: PositiveInt = 20
    points: int = 10_000
    drawn: bool = False
    alpha: PositiveFloat = 0.4
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.clients, self.points)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition."""
        count = _count(pool, self.points, self.drawn, self.clients, self.test_share)
        owners = _dirichlet(self.clients, self.alpha)
        return ScenarioSpec(
            lambda: _splits(pool, key, count, owners, self.clients, self.validation, self.test_share),
            normalise="unit",
        )


@dataclass(frozen=True)
class UcflB(Scenario):
    """Label and covariate shift: as A, and each block of users has its images rotated by its own angle.

    Attributes:
        clients: number of clients N, a multiple of the number of angles.
        points: number of training images of all users together (125,000 are drawn for 100,000); up to one
            less for each user, because its share for testing is rounded up.
        drawn: true: the other reading of the paper, in which `points` counts drawn images, 80 % of them for
            training.
        alpha: concentration of the Dirichlet distribution.
        angles: rotation in degrees, one for each block of users; blocks with equal angles are one group.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each user's images set aside for testing.
    """

    clients: PositiveInt = 100
    points: int = 100_000
    drawn: bool = False
    alpha: PositiveFloat = 8.0
    angles: Annotated[tuple[float, ...], MinLen(1)] = (90.0, 180.0, 270.0, 0.0)
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.clients, self.points)
        grouped(self.clients, len(self.angles))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and rotation."""
        count = _count(pool, self.points, self.drawn, self.clients, self.test_share)
        owners = _dirichlet(self.clients, self.alpha)
        blocks = grouped(self.clients, len(self.angles))
        group_of = same_angle(self.angles, 0.0, pool.shape)
        return ScenarioSpec(
            lambda: _splits(pool, key, count, owners, self.clients, self.validation, self.test_share),
            group_of[blocks],
            blocks,
            ops=(Rotate(self.angles),),
            materialize=True,
            normalise="unit",
            names=angle_names(self.angles, group_of),
        )


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

    tested_on: ClassVar[str] = "the paper tests all users on the first 1000 test images; leave it out"

    clients: PositiveInt = 20
    permutations: PositiveInt = 4
    test_images: NonNegativeInt = 1000
    validation: ShareBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        grouped(self.clients, self.permutations)

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
        kept, held = hold_out(whole, self.validation)
        return {"train": kept, "val": held, "test": everyone(pool.test[: self.test_images], self.clients)}


@dataclass(frozen=True)
class UcflBatch(Scenario):
    """The batch-size study, figure 7: as B, but all users have one size, 1000 training images each.

    The classes of user k follow q_k, where q_k[c] is proportional to n_c p_c[k] with p_c ~ Dir(alpha 1_N)
    over users: B's label shift in expectation. A class that is used up is no longer drawn.

    Attributes:
        clients: number of clients N, a multiple of the number of angles.
        points: number of training images of all users together.
        alpha: concentration of the label shift; null: no label shift.
        angles: rotation in degrees, one for each block of users; blocks with equal angles are one group; []:
            no covariate shift.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each user's images set aside for testing.
    """

    clients: PositiveInt = 100
    points: int = 100_000
    alpha: PositiveFloat | None = 8.0
    angles: tuple[float, ...] = (90.0, 180.0, 270.0, 0.0)
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.clients, self.points)
        grouped(self.clients, max(len(self.angles), 1))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and rotation."""
        count = _count(pool, self.points, False, self.clients, self.test_share)
        blocks = grouped(self.clients, len(self.angles)) if self.angles else None
        group_of = same_angle(self.angles, 0.0, pool.shape)
        return ScenarioSpec(
            lambda: _splits(pool, key, count, self._owners, self.clients, self.validation, self.test_share),
            None if blocks is None else group_of[blocks],
            blocks,
            ops=(Rotate(self.angles),) if self.angles else (),
            materialize=bool(self.angles),
            normalise="unit",
            names=angle_names(self.angles, group_of),
        )

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


def _dirichlet(clients: int, alpha: float) -> Owners:
    def owners(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return at_least(
            owners_by_class(labels, clients, alpha, rng), clients, 2, rng
        )  # one to train, one to test

    return owners


def _check(clients: int, points: int) -> None:
    require(points >= 2 * clients, "points", points, f"{clients} users need at least two images each")


def _count(pool: Pool, points: int, drawn: bool, clients: int, test_share: float) -> int:
    """Return how many images to draw so that `points` of them are for training."""
    count = points if drawn else math.ceil(points / (1.0 - test_share) - 1e-6)
    remedy = f"needs {count} training images but the source has {pool.num_train}; use fewer points"
    require(count <= pool.num_train, "points", points, remedy)
    check_clients(clients, count)
    return count


def _splits(
    pool: Pool, key: Key, count: int, owners: Owners, clients: int, validation: float, test_share: float
) -> dict[str, Csr]:
    samples = key.of("drawn").numpy().permutation(pool.num_train)[:count]
    rng = key.of("users").numpy()
    owner = owners(np.asarray(pool.labels)[samples], rng)
    whole, test = hold_out(from_owner(owner, samples, clients, rng), test_share)
    kept, held = hold_out(whole, validation)
    return {"train": kept, "val": held, "test": test}
