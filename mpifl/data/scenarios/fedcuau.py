"""The scenario of FedCUAU ("Clustered FL Using Weight Divergence"): groups of unequal heterogeneity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_owner, stack, train_val_test
from mpifl.data.partition.dirichlet import owners_by_client, take_by_mixture
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, check_groups, grouped


@dataclass(frozen=True)
class FedCuau(Scenario):
    """Mixed-alpha latent Dirichlet allocation: each group has its own share of the source and concentration.

    Client k of group g draws its classes from q_k ~ Dir(alpha_g 1_L), for training and test alike. A class
    that its group has used up is no longer drawn, and q_k is renormalised. The last clients of a skewed group
    therefore take what is left rather than what they drew; `mpifl.data.label_distance` measures the resulting
    heterogeneity.

    Attributes:
        clients: number of clients N, a multiple of the number of alphas.
        alphas: concentration of each group; groups with equal ones are one group in the ground truth.
        samples: number of training samples of each client.
        test_images: number of test samples of each client.
        validation: share of each client's training samples set aside for validation.
    """

    paper = "fedcuau"

    tested_on: ClassVar[str] = "clients are tested on images of the source's test part; use test_images"

    clients: PositiveInt = 100
    alphas: Annotated[tuple[PositiveFloat, ...], MinLen(1)] = (1000.0, 1.0, 0.5, 0.1)
    samples: PositiveInt = 500
    test_images: NonNegativeInt = 100
    validation: ShareBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.clients, len(self.alphas))

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition."""
        size = self.clients // len(self.alphas)
        for name, part in (("samples", pool.train), ("test_images", pool.test)):
            count, have = getattr(self, name), len(part) // len(self.alphas)
            remedy = f"{size} clients share the {have} samples of a group; use at most {have // size}"
            require(count * size <= have, name, count, remedy)
        different = list(dict.fromkeys(self.alphas))
        group_of = np.array([different.index(alpha) for alpha in self.alphas])
        names = tuple(f"alpha {alpha:g}" for alpha in different)
        groups = group_of[grouped(self.clients, len(self.alphas))]
        return ScenarioSpec(lambda: self._splits(pool, key), groups, names=names)

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        groups = len(self.alphas)
        parts = enumerate((pool.train, pool.test))
        shares = [np.array_split(key.of("share", i).numpy().permutation(part), groups) for i, part in parts]
        pairs = [self._group(pool, shares[0][g], shares[1][g], g, key) for g in range(groups)]
        whole, test = stack([train for train, _ in pairs]), stack([test for _, test in pairs])
        return train_val_test(whole, test, self.validation)

    def _group(
        self, pool: Pool, train: np.ndarray, test: np.ndarray, group: int, key: Key
    ) -> tuple[Csr, Csr]:
        """Return (train, test) of the clients of one group, whose own samples these are."""
        size, alpha = self.clients // len(self.alphas), self.alphas[group]
        rng = key.of("group", group).numpy()
        owner, mixtures = owners_by_client(pool.labels[train], np.full(size, self.samples), alpha, rng)
        labels = np.asarray(pool.labels[test])
        classes = np.unique(pool.labels[train])
        stock = np.array([np.count_nonzero(labels == c) for c in classes])
        most = int(stock.sum()) // size
        few = f"use at most {most}: clients of group {group} share {stock.sum()} test samples whose classes"
        require(self.test_images <= most, "test_images", self.test_images, f"{few} it trains on")
        taken = take_by_mixture(mixtures, np.full(size, self.test_images), stock, rng)  # [clients, L]
        own = np.full(len(test), -1, np.int64)
        for c, column in zip(classes, taken.T, strict=True):
            own[np.flatnonzero(labels == c)[: column.sum()]] = np.repeat(np.arange(size), column)
        return from_owner(owner, train, size, rng), from_owner(own, test, size, rng)
