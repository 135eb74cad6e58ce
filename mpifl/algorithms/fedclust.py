"""FedClust: clients whose final layers stay close after a little local training share a model.

Islam et al., "FedClust: Tackling Data Heterogeneity in Federated Learning through Weight-Driven Client
Clustering", ICPP 2024. From the common initial model every client trains for a few epochs and sends the
weights v_i of its final layer. The server cuts a hierarchy on ||v_i - v_j|| at lambda. Then FedAvg runs
inside each cluster, from the initial model. A new client does the same first training and joins the cluster
with the nearest mean of final layers.

There is no official code; our reading is complete linkage. Variant `emdcfl` follows the EMD-CFL repository,
which produced that paper's FedClust rows: whole state dicts are compared, including batch counters
(`num_batches_tracked`), and clusters are averaged once, over this first training, and never again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from mpifl.clustering.distances import squared_distances
from mpifl.clustering.partitions import agglomerative
from mpifl.clustering.server_plans import clustered_plan, clustered_server, joined
from mpifl.core.method import Algorithm, Client, Key, Needs, NewClients, PlainVisits, Plan
from mpifl.core.metric import least
from mpifl.core.mixing import by_cluster
from mpifl.core.options import NonNegativeInt, NumModelsOrZero, PositiveFloat
from mpifl.core.parameters import take, width
from mpifl.core.types import Notes, ProblemInfo, Report, Server, Vector
from mpifl.training.evaluation import counter_weight


@dataclass(frozen=True)
class FedClust(NewClients, PlainVisits, Algorithm):
    """One row per cluster, and the initial model; table `signature` holds the clusters' mean final layers.

    Attributes:
        threshold: lambda, the distance of weights at which the hierarchy is cut; a good value depends on
            model, learning rate and epochs.
        num_clusters: cut the hierarchy into this many clusters instead; 0: cut at `threshold`.
        epochs: epochs of the first training; 0: as many as in a round.
        linkage: `complete`, `single`, `average` or `ward`.
        variant: `paper`, or `emdcfl` (compares whole state dicts instead of final layers, averages once).
    """

    threshold: PositiveFloat = 1.0
    num_clusters: NumModelsOrZero = 0
    epochs: NonNegativeInt = 0
    linkage: Literal["single", "complete", "average", "ward"] = "complete"
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "islam2024fedclust"
    needs = Needs(averages=True)
    statistics_gram = "signature"
    statistics_distance = "signature"
    statistics_from = ("epochs", "variant")

    @property
    def _compared(self) -> str:
        """The part of the weights that is compared."""
        return "head" if self.variant == "paper" else "all"

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Train for a few epochs and return v_i."""
        changes: dict[str, Any] = {"epochs": self.epochs} if self.epochs else {}
        trained = client.sgd(shown["init"][0], key, **changes)
        v = take(trained.vector, client.layout.part(self._compared)).clone()
        if self.variant == "emdcfl" and (weight := counter_weight(client.layout)) is not None:
            v = torch.cat([v, v.new_tensor([weight * trained.steps])])
        return client.report(signature=v)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cut the hierarchy."""
        assert fingerprints is not None
        distances = np.sqrt(squared_distances(fingerprints["gram"]))  # [n, n]
        if self.num_clusters:
            labels = agglomerative(
                distances, self.linkage, n_clusters=min(self.num_clusters, len(fingerprints))
            )
        else:
            labels = agglomerative(distances, self.linkage, threshold=self.threshold)
        server = clustered_server(problem, fingerprints.client, labels)
        counted = self.variant == "emdcfl" and counter_weight(problem.layout) is not None
        size = width(problem.layout.part(self._compared)) + counted
        return replace(
            server, tables={**server.tables, "signature": torch.zeros(int(labels.max()) + 1, size)}
        )

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """Store each cluster's mean final layer; under `emdcfl` also its mean model, averaged only once."""
        labels, num = server.assign[fingerprints.client], len(server.tables["signature"])
        mixings = [by_cluster(labels, num, np.ones(len(fingerprints)), into="signature", of="signature")]
        if self.variant == "emdcfl":
            models = by_cluster(labels, num + 1, fingerprints.num_samples, of="signature")
            d, sent = server.tables["model"].shape[1], server.tables["signature"].shape[1]
            mixings.append(replace(models, part=(slice(0, d),) if sent > d else None))
        return Plan(mixings)

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Join the cluster with the nearest mean final layer."""
        return joined(server, fingerprints.client, least(fingerprints["row_distance"]))

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each cluster by samples."""
        return clustered_plan(server, notes) if self.variant == "paper" else Plan([])
