"""How long a run will take at any number of ranks, from measured seconds of its parts.

Synchronous rounds are dealt by the scheduler that a run uses, on the cohorts that it draws; a round lasts as
long as its busiest worker, and rank 0 and the network after it. Asynchronous runs are played through: the
policy and the clock of the run start and end the visits, workers take them by urgency, rank 0 takes them in
the order of the clock. Every rank has a core of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from mpifl.aggregation.collective_choice import Costs, Given, between, choose
from mpifl.core.capabilities import (
    NewClients,
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    uses,
)
from mpifl.core.mixing import Plan
from mpifl.runtime.engine import EvaluationSchedule
from mpifl.runtime.scheduler import Scheduler
from mpifl.simulation.clock import Clock, DrawnClock, WallTime
from mpifl.simulation.policies import AsynchronousPolicy
from mpifl.simulation.visits import DispatchState, Visit

from .context import RunContext
from .measured_times import MeasuredTimes, trained_samples
from .traffic_forecast import TrafficForecast

MOST_STEPS = 400  # that are dealt or played through; the mean of the later half stands for the rest
MPI_S = 0.8  # in which mpirun starts, and MPI connects the ranks of a node
POLL_S = 1e-3  # until a rank that waits looks again: pauses grow to 2 ms
EXCHANGES = 3  # of a round that rank 0 or the workers wait for: command, tasks, reports
CHECKPOINT_BYTES_S = 200e6  # of the client state in checkpoints


@dataclass(frozen=True)
class Surroundings:
    """Seconds of what is not the method's.

    Attributes:
        start: of a process until it is ready, programs loaded.
        open: of data and model.
        figures: of the libraries for rank 0's figures, and the first batch.
        end: of the last files, without the rows.
        rows: numbers that a round sends to all workers again.
        kept_bytes: of client state in a checkpoint.
    """

    start: float
    open: float
    figures: float
    end: float
    rows: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class TimeForecast:
    """The seconds of a run.

    Attributes:
        num_ranks: P.
        parts: part -> seconds; they add up to the whole.
        round_s: of a round, or step: their mean.
        processor: of all ranks together, without those in which they wait.
        limits: what most of a round is spent on.
    """

    num_ranks: int
    parts: Mapping[str, float]
    round_s: float
    processor: float
    limits: str

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.parts.values())


@dataclass
class _Spent:
    """Seconds of rounds and evaluations, by what they are spent on."""

    training: float = 0.0
    server: float = 0.0
    network: float = 0.0
    evaluation: float = 0.0
    work: float = 0.0  # of all ranks
    rounds: list[float] = field(default_factory=list)
    evaluations: int = 0


def forecast_time(
    context: RunContext,
    measured: MeasuredTimes,
    traffic: TrafficForecast,
    plan: Plan,
    around: Surroundings,
    num_ranks: int,
) -> TimeForecast:
    """Return how long a run takes on so many ranks.

    Args:
        context: of the run.
        measured: seconds of its parts.
        traffic: of the run.
        plan: of a step.
        around: what is not the method's.
        num_ranks: P.
    """
    costs = _costs(context, num_ranks)
    if context.config.policy.synchronous:
        spent = _rounds(context, measured, plan, around, num_ranks, costs)
    else:
        spent = _arrivals(context, measured, traffic, num_ranks, costs)
    statistics, work = _statistics(context, measured, num_ranks)
    rounds = sum(spent.rounds)
    several = num_ranks > 1
    parts = {
        "start-up": around.start + around.figures + MPI_S * several,
        "data and model": around.open * (1 + several),
        "set-up statistics": statistics,
        "rounds": rounds,
        "evaluation": spent.evaluation,
    }
    once = measured.checkpoint + around.kept_bytes / CHECKPOINT_BYTES_S
    parts["checkpoints"] = once * _num_checkpoints(context, sum(parts.values()))
    parts["end"] = around.end + measured.checkpoint
    terms = {"training": spent.training, "rank 0": spent.server, "network": spent.network}
    processor = (around.start + around.open) * num_ranks + around.figures + spent.work + work + around.end
    mean = rounds / context.config.rounds
    return TimeForecast(num_ranks, parts, mean, processor, max(terms, key=lambda name: terms[name]))


def _costs(context: RunContext, num_ranks: int) -> Costs | None:
    """Return the costs of messages: given ones, or the defaults of those; None for one process."""
    kind = context.config.system.cost
    given = kind if isinstance(kind, Given) else Given()
    return between(given.latency_s, given.bytes_s, num_ranks) if num_ranks > 1 else None


def _num_checkpoints(context: RunContext, seconds: float) -> int:
    """Return how many checkpoints a run of so many seconds writes."""
    config, rounds = context.config.checkpoint, context.config.rounds
    if rounds < 2 or not (config.every or config.minutes):
        return 0
    by_time = int(seconds / (60 * config.minutes)) if config.minutes else 0
    return 1 + by_time + ((rounds - 1) // config.every if config.every else 0)


def _scheduler(context: RunContext, num_ranks: int) -> Scheduler:
    workers = tuple(range(1, num_ranks)) or (0,)
    sizes = context.federation.sizes[:, 0]
    return Scheduler((0,) * num_ranks, workers, sizes, stack=context.decisions.stack)


def _busiest(owners: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.bincount(owners, seconds).max()) if len(owners) else 0.0


def _statistics(context: RunContext, measured: MeasuredTimes, num_ranks: int) -> tuple[float, float]:
    """Return the seconds before the first round, and the processor seconds of all ranks."""
    algorithm, sizes = context.config.algorithm, context.federation.sizes[:, 0]
    once = measured.shown + measured.setup + measured.gram_setup
    if not uses(algorithm, OneShotStatistics):
        return once, once
    everyone = np.setdiff1d(np.arange(len(sizes)), context.decisions.absent)
    seconds = measured.fingerprint(sizes[everyone])
    owners = _scheduler(context, num_ranks).assign(everyone, sizes[everyone])
    return once + _busiest(owners, seconds), once + float(seconds.sum())


# -- rounds --------------------------------------------------------------------------------------------------


def _rounds(
    context: RunContext,
    measured: MeasuredTimes,
    plan: Plan,
    around: Surroundings,
    num_ranks: int,
    costs: Costs | None,
) -> _Spent:
    """Deal the cohorts of a run's rounds, and add up what they take."""
    config, algorithm, sampler = context.config, context.config.algorithm, context.sampler
    sizes, n, out = trained_samples(context), context.problem.num_clients, _Spent()
    remembers, looks = uses(algorithm, RememberedUploads), uses(algorithm, SecondLook)
    scheduler, met = _scheduler(context, num_ranks), set[int]()  # rank and client
    seen = np.zeros(0, np.int64)
    known = np.setdiff1d(np.arange(n), context.decisions.absent)
    schedule = EvaluationSchedule(context.evaluated_clients, config.evaluation.every)
    moved = 0.0 if costs is None else _network(context, plan, around, costs, num_ranks)
    most = min(config.rounds, MOST_STEPS)
    for step in range(1, most + 1):
        cohort = sampler(step)
        if context.config.policy.leaves_out:  # who is left out is not trained
            cohort = cohort[: context.decisions.num_sampled]
        clients = np.union1d(seen, cohort) if remembers else cohort
        fresh = np.isin(clients, cohort)
        pairs = len(clients) ** 2 - (len(seen) ** 2 if measured.looks_once and step > 1 else 0)
        if measured.looks_once and looks and not remembers and step > 1:
            pairs = 0
        costs_of = np.where(fresh, sizes[clients], 1) + (64 * len(clients) if looks and pairs else 0)
        owners = scheduler.assign(clients, costs_of)
        places = (owners * n + clients).tolist()
        cold = np.array([place not in met for place in places])
        met.update(place for place, trains in zip(places, fresh, strict=True) if trains)
        trained = np.where(cold, measured.first_visit(sizes[clients]), measured.visit(sizes[clients]))
        seconds = np.where(fresh, trained, measured.remembered)
        if looks and pairs:
            seconds = seconds + measured.look * pairs / len(clients)
        if uses(algorithm, NewClients):
            new = ~np.isin(clients, known)
            seconds = seconds + np.where(new, measured.fingerprint(sizes[clients]), 0.0)
            known = np.union1d(known, clients)
        seen = np.union1d(seen, cohort) if remembers else seen
        uploads = int(np.bincount(owners).max())
        training = _busiest(owners, seconds) + measured.mix * uploads + measured.mix_once
        server = measured.book * len(clients) + measured.decide + measured.gram
        out.training += training
        out.server += server
        out.network += moved
        mixing = measured.mix * len(clients) + measured.mix_once * max(1, num_ranks - 1)
        out.work += float(seconds.sum()) + mixing + server
        out.rounds.append(training + server + moved)
        if schedule.due(step, config.rounds):
            out.evaluations += 1
    rest = config.rounds - most
    if rest:
        out.rounds.append(rest * float(np.mean(out.rounds[most // 2 :])))
        out.work *= config.rounds / most
    _evaluate(context, measured, around, num_ranks, costs, schedule, scheduler, out)
    return out


def _network(context: RunContext, plan: Plan, around: Surroundings, costs: Costs, num_ranks: int) -> float:
    """Return the seconds in which a round's messages travel."""
    exact, d = context.config.system.sums == "exact", context.problem.layout.size
    seconds = EXCHANGES * (POLL_S + costs.latency_s * max(1, num_ranks - 1))
    for mixing in plan.mixings:
        rows, uploads = mixing.num_rows, mixing.weights.shape[1]
        collective = choose(rows, uploads, exact)
        seconds += costs.mixing(collective, rows, uploads, d, num_ranks, exact)
    return seconds + costs.sharing(max(1, around.rows // d), d)


def _evaluate(
    context: RunContext,
    measured: MeasuredTimes,
    around: Surroundings,
    num_ranks: int,
    costs: Costs | None,
    schedule: EvaluationSchedule,
    scheduler: Scheduler,
    out: _Spent,
) -> None:
    """Add the evaluations of a run."""
    config, clients = context.config, context.evaluated_clients
    each, work = evaluation_seconds(context, measured, scheduler)
    if costs is not None:
        each += EXCHANGES * POLL_S + costs.sharing(max(1, around.rows // context.problem.layout.size), 1)
    steps = range(1, config.rounds + 1)
    count = sum(schedule.due(step, config.rounds) for step in steps) + config.evaluation.at_start
    out.evaluation += count * (each + measured.record)
    out.work += count * (work + measured.record)
    assert len(clients)


def evaluation_seconds(
    context: RunContext, measured: MeasuredTimes, scheduler: Scheduler
) -> tuple[float, float]:
    """Return the seconds of the busiest worker in an evaluation, and those of all workers."""
    sizes, clients = context.federation.sizes, context.evaluated_clients
    samples = sizes[clients, 2] + sizes[clients, 0] * context.config.evaluation.train
    seconds = measured.evaluation(samples)
    return _busiest(scheduler.assign(clients, samples + 1), seconds), float(seconds.sum())


# -- arrivals ------------------------------------------------------------------------------------------------

START, END, STEP, EVALUATE = range(4)
Event = tuple[int, int, int, float]  # kind, number of the visit or step, client, when it is due


def arrivals(context: RunContext, traffic: TrafficForecast, steps: int) -> list[Event]:
    """Return what happens in the first steps of an asynchronous run, as its policy and clock have it.

    Args:
        context: of the run.
        traffic: of the run.
        steps: how many.
    """
    config, policy, sampler = context.config, context.config.policy, context.sampler
    assert isinstance(policy, AsynchronousPolicy)
    n, m = context.problem.num_clients, context.decisions.num_sampled
    clock: Clock
    if isinstance(config.clock, WallTime):  # arrivals are real: about in the order of the starts
        clock = DrawnClock()
    else:
        opened = policy.open_clock(config.clock, context.duration, context.federation, m, context.system_key)
        clock = opened
    per_visit = 1 if config.algorithm.needs.single_upload else m
    down, up = (size // per_visit for size in traffic.per_round)
    busy, visits, out = set[int](), np.zeros(n, np.int64), list[Event]()
    version = started = waiting = 0
    filled, tick = -1, policy.next_tick(0.0)
    concurrency = policy.concurrency(n, m)
    schedule = EvaluationSchedule(context.evaluated_clients, config.evaluation.every)
    pool: list[None] = []

    def fill() -> None:
        nonlocal started, filled
        while True:
            state = DispatchState(
                busy,
                started,
                version,
                concurrency,
                sampler,
                context.system_key,
                clock.available,
                waiting,
                filled,
            )
            found = clock.starts(state)
            for k, read in policy.starts(state) if found is None else found:
                due = clock.due(k, int(visits[k]), down, up)
                clock.add(Visit(due, started, k, int(visits[k]), read, clock.now))
                out.append((START, started, k, due))
                busy.add(k)
                started += 1
                filled = version
            if busy or (waiting and tick < inf):
                return
            clock.advance(n)

    fill()
    while version < steps:
        visit = clock.pop(pool, tick)  # type: ignore[arg-type]  # these clocks do not look into it
        if visit is None:
            tick = policy.next_tick(clock.now)
        else:
            busy.discard(visit.client)
            visits[visit.client] += 1
            out.append((END, visit.number, visit.client, visit.due))
            late = policy.max_staleness is not None and version - visit.version > policy.max_staleness
            waiting += not late
        if waiting and (visit is None or policy.ready(waiting, len(busy))):
            version, waiting = version + 1, 0
            out.append((STEP, version, -1, 0.0))
            if schedule.due(version, config.rounds):
                out.append((EVALUATE, version, -1, 0.0))
        if version < steps and not clock.is_tied():
            fill()
    return out


class Workers:
    """Workers that take visits by urgency, each as soon as it is free.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.free = [0.0] * count
        self.waiting: list[tuple[float, int, float, float]] = []  # due, number, sent, seconds
        self.ends: dict[int, float] = {}

    def send(self, number: int, due: float, now: float, seconds: float) -> None:
        """Add a visit that was sent now."""
        heapq.heappush(self.waiting, (due, number, now, seconds))

    def take(self) -> None:
        """Give the most urgent visit to the worker that is free first."""
        at = self.free[0]
        there = [entry for entry in self.waiting if entry[2] <= at]
        entry = min(there) if there else min(self.waiting, key=lambda e: (e[2], e[0], e[1]))
        if entry is self.waiting[0]:
            heapq.heappop(self.waiting)
        else:
            self.waiting.remove(entry)
            heapq.heapify(self.waiting)
        _, number, sent, seconds = entry
        self.ends[number] = max(at, sent) + seconds
        heapq.heapreplace(self.free, self.ends[number])

    def end(self, number: int) -> float:
        """Return when a visit is over."""
        while number not in self.ends:
            self.take()
        return self.ends.pop(number)

    def meet(self, now: float) -> float:
        """Return when all workers have ended what they hold."""
        for _ in range(min(len(self.waiting), len(self.free))):
            self.take()
        return max(now, *self.free)

    def hold(self, until: float) -> None:
        """Keep all workers busy until then."""
        self.free = [max(until, at) for at in self.free]
        heapq.heapify(self.free)


def _arrivals(
    context: RunContext,
    measured: MeasuredTimes,
    traffic: TrafficForecast,
    num_ranks: int,
    costs: Costs | None,
) -> _Spent:
    """Play the arrivals of an asynchronous run through."""
    config, sizes = context.config, trained_samples(context)
    steps = min(config.rounds, MOST_STEPS)
    events, out = arrivals(context, traffic, steps), _Spent()
    per_visit = 1 if config.algorithm.needs.single_upload else context.decisions.num_sampled
    size = sum(traffic.per_round) / per_visit
    travel = 0.0 if costs is None else 2 * costs.latency_s + size / costs.bytes_s
    workers = Workers(max(1, num_ranks - 1))
    each, work = evaluation_seconds(context, measured, _scheduler(context, num_ranks))
    seconds = measured.visit(sizes)
    now, last, evaluated, alone = 0.0, 0.0, 0.0, num_ranks == 1
    for kind, number, client, due in events:
        if kind == START and not alone:
            workers.send(number, due, now, float(seconds[client]) + travel)
        elif kind == END:
            now = now + float(seconds[client]) if alone else max(now, workers.end(number))
            out.training += float(seconds[client]) / len(workers.free)
            out.work += float(seconds[client])
        elif kind == STEP:
            now += measured.step + (0.0 if alone else travel)
            out.server += measured.step
            out.network += travel
            out.work += measured.step
            out.rounds.append(now - last)
            last = now
        elif kind == EVALUATE:
            begin = now if alone else workers.meet(now)
            out.rounds[-1] += begin - now
            now = begin + each
            workers.hold(now)
            now += measured.record
            evaluated += each + measured.record
            out.work += work + measured.record
            last = now
    out.evaluation = evaluated + config.evaluation.at_start * (each + measured.record)
    rest = config.rounds - steps
    if rest:
        out.rounds.append(rest * float(np.mean(out.rounds[steps // 2 :])))
        schedule = EvaluationSchedule(context.evaluated_clients, config.evaluation.every)
        more = sum(schedule.due(step, config.rounds) for step in range(steps + 1, config.rounds + 1))
        out.evaluation += more * (each + measured.record)
        out.work *= config.rounds / steps
    return out


# -- several numbers of ranks --------------------------------------------------------------------------------

MARGIN = 1.5  # of the time that is asked for
MEMORY_MARGIN = 1.25


@dataclass(frozen=True)
class Allocation:
    """What to ask a scheduler for.

    Attributes:
        nodes: how many.
        ranks: P.
        bytes: of memory on each node.
        seconds: for the whole job.
    """

    nodes: int
    ranks: int
    bytes: float
    seconds: float

    @classmethod
    def of(cls, found: TimeForecast, server: int, worker: int, kept: int, cores: int) -> Allocation:
        """Return the allocation of a forecast, with its margins.

        Args:
            found: the forecast.
            server: bytes of rank 0.
            worker: bytes of the busiest worker.
            kept: bytes of client state on all nodes together.
            cores: of a node.
        """
        nodes = ceil(found.num_ranks / cores)
        on_first = min(found.num_ranks, cores)
        memory = server + (on_first - 1) * worker + kept / nodes
        return cls(nodes, found.num_ranks, MEMORY_MARGIN * memory, max(300.0, MARGIN * found.total))

    def __str__(self) -> str:
        minutes = ceil(self.seconds / 60)
        memory = ceil(self.bytes / 1e6 / 100) * 100
        clock = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
        return f"--nodes {self.nodes} --ntasks {self.ranks} --mem {memory}M --time {clock}"


def efficiencies(found: Sequence[TimeForecast], one_worker: TimeForecast) -> list[float]:
    """Return the strong efficiency of each: seconds of a round on one worker, by workers times seconds.

    Args:
        found: the forecasts.
        one_worker: that of two ranks.
    """
    return [one_worker.round_s / (max(1, f.num_ranks - 1) * f.round_s) for f in found]
