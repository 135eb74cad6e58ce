"""Jobs of `launch/slurm` on a real Slurm: disturbed ones end with the digest of an undisturbed run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import Slurm, wait_for

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parents[3] / "launch" / "slurm"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
LAUNCHERS = ("mpirun", "srun")
LEAST = 4  # rounds before a disturbance: the first checkpoint is that of round 1


class Job:
    """A submitted job of `launch/slurm`, and its run.

    Args:
        slurm: the cluster.
        options: options of sbatch.
        words: configuration and options of mpifl.
        environment: variables of the submitting shell.
    """

    def __init__(
        self, slurm: Slurm, *options: str, words: tuple[str, ...] = ("sleepy.yaml",), **environment: str
    ) -> None:
        self.slurm, self.name = slurm, environment.get("RUN_ID")
        done = slurm.run("sbatch", "--parsable", *options, str(SCRIPT), *words, **environment)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def log(self) -> str:
        return self.slurm.log(self.id)

    @property
    def folder(self) -> Path:
        return self.slurm.jobs / "runs" / f"sleepy-{self.name or self.id}"

    @property
    def about(self) -> dict[str, str]:
        return self.slurm.about(self.id)

    @property
    def restarts(self) -> int:
        return int(self.about["Restarts"])

    @property
    def step(self) -> int:
        """The step of the last checkpoint; 0 without one."""
        steps = (self.folder / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in steps), default=0)

    @property
    def digest(self) -> str:
        """The digest of the run, empty if it is not complete."""
        file = self.folder / "summary.json"
        return str(json.loads(file.read_text())["digest"]) if file.exists() else ""

    def trained(self, rounds: int = LEAST) -> Job:
        """Wait until some rounds are done."""

        def look() -> bool:
            assert self.about["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), self.log
            return (
                max((int(n) for n in re.findall(r"^round (\d+)/", self.log, re.MULTILINE)), default=0)
                >= rounds
            )

        wait_for(look, 120, f"round {rounds} of job {self.id}", lambda: self.log)
        return self

    def ended(self, seconds: float = 120) -> str:
        """Wait for the end of the job, and return its state."""
        return self.slurm.wait_until_ended(self.id, seconds)


@pytest.fixture(scope="session")
def digest(slurm) -> str:
    """Return the digest of the same run without a disturbance, in one process."""
    command = [
        sys.executable,
        "-m",
        "mpifl",
        "run",
        "sleepy.yaml",
        "-q",
        "--algorithm.nap",
        "0.1",
        "--output.id",
        "alone",
    ]
    subprocess.run(command, cwd=slurm.jobs, env=slurm.environment, check=True)
    return str(json.loads((slurm.jobs / "runs" / "sleepy-alone" / "summary.json").read_text())["digest"])


@pytest.fixture(autouse=True)
def idle(slurm):
    """Leave all nodes idle, with both alive."""
    yield
    slurm.run("scancel", "-u", "root")
    slurm.wait_until_idle()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_preempted_job_writes_its_state_and_goes_on(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.run(
        "sbatch",
        "-p",
        "urgent",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--output=/dev/null",
        "--wrap",
        "sleep 1",
    )
    wait_for(lambda: job.restarts == 1, 60, "preemption", lambda: job.log)
    assert job.step >= LEAST, job.log
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_goes_on_after_the_death_of_a_node(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.kill_node("node2")
    wait_for(lambda: job.restarts == 1, 90, "the end on a dead node", lambda: job.log)
    slurm.start_node("node2")
    assert (job.ended(), job.digest) == ("COMPLETED", digest), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scancel_cancels_once_and_the_state_is_written(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher, RUN_ID=f"cancelled-{launcher}").trained()
    slurm.run("scancel", job.id)
    assert (job.ended(), job.restarts, job.digest) == ("CANCELLED", 0, ""), job.log
    slurm.wait_until_idle()
    assert job.about["JobState"] == "CANCELLED", job.log
    assert job.step >= LEAST, job.log
    further = Job(slurm, *TWO_NODES, LAUNCHER=launcher, RUN_ID=f"cancelled-{launcher}")
    assert (further.ended(), further.digest) == ("COMPLETED", digest), further.log
    assert f"going on after step {job.step}" in further.log or further.step == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_to_all_processes_of_a_job_writes_its_state(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.run("scancel", "--full", "-s", "TERM", job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    assert job.step >= LEAST, job.log
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_queued_again_by_hand_goes_on_once(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.run("scontrol", "requeue", job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    slurm.wait_until_idle()
    assert job.step >= LEAST, job.log
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.parametrize(
    "signal_before", ["--signal=B:USR1@40", "--signal=B:USR1@0"], ids=["warned", "limit"]
)
def test_a_job_goes_on_after_its_time_limit(signal_before, slurm, digest):
    words = ("sleepy.yaml", "--algorithm.nap", "1.5")
    job = Job(slurm, *TWO_NODES, "--time=1", signal_before, words=words).trained(2)
    wait_for(lambda: job.restarts == 1, 120, "the limit", lambda: job.log)
    assert job.step >= 2, job.log
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=5")
    assert (job.ended(180), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


def test_a_job_that_may_not_be_queued_again_says_how_to_go_on(slurm, digest):
    job = Job(slurm, *TWO_NODES, "--no-requeue").trained()
    slurm.run("scancel", "--batch", "-s", "USR1", job.id)
    assert (job.ended(), job.about["ExitCode"], job.digest) == ("FAILED", "75:0", ""), job.log
    assert f"RUN_ID={job.id} sbatch" in job.log
    further = Job(slurm, *TWO_NODES, "--no-requeue", RUN_ID=job.id)
    assert (further.ended(), further.digest) == ("COMPLETED", digest), further.log


def test_a_job_ends_as_failed_if_its_nodes_die_too_often(slurm):
    job = Job(slurm, *TWO_NODES, RESTARTS="0").trained()
    slurm.kill_node("node2")
    try:
        assert job.ended() in ("FAILED", "NODE_FAIL"), job.log
        assert (job.restarts, job.digest) == (0, "")
    finally:
        slurm.start_node("node2")


def test_a_complete_run_is_left_alone_and_a_name_in_use_is_refused(slurm, digest):
    first = Job(slurm, *TWO_NODES, RUN_ID="shared").trained(1)
    second = Job(slurm, "--ntasks=1", "--nodes=1", "--ntasks-per-node=1", RUN_ID="shared")
    assert (second.ended(), second.about["ExitCode"]) == ("FAILED", "2:0"), second.log
    assert (first.ended(), first.digest) == ("COMPLETED", digest), first.log
    assert Job(slurm, *TWO_NODES, RUN_ID="shared").ended() == "COMPLETED"
