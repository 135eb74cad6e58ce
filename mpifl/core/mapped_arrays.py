"""Arrays in files that are mapped into memory, with their space reserved on the disk from the start."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy


def reserve(path: Path, size: int, start: int = 0) -> None:
    """Reserve `size` bytes on disk for a file, from `start` on; its content stays.

    Without reserved space, a write to a mapped file on a full disk ends the process by SIGBUS, without a
    message.

    Raises:
        OSError: there is no room; the file is removed.
    """
    try:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), start, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def release(array: np.ndarray) -> None:
    """Let go of the pages of an array that is mapped from a file, if nothing was written to it.

    They are read again at the next access. An array in memory stays as it is.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        with suppress(ValueError, OSError):
            base.madvise(mmap.MADV_DONTNEED)


def new_array(path: Path, dtype: type, shape: tuple[int, ...], rows: np.ndarray | None = None) -> np.ndarray:
    """Make an .npy file with room for all of an array of zeros, and return it mapped for writing.

    Args:
        path: the file.
        dtype: type of the numbers.
        shape: shape of the array.
        rows: the only rows that will ever be written, in ascending order; None for all.

    Raises:
        OSError: there is no room; the file is removed.
    """
    described = npy.dtype_to_descr(np.dtype(dtype))
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
        start = file.tell()
    width = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
    if rows is None:
        reserve(path, start + shape[0] * width)
    else:
        os.truncate(path, start + shape[0] * width)
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            if len(run):
                reserve(path, len(run) * width, start + int(run[0]) * width)
    return npy.open_memmap(path, mode="r+")
