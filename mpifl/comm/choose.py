"""Which collective carries a mixing: ship the short side of W.

`weights` is [K, m]. A rank can send K partial rows (int64 in the exact mode) or its own uploads (float32).
Pure
arithmetic on sizes: the same answer on every rank, tested by a table without MPI.
"""

from __future__ import annotations

REDUCE, GATHER, SCATTER = "reduce", "gather", "scatter"
COLLECTIVES = (REDUCE, GATHER, SCATTER)


def choose(num_rows: int, num_uploads: int, exact: bool = True, spread: bool = False) -> str:
    """Return the collective that puts the fewest bytes on the busiest rank.

    Args:
        num_rows: K, rows that receive anything.
        num_uploads: m.
        exact: partial rows are int64 (8 bytes a number) rather than float32.
        spread: the table's rows live at the ranks that read them, so that no rank needs them all.
    """
    if spread:
        return SCATTER
    reduce_bytes = num_rows * (8 if exact else 4)
    gather_bytes = num_uploads * 4
    return GATHER if gather_bytes < reduce_bytes else REDUCE


def busiest_bytes(collective: str, num_rows: int, num_uploads: int, d: int, exact: bool = True) -> int:
    """Return the payload bytes that the busiest rank receives for one mixing."""
    per_row = d * (8 if exact else 4)
    return num_uploads * d * 4 if collective == GATHER else num_rows * per_row


def is_spread(num_rows: int, most_readers: int, num_ranks: int) -> bool:
    """Return whether a table's rows should live with their readers: many rows, each read by one client."""
    return num_ranks > 2 and most_readers <= 1 and num_rows > num_ranks
