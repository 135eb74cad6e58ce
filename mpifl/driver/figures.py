"""Figures of a step that are not computed from the clients' scores: columns of `metrics.csv`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from mpifl.core.capabilities import ServerEvaluation, uses
from mpifl.core.metric import with_figures
from mpifl.experiment.context import RunContext
from mpifl.protection.accountant import Accountant
from mpifl.results.columns import with_diverged
from mpifl.results.metrics import client_distances, mixture_kl
from mpifl.results.recorder import RunningFigures
from mpifl.results.recovery import recoveries_so_far, recovery_figures
from mpifl.runtime.engine import Engine, Record
from mpifl.runtime.server_step import ServerStep


def columns(
    context: RunContext, record: Record, server_step: ServerStep, engine: Engine, running: RunningFigures
) -> dict[str, float]:
    """Return the columns of an evaluation that are not computed from the clients' scores; on rank 0.

    Args:
        context: context of the run.
        record: record of a step with scores.
        server_step: the server step, after the step.
        engine: counts the uploads of each client.
        running: running figures of the run; the clusters' scores are added.
    """
    return with_figures(
        record.train,
        figures(context, record, server_step.visits, running),
        recovery(context, record, running),
        clustering_costs(context, server_step),
        distances(context, record, server_step),
        privacy_spent(context.accountant, engine.num_uploads, record.step),
        server_step.config.filters.figures(),
    )


def figures(
    context: RunContext, record: Record, visits: np.ndarray, running: RunningFigures
) -> dict[str, float]:
    """Compute the figures of only some methods, add them to the running figures, and return the columns.

    On rank 0. The columns are:
    `mixture_kl`: mean over the evaluated clients of KL(true || estimated mixture) of the last upload from
    which the client's mixture was estimated; `mixture_kl_uploads`: mean over all such uploads of all clients
    so far.
    `accuracy_cluster`: mean over the groups of row k's accuracy on group k's own test set, for methods in
    which each row belongs to one of the server's own sets; `accuracy_cluster_std` is the standard deviation
    over the groups.
    `accuracy_cluster_all` and `accuracy_cluster_all_std`: the same for each row's mean over all evaluations.
    The names of the cluster columns begin with the name of the task's metric, here `accuracy`.

    Args:
        context: context of the run.
        record: record of a step with scores.
        visits: number of visits of each client so far [N].
        running: running figures of the run; the clusters' scores are added.
    """
    out = running.mixture(record.evaluated_clients.tolist())
    out |= before_training(context, record, visits)
    if scores := cluster_scores(context, record):
        out |= running.of_clusters(record.step, scores, context.config.task.metric.name)
    return out


def estimated(context: RunContext, record: Record) -> Iterator[tuple[int, float]]:
    """Yield the client and KL(true || estimated mixture) of each upload of a step, in nats; on rank 0.

    The true mixture is that of the data on which the upload was trained. An upload that the step did not take
    gives no estimate.

    Args:
        context: context of the run.
        record: record of the step.
    """
    u = context.config.algorithm.mixtures(record.server)  # [N, K]
    if u is None:
        return
    for k, visit in record.accepted:
        truth = context.federation.mixture(k, visit)
        if truth is not None and truth.shape == u[k].shape:
            yield k, mixture_kl(truth, u[k])


def before_training(context: RunContext, record: Record, visits: np.ndarray) -> dict[str, float]:
    """Return `accuracy_before` and `accuracy_before_std` of asynchronous runs in which nobody downloads.

    These are mean and standard deviation over the clients that have trained and have a score, which are
    evaluated with their own models (Local). Other methods report these figures themselves.

    Args:
        context: context of the run.
        record: record of a step with scores.
        visits: number of visits of each client so far [N].
    """
    alone = not context.config.policy.synchronous and not context.config.algorithm.reads(record.server, 0)
    if record.scores is None or not alone:
        return {}
    metric, scored = context.config.task.metric.name, context.config.task.scored
    scores = with_diverged(record.scores, scored)[metric]
    before = scores[(visits[record.evaluated_clients] > 0) & ~np.isnan(scores)]
    if not before.size:
        return {}
    with np.errstate(invalid="ignore"):  # in a run that diverges
        return {f"{metric}_before": float(before.mean()), f"{metric}_before_std": float(before.std())}


def recovery(context: RunContext, record: Record, running: RunningFigures) -> dict[str, float]:
    """Add an evaluation to the running figures, and return the columns of drift; nothing without drift.

    The columns are those of `recovery_figures`, over the changes of data so far.

    Args:
        context: context of the run.
        record: record of a step with scores.
        running: running figures of the run.
    """
    if record.scores is None or context.config.drift.kind is None:
        return {}
    task = context.config.task
    scores = with_diverged(record.scores, task.scored)[task.metric.name]
    known = scores[~np.isnan(scores)]
    mean = float(known.mean()) if known.size else np.nan
    running.scores.append((record.step, mean, record.virtual_seconds or 0.0))
    return recovery_figures(recoveries_of(context, running), timed=running.timed)


def clustering_costs(context: RunContext, server_step: ServerStep) -> dict[str, int]:
    """Return `clustering_bytes` so far, in both directions, of runs under drift or with `recluster`.

    These are the bytes of one-shot statistics and second looks; their computation is `flops_statistics`.
    """
    if context.config.drift.kind is None and not context.config.recluster:
        return {}
    return {"clustering_bytes": server_step.ledger.clustering.total()}


def costs_since(events: Sequence[Mapping[str, Any]], server_step: ServerStep) -> list[dict[str, Any]]:
    """Return each change of data with what clustering has cost from its step until the next one.

    Args:
        events: rows with a `step`, ascending.
        server_step: has the ledgers.

    Returns:
        The rows with `clustering_bytes_up`, `clustering_bytes_down` and `clustering_flops`.
    """
    begins = [event["step"] for event in events]
    out = []
    for event, (begin, end) in zip(events, pairwise([*begins, inf]), strict=True):
        of = {"up": 0, "down": 0}
        for (direction, step), size in server_step.ledger.clustering.items():
            of[direction] += size * (begin <= step < end)
        entries = server_step.computation.entries.items()
        flops = sum(w.flops for (step, what), w in entries if what == "statistics" and begin <= step < end)
        costs = {f"clustering_bytes_{direction}": size for direction, size in of.items()}
        out.append({**event, **costs, "clustering_flops": flops})
    return out


def recoveries_of(context: RunContext, running: RunningFigures) -> list[dict[str, Any]]:
    """Return what became of the score after each change of data so far, see `recoveries`."""
    drift, metric = context.config.drift, context.config.task.metric
    changes = context.federation.change_steps
    return recoveries_so_far(running.scores, running.begins, changes, drift.recovered, metric.better)


def cluster_scores(context: RunContext, record: Record) -> list[float]:
    """Return the score of each row k on group k's own test set; empty if rows and groups do not match."""
    evaluates = uses(context.config.algorithm, ServerEvaluation)
    group_test_sets = context.federation.group_test_sets() if evaluates else ()
    rows = record.server.tables.get("model", ())
    if not group_test_sets or len(rows) != len(group_test_sets):
        return []
    name, evaluate = context.config.task.metric.name, context.problem.public[0].evaluate
    return [evaluate(w, split)[name] for w, split in zip(rows, group_test_sets, strict=True)]


