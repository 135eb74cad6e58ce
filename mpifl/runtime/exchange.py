"""The second look of a step: after training, clients ask each other in pairs (`SecondLook`).

Each hook is called on a rank that has the client whose data it sees: `ask` and `show` where the client that
looks was trained, `answer` where the peer was, `compare` where the client that looks was trained, or on rank
0. What they need of each other moves by collectives (`OverMpi`). With `Local`, the rank of the client that
looks calls them all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from mpifl.aggregation.exchange_choice import (
    ALLTOALL,
    BLOCK,
    SERVER,
    OverMpi,
    asking_waves,
    choose_question,
    needed_copies,
    pair_blocks,
)
from mpifl.comm.transport import Transport
from mpifl.core.capabilities import Question, SecondLook, hooks_of
from mpifl.core.client import Client
from mpifl.core.computation import Computation
from mpifl.core.devices import to_main_memory
from mpifl.core.rng import Key
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Vector

from .hook_errors import Dropped, VisitPlace, counted_attempt
from .hooks import ClientHooks
from .protocol import LookPlan
from .step_config import StepConfig

T = TypeVar("T")
Shape = torch.Size
Pair = tuple[int, int]  # a client that looks and its peer
Fault = tuple[int, int, Dropped]  # the same, and what failed
Counted = dict[tuple[str, str, int], tuple[int, int]]  # `ReportHeader.exchanges`
SHOWN, ANSWERED = 0, 1
SAMPLES = "samples"  # name in the ledger of what clients store at the server
Uploads = Mapping[int, Mapping[str, Vector]]  # number of a report -> its vectors, for clients that ask


@dataclass
class Found:
    """What the look of one client has found.

    Attributes:
        notes: notes of its question.
        findings: name -> a number for each client of the step [m], NaN for those that it did not look at;
            `peer` has the numbers of these clients.
        exchanges: see `ReportHeader`.
    """

    notes: Mapping[str, Any]
    findings: dict[str, np.ndarray]
    exchanges: Counted = field(default_factory=dict)

    def count(self, name: str, direction: str, client: int, shape: Shape) -> None:
        """Count a tensor that a client exchanges with the server."""
        numbers, messages = self.exchanges.get((name, direction, client), (0, 0))
        self.exchanges[name, direction, client] = numbers + shape.numel(), messages + 1

    def add(self, peer: int, compared: Mapping[str, float]) -> None:
        """Add what a comparison with a peer, given by its place in the step, has found."""
        for name, value in compared.items():
            column = self.findings.setdefault(name, np.full(len(self.findings["peer"]), np.nan))
            column[peer] = value


def stored(hooks: ClientHooks, config: StepConfig, client: Client) -> Counted:
    """Return the exchanges of a client that stores its samples at the server, with its first upload.

    Args:
        hooks: calls the hooks of the method.
        config: objects and settings of server steps.
        client: the client at its first visit.
    """
    samples = hooks.store(client, config.seed.of("probe"))
    return {(SAMPLES, "up", client.id): (samples.numel(), 1)}


class _LeftOut(Exception):
    """A hook failed twice; the client that looks is left out."""

    def __init__(self, dropped: Dropped) -> None:
        self.dropped = dropped


class PairedLooks:
    """Carries out the second look of a step; every rank has an instance.

    Args:
        config: objects and settings of server steps.
        hooks: calls the hooks of the method.
        watch: counts the seconds of each phase.
    """

    def __init__(self, config: StepConfig, hooks: ClientHooks, watch: Stopwatch) -> None:
        self.config, self.hooks, self.watch = config, hooks, watch

    def run(
        self, looks: LookPlan, step: int, uploads: Uploads
    ) -> tuple[Mapping[int, Found], Mapping[int, Dropped]]:
        """Return what clients of this rank find, and which of them are left out, by report number.

        A hook that fails is called once more. If it fails again, the client that looks is left out; in a run
        that leaves nobody out, the error is raised. What a look that fails has computed is not counted: how
        far it came depends on the ranks.

        Args:
            looks: who looks at whom.
            step: number of the server step.
            uploads: the uploads of the clients of this rank that look.
        """
        exchange, transport = self.config.exchange, self.config.transport
        look = _Look(self.config, self.hooks, self.watch, looks, step, uploads)
        if isinstance(exchange, OverMpi) and transport.size > 1:
            look.over_ranks(transport, exchange.distances == "server")
        else:
            look.here()
        failed = {*look.failed}
        if self.config.drops:  # on any rank
            failed.update(*look.told(transport, [*failed]))
        look.count_computation(failed)
        return look.found, {i: dropped for i, (_, dropped) in look.failed.items() if i in uploads}

    def run_one(
        self, looks: LookPlan, place: int, step: int, uploads: Mapping[str, Vector]
    ) -> Found | Dropped:
        """Return what one client finds, without other ranks; see `run`.

        Args:
            looks: who looks at whom.
            place: the client's place in the step.
            step: number of the server step.
            uploads: the client's uploads.
        """
        look = _Look(self.config, self.hooks, self.watch, looks, step, {place: uploads})
        look.here()
        look.count_computation({*look.failed})
        return look.failed[place][1] if place in look.failed else look.found[place]


class _Look:
    """One second look.

    Clients are given by their places in the step, which are the numbers of their reports.

    Attributes:
        found: what the clients of this rank find.
        failed: client that looks -> (peer, the failure), of the first peer; -1 if its question failed.
    """

    def __init__(
        self,
        config: StepConfig,
        hooks: ClientHooks,
        watch: Stopwatch,
        looks: LookPlan,
        step: int,
        uploads: Uploads,
    ) -> None:
        self.config, self.hooks, self.watch, self.looks = config, hooks, watch, looks
        self.step, self.uploads = step, uploads
        self.found: dict[int, Found] = {}
        self.failed: dict[int, tuple[int, Dropped]] = {}
        self._clients: dict[int, Client] = {}
        self._computed: dict[int, Computation] = {}  # client that looks -> what this rank computed for it
        names = hooks_of(config.algorithm, SecondLook)
        self._question, self._answered = names.question, names.answered
        self._at_server = names.at_server

    # -- the hooks, each on the rank that has the client -----------------------------------------------------

    def _client(self, i: int) -> Client:
        if i not in self._clients:
            who = int(self.looks.clients[i]), int(self.looks.visits[i])
            self._clients[i] = self.config.clients.client(*who, self.step)
        return self._clients[i]

    def _key(self, i: int) -> Key:
        """Return the key with which a client asks, and with which it is answered."""
        if self._at_server:
            return self.config.seed.of("probe")
        return self.config.seed.of("probe", int(self.looks.clients[i]), self.step)

    def _place(self, i: int) -> VisitPlace:
        looks, rank = self.looks, self.config.transport.rank
        return VisitPlace(rank, self.step, int(looks.clients[i]), int(looks.visits[i]))

    def _attempt(self, i: int, work: Callable[[], T]) -> T:
        """Return the result of a hook for the client `i` that looks.

        Raises:
            _LeftOut: it failed twice, and clients that fail are left out.
        """
        c, counter = self.config, self.config.clients.computation
        with self.watch("cluster"), counter.apart() as counted:
            made = counted_attempt(work, self._place(i), c.drops, c.kept, counter)
        self._computed.setdefault(i, Computation()).add_all(counted)
        if isinstance(made, Dropped):
            raise _LeftOut(made)
        return made

    def _rounded(self, sent: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it arrives."""
        return self.config.payload.rounded(to_main_memory(sent))

    def _ask(self, i: int) -> Question:
        """Return the question of a client, its payload as it arrives."""
        me, own, place = self._client(i), self.uploads[i], self._place(i)

        def work() -> Question:
            question = self.hooks.ask(me, place.visit, own, self._key(i))
            return replace(question, payload=self._rounded(question.payload))

        question = self._attempt(i, work)
        notes, known = (question.notes, {}) if not self._at_server else ({}, question.notes)
        self.found[i] = Found(notes, {"peer": self.looks.clients, **known})
        return question

    def _show(self, i: int, j: int, shown: torch.Tensor | None) -> torch.Tensor | None:
        """Return what client `i` sends for the comparison with `j`, as it arrives; None for nothing."""
        if shown is None:
            return None
        peer, place, key = int(self.looks.clients[j]), self._place(i), self._key(i)
        return self._attempt(
            i, lambda: self._rounded(self.hooks.show(shown, place.client, place.visit, peer, key))
        )

    def _answer(self, i: int, j: int, payload: torch.Tensor) -> torch.Tensor:
        """Return the answer of client `j` to `i`, as it arrives."""
        peer, visit, key = self._client(j), self._place(j).visit, self._key(i)
        return self._attempt(i, lambda: self._rounded(self.hooks.answer(peer, visit, payload, key)))

    def _compare(
        self, i: int, shown: torch.Tensor | None, answered: torch.Tensor, notes: Mapping[str, Any]
    ) -> Mapping[str, float]:
        """Return what the comparison of two clients has found."""
        place = self._place(i)
        work = partial(self.hooks.compare, place.client, place.visit, shown, answered, notes)
        return self._attempt(i, work)

    def _count(self, i: int, j: int, question: Shape, shown: Shape | None, answered: Shape) -> None:
        """Count what a pair has exchanged through the server."""
        if self._at_server:
            return
        found, me, them = self.found[i], *(int(self.looks.clients[k]) for k in (i, j))
        if shown is not None:
            found.count(self._answered, "up", me, shown)
        found.count(self._question, "up", me, question)
        found.count(self._question, "down", them, question)
        found.count(self._answered, "up", them, answered)

    def count_computation(self, failed: Collection[int]) -> None:
        """Count what this rank has computed for the clients that look, without those that `failed`."""
        for i, computed in self._computed.items():
            if i not in failed:
                self.config.clients.computation.add_all(computed)

    def _fail(self, i: int, j: int, dropped: Dropped) -> None:
        """Leave a client out; of several failures, that of the first peer is told."""
        self.found.pop(i, None)
        self.failed[i] = min(self.failed.get(i, (j, dropped)), (j, dropped), key=lambda failure: failure[0])

    # -- everything on the rank of the client that looks -----------------------------------------------------

    def here(self) -> None:
        """Let the clients of this rank look at all their peers."""
        for i in self.uploads:
            j = -1
            try:
                question = self._ask(i)
                for j in self.looks.peers(i).tolist():
                    shown = self._show(i, j, question.shown)
                    answered = self._answer(i, j, question.payload)
                    self._count(i, j, question.payload.shape, _shape(shown), answered.shape)
                    self.found[i].add(j, self._compare(i, shown, answered, question.notes))
            except _LeftOut as left:
                self._fail(i, j, left.dropped)

    # -- over the ranks --------------------------------------------------------------------------------------

    def over_ranks(self, transport: Transport, at_server: bool) -> None:
        """Let all clients look at their peers; every rank calls.

        Args:
            transport: connects the ranks.
            at_server: whether rank 0 compares; otherwise each rank does for its own clients.
        """
        looks, owners, rank = self.looks, self.looks.owners, transport.rank
        asking = np.concatenate(self.told(transport, np.array([*self.uploads], np.int64)))
        pairs = looks.matrix()
        for wave in asking_waves(owners, np.sort(asking), self.config.problem.layout.size):
            questions = dict[int, Question]()
            for i in wave[owners[wave] == rank].tolist():
                try:
                    questions[i] = self._ask(i)
                except _LeftOut as left:
                    self._fail(i, -1, left.dropped)
            sizes = {
                i: (q.payload.shape, _shape(q.shown), q.notes if at_server else {})
                for i, q in questions.items()
            }
            told = {i: size for part in self.told(transport, sizes) for i, size in part.items()}
            wave = wave[[i in told for i in wave.tolist()]]
            if not len(wave):
                continue
            payloads = self._questions(transport, wave, pairs, questions, {i: t[0] for i, t in told.items()})
            shown = max(0 if size is None else size.numel() for _, size, _ in told.values())
            for some, those in pair_blocks(wave, owners, shown, at_server, len(transport.workers)):
                block = [(i, j) for i in some.tolist() for j in those[pairs[i][those]].tolist()]
                self._block(transport, block, questions, payloads, told, at_server)

    def told(self, transport: Transport, value: T) -> list[T]:
        """Return the values of all ranks."""
        with self.watch("wait"):
            told: list[T] = transport.allgather(value, "exchange")
        return told

    def _questions(
        self,
        transport: Transport,
        wave: np.ndarray,
        pairs: np.ndarray,
        questions: Mapping[int, Question],
        shapes: Mapping[int, Shape],
    ) -> Mapping[int, torch.Tensor]:
        """Return the questions of a wave that this rank answers, by the client that asks.

        A message has at most `BLOCK` numbers for each rank.
        """
        owners, rank, size = self.looks.owners, transport.rank, transport.size
        needed = needed_copies(wave.tolist(), pairs, owners, size)
        sizes = np.array([shapes[i].numel() for i in wave.tolist()])
        collective = choose_question(owners[wave], needed)
        own = next((i for i in wave.tolist() if owners[i] == rank), None)
        mine = torch.zeros(0) if own is None else questions[own].payload.reshape(-1).contiguous()
        out = {} if own is None else {own: questions[own].payload}
        if not needed.any():
            return out
        wanted = np.flatnonzero(needed[rank]).tolist()
        flat = {n: torch.empty(int(sizes[n])) for n in wanted}
        with self.watch("reduce"):
            for low in range(0, int(sizes.max()), most := max(1, BLOCK // len(wave))):
                part = mine[low : low + most]
                here = np.clip(sizes - low, 0, most)
                given = np.zeros((size, size), np.int64)  # [source, destination]
                for n, source in enumerate(owners[wave].tolist()):
                    given[source] = here[n] * needed[:, n]
                if collective == ALLTOALL:
                    got = transport.Alltoallv(
                        part, given[rank].tolist(), given[:, rank].tolist(), self._question, [0] * size
                    )
                    places = wanted
                elif transport.is_worker:
                    counts = np.bincount(owners[wave], here, size).astype(np.int64)
                    got = transport.Allgatherv(part, counts.tolist(), self._question)
                    places = [*range(len(wave))]
                else:
                    continue
                order = sorted(places, key=lambda n: int(owners[wave[n]]))
                for n, piece in zip(order, got.split([int(here[n]) for n in order]), strict=True):
                    if n in flat:
                        flat[n][low : low + most] = piece
        return out | {int(wave[n]): x.reshape(shapes[int(wave[n])]) for n, x in flat.items()}

    def _block(
        self,
        transport: Transport,
        block: Sequence[Pair],
        questions: Mapping[int, Question],
        payloads: Mapping[int, torch.Tensor],
        told: Mapping[int, tuple[Shape, Shape | None, Mapping[str, Any]]],
        at_server: bool,
    ) -> None:
        """Answer, send and compare some pairs."""
        owners, rank = self.looks.owners, transport.rank
        made = dict[tuple[Pair, int], torch.Tensor]()  # what this rank has of a pair: shown 0, answered 1
        faults = list[Fault]()
        for i, j in block:
            try:
                if owners[i] == rank and (shown := self._show(i, j, questions[i].shown)) is not None:
                    made[(i, j), SHOWN] = shown
                if owners[j] == rank:
                    made[(i, j), ANSWERED] = self._answer(i, j, payloads[i])
            except _LeftOut as left:
                faults.append((i, j, left.dropped))
        shapes = dict[tuple[Pair, int], Shape]()
        for part, failures in self.told(transport, ({at: x.shape for at, x in made.items()}, faults)):
            shapes |= part
            for fault in failures:
                self._fail(*fault)
        made = self._compared_here(transport, made, shapes, at_server)
        compared, faults = dict[Pair, Mapping[str, float]](), []
        for i, j in block:
            whole = ((i, j), ANSWERED) in made and (told[i][1] is None or ((i, j), SHOWN) in made)
            fails = i in self.failed and self.failed[i][0] <= j
            if whole and not fails and rank == (SERVER if at_server else owners[i]):
                try:
                    shown = made.get(((i, j), SHOWN))
                    notes = told[i][2] if at_server else questions[i].notes
                    compared[i, j] = self._compare(i, shown, made[(i, j), ANSWERED], notes)
                except _LeftOut as left:
                    faults.append((i, j, left.dropped))
        if at_server:
            compared, faults = transport.bcast((compared, faults), "exchange")
        for fault in faults:
            self._fail(*fault)
        for (i, j), values in compared.items():
            if owners[i] == rank and i not in self.failed:
                self._count(i, j, told[i][0], shapes.get(((i, j), SHOWN)), shapes[(i, j), ANSWERED])
                self.found[i].add(j, values)

    def _compared_here(
        self,
        transport: Transport,
        made: dict[tuple[Pair, int], torch.Tensor],
        shapes: Mapping[tuple[Pair, int], Shape],
        at_server: bool,
    ) -> dict[tuple[Pair, int], torch.Tensor]:
        """Return the tensors of the pairs that this rank compares.

        Args:
            transport: connects the ranks.
            made: what this rank has shown and answered.
            shapes: shapes of what all ranks have.
            at_server: whether rank 0 compares.
        """
        owners, rank, size = self.looks.owners, transport.rank, transport.size
        sent, received = ([list[tuple[Pair, int]]() for _ in range(size)] for _ in range(2))
        kept = {at: x for at, x in made.items() if not at_server or rank == SERVER}
        moves = False
        for at in sorted(shapes):
            (i, j), which = at
            source, goal = int(owners[j if which else i]), SERVER if at_server else int(owners[i])
            moves |= source != goal
            if source != goal and rank == source:
                sent[goal].append(at)
            if source != goal and rank == goal:
                received[source].append(at)
        if not moves:
            return kept
        parts = [made[at].reshape(-1) for some in sent for at in some]
        given, taken = ([sum(shapes[at].numel() for at in some) for some in way] for way in (sent, received))
        with self.watch("reduce"):
            got = transport.Alltoallv(torch.cat([torch.zeros(0), *parts]), given, taken, self._answered)
        arrived = [at for some in received for at in some]
        pieces = got.split([shapes[at].numel() for at in arrived])
        return kept | {at: x.reshape(shapes[at]) for at, x in zip(arrived, pieces, strict=True)}


def _shape(sent: torch.Tensor | None) -> Shape | None:
    return None if sent is None else sent.shape
