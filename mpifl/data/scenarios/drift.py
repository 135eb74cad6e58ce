"""Partitions drawn at each visit and never stored: CCFL's dynamic mixtures, large populations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne, UnitInterval
from mpifl.core.rng import Key
from mpifl.data.partition.dirichlet import dirichlet, take_by_mixture
from mpifl.data.pool import Pool
from mpifl.data.scenario import Partition, SampleIndex, Scenario, ScenarioSpec
from mpifl.data.scenarios.rotated import same_angle
from mpifl.data.transforms import Rotate


@dataclass(frozen=True)
class Ccfl(Scenario):
    """CCFL's dynamic mixtures: cluster i is the whole source rotated by i * 360 / K degrees.

    At every visit a client gets new data: n ~ U{500..2000} images, a share ~ U[0.4, 0.9] of them from its
    main cluster, the rest spread at random over the others (how, the paper does not say in 5.1 and A.1); its
    test images follow the same mixture, as in the paper, unless asked otherwise. Some test images of each
    cluster are the server's public set D_k, the same images in every cluster, and no client is tested on
    them.

    Attributes:
        clusters: number of clusters K.
        clients: number of clients N, spread over the clusters as evenly as possible (the paper: 20 K).
        smallest: smallest number of images of a visit.
        largest: largest number of images of a visit.
        main_low: smallest share of the main cluster in a visit's images.
        main_high: largest share of the main cluster in a visit's images.
        others: clusters of a visit's images that are not of the main cluster: `all` spreads them over all
            others, `one` takes them from one other cluster, drawn at each visit; with two clusters these are
            the same.
        test_images: number of test images of a visit.
        test_on: clusters of a visit's test images: `mixture` as in training, `redrawn` another draw of such
            a mixture, `main` the main cluster alone.
        public: number of images in each of the server's public sets D_k.
        exam: largest number of test images, outside of D_k, on which a whole cluster's model is evaluated.
        static: whether every visit has the data of the first one.
        validation: share of a visit's images set aside for validation.
    """

    paper = "li2024towards"

    tested_on: ClassVar[str] = "visits are tested on images of the source's test part; use test_images"

    clusters: PositiveInt = 4
    clients: PositiveInt = 80
    smallest: PositiveInt = 500
    largest: int = 2000
    main_low: UnitInterval = 0.4
    main_high: UnitInterval = 0.9
    others: Literal["all", "one"] = "all"
    test_images: NonNegativeInt = 500
    test_on: Literal["mixture", "redrawn", "main"] = "mixture"
    public: NonNegativeInt = 2000
    exam: NonNegativeInt = 8000
    static: bool = False
    validation: ShareBelowOne = 0.0

    @property
    def changes(self) -> bool:
        """Whether clients hold other samples at each visit."""
        return not self.static

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"lies in 1..largest ({self.largest})"
        require(self.smallest <= self.largest, "smallest", self.smallest, remedy)
        remedy = f"a share in [0, main_high], main_high = {self.main_high} at most 1"
        require(self.main_low <= self.main_high, "main_low", self.main_low, remedy)
        few = f"every one of the {self.clusters} clusters needs a client"
        require(self.clients >= self.clusters, "clients", self.clients, few)

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose rotation, public sets and drift."""
        few = f"more than the {pool.num_train} training images; use fewer"
        require(self.largest <= pool.num_train, "largest", self.largest, few)
        order = key.of("public").numpy().permutation(pool.test)
        few = f"{self.test_images} test images beside them are more than the {len(order)} there are"
        enough = self.public + self.test_images <= len(order)
        require(enough, "public", self.public, f"{few}; use fewer")
        groups = np.arange(self.clients) * self.clusters // self.clients  # in blocks
        angles = tuple(i * 360.0 / self.clusters for i in range(self.clusters))
        few = f"angles {360.0 / self.clusters:.2g} degrees apart leave all pixels where they are; use fewer"
        different = len(np.unique(same_angle(angles, 0.0, pool.shape)))
        require(different == self.clusters, "clusters", self.clusters, few)
        public, exam = order[: self.public], order[self.public :][: self.exam]
        return ScenarioSpec(
            groups=groups,
            names=tuple(f"{angle:g} degrees" for angle in angles),
            ops=(Rotate(angles),),
            drift=MixturePartition(self, groups, pool.num_train, np.sort(order[self.public :]), key),
            public=(np.sort(public),) * self.clusters if self.public else (),
            group_test_sets=(np.sort(exam),) * self.clusters if self.exam else (),
        )


