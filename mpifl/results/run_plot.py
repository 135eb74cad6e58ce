"""Draws a run into matplotlib axes, for scripts and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpifl.core.errors import nearest, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

AGAINST = {  # axis -> its title
    "rounds": "rounds",
    "bytes": "MB sent, up and down",
    "seconds": "virtual time, s",
    "wall_seconds": "real time, s",
}


def plot(
    metrics: DataFrame,
    metric: str,
    against: str,
    label: str,
    ax: Axes | None,
    style: dict[str, Any],
    stepped: bool = False,
) -> Axes:
    """Draw a column of `metrics.csv` and return the axes; see `Run.plot`.

    `stepped` says whether rounds are steps of an asynchronous server.
    """
    require(metric in metrics, "metric", metric, nearest(metric, list(metrics)))
    require(against in AGAINST, "against", against, f"use one of {', '.join(AGAINST)}")
    there = against != "seconds" or "virtual_seconds" in metrics
    require(there, "against", against, "this run has no virtual time; use wall_seconds")
    if against == "rounds":
        x = metrics["round"]
    elif against == "bytes":
        x = (metrics["federation_bytes_up"] + metrics["federation_bytes_down"]) / 1e6
    else:
        x = metrics["virtual_seconds" if against == "seconds" else "seconds"]
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.subplots(figsize=(4.5, 3.0), layout="constrained")[1]
    ax.plot(x, metrics[metric], **{"label": label, "lw": 1.5, **style})
    ax.set_xlabel("server steps" if stepped and against == "rounds" else AGAINST[against])
    ax.set_ylabel(metric.replace("_", " "))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)
    return ax
