"""Records the study of groups that move, for `docs/moving-groups.md`.

    python tests/campaigns/record_moving.py FOLDER

The figures of the sweep, `sweeps/moving-groups` or `sweeps/moving-groups-mnist`, go into a file of its name
in `configs/sweeps/measured`, a line for each method and group of columns of which all seeds ran. Tables of
the page are written from it, and from that of the first its figure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.analysis.figures import framed, legend_below, line_style, new_figure
from mpifl.analysis.statistics import estimate
from mpifl.analysis.tables import Table, as_markdown
from mpifl.core.case_names import labels_of
from mpifl.core.errors import require
from mpifl.core.files import write_atomically
from mpifl.core.textfiles import json_file
from mpifl.experiment import loader
from mpifl.experiment.table_layout import COLUMNS, ROWS, SEED
from mpifl.results.reader import Run
from mpifl.sweeps.cases import Case, started_with, unchecked_cases
from mpifl.sweeps.results import is_complete
from mpifl.sweeps.table import CONFIDENCE, Cell

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.recorded import ROOT, Recorded, about, kept, runs_of

NAME = "moving-groups"
RECORDED = Recorded(NAME, "record_moving.py")
MNIST = Recorded(f"{NAME}-mnist", "record_moving.py", on=NAME)
FIGURE = ROOT / "docs" / "figures" / f"{NAME}.png"
CHANGE = 240  # visits before the change
WORLDS = ("swap", "split", "label", "no drift")
WAYS = (
    "rounds",
    *(f"{policy} {under_way}" for policy in ("buffer", "arrivals") for under_way in (6, 12, 24)),
)
SHOWN = ("rounds", "buffer 12", "arrivals 12")  # of which there are tables of all methods, and curves
PAIRS = {name: f"{name} again" for name in ("PACFL", "FlexCFL", "EMD-CFL")}
PERCENT = (0.0, 100.0)
DRAWN = ("FedAvg", "Oracle", "IFCA", "FeSEM", "FlexCFL", "FlexCFL again", "FedDrift")
Place = tuple[str, str]  # group of columns, row
Rows = Mapping[Place, Mapping[str, Any]]


# -- figures of runs -----------------------------------------------------------------------------------------


def record(folder: Path) -> list[Path]:
    """Record the figures of a sweep, and write its tables of the page and its figure.

    Args:
        folder: folder of the sweep, complete or not.

    Returns:
        The files that were written.

    Raises:
        UserError: the folder is that of another sweep, or no method has all seeds in a group of columns.
    """
    tree = started_with(folder)
    to = next((one for one in (RECORDED, MNIST) if one.name == tree.get("name")), None)
    require(to is not None, "RUN", str(folder), f"is not a run of sweeps/{NAME} or sweeps/{MNIST.name}")
    assert to is not None
    groups: dict[Place, list[Case]] = {}
    for case in unchecked_cases(tree):
        groups.setdefault((case.labels[COLUMNS], case.labels[ROWS]), []).append(case)
    origins: dict[str, set[str]] = {"dates": set(), "code": set()}
    rows, missing, seconds = [], [], 0.0
    for (columns, row), group in groups.items():
        without = [case.labels[SEED] for case in group if not is_complete(case, folder)]
        if without:
            missing.append({COLUMNS: columns, ROWS: row, SEED: without})
            continue
        one: dict[str, Any] = {COLUMNS: columns, ROWS: row, "seed": [], "digest": []}
        for case, run in runs_of(group, folder):
            one["seed"].append(case.labels[SEED])
            one["digest"].append(run.summary["digest"][:12])
            drawn = columns in [f"swap, {way}" for way in SHOWN]
            for name, value in figures_of(run, drawn).items():
                one.setdefault(name, []).append(value)
            for name, text in about(run).items():
                origins[name].add(text)
            seconds += run.summary["wall_seconds"]
        rows.append(one)
    require(
        bool(rows), "RUN", str(folder), "has no method with all seeds in a group of columns; run it first"
    )
    to.write(rows, origins, missing=missing, minutes=round(seconds / 60))
    write_atomically(to.page, page(to.page.read_text(), to))
    if to is MNIST:
        return [to.measured, to.page]
    draw(FIGURE, found())
    return [to.measured, to.page, FIGURE]


def figures_of(run: Run, with_curve: bool = False) -> dict[str, Any]:
    """Return the figures of a run, with visits in place of server steps.

    Args:
        run: the run.
        with_curve: whether to add the accuracy at every evaluation.

    Returns:
        `final` and `after`: mean accuracy over clients at the end, and the mean over evaluations after the
        change (without drift: after as many visits); `ari` at the end; `staleness`: mean over uploads, in
        server steps; `up`, `down`: bytes of the federation; under drift `recovered_after`, visits until 95 %
        of the accuracy before the change were reached again (None: never), and `lost`, accuracy x visits.
    """
    visits = uploads_of_a_step(run.config)
    accuracy = run.series[f"{run.metric.name}_mean"]
    after = run.series["round"] * visits > CHANGE
    out: dict[str, Any] = {
        "final": kept(accuracy[-1]),
        "after": kept(accuracy[after].mean()),
        "ari": kept(run.series["ari"][-1]),
        "staleness": kept(run.summary.get("asynchronous", {}).get("staleness_mean", 0.0)),
        "up": run.summary["federation_bytes_up"],
        "down": run.summary["federation_bytes_down"],
    }
    for event in run.summary.get("drift", ()):
        steps = event["recovered_after"]
        out |= {
            "recovered_after": None if steps is None else steps * visits,
            "lost": kept(event["lost"] * visits),
        }
    if with_curve:
        out["curve"] = [round(float(value), 4) for value in accuracy]
    return out


def uploads_of_a_step(config: Mapping[str, Any]) -> int:
    """Return how many uploads a server step takes, from a run's configuration."""
    policy = config["policy"]
    name = policy if isinstance(policy, str) else policy["name"]
    return {"rounds": config["cohort_size"], "every_arrival": 1}.get(name) or int(policy["size"])


