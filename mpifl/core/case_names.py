"""Names of the cases of a sweep: labels of varied values, titles, and names of run folders.

They are computed without reading or importing anything, so that `mpifl watch` can show them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

from .conversion import untyped

LEFT_OUT = "left_out"  # key of a group of columns' change of a row: why the group has no such row
LOCKS = ".locks"  # in a sweep's folder: a file for each case and each training that some process runs


def label_of(value: Any) -> str:
    """Return the label of a value: a number as Python writes it, the name of a section or of a file."""
    name = value.get("name", value) if isinstance(value, dict) else value
    return str(untyped(name)).rpartition("/")[2]


def labels_of(values: Any) -> list[str]:
    """Return the labels of the values of a varied key, a list or a mapping of labels to values."""
    if isinstance(values, dict):
        return [str(label) for label in values]
    return [label_of(value) for value in values]


def label_among(given: Any, known: Collection[str]) -> str | None:
    """Return which of the known labels a user means: as it is written, or as a number is labelled."""
    return next((label for label in (str(given), label_of(given)) if label in known), None)


def title_of(labels: Mapping[str, str]) -> str:
    """Return the title of a case: its labels, each after its key.

    Args:
        labels: varied key -> label of its value.
    """
    return ", ".join(f"{key} {label}" for key, label in labels.items())


def slug_of(labels: Iterable[str]) -> str:
    """Return the labels of a case as one word, the id of its run folder."""
    return "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in label) for label in labels)


def slugs_of(vary: Mapping[str, Any]) -> list[str]:
    """Return the slugs of all cases, in their order.

    Args:
        vary: varied key -> its values.
    """
    without = rows_left_out(vary)
    every = (dict(zip(vary, labels, strict=True)) for labels in product(*map(labels_of, vary.values())))
    return [slug_of(labels.values()) for labels in every if place_of(labels) not in without]


def place_of(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return the labels of a case's group of columns and of its row; empty texts for none."""
    return labels.get("columns", ""), labels.get("rows", "")


def rows_left_out(vary: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (group of columns, row) -> reason, for each row that a group of columns leaves out.

    Args:
        vary: varied key -> its values; `columns.LABEL.rows.LABEL.left_out` is the reason.
    """
    columns, rows = vary.get("columns"), labels_of(vary.get("rows") or [])
    found = {}
    for label, part in columns.items() if isinstance(columns, dict) else ():
        changes = part.get("rows") if isinstance(part, dict) else None
        for row, change in changes.items() if isinstance(changes, dict) else ():
            known = label_among(row, rows)
            if known is not None and isinstance(change, dict) and change.get(LEFT_OUT):
                found[str(label), known] = str(change[LEFT_OUT])
    return found


def folder_name(name: str, slug: str) -> str:
    """Return the name of a case's run folder.

    Args:
        name: name of its configuration.
        slug: see `slug_of`.
    """
    return f"{name}-{slug}"
