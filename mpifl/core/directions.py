"""Which values of a figure are better, and whether a value is as good as a target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .metric import SPREADS, Metric, metric_of_column

# columns of no metric, and prefixes of such
HIGHER = ("ari", "nmi", "purity", "recovered")
LOWER = (
    *("loss", "train_loss", "federation_bytes", "seconds", "virtual_seconds", "churn", "refusal_rate"),
    *("mixture_kl", "client_distance", "head_distance", "staleness"),
    *("flops", "forward", "backward", "joules", "clustering_bytes", "recovery", "score_lost"),
)
ROUNDING = 1e-9  # relative difference that a change in the order of sums may cause; counts as none


def begins(column: str, names: Iterable[str]) -> bool:
    """Return whether a column is one of some figures, or a figure's name with an ending."""
    return any(column == name or column.startswith(f"{name}_") for name in names)


def direction(column: str, metric: Metric, own: tuple[str, int] | None = None) -> int:
    """Return 1 if higher is better in a column of `metrics.csv`, -1 if lower is, 0 if neither is.

    Args:
        column: the column.
        metric: the main metric of the run.
        own: name and direction of the user's figure that the column belongs to; None for none.
    """
    found = metric if metric.of(column) else None if own else metric_of_column(column)
    if found is None and own is None:
        return int(begins(column, HIGHER)) - int(begins(column, LOWER))
    name, better = own or ("", 0)
    if found is not None:
        name, better = found.name, found.better
    return -1 if better and any(word in column[len(name) :] for word in SPREADS) else better


def reaches(values: Any, target: float, better: int) -> np.ndarray:
    """Return which values are as good as a target; one that misses it only by rounding is, NaN never.

    Args:
        values: any shape.
        target: the target.
        better: 1 where higher is better, -1 where lower is.
    """
    found = np.asarray(values, np.float64)
    return np.asarray(better * found >= better * target - ROUNDING * abs(target))
