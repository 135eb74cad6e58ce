"""The allocator setting takes hold and leaves the user's own alone; limits of containers count."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mpifl.core import process

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


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3),  # version 2, above
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/docker/x", {"cpu.max": "200000 100000"}, 2),  # the container shows its group as the root
        (
            "5:memory:/\n4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("", {}, 64),
    ],
)
def test_cores_are_limited_by_the_quota_of_control_groups(groups, files, cores, tmp_path, monkeypatch):
    """Files as the kernel writes them; a machine of 64 cores."""
    (tmp_path / "own").write_text(groups + "\n" * bool(groups))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    monkeypatch.setattr(process, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert process.available_cores() == cores


def test_a_quota_of_this_kernel_counts():
    """A control group of version 1, where root may make one: half of all cores, one at least."""
    group = Path("/sys/fs/cgroup/cpu/mpifl-tests")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here ({error.strerror})")
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        (group / "cpu.cfs_period_us").write_text("100000")
        program = "from mpifl.core.process import available_cores as a; print(a())"
        command = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{program}'"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.stdout == "1\n", done.stderr
    finally:
        group.rmdir()
