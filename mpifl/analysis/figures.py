"""The figures of reports, comparisons and sweeps.

Colours are safe for colour-blind readers. Lines and bars also differ in dashes and hatches, so that they can
be distinguished in greyscale.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import first_of, require
from mpifl.core.files import write_atomically
from mpifl.core.timing import PHASES
from mpifl.core.units import byte_unit
from mpifl.results.reader import Run
from mpifl.supervision.logging import warn_once

from . import drift, statistics_drawn
from .comparison import Comparison
from .seed_groups import AXES, Group, axes_of, metric_of, rounds_title
from .statistics_drawn import Bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "**", "++")
SHARED_STYLE = {"color": "#555555", "ls": "-", "lw": 1.4}  # of a histogram that is the same for all lines
STALENESS, ARRIVALS = "staleness, server steps", "share of arrivals"  # titles of axes
MAX_DRAWN = 1e300  # axes overflow beyond this value
MAX_BINS = 40
ROW, HEAD = 0.34, 1.15  # height of a row, and of the space around the rows, in inches
FAINT: dict[str, Any] = {"color": "#999999", "ms": 4, "ls": "", "mew": 0.9}
MAX_MATRICES, MAX_TIMINGS, MAX_LEGEND = 8, 8, 16
MAX_LEAVES = 500  # of a tree: SciPy recurses once for each join of a chain, and Python allows 1000 calls
MATRICES = {  # array [N, N] of an algorithm -> title, colour map (light: similar clients)
    "distance": ("distance", "cividis"),
    "collaboration": ("collaboration weight", "cividis_r"),
    "affinity": ("affinity", "cividis_r"),
    "linked": ("linked", "Greys"),
}
COMPARED = {  # array [N, N] of matrices.npz -> title, colour map
    "parameters": ("distance of parameters", "cividis"),
    "gradients": ("cosine of gradients", "cividis_r"),
    "angles": ("angle of data, degrees", "cividis"),
    "smallest_angles": ("smallest principal angle, degrees", "cividis"),
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure  # heavy: only when something is drawn

    return Figure((width, height), dpi=110, layout="constrained")


def drawable(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return values with NaN, drawn as a gap, in place of those that are infinite or too large to draw."""
    y = np.asarray(values, np.float64)
    return np.where(np.abs(y) <= MAX_DRAWN, y, np.nan)


def line_style(i: int) -> dict[str, Any]:
    """Return the style of line `i`."""
    cycle = i // len(COLOURS)
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[(i + cycle) % len(DASHES)], "lw": 1.5}


