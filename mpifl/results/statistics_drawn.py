"""What the figures over seeds show, as numbers: for files of figures and for the page of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import statistics, survival
from .comparison import COLUMNS, STD, Column, Comparison
from .seed_groups import metric_of

TARGETS = ("rounds_to_target", "mb_to_target", "virtual_s_to_target")


@dataclass(frozen=True)
class Bar:
    """A value with its interval, and the single runs behind it.

    Attributes:
        centre: mean, or median; NaN or infinite where there is none.
        low: end of the interval; NaN for none.
        high: its other end; infinite where it goes on beyond the last observation.
        end: the last observation, at which an interval without an end is cut; infinite for none.
        runs: of each run its value, or where it ended.
        met: of each run, whether it met the target; None where the values are no costs of a target.
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
        title: of the axis, with its unit.
        from_zero: whether the axis begins at zero.
        bars: of each group; None where it has no such value.
    """

    title: str
    from_zero: bool
    bars: Sequence[Bar | None]


@dataclass(frozen=True)
class Steps:
    """The share of a group's runs that have met the target.

    Attributes:
        x: cost at which the share rises, from 0.
        y: the share from there on.
        ends: [cost, share] at which a run ended without the target.
    """

    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[tuple[float, float]]


def several(comparison: Comparison) -> bool:
    """Return whether any group has several seeds."""
    return any(len(group.runs) > 1 for group in comparison.groups)


def _kind(comparison: Comparison) -> str:
    """Return the interval that figures show: where a table has the standard deviation, Student's t."""
    return "t" if comparison.choices.interval == STD else comparison.choices.interval


def _shown_targets(comparison: Comparison) -> list[Column]:
    """Return the costs of the target that every run has; virtual time only where it is no count of rounds."""
    groups = range(len(comparison.groups))
    columns = [COLUMNS[key] for key in TARGETS]
    held = [c for c in columns if all(comparison.has(i, c) for i in groups)]
    at = {c: np.concatenate([comparison.reached(i, c).position for i in groups]) for c in held}
    rounds = at[columns[0]]
    return [c for c in held if at[c].any() and (c == columns[0] or not np.array_equal(at[c], rounds))]


def _mean(comparison: Comparison, values: np.ndarray) -> Bar:
    said = statistics.estimate(values, _kind(comparison), comparison.choices.confidence)
    return Bar(said.mean, said.low, said.high, np.inf, values.tolist())


def _bar(comparison: Comparison, group: int, column: Column) -> Bar | None:
    if not comparison.has(group, column):
        return None
    if not column.target:
        return _mean(comparison, comparison.values(group, column))
    found, said = comparison.reached(group, column), comparison.median(group, column)
    return Bar(said.value, said.low, said.high, said.beyond, found.position.tolist(), found.met.tolist())


def intervals(comparison: Comparison) -> list[Panel]:
    """Return the chosen metric of each group and what the target took it; nothing where all have one seed."""
    if not several(comparison):
        return []
    metric = comparison.column(comparison.choices.metric)
    columns = [metric, *(c for c in _shown_targets(comparison) if c != metric)]
    groups = range(len(comparison.groups))
    return [Panel(c.title, bool(c.target), [_bar(comparison, i, c) for i in groups]) for c in columns]


def differences(comparison: Comparison) -> list[tuple[str, int, Bar]]:
    """Return name, group and bar of each group minus the best of its problem; nothing where no seeds pair."""
    column, out = comparison.column(comparison.choices.metric), []
    for problem in comparison.problems:
        for c in comparison.contrasts(problem, column):
            if c.difference is not None and c.pairs > 1 and np.isfinite(c.difference).all():
                name = " - ".join(comparison.groups[i].name for i in (c.group, c.best))
                out.append((name, c.group, _mean(comparison, c.difference)))
    return out


def at_target(comparison: Comparison) -> list[tuple[str, list[Steps]]]:
    """Return title and 1 - Kaplan-Meier of each group, for each cost; nothing where no run meets it."""
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
