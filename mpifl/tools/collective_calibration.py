"""`mpifl calibrate`: measures costs of messages and collectives, and how well they forecast a mixing."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.calibration import measure
from mpifl.aggregation.collective_choice import GATHER, REDUCE, far_ranks
from mpifl.aggregation.collective_costs import Costs, Line
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.transport import Transport
from mpifl.core.errors import require
from mpifl.core.plan import Mixing

GRID = (  # K rows, m uploads, d numbers: few rows of many uploads, many rows of few
    *((1, 8, 20_000), (1, 32, 20_000), (4, 4, 20_000), (4, 64, 20_000), (16, 8, 20_000)),
    *((1, 1, 100_000), (1, 8, 100_000), (4, 24, 100_000), (8, 4, 100_000), (1, 4, 400_000)),
)
REPEATS = 5  # the shortest time counts: other programs only add to it
HEAD = f"{'K':>4}{'m':>5}{'d':>9}  {'Reduce, s':>21}  {'Gatherv, s':>21}  {'chosen':>8}{'faster':>8}  error"


def calibrate(transport: Transport) -> str:
    """Return the costs of collectives, and a table of mixings with forecast and measured seconds.

    Args:
        transport: Connects the ranks; all of them must call this.

    Raises:
        UserError: There is only one rank.
    """
    remedy = "there is nothing to measure; use mpirun -n 2"
    require(transport.size > 1, "calibrate", f"{transport.size} rank", remedy)
    costs = measure(transport)
    rows = [_point(transport, costs, *point) for point in GRID]
    right = sum(row["chosen"] == row["faster"] for row in rows)
    errors = [row["error"] for row in rows]
    return "\n".join(
        [
            f"{transport.size} ranks on {len(set(transport.nodes))} nodes",
            f"message      {1e3 * costs.latency_s:.3g} ms, then {costs.bytes_s / 1e6:.4g} MB/s",
            *(_cost_line(name, getattr(costs, name)) for name in ("reduce", "gather", "bcast")),
            "",
            HEAD,
            *(_table_line(row) for row in rows),
            "",
            f"the chosen collective is the faster one at {right} of {len(rows)} points",
            f"a round's communication differs from the forecast by {np.median(errors):.0%} in the median, "
            f"{max(errors):.0%} at most",
        ]
    )


def _cost_line(name: str, line: Line) -> str:
    rate = f"{1e-6 / line.byte_s:.4g} MB/s" if line.byte_s else "no time per byte"
    return f"{name:12} {1e3 * line.once_s:.3g} ms once, {1e3 * line.block_s:.3g} ms a call, {rate}"


def _point(transport: Transport, costs: Costs, k: int, m: int, d: int) -> dict[str, Any]:
    """Return forecast and measured seconds of a round: all ranks get K rows, and m uploads are mixed."""
    seconds, forecast = {}, {}
    owners = _owners(transport, m)
    size = (k, m, d, transport.size, True, int(np.isin(owners, far_ranks(transport.nodes)).sum()))
    for collective in (REDUCE, GATHER):
        repeats = [_round(transport, collective, k, m, d) for _ in range(REPEATS)]
        seconds[collective] = min(repeats)
        forecast[collective] = costs.sharing(k, d) + costs.mixing(collective, *size)
    faster = min(seconds, key=lambda c: seconds[c])
    chosen = costs.choose(*size)
    error = abs(forecast[chosen] - seconds[chosen]) / seconds[chosen]
    point = {"K": k, "m": m, "d": d, "seconds": seconds, "forecast": forecast}
    return {**point, "chosen": chosen, "faster": faster, "error": error}


def _owners(transport: Transport, m: int) -> np.ndarray:
    """Return the rank of each upload [m]: the workers in turn."""
    return np.resize(transport.workers, m)


def _round(transport: Transport, collective: str, k: int, m: int, d: int) -> float:
    """Return the seconds that one round's communication takes on rank 0."""
    tables = Tables(transport)
    if transport.is_server:
        tables.publish({"model": torch.zeros(k, d)})
    owners = _owners(transport, m)
    uploads = [torch.ones(d) for j in range(m) if owners[j] == transport.rank]
    weights = np.full((k, m), 1 / m)
    mixer = Mixer(transport, tables, collective=collective)
    transport.barrier()
    start = perf_counter()
    tables.bcast_rows({"model": (list(range(k)), d)})
    mixings = [Mixing(weights)] if transport.is_server else None
    mixer.mix(mixings, (lambda name: (np.ones(m), owners)) if mixings else None, {"model": uploads})
    return perf_counter() - start


def _table_line(row: dict[str, Any]) -> str:
    def pair(collective: str) -> str:
        return f"{row['seconds'][collective]:.3g} ({row['forecast'][collective]:.3g})"

    size = f"{row['K']:>4}{row['m']:>5}{row['d']:>9}"
    choice = f"{row['chosen']:>8}{row['faster']:>8}  {100 * row['error']:.0f} %"
    return f"{size}  {pair(REDUCE):>21}  {pair(GATHER):>21}  {choice}"
