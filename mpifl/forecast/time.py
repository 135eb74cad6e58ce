"""Forecasts the time of a run on any number of ranks from measured seconds of its parts.

For synchronous rounds, the scheduler of the run assigns the cohorts that the run draws. A round takes the
time of its busiest worker, then that of rank 0 and the network. Asynchronous runs are simulated: the policy
and the clock of the run start and end the visits; rank 0 assigns visits by urgency, a few ahead, and takes
the reports in the order of the clock. If a node has more ranks than cores, its ranks share the cores.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from mpifl.aggregation.collective_choice import choose
from mpifl.aggregation.collective_costs import Costs, Given, between, tree_levels
from mpifl.aggregation.exchange_choice import Local, OverMpi
from mpifl.comm.task_pool import depth
from mpifl.core.capabilities import (
    NewClients,
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    hooks_of,
    uses,
)
from mpifl.core.plan import Plan
from mpifl.experiment.build import trained_samples
from mpifl.experiment.context import RunContext
from mpifl.runtime.engine import EvaluationSchedule
from mpifl.runtime.scheduler import task_costs
from mpifl.simulation.clock import (
    DrawnClock,
    Replay,
    TrainingPool,
    VirtualClock,
    WallClock,
    WallTime,
    first_return,
)
from mpifl.simulation.dispatcher import Dispatcher
from mpifl.simulation.policies import AsynchronousPolicy, ClockParts
from mpifl.traffic.ledger import Moves

from .hosting import scheduler_of
from .measured_times import MeasuredTimes
from .traffic import FLOAT_BYTES, TrafficForecast, looks_of_ranks, planned_run, uploads_per_step

MOST_STEPS = 400  # steps that are simulated; further steps take the mean of the later half of these
LAUNCH_S = 0.3  # time in which mpirun starts
MPI_CPU_S = 0.55  # processor seconds of a rank to load MPI and connect: 2.5 instead of 1.95 until it is ready
EXIT_CPU_S = 0.5  # processor seconds of a rank from its last result until the process has ended
POLL_S = 1e-3  # time until a waiting rank polls again: pauses grow to 2 ms
POLLING = 0.03  # fraction of a core that a rank uses while it waits for a round
SHORT_POLLING = 0.3  # ... for a few milliseconds: a poll takes 45 us, and the first pauses are hardly longer
HANDOVER_S = 4e-4  # of rank 0 and of a worker for the two messages of a visit: pickling, MPI; 0.26 to 0.5 ms
EXCHANGES = 3  # exchanges of a round for which rank 0 or the workers wait: tasks, reports, plan of the mixing
RANK_S = 25e-6  # processor seconds of rank 0 for a worker (`tests/campaigns/many_ranks.py`)
PAIR_S = 6e-5  # processor seconds of each rank for a pair of a second look whose parts travel: sizes, copies
VISIT_BYTES, RANK_BYTES = 90, 1500  # of tasks and reports: columns of each visit, headers of each worker
CHECKPOINT_BYTES_S = 200e6  # at which the client state of checkpoints is written
TERMS = ("training", "rank 0", "ranks", "network")  # of a round


@dataclass(frozen=True)
class Cores:
    """The cores of the ranks. If a node has more ranks than cores, its ranks share the cores.

    Attributes:
        per_node: number of cores of a node, divided by the number of threads of a rank.
        nodes: number of nodes; None: as many as are needed to give each rank a core.
    """

    per_node: float
    nodes: int | None = None

    def num_nodes(self, num_ranks: int) -> int:
        """Return the number of nodes on which the ranks run."""
        return min(num_ranks, self.nodes or ceil(num_ranks / max(1, int(self.per_node))))

    def node_of(self, num_ranks: int) -> np.ndarray:
        """Return the node of each rank [P]; ranks are distributed evenly, in blocks."""
        return np.arange(num_ranks) * self.num_nodes(num_ranks) // num_ranks

    def slowdown(self, num_ranks: int) -> float:
        """Return the factor by which work takes longer if all ranks do it at the same time."""
        return max(1.0, int(np.bincount(self.node_of(num_ranks)).max()) / self.per_node)

    def busiest(self, owners: np.ndarray, seconds: np.ndarray, num_ranks: int) -> float:
        """Return the seconds until all tasks are done, if all ranks start together and do theirs in turn.

        Args:
            owners: rank of each task.
            seconds: processor seconds of each task.
            num_ranks: P, the number of ranks; ranks without a task wait and poll for messages.
        """
        of_rank = np.bincount(owners, seconds, num_ranks) if len(owners) else np.zeros(num_ranks)
        node_of, last = self.node_of(num_ranks), 0.0
        for node in range(self.num_nodes(num_ranks)):
            at, before, work = 0.0, 0.0, np.sort(of_rank[node_of == node])
            for i, done in enumerate(work.tolist()):  # ranks with less work have finished and wait
                busy = len(work) - i
                at += (done - before) * max(1.0, (busy + POLLING * i) / self.per_node)
                before = done
            last = max(last, at)
        return last


OWN_CORES = Cores(1 << 20)


@dataclass(frozen=True)
class Surroundings:
    """Costs of a run that do not depend on the method's computations.

    Attributes:
        start: seconds until a process is ready, with its libraries loaded.
        open: seconds for opening data and model.
        figures: seconds for loading the libraries of rank 0's figures, and for the first batch.
        end: seconds for the last files, without the rows.
        rows: number of floats in the rows that each round sends to all workers.
        kept_bytes: bytes of client state in a checkpoint.
    """

    start: float
    open: float
    figures: float
    end: float
    rows: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class TimeForecast:
    """The forecast seconds of a run.

    Attributes:
        num_ranks: P, the number of ranks.
        parts: part of the run -> seconds; the parts add up to the total.
        round_s: mean seconds of a round or step.
        processor: processor seconds of all ranks together, without waiting.
        terms: term -> seconds of a round: `training`, at the busiest worker; `rank 0`, its bookkeeping and
            decisions; `ranks`, tasks and reports of all workers at rank 0 and on its link; `network`, the
            trees that send out rows and return sums; `waiting`, for clients that the wall clock holds back.
            In asynchronous runs the terms overlap, and are given as their shares of a step.
    """

    num_ranks: int
    parts: Mapping[str, float]
    round_s: float
    processor: float
    terms: Mapping[str, float]

    @property
    def limits(self) -> str:
        """The term that takes most of a round."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.parts.values())


