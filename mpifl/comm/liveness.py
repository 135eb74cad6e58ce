"""Liveness of ranks: their processes, a watcher for stopped ones, and waiting with a free core."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stopped_process_watch as stopped
from .stopped_process_watch import status


@dataclass(frozen=True)
class Process:
    """A process of a host; its start time distinguishes it from a later process with the same pid.

    Attributes:
        host: name of the host.
        pid: process id on that host.
        start_ticks: clock ticks from the start of the host to the start of the process; -1 if unknown.
    """

    host: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return a process of this host.

        Args:
            pid: its process id.
        """
        return cls(socket.gethostname(), pid, start_ticks(pid))

    @property
    def program(self) -> str:
        """First 15 characters of its program's name, read on its own host; empty if unknown."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        return ""

    def send(self, number: int) -> None:
        """Send a signal unless the process has ended; call it on the host of the process.

        Args:
            number: signal number. SIGKILL ends a stopped process too.
        """
        if self.start_ticks >= 0 and start_ticks(self.pid) == self.start_ticks:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_ticks(pid: int) -> int:
    """Return when a process of this host started, in clock ticks since the host's start; -1 if unknown."""
    return status(pid)[2]


STOPPED_S = 30.0  # limit until the configuration sets another
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class StoppedProcessWatcher:
    """A child process that kills processes of this host that stay stopped and so block all other ranks.

    It runs until it is closed or all watched processes have ended.

    Args:
        limit: seconds for which a process may be stopped.
        processes: processes of this host, each with its name in messages.
        launcher: the launcher, if rank 0 is among the processes. It is ended if it outlives all of them.
    """

    def __init__(
        self, limit: float, processes: Iterable[tuple[Process, str]], launcher: Process | None = None
    ) -> None:
        rows = json.dumps([(process.pid, process.start_ticks, name) for process, name in processes])
        command = [sys.executable, "-I", "-S", stopped.__file__, str(limit)]
        command += [str(launcher.pid), str(launcher.start_ticks)] if launcher is not None else []
        # launchers signal a rank and all its children; the child inherits this mask and is not interrupted
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._program: subprocess.Popen[bytes] | None = None
        try:
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            assert self._program.stdin is not None
            self._program.stdin.write(rows.encode() + b"\n")
            self._program.stdin.flush()
        except OSError as error:  # the job can run without a watcher
            warnings.warn(f"no watch for stopped ranks: {error}", stacklevel=2)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the child process."""
        if self._program is not None:
            with suppress(BrokenPipeError):
                self._program.communicate(b"\n")


def wait_until(ready: Callable[[], Any]) -> Any:
    """Call `ready` until it returns a true value, and return that value; the core stays free meanwhile.

    The pause between two calls is 2 % of the time waited so far, at most 2 ms; there is none in the first
    0.1 ms.

    Args:
        ready: polls for whatever is awaited.
    """
    start = time.perf_counter()
    while not (answer := ready()):
        waited = time.perf_counter() - start
        if waited > 1e-4:
            time.sleep(min(2e-3, 0.02 * waited))
    return answer
