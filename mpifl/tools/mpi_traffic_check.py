"""`mpifl doctor --check-mpi-traffic`: compares `mpi_traffic.csv` with the bytes that Open MPI counted."""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpifl.comm.monitoring import KINDS, Monitor
from mpifl.comm.transport import Transport, on_server
from mpifl.core.errors import require
from mpifl.experiment.loader import from_tree, merged
from mpifl.experiment.run import run
from mpifl.experiment.schema import Config

TINY: dict[str, Any] = {  # takes a second; its data come with scikit-learn
    "name": "mpi-traffic-check",
    "rounds": 2,
    "participation": 0.5,
    "model": {"name": "mlp", "hidden": [12]},
    "local": {"batch_size": 32, "lr": 0.1},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8}},
    "evaluation": {"every": 0},
}
RUNS: dict[str, dict[str, Any]] = {  # together they use every collective that moves numbers
    "rounds, CFL": {"algorithm": {"name": "cfl", "warmup": 1, "eps1": 100, "eps2": 0}},
    "rounds, UCFL": {"algorithm": "ucfl"},
    "rounds, median": {"algorithm": "fedavg", "robust": "median"},
    "asynchronous, FedBuff": {"algorithm": "fedbuff", "policy": {"name": "buffer", "size": 2}},
}
CALLS = {  # kinds that Open MPI counts -> calls of mpi_traffic.csv
    "O2A": ("bcast",),
    "A2O": ("reduce", "gatherv"),
    "A2A": ("reduce_scatter", "alltoallv"),
    "point": ("send",),
}
NAMES = {"O2A": "broadcasts", "A2O": "reductions and gathers", "A2A": "exchanges", "point": "messages"}


class Line(NamedTuple):
    """Bytes of one kind of call in one run.

    Attributes:
        run: The run.
        kind: The kind of call, a key of `CALLS`.
        ours: Bytes that mpifl counted.
        theirs: Bytes that Open MPI counted.
        difference: Difference of the two; for messages, the sum of the differences of the ranks.
    """

    run: str
    kind: str
    ours: int
    theirs: int
    difference: int


def bytes_by_kind(found: Mapping[str, Mapping[Any, Any]]) -> dict[str, int]:
    """Return the bytes of each kind of call that Open MPI counted on one rank.

    Collectives are counted on mpifl's communicator only: the library uses further ones internally, within and
    between nodes. All messages are counted.

    Args:
        found: The result of `Monitor.read`.
    """
    calls = found["communicators"]["mpifl"].items()
    out = {kind: sum(count.size for (_, which), count in calls if which == kind) for kind in KINDS}
    return out | {"point": sum(count.size for count in found["point"].values())}


def compare_counts(
    run: str, rows: Sequence[Mapping[str, str]], counts: Sequence[Mapping[str, int]]
) -> list[Line]:
    """Return a line for each kind of call.

    Args:
        run: Name of the run.
        rows: Rows of its `mpi_traffic.csv`.
        counts: `bytes_by_kind` of each rank.
    """
    lines = []
    for kind, calls in CALLS.items():
        mine = Counter({r: 0 for r in range(len(counts))})
        for row in rows:
            mine[int(row["rank"])] += int(row["bytes"]) * (row["call"] in calls)
        ours, theirs = sum(mine.values()), sum(count[kind] for count in counts)
        # Open MPI counts a reduction at the receiving rank, mpifl at the sending ones
        apart = [abs(mine[r] - count[kind]) for r, count in enumerate(counts)]
        lines.append(Line(run, kind, ours, theirs, sum(apart) if kind == "point" else abs(ours - theirs)))
    return lines


def warm_up(transport: Transport) -> None:
    """Call each collective once: over several nodes, Open MPI makes further calls at the first one."""
    row = torch.zeros(1, 8)
    transport.Bcast(row[0], "check")
    transport.Reduce(row, "check")
    transport.Gatherv(row, [1] * transport.size, "check")
    if transport.is_worker:
        workers = len(transport.workers)
        transport.Reduce_scatter(torch.zeros(workers, 8), [0] + [1] * workers, "check")
    each = [8] * transport.size
    transport.Alltoallv(torch.zeros(8 * transport.size), each, each, "check")


def measure(transport: Transport) -> list[Line]:
    """Make all runs; return their lines on rank 0, none elsewhere; all ranks must call it.

    Raises:
        UserError: There is only one rank, or this MPI has no monitoring.
    """
    remedy = "one process sends nothing; start it as mpirun -n 3 mpifl doctor --check-mpi-traffic"
    require(transport.size > 1, "--check-mpi-traffic", "1 rank", remedy)
    monitor, lines = Monitor(), []
    warm_up(transport)
    with tempfile.TemporaryDirectory() as own:
        parent = on_server(transport, lambda: own)
        for number, (name, changes) in enumerate(RUNS.items()):
            place = {"output": {"folder": parent, "id": str(number), "model": False}}
            config = from_tree(Config, merged(TINY, {**changes, **place}))
            transport.barrier()
            transport.traffic.clear()
            monitor.read()
            folder = run(config, transport, quiet=True)
            counts = transport.gather(bytes_by_kind(monitor.read()), "check")
            if folder is not None and counts is not None:
                lines += compare_counts(name, read(folder / "mpi_traffic.csv"), counts)
        transport.barrier()
    return lines


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def table(lines: Sequence[Line]) -> str:
    """Return the lines and their totals as an aligned table."""
    ours, theirs, apart = (sum(column) for column in list(zip(*lines, strict=True))[2:])
    heads = [("run", "bytes of", "mpi_traffic.csv", "monitoring", "difference")]
    body = [(x.run, NAMES[x.kind], f"{x.ours:,}", f"{x.theirs:,}", f"{x.difference:,}") for x in lines]
    total = [("all", "", f"{ours:,}", f"{theirs:,}", f"{apart:,}")]
    return "\n".join(f"{a:22} {b:23}{c:>16}{d:>12}{e:>12}" for a, b, c, d, e in (*heads, *body, *total))


def check_mpi_traffic(transport: Transport, say: Callable[[str], None]) -> bool:
    """Show the table on rank 0; return whether every difference is 0, on every rank.

    Args:
        transport: Connects the ranks; all of them must call this.
        say: Called with the table.

    Raises:
        UserError: There is only one rank, or this MPI has no monitoring.
    """
    lines = measure(transport)
    if lines:
        library = getattr(transport, "library", "")
        say(f"{library}, {transport.size} ranks: mpifl's counts beside the library's own\n\n{table(lines)}")
    return bool(transport.bcast(all(line.difference == 0 for line in lines), "check"))
