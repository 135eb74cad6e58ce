"""The figures of a report.

Colours are safe for colour-blind readers. Lines and bars also differ in dashes and hatches, so that they can
be distinguished in greyscale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import require
from mpifl.core.timing import PHASES

from .seed_groups import AXES, Group, metric_of, rounds_title
from .sweep_figure import COLOURS, drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "**", "++")
MAX_MATRICES, MAX_TIMINGS, MAX_LEGEND = 8, 8, 16
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


def line_style(i: int) -> dict[str, Any]:
    """Return the style of line `i`."""
    cycle = i // len(COLOURS)
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[(i + cycle) % len(DASHES)], "lw": 1.5}


def _bar(i: int) -> dict[str, Any]:
    """Return the style of part `i` of a bar."""
    return {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}


def plain(axis: Any) -> None:
    """Give an axis a faint grid and remove its frame at the top and on the right."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def legend_below(figure: Figure, axis: Any) -> None:
    """Draw one legend below all panels, in as many columns as fit."""
    handles, labels = axis.get_legend_handles_labels()
    if len(handles) > MAX_LEGEND * 3:
        handles, labels = handles[: MAX_LEGEND * 3], [*labels[: MAX_LEGEND * 3 - 1], "and more"]
    wide = max(map(len, labels), default=0)
    columns = 1 if wide > 60 else 2 if wide > 30 else 4
    columns = max(1, min(columns, int(figure.get_size_inches()[0] / (0.5 + 0.06 * wide))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def curves(
    groups: Sequence[Group], name: str, title: str, dashed: str = "", width: float | None = None
) -> Figure | None:
    """Draw a column of `metrics.csv` against rounds, bytes and virtual time.

    Lines show means over seeds, bands the range.

    Args:
        groups: the groups of runs.
        name: the column.
        title: label of its axis.
        dashed: a second column, drawn dashed in the same colours; the lines of the first are then solid.
        width: width in inches of a figure with panels below one another; None puts them side by side.

    Returns:
        The figure; None if no group has the column.
    """
    axes_of = [a for a in AXES if any(g.has(a) and np.ptp(g.column(a)) > 0 for g in groups)] or ["round"]
    shown = [g for g in groups if g.has(name)]
    if not shown:
        return None
    seconds = [bool(dashed) and group.has(dashed) for group in shown]
    below = 0.2 * min(len(shown), MAX_LEGEND)
    if width is None:
        figure = new_figure(3.7 * len(axes_of) + 0.4, 3.0 + below)
        axes = figure.subplots(1, len(axes_of), squeeze=False, sharey=True)[0]
    else:
        figure = new_figure(width, 2.1 * len(axes_of) + below)
        axes = figure.subplots(len(axes_of), 1, squeeze=False)[:, 0]
    for axis, kind in zip(axes, axes_of, strict=True):
        for i, group in enumerate(shown):
            curve, look = group.curve(kind, name), line_style(i)
            mark = {"marker": MARKS[i % len(MARKS)], "ms": 4, "markevery": max(1, len(curve.x) // 8)}
            x = curve.x / 1e6 if kind == "bytes" else curve.x
            look |= {"ls": "-"} if any(seconds) else {}
            axis.plot(x, drawable(curve.mean), label=group.name, **look, **mark)
            if seconds[i]:
                axis.plot(x, drawable(group.curve(kind, dashed).mean), **{**look, "ls": "--"})
            if len(group.runs) > 1:
                band = drawable(curve.low), drawable(curve.high)
                axis.fill_between(x, *band, color=look["color"], alpha=0.2, lw=0)
        axis.set_xlabel(rounds_title(shown) if kind == "round" else AXES[kind], fontsize=9)
        plain(axis)
    for axis in axes[: 1 if width is None else None]:
        axis.set_ylabel(title, fontsize=9)
    legend_below(figure, axes[0])
    return figure


def traffic(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the bytes of the first run of each group, stacked by kind and direction."""
    found = [group.runs[0].bytes_by_kind for group in groups]
    if not any(sum(t.values()) for t in found):
        return None
    unit, name = _unit(max(sum(t.values()) for t in found))
    parts = sorted({part for total in found for part in total})
    below = 0.12 if width is None else 0.2
    figure = new_figure(width or 8.5, 1.3 + 0.3 * len(groups) + below * len(parts))
    axis, places = figure.subplots(), np.arange(len(groups))
    start = np.zeros(len(groups))
    for i, (direction, kind) in enumerate(parts):
        size = np.array([total[direction, kind] / unit for total in found])
        look = _bar(i)
        axis.barh(places, size, left=start, height=0.7, label=f"{kind}, {direction}", **look)
        start += size
    axis.set_yticks(places, [g.name for g in groups])
    axis.invert_yaxis()
    axis.set_xlabel(f"{name} sent by unicast", fontsize=9)
    plain(axis)
    legend_below(figure, axis)
    return figure


def _unit(most: float) -> tuple[float, str]:
    """Return the unit of bytes for values up to `most`, and its name."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if most >= unit[0]), (1.0, "bytes"))


def matrices(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the matrices over pairs of clients, ordered by cluster and true group.

    These are, for each group, the matrix that its algorithm keeps and those of `evaluation.matrices`.
    """
    found = []
    for group in groups:
        run = group.runs[0]
        if run.written != "all":  # the labels that order the clients are missing
            continue
        kept = next(
            (n for n in MATRICES if n in run.algorithm_state and run.algorithm_state[n].ndim == 2), None
        )
        drawn = [] if kept is None else [("algorithm_state.npz", *MATRICES[kept], run.algorithm_state[kept])]
        drawn += [("matrices.npz", *COMPARED[n], run.matrices[n]) for n in COMPARED if n in run.matrices]
        for file, title, colours, values in drawn:
            if np.isfinite(values).any():
                n = int(run.summary["clients"])
                remedy = f"{file}: {title} has shape {values.shape}, for {n} clients; run it again"
                require(values.shape == (n, n), "RUN", str(run.folder), remedy)
                found.append((group, title, colours, values))
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


def silhouettes(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the mean silhouette against the number of clusters, for algorithms that use it to choose."""
    kept = [(g, g.runs[0].algorithm_state.get("silhouette")) for g in groups]
    found = [(g, scores) for g, scores in kept if scores is not None and scores.ndim == 2 and scores.size]
    if not found:
        return None
    figure = new_figure(width or 5.5, (3.0 if width is None else 2.1) + 0.18 * len(found))
    axis = figure.subplots()
    for i, (group, scores) in enumerate(found):
        look = {**line_style(i), "marker": MARKS[i % len(MARKS)], "ms": 4}
        axis.plot(scores[:, 0], scores[:, 1], label=group.name, **look)
    axis.set_xlabel("number of clusters k", fontsize=9)
    axis.set_ylabel("mean silhouette", fontsize=9)
    plain(axis)
    legend_below(figure, axis)
    return figure


def staleness(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the distribution of staleness of asynchronous runs."""
    found = [(g, g.runs[0].summary["asynchronous"]) for g in groups if g.runs[0].summary.get("asynchronous")]
    if not found:
        return None
    figure = new_figure(width or 6.5, (3.0 if width is None else 2.1) + 0.18 * len(found))
    axis = figure.subplots()
    for i, (group, said) in enumerate(found):
        lags = {int(k): n for k, n in said["staleness_histogram"].items()}
        x, total = np.arange(max(lags, default=0) + 2), sum(lags.values())
        y = np.array([lags.get(int(lag), 0) / max(total, 1) for lag in x])
        axis.step(x - 0.5, y, where="post", label=group.name, **line_style(i))
    axis.set_xlabel("staleness, server steps", fontsize=9)
    axis.set_ylabel("share of arrivals", fontsize=9)
    plain(axis)
    legend_below(figure, axis)
    return figure


def timings(groups: Sequence[Group], width: float | None = None) -> Figure | None:
    """Draw the seconds of each phase, for each rank of the first run of each group."""
    found = [(g, rows) for g in groups if (rows := g.runs[0].rows("timing.csv"))][:MAX_TIMINGS]
    if not found:
        return None
    labels, spent = [], []
    for group, rows in found:
        ranks = sorted({int(r["rank"]) for r in rows})
        for rank in ranks:
            mine = [r for r in rows if int(r["rank"]) == rank]
            spent.append([sum(float(r.get(p) or 0) for r in mine) for p in PHASES])
            labels.append(f"{group.name}, rank {rank}" if len(ranks) > 1 else group.name)
    figure = new_figure(width or 8.5, (1.4 if width is None else 2.0) + 0.26 * len(labels))
    axis, seconds, start = figure.subplots(), np.array(spent), np.zeros(len(labels))
    for i, phase in enumerate(PHASES):
        look = _bar(i)
        axis.barh(np.arange(len(labels)), seconds[:, i], left=start, height=0.75, label=phase, **look)
        start += seconds[:, i]
    axis.set_yticks(np.arange(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("seconds", fontsize=9)
    plain(axis)
    legend_below(figure, axis)
    return figure


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
    "silhouette": (
        "Silhouette",
        "The score by which the number of clusters was chosen; first seed.",
        silhouettes,
    ),
    "staleness": ("Staleness", "Server steps between download and arrival; first seed.", staleness),
    "time": ("Time of each rank", "Seconds of each phase, evaluation included; first seed.", timings),
}