@dataclass
class _Job:
    """A run on a number of ranks, and the seconds of its rounds and evaluations so far.

    Attributes:
        context: context of the run.
        measured: measured seconds of its parts.
        around: costs that do not depend on the method.
        num_ranks: P, the number of ranks.
        cores: cores of the ranks.
        terms: term -> seconds of the simulated rounds, see `TimeForecast`.
        rounds: seconds of each simulated round, then of all others together.
        evaluation: seconds of all evaluations.
        work: processor seconds of all ranks.
    """

    context: RunContext
    measured: MeasuredTimes
    around: Surroundings
    num_ranks: int
    cores: Cores
    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    rounds: list[float] = field(default_factory=list)
    evaluation: float = 0.0
    work: float = 0.0

    def __post_init__(self) -> None:
        config = self.context.config
        self.scheduler = scheduler_of(self.context, self.num_ranks)
        self.workers = len(self.scheduler.workers)
        self.costs = _costs(self.context, self.num_ranks)
        self.schedule = EvaluationSchedule(self.context.evaluated_clients, config.evaluation.every)
        self.holds_back = isinstance(config.clock, WallTime) and config.clock.scale > 0
        self.steps = min(config.rounds, MOST_STEPS)
        self.terms |= {"waiting": 0.0} if self.holds_back else {}

    def statistics(self) -> tuple[float, float]:
        """Return the seconds before the first round, and the processor seconds of all ranks."""
        measured, sizes = self.measured, self.context.federation.sizes[:, 0]
        once = measured.shown + measured.setup + measured.gram_setup
        if not uses(self.context.config.algorithm, OneShotStatistics):
            return once, once
        everyone = _present(self.context)
        seconds = measured.fingerprint(sizes[everyone])
        owners = scheduler_of(self.context, self.num_ranks).assign(everyone, sizes[everyone])
        busiest = self.cores.busiest(owners, seconds, self.num_ranks)
        return once + busiest, once + float(seconds.sum())

    def assigned_evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank that evaluates each client, and its processor seconds."""
        sizes, clients = self.context.federation.sizes, self.context.evaluated_clients
        samples = sizes[clients, 2] + sizes[clients, 0] * self.context.config.evaluation.train
        return self.scheduler.assign(clients, samples + 1), self.measured.evaluation(samples)

    def add_rest(self) -> None:
        """Add the steps after the simulated ones: each takes the mean of the later half of these."""
        rest = self.context.config.rounds - self.steps
        if rest:
            self.rounds.append(rest * float(np.mean(self.rounds[self.steps // 2 :])))
            self.work *= self.context.config.rounds / self.steps

    # -- rounds ------------------------------------------------------------------------------------------

    def simulate_rounds(self, plan: Plan) -> None:
        """Assign the cohorts of the rounds to ranks and add up the seconds."""
        context, measured, costs = self.context, self.measured, self.costs
        algorithm, scheduler, workers = context.config.algorithm, self.scheduler, self.workers
        sizes, n = trained_samples(context), context.problem.num_clients
        remembers, looks = uses(algorithm, RememberedUploads), uses(algorithm, SecondLook)
        met = set[int]()  # rank and client
        seen = np.zeros(0, np.int64)
        known = _present(context) if uses(algorithm, NewClients) else seen
        every_round = 0.0 if costs is None else self._network(plan, costs)
        exchanges, at_server = self._exchanges(), self._at_server
        for step in range(1, self.steps + 1):
            cohort = context.sampler(step)
            if context.config.policy.leaves_out:  # clients that are left out are not trained
                cohort = cohort[: context.decisions.num_sampled]
            clients = np.union1d(seen, cohort) if remembers else cohort
            fresh = np.isin(clients, cohort)
            pairs = len(clients) ** 2 - (len(seen) ** 2 if measured.looks_once and step > 1 else 0)
            if measured.looks_once and looks and not remembers and step > 1:
                pairs = 0
            costs_of = task_costs(sizes[clients], fresh, bool(looks and pairs))
            owners = scheduler.assign(clients, costs_of)
            places = (owners * n + clients).tolist()
            cold = np.array([place not in met for place in places])
            met.update(place for place, trains in zip(places, fresh, strict=True) if trains)
            trained = np.where(cold, measured.first_visit(sizes[clients]), measured.visit(sizes[clients]))
            seconds = np.where(fresh, trained, measured.remembered)
            moved, compared = every_round + next(exchanges, 0.0), 0.0
            if looks and pairs:
                compared = measured.compare * pairs if at_server else 0.0
                seconds = seconds + (measured.look * pairs - compared) / len(clients)
            if uses(algorithm, NewClients):
                new = ~np.isin(clients, known)
                seconds = seconds + np.where(new, measured.fingerprint(sizes[clients]), 0.0)
                known = np.union1d(known, clients)
            seen = clients if remembers else seen
            with_sums = np.concatenate([seconds + measured.mix, [measured.mix_once] * workers])
            everyone = np.concatenate([owners, scheduler.workers])
            training = self.cores.busiest(everyone, with_sums, self.num_ranks)
            server = measured.book_once + measured.book * len(clients) + measured.decide + measured.gram
            server += compared
            told = 0.0
            if costs is not None:
                told = EXCHANGES * POLL_S + ranks_seconds(costs, len(clients), workers)
            for name, spent in zip(TERMS, (training, server, told, moved), strict=True):
                self.terms[name] += spent
            self.work += float(seconds.sum()) + measured.mix * len(clients) + measured.mix_once * workers
            self.work += server + RANK_S * workers * (costs is not None)
            self.rounds.append(training + server + told + moved)
        self.add_rest()
        owners, seconds = self.assigned_evaluations()
        each, work = self.cores.busiest(owners, seconds, self.num_ranks), float(seconds.sum())
        if costs is not None:
            rows = max(1, self.around.rows // context.problem.layout.size)
            each += EXCHANGES * POLL_S + costs.sharing(rows, 1)
        count = self.schedule.num_due(0, context.config.rounds) + context.config.evaluation.at_start
        self.evaluation += count * (each + measured.record)
        self.work += count * (work + measured.record)

    @property
    def _at_server(self) -> bool:
        """Whether rank 0 compares what clients send in second looks."""
        exchange = self.context.config.system.exchange
        return self.costs is not None and isinstance(exchange, OverMpi) and exchange.distances == "server"

    def _exchanges(self) -> Iterator[float]:
        """Yield the seconds that ranks exchange questions and answers, of each round with a second look.

        Each rank waits for all others several times in a wave, and learns the sizes of all pairs.
        """
        config, costs = self.context.config, self.costs
        if (
            costs is None
            or not uses(config.algorithm, SecondLook)
            or isinstance(config.system.exchange, Local)
        ):
            return
        sizes = hooks_of(config.algorithm, SecondLook).look_sizes(planned_run(self.context))
        latency = tree_levels(self.num_ranks) * costs.latency_s
        for look in () if sizes is None else looks_of_ranks(self.context, self.num_ranks, sizes):
            waits = look.told * (POLL_S + 2 * latency) + look.vectors * latency
            yield waits + FLOAT_BYTES * look.busiest / costs.bytes_s + PAIR_S * look.pairs

    def _network(self, plan: Plan, costs: Costs) -> float:
        """Return the seconds for sending a round's rows and sums, with a barrier before each sum."""
        exact, d = self.context.config.system.sums == "exact", self.context.problem.layout.size
        seconds = 0.0
        for mixing in plan.mixings:
            rows, uploads = mixing.num_rows, mixing.weights.shape[1]
            collective = choose(rows, uploads, exact)
            seconds += costs.mixing(collective, rows, uploads, d, self.num_ranks, exact)
            seconds += tree_levels(self.num_ranks) * costs.latency_s
        return seconds + costs.sharing(max(1, self.around.rows // d), d)

    # -- arrivals ----------------------------------------------------------------------------------------

    def simulate_arrivals(self, traffic: TrafficForecast) -> None:
        """Simulate the arrivals of an asynchronous run."""
        context, measured, terms, costs = self.context, self.measured, self.terms, self.costs
        size = sum(traffic.per_round) / uploads_per_step(context)
        handover = 0.0 if costs is None else HANDOVER_S + 2 * costs.latency_s + size / costs.bytes_s
        ranks = OneProcess() if costs is None else Ranks(self.num_ranks, self.cores, handover)
        owners, evaluations = self.assigned_evaluations()
        each = self.cores.busiest(owners, evaluations, self.num_ranks)
        read = 0.0 if costs is None else EXCHANGES * POLL_S + measured.unread
        seconds, last, spent = measured.visit(trained_samples(context)).tolist(), 0.0, list[float]()
        for kind, number, client, due in arrivals(context, traffic, self.steps):
            if kind == START:
                hosts = self.scheduler.hosts
                ranks.submit(number, due, seconds[client], None if hosts is None else int(hosts[client]))
            elif kind == EVALUATE:
                ranks.evaluate(owners, evaluations)
                ranks.work(measured.record + read)
                self.work += float(evaluations.sum()) + measured.record
                self.work += 0.0 if costs is None else measured.unread
                spent.append(ranks.now - last)
                last = ranks.now
            elif kind == END:
                ranks.result(number)
                terms["training"] += (seconds[client] + handover) / self.workers
                terms["network"] += handover
                self.work += seconds[client] + 2 * handover
            else:
                ranks.work(measured.step)
                terms["rank 0"] += measured.step
                self.work += measured.step
            if kind in (END, STEP) and self.holds_back:
                terms["waiting"] += max(0.0, due - ranks.now)
                ranks.hold(due)
            if kind == STEP:
                self.rounds.append(ranks.now - last)
                last = ranks.now
        self.add_rest()
        more = self.schedule.num_due(self.steps, context.config.rounds)
        once = float(np.mean(spent)) if spent else each + measured.record
        at_start = context.config.evaluation.at_start * (each + measured.record)
        self.evaluation = sum(spent) + at_start + more * once


def forecast_time(
    context: RunContext,
    measured: MeasuredTimes,
    traffic: TrafficForecast,
    plan: Plan,
    around: Surroundings,
    num_ranks: int,
    cores: Cores = OWN_CORES,
) -> TimeForecast:
    """Return the time forecast of a run on a number of ranks.

    Args:
        context: context of the run.
        measured: measured seconds of its parts.
        traffic: traffic forecast of the run.
        plan: plan of a step.
        around: costs that do not depend on the method.
        num_ranks: P, the number of ranks.
        cores: cores of the ranks.
    """
    job = _Job(context, measured, around, num_ranks, cores)
    if context.config.policy.synchronous:
        job.simulate_rounds(plan)
    else:
        job.simulate_arrivals(traffic)
    statistics, work = job.statistics()
    several, slowdown = num_ranks > 1, cores.slowdown(num_ranks)
    start = around.start + MPI_CPU_S * several
    parts = {
        "start-up": start * slowdown + around.figures + LAUNCH_S * several,
        "data and model": around.open * (1 + several * slowdown),
        "set-up statistics": statistics,
        "rounds": sum(job.rounds),
        "evaluation": job.evaluation,
    }
    once = measured.checkpoint + around.kept_bytes / CHECKPOINT_BYTES_S
    parts["checkpoints"] = once * _num_checkpoints(context, sum(parts.values()))
    parts["end"] = around.end + measured.checkpoint + EXIT_CPU_S * slowdown
    each = start + around.open + EXIT_CPU_S
    processor = each * num_ranks + around.figures + job.work + work + around.end
    mean = parts["rounds"] / context.config.rounds
    share = mean / max(sum(job.terms.values()), 1e-12)
    terms = {name: seconds * share for name, seconds in job.terms.items()}
    return TimeForecast(num_ranks, parts, mean, processor, terms)


def _costs(context: RunContext, num_ranks: int) -> Costs | None:
    """Return the costs of messages: the given ones, or the defaults of `Given`; None for one process."""
    kind = context.config.system.cost
    given = kind if isinstance(kind, Given) else Given()
    return between(given.latency_s, given.bytes_s, num_ranks) if num_ranks > 1 else None


def _num_checkpoints(context: RunContext, seconds: float) -> int:
    """Return the number of checkpoints that a run of a number of seconds writes."""
    config, rounds = context.config.checkpoint, context.config.rounds
    if rounds < 2 or not (config.every or config.minutes):
        return 0
    by_time = int(seconds / (60 * config.minutes)) if config.minutes else 0
    return 1 + by_time + ((rounds - 1) // config.every if config.every else 0)


def _present(context: RunContext) -> np.ndarray:
    """Return the clients that are present from the first round on, ascending."""
    absent = np.array(context.decisions.absent, np.int64)
    return np.delete(np.arange(context.problem.num_clients), absent)


def ranks_seconds(costs: Costs, visits: float, workers: int) -> float:
    """Return the seconds of a round's tasks and reports at rank 0 and on its link.

    The messages of an exchange travel at the same time, so its latency counts once.

    Args:
        costs: costs of messages.
        visits: number of visits in the round.
        workers: number of ranks that host clients.
    """
    on_link = (VISIT_BYTES * visits + RANK_BYTES * workers) / costs.bytes_s
    return RANK_S * workers + EXCHANGES * costs.latency_s + on_link


# -- arrivals ------------------------------------------------------------------------------------------------

START, END, STEP, EVALUATE = range(4)
Event = tuple[int, int, int, float]  # kind, number of the visit or step, client, time at which it is due


class _NoPool:
    """A training pool that trains nothing, because the clocks of a forecast know when visits arrive."""

    def finished(self) -> list[int]:
        return []

    def poll(self) -> None:
        return


class _HeldBack(VirtualClock):
    """A virtual clock in wall time: visits arrive when the wall clock of the run would release them.

    Args:
        wall: the wall clock of the run.
    """

    def __init__(self, wall: WallClock) -> None:
        super().__init__(wall.duration)
        self.scale = wall.scale

    def due(self, client: int, visit: int, down: int, up: int, look: float = 0.0) -> float:
        """Return the time until which the visit is held back."""
        return self.scale * self.duration.end(client, visit, self.now / self.scale, down, up, look=look)

    def take_statistics(self, moved: Moves, pool: TrainingPool) -> None:
        """Advance the clock by the time of their messages, in wall time."""
        self.now = self.scale * self.duration.statistics_end(moved)

    @property
    def available(self) -> Callable[[int], bool] | None:
        """Client -> whether it is present in simulated time; None if all clients always are."""
        presence = self.duration.presence
        return None if presence.always else (lambda k: presence.is_available(k, self.now / self.scale))

    def return_of(self, clients: Collection[int]) -> float:
        """Return the wall time of the first return of an absent client; infinity if none is absent."""
        return self.scale * first_return(self.duration.presence, clients, self.now / self.scale)


def arrivals(context: RunContext, traffic: TrafficForecast, steps: int) -> list[Event]:
    """Return the events in the first steps of an asynchronous run, according to its policy and clock.

    Args:
        context: context of the run.
        traffic: traffic forecast of the run.
        steps: number of steps.
    """
    down, up = (size // uploads_per_step(context) for size in traffic.per_round)
    return events_of(context, _statistics_moved(context, traffic), down, up, steps)


def check_replay(context: RunContext) -> None:
    """Raise `UserError` if the arrivals of a trace are not those of such a run, or too few for its steps.

    Visits that fail, and are left out, can still make a trace too short.
    """
    if isinstance(context.config.clock, Replay):
        everyone = np.arange(context.problem.num_clients * uses(context.config.algorithm, OneShotStatistics))
        events_of(context, _moved(everyone, 0, 0), 0, 0, context.config.rounds)


def events_of(context: RunContext, statistics: Moves, down: int, up: int, steps: int) -> list[Event]:
    """Return the events in the first steps of an asynchronous run whose visits all move the same bytes.

    Args:
        context: context of the run.
        statistics: messages of the one-shot statistics; empty if there are none.
        down: bytes of a download.
        up: bytes of an upload.
        steps: number of steps.
    """
    config, policy, sampler = context.config, context.config.policy, context.sampler
    assert isinstance(policy, AsynchronousPolicy)
    m = context.decisions.num_sampled
    parts = ClockParts(config.clock, context.duration, context.federation, m, context.system_key, 0)
    clock = policy.open_clock(parts)
    if isinstance(clock, WallClock):  # assume that visits arrive when due, or in the order of their starts
        clock = _HeldBack(clock) if clock.scale else DrawnClock()
    dispatcher, pool = Dispatcher(policy, clock, sampler, context.system_key), _NoPool()
    visits, out = np.zeros(context.problem.num_clients, np.int64), list[Event]()
    schedule = EvaluationSchedule(context.evaluated_clients, config.evaluation.every)
    version = waiting = 0

    def start(client: int, read: int) -> None:
        policy.check_read(client, read, version)
        visit = dispatcher.begin(client, int(visits[client]), read, down, up)
        out.append((START, visit.number, client, visit.due))

    dispatcher.take_statistics(statistics, pool)
    dispatcher.fill(version, waiting, pool, start)
    while version < steps:
        visit = dispatcher.next_arrival(pool)
        if visit is not None:
            visits[visit.client] += 1
            out.append((END, visit.number, visit.client, visit.due))
            waiting += not policy.refuses(version - visit.version)
        if dispatcher.server_steps(visit, waiting):
            version, waiting = version + 1, 0
            out.append((STEP, version, -1, clock.now))
            if schedule.due(version, config.rounds):
                out.append((EVALUATE, version, -1, 0.0))
        if version < steps:
            dispatcher.fill(version, waiting, pool, start)
    return out


def _statistics_moved(context: RunContext, traffic: TrafficForecast) -> Moves:
    """Return the messages of the clients' one-shot statistics, each with the mean size."""
    n = context.problem.num_clients
    who = np.arange(n if uses(context.config.algorithm, OneShotStatistics) else 0)
    down, up = (total // n for total in traffic.fingerprints)
    return _moved(who, down, up)


def _moved(who: np.ndarray, down: int, up: int) -> Moves:
    """Return messages of one size of some clients [n] before the first step."""
    nothing = np.zeros_like(who)
    return Moves(np.stack([nothing, who, nothing, nothing, nothing + down, nothing + up], axis=1))


_Visit = tuple[float, int, float]  # due, number, seconds
EVALUATION = -1  # task number of an evaluation, which a worker begins after the tasks that it holds


class Ranks:
    """Simulates rank 0 and its workers in an asynchronous run, with visits assigned as by the task pool.

    Workers hold a few tasks ahead and do them in turn. Rank 0 receives reports and sends more tasks only
    while it waits for the report that it needs next. If a node has more ranks than cores, they share them.

    Args:
        num_ranks: P, the number of ranks, at least 2.
        cores: cores of the ranks.
        handover: processor seconds of rank 0 and of a worker for the messages of a visit.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self, num_ranks: int, cores: Cores = OWN_CORES, handover: float = 0.0) -> None:
        self.now, self.handover, self.cores = 0.0, handover, cores
        self.node = cores.node_of(num_ranks).tolist()
        self.on_node = np.bincount(self.node).tolist()
        self.shared = max(self.on_node) > cores.per_node
        self.left: dict[int, float] = {}  # working rank -> remaining processor seconds of its current task
        self.held: dict[int, deque[tuple[int, float]]] = {r: deque() for r in range(1, num_ranks)}
        self.open = dict.fromkeys(self.held, 0)  # tasks of a worker whose reports rank 0 has not received
        self.waiting: list[_Visit] = []  # any worker may do these
        self.own: dict[int, list[_Visit]] = {r: [] for r in self.held}
        self.reports: deque[tuple[int, int]] = deque()  # worker and number of reports not yet received
        self.answers = set[int]()
        self.under_way = 0

    def submit(self, number: int, due: float, seconds: float, host: int | None = None) -> None:
        """Submit a visit; the visit that is due first is sent first.

        Args:
            number: number of the visit.
            due: time at which it is due, on the run's clock.
            seconds: processor seconds of the visit.
            host: the worker that hosts the client; None: any worker may do it.
        """
        heapq.heappush(self.waiting if host is None else self.own[host], (due, number, seconds))
        self.under_way += 1
        self._send()

    def work(self, seconds: float) -> None:
        """Let rank 0 work for a number of processor seconds."""
        if seconds > 0:
            self.left[0] = seconds
            while 0 in self.left:
                self._next()

    def result(self, number: int) -> None:
        """Let rank 0 wait for the report of a visit."""
        while number not in self.answers:
            self._poll()
            if number not in self.answers:
                self._next()
        self.answers.discard(number)

    def hold(self, until: float) -> None:
        """Let rank 0 wait until a time and receive the reports that arrive before it."""
        while self.now < until:
            self._poll()
            if self.left:
                self._next(until)
            else:
                self.now = max(self.now, until)

    def evaluate(self, owners: np.ndarray, seconds: np.ndarray) -> None:
        """Let each worker finish the tasks that it holds and evaluate clients; rank 0 waits for all.

        Args:
            owners: rank that evaluates each client.
            seconds: processor seconds of each client's evaluation.
        """
        of_rank = np.bincount(owners, seconds, len(self.node)).tolist()
        for rank, held in self.held.items():
            held.append((EVALUATION, of_rank[rank]))
            self._begin(rank)
        while self.left:
            self._next()
        self._poll()

    def _poll(self) -> None:
        while self.reports:  # more may arrive while rank 0 receives one
            rank, number = self.reports.popleft()
            self.work(self.handover)
            self.answers.add(number)
            self.open[rank] -= 1
            self.under_way -= 1
            self._send()

    def _send(self) -> None:
        for level in range(depth(self.under_way, len(self.held))):
            for rank, open_tasks in self.open.items():
                if open_tasks == level and (queue := self.own[rank] or self.waiting):
                    _, number, seconds = heapq.heappop(queue)
                    self.held[rank].append((number, seconds + self.handover))
                    self.open[rank] += 1
                    self._begin(rank)

    def _begin(self, rank: int) -> None:
        if rank not in self.left and self.held[rank]:
            self.left[rank] = self.held[rank][0][1]

    def _next(self, until: float = inf) -> None:
        """Let all ranks work until one of them has finished its task, or until a time."""
        assert self.left, "a visit that nobody has started"
        rate = [1.0] * len(self.on_node)
        if self.shared:
            busy = [0] * len(self.on_node)
            for rank in self.left:
                busy[self.node[rank]] += 1
            for i, (all_ranks, some) in enumerate(zip(self.on_node, busy, strict=True)):
                rate[i] = min(1.0, self.cores.per_node / (some + SHORT_POLLING * (all_ranks - some)))
        lasts = {rank: seconds / rate[self.node[rank]] for rank, seconds in self.left.items()}
        step = min(*lasts.values(), max(0.0, until - self.now))
        self.now += step
        for rank, seconds in lasts.items():
            if seconds > step:
                self.left[rank] = (seconds - step) * rate[self.node[rank]]
                continue
            del self.left[rank]
            if rank:
                number, _ = self.held[rank].popleft()
                if number != EVALUATION:
                    self.reports.append((rank, number))
                self._begin(rank)


class OneProcess:
    """Simulates a run of one process, which trains a visit when its report is due; see `Ranks`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.visits: dict[int, float] = {}  # number of a visit that has started -> its seconds

    def submit(self, number: int, due: float, seconds: float, host: int | None = None) -> None:
        """Submit a visit."""
        self.visits[number] = seconds

    def work(self, seconds: float) -> None:
        """Work for a number of seconds."""
        self.now += seconds

    def result(self, number: int) -> None:
        """Train a visit."""
        self.now += self.visits.pop(number)

    def hold(self, until: float) -> None:
        """Wait until a time."""
        self.now = max(self.now, until)

    def evaluate(self, owners: np.ndarray, seconds: np.ndarray) -> None:
        """Evaluate clients."""
        self.now += float(seconds.sum())


# -- several numbers of ranks --------------------------------------------------------------------------------

MARGIN = 1.5  # factor on the forecast time
MEMORY_MARGIN = 1.25
WARNED_S = 180.0  # launch/slurm ends a run this much before the time limit: the signal is asked for 120 s
# before it, and Slurm sends it up to 60 s early


@dataclass(frozen=True)
class Allocation:
    """Resources to request from a job scheduler.

    Attributes:
        nodes: number of nodes.
        ranks: P, the number of ranks.
        bytes: memory of each node in bytes.
        seconds: time of the whole job.
        shared: whether a node has more ranks than cores.
        threads: cores of each rank.
    """

    nodes: int
    ranks: int
    bytes: float
    seconds: float
    shared: bool = False
    threads: int = 1

    @classmethod
    def of(
        cls, found: TimeForecast, server: int, worker: int, kept: int, cores: Cores, threads: int = 1
    ) -> Allocation:
        """Return the allocation of a forecast, with its margins.

        Args:
            found: the forecast.
            server: bytes of rank 0.
            worker: bytes of the busiest worker.
            kept: bytes of client state on all nodes together.
            cores: cores of the ranks.
            threads: threads of each rank.
        """
        ranks, nodes = found.num_ranks, cores.num_nodes(found.num_ranks)
        on_first = int((cores.node_of(ranks) == 0).sum())
        memory = server + (on_first - 1) * worker + kept / nodes
        seconds, shared = max(300.0, MARGIN * found.total + WARNED_S), cores.slowdown(ranks) > 1
        return cls(nodes, ranks, MEMORY_MARGIN * memory, seconds, shared, threads)

    def __str__(self) -> str:
        minutes = ceil(self.seconds / 60)
        memory = ceil(self.bytes / 1e6 / 100) * 100
        clock = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
        # Slurm gives a job with --overcommit one core of each node, unless it gets all of them, and refuses
        # more tasks on a node than its cores; without it, all tasks could come to the first nodes
        more = (
            " --overcommit --exclusive"
            if self.shared
            else f" --ntasks-per-node {-(-self.ranks // self.nodes)}"
        )
        more += f" --cpus-per-task {self.threads}" * (self.threads > 1 and not self.shared)
        return f"--nodes {self.nodes} --ntasks {self.ranks}{more} --mem {memory}M --time {clock}"


def efficiencies(found: Sequence[TimeForecast], one_worker: TimeForecast) -> list[float]:
    """Return strong-scaling efficiencies: seconds of a round on one worker / (workers x seconds of a round).

    Args:
        found: the forecasts.
        one_worker: the forecast for two ranks, which have one worker.
    """
    return [one_worker.round_s / (max(1, f.num_ranks - 1) * f.round_s) for f in found]
