"""The usual scenarios: IID, Dirichlet, shards of labels, clients of unequal size."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from mpifl.core.errors import require
from mpifl.core.federation import CLASSES
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out, train_val_test
from mpifl.data.partition.dirichlet import at_least, owners_by_class, owners_by_client, owners_like
from mpifl.data.partition.shards import balanced, cut, cut_by_class, owners_by_shards, owners_by_weight
from mpifl.data.pool import Pool, stratified
from mpifl.data.scenario import (
    TEST_SHARE,
    Scenario,
    ScenarioSpec,
    check_clients,
    check_part,
    check_test_share,
)


@dataclass(frozen=True)
class PartitionedScenario(Scenario):
    """A partition of the training part, and the way in which clients are tested.

    Attributes:
        clients: number of clients N.
        validation: share of each client's training samples set aside for validation.
        test: `like` divides the source's test part so that each client is tested on its own class histogram;
            `own` sets aside `test_share` of each client's samples instead; `all` tests every client on the
            whole test part.
        test_share: share of each client's samples set aside for testing if test is own.
        min_samples: smallest number of samples of a client, before any are set aside; the largest clients
            give samples to those that have fewer.
    """

    clients: PositiveInt = 20
    validation: ShareBelowOne = 0.0
    test: Literal["like", "own", "all"] = "like"
    test_share: ShareBelowOne = TEST_SHARE
    min_samples: NonNegativeInt = 1

    by_class: ClassVar[bool] = False
    of_images: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_test_share(self.test, self.test_share)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition; samples are not transformed."""
        check_clients(self.clients, pool.num_train, self.clients * max(self.min_samples, 1))
        return ScenarioSpec(splits=lambda: self._splits(pool, key))

    @abstractmethod
    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each training sample, int64 [n]; -1: nobody.

        Args:
            labels: classes of the training samples [n]; zeros if samples have none.
            rng: one stream for all draws.
        """

    def train_owners(self, pool: Pool, key: Key, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each training sample; override it if the partition reads more than labels."""
        return self.owners(strata(pool)[: pool.num_train], rng)

    def test_rows(self, pool: Pool, owner: np.ndarray, key: Key) -> Csr:
        """Return the test part as `test: like` divides it; `owner` [n] is that of the training samples."""
        labels = strata(pool)[: pool.num_train]
        return test_like(pool, labels, owner, self.clients, key.of("test").numpy())

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        rng = key.of("train").numpy()
        owner = self.train_owners(pool, key, rng)
        given = owner >= 0
        check_clients(self.clients, int(given.sum()), self.clients * max(self.min_samples, 1))
        owner[given] = at_least(owner[given], self.clients, self.min_samples, rng)
        whole = from_owner(owner, pool.train, self.clients, rng)
        if self.test == "own":
            whole, test = hold_out(whole, self.test_share)
        elif self.test == "all":
            test = everyone(pool.test, self.clients)
        else:
            test = self.test_rows(pool, owner, key)
        return train_val_test(whole, test, self.validation)


def strata(pool: Pool) -> np.ndarray:
    """Return the strata of a partition, int64 [n]: the classes of the samples, zeros if there are none."""
    is_class = pool.label_kind == CLASSES
    return np.asarray(pool.labels) if is_class else np.zeros(len(pool.labels), np.int64)


def test_like(
    pool: Pool, labels: np.ndarray, owner: np.ndarray, num_clients: int, rng: np.random.Generator
) -> Csr:
    """Return the test part, each class divided in the proportions of the clients' training samples."""
    own = owners_like(strata(pool)[pool.num_train :], labels, owner, num_clients, rng)
    given = own >= 0
    if np.count_nonzero(given) >= num_clients:
        own[given] = at_least(own[given], num_clients, 1, rng)
    return from_owner(own, pool.test, num_clients, rng)


def parts_of_copies(
    pool: Pool, share: float | None, copies: int, clients: int, key: Key
) -> tuple[tuple[np.ndarray, np.ndarray], float | None]:
    """Return the addresses (for training, for testing), and the share that clients still set aside to test.

    If there are several copies, the share is taken from the training part, and all copies divide the same two
    parts: no client is tested on what is training data in another copy. If there is one copy, its clients set
    the share aside themselves.

    Args:
        pool: the samples.
        share: share of the training part, stratified by class, that replaces the source's test part; None:
            the source's test part is used.
        copies: number of copies of the training part.
        clients: number of clients of a copy.
        key: addresses the draw.

    Raises:
        UserError: the share has fewer samples than a copy has clients.
    """
    if not share or copies == 1:
        return (pool.train, pool.test), share
    train, tested = stratified(strata(pool)[: pool.num_train], share, key.of("apart"))
    remedy = f"leaves {len(tested)} samples for the tests of {clients} clients; use a larger one"
    require(len(tested) >= clients, "test_share", share, remedy)
    return (train, tested), None


