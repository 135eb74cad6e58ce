"""Groups in which inputs and labels are related in different ways: other orders, other alphabets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, factorial, perm
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, IMAGES, MASKED, MASKS, NUMBERS, TOKENS
from mpifl.core.options import PositiveInt, PositiveShare, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_owner, hold_out, train_val_test
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, check_clients, check_groups, grouped
from mpifl.data.scenarios.usual import cut_copies, parts_of_copies
from mpifl.data.transforms import MASK_AXES, Op, renamed_masks

MOST_DRAWS = 20_000  # for one group, until it differs from all others


@dataclass(frozen=True)
class Relations(Scenario):
    """Groups of equal size that share one source, each with the inputs or the labels in its own order.

    With `permutes: inputs`, each group permutes the features of a sample, rescaled to the mean and deviation
    of their new places, or its pixels, with unchanged values. For tokens it permutes the alphabet without its
    special tokens, also in labels that are tokens of it. With `permutes: labels`, each group permutes the
    classes (those of pixels, in masks), or the columns of multi-hot labels; numbers change their sign in the
    second of two groups. Group 0 changes nothing.

    Attributes:
        clients: number of clients N, a multiple of `groups`.
        groups: number of groups.
        permutes: what each group permutes: inputs or labels.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each client's samples set aside for testing.
    """

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    clients: PositiveInt = 20
    groups: PositiveInt = 2
    permutes: Literal["inputs", "labels"] = "inputs"
    validation: ShareBelowOne = 0.0
    test_share: ShareBelowOne = 0.2

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose an equal partition of all samples; groups differ in what is done to them."""
        groups = grouped(self.clients, self.groups)
        check_clients(self.clients, len(pool.labels))
        names = ("as they are", *(f"{self.permutes} in order {g}" for g in range(1, self.groups)))
        ops = (self.operation(pool, key),)
        return ScenarioSpec(lambda: self._splits(pool, key), groups, ops=ops, names=names)

    def operation(self, pool: Pool, key: Key) -> Op:
        """Return the permutation of each group's inputs or labels; that of group 0 changes nothing.

        Raises:
            UserError: they cannot be permuted, or not in so many ways.
        """
        remedy = "numbers have two signs; use 2 groups, or permutes: inputs"
        numbers = self.permutes == "labels" and pool.label_kind == NUMBERS
        require(self.groups <= 2 or not numbers, "groups", self.groups, remedy)
        plain = self.permutes == "labels" or not (pool.categories or pool.parts)
        remedy = "columns of categories and several inputs cannot be permuted; use labels"
        require(plain, "permutes", self.permutes, remedy)
        remedy = "labels are masks, whose pixels would no longer be those of the images; use labels"
        apart = self.permutes == "labels" or pool.label_kind != MASKS
        require(apart, "permutes", self.permutes, remedy)
        if self.permutes == "labels":
            width = pool.num_classes  # for numbers, groups differ in the sign
            kept = np.tile(np.arange(width), (self.groups, 1))
            parts = [pool.classes] if pool.label_kind in (CLASSES, MASKS) else None
            return PermuteTargets(kept if numbers else _orders(key, self.groups, width, parts))
        if pool.kind == TOKENS:
            ordinary = ordinary_tokens(pool)
            orders = renamed(ordinary, _orders(key, self.groups, len(ordinary)), pool.vocabulary)
            return PermuteTokens(orders, labels_are_tokens(pool))
        orders = _orders(key, self.groups, int(np.prod(pool.shape)))
        if pool.mean is None or pool.std is None or pool.kind == IMAGES:
            return PermuteFeatures(orders)
        return PermuteFeatures(orders, pool.mean.reshape(-1), pool.std.reshape(-1))

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        rng, total = key.of("samples").numpy(), len(pool.labels)
        owner = rng.permutation(np.arange(total) % self.clients)
        rest, test = hold_out(from_owner(owner, np.arange(total), self.clients, rng), self.test_share)
        return train_val_test(rest, test, self.validation)


def labels_are_tokens(pool: Pool) -> bool:
    """Return whether labels are tokens of the alphabet of the samples: as many, and classes or tokens."""
    return pool.label_kind in (CLASSES, TOKENS, MASKED) and pool.num_classes == pool.vocabulary


def ordinary_tokens(pool: Pool) -> np.ndarray:
    """Return the tokens that are not special, int64 ascending: padding and masks keep their names."""
    return np.setdiff1d(np.arange(pool.vocabulary), [token for _, token in pool.special])


