"""`mpifl calibrate`: what the ranks' messages and collectives cost, and how well that foretells a mixing."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.calibration import measure
from mpifl.aggregation.collective_choice import GATHER, REDUCE, Costs, Line, far_ranks
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.transport import Transport
from mpifl.core.errors import require
from mpifl.core.mixing import Mixing

GRID = (  # K rows, m uploads, d numbers: few rows and many uploads, and the other way round
    *((1, 8, 20_000), (1, 32, 20_000), (4, 4, 20_000), (4, 64, 20_000), (16, 8, 20_000)),
    *((1, 1, 100_000), (1, 8, 100_000), (4, 24, 100_000), (8, 4, 100_000), (1, 4, 400_000)),
)
REPEATS = 5  # the least counts: other programs only ever add
HEAD = f"{'K':>4}{'m':>5}{'d':>9}  {'Reduce, s':>21}  {'Gatherv, s':>21}  {'chosen':>8}{'faster':>8}  error"


def sweep(transport: Transport) -> str:
    """Return a page of costs and of a grid of mixings, foretold and measured; every rank calls."""
    require(
        transport.size > 1, "sweep", f"{transport.size} rank", "there is nothing to measure; use mpirun -n 2"
    )
    costs = measure(transport)
    rows = [_point(transport, costs, *point) for point in GRID]
    right = sum(row["chosen"] == row["faster"] for row in rows)
    errors = [row["error"] for row in rows]
    return "\n".join(
        [
            f"{transport.size} ranks on {len(set(transport.nodes))} nodes",
            f"message      {1e3 * costs.latency_s:.3g} ms, then {costs.bytes_s / 1e6:.4g} MB/s",
            *(_line(name, getattr(costs, name)) for name in ("reduce", "gather", "bcast")),
            "",
            HEAD,
            *(_text(row) for row in rows),
            "",
            f"the chosen collective is the faster one at {right} of {len(rows)} points",
            f"a round's communication differs from the forecast by {np.median(errors):.0%} in the median, "
            f"{max(errors):.0%} at most",
        ]
    )


def _line(name: str, line: Line) -> str:
    rate = f"{1e-6 / line.byte_s:.4g} MB/s" if line.byte_s else "no time per byte"
    return f"{name:12} {1e3 * line.once_s:.3g} ms once, {1e3 * line.block_s:.3g} ms a call, {rate}"


def _point(transport: Transport, costs: Costs, k: int, m: int, d: int) -> dict[str, Any]:
    """Return what was foretold and measured of a round's communication: K rows to all, m uploads mixed."""
    seconds, foretold = {}, {}
    owners = _owners(transport, m)
    size = (k, m, d, transport.size, True, int(np.isin(owners, far_ranks(transport.nodes)).sum()))
    for collective in (REDUCE, GATHER):
        turns = [_round(transport, collective, k, m, d) for _ in range(REPEATS)]
        seconds[collective] = min(turns)
        foretold[collective] = costs.sharing(k, d) + costs.mixing(collective, *size)
    faster = min(seconds, key=lambda c: seconds[c])
    chosen = costs.choose(*size)
    error = abs(foretold[chosen] - seconds[chosen]) / seconds[chosen]
    point = {"K": k, "m": m, "d": d, "seconds": seconds, "foretold": foretold}
    return {**point, "chosen": chosen, "faster": faster, "error": error}


def _owners(transport: Transport, m: int) -> np.ndarray:
    """Return the rank of each upload [m]: the workers in turn."""
    return np.resize(transport.workers, m)


def _round(transport: Transport, collective: str, k: int, m: int, d: int) -> float:
    """Return rank 0's seconds of one round's communication."""
    tables = Tables(transport)
    if transport.is_server:
        tables.publish({"model": torch.zeros(k, d)})
    owners = _owners(transport, m)
    uploads = [torch.ones(d) for j in range(m) if owners[j] == transport.rank]
    weights = np.full((k, m), 1 / m)
    mixer = Mixer(transport, tables, collective=collective)
    transport.barrier()
    start = perf_counter()
    tables.share({"model": (list(range(k)), d)})
    mixings = [Mixing(weights)] if transport.is_server else None
    mixer.mix(mixings, (lambda name: (np.ones(m), owners)) if mixings else None, {"model": uploads})
    return perf_counter() - start


def _text(row: dict[str, Any]) -> str:
    def pair(collective: str) -> str:
        return f"{row['seconds'][collective]:.3g} ({row['foretold'][collective]:.3g})"

    size = f"{row['K']:>4}{row['m']:>5}{row['d']:>9}"
    words = f"{row['chosen']:>8}{row['faster']:>8}  {100 * row['error']:.0f} %"
    return f"{size}  {pair(REDUCE):>21}  {pair(GATHER):>21}  {words}"
