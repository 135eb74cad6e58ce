"""The asynchronous engine: visits under way, arrivals one by one, the same methods.

Shares the server's step with the synchronous engine: what a method decides from notes becomes mixings, which
rank 0 applies to the uploads it was sent.

The state of an asynchronous run: what the engine remembers, and the visits under way.

Of a visit under way, what it read is kept; it is made again.

How far a step goes: methods that replace rows by what has just arrived, made gentle.

Under a policy that steps at every arrival, FedAvg's average is an average of one: the last upload would be
the model. Damped by a, a step M becomes (1 - a) old + a M: FedAvg becomes FedAsync, clustered averaging its
asynchronous form. What is added up beside the models (SCAFFOLD's control variates) stays whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpifl.aggregation.tables import read_rows
from mpifl.comm import Lasting, RankLost, Task, open_pool, serve
from mpifl.core.devices import message_on
from mpifl.core.errors import require
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.rng import Key
from mpifl.core.timing import now
from mpifl.core.types import Message, Reads, Server
from mpifl.simulation.clock import Clock
from mpifl.simulation.policies import Policy, check
from mpifl.simulation.sampling import Sampler
from mpifl.simulation.visits import AsyncStats, DispatchState, Visit
from mpifl.traffic.codec import download_bytes, upload_bytes
from mpifl.training import LocalClient

from .aggregators import LocalAggregator
from .hook_errors import Dropped
from .protocol import ClientTask, ReportHeader
from .recovery import LAST, regroup
from .run_state import SAVE, STOP, Checkpointer, Never, Saved, needs_workers, save, take_stepper
from .server_step import ServerStep
from .synchronous import Record

Row = dict[str, Any]  # of events.csv


@dataclass(frozen=True)
class Arrival:
    """An upload that has reached the server; `row` is what will be written of it."""

    visit: Visit
    light: ReportHeader
    vectors: Mapping[str, torch.Tensor]
    row: Row


class Events:
    """Runs `num_steps` server steps under a policy and a clock; rank 0 drives, the others serve.

    Args:
        judge_every, judge_first, evaluated: as for rounds. key: of the system's draws.
        on_events: is told of arrivals, in their order.
        checkpointer: writes the state between steps.
    """

    def __init__(
        self,
        server_step: ServerStep,
        policy: Policy,
        clock: Clock,
        sampler: Sampler,
        num_steps: int,
        evaluated_clients: np.ndarray,
        judge_every: int = 1,
        judge_first: bool = False,
        key: Key | None = None,
        on_events: Callable[[Sequence[Row]], None] = lambda rows: None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.server_step, self.policy, self.clock, self.sampler = server_step, policy, clock, sampler
        self.num_steps, self.evaluated_clients = num_steps, evaluated_clients
        self.judge_every, self.judge_first = judge_every, judge_first
        self.key, self.on_events = key or server_step.seed, on_events
        self.checkpointer = checkpointer or Never()
        self.places = policy.concurrency(sampler.num_clients, sampler.num_sampled)
        self.busy: set[int] = set()
        self.number = 0
        self.failed = 0  # visits in a row
        self.servers: dict[int, Server] = {}  # version -> the server then, as many as the policy keeps
        self.upload_bytes = 0
        self.stats, self.rows = AsyncStats(), list[Row]()
        self.metrics: dict[int, Mapping[str, float]] = {}  # of each client's last visit
        self.aggregator = LocalAggregator(server_step.problem.layout.num_parameters, not policy.singly)
        self.start, self.judging = now(), np.zeros(2)
        self.served = np.zeros((server_step.transport.size, 2))  # idle and all seconds of each rank
        self.last_word: dict[str, float] = {}

    check = staticmethod(check)

    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run; `observe` is called on rank 0 after each step. Return the last server on rank 0.

        Args:
            saved: a state to go on from, on rank 0.
        """
        server_step = self.server_step
        if not server_step.transport.is_server:
            self._serve()
            return None
        pool = open_pool(
            server_step.transport,
            self._visit,
            lambda: regroup(server_step),
            lambda task: server_step.scheduler.candidates(task.header[0].client),
        )
        server = self._begin(pool, saved)
        server = self._drive(server, pool, observe, saved)
        pool.close("end")
        return server

    def _begin(self, pool: Lasting, saved: Saved | None) -> Server:
        if saved is None:
            server: Server | None = self._together(pool, "begin", self.server_step.initialize)
            assert server is not None
            self.servers = {server.version: server}
            return server
        restored = take_events(saved, self)
        self._together(pool, "restore", lambda: self.server_step.distribute(restored))
        return restored

    def _together(self, pool: Lasting, word: str, act: Callable[[], Any]) -> Any:
        """Do something that every rank takes part in, again if one is lost meanwhile; on rank 0."""
        while True:
            self.server_step.ledger.commit()
            pool.order_all(word)
            try:
                return act()
            except RankLost:
                self.server_step.ledger.roll_back()
                pool.recover()

    def summary(self) -> dict[str, Any]:
        """Return what the run says of itself; on rank 0."""
        workers = self.served[list(self.server_step.transport.workers)]
        idle = [i / s for i, s in workers.tolist() if s]
        real, busy = (now() - self.start - self.judging).tolist()
        said = self.stats.summary(self.num_steps, self.clock.now, real, idle, busy / real)
        steps = {} if self.clock.in_seconds else {"clock_seconds": None, "updates_per_clock_second": None}
        return said | steps

    # -- at the worker ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        server_step, word = self.server_step, ""
        acts: dict[str, Callable[[], Any]] = {
            "begin": server_step.initialize,
            "restore": lambda: server_step.distribute(None),
            "evaluate": lambda: self._evaluate(None),
            SAVE: lambda: save(server_step, None, self.checkpointer, None, alone=False),
        }
        while word not in LAST:
            try:
                said = serve(server_step.transport, self._visit)
                self.last_word, word = {"idle": said.idle, "elapsed": said.seconds}, said.word
                if word == STOP:
                    self.checkpointer.stop(said.what)
                acts.get(word, lambda: None)()
            except RankLost:
                regroup(server_step)

    def _visit(
        self, header: tuple[ClientTask, int, int], vectors: Mapping[str, torch.Tensor]
    ) -> tuple[ReportHeader | Dropped, dict[str, torch.Tensor]]:
        order, step, version = header
        message = Message(vectors, order.reads, version, step)
        return self.server_step.worker.serve(order, message)

    # -- at the server ---------------------------------------------------------------------------------------

    def _drive(
        self, server: Server, pool: Lasting, observe: Callable[[Record], None], saved: Saved | None
    ) -> Server:
        if self.clock.counts_bytes:
            self.upload_bytes = self._upload_bytes(server)
        if self.judge_first and saved is None:
            self._record(server, [], pool, observe)
        waiting: list[Arrival] = []
        self.start, self.judging = now(), np.zeros(2)
        if saved is None:
            self.clock.begin()
        else:
            take_visits(saved, self, pool)
        if not self.clock.more():
            self._fill(server, pool)
        while server.version < self.num_steps:
            arrival = self._next(server, pool)
            if arrival is not None and self._welcome(arrival):
                waiting.append(arrival)
            if waiting and self.policy.ready(len(waiting), len(self.busy)):
                server = self._step(server, waiting)
                self._record(server, [a.visit.client for a in waiting], pool, observe)
                waiting = []
                if server.version < self.num_steps:
                    self._save(server, pool)
            if server.version < self.num_steps and not self.clock.more():
                self._fill(server, pool)
        return server

    def _upload_bytes(self, server: Server) -> int:
        """Return the bytes of an upload: those of client 0 after training for no epoch."""
        c = self.server_step.config
        reads = c.algorithm.reads(server, 0)
        vectors = {name: rows_read(server, name, which) for name, which in reads.items()}
        client = LocalClient(0, c.federation, c.learner, replace(c.local, epochs=0))
        message = message_on(Message(vectors, reads), c.learner.device)
        report, _ = c.algorithm.local_update(message, {}, client, c.seed.of("size"))
        return upload_bytes(c.payload, report, message)

    def _save(self, server: Server, pool: Lasting) -> None:
        """Write the state if that is due, and end if it was asked for."""
        word = self.checkpointer.due(server.version)
        if not word:
            return

        def write(alone: bool) -> None:
            save(self.server_step, server, self.checkpointer, events_state(self, server, pool), alone)

        if needs_workers(self.server_step):
            self._together(pool, SAVE, lambda: write(alone=False))
        else:
            write(alone=True)
        if word == STOP:
            pool.close(STOP, server.version)
            self.checkpointer.stop(server.version)

    def _fill(self, server: Server, pool: Lasting) -> None:
        """Start visits until all places are taken, or nobody is left to start."""
        while True:
            dispatch = DispatchState(
                busy=self.busy,
                number=self.number,
                version=server.version,
                places=self.places,
                sampler=self.sampler,
                key=self.key,
                here=self.clock.here,
            )
            starts = self.clock.starts(dispatch)
            for k, version in self.policy.starts(dispatch) if starts is None else starts:
                self._start(k, version, pool)
            if self.busy:
                return
            self.clock.skip(self.sampler.num_clients)

    def _start(self, k: int, version: int, pool: Lasting) -> None:
        """Send a client what it reads and put its arrival on the clock."""
        remedy = f"reads version {version}, and the server is at {max(self.servers)}: no trace of such a run"
        require(version in self.servers, "clock.trace", f"client {k}", remedy)
        server_step, server, v = self.server_step, self.servers[version], int(self.server_step.visits[k])
        step = max(self.servers) + 1
        reads = server_step.hooks.reads("reads", server, np.array([k]))[k]
        widths = {name: table.shape[1] for name, table in server.tables.items()}
        server_step.ledger.add_reads(step, {k: reads}, widths)
        due = self.clock.due(
            k, v, download_bytes(reads, widths, server_step.ledger.payload), self.upload_bytes
        )
        visit = Visit(due, self.number, k, v, version, self.clock.now)
        self.clock.add(visit)
        vectors = {name: rows_read(server, name, which) for name, which in reads.items()}
        header = (ClientTask(0, k, v, reads), step, version)
        pool.submit(Task(self.number, due, header, vectors, tuple(server_step.scheduler.candidates(k))))
        self.busy.add(k)
        self.number += 1

    def _drop(self, visit: Visit, failed: Dropped) -> None:
        """A visit has failed: its client is free, and may try again later."""
        self.failed += 1
        self.server_step.drop([failed], nobody=self.failed > 2 * self.sampler.num_clients)
        self.stats.passed(self.clock.now, len(self.busy))
        self.busy.discard(visit.client)

    def _next(self, server: Server, pool: Lasting) -> Arrival | None:
        """Return the next upload to arrive; None where the visit has failed."""
        with self.server_step.watch("wait"):
            visit = self.clock.next(pool)
            light, vectors = pool.result(visit.number)
        if isinstance(light, Dropped):
            self._drop(visit, light)
            return None
        self.stats.passed(self.clock.now, len(self.busy))
        self.failed = 0
        self.busy.discard(visit.client)
        self.server_step.visits[visit.client] += 1
        self.server_step.book(server.version + 1, light)
        self.metrics[visit.client] = light.metrics
        row = visit.row(self.clock.now, server.version)
        self.rows.append(row)
        return Arrival(visit, light, vectors, row)

    def _welcome(self, arrival: Arrival) -> bool:
        """Return whether an upload is fresh enough."""
        limit, lag = self.policy.max_staleness, arrival.row["staleness"]
        late = limit is not None and lag > limit
        if late:
            self.stats.add(lag, accepted=False)
        return not late

    def _step(self, server: Server, arrivals: list[Arrival]) -> Server:
        """Return the server after the uploads at hand, taken in the order of (client, visit)."""
        step, damps = self.server_step, not self.server_step.algorithm.needs.asynchronous
        arrivals = sorted(arrivals, key=lambda a: (a.visit.client, a.visit.visit))
        headers = [replace(a.light, number=j) if j else a.light for j, a in enumerate(arrivals)]
        lag = np.array([a.row["staleness"] for a in arrivals])
        uploads: dict[str, list[torch.Tensor]] = {}
        for a in arrivals:
            for name, rows in a.vectors.items():
                uploads.setdefault(name, []).extend(rows.unbind())
        reports = step.reports_of(headers, np.zeros(len(headers), np.int64), lag)
        adjust = (lambda plan: damped(plan, self.policy.rates(lag))) if damps else None
        result = step.advance(server, reports, uploads, self.aggregator, adjust)
        assert result is not None
        plan, new = result.plan, result.server
        for j, a in enumerate(arrivals):
            a.row["weight"] = largest_weight(plan, j, len(arrivals))
            a.row["accepted"] = int(bool(plan.mixings) or not a.vectors)
            self.stats.add(a.row["staleness"], bool(a.row["accepted"]))
        self.on_events(self.rows)
        self.rows = []
        step.ledger.commit()
        self.servers[new.version] = new
        self.servers.pop(new.version - self.policy.versions, None)
        return new

    def _record(
        self, server: Server, cohort: list[int], pool: Lasting, observe: Callable[[Record], None]
    ) -> None:
        scores, timing, start = None, None, now()
        due = self.judge_every and server.version % self.judge_every == 0
        if due or server.version in (0, self.num_steps):
            scores, timing = self._together(pool, "evaluate", lambda: self._evaluate(server))
            pool.look()  # workers train on while rank 0 writes
        observe(
            Record(
                step=server.version,
                server=server,
                cohort=np.array(cohort, np.int64),
                evaluated_clients=self.evaluated_clients,
                scores=scores,
                train={**self._means(), **self.stats.so_far()} if scores is not None else {},
                seconds=perf_counter() - float(self.start[0]),
                timing=timing or [],
                virtual_seconds=self.clock.now if self.clock.in_seconds else None,
            )
        )
        if scores is not None:
            self.judging += now() - start

    def _means(self) -> dict[str, float]:
        """Return the means over clients of what each noted at its last visit."""
        names = dict.fromkeys(name for m in self.metrics.values() for name in m)
        return {name: float(np.mean([m[name] for m in self.metrics.values() if name in m])) for name in names}

    def _evaluate(self, server: Server | None) -> tuple[Any, Any]:
        """Judge all, and bring the timing of all ranks together; every rank calls."""
        scores = self.server_step.evaluate(server, self.evaluated_clients)
        timing = self.server_step.transport.gather(self.server_step.watch.take() | self.last_word, "timing")
        for rank, phases in enumerate(timing or ()):
            self.served[rank] += phases.get("idle", 0.0), phases.get("elapsed", 0.0)
        return scores, timing


