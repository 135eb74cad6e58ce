"""Patches of the two photographs that come with scikit-learn: public images that need no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.core.rng import key
from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source, Statistics

PATCHES, SIDE, ZOOM = 2000, 32, 2  # patches per photograph; pixels of a side; photograph's pixels for one


@dataclass(frozen=True)
class Photos(Source):
    """Colour patches of 32 x 32 cut at random places; the label is the photograph (0 temple, 1 flower).

    They resemble no data set, so a server that learns from them learns nothing about its clients.
    """

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
