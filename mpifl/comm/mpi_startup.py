"""The start of MPI: the size that the launcher asked for, a time limit for MPI_Init, GPU support.

If a rank is stopped, or dies under fault tolerance (`mpirun --with-ft ulfm`), before it has called MPI_Init,
the others wait inside MPI_Init, where no Python code runs. A child process of each rank watches for this.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mpifl.core.errors import UserError, require
from mpifl.core.process import SIZES

from .liveness import Process
from .stopped_process_watch import LOOKS, STOPPED, force_to_end, status

HANG_S, START_S = "MPIFL_HANG_S", "MPIFL_START_S"  # environment variables: MPI starts before a configuration
DEFAULTS = {HANG_S: 0.0, START_S: 120.0}
RANK_S = 2.0  # added for each rank unless START_S is set: on few cores, ranks load one after the other
MOST_S = 1e7
POLL_S = 3.0  # between two polls of the ranks of this host
DEAD_LOOKS = 3  # polls that see dead ranks: a launcher may still start them at the first
TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "prte")
SERVE_JOBS = ("prted", "prte")  # may stay for further jobs
PARENTS = (*LAUNCHERS, "hydra_pmi_proxy", "slurmstepd")  # of all ranks of a host
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
TASKS_OF_NODES, NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
STEP_SIZE, JOB_SIZE, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID"


class LaunchInfo(NamedTuple):
    """The job that a launcher started, as the environment of one of its processes describes it.

    Attributes:
        size: number of ranks.
        rank: rank of this process.
        name: the variable that `size` was read from; empty if there is none.
    """

    size: int
    rank: int
    name: str


def launch_info(environment: Mapping[str, str]) -> LaunchInfo:
    """Return the size that the launcher of a process asked for, and its rank; one rank if no variable says.

    In a Slurm batch script, SLURM_NTASKS describes the job, while the script itself is one process. So
    SLURM_NTASKS counts only in a task other than the first; SLURM_STEP_NUM_TASKS, which srun sets for a job
    step, always counts.

    Args:
        environment: environment variables of the process.
    """
    numbers = {name: int(text) for name, text in environment.items() if text.isdecimal() and len(text) < 9}
    rank = next((numbers[name] for name in RANKS if name in numbers), 0)
    for name in (*SIZES, STEP_SIZE, *((JOB_SIZE,) if numbers.get(TASK) else ())):
        if name in numbers:
            return LaunchInfo(max(numbers[name], 1), rank, name)
    return LaunchInfo(1, rank, "")


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Check that MPI has as many ranks as the launcher asked for.

    Args:
        size: size of MPI.COMM_WORLD; 1 without MPI.
        environment: environment variables of this process.

    Raises:
        UserError: the launcher asked for several ranks, but MPI has one.
    """
    asked = launch_info(environment)
    if size == 1 < asked.size:
        remedy = (
            f"the launcher started {asked.size} processes, MPI knows of one: the launcher and mpi4py belong "
            "to different MPIs. Take the launcher of mpi4py's MPI (python -m mpi4py --mpi-library), or "
            f"srun --mpi=pmix; if you want runs of one process, unset {asked.name}"
        )
        raise UserError(asked.name, asked.size, remedy)


def seconds(name: str) -> float:
    """Return a limit in seconds; 0 for no limit.

    Args:
        name: environment variable, `HANG_S` or `START_S`.

    Raises:
        UserError: its value is not a number of seconds in the allowed range.
    """
    text = os.environ.get(name)
    if text is None:
        return DEFAULTS[name] + (RANK_S * launch_info(os.environ).size if name == START_S else 0.0)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0 <= value <= MOST_S, name, text, f"use seconds, {MOST_S:.0f} at most, or 0 for no limit")
    return value


def is_tolerant() -> bool:
    """Return whether this job runs under fault tolerance, `mpirun --with-ft ulfm`."""
    return os.environ.get(TOLERANT) == "1"


def find_hangs() -> None:
    """Turn on Open MPI's detector of ranks that do not answer, if `MPIFL_HANG_S` is set.

    A thread in each rank sends heartbeats to a neighbour. The ranks broadcast failures themselves, because
    the launcher may not know of them. The detector is off by default: with it, a rank crashed in 3 of 128
    starts of Open MPI 5.0.11.
    """
    if limit := seconds(HANG_S):
        options = {"detector": "1", "detector_thread": "1", "propagator_with_rbcast": "1"}
        options |= {"detector_period": f"{limit / 6}", "detector_timeout": f"{limit}"}
        for name, value in options.items():
            os.environ.setdefault(f"OMPI_MCA_mpi_ft_{name}", value)