# -- recorded figures ----------------------------------------------------------------------------------------


def found(of: Recorded = RECORDED) -> dict[Place, dict[str, Any]]:
    """Return (group of columns, row) -> its recorded figures."""
    return {(one[COLUMNS], one[ROWS]): one for one in of.rows()}


def values(rows: Rows, world: str, way: str, row: str, figure: str) -> np.ndarray | None:
    """Return a figure for each seed, accuracies in percent and bytes in MB; None if it is not recorded.

    Args:
        rows: the recorded figures.
        world: the kind of drift, or `no drift`.
        way: how uploads arrive.
        row: the method.
        figure: name of the figure; `bytes` is the sum of both directions.
    """
    one = rows.get((f"{world}, {way}", row))
    if one is None:
        return None
    if figure == "bytes":
        return (np.array(one["up"]) + np.array(one["down"])) / 1e6
    scale = 100.0 if figure in ("final", "after", "curve", "lost") else 1.0
    return np.array(one[figure], float) * scale


def cell(found: np.ndarray | None, digits: int = 1, limits: tuple[float, float] = (-np.inf, np.inf)) -> str:
    """Return the mean over seeds with its 95 % t-interval."""
    if found is None:
        return "-"
    return Cell("", tuple(found), digits, "t", seeds=len(found), limits=limits).measured


