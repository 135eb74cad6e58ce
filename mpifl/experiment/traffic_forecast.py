"""What a run will send, before it trains: the one-shot statistics, and a round times the number of rounds.

Nothing is typed in by a method: its hooks are called with a learner that does not train, and what they read
and report is measured. Terms that depend on what training finds are worked out in `SPECIAL`, or named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpifl.aggregation.tables import read_rows
from mpifl.core.devices import message_on, tensors_on
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, Report, Server, Vector
from mpifl.traffic.codec import download_bytes, upload_bytes
from mpifl.traffic.ledger import Ledger, count_numbers
from mpifl.training import LocalClient, public_clients

from .context import RunContext

UNDER_WAY = "which visits are under way at the end: they have downloaded and not uploaded"


@dataclass(frozen=True)
class Expected:
    """Federation bytes of a run, by unicast.

    Attributes:
        once, per_round: (down, up) before training, and in a round.
        total: (down, up) of the run; None where only training can tell.
        why: what the total depends on, where there is none.
    """

    once: tuple[int, int]
    per_round: tuple[int, int]
    total: tuple[int, int] | None
    why: str = ""


def without_training(context: RunContext) -> RunContext:
    """Return a context whose clients, those of the server's own sets too, train for no step."""
    learner = context.learner.without_training()
    sets = [client.data.train for client in context.problem.public]
    public = public_clients(context.federation, learner, context.config.local, sets)
    problem = replace(context.problem, public=public)
    return replace(context, parts=replace(context.parts, learner=learner, problem=problem))


def first_server(context: RunContext) -> tuple[Server, tuple[int, int]]:
    """Return the server before the first round and the bytes (down, up) that set it up.

    One-shot statistics are taken from client 0 alone and repeated for everyone, so rows chosen by data (the
    number of streams by silhouette, say) are what a population of equals would give.
    """
    algorithm, problem = context.config.algorithm, context.problem
    if not algorithm.needs.fingerprint:
        server = algorithm.setup(problem, None, key(0))
        return algorithm.appraise(None, server, problem.public) if algorithm.needs.inspect else server, (0, 0)
    shown = algorithm.shows(problem, key(0))
    report = _print(context, shown, 0)
    n = problem.num_clients
    columns = {name: np.stack([np.asarray(v)] * n) for name, v in report.notes.items()}
    if algorithm.needs.fingerprint_gram:
        columns["gram"] = np.ones((n, n)) + np.eye(n)
    everyone = np.arange(n)
    fingerprints = Notes(everyone, problem.num_samples, np.zeros(n, np.int64), np.ones(n, bool), columns)
    return algorithm.setup(problem, fingerprints, key(0)), _fingerprint_bytes(
        context, initial_clients_of(context)
    )


def initial_clients_of(context: RunContext) -> np.ndarray:
    """Return who gives one-shot statistics before training."""
    everyone = np.arange(context.problem.num_clients)
    if not (context.config.algorithm.needs.newcomers and context.is_synchronous):
        return everyone
    return context.config.algorithm.initial_clients(
        context.problem, everyone, key(context.config.seed.training, "founders")
    )


def _print(context: RunContext, shown: Mapping[str, Vector], k: int) -> Report:
    """Return a client's one-shot statistics, without training."""
    there = tensors_on(shown, context.learner.device)
    report = context.config.algorithm.fingerprint(client_of(context, k), there, key(0))
    assert report is not None
    return report


def _fingerprint_bytes(context: RunContext, clients: np.ndarray) -> tuple[int, int]:
    """Return the bytes (down, up) of the one-shot statistics of clients."""
    algorithm, payload = context.config.algorithm, context.config.payload
    shown = algorithm.shows(context.problem, key(0))
    asked = clients.tolist() if type(algorithm).__name__ in UNEVEN else [0]
    ups = [upload_bytes(payload, _print(context, shown, k), None) for k in asked]
    down = sum(payload.size(count_numbers(rows), len(rows)) for rows in shown.values())
    return len(clients) * down, sum(ups) if len(ups) > 1 else len(clients) * ups[0]


def _strangers(context: RunContext) -> tuple[int, int]:
    """Return the bytes (down, up) of the statistics of those who were no initial_clients and take part
    later.
    """
    needs = context.config.algorithm.needs
    if not (needs.newcomers and needs.fingerprint):
        return 0, 0
    later = np.setdiff1d(np.concatenate(cohorts(context)), initial_clients_of(context))
    return _fingerprint_bytes(context, later) if len(later) else (0, 0)


def client_of(context: RunContext, k: int) -> LocalClient:
    """Return a client; it trains only where the context does: see `without_training`."""
    return LocalClient(k, context.federation, context.learner, context.config.local)


def message_to(context: RunContext, server: Server, k: int) -> Message:
    """Return what client `k` downloads, where its model is trained."""
    reads = context.config.algorithm.reads(server, k)
    vectors = {
        name: read_rows(lambda t, rows: server.tables[t][rows], name, which) for name, which in reads.items()
    }
    return message_on(Message(vectors, reads), context.learner.device)


def empty_report(context: RunContext, server: Server, k: int) -> Report:
    """Return the report of a visit without training: its sizes are those of a real one."""
    message = message_to(context, server, k)
    report, _ = context.config.algorithm.local_update(message, {}, client_of(context, k), key(0))
    return report


