"""`mpifl bench`: seconds per round of mpifl beside a plain PyTorch loop, measured turn by turn."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, nearest, require
from mpifl.data import prepare
from mpifl.experiment import loader

from .turns import KEEP_FREED, Job, mpirun, scratch
from .workloads import WORKLOADS, Workload

Figures = dict[str, Any]


def bench(names: Sequence[str], ranks: int, turns: int | None, options: Sequence[str]) -> dict[str, Figures]:
    """Measure workloads (all by default); print a line or two for each as it is done."""
    for name in names:
        if name not in WORKLOADS:
            raise UserError("bench", name, nearest(name, [*WORKLOADS, "population", "scaling"]))
    out = {}
    for name in names or WORKLOADS:
        out[name] = measure(WORKLOADS[name], ranks, turns, options)
        print("\n".join(lines(name, out[name])), flush=True)
    return out


def measure(workload: Workload, ranks: int, turns: int | None, options: Sequence[str]) -> Figures:
    """Return the figures of one workload on `ranks` ranks, beside a plain process for each worker."""
    config = loader.load(workload.config, list(options))
    prepare(config.data, config.seed.data, download=False)
    workers = str(max(1, ranks - 1))
    loop = [sys.executable, "-m", "mpifl.benchmarks.plain_loop", "SOCKET", workers, workload.config]
    with scratch() as place:
        folder = Path(place)
        mine = ["mpifl.benchmarks.job", "SOCKET", workload.config, "--system.scratch", place, *options]
        commands = {
            "mpifl": ([*mpirun(ranks), *mine], {}),
            "plain": (loop, {}),
            "tuned": (loop, KEEP_FREED),
        }
        jobs: dict[str, Job] = {}
        try:
            for name, (command, extra) in commands.items():
                jobs[name] = Job(name, command, extra, folder)
                jobs[name].stand_still()
            return _figures(jobs, _take_turns(jobs, workload, turns or workload.turns))
        finally:
            for job in jobs.values():
                job.end()


def _take_turns(jobs: dict[str, Job], workload: Workload, turns: int) -> dict[str, list[Figures]]:
    """Warm every job up, then let each in turn do the same rounds."""
    longest = max(job.turn(1)["seconds"] for job in jobs.values())
    for _ in range(3 if longest < workload.seconds else 0):
        longest = min(longest, max(job.turn(2)["seconds"] / 2 for job in jobs.values()))
    rounds = max(1, round(workload.seconds / longest))
    taken: dict[str, list[Figures]] = {name: [] for name in jobs}
    for turn in range(turns):
        order = list(jobs)[:: 1 if turn % 2 else -1]  # who goes first may find a quieter machine
        for name in order:
            taken[name].append(jobs[name].turn(rounds))
    return taken


def _figures(jobs: dict[str, Job], taken: dict[str, list[Figures]]) -> Figures:
    """Return medians, and ratios to the two loops turn by turn."""
    out: Figures = {"load": os.getloadavg()[0], "turns": len(taken["mpifl"])}
    for name, turns in taken.items():
        out[name] = {
            "seconds_per_round": statistics.median(t["seconds"] / t["rounds"] for t in turns),
            "cpu_per_round": statistics.median(sum(t["cpu"]) / t["rounds"] for t in turns),
            "startup_seconds": jobs[name].startup,
            "peak_bytes": sum(used["peak"] for used in turns[-1]["used"]),
            "pss_bytes": sum(used["pss"] for used in turns[-1]["used"]),
            "rounds_per_turn": turns[0]["rounds"],
        }
    for name in ("plain", "tuned"):
        out[f"ratio_{name}"] = ratios(taken["mpifl"], taken[name], lambda t: t["seconds"])
        out[f"cpu_ratio_{name}"] = ratios(taken["mpifl"], taken[name], lambda t: sum(t["cpu"]))
    return out | _inside(jobs["mpifl"], taken["mpifl"])


def ratios(ours: list[Figures], theirs: list[Figures], of: Any) -> dict[str, float]:
    """Return median, lowest and highest of the quotients of `of`, turn by turn."""
    values = sorted(of(a) / of(b) for a, b in zip(ours, theirs, strict=True))
    return {"median": statistics.median(values), "low": values[0], "high": values[-1]}


def _inside(job: Job, turns: list[Figures]) -> Figures:
    """Return what only mpifl can say of itself: the server's processor time, bytes, time outside training."""
    rounds = sum(t["rounds"] for t in turns)
    seconds = sum(t["seconds"] for t in turns)
    workers = [r for r in range(len(turns[0]["phases"])) if r or len(turns[0]["phases"]) == 1]
    phases = {
        name: sum(t["phases"][r][name] for t in turns for r in workers) / len(workers) / rounds
        for name in turns[0]["phases"][0]
    }
    return {
        "server_cpu_share": sum(t["cpu"][0] for t in turns) / seconds,
        "outside_training": 1 - phases["train"] * rounds / seconds,
        "worker_phases": phases,
        "mpi_bytes_per_round": (job.last["mpi_bytes"] - job.first["mpi_bytes"]) / job.rounds,
        "federation_bytes_per_round": sum(job.last["federation_bytes"]) / job.rounds,
    }


