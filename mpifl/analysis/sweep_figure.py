"""The figure of a sweep: the metric of each case over time, and the staleness of uploads, if any."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.files import write_atomically

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")
SHARED_STYLE = {"color": "#555555", "ls": "-", "lw": 1.4}  # of a histogram that is the same for all lines
MAX_DRAWN = 1e300  # axes overflow beyond this value
MAX_BINS = 40
MAX_LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class Curve:
    """The metric of one case over its evaluations.

    Attributes:
        labels: varied key -> label of its value in this case.
        axis: title of the axis of `x`: rounds, or virtual seconds.
        x: time of each evaluation.
        y: mean of the metric over clients at each evaluation; accuracy is in [0, 1].
        staleness: staleness of each upload, in server steps; empty for synchronous runs.
        train: mean on the clients' training data at each evaluation; empty if there is none.
        metric: title of the metric.
    """

    labels: Mapping[str, str]
    axis: str
    x: Sequence[float]
    y: Sequence[float]
    staleness: Sequence[int]
    train: Sequence[float] = ()
    metric: str = "accuracy"

    @property
    def keys(self) -> list[str]:
        """The varied keys except the seed, because curves of different seeds look alike."""
        return [key for key in self.labels if key != "seed"]

    @property
    def panel(self) -> str:
        """The title of the panel that shows this curve: the value of the last key, if there are several."""
        return f"{self.keys[-1]}: {self.labels[self.keys[-1]]}" if len(self.keys) > 1 else ""

    @property
    def line(self) -> str:
        """The name of this curve in the legend: the values of the other keys."""
        others = self.keys[:-1] if len(self.keys) > 1 else self.keys
        return ", ".join(self.labels[key] for key in others)


def drawable(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return values with NaN, drawn as a gap, in place of those that are infinite or too large to draw."""
    y = np.asarray(values, np.float64)
    return np.where(np.abs(y) <= MAX_DRAWN, y, np.nan)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG with a column of panels for each value of the last key, and a line for each of the others.

    If any curve has values on training data, these are dashed and all lines on test data are solid.

    Args:
        curves: one curve per case.
        path: the file.
    """
    from matplotlib.figure import Figure  # heavy: only when something is drawn

    panels = list(dict.fromkeys(c.panel for c in curves))
    lines = list(dict.fromkeys(c.line for c in curves))
    rows = 2 if any(c.staleness for c in curves) else 1
    width, legend = max(3.6 * len(panels), 6.0), 0.22 * -(-len(lines) // MAX_LEGEND_COLUMNS)
    figure = Figure((width, 2.8 * rows + legend), dpi=130, layout="constrained")
    axes = figure.subplots(rows, len(panels), squeeze=False, sharey="row")
    several_seeds = len({(c.panel, c.line) for c in curves}) < len(curves)
    width = 0.9 if several_seeds else 1.6
    styles = {
        line: {
            "color": COLOURS[i % len(COLOURS)],
            "ls": "-" if any(c.train for c in curves) else DASHES[i % len(DASHES)],
            "lw": width,
        }
        for i, line in enumerate(lines)
    }
    drawn: dict[str, Any] = {}
    for curve in curves:
        axis = axes[0][panels.index(curve.panel)]
        style = styles[curve.line] | {"marker": "o" if len(curve.x) == 1 else None}  # one point makes no line
        (drawn[curve.line],) = axis.plot(curve.x, drawable(curve.y), **style)
        if curve.train:
            axis.plot(curve.x, drawable(curve.train), **{**style, "ls": "--"})
        axis.set(title=curve.panel, xlabel=curve.axis)
    dashed = " (dashed: training data)" if any(c.train for c in curves) else ""
    titles = ", ".join(dict.fromkeys(c.metric for c in curves))
    axes[0][0].set_ylabel(f"mean {titles}{dashed}")
    if rows == 2:
        axes[1][0].set_ylabel("share of arrivals")
        for panel, axis in zip(panels, axes[1], strict=True):
            _histograms(axis, [c for c in curves if c.panel == panel and c.staleness], styles)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if any(lines):
        looks = {"ncols": MAX_LEGEND_COLUMNS, "fontsize": 8, "frameon": False}
        figure.legend(drawn.values(), drawn, loc="outside lower center", **looks)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _histograms(axis: Any, curves: Sequence[Curve], styles: Mapping[str, dict[str, Any]]) -> None:
    """Draw the distribution of staleness of each line; only one if it is the same for all lines."""
    axis.set(xlabel="staleness, server steps", yscale="log")
    staleness: dict[str, list[int]] = {}
    for curve in curves:
        staleness.setdefault(curve.line, []).extend(curve.staleness)
    same = all(values == staleness[curves[0].line] for values in staleness.values())
    for line, values in [*staleness.items()][: 1 if same else None]:
        width = max(1, -(-(max(values) + 1) // MAX_BINS))
        counts = Counter(value // width for value in values)
        bins = range(max(counts) + 1)
        shares = [counts[b] / len(values) for b in bins]
        style = SHARED_STYLE if same else styles[line]
        axis.step([b * width for b in bins], shares, where="mid", **style)
