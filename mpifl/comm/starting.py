"""Before MPI is up: what it is told, and what ends a start that never comes to its end.

With fault tolerance (`mpirun --with-ft ulfm`) a rank that dies before it has joined MPI leaves the others
waiting for it inside MPI_Init, where no Python code runs any more: hence a child process that watches.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpifl.core.errors import require

from .process import Process

HANG_S, START_S = "MPIFL_HANG_S", "MPIFL_START_S"  # environment variables: MPI starts before a configuration
DEFAULTS = {HANG_S: 0.0, START_S: 600.0}
TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "prte")


def seconds(name: str) -> float:
    """Return one of the two limits; 0 for none."""
    text = os.environ.get(name, str(DEFAULTS[name]))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(value >= 0, name, text, "take seconds, or 0 for no limit")
    return value


def is_tolerant() -> bool:
    """Return whether this job goes on without a rank that died."""
    return os.environ.get(TOLERANT) == "1"


def find_hangs() -> None:
    """Have Open MPI find ranks that do not answer: a thread in each tells a neighbour that it lives. Who
    finds one out tells the others by itself: the launcher may not know of it. Off unless it is asked for: in
    Open MPI 5.0.11 a rank crashed in 3 of 128 starts with it.
    """
    if limit := seconds(HANG_S):
        options = {"detector": "1", "detector_thread": "1", "propagator_with_rbcast": "1"}
        options |= {"detector_period": f"{limit / 6}", "detector_timeout": f"{limit}"}
        for name, value in options.items():
            os.environ.setdefault(f"OMPI_MCA_mpi_ft_{name}", value)


@contextmanager
def starting() -> Iterator[None]:
    """Within it MPI comes up, in time or never: past the limit the job ends with a message."""
    limit = seconds(START_S)
    if not is_tolerant():
        yield
        return
    find_hangs()
    if not limit:
        yield
        return
    launcher = _launcher()
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(said)
        _watch(heard, limit, launcher)
    os.close(heard)
    try:
        yield
    finally:
        os.close(said)
        os.waitpid(child, 0)


def _watch(heard: int, limit: float, launcher: Process | None) -> None:
    """Wait, in the child, until the parent is up or gone; past the limit end the job."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    turn = min(int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), 50) / 5  # one speaks, the others are ended
    ready, _, _ = select.select([heard], [], [], limit + turn)
    if not ready and os.getppid() == parent:
        text = f"MPI did not come up within {limit:.0f} s ({START_S}): a rank died or stands still"
        print(f"mpifl: {text}; start the job again", file=sys.stderr, flush=True)
        time.sleep(0.5)  # so that the launcher has read it
        if launcher is not None:
            launcher.send(signal.SIGTERM)  # it ends all ranks, stopped ones too
        os.kill(parent, signal.SIGKILL)
    os._exit(0)


def _launcher() -> Process | None:
    """Return the MPI launcher that started this process."""
    above = Process.of(os.getppid())
    return above if above.program in LAUNCHERS else None


def end_launcher_after(limit: float) -> None:
    """Force the launcher to end if it is there after so many seconds: it may wait for hosts that are gone."""
    launcher = _launcher()
    if launcher is not None and os.fork() == 0:
        os.setsid()  # the launcher ends the sessions of ranks
        time.sleep(limit)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the third forces it
            launcher.send(number)
            time.sleep(1.0)
        os._exit(0)
