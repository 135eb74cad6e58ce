"""Measures the processor seconds of the parts of a run by making a few visits, evaluations and steps.

The engine calls the method's hooks on the data of a few clients of different sizes, starting from the first
server of the traffic forecast. A training that would take longer than `LONGEST_S` is cut off after some
steps, and its total time is extrapolated from these. Processor seconds do not depend on the other load of the
machine. If a rank has several threads or a GPU, wall time is measured instead.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.core.capabilities import (
    ComparedUploads,
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    ServerEvaluation,
    upload_named,
    uses,
)
from mpifl.core.client import Trained, TrainedVisits
from mpifl.core.parameters import Layout
from mpifl.core.plan import Plan
from mpifl.core.progress import VisitCounter, doing
from mpifl.core.rng import key
from mpifl.core.types import Server
from mpifl.experiment.build import build_engine, build_server_step, trained_samples
from mpifl.experiment.context import RunContext
from mpifl.results import checkpoint_files
from mpifl.results.recorder import Recorder, written_clients
from mpifl.runtime.engine import EvaluationSchedule, Record
from mpifl.runtime.hooks import ClientHooks
from mpifl.runtime.protocol import GatheredReports, TaskBatch
from mpifl.runtime.run_state import Saved
from mpifl.runtime.server_step import Aggregator, ServerStep, StepResult, Uploads
from mpifl.runtime.synchronous import SynchronousEngine
from mpifl.runtime.worker import VisitResults
from mpifl.simulation.clock import VirtualTime, WallTime
from mpifl.simulation.policies import Buffer, ClockParts
from mpifl.simulation.sampling import RoundPlan
from mpifl.training.backend import Backend, Request, VisitRequests, sizes_of, train_visits
from mpifl.training.client import public_clients
from mpifl.training.learner import Learner

VISITS, EVALUATIONS = 6, 12  # number of clients to train and to evaluate
LONGEST_S = 0.25  # of a training
ENOUGH_S, MOST_REPEATS = 0.5, 12  # measure visits for this time, but repeat them at most so often
GRAM_ROWS = 32
UNSEEN_VISIT = 1 << 20  # number of a visit whose data have not been read


@dataclass(frozen=True)
class PerSample:
    """Seconds of a client's task as a linear function of its samples: once_s + sample_s * samples.

    Attributes:
        once_s: seconds that do not depend on the number of samples.
        sample_s: seconds for each sample.
    """

    once_s: float = 0.0
    sample_s: float = 0.0

    @classmethod
    def of(cls, samples: Iterable[float], seconds: Iterable[float]) -> PerSample:
        """Fit a line through the median seconds of each number of samples; neither part is negative.

        Args:
            samples: number of samples of each measurement.
            seconds: seconds of each measurement.
        """
        found: dict[float, list[float]] = {}
        for n, s in zip(samples, seconds, strict=True):
            found.setdefault(float(n), []).append(s)
        if not found:
            return cls()
        x, y = np.array([*found], float), np.array([median(s) for s in found.values()])
        if len(x) > 1 and x.max() > 1.2 * x.min():
            slope, rise = np.polyfit(x, y, 1)
            if slope >= 0 and rise >= 0:
                return cls(float(rise), float(slope))
        return cls(0.0, float(y.sum() / x.sum())) if x.sum() else cls(float(y.mean()))

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Return the seconds of clients with these numbers of samples."""
        return self.once_s + self.sample_s * np.asarray(samples, float)


