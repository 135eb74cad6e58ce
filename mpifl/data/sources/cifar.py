"""CIFAR-10 and CIFAR-100: pickled batches in the folders torchvision uses."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import require
from mpifl.data.pool import Pool, labels_of
from mpifl.data.sources.base import Part, Source, Statistics, fetch, joined, reading


class _Arrays(pickle.Unpickler):
    """Reads arrays, lists and strings only: a data file must not be able to run code."""

    allowed: ClassVar[set[tuple[str, str]]] = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; refuse every other one."""
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_batch(path: Path, label_key: str, num_classes: int) -> Part:
    """Return (path, images uint8 [n, 3, 32, 32], labels int64 [n]) of one batch file."""
    with reading(path, "a CIFAR batch"):
        with path.open("rb") as file:
            batch = _Arrays(file, encoding="latin1").load()
        data, labels = batch["data"], np.asarray(batch[label_key])
        good = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.nbytes <= path.stat().st_size
        remedy = "not the pixels of a CIFAR batch, uint8 [n, 3072]; fetch it again with `mpifl prepare`"
        require(good, str(path), type(data).__name__, remedy)
        return path, data.reshape(-1, 3, 32, 32), labels_of(labels, f"{path}: {label_key}", num_classes)


@dataclass(frozen=True)
class Cifar(Source):
    """Batch files, the last of which is the test part."""

    num_classes: ClassVar[int]
    dataset: ClassVar[str]
    folder: ClassVar[str]
    batches: ClassVar[tuple[str, ...]]
    label_key: ClassVar[str]

    def files(self, root: Path) -> list[Path]:
        """Return the batches, the test batch last."""
        return [root / self.folder / name for name in self.batches]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the batches."""
        parts = [read_batch(path, self.label_key, self.num_classes) for path in self.files(root)]
        return joined(parts[:-1], parts[-1:], self.num_classes)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        fetch(self, self.dataset, root)


@dataclass(frozen=True)
class Cifar10(Cifar):
    """CIFAR-10: 50,000 / 10,000 photographs, 32 x 32 colour, 10 classes (Krizhevsky, 2009)."""

    paper = "krizhevsky2009learning"
    name: ClassVar[str] = "cifar10"
    published: ClassVar[Statistics | None] = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    num_classes: ClassVar[int] = 10
    dataset: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    batches: ClassVar[tuple[str, ...]] = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    label_key: ClassVar[str] = "labels"


@dataclass(frozen=True)
class Cifar100(Cifar):
    """CIFAR-100: 50,000 / 10,000 photographs, 32 x 32 colour, 100 classes (Krizhevsky, 2009).

    Attributes:
        classes: the classes to keep, numbered in this order; empty: all.
    """

    paper = "krizhevsky2009learning"
    name: ClassVar[str] = "cifar100"
    published: ClassVar[Statistics | None] = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    num_classes: ClassVar[int] = 100
    dataset: ClassVar[str] = "CIFAR100"
    folder: ClassVar[str] = "cifar-100-python"
    batches: ClassVar[tuple[str, ...]] = ("train", "test")
    label_key: ClassVar[str] = "fine_labels"

    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        known = set(self.classes) <= set(range(100)) and len(set(self.classes)) == len(self.classes)
        require(known, "classes", self.classes, "different numbers below 100")

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the batches and keep the chosen classes."""
        pool = super().load(root, scratch)
        return only(pool, self.classes) if self.classes else pool


@dataclass(frozen=True)
class Cifar20(Cifar10):
    """CIFAR-10 and ten classes of CIFAR-100, 55,000 / 11,000 photographs; they train FLT's Enc1."""

    name: ClassVar[str] = "cifar20"
    further: ClassVar[Cifar100] = Cifar100(classes=(11, 20, 22, 31, 37, 51, 54, 65, 86, 90))

    def files(self, root: Path) -> list[Path]:
        """Return CIFAR-10's batches, then CIFAR-100's."""
        return [*super().files(root), *self.further.files(root)]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read both; CIFAR-100's classes are numbered from 10."""
        ours, more, first = Cifar10().load(root, scratch), self.further.load(root, scratch), self.num_classes
        parts = [(pool, getattr(pool, part)) for part in ("train", "test") for pool in (ours, more)]
        images = np.concatenate([pool.images[part] for pool, part in parts])
        labels = [pool.labels[part] + (first if pool is more else 0) for pool, part in parts]
        return Pool(images, np.concatenate(labels), ours.num_train + more.num_train, 2 * first)

    def download(self, root: Path) -> None:
        """Fetch both through torchvision."""
        super().download(root)
        self.further.download(root)


def only(pool: Pool, classes: tuple[int, ...]) -> Pool:
    """Return the samples of some classes, numbered in the order of `classes`."""
    number = np.full(pool.num_classes, -1)
    number[list(classes)] = np.arange(len(classes))
    kept = np.flatnonzero(number[pool.labels] >= 0)
    labels = number[pool.labels[kept]]
    return Pool(pool.images[kept], labels, int(np.count_nonzero(kept < pool.num_train)), len(classes))
