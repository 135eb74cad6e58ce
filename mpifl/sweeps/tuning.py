"""Sweeps whose rows have options chosen on validation data, by one rule for all rows (section `tune`).

Such a sweep has two stages. In the first one every candidate of a row runs once in every group of columns,
with a seed of its own, and is evaluated on validation samples. In the second one the sweep runs with the best
candidate of each row and group. Both are ordinary sweeps in folders of their own, `NAME-tuning-ID` and
`NAME-ID`, which several processes may share: each runs its part of the candidates, and then what is left of
them and no other process runs.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from mpifl.comm.transport import Transport, on_server
from mpifl.core.case_names import LEFT_OUT, label_among, label_of, labels_of
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.files import write_atomically
from mpifl.experiment import loader
from mpifl.experiment.schema import REFUSE, REPLACE
from mpifl.experiment.table_layout import COLUMNS, METRIC, OF_SWEEPS, ROWS, SEED, TuneConfig
from mpifl.results.reader import load

from . import sweep as sweeps
from .cases import ALL, Part, cases, started_with, unchecked_cases, with_configurations
from .results import check_case, is_complete, is_sweep, result_of

SUFFIX = "-tuning"  # of the name of the first stage
CHOICES_FILE = "choices.csv"  # in its folder: every candidate, its figure, and whether it was chosen
WAIT_S = 1.0  # between two looks at candidates that other processes run
CHOSEN_BY = f"{METRIC}mean"


@dataclass(frozen=True)
class Candidate:
    """One combination of the values that a row may have.

    Attributes:
        row: label of the row of the sweep.
        label: label of its row in the first stage.
        part: the part of a configuration that it lays over the row.
    """

    row: str
    label: str
    part: Mapping[str, Any]


def tune_of(tree: Mapping[str, Any]) -> TuneConfig | None:
    """Return the section `tune` of a sweep; None without one.

    Args:
        tree: the configuration, as nested mappings.

    Raises:
        UserError: it is invalid, or does not fit what the sweep varies.
    """
    if tree.get("tune") is None:
        return None
    tune: TuneConfig = loader.from_tree(TuneConfig, tree["tune"], "tune")
    vary = tree.get("vary") or {}
    others = [key for key in vary if key not in (ROWS, COLUMNS, SEED)]
    remedy = "tune chooses options of vary.rows; beside them only columns and seed may vary"
    require(ROWS in vary and not others, "vary", others or [*vary], remedy)
    known = labels_of(vary[ROWS])
    for row in tune.rows:
        if label_among(row, known) is None:
            raise UserError("tune.rows", row, f"vary.rows has no such label; {nearest(row, known)}")
    remedy = "is a seed of the sweep: options chosen with it would look better than they are; use another"
    require(str(tune.seed) not in labels_of(vary.get(SEED, [])), "tune.seed", tune.seed, remedy)
    return tune


def candidates(tune: TuneConfig) -> list[Candidate]:
    """Return the candidates of all rows, in order."""
    out = []
    for row, keys in tune.rows.items():
        axes = [[*zip(labels_of(values), _values(values), strict=True)] for values in keys.values()]
        for combination in product(*axes):
            part: dict[str, Any] = {}
            for key, (_, value) in zip(keys, combination, strict=True):
                part = loader.merged(part, loader.nested(key.split("."), value))
            names = [
                f"{key.rpartition('.')[2]} {label}" for key, (label, _) in zip(keys, combination, strict=True)
            ]
            out.append(Candidate(str(row), ", ".join([str(row), *names]), part))
    return out


def _values(values: Any) -> list[Any]:
    return [*values.values()] if isinstance(values, Mapping) else [*values]


def first_stage(tree: Mapping[str, Any], tune: TuneConfig) -> dict[str, Any]:
    """Return the sweep of the candidates, evaluated on validation samples.

    Its entry `chooses_for` is the sweep itself, so that `resume` can go on with both.

    Args:
        tree: the configuration of the sweep.
        tune: its section `tune`.
    """
    every = candidates(tune)
    rows = _labelled(tree["vary"][ROWS])
    vary: dict[str, Any] = {}
    if COLUMNS in tree["vary"]:
        groups = _labelled(tree["vary"][COLUMNS])
        vary[COLUMNS] = {
            label: {**part, ROWS: {c.label: _over(_of(part.get(ROWS, {}), c.row), c.part) for c in every}}
            for label, part in groups.items()
        }
        vary[ROWS] = {c.label: _of(rows, c.row) for c in every}
    else:
        vary[ROWS] = {c.label: loader.merged(_of(rows, c.row), c.part) for c in every}
    vary[SEED] = [tune.seed]
    own = {name: value for name, value in tree.items() if name not in OF_SWEEPS}
    own = loader.merged(own, {"name": f"{tree.get('name', 'run')}{SUFFIX}"})
    own = loader.merged(own, {"data": {"evaluate_on": "validation"}})
    return {**own, "vary": vary, "chooses_for": dict(tree)}


def _over(part: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a row with a candidate laid over them; a row that is left out stays so."""
    return dict(part) if LEFT_OUT in part else loader.merged(part, more)


