"""The worker's side of a step: run visits, look at peers, evaluate models; keep what is heavy, hand on
what is
light.

Rows for the uploads of a round, allocated once and used again in the next.

Large tensors that are kept between others that come and go keep the C library from joining what was freed: a
worker's memory grew by half as much again as its uploads, and new memory costs more than the copy.

Clients that another one looks at in a probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.exact_sum import max_abs
from mpifl.aggregation.tables import Tables, read_rows, row_distances
from mpifl.core.algorithm import Algorithm
from mpifl.core.client import Client, Peer
from mpifl.core.devices import CPU, message_on, report_home, room, staged, state_on, tensors_on
from mpifl.core.federation import Federation
from mpifl.core.rng import Key
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Message, Report, State, Vector
from mpifl.traffic.codec import Coder
from mpifl.traffic.ledger import count_numbers
from mpifl.traffic.payload import Payload
from mpifl.training import Learner, LocalClient, LocalConfig, public_clients

from .client_errors import Dropped, attempt
from .hooks import (
    calling,
    check_look,
    check_peaks,
    check_scores,
    check_vector,
    checked_light,
    checked_note,
    checked_report,
    checked_visit,
    hook_name,
)
from .protocol import ClientTask, ReportHeader, TaskBatch

Coded = tuple[Report, Mapping[str, int]]  # what arrives at the server, and the bytes of its vectors


class Worker:
    """Runs visits on this rank."""

    def __init__(
        self,
        rank: int,
        algorithm: Algorithm,
        federation: Federation,
        learner: Learner,
        local: LocalConfig,
        tables: Tables,
        store: ClientStore,
        key: Key,
        watch: Stopwatch,
        finetune_epochs: int = 0,
        payload: Payload | None = None,
        stack: int = 1,
        drops: bool = False,
        exact: bool = True,
    ) -> None:
        self.drops = drops  # clients that fail
        needs, payload = algorithm.needs, payload or Payload()
        kept = needs.memory is not None or needs.probe or payload.compresses
        self.sums_only = exact and not kept
        self.stack, self.together = stack, learner.lockstep
        self.coder = Coder(payload, store)
        self.rank, self.algorithm, self.federation, self.learner = rank, algorithm, federation, learner
        self.local, self.tables, self.store, self.key, self.watch = local, tables, store, key, watch
        self.finetune_epochs = finetune_epochs  # before a client is evaluated a second time
        self.shelf = UploadBuffer()
        self.seconds = 0.0  # of the last run
        self.dropped: list[Dropped] = []  # in the last run
        self._block = -1  # the block that was last trained together
        self._public: Sequence[Client] = ()  # the server's own sets; read when first asked for

    def client(self, k: int, visit: int, step: int) -> LocalClient:
        """Return client `k` at its visit."""
        return LocalClient(k, self.federation, self.learner, self.local, visit, step)

    def message(self, order: ClientTask, step: int, version: int) -> Message:
        """Return what the client downloads."""
        with self.watch("load"):
            vectors = {name: read_rows(self.tables.rows, name, which) for name, which in order.reads.items()}
        return self.coder.down(Message(vectors, order.reads, version, step))

    def run(
        self, tasks: TaskBatch, fingerprint: bool = False
    ) -> tuple[list[ReportHeader], dict[str, list[torch.Tensor]]]:
        """Run all visits; return the light reports and the uploads by name, components flattened, which last
        until the next run.
        """
        headers: list[ReportHeader] = []
        uploads: dict[str, list[torch.Tensor]] = {}
        start, self.dropped, self._block = perf_counter(), [], -1
        peers, stacked = self._peers(tasks), dict[int, Coded]()
        self.shelf.clear(self._room())
        for order in tasks.visits:
            visit = Dropped(tasks.step, order.client, order.visit, "")
            work = partial(self._report, order, tasks, peers, None if fingerprint else stacked)
            made = attempt(work, self.rank, visit, self.drops and not fingerprint)
            if isinstance(made, Dropped):
                self.dropped.append(made)
                continue
            light, vectors = made
            headers.append(light)
            for name, vector in vectors.items():
                uploads.setdefault(name, []).extend(self.shelf.put(vector, len(tasks.visits)))
        self.seconds = perf_counter() - start
        return headers, uploads

    def _report(
        self, order: ClientTask, tasks: TaskBatch, peers: list[LocalClient], stacked: dict[int, Coded] | None
    ) -> tuple[ReportHeader, Mapping[str, Vector]]:
        """Return what a client reports; its statistics where `stacked` is None."""
        if stacked is None:
            report, sizes = self._print(order, tasks)
        else:
            block = order.number // self.stack
            if self.stack > 1 and block != self._block:  # where one of them fails, all train by themselves
                self._block = block
                stacked |= self._stacked(block, tasks)
            done = stacked.pop(order.number, None)
            report, sizes = done or self._visit(order, tasks)
        hook = "fingerprint" if stacked is None else "local_update"
        notes, findings, traffic = self._look(report, order, peers, tasks.step)
        findings = {**findings, **self._distances(report, tasks.compared)}
        return self._light(hook, order, report, sizes, notes, findings, traffic), report.vectors

    def _print(self, order: ClientTask, tasks: TaskBatch) -> Coded:
        with self.watch("train"):
            client = self.client(order.client, order.visit, tasks.step)
            shown = message_on(self.message(order, tasks.step, 0), self.learner.device).vectors
            key = self.key.of("fingerprint", order.client)
            needs, place = self.algorithm.needs, _place(order)
            asked = {"fingerprint_gram": needs.fingerprint_gram}
            asked["fingerprint_distance"] = needs.fingerprint_distance
            with calling(self.algorithm, "fingerprint", place) as where:
                made = self.algorithm.fingerprint(client, shown, key)
                report = checked_report(where, place, made, asked, self.learner.device)
        return self.coder.up(self._home(report), None, order.visit, key)

    def _visit(self, order: ClientTask, tasks: TaskBatch) -> Coded:
        if not order.fresh:
            with self.watch("load"):
                remembered = self.store.load("upload", order.client, order.visit)
            num_samples = self.federation.num_samples(order.client, order.visit - 1)  # those it was made from
            return Report(order.client, num_samples, remembered), {}
        client = self.client(order.client, order.visit, tasks.step)
        return self._train(client, order, self.message(order, tasks.step, tasks.version))

    def serve(
        self, order: ClientTask, message: Message
    ) -> tuple[ReportHeader | Dropped, dict[str, torch.Tensor]]:
        """Run one visit with a message that came with its order; return the light report and the uploads [C,
        d].
        """
        client = self.client(order.client, order.visit, message.step)

        def work() -> tuple[ReportHeader, Report]:
            report, sizes = self._train(client, order, self.coder.down(message))
            report = report_home(report, self.learner.device)
            findings = self.inspect(order, report)
            return self._light("local_update", order, report, sizes, {}, findings, {}), report

        visit = Dropped(message.step, order.client, order.visit, "")
        made = attempt(work, self.rank, visit, self.drops)
        if isinstance(made, Dropped):
            return made, {}
        light, report = made
        return light, {name: v.cpu().reshape(-1, v.shape[-1]) for name, v in report.vectors.items()}

    def _home(self, report: Report) -> Report:
        """Return a report whose notes are in main memory; its vectors too, unless only sums are made of
        them.
        """
        return report_home(report, self.learner.device, vectors=not self.sums_only)

    def _room(self) -> int:
        """Return the bytes of a run's uploads that may stay on the device."""
        t = self.tables.transport
        ranks = sum(t.nodes[r] == t.nodes[t.rank] for r in t.workers)
        return room(self.learner.device, ranks)

    def _light(
        self,
        hook: str,
        order: ClientTask,
        report: Report,
        sizes: Mapping[str, int],
        notes: Mapping[str, Any],
        findings: Mapping[str, Any],
        traffic: Mapping[tuple[str, str, int], tuple[int, int]],
    ) -> ReportHeader:
        """Return a report of a hook without its vectors, which are found finite on the way."""

        def of_rows(v: Vector) -> list[float]:
            return [max_abs(row) for row in v.reshape(-1, v.shape[-1])]  # faster than all rows at once

        where, place = hook_name(self.algorithm, hook), _place(order)
        report = checked_light(where, place, report, order.client)
        largest = {name: of_rows(v) for name, v in report.vectors.items()}
        check_peaks(where, place, largest)
        return ReportHeader(
            number=order.number,
            client=report.client,
            num_samples=report.num_samples,
            fresh=order.fresh,
            notes={**report.notes, **notes},
            findings=findings,
            metrics=report.metrics,
            max_abs=largest,
            sizes={name: count_numbers(v) for name, v in report.vectors.items()},
            widths={name: v.shape[-1] for name, v in report.vectors.items()},
            bytes=sizes,
            exchanges=traffic,
            unsent=report.unsent,
        )

    def inspect(self, order: ClientTask, report: Report) -> Mapping[str, Any]:
        """Judge an upload on the server's own data, here where it is."""
        if not self.algorithm.needs.inspect:
            return {}
        with self.watch("evaluate"):
            if not self._public:
                self._public = public_clients(self.federation, self.learner, self.local)
            place = _place(order)
            with calling(self.algorithm, "inspect", place) as where:
                found = self.algorithm.inspect(report.vectors, self._public)
                return {name: checked_note(where, place, name, value) for name, value in found.items()}

    def _stacked(self, block: int, tasks: TaskBatch) -> dict[int, Coded]:
        """Train the clients of one block together; return what they made, by the number of their report.

        A block is the same clients for any number of ranks, so it may bear on the last bits of the result.
        """
        mine = [o for o in tasks.visits if o.fresh and o.number // self.stack == block]
        if len(mine) < 2:
            return {}
        works, messages = [], []
        for order in mine:
            client = self.client(order.client, order.visit, tasks.step)
            messages.append(self.message(order, tasks.step, tasks.version))
            works.append(partial(self._local_update, order, *self._before(client, order, messages[-1])))
        try:
            with self.watch("train"):
                made = self.together.run(works)
        except Exception as error:
            error.order = mine[getattr(error, "place", 0)]  # type: ignore[attr-defined]
            raise
        return {
            order.number: self._after(order, message, *done)
            for order, message, done in zip(mine, messages, made, strict=True)
        }

    def _train(self, client: LocalClient, order: ClientTask, message: Message) -> Coded:
        """Train and commit the client's state."""
        arguments = self._before(client, order, message)
        with self.watch("train"):
            made = self._local_update(order, *arguments)
        return self._after(order, message, *made)

    def _local_update(
        self, order: ClientTask, message: Message, state: State, client: LocalClient, key: Key
    ) -> tuple[Report, State]:
        """Return what the method's own returns, checked."""
        place = _place(order)
        with calling(self.algorithm, "local_update", place) as where:
            made = self.algorithm.local_update(message, state, client, key)
            return checked_visit(where, place, made, self.algorithm, self.learner.device)

    def _before(
        self, client: LocalClient, order: ClientTask, message: Message
    ) -> tuple[Message, State, LocalClient, Key]:
        """Return what a visit starts from: message, state, client with its data at hand, key."""
        with self.watch("load"):
            state = self.store.load("state", order.client, order.visit) if self.algorithm.needs.state else {}
            _ = client.data
        device = self.learner.device
        key = self.key.of("visit", order.client, order.visit)
        return message_on(message, device), state_on(state, device), client, key

    def _after(self, order: ClientTask, message: Message, report: Report, after: State) -> Coded:
        """Encode a visit's report and commit the client's state."""
        key = self.key.of("visit", order.client, order.visit)
        with self.watch("load"):
            report, sizes = self.coder.up(self._home(report), message, order.visit, key)
            if self.algorithm.needs.state:
                self.store.save("state", order.client, order.visit + 1, tensors_on(after, CPU))
            if name := self.algorithm.needs.memory:
                self.store.save("upload", order.client, order.visit + 1, {name: report.vectors[name]})
        return report, sizes

    def _distances(self, report: Report, compared: tuple[str, int] | None) -> Mapping[str, Any]:
        """Return how far an upload is from all rows [K] of the table of its name, here where it is."""
        if compared is None:
            return {}
        name, num_rows = compared
        with self.watch("cluster"):
            u, rows = staged(report.vectors[name]), self.tables.rows(name, list(range(num_rows)))
            return {"row_distance": row_distances(u, rows, self.learner.layout.num_parameters)}

    def _peers(self, tasks: TaskBatch) -> list[LocalClient]:
        return [self.client(k, visit, tasks.step) for k, visit in tasks.peers]

    def _look(
        self, report: Report, order: ClientTask, peers: list[LocalClient], step: int
    ) -> tuple[Any, ...]:
        traffic: dict[tuple[str, str, int], tuple[int, int]] = {}
        if not peers:
            return {}, {}, traffic
        with self.watch("cluster"):
            me = self.client(order.client, order.visit, step)
            others = [CountedPeer(me.id, p, traffic, self.coder.payload) for p in peers]
            key = self.key.of("probe", order.client, step)
            with calling(self.algorithm, "probe", _place(order)) as where:
                look = self.algorithm.probe(me, report.vectors, others, key)
                check_look(where, _place(order), look)
        return look.notes, look.findings, traffic

    def evaluate(self, tasks: TaskBatch) -> dict[int, dict[str, float]]:
        """Return what each client scores: `accuracy`, `loss`, `accuracy_NAME` of its further test sets, and
        `accuracy_finetuned` if asked for.
        """
        out: dict[int, dict[str, float]] = {}
        with self.watch("evaluate"):
            for order in tasks.visits:
                last = max(
                    order.visit - 1, 0
                )  # where data change, a model is evaluated by those it was made for
                client = self.client(order.client, last, tasks.step)
                message = message_on(self.message(order, tasks.step, tasks.version), self.learner.device)
                state = state_on(self.store.load("state", order.client, order.visit), self.learner.device)
                visit = Dropped(tasks.step, order.client, last, "")
                work = partial(self._scores, message, state, client)
                scores = attempt(work, self.rank, visit, drops=False)
                assert not isinstance(scores, Dropped)
                out[order.client] = scores
        return out

    def _scores(self, message: Message, state: State, client: LocalClient) -> dict[str, float]:
        place = f"client {client.id}"
        with calling(self.algorithm, "evaluate", place) as where:
            scores = self.algorithm.evaluate(message, state, client, client.data.test)
            check_scores(where, place, scores)
            scores = dict(scores)
            for name, split in client.data.extra.items():
                extra = self.algorithm.evaluate(message, state, client, split)
                check_scores(where, place, extra)
                scores |= {f"{what}_{name}": value for what, value in extra.items()}
        if self.finetune_epochs:
            with calling(self.algorithm, "model_of", place) as where:
                start = self.algorithm.model_of(message, state, client)
                check_vector(where, place, start, client.layout.size)
            scores |= self._finetuned(client, start)
        return scores

    def _finetuned(self, client: LocalClient, start: Vector) -> dict[str, float]:
        """Return what the model a client is evaluated by scores after some more epochs on its training
        data.
        """
        key = self.key.of("finetune", client.id, client.visit)
        tuned = client.sgd(start, key, epochs=self.finetune_epochs).vector
        return {f"{what}_finetuned": value for what, value in client.evaluate(tuned).items()}


def _place(order: ClientTask) -> str:
    """Return whose visit it is, in words."""
    return f"client {order.client}, visit {order.visit}"


LEAST = 1 << 20  # bytes of a round's uploads from which on a copy is worth it
CHUNK = 1 << 22  # numbers that are allocated at a time


class UploadBuffer:
    """Holds uploads from one run of visits to the next."""

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = {}  # width -> rows
        self._taken: Counter[int] = Counter()
        self._room = 0  # bytes that may still stay on a device

    def clear(self, room: int = 0) -> None:
        """Make room: nobody reads the last run's uploads any more.

        Args:
            room: bytes of uploads that may stay on their device; the others come to main memory.
        """
        self._taken.clear()
        self._room = room

    def put(self, vector: torch.Tensor, visits: int) -> list[torch.Tensor]:
        """Return a client's upload [d] or [C, d] as rows in this rank's memory that last until `clear`.

        Args:
            visits: of the run; the others bring as much.
        """
        rows = vector.reshape(-1, vector.shape[-1])
        size = rows.numel() * rows.element_size()
        if rows.device != CPU and size <= self._room:
            self._room -= size
            return list(rows)
        rows = staged(rows)
        if visits * size < LEAST:
            return list(rows)
        return [self._next(rows.shape[1]).copy_(row) for row in rows]

    def _next(self, width: int) -> torch.Tensor:
        rows, number = self._rows.setdefault(width, []), self._taken[width]
        if number == len(rows):
            rows += torch.empty(max(1, CHUNK // width), width).unbind()
        self._taken[width] += 1
        return rows[number]


class CountedPeer(Peer):
    """A peer whose data are at hand; counts what a real exchange through the server would send."""

    def __init__(
        self,
        me: int,
        them: LocalClient,
        traffic: dict[tuple[str, str, int], tuple[int, int]],
        payload: Payload,
    ) -> None:
        self.id, self._me, self._them, self._traffic, self._payload = them.id, me, them, traffic, payload

    def _count(self, kind: str, direction: str, client: int, tensor: torch.Tensor) -> None:
        numbers, messages = self._traffic.get((kind, direction, client), (0, 0))
        self._traffic[kind, direction, client] = (numbers + tensor.numel(), messages + 1)

    def send(self, payload: torch.Tensor) -> None:
        """Count an upload of the asking client."""
        self._count("embedding", "up", self._me, payload)

    def ask(
        self, payload: torch.Tensor, answer: Callable[[Client, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Count the payload up and down and the answer up."""
        self._count("extractor", "up", self._me, payload)
        self._count("extractor", "down", self.id, payload)
        out = answer(self._them, self._payload.rounded(payload))
        self._count("embedding", "up", self.id, out)
        return self._payload.rounded(out)
