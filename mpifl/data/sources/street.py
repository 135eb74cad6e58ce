"""SVHN and USPS: digits from house numbers and from envelopes, in the files torchvision fetches."""

from __future__ import annotations

import bz2
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.core.errors import require
from mpifl.data.pool import Pool, labels_of
from mpifl.data.sources.base import Part, Source, Statistics, check_unpacked, fetch, joined, reading

USPS_TEXT = 1 << 26  # bytes; the larger file has 27 million


@dataclass(frozen=True)
class Svhn(Source):
    """SVHN, cropped: 73,257 / 26,032 house-number digits, 32 x 32 colour (Netzer et al., 2011)."""

    paper = "netzer2011reading"
    name: ClassVar[str] = "svhn"
    published: ClassVar[Statistics | None] = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

    def files(self, root: Path) -> list[Path]:
        """Return the two MATLAB files."""
        return [root / "train_32x32.mat", root / "test_32x32.mat"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read both files; their label of digit zero is ten."""
        train, test = (self._read(path) for path in self.files(root))
        return joined([train], [test], 10)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        for split in ("train", "test"):
            fetch(self, "SVHN", root, split=split)

    @staticmethod
    def _read(path: Path) -> Part:
        from scipy.io import loadmat, whosmat  # heavy: only when SVHN is decoded

        with reading(path, "SVHN's MATLAB file"):
            shapes = {name: (shape, kind) for name, shape, kind in whosmat(path)}
            (shape, kind), (count, _) = shapes["X"], shapes["y"]
            good = kind == "uint8" and shape[:3] == (32, 32, 3) and math.prod(count) == shape[-1]
            require(good, str(path), shapes, "not SVHN's images 32 x 32 x 3 x n; fetch it again")
            check_unpacked(path, math.prod(shape))
            data = loadmat(path, variable_names=["X", "y"])
            numbers = np.nan_to_num(data["y"], nan=-1).ravel()  # some writers store only doubles
            images, labels = data["X"].transpose(3, 2, 0, 1), numbers.astype(np.int64)
            wrong = int((labels != numbers).argmax())
            remedy = f"no whole number, in row {wrong + 1}; fetch it again"
            require(labels[wrong] == numbers[wrong], f"{path}: y", float(numbers[wrong]), remedy)
        labels_of(labels - 1, f"{path}: y, less one", 10)
        return path, np.ascontiguousarray(images), labels % 10


@dataclass(frozen=True)
class Usps(Source):
    """USPS: 7,291 / 2,007 digits from envelopes, 16 x 16 grey (Hull, 1994), as libsvm text."""

    paper = "hull1994database"
    name: ClassVar[str] = "usps"
    published: ClassVar[Statistics | None] = ((0.2469,), (0.2989,))

    def files(self, root: Path) -> list[Path]:
        """Return the two compressed text files."""
        return [root / "usps.bz2", root / "usps.t.bz2"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read both files: a line is "label 1:v 2:v ...", labels from one, v in [-1, 1]."""
        train, test = (self._read(path) for path in self.files(root))
        return joined([train], [test], 10)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        for train in (True, False):
            fetch(self, "USPS", root, train=train)

    @staticmethod
    def _read(path: Path) -> Part:
        with reading(path, "USPS's libsvm text"), bz2.open(path) as file:
            text = file.read(USPS_TEXT + 1)
            require(len(text) <= USPS_TEXT, str(path), "larger than USPS", "fetch it again")
            rows = [line.split() for line in text.decode().splitlines()]
            labels = np.array([int(row[0]) - 1 for row in rows])
            values = np.array([[float(cell.partition(":")[2]) for cell in row[1:]] for row in rows])
            grey = values.reshape(-1, 1, 16, 16)
            inside = bool((np.abs(grey) <= 1 + 1e-6).all())  # false for NaN
            require(inside, str(path), "pixels", "must lie between -1 and 1; fetch it again")
        pixels = ((grey + 1) / 2 * 255).astype(np.uint8)
        return path, pixels, labels_of(labels, f"{path}: labels, less one", 10)
