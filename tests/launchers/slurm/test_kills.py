"""Jobs of two nodes that are disturbed at random moments: each ends complete, with the undisturbed digest."""

from __future__ import annotations

import os
import random
import time

import pytest

from ..jobs import alone, wait_for
from .cluster import Slurm
from .test_slurm import LAUNCHERS, TWO_NODES, Job, idle

__all__ = ["idle"]  # a fixture
pytestmark = pytest.mark.nightly(seconds=60)

JOBS = int(os.environ.get("MPIFL_SLURM_KILLS", "3"))  # 20 before a release
WORDS = ("sleepy.yaml", "--algorithm.nap", "0.25")  # about forty seconds on two nodes
DISTURBANCES = ("node1 dies", "node2 dies", "preemption", "limit")


def disturb(slurm: Slurm, job: Job, what: str) -> None:
    """Disturb a running job, and wait until it is queued again or has ended."""
    before = job.restarts
    if what.endswith("dies"):
        slurm.kill_node(what.split()[0])
    elif what == "preemption":
        slurm.submit_urgent()
    else:  # Slurm looks at the limits twice a minute
        slurm.run("scontrol", "update", f"JobId={job.id}", "EndTime=now+1seconds")
    wait_for(lambda: job.restarts > before or slurm.has_ended(job.id), 120, what, lambda: job.log)
    if what.endswith("dies"):
        slurm.start_node(what.split()[0])
    if what == "limit":
        slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")


@pytest.mark.parametrize("number", range(JOBS))
def test_a_job_that_is_disturbed_at_any_moment_ends_complete(number, slurm):
    draw = random.Random(number)
    launcher, warned = LAUNCHERS[number % 2], draw.choice(("120", "0"))
    job = Job(slurm, *TWO_NODES, f"--signal=B:USR1@{warned}", words=WORDS, LAUNCHER=launcher)
    said = []
    for what in draw.sample(DISTURBANCES, draw.choice((1, 2))):
        wait_for(
            lambda: slurm.look(job.id) == "RUNNING" or slurm.has_ended(job.id), 60, "a start", lambda: job.log
        )
        moment = draw.uniform(0.0, 25.0)
        time.sleep(moment)
        if slurm.has_ended(job.id):
            break
        said.append(f"{what} {moment:.1f} s after a start, step {job.step}")
        disturb(slurm, job, what)
    state, expected = job.ended(240), alone(slurm, 30)
    row = (number, launcher, "; ".join(said), f"restarts {job.restarts}", state, job.digest == expected)
    print("job", *row, sep=" | ")
    assert (state, job.digest) == ("COMPLETED", expected), job.log
