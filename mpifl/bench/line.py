"""How the measuring process speaks with the jobs it measures: lines of JSON over a local socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class Line:
    """One end of the connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._file = connected.makefile("rw", encoding="utf-8")
        self._socket = connected

    @classmethod
    def to(cls, path: str | Path) -> Line:
        """Return the job's end, connected to the socket at `path`."""
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        return cls(connected)

    def say(self, what: Any) -> None:
        """Send one object that JSON can write."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        """Wait for the next object; None when the other end is gone."""
        line = self._file.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()
