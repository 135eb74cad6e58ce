"""Servers and plans that several methods share: clusters, linked clients, neighbourhoods, and graphs.

- Clusters found once, FedAvg inside each, new clients join later (PACFL, FedClust, FlexCFL). State: `known`
  [N].
- Clients linked by a relatedness matrix, a row for each distinct set of links (FLT, PCA+kM+HC). State:
  `linked` [N, N], `known` [N], `num_samples` [N] of the last visit.
- Neighbourhoods: clients with the same set of linked clients share the average over that set (EMD-CFL).
  State: `linked` [N, N], `labels` [N].
- Collaboration graphs, a model for each client (pFedGraph, FedSaC). State: `graph` [N, N].

In the first two the last row of table `model` is the initial model: unknown clients read it, clusters of new
clients start from it, and it stands for clients that were never visited.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpifl.core.mixing import by_cluster, carry, own_rows, updated
from mpifl.core.plan import Mixing, Plan
from mpifl.core.types import Notes, ProblemInfo, Server

from .distances import cosine_matrix, euclidean_matrix
from .partitions import agglomerative, kmeans, neighbourhoods, silhouette

KMEANS_SEED = 43  # of centroids, as in the repository of FLT


def clustered_server(
    problem: ProblemInfo, clients: np.ndarray, labels: np.ndarray, **algorithm_state: np.ndarray
) -> Server:
    """Return the first server: `clients` [n] are known, in clusters `labels` [n]; all rows are equal."""
    num_rows = int(labels.max()) + 1
    assign = np.full(problem.num_clients, num_rows)
    assign[clients] = labels
    known = np.isin(np.arange(problem.num_clients), clients)
    return problem.server(problem.alike(num_rows + 1), assign, {"known": known, **algorithm_state})


def clustered_plan(server: Server, notes: Notes) -> Plan:
    """Return the plan that averages each cluster by samples."""
    rows = server.assign[notes.client]
    return Plan([by_cluster(rows, len(server.tables["model"]), notes.num_samples)])


def joined(
    server: Server,
    clients: np.ndarray,
    labels: np.ndarray,
    parents: Sequence[int] = (),
    **algorithm_state: np.ndarray,
) -> Plan:
    """Return the plan that adds new clients to clusters.

    Args:
        server: the server before they joined.
        clients: the new clients [n].
        labels: their clusters [n]; numbers beyond the old ones make new clusters.
        parents: the cluster from which each of the first new clusters starts; -1 and further ones: the
            initial model.
        **algorithm_state: further entries of the algorithm's state.
    """
    num_old = len(server.tables["model"]) - 1
    num_rows = max(num_old, int(labels.max()) + 1)
    keep = np.eye(num_rows + 1, num_old + 1)
    keep[num_old:, num_old] = 1.0
    for new, parent in enumerate(parents, num_old):
        keep[new] = np.eye(num_old + 1)[parent]  # -1: the initial model, the last row
    assign = np.where(server.assign == num_old, num_rows, server.assign)
    assign[clients] = labels
    known = updated(server.algorithm_state["known"], clients, True)
    mixings = [carry(keep)] if num_rows > num_old else []
    return Plan(mixings, assign=assign, algorithm_state={"known": known, **algorithm_state})


def pulled(
    w: torch.Tensor, rate: float, *, normalised: bool = True, norms: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the models `w` [k, d], each pulled towards all others: FlexCFL's inter-group step.

    w_j + sum_l (rate / ||w_l||) w_l, l != j; `normalised` divides by 1 + sum_l rate / ||w_l||.

    Args:
        w: models [k, d].
        rate: eta_G.
        normalised: whether to divide.
        norms: ||w_l|| [k], if they are taken over more than `w`; None: norms of the rows of `w`.
    """
    w = w.double()
    scale = rate / (w.norm(dim=1, keepdim=True) if norms is None else norms.double()[:, None])  # [k, 1]
    sums = w + (scale * w).sum(0) - scale * w
    moved: torch.Tensor = sums / (1.0 + scale.sum() - scale) if normalised else sums
    return moved.float()