def framed(axis: Any, across: str, up: str = "") -> None:
    """Name the axes of a panel, give it a faint grid, and remove its frame at the top and on the right."""
    axis.set_xlabel(across, fontsize=9)
    axis.set_ylabel(up, fontsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def legend_below(figure: Figure, *axes: Any) -> None:
    """Draw one legend of the lines of some axes below all panels, in as many columns as fit."""
    found = [axis.get_legend_handles_labels() for axis in axes]
    lines = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    handles, labels = [*lines.values()], [*lines]
    if len(handles) > MAX_LEGEND * 3:
        handles, labels = handles[: MAX_LEGEND * 3], [*labels[: MAX_LEGEND * 3 - 1], "and more"]
    wide = max(map(len, labels), default=0)
    columns = 1 if wide > 60 else 2 if wide > 30 else 4
    columns = max(1, min(columns, int(figure.get_size_inches()[0] / (0.5 + 0.06 * wide))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def curves(
    groups: Sequence[Group], name: str, title: str, dashed: str = "", width: float | None = None
) -> Figure | None:
    """Draw a column of `metrics.csv` against rounds, bytes and virtual time, in the order of `axes_of`.

    Lines show means over seeds, bands the range, and dotted vertical lines where data change (`drift`).

    Args:
        groups: the groups of runs.
        name: the column.
        title: label of its axis.
        dashed: a second column, drawn dashed in the same colours; the lines of the first are then solid.
        width: width in inches of a figure with panels below one another; None puts them side by side.

    Returns:
        The figure; None if no group has the column.
    """
    kinds = [a for a in AXES if any(g.has(a) and np.ptp(g.column(a)) > 0 for g in groups)] or ["round"]
    kinds = axes_of(groups, kinds)
    shown = [g for g in groups if g.has(name)]
    if not shown:
        return None
    seconds = [bool(dashed) and group.has(dashed) for group in shown]
    below = 0.2 * min(len(shown), MAX_LEGEND)
    if width is None:
        figure = new_figure(3.7 * len(kinds) + 0.4, 3.0 + below)
        axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    else:
        figure = new_figure(width, 2.1 * len(kinds) + below)
        axes = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    for axis, kind in zip(axes, kinds, strict=True):
        for i, group in enumerate(shown):
            x, y, look = group.column(kind).mean(0), group.column(name), line_style(i)
            mark = {"marker": MARKS[i % len(MARKS)], "ms": 4, "markevery": max(1, len(x) // 8)}
            x = x / 1e6 if kind == "bytes" else x
            look |= {"ls": "-"} if any(seconds) else {}
            axis.plot(x, drawable(y.mean(0)), label=group.name, **look, **mark)
            if seconds[i]:
                axis.plot(x, drawable(group.column(dashed).mean(0)), **{**look, "ls": "--"})
            for place in drift.places(group, kind):
                axis.axvline(place / 1e6 if kind == "bytes" else place, color=look["color"], ls=":", lw=0.8)
            if len(group.runs) > 1:
                band = drawable(y.min(0)), drawable(y.max(0))
                axis.fill_between(x, *band, color=look["color"], alpha=0.2, lw=0)
        across = rounds_title(shown) if kind == "round" else AXES[kind]
        framed(axis, across, title if width is not None or axis is axes[0] else "")
    legend_below(figure, axes[0])
    return figure


def traffic(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the bytes of the first run of each group, stacked by kind and direction."""
    found = [group.runs[0].bytes_by_kind for group in groups]
    if not any(sum(t.values()) for t in found):
        return None
    unit, name = byte_unit(max(sum(t.values()) for t in found))
    parts = sorted({part for total in found for part in total})
    below = 0.12 if width is None else 0.2
    figure = new_figure(width or 8.5, 1.3 + 0.3 * len(groups) + below * len(parts))
    sizes = {f"{kind}, {way}": [total[way, kind] / unit for total in found] for way, kind in parts}
    _stacked(figure, [g.name for g in groups], sizes, f"{name} sent by unicast")
    return figure


def _stacked(figure: Figure, names: Sequence[str], parts: Mapping[str, Any], title: str) -> None:
    """Draw a bar for each name, stacked of parts: label -> value of each name."""
    axis, start = figure.subplots(), np.zeros(len(names))
    for i, (label, values) in enumerate(parts.items()):
        look: Any = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)]}
        places, look["edgecolor"] = np.arange(len(names)), "white"
        axis.barh(places, values, left=start, height=0.7, label=label, **look)
        start += np.asarray(values)
    axis.set_yticks(np.arange(len(names)), names)
    axis.invert_yaxis()
    framed(axis, title)
    legend_below(figure, axis)


def pair_matrices(run: Run) -> list[tuple[str, str, np.ndarray]]:
    """Return title, colour map and values [N, N] of each matrix over pairs of clients that a run kept.

    There are none if only some clients have rows: the labels that order the clients are missing then.
    """
    found, n = list[tuple[str, str, np.ndarray]](), int(run.summary["clients"])
    for file, titles, arrays in (
        ("algorithm_state.npz", MATRICES, run.algorithm_state),
        ("matrices.npz", COMPARED, run.matrices),
    ):
        for title, colours, values in ((*titles[name], arrays[name]) for name in titles if name in arrays):
            if run.written == "all" and values.ndim == 2 and np.isfinite(values).any():
                remedy = f"{file}: {title} has shape {values.shape}, for {n} clients; run it again"
                require(values.shape == (n, n), "RUN", str(run.folder), remedy)
                found.append((title, colours, values))
    return found


def matrices(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the matrices over pairs of clients, ordered by cluster and true group.

    These are, for each group, the first that its algorithm keeps and those of `evaluation.matrices`.
    """
    found, own = [], [title for title, _ in MATRICES.values()]
    for group in groups:
        drawn = enumerate(pair_matrices(group.runs[0]))
        found += [(group, *one) for i, one in drawn if not i or one[0] not in own]  # an algorithm's first
    if not found:
        return None
    found = found[:MAX_MATRICES]
    wide = min(len(found), 3 if width is None else 1)
    high = -(-len(found) // wide)
    figure = new_figure(width or 4.0 * wide, (3.8 if width is None else 0.95 * width) * high)
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for axis, shown in zip(axes, found, strict=False):
        _matrix(figure, axis, *shown)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    return figure


def _matrix(figure: Figure, axis: Any, group: Group, title: str, colours: str, values: np.ndarray) -> None:
    """Draw one matrix, with a strip of clusters and one of true groups on its left."""
    rows = group.runs[0].rows("clusters.csv")
    cluster, truth = (np.array([int(r[c]) for r in rows]) for c in ("cluster", "group"))
    order = np.lexsort((np.arange(len(rows)), truth, cluster))
    image = axis.imshow(values[np.ix_(order, order)].astype(float), cmap=colours, interpolation="nearest")
    figure.colorbar(image, ax=axis, fraction=0.045, pad=0.02).ax.tick_params(labelsize=7)
    strips = [("cluster", cluster)] + ([("truth", truth)] if (truth >= 0).all() else [])
    for i, (what, labels) in enumerate(strips):
        strip = axis.inset_axes([-0.07 - 0.075 * i, 0, 0.06, 1])
        codes = np.unique(labels, return_inverse=True)[1][order]
        strip.imshow(codes[:, None], aspect="auto", cmap="Greys", vmin=-1, interpolation="nearest")
        for edge in np.flatnonzero(np.diff(codes)):
            strip.axhline(edge + 0.5, color="#d55e00", lw=1)
        strip.set(xticks=[0], yticks=[])
        strip.set_xticklabels([what], rotation=90, fontsize=7)
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"{group.name}\n{title}", fontsize=8)


def dendrograms(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the trees of Ward's clustering of the clients by their links (FLT and PCA+kM+HC).

    Trees of more than `MAX_LEAVES` clients are left out, with a warning.
    """
    from scipy.cluster.hierarchy import dendrogram, linkage

    found = [(g.name, g.runs[0].algorithm_state) for g in groups]
    links = [
        (n, s["linked"]) for n, s in found if "linked" in s and "distance" not in s and len(s["linked"]) > 1
    ]
    large = [f"{name} ({len(linked)} clients)" for name, linked in links if len(linked) > MAX_LEAVES]
    if large:
        warn_once(f"trees of more than {MAX_LEAVES} clients are not drawn: {first_of(large)}")
    links = [(name, linked) for name, linked in links if len(linked) <= MAX_LEAVES]
    if not links:
        return None
    figure = new_figure(width or 7.0, 2.8 * len(links))
    for axis, (name, linked) in zip(figure.subplots(len(links), squeeze=False).flat, links, strict=True):
        dendrogram(linkage(linked.astype(float), "ward"), ax=axis, no_labels=True, color_threshold=0)
        axis.set_title(name, fontsize=8)
        axis.set_ylabel("Ward's distance", fontsize=8)
    return figure


def silhouettes(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the mean silhouette against the number of clusters, for algorithms that use it to choose."""
    lines = [(g.name, *scores.T) for g in groups if (scores := silhouette_of(g.runs[0])) is not None]
    return _lines(lines, "number of clusters k", "mean silhouette", width)


def silhouette_of(run: Run) -> np.ndarray | None:
    """Return numbers of clusters and their mean silhouettes [., 2]; None unless they were compared."""
    scores = run.algorithm_state.get("silhouette")
    if scores is None or scores.ndim != 2 or not scores.size or scores.shape[1] < 2:
        return None
    return scores[:, :2]


def staleness(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the distribution of staleness of asynchronous runs."""
    found = [(g, g.runs[0].summary["asynchronous"]) for g in groups if g.runs[0].summary.get("asynchronous")]
    lines = []
    for group, said in found:
        lags = {int(k): n for k, n in said["staleness_histogram"].items()}
        x, total = np.arange(max(lags, default=0) + 2), sum(lags.values())
        lines.append((group.name, x - 0.5, np.array([lags.get(int(lag), 0) / max(total, 1) for lag in x])))
    return _lines(lines, STALENESS, ARRIVALS, width, steps=True)


def _lines(
    lines: Sequence[tuple[str, np.ndarray, np.ndarray]],
    across: str,
    up: str,
    width: float | None,
    steps: bool = False,
) -> Figure | None:
    """Draw lines in one panel: name, x and y of each, as steps or with marks; None if there is none."""
    if not lines:
        return None
    figure = new_figure(width or 5.5 + steps, (3.0 if width is None else 2.1) + 0.18 * len(lines))
    axis = figure.subplots()
    for i, (name, x, y) in enumerate(lines):
        look = {"drawstyle": "steps-post"} if steps else {"marker": MARKS[i % len(MARKS)], "ms": 4}
        axis.plot(x, y, label=name, **line_style(i), **look)
    framed(axis, across, up)
    legend_below(figure, axis)
    return figure


def timings(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the seconds of each phase, for each rank of the first run of each group."""
    found = [(g, spent) for g in groups if (spent := phase_seconds(g.runs[0]))][:MAX_TIMINGS]
    if not found:
        return None
    bars = {
        f"{group.name}, rank {rank}" if len(spent) > 1 else group.name: seconds
        for group, spent in found
        for rank, seconds in spent.items()
    }
    figure = new_figure(width or 8.5, (1.4 if width is None else 2.0) + 0.26 * len(bars))
    phases = dict(zip(PHASES, np.stack([*bars.values()]).T, strict=True))
    _stacked(figure, [*bars], {name: spent for name, spent in phases.items() if spent.any()}, "seconds")
    return figure


def phase_seconds(run: Run) -> dict[int, np.ndarray]:
    """Return the seconds of each phase: rank -> [phases]; empty if the run has no `timing.csv`."""
    spent: dict[int, np.ndarray] = {}
    for row in run.rows("timing.csv"):
        seconds, rank = np.nan_to_num([float(row.get(p) or 0) for p in PHASES]), int(row["rank"])
        spent[rank] = spent[rank] + seconds if rank in spent else seconds
    return dict(sorted(spent.items()))


def _metric_curves(
    groups: Sequence[Group], what: str, title: str, dashed: str = "", width: float | None = None
) -> Figure | None:
    """Draw a column of the runs' metric, which is accuracy for classification."""
    metric = metric_of(groups)
    more = f"{metric.name}_{dashed}" if dashed else ""
    return curves(groups, f"{metric.name}_{what}", title.format(metric.title), more, width)


def said_of(text: str, groups: Sequence[Group]) -> str:
    """Return the title or caption of a figure, with the runs' metric in place of accuracy."""
    metric = metric_of(groups)
    first = f"{metric.title[0].upper()}{metric.title[1:]}"
    return text.replace("Accuracy", first).replace("accuracy", metric.title)


Drawing = Callable[[Sequence[Group], float | None], "Figure | None"]
FIGURES: dict[str, tuple[str, str, Drawing]] = {  # file name -> title, caption, function
    "accuracy": (
        "Accuracy",
        "Mean accuracy over clients; bands show the range over seeds. Under `evaluation.train`, dashes "
        "are the accuracy on training data.",
        lambda groups, width: _metric_curves(groups, "mean", "mean {}", "train_mean", width=width),
    ),
    "worst": (
        "Worst client",
        "Accuracy of the worst client of each evaluation.",
        lambda groups, width: _metric_curves(groups, "worst", "worst {}", width=width),
    ),
    "fairness": (
        "Fairness",
        "Standard deviation of accuracy over clients; lower is fairer.",
        lambda groups, width: _metric_curves(groups, "std", "std over clients", width=width),
    ),
    "bytes": (
        "Bytes",
        "Bytes that the federation would have sent, by kind and direction; first seed.",
        traffic,
    ),
    "matrices": (
        "Pairs of clients",
        "Ordered by cluster and true group; lines where either changes; first seed.",
        matrices,
    ),
    "dendrogram": (
        "Tree of clients",
        "Ward's clustering of the links between clients; first seed.",
        dendrograms,
    ),
    "silhouette": (
        "Silhouette",
        "The score by which the number of clusters was chosen; first seed.",
        silhouettes,
    ),
    "staleness": ("Staleness", "Server steps between download and arrival; first seed.", staleness),
    "time": ("Time of each rank", "Seconds of each phase, evaluation included; first seed.", timings),
}


# -- comparisons ---------------------------------------------------------------------------------------------


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
                _interval(axis, i, bar)
        if panel.from_zero:
            axis.set_xlim(left=0)
        framed(axis, panel.title)
    axes[0].set_yticks(np.arange(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _runs(axis: Any, row: int, bar: Bar, mark: str = "|") -> None:
    """Draw the runs of a group, with a triangle for a run that ended without the target."""
    values = np.array(bar.runs)
    met = np.ones(len(values), bool) if bar.met is None else np.array(bar.met, bool)
    for which, look in ((met, mark), *(() if bar.met is None else ((~met, ">"),))):
        axis.plot(values[which], np.full(int(which.sum()), row + 0.2), marker=look, mfc="none", **FAINT)


def _interval(axis: Any, row: int, bar: Bar, group: int | None = None) -> None:
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
    for axis, (title, shares) in zip(axes, panels, strict=True):
        for i, (group, curve) in enumerate(zip(comparison.groups, shares, strict=True)):
            look = line_style(i)
            axis.step(curve.x, curve.y, where="post", label=group.name, **look)
            at, heights = zip(*curve.ends, strict=True) if curve.ends else ((), ())
            axis.plot(at, heights, marker="|", ms=8, mew=1.5, ls="", color=look["color"])
        axis.set(xlim=(0, None), ylim=(-0.03, 1.05))
        share = f"share of runs at {statistics_drawn.target_text(comparison)}"
        framed(axis, title, share if axis is axes[0] else "")
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
        _interval(axis, row, bar, group)
    axis.set_yticks(np.arange(len(rows)), [name for name, _, _ in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    framed(axis, f"difference, {comparison.column(comparison.choices.metric).title}")
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


OF_COMPARISONS: dict[
    str, tuple[str, str, Callable[[Comparison], Figure | None]]
] = {  # file name -> title, caption, function
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


# -- sweeps --------------------------------------------------------------------------------------------------


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


def draw_sweep(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG with a column of panels for each value of the last key, and a line for each of the others.

    If any curve has values on training data, these are dashed and all lines on test data are solid.

    Args:
        curves: one curve per case.
        path: the file.
    """
    panels = list(dict.fromkeys(c.panel for c in curves))
    lines = list(dict.fromkeys(c.line for c in curves))
    rows = 2 if any(c.staleness for c in curves) else 1
    below = 0.2 * min(len(lines), MAX_LEGEND)
    figure = new_figure(max(3.6 * len(panels), 6.0), 2.8 * rows + below)
    axes = figure.subplots(rows, len(panels), squeeze=False, sharey="row")
    trained = any(c.train for c in curves)
    several_seeds = len({(c.panel, c.line) for c in curves}) < len(curves)
    title = f"mean {', '.join(dict.fromkeys(c.metric for c in curves))}"
    title += " (dashed: training data)" if trained else ""
    changes = {"lw": 0.9 if several_seeds else 1.5} | ({"ls": "-"} if trained else {})
    styles = {line: line_style(i) | changes for i, line in enumerate(lines)}
    for curve in curves:
        axis = axes[0][panels.index(curve.panel)]
        style = styles[curve.line] | {"marker": "o" if len(curve.x) == 1 else None}  # one point makes no line
        axis.plot(curve.x, drawable(curve.y), label=curve.line, **style)
        if curve.train:
            axis.plot(curve.x, drawable(curve.train), **{**style, "ls": "--"})
        axis.set_title(curve.panel, fontsize=9)
        framed(axis, curve.axis, title if axis is axes[0][0] else "")
    for panel, axis in zip(panels, axes[1] if rows == 2 else (), strict=rows == 2):
        _histograms(axis, [c for c in curves if c.panel == panel and c.staleness], styles)
        framed(axis, STALENESS, ARRIVALS if axis is axes[1][0] else "")
    if any(lines):
        legend_below(figure, *axes[0])
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _histograms(axis: Any, curves: Sequence[Curve], styles: Mapping[str, dict[str, Any]]) -> None:
    """Draw the distribution of staleness of each line; only one if it is the same for all lines."""
    axis.set_yscale("log")
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
