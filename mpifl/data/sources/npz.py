"""NumPy archives: a user's own samples, and MedMNIST."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.lib import format as npy

from mpifl.core.errors import UserError, require
from mpifl.core.federation import FEATURES
from mpifl.core.options import NonNegativeInt, ShareBelowOne
from mpifl.data.pool import Pool
from mpifl.data.sources.arrays import AS_FEATURES, LABELS, TEST_SHARE, any_labels_of, inputs_of, pack, pool_of
from mpifl.data.sources.base import Source, broken, check_unpacked, place_of, reading, refuse_foreign

KINDS = ("x", "y", "origin")
NAMES = "class_names"
SHOWN = 12  # arrays that an error message names at most
MEDMNIST = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
        *("normal colon mucosa", "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    ),
    "breastmnist": ("malignant", "normal, benign"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte"),
        *("neutrophil", "platelet"),
    ),
}  # archive -> names of its classes, if they are short


@dataclass(frozen=True)
class Npz(Source):
    """An .npz with x_train, y_train and, if there is a test part, x_test, y_test, as in Keras' mnist.npz.

    Images are uint8, or floats in [0, 1], as [n, H, W], [n, H, W, C] or [n, C, H, W]; floats [n, F] are
    features, integers [n, T] tokens. Labels are classes from zero, [n]; bytes [n, L] are multi-hot labels,
    floats numbers, integers [n, T] tokens. The optional arrays origin_train and origin_test give the origin
    of each sample, the optional array class_names the names of the classes.

    Several inputs of a model are arrays x_NAME_train and x_NAME_test, at least two, in place of x_train and
    x_test: bytes [n, H, W], [n, H, W, C] or [n, C, H, W] are images, floats [n, ...] features, whole numbers
    [n, T] of more than a byte tokens.

    Attributes:
        path: the archive: absolute, below data.root, or in the working folder.
        inputs: images, features or tokens, if the shape does not determine it; spectrograms and series of any
            shape are `features`.
        vocabulary: number of different tokens; 0: the largest plus one.
        labels: classes or numbers, for labels of one number each whose type says otherwise, such as classes
            that are stored as floats; null: whole numbers are classes, floats numbers.
        test_share: share of every class set aside for testing if the archive has no test part.
    """

    name: ClassVar[str] = "npz"
    needs_root: ClassVar[bool] = False
    readable_labels: ClassVar[tuple[str, ...]] = LABELS

    path: str = "data.npz"
    inputs: Literal["images", "features", "tokens"] | None = None
    vocabulary: NonNegativeInt = 0
    labels: Literal["classes", "numbers"] | None = None
    test_share: ShareBelowOne = TEST_SHARE

    def files(self, root: Path) -> list[Path]:
        """Return the archive."""
        return [place_of(self.path, root)]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the archive."""
        path = self.files(root)[0]
        several = _inputs_in(path)
        kinds = (*several, *KINDS[1:]) if several else KINDS
        arrays = read_npz(path, [NAMES, *(f"{kind}_{part}" for part in ("train", "test") for kind in kinds)])
        names = tuple(map(str, arrays.pop(NAMES, np.empty(0)).tolist()))
        parts = [p for p in ("train", "test") if f"{kinds[0]}_{p}" in arrays]
        kinds = kinds if "origin_train" in arrays else kinds[:-1]
        wanted = {f"{kind}_{part}" for part in {"train", *parts} for kind in kinds}
        for name in sorted(wanted - arrays.keys()):
            raise lacks(self.path, path, name)
        for name in sorted(arrays.keys() - wanted):
            raise UserError(str(path), name, "stands alone: images, labels and origins belong together")
        if several:
            for key in ("inputs", "vocabulary"):
                remedy = "has no effect on several inputs, whose arrays say what they hold; leave it out"
                require(not getattr(self, key), f"data.source.{key}", getattr(self, key), remedy)
            given = ({kind[2:]: arrays[f"{kind}_{part}"] for kind in several} for part in parts)
            samples, inputs = pack(*given, name=f"{path}: x")
        else:
            samples = [
                inputs_of(arrays[f"x_{part}"], f"{path}: x_{part}", self.inputs, AS_FEATURES)
                for part in parts
            ]
            inputs = ()
        read: list[tuple[np.ndarray, np.ndarray]] = []
        for part, x in zip(parts, samples, strict=True):
            y = any_labels_of(arrays[f"y_{part}"], f"{path}: y_{part}", self.labels)
            sizes = (len(x), len(y), len(arrays.get(f"origin_{part}", y)))
            remedy = f"samples, labels and origins of {part} differ in number"
            require(len(set(sizes)) == 1, str(path), sizes, remedy)
            read.append((x, y))
        origin = np.concatenate([arrays[f"origin_{part}"] for part in parts]) if "origin" in kinds else None
        test, key = read[1] if len(read) == 2 else None, "" if several else f"{path}: x_train"
        share, vocabulary = self.test_share, self.vocabulary
        pool = pool_of(read[0], test, f"{path}: y_train", names, vocabulary, share, origin, (), key)
        return replace(pool, parts=inputs)


