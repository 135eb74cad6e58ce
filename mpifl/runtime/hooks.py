"""Calls of a method's hooks by the engine; results are checked before they are used.

`ServerHooks` calls the hooks that run on rank 0, `ClientHooks` those that run at a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from mpifl.core.algorithm import Algorithm, vector_parts
from mpifl.core.capabilities import (
    CAPABILITIES,
    INITIAL_CLIENTS,
    ComparedUploads,
    NewClients,
    OneShotStatistics,
    Question,
    RememberedUploads,
    SecondLook,
    ServerEvaluation,
    declared,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.client import Client
from mpifl.core.devices import CPU
from mpifl.core.errors import MethodError, NotFinite
from mpifl.core.federation import Split
from mpifl.core.parameters import VectorParts, width
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import Key
from mpifl.core.task import SUMS
from mpifl.core.types import CohortReads, Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

from .hook_errors import ClientCall, HookCall, Kept, ServerCall, hook_name
from .protocol import ClientTask, GatheredReports

LARGEST = float(np.finfo(np.float32).max)
ONE_VECTOR = ("row_distance", "statistics_distance")  # attributes that name uploads compared with rows
Shapes = Mapping[str, tuple[int, int]]  # name -> (rows, width)


def check_capabilities(algorithm: Algorithm) -> None:
    """Refuse a method with hooks that would never be called.

    Raises:
        MethodError: a hook belongs to a capability that the class does not inherit from.
    """
    cls: type = type(algorithm)
    for capability in CAPABILITIES:
        for hook in vars(capability):
            if capability not in declared(cls) and not hook.startswith("_") and hasattr(cls, hook):
                remedy = f"inherit from {capability.__name__}, or leave it out"
                raise MethodError(hook_name(algorithm, hook), "would never be called", remedy)


class ServerHooks:
    """The hooks that run on rank 0. An exception in their own code ends the run as `CodeFailed`.

    Args:
        algorithm: the method.
        problem: information that the method may use.
        seed: key of the training seed.
        kept: makes a context for each call of a hook.

    Raises:
        MethodError: from the constructor, if a hook would never be called; from every method of this class,
            if a hook returns something invalid.
    """

    def __init__(
        self, algorithm: Algorithm, problem: ProblemInfo, seed: Key, kept: Kept = nullcontext
    ) -> None:
        check_capabilities(algorithm)
        self.algorithm, self.problem, self.seed, self.kept = algorithm, problem, seed, kept
        self.parts = vector_parts(algorithm, problem.layout)
        default = type(algorithm).reads is Algorithm.reads
        self._reads_own_row = default and algorithm.downloads.reads == "own"

    def _call(self, hook: str, **place: int) -> ServerCall:
        return ServerCall(self.algorithm, hook, self.kept, **place)

    def _check_server(self, call: HookCall, server: Any, known: Server | None = None) -> None:
        """Raise `MethodError` for an invalid server; tables that are also in `known` were checked before."""
        if not isinstance(server, Server):
            raise call.error(f"returned {_kind(server)}", "return Server(tables, assign, algorithm_state)")
        _check_tables(call, server.tables, self.parts, None if known is None else known.tables)
        if known is not None and set(known.tables) - set(server.tables):
            gone = ", ".join(set(known.tables) - set(server.tables))
            raise call.error(f"table {gone!r} is gone", "return all tables: {**server.tables, ...}")
        own_row = self._reads_own_row and "model" in server.tables
        num_rows = len(server.tables["model"]) if own_row else None
        _check_assign(call, server.assign, self.problem.num_clients, num_rows)
        _check_algorithm_state(call, server.algorithm_state, {} if known is None else known.algorithm_state)

    @property
    def shows_key(self) -> Key:
        """The address of the random draws of `shows`."""
        return self.seed.of("shows")

    def shows(self) -> Mapping[str, torch.Tensor]:
        """Return the rows that all clients download for their one-shot statistics: name -> [r, width]."""
        with self._call("shows") as call:
            shown = hooks_of(self.algorithm, OneShotStatistics).shows(self.problem, self.shows_key)
            _check_tables(call, shown, self.parts)
        return shown

    def initial_clients(self, present: np.ndarray) -> np.ndarray:
        """Return which of the clients `present` send one-shot statistics before training."""
        with self._call("initial_clients") as call:
            address = self.seed.of(INITIAL_CLIENTS)
            chosen = hooks_of(self.algorithm, NewClients).initial_clients(self.problem, present, address)
            _check_clients(call, chosen, present)
        return chosen

    def new_clients(self, server: Server, cohort: np.ndarray) -> np.ndarray:
        """Return which clients of a cohort send one-shot statistics before they first train."""
        with self._call("new_clients", step=server.version + 1) as call:
            chosen = hooks_of(self.algorithm, NewClients).new_clients(server, cohort)
            _check_clients(call, chosen, cohort)
        return chosen

    @property
    def setup_key(self) -> Key:
        """The address of the random draws of `setup`."""
        return self.seed.of("setup")

    def setup(self, fingerprints: Notes | None) -> Server:
        """Return the first server."""
        with self._call("setup") as call:
            server = self.algorithm.setup(self.problem, fingerprints, self.setup_key)
            self._check_server(call, server)
        return server

    def labels(self, server: Server) -> np.ndarray:
        """Return the estimated cluster of each client [N]."""
        with self._call("labels", step=server.version) as call:
            found = self.algorithm.labels(server)
            self._check_of_all(call, found, "iu", "an integer")
        return found

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return which clients have a known cluster, bool [N]; `visited` says which have made a visit."""
        with self._call("placed", step=server.version) as call:
            found = self.algorithm.placed(server, visited)
            self._check_of_all(call, found, "b", "a bool")
        return found

    def _check_of_all(self, call: HookCall, found: Any, kinds: str, what: str) -> None:
        """Raise `MethodError` unless `found` is an array [N] of one of these kinds of numbers."""
        n = self.problem.num_clients
        if not isinstance(found, np.ndarray) or found.dtype.kind not in kinds or found.shape != (n,):
            raise call.error(f"returned {_kind(found)}", f"return {what} for each of the {n} clients, [{n}]")

    def appraise(self, old: Server | None, new: Server) -> Server:
        """Return `new` with what the server finds out about its own rows."""
        if not uses(self.algorithm, ServerEvaluation):
            return new
        with self._call("appraise") as call:
            done = hooks_of(self.algorithm, ServerEvaluation).appraise(old, new, self.problem.public)
            self._check_server(call, done, new)
        return done

    def reads(self, hook: str, server: Server, clients: np.ndarray) -> CohortReads:
        """Return which rows clients download.

        Args:
            hook: `reads`, `serves` or `serves_unseen`.
            server: server whose rows they download.
            clients: numbers of the clients.
        """
        tables: Shapes = {name: (len(rows), rows.shape[1]) for name, rows in server.tables.items()}
        with self._call(hook) as call:
            ask = getattr(self.algorithm, hook)
            out = CohortReads.of((k, ask(server, k)) for k in clients.tolist())
            distinct = [
                _checked_reads(call, k, reads, tables)
                for k, reads in zip(out.first, out.distinct, strict=True)
            ]
        return CohortReads(out.clients, distinct, out.which)

    def probes(self, server: Server, step: int) -> bool:
        """Return whether clients look at each other in a step."""
        if not uses(self.algorithm, SecondLook):
            return False
        with self._call("probes"):
            return hooks_of(self.algorithm, SecondLook).probes(server, step)

    def pairs(self, server: Server, clients: np.ndarray, fresh: np.ndarray) -> np.ndarray | None:
        """Return which client looks at which, bool [m, m]; None if all look at all."""
        m = len(clients)
        with self._call("pairs", step=server.version + 1) as call:
            pairs = hooks_of(self.algorithm, SecondLook).pairs(server, clients, fresh)
            if not isinstance(pairs, np.ndarray) or pairs.dtype != bool or pairs.shape != (m, m):
                raise call.error(f"returned {_kind(pairs)}", f"return an array bool [{m}, {m}]")
        return None if (pairs | np.eye(m, dtype=bool)).all() and pairs.any(1).all() else pairs

    def forget(self, server: Server, clients: np.ndarray) -> Server:
        """Return the server without what looks have found about some clients."""
        with self._call("forget", step=server.version + 1) as call:
            found = hooks_of(self.algorithm, SecondLook).forget(server, clients)
            self._check_server(call, found, server)
        return found

    def with_groups(self, server: Server, step: int, groups: np.ndarray) -> Server:
        """Return the server that knows the true groups [N] from a step on."""
        with self._call("with_groups", step=step) as call:
            found = self.algorithm.with_groups(server, step, groups)
            self._check_server(call, found, server)
        return found

    def compares(self, server: Server) -> bool:
        """Return whether `aggregate` reads inner products of uploads after this step."""
        with self._call("compares"):
            return hooks_of(self.algorithm, ComparedUploads).compares(server)

    def measured_table(self, server: Server) -> tuple[str, int] | None:
        """Return the table to which upload distances are measured in this step, and its number of rows."""
        name = upload_named(self.algorithm, ComparedUploads, "row_distance")
        if name is None:
            return None
        with self._call("measures"):
            wanted = hooks_of(self.algorithm, ComparedUploads).measures(server)
        return self.compared_table(server, name) if wanted else None

    def compared_table(self, server: Server, name: str | None) -> tuple[str, int] | None:
        """Return the table with an upload's name, to which distances are measured, and its number of rows."""
        if name is None:
            return None
        if name not in server.tables:
            remedy = f"name an upload and the table of its name; the server has {', '.join(server.tables)}"
            raise self._call("row_distance").error(f"there is no table {name!r}", remedy)
        return name, len(server.tables[name])

    def plan(self, hook: str, server: Server, reports: GatheredReports, sharded: Sequence[str] = ()) -> Plan:
        """Return how rows are mixed.

        Args:
            hook: `aggregate`, `initial_plan` or `assign_new_clients`.
            server: the server before the step.
            reports: reports that the method decides from.
            sharded: tables whose rows are stored at their readers.
        """
        uploads = {name: (m.size, reports.widths[name]) for name, m in reports.max_abs.items()}
        max_abs = {name: m.reshape(-1) for name, m in reports.max_abs.items()}
        with self._call(hook, step=server.version + 1) as call:
            plan: Plan = getattr(self.algorithm, hook)(server, reports.notes)
            _check_plan(call, plan, server, uploads, max_abs, sharded, self._reads_own_row)
        return plan

    def server_update(self, old: Server, mixed: Server) -> Server:
        """Return the server after `server_update`; rows may change only if the method declares it."""
        with self._call("server_update", step=mixed.version) as call:
            changes = {name: rows._version for name, rows in mixed.tables.items()}  # in-place changes so far
            new = self.algorithm.server_update(old, mixed)
            others = [name for name, rows in mixed.tables.items() if rows._version != changes[name]]
            if new is not mixed:
                self._check_server(call, new, mixed)
                others += [name for name, rows in new.tables.items() if rows is not mixed.tables.get(name)]
            if others and not self.algorithm.needs.server_update:
                remedy = "declare needs = Needs(server_update=True)"
                raise call.error(f"changed table {others[0]!r}", remedy)
        return new if new is mixed else replace(new, version=mixed.version)


