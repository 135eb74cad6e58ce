"""Jobs of `launch/gridengine` on a real Grid Engine: disturbed ones end with the undisturbed digest."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..jobs import LEAST, SleepyJob, alone, wait_for
from .cluster import NOTICE, GridEngine

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parents[3] / "launch" / "gridengine"
TWO_NODES, ONE_NODE = ("-pe", "mpi", "3"), ("-pe", "smp", "3")
WORDS = ("sleepy.yaml",)
SLOW = ("sleepy.yaml", "--algorithm.nap", "0.6")  # 36 seconds with two workers


class Job(SleepyJob):
    """A submitted job of `launch/gridengine`, and its run.

    Args:
        gridengine: the cluster.
        options: options of qsub.
        words: configuration and options of mpifl.
        environment: variables of the submitting shell.
    """

    def __init__(
        self, gridengine: GridEngine, *options: str, words: tuple[str, ...] = WORDS, **environment: str
    ) -> None:
        super().__init__(gridengine, "qsub", "-terse", *options, str(SCRIPT), *words, **environment)
        self.gridengine = gridengine

    @property
    def is_alive(self) -> bool:
        return bool(self.gridengine.look(self.id))

    @property
    def restarts(self) -> int:
        """How often the run was started after the first time."""
        return len(re.findall(r"going on after step", self.log))

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks that run."""
        words = ["pgrep", "-f", f"python.*mpifl run sleepy.yaml.*--output.id {self.name or self.id}"]
        return [*map(int, subprocess.run(words, capture_output=True, text=True).stdout.split())]

    def written(self, seconds: float = 60) -> int:
        """Wait until the state is written, and return its step."""
        said: list[str] = []

        def look() -> bool:
            said[:] = re.findall(r"stopped after step (\d+)", self.log)
            return bool(said)

        wait_for(look, seconds, "the state", lambda: self.log)
        return int(said[-1])

    def ended(self, seconds: float = 120) -> tuple[str, str]:
        """Wait for the end of the job, and return `failed` and `exit_status` of its last start."""
        last = self.gridengine.ended(self.id, seconds)[-1]
        return last["failed"].split()[0], last["exit_status"].split()[0]


@pytest.fixture(scope="session")
def digest(gridengine) -> str:
    """Return the digest of the thirty rounds of sleepy.yaml."""
    return alone(gridengine, 30)


@pytest.fixture(autouse=True)
def idle(gridengine):
    """Leave no job."""
    yield
    if gridengine.run("qstat").stdout:
        gridengine.run("qdel", "-u", "root")
        time.sleep(NOTICE + 5)
        gridengine.run("qdel", "-f", "-u", "root")
        wait_for(lambda: not gridengine.run("qstat").stdout, 60, "the end of all jobs")


@pytest.mark.parametrize("options", [ONE_NODE, TWO_NODES, ()], ids=["node", "nodes", "alone"])
def test_a_job_ends_with_the_digest_of_one_process(options, gridengine, digest):
    job = Job(gridengine, *options)
    assert (job.ended(), job.digest) == (("0", "0"), digest), job.log
    assert json.loads((job.folder / "summary.json").read_text())["ranks"] == (3 if options else 1)


@pytest.mark.parametrize("limit", ["STOP_AFTER", "s_rt"])
def test_a_job_is_queued_again_after_its_time(limit, gridengine):
    """Grid Engine 8.1.9 takes later soft limits, and those of jobs on several hosts, for hard ones."""
    if limit == "s_rt":
        job = Job(gridengine, *ONE_NODE, "-l", "s_rt=0:0:40", words=SLOW)
    else:
        job = Job(gridengine, *TWO_NODES, words=SLOW, STOP_AFTER="40s")
    step = job.written(120)
    wait_for(lambda: job.restarts == 1, 60, "the next start", lambda: job.log)
    assert "the state is written; the job is queued again" in job.log
    assert f"going on after step {step}" in job.log


