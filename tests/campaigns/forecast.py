"""The processor time that `mpifl plan` forecasts for a run, compared with the time that the run takes.

python tests/campaigns/forecast.py [--turns 3] [--json FILE] [--key.path value ...]
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpifl.benchmarks.compare import range_of, spread
from mpifl.benchmarks.turns import scratch_folder
from mpifl.core.errors import UserError
from mpifl.core.progress import each

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.measurements import command

ASYNCHRONOUS = ("--policy", "every_arrival", "--algorithm", "fedasync")
RUNS = {  # some seconds each, in one process
    "synchronous": ("bench/w1", "--rounds", "40"),
    "asynchronous": ("bench/w3", "--rounds", "3000", *ASYNCHRONOUS),
}


def measure_forecasts(turns: int, options: Sequence[str]) -> dict[str, Any]:
    """Plan and run two configurations in turns, print the figures and return them.

    Args:
        turns: Number of turns.
        options: Command-line options that override the configurations.

    Returns:
        Run -> `foretold` and `taken`, median processor seconds, and `ratio`: median, lowest and highest of
        `foretold` divided by `taken`.

    Raises:
        UserError: A plan or a run failed, or a forecast is too long to be given in seconds.
    """
    done: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    for name in each([name for _ in range(turns) for name in RUNS], "measuring", "turns"):
        done[name].append(_turn([*RUNS[name], *options]))
    out = {name: _figures(taken) for name, taken in done.items()}
    print("\n".join(lines(out)), flush=True)
    return out


def _turn(words: Sequence[str]) -> dict[str, float]:
    """Return the processor seconds of one run: `foretold`, and `taken`, start-up and shutdown included."""
    page, _ = _mpifl(["plan", *words, "--quiet"])
    said = re.search(r"; ([\d.]+) s of processors", page)
    if said is None:
        remedy = (
            "use fewer --rounds: its forecast is two minutes of processors or more, and not to the second"
        )
        raise UserError("mpifl plan", " ".join(words), remedy)
    with scratch_folder() as place:
        _, taken = _mpifl(["run", *words, "--quiet", "--output.folder", place])
    return {"foretold": float(said[1]), "taken": taken}


def _mpifl(words: Sequence[str]) -> tuple[str, float]:
    """Run a command in its own process; return its output and its processor seconds."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "mpifl", *words], capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise UserError(f"mpifl {words[0]}", " ".join(words[1:]), done.stderr.strip() or "failed")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return done.stdout, used


def _figures(taken: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: statistics.median(turn[name] for turn in taken) for name in taken[0]}
    return {**medians, "ratio": range_of(turn["foretold"] / turn["taken"] for turn in taken)}


def lines(out: dict[str, Any]) -> list[str]:
    """Return the figures as text lines."""
    return [
        f"{name} ({' '.join(RUNS[name])}): {f['foretold']:.2f} s of processors forecast, "
        f"{f['taken']:.2f} taken, ratio {spread(f['ratio'])}"
        for name, f in out.items()
    ]


if __name__ == "__main__":
    sys.exit(command(str(__doc__).splitlines()[0], measure_forecasts, {"turns": 3}))
