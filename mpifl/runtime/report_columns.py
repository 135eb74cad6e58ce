"""Many light reports, as columns and as means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpifl.core.errors import MethodError

from .worker import ReportHeader


def stacked_notes(headers: Sequence[ReportHeader], where: str = "notes") -> dict[str, np.ndarray]:
    """Stack the notes and findings of all reports; a report without one gets NaN.

    Args:
        where: the hook that noted them.

    Raises:
        MethodError: a note has another shape at another client.
    """
    tables = [{**light.notes, **light.findings} for light in headers]
    out = {}
    for name in dict.fromkeys(n for t in tables for n in t):
        example = np.asarray(next(t[name] for t in tables if name in t))
        blank = np.full(example.shape, np.nan)
        column = [np.asarray(t[name]) if name in t else blank for t in tables]
        other = next((j for j, value in enumerate(column) if value.shape != example.shape), None)
        if other is not None:
            shape, client = column[other].shape, headers[other].client
            what = f"note {name!r} of client {client} has shape {shape}, not {example.shape}"
            raise MethodError(where, what, "a note has one shape for all clients: pad it with NaN")
        out[name] = np.stack(column)
    return out


def mean_metrics(headers: Sequence[ReportHeader]) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by samples."""
    fresh = [light for light in headers if light.fresh]
    out = {}
    for name in dict.fromkeys(name for light in fresh for name in light.metrics):
        there = [light for light in fresh if name in light.metrics]
        n = np.array([light.num_samples for light in there], float)
        out[name] = float(np.average([light.metrics[name] for light in there], weights=n))
    return out
