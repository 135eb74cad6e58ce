"""Forecasts the traffic of a run's federation before training: one-shot statistics, then the rounds.

The hooks of the method are called with clients that take no step, and the sizes of what they read and report
are measured. For differences between rounds, the method adds its own forecast (`Algorithm.extra_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpifl.aggregation.exchange_choice import ExchangeBytes, OverMpi, exchange_bytes
from mpifl.aggregation.tables import read_rows
from mpifl.aggregation.update_filter import FilteredVisit, UpdateFilters
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import (
    INITIAL_CLIENTS,
    NO_SINGLE_MODEL,
    LookSizes,
    NewClients,
    OneShotStatistics,
    PlannedRun,
    RememberedUploads,
    SecondLook,
    ServerEvaluation,
    hooks_of,
    upload_named,
    uses,
)
from mpifl.core.devices import message_on, tensors_on
from mpifl.core.errors import INTERRUPTED, CodeFailed, UserError, require, within_memory
from mpifl.core.process import peak_bytes
from mpifl.core.rng import key
from mpifl.core.torch_state import kept
from mpifl.core.types import Message, Notes, Report, Server, State
from mpifl.experiment.build import trained_samples
from mpifl.experiment.context import RunContext
from mpifl.experiment.filters import build_filters
from mpifl.experiment.schema import Config
from mpifl.protection.secure_sum import MaskedSums
from mpifl.runtime.hook_errors import DROP, ClientCall, ServerCall, first_that_works
from mpifl.runtime.measures import NO_MODELS
from mpifl.runtime.scheduler import task_costs
from mpifl.traffic.compression import INDEX_BYTES, Payload
from mpifl.traffic.encoding import (
    download_bytes,
    hidden_bytes,
    statistics_size,
    time_stamp_bytes,
    upload_bytes,
)
from mpifl.traffic.ledger import Ledger, row_bytes
from mpifl.training.client import LocalClient, public_clients

from .hosting import scheduler_of

Bytes = tuple[int, int]  # down, up
FLOAT_BYTES = 4
STEPS_BYTES = 8  # step counter of an optimiser

CLUSTERS = "who is in which cluster"
DROP_OUTS = "who drops out, so that no masked upload comes"
RANKS = "who takes part with which rank (model.lora.ranks)"
COHORTS = "how many clients each Poisson sample holds"
NEWCOMERS = "who is drawn when newcomers join, or clients leave"
AGAIN = "who sends statistics again, and into how many clusters clients then fall"
DIFFERENT = "some clients sent other than planned: they dropped out, or notes differ in length"


@dataclass(frozen=True)
class TrafficForecast:
    """Bytes of a run by unicast, each as (down, up).

    Attributes:
        server: the server before the first round. Rows that are chosen by data are those for a population of
            equal clients.
        report: report of client 0 in round 1; if it fails and failing clients are left out, of the next
            client that works.
        fingerprints: bytes of the one-shot statistics before training.
        per_round: bytes of round 1; in asynchronous runs, of the uploads of a step and as many downloads.
        new_fingerprints: bytes of the one-shot statistics of clients that give them when they first take
            part.
        extra: bytes of the method in addition to equal rounds: looks at each other, rounds that differ;
            negative if it sends less.
        kept: bytes that a client keeps on its node after a visit.
        setup_memory: bytes by which the method's set-up raised the peak memory of this process.
        total: bytes of the run: fingerprints, rounds, new fingerprints and extra; None if they depend on the
            training.
        why: what the total depends on, if it is None.
    """

    server: Server
    report: Report
    fingerprints: Bytes
    per_round: Bytes
    total: Bytes | None
    why: str = ""
    new_fingerprints: Bytes = (0, 0)
    extra: Bytes = (0, 0)
    kept: int = 0
    setup_memory: int = 0


def without_training(context: RunContext) -> RunContext:
    """Return a context whose clients, including those of the server's own sets, train for no step."""
    learner = context.learner.without_training()
    sets = [client.data.train for client in context.problem.public]
    public = public_clients(context.federation, learner, context.config.local, sets)
    problem = replace(context.problem, public=public)
    return replace(context, learner=learner, problem=problem)


