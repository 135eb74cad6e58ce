"""Groups whose images are rotated, whose labels are permuted or whose classes differ: known ground truths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.federation import MASKS
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_owner, hold_out, stack, train_val_test
from mpifl.data.partition.dirichlet import at_least, owners_by_class, owners_like
from mpifl.data.pool import Pool
from mpifl.data.scenario import ImageSide, Scenario, ScenarioSpec, check_clients, check_groups, grouped
from mpifl.data.scenarios.relations import different_orders
from mpifl.data.scenarios.usual import cut_copies, parts_of_copies, strata
from mpifl.data.transforms import Border, Op, PermuteLabels, Rotate, rotated


@dataclass(frozen=True)
class Rotated(Scenario):
    """Rotated images, one block of clients for each angle; clients are ordered by block.

    The defaults are EMD-CFL's recipe for any source: class-balanced, replicated across groups, disjoint
    within one.

    Attributes:
        clients: number of clients N, a multiple of the number of angles.
        angles: rotation in degrees counter-clockwise, one for each block of clients.
        tolerance: largest difference, in degrees, of angles that are one group in the ground truth; so are
            angles that move all pixels to the same places.
        copies: true: every block holds the whole data set; false: the blocks partition it.
        balance: whether to keep the first n_min images of each class, n_min being the size of the rarest, and
            give every client the same class histogram. Images with masks are of one class.
        validation: share of each client's training samples set aside for validation.
        test_parts: `group` divides the test images among the clients of a block; `population` divides them in
            N parts, of which each block uses the first ones (as in EMD-CFL's notebooks: only a quarter of
            MNIST's test part is used).
        test_share: share of each client's own samples set aside for testing, in place of the source's test
            part; null: the source's test part is used. Copies set the same samples aside.
        spread: true: the last clients get one sample each of a remainder; false: the very last client gets
            all of it (EMD-CFL's notebooks).
        expand: whether to grow the canvas so that no corner is cut (EMD-CFL's CIFAR-10).
        border: number of black pixels added on every side before rotating.
        resize: side in pixels of the images that clients get; null: unchanged.
    """

    of_masks: ClassVar[bool] = True

    clients: PositiveInt = 20
    angles: Annotated[tuple[float, ...], MinLen(1)] = (0.0, 90.0, 180.0, 270.0)
    tolerance: NonNegativeFloat = 0.0
    copies: bool = True
    balance: bool = True
    validation: ShareBelowOne = 0.2
    test_parts: Literal["group", "population"] = "group"
    test_share: ShareBelowOne | None = None
    spread: bool = True
    expand: bool = False
    border: NonNegativeInt = 0
    resize: ImageSide | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect on a test_share, which each client sets aside; leave one of them out"
        unused = self.test_parts != "group" and self.test_share is not None
        require(not unused, "test_parts", self.test_parts, remedy)
        check_groups(self.clients, len(self.angles))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and rotation."""
        side = max(pool.shape[-2:], default=0)
        remedy = f"use at most the {side} pixels of an image's side"
        require(self.border <= side, "border", self.border, remedy)
        blocks = grouped(self.clients, len(self.angles))
        border: tuple[Op, ...] = (Border(self.border),) if self.border else ()
        shape = tuple(length + 2 * self.border for length in pool.shape[-2:])
        group_of = same_angle(self.angles, self.tolerance, shape, self.expand)
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=group_of[blocks],
            blocks=blocks,
            ops=(*border, Rotate(self.angles, self.expand)),
            materialize=not self.expand,
            resize=self.resize,
            names=angle_names(self.angles, group_of),
        )

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        blocks, options = len(self.angles), {"balance": self.balance, "spread": self.spread}
        copies = blocks if self.copies else 1
        per_block = self.clients // blocks
        (learnt, tested), own = parts_of_copies(pool, self.test_share, copies, per_block, key)
        train = cut_copies(pool, learnt, self.clients, copies, key.of("train"), **options)
        if own is not None:
            train, test = hold_out(train, own)
        elif self.test_parts == "population":
            address = key.of("test")
            test = cut_copies(pool, tested, self.clients, blocks, address, self.clients, **options)
        else:
            test = cut_copies(pool, tested, self.clients, copies, key.of("test"), **options)
        return train_val_test(train, test, self.validation)


def angle_names(angles: tuple[float, ...], group_of: np.ndarray) -> tuple[str, ...]:
    """Return the angles of each group in words: ("-3, 3 degrees", "177, 183 degrees")."""
    turns = [
        dict.fromkeys(f"{a:g}" for a, g in zip(angles, group_of, strict=True) if g == group)
        for group in range(int(group_of.max(initial=-1)) + 1)
    ]
    return tuple(f"{', '.join(turn)} degrees" for turn in turns)


def same_angle(
    angles: tuple[float, ...], tolerance: float, shape: tuple[int, ...] = (), expand: bool = False
) -> np.ndarray:
    """Return the true group of each angle, int64: a chain of angles within `tolerance` is one group.

    EMD-CFL's "two" (-3, 3, 177, 183 with tolerance 6) has the groups 0, 0, 1, 1. A chain of angles that move
    all pixels to the same places is one group, too: 0 and 5 degrees for images of 8 x 8 pixels.

    Args:
        angles: in degrees.
        tolerance: in degrees.
        shape: shape of the images, [..., H, W]; empty: pixels are not compared.
        expand: as in `Rotate`.
    """
    turns = np.asarray(angles, np.float64)
    apart = np.abs((turns[:, None] - turns[None, :] + 180.0) % 360.0 - 180.0)
    alike = apart <= tolerance + 1e-9
    if len(shape) > 1:
        height, width = shape[-2:]
        near = np.degrees(3.0 / min(height, width))  # beyond it, pixels at the edge differ
        for i, j in np.argwhere(~alike & (apart <= near)):
            places = np.arange(1, height * width + 1).reshape(1, 1, height, width)  # 0: black
            one, other = (rotated(places, angles[k], expand) for k in (i, j))
            alike[i, j] = np.array_equal(one, other)
    label = np.arange(len(turns))
    for _ in turns:  # labels propagate along chains
        label = np.where(alike, label[None, :], len(turns)).min(axis=1)
    return np.unique(label, return_inverse=True)[1]


@dataclass(frozen=True)
class Composed(Scenario):
    """Groups that differ in angle, in the permutation of their labels, and in their classes.

    Masks turn with their images, and the classes of their pixels are permuted; they take no subsets of the
    classes and no alpha.

    There are len(angles) * permutations * subsets groups; group (a, p, s) is numbered (a * permutations + p)
    * subsets + s, and clients are ordered by group. Groups with equal angles (0 and 360) are one group in the
    ground truth, in which a numbers different angles.

    Attributes:
        clients: number of clients N, a multiple of the number of groups.
        angles: rotations in degrees counter-clockwise.
        permutations: number of label permutations, which differ in every subset of the classes; the first is
            the identity, so 1 leaves labels alone.
        subsets: number of disjoint random sets of classes, of equal size; 1 leaves every group all classes.
        alpha: concentration of a Dirichlet split over clients inside each group; null: IID.
        copies: true: every group draws from the whole source; false: the groups partition it.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each client's own samples set aside for testing, in place of the source's test
            part; null: the source's test part is used. Copies set the same samples aside.
    """

    of_masks: ClassVar[bool] = True

    clients: PositiveInt = 20
    angles: Annotated[tuple[float, ...], MinLen(1)] = (0.0,)
    permutations: PositiveInt = 1
    subsets: PositiveInt = 1
    alpha: PositiveFloat | None = None
    copies: bool = False
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.clients, self._num_groups)

    @property
    def _num_groups(self) -> int:
        return len(self.angles) * self.permutations * self.subsets

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition, rotation and label permutation."""
        plain, remedy = pool.label_kind != MASKS, "divides samples by class, and their labels are masks"
        require(plain or self.subsets == 1, "subsets", self.subsets, f"{remedy}; leave it out")
        require(plain or self.alpha is None, "alpha", self.alpha, f"{remedy}; leave it out")
        remedy = f"does not divide the {pool.num_classes} classes"
        require(pool.num_classes % self.subsets == 0, "subsets", self.subsets, remedy)
        check_clients(self.clients, pool.num_train, self.clients // (self._num_groups if self.copies else 1))
        classes = key.of("classes").numpy().permutation(pool.num_classes).reshape(self.subsets, -1)
        permuted = [p > 0 for p in range(self.permutations)]
        names = different_permutations(pool, permuted, key, "permutations", classes)
        per_angle = self.permutations * self.subsets
        ops: list[Op] = []
        every = range(self._num_groups)
        if any(angle % 360 for angle in self.angles):
            ops.append(Rotate(tuple(self.angles[g // per_angle] for g in every)))
        if self.permutations > 1:
            ops.append(PermuteLabels(tuple(names[g // self.subsets % self.permutations] for g in every)))
        facts = {"labels": names, "classes": classes.tolist()}
        blocks = grouped(self.clients, self._num_groups)
        turn = same_angle(self.angles, 0.0, pool.shape)
        group_of = (turn[:, None] * per_angle + np.arange(per_angle)).reshape(-1)
        turns = angle_names(self.angles, turn)
        return ScenarioSpec(
            lambda: self._splits(pool, classes, key),
            group_of[blocks],
            blocks,
            ops=tuple(ops),
            materialize=bool(ops),
            names=tuple(self._name(g, turns, classes) for g in range(len(turns) * per_angle)),
            facts=facts,
        )

    def _name(self, group: int, turns: tuple[str, ...], classes: np.ndarray) -> str:
        """Return what distinguishes a true group, in words."""
        permutation, subset = group // self.subsets % self.permutations, group % self.subsets
        turn = turns[group // (self.permutations * self.subsets)]
        words = [turn] if len(self.angles) > 1 else []
        words += [f"permutation {permutation} of the labels"] if self.permutations > 1 else []
        words += [f"classes {', '.join(map(str, sorted(classes[subset])))}"] if self.subsets > 1 else []
        return ", ".join(words)

    def _splits(self, pool: Pool, classes: np.ndarray, key: Key) -> dict[str, Csr]:
        copies = self._num_groups // self.subsets if self.copies else 1  # subsets share no sample
        parts, own = parts_of_copies(pool, self.test_share, copies, self.clients // self._num_groups, key)
        pairs = [self._group(pool, parts, g, classes[g % self.subsets], key) for g in range(self._num_groups)]
        whole, test = stack([train for train, _ in pairs]), stack([test for _, test in pairs])
        if own is not None:
            whole, test = hold_out(whole, own)
        return train_val_test(whole, test, self.validation)

    def _group(
        self, pool: Pool, parts: tuple[np.ndarray, np.ndarray], group: int, classes: np.ndarray, key: Key
    ) -> tuple[Csr, Csr]:
        """Return (train, test) of one group, from the two parts that all groups draw from."""
        size, rng = self.clients // self._num_groups, key.of("group", group).numpy()
        train, test = (self._share(pool, part, group, classes, key.of(i)) for i, part in enumerate(parts))
        check_clients(self.clients, len(train), size)
        labels, test_labels = strata(pool)[train], strata(pool)[test]
        if self.alpha is None:
            owner = rng.permutation(np.arange(len(train)) % size)
        else:
            owner = at_least(owners_by_class(labels, size, self.alpha, rng), size, 1, rng)
        own = owners_like(test_labels, labels, owner, size, rng)
        return from_owner(owner, train, size, rng), from_owner(own, test, size, rng)

    def _share(
        self, pool: Pool, samples: np.ndarray, group: int, classes: np.ndarray, key: Key
    ) -> np.ndarray:
        """Return the samples of `group`: its classes, of the whole source or of the group's share of it."""
        if not self.copies:
            sharing = self._num_groups // self.subsets
            samples = key.numpy().permutation(samples)[group // self.subsets :: sharing]
        return samples if self.subsets == 1 else samples[np.isin(pool.labels[samples], classes)]


def different_permutations(
    pool: Pool, permuted: Sequence[bool], key: Key, name: str, subsets: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return a permutation of the labels for each group: entry [g][y] is the name of class y in group g.

    Args:
        pool: the samples.
        permuted: whether the labels of each group are permuted; see `different_orders`.
        key: addresses the draws.
        name: the key that sets the number of permutations, for error messages.
        subsets: subsets of the classes, int64 [subsets, L / subsets]; permutations differ in each. None: one
            subset of all classes.
    """
    count, present = pool.num_classes, pool.classes
    found = (np.intersect1d(part, present) for part in (subsets if subsets is not None else [present]))
    parts = [part for part in found if len(part)]  # a subset without samples has no clients
    few = min(map(len, parts))
    of = f"{count} classes" if few == count else f"{few} of {count} classes"
    of += ", one of them as they are; use fewer"
    orders = different_orders(key.of("labels"), count, permuted, name, of, parts)
    return tuple(map(tuple, orders.tolist()))