class ClientHooks:
    """The hooks that run at a client. An exception in their own code is raised as `HookFailed`.

    Args:
        algorithm: the method.
        device: device of the client's model.

    Raises:
        MethodError: from every method of this class, if a hook returns something invalid.
    """

    def __init__(self, algorithm: Algorithm, device: torch.device) -> None:
        self.algorithm, self.device = algorithm, device
        always = getattr(type(algorithm), "compares", None) is ComparedUploads.compares
        gram = upload_named(algorithm, ComparedUploads, "gram")
        self._uploads = {
            "gram": gram if always else None,  # else needed only in steps that the method chooses
            "remembered": upload_named(algorithm, RememberedUploads, "remembered"),
            "row_distance": upload_named(algorithm, ComparedUploads, "row_distance"),
        }
        self._statistics = {
            role: upload_named(algorithm, OneShotStatistics, role)
            for role in ("statistics_gram", "statistics_distance")
        }

    def _call(self, hook: str, task: ClientTask) -> ClientCall:
        return self._at(hook, task.client, task.visit)

    def _at(self, hook: str, client: int, visit: int) -> ClientCall:
        return ClientCall(self.algorithm, hook, client=client, visit=visit)

    def checked_report(
        self,
        hook: str,
        task: ClientTask,
        report: Report,
        max_abs: Mapping[str, Sequence[float]],
        parts: VectorParts,
    ) -> Report:
        """Return a report after checking that notes and metrics are numbers and uploads are finite.

        Args:
            hook: hook that made the report.
            task: the visit.
            report: the report as it arrives at the server.
            max_abs: upload -> largest absolute value of each component.
            parts: what the vectors hold, to name a tensor that is not finite.
        """
        call = self._call(hook, task)
        report = _checked_numbers(call, report, task.client)
        _check_finite(call, report, max_abs, parts)
        return report

    def local_update(
        self, task: ClientTask, message: Message, state: State, client: Client, key: Key
    ) -> tuple[Report, State]:
        """Return the client's report, its uploads contiguous, and its next state."""
        with self._call("local_update", task) as call:
            made = self.algorithm.local_update(message, state, client, key)
            needs = self.algorithm.needs
            report, after = _checked_visit(call, made, self._uploads, needs.client_state, self.device)
            _check_alone(call, needs.alone, message, report)
        return report, after

    def unsent_vectors(
        self, hook: str, task: ClientTask, report: Report, arrived: Mapping[str, Vector]
    ) -> Mapping[str, Vector]:
        """Return the unsent vectors of a report as the server reconstructs them from the vectors that arrive.

        Args:
            hook: hook that made the report.
            task: the visit.
            report: the report as the client made it.
            arrived: name -> vector as it arrives, of the vectors that are sent.
        """
        with self._call(hook, task) as call:
            found = self.algorithm.unsent_vectors(report, arrived)
            for name, x in found.items():
                if name not in report.unsent or x.shape != report.vectors[name].shape:
                    remedy = "return vectors of the report's unsent names and shapes"
                    raise call.error(f"unsent_vectors returned {name!r} {tuple(x.shape)}", remedy)
        return found

    def fingerprint(self, task: ClientTask, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return the client's one-shot statistics."""
        with self._call("fingerprint", task) as call:
            made = hooks_of(self.algorithm, OneShotStatistics).fingerprint(client, shown, key)
            return _checked_report(call, made, self._statistics, self.device)

    def ask(self, client: Client, visit: int, own: Mapping[str, Vector], key: Key) -> Question:
        """Return the question of a client for its peers."""
        with self._at("ask", client.id, visit) as call:
            question = hooks_of(self.algorithm, SecondLook).ask(client, own, key)
            if not isinstance(question, Question):
                raise call.error(
                    f"returned {_kind(question)}", "return Question(payload, shown, notes={...})"
                )
            payload, shown = _check_sent(call, question.payload), question.shown
            shown = None if shown is None else _check_sent(call, shown)
            notes = {name: _checked_note(call, name, value) for name, value in question.notes.items()}
        return Question(payload, shown, notes)

    def store(self, client: Client, key: Key) -> torch.Tensor:
        """Return the samples that a client stores at the server."""
        with self._at("store", client.id, 0) as call:
            return _check_sent(call, hooks_of(self.algorithm, SecondLook).store(client, key))

    def show(self, shown: torch.Tensor, asker: int, visit: int, peer: int, key: Key) -> torch.Tensor:
        """Return what a client sends for the comparison with one peer."""
        with self._at("show", asker, visit) as call:
            sent = hooks_of(self.algorithm, SecondLook).show(shown, asker, peer, key)
            return _check_sent(call, sent)

    def answer(self, client: Client, visit: int, payload: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the answer of a client to the question of another."""
        with self._at("answer", client.id, visit) as call:
            return _check_sent(call, hooks_of(self.algorithm, SecondLook).answer(client, payload, key))

    def compare(
        self,
        asker: int,
        visit: int,
        shown: torch.Tensor | None,
        answered: torch.Tensor,
        notes: Mapping[str, Any],
    ) -> Mapping[str, float]:
        """Return the numbers that the server finds when it compares a client with a peer."""
        with self._at("compare", asker, visit) as call:
            found = hooks_of(self.algorithm, SecondLook).compare(shown, answered, notes)
            if not isinstance(found, Mapping):
                raise call.error(f"returned {_kind(found)}", "return a mapping from names to numbers")
            for name, value in found.items():
                if np.ndim(_checked_note(call, name, value)):
                    raise call.error(f"{name!r} is {_kind(value)}", "return one number of each name")
        return {name: float(value) for name, value in found.items()}

    def inspect(
        self, task: ClientTask, vectors: Mapping[str, Vector], public: Sequence[Client]
    ) -> Mapping[str, Any]:
        """Return what the server finds when it evaluates an upload on its own data."""
        with self._call("inspect", task) as call:
            found = hooks_of(self.algorithm, ServerEvaluation).inspect(vectors, public)
            return {name: _checked_note(call, name, value) for name, value in found.items()}

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> Mapping[str, float]:
        """Return a client's scores on a set: the task's metric, `loss`, and others that the method adds."""
        with ClientCall(self.algorithm, "evaluate", client=client.id) as call:
            scores = self.algorithm.evaluate(message, state, client, split)
            _check_scores(call, scores, client.task.metric.name)
        return scores

    def model_of(self, message: Message, state: State, client: Client, size: int) -> Vector:
        """Return the model [size] with which a client is evaluated."""
        with ClientCall(self.algorithm, "model_of", client=client.id) as call:
            w = self.algorithm.model_of(message, state, client)
            _check_vector(call, w, size)
        return w


# -- what is returned at a client ----------------------------------------------------------------------------


def _checked_visit(
    call: HookCall, made: Any, asked: Mapping[str, str | None], keeps_state: bool, device: torch.device
) -> tuple[Report, State]:
    """Return the checked result of `local_update`, with contiguous uploads.

    Args:
        call: the call of the hook.
        made: the result.
        asked: attribute of a capability -> the upload that it names.
        keeps_state: whether the method declares that clients keep a state.
        device: device of the client's model; uploads must be there or in main memory.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        what = f"returned {_kind(made)}"
        raise call.error(what, "return (client.report(...), state), state {} where nothing is kept")
    report, state = made
    report = _checked_report(call, report, asked, device)
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        what = "the state it returned is not a mapping from names to tensors"
        raise call.error(what, "return (report, {'name': tensor, ...}), or {} to keep nothing")
    if state and not keeps_state:
        what = f"returned state ({', '.join(map(str, state))}), which would be thrown away"
        raise call.error(what, "declare needs = Needs(client_state=True), or return {}")
    return report, state


def _check_alone(call: HookCall, alone: bool, message: Message, report: Report) -> None:
    """Raise `MethodError` if clients are declared to train `alone`, and a visit downloads or uploads."""
    found = {"downloads": message.vectors, "uploads": report.vectors}
    for what, vectors in found.items():
        if alone and vectors:
            remedy = "needs = Needs(alone=True) declares that there are none: leave that out"
            raise call.error(f"{what} {', '.join(vectors)}", remedy)


def _checked_report(
    call: HookCall, report: Any, asked: Mapping[str, str | None], device: torch.device
) -> Report:
    """Return a checked report with contiguous uploads, float32 [d] or [C, d]; values are checked later.

    Args:
        call: the call of the hook.
        report: the result of the hook.
        asked: attribute of a capability -> the upload that it names.
        device: device of the client's model.
    """
    if not isinstance(report, Report):
        raise call.error(f"returned {_kind(report)} for a report", "return client.report(...)")
    vectors = {}
    for name, x in report.vectors.items():
        wrong = _problem(x, device)
        if wrong:
            raise call.error(f"upload {name!r} {wrong[0]}", wrong[1])
        vectors[name] = x.detach().contiguous()
    for need, upload in asked.items():
        if upload is not None and upload not in vectors:
            what = f"no upload {upload!r}, which {need} = {upload!r} names"
            raise call.error(what, f"uploads are {', '.join(vectors) or 'none'}: name one of them")
        if upload is not None and need in ONE_VECTOR and vectors[upload].numel() != vectors[upload].shape[-1]:
            what = f"upload {upload!r}, which {need} names, has shape {tuple(vectors[upload].shape)}"
            raise call.error(what, "a distance to each row is that of one vector [d]: name such an upload")
    return replace(report, vectors=vectors)


def _problem(x: Any, device: torch.device) -> tuple[str, str] | None:
    """Return what is wrong with an upload, and the remedy."""
    if not isinstance(x, torch.Tensor):
        return f"is {_kind(x)}", "upload a tensor; small things travel as notes"
    if x.dtype != torch.float32:
        return f"is {str(x.dtype).removeprefix('torch.')}", "upload float32: .float()"
    if x.layout != torch.strided or x.ndim not in (1, 2) or x.numel() == 0:
        return (
            f"has shape {tuple(x.shape)}, {x.layout}",
            "upload a vector [d], or several of one width [C, d]",
        )
    if x.device not in (CPU, device):
        return f"is on {x.device}", f"upload what lies on {device} or in main memory"
    return None


def _check_finite(
    call: HookCall, report: Report, max_abs: Mapping[str, Sequence[float]], parts: VectorParts
) -> None:
    """Raise `NotFinite` if the largest absolute value of an upload is not finite."""
    for name, values in max_abs.items():
        if not all(map(math.isfinite, values)):
            rate = call.algorithm.needs.ignores.get("lr") or "local.lr"
            remedy = f"train with a smaller {rate}, or leave such clients out: on_client_error drop"
            tensor = parts.first_not_finite(name, report.vectors[name])
            raise call.error(f"upload {name!r} is not finite{tensor}", remedy, NotFinite)


def _checked_numbers(call: HookCall, report: Report, client: int) -> Report:
    """Return a report after checking that notes are arrays of numbers and metrics are numbers."""
    if report.client != client:
        what = f"the report is of client {report.client!r}"
        raise call.error(what, "return client.report(...)")
    notes = {name: _checked_note(call, name, value) for name, value in report.notes.items()}
    metrics = {}
    for name, value in report.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"metric {name!r} is {_kind(value)}"
            raise call.error(what, "metrics are single numbers: float(...)") from error
    return replace(report, notes=notes, metrics=metrics)


def _checked_note(call: HookCall, name: str, value: Any) -> Any:
    """Return a note unchanged; raise `MethodError` unless it is a number or an array of numbers."""
    try:
        kind = np.asarray(value).dtype.kind
    except (TypeError, ValueError, RuntimeError):
        kind = "O"
    if kind not in "biuf":
        what = f"note {name!r} is {_kind(value)}"
        raise call.error(what, "notes are numbers or arrays of numbers, of one shape for all clients")
    return value


def _check_sent(call: HookCall, sent: Any) -> torch.Tensor:
    """Return what a client sends in a second look; raise `MethodError` unless it is a float32 tensor."""
    if not isinstance(sent, torch.Tensor) or sent.dtype is not torch.float32:
        what = f"{sent.dtype} {list(sent.shape)}" if isinstance(sent, torch.Tensor) else _kind(sent)
        remedy = "clients exchange float32 tensors; small numbers travel as notes of the question"
        raise call.error(f"a client would send {what}", remedy)
    return sent.detach()


def _check_scores(call: HookCall, scores: Any, metric: str) -> None:
    """Raise `MethodError` for scores that lack the task's metric or the loss, or are not numbers."""
    numbers = isinstance(scores, Mapping) and all(
        isinstance(v, (int, float, np.number)) or name.startswith(SUMS) for name, v in scores.items()
    )
    if not numbers or not {metric, "loss"} <= set(scores):
        what = f"returned {sorted(scores) if numbers else _kind(scores)}"
        raise call.error(
            what, f"return a mapping with the numbers `{metric}` and `loss`: client.evaluate(w, split)"
        )


def _check_vector(call: HookCall, w: Any, size: int) -> None:
    """Raise `MethodError` unless `w` is a model, a vector [size]."""
    if not isinstance(w, torch.Tensor) or tuple(w.shape) != (size,):
        shape = tuple(w.shape) if isinstance(w, torch.Tensor) else _kind(w)
        raise call.error(f"returned {shape}", f"return a model: one vector [{size}]")


# -- what is returned on rank 0 ------------------------------------------------------------------------------


def _checked_reads(call: HookCall, k: int, reads: Any, tables: Shapes) -> Reads:
    """Return what client `k` reads, rows as Python integers; raise `MethodError` if they do not exist."""

    def wrong(what: str, remedy: str) -> NoReturn:
        raise call.error(f"client {k}: {what}", remedy)

    if not isinstance(reads, Mapping):
        wrong(f"returned {_kind(reads)}", "return a mapping from tables to rows: {'model': (0,)}")
    for name, which in reads.items():
        if name not in tables:
            wrong(f"no table {name!r}", f"the server has {', '.join(tables)}")
        num = tables[name][0]
        if isinstance(which, np.ndarray):
            if which.shape != (num,) or not np.isfinite(which).all() or not which.any():
                remedy = f"an array holds the finite weights of its {num} rows, not all 0; a tuple, rows"
                wrong(f"reads {which!r} of table {name!r}", remedy)
        elif not isinstance(which, Sequence) or not all(0 <= r < num for r in which) or not len(which):
            remedy = f"it has rows 0 to {num - 1}; give a tuple of them"
            wrong(f"reads rows {which!r} of table {name!r}", remedy)
    if all(isinstance(which, np.ndarray) or all(type(r) is int for r in which) for which in reads.values()):
        return reads
    return {
        name: which if isinstance(which, np.ndarray) else tuple(int(r) for r in which)
        for name, which in reads.items()
    }


def _check_clients(call: HookCall, chosen: Any, known: np.ndarray) -> None:
    """Raise `MethodError` unless `chosen` are distinct clients out of `known`."""
    good = isinstance(chosen, np.ndarray) and chosen.ndim == 1 and chosen.dtype.kind in "iu"
    if not good or len(np.unique(chosen)) != len(chosen) or not np.isin(chosen, known).all():
        what = f"returned {chosen.tolist() if good else _kind(chosen)}"
        raise call.error(what, f"return an integer array of clients out of {known.tolist()[:20]}")


def _check_tables(
    call: HookCall, tables: Any, parts: VectorParts, known: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise `MethodError` unless tables hold finite float32 rows [K, width]; skip those in `known`."""
    if not isinstance(tables, Mapping):
        raise call.error(f"returned {_kind(tables)} for tables", "tables map names to rows [K, width]")
    for name, rows in tables.items():
        if known is not None and rows is known.get(name):
            continue
        good = isinstance(rows, torch.Tensor) and rows.dtype == torch.float32 and rows.ndim == 2 and len(rows)
        if not good or rows.device != CPU:
            remedy = "a table is float32 [K, width] in main memory, K >= 1"
            raise call.error(f"table {name!r} is {_kind(rows)}", remedy)
        if not bool(torch.isfinite(rows[:1] if rows.stride(0) == 0 else rows).all()):
            tensor = parts.first_not_finite(name, rows)
            what = f"table {name!r} is not finite{tensor}"
            raise call.error(what, "something is divided by zero, or diverges")


def _check_assign(call: HookCall, assign: Any, num_clients: int, num_rows: int | None) -> None:
    """Raise `MethodError` unless `assign` holds an integer for each client, below `num_rows` if given."""
    good = isinstance(assign, np.ndarray) and assign.shape == (num_clients,) and assign.dtype.kind in "iu"
    if not good:
        what = f"{assign.dtype} {assign.shape}" if isinstance(assign, np.ndarray) else _kind(assign)
        raise call.error(f"assign is {what}", f"it holds an integer for each of the {num_clients} clients")
    least, most = int(assign.min()), int(assign.max())
    if least < 0 or (num_rows is not None and most >= num_rows):
        client = int(assign.argmin() if least < 0 else assign.argmax())
        what = f"assign gives client {client} row {int(assign[client])}"
        rows = f"{num_rows} rows" if num_rows is not None else "rows"
        raise call.error(what, f"table 'model' has {rows}, counted from 0")


def _check_algorithm_state(call: HookCall, state: Any, known: Mapping[str, Any]) -> None:
    """Raise `MethodError` unless `state` maps names to arrays of numbers or text; skip those in `known`."""
    remedy = "it is a mapping from names to arrays of numbers"
    if not isinstance(state, Mapping):
        raise call.error(f"algorithm_state is {_kind(state)}", remedy)
    for name, value in state.items():
        if name in known and value is known[name]:
            continue
        if not isinstance(name, str):
            raise call.error(f"algorithm_state has an entry named {name!r}", remedy)
        try:
            good = not isinstance(value, torch.Tensor) and np.asarray(value).dtype.kind in "biufcUS"
        except (TypeError, ValueError, RuntimeError):
            good = False
        if not good:
            what = f"algorithm_state {name!r} is {_kind(value)}"
            raise call.error(what, f"{remedy}: np.asarray(...), .numpy() of a tensor")


def _check_plan(
    call: HookCall,
    plan: Any,
    server: Server,
    uploads: Shapes,
    max_abs: Mapping[str, np.ndarray],
    sharded: Sequence[str],
    default_reads: bool,
) -> None:
    """Raise `MethodError` for a plan that cannot be carried out, or whose rows would not be finite.

    Args:
        call: the call of the hook.
        plan: the result of the hook.
        server: the server before the plan.
        uploads: name -> (number of components of all uploads, width).
        max_abs: name -> largest absolute value of each component [components].
        sharded: tables whose rows are stored at their readers.
        default_reads: whether every client reads its assigned row of `model`.
    """
    if not isinstance(plan, Plan) or isinstance(plan.mixings, Mixing):
        given = plan.mixings if isinstance(plan, Plan) else plan
        raise call.error(f"returned {_kind(given)}", "return Plan([mixing, ...])")
    tables = {name: (len(rows), rows.shape[1]) for name, rows in server.tables.items()}
    for number, mixing in enumerate(plan.mixings):
        if not isinstance(mixing, Mixing):
            raise call.error(f"mixing {number} is {_kind(mixing)}", "return Plan([mixing, ...])")
        wrong = _mixing_problem(mixing, tables, uploads, max_abs, mixing.into in sharded)
        if wrong:
            raise call.error(f"mixing {number} into {mixing.into!r}: {wrong[0]}", wrong[1])
        tables[mixing.into] = (mixing.num_rows, tables[mixing.into][1])
    if plan.algorithm_state is not None:
        _check_algorithm_state(call, plan.algorithm_state, server.algorithm_state)
    num_rows = tables["model"][0] if default_reads and "model" in tables else None
    fewer = num_rows is not None and num_rows < len(server.tables["model"])
    if plan.assign is not None or fewer:  # otherwise `assign` was checked before; N entries take time
        assign = server.assign if plan.assign is None else plan.assign
        _check_assign(call, assign, len(server.assign), num_rows)


def _mixing_problem(
    m: Mixing, tables: Shapes, uploads: Shapes, max_abs: Mapping[str, np.ndarray], sharded: bool
) -> tuple[str, str] | None:
    """Return what is wrong with a mixing, and the remedy."""
    if m.into not in tables:
        return "there is no such table", f"the server has {', '.join(tables)}"
    if m.of and m.of not in uploads:
        return f"there is no upload {m.of!r}", f"clients upload {', '.join(uploads) or 'nothing'}"
    num, wide = tables[m.into]
    count, upload = uploads[m.of] if m.of else (0, 0)
    if not isinstance(m.weights, np.ndarray) or m.weights.ndim != 2 or m.weights.dtype.kind not in "biuf":
        return f"weights are {_kind(m.weights)}", "weights are a float array [K, m]"
    if not np.isfinite(m.weights).all():
        return "weights are not finite", "something is divided by zero: was anybody chosen?"
    if not m.num_rows or m.weights.shape[1] != count:
        return f"weights have shape {m.weights.shape}", f"a column for each of the {count} uploads {m.of!r}"
    taken = upload if m.part is None else width(m.part)
    beyond = m.part is not None and any(not 0 <= s.start <= s.stop <= upload for s in m.part)
    if m.of and (taken != wide or beyond):
        return f"uploads {m.of!r} bring {taken} numbers", f"its rows hold {wide}: see `part`"
    if m.keep is not None:
        if not isinstance(m.keep, np.ndarray) or not np.isfinite(m.keep).all():
            return "keep is not a finite array", "something is divided by zero"
        if m.keep.shape not in ((m.num_rows, num), (m.num_rows,)) or (m.keep.ndim == 1 and m.num_rows != num):
            fits = f"[{m.num_rows}, {num}]" + (f" or [{num}]" if m.num_rows == num else "")
            return f"keep has shape {m.keep.shape}", f"{num} rows become {m.num_rows}: keep is {fits}"
    if sharded and (m.num_rows != num or (m.keep is not None and m.keep.ndim == 2)):
        return "rows that live with their readers become others", "set system.collective to gather"
    if m.of and (np.abs(m.weights) @ max_abs[m.of] > LARGEST).any():
        return "rows would overflow", "the weights are too large"
    return None


def _kind(value: Any) -> str:
    """Return a value's type in words."""
    if value is None:
        return "None"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
