"""`mpifl bench`: which measurement the words on the command line ask for."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpifl.core.errors import require

from .compare import compare_all
from .population import compare_populations
from .scaling import measure_scaling
from .workloads import WORKLOADS


def bench(
    names: Sequence[str], options: Sequence[str], ranks: str | None, turns: str | None, path: str | None
) -> None:
    """Measure what was named, print the figures, and write them as JSON.

    Args:
        names: Workloads, all if there are none; or `population`; or `scaling` and a workload.
        options: Command-line options, laid over the configurations.
        ranks: Number of ranks, server included; None for 3, or for as many as there are cores (`scaling`).
        turns: Number of turns of each job; None for that of the workload.
        path: JSON file to write; None for none.

    Raises:
        UserError: A name or a number is invalid, or a job ended early.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave by an exception, so that the jobs are ended too
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    num_ranks = 3 if ranks is None else _positive("ranks", ranks)
    num_turns = None if turns is None else _positive("turns", turns)
    figures: dict[str, Any]
    if [*names] == ["population"]:
        figures = compare_populations(num_ranks, num_turns, options)
    elif "scaling" in names:
        name = next((name for name in names if name in WORKLOADS), "W1")
        figures = measure_scaling(name, None if ranks is None else num_ranks - 1, num_turns, options)
    else:
        figures = compare_all(names, num_ranks, num_turns, options)
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def _positive(key: str, text: str) -> int:
    """Return a positive whole number that the user gave."""
    require(text.isdigit() and int(text) > 0, key, text, "take a whole number, 1 or more")
    return int(text)
