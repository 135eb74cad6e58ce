"""A sweep: one configuration run for every combination of the values that its `vary` names.

`vary` maps keys of the configuration to values: a list, or a mapping of labels to values. Three of its keys
are no keys of the configuration. The values of `vary.configuration` are names of whole configurations, over
which the sweep's own keys are laid. Those of `vary.rows` and `vary.columns` are parts of a configuration,
which are laid over it; the part of a group of columns may hold `rows`, what it changes in single rows.

The sweep's folder holds one run folder a case, a table over all cases (`sweep.csv`; `sweep.md` with means and
standard deviations over `vary.seed`), a figure (`sweep.png`), and `table.md` where the sweep has a `table`.
Several processes may share the cases and the folder (`Part`).
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from mpifl.comm.transport import Transport, on_server
from mpifl.core.errors import Stopped, UserError, nearest, require
from mpifl.core.files import write_atomically
from mpifl.core.old_keys import renamed
from mpifl.core.textfiles import MAX_NAME_BYTES, yaml_file
from mpifl.results import run_folder as folders
from mpifl.results.metrics import over_runs
from mpifl.results.reader import load, read_rows
from mpifl.results.supervision import Signals
from mpifl.results.sweep_figure import Curve, draw

from . import loader
from .retime import same_training, write_retimed
from .run import run
from .schema import Config, check_sections
from .sweep_table import COLUMNS, ROWS, Result, TableConfig, label_of, labels_of, markdown

SWEEP_FILE = "sweep.yaml"  # in the sweep's folder: the configuration that it was started with
OLD_STEM = "study"  # of the files in the folder of a sweep of mpifl 0.1
MAX_CASES = 10_000
JOIN_SECONDS = 10.0  # that a process waits for another one, which began the same sweep a moment ago
FIGURES = ("accuracy_mean", "accuracy_worst", "accuracy_before", "accuracy_cluster", "mixture_kl", "ari")
ASYNCHRONOUS = ("staleness_mean", "staleness_max", "refusal_rate", "clock_seconds", "arrivals_per_second")
TOTALS = ("federation_bytes_up", "federation_bytes_down", "wall_seconds")


@dataclass(frozen=True)
class Case:
    """One combination of values.

    Attributes:
        labels: Varied key -> label of its value.
        config: The configuration.
    """

    labels: Mapping[str, str]
    config: Config

    @property
    def slug(self) -> str:
        """The labels as one word; the id of the run folder."""
        return "-".join(
            "".join(c if c.isalnum() or c in "._" else "_" for c in x) for x in self.labels.values()
        )


# -- the cases -----------------------------------------------------------------------------------------------


def cases(tree: Mapping[str, Any]) -> list[Case]:
    """Return all combinations that a configuration with `vary` describes.

    Args:
        tree: The configuration, as nested mappings.

    Raises:
        UserError: `vary` or one of the cases is invalid, two cases are the same run, or there are more than
            `MAX_CASES`.
    """
    vary = tree.get("vary") or {}
    remedy = "name at least one key and its values, as in algorithm.alpha: [0.3, 0.6]"
    require(isinstance(vary, dict) and bool(vary), "vary", vary, remedy)
    odd = [key for key in vary if not isinstance(key, str)]
    require(not odd, "vary", odd[:1], "is no key of a configuration")
    axes = [_labelled(key, values) for key, values in vary.items()]
    count = num_cases(vary)
    require(count <= MAX_CASES, "vary", count, f"are more than {MAX_CASES} cases; take fewer values")
    out = []
    for combination in product(*axes):
        labels = dict(zip(vary, (label for label, _ in combination), strict=True))
        values = dict(zip(vary, (value for _, value in combination), strict=True))
        out.append(Case(labels, _configuration(tree, labels, values)))
        check_sections(out[-1].config)
    slugs = [case.slug for case in out]
    twice = next((slug for slug in slugs if slugs.count(slug) > 1), None)
    require(twice is None, "vary", twice, "two cases have the same name; label the values")
    long = next((slug for slug in slugs if len(slug.encode()) > MAX_NAME_BYTES), None)
    require(long is None, "vary", long, "is too long a name for a folder; label the values, in few letters")
    _check_different(out, tree)
    if tree.get("table") is not None:
        table_of(tree).check(vary)
    return out


def _configuration(tree: Mapping[str, Any], labels: Mapping[str, str], values: Mapping[str, Any]) -> Config:
    """Return the configuration of one combination of values."""
    one = {name: value for name, value in tree.items() if name not in ("vary", "table")}
    special: Mapping[str, Any] = {}
    for key, value in values.items():
        if key in (ROWS, COLUMNS):
            require(isinstance(value, dict), f"vary.{key}", value, "take parts of a configuration")
            part = dict(value)
            if key == COLUMNS:
                special = _special(part.pop(ROWS, {}), tree, labels)
            one = loader.merged(one, renamed(part))
        elif key == "configuration":
            file = loader.read(str(value))
            _check_algorithm(tree, file, str(value))
            one = loader.merged(file, one)
        else:
            one = loader.merged(one, renamed(loader.nested(key.split("."), value)))
    config: Config = loader.from_tree(Config, loader.merged(one, renamed(dict(special))))
    return config


def _special(rows: Any, tree: Mapping[str, Any], labels: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what a group of columns changes in this case's row: `vary.columns.LABEL.rows.LABEL`."""
    path = f"vary.columns.{labels[COLUMNS]}.rows"
    require(isinstance(rows, dict), path, rows, "take a mapping of rows to parts of a configuration")
    known = labels_of(tree["vary"].get(ROWS, []))
    for label in rows:
        if str(label) not in known:
            raise UserError(path, label, f"no such row; {nearest(str(label), known)}")
    part: Any = {str(label): part for label, part in rows.items()}.get(labels.get(ROWS, ""), {})
    require(isinstance(part, dict), f"{path}.{labels.get(ROWS)}", part, "take a part of a configuration")
    return dict(part)


