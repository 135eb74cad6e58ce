"""A user's own `torch.utils.data.Dataset`, named by import path."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import InputPart
from mpifl.core.imports import imported_from, load_object, root_of
from mpifl.core.options import ShareBelowOne
from mpifl.data.pool import Pool, void_of
from mpifl.data.sources.arrays import AS_FEATURES, TEST_SHARE, any_labels_of, inputs_of, pack, pool_of
from mpifl.data.sources.base import Source, in_one_line
from mpifl.data.sources.pictures import GREY, check_bits

LOOKS = 16  # items that are read again to see whether their transforms draw


@dataclass(frozen=True)
class Dataset(Source):
    """A map-style data set of (sample, label), all samples of one shape.

    PIL images, bytes, and floats in [0, 1] of an image's shape are images; floats [F] are features, integers
    [T] tokens. A sample of several inputs is a mapping from their names: uint8 images, floats of any shape
    (features), whole numbers [T] (tokens). A label is a whole number (its class), a number or an array of
    them, or a mask: a picture, or whole numbers [H, W], with a class for each pixel.

    The class is called with those of the arguments `root` and `train` that it accepts. If it does not accept
    `train`, a stratified share is set aside as the test part.

    Items are read once, when the data are prepared: transforms that draw, such as random flips, draw once,
    and a line says so.

    Attributes:
        path: "package.module:Name" or "file.py:Name", where Name is the class or a function that returns a
            data set.
        reads: files and folders that the data set reads, absolute or below data.root. It is prepared again
            when one of them changes. Changes to the file that defines it, and to what that file imports from
            its folder, are noticed in any case.
        inputs: images, features or tokens, if the shape does not determine it.
        vocabulary: number of different tokens; 0: the largest plus one.
        test_share: share of every class set aside for testing if Name does not accept `train`.
    """

    name: ClassVar[str] = "dataset"
    needs_root: ClassVar[bool] = False
    hands_on_root: ClassVar[bool] = True

    path: str = ""
    reads: tuple[str, ...] = ()
    inputs: Literal["images", "features", "tokens"] | None = None
    vocabulary: int = 0
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        where, _, what = self.path.rpartition(":")
        remedy = 'name a class: "package.module:Name" or "file.py:Name"'
        require(bool(where and what), "path", self.path, remedy)

    def files(self, root: Path) -> list[Path]:
        """Return the file that defines the data set, its imports, and the files in `reads`."""
        where = self.path.rpartition(":")[0]
        places = [root / os.path.expanduser(name) for name in self.reads]
        inside = [sorted(p for p in place.rglob("*") if p.is_file()) or [place] for place in places]
        return [*self._definition(where), *(path for paths in inside for path in paths)]

    def _definition(self, where: str) -> list[Path]:
        """Return the file that defines the data set, and what it imports from its own folder."""
        if where.endswith(".py"):
            file, module = Path(os.path.expanduser(where)), ""
        else:
            try:
                spec = importlib.util.find_spec(where)
            except (ImportError, ValueError):
                spec = None
            if spec is None:
                raise UserError("data.source.path", self.path, f"there is no module {where} to import")
            file, module = Path(spec.origin or ""), where
        if not file.is_file():  # a missing file is refused by name; built-in modules have none
            return [] if module else [file]
        return [root_of(file, module) / name for name in imported_from(file, module)] or [file]

    def unwatched(self) -> str:
        """Return a hint to name the files that are read, unless `reads` names them."""
        if self.reads:
            return ""
        return f"{self.path} was prepared before; name the files that it reads in data.source.reads"

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read every item."""
        factory = load_object(self.path, "data.source.path")
        require(callable(factory), "data.source.path", self.path, "name a class or a function")
        try:
            takes: Mapping[str, Any] = inspect.signature(factory).parameters
        except (TypeError, ValueError):  # a built-in class without a signature
            takes = {}
        halves = (True, False) if "train" in takes else (True,)
        made = [self._made(factory, takes, str(root), train) for train in halves]
        read = [self._read(items, part) for items, part in zip(made, ("training", "test"), strict=False)]
        inputs: tuple[InputPart, ...] = ()
        if isinstance(read[0][0], dict):
            for option in ("inputs", "vocabulary"):
                remedy = "has no effect on several inputs, whose types say what they hold; leave it out"
                require(not getattr(self, option), f"data.source.{option}", getattr(self, option), remedy)
            packed, inputs = pack(*(x for x, _ in read), name="data.source.path")
            parts = [(x, y) for x, (_, y) in zip(packed, read, strict=True)]
        else:
            parts = read
        names = next(filter(None, map(_names, made)), ())
        classes = parts[0][1].ndim in (1, 3)  # of samples, or of pixels
        largest = int(max(np.max(y, where=_counts(y), initial=0) for _, y in parts)) if classes else 0
        fits = len(names) > largest if classes else len(names) == parts[0][1].shape[1]
        test, key = parts[1] if len(parts) == 2 else None, "data.source.path"
        pool = pool_of(parts[0], test, key, names if fits else (), self.vocabulary, self.test_share)
        drawn = self._drawn(made)  # after all have been read: a second look may draw, too
        return replace(pool, remarks=(*pool.remarks, *drawn), parts=inputs)

    def _drawn(self, made: Sequence[Any]) -> tuple[str, ...]:
        """Return a line about data sets whose items differ when they are read again."""
        for items in made:
            for i in range(min(len(items), LOOKS)):
                one, two = (_arrays(items[i][0]) for _ in range(2))
                if not all(map(np.array_equal, one, two)):
                    remedy = "its transforms draw once, at preparation, and every epoch sees the same samples"
                    return (f"data.source.path = {self.path!r}: items differ when read again; {remedy}",)
        return ()

    def _made(self, factory: Callable[..., Any], takes: Any, root: str, train: bool) -> Any:
        given = {name: value for name, value in (("root", root), ("train", train)) if name in takes}
        try:
            return factory(**given)
        except Exception as error:
            remedy = f"cannot be made from {', '.join(given) or 'nothing'} ({in_one_line(error)})"
            raise UserError("data.source.path", self.path, remedy) from error

    def _read(self, items: Any, part: str) -> tuple[Any, np.ndarray]:
        """Return the samples and labels of all items of a part; several inputs are arrays by name."""
        try:
            count = len(items)
            require(count > 0, "data.source.path", self.path, f"has no items in its {part} part; give some")
            pairs = [items[i] for i in range(count)]
            if isinstance(pairs[0][0], Mapping):
                names = [*pairs[0][0]]
                several = {name: np.stack([np.asarray(x[name]) for x, _ in pairs]) for name in names}
                return several, any_labels_of(np.array([label_of(y) for _, y in pairs]), "data.source.path")
            colour = any(mode_of(image) not in ("", *GREY) for image, _ in pairs)
            images = np.stack([pixels_of(image, colour) for image, _ in pairs])
            labels = np.array([label_of(label) for _, label in pairs])
        except UserError:
            raise
        except Exception as error:
            remedy = f"every item must be (sample, label), all samples of one shape ({in_one_line(error)})"
            raise UserError("data.source.path", self.path, remedy) from error
        key = "data.source.path"
        return inputs_of(images, key, self.inputs, AS_FEATURES), any_labels_of(labels, key)


