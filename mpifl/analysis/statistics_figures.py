"""The figures of a comparison: intervals over seeds, differences, shares of runs at a target, ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import statistics_drawn
from .comparison import Comparison
from .figures import MARKS, legend_below, line_style, new_figure, plain
from .statistics_drawn import Bar
from .sweep_figure import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW, HEAD = 0.34, 1.15  # height of a row, and of the space around the rows, in inches
FAINT: dict[str, Any] = {"color": "#999999", "ms": 4, "ls": "", "mew": 0.9}


def intervals(comparison: Comparison) -> Figure | None:
    """Draw the chosen metric and the costs of the target of each group, with intervals and single runs.

    Returns:
        The figure; None if no group has several seeds.
    """
    panels = statistics_drawn.intervals(comparison)
    if not panels:
        return None
    names = [group.name for group in comparison.groups]
    figure = new_figure(3.0 * len(panels) + 1.2, HEAD + ROW * len(names))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for i, bar in enumerate(panel.bars):
            if bar is not None:
                _runs(axis, i, bar)
                _bar(axis, i, bar)
        axis.set_xlabel(panel.title, fontsize=9)
        if panel.from_zero:
            axis.set_xlim(left=0)
        plain(axis)
    axes[0].set_yticks(np.arange(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _runs(axis: Any, row: int, bar: Bar, mark: str = "|") -> None:
    """Draw the runs of a group, with a triangle for a run that ended without the target."""
    values = np.array(bar.runs)
    met = np.ones(len(values), bool) if bar.met is None else np.array(bar.met, bool)
    for which, look in ((met, mark), *(() if bar.met is None else ((~met, ">"),))):
        axis.plot(values[which], np.full(int(which.sum()), row + 0.2), marker=look, mfc="none", **FAINT)


def _bar(axis: Any, row: int, bar: Bar, group: int | None = None) -> None:
    """Draw a value with its interval; an arrow if the interval extends beyond the last observation."""
    look = row if group is None else group
    colour = COLOURS[look % len(COLOURS)]
    if np.isfinite(bar.low):
        axis.plot([bar.low, min(bar.high, bar.end)], [row, row], color=colour, lw=2.2, solid_capstyle="butt")
    if np.isinf(bar.high):
        axis.plot(bar.end, row, marker=5, color=colour, ms=7, ls="")  # a caret to the right
    if np.isfinite(bar.centre):
        axis.plot(bar.centre, row, marker=MARKS[look % len(MARKS)], color=colour, ms=6.5, ls="")


def target(comparison: Comparison) -> Figure | None:
    """Draw the share of runs that have met the target (1 - Kaplan-Meier) against rounds, bytes and time.

    A tick is a run that ends without the target.

    Returns:
        The figure; None if no group has several seeds, or if no run meets the target.
    """
    panels = statistics_drawn.at_target(comparison)
    if not panels:
        return None
    figure = new_figure(3.7 * len(panels) + 0.4, 3.0 + 0.1 * len(comparison.groups))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for i, (group, curve) in enumerate(zip(comparison.groups, curves, strict=True)):
            look = line_style(i)
            axis.step(curve.x, curve.y, where="post", label=group.name, **look)
            at, heights = zip(*curve.ends, strict=True) if curve.ends else ((), ())
            axis.plot(at, heights, marker="|", ms=8, mew=1.5, ls="", color=look["color"])
        axis.set_xlabel(title, fontsize=9)
        axis.set(xlim=(0, None), ylim=(-0.03, 1.05))
        plain(axis)
    axes[0].set_ylabel(f"share of runs at {statistics_drawn.target_text(comparison)}", fontsize=9)
    legend_below(figure, axes[0])
    return figure


def differences(comparison: Comparison) -> Figure | None:
    """Draw each group minus the best of its problem, seed by seed, with the mean and its interval.

    Returns:
        The figure; None if no seeds pair.
    """
    rows = statistics_drawn.differences(comparison)
    if not rows:
        return None
    figure = new_figure(6.4, HEAD + ROW * len(rows))
    axis = figure.subplots()
    axis.axvline(0.0, color="#555555", lw=1)
    for row, (_, group, bar) in enumerate(rows):
        _runs(axis, row, bar, "o")
        _bar(axis, row, bar, group)
    axis.set_yticks(np.arange(len(rows)), [name for name, _, _ in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    title = comparison.column(comparison.choices.metric).title
    axis.set_xlabel(f"difference, {title}", fontsize=9)
    plain(axis)
    return figure


def ranks(comparison: Comparison) -> Figure | None:
    """Draw the critical-difference diagram of average ranks over problems (Demsar 2006).

    Bars join methods that are not distinguishable.

    Returns:
        The figure; None if ranks were not requested.
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
        "Each configuration minus the best one, under equal seeds (small marks), with mean and interval.",
        differences,
    ),
    "target": (
        "Runs at the target",
        "Share of runs that have met the target (1 - Kaplan-Meier); a tick is a run that ends without it.",
        target,
    ),
    "ranks": (
        "Average ranks",
        "Over problems, 1 is best; bars join methods within Nemenyi's critical difference.",
        ranks,
    ),
}
