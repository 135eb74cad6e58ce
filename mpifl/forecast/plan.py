"""`mpifl plan`: sizes, collectives, memory, bytes and times of a run, before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import torch

from mpifl.aggregation.calibration import costs_of
from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.collective_choice import GATHER, REDUCE, SCATTER, busiest_bytes, choose, is_sharded
from mpifl.aggregation.collective_costs import Costs, Given, between, crossover
from mpifl.aggregation.exchange_choice import Local
from mpifl.aggregation.low_rank import Factors
from mpifl.aggregation.tables import read_rows
from mpifl.comm.single import Single
from mpifl.comm.transport import Transport, on_server
from mpifl.core.capabilities import OneShotStatistics, SecondLook, ServerEvaluation, hooks_of, uses
from mpifl.core.errors import name_of, require
from mpifl.core.parameters import Part
from mpifl.core.plan import Mixing, Plan
from mpifl.core.process import available_cores
from mpifl.core.progress import doing
from mpifl.core.types import Message, Server
from mpifl.core.units import in_bytes
from mpifl.experiment import loader
from mpifl.experiment.build import build, build_server_step, open_data
from mpifl.experiment.context import RunContext
from mpifl.experiment.filters import adapter_columns
from mpifl.experiment.schema import GROUPS, REFUSE, Config
from mpifl.models.lora import PRODUCT
from mpifl.protection.robust_mixer import busiest_bytes as robust_bytes
from mpifl.protection.robust_rules import CoordinateRule, DistanceRule, NoRule, Rule
from mpifl.protection.secure_sum import MaskedSums
from mpifl.results import run_folder as folders
from mpifl.runtime.hook_errors import DROP, ClientError, first_that_works
from mpifl.runtime.protocol import ClientTask, GatheredReports, LookPlan, ReportHeader, TaskBatch
from mpifl.runtime.server_step import ServerStep, Uploads
from mpifl.supervision.progress import in_words

from .computation import computation_lines, forecast_computation
from .data_preview import named_classes
from .hosting import groups_of, round_balance
from .measured_times import VISITS, MeasuredTimes, measure
from .memory import CLIENT_BYTES, FLOAT_BYTES, MeasuredMemory, StateMemory, peak_memory
from .time import (
    EXIT_CPU_S,
    MARGIN,
    MEMORY_MARGIN,
    WARNED_S,
    Allocation,
    Cores,
    Surroundings,
    TimeForecast,
    efficiencies,
    forecast_time,
)
from .traffic import TrafficForecast, forecast, look_bytes_of_ranks, uploads_per_step, without_training
from .trials import try_outcomes

MANY_CLIENTS = 10**8  # a table of ranks also gives the bytes for this number of clients
BUSY = 1.3  # ratio of wall time to processor seconds from which the page says that the machine is busy
START_S = 2.0  # of a process, if they were not recorded


@dataclass(frozen=True)
class Asked:
    """The times that a page shows.

    Attributes:
        times: whether to measure visits and forecast times.
        ranks: numbers of ranks in the table of times; empty for no table.
        cores: number of cores of a node; None: as many as this machine has.
        nodes: number of nodes that the ranks share; None: this machine alone, or, if `cores` is given, as
            many nodes as are needed to give each rank a core.
    """

    times: bool = False
    ranks: tuple[int, ...] = ()
    cores: int | None = None
    nodes: int | None = None

    @classmethod
    def of(cls, times: str, ranks: str | None, cores: str | None, nodes: str | None = None) -> Asked:
        """Return the times that the command-line options ask for.

        Args:
            times: `yes` or `no`.
            ranks: numbers separated by commas.
            cores: a number.
            nodes: a number.

        Raises:
            UserError: an option has another form, or needs times and `times` is `no`.
        """
        numbers = tuple(_count("--ranks", text) for text in ranks.split(",")) if ranks is not None else ()
        for option, given in (("--ranks", ranks), ("--cores", cores), ("--nodes", nodes)):
            require(times == "yes" or given is None, option, given, "needs times; leave --time no out")
        machine = (_count(name, n) if n else None for name, n in (("--cores", cores), ("--nodes", nodes)))
        return cls(times == "yes", numbers, *machine)

    def machine(self, threads: int) -> Cores:
        """Return the cores of the ranks.

        Args:
            threads: number of threads of each rank.
        """
        per_node = self.cores or available_cores()
        nodes = self.nodes if self.cores or self.nodes else 1
        return Cores(per_node / threads, nodes)


def _count(option: str, text: str) -> int:
    require(text.strip().isdecimal() and 0 < int(text) < 10**6, option, text, "use whole numbers from 1 on")
    return int(text)


def describe(config: Config, transport: Transport, asked: Asked | None = None) -> str:
    """Return a page about a run on rank 0, an empty text elsewhere.

    Args:
        config: configuration of the run; `system.ranks` may differ from the number of ranks of this job.
        transport: connects the ranks; every rank calls.
        asked: the times to show; None for none.

    Raises:
        UserError: the run would not begin.
        ClientError: the forecast needs a client that fails.
    """
    asked, system = asked or Asked(), config.system
    new = config.output.id if config.output.existing == REFUSE else None
    on_server(transport, lambda: folders.check(config.output.folder, config.name, new))
    here = replace(system, ranks=None, mpi_memory="main", scratch=None, stack=system.stack or 1)
    prepared: list[str] = []
    with doing("opening data and model"):
        start = process_time()
        context = build(replace(config, system=here), transport, prepared.append)
        opened = process_time() - start
        context = replace(context, config=config)
    on_server(transport, lambda: try_outcomes(context))
    start = process_time()
    memory = MeasuredMemory.of(context) if transport.is_server else None
    figures = process_time() - start
    costs = _costs(context)
    if memory is None:
        return ""
    real, context = context, without_training(context)
    with doing("forecasting the traffic"):
        start = process_time()
        traffic = forecast(context)
        foretold = process_time() - start
        plan, decide = first_plan(context, traffic.server)
    state = _state_memory(context, traffic, plan)
    memory = memory.with_setup(traffic, state)
    page = [
        *_size_lines(context),
        "",
        *(_mixing_line(mixing, traffic.server, context, costs) for mixing in plan.mixings),
        *_exchange_lines(context),
        *_crossover_lines(context, costs),
        "",
        *_traffic_lines(traffic, config),
        *computation_lines(forecast_computation(context), config.on_client_error),
        *_privacy_lines(context),
        *_memory_lines(memory, state, context, traffic),
    ]
    if asked.times:
        if prepared:  # the run will find the data in the cache
            with doing("opening the prepared data"):
                start = process_time()
                open_data(replace(config, system=here), True)
                opened = process_time() - start
        start = process_time()
        forecast(context)  # a run repeats the forecast at its end, when everything is compiled
        again = process_time() - start
        try:
            measured = measure(real, traffic.server, decide)
        except ClientError as error:
            if config.on_client_error != DROP:
                raise
            return "\n".join([*page, "", f"no times: {error}"])
        if uses(config.algorithm, OneShotStatistics):
            measured = replace(measured, setup=foretold)  # the forecast calls the same hooks for all clients
        rows = sum(mixing.num_rows * traffic.server.tables[mixing.into].shape[1] for mixing in plan.mixings)
        start_s = transport.started.get("cpu", START_S)
        around = Surroundings(
            start_s, opened, figures, again, rows, traffic.kept * context.problem.num_clients
        )
        machine, num_ranks = asked.machine(torch.get_num_threads()), planned_ranks(context)
        some = dict.fromkeys((num_ranks, *asked.ranks, *((2,) if asked.ranks else ())))
        found = {
            ranks: forecast_time(context, measured, traffic, plan, around, ranks, machine) for ranks in some
        }
        room = {ranks: peak_memory(memory, state, context, ranks) for ranks in some}
        allocation = Allocation.of(
            found[num_ranks],
            *room[num_ranks],
            traffic.kept * _num_kept(context),
            machine,
            torch.get_num_threads(),
        )
        page += ["", *_time_lines(measured, found[num_ranks], allocation, asked, machine)]
        if asked.ranks:
            page += _table_lines([(found[ranks], *room[ranks]) for ranks in asked.ranks], found[2], machine)
            page.append(_registered_line(context.problem.num_clients))
        page += _uncounted_lines(context)
    return "\n".join(page)


def seconds_alone(config: Config) -> float:
    """Return the forecast seconds of a run in a process that goes on after it, as a case of a sweep has.

    Raises:
        UserError: the run would not begin.
        ClientError: the forecast needs a client that fails.
    """
    system = config.system
    here = replace(system, ranks=None, mpi_memory="main", scratch=None, stack=system.stack or 1)
    start = process_time()
    context = build(replace(config, system=here), Single(), lambda line: None)
    opened = process_time() - start
    real = replace(context, config=config)
    context = without_training(real)
    traffic = forecast(context)
    start = process_time()
    forecast(context)  # a sweep makes it when everything is compiled
    foretold = process_time() - start
    plan, decide = first_plan(context, traffic.server)
    measured = measure(real, traffic.server, decide)
    if uses(config.algorithm, OneShotStatistics):
        measured = replace(measured, setup=foretold)  # the forecast calls the same hooks for all clients
    around = Surroundings(0.0, opened, 0.0, foretold, 0, traffic.kept * context.problem.num_clients)
    return forecast_time(context, measured, traffic, plan, around, 1).total - EXIT_CPU_S


def _time_lines(
    measured: MeasuredTimes, found: TimeForecast, allocation: Allocation, asked: Asked, machine: Cores
) -> list[str]:
    """Return the lines of the time forecast of the planned run."""
    cores = asked.cores or available_cores()
    most = max((found.num_ranks, *asked.ranks))
    each = 1e3 * float(measured.visit(np.array([measured.samples]))[0])
    cut = "; long ones were cut short and extrapolated" if measured.cut else ""
    shown = {name: s for name, s in found.parts.items() if s >= 0.005 or name == "rounds"}
    parts = ", ".join(f"{name} {_seconds(s)}" for name, s in shown.items())
    terms = ", ".join(f"{name} {_seconds(s)}" for name, s in found.terms.items() if s > 0)
    lines = [
        f"measured                {measured.num_visits} visits in {measured.spent:.1f} s{cut}; "
        f"a visit of {measured.samples} samples takes {each:.3g} ms of a core",
        f"time                    {_seconds(found.total)} in all: {parts}",
        f"a round                 {_seconds(found.round_s)}, most of it {found.limits}: {terms}; "
        f"{_seconds(found.processor)} of processors in all",
        f"to ask for              {allocation}   (time x {MARGIN:g} + {WARNED_S / 60:g} min, "
        f"memory x {MEMORY_MARGIN:g}; nodes of {cores} cores)",
    ]
    if most > 1:
        lines.append(f"cores                   {_cores_told(machine, asked, cores, most)}")
    if measured.busy > BUSY:
        now = f"now, visits take {measured.busy:.1f} times as long as stated here"
        lines.append(f"busy                    this machine is busy: {now}")
    return lines


def _table_lines(
    rows: Sequence[tuple[TimeForecast, int, int]], one_worker: TimeForecast, machine: Cores
) -> list[str]:
    """Return the table of numbers of ranks: forecast, memory of the server and of the busiest worker."""
    terms = "".join(f"{f'{name}, ms':>13}" for name in one_worker.terms)
    head = "     in all  efficiency  limited by      server  busiest worker"
    lines = ["", f"  ranks  cores  s a round{terms}{head}"]
    shares = efficiencies([found for found, _, _ in rows], one_worker)
    for (one, server, worker), efficiency in zip(rows, shares, strict=True):
        lines.append(
            f"{one.num_ranks:7d} {_cores_of(machine, one.num_ranks):6d} {one.round_s:10.4g}"
            + "".join(f"{1e3 * seconds:13.4g}" for seconds in one.terms.values())
            + f" {_seconds(one.total):>10} {efficiency:11.0%}  {one.limits:10} {in_bytes(server):>11} "
            f"{in_bytes(worker):>15}"
        )
    return [*lines, "efficiency: seconds of a round on one worker / (workers x seconds of a round)"]


def _cores_told(machine: Cores, asked: Asked, cores: int, most: int) -> str:
    """Return a description of the cores that the forecast assumes."""
    threads, whose = torch.get_num_threads(), f"this machine with {cores} cores"
    if asked.nodes:
        whose = f"{asked.nodes} node{'s' * (asked.nodes > 1)} of {cores} cores"
    elif asked.cores:
        whose = f"nodes of {cores} cores"
    whose += ", as fast as these"
    if machine.slowdown(most) == 1:
        return f"{whose}: one for each {'rank' if threads == 1 else f'of {threads} threads of a rank'}"
    shared = f"{whose}: up to {most} ranks share them"
    return shared + ("" if asked.cores else "; `--cores 16` forecasts nodes of 16 and a core for each rank")


def _cores_of(machine: Cores, ranks: int) -> int:
    """Return the number of cores that a number of ranks have together."""
    sizes = np.bincount(machine.node_of(ranks))
    return int(np.minimum(sizes, max(1, int(machine.per_node))).sum()) * torch.get_num_threads()


def _num_kept(context: RunContext) -> int:
    """Return the largest number of files of client state: one for each of a client's last two visits."""
    config = context.config
    visits = config.rounds * context.decisions.num_sampled
    return min(visits, 2 * context.problem.num_clients)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else in_words(seconds)


