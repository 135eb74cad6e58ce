"""Choice of the collective that carries out a mixing, by bytes; `collective_costs` chooses by seconds.

A mixing has weights [K, m]. A rank sends either K partial rows (int64 in the exact mode; `REDUCE`, or
`SCATTER` for a sharded table) or its own uploads (float32; `GATHER`). The choice depends on sizes alone, so
its result is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

REDUCE, GATHER, SCATTER = "reduce", "gather", "scatter"
BLOCK = 1 << 18  # numbers per message of a mixing: 1 to 2 MB, the fastest size measured


def choose(num_rows: int, num_uploads: int, exact: bool = True, sharded: bool = False) -> str:
    """Return the collective with the fewest bytes at the busiest rank.

    Args:
        num_rows: K, number of rows that receive uploads.
        num_uploads: m, number of uploads.
        exact: whether partial rows are int64 (8 bytes per number) rather than float32.
        sharded: whether the rows of the table are stored at the ranks that read them.
    """
    if sharded:
        return SCATTER
    reduce_bytes = num_rows * (8 if exact else 4)
    gather_bytes = num_uploads * 4
    return GATHER if gather_bytes < reduce_bytes else REDUCE


def busiest_bytes(collective: str, num_rows: int, num_uploads: int, d: int, exact: bool = True) -> int:
    """Return the payload bytes that the busiest rank receives in one mixing of rows [num_rows, d]."""
    per_row = d * (8 if exact else 4)
    return num_uploads * d * 4 if collective == GATHER else num_rows * per_row


def is_sharded(num_rows: int, most_readers: int, num_ranks: int) -> bool:
    """Return whether to shard a table over its readers: many rows, each read by one client.

    Args:
        num_rows: K, rows of the table.
        most_readers: largest number of clients that read the same row.
        num_ranks: P, number of ranks.
    """
    return num_ranks > 2 and most_readers <= 1 and num_rows > num_ranks


def far_ranks(nodes: Sequence[int]) -> list[int]:
    """Return the ranks that are not on the server's node; all workers if there are none."""
    return [r for r, node in enumerate(nodes) if node != nodes[0]] or list(range(1, len(nodes)))


class CostModel(Protocol):
    """Chooses the collective of a mixing; see `collective_costs.Costs`."""

    def choose(
        self, rows: int, uploads: int, width: int, ranks: int, exact: bool = True, from_far: int | None = None
    ) -> str:
        """Return `REDUCE` or `GATHER`."""

    def tree(self) -> Mapping[str, Any]:
        """Return all constants as nested mappings, for a file."""