def ranks_here(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher started on this host; 0 if it does not say.

    Slurm lists the tasks of each node of a step, as in `2(x3),1`.

    Args:
        environment: environment variables of a rank.
    """
    for name in LOCAL_SIZES:
        if (text := environment.get(name, "")).isdecimal():
            return int(text)
    counts = list[int]()
    for part in environment.get(TASKS_OF_NODES, "").split(","):
        if found := re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = environment.get(NODE, "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else 0


@contextmanager
def starting() -> Iterator[None]:
    """Guard the start of MPI in the `with` block.

    The job ends with a message if MPI does not start within the limit, or if a rank of this host is stopped
    or has ended.
    """
    limit = seconds(START_S)
    if is_tolerant():
        find_hangs()
    if not limit or launch_info(os.environ).size == 1:
        yield
        return
    launcher = own_launcher()
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
    """Wait in the child until the parent has started MPI or has ended; end the job after the limit.

    Time is counted in polls of this process: while a scheduler suspends the whole job, no time passes here.
    """
    parent, above = os.getppid(), _parent_of(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    pause, looks, fault, count, waited = min(POLL_S, limit / LOOKS), _HostPoll(above), "", 0, 0.0
    while not select.select([heard], [], [], pause)[0]:
        if os.getppid() != parent:
            os._exit(0)
        fault, before, waited = looks.fault(), fault, waited + pause
        count = count + 1 if fault and fault == before else int(bool(fault))
        needed = LOOKS if looks.stopped else DEAD_LOOKS
        if count >= needed or waited > limit:
            break
    else:
        os._exit(0)
    time.sleep(min(launch_info(os.environ).rank, 50))  # the first rank prints; the others are killed by then
    if count < needed:
        fault = f"MPI did not come up within {limit:.0f} s ({START_S}): a rank died or hangs"
    if select.select([heard], [], [], 0.0)[0] or os.getppid() != parent:
        os._exit(0)
    print(f"mpifl: {fault}; start the job again", file=sys.stderr, flush=True)
    time.sleep(0.5)  # for the launcher to read it
    if launcher is not None:
        launcher.send(signal.SIGTERM)  # the launcher kills all ranks, stopped ones too
        time.sleep(5.0)
    others = () if launcher is not None else looks.ranks  # srun, say, may let them wait
    for pid in dict.fromkeys((*looks.stopped, *others, parent)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _parent_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


class _HostPoll:
    """Polls the ranks of this host: the child processes of one launcher that run the same command.

    Only the first two ranks of a host poll, so that the cost does not grow with the square of its ranks.

    Attributes:
        size: number of ranks that the launcher started on this host; 0 if it does not say.
        ranks: process ids of the ranks at the last poll.
        stopped: those of them that were stopped.
    """

    def __init__(self, launcher: int) -> None:
        self.launcher, self.most = launcher, 0
        self.ranks, self.stopped = tuple[int, ...](), tuple[int, ...]()
        started = Process.of(launcher).program in PARENTS  # else a shell between launcher and rank, say
        self.size = ranks_here(os.environ) if started else 0
        number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "")
        self.command = self._command(os.getppid()) if number in ("0", "1") else b""

    def _command(self, pid: int) -> bytes:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    def fault(self) -> str:
        """Return what is wrong with a rank of this host, in words; empty if nothing is."""
        if not self.command:
            return ""
        with suppress(OSError, ValueError):
            threads = Path(f"/proc/{self.launcher}/task").glob("*/children")  # several start 64 ranks
            pids = [int(pid) for children in threads for pid in children.read_text().split()]
            self.ranks = ranks = tuple(p for p in pids if self._command(p) == self.command)
            self.stopped = tuple(p for p in ranks if status(p)[0] == STOPPED)
            if self.stopped:
                who = ", ".join(map(str, self.stopped))
                return f"a rank (pid {who}) is stopped and keeps MPI from coming up"
            self.most = max(self.most, len(ranks))
            if len(ranks) < self.most:
                return f"{self.most - len(ranks)} of this host's {self.most} ranks died before MPI was up"
            alive = sum(bool(self._command(p)) for p in pids)  # of any command; a zombie has none
            if alive < self.size:
                return f"{self.size - alive} of this host's {self.size} ranks died before MPI was up"
        return ""


def own_launcher(of_one_job: bool = False) -> Process | None:
    """Return the MPI launcher that started this process; None if another program did.

    Args:
        of_one_job: leave out daemons, which may stay for further jobs.
    """
    above = Process.of(os.getppid())
    known = {*LAUNCHERS} - {*(SERVE_JOBS if of_one_job else ())}
    return above if above.program in known else None


def end_launcher_after(limit: float) -> None:
    """Kill the launcher if it still runs after `limit` seconds: it may wait for lost hosts."""
    launcher = own_launcher()
    if launcher is not None and os.fork() == 0:
        os.setsid()  # the launcher kills everything in the sessions of its ranks
        time.sleep(limit)
        force_to_end((launcher.pid, launcher.start_ticks, launcher.program))
        os._exit(0)


MAIN, DEVICE, AUTO = "main", "device", "auto"  # memory of MPI buffers: `system.mpi_memory`
CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH


def cuda_aware() -> bool:
    """Return whether the MPI library accepts addresses of GPU memory; False if it does not say."""
    from mpi4py import MPI

    library, supported = ctypes.CDLL(MPI.__file__), ctypes.c_int(0)
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        failed = library.MPIX_GPU_query_support(CUDA, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False


def mpirun(ranks: int) -> list[str]:
    """Return the beginning of a command that runs a Python module on several ranks; append its name.

    Raises:
        UserError: there is no mpirun.
    """
    remedy = "is not on the PATH; activate an environment with an MPI"
    require(shutil.which("mpirun") is not None, "PATH", "mpirun", remedy)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 and _is_open_mpi() else []
    return ["mpirun", *root, "-n", str(ranks), sys.executable, "-m"]


def _is_open_mpi() -> bool:
    text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in text or "PRRTE" in text or "prterun" in text