def table_of(tree: Mapping[str, Any]) -> TableConfig:
    """Return the section `table` of a sweep that has one."""
    found: TableConfig = loader.from_tree(TableConfig, tree["table"], "table")
    return found


def num_cases(vary: Mapping[str, Any]) -> int:
    """Return the number of combinations, without checking them."""
    return prod(len(values) if isinstance(values, (list, dict)) else 1 for values in vary.values())


def _labelled(key: str, values: Any) -> list[tuple[str, Any]]:
    """Return the labels and values of one key."""
    fits = isinstance(values, (list, dict)) and len(values) > 0
    require(fits, f"vary.{key}", values, "take a list of values, or a mapping of labels to values")
    if isinstance(values, dict):
        return [(str(label), value) for label, value in values.items()]
    return [(label_of(value), value) for value in values]


def _check_algorithm(own: Mapping[str, Any], file: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` where the sweep's own algorithm overrides that of a varied configuration.

    The row would be labelled with an algorithm that was never run.
    """
    mine, theirs = (_algorithm(tree.get("algorithm")) for tree in (own, file))
    remedy = (
        f"vary.configuration {name} says {theirs}, which would never run; leave algorithm out of the sweep"
    )
    require(mine in (None, theirs), "algorithm", mine, remedy)


def _algorithm(section: Any) -> str | None:
    """Return the name in an `algorithm` section."""
    name = section.get("name") if isinstance(section, dict) else section
    return None if name is None else str(name)


def _check_different(all_cases: Sequence[Case], tree: Mapping[str, Any]) -> None:
    """Raise `UserError` where two cases are the same run."""
    seen: dict[str, Case] = {}
    for case in all_cases:
        resolved = {k: v for k, v in loader.to_tree(case.config).items() if k not in ("name", "output")}
        known = seen.setdefault(json.dumps(resolved), case)
        if known is not case:
            keys = [key for key, label in case.labels.items() if known.labels[key] != label]
            own = [key for key in tree if key not in ("vary", "name", "output", "system")]
            why = f" below the sweep's own {', '.join(own)}" if "configuration" in keys and own else ""
            remedy = f"the same run as {known.slug}{why}; take other values of {', '.join(keys)}"
            raise UserError("vary", case.slug, remedy)


# -- running them --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The cases of a sweep that one process runs; all by default.

    Attributes:
        only: Varied key -> labels.
        share: i and N: of those, the i-th of N parts (i from 1). Cases that differ only in times that can be
            recomputed stay together.
    """

    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    share: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, only: Sequence[str] = (), share: str | None = None) -> Part:
        """Return the part that options describe.

        Args:
            only: Texts `KEY=LABEL,LABEL`.
            share: Text `i/N`.

        Raises:
            UserError: An option has another form.
        """
        chosen: dict[str, list[str]] = {}
        for text in only:
            key, equals, names = text.partition("=")
            require(bool(equals and names), "--only", text, "take KEY=LABEL, as in rows=FedAvg,Local")
            chosen.setdefault(key, []).extend(name.strip() for name in names.split(","))
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", share or "1/1")
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        require(1 <= number <= count, "--case", share, "take i/N with i from 1 to N, as in 2/8")
        return cls(chosen, (number, count))

    def check(self, vary: Mapping[str, Any]) -> None:
        """Raise `UserError` where `only` names a key or label that a sweep does not have."""
        for key, names in self.only.items():
            if key not in vary:
                raise UserError("--only", key, f"is not varied; {nearest(key, [*vary])}")
            known = labels_of(vary[key])
            for name in names:
                if name not in known:
                    raise UserError("--only", f"{key}={name}", f"no such label; {nearest(name, known)}")

    def chosen(self, all_cases: Sequence[Case]) -> list[Case]:
        """Return the cases of this part, in order."""
        named = [c for c in all_cases if all(c.labels[key] in names for key, names in self.only.items())]
        groups: list[list[Case]] = []
        for case in named:
            twins = next((g for g in groups if same_training(g[0].config, case.config)), None)
            if twins is None:
                groups.append([case])
            else:
                twins.append(case)
        number, count = self.share
        mine = {id(case) for group in groups[number - 1 :: count] for case in group}
        return [case for case in named if id(case) in mine]


ALL = Part()


def sweep(
    name: str, options: Sequence[str], transport: Transport, quiet: bool = False, part: Part = ALL
) -> Path | None:
    """Run all cases of a configuration, one after the other, each over all ranks.

    A sweep with an `output.id` that was begun already is joined: its complete cases stay as they are.

    Args:
        name: The configuration: a file, or the name of one that comes with mpifl.
        options: Command-line options, laid over it.
        transport: Connects the ranks; every rank calls.
        quiet: Print nothing.
        part: The cases that this process runs.

    Returns:
        The sweep's folder on rank 0, None on the others.

    Raises:
        UserError: The configuration or one of its cases is invalid, or a sweep of that name has another
            configuration; nothing was run.
    """

    def create() -> tuple[dict[str, Any], Path]:
        tree = loader.merged(loader.read(name), loader.overrides(options))
        first = cases(tree)[0].config
        part.check(tree["vary"])
        require(bool(part.chosen(cases(tree))), "--case", "/".join(map(str, part.share)), "has no case left")
        return tree, _folder(tree, first)

    tree, folder = on_server(transport, create)
    return _run_all(tree, folder, transport, quiet, part)


def _folder(tree: Mapping[str, Any], first: Config) -> Path:
    """Return the folder of a sweep: a new one, or that of the same sweep, which is joined."""
    output = first.output
    there = Path(output.folder) / f"{first.name}-{output.id}"
    if output.id is not None and there.is_dir():
        file, until = there / SWEEP_FILE, time.monotonic() + JOIN_SECONDS
        while not file.exists() and time.monotonic() < until:  # another process has just created the folder
            time.sleep(0.1)
        if file.exists():
            began = yaml_file(file, "output.id")
            own = [{k: v for k, v in t.items() if k not in ("vary", "table")} for t in (began, tree)]
            remedy = f"a sweep of that name has other settings; give another output.id ({there})"
            require(json.dumps(own[0]) == json.dumps(own[1]), "output.id", output.id, remedy)
            return there
    folder = folders.create(output.folder, first.name, output.id)
    write_atomically(folder / SWEEP_FILE, yaml.safe_dump(tree, sort_keys=False))
    return folder


def listed(name: str, options: Sequence[str], part: Part = ALL) -> str:
    """Return one line for each case of a part of a sweep.

    Args:
        name: The configuration.
        options: Command-line options, laid over it.
        part: The part.

    Raises:
        UserError: The configuration or one of its cases is invalid.
    """
    tree = loader.merged(loader.read(name), loader.overrides(options))
    every = cases(tree)
    part.check(tree["vary"])
    lines = [", ".join(f"{key} {label}" for key, label in c.labels.items()) for c in part.chosen(every)]
    return "\n".join([*lines, f"{len(lines)} of {len(every)} cases"])


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return any((folder / name).is_file() for name in (SWEEP_FILE, f"{OLD_STEM}.yaml"))


def resume_sweep(folder: Path, transport: Transport, quiet: bool = False) -> Path | None:
    """Run the cases of a sweep that are not complete; a case with a checkpoint continues from it.

    Args:
        folder: The sweep's folder. Files that mpifl 0.1 named `study` are renamed.
        transport: Connects the ranks; every rank calls.
        quiet: Print nothing.

    Returns:
        The sweep's folder on rank 0, None on the others.
    """
    tree = on_server(transport, lambda: _started_with(folder))
    return _run_all(tree, folder, transport, quiet)


def _started_with(folder: Path) -> dict[str, Any]:
    """Return the configuration that a sweep was started with, checked."""
    if not (folder / SWEEP_FILE).exists():
        for path in folder.glob(f"{OLD_STEM}.*"):
            path.rename(path.with_stem("sweep"))
    tree = yaml_file(folder / SWEEP_FILE, "RUN")
    require(isinstance(tree, dict), "RUN", str(folder), f"has a {SWEEP_FILE} that holds no mapping")
    tree = renamed(tree)
    cases(tree)
    return tree


def _run_all(
    tree: dict[str, Any], folder: Path, transport: Transport, quiet: bool, part: Part = ALL
) -> Path | None:
    """Run the cases of a part that are not complete; write table and figure after each."""
    every = cases(tree)
    mine, found = part.chosen(every), Found(folder, tree, every)
    quiet = quiet or not transport.is_server
    with Signals() as signals:
        for number, case in enumerate(mine, 1):
            output = replace(case.config.output, folder=str(folder), id=case.slug, model=False)
            if not quiet:
                labels = ", ".join(f"{key} {label}" for key, label in case.labels.items())
                print(f"case {number}/{len(mine)}: {labels}", flush=True)
            placed = replace(case, config=replace(case.config, output=output))
            _run_case(placed, mine[: number - 1], transport, quiet)
            if transport.is_server:
                found.write()
            if number < len(mine) and on_server(transport, lambda: signals.stop):  # after a case's last step
                raise Stopped(case.config.rounds, str(folder))
    if not transport.is_server:
        return None
    if not quiet:
        print(found.text(), flush=True)
    return folder


def _run_case(case: Case, before: Sequence[Case], transport: Transport, quiet: bool) -> None:
    """Run a case unless it is complete; retime an earlier one that differs only in network and delays."""
    parent, name = Path(case.config.output.folder), case.config.name
    folder = parent / f"{name}-{case.slug}"
    twin = next((c for c in before if same_training(c.config, case.config)), None)
    state = on_server(transport, lambda: _state(folder, twin is None))
    if state == "complete":
        return
    if twin is None:
        run(case.config, transport, quiet, folder if state == "started" else None)
        gc.collect()  # a run leaves cycles that hold its model and samples
        return
    on_server(transport, lambda: write_retimed(load(parent / f"{name}-{twin.slug}"), case.config))


def _state(folder: Path, trains: bool) -> str:
    """Return whether a case is complete, started or new; remove what cannot be resumed."""
    if (folder / "summary.json").is_file():
        return "complete"
    if trains and (folder / "run.json").is_file():
        return "started"
    if folder.exists():  # the process ended while it created the folder
        shutil.rmtree(folder)
    return "new"


# -- table and figure ----------------------------------------------------------------------------------------


class Found:
    """The complete cases in a sweep's folder, whichever process ran them, as tables and a figure."""

    def __init__(self, folder: Path, tree: Mapping[str, Any], every: Sequence[Case]) -> None:
        self.folder, self.every = folder, every
        self.table = None if tree.get("table") is None else table_of(tree)
        self._read: dict[str, tuple[dict[str, Any], Curve, Result]] = {}

    def write(self) -> None:
        """Write the files: each is complete at any time."""
        found = self._complete()
        path = self.folder / "sweep.csv"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        rows = [row for row, _, _ in found]
        folders.write_csv(partial, rows)
        partial.replace(path)
        write_atomically(self.folder / "sweep.md", table(over_seeds(rows)))
        if self.table is not None:
            write_atomically(self.folder / "table.md", self._as_printed(found))
        draw([curve for _, curve, _ in found], self.folder / "sweep.png")

    def text(self) -> str:
        """Return what is printed in the end."""
        found, files = self._complete(), "sweep.md, sweep.csv, sweep.png"
        if self.table is None:
            return f"{table(over_seeds([row for row, _, _ in found]))}\nresults: {self.folder}: {files}"
        return f"{self._as_printed(found)}\nresults: {self.folder}: table.md, {files}"

    def _as_printed(self, found: Sequence[tuple[dict[str, Any], Curve, Result]]) -> str:
        assert self.table is not None
        return f"{self.table.title}\n\n{markdown(self.table, [result for _, _, result in found])}"

    def _complete(self) -> list[tuple[dict[str, Any], Curve, Result]]:
        for case in self.every:
            done = self.folder / f"{case.config.name}-{case.slug}"
            if case.slug not in self._read and (done / "summary.json").is_file():
                self._read[case.slug] = (_row(case, done), _curve(case, done), result_of(case.labels, done))
        return [self._read[case.slug] for case in self.every if case.slug in self._read]


def result_of(labels: Mapping[str, str], folder: Path) -> Result:
    """Return the final figures of a finished run: last row of `metrics.csv`, and `summary.json`.

    Args:
        labels: Of the case.
        folder: The run folder.
    """
    run = load(folder)
    values = dict(_numbers(run.summary))
    return Result(labels, values | {name: float(v[-1]) for name, v in run.metrics.items() if v[-1] == v[-1]})


def _numbers(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted name, number) of all numbers."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{above}{name}", float(value)


def _row(case: Case, folder: Path) -> dict[str, Any]:
    """Return the labels and final figures of a case."""
    run = load(folder)
    summary, metrics = run.summary, run.rows("metrics.csv")
    last, late = metrics[-1], [float(row["accuracy_mean"]) for row in metrics[len(metrics) // 2 :]]
    found: dict[str, Any] = {n: float(last[n]) for n in FIGURES if last.get(n) not in (None, "", "nan")}
    if "asynchronous" in summary:
        found |= {"second_half_mean": mean(late), "second_half_lowest": min(late)}
    found |= {n: v for n in ASYNCHRONOUS if (v := summary.get("asynchronous", {}).get(n)) is not None}
    found |= {n: summary[n] for n in TOTALS}
    return {**case.labels, **{n: round(v, 4) if isinstance(v, float) else v for n, v in found.items()}}


def _curve(case: Case, folder: Path) -> Curve:
    metrics = read_rows(folder / "metrics.csv")
    axis = "virtual_seconds" if "virtual_seconds" in metrics[0] else "round"
    staleness = [int(row["staleness"]) for row in read_rows(folder / "events.csv")]
    x, y = ([float(row[name]) for row in metrics] for name in (axis, "accuracy_mean"))
    return Curve(case.labels, axis.replace("_", " "), x, y, staleness)


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one row for all seeds of a case, with mean and sample standard deviation of each figure.

    Args:
        rows: Labels (texts) and figures (numbers) of each case; `seed` is a label.
    """
    if not any("seed" in row for row in rows):
        return list(rows)
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(v for k, v in row.items() if k != "seed" and isinstance(v, str)), []).append(
            row
        )
    return [
        {k: _spread([r.get(k) for r in group]) for k in group[0] if k != "seed"} for group in groups.values()
    ]


def _spread(values: Sequence[Any]) -> Any:
    """Return the common value, or mean and standard deviation as text."""
    numbers = [v for v in values if isinstance(v, (int, float))]
    if len(set(values)) == 1 or len(numbers) < 2:
        return values[0]
    centre, spread = over_runs(np.array(numbers))
    return f"{centre:.4g} ± {spread:.2g}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table, with the columns of all rows in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(c, "")) for c in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def note_on(config: Config) -> str:
    """Return what is said where only one of several cases is looked at; empty where there is one only."""
    keys = ", ".join(map(str, config.vary or ()))
    return f"\n\nvary: `mpifl sweep` gives other values to {keys}; this is without them" if keys else ""
