"""Weighted sums of float32 vectors that are exact in any order.

Each weighted upload is rounded once to a grid with one spacing per row, and whole multiples of the grid are
added as int64: the sum does not depend on the order or on how uploads were split over ranks. Adding the
constant 1.5 * 2^52 * g to a float64 rounds it to a multiple of g and leaves that multiple in the low bits, so
the integer is read off with one subtraction (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation",
2013, for the rounding).

A mixing applied by one rank that holds all its uploads.

`mix_exact` gives the same bits as a mixing over many ranks: weighted uploads are rounded to the row's grid
as everywhere else (`exact`); the multiples are carried in float64, whose sums below 2^53 of them are exact.
It works in blocks that stay in a core's cache. `mix_float32` takes float32 as it is, six times faster: for
steps of a single upload, which no other engine takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpifl.core.devices import CPU
from mpifl.core.mixing import Mixing
from mpifl.core.parameters import take
from mpifl.kernels import bindings

MAGIC = 1.5 * 2.0**52
SCRATCH = 1 << 14  # float64 numbers of scratch: 128 kB stay within a core's second cache
SCRATCH_THERE = 1 << 22  # the same on a device: 32 MB


def peak(upload: torch.Tensor) -> float:
    """Return the largest absolute value of an upload [b]; a NaN where there is one."""
    if bindings.AVAILABLE and upload.device.type == "cpu" and upload.dtype == torch.float32:
        return bindings.max_abs(upload.contiguous())
    low, high = torch.aminmax(upload)
    return max(-float(low), float(high))


def spacings(weights: np.ndarray, max_abs: np.ndarray) -> np.ndarray:
    """Return the grid spacing g [K] of each row: a power of two with sum_j |w_kj| max|x_j| <= 2^50 g.

    Args:
        weights: float64 [K, m].
        max_abs: largest absolute value of each upload [m].
    """
    bound = np.abs(weights) @ max_abs
    half, exponent = np.frexp(bound)  # not log2, which rounds: bound = half * 2^exponent, half in [0.5, 1)
    exponent = np.where(bound > 0, exponent + 1 - (half == 0.5), 0)
    exponent = np.where(np.isinf(bound), 900, exponent)
    return np.asarray(np.exp2(np.clip(exponent, -900, 900) - 51.0))


def partial_sums(
    uploads: Sequence[torch.Tensor], weights: np.ndarray, grid: np.ndarray, out: torch.Tensor
) -> torch.Tensor:
    """Write sum_j round(w_kj x_j / g_k) of these uploads into `out` int64 [K, b] and return it.

    Args:
        uploads: float32 [b] each, on the device of `out`.
        weights: float64 [K, len(uploads)].
        grid: spacing of each row [K].
    """
    out.zero_()
    if out.device != CPU:
        _add_there(out, uploads, weights, MAGIC * grid)
    elif bindings.AVAILABLE:
        bindings.exact_sum_add(out, uploads, weights, MAGIC * grid)
    else:
        _add(out.numpy(), [u.numpy() for u in uploads], weights, MAGIC * grid)
    return out


def _add(sums: np.ndarray, vectors: Sequence[np.ndarray], weights: np.ndarray, magics: np.ndarray) -> None:
    """Do what `bindings.exact_sum_add` does."""
    width = sums.shape[1]
    scratch = np.empty(min(SCRATCH, width))
    for lo in range(0, width, SCRATCH):
        columns = slice(lo, min(lo + SCRATCH, width))
        terms = scratch[: columns.stop - lo]
        bits = terms.view(np.int64)
        for k, row in enumerate(weights):
            chosen, row_sum, magic = np.flatnonzero(row), sums[k, columns], float(magics[k])
            for j in chosen.tolist():
                np.multiply(vectors[j][columns], row[j], out=terms, dtype=np.float64)
                np.add(terms, magic, out=terms)
                np.add(row_sum, bits, out=row_sum)  # wraps around; so does what is taken off
            if len(chosen):
                row_sum -= _bits(magic, len(chosen))


def _add_there(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magics: np.ndarray
) -> None:
    """Do what `bindings.exact_sum_add` does, on any device, as many uploads at a time as scratch allows."""
    some, start = max(1, SCRATCH_THERE // max(1, sums.shape[1])), 0
    scales = torch.from_numpy(weights[weights != 0]).to(sums.device)[:, None]  # row by row
    for row_sum, row, magic in zip(sums.unbind(), weights, magics.tolist(), strict=True):
        chosen = np.flatnonzero(row).tolist()
        for lo in range(0, len(chosen), some):
            block = torch.stack([uploads[j] for j in chosen[lo : lo + some]])
            terms = block * scales[start : start + len(block)]  # float64; rounded before the next line adds
            row_sum += terms.add_(magic).view(torch.int64).sum(0)
            start += len(block)
        row_sum -= int(_bits(magic, len(chosen)))


def _bits(magic: float, times: int) -> np.int64:
    """Return `times` times the bits of a float64, modulo 2^64."""
    bits = int(np.float64(magic).view(np.int64)) * times
    return np.uint64(bits & (1 << 64) - 1).view(np.int64)


def sums_by_device(
    uploads: Sequence[torch.Tensor], weights: np.ndarray, grid: np.ndarray, width: int
) -> list[torch.Tensor]:
    """Return the grid sums int64 [K, width] of the uploads on each device, made there; in main memory, where
    there are none. Arguments as for `partial_sums`.
    """
    out = []
    for device in {u.device for u in uploads} or {CPU}:
        here = [j for j, u in enumerate(uploads) if u.device == device]
        block = torch.empty(len(grid), width, dtype=torch.int64, device=device)
        out.append(partial_sums([uploads[j] for j in here], weights[:, here], grid, block))
    return out


def finish(sums: torch.Tensor, grid: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return new rows float32 [K, b] from the grid sums int64 [K, b] and what was kept float64 [K, b]."""
    if bindings.AVAILABLE and sums.is_contiguous() and (kept is None or kept.is_contiguous()):
        return bindings.exact_sum_finish(sums, grid, kept)
    values = sums.double() * torch.from_numpy(grid)[:, None]
    return (values if kept is None else values.add_(kept)).float()


