"""The cost of each rank at rank 0, for more ranks than a machine can hold.

This process acts as rank 0 of P ranks: it deals out tasks, sends them and receives reports through MPI, and
mixes, with the same code as any run. Its messages go to itself (MPI_COMM_SELF). The reports of the P - 1
workers are made here, and the time to make and send them is not counted. The collectives (the barrier, the
broadcast of rows, the sum) are left out: in MPI they are trees, which cost rank 0 a message or two a level.

    python tests/campaigns/many_ranks.py [--json FILE] [--key.path value ...]

The method is FedAvg. The measuring process starts itself again under mpirun.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.aggregation.client_store import ClientStore
from mpifl.benchmarks.server import CONFIG, METHODS
from mpifl.benchmarks.turns import ONE_MACHINE
from mpifl.comm import mpi
from mpifl.comm.mpi import LENGTH, Mpi
from mpifl.comm.mpi_startup import mpirun
from mpifl.comm.single import Single
from mpifl.comm.transport import MpiTraffic
from mpifl.core.errors import UserError
from mpifl.core.process import keep_freed
from mpifl.core.progress import doing
from mpifl.experiment.build import build, build_engine, build_server_step
from mpifl.experiment.loader import load
from mpifl.runtime.engine import run_command
from mpifl.runtime.protocol import ReportTable, TaskBatch
from mpifl.runtime.worker import VisitResults

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.measurements import command

RANKS = (2, 16, 64, 256, 1024)  # the first is the baseline
ROUNDS = 15
CLIENTS = 2048  # of a round
JOB = "--job"  # first word of the command line of the measured process
MPI: Any = vars(mpi)["MPI"]
OUT, BACK = 1, 2  # tags of messages to and from the workers


class _Workers:
    """A stand-in for the communicator of P ranks, as seen by rank 0.

    Args:
        width: numbers in the model that each client uploads.

    Attributes:
        seconds: processor time that is not counted.
    """

    def __init__(self, width: int) -> None:
        self.seconds, self.width = 0.0, width
        self._comm = MPI.COMM_SELF.Dup()
        self._told: dict[int, bytes] = {}  # rank -> the last message to it
        self._pending: int | None = None  # the rank whose report is in transit
        self._sent: tuple[Any, bytes] = None, b""  # the last report

    def Isend(self, buffer: list[Any], dest: int, tag: int) -> Any:
        """Send a message to a worker, and receive it there."""
        request = self._comm.Isend(buffer, 0, tag=OUT)
        begin = time.thread_time()
        got = bytearray(buffer[1])
        self._comm.Recv([got, MPI.BYTE], 0, tag=OUT)
        self._told[dest] = bytes(got)
        self.seconds += time.thread_time() - begin
        return request

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        """Return the message of a worker; it is sent when it is first asked for."""
        if self._pending != source:
            begin = time.thread_time()
            blob = _report(self._told[source], self.width)
            if self._sent[0] is not None:
                self._sent[0].Wait()
            self._pending, self._sent = source, (self._comm.Isend([blob, MPI.BYTE], 0, tag=BACK), blob)
            self.seconds += time.thread_time() - begin
        message = self._comm.Improbe(0, BACK, status)
        if message is not None:
            self._pending = None
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _report(blob: bytes, width: int) -> bytes:
    """Return a worker's answer to its tasks: report headers with made-up figures, without vectors."""
    (size,) = LENGTH.unpack_from(blob)
    rows, told = memoryview(blob)[LENGTH.size :][:size], blob[LENGTH.size + size :]
    batch: TaskBatch = pickle.loads(told).having(rows)
    client = np.array([task.client for task in batch.visits], np.int64)
    m = len(client)
    table = ReportTable(
        number=np.array([task.number for task in batch.visits], np.int64),
        client=client,
        num_samples=np.full(m, 20),
        fresh=True,
        notes={},
        findings={},
        metrics={"train_loss": np.full(m, 0.5)},
        max_abs={"model": np.ones((m, 1))},
        sizes={"model": width},
        widths={"model": width},
        bytes={"model": 4 * width},
        note_sizes={},
        exchanges={},
        unsent=(),
    )
    value, data = VisitResults([], {}, [], 1e-3, [table] if m else []).packed()
    return b"".join((LENGTH.pack(len(data)), data, pickle.dumps(value, protocol=5)))


class ManyRanks(Mpi):
    """The transport of rank 0 of P ranks, whose workers do not exist.

    Args:
        size: P.
        width: numbers in the model.
    """

    def __init__(self, size: int, width: int) -> None:
        self.workers_there = _Workers(width)
        self.comm: Any = self.workers_there
        self.rank, self.size, self.traffic = 0, size, MpiTraffic()
        self.nodes, self.names, self.lost = (0,) * size, tuple(map(str, range(size))), []
        self.numbers = tuple(range(size))
        self._sequence, self._waiting_for, self._received, self._empty_polls = 0, (0, size), 0, 0
        self._losses = 0


def measure_many_ranks(options: Sequence[str]) -> dict[str, Any]:
    """Print and return the processor seconds of rank 0 in a round, by number of ranks.

    Args:
        options: command-line options that override the configuration.

    Raises:
        UserError: the measured process failed.
    """
    asked = [*METHODS["fedavg"], "--model.hidden", "[8]", "--cohort_size", str(CLIENTS), *options]
    program = [*mpirun(1)[:-1], str(Path(__file__).resolve()), JOB, CONFIG, *asked]
    environment = {**ONE_MACHINE, **os.environ, "OMP_NUM_THREADS": "1"}
    with doing("rank 0 of up to 1024 ranks"):
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError("many_ranks", CONFIG, "the job ended: " + " / ".join(done.stderr.splitlines()[-8:]))
    found = {int(size): seconds for size, seconds in json.loads(done.stdout.splitlines()[-1]).items()}
    print(line(found), flush=True)
    return {str(size): seconds for size, seconds in found.items()}


def line(found: dict[int, float]) -> str:
    """Return the cost of a rank, beyond those of the smallest number of ranks, as text."""
    few, *many = found
    costs = (f"{n}: {1e6 * (found[n] - found[few]) / (n - few):.0f}" for n in many)
    return f"us a rank of many, FedAvg with {CLIENTS} clients a round: {', '.join(costs)}"


def seconds_of_rank_0(name: str, options: list[str], sizes: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Return the median processor seconds of rank 0 in a round, by number of ranks.

    Args:
        name: a configuration of a method whose clients upload one model.
        options: command-line options that override it.
        sizes: numbers of ranks.
        rounds: number of rounds whose median is taken, after three warm-up rounds.
    """
    config = replace(load(name, options), rounds=1 << 40)
    context = build(config, Single())
    out = {}
    for size in sizes:
        transport = ManyRanks(size, context.problem.layout.size)
        with tempfile.TemporaryDirectory() as place:
            there = replace(context, transport=transport)
            step = build_server_step(there, ClientStore("many", place))
            engine: Any = build_engine(there, step)
            taken = []
            run_command(step, "begin", engine.execute)
            for _ in range(rounds + 3):
                begin, left_out = time.thread_time(), transport.workers_there.seconds
                run_command(step, "step", engine.execute)
                taken.append(time.thread_time() - begin - (transport.workers_there.seconds - left_out))
        out[size] = statistics.median(taken[3:])
    return out


if __name__ == "__main__":
    if sys.argv[1:2] == [JOB]:
        keep_freed()
        print(json.dumps(seconds_of_rank_0(sys.argv[2], sys.argv[3:], RANKS, ROUNDS)))
    else:
        sys.exit(command(str(__doc__).splitlines()[0], measure_many_ranks, {}))
