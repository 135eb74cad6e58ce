"""A user's own images in one NumPy archive."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data.pool import Pool, images_of, stratified
from mpifl.data.sources.base import Source, broken
from mpifl.data.world import check_fraction


@dataclass(frozen=True)
class Npz(Source):
    """An .npz with x_train, y_train and, if there is a test part, x_test, y_test (the layout of Keras'
    mnist.npz).

    Images are uint8, or floats in [0, 1], as [n, H, W], [n, H, W, C] or [n, C, H, W]; labels count from
    zero. Arrays origin_train and origin_test, where present, say who made each sample.

    Attributes:
        path: absolute, or below data.root.
        test_share: share of every class set aside where the archive has no test part.
    """

    name: ClassVar[str] = "npz"
    needs_root: ClassVar[bool] = False

    path: str = "data.npz"
    test_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("test_share", self.test_share)

    def files(self, root: Path) -> list[Path]:
        """Return the archive."""
        return [root / Path(self.path).expanduser()]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the archive."""
        path = self.files(root)[0]
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise broken(path, f"truncated or not an .npz ({error})") from error
        for name in ("x_train", "y_train"):
            if name not in arrays:
                raise UserError(str(path), sorted(arrays), f"lacks the array {name}")
        parts = [p for p in ("train", "test") if f"x_{p}" in arrays]
        images = np.concatenate([images_of(arrays[f"x_{p}"], f"{path}: x_{p}") for p in parts])
        labels = np.concatenate([labels_of(arrays.get(f"y_{p}"), f"{path}: y_{p}") for p in parts])
        origin = np.concatenate([arrays[f"origin_{p}"] for p in parts]) if "origin_train" in arrays else None
        if not len(images) == len(labels) == len(labels if origin is None else origin):
            raise UserError(
                str(path), (len(images), len(labels)), "images, labels and origins differ in number"
            )
        if len(parts) == 2:
            return Pool(images, labels, len(arrays["y_train"]), int(labels.max()) + 1, origin)
        return with_test_part(images, labels, self.test_share, origin)


def labels_of(array: np.ndarray | None, name: str) -> np.ndarray:
    """Return labels as int64 [n]; refuse anything that does not count classes from zero."""
    if array is None or not np.issubdtype(array.dtype, np.integer) or (array.size and array.min() < 0):
        raise UserError(
            name, None if array is None else str(array.dtype), "labels must be integers from zero"
        )
    return array.astype(np.int64).ravel()


def with_test_part(images: np.ndarray, labels: np.ndarray, share: float, origin: np.ndarray | None) -> Pool:
    """Return a pool whose test part is a fixed stratified `share` of the samples, the same for every seed."""
    train, test = (
        stratified(labels, share, key(0, "test part")) if share else (np.arange(len(labels)), labels[:0])
    )
    order = np.concatenate([train, test])
    origin = None if origin is None else origin[order]
    return Pool(images[order], labels[order], len(train), int(labels.max()) + 1, origin)
