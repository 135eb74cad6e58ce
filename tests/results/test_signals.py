"""Requests of a scheduler are remembered; several at once are one, a later one ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support import toy

PROGRAM = """
import os, signal, sys
from mpifl.results import supervision as signals
signals.REPEAT_SECONDS = float(sys.argv[1])
with signals.Signals() as asked:
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
