"""The worker's part of a step: visits, second looks and evaluations of clients on this rank."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from mpifl.aggregation.exact_sum import max_abs
from mpifl.aggregation.tables import Tables, read_rows, row_distances
from mpifl.aggregation.update_filter import FilteredVisit
from mpifl.comm.transport import bytes_of
from mpifl.core.capabilities import (
    LOOKS,
    STATISTICS,
    TRAINING,
    RowUpdates,
    SecondLook,
    ServerEvaluation,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.client import Client
from mpifl.core.computation import COLUMNS, SERVER, Computation
from mpifl.core.devices import (
    CPU,
    RowsOnDevice,
    report_to_main_memory,
    tensors_on,
    to_main_memory,
    upload_budget,
)
from mpifl.core.errors import MethodError
from mpifl.core.parameters import take
from mpifl.core.plan import statistics_of
from mpifl.core.rng import Key
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Message, Report, State, Vector
from mpifl.traffic.ledger import count_numbers

from .exchange import Found, PairedLooks, stored
from .hook_errors import Dropped, VisitPlace, attempt, counted_attempt, hook_name
from .hooks import ClientHooks
from .protocol import ClientTask, LookPlan, ReportHeader, ReportTable, TaskBatch, report_tables
from .step_config import StepConfig, shared_result

Coded = tuple[Report, Mapping[str, int]]  # what arrives at the server, and the bytes of its vectors
Made = tuple[Report, State]  # what a visit returns
VisitArguments = tuple[Message, State, Client, Key]
TRAIN = "train"  # name of the training data among the sets on which clients are evaluated


@dataclass(frozen=True)
class VisitResults:
    """The results of one rank's visits in one step.

    Attributes:
        headers: headers of the reports, for rank 0.
        uploads: name -> vectors [w], all components of all uploads; valid until the next step.
        dropped: visits that failed and are left out.
        seconds: seconds that all visits took.
        tables: the reports, if they were made as columns, for rank 0; `headers` is then empty.
        computation: what the visits computed, as `Computation.table` has it.
    """

    headers: list[ReportHeader]
    uploads: Mapping[str, list[torch.Tensor]]
    dropped: list[Dropped]
    seconds: float
    tables: Sequence[ReportTable] = ()
    computation: np.ndarray = field(default_factory=lambda: Computation().table)

    def packed(self) -> tuple[tuple[list[ReportTable], list[Dropped]], bytes]:
        """Return what is sent to rank 0: (tables without reports, visits left out), and bytes.

        The former are equal on ranks whose reports have the same forms. The bytes hold the seconds, the
        computation and the reports; `unpacked` returns them.
        """
        tables = [*self.tables] or report_tables(self.headers)
        packed = [table.packed() for table in tables]
        heads = [head for head, _ in packed]
        rows = [bytes_of(np.ascontiguousarray(self.computation)), *(found for _, found in packed)]
        lengths = struct.pack(f"d{1 + len(rows)}q", self.seconds, len(rows), *map(len, rows))
        return (heads, self.dropped), b"".join((lengths, *rows))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the reports, in the order of the uploads."""
        return sorted([h.number for h in self.headers] + [n for t in self.tables for n in t.number.tolist()])


class Unpacked(NamedTuple):
    """What `VisitResults.packed` sends of a rank as bytes.

    Attributes:
        seconds: seconds that its visits took.
        computation: what they computed.
        rows: the rows of each of its tables.
    """

    seconds: float
    computation: np.ndarray
    rows: list[memoryview]


def unpacked(data: memoryview) -> Unpacked:
    """Return what a rank has packed."""
    seconds, count = struct.unpack_from("dq", data)
    lengths = struct.unpack_from(f"{count}q", data, 16)
    ends = [*accumulate(lengths, initial=16 + 8 * count)]
    counts, *rows = [data[lo:hi] for lo, hi in pairwise(ends)]
    return Unpacked(seconds, np.frombuffer(counts, np.int64).reshape(-1, len(COLUMNS)), rows)


class SingleVisit(NamedTuple):
    """A visit that was run by itself.

    Attributes:
        report: header of its report; for a visit that is left out, a `Dropped`.
        computation: what it computed, as `Computation.table` has it.
    """

    report: ReportHeader | Dropped
    computation: np.ndarray


