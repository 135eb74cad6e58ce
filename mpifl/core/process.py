"""This process: what started it, its memory and that of its machine, and the seconds since it began."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

from .errors import require

SETTINGS = {-1: 2_000_000_000, -2: 64 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD

# variables of launchers: the number of ranks
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
LAUNCHED = (*SIZES, "PMI_RANK", "PMIX_RANK")  # a launcher sets one of them


def launched() -> bool:
    """Return whether an MPI launcher started this process."""
    return any(name in os.environ for name in LAUNCHED)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes (VmHWM); 0 if the kernel does not report it.

    Unlike ru_maxrss it does not survive exec.
    """
    return kilobytes("status", "VmHWM:") * 1024


def kilobytes(file: str, field: str) -> int:
    """Return a field of a file below /proc/self, 0 where there is none."""
    try:
        lines = Path("/proc/self", file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use at once: those of its mask, or a container's quota if lower.

    A quota of 2.5 cores counts as 2, one below 1 as 1.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota())))


def _quota() -> float:
    """Return the least processor quota of this process's control groups, in cores."""
    least = float("inf")
    for folder in _control_groups("cpu"):
        try:
            if (file := folder / "cpu.max").exists():  # version 2: `max 100000` or `50000 100000`
                quota, period = file.read_text().split()
            else:
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                least = min(least, int(quota) / int(period))
        except (OSError, ValueError):  # the root has none
            continue
    return least


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group of a controller, and of those above it.

    A container may show its own group as the root, but name it by its path on the host; then only the root is
    returned.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, names, place = line.split(":", 2)
        if number == "0" or controller in names.split(","):
            root = CGROUPS if number == "0" else CGROUPS / names
            own = root / place.lstrip("/")
            found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return found


def machine_bytes() -> int:
    """Return the memory of this machine in bytes, or a lower limit of its container or address space."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), getrlimit(RLIMIT_AS)[0]]
    for folder in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # ValueError: `max`
                limits.append(int((folder / name).read_text()))
    return min(limit for limit in limits if limit != RLIM_INFINITY)


def check_memory(key: str, count: int, size: int) -> None:
    """Check that this machine has enough memory for a number of objects.

    Args:
        key: configuration key that sets their number.
        count: number of objects.
        size: least number of bytes that each takes.

    Raises:
        UserError: they do not fit.
    """
    need, has = count * size, machine_bytes()
    remedy = f"they take {need:,} bytes or more, and this machine has {has:,}; use fewer"
    require(need <= has, key, count, remedy)


def keep_freed() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system each time.

    Returns:
        False if there is no glibc, if MALLOC_* variables are set, or if glibc refuses the settings.
    """
    if not _may_set_allocator():
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(option, value) == 1 for option, value in SETTINGS.items())


def _may_set_allocator() -> bool:
    return platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ)


class FreedMemory:
    """Returns freed memory to the system now and then, in a process that keeps it (`keep_freed`).

    The vectors of a round lie between small objects that stay. Once the vectors are freed, the holes are
    often too small for the next ones, and the heap grows. Returning the pages of all holes takes a
    millisecond.

    Args:
        every_s: Seconds between two returns.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s, self._last = every_s, time.monotonic()
        self._trim = ctypes.CDLL(None).malloc_trim if _may_set_allocator() else None

    def give_back(self) -> bool:
        """Return freed pages to the system if that is due; return whether it was."""
        if self._trim is None or time.monotonic() - self._last < self.every_s:
            return False
        self._trim(0)
        self._last = time.monotonic()
        return True


def age() -> float:
    """Return the seconds since this process began, in steps of 0.01 s (Linux)."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # starttime of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
