"""What a run would do, without training: sizes, collectives, memory, bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mpifl.aggregation.calibration import costs_of
from mpifl.aggregation.collective_choice import (
    GATHER,
    REDUCE,
    SCATTER,
    Costs,
    Given,
    between,
    busiest_bytes,
    choose,
    crossover,
    is_sharded,
)
from mpifl.comm import Transport
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.types import Notes, Report, Server

from . import loader
from .build import build
from .context import RunContext
from .memory_forecast import Base, Held, footprint
from .schema import Config
from .traffic_forecast import TrafficForecast, forecast, without_training

NUMBER_BYTES = 4  # float32


def describe(config: Config, transport: Transport) -> str:
    """Return a page about a run; every rank calls, rank 0's page counts."""
    asked = config.system.ranks
    system = config.system
    here = replace(system, ranks=None, mpi_memory="main", scratch=None, stack=system.stack or 1)
    context = replace(build(replace(config, system=here), transport), config=config)
    base = Base.measured(context) if transport.is_server else None
    costs = _costs(context)
    if base is None:
        return ""
    context = without_training(context)
    traffic = forecast(context)
    server, report = traffic.server, traffic.report
    plan = context.config.algorithm.aggregate(server, notes_of(context, server, report))
    tree = loader.to_tree(config)
    n, m, d = context.problem.num_clients, context.decisions.num_sampled, context.problem.layout.size
    lines = [
        f"{config.name}: {tree['algorithm']['name']} on {tree['data']['source']['name']}, "
        f"{tree['data']['scenario']['name']}, model {tree['model']['name']}",
        "",
        f"clients                 N = {n}, m = {m} per round, {config.rounds} rounds",
        f"samples                 {_spread(context.federation.sizes[:, 0])} training per client",
        f"model                   d = {d:,} numbers ({context.problem.layout.num_parameters:,} trainable)",
        f"ranks                   P = {asked or transport.size} "
        f"({max(1, ranks_of(context) - 1)} with clients)",
        "",
    ]
    for mixing in plan.mixings:
        lines.append(_mixing_line(mixing, server, context, costs))
    lines += [
        *_crossover_lines(d, context, costs),
        "",
        *_traffic_lines(traffic),
        *_memory_lines(base, _held(context, server, report, plan, traffic.fingerprints[1]), context),
    ]
    return "\n".join(lines)


def _traffic_lines(traffic: TrafficForecast) -> list[str]:
    """Return what the federation sends, per round and in all."""
    (once_down, once_up), once = traffic.fingerprints, ""
    if once_down or once_up:
        once = f"; once before training {_size(once_down)} down, {_size(once_up)} up"
    total = f"not known before: it depends on {traffic.why}"
    if traffic.total is not None:
        down, up = traffic.total
        total = f"{_size(down)} down, {_size(up)} up ({down} and {up} bytes)"
    return [
        f"federation per round    {_size(traffic.per_round[0])} down, {_size(traffic.per_round[1])} up{once}",
        f"federation in all       {total}",
    ]


def ranks_of(context: RunContext) -> int:
    """Return the number of ranks the plan is for: `system.ranks`, or those that are here."""
    return context.config.system.ranks or context.transport.size


def notes_of(context: RunContext, server: Server, report: Report) -> Notes:
    """Return notes as if the whole cohort had sent `report`."""
    algorithm, public = context.config.algorithm, context.problem.public
    m, needs = 1 if algorithm.needs.one_by_one else context.decisions.num_sampled, algorithm.needs
    clients = np.arange(m)
    columns: dict[str, np.ndarray] = {name: np.stack([np.asarray(v)] * m) for name, v in report.notes.items()}
    if needs.inspect:
        columns |= {
            name: np.asarray(v)[None] for name, v in algorithm.inspect(report.vectors, public).items()
        }
    if needs.row_distance:
        columns["row_distance"] = np.ones((m, len(server.tables[needs.row_distance])))
    if needs.gram:
        columns["gram"] = np.eye(m)
    if needs.probe:
        columns |= {"distance": np.zeros((m, m)), "tau": np.zeros(m)}
    return Notes(
        clients, context.problem.num_samples[clients], np.zeros(m, np.int64), np.ones(m, bool), columns
    )


