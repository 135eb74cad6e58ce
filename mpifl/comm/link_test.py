"""A test of the links between nodes: latency, bandwidth and correct sums, for each pair of nodes.

A broken link may block a collective for ever, so each exchange has a deadline, after which the job is
aborted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from .transport import Transport

SMALL, LARGE = 1, 1 << 20  # float32 numbers: 4 bytes for the latency, 4 MiB for the bandwidth
REPEATS = 5  # of which the fastest counts: other programs can only add time


class Link(NamedTuple):
    """Measurements of the link between two ranks.

    Attributes:
        ranks: the two ranks, ascending.
        latency_s: seconds that a short message takes.
        bytes_s: bandwidth, bytes per second.
        right: whether all sums were correct.
    """

    ranks: tuple[int, int]
    latency_s: float
    bytes_s: float
    right: bool


def rounds_of_pairs(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs of 0..number - 1, so that each pair occurs in one round.

    This is the circle method for round-robin tournaments: one number stays, the others rotate. There are
    `number` - 1 rounds, or `number` rounds if `number` is odd.
    """
    ring: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    for _ in range(len(ring) - 1):
        meeting = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in meeting if a is not None and b is not None]
        ring.insert(1, ring.pop())


def first_ranks(nodes: tuple[int, ...]) -> list[int]:
    """Return the first rank of each node.

    Args:
        nodes: node of each rank.
    """
    return [nodes.index(node) for node in sorted(set(nodes))]


def measure(transport: Any, limit: float) -> list[Link] | None:
    """Return the links between all pairs of nodes on rank 0, None elsewhere; every rank calls.

    The pairs of a round are measured at the same time.

    Args:
        transport: connects the ranks over MPI.
        limit: seconds for one exchange; if one takes longer, the job is aborted with a message.
    """
    first, found = first_ranks(transport.nodes), []
    for turn in rounds_of_pairs(len(first)):
        for pair in [(first[a], first[b]) for a, b in turn]:
            if transport.rank in pair:
                names = " and ".join(transport.names[r] for r in pair)
                with deadline(transport, limit, f"the exchange between {names}"):
                    found.append(transport.run_guarded(partial(_link, transport, pair)))
        with deadline(transport, limit, "a round of exchanges between pairs of nodes"):
            transport.gather(None, "doctor")
    rows = transport.gather([link for link in found if link.ranks[0] == transport.rank], "doctor")
    return None if rows is None else sorted(link for links in rows for link in links)


def _link(transport: Any, ranks: tuple[int, int]) -> Link:
    """Measure the link between two ranks; both call."""
    group = transport.comm.group.Incl([*ranks])
    comm = transport.comm.Create_group(group)
    there, total = np.arange(LARGE, dtype=np.float32), np.zeros(LARGE, np.float32)
    row = there.copy() if comm.rank == 0 else np.zeros(LARGE, np.float32)
    least = {}
    for size in (SMALL, LARGE):
        seconds = []
        for _ in range(REPEATS):
            comm.Barrier()
            start = perf_counter()
            comm.Bcast(row[:size])
            comm.Reduce(row[:size], total[:size])
            comm.Bcast(total[:SMALL])  # the root of a reduction may return before the other rank
            seconds.append(perf_counter() - start)
        least[size] = min(seconds)
    right = bool((row == there).all()) and (comm.rank > 0 or bool((total == 2 * there).all()))
    right = comm.allreduce(int(right)) == 2
    comm.Free()
    group.Free()
    latency, carried = least[SMALL] / 3, 2 * 4 * (LARGE - SMALL)
    return Link(ranks, latency, carried / max(least[LARGE] - least[SMALL], 1e-9), right)


OTHERS_S = 5.0  # by which other ranks wait longer than rank 0, whose message says more


@contextmanager
def deadline(transport: Transport, seconds: float, what: str) -> Iterator[None]:
    """Abort the job with a message unless the `with` block ends in time.

    A thread watches the time, because the block may be stuck inside MPI.

    Args:
        transport: transport of this rank.
        seconds: time limit; ranks other than 0 wait a little longer.
        what: name of the block in the message; rank 0 adds the ranks that it waits for.
    """

    def end() -> None:
        names = "; ".join(transport.waiting_for())
        text = f"{what} did not end within {seconds:g} s" + (f": no word from {names}" if names else "")
        print(f"mpifl: {text}", file=sys.stderr, flush=True)
        transport.abort_from_any_thread(1)

    timer = threading.Timer(seconds + (0.0 if transport.is_server else OTHERS_S), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
