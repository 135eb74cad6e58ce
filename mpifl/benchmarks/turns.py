"""Jobs that `mpifl bench` measures in turns: while one computes, the processes of the others are stopped.

The measuring process has a `Job` for each; the job has the other end of the connection, a local socket
(`multiprocessing.connection`). The measuring process sends the number of rounds of the next turn, 0 for the
end. The job answers with the seconds of the turn and the resources that its processes have used so far.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from mpifl.core.errors import UserError, require
from mpifl.core.process import kilobytes, peak_bytes
from mpifl.core.progress import doing

KEEP_FREED = {  # glibc: do not return freed memory to the system
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
}
ONE_MACHINE = {  # Open MPI: allow more ranks than cores, bind none, yield while waiting
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
START_SECONDS = 600
REFUSED = "mpifl.core.errors.UserError: "  # begins the last line of a traceback of bad input


def asked(connection: Connection) -> int:
    """Return the number that the next turn is asked for; 0 when the other end is closed."""
    try:
        return int(connection.recv())
    except EOFError:
        return 0


def usage() -> dict[str, Any]:
    """Return the resources that this process has used so far, as counted by the Linux kernel.

    Returns:
        `pid` and `host`; `cpu`, processor seconds of all threads; `peak`, VmHWM, the peak resident memory in
        bytes (unlike ru_maxrss it does not survive exec); `pss`, the current proportional set size in bytes,
        in which a page shared by several processes counts in parts; 0 where the kernel does not report it.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cpu": process_time(),
        "peak": peak_bytes(),
        "pss": kilobytes("smaps_rollup", "Pss:") * 1024,
    }


class Job:
    """A program that computes in turns.

    Args:
        name: Name of the job in messages and files.
        command: Command that starts it; the word `SOCKET` is replaced by the path of its socket.
        variables: Variables that are added to its environment.
        folder: Folder for its socket and its log.
        limit: Seconds within which it must start, and answer each turn; 0 for `START_SECONDS` until it
            connects, and no limit after that.

    Attributes:
        startup: Seconds from its start to its first report.
        first: Its first report.
        last: Its last report.
        rounds: Rounds of all turns.

    Raises:
        UserError: It ended before its first report (the message has the end of its log), or took too long.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        limit: float = 0.0,
    ) -> None:
        self.name, self.log, self.limit = name, folder / f"{name}.log", limit
        path = folder / f"{name}.socket"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(1)
        command = [word.replace("SOCKET", str(path)) for word in command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        environment = {**ONE_MACHINE, **environment, "OMP_NUM_THREADS": "1", **variables}
        begin = perf_counter()
        with doing(f"starting {name}"), self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                self.connection = self._accept(listening)
                self.first = self._receive()
            except BaseException:
                self.process.terminate()
                raise
        self.startup = perf_counter() - begin
        self.last, self.rounds = self.first, 0

    def _accept(self, listening: socket.socket) -> Connection:
        listening.settimeout(0.2)
        begin = perf_counter()
        while perf_counter() - begin < (self.limit or START_SECONDS):
            with suppress(TimeoutError):
                return Connection(listening.accept()[0].detach())
            if self.process.poll() is not None:
                break
        raise self._error()

    def _error(self) -> UserError:
        text = self.log.read_text().strip().splitlines()
        refused = [line.partition(REFUSED)[2] for line in text if line.startswith(REFUSED)]
        return UserError("bench", self.name, "the job ended: " + " / ".join(refused[:1] or text[-8:]))

    def _receive(self) -> dict[str, Any]:
        try:
            remedy = f"the job did not answer for {self.limit:.0f} s"
            require(self.connection.poll(self.limit or None), "bench", self.name, remedy)
            return dict(self.connection.recv())
        except (EOFError, OSError) as error:
            raise self._error() from error

    def turn(self, rounds: int) -> dict[str, Any]:
        """Let the job compute some rounds, then stop its processes.

        Returns:
            Its report, with `rounds` and `cpu`: processor seconds of each process in this turn.

        Raises:
            UserError: It ended, or took too long.
        """
        before = self.last
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # if the job has ended, no report arrives either
            self.connection.send(rounds)
        with doing(self.name):
            self.last = self._receive()
        self._signal(signal.SIGSTOP)
        self.rounds += rounds
        cpu = [b["cpu"] - a["cpu"] for a, b in zip(before["used"], self.last["used"], strict=True)]
        return {**self.last, "rounds": rounds, "cpu": cpu}

    def stop(self) -> None:
        """Stop the job's processes until its next turn."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self.first["pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Ask the job to end; terminate it after 20 seconds."""
        self._signal(signal.SIGCONT)
        with suppress(OSError, ValueError):
            self.connection.send(0)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(20)
        with suppress(OSError):
            self.connection.close()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit`, so that the jobs are ended, too."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda which, _: sys.exit(128 + which)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder for sockets, logs and client state."""
    return tempfile.TemporaryDirectory(prefix="mpifl-bench-")
