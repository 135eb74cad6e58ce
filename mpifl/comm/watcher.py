"""Has processes of this host ended that are stopped, and would keep all others waiting."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress

from . import stopped
from .process import Process

STOPPED_S = 30.0  # the limit until a configuration gives another
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class Watcher:
    """A program beside this process that watches others until it is closed, or all of them are gone.

    Args:
        limit: seconds that a process may be stopped, at most; then it is ended.
        processes: of this host, each with its name in messages.
    """

    def __init__(self, limit: float, processes: Iterable[tuple[Process, str]]) -> None:
        rows = json.dumps([(process.pid, process.born, name) for process, name in processes])
        command = [sys.executable, "-I", "-S", stopped.__file__, str(limit)]
        # launchers send signals to a rank and all that it started: the program inherits what is blocked here
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._program: subprocess.Popen[bytes] | None = None
        try:
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            assert self._program.stdin is not None
            self._program.stdin.write(rows.encode() + b"\n")
            self._program.stdin.flush()
        except OSError as error:  # the job can do without
            warnings.warn(f"nobody watches for stopped ranks: {error}", stacklevel=2)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End it."""
        if self._program is not None:
            with suppress(BrokenPipeError):
                self._program.communicate(b"\n")
