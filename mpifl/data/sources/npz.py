"""A user's own images in one NumPy archive."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.lib import format as npy

from mpifl.core.errors import UserError, require
from mpifl.core.rng import key
from mpifl.data.pool import Pool, count_classes, images_of, labels_of, stratified
from mpifl.data.scenario import check_fraction
from mpifl.data.sources.base import Source, broken, check_unpacked, joined, reading

KINDS = ("x", "y", "origin")
NAMES = "class_names"


@dataclass(frozen=True)
class Npz(Source):
    """An .npz with x_train, y_train and, if there is a test part, x_test, y_test, as Keras' mnist.npz.

    Images are uint8, or floats in [0, 1], as [n, H, W], [n, H, W, C] or [n, C, H, W]; labels count from
    zero. Arrays origin_train and origin_test, where present, give the origin of each sample, and an array
    class_names the names of the classes.

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
        return [root / os.path.expanduser(self.path)]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the archive."""
        path = self.files(root)[0]
        arrays = read_npz(path, [NAMES, *(f"{kind}_{part}" for part in ("train", "test") for kind in KINDS)])
        names = tuple(map(str, arrays.pop(NAMES, np.empty(0)).tolist()))
        parts = [p for p in ("train", "test") if f"x_{p}" in arrays]
        kinds = KINDS if "origin_train" in arrays else KINDS[:2]
        wanted = {f"{kind}_{part}" for part in {"train", *parts} for kind in kinds}
        for name in sorted(wanted - arrays.keys()):
            raise UserError(str(path), sorted(arrays), f"lacks the array {name}")
        for name in sorted(arrays.keys() - wanted):
            raise UserError(str(path), name, "stands alone: images, labels and origins belong together")
        read = [
            (
                path,
                images_of(arrays[f"x_{part}"], f"{path}: x_{part}"),
                labels_of(arrays[f"y_{part}"], f"{path}: y_{part}"),
            )
            for part in parts
        ]
        for part, (_, images, labels) in zip(parts, read, strict=True):
            sizes = (len(images), len(labels), len(arrays.get(f"origin_{part}", labels)))
            remedy = f"images, labels and origins of {part} differ in number"
            require(len(set(sizes)) == 1, str(path), sizes, remedy)
        classes = count_classes(np.concatenate([labels for *_, labels in read]), f"{path}: y_train")
        remedy = f"{NAMES}: give a name to each of the {classes} classes"
        require(len(names) in (0, classes), str(path), len(names), remedy)
        pool = replace(joined(read[:1], read[1:], classes), class_names=names)
        if "origin" in kinds:
            pool = replace(pool, origin=np.concatenate([arrays[f"origin_{part}"] for part in parts]))
        return pool if len(parts) == 2 else with_test_part(pool, self.test_share)


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return those of the arrays called `wanted` that an .npz holds.

    Python objects are refused, and nothing is unpacked before its size is checked.
    """
    arrays: dict[str, np.ndarray] = {}
    with reading(path, "an .npz"), zipfile.ZipFile(path) as archive:
        entries = {e.filename.removesuffix(".npy"): e for e in archive.infolist()}
        found = {name: entries[name] for name in wanted if name in entries}
        check_unpacked(path, sum(entry.file_size for entry in found.values()))
        for name, entry in found.items():
            with archive.open(entry) as file:  # numpy takes room for what the header says, whatever follows
                version = npy.read_magic(file)
                header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = header(file)
                size = file.tell() + dtype.itemsize * math.prod(shape)
            require(not dtype.hasobject, f"{path}: {name}", str(dtype), "holds Python objects: give numbers")
            if size != entry.file_size:
                raise broken(path, f"truncated: {name} has {entry.file_size} bytes, its header says {size}")
            with archive.open(entry) as file:
                arrays[name] = npy.read_array(file, allow_pickle=False)
    return arrays


def with_test_part(pool: Pool, share: float) -> Pool:
    """Return a pool whose test part is a fixed stratified `share` of the samples, the same for every seed."""
    labels = pool.labels
    train, test = (
        stratified(labels, share, key(0, "test part")) if share else (np.arange(len(labels)), labels[:0])
    )
    order = np.concatenate([train, test])
    origin = None if pool.origin is None else pool.origin[order]
    return replace(pool, inputs=pool.inputs[order], labels=labels[order], num_train=len(train), origin=origin)
