"""Tables and images that ship with scikit-learn; none needs a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.rng import key
from mpifl.data.pool import Pool, stratified
from mpifl.data.sources.arrays import TEST_SHARE, strata_of
from mpifl.data.sources.base import Source, Statistics

PATCHES, SIDE, ZOOM = 2000, 32, 2  # patches per photograph; pixels of a side; photograph's pixels for one


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, 8 x 8 grey (Alpaydin and Kaynak, UCI 1998), shipped with scikit-learn.

    They have no official test part: a fixed stratified fifth (359 images, whatever the seed) is set aside as
    one.
    """

    paper = "alpaydin1998optical"
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


@dataclass(frozen=True)
class Photos(Source):
    """Colour patches of 32 x 32 cut at random places; the label is the photograph (0 temple, 1 flower).

    They resemble no data set, so a server that learns from them learns nothing about its clients.
    """

    paper = "pedregosa2011scikit"
    name: ClassVar[str] = "photos"
    published: ClassVar[Statistics | None] = ((0.0,), (1.0,))  # pixels / 255
    needs_root: ClassVar[bool] = False

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the images are inside scikit-learn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Cut the patches and halve their sides by taking means."""
        from sklearn.datasets import load_sample_images  # heavy: only when patches are cut

        rows, span = [], SIDE * ZOOM
        for label, photo in enumerate(load_sample_images().images):
            rng = key(0, "photos", label).numpy()
            tops, lefts = (rng.integers(0, side - span + 1, PATCHES) for side in photo.shape[:2])
            cut = np.stack([photo[t : t + span, w : w + span] for t, w in zip(tops, lefts, strict=True)])
            small = cut.reshape(PATCHES, SIDE, ZOOM, SIDE, ZOOM, 3).mean((2, 4))
            rows.append(np.rint(small).astype(np.uint8).transpose(0, 3, 1, 2))
        labels = np.repeat(np.arange(len(rows)), PATCHES)
        return Pool(np.concatenate(rows), labels, len(labels), len(rows))


@dataclass(frozen=True)
class ScikitLearn(Source):
    """A table that ships with scikit-learn.

    For regression: diabetes (442 x 10, one number) and linnerud (20 x 3, three numbers). For classification:
    breast_cancer (569 x 30, 2 classes), wine (178 x 13, 3 classes) and iris (150 x 4, 3 classes).

    None has an official test part: a fixed fifth of each class, or of each range of the first number, is set
    aside for testing, the same for every seed. Numbers to predict are standardised by the training part.

    Attributes:
        table: diabetes, breast_cancer, wine, iris or linnerud.
    """

    paper = "pedregosa2011scikit"
    name: ClassVar[str] = "sklearn"
    needs_root: ClassVar[bool] = False

    table: Literal["diabetes", "breast_cancer", "wine", "iris", "linnerud"] = "diabetes"

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the tables are inside scikit-learn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Put the test fifth behind the rest."""
        from sklearn import datasets  # heavy: only when a table is read

        data = getattr(datasets, f"load_{self.table}")()
        x, y = np.asarray(data.data, np.float32), np.asarray(data.target)
        numbers = self.table in ("diabetes", "linnerud")
        y = y.reshape(len(y), -1).astype(np.float64) if numbers else y.astype(np.int64)
        train, test = stratified(strata_of(y), TEST_SHARE, key(0, "sklearn", self.table))
        y = ((y - y[train].mean(0)) / y[train].std(0)).astype(np.float32) if numbers else y
        order = np.concatenate([train, test])
        names = tuple(map(str, data.get("target_names", ("progression",))))
        return Pool(x[order], y[order], len(train), len(names), class_names=names)