def lines(name: str, f: Figures) -> list[str]:
    """Return what is printed of one workload."""
    wall, cpu = f["ratio_plain"], f["cpu_ratio_plain"]
    tuned, mine = f["ratio_tuned"], f["mpifl"]
    return [
        f"{name}  {WORKLOADS[name].what}",
        f"    seconds per round: mpifl {mine['seconds_per_round']:.4f}, plain loop "
        f"{f['plain']['seconds_per_round']:.4f}, tuned loop {f['tuned']['seconds_per_round']:.4f}",
        f"    ratio to the plain loop {spread(wall)}, processor time {spread(cpu)}",
        f"    ratio to the tuned loop {spread(tuned)}, processor time {spread(f['cpu_ratio_tuned'])}",
        f"    start-up {mine['startup_seconds']:.1f} s (plain {f['plain']['startup_seconds']:.1f}), "
        f"peak memory {mine['peak_bytes'] / 1e9:.2f} GB (plain {f['plain']['peak_bytes'] / 1e9:.2f}), PSS "
        f"{mine['pss_bytes'] / 1e9:.2f} GB ({f['plain']['pss_bytes'] / 1e9:.2f})",
        f"    server's core {f['server_cpu_share']:.1%} busy, outside training {f['outside_training']:.1%}, "
        f"MPI {f['mpi_bytes_per_round'] / 1e6:.2f} MB a round; load {f['load']:.1f}, {f['turns']} turns of "
        f"{mine['rounds_per_turn']} rounds",
    ]


def spread(ratio: dict[str, float]) -> str:
    """Return a ratio with its spread, as it is printed."""
    return f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def main(
    names: Sequence[str], options: Sequence[str], ranks: str | None, turns: str | None, path: str | None
) -> None:
    """Measure what was named, print it, and write it as JSON if asked for."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # so that the jobs are ended, too
        signal.signal(ending, lambda which, _: sys.exit(128 + which))
    numbers = [number("ranks", ranks or "3"), None if turns is None else number("turns", turns)]
    ranks_, turns_ = numbers[0] or 3, numbers[1]
    if [*names] == ["population"]:
        from .population import population

        figures = population(ranks_, turns_, options)
    elif "scaling" in names:
        from .scaling import scaling

        chosen = next((name for name in names if name in WORKLOADS), "W1")
        figures = scaling(chosen, None if ranks is None else ranks_ - 1, turns_, options)
    else:
        figures = bench(names, ranks_, turns_, options)
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def number(key: str, text: str) -> int:
    """Return a positive whole number that the user gave."""
    require(text.isdigit() and int(text) > 0, key, text, "take a whole number, 1 or more")
    return int(text)
