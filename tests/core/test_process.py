"""The allocator setting: it takes hold, and it leaves the user's own settings alone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

HOLES = """
import ctypes, sys
from mpifl.core.process import FreedMemory, keep_freed, kilobytes
keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
freed, blocks = FreedMemory(float(sys.argv[1])), []
for _ in range(64):  # large ones, and small ones that stay between them
    blocks.append(libc.malloc(1 << 20))
    ctypes.memset(blocks[-1], 1, 1 << 20)
    libc.malloc(64)
for block in blocks:
    libc.free(block)
before = kilobytes("smaps_rollup", "Pss_Anon:")
answer = freed.give_back()
print(answer, before - kilobytes("smaps_rollup", "Pss_Anon:") > 60 << 10)
"""
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
@pytest.mark.parametrize(
    ("every", "mine", "answer"),
    [(0, {}, "True True"), (60, {}, "False False"), (0, {"MALLOC_ARENA_MAX": "1"}, "False False")],
)
def test_holes_between_small_blocks_go_back_to_the_system_when_that_is_due(every, mine, answer):
    """The program frees 64 MB in 64 blocks; at least 60 MB must be given back, or none."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path), **mine}
    command = [sys.executable, "-c", HOLES, str(every)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == answer, done.stderr