def forecast(context: RunContext) -> TrafficForecast:
    """Return the traffic forecast of a run; on rank 0.

    Args:
        context: context of the run; its clients train for no step here.

    Raises:
        ClientError: a client fails that is needed to measure an upload or one-shot statistics.
    """
    context = without_training(context)
    config, algorithm = context.config, context.config.algorithm
    before = peak_bytes()
    server, fingerprints = _first_server(context)
    grown = peak_bytes() - before

    def visit(k: int) -> tuple[Message, LocalClient, Report, State]:
        message, client = _message(context, server, k), _client(context, k)
        client.load_optimizer({})
        with ClientCall(algorithm, "local_update", client=k, visit=0):
            return message, client, *algorithm.local_update(message, {}, client, key(0))

    clients, drops = range(context.problem.num_clients), config.on_client_error == DROP
    message, client, report, state = first_that_works(visit, clients, 1, drops, kept)
    filters = build_filters(context)
    report = filters.client(report, FilteredVisit(message, 0, key(0)))  # adaptive clipping adds a note
    stored = _kept_bytes(context, report, state, len(client.optimizer_memory()))

    def upload(k: int) -> int:
        return upload_bytes(config.payload, filters, replace(report, client=k), message)

    per_round = _round_bytes(context, server, filters, upload)
    m, secure = context.decisions.num_sampled, config.secure_aggregation
    down, up = hidden_bytes(config.payload, filters, report, message, m)
    per_round = per_round[0] + m * down, per_round[1] + m * up
    why = algorithm.traffic_depends_on
    if context.config.policy.traffic_depends_on:
        why = context.config.policy.traffic_depends_on
    elif context.decisions.absent or context.decisions.leaves:
        why = NEWCOMERS
    elif context.config.recluster:
        why = AGAIN
    elif context.sampler.poisson:
        why = COHORTS
    elif filters.narrows and not config.policy.synchronous and m < context.problem.num_clients:
        why = RANKS
    elif isinstance(secure, MaskedSums):
        several = max(map(len, server.tables.values())) > 1
        why = ", and ".join([CLUSTERS] * several + [DROP_OUTS] * bool(secure.dropout)) or why
    if why:
        return TrafficForecast(
            server, report, fingerprints, per_round, None, why, kept=stored, setup_memory=grown
        )
    rounds, run = (config.rounds * per_round[0], config.rounds * per_round[1]), planned_run(context)
    if filters.narrows and config.policy.synchronous:
        rounds = _sum(_bytes_of(context, server, filters, upload, k.tolist()) for k in run.cohorts())
    extra, new = _sum([algorithm.extra_bytes(run), look_bytes(algorithm, run)]), _new_fingerprints(context)
    total = _sum([fingerprints, rounds, new, extra])
    return TrafficForecast(server, report, fingerprints, per_round, total, "", new, extra, stored, grown)


def compares_uploads(config: Config) -> bool:
    """Return whether uploads of a round are compared; they must then be whole models."""
    evaluation = config.evaluation
    return evaluation.distances or "parameters" in evaluation.matrices or config.output.updates


def check_uploads(context: RunContext) -> None:
    """Check, with the upload of client 0, that uploads can be compared if this is asked for; on rank 0.

    Raises:
        UserError: `output.updates` is set and clients do not train one whole model that they download; or
            distances or the matrix `parameters` are asked for and clients upload no whole model.
    """
    config, algorithm, d = context.config, context.config.algorithm, context.problem.layout.size
    compares = config.evaluation.distances or "parameters" in config.evaluation.matrices
    if not compares_uploads(config):
        return
    try:
        found = forecast(context)
    except UserError:
        raise
    except Exception as error:  # the method's code may fail without training; the first step checks again
        if isinstance(error, CodeFailed) and error.code == INTERRUPTED:
            raise
        return
    vectors = found.report.vectors
    widths = {name: vector.shape[-1] for name, vector in vectors.items()}
    sent = ", ".join(widths) or "nothing"
    one = "model" in vectors and vectors["model"].numel() == d
    remedy = f"clients upload {sent}, no whole model whose distances could be measured; leave it out"
    asked, method = "evaluation.distances, evaluation.matrices", f"with {type(algorithm).__name__}"
    require(not compares or (one and widths["model"] == d), asked, method, remedy)
    change = "model" in found.report.based_on and found.report.based_on["model"] is None
    require(not (compares and change), asked, method, NO_MODELS)
    reads = algorithm.reads(found.server, 0).get("model", ())
    table = found.server.tables.get("model")
    single = widths.get("model") == d and table is not None and table.shape[1] == d and len(reads) == 1
    require(single or not config.output.updates, "output.updates", True, NO_SINGLE_MODEL)


