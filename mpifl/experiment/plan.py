"""What a run would do, without training: sizes, collectives, memory, bytes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import torch

from mpifl.aggregation.calibration import costs_of
from mpifl.aggregation.client_store import ClientStore
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
from mpifl.aggregation.tables import read_rows
from mpifl.comm.transport import Single, Transport
from mpifl.core.capabilities import ServerEvaluation, uses
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.types import Message, Server
from mpifl.runtime.aggregators import DryAggregator
from mpifl.runtime.protocol import ClientTask, ReportHeader, TaskBatch
from mpifl.runtime.server_step import ServerStep

from . import loader
from .build import build, build_server_step
from .context import RunContext
from .memory_forecast import MeasuredMemory, StateMemory, peak_memory
from .schema import Config
from .traffic_forecast import TrafficForecast, forecast, without_training


def describe(config: Config, transport: Transport) -> str:
    """Return a page about a run on rank 0, an empty text elsewhere.

    Args:
        config: of the run; `system.ranks` may be more or fewer than there are now.
        transport: every rank calls.

    Raises:
        UserError: the run would not begin.
    """
    here = replace(config.system, ranks=None, mpi_memory="main", scratch=None, stack=config.system.stack or 1)
    context = replace(build(replace(config, system=here), transport), config=config)
    measured = MeasuredMemory.of(context) if transport.is_server else None
    costs = _costs(context)
    if measured is None:
        return ""
    context = without_training(context)
    traffic = forecast(context)
    plan = first_plan(context, traffic.server)
    return "\n".join(
        [
            *_size_lines(context),
            "",
            *(_mixing_line(mixing, traffic.server, context, costs) for mixing in plan.mixings),
            *_crossover_lines(context, costs),
            "",
            *_traffic_lines(traffic),
            *_memory_lines(measured, _state_memory(context, traffic, plan), context),
        ]
    )


def first_plan(context: RunContext, server: Server) -> Plan:
    """Return how the first server step mixes rows, where all clients report what client 0 does.

    Args:
        context: of the run; its clients train for no step.
        server: before the step.
    """
    config = replace(context.config, on_client_error="abort")
    m = 1 if config.algorithm.needs.single_upload else context.decisions.num_sampled
    with TemporaryDirectory() as folder, closing(ClientStore("plan", folder)) as store:
        step = build_server_step(replace(context, config=config, transport=Single()), store)
        step.tables.publish(server.tables)
        header, num_samples = _first_report(step, server, m), context.problem.num_samples
        headers = [replace(header, number=k, client=k, num_samples=int(num_samples[k])) for k in range(m)]
        reports = step.reports_of(headers, np.zeros(m, np.int64), np.zeros(m, np.int64))
        result = step.advance(server, reports, {}, DryAggregator())
    assert result is not None
    return result.plan


def _first_report(step: ServerStep, server: Server, num_sampled: int) -> ReportHeader:
    """Return the header of client 0's report; a second look meets a cohort of clients like itself."""
    reads = step.hooks.reads("reads", server, np.zeros(1, np.int64))[0]
    task = ClientTask(0, 0, 0, reads)
    if uses(step.algorithm, ServerEvaluation):  # uploads are evaluated where they come in one by one
        vectors = {name: read_rows(step.tables.rows, name, rows) for name, rows in reads.items()}
        header, _ = step.worker.serve(task, Message(vectors, reads))
        assert isinstance(header, ReportHeader)
        return header
    peers = ((0, 0),) * num_sampled if step.hooks.probes(server, 1) else ()
    return step.worker.run(TaskBatch(1, 0, (task,), {}, peers)).headers[0]


def planned_ranks(context: RunContext) -> int:
    """Return the number of ranks that the page is about: `system.ranks`, or those that are here."""
    return context.config.system.ranks or context.transport.size


def _size_lines(context: RunContext) -> list[str]:
    """Return name, clients, samples, model and ranks."""
    config, tree, layout = context.config, loader.to_tree(context.config), context.problem.layout
    n, m, size = context.problem.num_clients, context.decisions.num_sampled, planned_ranks(context)
    return [
        f"{config.name}: {tree['algorithm']['name']} on {tree['data']['source']['name']}, "
        f"{tree['data']['scenario']['name']}, model {tree['model']['name']}",
        "",
        f"clients                 N = {n}, m = {m} per round, {config.rounds} rounds",
        f"samples                 {_range(context.federation.sizes[:, 0])} training per client",
        f"model                   d = {layout.size:,} numbers ({layout.num_parameters:,} trainable)",
        f"ranks                   P = {size} ({max(1, size - 1)} with clients)",
    ]


def _costs(context: RunContext) -> Costs | None:
    """Return the costs that choose the collective; every rank calls.

    Given ones are for the planned number of ranks; measured ones need that many here.
    """
    kind, size = context.config.system.cost, planned_ranks(context)
    if isinstance(kind, Given) and size > 1:
        return between(kind.latency_s, kind.bytes_s, size)
    return costs_of(kind, context.transport) if size == context.transport.size else None


def _crossover_lines(context: RunContext, costs: Costs | None) -> list[str]:
    """Return from how many uploads on a reduction is faster, for several K, d and P."""
    d = context.problem.layout.size
    size, exact, kind = (
        planned_ranks(context),
        context.config.system.sums == "exact",
        context.config.system.cost,
    )
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
    exact, size = context.config.system.sums == "exact", planned_ranks(context)
    sharded = _is_sharded(table, server, context)
    collective, d = choose(rows, uploads, exact, sharded), table.shape[1]
    if costs is not None and not sharded:
        collective = costs.choose(rows, uploads, d, size, exact)
    if context.config.system.collective != "auto" and not sharded:
        collective = context.config.system.collective
    rest = busiest_bytes(collective, rows, uploads, d, exact)
    name = {REDUCE: "Reduce", SCATTER: "Reduce_scatter"}.get(collective, "Gatherv")
    moved = "nothing moves (P = 1)" if size == 1 else f"{name}, {_size(rest)} at the busiest rank"
    if costs is not None and not sharded:
        each = (costs.mixing(c, rows, uploads, d, size, exact) for c in (REDUCE, GATHER))
        moved += " (Reduce {:.3g} s, Gatherv {:.3g} s)".format(*each)
    return f"table {mixing.into:18}K = {rows} of {len(table)} rows mixed from {uploads} uploads: {moved}"


def _is_sharded(table: torch.Tensor, server: Server, context: RunContext) -> bool:
    """Return whether the workers hold a table: each of its rows has one reader."""
    k, n = len(table), context.problem.num_clients
    alone = k == n and len(np.unique(server.assign)) == n and not context.config.algorithm.needs.server_update
    return alone and is_sharded(k, 1, planned_ranks(context))


def _state_memory(context: RunContext, traffic: TrafficForecast, plan: Plan) -> StateMemory:
    server, algorithm = traffic.server, context.config.algorithm
    mixed = {mixing.into for mixing in plan.mixings}
    sharded = {name for name, table in server.tables.items() if _is_sharded(table, server, context)}
    return StateMemory.of(algorithm, server, traffic.report, traffic.fingerprints[1], mixed, sharded)


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


def _memory_lines(measured: MeasuredMemory, state: StateMemory, context: RunContext) -> list[str]:
    """Return the peak resident memory of server and workers."""
    size = planned_ranks(context)
    server, worker = peak_memory(measured, state, context, size)
    if size == 1:
        return [f"memory, alone           {_size(server)} resident at its peak"]
    return [
        f"memory, server          {_size(server)} resident at its peak",
        f"memory, each worker     {_size(worker)} resident at its peak",
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high} (median {int(np.median(values))})"
