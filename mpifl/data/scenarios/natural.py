"""Natural partitions: by writer, or by domain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out, train_val_test
from mpifl.data.partition.shards import cut
from mpifl.data.pool import Pool
from mpifl.data.scenario import TEST_SHARE, Scenario, ScenarioSpec, check_test_share


@dataclass(frozen=True)
class Natural(Scenario):
    """One client for each writer (femnist, qmnist), or for each origin of samples that a source names.

    Attributes:
        clients: number of clients, chosen at random among the origins with enough samples; null: all.
        min_samples: number of training samples that a writer needs to become a client.
        validation: share of each client's training samples set aside for validation.
        test: `origin` tests on the same writer's samples in the source's test part; `own` sets aside
            `test_share` of the client's samples instead (for qmnist, whose test part has other writers);
            `all` takes the whole test part.
        test_share: share of each client's samples set aside for testing if test is own.
    """

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    clients: PositiveInt | None = None
    min_samples: PositiveInt = 2
    validation: ShareBelowOne = 0.0
    test: Literal["origin", "own", "all"] = "origin"
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_test_share(self.test, self.test_share)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition; samples are not transformed."""
        origin = origin_of(pool)
        counts = np.bincount(origin[: pool.num_train], minlength=int(origin.max()) + 1)
        able = np.flatnonzero(counts >= self.min_samples)
        wanted = len(able) if self.clients is None else self.clients
        remedy = f"only {len(able)} origins have {self.min_samples} training samples; use fewer clients"
        require(0 < wanted <= len(able), "clients", wanted, remedy)
        chosen = np.sort(key.of("writers").numpy().choice(able, wanted, replace=False))
        client_of = np.full(len(counts), -1)
        client_of[chosen] = np.arange(wanted)
        own = client_of[origin]  # [n], -1 for writers who are not clients
        tested = np.bincount(own[pool.num_train :] + 1, minlength=wanted + 1)[1:]
        remedy = "no client wrote anything in the test part; use own or all"
        require(self.test != "origin" or bool(tested.any()), "test", self.test, remedy)
        names = [pool.origin_names[i] for i in chosen] if pool.origin_names else chosen.tolist()
        groups = np.array(pool.origin_groups, np.int64)[chosen] if pool.origin_groups else None
        said = self._left_out(counts, np.bincount(origin[pool.num_train :], minlength=len(counts)))
        if self.test == "origin" and not tested.all():
            said.append(f"{int((tested == 0).sum())} of {wanted} clients have no test samples of their own")
        return ScenarioSpec(
            lambda: self._splits(pool, own, wanted, key),
            groups,
            facts={"origins": names},
            remarks=lambda splits: said,
        )

    def _left_out(self, train: np.ndarray, test: np.ndarray) -> list[str]:
        """Return a line that counts the origins that cannot be clients.

        Args:
            train: number of training samples of each origin, int64 [O].
            test: number of test samples of each, int64 [O].
        """
        bare, few = (train == 0) & (test > 0), (train > 0) & (train < self.min_samples)
        why = [
            f"{int(bare.sum())} have test samples only" if bare.any() else "",
            f"{int(few.sum())} have fewer than {self.min_samples} training samples" if few.any() else "",
        ]
        known = int(((train > 0) | (test > 0)).sum())
        line = f"{int((bare | few).sum())} of {known} origins are no clients: {', '.join(filter(None, why))}"
        return [line] if any(why) else []

    def _splits(self, pool: Pool, own: np.ndarray, clients: int, key: Key) -> dict[str, Csr]:
        whole = from_owner(own[: pool.num_train], pool.train, clients, key.of("train").numpy())
        if self.test == "own":
            whole, test = hold_out(whole, self.test_share)
        elif self.test == "all":
            test = everyone(pool.test, clients)
        else:
            test = from_owner(own[pool.num_train :], pool.test, clients, key.of("test").numpy())
        return train_val_test(whole, test, self.validation)


@dataclass(frozen=True)
class Flt3(Scenario):
    """FLT's scenario 3: LEAF FEMNIST, 200 writers chosen at random, each tested on their own test samples.

    Attributes:
        clients: number of writers.
        validation: share of each client's training samples set aside for validation.
    """

    paper = "jamalirad2022federated"

    tested_on: ClassVar[str] = "the paper tests writers on their own test files; use natural with test: own"

    clients: PositiveInt = 200
    validation: ShareBelowOne = 0.0

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the natural partition."""
        return replace(Natural(self.clients, validation=self.validation).compose(pool, key), normalise="unit")


@dataclass(frozen=True)
class Pacs(Scenario):
    """EMD-CFL's PACS: every domain is a group, cut at random into floor(n / 500) clients.

    It needs source folder with `domains`. A fifth of each domain is test data (rounded down), a fifth of each
    client's other images validation data: 64 / 16 / 20 %.

    Attributes:
        per_client: number of images of a domain for each of its clients.
        validation: share of each client's other images set aside for validation.
        test_share: share of each domain's images set aside for testing.
    """

    paper = "zhang2025clustered"

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    per_client: PositiveInt = 500
    validation: ShareBelowOne = 0.2
    test_share: ShareBelowOne = 0.2

    def papers(self) -> tuple[str, ...]:
        """Return the papers that made the clients, and the images."""
        return self.paper, "li2017deeper"

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition by domain."""
        origin = origin_of(pool)
        counts = np.bincount(origin) // self.per_client
        for domain, count in enumerate(counts):
            name = pool.origin_names[domain] if pool.origin_names else domain
            remedy = f"domain {name} has fewer images; use a smaller number"
            require(count > 0, "per_client", self.per_client, remedy)
        groups = np.repeat(np.arange(len(counts)), counts)
        names = tuple(pool.origin_names)
        return ScenarioSpec(
            lambda: self._splits(origin, counts, key), groups, normalise="imagenet", names=names
        )

    def _splits(self, origin: np.ndarray, counts: np.ndarray, key: Key) -> dict[str, Csr]:
        train: list[np.ndarray] = []
        test: list[np.ndarray] = []
        for domain, clients in enumerate(counts):
            mixed = key.of("domain", domain).numpy().permutation(np.flatnonzero(origin == domain))
            held = int(self.test_share * len(mixed))
            test += cut(mixed[:held], clients)
            train += cut(mixed[held:], clients)
        return train_val_test(from_lists(train), from_lists(test), self.validation)


def origin_of(pool: Pool) -> np.ndarray:
    """Return the origin of each sample; raise `UserError` for a source without origins."""
    remedy = "the source does not say whose its samples are; femnist, qmnist, leaf and tables with client do"
    require(pool.origin is not None, "name", "natural", remedy)
    return np.asarray(pool.origin)
