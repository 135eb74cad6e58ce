"""What a process used, as the kernel counts it: processor time and memory. Linux."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from time import process_time
from typing import Any


def usage() -> dict[str, Any]:
    """Return what this process used so far.

    `cpu`: processor seconds of all its threads. `peak`: VmHWM in bytes, the most that was resident at once;
    unlike ru_maxrss it does not survive exec. `pss`: proportional set size now in bytes, in which a page that
    several processes share counts in parts; 0 where the kernel does not tell.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cpu": process_time(),
        "peak": _kilobytes("status", "VmHWM:") * 1024,
        "pss": _kilobytes("smaps_rollup", "Pss:") * 1024,
    }


def _kilobytes(file: str, field: str) -> int:
    try:
        lines = Path("/proc/self", file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)