def _labelled(values: Any) -> dict[str, Any]:
    """Return label -> value of a varied key."""
    return dict(zip(labels_of(values), _values(values), strict=True))


def _of(values: Mapping[Any, Any], label: str) -> dict[str, Any]:
    """Return the part of a configuration under a label; empty without one."""
    return dict(next((part for given, part in values.items() if label_among(given, (label,))), {}))


def second_stage(
    tree: Mapping[str, Any], tune: TuneConfig, chosen: Mapping[tuple[str, str], Candidate] | None = None
) -> dict[str, Any]:
    """Return the sweep with the chosen candidates; rows without one are as the sweep gives them.

    Args:
        tree: the configuration of the sweep.
        tune: its section `tune`.
        chosen: (group of columns, row) -> candidate; the group is empty if there are no columns.

    Returns:
        The configuration of the sweep without `tune`. Its rows under `tuned` may be the same runs as others.
    """
    own = {name: value for name, value in tree.items() if name != "tune"}
    own["tuned"] = [*map(str, tune.rows)]
    if not chosen:
        return own
    vary = dict(own["vary"])
    rows = _labelled(vary[ROWS])
    if COLUMNS not in vary:
        merged = {row: loader.merged(rows[row], candidate.part) for (_, row), candidate in chosen.items()}
        return {**own, "vary": {**vary, ROWS: rows | merged}}
    groups = {}
    for label, part in _labelled(vary[COLUMNS]).items():
        special = {str(row): change for row, change in part.get(ROWS, {}).items()}
        for row in rows:
            if (candidate := chosen.get((label, row))) is not None:
                mine = next((given for given in special if label_among(given, (row,))), row)
                special[mine] = _over(special.get(mine, {}), candidate.part)
        groups[label] = {**part, ROWS: special}
    return {**own, "vary": {**vary, COLUMNS: groups}}


def choose(
    tree: Mapping[str, Any], tune: TuneConfig, folder: Path
) -> tuple[dict[tuple[str, str], Candidate], list[dict[str, Any]]]:
    """Return the best candidate of each row and group of columns, and a row for each candidate that ran.

    The best one has the best mean over clients of the metric on validation samples at the end; of equal ones,
    the first. A row some of whose candidates have not run has no choice.

    Args:
        tree: the configuration of the sweep.
        tune: its section `tune`.
        folder: folder of the first stage.

    Raises:
        UserError: a candidate's run has other settings, or was computed with other files or code of the user.
    """
    by_label = {candidate.label: candidate for candidate in candidates(tune)}
    found: dict[tuple[str, str], list[tuple[float, Candidate]]] = {}
    unfinished = set()
    for case in unchecked_cases(with_configurations(first_stage(tree, tune))):
        candidate = by_label[case.labels[ROWS]]
        place = case.labels.get(COLUMNS, ""), candidate.row
        if not is_complete(case, folder):
            unfinished.add(place)
            continue
        check_case(case, folder)
        result = result_of(case.labels, load(case.folder(folder)))
        value = result.values.get(CHOSEN_BY, float("nan"))
        score = value * (result.better or 1)
        found.setdefault(place, []).append((score if score == score else float("-inf"), candidate))
    chosen, rows = {}, []
    for place, scores in found.items():
        best = max(scores, key=lambda one: one[0])[1]  # max returns the first of equal ones
        if place not in unfinished:
            chosen[place] = best
        for score, candidate in scores:
            is_best = candidate is best and place in chosen
            group = {COLUMNS: place[0]} if place[0] else {}
            rows.append({**group, "row": place[1], "candidate": candidate.label, CHOSEN_BY: abs(score)})
            rows[-1]["chosen"] = int(is_best)
    return chosen, rows


