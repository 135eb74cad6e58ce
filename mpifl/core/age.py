"""How long this process has been there."""

from __future__ import annotations

import os
import time


def age() -> float:
    """Return the seconds since this process began, to a hundredth; Linux."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # starttime of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
