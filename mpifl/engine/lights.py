"""Many light reports, as columns and as means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .visits import Light


def stacked_notes(lights: Sequence[Light]) -> dict[str, np.ndarray]:
    """Stack the notes and findings of all reports; a report without one gets NaN."""
    tables = [{**light.notes, **light.findings} for light in lights]
    out = {}
    for name in dict.fromkeys(n for t in tables for n in t):
        example = np.asarray(next(t[name] for t in tables if name in t))
        blank = np.full(example.shape, np.nan)
        out[name] = np.stack([np.asarray(t[name]) if name in t else blank for t in tables])
    return out


def mean_metrics(lights: Sequence[Light]) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by samples."""
    fresh = [light for light in lights if light.fresh]
    n = np.array([light.num_samples for light in fresh], float)
    names = dict.fromkeys(name for light in fresh for name in light.metrics)
    return {name: float(np.average([light.metrics[name] for light in fresh], weights=n)) for name in names}
