"""A process, known by more than its number, so that this one and no other can be ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .stopped import status


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