@dataclass(frozen=True)
class MeasuredTimes:
    """Processor seconds of the parts of a run, except where noted.

    Attributes:
        visit: visit of a client on a rank that has transformed its samples before, without second looks.
        first_visit: visit of a client on a rank that has not seen it before.
        look: one look at another client (`SecondLook`).
        compare: the comparison in it.
        looks_once: whether two clients look at each other only once.
        remembered: handling of an upload that is remembered.
        fingerprint: one-shot statistics of a client.
        shown: what the server computes for the statistics.
        setup: setting up the first server.
        book: bookkeeping of rank 0 for each visit: sending tasks, receiving reports.
        book_once: bookkeeping of rank 0 for each step, independent of its number of visits.
        decide: decision of rank 0 in each step, for a full cohort.
        mix: sums, for each upload.
        mix_once: sums, for each step, independent of its number of uploads: starting and finishing rows.
        gram: products of all pairs of uploads, for a full cohort.
        gram_setup: products of all pairs of clients' statistics.
        step: rank 0 in a step of an asynchronous run, arrivals included.
        evaluation: evaluation of a client.
        record: rank 0 at an evaluation, independent of the number of evaluated clients.
        unread: rank 0 at an evaluation, for reading the test data that it evaluates itself if only workers
            have read them (`ServerEvaluation`, data that change with every visit).
        checkpoint: writing a checkpoint, in wall time.
        spent: wall time of the measurement.
        busy: wall time per processor second of the visits, which shows how busy this machine is.
        num_visits: number of visits that were measured.
        samples: number of samples of a typical client.
        cut: whether trainings were cut off.
    """

    visit: PerSample
    first_visit: PerSample
    look: float = 0.0
    compare: float = 0.0
    looks_once: bool = True
    remembered: float = 0.0
    fingerprint: PerSample = PerSample()
    shown: float = 0.0
    setup: float = 0.0
    book: float = 0.0
    book_once: float = 0.0
    decide: float = 0.0
    mix: float = 0.0
    mix_once: float = 0.0
    gram: float = 0.0
    gram_setup: float = 0.0
    step: float = 0.0
    evaluation: PerSample = PerSample()
    record: float = 0.0
    unread: float = 0.0
    checkpoint: float = 0.0
    spent: float = 0.0
    busy: float = 1.0
    num_visits: int = 0
    samples: int = 0
    cut: bool = False


class Meter:
    """Reads processor seconds, and adds the estimated seconds of steps that were cut off.

    Args:
        by_clock: whether to read wall time instead.
    """

    def __init__(self, by_clock: bool) -> None:
        self._read: Callable[[], float] = perf_counter if by_clock else process_time
        self.skipped = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._read() + self.skipped