class DryAggregator:
    """Aggregates nothing, for forecasts: results have the sizes of a real step, but made-up values."""

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the products [m, m] of orthonormal uploads: the identity matrix."""
        return None if reports is None else np.eye(len(reports.notes))

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return distances [m, K], all 1."""
        return np.ones((len(reports.notes), len(server.tables[name])))

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return tables with the numbers of rows that a plan makes: the old rows, or copies of the first one.

        Rows are not 0, because a method may divide by the norms of mixed rows.
        """
        assert server is not None
        assert plan is not None
        out = {}
        for m in plan.mixings:
            old = server.tables[m.into]
            out[m.into] = old if len(old) == m.num_rows else old[:1].expand(m.num_rows, -1)
        return out


def first_plan(context: RunContext, server: Server) -> tuple[Plan, float]:
    """Return the plan of the first server step and the processor seconds of deciding it.

    All clients are assumed to report the same as client 0. If client 0 fails and failing clients are left
    out, the report of the next client that works is used.

    Args:
        context: context of the run; its clients train for no step.
        server: the server before the step.
    """
    config = replace(context.config, on_client_error="abort")
    m = uploads_per_step(context)
    with TemporaryDirectory() as folder, closing(ClientStore("plan", folder)) as store:
        step = build_server_step(replace(context, config=config, transport=Single()), store)
        step.tables.publish(server.tables)
        clients, drops = range(context.problem.num_clients), context.config.on_client_error == DROP
        header = first_that_works(lambda k: _first_report(step, server, m, k), clients, 1, drops)
        num_samples = context.problem.num_samples
        headers = [replace(header, number=k, client=k, num_samples=int(num_samples[k])) for k in range(m)]
        reports = step.reports_of(headers, np.zeros(m, np.int64))
        start = process_time()
        result = step.advance(server, reports, {}, DryAggregator())
        seconds = process_time() - start
    assert result is not None
    return result.plan, seconds


def _first_report(step: ServerStep, server: Server, num_sampled: int, k: int) -> ReportHeader:
    """Return the header of client `k`'s report; in a second look it finds itself in each other client."""
    reads = step.hooks.reads("reads", server, np.array([k]))[k]
    task = ClientTask(0, k, 0, reads)
    if uses(step.algorithm, ServerEvaluation):  # these methods run visits one by one
        vectors = {name: read_rows(step.tables.rows, name, rows) for name, rows in reads.items()}
        (header, _), _ = step.worker.run_visit(task, Message(vectors, reads))
        assert isinstance(header, ReportHeader)
        return header
    if not step.hooks.probes(server, 1):
        return step.worker.run(TaskBatch(1, 0, (task,), {})).headers[0]
    none = np.zeros(2, np.int64)
    looks = LookPlan(np.array([k, k]), none, none, np.array([[num_sampled > 1] * 2, [False] * 2]))
    batch = TaskBatch(1, 0, (task,), {}, looks)
    header = step.worker.look(batch, step.worker.run(batch)).headers[0]
    found = {name: np.repeat(value[1:], num_sampled) for name, value in header.findings.items()}
    found["peer"] = np.arange(num_sampled)
    return replace(header, findings=found)


