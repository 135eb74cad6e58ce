"""The figures of a comparison: intervals over seeds, differences, shares of runs at a target, ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import statistics, survival
from .comparison import COLUMNS, STD, Column, Comparison
from .figures import MARKS, legend_below, line_style, new_figure, plain
from .seed_groups import metric_of
from .sweep_figure import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS = ("rounds_to_target", "mb_to_target", "virtual_s_to_target")
ROW, HEAD = 0.34, 1.15  # height of a row and of what surrounds the rows, in inches
FAINT: dict[str, Any] = {"color": "#999999", "ms": 4, "ls": "", "mew": 0.9}


def _several(comparison: Comparison) -> bool:
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


def intervals(comparison: Comparison) -> Figure | None:
    """Draw the chosen metric of each group and what the target took it, with intervals and each run.

    Returns:
        None where no group has several seeds.
    """
    if not _several(comparison):
        return None
    metric = comparison.column(comparison.choices.metric)
    columns = [metric, *(c for c in _shown_targets(comparison) if c != metric)]
    names = [group.name for group in comparison.groups]
    figure = new_figure(3.0 * len(columns) + 1.2, HEAD + ROW * len(names))
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, column in zip(axes, columns, strict=True):
        for i in range(len(names)):
            if not comparison.has(i, column):
                continue
            if column.target:
                _median(axis, comparison, i, column)
            else:
                _mean(axis, comparison, i, column)
        axis.set_xlabel(column.title, fontsize=9)
        if column.target:
            axis.set_xlim(left=0)
        plain(axis)
    axes[0].set_yticks(np.arange(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _mean(axis: Any, comparison: Comparison, group: int, column: Column) -> None:
    """Draw the runs of a group, their mean and its interval."""
    values = comparison.values(group, column)
    said = statistics.estimate(values, _kind(comparison), comparison.choices.confidence)
    axis.plot(values, np.full(len(values), group + 0.2), marker="|", **FAINT)
    _bar(axis, group, said.mean, said.low, said.high, np.inf)


def _median(axis: Any, comparison: Comparison, group: int, column: Column) -> None:
    """Draw where the runs of a group met the target or ended without it, and the median with its interval."""
    found, said = comparison.reached(group, column), comparison.median(group, column)
    for met, mark in ((True, "|"), (False, ">")):
        ends = found.position[found.met == met]
        axis.plot(ends, np.full(len(ends), group + 0.2), marker=mark, mfc="none", **FAINT)
    _bar(axis, group, said.value, said.low, said.high, said.beyond)


def _bar(
    axis: Any, row: int, centre: float, low: float, high: float, end: float, group: int | None = None
) -> None:
    """Draw a value with its interval; an arrow where it goes on beyond the last observation."""
    look = row if group is None else group
    colour = COLOURS[look % len(COLOURS)]
    if np.isfinite(low):
        axis.plot([low, min(high, end)], [row, row], color=colour, lw=2.2, solid_capstyle="butt")
    if np.isinf(high):
        axis.plot(end, row, marker=5, color=colour, ms=7, ls="")  # a caret to the right
    if np.isfinite(centre):
        axis.plot(centre, row, marker=MARKS[look % len(MARKS)], color=colour, ms=6.5, ls="")


def target(comparison: Comparison) -> Figure | None:
    """Draw the share of runs that have met the target (1 - Kaplan-Meier) against rounds, bytes and time.

    A tick is a run that ends without the target.

    Returns:
        None where no group has several seeds, or no run meets the target.
    """
    columns = _shown_targets(comparison)
    met = any(comparison.reached(i, COLUMNS[TARGETS[0]]).met.any() for i in range(len(comparison.groups)))
    if not (_several(comparison) and columns and met):
        return None
    figure = new_figure(3.7 * len(columns) + 0.4, 3.0 + 0.1 * len(comparison.groups))
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, column in zip(axes, columns, strict=True):
        for i, group in enumerate(comparison.groups):
            found = comparison.reached(i, column)
            at, share = survival.kaplan_meier(found)
            x, y = np.concatenate([[0.0], at]), 1 - np.concatenate([[1.0], share])
            look = line_style(i)
            axis.step(x, y, where="post", label=group.name, **look)
            ends = found.position[~found.met]
            heights = y[np.searchsorted(x, ends, side="right") - 1]
            axis.plot(ends, heights, marker="|", ms=8, mew=1.5, ls="", color=look["color"])
        axis.set_xlabel(column.title.replace(" to target", ""), fontsize=9)
        axis.set(xlim=(0, None), ylim=(-0.03, 1.05))
        plain(axis)
    value = metric_of(comparison.groups).text(comparison.target)
    axes[0].set_ylabel(f"share of runs at {value}", fontsize=9)
    legend_below(figure, axes[0])
    return figure


def differences(comparison: Comparison) -> Figure | None:
    """Draw each group minus the best of its world, seed by seed, with the mean and its interval.

    Returns:
        None where no seeds pair.
    """
    column = comparison.column(comparison.choices.metric)
    found = [
        (world, c, c.difference)
        for world in comparison.worlds
        for c in comparison.contrasts(world, column)
        if c.difference is not None and c.pairs > 1 and np.isfinite(c.difference).all()
    ]
    if not found:
        return None
    figure = new_figure(6.4, HEAD + ROW * len(found))
    axis = figure.subplots()
    axis.axvline(0.0, color="#555555", lw=1)
    names = []
    for row, (_, contrast, values) in enumerate(found):
        said = statistics.estimate(values, _kind(comparison), comparison.choices.confidence)
        axis.plot(values, np.full(len(values), row + 0.2), marker="o", mfc="none", **FAINT)
        _bar(axis, row, said.mean, said.low, said.high, np.inf, contrast.group)
        pair = [comparison.groups[i].name for i in (contrast.group, contrast.best)]
        names.append(" - ".join(pair))
    axis.set_yticks(np.arange(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(f"difference, {column.title}", fontsize=9)
    plain(axis)
    return figure


def ranks(comparison: Comparison) -> Figure | None:
    """Draw the critical-difference diagram of average ranks over worlds (Demsar 2006).

    Bars join methods that are not distinguishable.

    Returns:
        None where ranks were not asked for.
    """
    if not comparison.choices.ranks:
        return None
    ranking, names = comparison.ranking, [name for name, _ in comparison.methods]
    order = np.argsort(ranking.average, kind="stable")
    k, half = len(names), (len(names) + 1) // 2
    bars = len(ranking.cliques)
    below = 0.55 + 0.28 * bars
    figure = new_figure(7.0, 0.9 + 0.3 * (below + half))
    axis = figure.subplots()
    margin = 0.42 * (k - 1)  # for the names, on both sides
    axis.set(xlim=(1 - margin, k + margin), ylim=(-(below + half), 1.9))
    axis.axis("off")
    black: dict[str, Any] = {"color": "black", "lw": 1}
    axis.plot([1, k], [0, 0], **black)
    for tick in range(1, k + 1):
        axis.plot([tick, tick], [0, 0.16], **black)
        axis.text(tick, 0.26, str(tick), ha="center", va="bottom", fontsize=8)
    for place, method in enumerate(order):
        left = place < half
        depth = -(below + (place if left else k - 1 - place))
        x, end = float(ranking.average[method]), 1 - 0.04 * k if left else k + 0.04 * k
        axis.plot([x, x, end], [0, depth, depth], **black)
        text = f"{names[method]} ({x:.2f})"
        side = "right" if left else "left"
        axis.text(end + (-0.03 if left else 0.03) * k, depth, text, va="center", ha=side, fontsize=8)
    for level, clique in enumerate(ranking.cliques):
        low, high = (ranking.average[clique[j]] for j in (0, -1))
        depth = -0.3 - 0.28 * level
        axis.plot([low - 0.03, high + 0.03], [depth, depth], color=COLOURS[0], lw=3, solid_capstyle="butt")
    width = min(ranking.critical_difference, k - 1 + 2 * margin)
    axis.plot([1, 1 + width], [1.1, 1.1], color="black", lw=1.4, marker="|")
    axis.text(1 + width / 2, 1.25, f"CD = {ranking.critical_difference:.2f}", ha="center", fontsize=8)
    return figure


Drawing = Callable[[Comparison], "Figure | None"]
FIGURES: dict[str, tuple[str, str, Drawing]] = {  # file name -> title, caption, function
    "intervals": (
        "Intervals over seeds",
        "Means with intervals over seeds, and Kaplan-Meier medians of what the target took; small marks are "
        "single runs, a triangle one that ended without the target, an arrow an interval without an end.",
        intervals,
    ),
    "differences": (
        "Against the best",
        "Each configuration minus the best one, under equal seeds (circles), with mean and interval.",
        differences,
    ),
    "target": (
        "Runs at the target",
        "Share of runs that have met the target (1 - Kaplan-Meier); a tick is a run that ends without it.",
        target,
    ),
    "ranks": (
        "Average ranks",
        "Over worlds, 1 is best; bars join methods within Nemenyi's critical difference.",
        ranks,
    ),
}
