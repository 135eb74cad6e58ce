"""A mixing applied by one rank that holds all its uploads.

`mixed_here` gives the same bits as a mixing over many ranks: weighted uploads are rounded to the row's grid
as everywhere else (`exact`); the multiples are carried in float64, whose sums below 2^53 of them are exact.
It works in blocks that stay in a core's cache. `blended_here` takes float32 as it is, six times faster: for
steps of a single upload, which no other engine takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpifl.core.mixing import Mixing
from mpifl.core.parameters import take

from .exact import MAGIC, spacings

BLOCK = 1 << 15  # numbers; three float64 buffers of them


def mixed_here(
    mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor], peaks: np.ndarray
) -> torch.Tensor:
    """Return the new table float32 [K, w].

    Args:
        old: [K0, w].
        uploads: float32, in the order of the weights; peaks: largest absolute value of each.
    """
    mine = [u if mixing.part is None else take(u, mixing.part) for u in uploads]
    grid, width = spacings(mixing.weights, peaks), old.shape[1]
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


def blended_here(mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor]) -> torch.Tensor:
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