def planned_ranks(context: RunContext) -> int:
    """Return the number of ranks of the planned run: `system.ranks`, or the ranks of this job."""
    return context.config.system.ranks or context.transport.size


def _size_lines(context: RunContext) -> list[str]:
    """Return name, clients, samples, model and ranks."""
    config, tree, layout = context.config, loader.to_tree(context.config), context.problem.layout
    n, m, size = context.problem.num_clients, context.decisions.num_sampled, planned_ranks(context)
    names, stops = context.federation.class_names, config.stop.given
    return [
        f"{config.name}: {tree['algorithm']['name']} on {tree['data']['source']['name']}, "
        f"{tree['data']['scenario']['name']}, model {tree['model']['name']}",
        "",
        f"clients                 N = {n}, m = {m} per round, {config.rounds} rounds",
        *([f"stop                    all below are upper bounds: it may end once {config.stop}"] * stops),
        f"samples                 {_range(context.federation.sizes[:, 0])} training per client",
        *([f"classes                 {named_classes(names)}"] if names else []),
        f"model                   d = {layout.size:,} numbers ({layout.num_parameters:,} trainable)",
        f"ranks                   P = {size} ({max(1, size - 1)} with clients)",
        *_hosting_lines(context, size),
    ]


def _hosting_lines(context: RunContext, size: int) -> list[str]:
    """Return the groups that workers host, and what they cost in balance; empty without groups."""
    if context.config.system.hosting != GROUPS:
        return []
    if size <= 2:
        return ["hosting                 one worker hosts all clients, as with hosting any"]
    groups = groups_of(context, size)
    lines = [
        f"hosting                 groups of {_range(groups.clients)} clients with {_range(groups.samples)} "
        f"samples; the busiest has {groups.busiest:.3f} of the mean work"
    ]
    if context.config.policy.synchronous:
        here, free = (round_balance(context, size, hosting) for hosting in (GROUPS, "any"))
        what = f"the busiest worker has {here:.2f} of the mean work ({free:.2f} with hosting any)"
        lines.append(f"  in a round            {what}")
    return lines


