"""Loops in C, built when mpifl is installed where there is a compiler: exact sums and pooling (reductions.c),
and the training of small networks (training.c).

What reductions.c replaces gives the same bits and stays in place for machines without a compiler: ask
`AVAILABLE` first. What training.c trains has last bits of its own: ask `NETWORKS` first. What was built
from other sources than those that lie here is not used: `BUILD` says what is, `PROBLEM` why nothing is.

Every function checks that a tensor is of the kind and length that the loop reads (`ValueError`): a loop that
reads beyond the end returns numbers all the same.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifl.core.devices import CPU

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
VERSION = 5  # of the functions' arguments; as in both files
NO_CLASS, NO_SAMPLE, NO_ROOM = -1, -2, -3  # as in training.c
LAYER_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "layers_run_here": ([], ctypes.c_int),
    "layers_narrow": ([ctypes.c_int], None),
    "layers_room": ([POINTER, COUNT, COUNT], COUNT),
    "layers_forward": ([POINTER, COUNT, *[POINTER] * 3, COUNT, COUNT, POINTER, COUNT], ctypes.c_int),
    "layers_train": (
        [
            POINTER,
            COUNT,
            *[POINTER] * 5,
            COUNT,
            POINTER,
            COUNT,
            COUNT,
            POINTER,
            COUNT,
            ctypes.c_int,
            POINTER,
            COUNT,
        ],
        ctypes.c_double,
    ),
    "layers_move": ([POINTER] * 3 + [COUNT, POINTER, COUNT], None),
}


SOURCES = "reductions.c", "training.c", "training_simd.inc"  # in the order in which setup.py takes their hash
HERE = Path(__file__).parent
INSTALL = "install mpifl again where there is a C compiler (pip install -e . in a checkout)"


class Absent(Exception):
    """Why a library is not used."""


def hash_of_sources(folder: Path = HERE) -> str:
    """Return the hash of the sources in C that lie in a folder; empty where they are not there (a wheel)."""
    files = [folder / name for name in SOURCES]
    if not all(file.is_file() for file in files):
        return ""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _open(name: str, signatures: Mapping[str, tuple[list[Any], Any]], sources: str) -> ctypes.CDLL:
    """Return a library with its signatures.

    Args:
        sources: hash of the sources it must be built from; empty for any.

    Raises:
        Absent: it was not built, or from other sources, or does not load.
    """
    found = next((p for s in EXTENSION_SUFFIXES if (p := HERE / f"{name}{s}").is_file()), None)
    if found is None:
        raise Absent(f"the loops in C were not built: {INSTALL}")
    try:
        library = ctypes.CDLL(str(found))
        for function, (arguments, result) in {**signatures, "build": ([], ctypes.c_char_p)}.items():
            entry = getattr(library, function)
            entry.argtypes, entry.restype = arguments, result
    except OSError as error:
        raise Absent(f"the loops in C do not load ({error}): {INSTALL}") from error
    except AttributeError:
        library = None
    if library is None or library.version() != VERSION or sources not in ("", _built(library)["sources"]):
        raise Absent(f"the loops in C were built from other sources than those in use: {INSTALL}")
    return library


def _built(library: ctypes.CDLL) -> dict[str, str]:
    """Return from what a library was built: `sources` (their hash), `flags`, `compiler`."""
    sources, _, more = library.build().decode(errors="replace").partition("|")
    flags, _, compiler = more.rpartition("|")
    compiler = f"gcc {compiler}" if compiler[:1].isdigit() else compiler  # others say their names
    return {"sources": sources, "flags": flags, "compiler": compiler}


def _open_both() -> tuple[ctypes.CDLL | None, ctypes.CDLL | None, str]:
    """Return both libraries, or neither and why."""
    try:
        sources = hash_of_sources()
        return _open("reductions", SIGNATURES, sources), _open("training", LAYER_SIGNATURES, sources), ""
    except Absent as why:
        return None, None, str(why)


_LIBRARY, _LAYERS, PROBLEM = _open_both()
BUILD: dict[str, str] = {} if _LAYERS is None else _built(_LAYERS)  # sources, flags, compiler
AVAILABLE = _LIBRARY is not None
NETWORKS = _LAYERS is not None and bool(_LAYERS.layers_run_here())
if AVAILABLE and not NETWORKS:
    PROBLEM = "this processor has no fused multiply-add, which the loops in C for networks need"


def _lent(x: torch.Tensor, name: str, dtype: torch.dtype = torch.float32, numel: int | None = None) -> int:
    """Return where the numbers of a tensor begin.

    Raises:
        ValueError: a loop in C cannot read it.
    """
    fits = x.dtype is dtype and x.device == CPU and x.is_contiguous() and numel in (None, x.numel())
    if not fits:
        length = "" if numel is None else f" of {numel} numbers"
        found = f"{x.dtype} {list(x.shape)} on {x.device}{'' if x.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be a contiguous {dtype} tensor{length} on the CPU, got {found}")
    return x.data_ptr()


def _lent_array(x: np.ndarray, name: str, dtype: type, size: int | None = None) -> int:
    """Return where the numbers of an array begin.

    Raises:
        ValueError: a loop in C cannot read it.
    """
    if x.dtype != dtype or not x.flags.c_contiguous or size not in (None, x.size):
        length = "" if size is None else f" of {size} numbers"
        raise ValueError(
            f"{name} must be a contiguous {dtype.__name__} array{length}, got {x.dtype} {x.shape}"
        )
    return x.ctypes.data


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
    weights, magic = np.ascontiguousarray(weights, np.float64), np.ascontiguousarray(magic, np.float64)
    rows, width = sums.shape
    uploads = [u.contiguous() for u in uploads]
    starts = (POINTER * len(uploads))(*(_lent(u, "an upload", numel=width) for u in uploads))
    pointers = (
        _lent(sums, "sums", torch.int64),
        starts,
        _lent_array(weights, "weights", np.float64, rows * len(uploads)),
        _lent_array(magic, "magic", np.float64, rows),
    )
    _call("add_exactly", *pointers, rows, len(uploads), width)


def finish(sums: torch.Tensor, grid: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return sums * grid + kept, added in float64, as float32 [K, b].

    Args:
        sums: int64 [K, b]; kept: float64 [K, b] or None; both contiguous.
        grid: float64 [K].
    """
    rows, width = sums.shape
    _lent(sums, "sums", torch.int64)
    if kept is not None:
        _lent(kept, "kept", torch.float64, sums.numel())
    if len(grid) != rows:
        raise ValueError(f"grid must have {rows} numbers, got {len(grid)}")
    out = torch.empty(sums.shape, dtype=torch.float32, device=CPU)
    for k, spacing in enumerate(grid.tolist()):
        old = None if kept is None else kept[k].data_ptr()
        _call("finish", sums[k].data_ptr(), spacing, old, out[k].data_ptr(), width)
    return out