class MixturePartition(Partition):
    """Samples drawn by client and visit."""

    def __init__(
        self, options: Ccfl, groups: np.ndarray, num_train: int, tested: np.ndarray, key: Key
    ) -> None:
        self.options, self.groups, self.key = options, groups, key
        self.num_train, self.tested = num_train, tested
        self.static = options.static
        total = self._totals(0)
        held = self._held(total)
        self.sizes = np.stack([total - held, held, np.full(len(groups), options.test_images)], axis=1)

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return client `k`'s samples at `visit`; the group of each is its cluster."""
        visit = 0 if self.options.static else visit
        rng = self.key.of("visit", k, visit, "test" if split == "test" else "train").numpy()
        clusters = np.arange(self.options.clusters)
        if split == "test":
            counts = self._test_counts(k, visit)
            index = self.tested[_draw_each(len(self.tested), counts, rng)]
            return SampleIndex(index, np.repeat(clusters, counts))
        total = int(self._totals(visit)[k])
        counts = self._counts(k, visit, total)
        index, group = _draw_each(self.num_train, counts, rng), np.repeat(clusters, counts)
        mixed, held = rng.permutation(total), int(self._held(np.array(total)))
        chosen = mixed[:held] if split == "val" else mixed[held:]
        return SampleIndex(index[chosen], group[chosen])

    def num_samples(self, k: int, visit: int) -> int:
        """Return how many training images client `k` holds at `visit`."""
        total = self._totals(0 if self.options.static else visit)[k]
        return int(total - self._held(total))

    def num_held(self, k: int, split: str, visit: int) -> int:
        """Return how many images client `k` holds in `split` at `visit`."""
        if split == "test":
            return self.options.test_images
        if split == "train":
            return self.num_samples(k, visit)
        return int(self._held(self._totals(0 if self.options.static else visit)[k]))

    def mixture(self, k: int, visit: int) -> np.ndarray:
        """Return the share of each cluster in client `k`'s images at `visit`, float64 [K]."""
        visit = 0 if self.options.static else visit
        total = int(self._totals(visit)[k])
        return self._counts(k, visit, total) / total

    @property
    def test_pool(self) -> int:
        """Return an upper bound of the number of different test images of all clients."""
        return min(super().test_pool, len(self.tested) * self.options.clusters)

    def _totals(self, visit: int) -> np.ndarray:
        rng = self.key.of("total", visit).numpy()
        return rng.integers(self.options.smallest, self.options.largest + 1, len(self.groups))

    def _test_counts(self, k: int, visit: int) -> np.ndarray:
        """Return how many of client `k`'s test images come from each cluster, int64 [K]."""
        total = self.options.test_images
        if self.options.test_on == "main":
            return np.where(np.arange(self.options.clusters) == self.groups[k], total, 0)
        return self._counts(k, visit, total, "test " if self.options.test_on == "redrawn" else "")

    def _counts(self, k: int, visit: int, total: int, draw: str = "") -> np.ndarray:
        """Return how many of `total` images come from each cluster, int64 [K]; `draw` names the draw."""
        clusters, main = self.options.clusters, int(self.groups[k])
        if clusters == 1:
            return np.array([total])
        low, high = self.options.main_low, self.options.main_high
        count = round(float(self.key.of(f"{draw}share", k, visit).numpy().uniform(low, high)) * total)
        rng = self.key.of(f"{draw}others", k, visit).numpy()
        if self.options.others == "one":
            others = (total - count) * (np.arange(clusters - 1) == rng.integers(clusters - 1))
        else:
            others = rng.multinomial(total - count, np.full(clusters - 1, 1 / (clusters - 1)))
        return np.insert(others, main, count)

    def _held(self, total: np.ndarray) -> np.ndarray:
        held = np.ceil(np.round(self.options.validation * total, 9)).astype(np.int64)
        return np.asarray(np.minimum(held, total - 1))


def _draw_each(stock: int, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return, for each cluster in turn, counts[c] different addresses below `stock`."""
    return np.concatenate([rng.choice(stock, int(count), replace=False) for count in counts])


@dataclass(frozen=True)
class Population(Scenario):
    """A population of any size: every client owns a few samples drawn from the source when it is visited.

    Clients share the source's images, so there may be a million clients; nothing is stored for any of them.

    Attributes:
        clients: number of clients N.
        samples: number of training samples of each client, all different.
        test_images: number of test samples of each client, with the same class mixture.
        alpha: concentration of the class mixture of each client, q_k ~ Dir(alpha 1_L); null: IID. A class
            gives at most the samples that it has.
        validation: share of each client's training samples set aside for validation.
    """

    tested_on: ClassVar[str] = "clients are tested on the source's test part; use test_images"

    clients: PositiveInt = 1_000_000
    samples: PositiveInt = 100
    test_images: NonNegativeInt = 20
    alpha: PositiveFloat | None = None
    validation: ShareBelowOne = 0.0

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the draws."""
        for name, stock in (("samples", pool.train), ("test_images", pool.test)):
            count, remedy = getattr(self, name), f"more than the {len(stock)} images there are; use fewer"
            require(count <= len(stock), name, count, remedy)
        return ScenarioSpec(drift=SampledPartition(self, pool, key))


class SampledPartition(Partition):
    """Samples drawn by client, the same at every visit."""

    static = True

    def __init__(self, options: Population, pool: Pool, key: Key) -> None:
        self.options, self.key = options, key
        labels, every = np.asarray(pool.labels), range(pool.num_classes)
        parts = {"train": pool.train, "test": pool.test}
        self._stock = {name: [part[labels[part] == c] for c in every] for name, part in parts.items()}
        self._held = min(int(np.ceil(round(options.validation * options.samples, 9))), options.samples - 1)
        row = np.array([options.samples - self._held, self._held, options.test_images])
        self.sizes = np.broadcast_to(row, (options.clients, 3))

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return client `k`'s samples."""
        part = "test" if split == "test" else "train"
        stock = self._stock[part]
        total = self.options.test_images if part == "test" else self.options.samples
        rng = self.key.of(part, k).numpy()
        left = np.array([len(members) for members in stock])
        counts = take_by_mixture(self._mixture(k, left)[None], np.array([total]), left, rng)[0]
        drawn = zip(stock, counts, strict=True)
        index = np.concatenate([members[rng.choice(len(members), n, replace=False)] for members, n in drawn])
        mixed = rng.permutation(index)
        if part == "test":
            return SampleIndex(mixed, 0)
        return SampleIndex(mixed[: self._held] if split == "val" else mixed[self._held :], 0)

    @property
    def test_pool(self) -> int:
        """Return an upper bound of the number of different test images of all clients."""
        return min(super().test_pool, sum(map(len, self._stock["test"])))

    def _mixture(self, k: int, left: np.ndarray) -> np.ndarray:
        if self.options.alpha is None:
            return np.asarray(left / left.sum())
        return dirichlet(self.key.of("classes", k).numpy(), self.options.alpha, (len(left),))