def _counts(labels: np.ndarray) -> np.ndarray | bool:
    """Return which labels count: those of masks may be ignored."""
    return labels != void_of(labels.dtype) if labels.ndim == 3 else True


def _arrays(sample: Any) -> list[np.ndarray]:
    """Return the inputs of a sample as arrays."""
    if isinstance(sample, Mapping):
        return [np.asarray(value) for value in sample.values()]
    return [pixels_of(sample)]


def _names(items: Any) -> tuple[str, ...]:
    """Return the names of the classes: the attribute `classes` of torchvision's data sets."""
    found = getattr(items, "classes", None)
    return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()


def label_of(label: Any) -> Any:
    """Return a label as a whole number, a number, or an array of them."""
    if isinstance(label, (float, np.floating)):
        return float(label)
    array = np.asarray(label)
    return index(label) if array.ndim == 0 and array.dtype.kind not in "fb" else array


def pixels_of(image: Any, colour: bool = False) -> np.ndarray:
    """Return a picture as an array.

    Args:
        image: a picture of PIL, or anything else that NumPy converts.
        colour: whether a grey picture gets three channels, as others of its data set have them.
    """
    mode = mode_of(image)
    if not mode:
        return np.asarray(image)
    check_bits(image, "data.source.path")
    return np.asarray(image.convert("L" if mode in GREY and not colour else "RGB"))


def mode_of(image: Any) -> str:
    """Return the mode of a picture of PIL, such as RGB; empty for anything else."""
    mode = getattr(image, "mode", "")  # PIL may not be installed; a tensor has a method of that name
    return mode if isinstance(mode, str) else ""
