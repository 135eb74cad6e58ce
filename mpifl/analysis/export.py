"""Tidy tables of runs, as CSV and Parquet: typed numbers, one variable per column, one observation per row.

Each row begins with its run: the folder, with as much of its path as makes it unique, the name in tables, the
method, and a column for every key of the configuration in which the runs differ, seeds included. Rounds of
synchronous runs (`round`) and server steps of asynchronous runs (`server_step`, with the `arrivals` so far)
are different things and have separate columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpifl.core.errors import UserError, first_of, require
from mpifl.core.optional_packages import need_package
from mpifl.core.textfiles import flat, readable
from mpifl.results.reader import INTEGER, Run
from mpifl.supervision.logging import warn_once

from .comparison import check_target, independent
from .seed_groups import AXES, Group, default_target, gather, metric_of, say_other_inputs, short_names

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("metrics", "final", "clients")
FORMATS = (".csv", ".parquet")
SUMMARY = ("ranks", "clients", "model_parameters", "mpi_bytes", "wall_seconds")  # numbers of summary.json
HIDDEN = ("name", "output", "system", "vary", "table", "tune")  # sections that get no columns
WHOLE = ("round", "bytes")  # axes of whole numbers
Row = dict[str, Any]


def export(
    names: Sequence[str],
    table: str,
    file: str | None,
    target: float | None = None,
    finished_only: bool = False,
) -> str:
    """Write a tidy table of runs.

    Args:
        names: run folders, folders that hold run folders, and patterns of them.
        table: one of `TABLES`.
        file: file to write, `.csv` or `.parquet`; None returns CSV.
        target: target of the table `final`, see `final_frame`; None takes 95 % of the best.
        finished_only: whether to leave out unfinished runs, with a warning.

    Returns:
        A line of text about the written file; the CSV text if there is no file.

    Raises:
        UserError: a folder is not a finished run, a target is given for another table, pyarrow is missing, or
            the file has another ending or cannot be written.
    """
    remedy = "has no effect: only --table final says what a target took"
    require(target is None or table == "final", "--target", target, remedy)
    path = None if file is None else Path(file)
    if path is not None:
        require(path.suffix in FORMATS, "--out", file, f"use a file that ends in {' or '.join(FORMATS)}")
        if path.suffix == ".parquet":
            need_package("pyarrow", "parquet", "--out", file)
    groups = gather(names, finished_only)
    say_other_inputs(groups)
    found = final_frame(groups, target) if table == "final" else frame(groups, table)
    if path is None:
        return str(found.to_csv(index=False))
    try:
        if path.suffix == ".csv":
            found.to_csv(path, index=False)
        else:
            found.to_parquet(path, index=False, engine="pyarrow")
    except OSError as error:
        raise UserError("--out", file, f"cannot be written ({error.strerror or error})") from error
    return f"{path}: {len(found)} rows, {len(found.columns)} columns\n"


def frame(groups: Sequence[Group], table: str) -> pd.DataFrame:
    """Return a tidy table of groups of runs.

    Args:
        groups: groups of runs.
        table: `metrics`: a row for each run and evaluation, with the columns of `metrics.csv`. `clients`: a
            row for each run and client, with the columns of `clients.csv` and `client_traffic.csv`.

    Raises:
        UserError: no run has such a table.
    """
    rows_of = {"metrics": _metrics, "clients": _clients}[table]
    heads = _heads(groups)
    runs = [run for group in groups for run in group.runs]
    without = [run.folder.name for run in runs if table == "clients" and run.written == "none"]
    if len(without) == len(runs):
        remedy = "these runs wrote no clients.csv; run them with output.clients: all or sample"
        raise UserError("output.clients", "none", remedy)
    if without:
        said = f"{len(without)} of {len(runs)} runs have no table {table} and are left out"
        warn_once(f"{said}: {first_of(without)} (output.clients: none)")
    rows = [{**heads[id(run)], **row} for group in groups for run in group.runs for row in rows_of(run)]
    require(bool(rows), "RUN", table, "these runs have no such table")
    return _frame(rows)


def final_frame(groups: Sequence[Group], target: float | None = None) -> pd.DataFrame:
    """Return a row for each run: its last evaluation, totals, and the cost of a target.

    `reached` says whether the run met the target. `round_to_target`, `bytes_to_target` and
    `virtual_seconds_to_target` say at what cost it met the target, or else at what cost the run ended without
    it. In terms of survival analysis these are the event and the times.

    Args:
        groups: groups of runs.
        target: target value of the mean accuracy, in [0, 1], or of the mean of another metric; None takes
            95 % of the best.

    Raises:
        UserError: the groups have different metrics, or their metric cannot have this value.
    """
    check_target(target, metric_of(groups))
    goal = default_target(independent(groups)[0]) if target is None else target  # as in comparisons
    heads = _heads(groups)
    rows = []
    for group in groups:
        found = {axis: group.reached(goal, axis) for axis in AXES}
        for j, run in enumerate(group.runs):
            totals = {name: run.summary[name] for name in SUMMARY if name in run.summary}
            row = {**heads[id(run)], **_metrics(run)[-1], **totals, "target": goal}
            row["reached"] = bool(found["round"].met[j])
            spent = {axis: float(f.position[j]) for axis, f in found.items()}
            rows.append(row | {f"{a}_to_target": int(v) if a in WHOLE else v for a, v in spent.items()})
    return _frame(rows)


def _heads(groups: Sequence[Group]) -> dict[int, Row]:
    """Return the leading columns of each run's rows, by `id` of the run."""
    runs = [(group, run) for group in groups for run in group.runs]
    leaves = [dict(flat({k: v for k, v in run.config.items() if k not in HIDDEN})) for _, run in runs]
    keys = list(dict.fromkeys(key for tree in leaves for key in tree))
    varied = [key for key in keys if len({_text(tree.get(key)) for tree in leaves}) > 1]
    out = {}
    names = short_names([run.folder for _, run in runs])
    for (group, run), tree, name in zip(runs, leaves, names, strict=True):
        head = {"run": name, "configuration": group.name, "method": run.method}
        out[id(run)] = head | {key: _plain(tree.get(key)) for key in varied}
    return out


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    """Return a value of the configuration as a value of a column: lists and mappings become JSON."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else _text(value)


def _metrics(run: Run) -> list[Row]:
    """Return the evaluations of a run."""
    asynchronous = "asynchronous" in run.summary
    step = "server_step" if asynchronous else "round"
    begin: Row = {"asynchronous": asynchronous, "round": None, "server_step": None, "arrivals": None}
    return [
        begin | {step if name == "round" else name: _of_file(text) for name, text in row.items()}
        for row in run.rows("metrics.csv")
    ]


def _clients(run: Run) -> list[Row]:
    """Return the final rows of the clients of a run, with the traffic of each."""
    traffic = {row["client"]: row for row in run.rows("client_traffic.csv")}
    rows = []
    for row in run.rows("clients.csv"):
        both = row | {k: v for k, v in traffic.get(row["client"], {}).items() if k != "client"}
        rows.append({name: _of_file(value) for name, value in both.items()})
    return rows


def _of_file(text: str) -> Any:
    """Return a value of a CSV file: a number, None if the field is empty or NaN, otherwise the text."""
    if INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return text
    return None if math.isnan(value) else value


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table whose columns have one type each, with missing values."""
    import pandas as pd  # heavy: only when something is exported

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return pd.DataFrame(columns)


def _column(values: Sequence[Any]) -> pd.Series[Any]:
    """Return a column of integers, floats, booleans or strings; of floats if there is no value."""
    import pandas as pd

    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pd.Series(values, dtype="Float64")
    if kinds == {bool} or kinds <= {int, float}:
        return pd.Series(pd.array(values))
    return pd.Series([None if v is None else readable(str(v)) for v in values], dtype="string")