if TYPE_CHECKING:
    pass


def events_state(events: Events, server: Server, pool: Lasting) -> Saved:
    """Return what the engine adds to a checkpoint; between two steps, no upload waiting."""
    assert not events.rows, "arrivals are told of at each step"
    saved = Saved(server.version)
    older = [s for version, s in sorted(events.servers.items()) if version != server.version]
    for i, s in enumerate(older):
        saved.put_server(f"older/{i}", s, s.tables)
    stats = {**vars(events.stats), "lags": sorted(events.stats.lags.items())}
    saved.values |= {
        "older": len(older),
        "number": events.number,
        "clock": events.clock.state(),
        "tally": stats,
        "metrics": [[k, dict(m)] for k, m in events.metrics.items()],
        "seconds": (now() - events.start).tolist(),
        "judging": events.judging.tolist(),
    }
    _put_visits(saved, events, pool)
    return saved


def take_events(saved: Saved, events: Events) -> Server:
    """Give the engine back what it remembered; visits are given out later, by `take_visits`."""
    take_stepper(saved, events.server_step)
    server, values = saved.take_server("server"), saved.values
    older = [saved.take_server(f"older/{i}") for i in range(values["older"])]
    events.servers = {s.version: s for s in (*older, server)}
    events.number = values["number"]
    events.stats.__dict__.update(values["tally"])
    events.stats.lags = Counter({lag: n for lag, n in values["tally"]["lags"]})
    events.metrics = {k: m for k, m in values["metrics"]}
    return server


