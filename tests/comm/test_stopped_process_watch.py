"""A process that is stopped is ended; one that merely waits, works, or is somebody else's is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support import toy

from mpifl.comm import stopped_process_watch as stopped
from mpifl.comm.liveness import Process, StoppedProcessWatcher

LIMIT = 1.0
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only Linux tells of processes")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def polled(polls: int, rows: list[stopped.Row], seen: dict[int, stopped.Seen]) -> list[str]:
    """Return the states of those that were found to stand still at so many polls."""
    return [state for _ in range(polls) for state, _ in stopped.poll(rows, seen)]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until it is."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_only_polls_without_a_break_count(sleeper):
    rows, seen = [(sleeper.pid, stopped.status(sleeper.pid)[2], "x")], {}
    assert polled(2 * stopped.LOOKS, rows, seen) == []
    stop(sleeper)
    assert polled(stopped.LOOKS - 1, rows, seen) == []
    sleeper.send_signal(signal.SIGCONT)
    os.waitpid(sleeper.pid, os.WCONTINUED)
    polled(1, rows, seen)
    stop(sleeper)
    assert polled(stopped.LOOKS - 1, rows, seen) == []
    assert polled(stopped.LOOKS, rows, seen) == ["T"], "once"


def test_another_process_of_the_same_number_is_left_alone(sleeper):
    stop(sleeper)
    assert polled(stopped.LOOKS, [(sleeper.pid, stopped.status(sleeper.pid)[2] + 1, "x")], {}) == []
    assert polled(stopped.LOOKS, [(sleeper.pid, -1, "x")], {}) == []


@pytest.mark.parametrize(
    ("state", "works", "found"),
    [("T", 0, ["T"]), ("T", 1, []), ("t", 0, []), ("S", 0, []), ("R", 1, []), ("D", 0, ["D"]), ("D", 1, [])],
    ids=["stopped", "throttled", "debugged", "waits", "works", "disk", "reads a lot"],
)
def test_states_are_told_apart(state, works, found, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(stopped, "status", lambda pid: (state, works * next(ticks), 7))
    assert polled(2 * stopped.DISK_LIMITS * stopped.LOOKS, [(1, 7, "x")], {}) == found


def test_a_stopped_process_is_ended_by_a_watcher_that_no_signal_to_its_group_ends(sleeper, capfd):
    watcher = StoppedProcessWatcher(LIMIT, [(Process.of(sleeper.pid), "rank 7")])
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        watcher._program.send_signal(number)
    sleeper.send_signal(signal.SIGSTOP)
    assert sleeper.wait(60) == -signal.SIGKILL
    watcher.close()
    assert watcher._program.returncode == 0
    assert (
        capfd.readouterr().err
        == "mpifl: rank 7, was stopped for 1 s (system.stopped_timeout_s) and is ended\n"
    )


def test_a_closed_watcher_ends_at_once(sleeper):
    begin = time.monotonic()
    StoppedProcessWatcher(3600.0, [(Process.of(sleeper.pid), "rank 7")]).close()
    assert time.monotonic() - begin < 30


PARENT = """
import sys
from mpifl.comm.liveness import Process
from mpifl.comm.liveness import StoppedProcessWatcher
watcher = StoppedProcessWatcher(float(sys.argv[2]), [(Process.of(int(sys.argv[1])), "rank 7")])
print(watcher._program.pid)
"""


def orphaned(sleeper: subprocess.Popen[bytes], limit: float) -> int:
    """Return the pid of a watcher whose parent is gone."""
    command = [sys.executable, "-c", PARENT, str(sleeper.pid), str(limit)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=toy.PYTHONPATH, check=True).stdout)


def test_a_process_that_is_stopped_at_the_end_is_ended_though_the_watchers_parent_is_gone(sleeper):
    stop(sleeper)
    orphaned(sleeper, LIMIT)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_watcher_does_not_outlive_its_parent_and_all_that_it_watches(sleeper):
    pid = orphaned(sleeper, 3600.0)
    assert os.path.exists(f"/proc/{pid}")
    sleeper.kill()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and stopped.status(pid)[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


LAST = """
import sys
from mpifl.comm import stopped_process_watch as stopped
pid, start = map(int, sys.argv[1:])
stopped.main(1.0, (pid, start, "mpirun"), stays=0.5)
"""


@pytest.mark.parametrize("stays", [True, False])
def test_a_launcher_that_outlives_all_ranks_of_its_host_is_ended(stays, sleeper):
    """The watcher's parent is gone, and so is soon the rank; it leaves its outputs before it waits."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleeps, stderr=subprocess.PIPE, text=True) as launcher:
        start = stopped.status(launcher.pid)[2]
        command = [sys.executable, "-c", LAST, str(launcher.pid), str(start)]
        rows = json.dumps([[sleeper.pid, stopped.status(sleeper.pid)[2], "rank 0"]])
        options = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": toy.PYTHONPATH}
        with subprocess.Popen(command, **options) as watcher:
            watcher.stdin.write(f"{rows}\n")
            watcher.stdin.flush()
            sleeper.kill()
            sleeper.wait(60)
            if not stays:
                launcher.kill()
                launcher.wait(60)
            watcher.stdin.close()
            assert watcher.stderr.read() == ""  # to the end of the file
            assert launcher.poll() is None or not stays
        said = launcher.stderr.read()
        assert ("mpirun is ended" in said) == stays, said
        assert launcher.wait(60) == (-signal.SIGTERM if stays else -signal.SIGKILL)
