"""Mixing of uploads into table rows on one rank that has all uploads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpifl.core.devices import to_main_memory
from mpifl.core.plan import Mixing

from .exact_sum import exact_sum, finish, kept_rows, spacings
from .mixer import check_uploads, column_blocks, parts_of

LOCAL_BLOCK = 1 << 16  # numbers of a block: its int64 sums fit in the L2 cache


def mix_exact(
    mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor], max_abs: np.ndarray
) -> torch.Tensor:
    """Mix on one rank that has all uploads, with the same bits as over ranks; return float32 [K, w].

    Args:
        mixing: the mixing.
        old: the table before the mixing, float32 [K0, w].
        uploads: m tensors, float32, in the order of the weights.
        max_abs: largest absolute value of each upload [m].
    """
    parts, width, blocks = parts_of(uploads, mixing.part), old.shape[1], []
    check_uploads(parts, width, f"mix:{mixing.into}")
    spacing = spacings(mixing.weights, max_abs)
    for columns in column_blocks(width, mixing.num_rows, LOCAL_BLOCK):
        block = [u[columns] for u in parts]
        sums = to_main_memory(exact_sum(block, mixing.weights, spacing, columns.stop - columns.start))
        blocks.append(finish(sums, spacing, kept_rows(mixing.keep, old[:, columns])))
    if not blocks:  # a table without columns
        return old.new_empty(mixing.num_rows, 0)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def mix_float32(mixing: Mixing, old: torch.Tensor, uploads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mix on one rank in float32; return float32 [K, w].

    For a single upload, the order of additions does not matter, and this is faster than `mix_exact`.

    Args:
        mixing: the mixing.
        old: the table before the mixing, float32 [K0, w].
        uploads: m tensors, float32, in the order of the weights.
    """
    parts, out = (
        parts_of(uploads, mixing.part),
        torch.empty(mixing.num_rows, old.shape[1], dtype=torch.float32),
    )
    check_uploads(parts, old.shape[1], f"mix:{mixing.into}")
    for k, row in enumerate(out.unbind()):
        terms = [(parts[j], w) for j, w in enumerate(mixing.weights[k].tolist()) if w]
        if mixing.keep is not None and mixing.keep.ndim == 1:
            terms.append((old[k], float(mixing.keep[k])))
        elif mixing.keep is not None:
            terms += [(old[j], c) for j, c in enumerate(mixing.keep[k].tolist()) if c]
        if not terms:
            row.zero_()
        for i, (x, c) in enumerate(terms):
            row.add_(x, alpha=c) if i else torch.mul(x, c, out=row)
    return out