def _put_visits(saved: Saved, events: Events, pool: Lasting) -> None:
    names: dict[tuple[Any, ...], str] = {}  # rows that several visits read are kept once
    visits = []
    for visit in sorted(events.clock.visits, key=lambda v: v.number):
        order, step, version = pool.tasks[visit.number].header
        rows = {}
        for name, tensor in pool.tasks[visit.number].vectors.items():
            which = (tensor.data_ptr(), *tensor.shape)
            rows[name] = names.setdefault(which, f"read/{len(names)}")
            saved.tensors[rows[name]] = tensor
        reads: dict[str, Any] = {}
        for name, numbers in order.reads.items():
            reads[name] = numbers
            if isinstance(numbers, np.ndarray):
                reads[name] = f"mixture/{visit.number}/{name}"
                saved.arrays[reads[name]] = numbers
        visits.append(
            {"visit": asdict(visit), "step": step, "version": version, "reads": reads, "rows": rows}
        )
    saved.values["visits"] = visits


def take_visits(saved: Saved, events: Events, pool: Lasting) -> None:
    """Give the visits under way out again, and set the clock."""
    visits = [Visit(**v["visit"]) for v in saved.values["visits"]]
    events.clock.restore(saved.values["clock"], visits)
    events.busy = {visit.client for visit in visits}
    for visit, about in zip(visits, saved.values["visits"], strict=True):
        order = ClientTask(0, visit.client, visit.visit, _reads(saved, about["reads"]))
        vectors = {name: saved.tensors[which] for name, which in about["rows"].items()}
        header = (order, about["step"], about["version"])
        ranks = tuple(events.server_step.scheduler.candidates(visit.client))
        pool.submit(Task(visit.number, visit.due, header, vectors, ranks))
    events.start = now() - np.array(saved.values["seconds"])
    events.judging = np.array(saved.values["judging"])


