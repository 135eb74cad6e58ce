"""Loops in C, built when mpifl is installed where there is a compiler: exact sums and pooling (kernels.c),
and the training of small networks (layers.c).

What kernels.c replaces gives the same bits and stays in place for machines without a compiler: ask
`AVAILABLE` first. The networks of layers.c have last bits of their own: ask `NETWORKS` first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import torch

WIDEST = 2048  # pixels in a line
POINTER, COUNT = ctypes.c_void_p, ctypes.c_ssize_t
SIGNATURES: dict[str, tuple[list[Any], Any]] = {  # name -> arguments, result
    "add_exactly": ([POINTER] * 4 + [COUNT] * 3, None),
    "finish": ([POINTER, ctypes.c_double, POINTER, POINTER, COUNT], None),
    "peak": ([POINTER, COUNT], ctypes.c_float),
    "max_pool": ([POINTER] * 3 + [COUNT] * 2, None),
    "max_pool_backward": ([POINTER] * 3 + [COUNT] * 2, None),
    "mean_pool": ([POINTER] * 2 + [COUNT] * 2, None),
    "mean_pool_backward": ([POINTER] * 2 + [COUNT] * 2, None),
}
VERSION = 4  # of the functions' arguments; as in both files
LAYER_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "layers_run_here": ([], ctypes.c_int),
    "layers_narrow": ([ctypes.c_int], None),
    "layers_room": ([POINTER, COUNT, COUNT], COUNT),
    "layers_forward": ([POINTER, COUNT, *[POINTER] * 3, COUNT, COUNT, POINTER], None),
    "layers_train": (
        [POINTER, COUNT, *[POINTER] * 6, COUNT, COUNT, POINTER, COUNT, ctypes.c_int, POINTER],
        ctypes.c_double,
    ),
    "layers_move": ([POINTER] * 3 + [COUNT, POINTER, COUNT], None),
}


def _open(name: str, signatures: Mapping[str, tuple[list[Any], Any]]) -> ctypes.CDLL | None:
    """Return a library with its signatures; None where it was not built, or from older sources."""
    here = Path(__file__).parent
    found = next((p for s in EXTENSION_SUFFIXES if (p := here / f"{name}{s}").is_file()), None)
    try:
        library = ctypes.CDLL(str(found)) if found else None
        for function, (arguments, result) in signatures.items() if library else ():
            entry = getattr(library, function)
            entry.argtypes, entry.restype = arguments, result
        if library and library.version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    return library


_LIBRARY = _open("kernels", SIGNATURES)
_LAYERS = _open("layers", LAYER_SIGNATURES)
AVAILABLE = _LIBRARY is not None
NETWORKS = _LAYERS is not None and bool(_LAYERS.layers_run_here())


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


def finish(sums: torch.Tensor, grid: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return sums * grid + kept, added in float64, as float32 [K, b].

    Args:
        sums: int64 [K, b]; kept: float64 [K, b] or None; both contiguous.
        grid: float64 [K].
    """
    out = torch.empty(sums.shape)
    for k, spacing in enumerate(grid.tolist()):
        old = None if kept is None else kept[k].data_ptr()
        _call("finish", sums[k].data_ptr(), spacing, old, out[k].data_ptr(), sums.shape[1])
    return out


def peak(x: torch.Tensor) -> float:
    """Return the largest absolute value of a contiguous float32 vector; a NaN where there is one."""
    return float(_call("peak", x.data_ptr(), x.numel()))


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


def _call(name: str, *arguments: object) -> Any:
    library = _LIBRARY if name in SIGNATURES else _LAYERS
    assert library is not None, "the caller asked AVAILABLE or NETWORKS"
    return getattr(library, name)(*arguments)


def room(table: np.ndarray, batch: int) -> int:
    """Return how many floats `train` needs to work in.

    Args:
        table: int64 [layers, 10], the fields of `struct layer` in layers.c.
    """
    return int(_call("layers_room", table.ctypes.data, len(table), batch))


def forward(
    table: np.ndarray,
    weights: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Write what a network makes of float32 images [n, ...] to `out` [n, outputs], contiguous; return it.

    Args:
        table, scratch: as in `train`, for `batch` samples at a time.
    """
    pointers = weights.data_ptr(), x.data_ptr(), out.data_ptr()
    _call("layers_forward", table.ctypes.data, len(table), *pointers, len(x), batch, scratch.data_ptr())
    return out


def train(
    table: np.ndarray,
    weights: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor | None,
    samples: tuple[torch.Tensor, torch.Tensor],
    order: np.ndarray,
    batch: int,
    rates: np.ndarray,
    done: int,
    last: bool,
    scratch: torch.Tensor,
) -> float:
    """Take steps of SGD on the samples in `order`; return the sum of the mean losses of the batches.

    Args:
        weights, momentum: float32 [p]; changed.
        gradient: None, or float32 [p], where the gradient of one batch goes while nothing else changes.
        samples: float32 [N, ...] and int64 [N], contiguous.
        order: int64 [n].
        rates: float32 learning rate, momentum, weight decay.
        done: steps taken before. last: whether none comes after these; the momentum is not written then.
        scratch: float32 [`room`].

    Raises:
        IndexError: a label is no class.
    """
    pointers = weights.data_ptr(), momentum.data_ptr(), None if gradient is None else gradient.data_ptr()
    x, y = samples
    data = x.data_ptr(), y.data_ptr(), order.ctypes.data, len(order)
    steps = batch, rates.ctypes.data, done, last
    total = _call("layers_train", table.ctypes.data, len(table), *pointers, *data, *steps, scratch.data_ptr())
    if total == -1:
        raise IndexError("a label is no class of the model")
    return float(total)


def narrow(on: bool) -> None:
    """Use a processor's narrower registers from now on, or the widest again: the bits are the same."""
    _call("layers_narrow", on)


def move(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray, done: int
) -> None:
    """Take a step of SGD with a gradient [p]; arguments as in `train`."""
    pointers = weights.data_ptr(), momentum.data_ptr(), gradient.data_ptr()
    _call("layers_move", *pointers, gradient.numel(), rates.ctypes.data, done)