def distances(context: RunContext, record: Record, server_step: ServerStep) -> dict[str, float]:
    """Return the columns of `evaluation.distances`; on rank 0.

    Args:
        context: context of the run.
        record: record of a step with scores.
        server_step: has the products of the models that clients uploaded in the step, if they were measured.
    """
    products = server_step.client_products
    if products is None or not context.config.evaluation.distances:
        return {}
    clients, groups = products.clients, context.federation.groups
    labels = server_step.hooks.labels(record.server)[clients]
    groups = None if groups is None else groups[clients]
    kinds = ("client_distance", products.parameters), ("head_distance", products.head)
    return {k: v for name, x in kinds for k, v in client_distances(x, labels, groups, name).items()}


def privacy_spent(accountant: Accountant, uploads: np.ndarray, step: int) -> dict[str, float]:
    """Return epsilon so far as a column of `metrics.csv`; on rank 0.

    Args:
        accountant: accountant of the run.
        uploads: number of uploads of each client so far [N].
        step: number of rounds so far.

    Returns:
        `epsilon` (under local privacy, that of the client with most uploads); nothing without privacy.
    """
    if not accountant.counts:
        return {}
    times = uploads if accountant.per_client else step
    return {"epsilon": accountant.epsilon(times)}


def privacy_of_clients(
    accountant: Accountant, uploads: np.ndarray, clients: np.ndarray
) -> dict[str, np.ndarray]:
    """Return epsilon of some clients, as a column of `clients.csv`, under local privacy.

    Args:
        accountant: accountant of the run.
        uploads: number of uploads of each client so far [N].
        clients: the clients [n].
    """
    return {"epsilon": accountant.of_clients(uploads[clients], clients)} if accountant.per_client else {}
