"""Synthetic images for benchmarks: noise around one pattern for each class, of any number and shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.core.options import NonNegativeFloat, PositiveInt
from mpifl.core.process import check_memory
from mpifl.core.rng import key
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source, Statistics

LABEL_BYTES = 32  # memory of an image's label while labels are made; pixels are on disk
BLOCK = 4096  # images drawn at a time


@dataclass(frozen=True)
class Synthetic(Source):
    """Noisy copies of one random pattern per class, without a download: for benchmarks, not for results.

    Attributes:
        train: number of images of the training part.
        test: number of images of the test part.
        shape: channels, height and width of an image.
        classes: number of classes, all equally frequent.
        noise: standard deviation of the noise around a pattern, in grey levels.
    """

    name: ClassVar[str] = "synthetic"
    needs_root: ClassVar[bool] = False
    published: ClassVar[Statistics | None] = ((0.5,), (0.25,))

    train: PositiveInt = 10000
    test: PositiveInt = 1000
    shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 28, 28)
    classes: PositiveInt = 10
    noise: NonNegativeFloat = 64.0

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the images are drawn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Draw patterns, then every image around the pattern of its class, a block of images at a time."""
        address, total = key(0, "synthetic"), self.train + self.test
        check_memory("data.source.train + test", total, LABEL_BYTES)
        patterns = address.of("patterns").numpy().integers(64, 192, (self.classes, *self.shape))
        labels = np.arange(total, dtype=np.int64) % self.classes
        images = cache.allocate(scratch, "images", (total, *self.shape))
        for start in range(0, total, BLOCK):
            mine = labels[start : start + BLOCK]
            rng = address.of("images", start).numpy()
            noise = rng.standard_normal((len(mine), *self.shape), dtype=np.float32) * self.noise
            images[start : start + BLOCK] = np.clip(patterns[mine] + noise, 0, 255).astype(np.uint8)
        images.flush()  # type: ignore[attr-defined]
        return Pool(images, labels, self.train, self.classes)