def sweep(
    tree: Callable[[], Mapping[str, Any]],
    transport: Transport,
    quiet: bool = False,
    part: Part = ALL,
    jobs: int = 1,
    keep_going: bool = False,
) -> Path | None:
    """Run a sweep as `sweep.sweep` does; if it has a section `tune`, choose the options of its rows first.

    Args:
        tree: returns the configuration; called on rank 0.
        transport: connects the ranks; every rank calls.
        quiet: whether to print nothing.
        part: the cases that this process runs. Several processes wait for each other's candidates.
        jobs: number of cases that run at the same time, each on a group of the ranks.
        keep_going: whether the other cases of a stage run although one has failed.

    Returns:
        The sweep's folder on rank 0, None on the others.

    Raises:
        UserError: as `sweep.sweep`, or the section `tune` does not fit the sweep.
    """

    def begin() -> tuple[dict[str, Any], TuneConfig | None]:
        own = dict(tree())
        tune = tune_of(own)
        if tune is not None:
            cases(
                with_configurations(second_stage(own, tune)), part
            )  # what is invalid is said before anything runs
        return own, tune

    own, tune = on_server(transport, begin)
    if tune is None:
        return sweeps.sweep(lambda: own, transport, quiet, part, jobs, keep_going)
    trial, rest = first_stage(own, tune), _part_of_first(part, tune)
    if (folder := on_server(transport, lambda: _complete(trial, rest))) is None:
        folder = sweeps.sweep(lambda: trial, transport, quiet, rest, jobs, keep_going)
    rest, begun = replace(rest, share=(1, 1)), on_server(transport, lambda: _id_of(folder, trial))
    trial, own = (loader.merged(one, {"output": {"id": begun}}) for one in (trial, own))
    while on_server(transport, lambda: bool(_left(trial, rest, folder))):
        time.sleep(WAIT_S)
        sweeps.sweep(lambda: trial, transport, True, rest, jobs, keep_going)

    def chosen() -> dict[str, Any]:
        assert folder is not None
        found, rows = choose(own, tune, folder)
        _write(rows, folder / CHOICES_FILE)
        return second_stage(own, tune, found)

    own = on_server(transport, chosen)
    return sweeps.sweep(lambda: own, transport, quiet, part, jobs, keep_going)


def resume(
    folder: Path,
    transport: Transport,
    quiet: bool = False,
    part: Part = ALL,
    jobs: int = 1,
    keep_going: bool = False,
) -> Path | None:
    """Go on with a sweep as `sweep.resume_sweep` does; with both stages, if it is that of the candidates.

    Args:
        folder: the sweep's folder.
        transport: connects the ranks; every rank calls.
        quiet: whether to print nothing.
        part: the cases that this process runs; rows are those of either stage.
        jobs: number of cases that run at the same time, each on a group of the ranks.
        keep_going: whether the other cases of a stage run although one has failed.

    Returns:
        The sweep's folder on rank 0, None on the others.

    Raises:
        UserError: as `sweep` and `sweep.resume_sweep`.
    """
    began = on_server(transport, lambda: started_with(folder))
    tree = began.get("chooses_for")
    if tree is None:
        return sweeps.resume_sweep(folder, transport, quiet, part, jobs, keep_going)
    place = {"folder": str(folder.parent), "id": _id_of(folder, began), "existing": REFUSE}
    tree, only = loader.merged(tree, {"output": place}), part.only
    if ROWS in only:
        row_of = {c.label: c.row for c in candidates(loader.from_tree(TuneConfig, tree["tune"], "tune"))}
        only = {**only, ROWS: [*dict.fromkeys(row_of.get(name, name) for name in only[ROWS])]}
    return sweep(lambda: tree, transport, quiet, replace(part, only=only), jobs, keep_going)


def _part_of_first(part: Part, tune: TuneConfig) -> Part:
    """Return the part of the first stage that a part of the sweep needs.

    Rows without candidates have none; if a part has no other rows, it still runs all candidates.
    """
    only = {key: names for key, names in part.only.items() if key != SEED}
    if ROWS in only:
        wanted = {name.strip() for text in only[ROWS] for name in (text, *text.split(","))}
        labels = [c.label for c in candidates(tune) if label_of(c.row) in wanted or c.row in wanted]
        only = {**only, ROWS: labels} if labels else {k: v for k, v in only.items() if k != ROWS}
    return replace(part, only=only)


def _complete(trial: Mapping[str, Any], part: Part) -> Path | None:
    """Return the folder of the first stage if all candidates of a part are complete; else None."""
    every = unchecked_cases(with_configurations(trial))
    output = every[0].output
    if output.id is None or output.existing == REPLACE:
        return None
    folder = Path(output.folder) / f"{trial['name']}-{output.id}"
    left = any(not is_complete(case, folder) for case in part.chosen(every))
    return folder if is_sweep(folder) and not left else None


def _id_of(folder: Path | None, trial: Mapping[str, Any]) -> str:
    """Return the id of the first stage, which the second one takes, too."""
    assert folder is not None
    return folder.name.removeprefix(f"{trial['name']}-")


def _left(trial: Mapping[str, Any], part: Part, folder: Path | None) -> list[str]:
    """Return the candidates of a part that are not complete."""
    assert folder is not None
    every = part.chosen(unchecked_cases(with_configurations(trial)))
    return [case.slug for case in every if not is_complete(case, folder)]


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a table as CSV; complete at any time, also if several processes write it."""
    text = StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def listed(tree: Mapping[str, Any], part: Part = ALL) -> str:
    """Return one line for each case of a part of a sweep, then a line with their number; of both stages.

    Args:
        tree: the configuration.
        part: the part.
    """
    tune = tune_of(tree)
    if tune is None:
        return sweeps.listed(tree, part)
    first = sweeps.listed(first_stage(tree, tune), _part_of_first(part, tune))
    second = sweeps.listed(second_stage(tree, tune), part)
    return f"candidates, on validation data:\n{first}\n\nthen, with the best of each row:\n{second}"
