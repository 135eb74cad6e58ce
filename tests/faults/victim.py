"""A rank that dies, or stops, at a given call: `mpirun -n P python victim.py JOBS`.

JOBS is JSON: a list of [PLAN, WORDS], WORDS being the arguments of mpifl. All of them run in one job, one
after the other, with the ranks that are left. PLAN is a list of {"rank": r, "call": name, "nth": n, "signal":
number, "after": seconds}. Calls are the verbs of the transport, `train`, `look`, `statistics`,
`open_federation`, `matrices`, on rank 0 `arrived` (uploads of a step), `record` (of an evaluation) and
`on_end` (of callbacks), and `start` for the moment before MPI is up. A moment named this way comes back in
every run, whatever the machine is doing. With "targets" these ranks get the signal instead, before the
seconds, in which the others notice it. Signal 0 only waits.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

from kills import ranks_of

from mpifl import cli
from mpifl.comm.connect import connect
from mpifl.comm.mpi_startup import starting
from mpifl.driver import run_callbacks
from mpifl.experiment import build as experiment
from mpifl.experiment import client_matrices
from mpifl.results.recorder import Recorder
from mpifl.runtime.worker import Worker
from mpifl.supervision.exit_codes import outcome
from mpifl.training.client import LocalClients

ELSEWHERE: dict[str, list[tuple[Any, str]]] = {
    "train": [(Worker, "_train"), (LocalClients, "train_visits")],  # one visit, or many in one call
    "look": [(Worker, "run_look")],  # of one client, under arrivals
    "statistics": [(Worker, "run_statistics")],  # the same
    "open_federation": [(experiment, "open_federation")],
    "matrices": [(client_matrices, "_mine")],
    "arrived": [(Recorder, "arrived")],
    "record": [(Recorder, "record_evaluation")],
    "on_end": [(run_callbacks, "load")],
}


def doomed(plan: dict[str, Any]) -> None:
    """Replace a call by one that ends this process the n-th time."""
    if plan["call"] == "start":
        os.kill(os.getpid(), plan.get("signal", 9))
        return
    with starting():
        from mpifl.comm.mpi import Mpi
    left = [plan["nth"]]

    def watch(owner: Any, name: str) -> None:
        verb = getattr(owner, name)

        @functools.wraps(verb)
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and "targets" in plan:
                pids = ranks_of(os.getppid())
                for target in plan["targets"]:
                    os.kill(pids[target], plan.get("signal", 9))
                time.sleep(plan.get("after", 0.0))
            elif left[0] == 0:
                time.sleep(plan.get("after", 0.0))
                os.kill(os.getpid(), plan.get("signal", 9))
            return verb(*args, **options)

        setattr(owner, name, call)

    for place in ELSEWHERE.get(plan["call"], [(Mpi, plan["call"])]):
        watch(*place)


def arm(plan: list[dict[str, Any]]) -> None:
    """See to it that this rank dies, if it is to."""
    here = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    for death in plan:
        if death["rank"] == here:
            doomed(death)


def main() -> int:
    """Run all jobs; return the first exit code that is not 0."""
    jobs = json.loads(sys.argv[1])
    if len(jobs) == 1:
        arm(jobs[0][0])
        return cli.main(jobs[0][1])
    transport, code = connect(), 0
    for plan, words in jobs:
        arm(plan)
        args, rest = cli.parser().parse_known_args(words)
        args.options = rest
        code = code or outcome(transport, functools.partial(cli.COMMANDS[args.command][0], transport, args))
    transport.finalize(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