def _costs(context: RunContext) -> Costs | None:
    """Return the costs that choose the collective; every rank calls.

    Given ones are for the planned number of ranks; measured ones need that many here.
    """
    kind, size = context.config.system.cost, ranks_of(context)
    if isinstance(kind, Given) and size > 1:
        return between(kind.latency_s, kind.bytes_s, size)
    return costs_of(kind, context.transport) if size == context.transport.size else None


def _crossover_lines(d: int, context: RunContext, costs: Costs | None) -> list[str]:
    """Return from how many uploads on a reduction is the faster, for several K, d and P."""
    size, exact, kind = ranks_of(context), context.config.system.sums == "exact", context.config.system.cost
    if size == 1:
        return []
    cases = [(d, size, costs)]
    if costs is not None:
        cases.append((100 * d, size, costs))
    if isinstance(kind, Given):
        cases.append((d, 4 * size, between(kind.latency_s, kind.bytes_s, 4 * size)))
    out = ["", f"Reduce beats Gatherv from m = ... uploads on ({'seconds' if costs else 'bytes'} decide):"]
    for width, ranks, how in cases:
        found = {k: crossover(how, k, width, ranks, exact) for k in (1, 4, 16, 64)}
        text = ", ".join(f"K = {k}: {m or 'never'}" for k, m in found.items())
        out.append(f"  d = {width:,}, P = {ranks}: {text}")
    return out


def _mixing_line(mixing: Mixing, server: Server, context: RunContext, costs: Costs | None) -> str:
    table = server.tables[mixing.into]
    rows, uploads = mixing.num_rows, mixing.weights.shape[1]
    exact, size = context.config.system.sums == "exact", ranks_of(context)
    spread = _spreads(table, server, context)
    collective, d = choose(rows, uploads, exact, spread), table.shape[1]
    if costs is not None and not spread:
        collective = costs.choose(rows, uploads, d, size, exact)
    if context.config.system.collective != "auto" and not spread:
        collective = context.config.system.collective
    rest = busiest_bytes(collective, rows, uploads, d, exact)
    name = {REDUCE: "Reduce", SCATTER: "Reduce_scatter"}.get(collective, "Gatherv")
    moved = "nothing moves (P = 1)" if size == 1 else f"{name}, {_size(rest)} at the busiest rank"
    if costs is not None and not spread:
        each = (costs.mixing(c, rows, uploads, d, size, exact) for c in (REDUCE, GATHER))
        moved += " (Reduce {:.3g} s, Gatherv {:.3g} s)".format(*each)
    return f"table {mixing.into:18}K = {rows} of {len(table)} rows mixed from {uploads} uploads: {moved}"


def _spreads(table: torch.Tensor, server: Server, context: RunContext) -> bool:
    k, n = len(table), context.problem.num_clients
    alone = k == n and len(np.unique(server.assign)) == n and not context.config.algorithm.needs.polish
    return alone and is_sharded(k, 1, ranks_of(context))


def _held(context: RunContext, server: Server, report: Report, plan: Plan, fingerprints: int) -> Held:
    mixed = {m.into for m in plan.mixings}
    spread = {name for name, table in server.tables.items() if _spreads(table, server, context)}
    return Held.by(context.config.algorithm, server, report, fingerprints, mixed, spread)


def _memory_lines(base: Base, held: Held, context: RunContext) -> list[str]:
    """Return the peak resident memory of server and workers."""
    size = ranks_of(context)
    memory = footprint(base, held, context, size)
    if size == 1:
        return [f"memory, alone           {_size(memory[0])} resident at its peak"]
    return [
        f"memory, server          {_size(memory[0])} resident at its peak",
        f"memory, each worker     {_size(memory[1])} resident at its peak",
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _spread(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high} (median {int(np.median(values))})"
