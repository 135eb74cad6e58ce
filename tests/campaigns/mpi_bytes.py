"""mpifl's counts of MPI bytes (`mpi_traffic.csv`) beside those of Open MPI's own monitoring.

    mpirun -n 3 python tests/campaigns/mpi_bytes.py

Five small runs use every collective that moves numbers; each line of the table has the bytes of one kind of
call in one run. Exit code 1 if they differ by a byte, 2 if this MPI has no monitoring.

`prepare` must be called before MPI starts, because MPI_Init chooses the component. A `Monitor` makes the
library write its counts through the MPI tool interface, so neither MPI_Finalize nor a shared file system is
needed; no communicator may have been freed before, because Open MPI 5.0 still reads its name. Without a
`Monitor`, the same counts are written at MPI_Finalize, to `F.<rank>.prof` for each rank of MPI_COMM_WORLD, by
`mpirun --mca pml_monitoring_enable 2 --mca pml_monitoring_enable_output 3 --mca pml_monitoring_filename F`.
Each line of these files has a tag and fields:

    E  rank  peer  B bytes  M msgs sent  histogram   point-to-point calls of the program (Send, Isend, ...)
    I  rank  peer  B bytes  M msgs sent  histogram   messages the library sent to carry out collectives
    C  rank  peer  B bytes  M msgs sent              collectives of program and library, spread over peers
    D  name  procs: 0,1,2                            a communicator; the next three lines belong to it
    O2A / A2O / A2A  rank  B bytes  M msgs sent      its one-to-all, all-to-one and all-to-all calls

Communicators that were freed before MPI_Finalize are not written.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpifl.comm.connect import connect
from mpifl.comm.transport import Transport, on_server
from mpifl.core.errors import require
from mpifl.driver.run import run
from mpifl.experiment.loader import from_tree, merged
from mpifl.experiment.schema import Config
from mpifl.supervision.exit_codes import outcome

ENABLE, LEVELS = "OMPI_MCA_pml_monitoring_enable", "OMPI_MCA_coll"
ALGORITHMS = {  # pairwise: persistent requests of the linear algorithm are also counted as messages
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_alltoallv_algorithm": "2",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",  # a ring; the linear one is also counted as a broadcast
}
FLUSH, GENERIC = b"pml_monitoring_flush", 9  # a performance variable, and MPI_T_PVAR_CLASS_GENERIC
PEER_TAGS = {"E": "point", "I": "internal", "C": "collective"}
KINDS = ("O2A", "A2O", "A2A")


class Count(NamedTuple):
    """The bytes and calls in one line of the monitoring output."""

    size: int
    calls: int


def prepare() -> None:
    """Turn on Open MPI's monitoring, which counts the program's messages and the library's separately.

    Two-level collectives are turned off: over several nodes, Open MPI 5.0.11 may crash in MPI_Finalize with
    both.
    """
    os.environ[ENABLE] = "2"
    os.environ.setdefault(LEVELS, "^han")
    os.environ.update(ALGORITHMS)


class Monitor:
    """Reads the counts that Open MPI makes on this rank from now on.

    Raises:
        UserError: this MPI has no monitoring.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
        remedy = "only Open MPI monitors itself; there is nothing to compare with"
        require(library.startswith("Open MPI"), "MPI", library, remedy)
        self._library, index, level = ctypes.CDLL(MPI.__file__), ctypes.c_int(), ctypes.c_int()
        remedy = "its monitoring component is missing; leave OMPI_MCA_pml unset, or use another build"
        self._call("MPI_T_init_thread", MPI.THREAD_SINGLE, ctypes.byref(level))
        missing = self._library.MPI_T_pvar_get_index(FLUSH, GENERIC, ctypes.byref(index))
        require(not missing, "MPI", library, remedy)
        self._session, self._handle, length = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        world = ctypes.c_void_p.from_address(MPI._addressof(MPI.COMM_WORLD))
        self._call("MPI_T_pvar_session_create", ctypes.byref(self._session))
        target = (ctypes.byref(world), ctypes.byref(self._handle), ctypes.byref(length))
        self._call("MPI_T_pvar_handle_alloc", self._session, index, *target)
        self._call("MPI_T_pvar_start", self._session, self._handle)
        self.read()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with code {code}")

    def read(self) -> dict[str, dict[Any, Any]]:
        """Return this rank's counts since the last call, in the form of `parse_monitoring`."""
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "count"
            name = ctypes.create_string_buffer(os.fsencode(prefix))
            self._call("MPI_T_pvar_write", self._session, self._handle, name)
            self._call(
                "MPI_T_pvar_stop", self._session, self._handle
            )  # writes the file and clears the counts
            self._call("MPI_T_pvar_start", self._session, self._handle)
            return parse_monitoring(prefix)


