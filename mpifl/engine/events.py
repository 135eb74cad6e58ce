"""The asynchronous engine: visits under way, arrivals one by one, the same methods.

Shares the server's step with the synchronous engine: what a method decides from notes becomes mixings, which
rank 0 applies to the uploads it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from mpifl.comm import Mixer, Pool, Single, Task, open_pool, serve
from mpifl.comm.here import blended_here, mixed_here
from mpifl.comm.tables import Tables
from mpifl.core.algorithm import Algorithm, apply_plan
from mpifl.core.errors import UserError, require
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Server

from .clock import Clock
from .damping import damped
from .flight import Flight, Visit
from .pace import bytes_down, bytes_up
from .policy import Policy
from .rounds import Record
from .sampler import Sampler
from .step import Stepper
from .tally import Tally
from .visits import Light, Order, read_rows, row_distances

Uploads = Mapping[str, list[torch.Tensor]]
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
    ) -> None:
        self.stepper, self.policy, self.clock, self.sampler = stepper, policy, clock, sampler
        self.num_steps, self.judged = num_steps, judged
        self.judge_every, self.judge_first = judge_every, judge_first
        self.key, self.on_events = key or stepper.seed, on_events
        self.places = policy.concurrency(sampler.num_clients, sampler.num_sampled)
        self.busy: set[int] = set()
        self.number = 0
        self.servers: dict[int, Server] = {}  # version -> the server then, as many as the policy keeps
        self.upload_bytes = 0
        self.tally, self.rows = Tally(), list[Row]()
        self.metrics: dict[int, Mapping[str, float]] = {}  # of each client's last visit
        self.mixer = Mixer(Single(), Tables(Single()))  # for the products of uploads that are all here
        self.start, self.judging = _now(), np.zeros(2)
        self.served = np.zeros((stepper.transport.size, 2))  # idle and all seconds of each rank
        self.last_word: dict[str, float] = {}

    @staticmethod
    def check(algorithm: Algorithm, policy: Policy) -> None:
        """Raise `UserError` for a method that cannot run without rounds."""
        needs, name = algorithm.needs, type(algorithm).__name__
        remedy = f"{name} takes one upload at a time; take policy every_arrival or client_decides"
        require(not needs.one_by_one or policy.singly, "policy.name", "buffer or barrier", remedy)
        remedy = f"{name} looks at all clients of a round at once; it runs under policy rounds only"
        require(not (needs.probe or needs.memory or needs.rounds), "policy.name", "asynchronous", remedy)
        remedy = f"{name} compares the uploads of a step; take policy rounds, barrier or buffer"
        fresh = policy.fresh or not needs.together
        require(fresh, "policy.name", "stale uploads", f"{name} needs fresh uploads; take rounds or barrier")
        several = needs.several or needs.gram is not None
        require(not (several and policy.singly), "policy.name", "one upload at a time", remedy)

    def run(self, observe: Callable[[Record], None]) -> Server | None:
        """Run; `observe` is called on rank 0 after each step. Return the last server on rank 0."""
        self.stepper.may_spread = self.stepper.may_welcome = False
        server = self.stepper.begin()
        if server is None:
            self._serve()
            return None
        pool = open_pool(self.stepper.transport, self._visit)
        try:
            server = self._drive(server, pool, observe)
        except UserError as error:  # found on rank 0 only; the others must hear of it
            pool.close("fail", error)
            raise
        pool.close("stop")
        return server

    def summary(self) -> dict[str, Any]:
        """Return what the run says of itself; on rank 0."""
        workers = self.served[list(self.stepper.transport.workers)]
        idle = [i / s for i, s in workers.tolist() if s]
        real, busy = (_now() - self.start - self.judging).tolist()
        return self.tally.summary(self.num_steps, self.clock.now, real, idle, busy / real)

    # -- at the worker ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            word = serve(self.stepper.transport, self._visit)
            self.last_word = {"idle": word.idle, "served": word.seconds}
            if word.word == "fail":
                raise word.what
            if word.word == "stop":
                return
            self._judge(None)

    def _visit(
        self, header: tuple[Order, int, int], vectors: Mapping[str, torch.Tensor]
    ) -> tuple[Light, dict[str, torch.Tensor]]:
        order, step, version = header
        message = Message(vectors, order.reads, version, step)
        return self.stepper.worker.serve(order, message)

    # -- at the server ---------------------------------------------------------------------------------------

    def _drive(self, server: Server, pool: Pool, observe: Callable[[Record], None]) -> Server:
        if self.clock.counts_bytes:
            self.upload_bytes = bytes_up(self.stepper.worker, server)
        if self.judge_first:
            self._record(server, [], pool, observe)
        waiting: list[Arrival] = []
        last = server.version + self.num_steps
        self.servers = {server.version: server}
        self.start, self.judging = _now(), np.zeros(2)
        self.clock.begin()
        self._fill(server, pool)
        while server.version < last:
            arrival = self._next(server, pool)
            if self._welcome(arrival):
                waiting.append(arrival)
            if waiting and self.policy.ready(len(waiting), len(self.busy)):
                server = self._step(server, waiting)
                self._record(server, [a.visit.client for a in waiting], pool, observe)
                waiting = []
            if server.version < last and not self.clock.more():
                self._fill(server, pool)
        return server

    def _fill(self, server: Server, pool: Pool) -> None:
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

    def _start(self, k: int, version: int, pool: Pool) -> None:
        """Send a client what it reads and put its arrival on the clock."""
        remedy = f"reads version {version}, and the server is at {max(self.servers)}: no trace of such a run"
        require(version in self.servers, "clock.trace", f"client {k}", remedy)
        stepper, server, v = self.stepper, self.servers[version], int(self.stepper.visits[k])
        step = max(self.servers) + 1
        reads = stepper.algorithm.reads(server, k)
        widths = {name: table.shape[1] for name, table in server.tables.items()}
        stepper.ledger.add_reads(step, {k: reads}, widths)
        due = self.clock.due(k, v, bytes_down(reads, widths, stepper.ledger.payload), self.upload_bytes)
        visit = Visit(due, self.number, k, v, version, self.clock.now)
        self.clock.add(visit)
        vectors = {name: _read(server, name, which) for name, which in reads.items()}
        header = (Order(0, k, v, reads), step, version)
        pool.submit(Task(self.number, due, header, vectors, tuple(stepper.scheduler.candidates(k))))
        self.busy.add(k)
        self.number += 1

    def _next(self, server: Server, pool: Pool) -> Arrival:
        """Return the next upload to arrive."""
        with self.stepper.watch("wait"):
            visit = self.clock.next(pool)
            light, vectors = pool.result(visit.number)
        self.tally.passed(self.clock.now, len(self.busy))
        self.busy.discard(visit.client)
        self.stepper.visits[visit.client] += 1
        self.stepper.book(server.version + 1, light)
        self.metrics[visit.client] = light.metrics
        row = {
            "time": self.clock.now,
            "client": visit.client,
            "visit": visit.visit,
            "start": visit.start,
            "read_version": visit.version,
            "arrival_version": server.version,
            "staleness": server.version - visit.version,
            "weight": 0.0,
            "accepted": 0,
        }
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
                uploads.setdefault(name, []).extend(rows)
        with self.stepper.watch("cluster"):
            notes = self._compared(server, self.stepper.columns(server.version + 1, lights, lag), uploads)
            plan = algorithm.aggregate(server, notes)
        if not algorithm.needs.asynchronous:
            plan = damped(plan, self.policy.rates(lag))
        for j, a in enumerate(arrivals):
            a.row["weight"] = _weight(plan, j, len(arrivals))
            a.row["accepted"] = int(bool(plan.mixings) or not a.vectors)
            self.tally.add(a.row["staleness"], bool(a.row["accepted"]))
        self.on_events(self.rows)
        self.rows = []
        return self._mixed(server, plan, uploads)

    def _compared(self, server: Server, notes: Notes, uploads: Uploads) -> Notes:
        """Return the notes with what the method wants compared."""
        algorithm = self.stepper.algorithm
        name = algorithm.needs.gram
        if name and algorithm.compares(server):
            x = uploads[name]
            gram = self.mixer.gram(x, (len(x),), np.zeros(len(x), int), len(x[0]))
            assert gram is not None
            notes = notes.having(gram=gram)
        if name := algorithm.needs.row_distance:
            rows, p = server.tables[name], self.stepper.world.layout.num_parameters
            notes = notes.having(row_distance=np.stack([row_distances(u, rows, p) for u in uploads[name]]))
        return notes

    def _mixed(self, server: Server, plan: Plan, uploads: Uploads) -> Server:
        tables = dict(server.tables)
        with self.stepper.watch("reduce"):
            for m in plan.mixings:
                tables[m.into] = self._mix(m, tables[m.into], uploads[m.of])
        new = apply_plan(server, plan, tables)
        polished = self.stepper.algorithm.server_update(server, new)
        new = polished if polished is new else replace(polished, version=new.version)
        if self.stepper.algorithm.needs.inspect:
            with self.stepper.watch("evaluate"):
                new = self.stepper.algorithm.appraise(server, new, self.stepper.world.public)
        self.stepper.tables.publish(new.tables)
        self.servers[new.version] = new
        self.servers.pop(new.version - self.policy.versions, None)
        return new

    def _mix(self, mixing: Mixing, old: torch.Tensor, uploads: list[torch.Tensor]) -> torch.Tensor:
        if self.policy.singly:
            return blended_here(mixing, old, uploads)
        return mixed_here(mixing, old, uploads, self.stepper.peaks(mixing.of).reshape(-1))

    def _record(
        self, server: Server, cohort: list[int], pool: Pool, observe: Callable[[Record], None]
    ) -> None:
        scores, timing, start = None, None, _now()
        due = self.judge_every and server.version % self.judge_every == 0
        if due or server.version in (0, self.num_steps):
            pool.order_all("judge")
            scores, timing = self._judge(server)
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
                virtual_seconds=self.clock.now,
            )
        )
        if scores is not None:
            self.judging += _now() - start

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


def _now() -> np.ndarray:
    """Return the real seconds and the processor's seconds of this process."""
    return np.array([perf_counter(), process_time()])


def _read(server: Server, name: str, which: tuple[int, ...] | np.ndarray) -> torch.Tensor:
    """Return what is downloaded of a table; a single row is no copy, since tables are never written to."""
    table = server.tables[name]
    if not isinstance(which, np.ndarray) and len(which) == 1:
        return table[which[0] : which[0] + 1]
    return read_rows(lambda _, rows: table[rows], name, which)


def _weight(plan: Plan, j: int, m: int) -> float:
    """Return the largest weight of report j in any row of the first mixing."""
    if not plan.mixings:
        return 0.0
    weights = plan.mixings[0].weights
    return float(np.abs(weights.reshape(len(weights), m, -1)[:, j]).max())
