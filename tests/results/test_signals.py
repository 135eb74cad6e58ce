"""Requests of a scheduler are remembered; several at once are one, a later one ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support import toy

from mpifl.results.supervision import Signals

PROGRAM = """
import os, signal, sys
from mpifl.results import supervision as signals
signals.REPEAT_SECONDS = float(sys.argv[1])
with signals.Signals(answers=len(sys.argv) > 2) as asked:
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    print(asked.take(), asked.take())
"""


@pytest.mark.parametrize(
    ("seconds", "code", "said"),
    [("3600", 0, "(True, True) (False, True)\n"), ("0", -signal.SIGTERM, "")],
    ids=["at once", "later"],
)
def test_a_second_request_to_stop_ends_the_process_unless_it_is_the_same(seconds, code, said):
    command = [sys.executable, "-c", PROGRAM, seconds]
    done = subprocess.run(command, capture_output=True, text=True, env=toy.PYTHONPATH, timeout=120)
    assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_a_request_to_stop_is_answered_at_once_and_one_to_save_is_not():
    command = [sys.executable, "-c", PROGRAM, "3600", "answers"]
    done = subprocess.run(command, capture_output=True, text=True, env=toy.PYTHONPATH, timeout=120)
    answer = "mpifl: stops after this step, its state written; Ctrl-C or SIGTERM once more ends it at once\n"
    assert done.stderr == answer, "once, for two signals that are one request"
    assert done.returncode == 0


def test_within_a_sweep_the_sweep_decides_whether_a_request_is_answered():
    with Signals(answers=True), Signals(answers=False) as inner:
        assert inner.answers
    with Signals(), Signals(answers=True) as inner:
        assert not inner.answers
    with Signals(answers=True) as alone:
        assert alone.answers