def peak(x: torch.Tensor) -> float:
    """Return the largest absolute value of a contiguous float32 vector; a NaN where there is one."""
    return float(_call("peak", _lent(x, "a vector"), x.numel()))


def _windows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the shape of images whose windows the loops pool.

    Raises:
        ValueError: their sides are odd, or wider than `WIDEST`.
    """
    n, c, h, w = x.shape
    if h % 2 or w % 2 or w > WIDEST:
        raise ValueError(f"images of {h}x{w} pixels: both sides must be even, the second at most {WIDEST}")
    return n, c, h, w


def max_pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each 2x2 window and where in it that lies, both [n, c, H/2, W/2].

    Args:
        x: float32 [n, c, H, W], contiguous, both sides even, W at most `WIDEST`.
    """
    n, c, h, w = _windows(x)
    images = _lent(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    where = torch.empty_like(out, dtype=torch.uint8)
    if out.numel():
        _call("max_pool", images, out.data_ptr(), where.data_ptr(), n * c * (h // 2), w // 2)
    return out, where


def max_pool_backward(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] by the input of `max_pool` from that by its output."""
    n, c, h, w = grad.shape
    pointers = _lent(grad, "a gradient"), _lent(where, "places", torch.uint8, grad.numel())
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("max_pool_backward", *pointers, out.data_ptr(), n * c * h, w)
    return out


def mean_pool(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each 2x2 window [n, c, H/2, W/2]; `x` as in `max_pool`."""
    n, c, h, w = _windows(x)
    images = _lent(x, "images")
    out = x.new_empty(n, c, h // 2, w // 2)
    _call("mean_pool", images, out.data_ptr(), n * c * (h // 2), w // 2)
    return out


def mean_pool_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n, c, H, W] by the input of `mean_pool` from that by its output."""
    n, c, h, w = grad.shape
    given = _lent(grad, "a gradient")
    out = grad.new_empty(n, c, 2 * h, 2 * w)
    _call("mean_pool_backward", given, out.data_ptr(), n * c * h, w)
    return out


def _call(name: str, *arguments: object) -> Any:
    library = _LIBRARY if name in SIGNATURES else _LAYERS
    assert library is not None, "the caller asked AVAILABLE or NETWORKS"
    return getattr(library, name)(*arguments)


def room(table: np.ndarray, batch: int) -> int:
    """Return how many floats `train` needs to work in.

    Args:
        table: int64 [layers, 10], the fields of `struct layer` in training.c.
    """
    return int(_call("layers_room", _lent_array(table, "table", np.int64), len(table), batch))


def _room_of(scratch: torch.Tensor) -> tuple[int, int]:
    """Return where the room that a network works in begins, and how many floats it is."""
    return _lent(scratch, "scratch"), scratch.numel()


def _layers_of(table: np.ndarray, batch: int) -> tuple[int, int]:
    """Return where a network's table begins, and its length.

    Raises:
        ValueError: there is no sample in a batch.
    """
    if batch < 1:
        raise ValueError(f"a batch must have at least one sample, got {batch}")
    return _lent_array(table, "table", np.int64), len(table)


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
    layers, work = _layers_of(table, batch), _room_of(scratch)
    pixels = len(x) * int(table[0, 1:4].prod())
    pointers = _lent(weights, "weights"), _lent(x, "images", numel=pixels), _lent(out, "outputs")
    if _call("layers_forward", *layers, *pointers, len(x), batch, *work) == NO_ROOM:
        raise ValueError(f"{batch} samples need more room than {len(scratch)} floats")
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
        IndexError: a label is no class, or a number in `order` no sample.
        ValueError: a tensor is of another kind or length.
    """
    layers, work = _layers_of(table, batch), _room_of(scratch)
    x, y = samples
    p, pixels = weights.numel(), len(y) * int(table[0, 1:4].prod())
    pointers = (
        _lent(weights, "weights"),
        _lent(momentum, "momentum", numel=p),
        None if gradient is None else _lent(gradient, "a gradient", numel=p),
        _lent(x, "images", numel=pixels),
        _lent(y, "labels", torch.int64),
        len(y),
        _lent_array(order, "order", np.int64),
    )
    steps = batch, _lent_array(rates, "rates", np.float32, 3), done, last
    total = _call("layers_train", *layers, *pointers, len(order), *steps, *work)
    if total == NO_ROOM:
        raise ValueError(f"{batch} samples need more room than {len(scratch)} floats")
    if total in (NO_CLASS, NO_SAMPLE):
        raise IndexError(f"a {'label is no class' if total == NO_CLASS else 'number is no sample'} of these")
    return float(total)


def narrow(on: bool) -> None:
    """Use a processor's narrower registers from now on, or the widest again: the bits are the same."""
    _call("layers_narrow", on)


def move(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rates: np.ndarray, done: int
) -> None:
    """Take a step of SGD with a gradient [p]; arguments as in `train`."""
    p = gradient.numel()
    pointers = (_lent(v, "a vector", numel=p) for v in (weights, momentum, gradient))
    _call("layers_move", *pointers, p, _lent_array(rates, "rates", np.float32, 3), done)
