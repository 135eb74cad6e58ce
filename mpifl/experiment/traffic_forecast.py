"""What the federation of a run will send, before anything is trained: one-shot statistics, then the rounds.

The hooks of the method are called with clients that take no step, and what they read and report is measured.
What differs from round to round, the method adds itself (`Algorithm.extra_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpifl.aggregation.tables import read_rows
from mpifl.core.algorithm import PlannedRun
from mpifl.core.capabilities import (
    NewClients,
    OneShotStatistics,
    ServerEvaluation,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.devices import message_on, tensors_on
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, Report, Server
from mpifl.traffic.encoding import download_bytes, time_stamp_bytes, upload_bytes
from mpifl.traffic.ledger import Ledger, count_numbers
from mpifl.training.client import LocalClient, public_clients

from .context import RunContext

Bytes = tuple[int, int]  # down, up

UNDER_WAY = "which visits are under way at the end: they have downloaded and not uploaded"
NEWCOMERS = "who is drawn when newcomers join"
DIFFERENT = "some clients sent other than planned: they dropped out, or notes differ in length"


@dataclass(frozen=True)
class TrafficForecast:
    """Bytes of a run, by unicast, each (down, up).

    Attributes:
        server: before the first round; rows chosen by data are those of a population of equals.
        report: of client 0 in round 1.
        fingerprints: one-shot statistics before training.
        per_round: of round 1.
        total: of the run; None where only training can tell.
        why: what the total depends on, where there is none.
    """

    server: Server
    report: Report
    fingerprints: Bytes
    per_round: Bytes
    total: Bytes | None
    why: str = ""


def without_training(context: RunContext) -> RunContext:
    """Return a context whose clients, those of the server's own sets too, train for no step."""
    learner = context.learner.without_training()
    sets = [client.data.train for client in context.problem.public]
    public = public_clients(context.federation, learner, context.config.local, sets)
    problem = replace(context.problem, public=public)
    return replace(context, parts=replace(context.parts, learner=learner, problem=problem))


def forecast(context: RunContext) -> TrafficForecast:
    """Return what a run will send; on rank 0.

    Args:
        context: of the run; its clients train for no step here.
    """
    context = without_training(context)
    config, algorithm = context.config, context.config.algorithm
    server, fingerprints = _first_server(context)
    message = _message(context, server)
    report, _ = algorithm.local_update(message, {}, _client(context), key(0))
    per_round = _round_bytes(context, server, upload_bytes(config.payload, report, message))
    why = algorithm.traffic_depends_on
    if not context.config.policy.fixed_visits:
        why = UNDER_WAY
    elif context.decisions.absent:
        why = NEWCOMERS
    total = None
    if not why:
        rounds = (config.rounds * per_round[0], config.rounds * per_round[1])
        extra = algorithm.extra_bytes(planned_run(context))
        total = _sum([fingerprints, rounds, _new_fingerprints(context), extra])
    return TrafficForecast(server, report, fingerprints, per_round, total, why)


def compared(context: RunContext, ledger: Ledger) -> dict[str, Any]:
    """Return the forecast of a finished run for its summary, and why the ledger differs; on rank 0.

    Args:
        context: of the run.
        ledger: what was sent.

    Returns:
        `down` and `up` in bytes, None where there is no forecast; `why` it is missing or wrong, or "".
    """
    down, up, why = None, None, UNDER_WAY
    if context.config.policy.fixed_visits:
        try:
            found = forecast(context)
        except Exception as error:  # a method's own; a finished run is not lost for want of a forecast
            why = f"no forecast: {type(error).__name__}: {error}"
        else:
            why = found.why
            if found.total is not None:
                down, up = found.total
                why = "" if found.total == (ledger.total("down"), ledger.total("up")) else DIFFERENT
    return {"down": down, "up": up, "why": why}


def planned_run(context: RunContext) -> PlannedRun:
    """Return what a method may know of a run when it forecasts its traffic."""
    return PlannedRun(
        problem=context.problem,
        num_rounds=context.config.rounds,
        num_sampled=context.decisions.num_sampled,
        cohort=context.sampler,
        sizes=context.federation.sizes,
        message_bytes=context.config.payload.size,
        client=_client(context),
    )


