"""A run that is asked to stop writes its state after the step and ends; nothing of it is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import children, mpi_environment
from faults import deaths
from support import toy

from mpifl import cli

LIMIT = 240.0  # seconds in which things must have happened; they take a few
LONG = ["--rounds", "100000", "--checkpoint.keep", "2"]
JOB = deaths.HERE.parents[1] / "launch" / "job.sh"
GENTLY = """set -euo pipefail; source "$0"; launcher=("$1" -n 2) program=("${@:4}")
gently; run_job; exit "$code" """


def eventually(what: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def ranks(pid: int) -> list[int]:
    """Return the ranks that a launcher started, itself or through others."""
    below = [c for child in children(pid) for c in (child, *ranks(child))]
    words = {p: Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in below}
    return [p for p in below if words[p][1:3] == [b"-m", b"mpifl"]]


def environment(pid: int) -> list[bytes]:
    """Return the environment of a process: `NAME=value`."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture
def training(tmp_path):
    """Return a function launcher -> a process in which two ranks have begun a run that does not end."""
    mpirun = Path(sys.executable).parent / "mpirun"
    if not (mpirun.parent / "prterun").exists():
        pytest.skip("signals of Open MPI 5's mpirun, beside the interpreter")
    started = []

    def start(
        *launcher: str | Path,
        options: Sequence[str] = (),
        begun: Callable[[Path], bool] = lambda run: any(run.glob("checkpoints/step-*")),
        alive: Callable[[int], bool] = lambda pid: False,
    ) -> subprocess.Popen[str]:
        asked = deaths.arguments(tmp_path, "x", "scaffold", tmp_path / "cache")
        command = [*launcher, mpirun, "-n", "2", sys.executable, "-m", "mpifl", *asked, *LONG, *options]
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=mpi_environment(toy.PYTHONPATH),
        )
        started.append(process)
        eventually(lambda: begun(tmp_path / "tiny-x") or alive(process.pid) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def stops(process: subprocess.Popen[str]) -> str:
    """Wait for a process that was asked to stop; return what it said."""
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, said
    assert "state written" in said
    return said


@pytest.mark.in_turn
def test_a_run_whose_ranks_get_sigterm_goes_on_later_as_if_nothing_had_been(training, tmp_path):
    process, checkpoints = training(), tmp_path / "tiny-x" / "checkpoints"
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: [*checkpoints.glob("step-*")])
    assert process.poll() is None
    for pid in ranks(process.pid):
        os.kill(pid, signal.SIGTERM)
    step = int(stops(process).split("after step ")[1].split(",")[0])
    rounds = ["--rounds", str(step + 2)]
    assert cli.main(["resume", str(tmp_path / "tiny-x"), *rounds]) == 0
    asked = deaths.arguments(tmp_path, "whole", "scaffold", tmp_path / "cache")
    assert cli.main([*asked, *rounds]) == 0
    assert deaths.digest(tmp_path, "x") == deaths.digest(tmp_path, "whole")


