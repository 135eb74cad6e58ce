"""The data of the figures over seeds, for the files of figures and for the page of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import statistics, survival
from .comparison import COLUMNS, STD, Column, Comparison, limits_of
from .seed_groups import metric_of

TARGETS = ("rounds_to_target", "mb_to_target", "virtual_s_to_target")


@dataclass(frozen=True)
class Bar:
    """A value with its interval, and the values of the single runs.

    Attributes:
        centre: mean or median; NaN or infinite if there is none.
        low: lower end of the interval; NaN if there is no interval.
        high: upper end of the interval; infinite if it extends beyond the last observation.
        end: the last observation, where an interval without an upper end is cut off; infinite for none.
        runs: value of each run; for a run without the target, where it ended.
        met: whether each run met the target; None if the values are not costs of a target.
    """

    centre: float
    low: float
    high: float
    end: float
    runs: Sequence[float]
    met: Sequence[bool] | None = None


@dataclass(frozen=True)
class Panel:
    """One axis of the figure of intervals.

    Attributes:
        title: title of the axis, with its unit.
        from_zero: whether the axis begins at zero.
        bars: bar of each group; None if the group has no such value.
    """

    title: str
    from_zero: bool
    bars: Sequence[Bar | None]


@dataclass(frozen=True)
class Steps:
    """The share of a group's runs that have met the target.

    Attributes:
        x: costs at which the share rises, starting with 0.
        y: the share from each of these costs on.
        ends: (cost, share) at which each run without the target ended.
    """

    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[tuple[float, float]]


def several(comparison: Comparison) -> bool:
    """Return whether any group has several seeds."""
    return any(len(group.runs) > 1 for group in comparison.groups)


def _kind(comparison: Comparison) -> str:
    """Return the kind of interval in figures: Student's t if tables show the standard deviation."""
    return "t" if comparison.choices.interval == STD else comparison.choices.interval


def _shown_targets(comparison: Comparison) -> list[Column]:
    """Return the costs of the target that every run has, except any that are all 0 or equal to rounds."""
    groups = range(len(comparison.groups))
    columns = [COLUMNS[key] for key in TARGETS]
    held = [c for c in columns if all(comparison.has(i, c) for i in groups)]
    at = {c: np.concatenate([comparison.reached(i, c).position for i in groups]) for c in held}
    rounds = at[columns[0]]
    return [c for c in held if at[c].any() and (c == columns[0] or not np.array_equal(at[c], rounds))]


def _mean(comparison: Comparison, values: np.ndarray, limits: tuple[float, float] = (-np.inf, np.inf)) -> Bar:
    said = statistics.estimate(values, _kind(comparison), comparison.choices.confidence, limits)
    return Bar(said.mean, said.low, said.high, np.inf, values.tolist())


def _bar(comparison: Comparison, group: int, column: Column) -> Bar | None:
    if not comparison.has(group, column):
        return None
    if not column.target:
        ends = limits_of(column, comparison.groups[group].metric)
        return _mean(comparison, comparison.values(group, column), ends)
    found, said = comparison.reached(group, column), comparison.median(group, column)
    return Bar(said.value, said.low, said.high, said.beyond, found.position.tolist(), found.met.tolist())


def intervals(comparison: Comparison) -> list[Panel]:
    """Return panels of the chosen metric and the costs of the target; none if each group has one seed."""
    if not several(comparison):
        return []
    metric = comparison.column(comparison.choices.metric)
    columns = [metric, *(c for c in _shown_targets(comparison) if c != metric)]
    groups = range(len(comparison.groups))
    return [Panel(c.title, bool(c.target), [_bar(comparison, i, c) for i in groups]) for c in columns]


def differences(comparison: Comparison) -> list[tuple[str, int, Bar]]:
    """Return name, group and bar of each group minus the best of its problem; nothing if no seeds pair."""
    column, out = comparison.column(comparison.choices.metric), []
    for problem in comparison.problems:
        for c in comparison.contrasts(problem, column):
            if c.difference is not None and c.pairs > 1 and np.isfinite(c.difference).all():
                name = " - ".join(comparison.groups[i].name for i in (c.group, c.best))
                out.append((name, c.group, _mean(comparison, c.difference)))
    return out


def at_target(comparison: Comparison) -> list[tuple[str, list[Steps]]]:
    """Return, for each cost, title and 1 - Kaplan-Meier of each group; nothing if no run meets the target."""
    columns = _shown_targets(comparison) if several(comparison) else []
    groups = range(len(comparison.groups))
    if not (columns and any(comparison.reached(i, COLUMNS[TARGETS[0]]).met.any() for i in groups)):
        return []
    return [
        (column.title.replace(" to target", ""), [_steps(comparison, i, column) for i in groups])
        for column in columns
    ]


def _steps(comparison: Comparison, group: int, column: Column) -> Steps:
    found = comparison.reached(group, column)
    at, share = survival.kaplan_meier(found)
    x, y = np.concatenate([[0.0], at]), 1 - np.concatenate([[1.0], share])
    ends = found.position[~found.met]
    heights = y[np.searchsorted(x, ends, side="right") - 1]
    return Steps(x.tolist(), y.tolist(), [*zip(ends.tolist(), heights.tolist(), strict=True)])


def target_text(comparison: Comparison) -> str:
    """Return the target with its unit."""
    return metric_of(comparison.groups).text(comparison.target)
