"""Columns of tables as people write them: missing values, numbers in texts, blanks, row numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import UserError, require

if TYPE_CHECKING:
    import pandas as pd

MARKS = {
    *("", ".", "-", "--", "?", "??", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none", "nil"),
    *("missing", "\\n", "#div/0!", "#value!", "#ref!", "#num!", "#name?", "#null!"),
}  # what stands for a missing value, in lower case
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
ALMOST = re.compile(
    r"[<>=~$€£\s-]*[-+]?\d[\d.,'\s]*(?:[eE][-+]?\d+)?\s*(?:[%°$€£]\w*|[^\W\d_]{1,6}(?:/\w+)?)?"
)
"""A number with another decimal mark, separators of thousands, a unit or a sign of comparison."""
DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?:[ T]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(?::\d{2}.*)?")
INDEX = re.compile(r"Unnamed: \d+|__index_level_\d+__|")  # how pandas calls a column without a name
SHOWN = 1000  # texts, by which a column of them is taken for numbers or for sentences
CONSTANT = "it has one value alone, which tells samples apart by nothing"
FEW = 20  # rows, below which a column may decide the target or name every row by chance


def is_missing(value: object) -> bool:
    """Return whether a value is missing: None, NaN, or a text of `MARKS`."""
    if isinstance(value, str):
        return value.strip().lower() in MARKS
    return value is None or bool(value != value)


def missing_in(column: pd.Series) -> np.ndarray:
    """Return where a column lacks a value, bool [n]: a gap, or a text of `MARKS`."""
    gaps: np.ndarray = column.isna().to_numpy(bool)
    if column.dtype.kind in "biufcmM":
        return gaps
    marked = [isinstance(value, str) and is_missing(value) for value in column.tolist()]
    return np.asarray(gaps | np.array(marked, bool))


def index_of(files: Sequence[tuple[Path | str, int]]) -> pd.Index[Any]:
    """Return the index of the joined rows of files, (file, rows) each, by which `row_of` names a row."""
    import pandas as pd

    counts = [count for _, count in files]
    rows = np.concatenate([np.arange(count) for count in counts]) if files else np.zeros(0, np.int64)
    if len(files) < 2:
        return pd.RangeIndex(len(rows))
    names, number = [str(file) for file, _ in files], np.repeat(np.arange(len(files)), counts)
    return pd.MultiIndex([names, range(max(counts))], [number, rows])


def row_of(column: pd.Series, i: int) -> str:
    """Return which row of which file the i-th value of a column is from, for messages; rows count from 1."""
    at: Any = column.index[i]
    return f"row {at[1] + 1} of {at[0]}" if isinstance(at, tuple) else f"row {at + 1}"


def first_of(column: pd.Series, wrong: np.ndarray) -> str:
    """Return which row is the first where `wrong`, bool [n], holds, and its value; empty for none."""
    if not wrong.any():
        return ""
    i = int(wrong.argmax())
    return f"{row_of(column, i)} holds {column.iloc[i : i + 1].tolist()[0]!r}"


def refuse_gaps(
    column: pd.Series, key: str, name: str, gaps: np.ndarray | None = None, remedy: str = "leave it out"
) -> None:
    """Raise `UserError` for a column that lacks a value.

    Args:
        column: its values.
        key: configuration key or file that names it.
        name: its name.
        gaps: where it lacks one, bool [n]; None: as `missing_in` finds.
        remedy: what to do about it.
    """
    gaps = missing_in(column) if gaps is None else gaps
    if gaps.any():
        where = row_of(column, int(gaps.argmax()))
        raise UserError(key, name, f"lacks a value in {where}: {remedy}")


def stripped(column: pd.Series) -> pd.Series:
    """Return a column whose texts have no blanks at their ends."""
    if column.dtype.kind in "biufcmM":
        return column
    return column.map(lambda value: value.strip() if isinstance(value, str) else value)


def numbers_in(
    column: pd.Series, key: str, name: str, decimal: str = ".", otherwise: tuple[str, str] = ("", "")
) -> np.ndarray | None:
    """Return the numbers of a column, float64 [n] (NaN where one is missing), or None for a column of names.

    Args:
        column: its values; texts may be numbers.
        key: configuration key that names it, for messages.
        name: its name.
        decimal: the decimal mark of numbers in texts, `.` or `,`.
        otherwise: further advice, on another decimal mark and on any column; empty for none.

    Raises:
        UserError: most values are numbers and some are not, or all are dates.
    """
    if column.dtype.kind in "iuf":
        return np.array(column.to_numpy(np.float64, na_value=np.nan))
    values = column.tolist()
    if column.dtype.kind in "bcmM" or not any(isinstance(value, str) for value in values):
        return None
    gaps = missing_in(column)
    texts = [(i, str(v).strip()) for i, v in enumerate(values) if not gaps[i] and not isinstance(v, bool)]
    if not texts:
        return None
    dates = all(DATE.fullmatch(text) for _, text in texts)
    also = f", or {otherwise[1]}" if otherwise[1] else ""
    require(not dates, key, name, f"holds dates or times, such as {texts[0][1]!r}: make them numbers{also}")
    numbers, wrong, almost = np.full(len(column), np.nan), [], 0
    for i, text in texts:
        written = isinstance(values[i], str) and decimal == ","
        plain = text.replace(",", ".") if written and "." not in text else "" if written else text
        if NUMBER.fullmatch(plain):
            numbers[i] = float(plain)
        else:
            wrong.append((i, text))
            almost += bool(ALMOST.fullmatch(text))
    if wrong and 2 * (len(texts) - len(wrong) + almost) <= len(texts):
        return None
    if wrong:
        i, text = wrong[0]
        other = "," if decimal == "." else "."
        how = f", {otherwise[0].format(other)}" if otherwise[0] and other in text else ""
        says = f"{row_of(column, i)} holds {text!r}, which is no plain number, and most of its values are "
        raise UserError(key, name, f"{says}numbers: write plain numbers{how}{also}")
    return numbers


def numbers_of_texts(column: pd.Series, key: str, name: str) -> np.ndarray | None:
    """Return the numbers of samples that are texts, float64 [n], or None for words; see `numbers_in`.

    Raises:
        UserError: most of them are numbers, and some lack a value or are something else.
    """
    few = column.iloc[:: max(1, len(column) // SHOWN)]
    known = [text.strip() for text in few if isinstance(text, str) and not is_missing(text)]
    like = [bool(ALMOST.fullmatch(text) or DATE.fullmatch(text)) for text in known]
    if 2 * sum(like) <= len(like):
        return None
    numbers = numbers_in(column, key, name)
    if numbers is not None:
        refuse_gaps(column, key, name)
    return numbers


def numbers_of_lists(column: pd.Series, key: str, name: str) -> np.ndarray:
    """Return lists of texts that are numbers, float64 [n, F]; see `numbers_in`.

    Raises:
        UserError: they differ in length, or a place in them holds texts, or lacks a value.
    """
    import pandas as pd

    widths = column.map(len).to_numpy()
    wrong = np.flatnonzero(widths != widths[0])
    where = row_of(column, int(wrong[0])) if len(wrong) else ""
    require(not len(wrong), key, name, f"{where} holds another number of values than row 1: give as many")
    columns = []
    for i in range(int(widths[0])):
        values = pd.Series([row[i] for row in column], column.index, dtype=object)
        numbers = numbers_in(values, key, f"{name}[{i}]")
        remedy = "holds lists of texts: give numbers, or one text a sample"
        require(numbers is not None, key, f"{name}[{i}]", remedy)
        refuse_gaps(values, key, f"{name}[{i}]")
        columns.append(numbers)
    return np.stack(columns, axis=1)  # type: ignore[arg-type]


def lines_on_texts(column: pd.Series, key: str) -> list[str]:
    """Return a line that counts samples of text which are empty or stand for a missing value."""
    gaps = [i for i, text in enumerate(column) if len(text) < 16 and is_missing(text)]
    if not gaps:
        return []
    first = f"the first is {column.iloc[gaps[0]]!r} in {row_of(column, gaps[0])}"
    return [f"{key}: {len(gaps)} of {len(column)} texts are empty or stand for a missing value ({first})"]


def clean_name(name: str, where: str) -> str:
    """Return the name of a client without blanks at its ends; refuse one that is a mark of `MARKS`."""
    require(not is_missing(name), where, name, "stands for a missing name: name the client, or leave it out")
    return name.strip()


def check_header(names: Sequence[object], where: str) -> list[object]:
    """Return the names of columns without blanks at their ends; refuse names that occur twice."""
    clean = [name.strip() if isinstance(name, str) else name for name in names]
    twice = next((name for i, name in enumerate(clean) if name in clean[:i] and name != ""), None)
    require(twice is None, where, twice, "two columns have this name: rename one of them")
    return clean


def lines_on_names(names: Sequence[str], key: str, what: str) -> list[str]:
    """Return a line for the user if names differ by upper and lower case or blanks alone."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), name)
        if other != name:
            return [f"{key}: {what} {other!r} and {name!r} differ by case or blanks alone; they count as two"]
    return []


