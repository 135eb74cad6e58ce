"""Results of a sweep so far: the runs in its folder as tables, a figure, and a `Sweep` in Python."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.analysis.figures import Curve, draw_sweep
from mpifl.analysis.seed_groups import matched
from mpifl.analysis.tables import Table, as_markdown
from mpifl.core.beginning import OWN, PHASES
from mpifl.core.case_names import label_of, rows_left_out
from mpifl.core.conversion import untyped
from mpifl.core.errors import CodeFailed, UserError, first_of, require
from mpifl.core.files import try_lock, write_atomically, write_json
from mpifl.core.optional_packages import REPORT, is_there
from mpifl.core.textfiles import flat, json_mapping, yaml_file, yaml_text
from mpifl.driver.existing import check_origin
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.experiment.table_layout import METRIC, TableConfig
from mpifl.results import run_folder as folders
from mpifl.results.identity import Origin, deciding, describe_origins, of_machine
from mpifl.results.metrics import over_runs
from mpifl.results.reader import Run, load
from mpifl.supervision.logging import warn, warn_once

from .cases import (
    CONFIGURATIONS,
    CONFIGURATIONS_FILE,
    SWEEP_FILE,
    Case,
    beginnings,
    started_with,
    table_if_any,
    unchecked_cases,
)
from .table import Result, markdown, of_seeds

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("{}_mean", "{}_worst", "{}_before", "{}_cluster", "mixture_kl", "ari")  # {}: the metric
ASYNCHRONOUS = ("staleness_mean", "staleness_max", "refusal_rate", "clock_seconds", "arrivals_per_second")
VIRTUAL = "virtual_seconds"  # simulated time of rounds
DECIDES_BITS = ("kernels", "stack", "sums", "cuda_graphs", "deterministic")  # of `system`
ROUNDING = 1e-12  # a deviation below this share of the mean is that of rounding
DRAWING_SHARE = 10  # spend at most a tenth of the time on drawing intermediate figures
FIRST_DRAWING_S = 0.5  # assumed time of the first drawing
CaseFigures = tuple[dict[str, Any], Curve, Result]  # row of `sweep.csv`, curve of the figure, row of `table`
BEGINNINGS_FILE = "beginnings.csv"
Beginning = Mapping[str, Mapping[str, int]]  # phase -> name of a run, or `OWN` -> number of results
TOTALS = ("federation_bytes_up", "federation_bytes_down", "wall_seconds")


# -- the folder ----------------------------------------------------------------------------------------------


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / SWEEP_FILE).is_file()


def keep(tree: Mapping[str, Any], folder: Path) -> None:
    """Write the configuration that `started_with` returns into a sweep's folder."""
    if CONFIGURATIONS in tree:
        write_json(folder / CONFIGURATIONS_FILE, tree[CONFIGURATIONS])
    own = {name: value for name, value in tree.items() if name != CONFIGURATIONS}
    write_atomically(folder / SWEEP_FILE, yaml_text(own))


def titles(folder: Path) -> dict[str, str]:
    """Return name of the run folder -> title, for each case that a sweep has or will have.

    Args:
        folder: the sweep's folder.
    """
    return {case.folder(folder).name: case.title for case in unchecked_cases(started_with(folder))}


def is_complete(case: Case, parent: Path) -> bool:
    """Return whether a case has run to its end.

    Args:
        case: the case.
        parent: the sweep's folder.
    """
    return (case.folder(parent) / "summary.json").is_file()


def never_ran(folder: Path) -> bool:
    """Return whether nothing of a case's run is kept: it has not begun, or has failed before a checkpoint.

    Args:
        folder: the run folder of the case.
    """
    if not (folder / "run.json").is_file():
        return True
    if (folder / "summary.json").is_file() or any(folder.glob("checkpoints/step-*")):
        return False
    with (folder / "run.json").open() as file:
        return try_lock(file)  # otherwise a process is running it


def settings_of(config: Config) -> dict[str, Any]:
    """Return the keys that decide the numbers of a case: dotted key -> value."""
    whole = loader.to_tree(config)
    system = {key: whole["system"][key] for key in DECIDES_BITS}
    system["cuda_graphs"] = bool(system["cuda_graphs"])  # null changes no bit
    return dict(flat({**deciding(whole), "system": system}))


