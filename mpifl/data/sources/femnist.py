"""LEAF's FEMNIST: characters by writer, in LEAF's JSON shards or in one NumPy archive of the same content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.progress import each
from mpifl.core.textfiles import json_of
from mpifl.data.pool import Pool, images_of, labels_of
from mpifl.data.sources.base import Source, Statistics, reading
from mpifl.data.sources.columns import clean_name, lines_on_names
from mpifl.data.sources.npz import read_npz

NUM_CLASSES, SHAPE = 62, (28, 28)

Part = dict[str, tuple[np.ndarray, np.ndarray]]  # writer -> images uint8 [n, 28, 28], labels [n]


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
            train = read_shards([p for p in paths if p.parent.name == "train"])
            test = read_shards([p for p in paths if p.parent.name == "test"])
        if not train or not test:
            raise UserError(str(paths[0].parent), "no clients", "in training or test; fetch it again")
        names = tuple(sorted(train.keys() | test.keys()))
        rows = [(i, part[name]) for part in (train, test) for i, name in enumerate(names) if name in part]
        images = np.concatenate([images for _, (images, _) in rows])[:, None]
        images = 255 - images if self.inverted else images
        labels = np.concatenate([labels for _, (_, labels) in rows]).astype(np.int64)
        origin = np.repeat([i for i, _ in rows], [len(labels) for _, (_, labels) in rows])
        pool = Pool(images, labels, sum(len(y) for _, y in train.values()), NUM_CLASSES, origin, names)
        return replace(pool, remarks=tuple(lines_on_names(names, str(paths[0].parent), "writers")))


def read_shards(paths: list[Path]) -> Part:
    """Return the writers in LEAF shards (users, num_samples, user_data: writer -> x [n][784], y [n])."""
    found: Part = {}
    for path in each(paths, "reading shards", "files"):
        with reading(path, "a LEAF shard"):
            shard = json_of(path.read_bytes())
            for user, count in zip(shard["users"], shard["num_samples"], strict=True):
                name = clean_name(user, f"{path}: users")
                where = f"{path}: client {name}"
                require(name not in found, where, "twice", "a client stands in one shard only; remove one")
                found[name] = _of_writer(shard["user_data"][user], where, count)
            more = sorted(shard["user_data"].keys() - set(shard["users"]))
            require(not more, str(path), more[:1], "clients that `users` does not list; fetch it again")
    return found


def _of_writer(data: Mapping[str, Any], where: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images uint8 [n, 28, 28] and labels [n] of one writer in a shard."""
    flat = np.asarray(data["x"], np.float64)
    x = images_of(flat.reshape(len(flat), *SHAPE), f"{where}: x")[:, 0]
    y = labels_of(np.asarray(data["y"] or np.zeros(0, np.int64)), f"{where}: y", NUM_CLASSES)
    right = len(x) == len(y) == count
    remedy = "images, labels and num_samples differ; fetch the file again"
    require(right, where, (len(x), len(y), count), remedy)
    return x, y


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