class CutBackend(Backend):
    """Trains with the backends of a learner for at most `LONGEST_S` and extrapolates the rest.

    Args:
        backends: the backends of the learner.
        meter: gets the estimated seconds of the steps that were left out.
        drop_single: whether batches of one sample are left out.
    """

    def __init__(self, backends: Sequence[Backend], meter: Meter, drop_single: bool = False) -> None:
        self.backends, self.meter, self.drop_single = backends, meter, drop_single
        self.step_s: dict[tuple[object, ...], float] = {}  # kind of request -> seconds of a step
        self.cut = False

    def accepts(self, request: Request) -> bool:
        """Return True."""
        return True

    def train(self, request: Request) -> Trained:
        """Train a request, or its first steps."""
        config, n = request.config, len(request.split)
        per_epoch = ceil(config.num_usable(n, self.drop_single) / config.batch_size)
        steps = config.num_steps(n, self.drop_single)
        kind = (request.kind, request.loss is None, request.direction is None)
        if kind not in self.step_s:
            few = min(steps, 2)
            self._timed(request, few)  # to warm up
            self.step_s[kind] = self._timed(request, few)[1] / max(few, 1)
        most = max(1, int(LONGEST_S / max(self.step_s[kind], 1e-9)))
        if steps <= most:
            return self._train(request)
        most = max(most // per_epoch * per_epoch, min(most, per_epoch))  # whole epochs, if there is time
        trained, seconds = self._timed(request, most, lasting=True)
        self.meter.skipped += seconds * (steps / most - 1)
        self.cut = True
        return trained

    def train_visits(self, visits: VisitRequests) -> TrainedVisits | None:
        """Train visits with the backends; None if one may be cut off, or no step has been timed yet."""
        steps = max(map(visits.config.num_steps, sizes_of(visits.samples).tolist()), default=0)
        if not self.step_s or steps * max(self.step_s.values()) > LONGEST_S:
            return None
        return train_visits(self.backends, visits)

    def _timed(self, request: Request, steps: int, lasting: bool = False) -> tuple[Trained, float]:
        """Train for some steps and return their seconds.

        Unless `lasting`, train with a copy of the kept optimiser and do not count the time.
        """
        start = self.meter()
        kept = None if request.kept is None else copy(request.kept)
        short = request._replace(config=replace(request.config, steps=steps))
        trained = self._train(short if lasting else short._replace(kept=kept))
        seconds = self.meter() - start
        if not lasting:
            self.meter.skipped -= seconds
        return trained, seconds

    def _train(self, request: Request) -> Trained:
        return next(b for b in self.backends if b.accepts(request)).train(request)


class TimedVisits(VisitCounter):
    """Records the seconds of the visits of a rank.

    Args:
        meter: reads the seconds.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter, self.seconds, self._last = meter, list[float](), 0.0

    def begin(self) -> None:
        """Record that the first visit starts."""
        self._last = self.meter()

    def advance(self, visits: int = 1) -> None:
        """Record the seconds of a visit; if one call made several visits, the mean for each."""
        now = self.meter()
        self.seconds += [(now - self._last) / visits] * visits
        self._last = now

    def take(self) -> list[float]:
        """Return the seconds of the visits since the last call."""
        out, self.seconds = self.seconds, []
        return out


@dataclass
class Parts:
    """Seconds of the parts of a server step.

    Attributes:
        visits: seconds of each visit.
        looks: second looks.
        compared: the comparisons in them.
        advance: deciding and mixing.
        decide: deciding.
        whole: the whole step.
    """

    visits: list[float] = field(default_factory=list)
    looks: float = 0.0
    compared: float = 0.0
    advance: float = 0.0
    decide: float = 0.0
    whole: float = 0.0


class TimedHooks(ClientHooks):
    """Hooks of clients that record the seconds of comparisons.

    Args:
        hooks: the hooks that they replace.
        meter: reads the seconds.
    """

    def __init__(self, hooks: ClientHooks, meter: Meter) -> None:
        super().__init__(hooks.algorithm, hooks.device)
        self.meter, self.compared = meter, 0.0

    def compare(self, *given: Any) -> Mapping[str, float]:
        """Compare two clients."""
        start = self.meter()
        found = super().compare(*given)
        self.compared += self.meter() - start
        return found


class TimedStep(ServerStep):
    """A server step that records its times.

    Args:
        step: the server step that it replaces.
        meter: reads the seconds.
        visits: records the seconds of the visits.
    """

    def __init__(self, step: ServerStep, meter: Meter, visits: TimedVisits) -> None:
        super().__init__(step.config)
        self.meter, self.timed_visits = meter, visits
        self.parts: list[Parts] = []
        self.evaluations: list[tuple[list[float], float]] = []  # seconds of each client, and the start
        self.look_hooks = self.worker.looks.hooks = TimedHooks(self.worker.hooks, meter)
        self._look_s, self._advance, self._decide = 0.0, 0.0, 0.0

    def step(self, server: Server | None, who: RoundPlan) -> StepResult | None:
        """Take a step."""
        self.timed_visits.take()
        start, clock = self.meter(), perf_counter()
        skipped = self.meter.skipped
        self._look_s = self._advance = self._decide = self.look_hooks.compared = 0.0
        out = super().step(server, who)
        whole, lasted = self.meter() - start, perf_counter() - clock
        left_out = self.meter.skipped - skipped
        share = (whole - left_out) / lasted if lasted else 1.0  # phases are in wall time
        visits = self.timed_visits.take()
        looks = self._look_s, self.look_hooks.compared
        self.parts.append(Parts(visits, *looks, self._advance, share * self._decide, whole))
        return out

    def look(self, batch: TaskBatch, results: VisitResults) -> VisitResults:
        """Let clients look at each other."""
        start = self.meter()
        out = super().look(batch, results)
        self._look_s += self.meter() - start
        return out

    def advance(
        self,
        server: Server | None,
        reports: GatheredReports | None,
        uploads: Uploads,
        aggregator: Aggregator,
        adjust: Callable[[Plan], Plan] | None = None,
    ) -> StepResult | None:
        """Decide and mix."""
        start, before = self.meter(), self.watch.seconds.get("cluster", 0.0)
        out = super().advance(server, reports, uploads, aggregator, adjust)
        self._advance += self.meter() - start
        self._decide += self.watch.seconds.get("cluster", 0.0) - before
        return out

    def evaluate(self, server: Server | None, clients: np.ndarray) -> Any:
        """Evaluate clients."""
        held, start = self.timed_visits.take(), self.meter()
        out = super().evaluate(server, clients)
        self.evaluations.append((self.timed_visits.take(), start))
        self.timed_visits.seconds = held
        return out


def measure(context: RunContext, server: Server, decide: float) -> MeasuredTimes:
    """Make some visits, steps and evaluations of a run, and return their times; on rank 0.

    Args:
        context: context of the run.
        server: the server before the first round.
        decide: seconds that rank 0 needs to decide a step with a full cohort.
    """
    began = perf_counter()
    by_clock = torch.get_num_threads() > 1 or context.learner.device.type != "cpu"
    meter = Meter(by_clock)
    learner, backends = _cut(context.learner, meter)
    sets = [client.data.train for client in context.problem.public]
    problem = replace(
        context.problem, public=public_clients(context.federation, learner, context.config.local, sets)
    )
    config = replace(
        context.config,
        on_client_error="abort",
        system=replace(context.config.system, placement_seed=None),
        output=replace(context.config.output, updates=False),
        evaluation=replace(context.config.evaluation, distances=False, matrices=()),
    )
    small = replace(
        context,
        config=config,
        transport=Single(),
        learner=learner,
        problem=problem,
        decisions=replace(context.decisions, stack=1),
    )
    with tempfile.TemporaryDirectory(dir=_disk(config.output.folder)) as place:
        with closing(ClientStore("plan", place)) as store:
            visits = TimedVisits(meter)
            step = TimedStep(build_server_step(small, store, visits), meter, visits)
            with doing("measuring some visits"):
                if config.policy.synchronous:
                    found = _rounds(small, step, server, Path(place))
                else:
                    found = _arrivals(small, step, server, Path(place))
            with doing("measuring what comes before training"):
                found = replace(found, **_before(small, step, meter))
        found = replace(found, checkpoint=_checkpoint(server, Path(place)))
    return replace(
        found,
        decide=decide,
        gram=_gram(small, problem.layout, context.decisions.num_sampled, ComparedUploads, "gram"),
        gram_setup=_gram(small, problem.layout, problem.num_clients, OneShotStatistics, "statistics_gram"),
        samples=int(np.median(trained_samples(context))),
        spent=perf_counter() - began,
        cut=any(backend.cut for backend in backends),
    )


def _cut(learner: Learner, meter: Meter) -> tuple[Learner, list[CutBackend]]:
    """Return a learner whose trainings are cut off, and its backends and those of its auxiliary network."""
    out, made = copy(learner), CutBackend(learner.backends, meter, learner.drop_single)
    out.backends, backends = (made,), [made]
    if learner.auxiliary is not None:
        out.auxiliary, more = _cut(learner.auxiliary, meter)
        backends += more
    return out, backends


def _disk(folder: str) -> Path | None:
    """Return a writable folder on the disk of the run folders; None for the temporary folder."""
    there = next((p for p in (Path(folder), *Path(folder).absolute().parents) if p.is_dir()), None)
    return there if there is not None and os.access(there, os.W_OK) else None


def _evenly(sizes: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers of `count` clients, from the smallest to the largest, ascending."""
    order = np.argsort(sizes, kind="stable")
    return np.unique(order[np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)])


