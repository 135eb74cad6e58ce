"""Groups that write the same language with different alphabets: a known ground truth for sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import comb, factorial
from typing import ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import TOKENS
from mpifl.core.options import PositiveInt, PositiveShare, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, hold_out, train_val_test
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, grouped
from mpifl.data.scenarios.relations import MOST_DRAWS, PermuteTokens, first_new, labels_are_tokens
from mpifl.data.scenarios.usual import cut_copies, parts_of_copies


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
        grouped(self.clients, self.groups)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose partition and alphabets."""
        remedy = f"needs sequences of tokens, but the samples of this source are {pool.kind}; use text"
        require(pool.kind == TOKENS, "data.source.name", pool.kind, remedy)
        orders = self._alphabets(pool.vocabulary, key.of("alphabet"))
        return ScenarioSpec(
            splits=lambda: self._splits(pool, key),
            groups=grouped(self.clients, self.groups),
            ops=(PermuteTokens(np.array(orders, np.int64), labels_are_tokens(pool)),),
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