def _kept_bytes(context: RunContext, report: Report, state: State, trainings: int) -> int:
    """Return the bytes that a client keeps on its node from one visit to the next.

    Args:
        context: context of the run.
        report: report of client 0.
        state: state that the method keeps at client 0.
        trainings: number of trainings of a visit whose optimisers are kept.
    """
    config, layout = context.config, context.problem.layout
    vectors = sum(tensor.nbytes for tensor in state.values()) if config.algorithm.needs.client_state else 0
    uploads = {name: vector.nbytes for name, vector in report.vectors.items()}
    if uses(config.algorithm, RememberedUploads) and config.policy.synchronous:
        vectors += sum(uploads.values())
    if config.payload.error_feedback:
        left_out = (*report.unsent, *config.algorithm.statistics)
        vectors += sum(size for name, size in uploads.items() if name not in left_out)
    if config.local.keep_optimizer:
        moments = 2 if config.local.optimizer == "adam" else 1
        vectors += trainings * (moments * FLOAT_BYTES * layout.num_parameters + STEPS_BYTES)
    return vectors


def compared(context: RunContext, ledger: Ledger) -> dict[str, Any]:
    """Return the forecast of a finished run for its summary, and why the ledger differs; on rank 0.

    Args:
        context: context of the run.
        ledger: ledger of the traffic that was sent.

    Returns:
        `down` and `up` in bytes, None if there is no forecast; `why` it is missing or wrong, or "".
    """
    down, up, why = None, None, context.config.policy.traffic_depends_on
    if not why:
        try:
            found = forecast(context)
        except Exception as error:  # raised by the method; a missing forecast must not lose a finished run
            why = f"no forecast: {type(error).__name__}: {error}"
        else:
            why = found.why
            if found.total is not None:
                down, up = found.total
                why = "" if found.total == (ledger.total("down"), ledger.total("up")) else DIFFERENT
    return {"down": down, "up": up, "why": why}


def look_bytes(algorithm: Algorithm, run: PlannedRun) -> Bytes:
    """Return the bytes of the second looks of a run; 0 if there are none, or if they are not known before.

    For each pair, a question goes up and down, and the two tensors that are compared go up. Each client that
    trains and asks sends the notes of its question. If the server has the clients' samples, they are all that
    is sent, once.
    """
    if not uses(algorithm, SecondLook):
        return 0, 0
    looking, down, up = hooks_of(algorithm, SecondLook), 0, 0
    if (sizes := looking.look_sizes(run)) is None:
        return 0, 0
    met = np.zeros(0, np.int64)
    for look in looking.planned_looks(run):
        if sizes.stored is not None:
            new = np.setdiff1d(look.clients[look.fresh], met)
            met = np.union1d(met, new)
            up += run.message_bytes(int(sizes.stored[new].sum()), len(new))
            continue
        asks = int((look.pairs.any(1) & look.fresh).sum())
        pairs = look.pairs & ~np.eye(len(look.clients), dtype=bool)
        shown, answered = sizes.shown[look.clients], sizes.answered[look.clients]
        count, asked = int(pairs.sum()), int(pairs.sum()) * sizes.question
        numbers = int(pairs.sum(1) @ shown + pairs.sum(0) @ answered)
        messages = count + int(pairs.sum(1) @ (shown > 0))
        down += run.message_bytes(asked, count)
        up += run.message_bytes(asked + numbers, count + messages)
        up += run.message_bytes(asks * sizes.notes, asks * (sizes.notes > 0), note=True)
    return down, up


