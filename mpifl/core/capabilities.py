"""Capabilities: what a method may do beyond a plain round, by phase.

A method declares a capability by inheriting from it, which brings the hooks of that phase:

    class MyMethod(OneShotStatistics, Algorithm): ...

| capability | phase | hooks |
|---|---|---|
| `OneShotStatistics` | before training | `shows`, `fingerprint`, `initial_plan` |
| `NewClients` | first visit of a client | `new_clients`, `assign_new_clients` |
| `RememberedUploads` | gathering | none |
| `ComparedUploads` | before `aggregate` | `compares`, `measures` |
| `SecondLook` | after training, in pairs | `probes`, `pairs`, `ask`, `show`, `answer`, `compare`, ... |
| `ServerEvaluation` | before `aggregate` | `inspect`, `appraise` |
| `RowUpdates` | at the client, and mixing | none |
| `PlainVisits` | at the client | `plain_visit` |

The engine asks `uses(algorithm, OneShotStatistics)`; it never checks whether a hook exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import torch

from .client import Client, proximal
from .computation import Asked, Held
from .errors import Missing
from .metric import least_finite
from .plan import Plan
from .rng import Key
from .types import Notes, ProblemInfo, Report, Server, Vector

# phases of the beginning of a run, which cases of a sweep may share (`core/beginning.py`)
SHOWN, STATISTICS, SETUP, TRAINING, LOOKS = "shown", "statistics", "setup", "training", "looks"
NO_SINGLE_MODEL = "clients of this method do not train one whole model that they download; leave it out"


class Capability:
    """A group of hooks for one phase."""


@dataclass(frozen=True)
class PlannedRun:
    """A run in rounds before it begins, for methods that forecast their traffic.

    It is the argument of `Algorithm.extra_bytes`, `SecondLook.look_sizes` and `SecondLook.planned_looks`.

    Attributes:
        problem: the same as in `setup`.
        num_rounds: T.
        num_sampled: m, clients in a round.
        cohort: round, from 1 -> its clients, int64 [m] ascending.
        sizes: samples for training, validation and test of each client, int64 [N, 3].
        message_bytes: (numbers, messages=1, note=False, named_rows=0) -> bytes of so many messages, which
            hold so many numbers and name so many of the rows that compressed uploads are relative to.
        row_bytes: (table, width, rows) -> bytes of downloaded rows, which may be compressed.
        client: a client that takes no steps when it trains.
    """

    problem: ProblemInfo
    num_rounds: int
    num_sampled: int
    cohort: Callable[[int], np.ndarray]
    sizes: np.ndarray
    message_bytes: Callable[..., int]
    row_bytes: Callable[[str, int, int], int]
    client: Client

    def cohorts(self) -> Iterator[np.ndarray]:
        """Yield the clients of each round."""
        return map(self.cohort, range(1, self.num_rounds + 1))


class OneShotStatistics(Capability, ABC):
    """Clients send statistics once, before training; the first server is set up from them. UCFL, FLT, PACFL.

    Attributes:
        statistics_gram: name of a vector of the fingerprint whose pairwise products `setup` reads as `gram`
            [n, n]; None for none.
        statistics_distance: name of a vector of the fingerprint whose distances to the rows of the table of
            that name `assign_new_clients` reads as `row_distance` [m, K]; None for none.
        fingerprints_vary: whether the size of the statistics depends on the client's data.
        shown_from: the fields of the method that decide what `shows` returns; None for all of them.
        statistics_from: the fields that decide, with what `shows` returned, what `fingerprint` returns; None
            for all of them. Cases of a sweep that differ in other fields share it (`core/beginning.py`).
    """

    fingerprints_vary: ClassVar[bool] = False
    shown_from: ClassVar[tuple[str, ...] | None] = None
    statistics_from: ClassVar[tuple[str, ...] | None] = None
    statistics_gram: ClassVar[str | None] = None
    statistics_distance: ClassVar[str | None] = None

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Return the rows [r, width] that all download for their statistics. Default: theta0, as `init`."""
        return {"init": problem.init(0)[None]}

    @abstractmethod
    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return the statistics of a client, which downloaded `shown`."""

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked] | None:
        """Return what the statistics ask a client for; see `Algorithm.visit_passes`. Default: None."""
        return None

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """Return the plan that mixes initial clients' vectors into the first rows. Default: an empty plan."""
        return Plan([])


