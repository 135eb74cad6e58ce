"""The MNIST family: idx files in the folders torchvision uses."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import require
from mpifl.data.pool import Pool, images_of, labels_of
from mpifl.data.sources.base import Part, Source, Statistics, broken, check_unpacked, fetch, joined, reading

_DTYPES = {8: "u1", 12: ">i4"}


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an idx file (LeCun), plain or .gz: magic number, big-endian sizes, data."""
    with reading(path, "an idx file"), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
            raise broken(path, "not an idx file")
        dtype, shape = np.dtype(_DTYPES[magic[2]]), np.frombuffer(file.read(4 * magic[3]), ">u4").tolist()
        size = dtype.itemsize * math.prod(shape)
        check_unpacked(path, size)
        data = file.read(size + 1)
        if len(shape) != magic[3] or len(data) != size:
            wrong = "idx file of too many bytes" if len(data) > size else "truncated idx file"
            raise broken(path, f"{wrong}: its header says {size} of data")
        return np.frombuffer(data, dtype).reshape(shape)


def read_part(images: Path, labels: Path, num_classes: int, first_label: int = 0) -> Part:
    """Return the images and labels in two idx files; `first_label` is the file's number for class 0."""
    pixels, numbers = images_of(read_idx(images), str(images)), read_idx(labels)
    require(numbers.ndim == 1, str(labels), numbers.shape, "not one label for each image: fetch it again")
    numbers = labels_of(numbers.astype(np.int64) - first_label, str(labels), num_classes)
    if len(pixels) != len(numbers):
        raise broken(labels, f"{len(numbers)} labels for {len(pixels)} images")
    return images, pixels, numbers


def plain_or_gz(path: Path) -> Path:
    """Return `path`, or its .gz sibling if only that exists."""
    zipped = path.with_name(path.name + ".gz")
    return zipped if zipped.exists() and not path.exists() else path


@dataclass(frozen=True)
class Idx(Source):
    """Four idx files: images and labels for training and test."""

    num_classes: ClassVar[int] = 10
    dataset: ClassVar[str]  # name of torchvision's class and of its folder

    def files(self, root: Path) -> list[Path]:
        """Return training images, training labels, test images, test labels."""
        stems = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        return [plain_or_gz(root / self.dataset / "raw" / f"{stem}-ubyte") for stem in stems]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the four files."""
        a, b, c, d = self.files(root)[:4]
        classes = self.num_classes
        return joined([read_part(a, b, classes)], [read_part(c, d, classes)], classes)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        fetch(self, self.dataset, root)


@dataclass(frozen=True)
class Mnist(Idx):
    """MNIST: 60,000 / 10,000 handwritten digits, 28 x 28 grey (LeCun et al., 1998)."""

    paper = "lecun1998gradient"
    name: ClassVar[str] = "mnist"
    dataset: ClassVar[str] = "MNIST"
    published: ClassVar[Statistics | None] = ((0.1307,), (0.3081,))


@dataclass(frozen=True)
class FashionMnist(Idx):
    """FashionMNIST: 60,000 / 10,000 articles of clothing, 28 x 28 grey (Xiao et al., 2017)."""

    paper = "xiao2017fashion"
    name: ClassVar[str] = "fashionmnist"
    dataset: ClassVar[str] = "FashionMNIST"
    published: ClassVar[Statistics | None] = ((0.2860,), (0.3530,))


@dataclass(frozen=True)
class KMnist(Idx):
    """KMNIST: 60,000 / 10,000 Kuzushiji characters, 28 x 28 grey (Clanuwat et al., 2018)."""

    paper = "clanuwat2018deep"
    name: ClassVar[str] = "kmnist"
    dataset: ClassVar[str] = "KMNIST"
    published: ClassVar[Statistics | None] = ((0.1918,), (0.3483,))


_EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10}


@dataclass(frozen=True)
class Emnist(Source):
    """EMNIST: handwritten letters and digits, 28 x 28 grey (Cohen et al., 2017).

    Attributes:
        split: balanced (47 classes, 112,800 / 18,800), byclass (62 classes, 697,932 / 116,323), bymerge,
            letters, digits or mnist.
        upright: whether to transpose the images, which the files store on their side (torchvision does not).
    """

    paper = "cohen2017emnist"
    name: ClassVar[str] = "emnist"
    published: ClassVar[Statistics | None] = ((0.1751,), (0.3332,))

    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    upright: bool = True

    def files(self, root: Path) -> list[Path]:
        """Return training images, training labels, test images, test labels."""
        names = [f"emnist-{self.split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in _KINDS]
        return [plain_or_gz(root / "EMNIST" / "raw" / name) for name in names]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the four files; labels of the letters split start at one in the files, at zero here."""
        a, b, c, d = self.files(root)
        classes, first = _EMNIST_CLASSES[self.split], int(self.split == "letters")
        pool = joined([read_part(a, b, classes, first)], [read_part(c, d, classes, first)], classes)
        if not self.upright:
            return pool
        return replace(pool, inputs=np.ascontiguousarray(pool.images.transpose(0, 1, 3, 2)))

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        fetch(self, "EMNIST", root, split=self.split)


_KINDS = ("images-idx3", "labels-idx1")


@dataclass(frozen=True)
class QMnist(Mnist):
    """MNIST with the writer of each image (Yadav and Bottou, 2019): 539 in training, 297 others in test."""

    paper = "yadav2019cold"
    name: ClassVar[str] = "qmnist"

    def files(self, root: Path) -> list[Path]:
        """Return MNIST's four files and QMNIST's label files, in qmnist/ or where torchvision puts them."""
        stems = [f"qmnist-{part}-labels-idx2-int" for part in ("train", "test")]
        folder = root / "QMNIST" / "raw" if (root / "QMNIST").exists() else root / "qmnist"
        return [*super().files(root), *(plain_or_gz(folder / stem) for stem in stems)]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read MNIST, then column 2 of QMNIST's labels, which lists MNIST's images first and in order."""
        pool, paths = super().load(root, scratch), self.files(root)[4:]
        counts, rows = (pool.num_train, len(pool.labels) - pool.num_train), []
        for path, count in zip(paths, counts, strict=True):
            row = read_idx(path)
            good = row.ndim == 2 and row.shape[1] > 2 and len(row) >= count
            remedy = f"needs at least {count} rows of 8 integers: QMNIST's label file"
            require(good, str(path), row.shape, remedy)
            rows.append(row[:count])
        table = np.concatenate(rows)
        remedy = "differ from MNIST's: the two sets of files do not belong together"
        require(np.array_equal(table[:, 0], pool.labels), str(paths[0]), "labels", remedy)
        return replace(pool, origin=table[:, 2].astype(np.int64))
