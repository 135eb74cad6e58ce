"""LEAF's JSON files, for any of its tasks: users, each with samples x and labels y."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from mpifl.core.errors import require
from mpifl.core.options import PositiveInt
from mpifl.core.progress import each
from mpifl.core.textfiles import json_of
from mpifl.data.pool import Pool, images_of, labels_of
from mpifl.data.sources import arrays, columns
from mpifl.data.sources.base import Source, Statistics, reading
from mpifl.data.sources.npz import read_npz

if TYPE_CHECKING:
    import pandas as pd

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of Shakespeare, in its order."""
PARTS = ("train", "test")  # folders of the shards
TWEET = 4  # index of the text among the fields of a tweet in Sent140


@dataclass(frozen=True)
class Leaf(Source):
    """A data set of LEAF (Caldas et al., 2018), as its scripts write it: train/*.json and test/*.json.

    The types of x and y determine how they are read. Lists of numbers are features (for FEMNIST's pixels,
    take source femnist). Texts of one length whose labels are single characters are for predicting the next
    character (Shakespeare; LEAF's alphabet if it suffices). Other texts, and the fields of tweets, are
    sequences of words (Sent140). Users are the origins, so scenario natural makes each a client.

    Attributes:
        path: folder below data.root.
        shape: shape of a sample of numbers, such as [1, 28, 28]; empty: [F], as in the files.
        length: number of words of a text; longer texts are cut, shorter ones padded with 0.
        vocabulary: largest number of tokens: 0 for padding, 1 for unknown words, and the most frequent words
            of the training part.
        labels: classes or numbers, for labels of one number each whose type says otherwise, such as classes
            that are stored as floats; null: whole numbers are classes, floats numbers.
    """

    paper = "caldas2018leaf"
    name: ClassVar[str] = "leaf"
    readable_labels: ClassVar[tuple[str, ...]] = arrays.LABELS

    path: str = "shakespeare"
    shape: tuple[PositiveInt, ...] = ()
    length: PositiveInt = 25
    vocabulary: Annotated[int, Ge(3)] = 10_000
    labels: Literal["classes", "numbers"] | None = None

    def files(self, root: Path) -> list[Path]:
        """Return the shards, training part first."""
        shards = [sorted((root / self.path / part).glob("*.json")) for part in PARTS]
        if all(shards):
            return [*shards[0], *shards[1]]
        return [root / self.path / "train" / "*.json", root / self.path / "test" / "*.json"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the shards; users are numbered by name."""
        paths = self.files(root)
        train, test = (read_users([p for p in paths if p.parent.name == part]) for part in PARTS)
        name, held = str(root / self.path), arrays.rows_of_clients(train, test, "user")
        xs, ys = (list(chain.from_iterable(column)) for column in (held.samples, held.labels))
        require(len(xs) > 0, name, 0, "no samples in any user; fetch it again")
        x, vocabulary, alphabet, said = self._inputs(xs, ys, held.count, name, held.index)
        y, names = _labels(ys, alphabet, name, self.labels, held.index)
        parts = (x[: held.count], y[: held.count]), (x[held.count :], y[held.count :])
        key = "" if self.shape else f"{name}: x"
        pool = arrays.pool_of(*parts, name, names, vocabulary, 0.0, held.origin, held.names, key)
        return replace(pool, remarks=(*pool.remarks, *said))

    def _inputs(
        self, xs: list[Any], ys: list[Any], count: int, name: str, index: pd.Index[Any]
    ) -> tuple[np.ndarray, int, str, list[str]]:
        """Return samples [n, ...], the number of tokens (0: none), the alphabet of characters, and lines."""
        import pandas as pd

        column, first = pd.Series(xs, index, dtype=object), xs[0]
        columns.refuse_gaps(column, f"{name}: x", "x", column.isna().to_numpy(bool))
        if isinstance(first, list) and first and isinstance(first[0], str):
            if all(columns.NUMBER.fullmatch(text.strip()) for text in first):
                return arrays.as_float32(columns.numbers_of_lists(column, name, "x"), f"{name}: x"), 0, "", []
            field = min(TWEET, len(first) - 1)
            column = column.map(lambda x: str(x[field]))
        elif not isinstance(first, str):
            return arrays.numbers_of_rows(column, name, "x", self.shape or (-1,)), 0, "", []
        else:
            arrays.refuse_pictures(xs, f"{name}: x")
            numbers = columns.numbers_of_texts(column, name, "x")
            if numbers is not None:
                return arrays.as_float32(numbers[:, None], f"{name}: x"), 0, "", []
            if len(set(map(len, xs))) == 1 and all(isinstance(y, str) and len(y) == 1 for y in ys):
                present = set("".join([*xs, *ys]))
                alphabet = LETTERS if present <= set(LETTERS) else "".join(sorted(present))
                return arrays.characters_of(xs, alphabet, f"{name}: x"), len(alphabet), alphabet, []
        x, tokens, lines = arrays.words_of_rows(
            column, f"{name}: x", range(count), self.vocabulary, self.length
        )
        return x, tokens, "", lines


def read_users(
    paths: Sequence[Path], read: Callable[[Any, Any, str], arrays.Held] = lambda x, y, where: (x, y)
) -> dict[str, arrays.Held]:
    """Return the users in LEAF shards, whose keys are users, num_samples and user_data (user -> x, y).

    Args:
        paths: the shards.
        read: makes samples and labels of a user's x and y, which are at a place for messages.
    """
    found: dict[str, arrays.Held] = {}
    for path in each(list(paths), "reading shards", "files"):
        with reading(path, "a LEAF shard"):
            shard = json_of(path.read_bytes())
            for name, count in zip(shard["users"], shard["num_samples"], strict=True):
                data: Mapping[str, Any] = shard["user_data"][name]
                user = columns.clean_name(name, f"{path}: users")
                where = f"{path}: user {user}"
                require(user not in found, where, "twice", "a user stands in one shard only; remove one")
                sizes = (len(data["x"]), len(data["y"]), count)
                require(len(set(sizes)) == 1, where, sizes, "x, y and num_samples differ; fetch it again")
                found[user] = read(list(data["x"]), list(data["y"]), where)
            more = sorted(shard["user_data"].keys() - set(shard["users"]))
            require(not more, str(path), more[:1], "users that `users` does not list; fetch it again")
    return found


def _labels(
    ys: list[Any], alphabet: str, name: str, kind: str | None, index: pd.Index[Any]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels and the names of classes: characters of the alphabet, none for numbers, or texts."""
    if alphabet:
        missing = sorted({str(y) for y in ys} - set(alphabet))
        remedy = "is not a single character of the alphabet of x"
        require(not missing, f"{name}: y", missing[:1], remedy)
        return arrays.characters_of(ys, alphabet, f"{name}: y")[:, 0].astype(np.int64), tuple(
            map(repr, alphabet)
        )
    import pandas as pd

    column = pd.Series(ys, index, dtype=object)
    columns.refuse_gaps(column, name, "y")
    if all(isinstance(y, str) for y in ys):
        return arrays.labels_of_texts(column, name, "y", kind)
    if kind is not None:
        given = next((y for y in ys if isinstance(y, bool) or not isinstance(y, (int, float))), None)
        remedy = f"labels: {kind} is for one number for each sample: leave it out"
        require(given is None, f"{name}: y", given, remedy)
    if all(isinstance(y, (int, float)) for y in ys):
        whole = all(isinstance(y, int) and not isinstance(y, bool) for y in ys)
        values = np.array(ys, np.int64 if whole else np.float64)
        return (
            values if whole and kind is None else arrays.any_labels_of(values, f"{name}: y", kind, column)
        ), ()
    structured = next((y for y in ys if isinstance(y, (list, dict))), None)
    require(structured is None, f"{name}: y", structured, "labels must be numbers or texts")
    return arrays.numbered([str(y).strip() for y in ys])


NUM_CLASSES, SHAPE = 62, (28, 28)

Part = dict[str, arrays.Held]  # writer -> images uint8 [n, 28, 28], labels [n]


@dataclass(frozen=True)
class Femnist(Source):
    """FEMNIST: 62 classes of handwritten characters, 28 x 28 grey, black on white (Caldas et al., 2018).

    Attributes:
        folder: folder below data.root; holds train/*.json and test/*.json as LEAF writes them, or
            femnist_leaf_writers.npz with arrays x, y, writer, is_test, users.
        inverted: whether to invert the images to white on black, as in EMNIST.
    """

    paper = "caldas2018leaf"
    name: ClassVar[str] = "femnist"
    published: ClassVar[Statistics | None] = ((0.0,), (1.0,))  # pixels / 255

    folder: str = "femnist"
    inverted: bool = False

    def files(self, root: Path) -> list[Path]:
        """Return the JSON shards if there are any, otherwise the archive."""
        shards = [sorted((root / self.folder / part).glob("*.json")) for part in PARTS]
        if all(shards):
            return [*shards[0], *shards[1]]
        return [root / self.folder / "femnist_leaf_writers.npz"]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the files; writers are numbered by name, so both forms give the same pool."""
        paths = self.files(root)
        if paths[0].suffix == ".npz":
            train, test = read_archive(paths[0])
        else:
            named = ([p for p in paths if p.parent.name == part] for part in PARTS)
            train, test = (read_users(shards, _of_writer) for shards in named)
        remedy = "in training or test; fetch it again"
        require(bool(train and test), str(paths[0].parent), "no clients", remedy)
        held = arrays.rows_of_clients(train, test)
        images, labels = np.concatenate(held.samples)[:, None], np.concatenate(held.labels).astype(np.int64)
        images = 255 - images if self.inverted else images
        told = tuple(columns.lines_on_names(held.names, str(paths[0].parent), "writers"))
        return Pool(images, labels, held.count, NUM_CLASSES, held.origin, held.names, remarks=told)


def _of_writer(x: list[Any], y: list[Any], where: str) -> arrays.Held:
    """Return the images uint8 [n, 28, 28] and labels [n] of one writer in a shard."""
    images = images_of(np.asarray(x, np.float64).reshape(len(x), *SHAPE), f"{where}: x")[:, 0]
    return images, labels_of(np.asarray(y or np.zeros(0, np.int64)), f"{where}: y", NUM_CLASSES)


def read_archive(path: Path) -> tuple[Part, Part]:
    """Return the writers (train, test) in the NumPy archive."""
    names = ("x", "y", "writer", "is_test", "users")
    found = read_npz(path, names)
    with reading(path, "the writers' archive"):
        x, y, writer, held, users = (found[name] for name in names)
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
