"""The allocator setting: it takes hold, and it leaves the user's own settings alone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from mpifl.core.process import keep_freed
answer, libc = keep_freed(), ctypes.CDLL(None)
libc.malloc.restype, libc.sbrk.restype = ctypes.c_void_p, ctypes.c_void_p
block, top = libc.malloc(16 << 20), libc.sbrk(0)
print(answer, block < top)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
@pytest.mark.parametrize(("mine", "answer"), [({}, "True True"), ({"MALLOC_ARENA_MAX": "1"}, "False False")])
def test_a_large_block_comes_from_the_heap_unless_the_user_says_otherwise(mine, answer, monkeypatch):
    """Below M_MMAP_THRESHOLD (32 MB instead of 128 kB) a block lies below the program break, not in a map."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path), **mine}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == answer, done.stderr