def _costs(context: RunContext) -> Costs | None:
    """Return the costs by which collectives are chosen, None if only bytes decide; every rank calls.

    Given costs apply to the planned number of ranks. Measured costs need a job with that number of ranks.
    """
    kind, size = context.config.system.cost, planned_ranks(context)
    if isinstance(kind, Given) and size > 1:
        return between(kind.latency_s, kind.bytes_s, size)
    return costs_of(kind, context.transport) if size == context.transport.size else None


def _crossover_lines(context: RunContext, costs: Costs | None) -> list[str]:
    """Return the number of uploads from which a reduction is faster, for several K, d and P."""
    d = context.problem.layout.size
    size, kind = planned_ranks(context), context.config.system.cost
    exact = context.config.system.sums == "exact"
    if size == 1 or not context.config.policy.synchronous:
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
    """Return what one mixing of the first step moves, and by which collective."""
    config, table, size = context.config, server.tables[mixing.into], planned_ranks(context)
    (rows, uploads), d, exact = mixing.weights.shape, table.shape[1], config.system.sums == "exact"
    head = f"table {mixing.into:18}K = {rows} (before: {len(table)}), mixed from {uploads} uploads:"
    if size == 1:
        return f"{head} nothing moves (P = 1)"
    if not config.policy.synchronous:
        return f"{head} rank 0 mixes, {in_bytes(FLOAT_BYTES * uploads * d)} come to it"
    sharded = _is_sharded(table, server, context)
    rule = config.robust if isinstance(config.robust, Rule) and uploads else None
    if rule is not None and not rule.applies(mixing.of, config.algorithm.statistics):
        rule = None
    collective = choose(rows, uploads, exact, sharded)
    if costs is not None and not sharded:
        collective = costs.choose(rows, uploads, d, size, exact)
    if config.system.collective != "auto" and not sharded:
        collective = config.system.collective
    if mixing.masks is not None:
        collective = REDUCE
    rest = busiest_bytes(collective, rows, uploads, d, exact)
    name = {REDUCE: "Reduce", SCATTER: "Reduce_scatter"}.get(collective, "Gatherv")
    if rule is not None:
        rest, name = _robust_bytes(rule, mixing, d, size, rest, name)
    if config.lora.average == PRODUCT:
        sent = uploads * sum(
            f.a.stop - f.a.start + f.b.stop - f.b.start for f in _adapters(mixing, d, context)
        )
        rest, name = rest + FLOAT_BYTES * sent, f"{name}, and Gatherv of adapters"
    line = f"{head} {name}, {in_bytes(rest)} at the busiest rank"
    if costs is not None and not sharded and rule is None:
        each = (costs.mixing(c, rows, uploads, d, size, exact) for c in (REDUCE, GATHER))
        line += " (Reduce {:.3g} s, Gatherv {:.3g} s)".format(*each)
    return line