class Worker:
    """Runs the visits of this rank.

    Args:
        config: objects and settings of server steps.
        tables: this rank's part of the server's tables.
        watch: counts the seconds of each phase.

    Attributes:
        looks: carries out the second looks of steps.
        sends_changes: whether an upload `model` of a client on this rank was a change instead of a model.
    """

    def __init__(self, config: StepConfig, tables: Tables, watch: Stopwatch) -> None:
        self.config, self.tables, self.watch = config, tables, watch
        self.hooks = ClientHooks(config.algorithm, config.clients.device)
        self._remembered = config.remembered
        self._trained = upload_named(config.algorithm, RowUpdates, "trained")
        reused = self._remembered is not None or uses(config.algorithm, SecondLook)
        self._sums_only = config.sums.exact and not (reused or config.filters.in_main_memory)
        self._plain = config.in_one_call and config.in_one_call(config, tables, watch)
        self.looks = PairedLooks(config, self.hooks, watch)
        self._counter = config.clients.computation
        self._attempt = partial(counted_attempt, kept=config.kept, counter=self._counter)
        self._buffer = UploadBuffer()
        self._downloads = RowsOnDevice(config.clients.device)
        self.sends_changes = False
        self._bases: dict[int, Vector | None] = {}  # report number -> what its upload `model` is based on
        self._public: Sequence[Client] = ()  # the server's own data sets; read at first use

    def client(self, k: int, visit: int, step: int, work: Fraction | None = None) -> Client:
        """Return client `k` for a visit, which ends after the share `work` of its mini-batches, if given."""
        return self.config.clients.client(k, visit, step, work)

    def message(self, task: ClientTask, step: int, version: int) -> Message:
        """Return the client's download."""
        with self.watch("load", task.client, task.visit):
            vectors = {name: read_rows(self.tables.rows, name, which) for name, which in task.reads.items()}
        return self.config.filters.download(Message(vectors, task.reads, version, step), task.client)

    def _key(self, hook: str, *address: int) -> Key:
        return self.config.seed.of(hook, *address)

    def _place(self, step: int, client: int, visit: int) -> VisitPlace:
        return VisitPlace(self.config.transport.rank, step, client, visit)

    # -- a step ----------------------------------------------------------------------------------------------

    def run(self, batch: TaskBatch, fingerprint: bool = False) -> VisitResults:
        """Run all visits of a step.

        Args:
            batch: this rank's tasks.
            fingerprint: whether clients send their one-shot statistics instead of training.

        Raises:
            UserError: a function, hook or mode of PyTorch was changed on this rank since the run began.
        """
        with self.watch("visits"):
            results = self._run(batch, fingerprint)
            self._check_code(batch)
        return results

    def _check_code(self, batch: TaskBatch) -> None:
        rank = self.config.transport.rank
        self.config.check_code(f"code that ran on rank {rank} until round {batch.step}")

    def _run(self, batch: TaskBatch, fingerprint: bool) -> VisitResults:
        start, headers, dropped = perf_counter(), list[ReportHeader](), list[Dropped]()
        self._bases.clear()
        if self._plain is not None and not fingerprint and not self._shares_training(batch.version):
            self._buffer.clear()
            with self._counter.counting() as computation:
                made = self._plain.run(batch, self._buffer.rows)
            if made is not None:
                tables, vectors = made
                seconds = perf_counter() - start
                return VisitResults([], vectors, [], seconds, tables, computation.table)
        uploads: dict[str, list[torch.Tensor]] = {}
        visits = _Blocks(self, batch)
        self._buffer.clear(self._room())
        counter = self.config.counter
        counter.begin()
        with self._downloads, self._counter.counting() as computation:
            for task in batch.visits:
                work = partial(self._report, task, batch, None if fingerprint else visits)
                drops = self.config.drops and not fingerprint
                report = self._attempt(work, self._place(batch.step, task.client, task.visit), drops)
                counter.advance()
                if isinstance(report, Dropped):
                    dropped.append(report)
                    if fingerprint or not self._has_remembered(task, batch):
                        continue
                    report = self._remembered_report(task, batch)
                header, brought = report
                headers.append(header)
                with self.watch("report", task.client, task.visit):
                    for name, vector in brought.items():
                        uploads.setdefault(name, []).extend(self._buffer.put(vector, len(batch.visits)))
        return VisitResults(headers, uploads, dropped, perf_counter() - start, (), computation.table)

    def _has_remembered(self, task: ClientTask, batch: TaskBatch) -> bool:
        """Return whether a client that is left out has a remembered upload that counts in the step."""
        return self._remembered is not None and task.visit > 0 and task.client not in batch.outdated

    def _remembered_report(
        self, task: ClientTask, batch: TaskBatch
    ) -> tuple[ReportHeader, Mapping[str, Vector]]:
        """Return the report of a client that is left out, as of one outside of the cohort."""
        self._bases.pop(task.number, None)
        with self.config.kept():
            return self._report(replace(task, fresh=False), batch, _Blocks(self, batch))

    def look(self, batch: TaskBatch, results: VisitResults) -> VisitResults:
        """Return the results of a step after its second look; every rank calls if the batch has one.

        A client whose look fails is left out like one whose visit fails. One that failed before has no
        question.

        Args:
            batch: this rank's tasks.
            results: the results of its visits.
        """
        assert batch.looks is not None
        tasks = {task.number: task for task in batch.visits}
        uploads = {name: _components(rows, len(results.headers)) for name, rows in results.uploads.items()}
        asking = {
            h.number: {name: h.shaped(name, each[i]) for name, each in uploads.items()}
            for i, h in enumerate(results.headers)
            if h.fresh == tasks[h.number].fresh and batch.looks.asks(h.number)
        }
        at_server = hooks_of(self.config.algorithm, SecondLook).at_server
        with self._counter.counting("server" if at_server else "statistics") as computation:
            found, failed = self._look(batch, batch.looks, asking)
        headers = list[ReportHeader]()
        for i, header in enumerate(results.headers):
            number = header.number
            if number in failed:
                task = tasks[number]
                if not self._has_remembered(task, batch):
                    for each in uploads.values():
                        each[i] = []
                    continue
                header, brought = self._remembered_report(task, batch)
                for name, vector in brought.items():
                    uploads[name][i] = self._buffer.put(vector, len(batch.visits))
            elif number in found:
                header = header.having(found[number].notes, found[number].findings, found[number].exchanges)
            task = tasks[number]
            if header.fresh and not task.visit and hooks_of(self.config.algorithm, SecondLook).at_server:
                work = partial(stored, self.hooks, self.config, self.client(task.client, 0, batch.step))
                sent = self._attempt(work, self._place(batch.step, task.client, 0), drops=False)
                assert not isinstance(sent, Dropped)
                header = replace(header, exchanges=sent)
            headers.append(header)
        joined = {name: [row for rows in each for row in rows] for name, each in uploads.items()}
        dropped = [*results.dropped, *failed.values()]
        self._check_code(batch)
        computed = np.concatenate([results.computation, computation.table])
        return replace(results, headers=headers, uploads=joined, dropped=dropped, computation=computed)

    def _look(
        self, batch: TaskBatch, looks: LookPlan, asking: Mapping[int, Mapping[str, Vector]]
    ) -> tuple[Mapping[int, Found], Mapping[int, Dropped]]:
        """Return what clients find, now or in another case of a sweep, and which of them are left out."""
        beginning, transport = self.config.beginning, self.config.transport
        if beginning is None or batch.version or LOOKS not in beginning:
            return self.looks.run(looks, batch.step, asking)
        own = {i: beginning.address(LOOKS, uploads) for i, uploads in asking.items()}
        told, address, known = transport.gather(own, "notes"), "", None
        if told is not None:  # rank 0 reads and writes the looks of all clients together
            uploads = sorted((i, of) for part in told for i, of in part.items())
            who = looks.clients, looks.visits, looks.matrix(), batch.step, self._key("probe").path
            address = beginning.address(LOOKS, uploads, who) if all(of for _, of in uploads) else ""
        with beginning.alone(LOOKS, address):
            if told is not None:
                known = beginning.find(LOOKS, SERVER, address)
            found: Mapping[int, Found] | None = transport.bcast(None if known is None else known[0], "notes")
            if found is not None:
                if known is not None:
                    self._counter.add_all(Computation.of(known[1]))
                return {i: found[i] for i in asking}, {}
            with self._counter.apart() as counted:
                found, failed = self.looks.run(looks, batch.step, asking)
            self._counter.add_all(counted)
            parts = transport.gather((found, bool(failed), counted.table), "notes")
            if parts is not None and not any(fails for _, fails, _ in parts):
                joined = {i: one for some, _, _ in parts for i, one in some.items()}
                computed = np.concatenate([table for _, _, table in parts])
                beginning.keep(LOOKS, SERVER, address, (joined, computed))
            return found, failed

    def updates(self, batch: TaskBatch, results: VisitResults) -> list[Vector]:
        """Return, for each visit of a step, the reported change of the model that it downloaded, [d] each."""
        tasks = {task.number: task for task in batch.visits}
        changes = []
        for number, w in zip(results.numbers, results.uploads.get("model", []), strict=True):
            if number in self._bases:
                base = self._bases[number]
            else:
                base = self.message(tasks[number], batch.step, batch.version).vectors["model"][0]
            changes.append(w if base is None else w - base.to(w.device))
        return changes

    def _room(self) -> int:
        """Return the bytes of a step's uploads that may stay on the device."""
        return upload_budget(self.config.clients.device, self.config.transport.num_workers_here)

    def _report(
        self, task: ClientTask, batch: TaskBatch, visits: _Blocks | None
    ) -> tuple[ReportHeader, Mapping[str, Vector]]:
        """Return a client's report: the header and the uploads; one-shot statistics if `visits` is None."""
        hook = "fingerprint" if visits is None else "local_update"
        if visits is None:
            shown = self._downloads.message(self.message(task, batch.step, 0)).vectors
            report, sizes = self._fingerprint(task, batch.step, shown)
        else:
            report, sizes = visits.report(task)
        change = "model" in report.based_on and report.based_on["model"] is None
        self.sends_changes |= change and visits is not None
        if self.config.evaluation.updates and "model" in report.based_on:
            self._bases[task.number] = report.based_on["model"]
        findings = self._row_distances(report, batch.compared)
        return self._header(hook, task, report, sizes, findings), report.vectors

    def _fingerprint(self, task: ClientTask, step: int, shown: Mapping[str, Vector]) -> Coded:
        who = task.client, task.visit
        with self.watch("train", *who), self._counter.during("statistics"):
            client = self.client(task.client, task.visit, step)
            key = self._key("fingerprint", task.client)
            report = self._in_main_memory(self._statistics(task, client, shown, key, step))
        arrived = self.config.filters.statistics(report)
        if arrived is not report:
            arrived = self._with_unsent("fingerprint", task, report, arrived)
        return arrived, self.config.payload.vector_bytes(report)

    def _statistics(
        self, task: ClientTask, client: Client, shown: Mapping[str, Vector], key: Key, step: int
    ) -> Report:
        """Return a client's one-shot statistics as it makes them, now or in another case of a sweep."""

        def arguments() -> tuple[Any, ...]:
            return shown, key.path, client.id, client.visit, step

        def make() -> tuple[Report, np.ndarray]:
            with self._counter.apart() as counted:
                return self.hooks.fingerprint(task, client, shown, key), counted.table

        report, computed = shared_result(self.config.beginning, STATISTICS, client.id, arguments, make)
        self._counter.add_all(Computation.of(computed))
        return report

    def _shares_training(self, version: int) -> bool:
        """Return whether cases of a sweep share the training of clients that read a version of the server."""
        return version == 0 and self.config.beginning is not None and TRAINING in self.config.beginning

    def _made(
        self,
        tasks: Sequence[ClientTask],
        arguments: Sequence[VisitArguments],
        train: Callable[[], list[Made]],
    ) -> list[Made]:
        """Return what visits of clients that train together make, now or in another case of a sweep.

        Args:
            tasks: the visits.
            arguments: the arguments of each.
            train: makes all of them.
        """
        beginning = self.config.beginning
        if beginning is None or not self._shares_training(arguments[0][0].version):
            return train()
        calls = [
            (message, state, key.path, client.id, client.visit, task.work)
            for task, (message, state, client, key) in zip(tasks, arguments, strict=True)
        ]
        own = [beginning.address(TRAINING, call) for call in calls]
        if not all(own):
            return train()
        addresses = own if len(own) == 1 else [beginning.address(TRAINING, one, own) for one in own]
        places = [(task.client, address) for task, address in zip(tasks, addresses, strict=True)]
        known = [message for message, _, _, _ in arguments]

        def find() -> list[Any]:
            return [beginning.find(TRAINING, *place, m) for place, m in zip(places, known, strict=True)]

        if None in (found := find()):
            with beginning.alone(TRAINING, addresses[0]):
                if None in (found := find()):
                    with self._counter.apart() as counted:
                        made = train()
                    of = [counted.table[counted.table[:, 0] == client] for client, _ in places]
                    found = [*zip(made, of, strict=True)]
                    for place, value, m in zip(places, found, known, strict=True):
                        beginning.keep(TRAINING, *place, value, m)
        for _, table in found:
            self._counter.add_all(Computation.of(table))
        return [one for one, _ in found]

    def visit(self, task: ClientTask, batch: TaskBatch) -> Coded:
        """Return one client's report, from training now or from its remembered upload."""
        if not task.fresh:
            with self.watch("load", task.client, task.visit):
                remembered = self.config.store.load("upload", task.client, task.visit)
            num_samples = self.config.federation.num_samples(task.client, task.data_visit)
            return Report(task.client, num_samples, remembered), {}
        client = self.client(task.client, task.visit, batch.step, task.work)
        return self._train(client, task, self.message(task, batch.step, batch.version))

    def train_block(self, tasks: Sequence[ClientTask], batch: TaskBatch) -> dict[int, Coded]:
        """Train some clients together; return their reports by report number."""
        works, messages, arguments = [], [], []
        for task in tasks:
            client = self.client(task.client, task.visit, batch.step, task.work)
            messages.append(self.message(task, batch.step, batch.version))
            arguments.append(self._before(client, task, messages[-1]))
            works.append(partial(self.hooks.local_update, task, *arguments[-1]))
        with self.watch("train", [t.client for t in tasks], [t.visit for t in tasks]):
            made = self._made(tasks, arguments, partial(self.config.clients.run_lockstep, works))
        return {
            task.number: self._after(task, message, *done)
            for task, message, done in zip(tasks, messages, made, strict=True)
        }

    def _train(self, client: Client, task: ClientTask, message: Message) -> Coded:
        """Train one client and commit its state."""
        arguments = self._before(client, task, message)
        with self.watch("train", task.client, task.visit):
            [made] = self._made([task], [arguments], lambda: [self.hooks.local_update(task, *arguments)])
        if self.config.clients.keeps_optimizer:
            memory = tensors_on(client.optimizer_memory(), CPU)
            self.config.store.save("optimizer", task.client, task.visit + 1, memory)
        return self._after(task, message, *made)

    def _before(self, client: Client, task: ClientTask, message: Message) -> VisitArguments:
        """Return the arguments of a visit: message, state, client with its data loaded, key."""
        with self.watch("load", task.client, task.visit):
            keeps = self.config.algorithm.needs.client_state
            state = self._state(task) if keeps else {}
            if self.config.clients.keeps_optimizer:
                client.load_optimizer(self.config.store.load("optimizer", task.client, task.visit))
            _ = client.data
        key = self._key("visit", task.client, task.visit)
        return self._downloads.message(message), state, client, key

    def _state(self, task: ClientTask) -> State:
        """Return a client's state before a visit, on the device."""
        load = partial(self.config.store.load, "state", task.client, task.visit)
        return self.config.clients.state(task.client, task.visit, load)

    def _after(self, task: ClientTask, message: Message, report: Report, after: State) -> Coded:
        """Pass a visit's report through the filters, and save the client's state."""
        key, store, c = self._key("visit", task.client, task.visit), self.config.store, self.config
        visit = FilteredVisit(message, task.visit, key, task.told, store)
        with self.watch("report", task.client, task.visit):
            made, report = report, c.filters.client(report, visit)
            changed, report = report is not made, self._in_main_memory(report)
            if changed:
                report = self._with_unsent("local_update", task, self._in_main_memory(made), report)
            sizes = c.filters.sizes(c.payload.vector_bytes(report), report, message)
            report = self._with_statistics(report, message)
            if self.config.algorithm.needs.client_state:
                store.save("state", task.client, task.visit + 1, tensors_on(after, CPU))
                c.clients.keep_state(task.client, task.visit + 1, after)
            if self._remembered:
                store.save("upload", task.client, task.visit + 1, dict(report.vectors))
        return report, sizes

    def _with_statistics(self, report: Report, message: Message) -> Report:
        """Return a report that holds, beside changes of models, the models' statistics.

        The server computes them from the row that it sent (`Algorithm.changes`), so they are not sent.
        """
        found: dict[str, Vector] = {}
        for name, table in self.config.algorithm.changes.items():
            x, rows = report.vectors.get(name), message.vectors.get(table)
            part = () if x is None else self.config.parts.statistics(name, x.shape[-1])
            if x is None or rows is None or not part:
                continue
            row = rows[0 if len(rows) == 1 else int(report.notes[str(self._trained)])]
            found[statistics_of(name)] = (take(x, part) + take(row.to(x.device), part)).contiguous()
        unsent = (*report.unsent, *found)
        return replace(report, vectors={**report.vectors, **found}, unsent=unsent) if found else report

    def _with_unsent(self, hook: str, task: ClientTask, made: Report, arrived: Report) -> Report:
        """Return the report that arrives, with unsent vectors as the server reconstructs them.

        Args:
            hook: hook that made the report.
            task: the visit.
            made: the report as the client made it.
            arrived: the report as it arrives at the server.
        """
        if not any(name in made.vectors for name in made.unsent):
            return arrived
        sent = {name: x for name, x in arrived.vectors.items() if name not in made.unsent}
        found = self.hooks.unsent_vectors(hook, task, made, sent)
        return replace(arrived, vectors={**arrived.vectors, **found})

    def _in_main_memory(self, report: Report) -> Report:
        """Return a report with its notes in main memory, and its vectors too unless they are only summed."""
        return report_to_main_memory(report, self.config.clients.device, vectors=not self._sums_only)

    def _header(
        self,
        hook: str,
        task: ClientTask,
        report: Report,
        sizes: Mapping[str, int],
        findings: Mapping[str, Any],
    ) -> ReportHeader:
        """Return the header of a hook's report, after checking the report and that its vectors are finite."""
        with self.watch("report", task.client, task.visit):
            # row by row: faster than all rows at once
            largest = {name: [max_abs(row) for row in _rows(v)] for name, v in report.vectors.items()}
            report = self.hooks.checked_report(hook, task, report, largest, self.config.parts)
        return ReportHeader(
            number=task.number,
            client=report.client,
            num_samples=report.num_samples,
            fresh=task.fresh,
            notes=report.notes,
            findings=findings,
            metrics=report.metrics,
            max_abs=largest,
            sizes={name: self._count_numbers(name, v, report.client) for name, v in report.vectors.items()},
            widths={name: v.shape[-1] for name, v in report.vectors.items()},
            bytes=sizes,
            shapes={name: tuple(v.shape) for name, v in report.vectors.items()},
            unsent=report.unsent,
        )

    def _count_numbers(self, name: str, vectors: Vector, client: int) -> int:
        """Return how many numbers of vectors [d] or [C, d] a client has."""
        if not (filters := self.config.filters).narrows:
            return count_numbers(vectors)
        return len(_rows(vectors)) * filters.width(name, vectors.shape[-1], client)

    def _row_distances(self, report: Report, compared: tuple[str, int] | None) -> Mapping[str, Any]:
        """Return the distances [K] of an upload to all rows of the table with its name."""
        if compared is None:
            return {}
        name, num_rows = compared
        with self.watch("cluster", report.client):
            u, rows = to_main_memory(report.vectors[name]), self.tables.rows(name, list(range(num_rows)))
            return {"row_distance": row_distances(u, rows, self.config.clients.layout)}

    # -- a single visit --------------------------------------------------------------------------------------

    def run_visit(self, task: ClientTask, message: Message) -> tuple[SingleVisit, dict[str, torch.Tensor]]:
        """Run one visit whose rows came with its task; return its report and uploads, name -> [C, d]."""
        with self._counter.counting() as computation:
            plain = self._run_plain_visit(task, message)
        if plain is not None:
            return SingleVisit(plain[0], computation.table), plain[1]
        client, algorithm = self.client(task.client, task.visit, message.step), self.config.algorithm
        stores = uses(algorithm, SecondLook) and hooks_of(algorithm, SecondLook).at_server and not task.visit

        def work() -> tuple[ReportHeader, Report]:
            report, sizes = self._train(client, task, self.config.filters.download(message, task.client))
            report = report_to_main_memory(report, self.config.clients.device)
            findings = self._inspect(task, report)
            header = self._header("local_update", task, report, sizes, findings)
            sent = stored(self.hooks, self.config, client) if stores else {}
            return replace(header, exchanges=sent), report

        self.config.counter.begin()
        with self._downloads, self._counter.counting() as computation:
            made = self._attempt(work, self._place(message.step, task.client, task.visit), self.config.drops)
        self.config.counter.advance()
        if isinstance(made, Dropped):
            return SingleVisit(made, computation.table), {}
        header, report = made
        uploads = {name: v.cpu().reshape(-1, v.shape[-1]) for name, v in report.vectors.items()}
        return SingleVisit(header, computation.table), uploads

    def _run_plain_visit(
        self, task: ClientTask, message: Message
    ) -> tuple[ReportHeader, dict[str, torch.Tensor]] | None:
        """Return the result of `run_visit` for a visit that only trains; None if it does more, or fails."""
        algorithm = self.config.algorithm
        if self._plain is None or uses(algorithm, ServerEvaluation) or uses(algorithm, SecondLook):
            return None
        self.config.counter.begin()
        made = self._plain.run_visit(task, message)
        if made is not None:
            self.config.counter.advance()
        return made

    def run_statistics(
        self, task: ClientTask, step: int, shown: Mapping[str, torch.Tensor]
    ) -> tuple[ReportHeader, np.ndarray, dict[str, torch.Tensor]]:
        """Return a client's statistics: their header, what was computed, and their vectors, name -> [C, d].

        Args:
            task: client and visit.
            step: number of the server step.
            shown: what the client downloads for them.
        """

        def work() -> tuple[ReportHeader, Report]:
            message = self._downloads.message(Message(shown, task.reads, 0, step))
            report, sizes = self._fingerprint(task, step, message.vectors)
            report = report_to_main_memory(report, self.config.clients.device)
            return self._header("fingerprint", task, report, sizes, {}), report

        with self._downloads, self._counter.counting() as computation:
            made = self._attempt(work, self._place(step, task.client, task.visit), drops=False)
        assert not isinstance(made, Dropped)
        header, report = made
        uploads = {name: v.cpu().reshape(-1, v.shape[-1]) for name, v in report.vectors.items()}
        return header, computation.table, uploads

    def run_look(
        self, looks: LookPlan, place: int, step: int, uploads: Mapping[str, torch.Tensor]
    ) -> tuple[Found | Dropped, np.ndarray]:
        """Return what one client finds that looks at its peers, and what was computed for it.

        Args:
            looks: who looks at whom.
            place: the client's place in the step.
            step: number of the server step.
            uploads: the client's uploads, in the shapes in which it reported them.
        """
        at_server = hooks_of(self.config.algorithm, SecondLook).at_server
        with self._counter.counting("server" if at_server else "statistics") as computation:
            found = self.looks.run_one(looks, place, step, uploads)
        return found, computation.table

    def _inspect(self, task: ClientTask, report: Report) -> Mapping[str, Any]:
        """Return what the server finds when it evaluates an upload on its own data."""
        c = self.config
        if not uses(c.algorithm, ServerEvaluation):
            return {}
        with self.watch("evaluate", task.client, task.visit):
            if not self._public:
                self._public = c.clients.public_clients()
            return self.hooks.inspect(task, report.vectors, self._public)

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, batch: TaskBatch) -> tuple[dict[int, dict[str, float]], np.ndarray]:
        """Evaluate clients on their test sets.

        Returns:
            Client -> scores: the task's metrics (such as `accuracy`) and `loss`; on further test sets as
            `accuracy_NAME`; on the training data as `accuracy_train`; and after fine-tuning as
            `accuracy_finetuned`. Second, what was computed for it, as `Computation.table` has it.
        """
        out: dict[int, dict[str, float]] = {}
        counter = self.config.counter
        counter.begin()
        computation = Computation()
        with self._downloads, self.watch("evaluate"), self._counter.counting("evaluation", computation):
            for task in batch.visits:
                # if a client's data change over visits, its model is evaluated on the data of the last visit
                last = max(task.visit - 1, 0)
                with self.watch("evaluate", task.client, last):
                    client = self.client(task.client, last, batch.step)
                    message = self._downloads.message(self.message(task, batch.step, batch.version))
                    work = partial(self._scores, message, self._state(task), client)
                    place = self._place(batch.step, task.client, last)
                    scores = attempt(work, place, drops=False, kept=self.config.kept)
                counter.advance()
                assert not isinstance(scores, Dropped)
                out[task.client] = scores
            self._check_code(batch)
        return out, computation.table

    def models(self, batch: TaskBatch) -> tuple[list[int], torch.Tensor]:
        """Return clients and the models [n, d] with which they are evaluated, float32 in main memory."""
        clients = [task.client for task in batch.visits]
        rows = torch.empty(len(clients), self.config.problem.layout.size, dtype=torch.float32)
        with self._downloads:
            for row, task in zip(rows, batch.visits, strict=True):
                client = self.client(task.client, max(task.visit - 1, 0), batch.step)
                message = self._downloads.message(self.message(task, batch.step, batch.version))
                work = partial(self.hooks.model_of, message, self._state(task), client, client.layout.size)
                place = self._place(batch.step, task.client, task.visit)
                model = attempt(work, place, drops=False, kept=self.config.kept)
                assert not isinstance(model, Dropped)
                row.copy_(to_main_memory(model))
        return clients, rows

    def _scores(self, message: Message, state: State, client: Client) -> dict[str, float]:
        scores = dict(self.hooks.evaluate(message, state, client, client.data.test))
        missing = [name for name in self.config.clients.metric_names if name not in scores]
        if missing:
            remedy = "evaluation.metrics asks for it: return {..., **client.measure(logits, labels)}, too"
            raise MethodError(hook_name(self.config.algorithm, "evaluate"), f"scores no {missing[0]}", remedy)
        others = dict(client.data.extra)
        if self.config.evaluation.training_data:
            others[TRAIN] = client.data.train
        for name, split in others.items():
            extra = self.hooks.evaluate(message, state, client, split)
            scores |= {f"{what}_{name}": value for what, value in extra.items()}
        if self.config.evaluation.finetune_epochs:
            start = self.hooks.model_of(message, state, client, client.layout.size)
            scores |= self._finetuned(client, start)
        return scores

    def _finetuned(self, client: Client, start: Vector) -> dict[str, float]:
        """Return a model's scores after fine-tuning on the client's training data."""
        key = self._key("finetune", client.id, client.visit)
        tuned = client.sgd(start, key, epochs=self.config.evaluation.finetune_epochs).vector
        return {f"{what}_finetuned": value for what, value in client.evaluate(tuned).items()}


