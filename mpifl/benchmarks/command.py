"""`mpifl bench`: runs the measurement that the command line asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, require

from .compare import TURN_S, compare_all
from .server import measure_server
from .turns import ended_by_signals
from .workloads import SERVER


def bench(
    names: Sequence[str],
    options: Sequence[str],
    ranks: str | None,
    turns: str | None,
    path: str | None,
    seconds: str | None = None,
) -> None:
    """Run the named measurements, print the figures, and write them as JSON.

    Args:
        names: Workloads, none for all; or `server` alone.
        options: Command-line options that override the configurations.
        ranks: Number of ranks, server included; None for 3.
        turns: Number of turns of each job; None for the default of the measurement.
        path: JSON file to write; None for none.
        seconds: Minimum seconds of a turn of a workload, 0 for one round; None for 3.

    Raises:
        UserError: A name, number or option is invalid, the file cannot be written, or a job ended early.
    """
    num_ranks = 3 if ranks is None else _positive("ranks", ranks)
    num_turns = None if turns is None else _positive("turns", turns)
    length = TURN_S if seconds is None else _seconds(seconds)
    fits = seconds is None or SERVER not in names
    require(fits, "--seconds", seconds, "has no effect: only turns of workloads have a length")

    def measure() -> dict[str, Any]:
        if [*names] == [SERVER]:
            return measure_server(num_ranks, num_turns, options)
        return compare_all(names, num_ranks, num_turns, options, length)

    keep_figures(measure, path)


def keep_figures(measure: Callable[[], dict[str, Any]], path: str | None) -> None:
    """Run a measurement and write its figures as JSON; signals that end it end its jobs, too.

    Args:
        measure: Returns the figures.
        path: JSON file to write; None for none.

    Raises:
        UserError: The file cannot be written; this is tried before the measurement, which takes minutes.
    """
    if path is not None:
        with _written(path):
            is_new = not Path(path).exists()
            Path(path).open("a").close()
            if is_new:
                Path(path).unlink()
    with ended_by_signals():
        figures = measure()
    if path is not None:
        with _written(path):
            Path(path).write_text(json.dumps(figures, indent=1) + "\n")


@contextmanager
def _written(path: str) -> Iterator[None]:
    """Raise `UserError` if the file of figures cannot be written."""
    try:
        yield
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}); name a file in a folder that is there"
        raise UserError("--json", path, remedy) from error


def _positive(key: str, text: str) -> int:
    """Return a positive whole number that the user gave."""
    require(text.isdigit() and int(text) > 0, key, text, "use a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    """Return the length of a turn that the user gave."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0 <= value <= 600, "--seconds", text, "use the seconds of a turn, or 0 for one round")
    return value
