"""One small method for each capability that a method may declare beyond a plain round. Examples, not papers.

`docs/capabilities.md` says when each hook runs and what is counted. A test runs every class of this file.

    mpifl run docs/examples/clustered.yaml --algorithm '{name: "docs/examples/capabilities.py:LabelClusters"}'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpifl.clustering.distances import cosine_matrix, euclidean_matrix
from mpifl.clustering.partitions import agglomerative
from mpifl.clustering.server_plans import clustered_plan, clustered_server, joined
from mpifl.core.method import (
    Algorithm,
    Client,
    ComparedUploads,
    Key,
    Message,
    Needs,
    NewClients,
    Notes,
    OneShotStatistics,
    PlainVisit,
    PlainVisits,
    Plan,
    ProblemInfo,
    Question,
    RememberedUploads,
    Report,
    RowUpdates,
    SecondLook,
    Server,
    ServerEvaluation,
    State,
    Vector,
)
from mpifl.core.mixing import add, average, blend, by_cluster


@dataclass(frozen=True)
class LabelClusters(OneShotStatistics, Algorithm):
    """Clients with similar label histograms share a model.

    Attributes:
        num_clusters: K.
    """

    num_clusters: int = 2

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send nothing: a client can count its labels without a model."""
        return {}

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Send the share of each label."""
        return client.report({"labels": label_shares(client)})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the clients by their histograms; all clusters start from the same model."""
        assert fingerprints is not None
        distances = euclidean_matrix(fingerprints["labels"])
        return clustered_server(
            problem, fingerprints.client, agglomerative(distances, n_clusters=self.num_clusters)
        )

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average within clusters."""
        return clustered_plan(server, notes)


@dataclass(frozen=True)
class JoiningLabelClusters(NewClients, Algorithm):
    """LabelClusters for clients that arrive later: each joins the cluster with the nearest mean histogram.

    Attributes:
        num_clusters: K.
    """

    num_clusters: int = 2

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send nothing."""
        return {}

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Send the share of each label."""
        return client.report({"labels": label_shares(client)})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the clients that are there; keep the mean histogram of each cluster."""
        assert fingerprints is not None
        shares = fingerprints["labels"]  # [n, L]
        found = agglomerative(euclidean_matrix(shares), n_clusters=self.num_clusters)
        server = clustered_server(problem, fingerprints.client, found)
        means = np.stack([shares[found == c].mean(0) for c in range(self.num_clusters)])  # [K, L]
        return Server(server.tables, server.assign, {**server.algorithm_state, "means": means})

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Put each new client into the cluster with the nearest mean."""
        means = server.algorithm_state["means"]
        far = np.abs(fingerprints["labels"][:, None] - means[None]).sum(2)  # [m, K]
        return joined(server, fingerprints.client, far.argmin(1))

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average within clusters."""
        return clustered_plan(server, notes)


@dataclass(frozen=True)
class AverageOfAll(RememberedUploads, Algorithm):
    """FedAvg over the last upload of every client that has ever taken part."""

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average new and remembered uploads alike; `notes.fresh` would tell them apart."""
        return Plan([average(notes)])


@dataclass(frozen=True)
class AgreeingUpdates(ComparedUploads, Algorithm):
    """Updates are weighted by their mean cosine with the others; negative ones are left out."""

    needs = Needs(min_cohort=2)
    gram = "delta"

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Upload the change of the model."""
        start = message["model"][0]
        return client.report(delta=client.sgd(start, key).vector - start), state

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Add the updates, weighted by agreement."""
        agreement = np.maximum(cosine_matrix(notes["gram"]).mean(1), 0.0)  # [m]
        return Plan([add(agreement / max(agreement.sum(), 1e-12), of="delta")])


@dataclass(frozen=True)
class Transferable(SecondLook, Algorithm):
    """Models weigh by how well they do on the data of the other clients of the round."""

    needs = Needs(min_cohort=2)

    def ask(self, client: Client, own: Mapping[str, Vector], key: Key) -> Question:
        """Send the model to each peer."""
        return Question(own["model"])

    def answer(self, client: Client, payload: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the loss of the model on the data of a peer."""
        return loss_of(client, payload)

    def compare(
        self, shown: torch.Tensor | None, answered: torch.Tensor, notes: Mapping[str, Any]
    ) -> Mapping[str, float]:
        """Return the loss; there is nothing to compare it with."""
        return {"loss_elsewhere": float(answered)}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average, weighted by one over the loss."""
        return Plan([average(notes, weights=1.0 / (np.nanmean(notes["loss_elsewhere"], axis=1) + 0.1))])


@dataclass(frozen=True)
class RoutedArrivals(ServerEvaluation, Algorithm):
    """An asynchronous server with a labelled set for each group: uploads enter the row of their best set.

    Attributes:
        rate: how far a fresh upload moves its row.
    """

    rate: float = 0.3
    needs = Needs(single_upload=True, weighs_staleness=True)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with one row for each of the server's sets; all clients use row 0."""
        rows = torch.stack([problem.init(0)] * len(problem.public))  # [K, d]
        return Server({"model": rows}, np.zeros(problem.num_clients, np.int64))

    def inspect(self, vectors: Mapping[str, Vector], public: Sequence[Client]) -> Mapping[str, np.ndarray]:
        """Return the loss of the upload on each of the server's sets [K]."""
        return {"server_loss": np.array([own.loss(vectors["model"]) for own in public])}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Blend the upload into the row of its best set, which its client uses from then on."""
        losses = notes["server_loss"]  # [1, K]
        rates = np.zeros((losses.shape[1], 1))
        rates[losses[0].argmin()] = self.rate / (1 + notes.staleness[0]) ** 0.5
        assign = server.assign.copy()
        assign[notes.client] = losses.argmin(1)
        return Plan([blend(rates)], assign=assign)


@dataclass(frozen=True)
class PrivateMedley(RowUpdates, Algorithm):
    """Two models; clients of even number train one, clients of odd number the other."""

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from two initial models."""
        rows = torch.stack([problem.init(j) for j in range(2)])
        return Server({"model": rows}, np.arange(problem.num_clients) % 2)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the updates of each row."""
        return Plan([by_cluster(server.assign[notes.client], 2, notes.num_samples)])


@dataclass(frozen=True)
class NearAverage(PlainVisits, Algorithm):
    """FedProx of updates: visits only train, so that many are made in one call.

    Attributes:
        mu: weight of mu/2 ||w - x||^2.
    """

    mu: float = 0.1

    def plain_visit(self) -> PlainVisit:
        """Say what `local_update` does."""
        return PlainVisit("delta", change=True, mu=self.mu)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train near x; report the update."""
        x = message["model"][0]
        w = client.sgd(x, key, direction=lambda g, v: g + self.mu * (v - x))
        return client.report(delta=w.vector - x, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Add the mean update by samples."""
        return Plan([add(notes.num_samples / notes.num_samples.sum(), of="delta")])


def label_shares(client: Client) -> np.ndarray:
    """Return the share of each label in the training data [L]."""
    data = client.data.train
    num_classes = client.logits(client.init, data.x[:1]).shape[1]
    return np.bincount(data.y.cpu().numpy(), minlength=num_classes) / len(data)


def loss_of(client: Client, w: torch.Tensor) -> torch.Tensor:
    """Return the loss of a model on a client's training data, as a tensor that can be sent."""
    return torch.tensor([client.loss(w)])