def _evaluated_clients(context: RunContext, visited: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Return some clients to evaluate, ascending; only visited ones, if there are at least two.

    Methods such as IFCA choose a model at each evaluation for clients that no round has visited. In a run,
    such clients soon become rare.
    """
    clients: np.ndarray = np.intersect1d(context.evaluated_clients, visited)
    clients = clients if len(clients) > 1 else context.evaluated_clients
    picked: np.ndarray = clients[_evenly(context.federation.sizes[clients, 2], EVALUATIONS)]
    return picked


def _saved(server: Server, step: ServerStep, **values: Any) -> Saved:
    """Return the state of a run that has taken no step."""
    saved = Saved(0, values={"seconds": 0.0, **values})
    saved.put_server("server", server, server.tables)
    saved.put_step_state(step)
    return saved


class _Observer:
    """Writes the figures of evaluations as a run does, and records the seconds that each evaluation took."""

    def __init__(self, context: RunContext, step: TimedStep, folder: Path) -> None:
        self.context, self.step = context, step
        config, n = context.config, context.problem.num_clients
        written = written_clients(config.output.clients, n, key(config.seed.training))
        self.recorder = Recorder(
            folder, context.federation, config.evaluation.by, task=config.task, written=written
        )
        if written is not None:
            step.ledger.remember(written)
            step.computation.remember(written)
        self.seconds: list[float] = []

    def __call__(self, record: Record) -> None:
        if record.scores is None:
            return
        self.recorder.record_evaluation(
            record.step,
            record.seconds,
            scores=record.scores,
            clients=record.evaluated_clients,
            labels=self.step.hooks.labels(record.server),
            train=record.train,
            traffic={},
            timing=record.timing,
            placed=self.step.hooks.placed(record.server, self.step.visits > 0),
        )
        self.seconds.append(self.step.meter() - self.step.evaluations[-1][1])


def _evaluated(
    context: RunContext, step: TimedStep, observer: _Observer, clients: np.ndarray
) -> dict[str, Any]:
    """Return `evaluation`, `record` and `unread` of `MeasuredTimes`."""
    sizes = context.federation.sizes
    samples = sizes[clients, 2] + sizes[clients, 0] * context.config.evaluation.train
    timed = [(n, s) for seconds, _ in step.evaluations for n, s in zip(samples, seconds, strict=True)]
    rest = [whole - sum(s) for whole, (s, _) in zip(observer.seconds, step.evaluations, strict=True)]
    record, unread = median(rest), 0.0
    if uses(context.config.algorithm, ServerEvaluation) and not context.config.policy.synchronous:
        all_of_few = len(context.evaluated_clients) / len(clients)  # rank 0 evaluates what clients received
        start = step.meter()
        for k in clients.tolist():
            len(step.config.clients.client(k, UNSEEN_VISIT).data.test)
        record, unread = record * all_of_few, (step.meter() - start) * all_of_few
    return {"evaluation": PerSample.of(*zip(*timed, strict=True)), "record": record, "unread": unread}


def _rounds(context: RunContext, step: TimedStep, server: Server, folder: Path) -> MeasuredTimes:
    """Measure rounds with a few clients."""
    sizes, algorithm, m = trained_samples(context), context.config.algorithm, context.decisions.num_sampled
    remembers, looks = uses(algorithm, RememberedUploads), uses(algorithm, SecondLook)
    chosen = others = _evenly(sizes, min(VISITS, m))
    few, c = chosen[:: max(1, len(chosen) // 2)], len(chosen)
    if remembers and m < len(sizes):
        others = np.setdiff1d(np.arange(len(sizes)), chosen)[:c]
    evaluated = _evaluated_clients(context, chosen)
    observer, schedule = _Observer(context, step, folder), EvaluationSchedule(evaluated, 1)

    def run(*cohorts: np.ndarray) -> None:
        engine = SynchronousEngine(step, _Cohorts(cohorts), len(cohorts), schedule)
        engine.run(observer, _saved(server, step))

    clock, start, began = perf_counter(), process_time(), step.meter()
    run(chosen, chosen, others, few)
    cold, warm, last, least = step.parts
    if not (looks or remembers):
        repeats = min(MOST_REPEATS, int((ENOUGH_S - step.meter() + began) / max(warm.whole, 1e-9)))
        if repeats > 0:
            run(*[chosen, few] * repeats)
    busy = (perf_counter() - clock) / max(process_time() - start, 1e-9)
    look, compare, once, remembered = 0.0, 0.0, True, 0.0
    n, per_visit = sizes[chosen], [cold.visits, warm.visits]
    if looks:
        once = warm.looks < 0.5 * cold.looks
        look, compare = cold.looks / c**2, cold.compared / c**2
    again = [p.visits for p in (last, *step.parts[4::2]) if len(p.visits) == c]
    if others is not chosen:
        again, old = [], ~np.isin(np.union1d(chosen, others), others)
        remembered = float(np.mean(np.array(last.visits)[old])) if len(last.visits) == len(old) else 0.0
    repeated, repeated_few = (warm, last, *step.parts[4::2]), (least, *step.parts[5::2])
    of_all, of_few = (
        max(0.0, min(p.whole - sum(p.visits) - p.looks - p.advance for p in parts))
        for parts in (repeated, repeated_few)
    )
    book = max(0.0, of_all - of_few) / max(1, c - len(few))
    book_once = max(0.0, of_all - c * book)
    of_all, of_few = (
        min(part.advance - part.decide for part in parts)
        - _gram(context, context.problem.layout, count, ComparedUploads, "gram")
        for parts, count in ((repeated, c), (repeated_few, len(few)))
    )
    mix, mix_once = max(0.0, of_all) / c, 0.0
    if len(few) < c and not remembers and 0 < of_few < of_all:
        mix = (of_all - of_few) / (c - len(few))
        mix_once = max(0.0, of_all - c * mix)
    return MeasuredTimes(
        visit=PerSample.of(np.tile(n, 1 + len(again)), np.concatenate([per_visit[1], *again])),
        first_visit=PerSample.of(n, per_visit[0]),
        look=look,
        compare=compare,
        looks_once=once,
        remembered=remembered,
        book=book,
        book_once=book_once,
        mix=mix,
        mix_once=mix_once,
        busy=busy,
        num_visits=sum(len(p.visits) for p in step.parts),
        **_evaluated(context, step, observer, evaluated),
    )


@dataclass(frozen=True)
class _Cohorts:
    """Returns the given cohort of each step, like a sampler."""

    cohorts: Sequence[np.ndarray]

    def __call__(self, step: int) -> np.ndarray:
        return self.cohorts[step - 1]


def _arrivals(
    context: RunContext, step: TimedStep, server: Server, folder: Path, repeats: int = 1
) -> MeasuredTimes:
    """Measure steps of an asynchronous run; if they take too little time, measure `repeats` times as many."""
    policy = context.config.policy
    size = policy.size if isinstance(policy, Buffer) else 1
    m = min(context.decisions.num_sampled, max(VISITS, size))
    steps = max(2, ceil(2 * VISITS / size)) if policy.single_upload or size > 1 else 2  # type: ignore[attr-defined]
    steps *= repeats
    evaluated = _evaluated_clients(context)
    evaluation = replace(context.config.evaluation, every=0, at_start=False, clients=len(evaluated))
    timed = context.config.clock
    if isinstance(timed, WallTime):  # which may hold clients back; the forecast adds that
        timed = VirtualTime()
    parts = ClockParts(timed, context.duration, context.federation, m, context.system_key, 0)
    small = replace(
        context,
        config=replace(context.config, rounds=steps, evaluation=evaluation),
        decisions=replace(context.decisions, num_sampled=m, clock=policy.open_clock(parts)),
    )
    rows: list[dict[str, Any]] = []
    engine = build_engine(small, step, rows.extend)
    assert small.decisions.clock is not None
    tally = {"lags": [], "refused": 0, "busy_seconds": 0.0, "_then": 0.0}
    saved = _saved(
        server,
        step,
        older=0,
        number=0,
        filled=-1,
        upload_sizes=[],
        owed=[],
        clock=small.decisions.clock.state_dict(),
        tally=tally,
        metrics=[],
        judging=[0.0, 0.0],
        visits=[],
        kept=[],
    )
    saved.values["seconds"] = [0.0, 0.0]
    observer, meter = _Observer(small, step, folder), step.meter
    start, clock, processor = meter(), perf_counter(), process_time()
    engine.run(observer, saved)
    whole, busy = meter() - start, (perf_counter() - clock) / max(process_time() - processor, 1e-9)
    if repeats == 1 and 2 * whole < ENOUGH_S:
        step.timed_visits.take()
        step.parts, step.evaluations = [], []
        return _arrivals(context, step, server, folder, min(MOST_REPEATS, int(ENOUGH_S / max(whole, 1e-9))))
    seconds = step.timed_visits.take()
    clients = [row["client"] for row in rows][: len(seconds)]
    samples = trained_samples(context)[clients] if clients else np.zeros(0, np.int64)
    seconds = seconds[: len(clients)]
    rest = whole - sum(seconds) - sum(observer.seconds)
    line = PerSample.of(samples[1:], seconds[1:])
    return MeasuredTimes(
        visit=line,
        first_visit=line,
        step=max(0.0, rest) / steps,
        busy=busy,
        num_visits=len(seconds),
        **_evaluated(small, step, observer, small.evaluated_clients),
    )


def _before(context: RunContext, step: TimedStep, meter: Meter) -> dict[str, Any]:
    """Measure what precedes the first round: one-shot statistics, otherwise setting up the first server."""
    algorithm, sizes = context.config.algorithm, context.federation.sizes[:, 0]
    if not uses(algorithm, OneShotStatistics):
        start = meter()
        first = algorithm.setup(context.problem, None, key(0))
        step.hooks.appraise(None, first)
        return {"setup": meter() - start}
    start = meter()
    step.hooks.shows()
    shown = meter() - start
    chosen = _evenly(sizes, VISITS)
    step.timed_visits.take()
    step.fingerprint_round(chosen, None)  # repeats `shows`, whose time is left out below
    seconds = step.timed_visits.take()
    return {"shown": shown, "fingerprint": PerSample.of(sizes[chosen][1:], seconds[1:])}


def _gram(context: RunContext, layout: Layout, rows: int, capability: type[Any], role: str) -> float:
    """Return the seconds of the products of all pairs of uploads; 0 if the method asks for none."""
    if upload_named(context.config.algorithm, capability, role) is None:
        return 0.0
    few = min(rows, GRAM_ROWS)
    uploads = torch.ones(few, layout.size).unbind()
    alone = Single()
    mixer = Mixer(alone, Tables(alone))
    start = process_time()
    mixer.gram(list(uploads), (few,), np.zeros(few, np.int64), layout.size)
    return (process_time() - start) * (rows / few) ** 2


def _checkpoint(server: Server, place: Path) -> float:
    """Return the wall time of writing the tables of a server as a checkpoint."""
    start = perf_counter()
    tensors = {name: table.contiguous() for name, table in server.tables.items()}
    checkpoint_files.write(
        place / "checkpoints", checkpoint_files.Content(step=1, run="plan", tensors=tensors)
    )
    return perf_counter() - start
