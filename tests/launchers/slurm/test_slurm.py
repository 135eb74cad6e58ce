"""Jobs of `launch/slurm` on a real Slurm: disturbed ones end with the digest of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..jobs import LEAST, SleepyJob, alone, wait_for
from .cluster import Slurm

pytestmark = pytest.mark.nightly(seconds=30)

SCRIPT = Path(__file__).parents[3] / "launch" / "slurm"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
LAUNCHERS = ("mpirun", "srun")
WRITTEN = {
    "mpirun": LEAST,
    "srun": 1,
}  # least step after SIGTERM to all processes: srun kills its ranks at once


class Job(SleepyJob):
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
        super().__init__(slurm, "sbatch", "--parsable", *options, str(SCRIPT), *words, **environment)
        self.slurm = slurm

    @property
    def about(self) -> dict[str, str]:
        return self.slurm.about(self.id)

    @property
    def is_alive(self) -> bool:
        return self.about["JobState"] in ("PENDING", "RUNNING", "CONFIGURING")

    @property
    def restarts(self) -> int:
        return int(self.about["Restarts"])

    def ended(self, seconds: float = 120) -> str:
        """Wait for the end of the job, and return its state."""
        return self.slurm.wait_until_ended(self.id, seconds)


def planned(slurm: Slurm, ranks: str, *words: str) -> list[str]:
    """Return the options of sbatch that `mpifl plan` says."""
    plan = ("plan", "sleepy.yaml", "--time", "yes", "--system.ranks", ranks, *words)
    said = slurm.run(sys.executable, "-m", "mpifl", *plan).stdout
    found = re.search(r"^to ask for +(--.*?) +\(", said, re.MULTILINE)
    assert found, said
    return found[1].split()


@pytest.fixture(scope="session")
def digest(slurm) -> str:
    """Return the digest of the thirty rounds of sleepy.yaml."""
    return alone(slurm, 30)


@pytest.fixture(autouse=True)
def idle(slurm):
    """Leave all nodes idle, with both alive."""
    yield
    slurm.run("scancel", "-u", "root")
    slurm.wait_until_idle()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_preempted_job_writes_its_state_and_goes_on(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.submit_urgent()
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
    assert job.step >= WRITTEN[launcher], job.log
    further = Job(slurm, *TWO_NODES, LAUNCHER=launcher, RUN_ID=f"cancelled-{launcher}")
    assert (further.ended(), further.digest) == ("COMPLETED", digest), further.log
    assert f"going on after step {job.step}" in further.log or further.step == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_to_all_processes_of_a_job_writes_its_state(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.run("scancel", "--full", "-s", "TERM", job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    assert job.step >= WRITTEN[launcher], job.log
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_queued_again_by_hand_goes_on_once(launcher, slurm, digest):
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher).trained()
    slurm.run("scontrol", "requeue", job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    slurm.wait_until_idle()
    assert job.step >= WRITTEN[launcher], job.log
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.nightly(seconds=140)
@pytest.mark.parametrize("signal_before", ["--signal=B:USR1@1", "--signal=B:USR1@0"], ids=["warned", "limit"])
def test_a_job_goes_on_after_its_time_limit(signal_before, slurm):
    words = ("sleepy.yaml", "--rounds", "20", "--algorithm.nap", "1.5")  # longer than the limit
    job = Job(slurm, *TWO_NODES, "--time=1", signal_before, words=words).trained(2)
    wait_for(lambda: job.restarts == 1, 120, "the limit", lambda: job.log)
    assert job.step >= 2, job.log
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=5")
    assert (job.ended(240), job.digest, job.restarts) == ("COMPLETED", alone(slurm, 20), 1), job.log


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


START = """import os, signal, time
from pathlib import Path
if "PMIX_RANK" in os.environ:
    Path("starting").touch()
    if "DEAF" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    time.sleep(12)
    os._exit(int(os.environ["FAILS"])) if "FAILS" in os.environ else None