def kept_rows(keep: np.ndarray | None, old: torch.Tensor) -> torch.Tensor | None:
    """Return keep @ old in float64 [K, b], summed row by row in ascending order; None where nothing is kept.

    Args:
        keep: None, [K] or [K, K0].
        old: float32 [K0, b].
    """
    if keep is None:
        return None
    if keep.ndim == 1:
        return old.double() * torch.from_numpy(keep)[:, None]
    out = torch.zeros(len(keep), old.shape[1], dtype=torch.float64)
    for k, row in enumerate(keep):
        for j in np.flatnonzero(row):
            out[k] += old[j].double() * float(row[j])
    return out


def fast_sums(uploads: Sequence[torch.Tensor], weights: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """Write weights @ uploads in float32 into `out` [K, b]: half the bytes, last bits depend on the split."""
    out.zero_()
    for k, row in enumerate(weights):
        for j in np.flatnonzero(row).tolist():
            out[k].add_(uploads[j], alpha=float(row[j]))
    return out


BLOCK = 1 << 15  # numbers; three float64 buffers of them


def mix_exact(
    mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor], max_abs: np.ndarray
) -> torch.Tensor:
    """Return the new table float32 [K, w].

    Args:
        old: [K0, w].
        uploads: float32, in the order of the weights; max_abs: largest absolute value of each.
    """
    mine = [u if mixing.part is None else take(u, mixing.part) for u in uploads]
    grid, width = spacings(mixing.weights, max_abs), old.shape[1]
    out = torch.empty(mixing.num_rows, width)
    scratch = torch.empty(3, min(BLOCK, width), dtype=torch.float64)
    for lo in range(0, width, BLOCK):
        columns = slice(lo, min(lo + BLOCK, width))
        total, kept, term = scratch[:, : columns.stop - lo]
        for k, weights in enumerate(mixing.weights):
            _sum(total, term, mine, weights, MAGIC * float(grid[k]), columns)
            if mixing.keep is not None:
                whole = mixing.keep if mixing.keep.ndim == 2 else None
                row = {k: float(mixing.keep[k])} if whole is None else _nonzero(whole[k])
                total.add_(_kept(kept, term, old, row, columns))
            out[k, columns] = total
    return out


def mix_float32(mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the new table float32 [K, w], summed in float32."""
    out = torch.empty(mixing.num_rows, old.shape[1])
    for k, row in enumerate(out.unbind()):
        terms = [
            (uploads[j] if mixing.part is None else take(uploads[j], mixing.part), w)
            for j, w in _nonzero(mixing.weights[k]).items()
        ]
        if mixing.keep is not None:
            full = mixing.keep.ndim == 2
            stays = _nonzero(mixing.keep[k]) if full else {k: float(mixing.keep[k])}
            terms += [(old[j], c) for j, c in stays.items()]
        if not terms:
            row.zero_()
        for i, (x, c) in enumerate(terms):
            row.add_(x, alpha=c) if i else torch.mul(x, c, out=row)
    return out


def _nonzero(row: np.ndarray) -> dict[int, float]:
    return {j: value for j, value in enumerate(row.tolist()) if value}


def _sum(
    total: torch.Tensor,
    term: torch.Tensor,
    uploads: Sequence[torch.Tensor],
    weights: np.ndarray,
    magic: float,
    columns: slice,
) -> None:
    """Write the sum of the weighted uploads, each rounded to the grid, into `total`."""
    target = total
    for j, w in _nonzero(weights).items():
        target.copy_(uploads[j][columns]).mul_(w).add_(magic).sub_(magic)
        if target is term:
            total.add_(term)
        target = term
    if target is total:
        total.zero_()


def _kept(
    kept: torch.Tensor, term: torch.Tensor, old: torch.Tensor, row: dict[int, float], columns: slice
) -> torch.Tensor:
    """Return what stays of the old rows, summed in ascending order of rows."""
    target = kept
    for j, c in row.items():
        target.copy_(old[j, columns]).mul_(c)
        if target is term:
            kept.add_(term)
        target = term
    return kept.zero_() if target is kept else kept