def test_qdel_ends_a_job_for_good_and_the_state_is_written(gridengine, digest):
    job = Job(gridengine, *TWO_NODES, RUN_ID="deleted").trained(1)
    gridengine.run("qdel", job.id)
    step = job.written()
    assert (job.ended()[1], job.digest, len(gridengine.starts(job.id))) == ("75", "", 1), job.log
    assert "RUN_ID=deleted qsub" in job.log
    further = Job(gridengine, *ONE_NODE, RUN_ID="deleted")
    assert (further.ended(), further.digest) == (("0", "0"), digest), further.log
    assert f"going on after step {step}" in further.log


def test_a_job_writes_its_state_at_its_hard_limit(gridengine):
    words = ("sleepy.yaml", "--algorithm.nap", "1.2")
    job = Job(gridengine, *TWO_NODES, "-l", "h_rt=0:1:0", words=words)
    assert job.written(120) >= 0
    assert (job.ended()[1], job.digest, len(gridengine.starts(job.id))) == ("75", "", 1), job.log
    assert f"RUN_ID={job.id} qsub" in job.log


@pytest.mark.parametrize("options", [(), ("-notify", "n")], ids=["notice", "kill"])
def test_a_job_that_is_rescheduled_waits_for_its_earlier_start(options, gridengine, digest):
    """Grid Engine starts it anew while the earlier start writes its state.

    Its own start of a job of several hosts may hang (`qstat`: Rt) where the earlier one has a host of it.
    """
    job = Job(gridengine, *ONE_NODE).trained()
    gridengine.run("qmod", "-rj", job.id)
    assert (job.ended(), job.digest, job.restarts) == (("0", "0"), digest, 1), job.log
    if not options:
        assert f"going on after step {job.written()}" in job.log


def test_a_job_that_is_suspended_writes_its_state_and_is_queued_again(gridengine, digest):
    job = Job(gridengine, *TWO_NODES).trained()
    gridengine.run("qmod", "-sj", job.id)
    assert job.written() >= LEAST, job.log
    assert (job.ended(), job.digest, job.restarts) == (("0", "0"), digest, 1), job.log


def test_a_job_goes_on_after_the_death_of_a_rank(gridengine, digest):
    job = Job(gridengine, *TWO_NODES).trained()
    os.kill(job.ranks[-1], signal.SIGKILL)
    assert (job.ended(), job.digest, job.restarts) == (("0", "0"), digest, 1), job.log
    assert [start["exit_status"] for start in gridengine.starts(job.id)] == ["99", "0"]
    assert not [*gridengine.jobs.glob(f".mpifl-{job.id}*")]


def test_a_job_whose_ranks_die_too_often_has_failed(gridengine):
    job = Job(gridengine, *ONE_NODE, RESTARTS="1")
    for i in (1, 2):
        wait_for(lambda i=i: job.restarts == i - 1 and job.step and len(job.ranks) == 3, 90, f"start {i}")
        os.kill(job.ranks[-1], signal.SIGKILL)
    assert job.ended()[1] not in ("0", "99", "75"), job.log
    assert (job.restarts, job.digest, len(gridengine.starts(job.id))) == (1, "", 2)


def test_each_task_of_an_array_has_its_seed(gridengine):
    job = Job(gridengine, "-t", "1-2")
    runs = gridengine.jobs / "runs"
    folders = [runs / f"sleepy-{job.id}-{i}" for i in (1, 2)]
    wait_for(lambda: [*folders[0].glob("checkpoints/step-*")], 90, "a checkpoint", lambda: job.log)
    gridengine.run("qmod", "-rj", f"{job.id}.1")
    assert job.ended(180) == ("0", "0"), job.log
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [summary["seed"]["training"] for summary in found] == [1, 2]
    assert found[0]["digest"] != found[1]["digest"]
    assert job.restarts == 1, job.log


def test_the_tasks_of_an_array_share_a_sweep(gridengine):
    sweep = "name: naps\nbase: sleepy.yaml\nrounds: 6\nvary:\n  seed: [0, 1, 2, 3]\n"
    (gridengine.jobs / "sweep.yaml").write_text(sweep)
    job = Job(gridengine, *ONE_NODE, "-t", "1-3:2", words=("sweep", "sweep.yaml"))
    assert job.ended(180) == ("0", "0"), job.log
    assert len([*(gridengine.jobs / "runs" / f"naps-{job.id}").glob("*/summary.json")]) == 4