def _exchange_lines(context: RunContext) -> list[str]:
    """Return what the second looks of the run move between ranks, and what they are in the federation."""
    size, looking = planned_ranks(context), context.config.algorithm
    if not uses(looking, SecondLook):
        return []
    if not context.config.policy.synchronous:
        what = "neither its bytes nor by how much it lengthens visits is known before"
        return [f"second look             who looks at whom follows from the arrivals: {what}"]
    if size == 1:
        return []
    if isinstance(context.config.system.exchange, Local):
        return ["second look             nothing moves (system.exchange: local)"]
    found = look_bytes_of_ranks(context, size)
    if found is None:
        return ["second look             sizes are not known before (SecondLook.look_sizes)"]
    names = hooks_of(looking, SecondLook)
    calls, copies, moved = " or ".join(found.calls) or "nothing", found.copies, found.moved
    asked, compared = FLOAT_BYTES * 2 * found.asked, FLOAT_BYTES * found.compared
    return [
        f"second look             {found.pairs} pairs: {names.question} by {calls}, "
        f"{in_bytes(FLOAT_BYTES * copies)} to ranks ({in_bytes(asked)} up and down in the federation)",
        f"                        {names.answered} by Alltoallv, {in_bytes(FLOAT_BYTES * moved)} "
        f"to the ranks that compare ({in_bytes(compared)} up in the federation)",
    ]


