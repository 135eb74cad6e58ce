"""Folders of pictures: one for each class, and above them one for each domain if there are domains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.options import PositiveInt, ShareBelowOne
from mpifl.core.progress import each
from mpifl.core.rng import key
from mpifl.data import prepared_cache as cache
from mpifl.data.pool import Pool, stratified
from mpifl.data.sources.arrays import TEST_SHARE, lines_on_classes, refuse_unused_share
from mpifl.data.sources.base import TEST, TRAIN, VALIDATION, Source, part_of, roles_of
from mpifl.data.sources.pictures import decoded

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp"}
NO_PICTURES = {".gif", ".tif", ".tiff", ".jfif", ".jp2", ".avif", ".heic", ".heif", ".npy"}  # not read
SYSTEM = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"}


@dataclass(frozen=True)
class ClassFolder:
    """A folder of the pictures of one class.

    Attributes:
        path: the folder.
        part: name of the folder of its part, such as train; empty where the layout has none.
        domain: name of its domain; empty where the layout has none.
    """

    path: Path
    part: str = ""
    domain: str = ""

    @property
    def name(self) -> str:
        """Return the name of the class."""
        return self.path.name


Found = tuple[Path, ClassFolder]  # a picture, the folder of its class


@dataclass(frozen=True)
class Folder(Source):
    """Pictures in folders, enlarged or reduced to one square size when the cache is built.

    Folders called train, test, and val, valid or validation, in any case, are parts, above the classes or the
    domains or below the domains; without them a share of every class is set aside for testing. Pictures are
    turned as their EXIF orientation says. Hidden files and folders are not read.

    Attributes:
        path: folder below data.root; holds <class>/*.jpg, or <domain>/<class>/*.jpg if `domains` is true;
            with parts <part>/<class>/*.jpg.
        domains: whether the first level names domains (PACS: art_painting, cartoon, photo, sketch).
        broken: treatment of a picture that cannot be read: `refuse` stops and names it, `skip` leaves it out.
        side: side of the stored pictures in pixels; the shorter side is scaled to it, the middle is kept.
        test_share: share of every class set aside as the test part, the same for every seed, if no folder is
            one.
        validation: use of a folder val beside train and test: `drop` leaves it out, `train` adds it to the
            training part. Without a folder test, val is the test part.
    """

    name: ClassVar[str] = "folder"

    path: str = "images"
    domains: bool = False
    side: PositiveInt = 84
    test_share: ShareBelowOne = TEST_SHARE
    broken: Literal["refuse", "skip"] = "refuse"
    validation: Literal["drop", "train"] = "drop"

    def files(self, root: Path) -> list[Path]:
        """Return the pictures, class by class."""
        top = root / self.path
        folders = self._folders(top)
        pictures = [picture for folder in folders for picture in self._pictures(folder.path)]
        if not pictures:
            self._hint(top)
        return pictures or [top / ("<domain>/<class>/*.jpg" if self.domains else "<class>/*.jpg")]

    def _folders(self, top: Path) -> list[ClassFolder]:
        """Return the folders of the classes; refuse parts that would be read as classes or as domains."""
        levels = 2 if self.domains else 1
        below = {depth: self._below(top, depth) for depth in (levels, levels + 1)}
        in_parts = [p for p in below[levels + 1] if any(map(part_of, p.relative_to(top).parts[:-1]))]
        in_parts = in_parts if any(map(self._pictures, in_parts)) else []
        shape = "<domain>/<class>" if self.domains else "<class>"
        if not in_parts:
            named = sorted({p.relative_to(top).parts[-2 if self.domains else -1] for p in below[levels]})
            parts = [name for name in named if part_of(name)]
            holds = [p for p in below[levels] if set(p.relative_to(top).parts) & set(parts)]
            remedy = f"are parts, and pictures lie in them as {shape}/*.jpg"
            remedy += ": set domains: false" if self.domains else ": put a folder for each class below each"
            wrong = bool(parts) if self.domains else len(set(map(part_of, parts))) > 1  # train may be a class
            require(not (wrong and any(map(self._pictures, holds))), str(top), parts, remedy)
            return [ClassFolder(p, domain=p.parent.name if self.domains else "") for p in below[levels]]
        found = [_of_part(p, top, self.domains) for p in in_parts]
        others = [p for p in (*below[levels], *below[levels + 1]) if p not in in_parts and self._pictures(p)]
        remedy = f"holds pictures beside folders of parts ({found[0].part}): move them into one, or away"
        require(not others, str(top), [str(p.relative_to(top)) for p in others[:2]], remedy)
        return found

    @staticmethod
    def _below(top: Path, depth: int) -> list[Path]:
        """Return the folders at a depth, but for hidden ones."""
        with reading_folder(top):
            found = top.glob("/".join("*" * depth))
            return sorted(p for p in found if p.is_dir() and not _of_system(p.relative_to(top)))

    @staticmethod
    def _pictures(folder: Path) -> list[Path]:
        with reading_folder(folder):
            found = (p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
            return sorted(p for p in found if not _of_system(Path(p.name)))

    def _hint(self, top: Path) -> None:
        """Raise `UserError` if the pictures lie one level deeper, or one less deep, than `domains` says."""
        other = replace(self, domains=not self.domains)
        if any(self._pictures(folder.path) for folder in other._folders(top)):
            lie = "<class>/*.jpg" if self.domains else "<domain>/<class>/*.jpg"
            remedy = f"pictures lie in {top} as {lie}: set domains: {str(other.domains).lower()}"
            raise UserError("data.source.domains", self.domains, remedy)

    def load(self, root: Path, scratch: Path) -> Pool:
        """Decode every picture into `scratch`; nothing larger than one picture is held in memory."""
        top = root / self.path
        folders = self._folders(top)
        remarks = self._not_read(top, folders)
        roles: dict[str, str] = {}
        parts = sorted({folder.part for folder in folders if self._pictures(folder.path)} - {""})
        if parts:
            roles, said = roles_of(parts, self.validation, str(top))
            remarks = (*remarks, *said)
            folders = [folder for folder in folders if folder.part in roles]
        else:
            remedy = "has no effect: no folder is a validation part; leave it out"
            require(self.validation == VALIDATION[0], "data.source.validation", self.validation, remedy)
        classes = sorted({folder.name for folder in folders})
        domains = sorted({folder.domain for folder in folders}) if self.domains else []
        found = [(p, f) for f in folders for p in self._pictures(f.path)]
        if self.broken == "skip":
            found, said = self._readable(found)
            remarks = (*remarks, *said)
        empty = sorted(set(classes) - {folder.name for _, folder in found})
        remedy = f"no pictures in the folder of this class ({', '.join(sorted(PICTURES))}); remove it"
        require(not empty, str(top), empty[:1], remedy)
        labels = np.array([classes.index(folder.name) for _, folder in found], np.int64)
        train, test = self._parts(labels, np.array([roles.get(f.part, "") for _, f in found]))
        if roles:
            told = lines_on_classes(labels[train], labels[test], len(classes), classes, str(top))
            remarks = (*remarks, *told)
        order = np.concatenate([train, test])
        images = cache.allocate(scratch, "images", (len(found), 3, self.side, self.side))
        for target, i in enumerate(each(order.tolist(), "decoding pictures", "pictures")):
            images[target] = decoded(found[i][0], str(found[i][0]), self.side)
        origin = np.array([domains.index(f.domain) for _, f in found])[order] if domains else None
        pool = Pool(images, labels[order], len(train), len(classes), origin, tuple(domains), tuple(classes))
        return replace(pool, remarks=remarks)

    def _parts(self, labels: np.ndarray, role: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pictures that train, and those that test.

        Args:
            labels: class of each picture, int64 [n].
            role: `TRAIN` or `TEST` for each, [n], empty texts where the layout has no parts.
        """
        if (role == TEST).any():
            refuse_unused_share(self.test_share, True)
            return np.flatnonzero(role == TRAIN), np.flatnonzero(role == TEST)
        if self.test_share:
            return stratified(labels, self.test_share, key(0, "folder"))
        return np.arange(len(labels)), np.zeros(0, np.int64)

    def _not_read(self, top: Path, folders: list[ClassFolder]) -> tuple[str, ...]:
        """Return lines about files that look like pictures and are not read."""
        read = {folder.path for folder in folders}
        files: list[Path] = []
        for at, inside, names in os.walk(top):
            inside[:] = [name for name in inside if not _of_system(Path(name))]
            files += [Path(at, name) for name in names if not _of_system(Path(name))]
        files.sort()
        deep = [p for p in files if p.suffix.lower() in PICTURES and p.parent not in read and p.is_file()]
        other = [p for p in files if p.suffix.lower() in NO_PICTURES and p.is_file()]
        lines = []
        if deep:
            lie = f"{deep[0].relative_to(top)}{_and_more(deep)}"
            lines.append(f"{top}: pictures that do not lie in a folder of a class are not read: {lie}")
        if other:
            lie = f"{other[0].relative_to(top)}{_and_more(other)}"
            known = ", ".join(sorted(PICTURES))
            lines.append(f"{top}: files of other formats are not read (pictures end in {known}): {lie}")
        return tuple(lines)

    def _readable(self, found: list[Found]) -> tuple[list[Found], tuple[str, ...]]:
        """Return the pictures that can be decoded, and a line about those that cannot."""
        good, bad = [], []
        for picture, folder in each(found, "looking for broken pictures", "pictures"):
            try:
                decoded(picture, str(picture), self.side)
                good.append((picture, folder))
            except UserError:
                bad.append(picture)
        said = (f"pictures that cannot be read are left out: {bad[0]}{_and_more(bad)}",) if bad else ()
        return good, said


def _and_more(names: Sequence[object]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _of_part(path: Path, top: Path, domains: bool) -> ClassFolder:
    """Return the folder of a class below one part, above or below its domain."""
    *above, _ = path.relative_to(top).parts
    parts = [name for name in above if part_of(name)]
    require(len(parts) == 1, str(path), parts, "lies in folders of two parts: move it into one")
    domain = next(name for name in above if name not in parts) if domains else ""
    return ClassFolder(path, parts[0], domain)


def _of_system(path: Path) -> bool:
    """Return whether a file or folder is hidden, or of an archiver, an editor or a system."""
    return any(part.startswith(".") or part in SYSTEM for part in path.parts)


@contextmanager
def reading_folder(folder: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be listed into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError("data.source.path", str(folder), f"cannot be listed ({error.strerror})") from error
