"""One server step over all ranks, shared by rounds and events.

reads -> local_update -> notes -> aggregate -> mix -> server_update, left to right. Every rank walks every
line that speaks; rank 0 decides, the others are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.collective_choice import Costs, is_sharded
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables, rows_of
from mpifl.comm import Transport
from mpifl.core.algorithm import Algorithm, apply_plan
from mpifl.core.errors import MethodError
from mpifl.core.federation import Federation
from mpifl.core.mixing import Plan
from mpifl.core.rng import Key
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Notes, ProblemInfo, Reads, Server
from mpifl.traffic.ledger import Ledger, count_numbers
from mpifl.traffic.payload import Payload
from mpifl.training import Learner, LocalConfig

from .client_errors import ClientError, Dropped
from .fingerprints import FingerprintRound
from .hooks import Shapes, check_needs, check_plan, check_reads, check_server, deciding, hook_name, unwrapped
from .protocol import ClientTask, ReportHeader, TaskBatch, mean_metrics, stacked_notes
from .scheduler import Scheduler
from .worker import Worker


@dataclass(frozen=True)
class StepConfig:
    """What a run is made of, on every rank.

    Attributes:
        seed: the training seed's key. absent: clients that are not there before training.
        finetune_epochs: see `EvaluationConfig`. stack: clients that are trained together.
        direct: MPI is given the memory of GPUs.
    """

    transport: Transport
    algorithm: Algorithm
    federation: Federation
    learner: Learner
    local: LocalConfig
    problem: ProblemInfo
    store: ClientStore
    seed: Key
    exact: bool = True
    collective: str | None = None
    shuffle: Key | None = None
    absent: Sequence[int] = ()
    finetune_epochs: int = 0
    payload: Payload = field(default_factory=Payload)
    costs: Costs | None = None
    stack: int = 1
    drops: bool = False
    direct: bool = False


class ServerStep:
    """Takes server steps. Rank 0 holds the server; the other ranks hold clients."""

    def __init__(self, setting: StepConfig) -> None:
        s = setting
        check_needs(s.algorithm)
        self.transport, self.algorithm, self.problem, self.seed = s.transport, s.algorithm, s.problem, s.seed
        self.sizes = s.federation.sizes
        self.watch, self.store = Stopwatch(), s.store
        self.tables = Tables(s.transport)
        self.mixer = Mixer(s.transport, self.tables, s.exact, s.collective, s.costs, s.direct)
        self.worker = Worker(
            s.transport.rank,
            s.algorithm,
            s.federation,
            s.learner,
            s.local,
            self.tables,
            s.store,
            s.seed,
            self.watch,
            s.finetune_epochs,
            s.payload,
            s.stack,
            s.drops,
            s.exact,
        )
        self.dropped: list[Dropped] = []  # on rank 0
        self.visits = np.zeros(len(self.sizes), np.int64)
        self.ledger = Ledger(len(self.sizes), s.payload)
        needs = s.algorithm.needs
        pinned = needs.state or needs.memory is not None or s.payload.error_feedback
        self.scheduler = Scheduler(
            s.transport.nodes, s.transport.workers, self.sizes[:, 0], pinned, s.shuffle, s.stack
        )
        self.may_shard = True  # rows may leave rank 0
        self.admits_new_clients = True  # clients may be taken in after the first step
        self.fingerprints = FingerprintRound(self, np.asarray(s.absent, np.int64))
        self.train_metrics: dict[str, float] = {}
        self._owner = np.zeros(0, np.int64)  # rank of each report of the step
        self._max_abs: dict[str, np.ndarray] = {}  # upload -> largest absolute value [m, C]
        self._widths: Mapping[str, int] = {}  # upload -> width
        self._layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # nodes and ranks left, half-way

    # -- setting up ------------------------------------------------------------------------------------------

    def begin(self) -> Server | None:
        """Return the first server on rank 0, after the one-shot statistics where the method declares them."""
        fingerprints: Notes | None = None
        uploads: Mapping[str, list[torch.Tensor]] = {}
        if self.algorithm.needs.fingerprint:
            fingerprints, uploads = self.fingerprints.take(self.fingerprints.initial_clients(), None)
        server = None
        if self.transport.is_server:
            with self.watch("cluster"):
                with deciding(self.algorithm, "setup") as where:
                    server = self.algorithm.setup(self.problem, fingerprints, self.seed.of("setup"))
                    self.check_server(where, server)
                server = self.appraised(None, server)
            self.tables.publish(server.tables)
        if self.algorithm.needs.fingerprint:
            plan = None
            if server is not None and fingerprints is not None:
                plan = self.planned("initial_plan", server, fingerprints, self.algorithm.initial_plan)
            server = self.fingerprints.mixed(server, plan, uploads)
        self.settle(server)
        return server

    def appraised(self, old: Server | None, new: Server) -> Server:
        """Return `new` with what the server must know of its own rows."""
        if not self.algorithm.needs.inspect:
            return new
        with deciding(self.algorithm, "appraise") as where:
            done = self.algorithm.appraise(old, new, self.problem.public)
            self.check_server(where, done, new)
        return done

    def check_server(self, where: str, server: Server, known: Server | None = None) -> None:
        """Raise `MethodError` for a server that no step can start from; see `hooks.check_server`."""
        check_server(where, server, len(self.sizes), self._reads_own_row, known)

    @property
    def _reads_own_row(self) -> bool:
        return type(unwrapped(self.algorithm)).reads is Algorithm.reads

    def planned(
        self, hook: str, server: Server, notes: Notes, decide: Callable[[Server, Notes], Plan]
    ) -> Plan:
        """Return what a hook decides from notes, checked."""
        uploads = {name: (max_abs.size, self._widths[name]) for name, max_abs in self._max_abs.items()}
        flat = {name: max_abs.reshape(-1) for name, max_abs in self._max_abs.items()}
        with deciding(self.algorithm, hook, f"step {server.version + 1}") as where:
            plan = decide(server, notes)
            spread = tuple(self.tables.sharded)
            check_plan(where, plan, server, uploads, flat, spread, self._reads_own_row)
        return plan

    def polished(self, old: Server, mixed: Server) -> Server:
        """Return the server after `server_update`, whose rows change only where that is declared."""
        with deciding(self.algorithm, "server_update", f"step {mixed.version}") as where:
            new = self.algorithm.server_update(old, mixed)
            if new is mixed:
                return new
            self.check_server(where, new, mixed)
            others = [name for name, rows in new.tables.items() if rows is not mixed.tables.get(name)]
            if others and not self.algorithm.needs.polish:
                remedy = "declare needs = Needs(polish=True)"
                raise MethodError(where, f"changed table {others[0]!r}", remedy)
        return replace(new, version=mixed.version)

    def read_by(self, hook: str, server: Server, clients: np.ndarray) -> dict[int, Reads]:
        """Return what a hook, `reads` or `serves`, says that clients download."""
        tables: Shapes = {name: (len(rows), rows.shape[1]) for name, rows in server.tables.items()}
        out = {}
        with deciding(self.algorithm, hook) as where:
            ask = getattr(self.algorithm, hook)
            for k in clients.tolist():
                out[k] = ask(server, k)
                check_reads(where, k, out[k], tables)
        return out

    def settle(self, server: Server | None) -> None:
        """Take the rows of a server; spread tables out whose rows are each read by one client."""
        if server is not None:
            self.tables.publish(server.tables)
        where: dict[str, tuple[np.ndarray, tuple[int, int], bool]] = {}
        if server is not None:
            for name, table in server.tables.items():
                owner = self._owners_of_rows(server, name)
                if owner is not None:
                    k, width = table.shape
                    where[name] = (owner, (k, width), table.stride(0) == 0)
        for name, (owner, shape, identical) in self.transport.bcast(where, "layout").items():
            self.scheduler.pinned = True
            self.tables.shard(name, owner, shape, self.store.folder, identical)

    def _owners_of_rows(self, server: Server, name: str) -> np.ndarray | None:
        """Return the rank [K] that owns each row of a table to be spread, None for a central one."""
        n, k = len(self.sizes), len(server.tables[name])
        needs = self.algorithm.needs
        fixed = not self.may_shard or self.mixer.collective is not None or needs.polish or needs.newcomers
        if k != n or fixed:
            return None
        reads = [rows.get(name, ()) for rows in self.read_by("reads", server, np.arange(n)).values()]
        if any(len(r) != 1 for r in reads):
            return None
        reader = np.array([r[0] for r in reads])
        if not is_sharded(k, int(np.bincount(reader, minlength=k).max()), self.transport.size):
            return None
        owner = np.empty(n, np.int64)
        owner[reader] = self.scheduler.keepers()
        return owner

    def regroup(self) -> None:
        """Go on with the ranks that are left after `RankLost`; every one of them calls."""
        transport = self.transport
        nodes, known = self._layout or (transport.nodes, tuple(range(transport.size)))
        known = tuple(known[r] for r in transport.regroup())
        self._layout = nodes, known
        self.worker.rank = transport.rank
        self.scheduler.regroup(transport.nodes, transport.workers)
        self.tables.regroup(known, nodes)
        self._layout = None

    # -- one step --------------------------------------------------------------------------------------------

    def step(self, server: Server | None, cohort: np.ndarray) -> tuple[Server | None, Notes | None]:
        """Return the next server, and the notes it was decided from, on rank 0."""
        if self.algorithm.needs.newcomers and self.admits_new_clients:
            server = self.fingerprints.assign_new_clients(server, cohort)
        tasks = self.scatter_tasks(self._train_tasks(server, cohort) if server is not None else None)
        headers, uploads = self.worker.run(tasks)
        notes = self.gather_reports(tasks.step, headers)
        if name := self.algorithm.needs.gram or "":
            wanted = True
            if server is not None:
                with deciding(self.algorithm, "compares"):
                    wanted = self.algorithm.compares(server)
            notes = self.with_gram(notes, uploads, name, wanted)
        plan = None
        if server is not None and notes is not None:
            with self.watch("cluster"):
                plan = self.planned("aggregate", server, notes, self.algorithm.aggregate)
        with self.watch("reduce"):
            changed = self.mixer.mix(
                plan.mixings if plan else None, self.upload_info if plan else None, uploads
            )
        if server is None or plan is None or notes is None:
            return None, None
        new = apply_plan(server, plan, {**server.tables, **changed})
        new = self.polished(server, new)
        self.tables.publish({k: t for k, t in new.tables.items() if k not in self.tables.sharded})
        self.visits[notes.client[notes.fresh]] += 1
        return new, notes

    def _train_tasks(self, server: Server, cohort: np.ndarray) -> list[TaskBatch]:
        step, needs = server.version + 1, self.algorithm.needs
        clients = cohort
        if needs.memory:
            clients = np.union1d(cohort, np.flatnonzero(self.visits))
        fresh = np.isin(clients, cohort)
        reads = self.read_by("reads", server, cohort)
        widths = {name: self.tables.width(name) for name in server.tables}
        self.ledger.add_reads(step, reads, widths)
        with deciding(self.algorithm, "probes"):
            look = needs.probe and self.algorithm.probes(server, step)
        costs = np.where(fresh, self.sizes[clients, 0], 1) + (len(clients) * 64 if look else 0)
        peers = tuple((int(k), int(self.visits[k])) for k in clients) if look else ()
        compared = self.compared(server, needs.row_distance)
        return self.task_batches(step, clients, reads, costs, server.version, fresh, peers, compared)

    def compared(self, server: Server, name: str | None) -> tuple[str, int] | None:
        """Return the table that uploads of its name are measured against, and how many rows it has."""
        if name is None:
            return None
        if name not in server.tables:
            remedy = f"name an upload and the table of its name; the server has {', '.join(server.tables)}"
            raise MethodError(hook_name(self.algorithm, "needs"), f"there is no table {name!r}", remedy)
        return name, len(server.tables[name])

    def task_batches(
        self,
        step: int,
        clients: np.ndarray,
        reads: Mapping[int, Reads],
        costs: np.ndarray,
        version: int,
        fresh: np.ndarray | None = None,
        peers: tuple[tuple[int, int], ...] = (),
        compared: tuple[str, int] | None = None,
    ) -> list[TaskBatch]:
        """Return the tasks of each rank; report numbers follow the order of `clients`."""
        needed: dict[str, set[int]] = {compared[0]: set(range(compared[1]))} if compared else {}
        for rows in reads.values():
            for name, numbers in rows.items():
                needed.setdefault(name, set()).update(rows_of(numbers))
        missing = self.tables.missing(needed)
        self._owner = self.scheduler(clients, costs)
        visits: list[list[ClientTask]] = [[] for _ in range(self.transport.size)]
        for j, (k, rank) in enumerate(zip(clients.tolist(), self._owner.tolist(), strict=True)):
            live = fresh is None or bool(fresh[j])
            visits[rank].append(ClientTask(j, k, int(self.visits[k]), reads[k] if live else {}, live))
        return [TaskBatch(step, version, tuple(v), missing, peers, compared) for v in visits]

    def scatter_tasks(self, task_batches: Sequence[TaskBatch] | None) -> TaskBatch:
        """Return this rank's tasks, with the rows they need at hand."""
        with self.watch("wait"):
            tasks: TaskBatch = self.transport.scatter(task_batches, "orders")
        with self.watch("broadcast"):
            self.tables.share(tasks.missing)
        return tasks

    def gather_reports(self, step: int, headers: list[ReportHeader]) -> Notes | None:
        """Return the columns of all reports on rank 0, in the order of their numbers."""
        with self.watch("wait"):
            parts = self.transport.gather((headers, self.worker.seconds, self.worker.dropped), "notes")
        if parts is None:
            return None
        for rank, (part, seconds, _) in enumerate(parts):
            self.scheduler.learn(rank, sum(light.num_samples for light in part if light.fresh), seconds)
        everyone = sorted((light for part, _, _ in parts for light in part), key=lambda light: light.number)
        gone = sorted((d for *_, some in parts for d in some), key=lambda d: d.client)
        self._owner = self._owner[[light.number for light in everyone]]
        self.drop(gone, nobody=not any(light.fresh for light in everyone))
        for light in everyone:
            self.book(step, light)
        self.train_metrics = mean_metrics(everyone)
        return self.columns(step, everyone, np.zeros(len(everyone), np.int64))

    def drop(self, gone: Sequence[Dropped], nobody: bool) -> None:
        """Take note of clients that are left out, on rank 0; `nobody`: no other is in the step.

        Raises:
            ClientError: nobody else is.
        """
        if gone and nobody:
            first = gone[0]
            place = f"all clients of round {first.step} failed; client {first.client}, visit {first.visit}"
            raise ClientError(f"{place}: {first.reason}")
        self.dropped += gone

    def columns(self, step: int, everyone: Sequence[ReportHeader], staleness: np.ndarray) -> Notes:
        """Return the notes of reports in the order of their numbers; remember what mixing them needs."""
        where = hook_name(self.algorithm, "local_update" if step else "fingerprint")
        first = everyone[0]
        for light in everyone:
            if light.widths != first.widths or any(
                len(light.max_abs[name]) != len(max_abs) for name, max_abs in first.max_abs.items()
            ):
                (a, b), (k, other) = map(_uploads, (first, light)), (first.client, light.client)
                what = f"client {k} uploads {a}, client {other} {b}"
                raise MethodError(where, what, "all uploads of a step have the same names and shapes")
        self._max_abs = {
            name: np.array([light.max_abs[name] for light in everyone]) for name in first.max_abs
        }
        self._widths = first.widths
        return Notes(
            client=np.array([light.client for light in everyone]),
            num_samples=np.array([light.num_samples for light in everyone]),
            staleness=staleness,
            fresh=np.array([light.fresh for light in everyone]),
            columns=stacked_notes(everyone, where),
        )

    def book(self, step: int, light: ReportHeader) -> None:
        """Enter a report's traffic into the ledger."""
        ledger, unsent = self.ledger, light.unsent
        if light.fresh:
            for name, numbers in light.sizes.items():
                if name not in unsent:
                    ledger.add_up(step, name, light.client, numbers, light.bytes[name])
            for name, value in light.notes.items():
                if name not in unsent:
                    ledger.add_up(step, name, light.client, count_numbers(value), note=True)
        for (kind, direction, client), (numbers, messages) in light.exchanges.items():
            if direction == "up":
                ledger.add_up(step, kind, client, numbers, messages=messages)
            else:
                ledger.add_down(step, kind, client, numbers, messages)

    def max_abs(self, name: str) -> np.ndarray:
        """Return the largest absolute value of each component of each upload of the step [m, C]."""
        return self._max_abs[name]

    def upload_info(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the max_abs and the ranks of all components of an upload."""
        max_abs = self._max_abs[name]
        return max_abs.reshape(-1), np.repeat(self._owner, max_abs.shape[1])

    def with_gram(
        self,
        notes: Notes | None,
        uploads: Mapping[str, list[torch.Tensor]],
        name: str,
        wanted: bool = True,
    ) -> Notes | None:
        """Add the pairwise products of an upload to the notes, if `wanted` on rank 0; every rank calls."""
        told = None
        if notes is not None and wanted:
            if name not in self._max_abs:
                what = f"no upload {name!r} in a step that compares: uploads are {', '.join(self._max_abs)}"
                raise MethodError(
                    hook_name(self.algorithm, "local_update"), what, "upload it, or see compares"
                )
            counts = np.bincount(self._owner, minlength=self.transport.size)
            told = (tuple(int(c) for c in counts), self._max_abs[name].shape[1] * self._widths[name])
        with self.watch("reduce"):
            told = self.transport.bcast(told, "plan")
            if told is None:
                return notes
            counts, width = told
            owner = self._owner if notes is not None else None
            gram = self.mixer.gram(uploads.get(name, []), counts, owner, width)
        return notes.having(gram=gram) if notes is not None and gram is not None else None

    # -- judging ---------------------------------------------------------------------------------------------

    def evaluate(self, server: Server | None, clients: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return the scores of `clients` on rank 0: name -> float64 [len(clients)]."""
        task_batches = None
        if server is not None:
            seen = self.visits[clients] > 0
            serves = self.read_by("serves", server, clients[seen])
            serves |= self.read_by("serves_unseen", server, clients[~seen])
            task_batches = self.task_batches(
                server.version, clients, serves, self.sizes[clients, 2] + 1, server.version
            )
        tasks = self.scatter_tasks(task_batches)
        scores = self.worker.evaluate(tasks)
        with self.watch("wait"):
            parts = self.transport.gather(scores, "scores")
        if parts is None:
            return None
        everyone = {k: s for part in parts for k, s in part.items()}
        names = everyone[int(clients[0])]
        other = next((k for k, scores in everyone.items() if set(scores) != set(names)), None)
        if other is not None:
            what = f"client {other} scores {sorted(everyone[other])}, client {clients[0]} {sorted(names)}"
            raise MethodError(hook_name(self.algorithm, "evaluate"), what, "return the same names for all")
        return {name: np.array([everyone[int(k)][name] for k in clients]) for name in names}


def _uploads(light: ReportHeader) -> str:
    """Return the names and shapes of a report's uploads, in words."""
    shapes = [f"{name!r} [{len(light.max_abs[name])}, {width}]" for name, width in light.widths.items()]
    return ", ".join(shapes) or "nothing"