def cut_copies(
    pool: Pool,
    samples: np.ndarray,
    clients: int,
    copies: int,
    key: Key,
    parts: int | None = None,
    balance: bool = False,
    spread: bool = True,
) -> Csr:
    """Return the samples of clients in blocks of equal size, each of which divides a copy of the samples.

    Args:
        pool: the source.
        samples: addresses [n].
        clients: number of clients of all blocks.
        copies: number of blocks.
        key: addresses the draws, by block.
        parts: number of parts of a copy, of which the clients of a block take the first ones; None: one for
            each of them.
        balance: whether to cut each class by itself, after `balanced`.
        spread: see `bounds`.
    """
    check_part(samples)
    used = clients // copies
    parts, chosen = parts or used, balanced(pool, samples) if balance else samples
    check_clients(clients, len(chosen), parts)
    rows: list[np.ndarray] = []
    for block in range(copies):
        rng = key.of(block).numpy()
        mixed = rng.permutation(chosen)
        if balance:
            rows += cut_by_class(mixed, pool.labels[mixed], parts, rng, spread)[:used]
        else:
            rows += cut(mixed, parts, spread)[:used]
    return from_lists(rows)


@dataclass(frozen=True)
class Iid(PartitionedScenario):
    """Every sample goes to a client at random; sizes differ by at most one."""

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a random owner for each sample; sizes differ by at most one."""
        return rng.permutation(np.arange(len(labels)) % self.clients)


@dataclass(frozen=True)
class Dirichlet(PartitionedScenario):
    """Label skew drawn from a Dirichlet distribution.

    Attributes:
        alpha: concentration of the Dirichlet distribution; 0.1 is severe skew, 100 nearly IID.
        by: `class` divides each class over clients by p_c ~ Dir(alpha 1_N), and sizes vary; `client` gives
            all clients the same size and draws the classes of client k from q_k ~ Dir(alpha 1_L); a class
            that is used up is no longer drawn.
    """

    by_class: ClassVar[bool] = True

    alpha: PositiveFloat = 0.5
    by: Literal["class", "client"] = "class"

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each sample, drawn over clients or over classes."""
        if self.by == "class":
            return owners_by_class(labels, self.clients, self.alpha, rng)
        sizes = np.full(self.clients, len(labels) // self.clients)
        sizes[: len(labels) % self.clients] += 1
        return owners_by_client(labels, sizes, self.alpha, rng)[0]


@dataclass(frozen=True)
class Shards(PartitionedScenario):
    """Pathological label skew: samples sorted by label and cut into equal shards, a few for each client.

    McMahan et al., AISTATS 2017.

    Attributes:
        shards: number of shards of each client; with 2, most clients have two classes.
    """

    by_class: ClassVar[bool] = True

    shards: PositiveInt = 2

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition, if there is a sample for every shard."""
        few = f"more than the {pool.num_train} samples: use fewer shards or clients"
        require(self.shards * self.clients <= pool.num_train, "shards", self.shards * self.clients, few)
        return super().compose(pool, key)

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each sample's shard."""
        return owners_by_shards(labels, self.clients, self.shards, rng)


@dataclass(frozen=True)
class LogNormal(PartitionedScenario):
    """Quantity skew: sizes in proportion to log-normal draws, classes IID.

    Attributes:
        sigma: standard deviation of the logarithm of a client's size; 0 is IID.
    """

    sigma: Annotated[float, Interval(ge=0, le=100)] = 1.0

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a random owner for each sample, by weight."""
        return owners_by_weight(len(labels), rng.lognormal(0.0, self.sigma, self.clients), rng)


@dataclass(frozen=True)
class PowerLaw(PartitionedScenario):
    """Quantity skew: the r-th largest client has a size in proportion to r^-exponent, classes IID.

    Attributes:
        exponent: 0 is IID, 1 is Zipf's law.
    """

    exponent: NonNegativeFloat = 1.0

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a random owner for each sample, by weight; ranks are assigned at random."""
        ranks = rng.permutation(self.clients) + 1.0
        return owners_by_weight(len(labels), ranks**-self.exponent, rng)