def inherited(
    labels: np.ndarray, old: np.ndarray, num_old: int, again: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """Return `labels` [n] with each cluster renumbered to the one that most of its members had before.

    Where members of one old cluster that all sent their statistics again are in several new clusters, the one
    with most of them keeps its number: the old cluster has split.

    Args:
        labels: new cluster [n] of each client.
        old: cluster [n] of each client before, -1 for new clients. Of equally frequent ones the smallest is
            taken.
        num_old: number of the first cluster that is new; further ones take the next numbers.
        again: whether each client has sent its statistics again, bool [n].

    Returns:
        The labels, and for each new cluster the old one from which it split; -1: it has only new clients.
    """
    groups, of = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(groups), max(num_old, 1)), np.int64)
    np.add.at(counts, (of[old >= 0], old[old >= 0]), 1)
    claims = np.where(counts.any(1), counts.argmax(1), -1)  # [K]
    stays = np.zeros(len(groups), bool)
    stays[of[(old >= 0) & ~again]] = True  # a member sent nothing
    largest_first = np.argsort(-counts[np.arange(len(groups)), claims], kind="stable")
    stays[largest_first[np.unique(claims[largest_first], return_index=True)[1]]] = True  # one of each claim
    stays &= claims >= 0
    names = np.where(stays, claims, num_old - 1 + np.cumsum(~stays))
    return names[of], claims[~stays].tolist()


def client_centroids(samples: np.ndarray, k: int, rows: int) -> np.ndarray:
    """Return the centroids of a client's samples, as FLT's clients send them [rows, e].

    Args:
        samples: the samples [n, e].
        k: number of centroids; at most n.
        rows: number of rows; those beyond the centroids are NaN.
    """
    found = kmeans(samples, min(k, len(samples)), seed=KMEANS_SEED).centres
    padded = np.full((rows, samples.shape[1]), np.nan)
    padded[: len(found)] = found
    return padded


def centroids_of_all(fingerprints: Notes, num_clients: int) -> np.ndarray:
    """Return the centroids of all clients [N, k, e], NaN for those that sent none."""
    centroids = np.full((num_clients, *fingerprints["centroids"].shape[1:]), np.nan)
    centroids[fingerprints.client] = fingerprints["centroids"]
    return centroids


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
    return np.asarray(labels[:, None] == labels[None, :])


def _ward(rows: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return Ward labels [n] of `rows` [n, d]."""
    distances, distinct = euclidean_matrix(rows), len(np.unique(rows, axis=0))
    if num_clusters:  # clients with the same links stay together
        return agglomerative(distances, "ward", n_clusters=min(num_clusters, distinct))
    most = min(distinct, len(rows) - 1)
    cuts = [agglomerative(distances, "ward", n_clusters=c) for c in range(1, most + 1)]
    return max(cuts, key=lambda labels: silhouette(distances, labels, "precomputed"))  # the first of equals


def related_server(
    problem: ProblemInfo, clients: np.ndarray, linked: np.ndarray, **algorithm_state: np.ndarray
) -> Server:
    """Return the first server: `clients` [n] are known, with links `linked` [n, n]."""
    everyone = np.eye(problem.num_clients, dtype=np.uint8)
    everyone[np.ix_(clients, clients)] = linked
    known = np.isin(np.arange(problem.num_clients), clients)
    assign = _rows(everyone, known)
    state = {"linked": everyone, "known": known, "num_samples": problem.num_samples, **algorithm_state}
    return problem.server(problem.alike(_last(assign, known) + 1), assign, state)


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
        server: the server before this step.
        notes: notes of the reports.
        all_clients: whether absent clients count, too, with their last model or the initial one; otherwise
            only those that take part count.
    """
    known, last = server.algorithm_state["known"], len(server.tables["model"]) - 1
    num_samples = updated(server.algorithm_state["num_samples"], notes.client, notes.num_samples)
    first = [np.flatnonzero(known & (server.assign == k))[0] for k in range(last)]
    shares = server.algorithm_state["linked"][first] * num_samples.astype(np.float64)  # [K, N]
    weights = shares[:, notes.client] * (notes.fresh | all_clients)  # [K, m]
    absent = np.maximum(shares.sum(1) - weights.sum(1), 0.0) * all_clients
    total = weights.sum(1) + absent
    keep = np.eye(last + 1)
    keep[:last, :last] *= (total == 0)[:, None]
    keep[:last, last] = absent / np.where(total > 0, total, 1.0)
    weights = np.vstack([weights / np.where(total > 0, total, 1.0)[:, None], np.zeros(len(notes))])
    return Plan([Mixing(weights, keep=keep)], algorithm_state={"num_samples": num_samples})


def regrouped(server: Server, clients: np.ndarray, linked: np.ndarray, **algorithm_state: np.ndarray) -> Plan:
    """Return the plan that adds new clients and links all known clients anew.

    A row starts from the row of an old member; without one, from the row of an old client to which its first
    member is linked; otherwise from the initial model.

    Args:
        server: the server before they joined.
        clients: all known clients [n].
        linked: their links [n, n].
        **algorithm_state: further entries of the algorithm's state.
    """
    old, known = server.algorithm_state["known"], np.isin(np.arange(len(server.assign)), clients)
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
        [carry(keep)], assign=assign, algorithm_state={"linked": everyone, "known": known, **algorithm_state}
    )


