"""Cost model of the collectives, by which a mixing takes the faster one.

It is the alpha-beta model (Hockney 1994): seconds per call, per message and per byte, plus the time that a
rank takes to weight and add a number. Its constants are given, or measured on the ranks of the job
(`calibration`); measured constants include the effects of the MPI library's algorithms and of the links
between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, log2
from typing import Any

from mpifl.core.options import NonNegativeFloat, Options, PositiveFloat

from .collective_choice import BLOCK, GATHER, REDUCE, choose

BCAST = "bcast"


def blocks_of(height: int, width: int) -> int:
    """Return the number of messages for a matrix [height, width]."""
    return ceil(width / max(1024, BLOCK // max(height, 1)))


@dataclass(frozen=True)
class Line:
    """Cost of a sequence of calls in seconds: once_s + block_s * calls + byte_s * bytes.

    Attributes:
        once_s: seconds for the sequence.
        block_s: seconds for each call.
        byte_s: seconds for each byte.
    """

    once_s: float = 0.0
    block_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, blocks: int, size: int) -> float:
        """Return the seconds of `blocks` calls that move `size` bytes in total."""
        return self.once_s + self.block_s * blocks + self.byte_s * size


@dataclass(frozen=True)
class Costs:
    """Costs of the collectives of a job.

    Attributes:
        latency_s: seconds of an empty message between the server and the farthest worker.
        bytes_s: bytes per second between the two.
        reduce: cost of a reduction; its bytes are those of the block.
        gather: cost of a gather; its bytes are those that arrive from far ranks.
        bcast: cost of a broadcast; its bytes are those of the block.
        term_s: seconds that a rank takes to weight and add one number.
        far: fraction of the workers that are not on the server's node; 1 if all workers are on it.
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
        """Return the seconds of one mixing.

        Args:
            collective: `REDUCE` or `GATHER`.
            rows: K, number of rows that receive uploads.
            uploads: m, number of uploads on all ranks together.
            width: columns of the table.
            ranks: P, number of ranks.
            exact: whether sums are int64.
            from_far: number of uploads on far ranks; None estimates it from `far`.
        """
        if collective == GATHER:
            far = ceil(uploads * self.far) if from_far is None else from_far
            size, terms = far * width * 4, rows * uploads * width
            return self.gather.seconds(blocks_of(uploads, width), size) + self.term_s * terms
        size = rows * width * (8 if exact else 4)
        terms = rows * ceil(uploads / max(1, ranks - 1)) * width
        return self.reduce.seconds(blocks_of(rows, width), size) + self.term_s * terms

    def sharing(self, rows: int, width: int) -> float:
        """Return the seconds that a broadcast of rows [rows, width] to all workers takes."""
        return self.bcast.seconds(rows * ceil(width / (1 << 26)), rows * width * 4)

    def choose(
        self, rows: int, uploads: int, width: int, ranks: int, exact: bool = True, from_far: int | None = None
    ) -> str:
        """Return the faster collective of a mixing, `REDUCE` on a tie; arguments as for `mixing`."""
        size = (rows, uploads, width, ranks, exact, from_far)
        cost = {c: self.mixing(c, *size) for c in (REDUCE, GATHER)}
        return GATHER if cost[GATHER] < cost[REDUCE] else REDUCE

    def tree(self) -> Mapping[str, Any]:
        """Return all constants as nested mappings, for a file."""
        return asdict(self)


def between(latency_s: float, bytes_s: float, ranks: int) -> Costs:
    """Return the costs of collectives if each message takes latency_s + size / bytes_s seconds.

    A reduction and a broadcast are trees of ceil(log2 P) levels; a gather arrives over the server's link.

    Args:
        latency_s: seconds that an empty message takes.
        bytes_s: bytes per second.
        ranks: P, number of ranks.
    """
    levels = tree_levels(ranks)
    tree = Line(0.0, levels * latency_s, levels / bytes_s)
    return Costs(latency_s, bytes_s, tree, Line(0.0, latency_s, 1 / bytes_s), tree)


def tree_levels(ranks: int) -> int:
    """Return the number of levels of a binary tree of `ranks`, which is also the number of barrier steps."""
    return ceil(log2(max(ranks, 2)))


def crossover(costs: Costs | None, rows: int, width: int, ranks: int, exact: bool = True) -> int | None:
    """Return the smallest number of uploads for which a reduction is chosen; None for more than 2^20.

    Args:
        costs: the cost model; None compares the bytes of the busiest rank.
        rows: K, number of rows that receive uploads.
        width: columns of the table.
        ranks: P, number of ranks.
        exact: whether sums are int64.
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


# -- configuration: system.cost ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByBytes(Options):
    """Choose the collective with the fewest bytes at the busiest rank."""


@dataclass(frozen=True)
class Given(Options):
    """Choose the faster collective, assuming that a message takes latency_s + size / bytes_s seconds.

    Attributes:
        latency_s: seconds that an empty message takes.
        bytes_s: bandwidth of a link, bytes per second.
    """

    latency_s: NonNegativeFloat = 2e-5
    bytes_s: PositiveFloat = 1e9


@dataclass(frozen=True)
class Measured(Options):
    """Choose the faster collective by costs measured at the start of a run (1 s on a fast network)."""