class _Blocks:
    """The visits of a step in blocks whose clients are trained together.

    A block has the same clients for any number of ranks, so it may influence the last bits of the result. If
    one client of a block fails, each of them trains by itself.
    """

    def __init__(self, worker: Worker, batch: TaskBatch) -> None:
        self.worker, self.batch, self.stack = worker, batch, worker.config.stack
        self._trained: dict[int, Coded] = {}  # by report number; reports not yet requested
        self._computed = Computation()  # in their visits
        self._started: set[int] = set()

    def report(self, task: ClientTask) -> Coded:
        """Return one client's report."""
        block = task.number // self.stack
        if self.stack > 1 and block not in self._started:
            self._started.add(block)
            tasks = [t for t in self.batch.visits if t.fresh and t.number // self.stack == block]
            if len(tasks) > 1:
                with self.worker.config.clients.computation.counting(into=self._computed):
                    self._trained |= self.worker.train_block(tasks, self.batch)
        if (made := self._trained.pop(task.number, None)) is None:
            return self.worker.visit(task, self.batch)
        self.worker.config.clients.computation.add_all(self._computed, task.client)
        return made


def _components(rows: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Return the components of each of `count` uploads, whose components follow each other."""
    c = len(rows) // max(count, 1)
    return [[*rows[i * c : (i + 1) * c]] for i in range(count)]


def _rows(upload: torch.Tensor) -> list[torch.Tensor]:
    """Return the components [d] of an upload, [d] or [C, d]."""
    return [upload] if upload.ndim == 1 else list(upload)


LEAST = 1 << 20  # least bytes of a step's uploads for which copying them pays
CHUNK = 1 << 22  # numbers allocated at a time


class UploadBuffer:
    """Rows for the uploads of a step, allocated once and reused in the next step.

    Large long-lived tensors between short-lived ones prevent the C library from merging freed memory. Without
    this buffer, a worker's memory grows by half the size of its uploads, and allocating new memory takes
    longer than the copy.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = {}  # width -> rows
        self._chunks: dict[int, torch.Tensor] = {}  # width -> the last allocation [rows, width]
        self._used: Counter[int] = Counter()
        self._room = 0  # bytes that may still stay on a device

    def clear(self, room: int = 0) -> None:
        """Make all rows available again; the uploads of the last step must not be read after this.

        Args:
            room: bytes of uploads that may stay on their device; the others are copied to main memory.
        """
        self._used.clear()
        self._room = room

    def put(self, vector: torch.Tensor, visits: int) -> list[torch.Tensor]:
        """Return an upload as rows in this rank's memory that last until `clear`.

        Args:
            vector: the upload, [d] or [C, d].
            visits: number of this rank's visits in the step; all are assumed to have uploads of this size.
        """
        size = vector.nbytes
        if vector.device != CPU and size <= self._room:
            self._room -= size
            return _rows(vector)
        rows = _rows(to_main_memory(vector))
        if visits * size < LEAST:
            return rows
        return [self._next(len(row)).copy_(row) for row in rows]

    def rows(self, width: int, count: int) -> list[torch.Tensor]:
        """Return `count` rows [width] in main memory for uploads; they last until `clear`."""
        return [self._next(width) for _ in range(count)]

    def _next(self, width: int) -> torch.Tensor:
        rows, number = self._rows.setdefault(width, []), self._used[width]
        if number == len(rows):
            height = max(1, CHUNK // width)
            if number % height == 0:
                self._chunks[width] = torch.empty(height, width, dtype=torch.float32)
            rows.append(self._chunks[width][number % height])
        self._used[width] += 1
        return rows[number]
