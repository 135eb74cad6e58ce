"""A round with a million registered clients beside one with ten thousand, in cohorts of the same size.

python tests/campaigns/population.py [--ranks 3] [--turns 7] [--json FILE] [--key.path value ...]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpifl.benchmarks.compare import check_rounds, ratios, spread
from mpifl.benchmarks.turns import Job, scratch_folder
from mpifl.comm.mpi_startup import mpirun
from mpifl.core.progress import each
from mpifl.data import prepare
from mpifl.experiment import loader

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.measurements import command

MANY, FEW = 1_000_000, 10_000
CONFIG = "bench/million"


def compare_populations(ranks: int, turns: int, options: Sequence[str]) -> dict[str, Any]:
    """Measure both populations in turns, print the figures and return them.

    Args:
        ranks: Number of ranks, server included.
        turns: Number of turns.
        options: Command-line options that override the configuration.
    """
    config = loader.load(CONFIG, list(options))
    check_rounds(config, options, ("rounds", "data.scenario.clients"))
    prepare(config.data, config.seed.data, download=False)
    taken: dict[int, list[dict[str, Any]]] = {MANY: [], FEW: []}
    with scratch_folder() as place:
        jobs: dict[int, Job] = {}
        try:
            for n in taken:
                size = ["--data.scenario.clients", str(n), "--system.scratch", place]
                command = [*mpirun(ranks), "mpifl.benchmarks.job", "SOCKET", CONFIG, *options, *size]
                jobs[n] = Job(str(n), command, {}, Path(place))
                jobs[n].turn(1)
            order = list(jobs)
            turn_of = [n for turn in range(turns) for n in order[:: 1 if turn % 2 else -1]]
            for n in each(turn_of, "measuring", "turns"):
                taken[n].append(jobs[n].turn(1))
        finally:
            for job in jobs.values():
                job.end()
    out = {str(n): _figures(jobs[n], taken[n]) for n in jobs}
    out["ratio"] = ratios(taken[MANY], taken[FEW], lambda t: t["seconds"])
    out["cpu_ratio"] = ratios(taken[MANY], taken[FEW], lambda t: sum(t["cpu"]))
    print("\n".join(lines(out)), flush=True)
    return out


def _figures(job: Job, turns: list[dict[str, Any]]) -> dict[str, Any]:
    used = turns[-1]["used"]
    return {
        "startup_seconds": job.startup,
        "seconds_per_round": statistics.median(t["seconds"] for t in turns),
        "cpu_per_round": statistics.median(sum(t["cpu"]) for t in turns),
        "server_cpu_per_round": statistics.median(t["cpu"][0] for t in turns),
        "server_peak_bytes": used[0]["peak"],
        "worker_peak_bytes": max(u["peak"] for u in used),
    }


def lines(out: dict[str, Any]) -> list[str]:
    """Return the figures as text lines."""
    page = []
    for n in (MANY, FEW):
        f = out[str(n)]
        memory = [f[f"{who}_peak_bytes"] / 1e6 for who in ("server", "worker")]
        page.append(
            f"{n:>9,} clients: start-up {f['startup_seconds']:.1f} s, {f['seconds_per_round']:.3f} s a round,"
            f" {f['cpu_per_round']:.3f} s of processors (server {f['server_cpu_per_round']:.3f}), "
            f"peak memory server {memory[0]:.0f} MB, worker {memory[1]:.0f} MB"
        )
    page.append(
        f"a round of the million costs {spread(out['ratio'])}, in processor time {spread(out['cpu_ratio'])}"
    )
    return page


if __name__ == "__main__":
    sys.exit(command(str(__doc__).splitlines()[0], compare_populations, {"ranks": 3, "turns": 7}))