def look_bytes_of_ranks(context: RunContext, num_ranks: int) -> ExchangeBytes | None:
    """Return what the second looks of a run send between ranks, beside the federation; None if unknown.

    Clients are placed on ranks of one node and of equal speed, as in the first round of a run.

    Args:
        context: context of the run.
        num_ranks: P, number of ranks.
    """
    algorithm = context.config.algorithm
    if not uses(algorithm, SecondLook):
        return None
    sizes = hooks_of(algorithm, SecondLook).look_sizes(planned_run(context))
    if sizes is None:
        return None
    found = sum(looks_of_ranks(context, num_ranks, sizes), ExchangeBytes())
    return found if sizes.stored is None else replace(found, asked=0, compared=0)


def looks_of_ranks(context: RunContext, num_ranks: int, sizes: LookSizes) -> Iterator[ExchangeBytes]:
    """Yield what each second look of a run sends; see `look_bytes_of_ranks`.

    Args:
        context: context of the run.
        num_ranks: P, number of ranks.
        sizes: what clients send in a second look.
    """
    exchange, costs = context.config.system.exchange, trained_samples(context)
    looking, scheduler = hooks_of(context.config.algorithm, SecondLook), scheduler_of(context, num_ranks)
    travels = isinstance(exchange, OverMpi)
    for look in looking.planned_looks(planned_run(context)):
        k = look.clients
        yield exchange_bytes(
            look.pairs,
            scheduler.assign(k, task_costs(costs[k], look.fresh, True)),
            sizes.question,
            sizes.shown[k],
            sizes.answered[k],
            context.problem.layout.size,
            num_ranks if travels else 1,
            isinstance(exchange, OverMpi) and exchange.distances == "server",
        )


def planned_run(context: RunContext) -> PlannedRun:
    """Return what a method may know of a run when it forecasts its traffic."""
    return PlannedRun(
        problem=context.problem,
        num_rounds=context.config.rounds,
        num_sampled=context.decisions.num_sampled,
        cohort=context.sampler,
        sizes=context.federation.sizes,
        message_bytes=_message_bytes(context.config.payload),
        row_bytes=partial(row_bytes, context.payload),
        client=_client(context),
    )


def _message_bytes(payload: Payload) -> Callable[..., int]:
    """Return the function that gives a method the bytes of messages (`PlannedRun.message_bytes`)."""

    def size(numbers: int, messages: int = 1, note: bool = False, named_rows: int = 0) -> int:
        """Return the bytes of messages, including the row numbers in compressed uploads."""
        return payload.size(numbers, messages, note) + INDEX_BYTES * named_rows * payload.compresses

    return size


def uploads_per_step(context: RunContext) -> int:
    """Return the number of uploads that a server step takes."""
    m = context.decisions.num_sampled
    return 1 if context.config.algorithm.needs.single_upload else context.config.policy.uploads_per_step(m)


def _senders(context: RunContext) -> int:
    """Return the number of clients that upload in a step, including those that send too late."""
    policy, taken = context.config.policy, uploads_per_step(context)
    return policy.num_started(taken, context.problem.num_clients) if policy.late_send else taken


def _sum(parts: Iterable[Bytes]) -> Bytes:
    down, up = zip(*parts, strict=True)
    return sum(down), sum(up)


def _client(context: RunContext, k: int = 0) -> LocalClient:
    return LocalClient(k, context.federation, context.learner, context.local_of(k))


def _message(context: RunContext, server: Server, k: int) -> Message:
    """Return what client `k` downloads, on the device that trains its model."""
    with ServerCall(context.config.algorithm, "reads", kept, client=k):
        reads = context.config.algorithm.reads(server, k)
    vectors = {
        name: read_rows(lambda t, rows: server.tables[t][rows], name, which) for name, which in reads.items()
    }
    return message_on(Message(vectors, reads), context.learner.device)


def _round_bytes(
    context: RunContext, server: Server, filters: UpdateFilters, upload: Callable[[int], int]
) -> Bytes:
    """Return the bytes of a round of the first clients, in which client k uploads `upload(k)` bytes."""
    m = uploads_per_step(context)
    drawn = max(m, context.config.policy.num_started(m, context.problem.num_clients))
    down, up = _bytes_of(context, server, filters, upload, range(drawn))
    if (senders := _senders(context)) != drawn:
        up = _bytes_of(context, server, filters, upload, range(senders))[1]
    return down, up


