"""Arrays in files that are mapped into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.testing import assert_array_equal

from mpifl.core.mapped_arrays import release


def resident(path: Path) -> int:
    """Return the kilobytes of a mapped file that this process has in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:"))


def test_pages_that_are_let_go_are_read_again(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(2**18))
    mapped = np.asarray(np.load(path, mmap_mode="c"))
    assert mapped.sum() == 2**17 * (2**18 - 1)
    assert resident(path) >= 2048
    release(mapped[5:])
    assert resident(path) == 0
    assert_array_equal(mapped[:3], [0, 1, 2])


def test_an_array_in_memory_stays_as_it_is():
    own = np.arange(5)
    release(own)
    assert_array_equal(own, [0, 1, 2, 3, 4])