"""


@pytest.fixture
def slow_start(slurm):
    """Return a wait for a start, and variables: each rank takes 12 seconds to start, and fails with FAILS."""
    (slurm.jobs / "slow").mkdir(exist_ok=True)
    (slurm.jobs / "slow" / "sitecustomize.py").write_text(START)
    (slurm.jobs / "starting").unlink(missing_ok=True)
    path = f"{slurm.jobs / 'slow'}:{slurm.environment['PYTHONPATH']}"
    return lambda: wait_for((slurm.jobs / "starting").exists, 60, "a start"), {"PYTHONPATH": path}


DISTURBED_STARTS = [(launcher, what) for what in ("node2 dies", "preemption") for launcher in LAUNCHERS]
DISTURBED_STARTS += [("mpirun", "warning"), ("srun", "TERM to all")]


@pytest.mark.parametrize(("launcher", "what"), DISTURBED_STARTS)
def test_a_job_goes_on_if_its_first_start_is_disturbed(launcher, what, slurm, digest, slow_start):
    """The ranks have not begun yet, and cannot hear a signal."""
    starting, environment = slow_start
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher, **environment)
    starting()
    if what == "node2 dies":
        slurm.kill_node("node2")
    elif what == "preemption":
        slurm.submit_urgent()
    else:
        slurm.run("scancel", *(("--full", "-s", "TERM") if "all" in what else ("-b", "-s", "USR1")), job.id)
    wait_for(lambda: job.restarts == 1, 60, "the end", lambda: job.log)
    if what == "node2 dies":
        slurm.start_node("node2")
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


def test_a_job_goes_on_if_its_grace_time_ends(slurm, digest, slow_start):
    """The job that needed its nodes is gone by then; Slurm queues this one again, and the script does not."""
    starting, environment = slow_start
    job = Job(slurm, *TWO_NODES, LAUNCHER="srun", DEAF="1", **environment)
    starting()
    slurm.submit_urgent()
    wait_for(lambda: job.about["PreemptTime"] != "None", 20, "preemption", lambda: job.log)
    slurm.run("scancel", "-p", "urgent")
    wait_for(lambda: job.restarts == 1, 100, "the end", lambda: job.log)
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 1), job.log


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_cannot_start_is_not_queued_again(launcher, slurm, slow_start):
    _, environment = slow_start
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher, FAILS="3", **environment)
    assert (job.ended(), job.restarts) == ("FAILED", 0), job.log
    assert job.about["ExitCode"] in ("3:0", "143:0")  # srun may have to end the other rank


SUSPENDED_S = 45.0  # longer than any limit that is on by default: STOPPED_S is 30


@pytest.mark.parametrize(
    ("launcher", "when"), [("mpirun", "running"), ("srun", "running"), ("mpirun", "starting")]
)
def test_a_suspended_job_goes_on_when_it_is_resumed(launcher, when, slurm, digest, slow_start):
    starting, environment = slow_start
    job = Job(slurm, *TWO_NODES, LAUNCHER=launcher, **(environment if when == "starting" else {}))
    starting() if when == "starting" else job.trained()
    assert slurm.run("scontrol", "suspend", job.id).returncode == 0
    time.sleep(2.0)
    before = job.log
    time.sleep(SUSPENDED_S)
    assert (job.about["JobState"], job.log) == ("SUSPENDED", before)
    slurm.run("scontrol", "resume", job.id)
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 0), job.log


def test_a_complete_run_is_left_alone_and_a_name_in_use_is_refused(slurm, digest):
    first = Job(slurm, *TWO_NODES, RUN_ID="shared").trained(1)
    second = Job(slurm, "--ntasks=1", "--nodes=1", "--ntasks-per-node=1", RUN_ID="shared")
    assert (second.ended(), second.about["ExitCode"]) == ("FAILED", "2:0"), second.log
    assert (first.ended(), first.digest) == ("COMPLETED", digest), first.log
    assert Job(slurm, *TWO_NODES, RUN_ID="shared").ended() == "COMPLETED"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("asked", [("3",), ("5",), ("6", "--nodes", "1")], ids=["node", "nodes", "shared"])
def test_what_a_plan_says_to_ask_for_gives_its_ranks(asked, launcher, slurm, digest):
    """Nodes of four cores; six ranks share those of one node."""
    job = Job(slurm, *planned(slurm, asked[0], "--cores", "4", *asked[1:]), LAUNCHER=launcher)
    assert (job.ended(), job.digest) == ("COMPLETED", digest), job.log
    assert json.loads((job.folder / "summary.json").read_text())["ranks"] == int(asked[0])


def test_each_task_of_an_array_goes_on_after_its_limit(slurm):
    """Slurm itself would end the array's tasks for good."""
    words = ("sleepy.yaml", "--rounds", "12", "--algorithm.nap", "1.5")
    first = Job(slurm, "--array=0-1", "--ntasks=1", "--time=1", "--signal=B:USR1@40", words=words)
    tasks = [f"{first.id}_0", f"{first.id}_1"]
    for task in tasks:
        wait_for(lambda task=task: slurm.about(task).get("Restarts") == "1", 120, "the limit")
        slurm.run("scontrol", "update", f"JobId={task}", "TimeLimit=5")
    assert [slurm.wait_until_ended(task, 180) for task in tasks] == ["COMPLETED"] * 2
    runs = slurm.jobs / "runs"
    found = [json.loads((runs / f"sleepy-{first.id}-{i}" / "summary.json").read_text()) for i in (0, 1)]
    assert [summary["seed"]["training"] for summary in found] == [0, 1]
    assert found[0]["digest"] != found[1]["digest"]


