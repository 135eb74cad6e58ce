"""A process, known by more than its number, so that this one and no other can be ended.

Has processes of this host ended that are stopped, and would keep all others waiting.

What happens when a rank is gone.

Waiting without burning a core.
"""

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
    """A process of a host.

    Attributes:
        host, pid: where, and its number there.
        born: clock ticks between the host's start and its own; -1 where the system does not tell.
    """

    host: str
    pid: int
    born: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return a process of this host."""
        return cls(socket.gethostname(), pid, born(pid))

    @property
    def program(self) -> str:
        """The first 15 letters of what it runs; empty where that is unknown. Only on its own host."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        return ""

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone; only on its own host. SIGKILL ends a stopped process too."""
        if self.born >= 0 and born(self.pid) == self.born:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def born(pid: int) -> int:
    """Return when a process of this host began; -1 where there is none, or no way to know."""
    return status(pid)[2]


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


def patiently(ready: Callable[[], Any]) -> Any:
    """Return the first true answer of `ready`, asking ever less often.

    Sleeps grow to 2 % of the wait, 2 ms at most.
    """
    start = time.perf_counter()
    while not (answer := ready()):
        waited = time.perf_counter() - start
        if waited > 1e-4:
            time.sleep(min(2e-3, 0.02 * waited))
    return answer
