"""Randomly drawn samples: numbers, classes, multi-hot labels and sequences of tokens, and noisy images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.federation import CLASSES, MULTI_HOT, NUMBERS, TOKENS
from mpifl.core.options import NonNegativeFloat, PositiveInt
from mpifl.core.process import check_memory
from mpifl.core.rng import Key, key
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source, Statistics

CONCENTRATION = 0.1  # of the Dirichlet distribution over the successors of a token
LABEL_BYTES = 32  # memory of an image's label while labels are made; pixels are on disk
BLOCK = 4096  # images drawn at a time


@dataclass(frozen=True)
class Generated(Source):
    """Samples with a known relation, drawn without a download: for trying out tasks, and for tests.

    Features are standard normal. A fixed random linear map turns them into numbers, and the labels are these
    numbers, the index of the largest (classes), or the positive ones (multi-hot). Tokens are a Markov chain:
    each token has a few likely successors, and the label of a position is the token after it.

    Attributes:
        kind: kind of the labels: numbers, classes, multi_hot or tokens.
        train: number of samples of the training part.
        test: number of samples of the test part.
        features: number of features of a sample.
        outputs: number of targets, classes, labels, or different tokens.
        length: number of tokens of a sample.
        noise: standard deviation of the noise on each number; the signal has standard deviation 1.
    """

    name: ClassVar[str] = "generated"
    needs_root: ClassVar[bool] = False

    kind: Literal["numbers", "classes", "multi_hot", "tokens"] = "numbers"
    train: PositiveInt = 1600
    test: PositiveInt = 400
    features: PositiveInt = 10
    outputs: PositiveInt = 4
    length: PositiveInt = 16
    noise: NonNegativeFloat = 0.1

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the samples are drawn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Draw the samples."""
        address, total = key(0, "generated", self.kind), self.train + self.test
        width = self.length if self.kind == TOKENS else self.features + self.outputs
        check_memory("data.source.train + test", total, 8 * width)
        if self.kind == TOKENS:
            tokens = self._chain(address, total)
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            return Pool(inputs, labels.copy(), self.train, self.outputs, vocabulary=self.outputs)
        rng = address.of("samples").numpy()
        x = rng.standard_normal((total, self.features))
        weights = address.of("weights").numpy().standard_normal((self.features, self.outputs))
        scores = x @ (weights / np.linalg.norm(weights, axis=0))
        scores += self.noise * rng.standard_normal(scores.shape)
        labels = {
            NUMBERS: scores.astype(np.float32),
            CLASSES: scores.argmax(1),
            MULTI_HOT: (scores > 0).astype(np.uint8),
        }[self.kind]
        return Pool(x.astype(np.float32), labels, self.train, self.outputs)

    def _chain(self, address: Key, total: int) -> np.ndarray:
        """Return `total` Markov chains, int64 [total, length + 1]."""
        rows = address.of("chain").numpy().dirichlet(np.full(self.outputs, CONCENTRATION), self.outputs)
        ends = np.cumsum(rows, axis=1)
        rng = address.of("tokens").numpy()
        tokens = np.empty((total, self.length + 1), np.int64)
        tokens[:, 0] = rng.integers(self.outputs, size=total)
        for t in range(self.length):
            below = ends[tokens[:, t]] < rng.random(total)[:, None]
            tokens[:, t + 1] = np.minimum(below.sum(1), self.outputs - 1)
        return tokens


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
