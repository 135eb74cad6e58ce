"""Seconds per round of mpifl beside those of a plain PyTorch loop, measured in turns."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from mpifl.comm.mpi_startup import mpirun
from mpifl.core.errors import nearest, require
from mpifl.core.progress import doing, each
from mpifl.core.textfiles import flat
from mpifl.data import prepare
from mpifl.experiment import loader
from mpifl.experiment.build import device_of
from mpifl.experiment.schema import Config

from .turns import KEEP_FREED, Job, scratch_folder
from .workloads import SERVER, WORKLOADS, Workload

Figures = dict[str, Any]
TURN_S = 3.0  # minimum length of a turn
OF_LOOPS = ("data", "model", "seed", "participation", "cohort_size")  # what the loops read from options
OF_TRAINING = tuple(f"local.{key}" for key in ("epochs", "batch_size", "lr", "momentum", "weight_decay"))
OF_MPIFL = "system"  # section that decides how mpifl does the same work
TRACE = "output.trace"  # so does this key


def compare_all(
    names: Sequence[str], ranks: int, turns: int | None, options: Sequence[str], seconds: float = TURN_S
) -> dict[str, Figures]:
    """Measure workloads; print the figures of each when it is complete.

    Args:
        names: Workloads; all if there are none.
        ranks: Number of ranks, server included.
        turns: Number of turns of each job; None for the default of the workload.
        options: Command-line options that override the configurations of mpifl and of the loops.
        seconds: Minimum length of a turn; 0 for one round.

    Returns:
        Workload -> its figures.

    Raises:
        UserError: A workload is unknown, the loops do not support an option, or a job ended early.
    """
    for name in names:
        require(name != SERVER, "bench", [*names], f"{name} runs alone: leave the others out")
        require(name in WORKLOADS, "bench", name, nearest(name, [*WORKLOADS, SERVER]))
    out = {}
    for name in names or WORKLOADS:
        with doing(name):
            out[name] = compare(WORKLOADS[name], ranks, turns, options, seconds)
        print("\n".join(lines(name, out[name])), flush=True)
    return out


def compare(
    workload: Workload, ranks: int, turns: int | None, options: Sequence[str], seconds: float = TURN_S
) -> Figures:
    """Return the figures of one workload, for mpifl and for a plain loop with one process per worker.

    The loop is measured twice: unchanged, and with an allocator that keeps freed memory ("tuned"). It trains
    on the same kind of device as mpifl: on GPUs if mpifl uses them.

    Args:
        workload: The workload.
        ranks: Number of ranks, server included.
        turns: Number of turns of each job; None for the default of the workload.
        options: Command-line options that override the configuration of mpifl and of the loops.
        seconds: Minimum length of a turn; 0 for one round.

    Raises:
        UserError: The loops do not support an option, the device is missing, or a job ended early.
    """
    config = loader.load(workload.config, list(options))
    check_options(options)
    prepare(config.data, config.seed.data, download=False)
    workers = str(max(1, ranks - 1))
    program = [sys.executable, "-m", "mpifl.benchmarks.plain_loop"]
    device = device_of(config.system, 0).partition(":")[0]
    loop = [*program, "SOCKET", workers, workload.config, device, *options]
    with scratch_folder() as place:
        folder = Path(place)
        mine = ["mpifl.benchmarks.job", "SOCKET", workload.config, "--system.scratch", place, *options]
        commands = {"mpifl": ([*mpirun(ranks), *mine], {}), "plain": (loop, {}), "tuned": (loop, KEEP_FREED)}
        jobs: dict[str, Job] = {}
        try:
            for name, (command, variables) in commands.items():
                jobs[name] = Job(name, command, variables, folder)
                jobs[name].stop()
            return _figures(jobs, take_turns(jobs, seconds, turns or workload.turns))
        finally:
            for job in jobs.values():
                job.end()


def check_options(options: Sequence[str]) -> None:
    """Check that the loops support the options given to mpifl.

    Raises:
        UserError: The loops do not support one of the keys.
    """
    known = (*OF_LOOPS, *OF_TRAINING, OF_MPIFL, TRACE)
    for key, value in flat(loader.overrides(options)):
        fits = key in known or key.split(".")[0] in (*OF_LOOPS, OF_MPIFL)
        require(fits, key, value, f"the plain loops beside mpifl do not know it; use {', '.join(known)}")


def check_rounds(config: Config, options: Sequence[str], chosen: Sequence[str]) -> None:
    """Check that a configuration has rounds that can be measured, and that no option sets what it chooses.

    Args:
        config: The configuration, with the options.
        options: Command-line options that override the configuration.
        chosen: Keys that the measurement sets.

    Raises:
        UserError: The run is asynchronous, or an option is one of these keys.
    """
    remedy = "only synchronous rounds are measured; use policy rounds"
    require(config.policy.synchronous, "policy.name", loader.to_tree(config)["policy"]["name"], remedy)
    for key, value in flat(loader.overrides(options)):
        own = any(f"{key}.".startswith(f"{name}.") for name in chosen)
        require(not own, key, value, "the measurement chooses it; leave it out")


def take_turns(jobs: dict[str, Job], seconds: float, turns: int) -> dict[str, list[Figures]]:
    """Warm the jobs up, then let them compute some rounds in turn.

    A program that was stopped resumes with cold caches: the first rounds of a turn are slower than those of a
    program that runs alone. With turns of some seconds the difference is small; turns of one round are the
    other extreme.

    Args:
        jobs: name -> job; they are stopped.
        seconds: minimum length of a turn; each job computes as many rounds as that takes. 0 for one round.
        turns: number of turns of each job.

    Returns:
        Name -> the reports of its turns.
    """
    with doing("warming up"):
        least = {name: job.turn(1)["seconds"] for name, job in jobs.items()}
        for _ in range(3 if max(least.values()) < 1 else 0):
            least = {name: min(least[name], job.turn(2)["seconds"] / 2) for name, job in jobs.items()}
        rounds = {name: max(1, ceil(seconds / least[name])) for name in jobs}
        for name, job in jobs.items():  # rounds of a long turn are faster than those after a stop
            while rounds[name] > 1 and (took := job.turn(rounds[name])["seconds"]) < seconds:
                rounds[name] = ceil(1.1 * rounds[name] * seconds / took)
    taken: dict[str, list[Figures]] = {name: [] for name in jobs}
    order = list(jobs)  # reversed every other turn: the first job may find a quieter machine
    names = [name for turn in range(turns) for name in order[:: 1 if turn % 2 else -1]]
    for name in each(names, "measuring", "turns"):
        taken[name].append(jobs[name].turn(rounds[name]))
    return taken


def _figures(jobs: dict[str, Job], taken: dict[str, list[Figures]]) -> Figures:
    """Return the medians of each job, and the ratios of mpifl to the two loops."""
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
        out[f"ratio_{name}"] = ratios(taken["mpifl"], taken[name], lambda t: t["seconds"] / t["rounds"])
        out[f"cpu_ratio_{name}"] = ratios(taken["mpifl"], taken[name], lambda t: sum(t["cpu"]) / t["rounds"])
    return out | _details(jobs["mpifl"], taken["mpifl"])


def ratios(
    ours: list[Figures], theirs: list[Figures], figure: Callable[[Figures], float]
) -> dict[str, float]:
    """Return median, lowest and highest of the ratios of a figure, turn by turn.

    Args:
        ours: Reports of the turns of one job.
        theirs: Reports of another job; its turns alternate with ours, so the machine is equally busy.
        figure: Returns the figure of a report.
    """
    return range_of(figure(a) / figure(b) for a, b in zip(ours, theirs, strict=True))


def range_of(values: Iterable[float]) -> dict[str, float]:
    """Return median, lowest and highest of some values."""
    in_order = sorted(values)
    return {"median": statistics.median(in_order), "low": in_order[0], "high": in_order[-1]}


def _details(job: Job, turns: list[Figures]) -> Figures:
    """Return the figures of mpifl alone: processor time of the server, bytes, time outside training."""
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
    """Return the text lines of one workload."""
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
    """Return a ratio and its range as text."""
    return f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
