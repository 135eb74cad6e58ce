"""Before MPI is up: what a launcher asked for, the limits, and a rank that keeps the others waiting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import children, mpi_environment
from faults import deaths
from support.each import for_each

from mpifl.comm import mpi_startup as starting
from mpifl.comm.mpi_startup import LaunchInfo, check_size, launch_info, seconds
from mpifl.core.errors import UserError

ASKED = {
    "open mpi": ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}, 3, 2),
    "hydra": ({"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, 4, 1),
    "hydra, one node": ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, 2, 1),
    "srun without PMI": ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 8, 0),
    "another task of srun": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}, 8, 5),
    "mpirun below srun": ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1, 0),
    "a batch script": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, 0),
    "a terminal": ({"PATH": "/bin"}, 1, 0),
    "nonsense": ({"PMI_SIZE": "many", "PMI_RANK": ""}, 1, 0),
}


@for_each(("environment", "size", "rank"), ASKED.values(), ids=ASKED)
def test_the_environment_tells_how_many_ranks_a_launcher_asked_for(environment, size, rank):
    asked = launch_info(environment)
    assert (asked.size, asked.rank) == (size, rank)
    if size > 1:
        with pytest.raises(UserError, match=f"{asked.name} = {size}.*launcher"):
            check_size(1, environment)
    else:
        check_size(1, environment)
    check_size(3, environment)


@pytest.mark.parametrize("text", ["abc", "-1", "nan", "inf", "1e99", ""])
@pytest.mark.parametrize("name", [starting.START_S, starting.HANG_S])
def test_limits_that_are_no_seconds_are_refused(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    shown = text if text in ("-1", "1e99") else repr(text)
    with pytest.raises(UserError, match=f"{name} = {shown}: use seconds"):
        seconds(name)


def test_more_ranks_may_take_longer_to_start(monkeypatch):
    monkeypatch.delenv(starting.START_S, raising=False)
    assert launch_info({}) == LaunchInfo(1, 0, "")
    for size, limit in ((3, 126.0), (64, 248.0)):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
        assert seconds(starting.START_S) == limit
    monkeypatch.setenv(starting.START_S, "7.5")
    assert seconds(starting.START_S) == 7.5


@pytest.mark.in_turn
def test_processes_of_another_mpis_launcher_do_not_run_alone(mpirun, tmp_path):
    asked = deaths.arguments(tmp_path, "x", "fedavg", tmp_path)
    end = mpirun(None, "-m", "mpifl", *asked, env={"PMI_SIZE": "3", "PMI_RANK": "0"}, fresh=True)
    assert end.returncode == 2
    assert end.stderr.startswith("mpifl: PMI_SIZE = 3: the launcher")
    assert end.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_rank_that_is_stopped_before_mpi_is_up_ends_the_job(mpirun, tmp_path):
    asked = deaths.arguments(tmp_path, "x", "fedavg", tmp_path)
    plan, begin = [{"rank": 1, "call": "start", "signal": 19}], time.monotonic()
    end = deaths.launch(mpirun, 3, plan, *asked, env={"MPIFL_START_S": "5"})
    assert end.returncode not in (0, 2, 75)
    assert "is stopped and keeps MPI from coming up" in end.stderr
    assert "Traceback" not in end.stderr
    assert time.monotonic() - begin < 60


def test_an_mpirun_of_the_tests_that_finds_no_port_is_tried_again(mpirun, tmp_path):
    """It fails before it starts a rank, on machines where much runs: once in thousands of starts."""
    launcher, tried = tmp_path / "mpirun", tmp_path / "tried"
    failure = (
        'echo bind failed; echo "The PMIx server\'s listener thread failed to start. We cannot" >&2; exit 213'
    )
    launcher.write_text(f'#!/bin/sh\n[ -e {tried} ] && exec echo ranks "$2"\ntouch {tried}; {failure}\n')
    launcher.chmod(0o755)
    with pytest.warns(UserWarning, match="(?s)tried again: bind failed.*listener"):
        end = mpirun(3, "-c", "", python=str(tmp_path / "python"))
    assert (end.returncode, end.stdout) == (0, "ranks 3\n")


def test_an_mpirun_of_the_tests_that_never_finds_a_port_has_failed(mpirun, tmp_path):
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        '#!/bin/sh\necho "The PMIx server\'s listener thread failed to start" >&2; exit 213\n'
    )
    launcher.chmod(0o755)
    with pytest.warns(UserWarning, match="tried again") as said:
        end = mpirun(1, "-c", "", python=str(tmp_path / "python"))
    assert end.returncode == 213
    assert len(said) == 2


def wait_for_programs(parent, name, count):
    """Wait until a process has so many children that run a program: they are copies of it at first."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if [Path(f"/proc/{pid}/comm").read_text() for pid in children(parent)] == [f"{name}\n"] * count:
            return
        time.sleep(0.01)
    pytest.fail(f"no {count} children of {parent} run {name}")


@pytest.mark.parametrize(
    ("program", "size", "says"),
    [
        ("mpirun", "3", "1 of this host's 3 ranks died before MPI was up"),
        ("mpirun", "2", ""),
        ("hydra_pmi_proxy", "3", "1 of this host's 3 ranks died before MPI was up"),
        ("slurmstepd", "3", "1 of this host's 3 ranks died before MPI was up"),
        ("bash", "3", ""),  # between launcher and rank: it has one child
    ],
)
def test_a_rank_that_died_before_the_first_poll_is_missed(program, size, says, tmp_path, monkeypatch):
    """The launcher has two children, and says how many ranks it started on this host."""
    shutil.copy(shutil.which("bash") or "", tmp_path / program)
    command = [str(tmp_path / program), "-c", "sleep 60 & sleep 60 & echo up; wait"]
    local = {
        "hydra_pmi_proxy": {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": size},
        "slurmstepd": {
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "2",
            "SLURM_STEP_TASKS_PER_NODE": f"4(x2),{size}",
        },
    }
    local["mpirun"] = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": size}
    for name, value in local.get(program, local["mpirun"]).items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"up\n"
            wait_for_programs(launcher.pid, "sleep", 2)
            assert starting._HostPoll(launcher.pid).fault() == says
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


def test_many_ranks_are_seen_which_threads_of_the_launcher_started(monkeypatch):
    """Open MPI starts 64 ranks and more of a host by several threads."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if (mpirun := shutil.which("mpirun", path=places)) is None:
        pytest.skip("no mpirun beside the interpreter or on the PATH")
    command = [mpirun, "-n", "64", "sleep", "60"]
    with subprocess.Popen(command, env=mpi_environment(), start_new_session=True) as launcher:
        try:
            wait_for_programs(launcher.pid, "sleep", 64)
            monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
            for size, says in (("64", ""), ("65", "1 of this host's 65 ranks died before MPI was up")):
                monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", size)
                assert starting._HostPoll(launcher.pid).fault() == says
        finally:
            launcher.terminate()  # it ends its ranks