def neighbourhood_plan(server: Server, notes: Notes, linked: np.ndarray) -> Plan:
    """Return the plan that gives each distinct neighbourhood its average, weighted by samples.

    Clients that never took part keep the initial row.

    Args:
        server: the server before this step.
        notes: notes of the reports.
        linked: bool [m, m] over the reports, reflexive.
    """
    num_clients = len(server.assign)
    ids = neighbourhoods(linked)  # [m], by first appearance
    num_rows = int(ids.max()) + 1
    first = np.array([np.flatnonzero(ids == k)[0] for k in range(num_rows)])
    weights = linked[first] * notes.num_samples.astype(np.float64)  # [K, m]
    weights = weights / weights.sum(1, keepdims=True)
    unseen = np.setdiff1d(np.arange(num_clients), notes.client)
    keep, assign = None, server.assign.copy()
    if len(unseen):
        weights = np.vstack([weights, np.zeros(len(notes))])
        keep = np.zeros((num_rows + 1, len(server.tables["model"])))
        keep[-1, server.assign[unseen[0]]] = 1.0
    assign[notes.client], assign[unseen] = ids, num_rows
    everyone = np.eye(num_clients, dtype=np.uint8)
    everyone[np.ix_(notes.client, notes.client)] = linked
    labels = num_rows + np.arange(num_clients)
    labels[notes.client] = ids
    state: dict[str, np.ndarray] = {"linked": everyone, "labels": labels}
    return Plan([Mixing(weights, keep=keep)], assign=assign, algorithm_state=state)


def neighbourhood_labels(server: Server) -> np.ndarray:
    """Return the cluster of each client [N]; a client that never took part is alone."""
    return np.asarray(server.algorithm_state.get("labels", np.arange(len(server.assign))))


def own_models(problem: ProblemInfo, directions: bool) -> Server:
    """Return a server with one row for each client, all equal, and a graph without links.

    Args:
        problem: sizes, and the initial model.
        directions: add table `direction`, zeros, for the mixtures of the models' directions.
    """
    N, tables = problem.num_clients, dict[str, torch.Tensor]()
    if directions:
        tables["direction"] = torch.zeros(N, problem.layout.num_parameters)
    return problem.server(problem.alike(N), np.arange(N), {"graph": np.eye(N)}, **tables)


def dissimilarity(gram: np.ndarray, clip: float | None = -0.9) -> np.ndarray:
    """Return d_ij = -cos(dw_i, dw_j) [m, m] from the inner products of updates; -1 below `clip`.

    pFedGraph and FedSaC, code; None: no clipping.
    """
    d = -cosine_matrix(gram)
    return d if clip is None else np.where(d < clip, -1.0, d)


def graph_plan(server: Server, notes: Notes, X: np.ndarray) -> Plan:
    """Return the plan that mixes all tables by the rows of the graph `X` [m, m] over those who take part.

    If a client has two uploads, its row is that of the last one, and the weights of both add up in `graph`.
    """
    graph = server.algorithm_state["graph"].copy()
    graph[notes.client] = X @ (notes.client[:, None] == np.arange(len(graph)))
    mixings = [own_rows(X, notes, len(server.assign), into=name, of=name) for name in server.tables]
    return Plan(mixings, algorithm_state={"graph": graph})
