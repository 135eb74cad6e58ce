"""Records the sweep of clustered methods, for `docs/clustered-methods.md`.

    python tests/campaigns/record_methods.py FOLDER...

The figures of the finished cases go into `configs/sweeps/measured/clustered-methods.json`, a line for each
method and world, with the candidates that were chosen. The tables of the page are written from this file.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpifl.analysis.tables import Table, as_markdown
from mpifl.core.case_names import labels_of, rows_left_out
from mpifl.core.errors import require
from mpifl.core.files import write_atomically
from mpifl.experiment import loader
from mpifl.experiment.table_layout import COLUMNS, ROWS, SEED
from mpifl.sweeps.cases import Case, started_with, table_of, unchecked_cases
from mpifl.sweeps.results import is_complete, result_of
from mpifl.sweeps.table import Result, markdown
from mpifl.sweeps.tuning import CHOICES_FILE, SUFFIX

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.recorded import Recorded, about, kept, runs_of

NAME = "clustered-methods"
RECORDED = Recorded(NAME, "record_methods.py")
PAGE = RECORDED.page


def record(folders: Sequence[Path]) -> list[Path]:
    """Record the figures of a sweep, and write the tables of the page.

    Args:
        folders: folders of the sweep, complete or not, for example one for each part of the worlds.

    Returns:
        The files that were written.

    Raises:
        UserError: a folder is that of another sweep, or none has a finished case.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    origins: dict[str, set[str]] = {"dates": set(), "code": set()}
    for folder in folders:
        for place, one, of in _rows(folder):
            found[place] = one
            for name, texts in of.items():
                origins[name] |= texts
    require(bool(found), "RUN", str(folders), "have no finished case; run it first")
    tree = loader.read(f"sweeps/{NAME}")
    order = [(w, r) for w in labels_of(tree["vary"][COLUMNS]) for r in labels_of(tree["vary"][ROWS])]
    RECORDED.write([found[place] for place in order if place in found], origins)
    write_atomically(PAGE, page(PAGE.read_text()))
    return [RECORDED.measured, PAGE]


def _rows(folder: Path) -> Iterator[tuple[tuple[str, str], dict[str, Any], dict[str, set[str]]]]:
    """Yield (world, method), its record, and dates and code of its runs; for all with a finished case."""
    tree = started_with(folder)
    require(tree.get("name") == NAME, "RUN", str(folder), f"is not a run of sweeps/{NAME}")
    names = [figure.of for figure in table_of(tree).figures.values()]
    trial = folder.parent / folder.name.replace(NAME, f"{NAME}{SUFFIX}", 1)
    with (trial / CHOICES_FILE).open() as rows:
        chosen = {(row[COLUMNS], row["row"]): row for row in csv.DictReader(rows) if row["chosen"] == "1"}
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in unchecked_cases(tree):
        if is_complete(case, folder):
            groups.setdefault((case.labels[COLUMNS], case.labels[ROWS]), []).append(case)
    for place, group in groups.items():
        one: dict[str, Any] = {COLUMNS: place[0], ROWS: place[1], "seed": [], "digest": []}
        of: dict[str, set[str]] = {"dates": set(), "code": set()}
        if place in chosen:
            one["chosen"] = chosen[place]["candidate"].removeprefix(f"{place[1]}, ")
            one["validation"] = kept(float(chosen[place]["metric_mean"]))
        for case, run in runs_of(group, folder):
            values = result_of(case.labels, run).values
            one["seed"].append(case.labels[SEED])
            one["digest"].append(run.summary["digest"][:12])
            for name in names:
                if name in values:
                    one.setdefault(name, []).append(kept(values[name]))
            for name, text in about(run).items():
                of[name].add(text)
        yield place, one, of


def measured() -> list[dict[str, Any]]:
    """Return the record of each method and world."""
    return RECORDED.rows()


def results() -> list[Result]:
    """Return the recorded figures of each case."""
    out = []
    for one in measured():
        for i, seed in enumerate(one["seed"]):
            labels = {COLUMNS: one["columns"], ROWS: one["rows"], SEED: seed}
            values = {k: v[i] for k, v in one.items() if isinstance(v, list) and k not in ("seed", "digest")}
            out.append(Result(labels, values, better=1))
    return out


def tables() -> str:
    """Return the tables of the page."""
    tree = loader.read(f"sweeps/{NAME}")
    found = results()
    parts = [
        markdown(table_of(tree), found, hints=False, left_out=rows_left_out(tree["vary"])),
        "**What was chosen on validation data**\n",
        as_markdown(_choices(measured())),
    ]
    return "\n".join(parts)


def _choices(rows: list[dict[str, Any]]) -> Table:
    """Return the chosen candidate of each method in each world."""
    worlds = list(dict.fromkeys(one["columns"] for one in rows))
    tuned = list(dict.fromkeys(one["rows"] for one in rows if "chosen" in one))
    of: Mapping[tuple[str, str], str] = {
        (one["columns"], one["rows"]): one.get("chosen", "-") for one in rows
    }
    return Table.of(["", *worlds], [[row, *(of.get((world, row), "-") for world in worlds)] for row in tuned])


def page(text: str) -> str:
    """Return the page with its tables written anew.

    Args:
        text: the page.

    Raises:
        UserError: it has no place for them.
    """
    return RECORDED.with_tables(text, tables())


if __name__ == "__main__":
    for path in record([*map(Path, sys.argv[1:])]):
        print(path)
