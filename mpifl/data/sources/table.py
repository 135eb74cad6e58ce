"""Tables in CSV and Parquet: columns of numbers and categories, a target, and the client of each row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from annotated_types import MaxLen, MinLen

from mpifl.core.errors import require
from mpifl.core.optional_packages import optional
from mpifl.core.options import ShareBelowOne
from mpifl.data.pool import Pool
from mpifl.data.sources import columns
from mpifl.data.sources.arrays import (
    TEST_SHARE,
    as_float32,
    groups_of,
    numbered,
    pool_of,
    refuse_not_finite,
    with_test,
)
from mpifl.data.sources.base import FOREIGN, TEST, TRAIN, Source, part_of, place_of, reading, refuse_foreign

if TYPE_CHECKING:
    import pandas as pd

LABELS = ("classes", "numbers", "multi_hot")
NAMES = ("numbers", "string", "boolean", "categorical", "mixed-integer", "integer")
"""Kinds of columns, as pandas calls them: numbers, and what is numbered by name."""
MARK = "set decimal: '{}'"  # advice on numbers with another decimal mark
ARFF = re.compile(r"\s*(@relation\b|%)", re.IGNORECASE)
SVMLIGHT = re.compile(r"\S+(\s+\d+:\S+)+")
FEW_ROWS = 10  # with fewer rows per class, whole numbers are probably no classes


@dataclass(frozen=True)
class Table(Source):
    """A table with a row for each sample: a .csv or .parquet file, or a folder of them, read in order.

    Columns of numbers are features, also where they are written as texts; columns of other texts or booleans
    are categories, numbered in alphabetical order. Blanks at the ends of texts and of names do not count. A
    column of texts most of which are numbers is refused, and so are values of other types, such as decimals,
    times and lists.

    Attributes:
        path: file or folder: absolute, below data.root, or in the working folder.
        test_path: file or folder of the test part, with the same columns; null: the test part is given by
            `part`, or `test_share` is set aside.
        target: column to predict; several columns are several targets, or the labels if labels is multi_hot.
        labels: classes, numbers or multi_hot; null: classes if there is one target column and it does not
            hold floats, otherwise numbers.
        features: columns of a sample; empty: all columns that have no other role.
        categories: columns of a sample that are categories whatever they hold: numbers, dates, marks such as
            `?`.
        client: column with the owner of each row; scenario natural makes each owner a client.
        group: column with the hidden group of the client; it is the ground truth of scenario natural.
        part: column with the values train and test.
        missing: what happens to a row that lacks a value (empty, `?`, `NA`, `-`, `null`, `none`, ...) in a
            column that is used: refuse names it; drop leaves the row out; mean takes the mean of the training
            part, or its most frequent category, for samples alone.
        decimal: the decimal mark of numbers in a .csv and in texts, `.` or `,`.
        separator: what separates the fields of a .csv.
        standardise_target: whether numbers to predict are standardised by the training part.
        test_share: share of each class, or of each range of the target, set aside for testing if there is no
            test part.
    """

    name: ClassVar[str] = "table"
    needs_root: ClassVar[bool] = False
    readable_labels: ClassVar[tuple[str, ...]] = LABELS

    path: str = "data.csv"
    test_path: str | None = None
    target: Annotated[tuple[str, ...], MinLen(1)] = ("target",)
    labels: Literal["classes", "numbers", "multi_hot"] | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    client: str | None = None
    group: str | None = None
    part: str | None = None
    missing: Literal["refuse", "drop", "mean"] = "refuse"
    decimal: Literal[".", ","] = "."
    separator: Annotated[str, MinLen(1), MaxLen(1)] = ","
    standardise_target: bool = True
    test_share: ShareBelowOne = TEST_SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "multi_hot or numbers: several targets do not make one class"
        require(len(self.target) == 1 or self.labels != "classes", "labels", self.labels, remedy)
        both = self.part is None or self.test_path is None
        require(both, "part", self.part, "test_path names the test part: leave one of them out")
        require(self.group is None or self.client is not None, "group", self.group, "needs client, too")

    def files(self, root: Path) -> list[Path]:
        """Return the files: training part, then test part."""
        paths = [self.path, *([] if self.test_path is None else [self.test_path])]
        return [file for path in paths for file in _inside(place_of(path, root))]

    def load(self, root: Path, scratch: Path) -> Pool:
        """Read the columns and number categories and classes over both parts."""
        import pandas as pd  # heavy: only when a table is read

        parts = [self.path] if self.test_path is None else [self.path, self.test_path]
        train, *test = self._read(*(_inside(place_of(path, root)) for path in parts))
        count: int | None = None
        if test:
            count, frame = len(train), _joined([train, *test])
        elif self.part is not None:
            column = self._column(train, self.part, "part")
            roles = column.map(lambda value: part_of(str(value)))
            wrong = columns.first_of(column, ~roles.isin((TRAIN, TEST)).to_numpy())
            remedy = f"{wrong}: its values must be train and test"
            require(not wrong, "data.source.part", self.part, remedy)
            first = roles == TRAIN
            remedy = "names no row of the test part: leave it out, and test_share sets one aside"
            require(not first.all(), "data.source.part", self.part, remedy)
            frame = pd.concat([train[first], train[~first]])
            count = int(first.sum())
        else:
            frame = train
        return self._pool(frame, count)

    def _pool(self, frame: pd.DataFrame, count: int | None) -> Pool:
        """Return the pool; the first `count` rows are the training part, None where a share is set aside."""
        good = len(frame) > 0 and count != 0
        require(good, "data.source.path", self.path, "has no training row: give some")
        names = self._names(frame)
        told: list[str] = []
        if self.missing == "drop":
            frame, count, told = self._complete(frame, names, count)
        y, classes = self._labels(frame)
        if count is None:
            order, size = with_test(y, self.test_share)
            train_rows = order[:size]
        else:
            train_rows = np.arange(count)
        x, kinds = np.empty((len(frame), len(names)), np.float32), []  # column by column: no copy in float64
        for j, name in enumerate(names):
            x[:, j], values, filled = self._feature(frame, name, train_rows)
            kinds.append(len(values))
            key = f"data.source.features = {name}"
            told += columns.lines_on_column(name, x[:, j], len(values), y, len(classes))
            told += columns.lines_on_names(values, key, "categories")
            new = len(values) - len(np.unique(x[:count, j])) if values and count is not None else 0
            told += [f"{key}: {new} of {len(values)} categories have no training row"] if new else []
            told += [f"{key}: {filled} missing values are filled in"] if filled else []
        origin: np.ndarray | None = None
        clients: tuple[str, ...] = ()
        if self.client is not None:
            origin, clients = self._numbered(frame, self.client, "client")
        train, test = (x[:count], y[:count]), None if count is None else (x[count:], y[count:])
        share, key = self.test_share, f"data.source.target = {', '.join(self.target)}"
        pool = replace(pool_of(train, test, key, classes, 0, share, origin), origin_names=clients)
        told += columns.lines_on_names(clients, f"data.source.client = {self.client}", "clients")
        if self.group is not None and origin is not None:
            groups, names_of_groups = self._groups(frame, self.group, origin, clients)
            pool = replace(pool, origin_groups=groups)
            told += columns.lines_on_names(names_of_groups, f"data.source.group = {self.group}", "groups")
        if y.dtype.kind == "f" and self.standardise_target:
            part = pool.labels[: pool.num_train].astype(np.float64)  # sums in float32 lose digits
            std = part.std(0)
            scaled = (pool.labels - part.mean(0)) / np.where(std > 0, std, 1.0)
            pool = replace(pool, labels=scaled.astype(np.float32))
        told += columns.lines_on_names(list(map(str, frame.columns)), "data.source.path", "columns")
        told += [line for line in pool.remarks if line not in told]
        remarks = (*(self._guessed(frame, len(classes)) if y.ndim == 1 else ()), *told)
        return replace(pool, categories=tuple(kinds) if any(kinds) else (), remarks=remarks)

    def _names(self, frame: pd.DataFrame) -> list[str]:
        """Return the columns of the samples."""
        roles = {*self.target, self.client, self.group, self.part}
        names = list(self.features) or [c for c in frame.columns if c not in roles]
        require(len(names) > 0, "data.source.features", [], "no column is left for the samples: name some")
        none = f"is no column of the samples, which are {', '.join(map(str, names[:20]))}: leave it out"
        unnamed = "a column without a name, such as the row numbers that pandas writes unless index=False"
        without = [name for name in names if columns.INDEX.fullmatch(str(name)) and not self.features]
        for key, wrong, remedy in (
            ("features", without, f"{unnamed}: name features"),
            ("features", [n for i, n in enumerate(names) if n in names[:i]], "is there twice: name it once"),
            ("features", [n for n in names if n in self.target], "is the target: leave it out of features"),
            ("categories", [n for n in self.categories if n not in names], none),
        ):
            require(not wrong, f"data.source.{key}", wrong[0] if wrong else None, remedy)
        return names

    def _guessed(self, frame: pd.DataFrame, classes: int) -> tuple[str, ...]:
        """Return a line for the user if whole numbers or names of rows were taken for classes."""
        numbers = frame[self.target[0]].dtype.kind in "iu"
        few = classes * FEW_ROWS if numbers else 2 * classes
        if self.labels is not None or few <= len(frame):
            return ()
        what = "whole numbers" if numbers else "texts"
        say = f"{classes} different {what} in {len(frame)} rows are taken for classes"
        if not numbers:
            return (f"data.source.target = {self.target[0]}: {say}; labels: classes leaves out this line",)
        remedy = "labels: numbers predicts their values, labels: classes leaves out this line"
        return (f"data.source.target = {self.target[0]}: {say}; {remedy}",)

    def _complete(
        self, frame: pd.DataFrame, names: list[str], count: int | None
    ) -> tuple[pd.DataFrame, int | None, list[str]]:
        """Return the rows that lack no value, how many of them are training rows, and lines for the user."""
        lacks = np.zeros(len(frame), bool)
        used = [*names, *self.target, self.client, self.group, self.part]
        for name in dict.fromkeys(name for name in used if name is not None):
            column = self._there(frame, name, "features")
            lacks |= column.isna().to_numpy(bool) if name in self.categories else columns.missing_in(column)
        good = bool((~lacks[:count]).any())
        require(good, "data.source.missing", "drop", "every training row lacks a value: use mean")
        says = f"data.source.missing: {int(lacks.sum())} of {len(frame)} rows lack a value and are left out"
        left = None if count is None else int((~lacks[:count]).sum())
        return frame[~lacks], left, [says] if lacks.any() else []

    def _feature(
        self, frame: pd.DataFrame, name: str, train: np.ndarray
    ) -> tuple[np.ndarray, tuple[str, ...], int]:
        """Return a column as numbers [n], its categories, if any, and how many values are filled in."""
        column, coded = self._there(frame, name, "features"), name in self.categories
        key = "data.source.features"
        other = (MARK, "name it in categories")
        values = None if coded else columns.numbers_in(column, key, name, self.decimal, other)
        gaps = column.isna().to_numpy(bool) if coded else columns.missing_in(column)
        fill = self.missing == "mean" and bool(gaps.any())
        known = train[~gaps[train]]
        if fill:
            require(len(known) > 0, key, name, "lacks every value in the training part: leave it out")
        else:
            self._refuse_gaps(column, gaps, name, "features")
        if values is not None:
            infinite = columns.first_of(column, np.isinf(values))
            require(not infinite, key, name, f"{infinite}, which is not finite: leave the row out")
            values[gaps] = values[known].mean() if fill else np.nan
            return as_float32(values, key, name), (), int(gaps.sum())
        column = columns.stripped(column)
        if fill:
            column = column.where(~gaps, column.iloc[known].mode().iloc[0])
        _check_names(column, name, "features")
        number, names = numbered(column.tolist())
        return number, names, int(gaps.sum())

    def _labels(self, frame: pd.DataFrame) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return labels, and the names of classes or of targets."""
        held = [self._target(frame, name) for name in self.target]
        real = all(column.dtype.kind in "iufb" for column in held)
        kind = self.labels or ("classes" if held[0].dtype.kind != "f" and len(held) == 1 else "numbers")
        for name, column in zip(self.target, held, strict=True):
            _check_names(column, name, "target")
        if kind == "classes":
            only = held[0]
            whole = only.dtype.kind == "f" and bool((only % 1 == 0).all())
            return numbered((only.astype(np.int64) if whole else only).tolist())
        texts = f"holds texts: use labels: classes, or leave {', '.join(self.target)} out"
        require(real, "data.source.target", ", ".join(self.target), texts)
        y = np.stack([column.to_numpy(np.float64) for column in held], axis=1)
        if kind == "numbers":
            for values, name in zip(y.T, self.target, strict=True):
                refuse_not_finite(values, f"data.source.target = {name}", frame[name])
            numbers = [as_float32(v, "data.source.target", n) for v, n in zip(y.T, self.target, strict=True)]
            return np.stack(numbers, axis=1), self.target
        good = bool(np.isin(y, (0, 1)).all()) and len(self.target) > 1
        require(good, "data.source.labels", kind, "needs two columns or more that hold 0 and 1 alone")
        return y.astype(np.uint8), self.target

    def _numbered(self, frame: pd.DataFrame, name: str, role: str) -> tuple[np.ndarray, tuple[str, ...]]:
        return numbered(self._column(frame, name, role).tolist())

    def _groups(
        self, frame: pd.DataFrame, name: str, origin: np.ndarray, clients: Sequence[str]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the group of each client, and the names of the groups."""
        group, names = self._numbered(frame, name, "group")
        return groups_of(group, origin, clients, name), names

    def _target(self, frame: pd.DataFrame, name: str) -> pd.Series:
        """Return a column to predict; numbers that are written as texts are numbers."""
        column = self._column(frame, name, "target")
        if self.labels == "classes" or column.dtype.kind in "biufcmM":
            return column
        other = (MARK, "set labels: classes")
        numbers = columns.numbers_in(column, "data.source.target", name, self.decimal, other)
        return column if numbers is None else column.astype(object).where(False, numbers).astype(np.float64)

    def _there(self, frame: pd.DataFrame, name: str, role: str) -> pd.Series:
        there = f"the table has no such column; it has {', '.join(map(str, list(frame.columns)[:20]))}"
        require(name in frame.columns, f"data.source.{role}", name, there)
        return frame[name]

    def _column(self, frame: pd.DataFrame, name: str, role: str) -> pd.Series:
        """Return a column that lacks no value; its texts have no blanks at their ends."""
        column = self._there(frame, name, role)
        self._refuse_gaps(column, columns.missing_in(column), name, role)
        return columns.stripped(column)

    def _refuse_gaps(self, column: pd.Series, gaps: np.ndarray, name: str, role: str) -> None:
        other = "missing: drop, or mean" if role == "features" else "missing: drop"
        remedy = f"fill it in, set {other}, or leave the column out"
        columns.refuse_gaps(column, f"data.source.{role}", name, gaps, remedy)

    def _read(self, *parts: list[Path]) -> list[pd.DataFrame]:
        """Return the rows of the files of each part; their index says where each is from (`index_of`)."""
        frames = [[self._file(path) for path in part] for part in parts]
        paths = [path for part in parts for path in part]
        held = list(zip(paths, (frame for part in frames for frame in part), strict=True))
        index, end = columns.index_of([(path, len(frame)) for path, frame in held]), 0
        first, names = held[0][0], list(held[0][1].columns)
        for path, frame in held:
            same = set(frame.columns) == set(names)
            require(same, str(path), list(frame.columns)[:4], f"other columns than {first} has")
            frame.index, end = index[end : end + len(frame)], end + len(frame)
        return [_joined([frame[names] for frame in part]) for part in frames]

    def _file(self, path: Path) -> pd.DataFrame:
        """Return the rows of one file."""
        import pandas as pd

        refuse_foreign(path, "a table in CSV or Parquet", "DataFrame.to_parquet")
        with reading(path, "a table"):
            if path.suffix == ".parquet":
                optional("pyarrow", "parquet", "data.source.path", str(path))
                frame = pd.read_parquet(path, engine="pyarrow")
            else:
                frame = self._csv(path)
            frame.columns = pd.Index(columns.check_header(list(frame.columns), str(path)))
        return frame

    def _csv(self, path: Path) -> pd.DataFrame:
        """Return the rows of a .csv under the names of its first line."""
        import pandas as pd

        # whole columns at once: the types of pieces may differ
        form = {"sep": self.separator, "skipinitialspace": True, "low_memory": False}
        head = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **form)
        names = columns.check_header(head.iloc[0].tolist(), str(path))
        _refuse_other_texts(path, str(names[0]), len(names) == 1)
        names[0] = str(names[0]).removeprefix("#").strip()  # as numpy.savetxt writes a header
        other = next((mark for mark in (";", "\t", "|", ",", " ") if mark in str(names[0])), None)
        remedy = f"one column: set data.source.separator to {other!r}"
        require(len(names) > 1 or other is None, str(path), names[0], remedy)
        frame = pd.read_csv(path, decimal=self.decimal, **form)
        remedy = "the rows have more fields than the first line has names: name every column"
        require(isinstance(frame.index, pd.RangeIndex), str(path), len(names), remedy)
        return frame.rename(columns={name: name.removeprefix("#").strip() for name in frame.columns[:1]})


def _refuse_other_texts(path: Path, first: str, alone: bool) -> None:
    """Refuse texts that are no CSV, by the first field of their first line.

    Args:
        path: the file.
        first: the field.
        alone: whether the line has no other.
    """
    forms = {ARFF: FOREIGN[".arff"], SVMLIGHT: FOREIGN[".svm"]}
    reader = next((reader for form, reader in forms.items() if form.match(first)), None)
    remedy = f"no CSV: read it with {reader} and write it with DataFrame.to_parquet"
    require(reader is None, str(path), first, remedy)
    remedy = "begins with a comment: begin with the names of columns"
    require(not (alone and first.startswith("#")), str(path), first, remedy)


def _check_names(column: pd.Series, name: str, role: str) -> None:
    """Refuse a column whose values are neither numbers nor names, such as decimals or times."""
    import pandas as pd

    kind = "numbers" if column.dtype.kind in "iuf" else pd.api.types.infer_dtype(column)
    remedy = f"holds values of kind {kind}: make them numbers or texts"
    require(kind in NAMES, f"data.source.{role}", name, remedy)


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of tables, without those that have none: columns without a value have no type."""
    import pandas as pd

    filled = [frame for frame in frames if len(frame)] or frames[:1]
    return pd.concat(filled) if len(filled) > 1 else filled[0]


def _inside(path: Path) -> list[Path]:
    """Return a file, or the tables in a folder."""
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix in (".csv", ".parquet"))
    return found or [path / "*.csv"]
