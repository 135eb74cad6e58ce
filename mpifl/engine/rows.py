"""What is read of a table, and how far an upload is from its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mpifl.comm.exact import kept_rows


def read_rows(
    rows: Callable[[str, list[int]], torch.Tensor], name: str, which: tuple[int, ...] | np.ndarray
) -> torch.Tensor:
    """Return what is downloaded of a table [r, w]: rows, or one mixture, summed in ascending order of
    rows.
    """
    if not isinstance(which, np.ndarray):
        return rows(name, list(which))
    used = np.flatnonzero(which)
    mixed = kept_rows(which[None, used], rows(name, used.tolist()))
    assert mixed is not None
    return mixed.float()


def rows_of(which: tuple[int, ...] | np.ndarray) -> list[int]:
    """Return the numbers of the rows a download takes part of."""
    return np.flatnonzero(which).tolist() if isinstance(which, np.ndarray) else list(which)


def row_distances(upload: torch.Tensor, rows: torch.Tensor, p: int) -> np.ndarray:
    """Return the distances [K] of an upload [d] to rows [K, d], over the first `p` numbers."""
    return np.array([float((upload[:p] - row[:p]).double().norm()) for row in rows])
