"""Before MPI is up: what it is told, and what ends a start that never comes to its end.

A rank that is stopped, or that dies under fault tolerance (`mpirun --with-ft ulfm`), before it has joined MPI
leaves the others waiting for it inside MPI_Init, where no Python code runs any more: hence a child process
that watches.

Whether the MPI library takes addresses of GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mpifl.core.errors import UserError, require

from .liveness import Process
from .stopped_process_watch import LOOKS, STOPPED, status

HANG_S, START_S = "MPIFL_HANG_S", "MPIFL_START_S"  # environment variables: MPI starts before a configuration
DEFAULTS = {HANG_S: 0.0, START_S: 120.0}
RANK_S = (
    2.0  # more for each rank, unless START_S is set: on few cores, many ranks load their programs in turn
)
MOST_S = 1e7
LOOK_S = 3.0  # between two looks at the ranks of this host
TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "prte")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
STEP_SIZE, JOB_SIZE, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID"


class Asked(NamedTuple):
    """What a launcher asked for, as the environment of a process that it started tells.

    Attributes:
        size, rank: number of ranks, and of this one.
        name: the variable that `size` was read from; empty where there is none.
    """

    size: int
    rank: int
    name: str


def asked_of(environment: Mapping[str, str]) -> Asked:
    """Return what the launcher of a process asked for; one rank where nothing tells.

    In a batch script of Slurm SLURM_NTASKS is that of the job, while the script is one process: there, only
    what srun sets for a step counts, or the number of a task that is not the first.
    """
    numbers = {name: int(text) for name, text in environment.items() if text.isdecimal() and len(text) < 9}
    rank = next((numbers[name] for name in RANKS if name in numbers), 0)
    for name in (*SIZES, STEP_SIZE, *((JOB_SIZE,) if numbers.get(TASK) else ())):
        if name in numbers:
            return Asked(max(numbers[name], 1), rank, name)
    return Asked(1, rank, "")


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Raise `UserError` where a launcher asked for several ranks and MPI has come up with one.

    Args:
        size: of MPI.COMM_WORLD; 1 without MPI.
    """
    asked = asked_of(environment)
    if size == 1 < asked.size:
        remedy = (
            f"the launcher started {asked.size} processes, MPI knows of one: the launcher and mpi4py belong "
            "to different MPIs. Take the launcher of mpi4py's MPI (python -m mpi4py --mpi-library), or "
            f"srun --mpi=pmix; where runs of one process are meant, unset {asked.name}"
        )
        raise UserError(asked.name, asked.size, remedy)


def seconds(name: str) -> float:
    """Return one of the two limits; 0 for none."""
    text = os.environ.get(name)
    if text is None:
        return DEFAULTS[name] + (RANK_S * asked_of(os.environ).size if name == START_S else 0.0)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0 <= value <= MOST_S, name, text, f"take seconds, {MOST_S:.0f} at most, or 0 for no limit")
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
    """Within it MPI comes up, in time or never: past the limit, or where a rank of this host is stopped or
    gone, the job ends with a message.
    """
    limit = seconds(START_S)
    if is_tolerant():
        find_hangs()
    if not limit or asked_of(os.environ).size == 1:
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
    """Wait, in the child, until the parent is up or gone; past the limit end the job. Looks are counted, not
    seconds: while a scheduler suspends the whole job, no time passes here either.
    """
    parent, above = os.getppid(), _parent_of(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    pause, looks, fault, count, waited = min(LOOK_S, limit / LOOKS), _Looks(above), "", 0, 0.0
    while not select.select([heard], [], [], pause)[0]:
        if os.getppid() != parent:
            os._exit(0)
        fault, before, waited = looks.fault(), fault, waited + pause
        count = count + 1 if fault and fault == before else int(bool(fault))
        if count == LOOKS or waited > limit:
            break
    else:
        os._exit(0)
    time.sleep(min(asked_of(os.environ).rank, 50))  # one speaks, the others are ended
    if count < LOOKS:
        fault = f"MPI did not come up within {limit:.0f} s ({START_S}): a rank died or stands still"
    if select.select([heard], [], [], 0.0)[0] or os.getppid() != parent:
        os._exit(0)
    print(f"mpifl: {fault}; start the job again", file=sys.stderr, flush=True)
    time.sleep(0.5)  # so that the launcher has read it
    if launcher is not None:
        launcher.send(signal.SIGTERM)  # it ends all ranks, stopped ones too
        time.sleep(5.0)
    for pid in (*looks.stopped, parent):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _parent_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


class _Looks:
    """Looks at the ranks of this host: the processes of one launcher that run the same command.

    Only the host's first two ranks look, so that many ranks are not looked at by all the others.

    Attributes:
        stopped: the ranks that were stopped at the last look.
    """

    def __init__(self, launcher: int) -> None:
        self.launcher, self.stopped, self.most = launcher, tuple[int, ...](), 0
        number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "")
        self.command = self._command(os.getppid()) if number in ("0", "1") else b""

    def _command(self, pid: int) -> bytes:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    def fault(self) -> str:
        """Return what is wrong with a rank of this host, empty where nothing is."""
        if not self.command:
            return ""
        with suppress(OSError, ValueError):
            children = f"/proc/{self.launcher}/task/{self.launcher}/children"
            pids = [int(p) for p in Path(children).read_text().split()]
            ranks = [p for p in pids if self._command(p) == self.command]
            self.stopped = tuple(p for p in ranks if status(p)[0] == STOPPED)
            if self.stopped:
                who = ", ".join(map(str, self.stopped))
                return f"a rank (pid {who}) is stopped and keeps MPI from coming up"
            self.most = max(self.most, len(ranks))
            if len(ranks) < self.most:
                return f"{self.most - len(ranks)} of this host's {self.most} ranks died before MPI was up"
        return ""


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


MAIN, DEVICE, AUTO = "main", "device", "auto"  # the memory MPI is given: `system.mpi_memory`
CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH


def cuda_aware() -> bool:
    """Return what the library says of itself, as Open MPI and MPICH can; False where it says nothing."""
    from mpi4py import MPI

    library, supported = ctypes.CDLL(MPI.__file__), ctypes.c_int(0)
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        failed = library.MPIX_GPU_query_support(CUDA, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False
