"""The metrics of tasks: names in files, titles, whether higher is better; and the best of several values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import require

SPREADS = ("std", "variance", "standard_error")  # in names of columns: how much values vary


@dataclass(frozen=True)
class Metric:
    """A metric of a client, or of all samples together.

    Attributes:
        name: name in columns of `metrics.csv` and `clients.csv`.
        title: name in tables, figures and progress lines.
        better: 1 where higher is better, -1 where lower is.
        percent: whether it is a fraction, which tables show in percent.
    """

    name: str
    title: str
    better: int = 1
    percent: bool = True

    @property
    def scale(self) -> float:
        """Factor from a value to the unit of tables."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """The unit of tables: % or none."""
        return "%" if self.percent else ""

    def text(self, value: float, digits: int = 4) -> str:
        """Return a value as tables show it, with at most `digits` significant digits."""
        return f"{self.scale * value:.{digits}g}{' %' if self.percent else ''}"

    def of(self, name: str) -> bool:
        """Return whether a score or the stem of a column belongs to this metric: `NAME`, or `NAME_...`."""
        return name == self.name or name.startswith(f"{self.name}_")


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy"),
        Metric("top5", "top-5 accuracy"),
        Metric("balanced_accuracy", "balanced accuracy"),
        Metric("macro_f1", "macro F1"),
        Metric("micro_f1", "micro F1"),
        Metric("subset_accuracy", "subset accuracy"),
        Metric("hamming", "share of right labels"),
        Metric("mse", "mean squared error", -1, percent=False),
        Metric("mae", "mean absolute error", -1, percent=False),
        Metric("rmse", "root mean squared error", -1, percent=False),
        Metric("r2", "R2", 1, percent=False),
        Metric("perplexity", "perplexity", -1, percent=False),
        Metric("token_accuracy", "token accuracy"),
        Metric("mean_iou", "mean IoU"),
        Metric("worst_iou", "IoU of the worst class"),
        Metric("dice", "mean Dice"),
        Metric("pixel_accuracy", "pixel accuracy"),
    )
}
"""Those of the tasks that travel with mpifl; a user's task has its own."""

ACCURACY = METRICS["accuracy"]


def least(values: Any, axis: int = -1) -> Any:
    """Return the index of the least value along an axis, int64 [...]: the first of equals.

    NaN is never the least: a model whose loss is NaN fits worse than any other, also one with an infinite
    loss. Where all values are NaN, the index is 0.

    Args:
        values: losses, distances, or similarities times -1, [...].
        axis: the axis that disappears.
    """
    array = np.asarray(values, np.float64)
    unknown = np.isnan(array)
    found = np.where(unknown, np.inf, array).argmin(axis)
    first_known = unknown.argmin(axis)  # 0 where none is known
    lowest = np.take_along_axis(array, np.expand_dims(found, axis), axis).squeeze(axis)
    return np.where(np.isnan(lowest), first_known, found)


def warn_of_no_finite(what: str) -> None:
    """Warn, once per process, that no model that a client chooses from or mixes has a finite loss.

    Args:
        what: what follows for the client.
    """
    warnings.warn(
        f"no model has a finite loss for a client, which {what}; use a smaller local.lr", stacklevel=2
    )


def least_finite(losses: Any, axis: int = -1) -> Any:
    """Return `least` of the losses of several models; warn where none is finite, and the first is taken."""
    if not np.isfinite(losses).any(axis).all():
        warn_of_no_finite("takes the first")
    return least(losses, axis)


def with_figures(figures: Mapping[str, Any], *columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures that clients reported, and then further columns of `metrics.csv`.

    Raises:
        UserError: a figure has the name of one of these columns.
    """
    others = {name: value for some in columns for name, value in some.items()}
    taken = next((name for name in figures if name in others), None)
    remedy = "is a column of metrics.csv already; give the figure another name"
    require(taken is None, "client.report(metrics=...)", taken, remedy)
    return {**figures, **others}


def metric_of_column(name: str) -> Metric | None:
    """Return the metric that a column of `metrics.csv` belongs to; None for none of `METRICS`."""
    found = [metric for metric in METRICS.values() if metric.of(name)]
    return max(found, key=lambda metric: len(metric.name), default=None)