def parse_monitoring(prefix: str | Path) -> dict[str, dict[Any, Any]]:
    """Return counts by tag, {(rank, peer): Count}, and by communicator, {name: {(rank, kind): Count}}.

    Args:
        prefix: PREFIX in the file names `PREFIX.<rank>.prof`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has an unknown tag.
    """
    found: dict[str, dict[Any, Any]] = {name: {} for name in PEER_TAGS.values()}
    found["communicators"] = defaultdict(dict)
    files = sorted(glob(f"{escape(str(prefix))}.*.prof"))
    if not files:
        raise FileNotFoundError(
            f"no monitoring output {prefix}.<rank>.prof: the run did not reach MPI_Finalize"
        )
    for name in files:
        with open(name) as lines:
            _parse_file(lines, found)
    return found


def _parse_file(lines: Iterable[str], found: dict[str, dict[Any, Any]]) -> None:
    communicator = ""
    for line in lines:
        tag, *fields = line.rstrip("\n").split("\t")
        if tag in PEER_TAGS:
            found[PEER_TAGS[tag]][int(fields[0]), int(fields[1])] = _count(fields[2:])
        elif tag == "D":
            communicator = fields[0]
        elif tag in KINDS:
            # several communicators may share a name (splits, duplicates): their calls add up
            calls, key = found["communicators"][communicator], (int(fields[0]), tag)
            old, new = calls.get(key, Count(0, 0)), _count(fields[1:])
            calls[key] = Count(old.size + new.size, old.calls + new.calls)
        elif not tag.startswith("#"):
            raise ValueError(f"monitoring output: unknown line {line!r}")


def _count(fields: list[str]) -> Count:
    return Count(int(fields[0].removesuffix(" bytes")), int(fields[1].removesuffix(" msgs sent")))


# -- the runs ------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {  # takes a second; its data come with scikit-learn
    "name": "mpi-traffic-check",
    "rounds": 2,
    "participation": 0.5,
    "model": {"name": "mlp", "hidden": [12]},
    "local": {"batch_size": 32, "lr": 0.1},
    "data": {
        "source": "digits",
        "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8, "validation": 0.2},
    },
    "evaluation": {"every": 0},
}
RUNS: dict[str, dict[str, Any]] = {  # together they use every collective that moves numbers
    "rounds, CFL": {"algorithm": {"name": "cfl", "warmup": 1, "eps1": 100, "eps2": 0}},
    "rounds, UCFL": {"algorithm": "ucfl"},
    "rounds, median": {"algorithm": "fedavg", "robust": "median"},
    "rounds, EMD-CFL": {"algorithm": {"name": "emdcfl", "sample_cap": 16}},
    "asynchronous, FedBuff": {"algorithm": "fedbuff", "policy": {"name": "buffer", "size": 2}},
}
CALLS = {  # kinds that Open MPI counts -> calls of mpi_traffic.csv
    "O2A": ("bcast",),
    "A2O": ("reduce", "gatherv"),
    "A2A": ("reduce_scatter", "alltoallv", "allgatherv"),
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
        transport.Allgatherv(torch.zeros(8), [0] + [8] * workers, "check")
    each = [8] * transport.size
    transport.Alltoallv(torch.zeros(8 * transport.size), each, each, "check")


def measure(transport: Transport) -> list[Line]:
    """Make all runs; return their lines on rank 0, none elsewhere; all ranks must call it.

    Raises:
        UserError: There is only one rank, or this MPI has no monitoring.
    """
    remedy = "one process sends nothing; start it as mpirun -n 3 python tests/campaigns/mpi_bytes.py"
    require(transport.size > 1, "ranks", "1", remedy)
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


def compare(transport: Transport) -> int:
    """Measure, show the table on rank 0, and return the exit code; all ranks must call it."""
    lines = measure(transport)
    if lines:
        ran = f"{transport.library}, {transport.size} ranks"
        print(f"{ran}: mpifl's counts beside the library's own\n\n{table(lines)}")
    equal = transport.bcast(all(line.difference == 0 for line in lines), "check")
    if not equal:
        transport.final_barrier()
    return int(not equal)


def main(words: Sequence[str] | None = None) -> int:
    """Compare on all ranks of mpirun; return the exit code."""
    description = "mpifl's counts of MPI bytes beside those of Open MPI's monitoring"
    argparse.ArgumentParser(description=description, usage=f"mpirun -n 3 python {sys.argv[0]}").parse_args(
        words
    )
    prepare()
    transport = connect()
    code = outcome(transport, lambda: compare(transport))
    transport.finalize(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
