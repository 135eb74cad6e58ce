"""A job that stands still ends, and says where it stood."""

from __future__ import annotations

import subprocess
import sys

from support import toy

PROGRAM = """
import sys, time
from pathlib import Path
from mpifl.supervision.signals import watchdog

grace = float(sys.argv[3])
start = time.monotonic()
alive = time.monotonic if sys.argv[2] == "alive" else lambda: start

def says():
    if sys.argv[2] != "late":
        print("last words", flush=True)
        raise ValueError("no more words")

def waits_for_ever():
    with watchdog(0.3, alive, Path(sys.argv[1]), grace=grace, before_end=says):
        time.sleep(60.0 if sys.argv[2] == "stuck" else 1.5)

waits_for_ever()
print("went on")
"""


def run(tmp_path, what: str, grace: float = 0.0) -> subprocess.CompletedProcess[str]:
    """Run the program above."""
    log = tmp_path / "logs" / "host-0.log"
    command = [sys.executable, "-c", PROGRAM, str(log), what, str(grace)]
    return subprocess.run(command, capture_output=True, text=True, env=toy.PYTHONPATH, timeout=120)


def test_silence_ends_the_process_after_its_stacks_are_written(tmp_path):
    done = run(tmp_path, "stuck")
    assert done.returncode == 1
    assert "no progress for" in done.stderr
    assert done.stdout == "last words\n", "such as a trace of what it did"
    log = (tmp_path / "logs" / "host-0.log").read_text()
    assert "waits_for_ever" in log
    assert "no more words" in log, "an error in it does not keep the process"


def test_signs_of_life_keep_it_quiet(tmp_path):
    done = run(tmp_path, "alive")
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_run_that_ends_while_the_stacks_are_written_is_not_killed(tmp_path):
    """It was silent for its whole 1.5 s, but is over before the others could have written theirs."""
    done = run(tmp_path, "late", grace=30.0)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert "waits_for_ever" in (tmp_path / "logs" / "host-0.log").read_text()
