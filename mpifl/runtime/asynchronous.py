"""The asynchronous engine: clients train concurrently, and the server steps whenever the policy says so.

It runs the same methods and the same server step as the synchronous engine: a method decides on mixings from
the clients' notes, and rank 0 applies them to the uploads that have arrived. A checkpoint keeps the rows that
each visit under way has read; the visit is trained again after resuming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, nan
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mpifl.aggregation.local_mixing import mix_exact, mix_float32
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables, read_rows, row_distances, rows_of
from mpifl.aggregation.update_filter import UpdateFilters
from mpifl.comm.single import Single
from mpifl.comm.task_pool import Answer, RecoveringPool, Task, task_loop
from mpifl.comm.transport import RankLost
from mpifl.core.capabilities import (
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    ServerEvaluation,
    hooks_of,
    mixes_remembered,
    upload_named,
    uses,
)
from mpifl.core.devices import message_on
from mpifl.core.metric import with_figures
from mpifl.core.parameters import Layout, Part
from mpifl.core.plan import Plan
from mpifl.core.progress import ROUND, Stage, doing
from mpifl.core.rng import Key
from mpifl.core.timing import now
from mpifl.core.types import Message, Reads, Server
from mpifl.simulation.clock import Clock
from mpifl.simulation.dispatcher import Dispatcher
from mpifl.simulation.policies import AsynchronousPolicy
from mpifl.simulation.sampling import Sampler
from mpifl.simulation.staleness import damp
from mpifl.simulation.visits import Visit
from mpifl.traffic.encoding import download_bytes, time_stamp_bytes
from mpifl.traffic.ledger import count_numbers

from .engine import END, Engine, Evaluated, EvaluationSchedule, Observe, Record, regroup
from .exchange import Counted, Found
from .hook_errors import Dropped
from .kept_uploads import Arrival, KeptUploads, Row
from .protocol import ClientTask, GatheredReports, LookPlan, ReportHeader, weighted_mean
from .run_state import SAVE, STOP, Checkpointer, NoCheckpoints, Saved, needs_workers, save
from .server_step import Aggregator, MpiAggregator, ServerStep, Uploads
from .upload_size import UploadSizes

T = TypeVar("T")
SPREAD = "_before"  # suffix of visit metrics whose standard deviation over clients is reported too


@dataclass
class AsyncStats:
    """Counts of arrivals.

    Attributes:
        lags: staleness in server steps -> number of arrivals.
        refused: number of arrivals that changed nothing.
        busy_seconds: integral of the number of visits under way over the run's clock.
    """

    lags: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    busy_seconds: float = 0.0
    _then: float = 0.0

    def advance(self, now: float, under_way: int) -> None:
        """Add the time since the last call, during which `under_way` visits were under way."""
        self.busy_seconds += (now - self._then) * under_way
        self._then = now

    def add(self, lag: int, accepted: bool) -> None:
        """Count an arrival."""
        self.lags[lag] += 1
        self.refused += not accepted

    def metrics(self) -> dict[str, Any]:
        """Return the figures that are written at each evaluation."""
        arrivals = self.lags.total()
        return {
            "arrivals": arrivals,
            "refusal_rate": self.refused / max(arrivals, 1),
            "staleness_mean": sum(lag * n for lag, n in self.lags.items()) / max(arrivals, 1),
        }

    def summary(
        self, steps: int, virtual: float, real: float, idle: Sequence[float], server: float
    ) -> dict[str, Any]:
        """Return the figures of the run.

        Args:
            steps: number of server steps.
            virtual: seconds on the run's clock.
            real: seconds of real time without evaluation.
            idle: share of its time in which each worker had no visit; empty for one process.
            server: processor time of rank 0 as a share of the real seconds.
        """
        return {
            **self.metrics(),
            "refused": self.refused,
            "staleness_max": max(self.lags, default=0),
            "staleness_histogram": {str(lag): self.lags[lag] for lag in sorted(self.lags)},
            "concurrency": self.busy_seconds / virtual if virtual else 0.0,
            "clock_seconds": virtual,
            "updates_per_clock_second": steps / virtual if virtual else None,
            "updates_per_second": steps / real if real else None,
            "arrivals_per_second": self.lags.total() / real if real else None,
            "worker_idle_share": [round(share, 4) for share in idle],
            "server_cpu_share": round(server, 4),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts in a form that JSON can hold."""
        return {**vars(self), "lags": sorted(self.lags.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.lags = Counter({lag: count for lag, count in state["lags"]})
        self.refused, self.busy_seconds = state["refused"], state["busy_seconds"]
        self._then = state["_then"]


@dataclass(frozen=True)
class TrainingTask:
    """A visit, for a worker; its rows travel with it.

    Attributes:
        task: client, visit, and the rows that it reads.
        step: the server step that it belongs to.
        version: the version of the rows.
    """

    task: ClientTask
    step: int
    version: int

    @property
    def client(self) -> int:
        """The client."""
        return self.task.client


@dataclass(frozen=True)
class StatisticsTask:
    """What one client does to send its statistics, for a worker; what it is shown travels with it.

    Attributes:
        task: client and visit.
        step: the server step.
    """

    task: ClientTask
    step: int

    @property
    def client(self) -> int:
        """The client."""
        return self.task.client


@dataclass(frozen=True)
class LookTask:
    """What one client does in a second look, for a worker; its uploads travel with it.

    Attributes:
        looks: who looks at whom.
        place: the client's place in the step.
        step: the server step.
        shapes: upload -> its shape.
    """

    looks: LookPlan
    place: int
    step: int
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def client(self) -> int:
        """The client."""
        return int(self.looks.clients[self.place])


class Owed(NamedTuple):
    """What a client moves and computes beside its visits, by which its next visit lasts longer.

    Attributes:
        down: bytes that it downloads.
        up: bytes that it uploads.
        look: its work in second looks, in units of one local training.
    """

    down: int = 0
    up: int = 0
    look: float = 0.0


class LocalAggregator:
    """Aggregates uploads that are all on rank 0; only rank 0 calls its methods.

    Args:
        layout: layout of the model; its buffers do not count in distances.
        exact: whether to use the exact sums of `MpiAggregator`; otherwise float32 sums.
        filters: may replace the mixings.
    """

    def __init__(self, layout: Layout, exact: bool, filters: UpdateFilters) -> None:
        self.layout, self.exact, self._tables = layout, exact, Tables(Single())
        mixer = Mixer(Single(), self._tables, exact)
        self._alone = MpiAggregator(mixer, filters.mixer(mixer))

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m]."""
        return self._alone.gram(reports, uploads, name, part)

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray:
        """Return the distances [m, K] of an upload to the rows of the table with its name."""
        rows = server.tables[name]
        return np.stack([row_distances(u, rows, self.layout) for u in uploads[name]])

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes."""
        assert server is not None
        assert plan is not None
        assert reports is not None
        if self._alone.rows is not self._alone.mixer:
            self._tables.publish(server.tables)
            return self._alone.mix(server, plan, reports, uploads)
        changed: dict[str, torch.Tensor] = {}
        for m in plan.mixings:
            old, of = changed.get(m.into, server.tables[m.into]), uploads.get(m.of, [])
            if self.exact:
                max_abs = reports.upload_info(m.of)[0] if m.of else np.zeros(0)
                changed[m.into] = mix_exact(m, old, of, max_abs)
            else:
                changed[m.into] = mix_float32(m, old, of)
        return changed


class AsynchronousEngine(Engine):
    """Runs server steps under a policy and a clock; rank 0 drives, the other ranks train.

    Args:
        server_step: takes the steps.
        policy: decides when the server steps, and which clients start.
        clock: decides which upload arrives next; used on rank 0.
        sampler: draws cohorts.
        num_steps: number of steps to take.
        evaluation: which clients are evaluated, and when.
        key: address of the system's draws; None for the training seed's key.
        on_arrivals: called at each step with the rows of the arrivals, in order of arrival.
        checkpointer: writes the state between steps; None for no checkpoints.
    """

    def __init__(
        self,
        server_step: ServerStep,
        policy: AsynchronousPolicy,
        clock: Clock,
        sampler: Sampler,
        num_steps: int,
        evaluation: EvaluationSchedule,
        key: Key | None = None,
        on_arrivals: Callable[[Sequence[Row]], None] = lambda rows: None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.server_step, self.policy, self.clock, self.sampler = server_step, policy, clock, sampler
        self.num_steps, self.evaluation, self.on_arrivals = num_steps, evaluation, on_arrivals
        self.checkpointer = checkpointer or NoCheckpoints()
        server_step.seconds = lambda: clock.now
        self.failed = 0  # consecutive failed visits
        self.begun = -1  # the version of the server whose next step has begun
        self.servers: dict[int, Server] = {}  # by version, as many as the policy keeps
        self.upload_sizes = UploadSizes(server_step)  # used if the clock needs bytes
        self.owed: dict[int, Owed] = {}  # by client, until its next visit starts
        self.stamp_bytes = time_stamp_bytes(
            server_step.config.payload, server_step.algorithm.needs.time_stamps
        )
        if clock.energy is not None:
            server_step.computation.count_energy(len(server_step.visits))
        self.stats, self.rows = AsyncStats(), list[Row]()
        self.dispatcher = Dispatcher(policy, clock, sampler, key or server_step.seed, self.stats.advance)
        self.metrics: dict[int, Mapping[str, float]] = {}  # metrics of each client's last visit
        self.samples: dict[int, int] = {}  # training samples of each client's last visit
        layout, filters = server_step.problem.layout, server_step.config.filters
        self.aggregator: Aggregator = LocalAggregator(layout, not policy.single_upload, filters)
        self.kept: KeptUploads | None = None
        if uses(server_step.algorithm, RememberedUploads):
            self.kept = KeptUploads(hooks_of(server_step.algorithm, RememberedUploads).max_age)
        self.mixes_remembered = mixes_remembered(server_step.algorithm)
        self.damps = not (self.mixes_remembered or server_step.algorithm.needs.weighs_staleness)
        self.start, self.evaluation_time = now(), np.zeros(2)  # real and processor seconds
        self.served = np.zeros((server_step.transport.size, 2))  # for each rank: idle seconds, all seconds
        self.last_served: tuple[float, float] | None = None  # the same of this worker, before a command

    def run(self, observe: Observe, saved: Saved | None = None) -> Server | None:
        """Run all steps; see `Engine`."""
        server_step = self.server_step
        if not server_step.transport.is_server:
            self._worker_loop()
            return None
        self.checkpointer.begins(server_step, {**self._values(), "visits": Visit})
        pool = RecoveringPool(
            server_step.transport,
            self._work,
            lambda: regroup(server_step),
            lambda task: server_step.scheduler.candidates(task.header.client),
        )
        server = self._begin(pool, saved)

        def received() -> int:
            left = sum(number >= 0 for number in (*pool.tasks,))
            return self.dispatcher.num_started - left + len(pool.finished())

        rounds = doing(ROUND, self.num_steps, first=server.version, main=True)
        with rounds as stage, doing("training", unit="visits", count=received):
            server = self._drive(server, pool, self._counting(observe, stage), saved)
        self._close(pool, END)
        return server

    def _counting(self, observe: Observe, rounds: Stage) -> Observe:
        """Return `observe`, which also counts the steps."""

        def observed(record: Record) -> bool | None:
            over = observe(record)
            rounds.done = record.step
            return over

        return observed

    def _begin(self, pool: RecoveringPool, saved: Saved | None) -> Server:
        if saved is None:
            server = self._on_all(pool, "begin", self.server_step.initialize)
            assert server is not None
            self.servers = {server.version: server}
            with self.server_step.watch("collect"):
                self._take_statistics(pool)
            return server
        with self.checkpointer.restoring():
            restored = self._restore(saved)
        self._on_all(pool, "restore", lambda: self.server_step.distribute(restored))
        return restored

    def _take_statistics(self, pool: RecoveringPool) -> None:
        """Advance the clock until the one-shot statistics have arrived; nobody trains before that."""
        visits, nobody = self.server_step.visits, np.zeros(0, np.int64)
        moved = self.server_step.ledger.moved_in(0, nobody, visits.__getitem__)
        self.dispatcher.take_statistics(moved, pool)
        if (energy := self.clock.energy) is not None:
            for m in moved:
                self.server_step.computation.add_energy(m.client, energy.joules_of_statistics(m.client))

    def _on_all(self, pool: RecoveringPool, command: str, act: Callable[[], T]) -> T:
        """Execute a command on every rank, and repeat it if a rank is lost meanwhile; on rank 0."""
        while True:
            self.server_step.commit()
            with self.server_step.watch("wait"):
                pool.command_all(command)
            try:
                with self.server_step.config.timeline.command(command):
                    return act()
            except RankLost:
                self.server_step.roll_back()
                pool.recover()

    def _close(self, pool: RecoveringPool, command: str, argument: Any = None) -> None:
        """Send the last command, repeatedly until every rank has executed it; on rank 0."""
        while True:
            with self.server_step.watch("wait"):
                pool.close(command, argument)
            try:
                self.server_step.transport.barrier()  # if a rank is lost before this, all ranks repeat it
                return
            except RankLost:
                pool.recover()

    @property
    def num_uploads(self) -> np.ndarray:
        """The number of visits of each client [N]; uploads that were too stale were sent too; on rank 0."""
        return self.server_step.visits

    def summary(self) -> dict[str, Any]:
        """Return statistics of arrivals, staleness, concurrency and idle time, on rank 0."""
        transport = self.server_step.transport
        workers = self.served[[transport.numbers[rank] for rank in transport.workers]]
        idle = [i / s for i, s in workers.tolist() if s]
        real, cpu = (now() - self.start - self.evaluation_time).tolist()
        figures = self.stats.summary(max(self.servers), self.clock.now, real, idle, cpu / real)
        steps = {} if self.clock.in_seconds else {"clock_seconds": None, "updates_per_clock_second": None}
        return figures | steps | ({} if self.clock.knows_visits else {"concurrency": None})

    # -- at the worker ---------------------------------------------------------------------------------------

    def _worker_loop(self) -> None:
        server_step, command = self.server_step, ""
        barrier = server_step.transport.barrier
        acts: dict[str, Callable[[], Any]] = {
            "begin": server_step.initialize,
            "restore": lambda: server_step.distribute(None),
            "change": server_step.tell_changes,
            "evaluate": lambda: self._evaluate(None),
            SAVE: lambda: self._write(None, None, alone=False),
            END: barrier,
        }
        while command != END:
            try:
                last = task_loop(server_step.transport, self._work, server_step.watch)
                self.last_served, command = (last.idle, last.seconds), last.name
                if command == STOP:
                    barrier()  # the first rank that leaves removes the state that clients keep
                    self.checkpointer.stop(last.argument)
                with server_step.config.timeline.command(command):
                    acts.get(command, lambda: None)()
            except RankLost:
                command = ""
                regroup(server_step)

    def _work(
        self, header: TrainingTask | StatisticsTask | LookTask, vectors: Mapping[str, torch.Tensor]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the result of a task; see `task_loop`."""
        self.server_step.config.timeline.at_step(header.step)
        worker = self.server_step.worker
        self.server_step.config.give_back()
        if isinstance(header, LookTask):
            with self.server_step.watch("report", header.client):
                uploads = {name: vectors[name].reshape(shape) for name, shape in header.shapes.items()}
                return worker.run_look(header.looks, header.place, header.step, uploads), {}
        task = header.task
        with self.server_step.watch("visits", task.client, task.visit):
            if isinstance(header, StatisticsTask):
                made, computed, uploads = worker.run_statistics(task, header.step, vectors)
                return (made, computed), uploads
            message = Message(vectors, task.reads, header.version, header.step)
            return worker.run_visit(task, message)

    # -- at the server ---------------------------------------------------------------------------------------

    def _drive(self, server: Server, pool: RecoveringPool, observe: Observe, saved: Saved | None) -> Server:
        if self.evaluation.first and saved is None:
            self._record(server, (), pool, observe)
        waiting: list[Arrival] = []
        self.start, self.evaluation_time = now(), np.zeros(2)
        if saved is None:
            self.clock.start()
        else:
            with self.server_step.watch("select"), self.checkpointer.restoring():
                self._restore_visits(saved, pool)
        server = self._fill(server, pool)
        over = server.version >= self.num_steps
        while not over:
            with self.server_step.watch("wait"):
                visit = self.dispatcher.next_arrival(pool)
            who = () if visit is None else (visit.client, visit.visit)
            with self.server_step.watch("collect", *who):
                arrival = None if visit is None else self._arrived(visit, server, pool)
                if arrival is not None and not self._refused(arrival):
                    waiting.append(arrival)
                if self.dispatcher.server_steps(visit, len(waiting)):
                    with self.server_step.config.timeline.command("step"):
                        server = self._step(server, waiting, pool)
                    over = self._record(server, waiting, pool, observe) or server.version >= self.num_steps
                    waiting = []
                    if not over:
                        self._save(server, pool)
                if not over:
                    server = self._fill(server, pool, len(waiting))
        return server

    def _fill(self, server: Server, pool: RecoveringPool, waiting: int = 0) -> Server:
        """Start visits, and return the server, to whose clusters new clients may have been assigned.

        See `Dispatcher.fill`. Data that change do so when a server step begins: all its visits have the new.
        """
        if server.version > self.begun:
            self.begun = server.version
            if self.server_step.data_change(server.version + 1):
                self._on_all(pool, "change", self.server_step.tell_changes)
                self.servers[server.version] = self.server_step.with_groups(server)

        def start(client: int, version: int) -> None:
            self._start(client, version, pool)

        def prepare(clients: Sequence[int]) -> None:
            if self.server_step.admits_new_clients:
                self._assign_new_clients(np.sort(np.array(clients)), pool)

        with self.server_step.watch("select"):
            self.dispatcher.fill(server.version, waiting, pool, start, prepare)
        return self.servers[server.version]

    def _assign_new_clients(self, clients: np.ndarray, pool: RecoveringPool) -> None:
        """Let clients that start now send their statistics if they are due, and assign them by these.

        What they move for it lengthens their visits.
        """
        step, newest = self.server_step, max(self.servers)
        server = self.servers[newest]
        if not step.config.recluster:
            clients = clients[step.visits[clients] == 0]  # the others have taken part
        if not len(clients):
            return
        sending = step.sending_statistics(server, clients)
        if not len(sending):
            return
        ledger, number = step.ledger, newest + 1
        before = ledger.down[sending], ledger.up[sending]
        step.book_shown(number, sending)
        shown = step.publish_shown()
        reads = {name: tuple(range(len(rows))) for name, rows in shown.items()}
        tasks = [
            (StatisticsTask(ClientTask(j, k, int(step.visits[k]), reads), number), shown)
            for j, k in enumerate(sending.tolist())
        ]
        headers, uploads = list[ReportHeader](), dict[str, list[torch.Tensor]]()
        for header, vectors in self._made_now(tasks, pool):
            step.book_statistics(number, header)
            headers.append(header)
            for name, rows in vectors.items():
                uploads.setdefault(name, []).extend(rows.unbind())
        reports = step.reports_of(headers, np.zeros(len(headers), np.int64), hook="fingerprint")
        if gram := upload_named(step.algorithm, OneShotStatistics, "statistics_gram"):
            reports = step.with_gram(reports, uploads, gram, self.aggregator) or reports
        if compared := upload_named(step.algorithm, OneShotStatistics, "statistics_distance"):
            distances = self.aggregator.row_distances(server, reports, uploads, compared)
            assert distances is not None
            reports = reports.having(row_distance=distances)
        after = step.assigned(server, sending, reports, uploads, self.aggregator)
        assert after is not None
        self.servers[newest] = after
        moved = ledger.down[sending] - before[0], ledger.up[sending] - before[1]
        for k, down, up in zip(sending.tolist(), *(m.tolist() for m in moved), strict=True):
            self._owe(k, down, up)

    def _owe(self, client: int, down: int = 0, up: int = 0, look: float = 0.0) -> None:
        """Let a client's next visit last longer; without another visit, it takes no time."""
        before = self.owed.get(client, Owed())
        self.owed[client] = Owed(before.down + down, before.up + up, before.look + look)

    def _owe_exchanges(self, exchanges: Counted) -> None:
        """Let the next visits of clients last longer by what they have exchanged, or stored at the server."""
        size = self.server_step.ledger.payload.size
        for (_, direction, k), (numbers, messages) in exchanges.items():
            self._owe(k, **{direction: size(numbers, messages)})

    def _start(self, k: int, version: int, pool: RecoveringPool) -> None:
        """Send a client the rows it reads, and add its visit to the clock."""
        self.policy.check_read(k, version, max(self.servers))
        server_step, server, v = self.server_step, self.servers[version], int(self.server_step.visits[k])
        step = max(self.servers) + 1
        reads = server_step.hooks.reads("reads", server, np.array([k]))[k]
        widths = {name: table.shape[1] for name, table in server.tables.items()}
        server_step.book_reads(step, {k: reads}, widths)
        own = server_step.config.filters.widths(widths, k)
        down, up, look = self.owed.pop(k, Owed())
        down += download_bytes(reads, own, server_step.ledger.payload) + self.stamp_bytes
        if self.clock.needs_bytes:
            self.upload_sizes.expected[k] = self.upload_sizes.clear(server, reads, k)
            up += self.upload_sizes.expected[k]
        if look and (energy := self.clock.energy) is not None:
            server_step.computation.add_energy(k, energy.joules_of_look(k, v, look))
        visit = self.dispatcher.begin(k, v, version, down, up, look)
        vectors = {name: rows_read(server, name, which) for name, which in reads.items()}
        self._submit(pool, visit, TrainingTask(ClientTask(0, k, v, reads), step, version), vectors)

    def _submit(
        self, pool: RecoveringPool, visit: Visit, header: TrainingTask, vectors: Mapping[str, torch.Tensor]
    ) -> None:
        ranks = tuple(self.server_step.scheduler.candidates(visit.client))
        pool.submit(Task(visit.number, visit.due, header, vectors, ranks))

    def _arrived(self, visit: Visit, server: Server, pool: RecoveringPool) -> Arrival | None:
        """Return the upload of a visit that has arrived; None if the visit failed."""
        with self.server_step.watch("wait"):
            (header, computed), vectors = pool.result(visit.number)
        self.server_step.computation.add(server.version + 1, computed)
        if (energy := self.clock.energy) is not None:
            joules = energy.joules(visit.client, visit.visit)
            self.server_step.computation.add_energy(visit.client, joules)
        if isinstance(header, Dropped):
            self.failed += 1  # its client may start again later
            self.server_step.drop([header], nobody=self.failed > 2 * self.sampler.num_clients)
            return None
        self.failed = 0
        self.server_step.book_arrival(server.version + 1, header)
        self._owe_exchanges(header.exchanges)
        self.server_step.remember_losses(visit.client, header.metrics)
        self.upload_sizes.compare(header)
        self.metrics[visit.client], self.samples[visit.client] = header.metrics, header.num_samples
        row = visit.row(self.clock.now, server.version)
        self.rows.append(row)
        return Arrival(visit, header, vectors, row)

    def _refused(self, arrival: Arrival) -> bool:
        """Return whether an upload is too stale; count it if so."""
        refused = self.policy.refuses(arrival.row["staleness"])
        if refused:
            self.stats.add(arrival.row["staleness"], accepted=False)
        return refused

    def _counted(
        self, server: Server, arrived: Sequence[Arrival]
    ) -> tuple[Sequence[Arrival], Sequence[Arrival]]:
        """Return the uploads that count in a step: those that have arrived, and those that are remembered.

        Where remembered uploads enter rows, the last upload of a client that has sent several counts.
        """
        if self.kept is None:
            return arrived, ()
        last = {a.visit.client: a for a in arrived}
        new = [a for a in arrived if not self.mixes_remembered or last[a.visit.client] is a]
        return new, self.kept.counting(server.version, last)

    def _made_now(
        self,
        tasks: Sequence[tuple[StatisticsTask | LookTask, Mapping[str, torch.Tensor]]],
        pool: RecoveringPool,
    ) -> Iterator[Answer]:
        """Yield what clients make in some tasks that rank 0 waits for, in their order, with its vectors.

        Workers make them before the visits that have not begun; what was computed is counted.
        """
        step = self.server_step
        for j, (header, vectors) in enumerate(tasks):
            ranks = tuple(step.scheduler.candidates(header.client))
            pool.submit(Task(-1 - j, -inf, header, vectors, ranks))  # visits have numbers from 0 on
        for j, (header, _) in enumerate(tasks):
            with step.watch("wait"):
                (made, computed), vectors = pool.result(-1 - j)
            step.computation.add(header.step, computed)
            yield made, vectors

    def _look(
        self, server: Server, new: Sequence[Arrival], old: Sequence[Arrival], pool: RecoveringPool
    ) -> tuple[list[Arrival], list[Arrival]]:
        """Return the uploads of a step with what their clients found when they looked at each other.

        A client whose look fails counts with its upload before, if there is one that is not too old. What
        clients move and compute lengthens their next visits, the computing also if it fails; the step itself
        does not wait for it.

        Args:
            server: the server before the step.
            new: uploads that have arrived.
            old: uploads that are remembered.
            pool: runs the looks.
        """
        step, number = self.server_step, server.version + 1
        arrivals = sorted((*new, *old), key=lambda a: a.place)
        clients = np.array([a.visit.client for a in arrivals])
        fresh = np.array([a.header.fresh for a in arrivals])
        visits = np.array([a.visit.visit for a in arrivals])
        if hooks_of(step.algorithm, SecondLook).at_server:
            visits[:] = 0
        looks = LookPlan(clients, visits, np.zeros_like(clients), step.hooks.pairs(server, clients, fresh))
        asking = [i for i in range(len(arrivals)) if looks.asks(i)]
        tasks = [(LookTask(looks, i, number, arrivals[i].header.shapes), arrivals[i].vectors) for i in asking]
        found, failed = dict[int, Found](), dict[int, Dropped]()
        for i, (made, _) in zip(asking, self._made_now(tasks, pool), strict=True):
            if isinstance(made, Dropped):
                failed[i] = made
                continue
            found[i] = made
            if fresh[i]:
                k = int(clients[i])
                for name, value in made.notes.items():
                    size = step.ledger.payload.size(count_numbers(value), note=True)
                    step.ledger.add_up(number, name, k, count_numbers(value), size, note=True)
                    self._owe(k, up=size)
            step.book_exchanges(number, made.exchanges)
            self._owe_exchanges(made.exchanges)
        if (loads := self.clock.looks) is not None:
            for k, work in loads.work(looks.clients, looks.visits, *looks.counts()):
                if work:
                    self._owe(k, look=work)
        out = list[Arrival]()
        for i, a in enumerate(arrivals):
            if i in found:
                told = a.header.having(found[i].notes, found[i].findings, {})
                out.append(replace(a, header=told))
            elif i not in failed or not a.header.fresh:
                out.append(a)
            elif (
                self.kept is not None and (before := self.kept.of(a.visit.client, server.version)) is not None
            ):
                out.append(before)
        step.drop([*failed.values()], nobody=not out)
        return [a for a in out if a.header.fresh], [a for a in out if not a.header.fresh]

    def _step(self, server: Server, arrived: Sequence[Arrival], pool: RecoveringPool) -> Server:
        """Return the server after a step with the uploads that have arrived, and those that are remembered.

        Reports are ordered by (client, visit).
        """
        step = self.server_step
        step.config.timeline.at_step(server.version + 1)
        new, old = self._counted(server, arrived)
        if step.config.recluster:
            visits = step.visits.copy()  # before those that have arrived
            for a in new:
                visits[a.visit.client] = a.visit.visit
            server = step.looking_again(server, np.unique([a.visit.client for a in new]), visits)
        if uses(step.algorithm, SecondLook) and step.hooks.probes(server, server.version + 1):
            new, old = self._look(server, new, old, pool)
        everything = [*old, *new]  # in order of arrival
        places = sorted(range(len(everything)), key=lambda i: everything[i].place)
        arrivals = [everything[i] for i in places]
        headers = [replace(a.header, number=j) if j else a.header for j, a in enumerate(arrivals)]
        lag = np.array([a.age(server.version) for a in arrivals])
        uploads: dict[str, list[torch.Tensor]] = {}
        for a in arrivals:
            for name, vectors in a.vectors.items():
                uploads.setdefault(name, []).extend(vectors.unbind())
        reports = step.reports_of(headers, lag, np.argsort(places))
        rows = {name: len(table) for name, table in server.tables.items()}
        adjust = (lambda plan: damp(plan, self.policy.step_sizes(lag), rows)) if self.damps else None
        result = step.advance(server, reports, uploads, self.aggregator, adjust)
        assert result is not None
        plan, after = result.plan, result.server
        for j, a in enumerate(arrivals):
            if a.header.fresh:
                a.row["weight"] = largest_weight(plan, j, len(arrivals))
                a.row["accepted"] = int(bool(plan.mixings) or not a.vectors)
                step.taken[a.visit.client] += 1  # a client may be there twice
        for a in arrived:
            self.stats.add(a.row["staleness"], bool(a.row["accepted"]))
        if self.kept is not None:
            self.kept.keep(new)
        self.on_arrivals(self.rows)
        self.rows = []
        step.commit()
        step.config.give_back()
        self.servers[after.version] = after
        self.servers.pop(after.version - self.policy.num_versions, None)
        return after

    def _record(
        self, server: Server, arrivals: Sequence[Arrival], pool: RecoveringPool, observe: Observe
    ) -> bool:
        """Evaluate if an evaluation is due, and pass on the record of the step.

        Returns whether the step is the last one.
        """
        due, start = self.evaluation.due(server.version, self.num_steps), now()
        over = self._observed(lambda evaluated: self._seen(server, arrivals, pool, evaluated), due, observe)
        if due or over:
            self.evaluation_time += now() - start
        return over

    def _seen(
        self, server: Server, arrivals: Sequence[Arrival], pool: RecoveringPool, evaluated: bool
    ) -> Record:
        """Return the record of the step."""
        (scores, timing), train = Evaluated(), dict[str, float]()
        if evaluated:
            scores, timing = self._on_all(pool, "evaluate", lambda: self._evaluate(server))
            with self.server_step.watch("wait"):
                pool.poll()  # workers train on while rank 0 writes
            received = self._received_metrics(server, pool)
            train = with_figures(self._mean_metrics(), received, self.stats.metrics())
        with self.server_step.watch("record"):
            return Record(
                step=server.version,
                server=server,
                cohort=np.array([a.visit.client for a in arrivals], np.int64),
                accepted=[(a.visit.client, a.visit.visit) for a in arrivals if a.row["accepted"]],
                evaluated_clients=self.evaluation.clients,
                scores=scores,
                train=train,
                seconds=perf_counter() - float(self.start[0]),
                timing=timing or [],
                virtual_seconds=self.clock.now if self.clock.in_seconds else None,
            )

    def _mean_metrics(self) -> dict[str, float]:
        """Return the means over clients of the metrics of their last visits, weighted by samples.

        Scores before an upload (`..._before`) are on test samples: their mean is unweighted, and their
        standard deviation is returned too.
        """
        out: dict[str, float] = {}
        for name in dict.fromkeys(name for m in self.metrics.values() for name in m):
            having = sorted(k for k, m in self.metrics.items() if name in m)  # the same order as in rounds
            values = np.array([self.metrics[k][name] for k in having])
            known = values[~np.isnan(values)]  # without visits that had no step, or clients without test data
            if name.endswith(SPREAD):
                mean, std = (float(of(known)) if known.size else nan for of in (np.mean, np.std))
                out |= {name: mean, f"{name}_std": std}
                continue
            n = np.array([self.samples[k] for k in having], float)
            out[name] = weighted_mean(values, n)
        return out

    def _received_metrics(self, server: Server, pool: RecoveringPool) -> dict[str, float]:
        """Return the accuracy of the models that clients received after their last upload.

        Rank 0 evaluates each of these models on the test data of the uploaded visit, while the workers go on
        training. This is done for methods that declare `ServerEvaluation` and keep no state at the client. In
        a replay it is not: the rows read by visits that never arrive are not known.

        Args:
            server: current server; it answers the clients whose next visit has not begun.
            pool: holds the rows that the visits under way have read.

        Returns:
            `accuracy_received` and `accuracy_received_std` over the evaluated clients that have uploaded,
            where `accuracy` is the name of the task's metric. Empty if no evaluated client has uploaded, or
            if what a client is evaluated with cannot be made from its download.
        """
        step, algorithm = self.server_step, self.server_step.algorithm
        clients = self.evaluation.clients[step.visits[self.evaluation.clients] > 0]
        receives = uses(algorithm, ServerEvaluation) and not algorithm.needs.client_state
        if not len(clients) or not receives or not self.clock.knows_visits:
            return {}
        with step.watch("evaluate"), step.config.clients.computation.counting("evaluation") as computed:
            tasks = {v.client: pool.tasks[v.number] for v in self.clock.visits}
            found = []
            for k, serves in step.hooks.reads("serves", server, clients).items():
                if k in tasks:
                    vectors = served_of(tasks[k].header.task.reads, tasks[k].vectors, serves)
                else:
                    vectors = {name: rows_read(server, name, which) for name, which in serves.items()}
                if vectors is None:
                    return {}
                client = step.config.clients.client(k, int(step.visits[k]) - 1, server.version)
                message = Message(vectors, serves, server.version, server.version)
                message = step.config.filters.download(message, k)
                scores = step.worker.hooks.evaluate(
                    message_on(message, step.config.clients.device), {}, client, client.data.test
                )
                name = client.task.metric.name
                found.append(scores[name])
        step.computation.add(server.version, computed.table)
        return {f"{name}_received": float(np.mean(found)), f"{name}_received_std": float(np.std(found))}

    def _evaluate(self, server: Server | None) -> Evaluated:
        """Evaluate clients; every rank calls."""
        scores = self.server_step.evaluate(server, self.evaluation.clients)
        phases, transport = self.server_step.watch.take(), self.server_step.transport
        if self.last_served is not None:
            phases["idle"] = self.last_served[0]
        with self.server_step.watch("wait"):
            found = transport.gather((phases, self.last_served), "timing")
        for rank, (_, served) in enumerate(found or ()):
            if served is not None:
                self.served[transport.numbers[rank]] += served
        return Evaluated(scores, None if found is None else [phases for phases, _ in found])

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _save(self, server: Server, pool: RecoveringPool) -> None:
        """Write a checkpoint if one is due, and end the run if that was requested."""
        with self.server_step.watch("checkpoint"):
            command = self.checkpointer.due(server.version)
        if not command:
            return
        if needs_workers(self.server_step):
            self._on_all(pool, SAVE, lambda: self._write(server, pool, alone=False))
        else:
            self._write(server, pool, alone=True)
        if command == STOP:
            self._close(pool, STOP, server.version)
            self.checkpointer.stop(server.version)

    def _write(self, server: Server | None, pool: RecoveringPool | None, alone: bool) -> None:
        """Write a checkpoint; every rank calls, or only rank 0 if `alone`. Both are None elsewhere."""
        with self.server_step.watch("checkpoint"):
            saved = None if server is None or pool is None else self._state(server, pool)
            save(self.server_step, server, self.checkpointer, saved, alone)

    def _state(self, server: Server, pool: RecoveringPool) -> Saved:
        """Return the engine's part of the state, between two steps, when no upload is waiting."""
        assert not self.rows, "the rows of arrivals are passed on at each step"
        saved = Saved(server.version)
        older = [s for version, s in sorted(self.servers.items()) if version != server.version]
        for i, s in enumerate(older):
            saved.put_server(f"older/{i}", s, s.tables)
        saved.values |= {"older": len(older), **self._values()}
        if self.kept is not None:
            self.kept.put(saved)
        self._put_visits(saved, pool)
        return saved

    def _values(self) -> dict[str, Any]:
        values = {
            "number": self.dispatcher.num_started,
            "clock": self.clock.state_dict(),
            "tally": self.stats.state_dict(),
            "metrics": [[k, dict(m), self.samples[k]] for k, m in self.metrics.items()],
            "seconds": (now() - self.start).tolist(),
            "judging": self.evaluation_time.tolist(),
            "filled": self.dispatcher.filled,
            "upload_sizes": self.upload_sizes.state_dict(),
            "owed": [[k, *owed] for k, owed in self.owed.items()],
        }
        return values | ({"tick": self.dispatcher.tick} if self.dispatcher.tick < inf else {})

    def _put_visits(self, saved: Saved, pool: RecoveringPool) -> None:
        """Add the visits under way and the rows they have read, storing shared rows once."""
        names: dict[tuple[Any, ...], str] = {}
        visits = []
        for visit in sorted(self.clock.visits, key=lambda v: v.number):
            header = pool.tasks[visit.number].header
            rows = {}
            for name, tensor in pool.tasks[visit.number].vectors.items():
                which = (tensor.data_ptr(), *tensor.shape)
                rows[name] = names.setdefault(which, f"read/{len(names)}")
                saved.tensors[rows[name]] = tensor
            reads: dict[str, Any] = {}
            for name, numbers in header.task.reads.items():
                reads[name] = numbers
                if isinstance(numbers, np.ndarray):
                    reads[name] = f"mixture/{visit.number}/{name}"
                    saved.arrays[reads[name]] = numbers
            visits.append(
                {
                    "visit": asdict(visit),
                    "step": header.step,
                    "version": header.version,
                    "reads": reads,
                    "rows": rows,
                }
            )
        saved.values["visits"] = visits

    def _restore(self, saved: Saved) -> Server:
        """Restore the state except for the visits under way; return the server."""
        saved.load_step_state(self.server_step)
        server, values = saved.server_under("server"), saved.values
        older = [saved.server_under(f"older/{i}") for i in range(values["older"])]
        self.servers = {s.version: s for s in (*older, server)}
        self.dispatcher.num_started = values["number"]
        self.dispatcher.filled = values["filled"]
        self.upload_sizes.load_state_dict(values["upload_sizes"])
        self.owed = {k: Owed(*owed) for k, *owed in values["owed"]}
        self.dispatcher.tick = values.get("tick", self.dispatcher.tick)
        self.stats.load_state_dict(values["tally"])
        if self.kept is not None:
            self.kept.load(saved)
        self.metrics = {k: m for k, m, _ in values["metrics"]}
        self.samples = {k: n for k, _, n in values["metrics"]}
        return server

    def _restore_visits(self, saved: Saved, pool: RecoveringPool) -> None:
        """Restore the clock, and submit the visits that were under way."""
        self.clock.load_state_dict(saved.values["clock"])
        for about in saved.values["visits"]:
            visit = Visit(**about["visit"])
            self.dispatcher.add(visit)
            task = ClientTask(0, visit.client, visit.visit, _reads(saved, about["reads"]))
            vectors = {name: saved.tensors[which] for name, which in about["rows"].items()}
            self._submit(pool, visit, TrainingTask(task, about["step"], about["version"]), vectors)
        self.start = now() - np.array(saved.values["seconds"])
        self.evaluation_time = np.array(saved.values["judging"])


def _reads(saved: Saved, about: Mapping[str, Any]) -> Reads:
    return {
        name: saved.arrays[which] if isinstance(which, str) else tuple(which) for name, which in about.items()
    }


def largest_weight(plan: Plan, j: int, m: int) -> float:
    """Return the largest weight of report j in any row of the first mixing; 0 if that has no uploads.

    Args:
        plan: plan of the step.
        j: number of the report.
        m: number of reports in the step.
    """
    if not plan.mixings or not plan.mixings[0].of:
        return 0.0
    weights = plan.mixings[0].weights
    return float(np.abs(weights.reshape(len(weights), m, -1)[:, j]).max())


def served_of(
    reads: Reads, vectors: Mapping[str, torch.Tensor], serves: Reads
) -> dict[str, torch.Tensor] | None:
    """Return the rows that a client is evaluated with, made from its download.

    Args:
        reads: rows that it downloaded: table -> indices, or weights of a mixture.
        vectors: the download: table -> rows.
        serves: rows that it is evaluated with: the downloaded mixture, or a choice or mixture of the
            downloaded rows.

    Returns:
        Table -> rows; None if they cannot be made from the download.
    """
    out = {}
    for name, which in serves.items():
        have = reads.get(name, ())
        if isinstance(have, np.ndarray):
            if not np.array_equal(have, which):
                return None
            out[name] = vectors[name]
            continue
        place = {row: j for j, row in enumerate(have)}
        if any(row not in place for row in rows_of(which)):
            return None

        def rows(name: str, numbers: list[int], place: dict[int, int] = place) -> torch.Tensor:
            return vectors[name][[place[number] for number in numbers]]

        out[name] = read_rows(rows, name, which)
    return out


def rows_read(server: Server, name: str, which: tuple[int, ...] | np.ndarray) -> torch.Tensor:
    """Return the rows that are downloaded from a table; a single row is a view: tables are never written to.

    Args:
        server: the server whose table is read.
        name: name of the table.
        which: indices of rows, or the weights of a mixture of all rows.
    """
    table = server.tables[name]
    if not isinstance(which, np.ndarray) and len(which) == 1:
        return table[which[0] : which[0] + 1]
    return read_rows(lambda _, rows: table[rows], name, which)