def lines_on_column(
    name: str, values: np.ndarray, categories: int, labels: np.ndarray, classes: int
) -> list[str]:
    """Return lines for the user on a column of samples that looks like an identity or gives the target away.

    Args:
        name: its name.
        values: its numbers, [n].
        categories: how many categories it has, 0 for a column of numbers.
        labels: classes [n], or numbers to predict [n, L].
        classes: number of classes.
    """
    told = _told_of(values, categories, labels, classes)
    return [f"data.source.features = {name}: {told}"] if told else []


def lines_on_columns(values: np.ndarray, key: str, labels: np.ndarray, classes: int) -> list[str]:
    """Return lines for the user on columns of numbers without names, one for each kind of `lines_on_column`.

    Columns of one value are left out: pixels at the border of pictures are such.

    Args:
        values: samples [n, F] in the order of their files.
        key: where they come from.
        labels: classes [n], or numbers to predict [n, L].
        classes: number of classes.
    """
    found: dict[str, list[int]] = {}
    for i in range(values.shape[1]):
        found.setdefault(_told_of(values[:, i], 0, labels, classes), []).append(i)
    return [
        f"{key}: {'column' if len(at) == 1 else f'{len(at)} columns, the first is'} {at[0]}: {told}"
        for told, at in found.items()
        if told not in ("", CONSTANT)
    ]


