"""Figures on textured ground with a class for each pixel: segmentation without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from mpifl.core.options import NonNegativeFloat, PositiveInt
from mpifl.core.process import check_memory
from mpifl.core.rng import key
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import VOID, Pool
from mpifl.data.sources.base import Source

NAMES = ("ground", "square", "disc", "triangle", "inverted triangle")
BLOCK = 1024  # images that are drawn from one stream
COARSE = 4  # pixels between the nodes of the texture
SMALLEST, LARGEST = 0.16, 0.3  # half the width of a figure, as a share of the image's side
CONTRAST = 48.0  # grey levels between a figure and the mean of its ground, at least


@dataclass(frozen=True)
class Shapes(Source):
    """Squares, discs and triangles on textured ground, and the class of each pixel: for task segmentation.

    Made up: each image has a ground of smooth noise, lighter at the top, and figures of random place, size
    and brightness, lighter or darker than the ground; later ones cover earlier ones. The classes are ground,
    square, disc, triangle (tip up) and inverted triangle (tip down): half a turn makes each triangle one of
    the other class.

    Attributes:
        train: number of images of the training part.
        test: number of images of the test part.
        side: height and width of an image in pixels.
        colour: whether images have three channels; otherwise they are grey.
        figures: largest number of figures in an image; there is at least one.
        noise: standard deviation of the noise of each pixel, in grey levels.
        outline: whether pixels on an edge between two classes are ignored, as in PASCAL VOC.
    """

    name: ClassVar[str] = "shapes"
    needs_root: ClassVar[bool] = False

    train: PositiveInt = 1600
    test: PositiveInt = 400
    side: Annotated[int, Interval(ge=16, le=1024)] = 32
    colour: bool = False
    figures: Annotated[int, Interval(ge=1, le=100)] = 3
    noise: NonNegativeFloat = 8.0
    outline: bool = False

    def files(self, root: Path) -> list[Path]:
        """Return nothing: the images are drawn."""
        return []

    def load(self, root: Path, scratch: Path) -> Pool:
        """Draw the images, a block of them at a time."""
        total, side = self.train + self.test, self.side
        check_memory("data.source.train + test", total, side * side)
        images = cache.allocate(scratch, "images", (total, self._channels, side, side))
        masks = np.zeros((total, side, side), np.uint8)
        for start in range(0, total, BLOCK):
            rng = key(0, "shapes", start).numpy()
            for i in range(start, min(start + BLOCK, total)):
                images[i], masks[i] = self._image(rng)
        images.flush()  # type: ignore[attr-defined]
        return Pool(images, masks, self.train, len(NAMES), class_names=NAMES)

    @property
    def _channels(self) -> int:
        return 3 if self.colour else 1

    def _image(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return an image uint8 [C, H, W] and its mask uint8 [H, W]."""
        side, level = self.side, rng.uniform(80, 175)
        y, x = np.mgrid[0:side, 0:side].astype(np.float64)
        ground = level + _texture(rng, side) + 24 * (0.5 - y / side)
        image = np.repeat(ground[None], self._channels, axis=0)
        mask = np.zeros((side, side), np.uint8)
        for _ in range(int(rng.integers(1, self.figures + 1))):
            what, half = int(rng.integers(1, len(NAMES))), rng.uniform(SMALLEST, LARGEST) * side
            v, u = y - rng.uniform(half, side - 1 - half), x - rng.uniform(half, side - 1 - half)
            inside = _inside(what, u, v, half)
            lighter = rng.random() < 0.5
            bound = (level + CONTRAST, 255.0) if lighter else (0.0, level - CONTRAST)
            image[:, inside] = rng.uniform(*bound, (self._channels, 1))
            mask[inside] = what
        image += self.noise * rng.standard_normal(image.shape)
        if self.outline:
            mask[_edges(mask)] = VOID
        return np.clip(np.rint(image), 0, 255).astype(np.uint8), mask


def _inside(what: int, u: np.ndarray, v: np.ndarray, half: float) -> np.ndarray:
    """Return which pixels a figure covers, bool [H, W].

    Args:
        what: its class.
        u: columns from its centre [H, W].
        v: rows from its centre [H, W], downwards.
        half: half its width.
    """
    if NAMES[what] == "square":
        return np.asarray(np.maximum(np.abs(u), np.abs(v)) <= half)
    if NAMES[what] == "disc":
        return np.asarray(u**2 + v**2 <= half**2)
    down = v if NAMES[what] == "triangle" else -v
    return np.asarray((np.abs(down) <= half) & (np.abs(u) <= (down + half) / 2))


def _texture(rng: np.random.Generator, side: int) -> np.ndarray:
    """Return smooth noise [side, side] with a standard deviation of about 8 grey levels."""
    nodes = side // COARSE + 2
    coarse = 12.0 * rng.standard_normal((nodes, nodes))
    at = np.arange(side) / COARSE
    low, share = at.astype(np.int64), at % 1.0
    rows = coarse[low] * (1 - share)[:, None] + coarse[low + 1] * share[:, None]
    return np.asarray(rows[:, low] * (1 - share) + rows[:, low + 1] * share)


def _edges(mask: np.ndarray) -> np.ndarray:
    """Return the pixels with a neighbour of another class on the right or below, bool [H, W]."""
    out = np.zeros(mask.shape, bool)
    out[:, :-1] |= mask[:, :-1] != mask[:, 1:]
    out[:-1] |= mask[:-1] != mask[1:]
    return out
