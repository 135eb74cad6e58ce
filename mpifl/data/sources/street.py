"""SVHN and USPS: digits from house numbers and from envelopes, in the files torchvision fetches."""

from __future__ import annotations

import bz2
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source, broken, fetch


@dataclass(frozen=True)
class Svhn(Source):
    """SVHN, cropped: 73,257 / 26,032 house-number digits, 32 x 32 colour (Netzer et al., 2011)."""

    name: ClassVar[str] = "svhn"
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)

    def files(self, root: Path) -> list[Path]:
        """Return the two MATLAB files."""
        return [root / "train_32x32.mat", root / "test_32x32.mat"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read them; the files call zero ten."""
        parts = [self._read(path) for path in self.files(root)]
        images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return Pool(images, labels % 10, len(parts[0][1]), 10)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        for split in ("train", "test"):
            fetch(self, "SVHN", root, split=split)

    @staticmethod
    def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
        from scipy.io import loadmat  # heavy: only when SVHN is decoded

        try:
            data = loadmat(path)
            images, labels = data["X"].transpose(3, 2, 0, 1), data["y"].astype(np.int64).ravel()
        except (OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
            raise broken(path, f"truncated or not SVHN's MATLAB file ({error})") from error
        if images.dtype != np.uint8 or images.shape[1] != 3 or len(images) != len(labels):
            raise broken(path, f"images {images.dtype} {images.shape}, {len(labels)} labels")
        return np.ascontiguousarray(images), labels


@dataclass(frozen=True)
class Usps(Source):
    """USPS: 7,291 / 2,007 digits from envelopes, 16 x 16 grey (Hull, 1994), as libsvm text."""

    name: ClassVar[str] = "usps"
    mean: ClassVar[tuple[float, ...]] = (0.2469,)
    std: ClassVar[tuple[float, ...]] = (0.2989,)

    def files(self, root: Path) -> list[Path]:
        """Return the two compressed text files."""
        return [root / "usps.bz2", root / "usps.t.bz2"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read them: a line is "label 1:v 2:v ...", labels from one, v in [-1, 1]."""
        parts = [self._read(path) for path in self.files(root)]
        images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return Pool(images, labels, len(parts[0][1]), 10)

    def download(self, root: Path) -> None:
        """Fetch through torchvision."""
        for train in (True, False):
            fetch(self, "USPS", root, train=train)

    @staticmethod
    def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
        try:
            with bz2.open(path) as file:
                rows = [line.decode().split() for line in file]
            labels = np.array([int(row[0]) - 1 for row in rows], np.int64)
            values = np.array([[float(cell.partition(":")[2]) for cell in row[1:]] for row in rows])
            grey = values.reshape(-1, 1, 16, 16)
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise broken(path, f"truncated or not USPS's libsvm text ({error})") from error
        return ((grey + 1) / 2 * 255).astype(np.uint8), labels