INITIAL_CLIENTS = "founders"
"""Address of the draw of `initial_clients`; the word decides numbers."""


class NewClients(OneShotStatistics):
    """Clients without statistics send them when they first take part. PACFL, FedClust, FLT, FlexCFL."""

    def initial_clients(self, problem: ProblemInfo, present: np.ndarray, key: Key) -> np.ndarray:
        """Return which of the clients `present` send statistics before training. Default: all."""
        return present

    def new_clients(self, server: Server, cohort: np.ndarray) -> np.ndarray:
        """Return which clients of a cohort send statistics now.

        Default: those who are not in `algorithm_state["known"]`, bool [N].
        """
        if "known" not in server.algorithm_state:
            remedy = "return it from setup: bool [N], which clients have sent their statistics"
            raise Missing("no algorithm_state 'known'", remedy)
        return np.asarray(cohort[~server.algorithm_state["known"][cohort]])

    @abstractmethod
    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Assign new clients by their statistics."""


class RememberedUploads(Capability):
    """The last upload of a client that does not take part counts in later steps too. FLT, FeSEM, EMD-CFL.

    Each step gets the reports of both, `Notes.fresh` and `Notes.staleness` tell them apart. Methods that only
    compare the uploads of a step (CFL) need it where a step has a single one (`policy: every_arrival`).

    Attributes:
        remembered: name of the upload that the server keeps; the other uploads of the visit are kept, too.
        max_age: server steps, from the rows that it was trained on, after which an upload that is remembered
            no longer counts; None: it always does; 0: none is remembered.
        mixes_remembered: whether remembered uploads enter rows, which are then means over many clients in
            every step, so that no policy damps it; otherwise they are only compared.
    """

    remembered: ClassVar[str] = "model"
    max_age: int | None = None

    @property
    def mixes_remembered(self) -> bool:
        """True, unless a method says otherwise."""
        return True


class ComparedUploads(Capability):
    """`aggregate` reads how far uploads are from each other, or from the rows. CFL, FedAMP, FeSEM, CCFL.

    Attributes:
        gram: name of an upload whose pairwise products are read as `gram` [m, m]; None for none.
        row_distance: name of an upload whose distances to all rows of the table of that name are read as
            `row_distance` [m, K]; None for none.
    """

    gram: ClassVar[str | None] = None
    row_distance: ClassVar[str | None] = None

    def compares(self, server: Server) -> bool:
        """Return whether `aggregate` reads `gram` after this step. Default: always."""
        return True

    def measures(self, server: Server) -> bool:
        """Return whether `aggregate` reads `row_distance` after this step. Default: always."""
        return True


@dataclass(frozen=True)
class Question:
    """What a client asks its peers in a second look.

    Attributes:
        payload: float32 tensor that is sent to each peer, which computes on it; any shape.
        shown: float32 tensor of the client's own that the comparison needs; None for none.
        notes: small numbers that the client sends to the server, once.
    """

    payload: torch.Tensor
    shown: torch.Tensor | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LookSizes:
    """How many numbers clients send in a second look, before it begins.

    Attributes:
        question: numbers of a question.
        shown: numbers that each client shows for one comparison, int64 [N]; 0 for none.
        answered: numbers that each client answers, int64 [N].
        notes: numbers in the notes of a question.
        stored: numbers in the samples that each client stores at the server, int64 [N]; None if
            `SecondLook.at_server` is False.
    """

    question: int
    shown: np.ndarray
    answered: np.ndarray
    notes: int = 0
    stored: np.ndarray | None = None


@dataclass(frozen=True)
class PlannedLook:
    """The second look of a round before it begins.

    Attributes:
        clients: the clients of the step, int64 [m].
        fresh: whether they train in it, bool [m]; the others take part with remembered uploads.
        pairs: which client (row) looks at which (column), bool [m, m].
    """

    clients: np.ndarray
    fresh: np.ndarray
    pairs: np.ndarray


class SecondLook(Capability, ABC):
    """After local training, clients look at each other in pairs through what they uploaded. EMD-CFL.

    Each client that looks sends a question to its peers, through the server; a peer sends its answer to the
    server, which compares it with what the client shows. Each hook sees the data of one client alone and is
    called on the rank that hosts this client, so it depends on nothing but its arguments.

    `aggregate` reads what is found as notes [m, m], NaN where a client (row) did not look at another, and as
    note `peer` [m, m] which clients the columns are.

    Attributes:
        question: name of the payload in the ledger.
        answered: name of the shown tensors and of the answers in the ledger.
        looked_from: the fields of the method that decide, with the uploads, what a look finds; None for all
            of them. Cases of a sweep that differ in other fields share it (`core/beginning.py`).
        forgets: whether clients may look again; then `forget` is defined.
    """

    question: ClassVar[str] = "model"
    answered: ClassVar[str] = "embedding"
    looked_from: ClassVar[tuple[str, ...] | None] = None
    forgets: ClassVar[bool] = False

    @property
    def at_server(self) -> bool:
        """Whether clients store samples at the server, which then computes everything itself. Default: no.

        Each client sends what `store` returns when it first takes part, and nothing for a pair. The hooks see
        the data of the client's first visit, and one key that belongs to all clients and steps.
        """
        return False

    def store(self, client: Client, key: Key) -> torch.Tensor:
        """Return the samples that a client stores at the server (`at_server`); any shape."""
        raise Missing("store is not defined", "return the samples that clients store at the server")

    def probes(self, server: Server, step: int) -> bool:
        """Return whether clients look at each other in this step. Default: always."""
        return True

    def pairs(self, server: Server, clients: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Return which client (row) looks at which (column), bool [m, m]. Default: all at all.

        A client without a pair is not asked for its question. No client looks at itself.

        Args:
            server: the server before the step.
            clients: numbers of the clients in the step, int64 [m].
            fresh: whether they trained in it, bool [m]; the others take part with remembered uploads.
        """
        return np.ones((len(clients), len(clients)), bool)

    def forget(self, server: Server, clients: np.ndarray) -> Server:
        """Return the server without what looks have found about some clients, which look again.

        Called before a step for clients that take part in it and whose looks are due (section `recluster`).
        """
        raise Missing("forget is not defined", "leave out recluster, or define which findings are dropped")

    @abstractmethod
    def ask(self, client: Client, own: Mapping[str, Vector], key: Key) -> Question:
        """Return the question of a client that looks.

        Args:
            client: the client.
            own: its uploads.
            key: belongs to the client and the step.
        """

    def show(self, shown: torch.Tensor, asker: int, peer: int, key: Key) -> torch.Tensor:
        """Return what a client sends for the comparison with one peer. Default: the same for all.

        Args:
            shown: the tensor of its question.
            asker: number of the client.
            peer: number of the peer.
            key: the key of `ask`.
        """
        return shown

    @abstractmethod
    def answer(self, client: Client, payload: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the float32 tensor that a peer computes from a question.

        Args:
            client: the peer.
            payload: payload of the question, as it arrives.
            key: the key with which the other client asked, so that both draw the same numbers.
        """

    @abstractmethod
    def compare(
        self, shown: torch.Tensor | None, answered: torch.Tensor, notes: Mapping[str, Any]
    ) -> Mapping[str, float]:
        """Return numbers that the server finds when it compares two clients.

        Args:
            shown: what the client that looks has sent, as it arrives; None if it sends nothing.
            answered: the peer's answer, as it arrives.
            notes: notes of the question.
        """

    def look_sizes(self, run: PlannedRun) -> LookSizes | None:
        """Return the sizes of what clients send, for the forecast. Default: they are not known before."""
        return None

    def look_passes(self, held: Held) -> tuple[Sequence[Asked], Sequence[Asked]] | None:
        """Return what a question and an answer ask a client for; see `Algorithm.visit_passes`.

        Default: None.
        """
        return None

    def planned_looks(self, run: PlannedRun) -> Iterator[PlannedLook]:
        """Yield the second looks of a run. Default: in each round, all clients look at all."""
        for cohort in run.cohorts():
            everyone = np.ones((len(cohort), len(cohort)), bool)
            yield PlannedLook(cohort, np.ones(len(cohort), bool), everyone)


class ServerEvaluation(Capability):
    """The server evaluates uploads and rows on labelled data of its own. CCFL, FedSoft-Async."""

    def inspect(self, vectors: Mapping[str, Vector], public: Sequence[Client]) -> Mapping[str, Any]:
        """Return what the server finds when it evaluates an upload on its own data. Default: nothing."""
        return {}

    def appraise(self, old: Server | None, new: Server, public: Sequence[Client]) -> Server:
        """Return `new`, completed by what the server finds out about its own rows. Default: `new`."""
        return new


class RowUpdates(Capability):
    """The server needs only sums: FedAvg, FedProx, IFCA. Privacy and secure aggregation require this.

    Each upload updates one row that the client downloaded, in the table of the same name. It enters the mean
    of that row and of no other, and the notes tell the server no more than which row it was.

    Attributes:
        trained: name of the note with the position of the trained row among the downloaded rows; None if one
            row of each table is downloaded.
    """

    trained: ClassVar[str | None] = None


@dataclass(frozen=True)
class PlainVisit:
    """A visit that trains one downloaded model once and reports the result; the client keeps no state.

    For models without buffers, where the change of the state dict is the change of the parameters.

    Attributes:
        upload: name of the upload: the trained model w.
        change: upload w - x, how far w moved from the downloaded model x.
        mu: weight of a proximal term mu/2 ||w - x||^2 of the loss; None for none.
        choice: name of the note that says which of the downloaded models was trained: the one with the lowest
            mean loss on the training data, the first of equals. None: the first one is trained.
        unsent: names under which the same vector is reported again, for comparisons on the server; they cause
            no traffic.
    """

    upload: str = "model"
    change: bool = False
    mu: float | None = None
    choice: str | None = None
    unsent: tuple[str, ...] = ()

    def made(self, models: torch.Tensor, client: Client, key: Key) -> Report:
        """Return the report of this visit at a client that downloaded `models` [K, d]."""
        k = 0 if self.choice is None else int(least_finite([client.loss(w) for w in models]))
        x, notes = models[k], {} if self.choice is None else {self.choice: k}
        w = client.sgd(x, key, direction=None if self.mu is None else proximal(self.mu, x))
        upload = w.vector - x if self.change else w.vector
        vectors: dict[str, Any] = dict.fromkeys((self.upload, *self.unsent), upload)
        return client.report(notes, {"train_loss": w.loss}, self.unsent, **vectors)


class PlainVisits(Capability):
    """A visit trains one downloaded model once and keeps nothing: FedAvg, UCFL, FedProx, IFCA.

    The engine may then make many visits in one call, without a client object for each. `plain_visit`
    describes a visit, and `Algorithm.local_update` makes it. A class with a `local_update` of its own defines
    `plain_visit` too; if a subclass overrides only `local_update`, its visits are made one by one.
    """

    def plain_visit(self) -> PlainVisit | None:
        """Return a description of a visit; None if `local_update` does more. Default: train and upload."""
        return PlainVisit()


CAPABILITIES: tuple[type[Capability], ...] = (
    OneShotStatistics,
    NewClients,
    RememberedUploads,
    ComparedUploads,
    SecondLook,
    ServerEvaluation,
    RowUpdates,
    PlainVisits,
)


class HasCapabilities(Protocol):
    """Anything that declares its capabilities, such as an algorithm."""

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """The capabilities in use."""
        ...


C = TypeVar("C", bound=Capability)


@cache
def declared(cls: type) -> frozenset[type[Capability]]:
    """Return the capabilities a class inherits from."""
    return frozenset(c for c in cls.__mro__ if c in CAPABILITIES)


def uses(algorithm: HasCapabilities, capability: type[Capability]) -> bool:
    """Return whether an algorithm uses a capability."""
    return capability in algorithm.capabilities


def hooks_of(algorithm: HasCapabilities, capability: type[C]) -> C:
    """Return an algorithm that uses a capability, typed by the hooks of the capability."""
    assert capability in algorithm.capabilities, f"{capability.__name__} is not used"
    return cast(C, algorithm)


def mixes_remembered(algorithm: HasCapabilities) -> bool:
    """Return whether remembered uploads enter the rows of a method (`RememberedUploads`)."""
    return uses(algorithm, RememberedUploads) and hooks_of(algorithm, RememberedUploads).mixes_remembered


def upload_named(algorithm: HasCapabilities, capability: type[Capability], role: str) -> str | None:
    """Return the upload name in an attribute of a capability; None if the capability is not used.

    Args:
        algorithm: the method.
        capability: for example `ComparedUploads`.
        role: the attribute, for example `gram`.
    """
    return getattr(algorithm, role) if capability in algorithm.capabilities else None