def round_bytes(context: RunContext, server: Server, report: Report) -> tuple[int, int]:
    """Return the federation's bytes (down, up) of one round, unicast."""
    algorithm, payload = context.config.algorithm, context.config.payload
    reads = [algorithm.reads(server, k) for k in range(context.decisions.num_sampled)]
    widths = {name: table.shape[1] for name, table in server.tables.items()}
    down = sum(download_bytes(r, widths, payload) for r in reads)
    return down, context.decisions.num_sampled * upload_bytes(payload, report, message_to(context, server, 0))


def expect(context: RunContext, server: Server, once: tuple[int, int], report: Report) -> Expected:
    """Return what a run will send.

    Args:
        server, once: as `first_server` gave them. report: as `empty_report` gave it.
    """
    config, name = context.config, type(context.config.algorithm).__name__
    each = round_bytes(context, server, report)
    down, up = (config.rounds * size for size in each)
    if not context.is_synchronous:
        return Expected(once, each, None, UNDER_WAY)
    if config.newcomers.share or config.newcomers.groups:
        return Expected(once, each, None, "who is drawn when newcomers join")
    if name in DATA_DECIDES:
        return Expected(once, each, None, DATA_DECIDES[name])
    extra = [SPECIAL[name](context)] if name in SPECIAL else []
    more = [sum(column) for column in zip(once, (down, up), _strangers(context), *extra, strict=True)]
    return Expected(once, each, (more[0], more[1]))


def settled(context: RunContext, ledger: Ledger) -> dict[str, Any]:
    """Return what a run was to send, and why it did not, for its summary; on rank 0, after the run."""
    e = Expected((0, 0), (0, 0), None, UNDER_WAY)
    try:
        context = without_training(context)
        if context.is_synchronous:
            server, once = first_server(context)
            e = expect(context, server, once, empty_report(context, server, 0))
    except Exception as error:  # a method's own; a finished run is not lost for want of a forecast
        return {"down": None, "up": None, "why": f"no forecast: {type(error).__name__}: {error}"}
    if e.total is None:
        return {"down": None, "up": None, "why": e.why}
    different = e.total != (ledger.total("down"), ledger.total("up"))
    why = "some clients sent other than planned: they dropped out, or notes differ in length"
    return {"down": e.total[0], "up": e.total[1], "why": why if different else ""}


Bytes = tuple[int, int]


def cohorts(context: RunContext) -> list[np.ndarray]:
    """Return who takes part in each round."""
    return [context.sampler(step) for step in range(1, context.config.rounds + 1)]


def _emdcfl(context: RunContext) -> Bytes:
    """Each ordered pair of those seen so far: an extractor up and down, projected embeddings of both up; tau
    of each who takes part. Only in round 1 where that is everyone.
    """
    a: Any = context.config.algorithm
    payload, sizes = context.config.payload, context.federation.sizes
    body = sum(s.stop - s.start for s in context.problem.layout.part("body"))
    width = (
        client_of(context, 0).embed(context.learner.init, context.federation.client(0).train.x[:1]).shape[1]
    )
    p, down, up = max(1, int(a.projection * width)), 0, 0
    images = [np.minimum(sizes[:, column], a.sample_cap) for column in (0, int(a.against == "val"))]
    seen = np.zeros(0, np.int64)
    for step, cohort in enumerate(cohorts(context)):
        if step and len(seen) == context.problem.num_clients == context.decisions.num_sampled:
            break
        seen = np.union1d(seen, cohort)
        pairs = len(seen) * (len(seen) - 1)
        numbers = (len(seen) - 1) * p * int(sum(column[seen].sum() for column in images))
        down += payload.size(pairs * body, pairs)
        up += payload.size(pairs * body + numbers, 3 * pairs)
        up += payload.size(len(cohort), len(cohort), note=True)
    return down, up


def _fedfomo(context: RunContext) -> Bytes:
    """From round 2 on, M models down and M gains up."""
    a: Any = context.config.algorithm
    payload, m = context.config.payload, a.num_models
    visits = (context.config.rounds - 1) * context.decisions.num_sampled
    return visits * payload.size(m * context.problem.layout.size, m), visits * payload.size(m, note=True)


def _fedsoft(context: RunContext) -> Bytes:
    """Counts go up every tau rounds, and at a client's first visit; not in the others."""
    a: Any = context.config.algorithm
    seen, without = set[int](), 0
    for step, cohort in enumerate(cohorts(context)):
        without += len(seen & set(cohort.tolist())) if step % a.period else 0
        seen |= set(cohort.tolist())
    return 0, -without * context.config.payload.size(a.num_clusters, note=True)


SPECIAL: dict[str, Callable[[RunContext], Bytes]] = {
    "EMDCFL": _emdcfl,
    "FedFomo": _fedfomo,
    "FedSoft": _fedsoft,
}
DATA_DECIDES: dict[str, str] = {
    "CFLGP": "who is in cluster 0, whose model the others download as well when clusters are formed",
    "FedCUAU": "who is in which cluster: cluster i of C moves the trunk and the blocks of copies i to C",
}
UNEVEN = ("PACFL",)  # the size of one-shot statistics depends on the client's data