def _adapters(mixing: Mixing, d: int, context: RunContext) -> Sequence[Factors]:
    """Return the adapters in a table [K, d] whose products are averaged."""
    return adapter_columns(context).factors(mixing.into, d)


def _robust_bytes(rule: Rule, mixing: Mixing, d: int, size: int, rest: int, name: str) -> tuple[int, str]:
    """Return the bytes at the busiest rank of a mixing with a robust rule, and its collectives.

    Args:
        rule: the rule that replaces the mean.
        mixing: the method's mixing.
        d: number of columns of the table.
        size: P, the number of ranks.
        rest: bytes of the mixing without a rule.
        name: collective of the mixing without a rule.
    """
    words = name_of(rule).replace("_", " ")
    active = int(mixing.weights.any(1).sum())
    found = robust_bytes(max(active, 1), mixing.weights.shape[1], d, size, rule)
    if isinstance(rule, CoordinateRule):
        return found, f"{words}, Alltoallv and Gatherv"
    return found + rest, f"{words}, Alltoallv, Reduce of distances, then {name}"


def _is_sharded(table: torch.Tensor, server: Server, context: RunContext) -> bool:
    """Return whether the workers hold a table, because each of its rows has only one reader."""
    k, n = len(table), context.problem.num_clients
    config = context.config
    alone = k == n and len(np.unique(server.assign)) == n and not config.algorithm.needs.server_update
    alone &= isinstance(config.robust, NoRule) and config.lora.average != PRODUCT
    alone &= config.algorithm.needs.row_per_client
    return alone and is_sharded(k, 1, planned_ranks(context))


def _state_memory(context: RunContext, traffic: TrafficForecast, plan: Plan) -> StateMemory:
    server, algorithm = traffic.server, context.config.algorithm
    mixed = {mixing.into for mixing in plan.mixings}
    sharded = {name for name, table in server.tables.items() if _is_sharded(table, server, context)}
    return StateMemory.of(algorithm, server, traffic.report, traffic.fingerprints[1], mixed, sharded)


