"""How the C library treats memory that was freed."""

from __future__ import annotations

import ctypes
import os
import platform

SETTINGS = {-1: 2_000_000_000, -2: 64 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed() -> bool:
    """Have glibc keep freed memory for the next tensor instead of giving it back to the system each time.

    Returns:
        False where there is no glibc, or where MALLOC_* variables say what the user wants.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(option, value) == 1 for option, value in SETTINGS.items())
