"""The scenarios of FLT ("Federated Learning with Taskonomy for Non-IID Data"): clusters that share classes.

Counts and recipes: algorithms.md section 7.2, from hjraad/FLT. A client is tested on all test images of its
cluster's classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from mpifl.core.errors import require
from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.core.rng import Key
from mpifl.data.partition.csr import Csr, from_lists, train_val_test
from mpifl.data.partition.shards import exponential_sizes
from mpifl.data.pool import Pool
from mpifl.data.scenario import Scenario, ScenarioSpec, grouped

TESTED_ON = "the paper tests a client on all test images of its cluster's classes; leave it out"


@dataclass(frozen=True)
class SharedClasses(Scenario):
    """Clusters of clients with the same few classes and, of each class, the same number of images.

    Attributes:
        clients: number of clients N, a multiple of half the number of classes.
        validation: share of each client's training samples set aside for validation.
        order: all classes in the order in which clusters take them; null: drawn with the data seed. The
            repository's seed, 321, draws 5 3 7 9 6 2 0 1 8 4.
        drawn: whether each client draws its images of a class by itself, as in earlier versions of the
            repository, so that clients may hold the same ones; no client runs short of images then.
    """

    tested_on: ClassVar[str] = TESTED_ON
    least_classes: ClassVar[int]

    clients: PositiveInt = 100
    images: int | None = None
    validation: ShareBelowOne = 0.0
    order: tuple[int, ...] | None = None
    drawn: bool = False

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition."""
        check_classes(pool, self.least_classes)
        clusters = self.clusters(self._ordered(pool, key))
        groups, size = grouped(self.clients, len(clusters)), self.clients // len(clusters)
        images = pool.num_train // self.clients if self.images is None else self.images
        per_class = images // len(clusters[0])
        require(per_class > 0, "clients", self.clients, "more clients than images of a class; use fewer")
        self._check_images(pool, per_class, 1 if self.drawn else self.disjoint(size), len(clusters[0]))

        def train() -> list[np.ndarray]:
            labels = np.asarray(pool.labels[: pool.num_train])
            by_class = [np.flatnonzero(labels == c) for c in range(pool.num_classes)]
            if self.drawn:
                rng = key.of("drawn").numpy()
                held = (
                    [rng.choice(by_class[c], per_class, replace=False) for c in clusters[g]] for g in groups
                )
            else:
                places = ((k % size, clusters[g]) for k, g in enumerate(groups))
                held = ([self.run(by_class[c], i, size, per_class, pool) for c in own] for i, own in places)
            return [np.concatenate(images) for images in held]

        return _spec(pool, key, train, groups, clusters, self.validation)

    @abstractmethod
    def clusters(self, order: list[int]) -> list[list[int]]:
        """Return the classes of each cluster, all of one number, for all classes in order."""

    def disjoint(self, size: int) -> int:
        """Return how many clients of a cluster of `size` must find enough images of a class."""
        return size

    def run(self, images: np.ndarray, i: int, size: int, per_class: int, pool: Pool) -> np.ndarray:
        """Return the run of one class's `images` for the `i`-th of `size` clients."""
        return images[per_class * i : per_class * (i + 1)]

    def _ordered(self, pool: Pool, key: Key) -> list[int]:
        """Return all classes in the order asked for, or in a drawn one."""
        if self.order is None:
            drawn: list[int] = key.of("classes").numpy().permutation(pool.num_classes).tolist()
            return drawn
        remedy = f"name each of the classes 0 to {pool.num_classes - 1} once, or leave it out"
        require(sorted(self.order) == list(range(pool.num_classes)), "order", list(self.order), remedy)
        return list(self.order)

    def _check_images(self, pool: Pool, per_class: int, size: int, classes: int) -> None:
        """Refuse `images` of a client if a class has fewer than `size` clients need, `per_class` each."""
        rarest = int(np.bincount(pool.labels[: pool.num_train], minlength=pool.num_classes).min())
        clients = "a client needs" if size == 1 else f"{size} clients need"
        remedy = f"{clients} {size * per_class} images of a class that has {rarest}; ask for fewer"
        require(size * per_class <= rarest, "images", classes * per_class, remedy)


