"""LEAF's FEMNIST: characters by writer, in LEAF's JSON shards or in one NumPy archive of the same content."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.data.pool import Pool
from mpifl.data.sources.base import Source, broken

Part = dict[str, tuple[np.ndarray, np.ndarray]]  # writer -> images uint8 [n, 28, 28], labels [n]


@dataclass(frozen=True)
class Femnist(Source):
    """FEMNIST: 62 classes of handwritten characters, 28 x 28 grey, black on white (Caldas et al., 2018).

    Attributes:
        folder: below data.root; holds train/*.json and test/*.json as LEAF writes them, or
            femnist_leaf_writers.npz with arrays x, y, writer, is_test, users.
    """

    name: ClassVar[str] = "femnist"

    folder: str = "femnist"

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
        names = tuple(sorted(train.keys() | test.keys()))
        rows = [(i, part[name]) for part in (train, test) for i, name in enumerate(names) if name in part]
        images = np.concatenate([images for _, (images, _) in rows])[:, None]
        labels = np.concatenate([labels for _, (_, labels) in rows]).astype(np.int64)
        origin = np.repeat([i for i, _ in rows], [len(labels) for _, (_, labels) in rows])
        return Pool(images, labels, sum(len(y) for _, y in train.values()), 62, origin, names)


def read_shards(paths: list[Path]) -> Part:
    """Return the writers in LEAF shards: users, num_samples, user_data: writer -> x [n][784], y [n]."""
    found: Part = {}
    for path in paths:
        try:
            shard = json.loads(path.read_text())
            for name in shard["users"]:
                data = shard["user_data"][name]
                x = np.rint(np.asarray(data["x"], np.float64).reshape(-1, 28, 28) * 255).astype(np.uint8)
                found[name] = x, np.asarray(data["y"], np.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise broken(path, f"truncated or not a LEAF shard ({error})") from error
    return found


def read_archive(path: Path) -> tuple[Part, Part]:
    """Return the writers (train, test) in the NumPy archive."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            x, y, writer, held, users = (archive[k] for k in ("x", "y", "writer", "is_test", "users"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise broken(path, f"truncated or not the writers' archive ({error})") from error
    parts = []
    for flag in (0, 1):
        rows = [np.flatnonzero((writer == i) & (held == flag)) for i in range(len(users))]
        parts.append({str(name): (x[r], y[r]) for name, r in zip(users, rows, strict=True) if len(r)})
    return parts[0], parts[1]
