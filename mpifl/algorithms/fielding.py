"""Fielding: clients with like labels form clusters; who drifts moves, and at times all are clustered anew.

Li et al., "Fielding: Clustered Federated Learning with Data Drift", arXiv:2411.01580, 2024 (v1: "Federated
Learning Clients Clustering with Adaptation to Data Drifts"). Legend: p_k distribution of client k's labels;
c_j mean p_k of the clients of cluster j, a_j the same when all were clustered last. Clients are clustered by
k-means on p_k, with the number of clusters of largest silhouette. Every client whose p_k has changed moves to
the cluster of the closest c_j. If the centres have moved too far, max_j ||c_j - a_j|| > theta times the mean
distance between the a_j, all clients are clustered anew. A new cluster starts from the mean of the models
that its clients had.

Our reading: of the paper only abstract and introduction could be read (distributions of labels decide, all
drifted clients are taken in and not only those that train, single moves and selective global clustering, a
number of clusters that changes), and no code. What the text does not show is ours: Euclidean distances, the
unit of theta, which is 0 and lets any move count while there is one cluster, its default of 1/3, at most
`max_clusters` clusters, equal weights of the clients in a new cluster's model, and that drift is any change
of p_k. The paper's other representations of clients, for drift that labels do not show, are left out.

Differs: p_k is sent before training and with every upload, so that a client moves after the first visit on
its new data. The model of that visit, trained from that of another cluster, enters no average. Absent clients
count with the p_k that they sent last. Single uploads, as under `every_arrival`, are treated alike; those of
clients that moved or were clustered anew since their download enter no average. With `recluster`, p_k is also
sent before the visit, and the client trains the model of its new cluster at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from mpifl.clustering.distances import euclidean_matrix
from mpifl.clustering.partitions import kmeans, kmeans_by_silhouette, last_uploads, match_labels
from mpifl.clustering.server_plans import clustered_server
from mpifl.core.computation import Asked, Held
from mpifl.core.method import Algorithm, Client, Key, Needs, NewClients, Plan
from mpifl.core.metric import least
from mpifl.core.mixing import by_cluster, carry, updated
from mpifl.core.options import NonNegativeFloat, NumModelsOrZero, PositiveInt
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State, Vector


@dataclass(frozen=True)
class Fielding(NewClients, Algorithm):
    """One row per cluster, and the initial model.

    Attributes:
        num_clusters: K, number of clusters; 0 takes that of the largest mean silhouette.
        max_clusters: largest number of clusters that is tried if `num_clusters` is 0.
        theta: how far a centre may move before all clients are clustered anew, in mean distances between
            centres.
    """

    num_clusters: NumModelsOrZero = 0
    max_clusters: PositiveInt = 10
    theta: NonNegativeFloat = 1 / 3

    paper = "li2024fielding"
    trains_once = True
    acts_with = MappingProxyType({"theta": ("newcomers", "drift")})
    needs = Needs(averages=True, classes=True)

    def ignored_options(self) -> Mapping[str, str]:
        """`num_clusters` replaces the search."""
        return {"max_clusters": "num_clusters gives the number of clusters"} if self.num_clusters else {}

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send nothing: a client needs its own labels only."""
        return {}

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return nothing: labels are counted without a network."""
        return []

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return p_k [L]."""
        return client.report({"shares": label_shares(client)})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the initial clients.

        State: `shares` [N, L], the p_k that clients sent last, `centres` [K, L], the c_j, `anchors` [K, L],
        the a_j, `since` [N], server version from which on a client has its cluster's model.
        """
        assert fingerprints is not None
        p = np.full((problem.num_clients, problem.num_classes), np.nan)
        p[fingerprints.client] = fingerprints["shares"]
        found = self._clusters(fingerprints["shares"])
        centres = _means(fingerprints["shares"], found)
        since = np.zeros(problem.num_clients, np.int64)
        state = {"shares": p, "centres": centres, "anchors": centres, "since": since}
        return clustered_server(problem, fingerprints.client, found, **state)

    def _clusters(self, p: np.ndarray) -> np.ndarray:
        """Return the cluster [n] of each client by k-means on `p` [n, L]."""
        if self.num_clusters:
            return kmeans(p, min(self.num_clusters, len(np.unique(p, axis=0)))).labels
        return kmeans_by_silhouette(p, range(1, self.max_clusters + 1)).labels

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the cluster's model; report p_k."""
        w = client.sgd(message["model"][0], key)
        return client.report({"shares": label_shares(client)}, {"train_loss": w.loss}, model=w.vector), {}

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Take in the p_k that clients send before a visit."""
        return self._taken_in(server, fingerprints, server.version)[1]

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each cluster by samples, without clients that leave it; then take in the new p_k."""
        own = server.assign[notes.client]  # [m]
        alone, after = self._taken_in(server, notes, server.version + 1)
        trained_it = server.algorithm_state["since"][notes.client] <= server.version - notes.staleness
        row = np.where(trained_it & (alone[notes.client] == own), own, -1)
        mixing = by_cluster(row, len(server.tables["model"]), notes.num_samples)
        return replace(after, mixings=[mixing, *after.mixings])

    def _taken_in(self, server: Server, notes: Notes, version: int) -> tuple[np.ndarray, Plan]:
        """Return the cluster [N] of each client after single moves, and the plan, which may cluster anew.

        Args:
            server: the server before.
            notes: p_k of some clients.
            version: of the server from which clients download what the plan makes.
        """
        s, last = server.algorithm_state, last_uploads(notes.client)
        last = last[(notes["shares"][last] != s["shares"][notes.client[last]]).any(1)]  # those that drifted
        if not len(last):
            return server.assign, Plan([])
        who, p = notes.client[last], notes["shares"][last]
        known, shares = updated(s["known"], who, True), updated(s["shares"], who, p)
        nearest = least(np.linalg.norm(p[:, None] - s["centres"], axis=2))  # argmin_j ||p_k - c_j||
        alone = updated(server.assign, who, nearest)
        centres = _means(shares, np.where(known, alone, -1), s["centres"])
        state = {"shares": shares, "known": known, "centres": centres}
        if np.linalg.norm(centres - s["anchors"], axis=1).max() <= self.theta * _unit(s["anchors"]):
            since = np.where(alone != server.assign, version, s["since"])
            return alone, Plan([], assign=alone, algorithm_state={**state, "since": since})
        found = match_labels(self._clusters(shares[known]), alone[known])
        found = np.unique(found, return_inverse=True)[1]  # without gaps
        centres, K = _means(shares[known], found), len(s["anchors"])
        keep = np.zeros((len(centres) + 1, K + 1))
        for j in range(len(centres)):  # the mean of the models that its clients had
            had = np.bincount(server.assign[known][found == j], minlength=K + 1)
            had[K] *= not had[:K].any()  # new clients had none
            keep[j] = had / had.sum()
        keep[-1, K] = 1.0
        assign = updated(np.full(len(known), len(centres)), known, found)
        state |= {"centres": centres, "anchors": centres, "since": np.where(known, version, s["since"])}
        return alone, Plan([carry(keep)], assign=assign, algorithm_state=state)


def label_shares(client: Client) -> np.ndarray:
    """Return p_k [L], the share of each class in the training data of a client."""
    y = client.data.train.y.flatten().cpu()
    counts = torch.bincount(y, minlength=client.layout.num_classes).double()
    return np.asarray(counts / max(len(y), 1))


def _means(p: np.ndarray, labels: np.ndarray, empty: np.ndarray | None = None) -> np.ndarray:
    """Return the mean [K, L] of the `p` [n, L] of each cluster; one without members has that of `empty`."""
    K = int(labels.max()) + 1 if empty is None else len(empty)
    members = [p[labels == j] for j in range(K)]
    return np.stack([m.mean(0) if empty is None or len(m) else empty[j] for j, m in enumerate(members)])


def _unit(centres: np.ndarray) -> float:
    """Return the mean distance of two centres [K, L]; 0 for one."""
    K = len(centres)
    return float(euclidean_matrix(centres).sum() / (K * (K - 1))) if K > 1 else 0.0
