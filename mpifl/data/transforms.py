"""Operations on stored samples and labels, composable in any order, and the conversion to tensors.

An operation takes samples [n, ...] and labels as the pool stores them (images uint8 [n, C, H, W], classes
int64 [n], masks [n, H, W]) and the group of each sample, int64 [n]. It returns new samples and labels. The
result is the same whether it runs while the cache is built or at every visit.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from mpifl.core.federation import IGNORED

from .pool import void_of

MASK_AXES = 3  # of labels [n, H, W]


def renamed_masks(y: np.ndarray, tables: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return masks with classes renamed; `tables[g][c]` is the new name of class c in group g.

    Args:
        y: [n, H, W], as a pool stores them; ignored pixels stay ignored.
        tables: int64 [groups, L].
        group: int64 [n].
    """
    ignored = y == void_of(y.dtype)
    return np.where(ignored, y, tables[group[:, None, None], np.where(ignored, 0, y)].astype(y.dtype))


class Op(ABC):
    """A change of samples or labels that may depend on label and group."""

    @abstractmethod
    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return new (x, y) of the same types; must not modify its arguments."""

    def channels(self, count: int) -> int:
        """Return the number of colour channels of the result for images with `count` channels."""
        return count


@dataclass(frozen=True)
class Rotate(Op):
    """Rotate each group's images by its angle in degrees, counter-clockwise as torchvision does.

    Multiples of 90 degrees move pixels exactly; other angles take the nearest pixel and fill with black.
    `expand` grows the canvas so that no corner is cut. Masks turn with their images; filled pixels are
    ignored.
    """

    angles: tuple[float, ...]
    expand: bool = False

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rotate `x`; samples of one call may belong to several groups if their canvases agree."""
        present = np.unique(group)
        if y.ndim == MASK_AXES:
            y = self._turned(y[:, None], group, present, void_of(y.dtype))[:, 0]
        return self._turned(x, group, present, 0), y

    def _turned(self, x: np.ndarray, group: np.ndarray, present: np.ndarray, fill: int) -> np.ndarray:
        """Return images [n, C, H, W], or masks [n, 1, H, W], rotated by the angles of their groups."""
        if len(present) <= 1:
            return rotated(x, self.angles[present[0]], self.expand, fill) if len(present) else x
        parts = [(group == g, rotated(x[group == g], self.angles[g], self.expand, fill)) for g in present]
        out = np.empty((len(x), *parts[0][1].shape[1:]), x.dtype)
        for where, turned in parts:
            out[where] = turned
        return out


@dataclass(frozen=True)
class MirrorAndTurn(Op):
    """Mirror images of groups 1, 2, ... left to right, then rotate them by `angles[group - 1]` degrees.

    No mirrored image is a rotation of the original. Masks follow their images.
    """

    angles: tuple[float, ...]

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mirror `x`, and masks."""
        flipped = (group > 0)[:, None, None, None]
        x = np.where(flipped, x[..., ::-1], x)
        if y.ndim == MASK_AXES:
            y = np.where(flipped[:, 0], y[..., ::-1], y)
        return Rotate((0.0, *self.angles))(x, y, group)


@dataclass(frozen=True)
class PermuteLabels(Op):
    """Rename each group's labels by its own permutation; `tables[g][y]` is the new name of y in group g."""

    tables: tuple[tuple[int, ...], ...]

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rename `y`; pixels of masks that are ignored stay so."""
        tables = np.asarray(self.tables, np.int64)
        return x, renamed_masks(y, tables, group) if y.ndim == MASK_AXES else tables[group, y]


@dataclass(frozen=True)
class Border(Op):
    """Add `width` black pixels on every side; those of masks are ignored."""

    width: int

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pad `x`, and masks."""
        w = self.width
        if y.ndim == MASK_AXES:
            y = np.pad(y, ((0, 0), (w, w), (w, w)), constant_values=void_of(y.dtype))
        return np.pad(x, ((0, 0), (0, 0), (w, w), (w, w))), y


