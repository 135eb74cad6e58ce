"""The usual scenarios: IID, skews of labels, of sizes and of a number, noise on the features."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Interval

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, IMAGES, NUMBERS, SEVERAL, TOKENS
from mpifl.core.options import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareBelowOne,
    UnitInterval,
)
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out, train_val_test
from mpifl.data.partition.dirichlet import at_least, owners_by_class, owners_by_client, owners_like
from mpifl.data.partition.shards import (
    balanced,
    bounds,
    cut,
    cut_by_class,
    owners_by_label_count,
    owners_by_shards,
    owners_by_weight,
)
from mpifl.data.pool import Pool, standardised, stratified
from mpifl.data.scenario import (
    TEST_SHARE,
    Scenario,
    ScenarioSpec,
    check_clients,
    check_groups,
    check_part,
    check_test_share,
    grouped,
)
from mpifl.data.transforms import Noise


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
    labels = strata(pool)
    parts, chosen = parts or used, balanced(labels[samples], samples) if balance else samples
    check_clients(clients, len(chosen), parts)
    rows: list[np.ndarray] = []
    for block in range(copies):
        rng = key.of(block).numpy()
        mixed = rng.permutation(chosen)
        if balance:
            rows += cut_by_class(mixed, labels[mixed], parts, rng, spread)[:used]
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

    paper = "hsu2019measuring"

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

    paper = "mcmahan2017communication"

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


BLOCK = 4096  # samples that are averaged at a time


@dataclass(frozen=True)
class LabelQuantity(PartitionedScenario):
    """Every client has a fixed number of labels; each label is divided equally among its clients.

    Li et al., ICDE 2022 (NIID-Bench's "#C = k"): client i has label i mod L, its other labels are drawn.
    Samples of a label that no client has are not used.

    Attributes:
        labels: number of different labels of each client.
    """

    paper = "li2022federated"

    by_class: ClassVar[bool] = True

    labels: PositiveInt = 2

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition, if the source has enough labels."""
        few = f"more than the {pool.num_classes} labels of the source; use fewer"
        require(self.labels <= pool.num_classes, "labels", self.labels, few)
        return super().compose(pool, key)

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each sample, -1 for nobody."""
        return owners_by_label_count(labels, self.clients, self.labels, rng)


@dataclass(frozen=True)
class Quantile(PartitionedScenario):
    """Samples are sorted by a number and cut into equal ranges, one for each client or group of clients.

    With `strictness` below 1 the standardised number is blended with standard normal noise before sorting, as
    in Flower's ContinuousPartitioner: 1 cuts sharply, 0 is IID. Test samples are cut at the same numbers.

    Attributes:
        by: what samples are sorted by: target (the first number to predict, or the label), brightness (the
            mean of a sample), or a feature, given by its number from 0.
        groups: number of contiguous blocks of clients, each of which divides one range at random; null: every
            client has a range of its own. The blocks are the ground truth, in which ranges that hold the same
            single value count as one group; so do all ranges if strictness is 0.
        strictness: weight in [0, 1] of the number against the noise in the sort order: 1 cuts sharply, 0 is
            IID.
    """

    by: str = "target"
    groups: PositiveInt | None = None
    strictness: UnitInterval = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.by in ("target", "brightness") or self.by.isdecimal()
        require(known, "by", self.by, "target, brightness or the number of a feature")
        if self.groups is not None:
            check_groups(self.clients, self.groups)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition, and its groups if there are any."""
        values = self._values(pool)
        spec = super().compose(pool, key)
        if self.groups is None:
            return spec
        ends = np.quantile(values[: pool.num_train], np.linspace(0, 1, self.groups + 1))
        new = self._differs(values[: pool.num_train], self.groups)
        ranges = pairwise([*ends[:-1][new], ends[-1]])
        names = tuple(f"{self._what} {a:.4g} to {b:.4g}" for a, b in ranges)
        group_of = np.cumsum(new) - 1
        return ScenarioSpec(spec.splits, group_of[grouped(self.clients, self.groups)], names=names)

    def _differs(self, values: np.ndarray, groups: int) -> np.ndarray:
        """Return whether each group differs from the previous one, bool [groups]; True for the first."""
        new: np.ndarray = np.arange(groups) == 0
        if self.strictness == 0 or values.min() == values.max():
            return new
        ends = bounds(len(values), groups, spread=True)
        ordered = np.sort(values)
        low, high = ordered[ends[:-1]], ordered[ends[1:] - 1]
        new[1:] = (self.strictness < 1) | (low[:-1] < high[1:])  # else both hold the same single value
        return new

    @property
    def _what(self) -> str:
        return f"feature {self.by}" if self.by.isdecimal() else self.by

    def _values(self, pool: Pool) -> np.ndarray:
        """Return the number by which each sample is sorted, float64 [n]."""
        if self.by == "target":
            kinds = f"labels of this source are {pool.label_kind}: use brightness or a feature"
            require(pool.label_kind in (NUMBERS, CLASSES), "by", self.by, kinds)
            return np.asarray(pool.labels.reshape(len(pool.labels), -1)[:, 0], np.float64)
        remedy = f"samples are {pool.kind}, which have no order: use target"
        require(pool.kind not in (TOKENS, SEVERAL), "by", self.by, remedy)
        if self.by == "brightness":
            starts = range(0, len(pool.inputs), BLOCK)
            blocks = (pool.inputs[a : a + BLOCK] for a in starts)
            return np.concatenate([b.reshape(len(b), -1).mean(1, dtype=np.float64) for b in blocks])
        count = int(np.prod(pool.shape))
        require(int(self.by) < count, "by", self.by, f"a sample has {count} features, numbered from 0")
        return np.asarray(pool.inputs.reshape(len(pool.inputs), count)[:, int(self.by)], np.float64)

    def _blended(self, pool: Pool, key: Key) -> np.ndarray:
        """Return the blended sort keys: numbers standardised by the training part, with noise."""
        values = self._values(pool)
        train = values[: pool.num_train]
        z = (values - train.mean()) / (train.std() or 1.0)
        noise = key.of("noise").numpy().standard_normal(len(z))
        ties = key.of("ties").numpy().random(len(z)) * 1e-9  # random order of equal numbers
        return np.asarray(self.strictness * z + (1.0 - self.strictness) * noise + ties)

    def _splits(self, pool: Pool, key: Key) -> dict[str, Csr]:
        self._check_ties(pool)
        return super()._splits(pool, key)

    def _check_ties(self, pool: Pool) -> None:
        distinct = len(np.unique(self._values(pool)[: pool.num_train]))
        remedy = "has one value in all training samples: nothing to sort by"
        require(distinct > 1 or self.strictness < 1, "by", self.by, remedy)

    def train_owners(self, pool: Pool, key: Key, rng: np.random.Generator) -> np.ndarray:
        """Return the owner of each training sample: ranges of equal size."""
        parts = self.groups or self.clients
        order = np.argsort(self._blended(pool, key)[: pool.num_train], kind="stable")
        members, owner = self.clients // parts, np.empty(len(order), np.int64)
        ends = bounds(len(order), parts, spread=True)
        for part in range(parts):
            inside = order[ends[part] : ends[part + 1]]
            owner[inside] = part * members + rng.permutation(np.arange(len(inside)) % members)
        return owner

    def test_rows(self, pool: Pool, owner: np.ndarray, key: Key) -> Csr:
        """Return the test part, cut at the same numbers as the training part."""
        rng = key.of("test").numpy()
        values = self._blended(pool, key)
        parts = self.groups or self.clients
        ends = np.quantile(values[: pool.num_train], np.linspace(0, 1, parts + 1)[1:-1])
        part = np.searchsorted(ends, values[pool.num_train :], side="right")
        members = self.clients // parts
        return from_owner(part * members + rng.integers(0, members, len(part)), pool.test, self.clients, rng)

    def owners(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Not used: owners depend on more than labels."""
        raise NotImplementedError


@dataclass(frozen=True)
class FeatureNoise(Iid):
    """IID samples under Gaussian noise whose level differs by client.

    Li et al., ICDE 2022 (NIID-Bench): client k of N has noise of standard deviation sigma (k + 1) / N. With
    groups, all clients of group g of G have sigma g / (G - 1). A sample has the same noise at every visit.

    Attributes:
        sigma: the largest standard deviation of the noise, for pixels in [0, 1] or for features in units of
            their own standard deviation.
        groups: number of contiguous blocks of clients with one noise level each; null: every client has its
            own level. The blocks are the ground truth; if sigma is 0, it is a single group.
    """

    paper = "li2022federated"

    of_images: ClassVar[bool] = False

    sigma: NonNegativeFloat = 0.1
    groups: Annotated[int, Ge(2)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None:
            check_groups(self.clients, self.groups)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition and the noise."""
        spec = super().compose(pool, key)
        if self.groups is None:
            levels = tuple(self.sigma * (k + 1) / self.clients for k in range(self.clients))
            groups, blocks = None, np.arange(self.clients)
        else:
            levels = tuple(self.sigma * g / (self.groups - 1) for g in range(self.groups))
            blocks = grouped(self.clients, self.groups)
            groups = blocks if self.sigma else np.zeros_like(blocks)
        different = levels if self.sigma else levels[:1]
        names = tuple(f"noise {level:.3g}" for level in different) if self.groups else ()
        return ScenarioSpec(
            spec.splits, groups, blocks, (noise_of(pool, levels, key),), materialize=True, names=names
        )


def noise_of(pool: Pool, levels: tuple[float, ...], key: Key) -> Noise:
    """Return noise with a level for each group, in units of pixels or of each feature's deviation.

    Raises:
        UserError: samples are tokens or several inputs, or a table of categories alone.
    """
    if pool.kind in (TOKENS, SEVERAL):
        raise UserError("sigma", max(levels), f"samples are {pool.kind}: noise is for images and features")
    seed = key.of("noise").entropy % 2**63
    if pool.kind == IMAGES:
        return Noise(levels, seed)
    scale = standardised(pool).std
    assert scale is not None
    scale = np.where(np.array(pool.categories) > 0, 0.0, scale) if pool.categories else scale
    remedy = "all columns are categories: noise is for images and for columns of numbers"
    require(bool(np.any(scale)) or max(levels) == 0, "sigma", max(levels), remedy)
    return Noise(levels, seed, tuple(np.asarray(scale, np.float64).ravel().tolist()))
