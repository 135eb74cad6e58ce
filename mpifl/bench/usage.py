"""What a process used, as the kernel counts it: processor time and memory. Linux."""

from __future__ import annotations

import os
import socket
from time import process_time
from typing import Any

from mpifl.core.process import kilobytes, peak_bytes


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
        "peak": peak_bytes(),
        "pss": kilobytes("smaps_rollup", "Pss:") * 1024,
    }
