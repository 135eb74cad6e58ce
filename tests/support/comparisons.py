"""Finished runs made without training: configurations, seeds and curves set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.analysis.seed_groups import Group
from mpifl.results.identity import deciding
from mpifl.results.reader import Run


def run_of(
    method: str,
    accuracy: Sequence[float],
    seed: int = 0,
    problem: str = "digits",
    mb: float = 1.0,
    **config: Any,
) -> Run:
    """Return a run evaluated in each round; a round takes `mb` MB up, as much down, and 2 virtual seconds."""
    rounds = np.arange(1.0, len(accuracy) + 1)
    tree = {
        "algorithm": {"name": method},
        "data": {"root": f"/data/{seed}", "source": {"name": problem}},
        "seed": {"data": seed, "training": seed},
        **config,
    }
    digest = f"{method} {problem} {seed} {config}"
    summary = {"algorithm": method, "digest": digest, "settings": deciding(tree), "identity": {}, "data": {}}
    run = Run(Path(f"{method}-{problem}-{seed}"), tree, summary)
    run.__dict__["series"] = {
        "round": rounds,
        "accuracy_mean": np.array(accuracy, float),
        "accuracy_worst": np.array(accuracy, float) / 2,
        "accuracy_std": np.full(len(rounds), 0.1),
        "loss": 1 - np.array(accuracy, float),
        "ari": np.ones(len(rounds)),
        "num_clusters": np.full(len(rounds), 2.0),
        "num_unplaced": np.zeros(len(rounds)),
        "federation_bytes_up": 1e6 * mb * rounds,
        "federation_bytes_down": 1e6 * mb * rounds,
        "virtual_seconds": 2 * rounds,
    }
    return run


def group_of(method: str, final: Sequence[float], problem: str = "digits", **more: Any) -> Group:
    """Return a group of runs with one evaluation each and the seeds 0, 1, ..."""
    runs = [run_of(method, [value], seed, problem, **more) for seed, value in enumerate(final)]
    return Group(method, tuple(runs))
