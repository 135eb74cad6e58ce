"""Files that are mapped into memory: their room is taken when they are made, not when they are written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.lib import format as npy


def reserve(path: Path, size: int) -> None:
    """Give a file room for `size` bytes in all; what it holds stays.

    A map of a file without room ends the process by SIGBUS, without a word, when the disk is full.

    Raises:
        OSError: there is no room; the file is gone.
    """
    try:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def new_array(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Make an .npy file with room for all of an array of zeros, and return it mapped for writing.

    Raises:
        OSError: there is no room; the file is gone.
    """
    described = npy.dtype_to_descr(np.dtype(dtype))
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
        start = file.tell()
    reserve(path, start + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)))
    return npy.open_memmap(path, mode="r+")
