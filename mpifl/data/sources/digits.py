"""scikit-learn's digits: 1797 images of 8 x 8, no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.core.rng import key
from mpifl.data.pool import Pool, stratified
from mpifl.data.sources.base import Source, Statistics


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, 8 x 8 grey (Alpaydin and Kaynak, UCI 1998), shipped with scikit-learn.

    They have no official test part: a fixed stratified fifth (359 images, whatever the seed) is set aside as
    one.
    """

    name: ClassVar[str] = "digits"
    needs_root: ClassVar[bool] = False
    published: ClassVar[Statistics | None] = ((0.3053,), (0.3761,))

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the images are inside scikit-learn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Scale the 17 grey levels to 0..255 and put the test fifth behind the rest."""
        from sklearn.datasets import load_digits  # heavy: only when digits are decoded

        data = load_digits()
        images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
        labels = data.target.astype(np.int64)
        train, test = stratified(labels, 0.2, key(0, "digits"))
        order = np.concatenate([train, test])
        return Pool(images[order], labels[order], len(train), 10)
