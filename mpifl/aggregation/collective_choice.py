"""What a collective costs in seconds: a start for the call, one for each message, and a time per byte.

The alpha-beta model (Hockney 1994), with a term for the server's own work. Where the costs are measured the
three terms of each collective are fitted to calls on the very ranks of the job, so that the library's
algorithms and the links between nodes are in them.

Which collective carries a mixing: ship the short side of W.

`weights` is [K, m]. A rank can send K partial rows (int64 in the exact mode) or its own uploads (float32).
Pure
arithmetic on sizes: the same answer on every rank, tested by a table without MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, log2
from typing import Any

from mpifl.core.errors import require

BLOCK = 1 << 18  # numbers per message of a mixing: 1 to 2 MB, which measures fastest
BCAST = "bcast"


def blocks_of(height: int, width: int) -> int:
    """Return in how many messages [height, width] numbers travel."""
    return ceil(width / max(1024, BLOCK // max(height, 1)))


@dataclass(frozen=True)
class Line:
    """Seconds of a sequence of calls: once_s + block_s * calls + byte_s * bytes."""

    once_s: float = 0.0
    block_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, blocks: int, size: int) -> float:
        """Return the time of `blocks` calls that move `size` bytes in all."""
        return self.once_s + self.block_s * blocks + self.byte_s * size


@dataclass(frozen=True)
class Costs:
    """What the calls of a job cost.

    Attributes:
        latency_s, bytes_s: of one message between the server and the farthest worker.
        reduce, gather, bcast: of the collectives; bytes are the block's, for a gather all that arrives from
            far ranks.
        term_s: seconds a rank needs to weigh and add one number.
        far: share of the workers that are on other nodes than the server; 1 where all share its node.
    """

    latency_s: float
    bytes_s: float
    reduce: Line
    gather: Line
    bcast: Line
    term_s: float = 0.0
    far: float = 1.0

    def mixing(
        self,
        collective: str,
        rows: int,
        uploads: int,
        width: int,
        ranks: int,
        exact: bool = True,
        from_far: int | None = None,
    ) -> float:
        """Return the seconds of one mixing of [rows, width] numbers.

        Args:
            uploads: m, on all ranks together. ranks: P. from_far: uploads on far ranks; None: their share.
        """
        if collective == GATHER:
            distant = ceil(uploads * self.far) if from_far is None else from_far
            size, terms = distant * width * 4, rows * uploads * width
            return self.gather.seconds(blocks_of(uploads, width), size) + self.term_s * terms
        size = rows * width * (8 if exact else 4)
        terms = rows * ceil(uploads / max(1, ranks - 1)) * width
        return self.reduce.seconds(blocks_of(rows, width), size) + self.term_s * terms

    def sharing(self, rows: int, width: int) -> float:
        """Return the seconds in which all workers get so many rows."""
        return self.bcast.seconds(rows * ceil(width / (1 << 26)), rows * width * 4)

    def choose(
        self,
        rows: int,
        uploads: int,
        width: int,
        ranks: int,
        exact: bool = True,
        from_far: int | None = None,
    ) -> str:
        """Return the faster collective of a mixing; a tie goes to the reduction."""
        size = (rows, uploads, width, ranks, exact, from_far)
        cost = {c: self.mixing(c, *size) for c in (REDUCE, GATHER)}
        return GATHER if cost[GATHER] < cost[REDUCE] else REDUCE

    def tree(self) -> Mapping[str, Any]:
        """Return all figures, for a file."""
        return asdict(self)


def far_ranks(nodes: Sequence[int]) -> list[int]:
    """Return the ranks on other nodes than the server, all workers where there are none."""
    return [r for r, node in enumerate(nodes) if node != nodes[0]] or list(range(1, len(nodes)))


def between(latency_s: float, bytes_s: float, ranks: int) -> Costs:
    """Return the costs of `ranks` ranks whose messages take latency_s + size / bytes_s each.

    A reduction and a broadcast are trees of ceil(log2 P) levels; a gather arrives over the server's link.
    """
    levels = max(1, ceil(log2(max(ranks, 2))))
    tree = Line(0.0, levels * latency_s, levels / bytes_s)
    return Costs(latency_s, bytes_s, tree, Line(0.0, latency_s, 1 / bytes_s), tree)


def crossover(costs: Costs | None, rows: int, width: int, ranks: int, exact: bool = True) -> int | None:
    """Return the smallest number of uploads from which on the reduction is at least as fast; None: never.

    Without costs the one with fewer bytes at the busiest rank counts.
    """

    def reduces(m: int) -> bool:
        if costs is None:
            return choose(rows, m, exact) == REDUCE
        return costs.choose(rows, m, width, ranks, exact) == REDUCE

    high = 1
    while not reduces(high):
        high *= 2
        if high > 1 << 20:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reduces(middle) else (middle, high)
    return high


# -- which costs choose the collective: the section system.cost ----------------------------------------------


@dataclass(frozen=True)
class ByBytes:
    """The fewest bytes at the busiest rank."""


@dataclass(frozen=True)
class Given:
    """Messages take latency_s + size / bytes_s each.

    Attributes:
        latency_s: seconds. bytes_s: bytes per second.
    """

    latency_s: float = 2e-5
    bytes_s: float = 1e9

    def __post_init__(self) -> None:
        require(self.latency_s >= 0, "latency_s", self.latency_s, "take 0 or more seconds")
        require(self.bytes_s > 0, "bytes_s", self.bytes_s, "take a positive rate")


@dataclass(frozen=True)
class Measured:
    """A sweep over sizes at the start of a run, of a second on a fast network."""


COSTS: dict[str, type] = {"bytes": ByBytes, "given": Given, "measured": Measured}


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


def is_sharded(num_rows: int, most_readers: int, num_ranks: int) -> bool:
    """Return whether a table's rows should live with their readers: many rows, each read by one client."""
    return num_ranks > 2 and most_readers <= 1 and num_rows > num_ranks
