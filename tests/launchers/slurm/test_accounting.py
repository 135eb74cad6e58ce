"""Jobs of `launch/slurm` on a Slurm that keeps accounts (slurmdbd)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..jobs import alone, wait_for
from .cluster import Slurm, missing, no_accounting
from .conftest import started_slurm
from .test_slurm import TWO_NODES, Job

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Yield two nodes of four cores, with accounts."""
    if why := missing() or no_accounting():
        pytest.skip(why)
    with started_slurm(2, 4, accounting=True) as cluster:
        yield cluster


def test_a_job_that_was_queued_again_has_both_runs_in_its_accounts(slurm):
    job = Job(slurm, *TWO_NODES).trained()
    slurm.run("scancel", "--batch", "-s", "USR1", job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", alone(slurm, 30), 1), job.log
    options = ("--duplicates", "--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode")

    def runs() -> list[str]:
        return slurm.run("sacct", *options, "-j", job.id).stdout.split()

    wait_for(lambda: runs()[-1:] == [f"{job.id}|COMPLETED|0:0"], 30, "accounts", lambda: str(runs()))
    assert runs() == [f"{job.id}|REQUEUED|0:0", f"{job.id}|COMPLETED|0:0"]
