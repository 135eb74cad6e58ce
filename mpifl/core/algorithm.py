"""The one abstraction behind every method: what a client computes, how the server's rows are mixed.

A method never sends. Its hooks are pure functions: the client's hooks run where the client's data are, the
server's hooks run on rank 0, and `comm/` moves the data that they name. Hyperparameters are the fields of
a frozen dataclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch

from mpifl.core.options import AtMostClients, Options, types_of, without_bounds

from .capabilities import (
    Capability,
    NewClients,
    PlainVisit,
    PlainVisits,
    PlannedRun,
    RememberedUploads,
    ServerEvaluation,
    declared,
    hooks_of,
    uses,
)
from .client import Client
from .computation import Asked, Held
from .errors import MethodError, Missing, require
from .federation import Split
from .parameters import Layout, VectorParts
from .plan import Plan
from .rng import Key
from .trainer import GIFTS, Gift
from .types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

RowChoice = Literal["own", "all", "none"]


@dataclass(frozen=True)
class Needs:
    """Requirements of a method on the data, local training and the policy; declared, never probed.

    Attributes:
        groups: it reads the true groups (Oracle).
        validation: every client must hold validation data.
        alone: clients train alone: they download no rows and upload no vectors. Attacks on uploads,
            compression and 16-bit payloads, which would change nothing, are refused.
        client_state: clients keep something between visits.
        sgd: local training must be SGD, with `any` momentum or `plain`, without; empty: any optimiser.
        new_optimizer: every training must begin with a new optimiser, because a visit trains on single
            batches, visits differ, or its equations contain the momentum; `local.keep_optimizer` is refused.
        own_gradients: its steps use gradients that it computes itself (`Client.gradient`), which are float32;
            `local.precision: bfloat16` is refused.
        ignores: keys of `local` that have no effect on its visits -> the keys of the method that are used
            instead, empty for none. A run that sets such a key prints a warning.
        round_number: it depends on rounds: the work of a client depends on the number of the round, or
            clients are regrouped between rounds. Other policies than `rounds` are refused.
        server_update: the hook `server_update` changes rows.
        min_cohort: least number of uploads in a step. From 2 on, a step compares uploads or distributes rows
            among them; policies and cohorts with fewer are refused.
        single_upload: a step takes one upload; policies that do not step at every arrival are refused.
        every_upload: a client continues from its own visit as if the server had accepted the upload;
            `policy.max_staleness` is refused.
        fresh_uploads: uploads must respond to what the server sent in the same step; policies with stale
            uploads are refused.
        weighs_staleness: it weights single and stale uploads by its own rule; no policy damps its steps.
        averages: its mixings are averages of uploads (models or updates), over all clients or over groups, so
            that a robust rule can replace them (`robust`).
        new_rows: with `averages`: rows are reassigned at each step, so that the row that an upload enters is
            not the one from which its client started.
        row_per_client: if a table has one row per client, which only that client reads, no hook on rank 0
            reads its numbers. With three ranks or more such rows are stored on the ranks of their clients.
        classes: it reads the classes of samples, or learns from sets of the server that have classes; tasks
            with other labels are refused.
        inputs: the kinds of samples that it can read directly (`DataInfo.inputs`); empty if it uses samples
            only through the model.
        exact_uploads: the server follows what clients keep from their uploads, which must arrive as they were
            made; payloads that round or compress and attacks on uploads are refused.
        sample_losses: it weighs the losses of single samples; tasks whose loss is not their mean are refused.
        different_starts: it distinguishes its models by their outputs from the first round on, so that the
            initial models must not all compute the same function.
        several_models: a client is evaluated with several models together, or with one that no hook returns;
            `output.client_models` is refused.
        time_stamps: the server's version is sent with every download, and returned with the upload: one
            number each way, in the ledger as `time_stamp`.
    """

    groups: bool = False
    validation: bool = False
    alone: bool = False
    client_state: bool = False
    sgd: Literal["", "any", "plain"] = ""
    new_optimizer: bool = False
    own_gradients: bool = False
    ignores: Mapping[str, str] = field(default_factory=dict)
    round_number: bool = False
    server_update: bool = False
    min_cohort: int = 1
    single_upload: bool = False
    every_upload: bool = False
    fresh_uploads: bool = False
    weighs_staleness: bool = False
    time_stamps: bool = False
    averages: bool = False
    new_rows: bool = False
    row_per_client: bool = False
    classes: bool = False
    inputs: tuple[str, ...] = ()
    exact_uploads: bool = False
    sample_losses: bool = False
    different_starts: bool = False
    several_models: bool = False


@dataclass(frozen=True)
class Downloads:
    """Which rows a client downloads; methods whose choice differs override the hooks of the same names.

    Each is `own` (the row of `model` that the client is assigned to), `all` (all rows of all tables) or
    `none`.

    Attributes:
        reads: the rows it trains.
        serves: the rows it is evaluated with; None: the same. `none`: its own model, `state["model"]`.
        serves_unseen: the rows it is evaluated with before its first visit; None: the same.
    """

    reads: RowChoice = "own"
    serves: RowChoice | None = None
    serves_unseen: RowChoice | None = None


def chosen_rows(choice: RowChoice, server: Server, k: int) -> Reads:
    """Return the rows of a choice for client `k`."""
    if choice == "all":
        return {name: tuple(range(len(rows))) for name, rows in server.tables.items()}
    return {"model": (int(server.assign[k]),)} if choice == "own" else {}


class Algorithm(Options, ABC):
    """A federated method. Subclasses are frozen dataclasses, either abstract or final.

    The hooks follow the order of a round: `setup` makes the first server, `reads` says what a client
    downloads, `local_update` trains, `aggregate` decides how uploads are mixed into rows, `server_update`
    takes a further step from the mixed rows, `model_of` says which model a client is evaluated with. The
    other hooks have defaults that most methods keep; further phases are capabilities
    (`core/capabilities.py`).

    Attributes:
        policies: names of the policies that its paper has; empty if it does not depend on them. Under another
            one a line says so.
        downloads: the rows that clients download.
        trains_once: whether its own `local_update` trains once, on all training data, and asks the client for
            no other loss, gradient or embedding; see `visit_passes`.
        statistics: names of uploads that are named like a table but are not parameters of a model. They are
            neither attacked nor compressed, and are still averaged under distance-based robust rules.
        setup_from: the fields that decide, with one-shot statistics, what `setup` returns, for methods that
            train there; cases of a sweep that differ in other fields share it (`core/beginning.py`). None: it
            is not shared.
        acts_with: option -> sections of a configuration (`newcomers`, `recluster`, `drift`), of which a run
            has one if the option has an effect. A run without them prints a line.
        trained_from: the fields that decide, with the download, what `local_update` returns, for methods
            whose first training is followed by something costly; None: it is not shared.
    """

    policies: ClassVar[tuple[str, ...]] = ()
    downloads: ClassVar[Downloads] = Downloads()
    trains_once: ClassVar[bool] = False
    statistics: ClassVar[tuple[str, ...]] = ()
    setup_from: ClassVar[tuple[str, ...] | None] = None
    acts_with: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    trained_from: ClassVar[tuple[str, ...] | None] = None

    @cached_property
    def needs(self) -> Needs:
        """Its requirements on the engine. Default: none.

        Override it by a class attribute, `needs = Needs(...)`, or a `cached_property` if fields change it.
        """
        return Needs()

    @property
    def asks(self) -> tuple[Gift, ...]:
        """What it asks of a trainer (`local.trainer`) beside a trained model. Default: nothing.

        `asked_of_trainer` adds what follows from `needs` and `plain_visit`. Override it by a class attribute,
        `asks = ("direction",)`, or a `property` if fields change it.
        """
        return ()

    @property
    def holds(self) -> Mapping[str, str]:
        """Return which part of the model (`Layout.part`) an upload or table holds, by its name.

        Running statistics are found by it in vectors that hold no whole model. Default: none is named.
        """
        return {}

    @property
    def evaluates_rows(self) -> bool:
        """Return whether `model_of` only puts served rows together, so that a run can say which a client has.

        It takes one row of each table, for the part of the model that `holds` names (otherwise the whole
        model): the only one or the last, or, before the first visit of a client, one that it chooses.
        Default: False. Methods whose `model_of` is the default need not say it.
        """
        return False

    @property
    def changes(self) -> Mapping[str, str]:
        """Return upload -> table, for uploads that are changes of the row of the table that a client trained.

        With such an upload the server also gets the running statistics after the training, and averages
        those: the changes of older rows may add up to a negative variance. Default: none.

        Override it by a class attribute, `changes = {"delta": "model"}`, or a `property` if fields change it.
        """
        return {}

    @property
    def traffic_depends_on(self) -> str:
        """What determines its traffic but is known only from a run. Default: nothing, an empty text.

        Override it by a class attribute, `traffic_depends_on = "..."`, or a `property` if fields change it.
        """
        return ""

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """The capabilities in use. Default: those that the class inherits from.

        A method whose `max_age` is 0 remembers no uploads.
        """
        found = declared(type(self))
        forgets = RememberedUploads in found and cast(RememberedUploads, self).max_age == 0
        return found - {RememberedUploads} if forgets else found

    # -- a round

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Return the first server; runs once, on rank 0. Default: one model, used by all."""
        return problem.server()

    def reads(self, server: Server, k: int) -> Reads:
        """Return the rows client `k` downloads to train. Default: those of `downloads`."""
        return chosen_rows(self.downloads.reads, server, k)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train at the client: take its download and its state, return a report and its next state.

        Default: make the visit that `plain_visit` describes; without one, train the one model that was
        downloaded. Keep no state.
        """
        visit = hooks_of(self, PlainVisits).plain_visit() if uses(self, PlainVisits) else None
        return (visit or PlainVisit()).made(message["model"], client, key), {}

    def unsent_vectors(self, report: Report, arrived: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return the unsent vectors of a report as the server computes them from the vectors that arrive.

        Called if uploads are rounded, compressed or changed by attackers. Default: such a run is refused.

        Args:
            report: the client's report, with its unsent vectors.
            arrived: name -> vector as it arrives, for each vector that is sent.
        """
        names = ", ".join(name for name in report.unsent if name in report.vectors)
        remedy = "use payload float32 without compression, and no attack; or define unsent_vectors"
        raise Missing(f"{names}, which is not sent, cannot be worked out of what arrives", remedy)

    @abstractmethod
    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Decide, on rank 0 and from notes only, how the rows are mixed."""

    def server_update(self, old: Server, new: Server) -> Server:
        """Return the server after a step of its own on the mixed rows (momentum, Adam). Default: `new`.

        Rows may change only under `Needs(server_update=True)`.
        """
        return new

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the vector [d] with which a client is evaluated.

        Default: its first row of `model`; if clients are served no rows, the model in their state, or the
        initial one before the first visit.
        """
        if self.downloads.serves == "none":
            return state.get("model", client.init)
        return message["model"][0]

    def with_groups(self, server: Server, step: int, groups: np.ndarray) -> Server:
        """Return the server that knows that `groups` [N] are the true groups from server step `step` on.

        Called before that step for methods that read them (`Needs.groups`), if times of drift are given in
        seconds (`drift.at_s`), whose steps no `ProblemInfo.regrouped` can tell. Default: `server`; the method
        keeps the first groups.
        """
        return server

    # -- before a run

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked] | None:
        """Return what a visit asks a client for, without evaluation; None if only the run shows it.

        `costs: all` charges visits for it, and `mpifl plan` foretells it. Default: one training for visits
        that only train; None for others. Methods whose visits do more declare here what they do.

        Args:
            held: the samples of the client.
            problem: the same as in `setup`.
        """
        plain = plain_visit(self)
        own = type(self).local_update is not Algorithm.local_update
        once = (self.trains_once or not own) if plain is None else not plain.choice
        return [Asked("sgd", held.train)] if once else None

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` when this method cannot run on this problem.

        Default: when an option of type `NumModels` is larger than the number of clients.
        """
        for name, hint in types_of(type(self)).items():
            if AtMostClients() in without_bounds(hint)[1]:
                remedy = f"there are only {problem.num_clients} clients; use fewer"
                require(vars(self)[name] <= problem.num_clients, name, vars(self)[name], remedy)

    def ignored_options(self) -> Mapping[str, str]:
        """Return the options of this method that have no effect beside its others -> why. Default: none.

        A run prints a line for each of them that is not at its default.
        """
        return {}

    def auxiliary(self) -> Mapping[str, Any] | None:
        """Return name and options of the auxiliary network (`Client.auxiliary`). Default: none."""
        return None

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Return the bytes (down, up), by unicast, that a run sends beyond the traffic of equal rounds.

        The forecast multiplies the reads and reports of round 1 by the number of rounds, and adds what
        `SecondLook.look_sizes` and `planned_looks` say. A method whose rounds differ returns the difference
        here; it is negative if the run sends less. Default: zero.
        """
        return 0, 0

    # -- evaluation

    def serves(self, server: Server, k: int) -> Reads:
        """Return the rows that client `k` is evaluated with. Default: those of `downloads`."""
        choice = self.downloads.serves
        return self.reads(server, k) if choice is None else chosen_rows(choice, server, k)

    def serves_unseen(self, server: Server, k: int) -> Reads:
        """Return the rows that client `k` is evaluated with before its first visit.

        Default: those of `downloads`. A method whose clients choose their row at a visit serves all rows
        here; `model_of` then chooses.
        """
        choice = self.downloads.serves_unseen
        return self.serves(server, k) if choice is None else chosen_rows(choice, server, k)

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Return the scores of a client on `split`. Default: accuracy and loss of `model_of`."""
        return client.evaluate(self.model_of(message, state, client), split)

    def labels(self, server: Server) -> np.ndarray:
        """Return the estimated cluster [N] of each client. Default: its row."""
        return server.assign

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return which clients have a known cluster, bool [N]; the others are still where they began.

        Default: those in `visited` and, where new clients are assigned, in `algorithm_state["known"]`.
        """
        if not uses(self, NewClients):
            return visited
        return np.asarray(visited | server.algorithm_state["known"].astype(bool))

    def mixtures(self, server: Server) -> np.ndarray | None:
        """Return the estimated share [N, K] of each group in each client's data (none by default)."""
        return None


def asked_of_trainer(algorithm: Algorithm) -> tuple[Gift, ...]:
    """Return what a method asks of a trainer beside a trained model, in the order of `GIFTS`."""
    needs, asked = algorithm.needs, {*algorithm.asks}
    asked |= {"rate"} if needs.sgd else set()
    asked |= {"sgd"} if needs.sgd == "plain" else set()
    asked |= {"gradient"} if needs.own_gradients else set()
    asked |= {"outputs"} if needs.sample_losses or uses(algorithm, ServerEvaluation) else set()
    visit = plain_visit(algorithm)
    if visit is not None:
        asked |= {"direction"} if visit.mu is not None else set()
        asked |= {"outputs"} if visit.choice is not None else set()
    return tuple(gift for gift in GIFTS if gift in asked)


def vector_parts(algorithm: Algorithm, layout: Layout) -> VectorParts:
    """Return what the vectors of a method hold."""
    return VectorParts(layout, algorithm.holds, algorithm.statistics)


def plain_visit(algorithm: Algorithm) -> PlainVisit | None:
    """Return the description of visits if it is one of the `local_update` in use; else None.

    Raises:
        MethodError: the hook `plain_visit` returns neither a `PlainVisit` nor None.
    """
    if not uses(algorithm, PlainVisits):
        return None
    methods = type(algorithm).__mro__
    updates, says = (next(c for c in methods if name in vars(c)) for name in ("local_update", "plain_visit"))
    update = getattr(algorithm.local_update, "__func__", None)  # also if it is set on this object
    of_one_class = updates in (says, Algorithm)
    if not of_one_class or update is not vars(updates)["local_update"]:
        return None
    made = hooks_of(algorithm, PlainVisits).plain_visit()
    if made is not None and not isinstance(made, PlainVisit):
        hook, remedy = f"{type(algorithm).__name__}.plain_visit", "return PlainVisit(...), or None"
        raise MethodError(hook, f"returned {type(made).__name__}", remedy)
    return made


def apply_plan(server: Server, plan: Plan, tables: Mapping[str, torch.Tensor]) -> Server:
    """Return the server after `plan`, given its new tables."""
    return Server(
        tables=tables,
        assign=server.assign if plan.assign is None else plan.assign,
        algorithm_state={**server.algorithm_state, **(plan.algorithm_state or {})},
        version=server.version + 1,
    )
