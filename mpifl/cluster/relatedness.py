"""Clients linked by a relatedness matrix: each row of the server is the average over what some client is
linked to.

Shared by FLT and PCA+kM+HC. The last row of table `model` is the initial model: it stands for clients that
were never visited, and unknown clients use it. Memo: `linked` [N, N], `known` [N], `num_samples` [N] of the
last visit.
"""

from __future__ import annotations

import numpy as np

from mpifl.core.mixing import Mixing, Plan, carry
from mpifl.core.types import Notes, Server, World

from .distances import euclidean_matrix
from .grouping import agglomerative, neighbourhoods, silhouette


def linked_clients(related: np.ndarray, case: str, num_clusters: int = 0) -> np.ndarray:
    """Return who is averaged with whom, bool [n, n].

    Args:
        related: A~ bool [n, n], reflexive.
        case: `full` takes A~ itself (FLT, case I); `ward` takes Ward clusters of its rows (case II).
        num_clusters: C of case II; 0 takes the C of the largest mean silhouette.
    """
    if case == "full" or len(related) == 1:
        return related
    labels = _ward(related.astype(np.float64), num_clusters)
    return labels[:, None] == labels[None, :]


def _ward(rows: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return Ward labels [n] of `rows` [n, d]."""
    distances, distinct = euclidean_matrix(rows), len(np.unique(rows, axis=0))
    if num_clusters:  # clients with the same links stay together
        return agglomerative(distances, "ward", n_clusters=min(num_clusters, distinct))
    most = min(distinct, len(rows) - 1)
    cuts = [agglomerative(distances, "ward", n_clusters=c) for c in range(1, most + 1)]
    return max(cuts, key=lambda labels: silhouette(distances, labels, "precomputed"))  # the first of equals


def related_server(world: World, clients: np.ndarray, linked: np.ndarray) -> Server:
    """Return the first server: `clients` [n] are known and `linked` [n, n], the others are not."""
    everyone = np.eye(world.num_clients, dtype=np.uint8)
    everyone[np.ix_(clients, clients)] = linked
    known = np.isin(np.arange(world.num_clients), clients)
    assign = _rows(everyone, known)
    memo = {"linked": everyone, "known": known, "num_samples": world.num_samples}
    return Server({"model": world.init(0)[None].expand(_last(assign, known) + 1, -1)}, assign, memo)


def _rows(linked: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the row [N] of each client: equal links share one, unknown clients take the last."""
    labels = neighbourhoods(linked[np.ix_(known, known)])
    assign = np.full(len(known), labels.max() + 1)
    assign[known] = labels
    return assign


def _last(assign: np.ndarray, known: np.ndarray) -> int:
    """Return the number of the initial model's row."""
    return int(assign[known].max()) + 1


def related_plan(server: Server, notes: Notes, all_clients: bool) -> Plan:
    """Return the plan that averages, for each row, the last models of the linked clients by samples.

    Args:
        all_clients: those who do not take part count with their last model, or the initial one; otherwise
            only those who take part count.
    """
    known, last = server.memo["known"], len(server.tables["model"]) - 1
    num_samples = server.memo["num_samples"].copy()
    num_samples[notes.client] = notes.num_samples  # data may change from visit to visit
    first = [np.flatnonzero(known & (server.assign == k))[0] for k in range(last)]
    shares = server.memo["linked"][first] * num_samples.astype(np.float64)  # [K, N]
    weights = shares[:, notes.client] * (notes.fresh | all_clients)  # [K, m]
    absent = np.maximum(shares.sum(1) - weights.sum(1), 0.0) * all_clients
    total = weights.sum(1) + absent
    keep = np.eye(last + 1)
    keep[:last, :last] *= (total == 0)[:, None]
    keep[:last, last] = absent / np.where(total > 0, total, 1.0)
    weights = np.vstack([weights / np.where(total > 0, total, 1.0)[:, None], np.zeros(len(notes))])
    return Plan([Mixing(weights, keep=keep)], memo={**server.memo, "num_samples": num_samples})


def regrouped(server: Server, clients: np.ndarray, linked: np.ndarray, **memo: np.ndarray) -> Plan:
    """Return the plan after newcomers made `clients` [n] the known ones, `linked` [n, n] anew.

    A row starts from that of an old member, otherwise of an old client its first member is linked to,
    otherwise from the initial model.
    """
    old, known = server.memo["known"], np.isin(np.arange(len(server.assign)), clients)
    everyone = np.eye(len(old), dtype=np.uint8)
    everyone[np.ix_(clients, clients)] = linked
    assign, num_old = _rows(everyone, known), len(server.tables["model"])
    last = _last(assign, known)
    keep = np.zeros((last + 1, num_old))
    keep[last, num_old - 1] = 1.0
    for k in range(last):
        members = np.flatnonzero(known & (assign == k))
        parents = [*members[old[members]], *np.flatnonzero(old & (everyone[members[0]] > 0))]
        keep[k, server.assign[parents[0]] if parents else num_old - 1] = 1.0
    return Plan(
        [carry(keep)], assign=assign, memo={**server.memo, "linked": everyone, "known": known, **memo}
    )