def require_same(was: Config, is_now: Config, what: str, remedy: str) -> None:
    """Raise `UserError` unless two configurations have the same settings.

    Args:
        was: the configuration of `what`.
        is_now: the configuration that is asked for.
        what: the name of the first one, for the message.
        remedy: what to do.
    """
    one, other = settings_of(was), settings_of(is_now)
    keys = [key for key in dict.fromkeys([*other, *one]) if one.get(key) != other.get(key)]
    if keys:
        others = f" (other keys that differ: {', '.join(keys[1:])})" if keys[1:] else ""
        raise UserError(keys[0], other.get(keys[0]), f"{what} has {one.get(keys[0])!r}{others}; {remedy}")


def check_case(case: Case, parent: Path) -> None:
    """Check that the run in the folder of a case is the case's, finished or not; there may be none yet.

    Args:
        case: the case.
        parent: the sweep's folder.

    Raises:
        UserError: its settings are not those of the case, or it was computed by other code or with other
            files of the user.
    """
    folder = case.folder(parent)
    if not (folder / "config.yaml").is_file() or never_ran(folder):
        return
    remedy = "move it away, and the sweep runs the case again"
    folders.check_format(json_mapping(folder / "run.json").get("format"), folder, remedy)
    summary = json_mapping(folder / "summary.json")
    was = loader.from_tree(Config, yaml_file(folder / "config.yaml", "RUN"))
    require_same(was, case.config, f"the run in {folder}", remedy)
    more = isinstance(rounds := summary.get("rounds"), int) and rounds > case.config.rounds
    require(not more, "rounds", case.config.rounds, f"the run in {folder} went on to {rounds}; {remedy}")
    check_origin(case.config, folder, remedy)


def _read(case: Case, parent: Path) -> Run:
    """Return the run of a complete case; raise `UserError` as `check_case`, or if it cannot be read."""
    check_case(case, parent)
    return load(case.folder(parent))


def say_missing(names: Sequence[str]) -> None:
    """Print, for each sweep among some folders, a line with the cases that have no folder.

    Args:
        names: run folders, folders of sweeps, folders that contain these, and patterns of them.
    """
    named = [Path(path) for name in names for path in matched(name)]
    inside = [file.parent for folder in named for file in sorted(folder.glob(f"*/{SWEEP_FILE}"))]
    for folder in dict.fromkeys([*filter(is_sweep, named), *inside]):
        try:
            of = titles(folder)
        except (UserError, CodeFailed):  # its runs can still be compared
            continue
        missing = [title for case, title in of.items() if not (folder / case / "config.yaml").is_file()]
        if missing:
            warn(f"{folder}: {len(missing)} of {len(of)} cases are not there: {first_of(missing)}")


# -- table and figure ----------------------------------------------------------------------------------------


