"""Memory, start and balance of `system.hosting: any` and `groups`, over numbers of workers, as a table.

    python tests/campaigns/hosting.py                           # 2, 4 and 8 workers, all clients and a tenth
    python tests/campaigns/hosting.py --workers 4 --shares 1 -- --data.source mnist

While a run is on, the kernel's counts of each of its processes are read a few times a second
(`/proc/PID/smaps_rollup`); the largest of each are kept. The busiest round is predicted from the number of
samples, which no other process disturbs; seconds are those of a machine that may be busy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np

from mpifl.comm.mpi_startup import mpirun
from mpifl.comm.single import Single
from mpifl.experiment import loader
from mpifl.experiment.build import build
from mpifl.experiment.context import RunContext
from mpifl.forecast.hosting import group_of_most, groups_of, round_balance

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
WORKLOAD = [
    *("--name", "hosting", "--algorithm", "scaffold", "--model", "{name: mlp, hidden: [64]}"),
    *("--local", "{epochs: 1, batch_size: 32, lr: 0.05}", "--data.source", "fashionmnist"),
    *("--data.scenario", "{name: lognormal, clients: 200, sigma: 1.0}"),
]
ROUNDS = {1.0: 4, 0.1: 40}  # share of the clients in a round -> rounds, so that each trains about four times
INTERVAL_S = 0.3
MB = 1e6
COUNTS = {  # what is counted -> its fields in the kernel's files
    "own": ("Private_Clean", "Private_Dirty"),
    "part": ("Pss",),
    "files": ("RssFile",),
    "resident": ("Rss",),
}
HEAD = (
    *("share", "workers", "hosting", "own MB", "Pss MB", "RssFile MB", "RSS MB", "all ranks, Pss MB"),
    *("start s", "round s", "copy, CPU s", "group / mean", "round / mean", "digest"),
)


def counts(pid: int) -> dict[str, int]:
    """Return the memory of a process in bytes, by the names of `COUNTS`; empty if it has ended.

    `own` is what no other process has, `part` counts shared pages in equal parts, `files` are resident pages
    of mapped files.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    held = {line[0]: 1024 * int(line[1]) for line in lines if line[-1:] == ["kB"]}
    return {what: sum(held.get(f"{name}:", 0) for name in names) for what, names in COUNTS.items()}


def ranks_below(parent: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the process of each rank below a launcher."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(path.parent.name))
    waiting = [*children[parent]]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        values = dict(entry.partition(b"=")[::2] for entry in environment)
        for name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
            if name in values:
                yield int(values[name]), pid
                break


def watched(command: Sequence[str], log: Path) -> dict[int, dict[str, int]]:
    """Run a command and return the largest counts of each of its ranks.

    Raises:
        SystemExit: it failed; has its output.
    """
    most: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    with log.open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out)
        while job.poll() is None:
            for rank, pid in ranks_below(job.pid):
                for name, size in counts(pid).items():
                    most[rank][name] = max(most[rank][name], size)
            time.sleep(INTERVAL_S)
    if job.returncode:
        raise SystemExit(log.read_text())
    return most


def measured(
    context: RunContext, hosting: str, workers: int, share: float, options: Sequence[str], folder: Path
) -> list[str]:
    """Return a row of the table.

    Args:
        context: context of the run in one process, for its balance.
        hosting: `any` or `groups`.
        workers: number of workers.
        share: share of the clients in a round.
        options: options of the run.
        folder: where it writes.
    """
    name = f"{hosting}-{workers}-{share:g}"
    program = [*mpirun(workers + 1), "mpifl", "run", CONFIG, "--quiet", *options]
    place = ["--system.hosting", hosting, "--output.folder", str(folder), "--output.id", name]
    most = watched([*program, *place], folder / f"{name}.log")
    found = folder / f"{context.config.name}-{name}"
    summary = json.loads((found / "summary.json").read_text())
    ranks = json.loads((found / "environment.json").read_text())["processes"]
    start = max(max(place["start_s"].values()) for place in ranks)
    busiest = [max(most[rank][what] for rank in range(1, workers + 1)) / MB for what in COUNTS]
    together = sum(one["part"] for one in most.values()) / MB
    group = groups_of(context, workers + 1).busiest if hosting == "groups" else float("nan")
    return [
        *(f"{share:g}", str(workers), hosting, *(f"{size:.0f}" for size in busiest), f"{together:.0f}"),
        *(f"{start:.1f}", f"{summary['wall_seconds'] / summary['rounds']:.2f}"),
        f"{copying(context, workers):.2f}" if hosting == "groups" else "",
        *(f"{group:.3f}".replace("nan", ""), f"{round_balance(context, workers + 1, hosting):.2f}"),
        summary["digest"][:8],
    ]


def copying(context: RunContext, workers: int) -> float:
    """Return the processor seconds in which a worker copies the samples of its group."""
    start = process_time()
    context.federation.host(group_of_most(context, workers + 1))
    seconds = process_time() - start
    context.federation.host(np.arange(context.problem.num_clients))  # back to the mapped pool
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as rows of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shares", type=float, nargs="+", default=[*ROUNDS])
    parser.add_argument("options", nargs="*", help="further options of the runs, after --")
    asked = parser.parse_args(arguments)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for share in asked.shares:
            rounds = ROUNDS.get(share, 10)
            options = [*WORKLOAD, "--rounds", str(rounds), "--evaluation.every", str(rounds)]
            options += ["--participation", str(share), *asked.options]
            context = build(loader.load(CONFIG, options), Single())
            for workers in asked.workers:
                for hosting in ("any", "groups"):
                    row = measured(context, hosting, workers, share, options, Path(folder))
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
