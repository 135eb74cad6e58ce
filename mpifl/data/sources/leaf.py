"""LEAF's JSON files, for any of its tasks: users, each with samples x and labels y."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from mpifl.core.errors import UserError, require
from mpifl.core.options import PositiveInt
from mpifl.core.progress import each
from mpifl.core.textfiles import json_of
from mpifl.data.pool import Pool
from mpifl.data.sources.arrays import (
    LABELS,
    any_labels_of,
    as_float32,
    characters_of,
    inputs_of,
    labels_of_texts,
    numbered,
    pool_of,
    refuse_not_finite,
    refuse_pictures,
    tokens_of,
    vocabulary_of,
)
from mpifl.data.sources.base import Source, reading
from mpifl.data.sources.columns import (
    NUMBER,
    clean_name,
    index_of,
    lines_on_texts,
    numbers_of_lists,
    numbers_of_texts,
    refuse_gaps,
)

if TYPE_CHECKING:
    import pandas as pd

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of Shakespeare, in its order."""
PARTS = ("train", "test")  # folders of the shards
TWEET = 4  # index of the text among the fields of a tweet in Sent140
Held = dict[str, tuple[list[Any], list[Any]]]  # user -> samples, labels


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

    name: ClassVar[str] = "leaf"
    readable_labels: ClassVar[tuple[str, ...]] = LABELS

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
        name = str(root / self.path)
        users = sorted(train.keys() | test.keys())
        rows = [(i, held[user]) for held in (train, test) for i, user in enumerate(users) if user in held]
        xs, ys = ([value for _, held in rows for value in held[column]] for column in (0, 1))
        require(len(xs) > 0, name, 0, "no samples in any user; fetch it again")
        count = sum(len(x) for x, _ in train.values())
        parts = zip(PARTS, (train, test), strict=True)
        owned = [(part, user, held[user]) for part, held in parts for user in users if user in held]
        index = index_of([(f"user {user} in {part}", len(held[1])) for part, user, held in owned])
        x, vocabulary, alphabet, said = self._inputs(xs, ys, count, name, index)
        y, names = _labels(ys, alphabet, name, self.labels, index)
        origin = np.repeat([i for i, _ in rows], [len(held[1]) for _, held in rows])
        halves = (x[:count], y[:count]), (x[count:], y[count:])
        origin, key = origin.astype(np.int64), "" if self.shape else f"{name}: x"
        pool = pool_of(*halves, name, names, vocabulary, 0.0, origin, tuple(users), key)
        return replace(pool, remarks=(*pool.remarks, *said))

    def _inputs(
        self, xs: list[Any], ys: list[Any], count: int, name: str, index: pd.Index[Any]
    ) -> tuple[np.ndarray, int, str, list[str]]:
        """Return samples [n, ...], the number of tokens (0: none), the alphabet of characters, and lines."""
        import pandas as pd

        column = pd.Series(xs, index, dtype=object)
        refuse_gaps(column, f"{name}: x", "x", column.isna().to_numpy(bool))
        first = xs[0]
        if isinstance(first, str):
            refuse_pictures(xs, f"{name}: x")
            numbers = numbers_of_texts(column, name, "x")
            if numbers is not None:
                return as_float32(numbers[:, None], f"{name}: x"), 0, "", []
            if len(set(map(len, xs))) == 1 and all(isinstance(y, str) and len(y) == 1 for y in ys):
                present = set("".join([*xs, *ys]))
                alphabet = LETTERS if present <= set(LETTERS) else "".join(sorted(present))
                return characters_of(xs, alphabet, f"{name}: x"), len(alphabet), alphabet, []
            return self._words(column, count, name)
        if isinstance(first, list) and first and isinstance(first[0], str):
            if all(NUMBER.fullmatch(text.strip()) for text in first):
                return as_float32(numbers_of_lists(column, name, "x"), f"{name}: x"), 0, "", []
            field = min(TWEET, len(first) - 1)
            return self._words(column.map(lambda x: str(x[field])), count, name)
        try:
            numbers = np.asarray(xs, np.float64)
        except (ValueError, TypeError) as error:
            remedy = "samples must be texts, or lists of numbers of one length"
            raise UserError(f"{name}: x", first, remedy) from error
        numbers = numbers.reshape(len(numbers), *(self.shape or (-1,)))
        refuse_gaps(column, name, "x", np.isnan(numbers).reshape(len(numbers), -1).any(1))
        refuse_not_finite(numbers, f"{name}: x", column)
        return inputs_of(numbers, f"{name}: x", "features"), 0, "", []

    def _words(self, column: pd.Series, count: int, name: str) -> tuple[np.ndarray, int, str, list[str]]:
        texts = column.tolist()
        known, lines = vocabulary_of(texts[:count], self.vocabulary), lines_on_texts(column, f"{name}: x")
        return tokens_of(texts, known, self.length), len(known) + 2, "", lines


def read_users(paths: Sequence[Path]) -> Held:
    """Return the users in LEAF shards, whose keys are users, num_samples and user_data (user -> x, y)."""
    found: Held = {}
    for path in each(list(paths), "reading shards", "files"):
        with reading(path, "a LEAF shard"):
            shard = json_of(path.read_bytes())
            for name, count in zip(shard["users"], shard["num_samples"], strict=True):
                data: Mapping[str, Any] = shard["user_data"][name]
                user = clean_name(name, f"{path}: users")
                where = f"{path}: user {user}"
                require(user not in found, where, "twice", "a user stands in one shard only; remove one")
                sizes = (len(data["x"]), len(data["y"]), count)
                require(len(set(sizes)) == 1, where, sizes, "x, y and num_samples differ; fetch it again")
                found[user] = list(data["x"]), list(data["y"])
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
        number = {character: i for i, character in enumerate(alphabet)}
        return np.array([number[y] for y in ys], np.int64), tuple(map(repr, alphabet))
    import pandas as pd

    column = pd.Series(ys, index, dtype=object)
    refuse_gaps(column, name, "y")
    if all(isinstance(y, str) for y in ys):
        return labels_of_texts(column, name, "y", kind)
    if kind is not None:
        given = next((y for y in ys if isinstance(y, bool) or not isinstance(y, (int, float))), None)
        remedy = f"labels: {kind} is for one number for each sample: leave it out"
        require(given is None, f"{name}: y", given, remedy)
        return any_labels_of(np.array(ys), f"{name}: y", kind, column), ()
    if all(isinstance(y, int) and not isinstance(y, bool) for y in ys):
        return np.array(ys, np.int64), ()
    if all(isinstance(y, (int, float)) for y in ys):
        return any_labels_of(np.array(ys, np.float64), f"{name}: y", None, column), ()
    if any(isinstance(y, (list, dict)) for y in ys):
        raise UserError(f"{name}: y", ys[0], "labels must be numbers or texts")
    return numbered([str(y).strip() for y in ys])
