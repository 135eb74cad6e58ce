"""Jobs of `launch/slurm` on a Slurm that limits their memory and cores by control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from ..jobs import alone
from .cluster import Slurm, missing, no_cgroups
from .conftest import started_slurm
from .test_slurm import LAUNCHERS, Job, planned

pytestmark = pytest.mark.nightly
CORES = min(4, os.cpu_count() or 1)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Yield two nodes with this machine's cores, at most four."""
    if why := missing() or no_cgroups():
        pytest.skip(why)
    with started_slurm(2, CORES, cgroups=True) as cluster:
        yield cluster


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_with_the_memory_of_its_plan_runs_to_its_end(launcher, slurm):
    asked = planned(slurm, str(CORES + 1), "--cores", str(CORES))
    assert "--mem" in asked
    job = Job(slurm, *asked, LAUNCHER=launcher)
    assert (job.ended(), job.digest) == ("COMPLETED", alone(slurm, 30)), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_whose_start_needs_more_memory_is_not_complete(launcher, slurm):
    job = Job(slurm, "--nodes=1", "--ntasks=2", "--overcommit", "--mem=200", LAUNCHER=launcher)
    assert job.ended() in ("OUT_OF_MEMORY", "FAILED"), job.log
    assert (job.restarts, job.digest) == (0, "")
    assert "oom-kill event" in job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_comes_to_need_more_memory_is_queued_again_a_few_times(launcher, slurm):
    words = ("sleepy.yaml", "--algorithm.nap", "0", "--algorithm.hoard_mb", "100")
    options = ("--nodes=1", "--ntasks=2", "--overcommit", "--mem=800")
    job = Job(slurm, *options, words=words, LAUNCHER=launcher, RESTARTS="1")
    assert job.ended() in ("OUT_OF_MEMORY", "FAILED"), job.log
    assert (job.restarts, job.digest, job.step) == (1, "", 1), job.log
    assert "2 times (RESTARTS=1): this job is not queued again; go on with: RUN_ID=" in job.log


def test_doctor_and_a_rank_see_the_memory_and_the_cores_of_a_job(slurm):
    limits = (
        "from mpifl.core.process import available_cores, machine_bytes as b; print(b(), available_cores())"
    )
    commands = f'{sys.executable} -c "{limits}"; mpirun -n 1 mpifl doctor'
    done = slurm.run("sbatch", "--parsable", "--mem=700", "--output=limits.log", "--wrap", commands)
    assert slurm.wait_until_ended(done.stdout.strip()) in ("COMPLETED", "FAILED")
    said = (slurm.jobs / "limits.log").read_text().splitlines()
    assert said[0] == f"{700 << 20} 1"
    (line,) = (line for line in said if line.split()[1:2] == ["job"])
    assert "memory 700M a node" in line