def imports(pid: int) -> bool:
    """Return whether a process has begun to import what takes long."""
    with suppress(OSError):
        return "_multiarray_umath" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.parametrize(
    ("command", "number", "code", "line"),
    [
        ("run", signal.SIGTERM, 75, "mpifl: stopped while no run was under way; start the command again"),
        ("run", signal.SIGINT, 75, "mpifl: stopped while no run was under way; start the command again"),
        ("sweep", signal.SIGUSR2, 75, "mpifl: stopped while no run was under way; start the command again"),
        ("plan", signal.SIGINT, 130, "mpifl: interrupted"),
    ],
)
def test_a_signal_during_the_start_ends_a_command_with_one_line(tmp_path, command, number, code, line):
    words = [command, deaths.CONFIG, "--output.folder", str(tmp_path), "--rounds", "100000"]
    words += ["--vary.seed", "[0, 1]"] * (command == "sweep")
    process = subprocess.Popen(
        [sys.executable, "-m", "mpifl", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=toy.PYTHONPATH,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    eventually(lambda: imports(process.pid) or process.poll() is not None)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT)
    assert (process.returncode, said) == (code, f"{line}\n")
    assert not [*tmp_path.iterdir()]


LATE = """
import os, signal, sys
from mpifl.__main__ import main

class Late:  # Python takes its handlers away, then everything that modules hold
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.{}):
        kill(own, number)

sys.late = Late()
main()
"""


@pytest.mark.in_turn
@pytest.mark.parametrize("number", ["SIGUSR2", pytest.param("SIGTERM", marks=pytest.mark.nightly)])
def test_a_signal_after_the_last_line_leaves_the_exit_code(tmp_path, number):
    words = ["run", str(deaths.CONFIG), "--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(number), *words],
        capture_output=True,
        text=True,
        env=toy.PYTHONPATH,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny-x" / "summary.json").exists()


def test_ranks_that_are_stopped_during_the_start_end_the_job_with_the_code_that_asks_for_more(
    training, tmp_path
):
    process = training(begun=lambda run: False, alive=lambda pid: [*map(imports, ranks(pid))] == [True] * 2)
    process.send_signal(signal.SIGUSR2)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, said
    assert said.count("mpifl: ") == said.count("mpifl: stopped while no run was under way") == 1, said
    assert "Traceback" not in said


def test_the_line_of_a_stop_during_the_start_is_said_where_another_rank_ends_first(training):
    """Rank 0 is held, as by a long import, while rank 1 has its signal."""
    process = training(begun=lambda run: False, alive=lambda pid: [*map(imports, ranks(pid))] == [True] * 2)
    server, worker = sorted(ranks(process.pid), key=lambda pid: b"PMIX_RANK=1" in environment(pid))
    os.kill(server, signal.SIGSTOP)
    os.kill(worker, signal.SIGUSR2)
    time.sleep(2.0)
    os.kill(server, signal.SIGUSR2)
    os.kill(server, signal.SIGCONT)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, said
    assert said.count("mpifl: ") == said.count("mpifl: stopped while no run was under way") == 1, said


@pytest.mark.nightly
def test_launch_scripts_turn_sigterm_into_a_stop_that_mpirun_hands_on(training, tmp_path):
    process = training("bash", "-c", GENTLY, JOB)
    process.send_signal(signal.SIGTERM)
    stops(process)
    assert [*(tmp_path / "tiny-x" / "checkpoints").glob("step-*/manifest.sha256")]


@pytest.mark.nightly
def test_workers_of_an_asynchronous_run_leave_together_when_it_stops(mpirun, tmp_path):
    """Rank 1 gets the command while rank 2 trains: the folder of what clients keep must outlive that."""
    plan = [
        {"rank": 0, "call": "arrived", "nth": 1, "targets": [0], "signal": signal.SIGUSR2},
        {"rank": 2, "call": "train", "nth": 3, "after": 2.0, "signal": 0},
    ]
    asked = deaths.arguments(tmp_path, "x", "scaffold-events", tmp_path / "cache")
    end = deaths.launch(mpirun, 3, plan, *asked)
    assert end.returncode == 75, end.stderr
    assert "stopped after step 1, state written" in end.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["rank 0", "all ranks"])
def test_a_run_is_stopped_at_once_while_the_server_trains_what_all_clients_download(training, tmp_path, who):
    """Nothing of it would be kept. FLT's autoencoder takes an hour on CIFAR-10."""
    method = "{name: flt, pretrain_epochs: 1000000, centroids: 2, code: 4}"

    def begun(run: Path) -> bool:
        file = run / "progress.json"
        return file.exists() and "training on the server's data" in file.read_text()

    process = training(options=["--algorithm", method], begun=begun)
    for pid in ranks(process.pid)[: None if who == "all ranks" else 1]:
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, said
    assert said.count("mpifl: ") == 1, said
    again = f"mpifl resume {tmp_path / 'tiny-x'} --from-start"
    assert f"mpifl: stopped before the first step; go on with: {again}" in said
    assert json.loads((tmp_path / "tiny-x" / "progress.json").read_text())["end"] == "stopped"
    assert not [*(tmp_path / "tiny-x" / "checkpoints").glob("step-*")]