def _reads(saved: Saved, about: Mapping[str, Any]) -> Reads:
    return {
        name: saved.arrays[which] if isinstance(which, str) else tuple(which) for name, which in about.items()
    }


def largest_weight(plan: Plan, j: int, m: int) -> float:
    """Return the largest weight of report j in any row of the first mixing; 0 where it takes no uploads."""
    if not plan.mixings or not plan.mixings[0].of:
        return 0.0
    weights = plan.mixings[0].weights
    return float(np.abs(weights.reshape(len(weights), m, -1)[:, j]).max())


def rows_read(server: Server, name: str, which: tuple[int, ...] | np.ndarray) -> torch.Tensor:
    """Return what is downloaded of a table; a single row is no copy, since tables are never written to."""
    table = server.tables[name]
    if not isinstance(which, np.ndarray) and len(which) == 1:
        return table[which[0] : which[0] + 1]
    return read_rows(lambda _, rows: table[rows], name, which)


def damped(plan: Plan, rates: np.ndarray) -> Plan:
    """Return a plan whose mixings go only part of the way.

    Args:
        rates: a_j [m], how far the step goes for upload j. In each row, uploads share its weight in
            proportion to a_j, and the row goes a = sum_j w_j a_j / sum_j w_j of the way.
    """
    if (rates == 1).all():
        return plan
    return replace(plan, mixings=[_damped(m, rates) for m in plan.mixings])


def _damped(mixing: Mixing, rates: np.ndarray) -> Mixing:
    if mixing.into != "model" and mixing.keep is not None and (mixing.keep == 1).all():
        return mixing
    each = np.repeat(rates, mixing.weights.shape[1] // len(rates))  # of all components of an upload
    size = np.abs(mixing.weights)
    total = size.sum(1)
    # [K]; what a row takes from other rows only is no upload's doing: all the way
    a = np.where(total > 0, size @ each / np.where(total > 0, total, 1.0), 1.0)
    if mixing.keep is not None and mixing.keep.ndim == 2:
        if mixing.keep.shape[0] != mixing.keep.shape[1]:
            return mixing  # the number of rows changes: there is no old row to stay near
        keep = a[:, None] * mixing.keep + np.diag(1 - a)
    else:
        keep = 1 - a + a * (0.0 if mixing.keep is None else mixing.keep)
    return replace(mixing, weights=mixing.weights * each, keep=keep)
