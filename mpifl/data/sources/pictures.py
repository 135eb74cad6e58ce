"""Pictures in files, decoded by PIL."""

from __future__ import annotations

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import require
from mpifl.data.sources.base import reading

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "GIF")  # decoders of some others start programs
PIXELS = 1 << 26  # of one picture
GREY = ("1", "L")  # modes of PIL's pictures with one channel


def is_grey(content: bytes, name: str) -> bool:
    """Return whether a picture has one channel; reads its header alone."""
    from PIL import Image

    with reading(Path(name), "a picture"), Image.open(BytesIO(content), formats=FORMATS) as opened:
        return opened.mode in GREY


def decoded(file: Path | BytesIO, name: str, side: int | None, colour: bool = True) -> np.ndarray:
    """Return a picture turned as its EXIF orientation says, uint8 [1 or 3, H, W].

    Args:
        file: the file, or its content.
        name: where it comes from, for error messages.
        side: the shorter side is scaled to it, bilinear, and the middle square is kept; None: no change.
        colour: whether a grey picture gets three channels, too.
    """
    from PIL import Image, ImageOps

    with reading(Path(name), "a picture"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and large pictures
        with Image.open(file, formats=FORMATS) as opened:
            remedy = f"larger than {PIXELS} pixels"
            remedy += f", or so when its shorter side has {side}" if side else ""
            most = max(math.prod(opened.size), math.prod(_scaled(opened.size, side)))
            require(most <= PIXELS, name, opened.size, f"{remedy}; make it smaller")
            check_bits(opened, name)
            picture = ImageOps.exif_transpose(opened)
            picture = picture.convert("L" if picture.mode in GREY and not colour else "RGB")
    if side is not None:
        width, height = _scaled(picture.size, side)
        left, top = (width - side) // 2, (height - side) // 2
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        picture = picture.crop((left, top, left + side, top + side))
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def check_bits(picture: Any, name: str) -> None:
    """Refuse a picture whose values have more than 8 bits: a conversion would clip them at 255."""
    remedy = "has values of more than 8 bits, which would be clipped at 255; convert it to 8 bits"
    require(not picture.mode.startswith(("I", "F")), name, picture.mode, remedy)


def _scaled(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    """Return width and height when the shorter of them is `side`."""
    if side is None:
        return size
    width, height = (max(side, round(length * side / min(size))) for length in size)
    return width, height