@dataclass(frozen=True)
class Flt1(SharedClasses):
    """Scenario 1: classes in random pairs, one cluster of clients for each pair; images are disjoint.

    Attributes:
        images: number of images of each client, half of them from each class; null: n_train // N (MNIST 600,
            CIFAR-10 500).
        short: what happens if a class runs out: truncate (the last clients have fewer images), shards (each
            client gets floor(n_class / clients of the cluster) of it), minus_one (the published defect:
            missing indices become -1, the last training image, whatever its label).
    """

    paper = "jamalirad2022federated"

    least_classes: ClassVar[int] = 2

    images: Annotated[int, Ge(2)] | None = None
    short: Literal["truncate", "shards", "minus_one"] = "truncate"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "without effect if clients draw their images (drawn: true); leave it out"
        require(self.short == "truncate" or not self.drawn, "short", self.short, remedy)

    def clusters(self, order: list[int]) -> list[list[int]]:
        """Return pairs of classes."""
        return [order[c : c + 2] for c in range(0, len(order) - 1, 2)]

    def disjoint(self, size: int) -> int:
        """Return 0: a class may run out."""
        return 0

    def run(self, images: np.ndarray, i: int, size: int, per_class: int, pool: Pool) -> np.ndarray:
        """Return the run of one class's `images` for the `i`-th of `size` clients."""
        run = super().run(images, i, size, len(images) // size if self.short == "shards" else per_class, pool)
        if self.short == "minus_one":
            run = np.concatenate([run, np.full(per_class - len(run), pool.num_train - 1)])
        return run


@dataclass(frozen=True)
class Flt2(SharedClasses):
    """Scenario 2: clusters of three classes; neighbours share one class and hold the same images of it.

    With a permutation p of ten classes: {p0, p1, p2}, {p2, p3, p4}, {p4, p5, p6}, {p6, p7, p8}, {p8, p9, p0}.
    The ablation with M = 500 clients is `clients: 500` (CIFAR-10: 100 images a client, 33 of each class).
    In earlier versions of the repository (`drawn`), a client has 300 (CIFAR-10: 250) images of each class:
    `images: 900` (750).

    Attributes:
        images: number of images of each client, a third of them (rounded down) from each class; null:
            n_train // N (MNIST 600, 200 from each class; CIFAR-10 500, 166 from each).
    """

    paper = "jamalirad2022federated"

    least_classes: ClassVar[int] = 4

    images: Annotated[int, Ge(3)] | None = None

    def clusters(self, order: list[int]) -> list[list[int]]:
        """Return sets of three classes, the last of which is the next one's first."""
        clusters = len(order) // 2
        return [[order[(2 * c + j) % (2 * clusters)] for j in range(3)] for c in range(clusters)]


@dataclass(frozen=True)
class Flt4(Scenario):
    """Scenario 4, structured non-IID EMNIST balanced: clusters of five classes in order, unequal sizes.

    Attributes:
        clients: number of clients N, a multiple of the number of clusters: 2400 (MLP) or 600 (CNN).
        classes: number of labels of a cluster; the last cluster has those left (EMNIST balanced: 45 and 46).
        padded: whether to reproduce the published defect: the last cluster's missing labels count as label 0
            in its test set.
        validation: share of each client's training samples set aside for validation.
    """

    paper = "jamalirad2022federated"

    tested_on: ClassVar[str] = TESTED_ON

    clients: PositiveInt = 2400
    classes: PositiveInt = 5
    padded: bool = False
    validation: ShareBelowOne = 0.0

    def compose(self, pool: Pool, key: Key) -> ScenarioSpec:
        """Compose the partition."""
        check_classes(pool)
        every, step = list(range(pool.num_classes)), self.classes
        labels = [every[c : c + step] for c in range(0, pool.num_classes, step)]
        groups = grouped(self.clients, len(labels))
        padded = self.padded and len(labels[-1]) < step
        tested = [*labels[:-1], [0, *labels[-1]]] if padded else labels

        def train() -> list[np.ndarray]:
            rows: list[np.ndarray] = []
            drawn = np.asarray(pool.labels[: pool.num_train])
            for cluster, own in enumerate(labels):
                members = key.of("cluster", cluster).numpy().permutation(np.flatnonzero(np.isin(drawn, own)))
                sizes = exponential_sizes(len(members), self.clients // len(labels))[0]
                rows += np.split(members, np.cumsum(sizes)[:-1])
            return rows

        return _spec(pool, key, train, groups, tested, self.validation)


def check_classes(pool: Pool, least: int = 1) -> None:
    """Refuse a source of fewer than `least` classes, or in which some label never occurs."""
    few = f"this scenario needs at least {least}; use another source"
    require(pool.num_classes >= least, "data.source.name", f"{pool.num_classes} classes", few)
    missing = np.setdiff1d(np.arange(pool.num_classes), pool.labels[: pool.num_train]).tolist()
    few = "every class needs training images here"
    require(not missing, "data.source.name", f"classes {missing} missing", few)


def _spec(
    pool: Pool,
    key: Key,
    train: Callable[[], list[np.ndarray]],
    groups: np.ndarray,
    tested: list[list[int]],
    validation: float,
) -> ScenarioSpec:
    """Compose one row for each client (from `train`) and one shared test row for each cluster."""

    def splits() -> dict[str, Csr]:
        rng = key.of("order").numpy()
        whole = from_lists([rng.permutation(row) for row in train()])
        labels = np.asarray(pool.labels[pool.num_train :])
        test = from_lists([pool.num_train + np.flatnonzero(np.isin(labels, own)) for own in tested], groups)
        return train_val_test(whole, test, validation)

    normalise = "unit" if pool.shape[0] == 1 else "half"
    names = tuple(f"classes {', '.join(map(str, own))}" for own in tested)
    return ScenarioSpec(splits, groups, normalise=normalise, names=names, facts={"classes": tested})