def _told_of(values: np.ndarray, categories: int, labels: np.ndarray, classes: int) -> str:
    """Return what is said of a column; see `lines_on_column`."""
    n = len(values)
    if n < FEW:
        return ""
    if 2 * categories > n:
        return f"{categories} categories in {n} rows: it names the rows; leave it out of features"
    step = np.diff(values)
    if not categories and abs(step[0]) == 1 and (step == step[0]).all():
        return "it numbers the rows of the file; leave it out of features"
    if (values == values[0]).all():
        return CONSTANT
    copy = "it decides the target alone; leave it out if it is a copy of it"
    if labels.ndim == 1:
        return copy if 1 < classes <= n / 2 and _decides(values, bool(categories), labels) else ""
    same = not categories and any(
        abs(np.corrcoef(values, labels[:, j])[0, 1]) > 1 - 1e-9
        for j in range(labels.shape[1])
        if labels.dtype.kind == "f" and np.ptp(labels[:, j]) > 0
    )
    return copy if same else ""


def _decides(values: np.ndarray, coded: bool, labels: np.ndarray) -> bool:
    """Return whether each category has one class, or each class a range of numbers to itself."""
    if coded:
        pairs = np.unique(np.stack([values, labels.astype(values.dtype)]), axis=1)
        return pairs.shape[1] == len(np.unique(values)) and bool((labels != labels[0]).any())
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    low, high = (f.reduceat(values[order], starts) for f in (np.minimum, np.maximum))
    by = np.argsort(low, kind="stable")
    return len(starts) > 1 and bool((high[by][:-1] < low[by][1:]).all())