def test_a_sweep_goes_on_after_one_of_its_tasks_was_killed(slurm):
    words = ("sweep", "sweep.yaml")
    sweep = "name: naps\nbase: sleepy.yaml\nrounds: 12\nvary:\n  seed: [0, 1, 2, 3]\n"
    (slurm.jobs / "sweep.yaml").write_text(sweep)
    first = Job(slurm, "--array=1-2", "--ntasks=1", words=words)
    tasks = [f"{first.id}_1", f"{first.id}_2"]
    folder = slurm.jobs / "runs" / f"naps-{first.id}"
    wait_for(lambda: len([*folder.glob("*/checkpoints")]) == 2, 120, "two cases")
    slurm.run("scancel", "--full", "-s", "KILL", tasks[1])
    ended = [slurm.wait_until_ended(task, 180) for task in tasks]
    assert ended[0] == "COMPLETED"
    second = Job(slurm, "--array=1-2", "--ntasks=1", words=words, RUN_ID=first.id)
    assert [slurm.wait_until_ended(f"{second.id}_{i}", 180) for i in (1, 2)] == ["COMPLETED"] * 2
    assert len([*folder.glob("*/summary.json")]) == 4


def test_a_run_outlives_a_worker_under_slurm(slurm, digest):
    """With Open MPI's fault tolerance the job goes on at once, not by being queued again."""
    job = Job(slurm, "--nodes=2", "--ntasks=3", "--ntasks-per-node=2", FT="1").trained()
    ranks = subprocess.run(
        ["pgrep", "-f", f"mpifl run sleepy.yaml.*{job.id}"], capture_output=True, text=True
    )
    by_rank = {}
    for pid in map(int, ranks.stdout.split()):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        by_rank |= {int(w[10:]): pid for w in words if w.startswith(b"PMIX_RANK=")}
    os.kill(by_rank[2], signal.SIGKILL)
    assert (job.ended(), job.digest, job.restarts) == ("COMPLETED", digest, 0), job.log
    assert json.loads((job.folder / "summary.json").read_text())["ranks_lost"]


@pytest.mark.parametrize("launcher", ["mpirun -n 2", "srun --mpi=pmix"])
def test_doctor_says_what_slurm_has_given(launcher, slurm):
    options = (
        "--ntasks=2",
        "--cpus-per-task=2",
        "--time=7",
        "--no-requeue",
        "--mem=700",
        "--output=doctor.log",
    )
    done = slurm.run("sbatch", "--parsable", *options, "--wrap", f"{launcher} mpifl doctor")
    assert slurm.wait_until_ended(done.stdout.strip()) in ("COMPLETED", "FAILED")
    said = (slurm.jobs / "doctor.log").read_text()
    (line,) = (line for line in said.splitlines() if line.split()[1:2] == ["job"])
    for part in ("2 tasks on 1 node", "4 cores (2 for a task)", "700M", "00:07:00", "not queued again"):
        assert part in line
    assert ("srun with PMIx" in line) == launcher.startswith("srun")
