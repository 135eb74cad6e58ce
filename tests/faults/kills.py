"""Kills ranks of its own job at a given moment: `mpirun -n P python kills.py PLAN WORDS...`.

PLAN is JSON: {"moment": name, "nth": n, "at": rank, "targets": [...], "signal": number, "note": file}. When
the rank `at` comes to the moment for the n-th time, it sends the signal to its targets, itself last: ranks by
their number, and "launcher" for mpirun. The time goes into the file `note`. WORDS are the arguments of mpifl.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpifl import cli
from mpifl.aggregation import client_store as store
from mpifl.comm.mpi_startup import starting
from mpifl.data import prepared_cache as cache
from mpifl.driver import outputs
from mpifl.experiment import build as experiment
from mpifl.results import checkpoint_files as checkpoint
from mpifl.results import recorder
from mpifl.runtime.worker import Worker
from mpifl.training.client import LocalClients

SERVER_MOMENTS = {  # where rank 0 comes by: (owner, name) of the calls
    "data": [(cache, "save"), (cache, "_publish"), (experiment, "open_federation")],
    "checkpoint": [(checkpoint, "force_to_disk"), (checkpoint, "prune")],
    "end": [(recorder, "write_csv"), (outputs, "write_json"), (outputs, "collect")],
}
HERE = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the processes of the ranks that a launcher has started here."""
    found = {}
    for text in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            words = Path(f"/proc/{text}/environ").read_bytes().split(b"\0")
            rank = next((w for w in words if w.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
            if rank is not None:
                found[int(rank.split(b"=")[1])] = int(text)
    return found


def kill(plan: dict[str, Any]) -> None:
    """Send the signal to all targets."""
    launcher, size = os.getppid(), int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    end = time.monotonic() + 10.0
    while len(ranks := ranks_of(launcher)) < size and time.monotonic() < end:
        time.sleep(0.01)
    Path(plan["note"]).write_text(str(time.time()))
    pids = [launcher if t == "launcher" else ranks.get(t, 0) for t in plan["targets"]]
    for pid in sorted(filter(None, pids), key=lambda pid: pid == os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, plan["signal"])


def arm(plan: dict[str, Any]) -> None:
    """Have the moment come."""
    left = [plan["nth"]]

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                kill(plan)
            return real(*args, **options)

        setattr(owner, name, call)

    moment = plan["moment"]
    if moment == "start":
        time.sleep(0.02 * plan["nth"])
        kill(plan)
        return
    for owner, name in SERVER_MOMENTS.get(moment, ()):
        watch(owner, name)
    if moment == "train":
        watch(Worker, "_train")
        watch(LocalClients, "train_visits")
    if moment == "state":
        watch(store.ClientStore, "save")
    if moment in ("mpi", "verbs"):
        with starting():
            from mpifl.comm.mpi import Mpi
        for name in (
            ("_find_nodes",) if moment == "mpi" else ("gather", "scatter", "Bcast", "Reduce", "isend")
        ):
            watch(Mpi, name)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if asked and asked["at"] == HERE:
        arm(asked)
    sys.exit(cli.main(sys.argv[2:]))
