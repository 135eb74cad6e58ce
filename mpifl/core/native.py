"""Inner loops in C (kernels.c), built when mpifl is installed where there is a compiler.

What they replace gives the same bits and stays in place for machines without one: ask `AVAILABLE` first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch

WIDEST = 2048  # pixels in a line
POINTER, COUNT = ctypes.c_void_p, ctypes.c_ssize_t
SIGNATURES: dict[str, tuple[int, int]] = {  # name -> pointers, counts
    "add_exactly": (4, 3),
    "max_pool": (3, 2),
    "max_pool_backward": (3, 2),
    "mean_pool": (2, 2),
    "mean_pool_backward": (2, 2),
}


def _open() -> ctypes.CDLL | None:
    """Return the library with its signatures; None where it was not built, or from older sources."""
    here = Path(__file__).parent
    found = next((p for s in EXTENSION_SUFFIXES if (p := here / f"kernels{s}").is_file()), None)
    try:
        library = ctypes.CDLL(str(found)) if found else None
        for name, (pointers, counts) in SIGNATURES.items() if library else ():
            function = getattr(library, name)
            function.argtypes, function.restype = [POINTER] * pointers + [COUNT] * counts, None
    except (OSError, AttributeError):
        return None
    return library


_LIBRARY = _open()
AVAILABLE = _LIBRARY is not None


def add_exactly(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magic: np.ndarray
) -> None:
    """Add uploads to grid sums; see `comm.exact.partial_sums`.

    Args:
        sums: int64 [K, b], contiguous; changed.
        uploads: float32 [b] each.
        weights: float64 [K, len(uploads)].
        magic: 1.5 * 2^52 times the grid spacing of each row, float64 [K].
    """
    uploads = [u.contiguous() for u in uploads]
    weights, magic = np.ascontiguousarray(weights, np.float64), np.ascontiguousarray(magic, np.float64)
    starts = (POINTER * len(uploads))(*(u.data_ptr() for u in uploads))
    pointers = sums.data_ptr(), starts, weights.ctypes.data, magic.ctypes.data
    _call("add_exactly", *pointers, len(weights), len(uploads), sums.shape[1])


def max_pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each 2x2 window and where in it that lies, both [n, c, H/2, W/2].

    Args:
        x: float32 [n, c, H, W], contiguous, both sides even, W at most `WIDEST`.
    """
    n, c, h, w = x.shape
    out = x.new_empty(n, c, h // 2, w // 2)
    where = torch.empty_like(out, dtype=torch.uint8)
    _call("max_pool", x.data_ptr(), out.data_ptr(), where.data_ptr(), n * c * (h // 2), w // 2)
    return out, where


def max_pool_backward(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] by the input of `max_pool` from that by its output."""
    n, c, h, w = grad.shape
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("max_pool_backward", grad.data_ptr(), where.data_ptr(), out.data_ptr(), n * c * h, w)
    return out


def mean_pool(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each 2x2 window [n, c, H/2, W/2]; `x` as in `max_pool`."""
    n, c, h, w = x.shape
    out = x.new_empty(n, c, h // 2, w // 2)
    _call("mean_pool", x.data_ptr(), out.data_ptr(), n * c * (h // 2), w // 2)
    return out


def mean_pool_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] by the input of `mean_pool` from that by its output."""
    n, c, h, w = grad.shape
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("mean_pool_backward", grad.data_ptr(), out.data_ptr(), n * c * h, w)
    return out


def _call(name: str, *arguments: object) -> None:
    assert _LIBRARY is not None, "the caller asked AVAILABLE"
    getattr(_LIBRARY, name)(*arguments)
