"""LEAF's FEMNIST: characters by writer, in LEAF's JSON shards or in one NumPy archive of the same content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import require
from mpifl.data.pool import Pool, images_of, labels_of
from mpifl.data.sources.arrays import Held, rows_of_clients
from mpifl.data.sources.base import Source, Statistics, reading
from mpifl.data.sources.columns import lines_on_names
from mpifl.data.sources.leaf import read_users
from mpifl.data.sources.npz import read_npz

NUM_CLASSES, SHAPE = 62, (28, 28)

Part = dict[str, Held]  # writer -> images uint8 [n, 28, 28], labels [n]


@dataclass(frozen=True)
class Femnist(Source):
    """FEMNIST: 62 classes of handwritten characters, 28 x 28 grey, black on white (Caldas et al., 2018).

    Attributes:
        folder: folder below data.root; holds train/*.json and test/*.json as LEAF writes them, or
            femnist_leaf_writers.npz with arrays x, y, writer, is_test, users.
        inverted: whether to invert the images to white on black, as in EMNIST.
    """

    name: ClassVar[str] = "femnist"
    published: ClassVar[Statistics | None] = ((0.0,), (1.0,))  # pixels / 255

    folder: str = "femnist"
    inverted: bool = False

    def files(self, root: Path) -> list[Path]:
        """Return the JSON shards if there are any, otherwise the archive."""
        shards = [sorted((root / self.folder / part).glob("*.json")) for part in ("train", "test")]
        if all(shards):
            return [*shards[0], *shards[1]]
        return [root / self.folder / "femnist_leaf_writers.npz"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the files; writers are numbered by name, so both forms give the same pool."""
        paths = self.files(root)
        if paths[0].suffix == ".npz":
            train, test = read_archive(paths[0])
        else:
            train = read_users([p for p in paths if p.parent.name == "train"], _of_writer)
            test = read_users([p for p in paths if p.parent.name == "test"], _of_writer)
        remedy = "in training or test; fetch it again"
        require(bool(train and test), str(paths[0].parent), "no clients", remedy)
        held = rows_of_clients(train, test)
        images, labels = np.concatenate(held.samples)[:, None], np.concatenate(held.labels).astype(np.int64)
        images = 255 - images if self.inverted else images
        told = tuple(lines_on_names(held.names, str(paths[0].parent), "writers"))
        return Pool(images, labels, held.count, NUM_CLASSES, held.origin, held.names, remarks=told)


def _of_writer(x: list[Any], y: list[Any], where: str) -> Held:
    """Return the images uint8 [n, 28, 28] and labels [n] of one writer in a shard."""
    images = images_of(np.asarray(x, np.float64).reshape(len(x), *SHAPE), f"{where}: x")[:, 0]
    return images, labels_of(np.asarray(y or np.zeros(0, np.int64)), f"{where}: y", NUM_CLASSES)


def read_archive(path: Path) -> tuple[Part, Part]:
    """Return the writers (train, test) in the NumPy archive."""
    names = ("x", "y", "writer", "is_test", "users")
    arrays = read_npz(path, names)
    with reading(path, "the writers' archive"):
        x, y, writer, held, users = (arrays[name] for name in names)
        good = x.dtype == np.uint8 and x.shape[1:] == SHAPE
        require(good, f"{path}: x", f"{x.dtype} {x.shape}", "images must be uint8 [n, 28, 28]")
        y = labels_of(y, f"{path}: y", NUM_CLASSES)
        writer = labels_of(writer, f"{path}: writer", len(users))
        held = labels_of(held, f"{path}: is_test", 2)
        sizes = (len(x), len(y), len(writer), len(held))
        require(len(set(sizes)) == 1, str(path), sizes, "x, y, writer and is_test differ in number")
        require(len(set(users.tolist())) == len(users), f"{path}: users", len(users), "names occur twice")
    parts = []
    for flag in (0, 1):
        rows = [np.flatnonzero((writer == i) & (held == flag)) for i in range(len(users))]
        parts.append({str(name): (x[r], y[r]) for name, r in zip(users, rows, strict=True) if len(r)})
    return parts[0], parts[1]
