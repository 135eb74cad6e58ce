"""A rank that dies, or stops, at a given call: `mpirun -n P python victim.py PLAN [mpifl arguments]`.

PLAN is JSON: a list of {"rank": r, "call": name, "nth": n, "signal": number}. Calls are the verbs of the
transport, `train`, `open_federation`, and `start` for the moment before MPI is up. A moment named this way
comes back in every run, whatever the machine is doing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

from mpifl import experiment
from mpifl.cli import main
from mpifl.comm.starting import starting
from mpifl.engine.visits import Worker

ELSEWHERE = {"train": (Worker, "_train"), "open_federation": (experiment, "open_federation")}


def doomed(plan: dict[str, Any]) -> None:
    """Replace a call by one that ends this process the n-th time."""
    if plan["call"] == "start":
        os.kill(os.getpid(), plan.get("signal", 9))
    with starting():
        from mpifl.comm.mpi import Mpi
    owner: Any
    owner, name = ELSEWHERE.get(plan["call"]) or (Mpi, plan["call"])
    verb, left = getattr(owner, name), [plan["nth"]]

    @functools.wraps(verb)
    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), plan.get("signal", 9))
        return verb(*args, **options)

    setattr(owner, name, call)


if __name__ == "__main__":
    here = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    for plan in json.loads(sys.argv[1]):
        if plan["rank"] == here:
            doomed(plan)
    sys.exit(main(sys.argv[2:]))
