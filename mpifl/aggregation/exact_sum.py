"""Weighted sums of float32 vectors whose bits depend neither on the order nor on the split of the terms.

Each weighted upload is rounded once to a grid with one spacing per row. The multiples of the spacing are
added as int64, which is exact in any order. The rounding is that of Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation", 2013: adding the constant 1.5 * 2^52 * spacing to a float64 rounds it to a multiple
of the spacing and leaves that multiple in the low bits; the bits of the constant are then subtracted.

A sum takes three steps: `spacings` chooses the grid from the largest absolute values, `exact_sum` adds the
uploads of a rank, and `finish` turns the sums of all ranks into float32 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpifl.core.devices import CPU, to_main_memory
from mpifl.kernels import bindings

MAGIC = 1.5 * 2.0**52
NUMPY_SCRATCH = 1 << 14  # float64 numbers: 128 kB fit in the L2 cache
TORCH_SCRATCH = 1 << 22  # float64 numbers on a GPU: 32 MB


def max_abs(upload: torch.Tensor) -> float:
    """Return the largest absolute value of an upload [b]; NaN if it contains NaN."""
    if bindings.AVAILABLE and upload.device.type == "cpu" and upload.dtype == torch.float32:
        return bindings.max_abs(upload.contiguous())
    low, high = map(float, torch.stack(torch.aminmax(upload)).tolist())  # one GPU synchronisation, not two
    return max(-low, high)


def spacings(weights: np.ndarray, max_abs: np.ndarray) -> np.ndarray:
    """Return the grid spacing g of each row [K]: a power of two with sum_j |w_kj| max|x_j| <= 2^50 g.

    Args:
        weights: float64 [K, m].
        max_abs: largest absolute value of each upload [m].
    """
    bound = np.abs(weights) @ max_abs
    mantissa, exponent = np.frexp(bound)  # exact, unlike log2; mantissa in [0.5, 1)
    exponent = np.where(bound > 0, exponent + 1 - (mantissa == 0.5), 0)
    exponent = np.where(np.isinf(bound), 900, exponent)
    return np.asarray(np.exp2(np.clip(exponent, -900, 900) - 51.0))


def exact_sum(
    uploads: Sequence[torch.Tensor], weights: np.ndarray, spacing: np.ndarray, width: int
) -> torch.Tensor:
    """Return sum_j round(w_kj x_j / g_k), int64 [K, b].

    The uploads are added on their devices. The result stays on the device if they share one; otherwise it is
    in main memory.

    Args:
        uploads: m tensors, float32 [b].
        weights: float64 [K, m].
        spacing: g of each row, float64 [K].
        width: b, length of an upload.
    """
    if not uploads:  # as on rank 0
        return torch.zeros(len(spacing), width, dtype=torch.int64, device=CPU)
    total: torch.Tensor | None = None
    for device in {u.device for u in uploads}:
        chosen = [j for j, u in enumerate(uploads) if u.device == device]
        sums = torch.zeros(len(spacing), width, dtype=torch.int64, device=device)
        _backend(device)(sums, [uploads[j] for j in chosen], weights[:, chosen], MAGIC * spacing)
        total = sums if total is None else to_main_memory(total).add_(to_main_memory(sums))
    assert total is not None
    return total


def _backend(
    device: torch.device,
) -> Callable[[torch.Tensor, list[torch.Tensor], np.ndarray, np.ndarray], None]:
    """Return the function that adds uploads on a device; all backends produce the same bits."""
    if device != CPU:
        return _add_torch
    return bindings.exact_sum_add if bindings.AVAILABLE else _add_numpy


def _add_numpy(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magic: np.ndarray
) -> None:
    """Do what `bindings.exact_sum_add` does, without a compiler; on a CPU, twice as fast as with PyTorch."""
    vectors, width = [u.numpy() for u in uploads], sums.shape[1]
    scratch = np.empty(min(NUMPY_SCRATCH, width))
    for lo in range(0, width, NUMPY_SCRATCH):
        columns = slice(lo, min(lo + NUMPY_SCRATCH, width))
        terms = scratch[: columns.stop - lo]
        bits = terms.view(np.int64)
        for k, row in enumerate(weights):
            chosen, row_sum = np.flatnonzero(row), sums.numpy()[k, columns]
            for j in chosen.tolist():
                np.multiply(vectors[j][columns], row[j], out=terms, dtype=np.float64)
                np.add(terms, magic[k], out=terms)
                np.add(row_sum, bits, out=row_sum)  # wraps around, as does the next line
            row_sum -= _bits(magic[k], len(chosen))


def _add_torch(
    sums: torch.Tensor, uploads: Sequence[torch.Tensor], weights: np.ndarray, magic: np.ndarray
) -> None:
    """Do what `bindings.exact_sum_add` does, on any device, as many uploads at a time as fit in scratch."""
    several, first = max(1, TORCH_SCRATCH // max(1, sums.shape[1])), 0
    scales = torch.from_numpy(weights[weights != 0]).to(sums.device)[:, None]  # row by row
    for k, row in enumerate(weights):
        chosen = np.flatnonzero(row).tolist()
        for lo in range(0, len(chosen), several):
            block = torch.stack([uploads[j] for j in chosen[lo : lo + several]])
            terms = block * scales[first : first + len(block)]  # float64; rounded before the next line adds
            sums[k] += terms.add_(float(magic[k])).view(torch.int64).sum(0)
            first += len(block)
        sums[k] -= int(_bits(magic[k], len(chosen)))


def _bits(value: np.float64, times: int) -> np.int64:
    """Return `times` times the bits of a float64, modulo 2^64."""
    bits = int(value.view(np.int64)) * times
    return np.uint64(bits & (1 << 64) - 1).view(np.int64)


def finish(sums: torch.Tensor, spacing: np.ndarray, kept: torch.Tensor | None) -> torch.Tensor:
    """Return sums * spacing + kept, computed in float64, as float32 [K, b].

    Args:
        sums: sums from `exact_sum`, added over all ranks, int64 [K, b] in main memory.
        spacing: g of each row, float64 [K].
        kept: result of `kept_rows`.
    """
    if bindings.AVAILABLE and sums.is_contiguous() and (kept is None or kept.is_contiguous()):
        return bindings.exact_sum_finish(sums, spacing, kept)
    values = sums.double() * torch.from_numpy(spacing)[:, None]
    return (values if kept is None else values.add_(kept)).float()


def kept_rows(keep: np.ndarray | None, old: torch.Tensor) -> torch.Tensor | None:
    """Return keep @ old, float64 [K, b], added in ascending order of the old rows; None if nothing is kept.

    Args:
        keep: None, factors [K] (each row keeps a part of itself), or a matrix [K, K0].
        old: old rows, float32 [K0, b].
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


def float32_sum(uploads: Sequence[torch.Tensor], weights: np.ndarray, width: int) -> torch.Tensor:
    """Return weights @ uploads, float32 [K, b]; the last bits depend on the order.

    Args:
        uploads: m tensors, float32 [b], in main memory.
        weights: float64 [K, m].
        width: b, length of an upload.
    """
    out = torch.zeros(len(weights), width, dtype=torch.float32)
    for k, row in enumerate(weights):
        for j in np.flatnonzero(row).tolist():
            out[k].add_(uploads[j], alpha=float(row[j]))
    return out