@dataclass(frozen=True)
class MedMnist(Source):
    """An archive of MedMNIST (Yang et al., 2023): pathmnist.npz, chestmnist.npz, organmnist3d.npz, ...

    Pictures of 2D sets are images, volumes of 3D sets are features [1, D, H, W] (divided by 255). Labels are
    classes; those of chestmnist are multi-hot.

    Attributes:
        path: the archive: absolute, below data.root, or in the working folder.
        validation: use of the official validation part: `train` adds it to the training part (scenarios set a
            share of each client's samples aside), `drop` leaves it out.
    """

    paper = "yang2023medmnist"
    name: ClassVar[str] = "medmnist"
    needs_root: ClassVar[bool] = False

    path: str = "pathmnist.npz"
    validation: Literal["train", "drop"] = "train"

    def files(self, root: Path) -> list[Path]:
        """Return the archive."""
        return [place_of(self.path, root)]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the archive."""
        path = self.files(root)[0]
        parts = ("train", "val", "test")
        arrays = read_npz(path, [f"{part}_{kind}" for part in parts for kind in ("images", "labels")])
        for name in (f"{part}_{kind}" for part in parts[::2] for kind in ("images", "labels")):
            if name not in arrays:
                raise lacks(self.path, path, name)
        if self.validation == "train" and "val_images" in arrays and "val_labels" in arrays:
            for kind in ("images", "labels"):
                arrays[f"train_{kind}"] = np.concatenate([arrays[f"{p}_{kind}"] for p in parts[:2]])
        train, test = (
            (self._inputs(arrays[f"{part}_images"], path), any_labels_of(arrays[f"{part}_labels"], str(path)))
            for part in parts[::2]
        )
        names = MEDMNIST.get(path.stem.split("_")[0], ())
        wide = train[1].ndim == 2 or len(names) > int(max(train[1].max(), test[1].max()))
        return pool_of(train, test, str(path), names if wide else ())

    @staticmethod
    def _inputs(array: np.ndarray, path: Path) -> np.ndarray:
        if array.ndim == 4 and array.shape[-1] not in (1, 3):  # volumes
            return inputs_of((array / 255.0).astype(np.float32)[:, None], str(path), FEATURES)
        return inputs_of(array, str(path))


def lacks(named: str, path: Path, name: str) -> UserError:
    """Return the error for an archive that lacks an array; it names the arrays that are there.

    Args:
        named: the archive as the user wrote it.
        path: where the archive was found.
        name: name of the array.
    """
    with reading(path, "an .npz"), zipfile.ZipFile(path) as archive:
        there = [entry.removesuffix(".npy") for entry in archive.namelist()]
    more = ", ..." if len(there) > SHOWN else ""
    found = f"{path} holds {', '.join(there[:SHOWN]) or 'none'}{more}"
    sparse = {"format", "shape", "data"} <= {*there}
    found += "; it is a sparse matrix of SciPy: write X.toarray()" if sparse else ""
    return UserError("data.source.path", named, f"lacks the array {name}; {found}")


def _inputs_in(path: Path) -> tuple[str, ...]:
    """Return `x_NAME` of the inputs in an archive with several, in its order; empty if it has `x_train`."""
    if path.suffix != ".npz":
        return ()  # refused where it is read
    with reading(path, "an .npz"), zipfile.ZipFile(path) as archive:
        held = [entry.filename.removesuffix(".npy") for entry in archive.infolist()]
    found = tuple(
        name.removesuffix("_train") for name in held if name.startswith("x_") and name.endswith("_train")
    )
    found = tuple(name for name in found if len(name) > 2) if "x_train" not in held else ()
    remedy = "stands alone: a model of several inputs needs two or more; name the array x_train"
    require(len(found) != 1, str(path), f"{found[0] if found else ''}_train", remedy)
    return found


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz whose names are in `wanted`.

    Python objects are refused, and nothing is unpacked before its size is checked.
    """
    arrays: dict[str, np.ndarray] = {}
    if path.suffix != ".npz":
        refuse_foreign(path, "an .npz", "numpy.savez")
    with reading(path, "an .npz"), zipfile.ZipFile(path) as archive:
        entries = {e.filename.removesuffix(".npy"): e for e in archive.infolist()}
        found = {name: entries[name] for name in wanted if name in entries}
        check_unpacked(path, sum(entry.file_size for entry in found.values()))
        for name, entry in found.items():
            with archive.open(entry) as file:  # numpy allocates what the header says, whatever follows
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
