"""The figure of a study: accuracy over time, and staleness where there is any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # safe for all eyes
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Curve:
    """One case of a study.

    Attributes:
        labels, keys: its values, and what they are values of. axis: what `x` is.
        x, y: evaluated steps, and mean accuracies. lags: staleness of each arrival; empty for rounds.
    """

    labels: tuple[str, ...]
    keys: tuple[str, ...]
    axis: str
    x: Sequence[float]
    y: Sequence[float]
    lags: Sequence[int]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG: a column of panels for each value of the last key, a line for each of the others."""
    from matplotlib.figure import Figure  # heavy: only when something is drawn

    panels = list(dict.fromkeys(c.labels[-1] for c in curves))
    lines = list(dict.fromkeys(c.labels[:-1] for c in curves))
    height = 2 if any(c.lags for c in curves) else 1
    figure = Figure((3.6 * len(panels), 2.9 * height), dpi=130, layout="constrained")
    axes = figure.subplots(height, len(panels), squeeze=False, sharey="row")
    for curve in curves:
        column, line = panels.index(curve.labels[-1]), lines.index(curve.labels[:-1])
        style = {"color": COLOURS[line % len(COLOURS)], "ls": STYLES[line % len(STYLES)], "lw": 1.6}
        name = ", ".join(curve.labels[:-1]) or None
        axes[0][column].plot(curve.x, curve.y, label=name, **style)
        axes[0][column].set(title=f"{curve.keys[-1]}: {curve.labels[-1]}", xlabel=curve.axis)
        if curve.lags:
            _histogram(axes[1][column], curve.lags, style)
    axes[0][0].set_ylabel("mean accuracy")
    if any(name for name in lines):
        axes[0][0].legend(fontsize=8, frameon=False)
    if height == 2:
        axes[1][0].set_ylabel("share of arrivals")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _histogram(axis: Any, lags: Sequence[int], style: dict[str, Any]) -> None:
    """Show how stale uploads were, in at most forty bins."""
    width = max(1, -(-(max(lags) + 1) // 40))
    bins = Counter(lag // width for lag in lags)
    places = range(max(bins) + 1)
    axis.step([b * width for b in places], [bins[b] / len(lags) for b in places], where="mid", **style)
    axis.set_xlabel("staleness, server steps")
