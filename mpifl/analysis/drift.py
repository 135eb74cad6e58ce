"""Changes of data during runs (section `drift`): in words, where they are on curves, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from mpifl.results.reader import Run

from .seed_groups import Group, metric_of
from .tables import Table


def described(run: Run) -> str:
    """Return the drift of a run in words: kind, times and other keys that are no defaults; empty for none."""
    given = run.non_default.get("drift")
    if not isinstance(given, Mapping) or not given.get("kind"):
        return ""
    others = (f"{key} {str(value).lower()}" for key, value in given.items() if key != "kind")
    return f"{given['kind']} ({', '.join(others)})"


def kind_of(run: Run) -> str:
    """Return the kind of drift of a run; empty for none."""
    return described(run).partition(" ")[0]


def steps_of(group: Group) -> np.ndarray:
    """Return the steps from which on data change [changes]: means over seeds, which differ by times."""
    told = [[change["step"] for change in run.changes] for run in group.runs]
    return np.array([np.mean([steps[i] for steps in told if len(steps) > i]) for i in _numbers(told)])


def places(group: Group, axis: str) -> np.ndarray:
    """Return where changes are on an axis of curves [changes]: in the middle of the step before they hold.

    Evaluations are after a step: that of step s is on the data from step s on. Between two evaluations, the
    place is interpolated.

    Args:
        group: runs of one configuration.
        axis: column of `metrics.csv`, or `bytes`.
    """
    steps = steps_of(group)
    if not len(steps):
        return steps
    rounds, along = group.column("round").mean(0), group.column(axis).mean(0)
    return np.asarray(np.interp(steps - 0.5, rounds, along))


def table(groups: Sequence[Group]) -> Table | None:
    """Return what each change of data did to the score, a row for each group and change; None without drift.

    Figures are means over the runs that have them.
    """
    metric = metric_of(groups)
    unit = f", {metric.unit}" if metric.unit else ""
    rows = [
        {
            "run": group.name,
            "drift": kind_of(group.runs[0]),
            "step": f"{step:.4g}",
            "at, s": _mean(group, i, "begins_s"),
            f"{metric.title} before{unit}": _mean(group, i, "before", metric.scale),
            f"worst after{unit}": _mean(group, i, "worst", metric.scale),
            "recovery, steps": _mean(group, i, "recovered_after"),
            "recovery, s": _mean(group, i, "recovered_after_s"),
            "recovered": "{} of {}".format(*_recovered(group, i)),
            "score lost": _mean(group, i, "lost"),
            "MB to cluster": _mean(group, i, "clustering_bytes", 1e-6),
        }
        for group in groups
        for i, step in enumerate(steps_of(group))
    ]
    if not rows:
        return None
    shown = [title for title in rows[0] if any(row[title] for row in rows)]
    return Table.of(shown, [[row[title] for title in shown] for row in rows])


def _numbers(told: Sequence[Sequence[Any]]) -> range:
    """Return the numbers of the changes of which some run knows."""
    return range(max(map(len, told), default=0))


def _values(group: Group, change: int, name: str) -> list[float]:
    """Return a figure of a change in each run of a group that has it."""
    found = [run.changes[change] for run in group.runs if len(run.changes) > change]
    if name == "clustering_bytes":
        values = [sum(_number(row.get(f"{name}_{way}")) for way in ("up", "down")) for row in found]
    else:
        values = [_number(row.get(name)) for row in found]
    return [value for value in values if not isnan(value)]


def _mean(group: Group, change: int, name: str, scale: float = 1.0) -> str:
    """Return the mean of a figure of a change over runs, as text; empty if no run has it."""
    values = _values(group, change, name)
    return f"{scale * float(np.mean(values)):.4g}" if values else ""


def _recovered(group: Group, change: int) -> tuple[int, int]:
    """Return how many runs recovered from a change, and in how many it happened."""
    happened = sum(len(run.changes) > change for run in group.runs)
    return len(_values(group, change, "recovered_after")), happened


def _number(value: object) -> float:
    """Return a number of `summary.json`; NaN for none."""
    return float(value) if isinstance(value, (int, float)) else nan
