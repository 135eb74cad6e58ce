"""Columns of tables as people write them: missing values, numbers in texts, blanks, row numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpifl.core.errors import require

if TYPE_CHECKING:
    import pandas as pd

MARKS = frozenset(
    (
        *("", ".", "-", "--", "?", "??", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "null", "none", "nil"),
        *("missing", "\\n", "#div/0!", "#value!", "#ref!", "#num!", "#name?", "#null!"),
    )
)  # what stands for a missing value, in lower case
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
ALMOST = re.compile(
    r"[<>=~$€£\s-]*[-+]?\d[\d.,'\s]*(?:[eE][-+]?\d+)?\s*(?:[%°$€£]\w*|[^\W\d_]{1,6}(?:/\w+)?)?"
)
"""A number with another decimal mark, separators of thousands, a unit or a sign of comparison."""
DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?:[ T]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(?::\d{2}.*)?")
INDEX = re.compile(r"Unnamed: \d+|__index_level_\d+__|")  # how pandas calls a column without a name
FEW = 20  # rows, below which a column may decide the target or name every row by chance


def is_missing(value: object) -> bool:
    """Return whether a value is missing: None, NaN, or a text of `MARKS`."""
    if isinstance(value, str):
        return value.strip().lower() in MARKS
    return value is None or bool(value != value)


def missing_in(column: pd.Series) -> np.ndarray:
    """Return where a column lacks a value, bool [n]: a gap, or a text of `MARKS`."""
    gaps: list[bool] = column.isna().tolist()
    if column.dtype.kind in "biufcmM":
        return np.array(gaps, bool)
    return np.array(
        [gap or (isinstance(v, str) and is_missing(v)) for gap, v in zip(gaps, column, strict=True)], bool
    )


def stripped(column: pd.Series) -> pd.Series:
    """Return a column whose texts have no blanks at their ends."""
    if column.dtype.kind in "biufcmM":
        return column
    return column.map(lambda value: value.strip() if isinstance(value, str) else value)


def numbers_in(column: pd.Series, key: str, name: str, decimal: str = ".") -> np.ndarray | None:
    """Return the numbers of a column, float64 [n] (NaN where one is missing), or None for a column of names.

    Args:
        column: its values; texts may be numbers.
        key: configuration key that names it, for messages.
        name: its name.
        decimal: the decimal mark of numbers in texts, `.` or `,`.

    Raises:
        UserError: most values are numbers and some are not, or all are dates.
    """
    if column.dtype.kind in "iuf":
        return np.array(column.to_numpy(np.float64, na_value=np.nan))
    if column.dtype.kind in "bcmM" or not any(isinstance(value, str) for value in column):
        return None
    gaps = missing_in(column)
    texts = [(i, str(v).strip()) for i, v in enumerate(column) if not gaps[i] and not isinstance(v, bool)]
    if not texts:
        return None
    dates = all(DATE.fullmatch(text) for _, text in texts)
    remedy = f"holds dates or times, such as {texts[0][1]!r}: make them numbers, or name it in categories"
    require(not dates, key, name, remedy)
    numbers, wrong, almost = np.full(len(column), np.nan), [], 0
    for i, text in texts:
        written = isinstance(column.iloc[i], str) and decimal == ","
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
        how = f"write plain numbers, set decimal: '{other}', " if other in text else "write plain numbers, "
        most = f"row {i + 1} holds {text!r}, which is no plain number, and most of its values are numbers"
        require(False, key, name, f"{most}: {how}or name it in categories")
    return numbers


def check_header(names: Sequence[object], where: str) -> list[object]:
    """Return the names of columns without blanks at their ends; refuse names that occur twice."""
    clean = [name.strip() if isinstance(name, str) else name for name in names]
    twice = next((name for i, name in enumerate(clean) if name in clean[:i] and name != ""), None)
    require(twice is None, where, twice, "two columns have this name: rename one of them")
    return clean


def lines_on_names(names: Sequence[str], key: str, what: str) -> list[str]:
    """Return a line for the user if names differ by upper and lower case alone."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            return [f"{key}: {what} {other!r} and {name!r} differ by case alone; they count as two"]
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
    n, key = len(values), f"data.source.features = {name}"
    if n < FEW:
        return []
    if 2 * categories > n:
        return [f"{key}: {categories} categories in {n} rows: it names the rows; leave it out of features"]
    step = np.diff(values)
    if not categories and (np.abs(step) == 1).all() and (step == step[0]).all():
        return [f"{key}: it numbers the rows of the file; leave it out of features"]
    if (values == values[0]).all():
        return [f"{key}: it has one value alone, which tells samples apart by nothing"]
    if labels.ndim == 1:
        # numbers whose order is the order of the classes, or categories with one class each
        order = np.lexsort((labels, values))
        y, v = labels[order], values[order]
        change = y[1:] != y[:-1]
        decides = classes > 1 and not (change & (v[1:] == v[:-1])).any()
        decides = decides and (bool(categories) or int(change.sum()) == classes - 1)
        return [f"{key}: it decides the target alone; leave it out if it is a copy of it"] if decides else []
    same = not categories and any(
        abs(np.corrcoef(values, labels[:, j])[0, 1]) > 1 - 1e-9
        for j in range(labels.shape[1])
        if labels.dtype.kind == "f" and np.ptp(labels[:, j]) > 0
    )
    return [f"{key}: it decides the target alone; leave it out if it is a copy of it"] if same else []