class Found:
    """The complete cases in a sweep's folder, whichever process ran them, as tables and a figure.

    Args:
        folder: the sweep's folder.

    Attributes:
        every: the cases of the sweep, including those that other processes have added meanwhile.
        table: the layout of a table in a paper; None for none.
        left_out: (group of columns, row) -> why the group has no such row.
    """

    every: Sequence[Case]
    table: TableConfig | None
    left_out: Mapping[tuple[str, str], str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sharing: Mapping[str, Mapping[str, str]] | None = None
        self._file = 0, 0  # modification time and number of the file that the cases were read from
        self._read_cases()
        self._read: dict[str, CaseFigures] = {}
        self._beginnings: dict[str, tuple[Mapping[str, str], Beginning]] = {}  # case -> labels, and record
        self._origins: dict[str, Origin] = {}  # run -> origin of its numbers
        self._unreadable: set[str] = set()  # cases
        self._shown = 0  # number of cases in the figure
        self._last_drawn = time.monotonic()
        self._seconds = FIRST_DRAWING_S  # time of drawing the figure

    def _read_cases(self) -> None:
        """Read the cases, unless they are those that were read before."""
        about = (self.folder / SWEEP_FILE).stat()
        if self._file != (about.st_mtime_ns, about.st_ino):
            tree = started_with(self.folder)
            self.every = unchecked_cases(tree)
            self.table = table_if_any(tree)
            self.left_out = rows_left_out(tree["vary"])
            self._file, self._sharing = (about.st_mtime_ns, about.st_ino), None

    @property
    def sharing(self) -> Mapping[str, Mapping[str, str]]:
        """What each case computes together with others, see `cases.beginnings`."""
        if self._sharing is None:
            self._sharing = beginnings(self.every, self.table)
        return self._sharing

    def write(self) -> None:
        """Write the tables, and from time to time the figure; each file is complete at any time.

        Several processes may write at the same time. If a case was finished or added meanwhile, the files are
        written again, so the last process to write has seen every case that was finished before.
        """
        found: list[CaseFigures] = []
        while len(now := self._complete()) > len(found):
            found = now
            rows = [row for row, _, _ in found]
            folders.write_csv(self.folder / "sweep.csv", rows)
            few = len(found) < len(self.every)
            if self._beginnings:
                folders.write_csv(self.folder / BEGINNINGS_FILE, of_beginnings(self._beginnings.values()))
            once = f"\n{self._shared}\n" if self._beginnings else ""
            note = f"\n{len(found)} of {len(self.every)} cases are complete.\n" if few else ""
            write_atomically(self.folder / "sweep.md", table(over_seeds(rows, self._labels)) + note + once)
            if self.table is not None:
                write_atomically(self.folder / "table.md", self._as_printed(found) + note + once)
            if time.monotonic() > self._last_drawn + DRAWING_SHARE * self._seconds:
                self.draw()

    def draw(self) -> None:
        """Write the figure, unless it already shows all complete cases."""
        found = self._complete()
        if not is_there("matplotlib"):
            warn_once(
                f'{self.folder}: no figure sweep.png, which needs matplotlib: pip install "mpifl[{REPORT}]"'
            )
        elif len(found) > self._shown:
            start = time.monotonic()
            draw_sweep([curve for _, curve, _ in found], self.folder / "sweep.png")
            self._shown, self._last_drawn = len(found), time.monotonic()
            self._seconds = self._last_drawn - start

    def text(self) -> str:
        """Return the text to print at the end."""
        found, files = self._complete(), "sweep.md, sweep.csv"
        files += ", sweep.png" if (self.folder / "sweep.png").exists() else ""
        if not found:
            return f"no case of {self.folder} is complete"
        unlike = [f"cases differ in {line}" for line in describe_origins(self._origins)]
        if self.table is None:
            shown = table(over_seeds([row for row, _, _ in found], self._labels))
        else:
            shown, files = self._as_printed(found), f"table.md, {files}"
        unlike += [self._shared] if self._beginnings else []
        return "\n".join([shown, *unlike, f"results: {self.folder}: {files}"])

    @property
    def _shared(self) -> str:
        """One line: how many cases computed the first phases that cases share."""
        records = [record for _, record in self._beginnings.values()]
        parts = []
        for phase, title in PHASES.items():
            having = [record[phase] for record in records if phase in record]
            own = sum(OWN in origins for origins in having)
            parts += [f"{title} by {own} of {len(having)}"] if having else []
        return f"Beginnings that cases share were computed once: {', '.join(parts)} ({BEGINNINGS_FILE})."

    def _as_printed(self, found: Sequence[CaseFigures]) -> str:
        assert self.table is not None
        results = [result for _, _, result in found]
        return f"{self.table.title}\n\n{markdown(self.table, results, self._labels, left_out=self.left_out)}"

    @property
    def _labels(self) -> list[Mapping[str, str]]:
        return [case.labels for case in self.every]

    def _complete(self) -> list[CaseFigures]:
        self._read_cases()
        for case in self.every:
            if case.slug in (*self._read, *self._unreadable) or not is_complete(case, self.folder):
                continue
            try:
                run = _read(case, self.folder)
                self._read[case.slug] = _figures(case, run)
                if beginning := run.summary.get("beginning"):
                    self._beginnings[case.slug] = case.labels, beginning
                origin = run.origin
                self._origins[run.folder.name] = replace(origin, identity=of_machine(origin.identity))
            except UserError as error:  # the other cases are still shown
                self._unreadable.add(case.slug)
                warn_once(f"{case.title} is left out of the tables: {error}")
        return [self._read[case.slug] for case in self.every if case.slug in self._read]


def result_of(labels: Mapping[str, str], run: Run) -> Result:
    """Return the final figures of a finished run: last row of `metrics.csv`, and `summary.json`.

    Of columns that end in `_mean` also the largest value over all evaluations (`accuracy_mean_max`).

    Args:
        labels: labels of the case.
        run: the run.
    """
    values = {k: float(v) for k, v in flat(run.summary) if is_number(v)}
    values |= {name: float(v[-1]) for name, v in run.series.items() if v[-1] == v[-1]}
    means = {name: v for name, v in run.series.items() if name.endswith("_mean") and not np.isnan(v).all()}
    values |= {f"{name}_max": float(np.nanmax(v)) for name, v in means.items()}
    stem = f"{run.metric.name}_"  # also give metric_mean etc., for tables over problems of several tasks
    alike = {f"{METRIC}{k.removeprefix(stem)}": v for k, v in values.items() if k.startswith(stem)}
    return Result(labels, alike | values, run.metric.better)


def figures_of(run: Run) -> dict[str, Any]:
    """Return the final figures of a run that the tables of a sweep show."""
    summary, metrics = run.summary, run.rows("metrics.csv")
    metric = run.metric.name
    last, late = metrics[-1], [float(row[f"{metric}_mean"]) for row in metrics[len(metrics) // 2 :]]
    names = [name.format(metric) for name in FIGURES]
    found: dict[str, Any] = {n: float(last[n]) for n in names if last.get(n) not in (None, "", "nan")}
    if "asynchronous" in summary:
        worst = min(late) if run.metric.better > 0 else max(late)
        found |= {"second_half_mean": mean(late), "second_half_lowest": worst}
    found |= {n: v for n in ASYNCHRONOUS if (v := summary.get("asynchronous", {}).get(n)) is not None}
    if "clock_seconds" not in found and last.get(VIRTUAL) not in (None, ""):
        found[VIRTUAL] = float(last[VIRTUAL])
    return found | {n: summary[n] for n in TOTALS}


def of_beginnings(found: Iterable[tuple[Mapping[str, str], Beginning]]) -> list[dict[str, Any]]:
    """Return a row for each case and first phase that it shares: what it computed, and took from whom.

    Args:
        found: labels of each case, and `beginning` of its `summary.json`.
    """
    return [
        {
            **labels,
            "phase": phase,
            "computed": origins.get(OWN, 0),
            "taken": sum(count for name, count in origins.items() if name != OWN),
            "from": " ".join(name for name in origins if name != OWN),
        }
        for labels, record in found
        for phase, origins in record.items()
    ]


def _figures(case: Case, run: Run) -> CaseFigures:
    """Return what the tables and the figure show of a case."""
    metrics = run.rows("metrics.csv")
    axis = VIRTUAL if VIRTUAL in metrics[0] else "round"
    staleness = [int(row["staleness"]) for row in run.rows("events.csv")]
    name = run.metric.name
    x, y = ([float(row[column]) for row in metrics] for column in (axis, f"{name}_mean"))
    train = [float(value) for row in metrics if (value := row.get(f"{name}_train_mean"))]
    curve = Curve(case.labels, axis.replace("_", " "), x, y, staleness, train, run.metric.title)
    return {**case.labels, **figures_of(run)}, curve, result_of(case.labels, run)


def over_seeds(
    rows: Sequence[Mapping[str, Any]], every: Sequence[Mapping[str, str]] = ()
) -> list[Mapping[str, Any]]:
    """Return one row for all seeds of a case, with mean and sample standard deviation of each figure.

    If some rows have fewer seeds than the sweep asks for, all rows show their number of seeds.

    Args:
        rows: labels (texts) and figures (numbers) of each case; `seed` is a label.
        every: labels of all cases that the sweep asks for, in whose order the rows are; empty: those of the
            rows.
    """
    if not any("seed" in row for row in rows):
        return list(rows)
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        labels = tuple(v for k, v in row.items() if k != "seed" and isinstance(v, str))
        groups.setdefault(labels, []).append(row)
    asked = Counter(tuple(v for k, v in labels.items() if k != "seed") for labels in every)
    few = any(len(group) < asked[labels] for labels, group in groups.items())
    out: list[Mapping[str, Any]] = []
    for labels in [labels for labels in asked if labels in groups] or [*groups]:
        group = groups[labels]
        names = dict.fromkeys(k for row in group for k in row)
        out.append({k: _spread([r.get(k) for r in group]) for k in names if k != "seed"})
        if few:
            own = {k: v for k, v in out[-1].items() if k in every[0]}
            out[-1] = {**own, "seeds": of_seeds(len(group), asked[labels]), **out[-1]}
    return out


def _spread(values: Sequence[Any]) -> Any:
    """Return the common value, or mean and standard deviation as text; adds the count if some are missing."""
    there = [v for v in values if v is not None]
    few = f" ({len(there)} of {len(values)})" if len(there) < len(values) else ""
    if len(set(there)) == 1:
        return f"{_shown(there[0])}{few}" if few else there[0]
    centre, spread = over_runs(np.array(there))
    spread = 0.0 if spread < ROUNDING * abs(centre) else spread
    more = f" ± {spread:.2g}" if isfinite(spread) else ""  # infinite figures have no deviation
    return f"{centre:.4g}{more}{few}"


def _shown(value: Any) -> str:
    """Return a value as text: floats with four decimals, small ones with four significant digits."""
    if not isinstance(value, float):
        return str(value)
    return str(round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}"))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table, with the columns of all rows in order of appearance."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return as_markdown(Table.of(columns, [[_shown(row.get(c, "")) for c in columns] for row in rows]))


# -- in Python -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The complete runs of a sweep.

    Attributes:
        folder: the sweep's folder.
        keys: the varied keys, in order.
        runs: labels of a case -> its run, in the order of the cases. Labels are texts: a single text if one
            key is varied (`runs["ucfl"]`), otherwise a tuple in the order of the keys (`runs["ucfl", "3"]`).
        values: labels of a case -> its value of each varied key; the label if the value is no number.
    """

    folder: Path
    keys: tuple[str, ...]
    runs: Mapping[str | tuple[str, ...], Run]
    values: Mapping[str | tuple[str, ...], tuple[Any, ...]]

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each run: a column for each varied key, then the final figures with all digits."""
        import pandas as pd

        rows = [
            dict(zip(self.keys, self.values[labels], strict=True)) | figures_of(run)
            for labels, run in self.runs.items()
        ]
        return pd.DataFrame(rows)


def load_sweep(folder: str | Path) -> Sweep:
    """Return the complete runs of the sweep in a folder; a sweep that still runs may have more later.

    Raises:
        UserError: the folder is no sweep, or has no complete case that can be read.
    """
    there = Path(folder)
    require(there.is_dir(), "SWEEP", str(folder), "there is no such folder")
    tree = started_with(there, "SWEEP")
    complete = [case for case in unchecked_cases(tree) if is_complete(case, there)]
    require(bool(complete), "SWEEP", str(folder), "has no complete case; wait for one, or run it")
    runs: dict[str, Run] = {}
    for case in complete:
        try:
            runs[case.slug] = _read(case, there)
        except UserError as error:
            if len(complete) == 1:
                raise
            warn_once(f"{case.title} is left out: {error}")
    require(bool(runs), "SWEEP", str(folder), "has no case that can be read; run it again")
    complete = [case for case in complete if case.slug in runs]
    numbers = {
        key: {label_of(value): value for value in values if isinstance(values, list) and is_number(value)}
        for key, values in untyped(tree["vary"]).items()
    }

    def labels_of(case: Case) -> str | tuple[str, ...]:
        labels = tuple(case.labels.values())
        return labels if len(labels) > 1 else labels[0]

    return Sweep(
        there,
        tuple(tree["vary"]),
        {labels_of(case): runs[case.slug] for case in complete},
        {labels_of(case): tuple(numbers[k].get(v, v) for k, v in case.labels.items()) for case in complete},
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
