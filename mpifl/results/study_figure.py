"""The figure of a study: accuracy over time, and staleness where there is any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # safe for all eyes
STYLES = ("-", "--", "-.", ":")
GREY = {"color": "#555555", "ls": "-", "lw": 1.4}


@dataclass(frozen=True)
class Curve:
    """One case of a study.

    Attributes:
        labels: what it varies -> its value. axis: what `x` is.
        x, y: evaluated steps, and mean accuracies. lags: staleness of each arrival; empty for rounds.
    """

    labels: Mapping[str, str]
    axis: str
    x: Sequence[float]
    y: Sequence[float]
    lags: Sequence[int]

    @property
    def keys(self) -> list[str]:
        """What is told apart: all that varies but seeds, whose curves look alike."""
        return [key for key in self.labels if key != "seed"]

    @property
    def panel(self) -> str:
        """Its column of panels: the value of the last key, where there are several."""
        return f"{self.keys[-1]}: {self.labels[self.keys[-1]]}" if len(self.keys) > 1 else ""

    @property
    def line(self) -> str:
        """Its line in a panel: the values of the other keys."""
        others = self.keys[:-1] if len(self.keys) > 1 else self.keys
        return ", ".join(self.labels[key] for key in others)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG: a column of panels for each value of the last key, a line for each of the others."""
    from matplotlib.figure import Figure  # heavy: only when something is drawn

    panels = list(dict.fromkeys(c.panel for c in curves))
    lines = list(dict.fromkeys(c.line for c in curves))
    height = 2 if any(c.lags for c in curves) else 1
    width, legend = max(3.6 * len(panels), 6.0), 0.22 * -(-len(lines) // 4)
    figure = Figure((width, 2.8 * height + legend), dpi=130, layout="constrained")
    axes = figure.subplots(height, len(panels), squeeze=False, sharey="row")
    thin = len({(c.panel, c.line) for c in curves}) < len(curves)  # several seeds each
    styles = {
        line: {"color": COLOURS[i % len(COLOURS)], "ls": STYLES[i % len(STYLES)], "lw": 0.9 if thin else 1.6}
        for i, line in enumerate(lines)
    }
    drawn: dict[str, Any] = {}
    for curve in curves:
        axis = axes[0][panels.index(curve.panel)]
        (drawn[curve.line],) = axis.plot(curve.x, curve.y, **styles[curve.line])
        axis.set(title=curve.panel, xlabel=curve.axis)
    axes[0][0].set_ylabel("mean accuracy")
    axes[-1][0].set_ylabel("share of arrivals" if height == 2 else "mean accuracy")
    for panel, axis in zip(panels, axes[1] if height == 2 else (), strict=False):
        _histograms(axis, [c for c in curves if c.panel == panel and c.lags], styles)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if any(lines):
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _histograms(axis: Any, curves: Sequence[Curve], styles: Mapping[str, dict[str, Any]]) -> None:
    """Show how stale uploads were, in at most forty bins; one grey line where that is the same for all."""
    axis.set(xlabel="staleness, server steps", yscale="log")
    lags: dict[str, list[int]] = {}
    for curve in curves:
        lags.setdefault(curve.line, []).extend(curve.lags)
    same = all(some == lags[curves[0].line] for some in lags.values())
    for line, some in [*lags.items()][: 1 if same else None]:
        width = max(1, -(-(max(some) + 1) // 40))
        bins = Counter(lag // width for lag in some)
        places = range(max(bins) + 1)
        shares = [bins[b] / len(some) for b in places]
        axis.step([b * width for b in places], shares, where="mid", **(GREY if same else styles[line]))
