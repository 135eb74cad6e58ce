"""A process, known by more than its number, so that this one and no other can be ended."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
    def this(cls) -> Process:
        """Return the calling process."""
        return cls(socket.gethostname(), os.getpid(), born(os.getpid()))

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process, unless it is gone; only on its own host."""
        if self.born >= 0 and born(self.pid) == self.born:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def born(pid: int) -> int:
    """Return when a process of this host began; -1 where there is none, or no way to know."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
