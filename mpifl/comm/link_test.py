"""Collectives between one rank of each pair of nodes: does every link carry them, and how fast?

A limit for what all ranks do together, where nobody can say what comes of a link that is broken.
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
REPEATS = 5  # the least counts: other programs only ever add


class Link(NamedTuple):
    """What was measured between two ranks: seconds of a short message, bytes a second, right sums."""

    ranks: tuple[int, int]
    latency_s: float
    bytes_s: float
    right: bool


def turns(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of so many players, turn by turn: each pair once, each player at most once in a turn.

    The circle method: one player stays, the others go round; n - 1 turns, or n where n is odd.
    """
    ring: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    for _ in range(len(ring) - 1):
        meeting = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in meeting if a is not None and b is not None]
        ring.insert(1, ring.pop())


def leaders(nodes: tuple[int, ...]) -> list[int]:
    """Return the first rank of each node."""
    return [nodes.index(node) for node in sorted(set(nodes))]


def measure(transport: Any, limit: float) -> list[Link] | None:
    """Return the link of every pair of nodes on rank 0; every rank calls. Pairs of a turn go together; the
    job ends with a message where one takes more than `limit` seconds.
    """
    first, found = leaders(transport.nodes), []
    for turn in turns(len(first)):
        for pair in [(first[a], first[b]) for a, b in turn]:
            if transport.rank in pair:
                names = " and ".join(transport.names[r] for r in pair)
                with within(transport, limit, f"the exchange between {names}"):
                    found.append(transport.guard(partial(_link, transport, pair)))
        with within(transport, limit, "a turn of exchanges between pairs of nodes"):
            transport.gather(None, "doctor")
    rows = transport.gather([link for link in found if link.ranks[0] == transport.rank], "doctor")
    return None if rows is None else sorted(link for links in rows for link in links)


def _link(transport: Any, ranks: tuple[int, int]) -> Link:
    """Return the link between this rank and another; both call."""
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
            comm.Bcast(total[:SMALL])  # the root of a reduction may be through before the other is
            seconds.append(perf_counter() - start)
        least[size] = min(seconds)
    right = bool((row == there).all()) and (comm.rank > 0 or bool((total == 2 * there).all()))
    right = comm.allreduce(int(right)) == 2
    comm.Free()
    group.Free()
    latency, carried = least[SMALL] / 3, 2 * 4 * (LARGE - SMALL)
    return Link(ranks, latency, carried / max(least[LARGE] - least[SMALL], 1e-9), right)


OTHERS_S = 5.0  # rank 0 knows more, and speaks first


@contextmanager
def within(transport: Transport, seconds: float, what: str) -> Iterator[None]:
    """End the job with a message unless the body ends in time: in a thread, for the body may be inside MPI.

    Args:
        what: the body, in words; rank 0 adds whom it waits for.
    """

    def end() -> None:
        names = "; ".join(transport.awaited())
        text = f"{what} did not end within {seconds:g} s" + (f": no word from {names}" if names else "")
        print(f"mpifl: {text}", file=sys.stderr, flush=True)
        transport.give_up(1)

    timer = threading.Timer(seconds + (0.0 if transport.is_server else OTHERS_S), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
