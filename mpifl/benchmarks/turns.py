"""Jobs that take turns: while one computes, the others stand still.

How the measuring process speaks with the jobs it measures: lines of JSON over a local socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from mpifl.core.errors import UserError

KEEP_FREED = {  # glibc: do not give freed memory back to the system
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
}
ONE_MACHINE = {  # Open MPI only: more ranks than cores, not bound to any, yielding while they wait
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
START_SECONDS = 600


class Job:
    """A started program that reports every turn over a socket."""

    def __init__(self, name: str, command: Sequence[str], extra: Mapping[str, str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        path = folder / f"{name}.socket"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(1)
        command = [word.replace("SOCKET", str(path)) for word in command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        environment = {**ONE_MACHINE, **environment, "OMP_NUM_THREADS": "1", **extra}
        begin = perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.line = self._connected(listening)
        self.first = self._heard()
        self.startup = perf_counter() - begin
        self.last, self.rounds = self.first, 0

    def _connected(self, listening: socket.socket) -> Line:
        listening.settimeout(0.2)
        begin = perf_counter()
        while perf_counter() - begin < START_SECONDS:
            with suppress(TimeoutError):
                connected, _ = listening.accept()
                connected.settimeout(None)
                return Line(connected)
            if self.process.poll() is not None:
                break
        raise self._failed()

    def _failed(self) -> UserError:
        text = self.log.read_text().strip().splitlines()
        return UserError("bench", self.name, "the job ended: " + " / ".join(text[-8:]))

    def _heard(self) -> dict[str, Any]:
        try:
            answer = self.line.hear()
        except OSError:
            answer = None
        if answer is None:
            raise self._failed()
        return dict(answer)

    def turn(self, rounds: int) -> dict[str, Any]:
        """Run so many rounds; return what the job reports of them, with processor seconds of this turn."""
        before = self.last
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # a job that is gone does not answer either
            self.line.say(rounds)
        self.last = self._heard()
        self._signal(signal.SIGSTOP)
        self.rounds += rounds
        cpu = [b["cpu"] - a["cpu"] for a, b in zip(before["used"], self.last["used"], strict=True)]
        return {**self.last, "rounds": rounds, "cpu": cpu}

    def stand_still(self) -> None:
        """Stop the job's processes until its next turn."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self.first["pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Let the job end by itself, or end it."""
        self._signal(signal.SIGCONT)
        with suppress(OSError, ValueError):
            self.line.say(0)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(20)
        with suppress(OSError):
            self.line.close()


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks of this Python."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and _is_open_mpi() else []
    return ["mpirun", *root, "-n", str(ranks), sys.executable, "-m"]


def _is_open_mpi() -> bool:
    try:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise UserError(
            "bench", "mpirun", "is not on the PATH; activate an environment with an MPI"
        ) from None
    return "Open MPI" in text or "PRRTE" in text or "prterun" in text


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for sockets, logs and client state."""
    return tempfile.TemporaryDirectory(prefix="mpifl-bench-")


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
