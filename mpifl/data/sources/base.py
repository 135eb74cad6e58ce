"""The interface of sources, and common functions to read and check files and to normalise images."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from annotated_types import MinLen

from mpifl.core.errors import UserError, require
from mpifl.core.optional_packages import torchvision_package
from mpifl.core.options import Options, PositiveFloat
from mpifl.core.process import machine_bytes
from mpifl.core.textfiles import RepeatedKey
from mpifl.data.pool import Pool

Channels = tuple[float, ...]
Statistics = tuple[Channels, Channels]  # mean and standard deviation per channel, of pixels in [0, 1]
# a file, its images uint8 [n, C, H, W], their labels int64 [n]
Part: TypeAlias = "tuple[Path, np.ndarray, np.ndarray]"

UNPACKED, RATIO = 1 << 30, 100  # beyond UNPACKED bytes, no file may unpack to over RATIO times its size

NORMALISATIONS: dict[str, Statistics | None] = {
    "standard": None,  # of the source
    "unit": ((0.0,), (1.0,)),  # UCFL: pixels / 255 and nothing else
    "half": ((0.5,), (0.5,)),  # FLT, CIFAR-10
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # torchvision's pretrained weights
}


TRAIN, VAL, TEST = "train", "val", "test"
PARTS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
    **dict.fromkeys(("test", "testing", "eval"), TEST),
}  # name of a folder or split, in lower case -> the part that it holds
VALIDATION = ("drop", "train")  # what a source may do with a validation part beside a test part

MEASURED = "by the training part"  # `standard` where a source of images publishes no statistics


@dataclass(frozen=True)
class Source(Options, ABC):
    """Samples with labels: images, features or tokens, and any kind of label that `Pool` knows.

    `load` returns a `Pool`. The types of its arrays determine the kinds of samples and labels, and thus which
    task (`task.name`) and which models fit.

    Attributes:
        normalise: mean and deviation for normalising: standard (for images, those published with the data
            set, or those of the training part for sources of your own; for features, those of each feature
            over the training part), unit (pixels / 255; features unchanged), half (mean and deviation 0.5) or
            imagenet; null: the choice of the scenario's paper if it has one, otherwise standard.
        mean: mean of each channel, for pixels in [0, 1], or of each feature; one number stands for all. Given
            together with `std`, in place of `normalise`. Columns of categories stay as they are.
        std: standard deviation of each channel or feature, like `mean`; positive.
    """

    name: ClassVar[str]
    needs_root: ClassVar[bool] = True
    hands_on_root: ClassVar[bool] = False  # to code that may read files there that `files` does not know
    published: ClassVar[Statistics | None] = None  # None: computed from the training part
    readable_labels: ClassVar[tuple[str, ...]] = ()  # values of its key `labels`; empty: no such key

    normalise: Literal["standard", "unit", "half", "imagenet"] | None = None
    mean: Channels | None = None
    std: Annotated[tuple[PositiveFloat, ...], MinLen(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean is not None or self.std is not None:
            require(self.mean is not None, "mean", None, "std is given: give mean, too")
            require(self.std is not None, "std", None, "mean is given: give std, too")
            remedy = "mean and std are given in its place: leave it out"
            require(self.normalise is None, "normalise", self.normalise, remedy)
            assert self.mean is not None
            assert self.std is not None
            remedy = f"{len(self.std)} numbers in std: give as many"
            require(len(self.mean) == len(self.std), "mean", list(self.mean), remedy)

    @abstractmethod
    def files(self, root: Path) -> list[Path]:
        """Return the files below `root` that `load` reads."""

    @abstractmethod
    def load(self, root: Path, scratch: Path) -> Pool:
        """Decode the files. A large source may write images.npy into `scratch` and return it mapped.

        That file holds `Pool.inputs` of any kind: `prepared_cache.allocate(scratch, "images", shape, dtype)`.
        """

    def unwatched(self) -> str:
        """Return a one-line warning if changes may not invalidate the cache; empty otherwise."""
        return ""

    def download(self, root: Path) -> None:
        """Download the files into `root`.

        Raises:
            UserError: this source cannot be downloaded.
        """
        remedy = "cannot be downloaded; put its files below data.root by hand"
        raise UserError("data.source.name", self.name, remedy)


def part_of(name: str) -> str:
    """Return the part that a folder or split holds by its name in any case: train, val, test, or empty."""
    return PARTS.get(name.strip().lower(), "")


def roles_of(names: Iterable[str], validation: str, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return which parts train and which test, and lines for the user.

    A validation part is the test part where there is no other.

    Args:
        names: folders or splits whose names are those of parts.
        validation: one of `VALIDATION`, for a validation part beside a test part.
        where: the folder that holds them, for messages.

    Returns:
        (name -> `TRAIN` or `TEST`, without parts that are left out; lines about these and about a validation
        part that tests).

    Raises:
        UserError: there is no training part, or there are two of a kind.
    """
    named: dict[str, str] = {}
    for name in names:
        other = named.setdefault(part_of(name), name)
        remedy = f"is the same part as {other}: put both into one, or remove one"
        require(other == name, where, name, remedy)
    remedy = "holds no training part: name one of its folders or splits train"
    require(TRAIN in named, "data.source.path", where, remedy)
    roles = {named[part]: part for part in (TRAIN, TEST) if part in named}
    if VAL not in named:
        remedy = "has no effect: there is no validation part; leave it out"
        require(validation == VALIDATION[0], "data.source.validation", validation, remedy)
        return roles, ()
    name = named[VAL]
    if TEST not in named:
        remedy = "has no effect: the validation part is the only one that can test; leave it out"
        require(validation == VALIDATION[0], "data.source.validation", validation, remedy)
        return {**roles, name: TEST}, (f"{where}: {name} is the test part, as there is no other",)
    if validation == TRAIN:
        return {**roles, name: TRAIN}, ()
    remark = f"{where}: {name} is left out; data.source.validation: train adds it to the training part"
    return roles, (remark,)


