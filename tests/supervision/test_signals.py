"""Requests of a scheduler are remembered; several at once are one, a later one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support import toy
from support.runs import CONFIG

from mpifl import cli
from mpifl.supervision.signals import Signals

PROGRAM = """
import os, signal, sys
from mpifl.supervision import signals
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
    answer = "mpifl: asked to stop: ends after this step; Ctrl-C or SIGTERM once more ends it at once\n"
    assert done.stderr == answer, "once, for two signals that are one request"
    assert done.returncode == 0


def test_within_a_sweep_the_sweep_decides_whether_a_request_is_answered():
    with Signals(answers=True), Signals(answers=False) as inner:
        assert inner.answers
    with Signals(), Signals(answers=True) as inner:
        assert not inner.answers
    with Signals(answers=True) as alone:
        assert alone.answers


class Stopper:
    """Asks its own process to stop in every round."""

    def on_round(self, done: object) -> None:
        """Send the signal."""
        os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_runs_and_sweeps_answer_once_unless_they_are_to_be_quiet(command, quiet, tmp_path, capfd):
    options = ["--output.folder", str(tmp_path), "--output.callbacks", f"[{__file__}:Stopper]"]
    options += ["-q"] if quiet else []
    options += ["--vary", "{seed: [0, 1]}"] if command == "sweep" else []
    assert cli.main([command, str(CONFIG), *options]) == 75
    assert capfd.readouterr().err.count("asked to stop: ends after this step") == (not quiet)
