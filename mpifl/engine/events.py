"""The asynchronous engine: visits under way, arrivals one by one, the same methods.

Shares the server's step with the synchronous engine: what a method decides from notes becomes mixings, which
rank 0 applies to the uploads it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpifl.comm import Lasting, RankLost, Task, open_pool, serve
from mpifl.core.errors import require
from mpifl.core.rng import Key
from mpifl.core.timing import now
from mpifl.core.types import Message, Server

from .checkpointing import SAVE, STOP, Checkpointer, Never, needs_workers, save
from .client_errors import Dropped
from .clock import Clock
from .damping import damped
from .event_state import events_state, take_events, take_visits
from .failures import LAST, regroup
from .fits import check
from .flight import Flight, Visit
from .pace import bytes_down, bytes_up
from .policy import Policy
from .rounds import Record
from .sampler import Sampler
from .saved import Saved
from .step import Stepper
from .taking import Taker, largest_weight, rows_read
from .tally import Tally
from .visits import Light, Order

Row = dict[str, Any]  # of events.csv


@dataclass(frozen=True)
class Arrival:
    """An upload that has reached the server; `row` is what will be written of it."""

    visit: Visit
    light: Light
    vectors: Mapping[str, torch.Tensor]
    row: Row


class Events:
    """Runs `num_steps` server steps under a policy and a clock; rank 0 drives, the others serve.

    Args:
        judge_every, judge_first, judged: as for rounds. key: of the system's draws.
        on_events: is told of arrivals, in their order.
        checkpointer: writes the state between steps.
    """

    def __init__(
        self,
        stepper: Stepper,
        policy: Policy,
        clock: Clock,
        sampler: Sampler,
        num_steps: int,
        judged: np.ndarray,
        judge_every: int = 1,
        judge_first: bool = False,
        key: Key | None = None,
        on_events: Callable[[Sequence[Row]], None] = lambda rows: None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.stepper, self.policy, self.clock, self.sampler = stepper, policy, clock, sampler
        self.num_steps, self.judged = num_steps, judged
        self.judge_every, self.judge_first = judge_every, judge_first
        self.key, self.on_events = key or stepper.seed, on_events
        self.checkpointer = checkpointer or Never()
        self.places = policy.concurrency(sampler.num_clients, sampler.num_sampled)
        self.busy: set[int] = set()
        self.number = 0
        self.failed = 0  # visits in a row
        self.servers: dict[int, Server] = {}  # version -> the server then, as many as the policy keeps
        self.upload_bytes = 0
        self.tally, self.rows = Tally(), list[Row]()
        self.metrics: dict[int, Mapping[str, float]] = {}  # of each client's last visit
        self.taker = Taker(stepper, policy)
        self.start, self.judging = now(), np.zeros(2)
        self.served = np.zeros((stepper.transport.size, 2))  # idle and all seconds of each rank
        self.last_word: dict[str, float] = {}

    check = staticmethod(check)

    def run(self, observe: Callable[[Record], None], saved: Saved | None = None) -> Server | None:
        """Run; `observe` is called on rank 0 after each step. Return the last server on rank 0.

        Args:
            saved: a state to go on from, on rank 0.
        """
        stepper = self.stepper
        stepper.may_spread = stepper.may_welcome = False
        if not stepper.transport.is_server:
            self._serve()
            return None
        pool = open_pool(
            stepper.transport,
            self._visit,
            lambda: regroup(stepper),
            lambda task: stepper.scheduler.candidates(task.header[0].client),
        )
        server = self._begin(pool, saved)
        server = self._drive(server, pool, observe, saved)
        pool.close("end")
        return server

    def _begin(self, pool: Lasting, saved: Saved | None) -> Server:
        if saved is None:
            server: Server | None = self._together(pool, "begin", self.stepper.begin)
            assert server is not None
            self.servers = {server.version: server}
            return server
        restored = take_events(saved, self)
        self._together(pool, "restore", lambda: self.stepper.settle(restored))
        return restored

    def _together(self, pool: Lasting, word: str, act: Callable[[], Any]) -> Any:
        """Do something that every rank takes part in, again if one is lost meanwhile; on rank 0."""
        while True:
            self.stepper.ledger.commit()
            pool.order_all(word)
            try:
                return act()
            except RankLost:
                self.stepper.ledger.roll_back()
                pool.recover()

    def summary(self) -> dict[str, Any]:
        """Return what the run says of itself; on rank 0."""
        workers = self.served[list(self.stepper.transport.workers)]
        idle = [i / s for i, s in workers.tolist() if s]
        real, busy = (now() - self.start - self.judging).tolist()
        said = self.tally.summary(self.num_steps, self.clock.now, real, idle, busy / real)
        steps = {} if self.clock.in_seconds else {"clock_seconds": None, "updates_per_clock_second": None}
        return said | steps

    # -- at the worker ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        stepper, word = self.stepper, ""
        acts: dict[str, Callable[[], Any]] = {
            "begin": stepper.begin,
            "restore": lambda: stepper.settle(None),
            "judge": lambda: self._judge(None),
            SAVE: lambda: save(stepper, None, self.checkpointer, None, alone=False),
        }
        while word not in LAST:
            try:
                said = serve(stepper.transport, self._visit)
                self.last_word, word = {"idle": said.idle, "served": said.seconds}, said.word
                if word == STOP:
                    self.checkpointer.stop(said.what)
                acts.get(word, lambda: None)()
            except RankLost:
                regroup(stepper)

    def _visit(
        self, header: tuple[Order, int, int], vectors: Mapping[str, torch.Tensor]
    ) -> tuple[Light | Dropped, dict[str, torch.Tensor]]:
        order, step, version = header
        message = Message(vectors, order.reads, version, step)
        return self.stepper.worker.serve(order, message)

    # -- at the server ---------------------------------------------------------------------------------------

    def _drive(
        self, server: Server, pool: Lasting, observe: Callable[[Record], None], saved: Saved | None
    ) -> Server:
        if self.clock.counts_bytes:
            self.upload_bytes = bytes_up(self.stepper.worker, server)
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

    def _save(self, server: Server, pool: Lasting) -> None:
        """Write the state if that is due, and end if it was asked for."""
        word = self.checkpointer.due(server.version)
        if not word:
            return

        def write(alone: bool) -> None:
            save(self.stepper, server, self.checkpointer, events_state(self, server, pool), alone)

        if needs_workers(self.stepper):
            self._together(pool, SAVE, lambda: write(alone=False))
        else:
            write(alone=True)
        if word == STOP:
            pool.close(STOP, server.version)
            self.checkpointer.stop(server.version)

    def _fill(self, server: Server, pool: Lasting) -> None:
        """Start visits until all places are taken, or nobody is left to start."""
        while True:
            flight = Flight(
                busy=self.busy,
                number=self.number,
                version=server.version,
                places=self.places,
                sampler=self.sampler,
                key=self.key,
                here=self.clock.here,
            )
            starts = self.clock.starts(flight)
            for k, version in self.policy.starts(flight) if starts is None else starts:
                self._start(k, version, pool)
            if self.busy:
                return
            self.clock.skip(self.sampler.num_clients)

    def _start(self, k: int, version: int, pool: Lasting) -> None:
        """Send a client what it reads and put its arrival on the clock."""
        remedy = f"reads version {version}, and the server is at {max(self.servers)}: no trace of such a run"
        require(version in self.servers, "clock.trace", f"client {k}", remedy)
        stepper, server, v = self.stepper, self.servers[version], int(self.stepper.visits[k])
        step = max(self.servers) + 1
        reads = stepper.read_by("reads", server, np.array([k]))[k]
        widths = {name: table.shape[1] for name, table in server.tables.items()}
        stepper.ledger.add_reads(step, {k: reads}, widths)
        due = self.clock.due(k, v, bytes_down(reads, widths, stepper.ledger.payload), self.upload_bytes)
        visit = Visit(due, self.number, k, v, version, self.clock.now)
        self.clock.add(visit)
        vectors = {name: rows_read(server, name, which) for name, which in reads.items()}
        header = (Order(0, k, v, reads), step, version)
        pool.submit(Task(self.number, due, header, vectors, tuple(stepper.scheduler.candidates(k))))
        self.busy.add(k)
        self.number += 1

    def _drop(self, visit: Visit, failed: Dropped) -> None:
        """A visit has failed: its client is free, and may try again later."""
        self.failed += 1
        self.stepper.drop([failed], nobody=self.failed > 2 * self.sampler.num_clients)
        self.tally.passed(self.clock.now, len(self.busy))
        self.busy.discard(visit.client)

    def _next(self, server: Server, pool: Lasting) -> Arrival | None:
        """Return the next upload to arrive; None where the visit has failed."""
        with self.stepper.watch("wait"):
            visit = self.clock.next(pool)
            light, vectors = pool.result(visit.number)
        if isinstance(light, Dropped):
            self._drop(visit, light)
            return None
        self.tally.passed(self.clock.now, len(self.busy))
        self.failed = 0
        self.busy.discard(visit.client)
        self.stepper.visits[visit.client] += 1
        self.stepper.book(server.version + 1, light)
        self.metrics[visit.client] = light.metrics
        row = visit.row(self.clock.now, server.version)
        self.rows.append(row)
        return Arrival(visit, light, vectors, row)

    def _welcome(self, arrival: Arrival) -> bool:
        """Return whether an upload is fresh enough."""
        limit, lag = self.policy.max_staleness, arrival.row["staleness"]
        late = limit is not None and lag > limit
        if late:
            self.tally.add(lag, accepted=False)
        return not late

    def _step(self, server: Server, arrivals: list[Arrival]) -> Server:
        """Return the server after the uploads at hand, taken in the order of (client, visit)."""
        algorithm = self.stepper.algorithm
        arrivals = sorted(arrivals, key=lambda a: (a.visit.client, a.visit.visit))
        lights = [replace(a.light, number=j) if j else a.light for j, a in enumerate(arrivals)]
        lag = np.array([a.row["staleness"] for a in arrivals])
        uploads: dict[str, list[torch.Tensor]] = {}
        for a in arrivals:
            for name, rows in a.vectors.items():
                uploads.setdefault(name, []).extend(rows.unbind())
        with self.stepper.watch("cluster"):
            notes = self.taker.compared(
                server, self.stepper.columns(server.version + 1, lights, lag), uploads
            )
            plan = self.stepper.planned("aggregate", server, notes, algorithm.aggregate)
        if not algorithm.needs.asynchronous:
            plan = damped(plan, self.policy.rates(lag))
        for j, a in enumerate(arrivals):
            a.row["weight"] = largest_weight(plan, j, len(arrivals))
            a.row["accepted"] = int(bool(plan.mixings) or not a.vectors)
            self.tally.add(a.row["staleness"], bool(a.row["accepted"]))
        self.on_events(self.rows)
        self.rows = []
        self.stepper.ledger.commit()
        new = self.taker.mixed(server, plan, uploads)
        self.servers[new.version] = new
        self.servers.pop(new.version - self.policy.versions, None)
        return new

    def _record(
        self, server: Server, cohort: list[int], pool: Lasting, observe: Callable[[Record], None]
    ) -> None:
        scores, timing, start = None, None, now()
        due = self.judge_every and server.version % self.judge_every == 0
        if due or server.version in (0, self.num_steps):
            scores, timing = self._together(pool, "judge", lambda: self._judge(server))
            pool.look()  # workers train on while rank 0 writes
        observe(
            Record(
                step=server.version,
                server=server,
                cohort=np.array(cohort, np.int64),
                judged=self.judged,
                scores=scores,
                train={**self._means(), **self.tally.so_far()} if scores is not None else {},
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

    def _judge(self, server: Server | None) -> tuple[Any, Any]:
        """Judge all, and bring the timing of all ranks together; every rank calls."""
        scores = self.stepper.judge(server, self.judged)
        timing = self.stepper.transport.collect(self.stepper.watch.take() | self.last_word, "timing")
        for rank, phases in enumerate(timing or ()):
            self.served[rank] += phases.get("idle", 0.0), phases.get("served", 0.0)
        return scores, timing