def place_of(path: str, root: Path) -> Path:
    """Return the file or folder that a user names: absolute, below data.root, or in the working folder."""
    below, here = root / os.path.expanduser(path), Path(path)
    return here if not os.path.exists(below) and os.path.exists(here) else below


def fetch(source: Source, dataset: str, root: Path, **options: Any) -> None:
    """Download a data set with torchvision.

    Args:
        source: the source that needs it.
        dataset: name of the class in `torchvision.datasets`.
        root: folder for the files.
        **options: further arguments of that class.

    Raises:
        UserError: torchvision is not installed, or the download fails.
    """
    datasets = torchvision_package("data.root", str(root)).datasets
    try:
        getattr(datasets, dataset)(str(root), download=True, **options)
    except (OSError, RuntimeError) as error:
        remedy = f"{dataset} could not be downloaded ({error}); run this where a network is, or copy them"
        raise UserError("data.root", str(root), remedy) from error


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn any error of a reader, on a file that is not `what`, into a `UserError` that names the file."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would wait for a writer
        raise UserError(str(path), "no file", f"a folder, pipe or device in place of {what}: remove it")
    try:
        yield
    except UserError:
        raise
    except RepeatedKey as error:
        raise UserError(str(path), "unreadable", str(error)) from error
    except OSError as error:
        if error.errno is None:  # an error of the format, not of the system
            raise broken(path, f"truncated or not {what} ({in_one_line(error)})") from error
        remedy = f"{os.strerror(error.errno)}: give a file that this user can read"
        raise UserError(str(path), "unreadable", remedy) from error
    except Exception as error:
        raise broken(path, f"truncated or not {what} ({in_one_line(error)})") from error


def broken(path: Path, why: str) -> UserError:
    """Return the error for a file that is not what it should be."""
    remedy = f"{why}; put a whole file there (`mpifl prepare` fetches public ones)"
    return UserError(str(path), "unreadable", remedy)


FOREIGN = {
    ".mat": "scipy.io.loadmat",
    ".arff": "scipy.io.arff.loadarff",
    **dict.fromkeys((".svm", ".svmlight", ".libsvm"), "sklearn.datasets.load_svmlight_file"),
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), "h5py.File, or pandas.read_hdf,"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "pandas.read_excel"),
    **dict.fromkeys((".feather", ".arrow"), "pandas.read_feather"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "pandas.read_json"),
    **dict.fromkeys((".pkl", ".pickle"), "pandas.read_pickle"),
    **dict.fromkeys((".npy", ".npz"), "numpy.load"),
    **dict.fromkeys((".pt", ".pth"), "torch.load"),
    ".orc": "pandas.read_orc",
    ".dta": "pandas.read_stata",
    ".sav": "pandas.read_spss",
    **dict.fromkeys((".sas7bdat", ".xpt"), "pandas.read_sas"),
}  # ending of a file of another program -> what reads it


def refuse_foreign(path: Path, what: str, writer: str) -> None:
    """Refuse a file whose ending is that of another format, and say what converts it.

    Args:
        path: the file.
        what: what it should be.
        writer: what writes such a file.
    """
    reader = FOREIGN.get(path.suffix.lower())
    remedy = f"is a file {path.suffix}, not {what}: read it with {reader} and write it with {writer}"
    require(reader is None, "data.source.path", str(path), remedy)


def in_one_line(error: BaseException) -> str:
    """Return the type of an error and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def check_unpacked(path: Path, size: int) -> None:
    """Raise `UserError` if a file would unpack to implausibly many bytes, or to more than memory holds."""
    packed, memory = path.stat().st_size, machine_bytes()
    remedy = f"bytes it would unpack to, more than {RATIO} times its own: no file of images does; remove it"
    require(size <= max(UNPACKED, RATIO * packed), str(path), size, remedy)
    require(size <= memory, str(path), size, f"bytes it would unpack to, and this machine has {memory}")


def joined(train: Sequence[Part], test: Sequence[Part], num_classes: int) -> Pool:
    """Return the pool of several files.

    Raises:
        UserError: numbers of images and labels differ, or images differ in shape.
    """
    parts = [*train, *test]
    first, like = parts[0][0], parts[0][1].shape[1:]
    for path, images, labels in parts:
        if len(labels) != len(images):
            raise broken(path, f"{len(labels)} labels for {len(images)} images")
        remedy = f"images of another size than those in {first}, {list(like)}: use files of one data set"
        require(images.shape[1:] == like, str(path), list(images.shape[1:]), remedy)
    images, labels = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return Pool(images, labels, sum(len(part[2]) for part in train), num_classes)
