"""`mpifl bench`: runs the measurement that the command line asks for."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, nearest, require

from .compare import TURN_S, compare_all
from .forecast import measure_forecasts
from .population import compare_populations
from .scaling import measure_scaling
from .server import measure_server
from .workloads import OTHERS, WORKLOADS


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit`, so that the jobs are ended, too."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda which, _: sys.exit(128 + which)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@_signals_raise()
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
        names: Workloads, none for all; or one of `population`, `server` and `plan`; or `scaling` and at most
            one workload.
        options: Command-line options that override the configurations.
        ranks: Number of ranks, server included; None for 3, or for as many workers as cores (`scaling`).
        turns: Number of turns of each job; None for the default of the measurement.
        path: JSON file to write; None for none.
        seconds: Minimum seconds of a turn of a workload, 0 for one round; None for 3.

    Raises:
        UserError: A name, number or option is invalid, the file cannot be written, or a job ended early.
    """
    num_ranks = 3 if ranks is None else _positive("ranks", ranks)
    num_turns = None if turns is None else _positive("turns", turns)
    length = TURN_S if seconds is None else _seconds(seconds)
    fits = seconds is None or not {*OTHERS} & {*names}
    require(fits, "--seconds", seconds, "has no effect: only turns of workloads have a length")
    if path is not None:
        with _written(path):  # fail now: measuring takes minutes
            is_new = not Path(path).exists()
            Path(path).open("a").close()
            if is_new:
                Path(path).unlink()
    figures: dict[str, Any]
    if [*names] == ["population"]:
        figures = compare_populations(num_ranks, num_turns, options)
    elif [*names] == ["server"]:
        figures = measure_server(num_ranks, num_turns, options)
    elif [*names] == ["plan"]:
        require(ranks is None, "--ranks", ranks, "has no effect: plan measures runs in one process")
        figures = measure_forecasts(num_turns, options)
    elif "scaling" in names:
        require(num_ranks > 1, "ranks", ranks, "use 2 or more: one is the server")
        workers = None if ranks is None else num_ranks - 1
        figures = measure_scaling(_workload(names), workers, num_turns, options)
    else:
        figures = compare_all(names, num_ranks, num_turns, options, length)
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


def _workload(names: Sequence[str]) -> str:
    """Return the workload that `scaling` measures: W1 unless another one is named."""
    name, *more = [name for name in names if name != "scaling"] or ["W1"]
    require(not more, "bench", [name, *more], "scaling measures one workload; name one")
    require(name in WORKLOADS, "bench", name, f"is not a workload; {nearest(name, [*WORKLOADS])}")
    return name


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