def difference(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return b - a, seed by seed."""
    return None if a is None or b is None else b - a


def methods() -> list[str]:
    """Return the methods, in the order of the sweep."""
    return labels_of(loader.read(f"sweeps/{NAME}")["vary"][ROWS])


def _methods(rows: Rows) -> list[str]:
    """Return the methods that are recorded in some group of columns."""
    return [row for row in methods() if any(one == row for _, one in rows)]


def _worlds(rows: Rows) -> list[str]:
    """Return the worlds in which some method is recorded."""
    return [world for world in WORLDS if any(columns.startswith(f"{world}, ") for columns, _ in rows)]


def _pairs(rows: Rows) -> list[tuple[str, str]]:
    """Return the pairs of methods, once and again, that are recorded."""
    return [pair for pair in PAIRS.items() if {*pair} <= {*_methods(rows)}]


# -- tables --------------------------------------------------------------------------------------------------


def tables(of: Recorded = RECORDED) -> str:
    """Return the tables of a sweep, without those in which nothing would stand."""
    rows = found(of)
    parts: list[str] = []
    for way in SHOWN:
        parts += [f"**Accuracy after the change, %: {way}**\n", as_markdown(_after(rows, way))]
    parts += ["**ARI at the end**\n", as_markdown(_ari(rows))]
    if ("swap, arrivals 24", "FedAvg") in rows:
        parts += ["**Accuracy after the change, %, and visits under way**\n", as_markdown(_staleness(rows))]
    parts += ["**Looking once and again, under swap**\n", as_markdown(_again(rows))]
    parts += [
        "**Accuracy after the change that looking again adds, points**\n",
        as_markdown(_again_elsewhere(rows)),
    ]
    parts += ["**Recovery from swap**\n", as_markdown(_recovery(rows))]
    parts.append("[]: 95 % confidence interval of the mean over seeds (t); -: not recorded\n")
    head = json_file(of.measured, "RUN")
    runs = sum(len(one["seed"]) for one in rows.values())
    took = f"The {runs:,} recorded runs took {head['minutes']} minutes, one added to the other"
    parts.append(f"{took}; up to three ran at a time on a machine of two cores that other work shared.\n")
    return "\n".join([*parts, *_missing(head["missing"])])


def _missing(left: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for the methods that are not recorded in the same groups of columns."""
    of: dict[str, list[str]] = {}
    for one in left:
        of.setdefault(one[ROWS], []).append(one[COLUMNS])
    alike: dict[str, list[str]] = {}
    for row, columns in of.items():
        alike.setdefault("; ".join(columns), []).append(row)
    lines = [f"- {', '.join(names)}: {columns}" for columns, names in alike.items()]
    said = "Not recorded, because runs of a seed had failed or had not ended:\n"
    return [said, *lines, ""] if lines else []


def _after(rows: Rows, way: str) -> Table:
    lines = [
        [row, *(cell(values(rows, world, way, row, "after"), limits=PERCENT) for world in _worlds(rows))]
        for row in _methods(rows)
    ]
    return Table.of(["", *_worlds(rows)], lines)


def _ari(rows: Rows) -> Table:
    places = [(world, way) for world in _worlds(rows) if world != "label" for way in SHOWN]
    lines = [
        [row, *(cell(values(rows, *place, row, "ari"), 2, (-1.0, 1.0)) for place in places)]
        for row in _methods(rows)
    ]
    return Table.of(["", *(f"{world}, {way}" for world, way in places)], lines)


def staleness(rows: Rows, way: str) -> float:
    """Return the mean staleness in server steps over all recorded runs of a way."""
    of = [np.mean(one["staleness"]) for (columns, _), one in rows.items() if columns.endswith(f", {way}")]
    return float(np.mean(of)) if of else np.nan


def _staleness(rows: Rows) -> Table:
    ways = [way for way in WAYS if way.startswith("arrivals")]
    header, lines = [""], [[row] for row in _methods(rows)]
    for world in ("swap", "no drift"):
        header += [f"{world}, {way.removeprefix('arrivals ')} ({staleness(rows, way):.1f})" for way in ways]
        header.append(f"{world}, 24 less 6")
        for line in lines:
            found = [values(rows, world, way, line[0], "after") for way in ways]
            line += [cell(one, limits=PERCENT) for one in found]
            line.append(cell(difference(found[0], found[-1])))
    notes = "in brackets of the titles: mean staleness in server steps, which are single uploads here"
    return Table.of(header, lines, [notes])


def _again(rows: Rows) -> Table:
    lines = []
    for once, again in _pairs(rows):
        for way in [way for way in WAYS if (f"swap, {way}", once) in rows]:
            of = {
                f: [values(rows, "swap", way, r, f) for r in (once, again)] for f in ("ari", "after", "bytes")
            }
            more = difference(*of["bytes"])
            lines.append(
                [
                    *(f"{once}, {way}", cell(of["ari"][0], 2, (-1, 1)), cell(of["ari"][1], 2, (-1, 1))),
                    *(cell(of["after"][0], limits=PERCENT), cell(difference(*of["after"]))),
                    *(_plain(of["bytes"][0]), _plain(more)),
                ]
            )
    header = ["", "ARI, once", "ARI, again", "accuracy, once", "points added", "MB, once", "MB added"]
    return Table.of(header, lines)


def _plain(found: np.ndarray | None) -> str:
    return "-" if found is None else f"{found.mean():.2f}"


def _again_elsewhere(rows: Rows) -> Table:
    lines = []
    for once, again in _pairs(rows):
        for way in SHOWN:
            line = [f"{once}, {way}"]
            for world in _worlds(rows):
                of = [values(rows, world, way, row, "after") for row in (once, again)]
                line.append(cell(difference(*of)))
            lines.append(line)
    return Table.of(["", *_worlds(rows)], lines)


def _recovery(rows: Rows) -> Table:
    header, lines = [""], [[row] for row in _methods(rows)]
    for way in SHOWN:
        header += [f"{way}, recovered", f"{way}, visits", f"{way}, lost"]
        for line in lines:
            visits = values(rows, "swap", way, line[0], "recovered_after")
            if visits is None:
                line += ["-"] * 3
                continue
            back = visits[~np.isnan(visits)]
            line += [f"{len(back)} of {len(visits)}", f"{back.mean():.0f}" if len(back) else "-"]
            lost = values(rows, "swap", way, line[0], "lost")
            line.append(cell(lost, 0, (0.0, np.inf)))
    notes = [
        "recovered: seeds in which 95 % of the accuracy before the change were reached again; visits: mean "
        "over these seeds, 0: never below; lost: area below the accuracy before, points x visits"
    ]
    return Table.of(header, lines, notes)


def page(text: str, of: Recorded = RECORDED) -> str:
    """Return the page with its tables written anew.

    Args:
        text: the page.
        of: the file of figures.

    Raises:
        UserError: the page has no place for them.
    """
    return of.with_tables(text, tables(of))


# -- figure --------------------------------------------------------------------------------------------------


def draw(file: Path, rows: Rows) -> None:
    """Draw accuracy against visits under swap, with intervals over seeds, for three ways of arrival.

    Args:
        file: file of the figure.
        rows: the recorded figures.
    """
    figure = new_figure(10.0, 3.8)
    axes = figure.subplots(1, len(SHOWN), sharey=True)
    for axis, way in zip(axes, SHOWN, strict=True):
        for i, row in enumerate(DRAWN):
            curves = values(rows, "swap", way, row, "curve")
            if curves is None:
                continue
            x = np.arange(1, curves.shape[1] + 1) * 2 * CHANGE / curves.shape[1]
            of = [estimate(column, "t", CONFIDENCE, PERCENT) for column in curves.T]
            axis.plot(x, [one.mean for one in of], label=row, **line_style(i))
            colour = line_style(i)["color"]
            axis.fill_between(
                x, [one.low for one in of], [one.high for one in of], color=colour, alpha=0.12, lw=0
            )
        axis.axvline(CHANGE, color="#555555", lw=0.8)
        axis.set_title(way, fontsize=9)
        framed(axis, "visits", "accuracy, %" if way == SHOWN[0] else "")
        axis.set_ylim(50, 100)
    legend_below(figure, *axes)
    figure.savefig(file, dpi=110)


def main(words: Sequence[str]) -> None:
    """Record the sweep in a folder."""
    require(len(words) == 1, "FOLDER", " ".join(words), "give one folder of the sweep")
    for path in record(Path(words[0])):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