def renamed(ordinary: np.ndarray, orders: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the new name of each token for each group, int64 [groups, vocabulary].

    Args:
        ordinary: tokens that are renamed, int64 [m].
        orders: which of them takes which name, int64 [groups, m].
        vocabulary: number of all tokens.
    """
    names = np.tile(np.arange(vocabulary), (len(orders), 1))
    names[:, ordinary] = ordinary[orders]
    return names


def _orders(key: Key, groups: int, width: int, parts: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """Return a different permutation for each group, int64 [groups, width]; the first changes nothing."""
    permuted = [g > 0 for g in range(groups)]
    of = f"{width}; use fewer groups"
    return different_orders(key.of("order"), width, permuted, "groups", of, parts)


def different_orders(
    key: Key,
    width: int,
    permuted: Sequence[bool],
    name: str,
    of: str,
    parts: Sequence[np.ndarray] | None = None,
    as_is: bool = False,
) -> np.ndarray:
    """Return a permutation for each group, int64 [groups, width]; the identity if it is not permuted.

    The permutations of any two groups differ in every part, unless neither group is permuted; draws are
    repeated until they do.

    Args:
        key: addresses the draws, by group.
        width: length of a permutation.
        permuted: whether each group is permuted.
        name: the key that sets the number of groups, for error messages.
        of: for error messages: what the orders are of, and advice.
        parts: sets of places, each int64 [m]; some groups hold the places of one part alone. None: all places
            are one part.
        as_is: whether the identity may be drawn.

    Raises:
        UserError: there are too few permutations, or `MOST_DRAWS` draws gave no new one.
    """
    parts = [np.arange(width)] if parts is None else parts
    fewest = perm(width, min(20, *map(len, parts)))  # 20 places have enough orders
    fits = sum(permuted) + (not as_is) <= fewest or fewest > MOST_DRAWS
    require(fits, name, len(permuted), f"there are only {fewest} orders of {of}")
    same = np.arange(width)
    orders, known = [], [] if as_is else [same]
    for g, is_permuted in enumerate(permuted):
        if is_permuted:
            rng = key.of(g).numpy()
            found = first_new(partial(rng.permutation, width), known, parts)
            if found is None:
                raise UserError(name, len(permuted), f"{MOST_DRAWS} draws gave no further order of {of}")
            known.append(found)
        orders.append(known[-1] if is_permuted else same)
    return np.array(orders, np.int64)


def first_new(
    draw: Callable[[], np.ndarray], known: Sequence[np.ndarray], parts: Sequence[np.ndarray]
) -> np.ndarray | None:
    """Return the first of `MOST_DRAWS` draws that differs from each known one in every part; None: none does.

    Args:
        draw: returns int64 [width], from a stream of its own.
        known: orders of other groups, each int64 [width].
        parts: sets of places, each int64 [m].
    """
    for _ in range(MOST_DRAWS):
        order = draw()
        equal = np.equal(known, order) if known else np.zeros((0, len(order)), bool)  # [known, width]
        if not any(equal[:, part].all(axis=1).any() for part in parts):
            return order
    return None


@dataclass(frozen=True, eq=False)
class PermuteFeatures(Op):
    """Permute each group's features; `orders[g][j]` is the feature that moves to place j.

    Attributes:
        orders: int64 [groups, F].
        mean: mean of each feature [F]; features are rescaled to the mean and standard deviation of their new
            place; None keeps values as they are.
        std: standard deviation of each feature [F], or None.
    """

    orders: np.ndarray
    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Permute `x`."""
        order = self.orders[group]  # [n, F]
        out = np.take_along_axis(x.reshape(order.shape), order, axis=1)
        if self.mean is not None and self.std is not None:
            moved = order != np.arange(order.shape[1])  # where nothing moves, not even the last bit changes
            scaled = (out - self.mean[order]) / self.std[order] * self.std + self.mean
            out = np.where(moved, scaled, out).astype(x.dtype)
        return out.reshape(x.shape), y


@dataclass(frozen=True, eq=False)
class PermuteTokens(Op):
    """Rename each group's tokens; `orders[g][t]` is the new name of token t.

    Attributes:
        orders: int64 [groups, vocabulary].
        labels: whether labels are tokens of the same alphabet and are renamed, too; -100 stays.
    """

    orders: np.ndarray
    labels: bool

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rename `x`, and `y` where it is of the same alphabet."""
        renamed = self.orders[group[:, None], x].astype(x.dtype)
        if not self.labels:
            return renamed, y
        group = group if y.ndim == 1 else group[:, None]
        return renamed, np.where(y >= 0, self.orders[group, np.maximum(y, 0)], y).astype(y.dtype)


@dataclass(frozen=True, eq=False)
class PermuteTargets(Op):
    """Permute each group's labels, or change the sign of numbers in groups 1, 3, ...

    Attributes:
        orders: int64 [groups, L]; `orders[g][c]` is the new name of class c, or the column that moves to c.
    """

    orders: np.ndarray

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Permute `y`."""
        if np.issubdtype(y.dtype, np.floating):
            return x, np.where(group[:, None] % 2 == 1, -y, y)
        if y.ndim == 1:
            return x, self.orders[group, y].astype(y.dtype)
        if y.ndim == MASK_AXES:
            return x, renamed_masks(y, self.orders, group)
        if y.dtype in (np.uint8, np.bool_):
            return x, np.take_along_axis(y, self.orders[group], axis=1)
        return x, np.where(y >= 0, self.orders[group[:, None], np.maximum(y, 0)], y).astype(y.dtype)


@dataclass(frozen=True)
class Alphabets(Scenario):
    """Sequences of tokens; every group of clients renames some of the tokens by a permutation of its own.

    Group 0 keeps the alphabet. In other groups, each renamed token gets the name of the next one in a random
    cycle. No two groups have the same alphabet. Labels that are tokens are renamed in the same way.

    Attributes:
        clients: number of clients N, a multiple of the number of groups.
        groups: number of alphabets.
        moved: share in (0, 1] of the tokens that a group renames; which ones is drawn for each group.
        copies: true: every group holds the whole data set; false: the groups partition it.
        validation: share of each client's training samples set aside for validation.
        test_share: share of each client's own samples set aside for testing, in place of the source's test
            part; null: the source's test part is used. Copies set the same samples aside.
    """

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    clients: PositiveInt = 20
    groups: PositiveInt = 4
    moved: PositiveShare = 1.0
    copies: bool = True
    validation: ShareBelowOne = 0.2
    test_share: ShareBelowOne | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.clients, self.groups)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and alphabets."""
        remedy = f"needs sequences of tokens, but the samples of this source are {pool.kind}; use text"
        require(pool.kind == TOKENS, "data.source.name", pool.kind, remedy)
        ordinary = ordinary_tokens(pool)
        found = np.array(self._alphabets(len(ordinary), key.of("alphabet")), np.int64)
        orders = renamed(ordinary, found, pool.vocabulary)
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=grouped(self.clients, self.groups),
            ops=(PermuteTokens(orders, labels_are_tokens(pool)),),
            names=tuple(f"alphabet {g}" for g in range(self.groups)),
        )

    def _alphabets(self, size: int, key: Key) -> list[np.ndarray]:
        """Return the new name of each token, for each group."""
        moved = max(2, round(self.moved * size))
        few = min(moved, 20)  # 20 tokens have enough alphabets
        count = 1 + comb(size, few) * factorial(few - 1)
        remedy = f"there are only {count} alphabets of {size} tokens that rename none of them or {moved}; "
        remedy += "use fewer groups, or move another share"
        require(self.groups <= count, "groups", self.groups, remedy)
        tables = [np.arange(size)]
        for group in range(1, self.groups):
            rng = key.of(group).numpy()
            found = first_new(partial(_renamed, size, moved, rng), tables, [np.arange(size)])
            if found is None:
                remedy = f"{MOST_DRAWS} draws gave no further alphabet; use fewer groups"
                raise UserError("groups", self.groups, remedy)
            tables.append(found)
        return tables

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        copies = self.groups if self.copies else 1
        (learnt, tested), own = parts_of_copies(pool, self.test_share, copies, self.clients // copies, key)
        train = cut_copies(pool, learnt, self.clients, copies, key.of("train"))
        if own is not None:
            train, test = hold_out(train, own)
        else:
            test = cut_copies(pool, tested, self.clients, copies, key.of("test"))
        return train_val_test(train, test, self.validation)


def _renamed(size: int, moved: int, rng: np.random.Generator) -> np.ndarray:
    """Return an alphabet, int64 [size], in which `moved` tokens exchange their names."""
    table = np.arange(size)
    chosen = rng.choice(size, moved, replace=False)
    table[chosen] = np.roll(chosen, 1)  # one cycle: none keeps its name
    return table