def _bytes_of(
    context: RunContext,
    server: Server,
    filters: UpdateFilters,
    upload: Callable[[int], int],
    clients: Sequence[int],
) -> Bytes:
    """Return the bytes that clients move in a round; client k uploads `upload(k)` bytes."""
    algorithm, payload = context.config.algorithm, context.payload
    widths = {name: table.shape[1] for name, table in server.tables.items()}
    own = ((k, filters.widths(widths, k)) for k in clients)
    down = sum(download_bytes(algorithm.reads(server, k), w, payload) for k, w in own)
    up = sum(map(upload, clients)) if filters.narrows else len(clients) * upload(0)
    stamps = len(clients) * time_stamp_bytes(payload, algorithm.needs.time_stamps)
    return down + stamps, up + stamps


# -- one-shot statistics -------------------------------------------------------------------------------------


def _first_server(context: RunContext) -> tuple[Server, Bytes]:
    """Return the server before the first round, and the bytes that set it up.

    One-shot statistics are computed for client 0 only and repeated for all clients.
    """
    algorithm, problem, n = context.config.algorithm, context.problem, context.problem.num_clients
    if not uses(algorithm, OneShotStatistics):
        server = algorithm.setup(problem, None, key(0))
        if uses(algorithm, ServerEvaluation):
            server = hooks_of(algorithm, ServerEvaluation).appraise(None, server, problem.public)
        return server, (0, 0)
    report = statistics_report(context, 0)
    columns = {name: np.stack([np.asarray(v)] * n) for name, v in report.notes.items()}
    if upload_named(algorithm, OneShotStatistics, "statistics_gram"):
        columns["gram"] = np.ones((n, n))
        np.fill_diagonal(columns["gram"], 2.0)
    fresh, staleness = np.ones(n, bool), np.zeros(n, np.int64)
    fingerprints = Notes(np.arange(n), problem.num_samples, staleness, fresh, columns)
    server = algorithm.setup(problem, fingerprints, key(0))
    return server, _fingerprint_bytes(context, _initial_clients(context))


def _initial_clients(context: RunContext) -> np.ndarray:
    """Return the clients that give one-shot statistics before training."""
    algorithm, everyone = context.config.algorithm, np.arange(context.problem.num_clients)
    if not (uses(algorithm, NewClients) and context.config.policy.synchronous):
        return everyone
    address = key(context.config.seed.training, INITIAL_CLIENTS)
    return hooks_of(algorithm, NewClients).initial_clients(context.problem, everyone, address)


def _new_fingerprints(context: RunContext) -> Bytes:
    """Return the bytes of the statistics of clients that give them when they first take part."""
    if not uses(context.config.algorithm, NewClients):
        return 0, 0
    cohorts = np.concatenate([*planned_run(context).cohorts()])
    return _fingerprint_bytes(context, np.setdiff1d(cohorts, _initial_clients(context)))


def _fingerprint_bytes(context: RunContext, clients: np.ndarray) -> Bytes:
    """Return the bytes of the one-shot statistics of clients."""
    algorithm, payload = hooks_of(context.config.algorithm, OneShotStatistics), context.payload
    shown = algorithm.shows(context.problem, key(0))
    if algorithm.fingerprints_vary:
        reports = (statistics_report(context, k) for k in clients.tolist())
        each = (statistics_size(payload, shown, report) for report in reports)
        return _sum([(0, 0), *((size.down, size.up) for size in each)])
    size = statistics_size(payload, shown, statistics_report(context, 0))
    return len(clients) * size.down, len(clients) * size.up


def statistics_report(context: RunContext, k: int) -> Report:
    """Return the one-shot statistics of a client."""
    algorithm = hooks_of(context.config.algorithm, OneShotStatistics)
    shown = tensors_on(algorithm.shows(context.problem, key(0)), context.learner.device)

    def visit(k: int) -> Report:
        with (
            ClientCall(context.config.algorithm, "fingerprint", client=k, visit=0),
            within_memory("algorithm", algorithm),
        ):
            report = algorithm.fingerprint(_client(context, k), shown, key(0))
        assert report is not None
        return report

    return first_that_works(visit, (k,), 0, drops=False, kept=kept)