@dataclass(frozen=True)
class Colour(Op):
    """Paint grey images: pixel = floor(grey * tables[g][y]), an RGB triple of shares of full intensity."""

    tables: tuple[tuple[tuple[float, float, float], ...], ...]

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `x` [n, 1, H, W] as [n, 3, H, W]; the black background stays black."""
        share = np.asarray(self.tables, np.float32)[group, y]  # [n, 3]
        painted = x.astype(np.float32) * share[:, :, None, None] + 1e-3  # 255 * (52 / 255) is 52, not 51
        return painted.astype(np.uint8), y

    def channels(self, count: int) -> int:
        """Return 3."""
        return 3


@dataclass(frozen=True)
class Patch(Op):
    """Paint the top-left `size` x `size` square in tables[g][y], an RGB triple 0..255, None for no patch."""

    tables: tuple[tuple[tuple[int, int, int] | None, ...], ...]
    size: int = 3

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Patch `x` [n, 3, H, W]."""
        table = np.array([[c or (0, 0, 0) for c in row] for row in self.tables], np.uint8)
        colours = table[group, y]  # [n, 3]
        has = np.array([[c is not None for c in row] for row in self.tables], bool)[group, y]
        out = x.copy()
        out[has, :, : self.size, : self.size] = colours[has][:, :, None, None]
        return out, y


@dataclass(frozen=True)
class Noise(Op):
    """Add Gaussian noise that depends only on the sample and its group, so it is the same at every visit.

    Images are rounded to bytes and clipped to [0, 255].

    Attributes:
        levels: standard deviation for each group, for pixels in [0, 1] or for features in units of `scale`.
        seed: seed of the draws.
        scale: the unit of each feature, [F]; empty: 1.
    """

    levels: tuple[float, ...]
    seed: int
    scale: tuple[float, ...] = ()

    def __call__(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `x` of the same type with noise."""
        level = np.asarray(self.levels)[group]
        scale = np.array(self.scale).reshape(x.shape[1:]) if self.scale else np.array(1.0)
        out = np.array(x)
        for i in np.flatnonzero(level > 0):
            content = int.from_bytes(hashlib.blake2b(x[i].tobytes(), digest_size=8).digest(), "little")
            key = np.array([content, self.seed ^ int(group[i])], np.uint64)  # a list would become float64
            rng = np.random.Generator(np.random.Philox(key=key))
            noise = rng.standard_normal(x.shape[1:], np.float32) * (level[i] * scale)
            if x.dtype == np.uint8:
                out[i] = np.clip(np.rint(x[i] + 255.0 * noise), 0, 255)
            else:
                out[i] = x[i] + noise
        return out, y


class ToInputs(ABC):
    """The conversion of stored samples to the inputs of a model; the last step of every visit."""

    def table(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the model input for each value of a pixel, float32 [C, 256], for images of a shape.

        None if such a table does not determine the inputs.
        """
        return None

    @abstractmethod
    def __call__(self, x: np.ndarray) -> torch.Tensor:
        """Return samples [n, ...] as a contiguous tensor: int64 for tokens, otherwise float32."""


@dataclass(frozen=True)
class ToTokens(ToInputs):
    """Conversion of tokens of any integer type to int64."""

    def __call__(self, x: np.ndarray) -> torch.Tensor:
        """Return tokens int64 [n, T]."""
        return torch.from_numpy(np.array(x, np.int64))


@dataclass(frozen=True, eq=False)
class ToFeatures(ToInputs):
    """Conversion of features of any float type to float32, standardised if `mean` and `std` are given.

    Attributes:
        mean: [*shape], subtracted from the features; None leaves them unchanged.
        std: [*shape], nonzero; the features are divided by it.
    """

    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> torch.Tensor:
        """Return (x - mean) / std, float32 [n, ...]."""
        out = torch.empty(x.shape)  # aligned, unlike NumPy's arrays: see `core.devices.aligned`
        out.numpy()[...] = x if self.mean is None or self.std is None else (x - self.mean) / self.std
        return out


def labels_as_tensor(y: np.ndarray) -> torch.Tensor:
    """Return labels as a tensor: int64 for classes, tokens and masks, float32 for others."""
    if y.ndim == MASK_AXES:
        return torch.from_numpy(np.where(y == void_of(y.dtype), IGNORED, y.astype(np.int64)))
    real = y.dtype in (np.uint8, np.bool_) or np.issubdtype(y.dtype, np.floating)
    return torch.from_numpy(np.array(y, np.float32 if real and y.ndim > 1 else np.int64))


@dataclass(frozen=True)
class ToTensor(ToInputs):
    """Conversion of uint8 pixels to normalised float32 tensors, resized if `resize` is given.

    Attributes:
        mean: mean of each channel, for pixels in [0, 1].
        std: standard deviation of each channel.
        resize: side in pixels of a square result (bilinear); None keeps the size.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None

    def __call__(self, x: np.ndarray) -> torch.Tensor:
        """Return (x / 255 - mean) / std, float32 [n, C, H, W], contiguous."""
        out = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32)
        if self.resize is not None and out.shape[-2:] != (self.resize, self.resize):
            size = (self.resize, self.resize)
            out = torch.nn.functional.interpolate(out, size, mode="bilinear", antialias=True)
        return out.div_(255.0).sub_(_channels(self.mean)).div_(_channels(self.std)).contiguous()

    def table(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the model input for each value of a pixel, float32 [C, 256]; None if images are resized."""
        if self.resize is not None and shape[-2:] != (self.resize, self.resize):
            return None
        pixels = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1)
        same_size = replace(self, resize=None)
        return same_size(np.repeat(pixels, shape[0], axis=1)).reshape(256, shape[0]).T.contiguous()