def _traffic_lines(traffic: TrafficForecast, config: Config) -> list[str]:
    """Return the lines about the federation's traffic; if the total is known, the lines add up to it."""
    rounds = tuple(config.rounds * size for size in traffic.per_round)
    one = "round   " if config.policy.synchronous else "step    "
    lines = [
        f"federation per {one} {in_bytes(traffic.per_round[0])} down, {in_bytes(traffic.per_round[1])} up"
    ]
    more = "in pairs, and rounds that differ" if uses(config.algorithm, SecondLook) else "rounds that differ"
    named = (
        (f"{config.rounds} such rounds", rounds),
        ("once before training", traffic.fingerprints),
        ("once, when clients join", traffic.new_fingerprints),
        (more, traffic.extra),
    )
    parts = [(name, part) for name, part in named if any(part)]
    if traffic.total is None:
        parts = [(name, part) for name, part in parts if part is not rounds]
    if len(parts) > 1 or traffic.total is None:
        lines += [f"  {name}: {_both(part)}" for name, part in parts]
    total = f"not known before: it depends on {traffic.why}"
    return [*lines, f"federation in all       {total if traffic.total is None else _both(traffic.total)}"]


def _privacy_lines(context: RunContext) -> list[str]:
    """Return the privacy that the noise of `privacy` will give at the end."""
    accountant, rounds = context.accountant, context.config.rounds
    if not accountant.counts:
        return []
    times, what = rounds, f"{rounds} rounds"
    if accountant.per_client:
        if not context.config.policy.synchronous:
            one = f"epsilon = {accountant.epsilon(1):.4g} for one visit of a client, at delta"
            return [f"privacy                 {one} = {accountant.delta:g}; visits are not known before"]
        drawn = np.concatenate([context.sampler(step) for step in range(1, rounds + 1)])
        times = int(np.bincount(drawn).max())
        what = f"{times} visits, the most of any client"
    end = f"epsilon = {accountant.epsilon(times):.4g} at delta = {accountant.delta:g} after {what}"
    return [f"privacy                 {end} ({accountant.neighbours})"]


def _uncounted_lines(context: RunContext) -> list[str]:
    """Return what the times do not include: work for each pair of a cohort, of which few were measured."""
    config, m = context.config, context.decisions.num_sampled
    left = []
    if isinstance(config.secure_aggregation, MaskedSums):
        left.append("masks and key shares of secure_aggregation")
    if isinstance(config.robust, DistanceRule):
        left.append(f"distances of {name_of(config.robust).replace('_', ' ')}")
    if not left or m <= VISITS:
        return []
    return [f"not counted             {' and '.join(left)} between {m} clients: {VISITS} were measured"]


def _both(sizes: Sequence[int]) -> str:
    down, up = sizes
    return f"{in_bytes(down)} down, {in_bytes(up)} up ({down} and {up} bytes)"


def _memory_lines(
    measured: MeasuredMemory, state: StateMemory, context: RunContext, traffic: TrafficForecast
) -> list[str]:
    """Return the peak resident memory of server and workers, and the client state on the nodes."""
    size = planned_ranks(context)
    server, worker = peak_memory(measured, state, context, size)
    lines = [f"memory, alone           {in_bytes(server)} resident at its peak"]
    if size > 1:
        lines = [
            f"memory, server          {in_bytes(server)} resident at its peak",
            f"memory, each worker     {in_bytes(worker)} resident at its peak",
        ]
    if traffic.kept:
        where = context.config.system.scratch or "shared memory, or the temporary folder if that is full"
        lines.append(
            f"client state            {in_bytes(traffic.kept * _num_kept(context))} on all nodes together, "
            f"{in_bytes(traffic.kept)} a visit; in {where}"
        )
    return lines


def _registered_line(num_clients: int) -> str:
    """Return the bytes of each rank's memory that grow with the number of registered clients."""
    here, many = (in_bytes(CLIENT_BYTES * n) for n in (num_clients, MANY_CLIENTS))
    return (
        f"registered clients: {CLIENT_BYTES} bytes each at every rank, {here} of these {num_clients:,} "
        f"(counted above), {many} of {MANY_CLIENTS:,}; beside what a method keeps of each"
    )


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high} (median {int(np.median(values))})"
