"""Folders of pictures: one for each class, and above them one for each domain if there are domains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.progress import each
from mpifl.core.rng import key
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import Pool, stratified
from mpifl.data.scenario import check_fraction
from mpifl.data.sources.base import Source, reading

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp"}
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "GIF")  # decoders of some others start programs
PIXELS = 1 << 26  # of one picture

Found = tuple[Path, Path]  # a picture, the folder of its class


@dataclass(frozen=True)
class Folder(Source):
    """Pictures in folders, enlarged or reduced to one square size when the cache is built.

    Attributes:
        path: folder below data.root; holds <class>/*.jpg, or <domain>/<class>/*.jpg if `domains` is true.
        domains: whether the first level names domains (PACS: art_painting, cartoon, photo, sketch).
        broken: treatment of a picture that cannot be read: `refuse` stops and names it, `skip` leaves it out.
        side: side of the stored pictures in pixels; the shorter side is scaled to it, the middle is kept.
        test_share: share of every class set aside as the test part, the same for every seed.
    """

    name: ClassVar[str] = "folder"

    path: str = "images"
    domains: bool = False
    side: int = 84
    test_share: float = 0.2
    broken: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.broken in ("refuse", "skip"), "broken", self.broken, "refuse or skip")
        require(self.side > 0, "side", self.side, "a side in pixels")
        check_fraction("test_share", self.test_share)

    def files(self, root: Path) -> list[Path]:
        """Return the pictures, class by class."""
        top = root / self.path
        pictures = [picture for folder in self._folders(top) for picture in self._pictures(folder)]
        if not pictures:
            self._hint(top)
        return pictures or [top / ("<domain>/<class>/*.jpg" if self.domains else "<class>/*.jpg")]

    def _folders(self, top: Path) -> list[Path]:
        """Return the folders of the classes."""
        with reading_folder(top):
            found = top.glob("*/*" if self.domains else "*")
            return sorted(p for p in found if p.is_dir() and not _of_archiver(p.relative_to(top)))

    @staticmethod
    def _pictures(folder: Path) -> list[Path]:
        with reading_folder(folder):
            found = (p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
            return sorted(p for p in found if not _of_archiver(Path(p.name)))

    def _hint(self, top: Path) -> None:
        """Raise `UserError` if the pictures lie one level deeper, or one less deep, than `domains` says."""
        other = replace(self, domains=not self.domains)
        if any(map(self._pictures, other._folders(top))):
            lie = "<class>/*.jpg" if self.domains else "<domain>/<class>/*.jpg"
            remedy = f"pictures lie in {top} as {lie}: set domains: {str(other.domains).lower()}"
            raise UserError("data.source.domains", self.domains, remedy)

    def load(self, root: Path, scratch: Path) -> Pool:
        """Decode every picture into `scratch`; nothing larger than one picture is held in memory."""
        folders = self._folders(root / self.path)
        classes = sorted({folder.name for folder in folders})
        domains = sorted({folder.parent.name for folder in folders}) if self.domains else []
        remarks: tuple[str, ...] = ()
        found = [(p, f) for f in folders for p in self._pictures(f)]
        if self.broken == "skip":
            found, remarks = self._readable(found)
        empty = sorted(set(classes) - {folder.name for _, folder in found})
        remedy = f"no pictures in the folder of this class ({', '.join(sorted(PICTURES))}); remove it"
        require(not empty, str(root / self.path), empty[:1], remedy)
        labels = np.array([classes.index(folder.name) for _, folder in found], np.int64)
        if self.test_share:
            train, test = stratified(labels, self.test_share, key(0, "folder"))
        else:
            train, test = np.arange(len(found)), np.zeros(0, np.int64)
        order = np.concatenate([train, test])
        images = cache.allocate(scratch, "images", (len(found), 3, self.side, self.side))
        for target, i in enumerate(each(order.tolist(), "decoding pictures", "pictures")):
            images[target] = read_picture(found[i][0], self.side)
        origin = np.array([domains.index(f.parent.name) for _, f in found])[order] if domains else None
        pool = Pool(images, labels[order], len(train), len(classes), origin, tuple(domains), tuple(classes))
        return replace(pool, remarks=remarks)

    def _readable(self, found: list[Found]) -> tuple[list[Found], tuple[str, ...]]:
        """Return the pictures that can be decoded, and a line about those that cannot."""
        good, bad = [], []
        for picture, folder in each(found, "looking for broken pictures", "pictures"):
            try:
                read_picture(picture, self.side)
                good.append((picture, folder))
            except UserError:
                bad.append(picture)
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        said = (f"pictures that cannot be read are left out: {bad[0]}{more}",) if bad else ()
        return good, said


def _of_archiver(path: Path) -> bool:
    """Return whether macOS added a path to an archive: `._name` files and folders `__MACOSX`."""
    return any(part.startswith("._") or part == "__MACOSX" for part in path.parts)


@contextmanager
def reading_folder(folder: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be listed into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError("data.source.path", str(folder), f"cannot be listed ({error.strerror})") from error


def read_picture(path: Path, side: int) -> np.ndarray:
    """Return the middle square of a picture file, uint8 [3, side, side]: shorter side scaled, bilinear."""
    from PIL import Image

    with reading(path, "a picture"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and large pictures
        with Image.open(path, formats=FORMATS) as opened:
            scale = side / min(opened.size)
            width, height = (max(side, round(length * scale)) for length in opened.size)
            remedy = f"larger than {PIXELS} pixels, or so when its shorter side has {side}; make it smaller"
            most = max(opened.size[0] * opened.size[1], width * height)
            require(most <= PIXELS, str(path), opened.size, remedy)
            check_bits(opened, str(path))
            picture = opened.convert("RGB")
    return np.asarray(middle_square(picture, side), np.uint8).transpose(2, 0, 1)


def check_bits(picture: Any, name: str) -> None:
    """Refuse a picture whose values have more than 8 bits: a conversion would clip them at 255."""
    remedy = "has values of more than 8 bits, which would be clipped at 255; convert it to 8 bits"
    require(not picture.mode.startswith(("I", "F")), name, picture.mode, remedy)


def middle_square(picture: Any, side: int) -> Any:
    """Return the middle square of a picture whose shorter side was scaled to `side`, bilinear."""
    from PIL import Image

    scale = side / min(picture.size)
    width, height = (max(side, round(length * scale)) for length in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - side) // 2, (height - side) // 2
    return picture.crop((left, top, left + side, top + side))