@lru_cache(maxsize=16)
def _channels(values: tuple[float, ...]) -> torch.Tensor:
    """Return a value per channel as float32 [1, C, 1, 1]."""
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def rotated(x: np.ndarray, angle: float, expand: bool = False, fill: int = 0) -> np.ndarray:
    """Return images [n, C, H, W] rotated counter-clockwise by `angle` degrees, nearest pixel, black fill.

    Args:
        x: images.
        angle: in degrees.
        expand: as in `Rotate`.
        fill: value of pixels that have no source.
    """
    height, width = x.shape[-2:]
    quarters, rest = divmod(angle, 90.0)
    if rest == 0.0 and (height == width or expand or quarters % 2 == 0):
        return np.ascontiguousarray(np.rot90(x, int(quarters) % 4, axes=(-2, -1)))
    source, size = _pixel_map(height, width, float(angle), expand)
    flat = x.reshape(*x.shape[:2], -1)
    out = np.take(flat, np.maximum(source, 0), axis=2)
    out[:, :, source < 0] = fill
    return np.asarray(out.reshape(*x.shape[:2], *size))


def canvas(height: int, width: int, angle: float) -> tuple[int, int]:
    """Return (H, W) of the canvas that holds every corner: ceil(max) - floor(min) of the rotated corners."""
    cos, sin = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))

    def side(length: int, span: float) -> int:
        top = math.trunc((length / 2 + span / 2) / 1e-4) * 1e-4  # drops the rounding error of cos(90 degrees)
        low = math.trunc((length / 2 - span / 2) / 1e-4) * 1e-4
        return math.ceil(top) - math.floor(low)

    return side(height, sin * width + cos * height), side(width, cos * width + sin * height)


@lru_cache(maxsize=256)
def _pixel_map(height: int, width: int, angle: float, expand: bool) -> tuple[np.ndarray, tuple[int, int]]:
    """Return (source pixel of every target pixel or -1, int64 [H'*W'], (H', W'))."""
    out_h, out_w = canvas(height, width, angle) if expand else (height, width)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    y, x = np.mgrid[0:out_h, 0:out_w].astype(np.float64)
    x, y = x + 0.5 - out_w / 2, y + 0.5 - out_h / 2
    column = np.rint(cos * x - sin * y + width / 2 - 0.5)
    row = np.rint(sin * x + cos * y + height / 2 - 0.5)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return np.where(inside, row * width + column, -1).astype(np.int64).ravel(), (out_h, out_w)