def _sum(parts: Iterable[Bytes]) -> Bytes:
    down, up = zip(*parts, strict=True)
    return sum(down), sum(up)


def _client(context: RunContext, k: int = 0) -> LocalClient:
    return LocalClient(k, context.federation, context.learner, context.config.local)


def _message(context: RunContext, server: Server) -> Message:
    """Return what client 0 downloads, where its model is trained."""
    reads = context.config.algorithm.reads(server, 0)
    vectors = {
        name: read_rows(lambda t, rows: server.tables[t][rows], name, which) for name, which in reads.items()
    }
    return message_on(Message(vectors, reads), context.learner.device)


def _round_bytes(context: RunContext, server: Server, upload: int) -> Bytes:
    """Return the bytes of a round in which each client uploads so many."""
    algorithm, payload, m = context.config.algorithm, context.config.payload, context.decisions.num_sampled
    m = 1 if algorithm.needs.single_upload else m
    widths = {name: table.shape[1] for name, table in server.tables.items()}
    down = sum(download_bytes(algorithm.reads(server, k), widths, payload) for k in range(m))
    stamps = m * time_stamp_bytes(payload, algorithm.needs.time_stamps)
    return down + stamps, m * upload + stamps


# -- one-shot statistics -------------------------------------------------------------------------------------


def _first_server(context: RunContext) -> tuple[Server, Bytes]:
    """Return the server before the first round, and the bytes that set it up.

    One-shot statistics are taken from client 0 alone and repeated for everyone.
    """
    algorithm, problem, n = context.config.algorithm, context.problem, context.problem.num_clients
    if not uses(algorithm, OneShotStatistics):
        server = algorithm.setup(problem, None, key(0))
        if uses(algorithm, ServerEvaluation):
            server = hooks_of(algorithm, ServerEvaluation).appraise(None, server, problem.public)
        return server, (0, 0)
    report = _fingerprint(context, 0)
    columns = {name: np.stack([np.asarray(v)] * n) for name, v in report.notes.items()}
    if upload_named(algorithm, OneShotStatistics, "statistics_gram"):
        columns["gram"] = np.ones((n, n)) + np.eye(n)
    fresh, staleness = np.ones(n, bool), np.zeros(n, np.int64)
    fingerprints = Notes(np.arange(n), problem.num_samples, staleness, fresh, columns)
    server = algorithm.setup(problem, fingerprints, key(0))
    return server, _fingerprint_bytes(context, _initial_clients(context))


def _initial_clients(context: RunContext) -> np.ndarray:
    """Return the clients that give one-shot statistics before training."""
    algorithm, everyone = context.config.algorithm, np.arange(context.problem.num_clients)
    if not (uses(algorithm, NewClients) and context.config.policy.synchronous):
        return everyone
    address = key(context.config.seed.training, "founders")
    return hooks_of(algorithm, NewClients).initial_clients(context.problem, everyone, address)


def _new_fingerprints(context: RunContext) -> Bytes:
    """Return the bytes of the statistics of those who give them when they first take part."""
    if not uses(context.config.algorithm, NewClients):
        return 0, 0
    cohorts = np.concatenate([*planned_run(context).cohorts()])
    return _fingerprint_bytes(context, np.setdiff1d(cohorts, _initial_clients(context)))


def _fingerprint_bytes(context: RunContext, clients: np.ndarray) -> Bytes:
    """Return the bytes of the one-shot statistics of clients."""
    algorithm, payload = hooks_of(context.config.algorithm, OneShotStatistics), context.config.payload
    shown = algorithm.shows(context.problem, key(0))
    down = sum(payload.size(count_numbers(rows), len(rows)) for rows in shown.values())
    if algorithm.fingerprints_vary:
        up = sum(upload_bytes(payload, _fingerprint(context, k), None) for k in clients.tolist())
    else:
        up = len(clients) * upload_bytes(payload, _fingerprint(context, 0), None)
    return len(clients) * down, up


def _fingerprint(context: RunContext, k: int) -> Report:
    """Return the one-shot statistics of a client."""
    algorithm = hooks_of(context.config.algorithm, OneShotStatistics)
    shown = tensors_on(algorithm.shows(context.problem, key(0)), context.learner.device)
    report = algorithm.fingerprint(_client(context, k), shown, key(0))
    assert report is not None
    return report
