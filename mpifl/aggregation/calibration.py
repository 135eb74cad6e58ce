"""Measurement of the cost of collectives on the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpifl.comm.transport import Transport

from .collective_choice import BLOCK, GATHER, REDUCE, far_ranks
from .collective_costs import BCAST, Costs, Given, Line, Measured, between
from .exact_sum import exact_sum

SMALL, LARGE = 1 << 10, 1 << 17  # int64 numbers of a block: 8 kB and 1 MB
SHAPES = ((1, SMALL), (8, SMALL), (1, LARGE), (6, LARGE))  # (calls in a row, numbers per call)
REPEATS = 5  # of which the fastest counts: other programs can only add time
PURPOSE = "sweep"


def costs_of(kind: object, transport: Transport) -> Costs | None:
    """Return the cost model that `system.cost` asks for; None to compare bytes. Collective.

    Args:
        kind: a `ByBytes`, `Given` or `Measured`.
        transport: connects the ranks.
    """
    if transport.size == 1:
        return None
    if isinstance(kind, Given):
        return between(kind.latency_s, kind.bytes_s, transport.size)
    return measure(transport) if isinstance(kind, Measured) else None


def measure(transport: Transport) -> Costs:
    """Measure the costs of this job's collectives; takes about a second on a fast network. Collective."""
    latency, rate = ping_pong(transport)
    lines = {name: _line(transport, name) for name in (REDUCE, GATHER, BCAST)}
    far = len(far_ranks(transport.nodes)) / (transport.size - 1)
    costs = Costs(latency, rate, lines[REDUCE], lines[GATHER], lines[BCAST], _term(), far)
    measured: Costs = transport.bcast(costs if transport.is_server else None, PURPOSE)
    return measured


def ping_pong(transport: Transport) -> tuple[float, float]:
    """Return latency [s] and rate [bytes/s] between rank 0 and its slowest worker, on rank 0. Collective."""
    times: dict[int, list[float]] = {}
    for size in (1, 1 << 20):
        for rank in transport.workers:
            seconds = []
            for _ in range(REPEATS):
                transport.barrier()
                start = perf_counter()
                messages = [bytes(size) if r == rank else b"" for r in range(transport.size)]
                mine = transport.scatter(messages if transport.is_server else None, PURPOSE)
                transport.gather(mine if transport.rank == rank else b"", PURPOSE)
                seconds.append(perf_counter() - start)
            times.setdefault(size, []).append(min(seconds) / 2)
    short, long = max(times[1]), max(times[1 << 20])
    return short, (1 << 20) / max(long - short, 1e-9)


def _line(transport: Transport, name: str) -> Line:
    """Return the fitted cost of a collective, measured by the clock of rank 0."""
    rows = []
    for calls, numbers in SHAPES:
        seconds = [_timed(transport, _call(transport, name, numbers), calls) for _ in range(REPEATS)]
        rows.append((calls, calls * numbers * 8 * _blocks_from_far(transport, name), min(seconds)))
    return fit(rows)


def _blocks_from_far(transport: Transport, name: str) -> int:
    """Return how many blocks arrive from far ranks in one call."""
    return len(far_ranks(transport.nodes)) if name == GATHER else 1


def _call(transport: Transport, name: str, numbers: int) -> Callable[[], Any]:
    """Return a function that calls a collective with a block of int64 numbers, as `Mixer` does."""
    block = torch.zeros(1, numbers, dtype=torch.int64)
    if name == REDUCE:
        return lambda: transport.Reduce(block, PURPOSE, block.dtype)
    if name == BCAST:
        return lambda: transport.Bcast(block[0], PURPOSE, block.dtype)
    counts = [0, *[1] * (transport.size - 1)]
    mine = block[: counts[transport.rank]]
    return lambda: transport.Gatherv(mine, counts, PURPOSE, block.dtype)


def _timed(transport: Transport, call: Callable[[], Any], times: int) -> float:
    """Return the seconds that `times` calls take, from barrier to barrier."""
    transport.barrier()
    start = perf_counter()
    for _ in range(times):
        call()
    transport.barrier()
    return perf_counter() - start


def fit(rows: Sequence[tuple[int, int, float]]) -> Line:
    """Fit a line to four measurements.

    The time of one more block is the difference within each pair, at least 0. The large blocks decide the
    time per byte, because a link may pass small blocks at once.

    Args:
        rows: (calls, bytes, seconds) of one small block, several small ones, one large block, several large.
    """
    (c0, b0, t0), (c1, b1, t1), (c2, b2, t2), (c3, b3, t3) = rows
    small, large = (t1 - t0) / (c1 - c0), (t3 - t2) / (c3 - c2)  # seconds of one more block
    size, most = (b1 - b0) / (c1 - c0), (b3 - b2) / (c3 - c2)
    byte = max(0.0, (large - small) / (most - size))
    block = max(0.0, small - byte * size)
    byte = max(0.0, large - block) / most
    return Line(max(0.0, t0 - c0 * block - b0 * byte), block, byte)


def _term() -> float:
    """Return the seconds that this rank takes to weight and add one number, the best of several trials."""
    uploads = [torch.ones(BLOCK // 8, dtype=torch.float32) for _ in range(8)]
    weights, seconds = np.full((1, 8), 0.125), []
    for _ in range(2 * REPEATS):  # the first one also touches the memory
        start = perf_counter()
        exact_sum(uploads, weights, np.array([1e-12]), BLOCK // 8)
        seconds.append(perf_counter() - start)
    return min(seconds) / BLOCK
