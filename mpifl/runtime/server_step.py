"""The server step, shared by both engines: send tasks, collect reports, make a plan, mix rows.

Rank 0 decides and holds the server; the workers hold the clients. Every rank executes every line that
communicates; values that only rank 0 knows are None on the other ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import filterfalse
from typing import Any, Protocol

import numpy as np
import torch

from mpifl.aggregation.collective_choice import is_sharded
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables, rows_of
from mpifl.aggregation.update_filter import PlannedStep, RowMixer
from mpifl.comm.transport import RankLost, on_all
from mpifl.core.algorithm import apply_plan
from mpifl.core.capabilities import (
    SETUP,
    SHOWN,
    ComparedUploads,
    NewClients,
    OneShotStatistics,
    RememberedUploads,
    SecondLook,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.computation import SERVER, Computation
from mpifl.core.errors import MethodError
from mpifl.core.parameters import Part, take, width
from mpifl.core.plan import Plan, statistics_of, with_statistics_apart
from mpifl.core.progress import doing
from mpifl.core.task import SUMS
from mpifl.core.timing import Stopwatch
from mpifl.core.types import CohortReads, Notes, Reads, Server
from mpifl.simulation.reclustering import LOSS, STATISTICS_S, STATISTICS_STEP, STATISTICS_VISITS, Since
from mpifl.simulation.sampling import RoundPlan
from mpifl.traffic.computation import ComputationLedger
from mpifl.traffic.ledger import TIME_STAMP, Clients, Ledger, StatisticsSize, is_among

from .hook_errors import ClientError, Dropped, hook_name
from .hooks import ServerHooks
from .protocol import (
    Exchanges,
    GatheredReports,
    LookPlan,
    ReportHeader,
    ReportTable,
    ScatteredTasks,
    TaskBatch,
    TaskTable,
    gathered_reports,
    joined_tables,
    mean_metrics,
    report_tables,
)
from .scheduler import Scheduler, task_costs, visit_work
from .step_config import Origins, StepConfig, shared_result
from .worker import VisitResults, Worker, unpacked

Uploads = Mapping[str, Sequence[torch.Tensor]]  # name -> vectors [w], all components of all uploads
COMPUTED = ".computation"  # name beside those of the rows that are shown; no row has a name with a dot
MODEL_BLOCK = 1 << 26  # most numbers of client models gathered at a time
STATISTICS_BLOCK = 1 << 30  # most bytes of one-shot statistics gathered at a time
LENGTH = struct.Struct("q")


@dataclass(frozen=True)
class StepResult:
    """The result of a server step, on rank 0.

    Attributes:
        server: the server after the step.
        plan: plan by which rows were mixed.
        reports: reports from which the plan was decided; None for a step without uploads.
    """

    server: Server
    plan: Plan
    reports: GatheredReports | None

    @property
    def notes(self) -> Notes:
        """Notes from which the plan was decided."""
        return Notes.of_nobody() if self.reports is None else self.reports.notes


class Aggregator(Protocol):
    """Compares the uploads of a step and mixes them into tables.

    Every rank that holds uploads calls each method, in the same order. Ranks other than 0 pass None for
    arguments that only rank 0 knows; only the result on rank 0 is used.
    """

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m].

        Args:
            reports: reports of the uploads; None on rank 0 too if no products are wanted.
            uploads: uploads of this rank.
            name: name of the upload. Its components are joined to one vector.
            part: the part; None for all. Allowed only for uploads with a single component.
        """

    def row_distances(
        self, server: Server, reports: GatheredReports, uploads: Uploads, name: str
    ) -> np.ndarray | None:
        """Return the distances [m, K] of an upload to the rows of the table with its name; on rank 0.

        Returns:
            The distances; None if the workers already measured them during the visits.
        """

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the tables that a plan changes.

        Args:
            server: the server before the step.
            plan: the mixings to carry out.
            reports: reports of the uploads.
            uploads: uploads of this rank.
        """


class MpiAggregator:
    """Aggregates uploads that stay with the workers, by collectives.

    Args:
        mixer: compares uploads.
        rows: carries out the mixings; None for the mixer.
    """

    def __init__(self, mixer: Mixer, rows: RowMixer | None = None) -> None:
        self.mixer, self.rows = mixer, rows or mixer

    def gram(
        self, reports: GatheredReports | None, uploads: Uploads, name: str, part: Part | None = None
    ) -> np.ndarray | None:
        """Return the pairwise inner products of an upload or a part of it, float64 [m, m]; every rank calls.

        `part` is rank 0's.
        """
        wanted = None
        if reports is not None:
            counts = np.bincount(reports.owners, minlength=self.mixer.transport.size)
            components = reports.max_abs[name].shape[1]
            columns = components * reports.widths[name] if part is None else width(part)
            wanted = tuple(int(c) for c in counts), columns, components, part
        wanted = self.mixer.transport.bcast(wanted, "plan")
        if wanted is None:
            return None
        owners = reports.owners if reports is not None else None
        mine, part = _joined(uploads.get(name, []), wanted[2]), wanted[3]
        mine = mine if part is None else [take(u, part) for u in mine]
        return self.mixer.gram(mine, wanted[0], owners, wanted[1])

    def row_distances(self, server: Server, reports: GatheredReports, uploads: Uploads, name: str) -> None:
        """Return None: the workers measure distances during the visits, where the uploads are."""

    def mix(
        self, server: Server | None, plan: Plan | None, reports: GatheredReports | None, uploads: Uploads
    ) -> Mapping[str, torch.Tensor]:
        """Return the central tables that a plan changes, on rank 0.

        New rows of sharded tables stay with the ranks that own them.
        """
        info = reports.upload_info if reports is not None else None
        return self.rows.mix(plan.mixings if plan is not None else None, info, uploads)


def _joined(vectors: Sequence[torch.Tensor], components: int) -> Sequence[torch.Tensor]:
    """Return one vector for each report: its components, concatenated."""
    if components == 1:
        return vectors
    return [torch.cat(list(vectors[i : i + components])) for i in range(0, len(vectors), components)]


@dataclass(frozen=True)
class ClientProducts:
    """Pairwise inner products of the models uploaded in a step; distances between models follow from them.

    Attributes:
        clients: client of each model, int64 [m]; clients that did not take part have their remembered models.
        parameters: inner products of all parameters, without buffers, float64 [m, m].
        head: inner products of the last linear layer, float64 [m, m].
    """

    clients: np.ndarray
    parameters: np.ndarray
    head: np.ndarray


@dataclass(frozen=True)
class CollectedUploads:
    """What this rank has of a cohort's reports, before they are mixed.

    Attributes:
        batch: this rank's tasks.
        results: the results of its visits, with the uploads.
        reports: all reports, on rank 0; None for nobody's.
    """

    batch: TaskBatch
    results: VisitResults
    reports: GatheredReports | None


class ServerStep:
    """Takes server steps; every rank has an instance.

    Args:
        config: objects and settings of server steps.
        measures: called on every rank with the step, the server on rank 0, and a cohort's uploads, before
            they are mixed.

    Attributes:
        tables: this rank's part of the server's tables.
        mixer: mixes rows over MPI.
        aggregator: compares and mixes uploads over MPI.
        update_aggregator: the same for uploads of training, whose means a filter may replace.
        worker: runs this rank's visits.
        scheduler: places tasks on workers.
        watch: seconds of each phase on this rank.
        ledger: the federation's traffic; on rank 0.
        computation: what clients and server have computed; on rank 0.
        visits: number of visits of each client so far, int64 [N]; on rank 0.
        taken: number of each client's uploads that steps have used, int64 [N]: all except those that were too
            stale or did not arrive; on rank 0.
        read: version of the rows that each client last trained in a synchronous step, int64 [N]; -1 before;
            on rank 0.
        arrived: clients whose uploads arrived in the last synchronous step; on rank 0.
        dropped: visits that were left out; on rank 0.
        train_metrics: mean training metrics of the last step, from the clients' reports; on rank 0.
        client_products: inner products of the models of the last step, if they are measured; on rank 0.
        costs: predicted work of each client's visit [N], in samples.
        beginning: origins of the results of the first phases that cases of a sweep share; on rank 0.
        losses: training loss of the last two visits of each client, the last one first, float64 [2, N]; kept
            if `recluster.loss_rise` compares them; on rank 0.
        seconds: returns the seconds on the run's clock; on rank 0.
        settled: the step of each moment at which clients change their data, where times are given in seconds
            (`drift.at_s`); as far as all ranks know it.
        looks: who has looked at whom in the last synchronous step; None if nobody did.
        updates: if requested, a row for each client of the last step and module of the model, with `client`,
            `block`, and the figures of `measures.update_statistics`; on rank 0.
    """

    def __init__(self, config: StepConfig, measures: Sequence[Measure] = ()) -> None:
        c = self.config = config
        self.measures = measures
        self.transport, self.algorithm, self.problem = c.transport, c.algorithm, c.problem
        self.store, self.seed = c.store, c.seed
        self.hooks = ServerHooks(c.algorithm, c.problem, c.seed, c.kept)
        self.sizes = c.federation.sizes
        self.watch = c.transport.traffic.watch = Stopwatch(c.timeline)
        self.tables = Tables(c.transport)
        self.mixer = Mixer(c.transport, self.tables, **vars(c.sums))
        self.aggregator = MpiAggregator(self.mixer)
        self.update_aggregator = MpiAggregator(self.mixer, c.filters.mixer(self.mixer))
        self.worker = Worker(c, self.tables, self.watch)
        self.ledger = Ledger(len(self.sizes), c.payload)
        self.computation = ComputationLedger(len(self.sizes))
        needs = c.algorithm.needs
        keeps = needs.client_state or c.remembered is not None
        pinned = keeps or bool(c.filters.remembered) or c.clients.keeps_optimizer
        self.costs = visit_work(self.sizes[:, 0], c.effort)
        self.scheduler = Scheduler(
            c.transport.nodes,
            c.transport.workers,
            self.sizes[:, 0],
            pinned,
            c.shuffle,
            c.stack,
            self.costs if c.hosts_groups else None,
            c.transport.numbers,
        )
        self._host()
        self.visits = np.zeros(len(self.sizes), np.int64)
        self.taken = np.zeros(len(self.sizes), np.int64)
        self.read = np.full(len(self.sizes), -1)
        self.arrived = np.zeros(0, np.int64)
        self.dropped: list[Dropped] = []
        self.train_metrics: dict[str, float] = {}
        self.client_products: ClientProducts | None = None
        self.beginning: dict[str, dict[int, str]] = {}
        self.losses = np.full((2, len(self.sizes)), np.nan)
        self.seconds: Callable[[], float] = float
        self.settled: Sequence[int] = c.federation.settled
        self.looks: LookPlan | None = None
        self.updates: list[dict[str, Any]] = []
        self._shown: Mapping[str, torch.Tensor] = {}  # rows downloaded for one-shot statistics; on rank 0
        self._showing = Computation().table  # what the server computed to make them

    # -- before the first step -------------------------------------------------------------------------------

    def initialize(self) -> Server | None:
        """Return the first server, on rank 0, after one-shot statistics if the method declares them."""
        one_shot = uses(self.algorithm, OneShotStatistics)
        reports, uploads = self._first_statistics() if one_shot else (None, {})
        server = None
        if self.transport.is_server:
            with self.watch("cluster"), doing("the first server", ends_at_once=True), self._serving(0):
                server = self._first_server(None if reports is None else reports.notes)
                server = self.hooks.appraise(None, server)
            with self.watch("update"):
                self.tables.publish(server.tables)
        if one_shot:
            server = self._mix_fingerprints("initial_plan", server, reports, uploads, self.aggregator)
        self.distribute(server)
        self._gather_origins()
        return server

    @contextmanager
    def _serving(self, step: int) -> Iterator[None]:
        """Book what the server computes in a block; on rank 0."""
        with self.config.clients.computation.counting("server") as found:
            yield
        self.computation.add(step, found.table)

    def _first_server(self, statistics: Notes | None) -> Server:
        """Return what `setup` returns, now or in another case of a sweep."""
        counter = self.config.clients.computation

        def arguments() -> tuple[Any, ...]:
            return statistics, self.hooks.setup_key.path, self._public_data

        def make() -> tuple[Server, np.ndarray]:
            with counter.apart() as counted:
                return self.hooks.setup(statistics), counted.table

        server, computed = shared_result(self.config.beginning, SETUP, SERVER, arguments, make)
        counter.add_all(Computation.of(computed))
        return server

    @property
    def _public_data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The samples and labels of each set of the server."""
        return [(client.data.train.x, client.data.train.y) for client in self.problem.public]

    def _gather_origins(self) -> None:
        """Collect which results of the first phases this run computed itself; every rank calls."""
        if self.config.beginning is None:
            return
        with self.watch("wait"):
            found: list[Origins] | None = self.transport.gather(self.config.beginning.taken(), "notes")
        for phase, origins in (item for one in found or () for item in one.items()):
            self.beginning.setdefault(phase, {}).update(origins)

    def distribute(self, server: Server | None) -> None:
        """Publish the tables of a server; shard tables in which each row is read by one client."""
        layout = None
        if server is not None:
            with self.watch("select"):
                self.tables.publish(server.tables)
                owners = {name: self._row_owners(server, name) for name in server.tables}
            layout = {
                name: (owners[name], tuple(table.shape), table.stride(0) == 0)
                for name, table in server.tables.items()
                if owners[name] is not None
            }
        with self.watch("wait"):
            layout = self.transport.bcast(layout, "layout")
        with self.watch("broadcast"):
            for name, (owner, shape, identical) in layout.items():
                self.scheduler.pinned = True
                self.tables.shard(name, owner, shape, self.store.folder, identical)
        if self.config.federation.changes_by_time:
            self.tell_changes()

    def _row_owners(self, server: Server, name: str) -> np.ndarray | None:
        """Return the rank that owns each row [K] of a table to be sharded; None for a central table."""
        n, k = len(self.sizes), len(server.tables[name])
        needs = self.algorithm.needs
        central = not self.config.synchronous or self.config.sums.collective is not None
        central = central or self.config.filters.at_server or not needs.row_per_client
        if k != n or central or needs.server_update or uses(self.algorithm, NewClients):
            return None
        reads = [rows.get(name, ()) for rows in self.hooks.reads("reads", server, np.arange(n)).values()]
        if any(len(r) != 1 for r in reads):
            return None
        reader = np.array([r[0] for r in reads])
        if not is_sharded(k, int(np.bincount(reader, minlength=k).max()), self.transport.size):
            return None
        owner = np.empty(n, np.int64)
        owner[reader] = self.scheduler.row_owners()
        return owner

    def data_change(self, step: int) -> bool:
        """Return whether data change from a step on that now begins, which all ranks must know; on rank 0.

        This is so if the time of a change is given in seconds, and has come. The first step has the data of
        the scenario.
        """
        federation = self.config.federation
        while step > 1 and federation.change_is_due(self.seconds()):
            federation.settle_changes([*federation.settled, step])
        return len(federation.settled) > len(self.settled)

    def tell_changes(self) -> None:
        """Let every rank know from which steps on data change; every rank calls."""
        federation = self.config.federation
        with self.watch("wait"):
            known = federation.settled if self.transport.is_server else None
            steps = self.transport.bcast(known, "orders")
        federation.settle_changes(steps)
        self.settled = steps

    def with_groups(self, server: Server) -> Server:
        """Return the server, whose method is told true groups that change in the next step; on rank 0.

        After `tell_changes`, for methods that read the groups; those of later steps are not known before.
        """
        step, federation = server.version + 1, self.config.federation
        if not self.algorithm.needs.groups or step not in federation.regroups:
            return server
        groups = federation.groups_at(step)
        assert groups is not None
        return self.hooks.with_groups(server, step, groups)

    def regroup(self) -> None:
        """Continue with the remaining ranks after `RankLost`, even if more are lost meanwhile; all call."""
        transport = self.transport
        nodes, left = transport.nodes, tuple(range(transport.size))
        while True:
            try:
                left = tuple(left[r] for r in transport.regroup())
                self.scheduler.regroup(transport.nodes, transport.workers, transport.numbers)
                self._host()
                self.tables.regroup(left, nodes)
                return
            except RankLost:
                continue

    def commit(self) -> None:
        """Make what was booked permanent; on rank 0."""
        with self.watch("collect"):
            self.ledger.commit()
            self.computation.commit()

    def roll_back(self) -> None:
        """Undo what was booked since the last commit; on rank 0."""
        self.ledger.roll_back()
        self.computation.roll_back()

    def _host(self) -> None:
        """Tell this rank's clients which of them it hosts."""
        if self.scheduler.hosts is not None:
            mine = np.flatnonzero(self.scheduler.hosts == self.transport.rank)
            if len(mine):
                self.config.clients.host(mine, self.transport.num_workers_here)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept between steps besides the server; on rank 0."""
        return {
            "ledger": self.ledger.state_dict(),
            "computation": self.computation.state_dict(),
            "visits": self.visits,
            "taken": self.taken,
            "read": self.read,
            **({"losses": self.losses} if self.config.recluster.loss_rise else {}),
            **({"change_steps": [*self.settled]} if self.config.federation.changes_by_time else {}),
            "dropped": [asdict(d) for d in self.dropped],
            **({"beginning": self._origins_as_lists()} if self.beginning else {}),
            **self.config.filters.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; on rank 0."""
        self.ledger.load_state_dict(state["ledger"])
        self.computation.load_state_dict(state["computation"])
        self.visits = state["visits"].copy()
        self.taken = state["taken"].copy()
        self.read = state["read"].copy()
        self.losses = state.get("losses", self.losses).copy()
        if self.config.federation.changes_by_time:
            self.config.federation.settle_changes(state["change_steps"])
        self.dropped = [Dropped(**d) for d in state["dropped"]]
        kept = state.get("beginning", {})
        self.beginning = {phase: {k: name for k, name in pairs} for phase, pairs in kept.items()}
        self.config.filters.load_state_dict(state)

    def _origins_as_lists(self) -> dict[str, list[tuple[int, str]]]:
        return {phase: [*origins.items()] for phase, origins in self.beginning.items()}

    # -- one step --------------------------------------------------------------------------------------------

    def step(self, server: Server | None, who: RoundPlan) -> StepResult | None:
        """Train a cohort and return the result of the step, on rank 0.

        Args:
            server: the server before the step.
            who: the clients that take part; used on rank 0.
        """
        if server is not None:
            self.config.timeline.at_step(server.version + 1)
        if self.admits_new_clients:
            if server is not None:
                self.tables.publish(server.tables)  # a repeated step may have changed the published tables
            server = self._assign_new_clients(server, who)
        batches = None
        if server is not None:
            with self.watch("select"):
                server = self.looking_again(server, who.cohort, self.visits)
                batches = self._train_batches(server, who)
        with self._counted("training", batches, main=True) as training:  # the server waits for other ranks
            batch = self._scatter(batches)
            results = self.worker.run(batch)
            self.looks = batch.looks
            if batch.looks is not None:
                with doing("clients look at each other", after=training), self.watch("report"):
                    results = self.look(batch, results)
            reports = self._gather(batch, results, "local_update")
        if batch.version == 0:
            self._gather_origins()
        with doing("aggregating"):
            with self.watch("evaluate"):
                for measure in self.measures:
                    measure(self, server, CollectedUploads(batch, results, reports))
            result = self.advance(server, reports, results.uploads, self.update_aggregator)
        with self.watch("update"):
            self.config.give_back()
            if result is None:
                return None
            took_part = result.notes.client[result.notes.fresh]
            self.visits[took_part] += 1
            self._remember_losses(result.reports)
            self.read[took_part] = batch.version
            self.arrived = took_part[~np.isin(took_part, self.config.filters.lost(batch.step, took_part))]
            self.taken[self.arrived] += 1
            self.config.filters.commit()
        return result

    def look(self, batch: TaskBatch, results: VisitResults) -> VisitResults:
        """Return the results of a step's visits after clients have looked at each other; every rank calls."""
        return self.worker.look(batch, results)

    def advance(
        self,
        server: Server | None,
        reports: GatheredReports | None,
        uploads: Uploads,
        aggregator: Aggregator,
        adjust: Callable[[Plan], Plan] | None = None,
    ) -> StepResult | None:
        """Decide from reports how rows are mixed, mix them, and publish the new tables.

        Every rank of the aggregator calls.

        Args:
            server: the server before the step.
            reports: reports of the step.
            uploads: uploads of this rank.
            aggregator: compares and mixes the uploads.
            adjust: changes the plan before it is carried out; None leaves it as it is.

        Raises:
            MethodError: the method's plan or server is invalid, or the step has fewer uploads than the method
                needs.
        """
        with self.watch("cluster"):
            reports = self._compare(server, reports, uploads, aggregator)
            plan = None if server is None else self._final_plan(server, reports, adjust)
        with self.watch("update"):
            new = self._mix(server, plan, reports, uploads, aggregator)
            if server is None or plan is None or new is None:
                return None
            new = self.config.filters.server(new)
            with self._serving(new.version):
                if not self._is_given_up(plan):
                    new = self.hooks.server_update(server, new)
                with self.watch("evaluate"):
                    new = self.hooks.appraise(server, new)
            self.tables.publish({k: t for k, t in new.tables.items() if k not in self.tables.sharded})
        return StepResult(new, plan, reports)

    def _final_plan(
        self, server: Server, reports: GatheredReports | None, adjust: Callable[[Plan], Plan] | None
    ) -> Plan | None:
        """Return the plan that the filters make of the method's plan, or of a step without uploads."""
        filters, step, ledger = self.config.filters, server.version + 1, self.ledger
        hook, plan, notes = hook_name(self.algorithm, "aggregate"), None, Notes.of_nobody()
        if reports is not None:
            notes, needed = reports.notes, self.algorithm.needs.min_cohort
            if (fresh := notes.fresh.sum()) < needed:
                what = f"step {step} has {fresh} upload, and the method needs {needed} or more"
                raise MethodError(hook, what, "let more clients take part")
            plan = self._plan("aggregate", server, reports)
            plan = plan if adjust is None else adjust(plan)

        def book(client: int, direction: str, name: str, numbers: int, size: int) -> None:
            add = ledger.add_up if direction == "up" else ledger.add_down
            add(step, name, client, numbers, size=size + ledger.payload.header_bytes)

        about = PlannedStep(
            server=server,
            notes=notes,
            widths={} if reports is None else reports.widths,
            lost=filters.lost(step, notes.client),
            reads=partial(self.hooks.reads, "reads", server),
            book=book,
            parts=self.config.parts,
            hook=hook,
        )
        return filters.plan(plan, about)

    def _plan(self, hook: str, server: Server, reports: GatheredReports) -> Plan:
        with self.watch("cluster"):
            return self.hooks.plan(hook, server, reports, tuple(self.tables.sharded))

    def _is_given_up(self, plan: Plan) -> bool:
        """Return whether too few clients remained for every row, so that the step changes no row."""
        masked = [mixing for mixing in plan.mixings if mixing.masks is not None]
        moved = self.config.filters.moves_rows or any(mixing.weights.any() for mixing in masked)
        return bool(masked) and not moved

    def _compare(
        self, server: Server | None, reports: GatheredReports | None, uploads: Uploads, aggregator: Aggregator
    ) -> GatheredReports | None:
        """Add the comparisons that the method needs to the reports: `gram` [m, m], `row_distance` [m, K]."""
        if gram := upload_named(self.algorithm, ComparedUploads, "gram"):
            wanted = server is not None and self.hooks.compares(server)
            reports = self.with_gram(reports, uploads, gram, aggregator, wanted)
        if server is None or reports is None or (measured := self.hooks.measured_table(server)) is None:
            return reports
        distances = aggregator.row_distances(server, reports, uploads, measured[0])
        return reports if distances is None else reports.having(row_distance=distances)

    def with_gram(
        self,
        reports: GatheredReports | None,
        uploads: Uploads,
        name: str,
        aggregator: Aggregator,
        wanted: bool = True,
    ) -> GatheredReports | None:
        """Add the pairwise inner products of an upload, without statistics, if `wanted` on rank 0."""
        if reports is not None and wanted and name not in reports.max_abs:
            what = f"no upload {name!r} in a step that compares: uploads are {', '.join(reports.max_abs)}"
            raise MethodError(hook_name(self.algorithm, "local_update"), what, "upload it, or see compares")
        part = None
        if reports is not None and wanted and reports.max_abs[name].shape[1] == 1:
            part = self.config.parts.weights(name, reports.widths[name]) or None  # what is no model counts
        with self.watch("reduce"):
            gram = aggregator.gram(reports if wanted else None, uploads, name, part)
        return reports if reports is None or gram is None else reports.having(gram=gram)

    def _mix(
        self,
        server: Server | None,
        plan: Plan | None,
        reports: GatheredReports | None,
        uploads: Uploads,
        aggregator: Aggregator,
    ) -> Server | None:
        """Return the server with the rows that a plan mixes; those of statistics are means."""
        apart, before = None, server
        if server is not None and plan is not None:
            central = {k: t for k, t in server.tables.items() if k not in self.tables.sharded}
            sent = {} if reports is None else reports.widths
            values = [name for name in sent if statistics_of(name) in sent]
            apart = with_statistics_apart(plan.mixings, central, self.config.parts, values)
            self.tables.publish(apart.tables)
            before = replace(server, tables={**server.tables, **apart.tables})
        mixed = plan if plan is None or apart is None else replace(plan, mixings=apart.mixings)
        with self.watch("reduce"):
            changed = aggregator.mix(before, mixed, reports, uploads)
        if server is None or plan is None or apart is None:
            return None
        self.tables.discard(apart.tables)
        return apply_plan(server, plan, {**server.tables, **apart.joined(changed)})

    # -- one-shot statistics ---------------------------------------------------------------------------------

    @property
    def admits_new_clients(self) -> bool:
        """Whether clients may send statistics after training has begun."""
        return uses(self.algorithm, NewClients)

    def _first_statistics(self) -> tuple[GatheredReports | None, Uploads]:
        """Return the statistics before training, of all clients if none can join later."""
        clients = np.arange(len(self.sizes))
        if self.transport.is_server:
            with self.watch("select"):
                if self.admits_new_clients:
                    present = np.setdiff1d(clients, np.asarray(self.config.absent, np.int64))
                    clients = self.hooks.initial_clients(present)
                self.book_shown(0, clients)
                self.computation.add(0, self._showing)  # a step that is repeated does not make them again
        return self.fingerprint_round(clients, None)

    def _assign_new_clients(self, server: Server | None, who: RoundPlan) -> Server | None:
        """Return the server after the new clients of a cohort have sent their statistics.

        What new clients that are late send is booked and not used: they stay new.
        """
        new_clients = self.sending_statistics(server, who.cohort) if server is not None else None
        with self.watch("wait"):
            new_clients = self.transport.bcast(new_clients, "orders")
        if server is not None:
            with self.watch("select"):
                readers = np.union1d(new_clients, np.array([*who.statistics], np.int64))
                if len(readers):
                    self.book_shown(server.version + 1, readers)
                if who.late_send:
                    self._book_statistics(server.version + 1, who.statistics)
        if not len(new_clients):
            return server
        reports, uploads = self.fingerprint_round(new_clients, server)
        return self.assigned(server, new_clients, reports, uploads, self.aggregator)

    def assigned(
        self,
        server: Server | None,
        clients: np.ndarray,
        reports: GatheredReports | None,
        uploads: Uploads,
        aggregator: Aggregator,
    ) -> Server | None:
        """Return the server after clients were assigned by their statistics; its version does not change.

        Args:
            server: the server before, on rank 0.
            clients: the clients.
            reports: reports of their statistics, on rank 0.
            uploads: this rank's uploads among them.
            aggregator: mixes them.
        """
        new = self._mix_fingerprints("assign_new_clients", server, reports, uploads, aggregator)
        if server is None or new is None or not self.config.recluster:
            return new
        return self._taken_now(new, clients, self.visits)

    def sending_statistics(self, server: Server, cohort: np.ndarray) -> np.ndarray:
        """Return which clients of a cohort send statistics in the next step: new ones, and whose are due."""
        new_clients = self.hooks.new_clients(server, cohort)
        if not self.config.recluster:
            return new_clients
        return np.union1d(new_clients, cohort[self._due(server, cohort, self.visits)])

    def looking_again(self, server: Server, cohort: np.ndarray, visits: np.ndarray) -> Server:
        """Return the server without what second looks found about clients of a step whose looks are due.

        Args:
            server: the server before the step.
            cohort: the clients that take part in it.
            visits: number of visits of each client before it, int64 [N].
        """
        if not self.config.recluster or not uses(self.algorithm, SecondLook):
            return server
        first = self._since(server, STATISTICS_STEP)[cohort] == 0  # they have not looked before
        due = self._due(server, cohort, visits) & ~first
        new = self.hooks.forget(server, cohort[due]) if due.any() else server
        return self._taken_now(new, cohort[due | first], visits)

    def _since(self, server: Server, entry: str) -> np.ndarray:
        """Return an entry of the state about each client's last statistics, int64 [N]; 0 before training."""
        return np.asarray(server.algorithm_state.get(entry, np.zeros_like(self.visits)))

    def _due(self, server: Server, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return which clients' statistics are due, bool [n], given the number of visits of each [N]."""
        taken = self._since(server, STATISTICS_STEP)[clients]
        since = (visits - self._since(server, STATISTICS_VISITS))[clients]
        seconds = self.seconds() - self._since(server, STATISTICS_S)[clients]
        rises = self.losses[0, clients] - self.losses[1, clients]
        return self.config.recluster.due(Since(server.version + 1, taken, since, seconds, rises))

    def _taken_now(self, server: Server, clients: np.ndarray, visits: np.ndarray) -> Server:
        """Return the server that knows that statistics of some clients are taken in the next step."""
        taken = {STATISTICS_STEP: self._since(server, STATISTICS_STEP).copy()}
        taken[STATISTICS_STEP][clients] = server.version + 1
        again = self.config.recluster
        if again.visits or again.loss_rise:  # otherwise nothing reads them
            taken[STATISTICS_VISITS] = self._since(server, STATISTICS_VISITS).copy()
            taken[STATISTICS_VISITS][clients] = visits[clients]
        if again.seconds:
            taken[STATISTICS_S] = self._since(server, STATISTICS_S).astype(float)
            taken[STATISTICS_S][clients] = self.seconds()
        return replace(server, algorithm_state={**server.algorithm_state, **taken})

    def _remember_losses(self, reports: GatheredReports | None) -> None:
        """Remember the training losses of a step's visits, if they are compared."""
        for table in () if reports is None else reports.tables:
            if table.fresh:
                self.remember_losses(table.client, table.metrics)

    def remember_losses(self, clients: Clients, metrics: Mapping[str, Any]) -> None:
        """Remember the training losses of visits, if they are compared; on rank 0.

        Args:
            clients: the client of each visit [m], or of one.
            metrics: what they report, [m] each, or of one.

        Raises:
            MethodError: the method reports no training loss.
        """
        if not self.config.recluster.loss_rise:
            return
        if LOSS not in metrics:
            what = f"reports no {LOSS}, which recluster.loss_rise compares"
            raise MethodError(hook_name(self.algorithm, "local_update"), what, f"report {LOSS} as a metric")
        self.losses[1, clients] = self.losses[0, clients]
        self.losses[0, clients] = metrics[LOSS]

    def book_shown(self, step: int, clients: np.ndarray) -> None:
        """Book what clients download for their statistics; on rank 0."""
        shown = self.publish_shown()
        widths = {name: rows.shape[1] for name, rows in shown.items()}
        with self.ledger.for_clustering():
            self.ledger.add_reads(step, _reads_of_all(shown, clients), widths)

    def _book_statistics(self, step: int, sent: Mapping[int, StatisticsSize]) -> None:
        """Book the statistics that clients send and nobody uses."""
        with self.ledger.for_clustering():
            for k, statistics in sent.items():
                for name, (numbers, size) in statistics.vectors.items():
                    self.ledger.add_up(step, name, k, numbers, size)
                for name, (numbers, size) in statistics.notes.items():
                    self.ledger.add_up(step, name, k, numbers, size, note=True)

    def fingerprint_round(
        self, clients: np.ndarray, server: Server | None
    ) -> tuple[GatheredReports | None, Uploads]:
        """Return the statistics of `clients` on rank 0, and this rank's uploads among them.

        Args:
            clients: who sends them; used on rank 0.
            server: the server before the step; None before the first.
        """
        batches = None
        if self.transport.is_server:
            with self.watch("select"):
                step = 0 if server is None else server.version + 1
                reads, costs = _reads_of_all(self.publish_shown(), clients), self.sizes[clients, 0]
                name = upload_named(self.algorithm, OneShotStatistics, "statistics_distance")
                compared = None if server is None else self.hooks.compared_table(server, name)
                batches = self._batches(step, clients, reads, costs, max(step - 1, 0), compared=compared)
        with self._counted("one-shot statistics", batches):
            batch = self._scatter(batches)
            results = self.worker.run(batch, fingerprint=True)
            reports = self._gather(batch, results, "fingerprint")
        if name := upload_named(self.algorithm, OneShotStatistics, "statistics_gram"):
            reports = self.with_gram(reports, results.uploads, name, self.aggregator)
        return reports, results.uploads

    def publish_shown(self) -> Mapping[str, torch.Tensor]:
        """Publish and return the rows that all clients download for their statistics; they are made once."""
        if not self._shown:
            early = not self.visits.any()  # a resumed run makes them again for its new clients
            with self.watch("cluster"), doing("what the server shows all clients", ends_at_once=early):
                cache, make = self.config.pretraining_cache, self._made_shown
                made_from = (self.algorithm, self.problem, self.hooks.shows_key)
                found = make() if cache is None else cache.get(*made_from, make)
                self._shown = {name: rows for name, rows in found.items() if name != COMPUTED}
                self._showing = found[COMPUTED].numpy()
            self.tables.publish(self._shown)
        return self._shown

    def _made_shown(self) -> Mapping[str, torch.Tensor]:
        """Return the rows that are shown to all clients, and as `COMPUTED` what the server computed."""

        def arguments() -> tuple[Any, ...]:
            return self.hooks.shows_key.path, self._public_data

        def make() -> Mapping[str, torch.Tensor]:
            with self.config.clients.computation.counting("server") as found:
                shown = self.hooks.shows()
            return {**shown, COMPUTED: torch.from_numpy(found.table)}

        return shared_result(self.config.beginning, SHOWN, SERVER, arguments, make)

    def _mix_fingerprints(
        self,
        hook: str,
        server: Server | None,
        reports: GatheredReports | None,
        uploads: Uploads,
        aggregator: Aggregator,
    ) -> Server | None:
        """Return the server after a plan that is not part of a step; its version does not change."""
        plan = None if server is None or reports is None else self._plan(hook, server, reports)
        with self.watch("update"):
            new = self._mix(server, plan, reports, uploads, aggregator)
            if server is None or new is None:
                return None
            new = replace(new, version=server.version)
            self.tables.publish(new.tables)
        return new

    # -- tasks and reports -----------------------------------------------------------------------------------

    def _train_batches(self, server: Server, who: RoundPlan) -> ScatteredTasks:
        step, clients, outdated = server.version + 1, who.cohort, np.zeros(0, np.int64)
        if uses(self.algorithm, RememberedUploads):
            remembered = self._remembered(server.version)
            clients = np.union1d(who.cohort, remembered)
            if self.config.drops:
                outdated = np.setdiff1d(who.cohort[self.visits[who.cohort] > 0], remembered)
        fresh = is_among(clients, who.cohort)
        reads = self.hooks.reads("reads", server, clients[fresh])
        widths = {name: self.tables.width(name) for name in server.tables}
        late = self.hooks.reads("reads", server, who.late) if len(who.late) else {}
        self.book_reads(step, CohortReads.of({**reads, **late}.items()) if late else reads, widths)
        probes = self.hooks.probes(server, step)
        costs = task_costs(self.costs[clients], fresh, probes)
        compared = self.hooks.measured_table(server)
        looks = None
        if probes:
            made = self.visits[clients] - ~fresh  # `ClientTask.data_visit` of each
            if hooks_of(self.algorithm, SecondLook).at_server:
                made = np.zeros(len(clients), np.int64)
            looks = partial(LookPlan, clients, made, pairs=self.hooks.pairs(server, clients, fresh))
        told = compared, looks, who.work, outdated
        return self._batches(step, clients, reads, costs, server.version, fresh, *told)

    def _remembered(self, version: int) -> np.ndarray:
        """Return the clients whose last uploads count in the step of a version, ascending."""
        max_age = hooks_of(self.algorithm, RememberedUploads).max_age
        counts = self.visits > 0
        return np.flatnonzero(counts if max_age is None else counts & (version - self.read <= max_age))

    def _batches(
        self,
        step: int,
        clients: np.ndarray,
        reads: CohortReads,
        costs: np.ndarray,
        version: int,
        fresh: np.ndarray | None = None,
        compared: tuple[str, int] | None = None,
        looks: Callable[[np.ndarray], LookPlan] | None = None,
        work: Mapping[int, Fraction] | None = None,
        outdated: np.ndarray | None = None,
    ) -> ScatteredTasks:
        """Return the tasks of each rank; report numbers follow the order of `clients`.

        `reads` has the reads of the `fresh` clients only, in the same order. `looks` maps the rank of each
        task to the second look of the step. `outdated` are clients whose remembered uploads no longer count.
        """
        needed: dict[str, set[int]] = {compared[0]: set(range(compared[1]))} if compared else {}
        for rows in reads.distinct:
            for name, numbers in rows.items():
                needed.setdefault(name, set()).update(rows_of(numbers))
        missing = self.tables.missing(needed)
        which = np.full(len(clients), -1)
        which[slice(None) if fresh is None else fresh] = reads.which
        columns = np.stack((np.arange(len(clients)), clients, self.visits[clients], which), axis=1)
        tasks = TaskTable(columns, reads.distinct, self.config.filters.told(), work or {})
        owners = self.scheduler.assign(clients, costs)
        tables, columns, counts = tasks.split_by_rank(owners, self.transport.size)
        plan, old = None if looks is None else looks(owners), () if outdated is None else outdated.tolist()
        batches: dict[int, TaskBatch] = {}  # ranks that share a table object share a batch object
        for mine in tables:
            if id(mine) not in batches:
                batches[id(mine)] = TaskBatch(step, version, mine, missing, plan, compared, tuple(old))
        return ScatteredTasks([batches[id(mine)] for mine in tables], columns, counts)

    def _counted(
        self, what: str, batches: ScatteredTasks | None, unit: str = "visits", main: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a progress stage that counts finished tasks on rank 0; on other ranks, an empty context.

        The ranks of other nodes are assumed to be as far as those of this node; without tasks here, no number
        is known.
        """
        if batches is None:
            return nullcontext()
        here, counter = self.transport.nodes[self.transport.rank], self.config.counter
        near = sum(n for n, node in zip(batches.counts, self.transport.nodes, strict=True) if node == here)
        before, total = counter.total(), sum(batches.counts) if near else 0

        def count() -> int:
            return (counter.total() - before) * total // near if near else 0

        return doing(what, total, unit, count, main=main)

    def _scatter(self, tasks: ScatteredTasks | None) -> TaskBatch:
        """Return this rank's tasks, after broadcasting the rows that they read."""
        with self.watch("wait"):
            parts: tuple[Sequence[TaskBatch] | None, np.ndarray | None, Sequence[int]] = (None, None, ())
            if tasks is not None:
                parts = tasks.batches, tasks.columns, tasks.counts
            told, rows = self.transport.scatter_rows(*parts, "orders")
            batch: TaskBatch = told.having(rows)
        self.config.timeline.at_step(batch.step)
        with self.watch("broadcast"):
            self.tables.bcast_rows(batch.missing)
        return batch

    def _gather(self, batch: TaskBatch, results: VisitResults, hook: str) -> GatheredReports | None:
        """Book and return all reports of a step on rank 0; None elsewhere, or if there are none."""
        with self.watch("wait"):
            packed = results.packed()
            if hook == "fingerprint":
                parts = self._gather_statistics(*packed)
            else:
                parts = self.transport.gather_rows(*packed, "notes")
        if parts is None:
            return None
        with self.watch("collect"):
            return self._collected(batch, hook, *parts)

    def _collected(
        self, batch: TaskBatch, hook: str, values: Sequence[Any], rows_of_ranks: Sequence[memoryview]
    ) -> GatheredReports | None:
        """Book and return the reports that all ranks have sent; None if there are none."""
        heads, dropped = [head for head, _ in values], [d for _, some in values for d in some]
        seconds, computed, rows = zip(*map(unpacked, rows_of_ranks), strict=True)
        self.computation.add(batch.step, np.concatenate(computed))
        tables, owners = joined_tables(heads, rows)
        weighs = self.config.effort is not None and hook == "local_update"
        work = np.zeros(self.transport.size)
        for t, ranks in zip(tables, owners, strict=True):
            if t.fresh:
                work += np.bincount(ranks, self.costs[t.client] if weighs else t.num_samples, len(work))
        self.scheduler.record_speeds(work.tolist(), seconds)
        dropped.sort(key=lambda d: d.client)
        nobody = not any(table.fresh for table in tables)
        self.drop(dropped, nobody and not self.config.filters.moves_rows)
        for table in tables:
            if hook == "fingerprint":
                self.book_statistics(batch.step, table)
            else:
                self.book(batch.step, table)
        clients = np.concatenate([np.zeros(0, np.int64), *(t.client for t in tables)])
        lost = self.config.filters.lost(batch.step, clients)
        self.train_metrics = mean_metrics(tables, lost)
        if not tables:  # Poisson sampling drew nobody, or all clients failed
            return None
        lag = np.zeros(sum(map(len, tables)), np.int64)
        if not all(table.fresh for table in tables):
            numbers = np.concatenate([table.number for table in tables])
            read = [np.where(t.fresh, batch.version, self.read[t.client]) for t in tables]
            lag = (batch.version - np.concatenate(read))[np.argsort(numbers)]
        arrival = self.seed.of("arrival", batch.step).numpy().permutation(len(lag))
        return gathered_reports(tables, owners, lag, hook_name(self.algorithm, hook), arrival)

    def _gather_statistics(self, value: Any, rows: bytes) -> tuple[list[Any], list[memoryview]] | None:
        """Return the values and rows of all ranks, as `gather_rows` does; the rows come by `Gatherv`.

        One-shot statistics can be large: centroids (FLT), bases of subspaces (PACFL).
        """
        t = self.transport
        told = t.gather_rows(value, LENGTH.pack(len(rows)), "notes")
        lengths = None if told is None else [LENGTH.unpack(length)[0] for length in told[1]]
        lengths = t.bcast(lengths, "statistics")
        most = STATISTICS_BLOCK // t.size
        parts: list[list[bytes]] = [[] for _ in lengths]
        mine = (
            torch.frombuffer(bytearray(rows), dtype=torch.uint8)
            if rows
            else torch.zeros(0, dtype=torch.uint8)
        )
        for low in range(0, max(lengths), most):
            counts = [min(max(length - low, 0), most) for length in lengths]
            block = mine[low : low + most].reshape(-1, 1)
            found = t.Gatherv(block, counts, "statistics", torch.uint8)
            for some, part in zip(parts, () if found is None else found.split(counts), strict=False):
                some.append(part.numpy().tobytes())
        return None if told is None else (told[0], [memoryview(b"".join(some)) for some in parts])

    def reports_of(
        self,
        headers: Sequence[ReportHeader],
        staleness: np.ndarray,
        arrival: np.ndarray | None = None,
        hook: str = "local_update",
    ) -> GatheredReports:
        """Return the reports of a step as one value, if all uploads are on rank 0.

        Args:
            headers: headers in the order of their numbers.
            staleness: server steps since each client read the server [m].
            arrival: see `Notes`.
            hook: the hook that made them.
        """
        tables = report_tables(headers)
        owners = [np.zeros(len(table), np.int64) for table in tables]
        return gathered_reports(tables, owners, staleness, hook_name(self.algorithm, hook), arrival)

    def drop(self, dropped: Sequence[Dropped], nobody: bool) -> None:
        """Record visits that are left out; on rank 0.

        Args:
            dropped: the visits.
            nobody: whether no other client remains in a step that needs one.

        Raises:
            ClientError: visits are left out, and no other client remains.
        """
        if dropped and nobody:
            first = dropped[0]
            place = f"all clients of round {first.step} failed; client {first.client}, visit {first.visit}"
            raise ClientError(f"{place}: {first.reason}")
        self.dropped += dropped

    def book_reads(self, step: int, reads: Mapping[int, Reads], widths: Mapping[str, int]) -> None:
        """Book the downloads of the clients that train in a step.

        Args:
            step: number of the server step.
            reads: client -> the rows that it reads.
            widths: table -> how many numbers a row has.
        """
        filters = self.config.filters
        self.ledger.add_reads(step, reads, widths, filters.width if filters.narrows else None)
        if self.algorithm.needs.time_stamps:
            for clients in [reads.clients] if isinstance(reads, CohortReads) else reads:
                self.ledger.add_down(step, TIME_STAMP, clients, 1, note=True)

    def book(self, step: int, reports: ReportHeader | ReportTable) -> None:
        """Book the traffic of a report, or of all reports of a table."""
        ledger, unsent = self.ledger, reports.unsent
        if reports.fresh:
            for name, numbers in reports.sizes.items():
                if name not in unsent and not self.config.filters.hides_uploads:
                    ledger.add_up(step, name, reports.client, numbers, reports.bytes[name])
            for name, sizes in reports.note_sizes.items():
                if name not in unsent:
                    ledger.add_up(step, name, reports.client, sizes, note=True)
            if self.algorithm.needs.time_stamps:
                ledger.add_up(step, TIME_STAMP, reports.client, 1, note=True)
        self.book_exchanges(step, reports.exchanges)

    def book_statistics(self, step: int, reports: ReportTable | ReportHeader) -> None:
        """Book the one-shot statistics that clients send."""
        with self.ledger.for_clustering():
            self.book(step, reports)

    def book_exchanges(self, step: int, exchanges: Exchanges) -> None:
        """Book what clients have exchanged with peers in a second look, or have stored at the server."""
        ledger = self.ledger
        with ledger.for_clustering():
            for (kind, direction, client), (numbers, messages) in exchanges.items():
                if direction == "up":
                    ledger.add_up(step, kind, client, numbers, messages=messages)
                else:
                    ledger.add_down(step, kind, client, numbers, messages)

    def book_arrival(self, step: int, report: ReportHeader) -> None:
        """Count a visit whose upload has arrived by itself, and book its traffic.

        What the visit computed is booked by the caller, who also knows of visits that failed.
        """
        self.visits[report.client] += 1
        self.book(step, report)

    # -- evaluation ------------------------------------------------------------------------------------------

    def serves(self, server: Server, clients: np.ndarray) -> CohortReads:
        """Return the rows that clients are evaluated with; on rank 0."""
        seen = self.taken[clients] > 0
        serves = {**self.hooks.reads("serves", server, clients[seen])}
        serves |= self.hooks.reads("serves_unseen", server, clients[~seen])
        return CohortReads.of((k, serves[k]) for k in clients.tolist())

    def client_models(self, server: Server | None, clients: np.ndarray) -> torch.Tensor | None:
        """Return the models [n, d] with which clients are evaluated, on rank 0; every rank calls.

        Args:
            server: the server, on rank 0; None elsewhere.
            clients: numbers of the clients, ascending; the same on every rank.

        Raises:
            UserError, CodeFailed: the method failed at a client; on every rank.
        """
        d = self.problem.layout.size
        table = None if server is None else torch.empty(len(clients), d, dtype=torch.float32)
        most = max(1, MODEL_BLOCK // d)
        for i in range(0, len(clients), most):
            some, batches = clients[i : i + most], None
            if server is not None:
                serves = self.serves(server, some)
                batches = self._batches(server.version, some, serves, np.ones(len(some)), server.version)
            batch = self._scatter(batches)
            mine, rows = on_all(self.transport, partial(self.worker.models, batch))
            whose = self.transport.allgather(mine, "end")
            block = self.transport.Gatherv(rows, [len(ks) for ks in whose], "end")
            if table is not None and block is not None:
                places = np.searchsorted(clients, [k for ks in whose for k in ks])
                table[torch.from_numpy(places)] = block
            del rows, block  # before the next block is allocated
        return table

    def evaluate(self, server: Server | None, clients: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return the scores of `clients` on rank 0: name -> float64 [len(clients)].

        The sums from which metrics are computed (their names begin with `sums.`) have further axes, and are 0
        for clients without samples.

        Raises:
            MethodError: clients have scores of different names.
        """
        batches = None
        if server is not None:
            with self.watch("select"):
                serves = self.serves(server, clients)
                of_training = self.sizes[clients, 0] * self.config.evaluation.training_data
                costs = self.sizes[clients, 2] + of_training + 1
                batches = self._batches(server.version, clients, serves, costs, server.version)
        with self._counted("evaluating", batches, "clients"):
            batch = self._scatter(batches)
            evaluated = self.worker.evaluate(batch)
            with self.watch("wait"):
                parts = self.transport.gather(evaluated, "scores")
        if parts is None:
            return None
        with self.watch("collect"):
            return self._scores(batch, clients, parts)

    def _scores(
        self, batch: TaskBatch, clients: np.ndarray, parts: Sequence[tuple[Any, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return the scores of clients from those that the ranks have sent; see `evaluate`."""
        self.computation.add(batch.step, np.concatenate([computed for _, computed in parts]))
        everyone = {k: s for scores, _ in parts for k, s in scores.items()}
        sums = {name: np.zeros_like(v) for s in everyone.values() for name, v in s.items() if _is_sum(name)}
        names = [*filterfalse(_is_sum, everyone[int(clients[0])])]
        other = next((k for k, s in everyone.items() if {*filterfalse(_is_sum, s)} != {*names}), None)
        if other is not None:
            what = f"client {other} scores {sorted(everyone[other])}, client {clients[0]} {sorted(names)}"
            raise MethodError(hook_name(self.algorithm, "evaluate"), what, "return the same names for all")
        found = {name: np.array([everyone[int(k)][name] for k in clients]) for name in names}
        for name, nothing in sums.items():
            found[name] = np.array([everyone[int(k)].get(name, nothing) for k in clients])
        return found


def _reads_of_all(shown: Mapping[str, torch.Tensor], clients: np.ndarray) -> CohortReads:
    """Return the reads of clients that each download all rows."""
    all_rows = {name: tuple(range(len(rows))) for name, rows in shown.items()}
    return CohortReads(clients, [all_rows], np.zeros(len(clients), np.int64))


def _is_sum(name: str) -> bool:
    return name.startswith(SUMS)


Measure = Callable[[ServerStep, Server | None, CollectedUploads], None]
