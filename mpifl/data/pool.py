"""A pool: all images of a source in one array, the training part first, then the test part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.rng import Key

MAX_ORIGINS = 1 << 24


@dataclass(frozen=True)
class Pool:
    """Images and labels of one source; sample i belongs to the training part if i < num_train.

    Attributes:
        images: uint8 [n, C, H, W], memory-mapped where it comes from the cache.
        labels: int64 [n].
        num_train: size of the training part.
        num_classes: L.
        origin: int64 [n], the origin of each sample (writer, domain), or None where it is unknown.
        origin_names: what the origins are called, if they have names.
    """

    images: np.ndarray
    labels: np.ndarray
    num_train: int
    num_classes: int
    origin: np.ndarray | None = None
    origin_names: tuple[str, ...] = ()

    @property
    def train(self) -> np.ndarray:
        """Return the addresses of the training part, int64 [num_train]."""
        return np.arange(self.num_train)

    @property
    def test(self) -> np.ndarray:
        """Return the addresses of the test part, int64 [n - num_train]."""
        return np.arange(self.num_train, len(self.labels))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (C, H, W) of one stored image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width


def images_of(array: np.ndarray, name: str) -> np.ndarray:
    """Return images as uint8 [n, C, H, W].

    Args:
        array: [n, H, W], [n, H, W, C] or [n, C, H, W] with C = 1 or 3; uint8, or floats in [0, 1].
        name: where they come from, for error messages.

    Raises:
        UserError: another shape, type or range.
    """
    array = np.asarray(array)
    require(
        array.ndim in (3, 4),
        name,
        array.shape,
        "images of unexpected shape: give [n, H, W], [n, H, W, C] or [n, C, H, W]",
    )
    if array.dtype != np.uint8:
        remedy = "images must be uint8, or floats between 0 and 1"
        require(np.issubdtype(array.dtype, np.floating), name, str(array.dtype), remedy)
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
        require(low >= 0.0 and high <= 1.0, name, f"{array.dtype} in [{low:g}, {high:g}]", remedy)  # no NaN
        array = np.rint(array * 255).astype(np.uint8)
    if array.ndim == 3:
        return array[:, None]
    if array.shape[1] in (1, 3):
        return array
    require(
        array.shape[3] in (1, 3),
        name,
        array.shape,
        "images of unexpected shape: one axis must hold 1 or 3 colour channels",
    )
    return array.transpose(0, 3, 1, 2)


def labels_of(array: np.ndarray | None, name: str, num_classes: int | None = None) -> np.ndarray:
    """Return labels as int64 [n].

    Args:
        array: integers [n] or [n, 1].
        name: where they come from, for error messages.
        num_classes: L; None where it is not known.

    Raises:
        UserError: another shape or type, or a label outside 0 .. L - 1.
    """
    if array is None or not np.issubdtype(array.dtype, np.integer):
        dtype = None if array is None else str(array.dtype)
        raise UserError(name, dtype, "must be integers from zero")
    flat = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    require(flat, name, array.shape, "labels of unexpected shape: give one for each image, [n]")
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    limit, remedy = 2**31 if num_classes is None else num_classes, "must be integers from zero"
    require(low >= 0 and high < limit, name, low if low < 0 else high, f"{remedy}, below {limit}")
    return array.astype(np.int64).ravel()


def count_classes(labels: np.ndarray, name: str) -> int:
    """Return L, one more than the largest label [n]; raise `UserError` for more classes than samples."""
    require(labels.size > 0, name, 0, "no samples: give some")
    largest = int(labels.max())
    remedy = f"more classes than the {len(labels)} samples: number the classes 0, 1, 2, ..."
    require(largest < len(labels), name, largest, remedy)
    return largest + 1


def check_pool(pool: Pool, name: str) -> None:
    """Raise `UserError` unless a source's pool is valid: its labels are used as indices."""
    images, n = pool.images, len(pool.labels)
    remedy = "images must be uint8 [n, C, H, W], none of C, H and W zero"
    good = images.dtype == np.uint8 and images.ndim == 4 and min(images.shape[1:]) > 0
    require(good, name, f"{images.dtype} {list(images.shape)}", remedy)
    require(n == len(images), name, n, f"labels for {len(images)} images: give one for each")
    require(0 < pool.num_train <= n, name, pool.num_train, f"training images of {n}: give some")
    labels_of(pool.labels, name, pool.num_classes)
    if pool.origin is not None:
        require(len(pool.origin) == n, name, len(pool.origin), f"origins for {n} images: give one for each")
        labels_of(pool.origin, f"{name}: origin", MAX_ORIGINS)


def stratified(labels: np.ndarray, fraction: float, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (kept, held out); of every class round(`fraction` n) are held out, at least one."""
    held = []
    for label in np.unique(labels):
        members = key.of(int(label)).numpy().permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held.append(members[:count])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out
