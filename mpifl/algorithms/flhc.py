"""FL+HC: some rounds of FedAvg, then one hierarchical clustering of the updates, then FedAvg in each cluster.

Briggs, Fan and Andras, "Federated Learning with Hierarchical Clustering of Local Updates to Improve Training
on Non-IID Data", IJCNN 2020, Algorithm 1. Legend: n rounds before the clustering, dw_k update of client k
from the shared model, P = (metric, linkage, threshold).

Our reading: the clustered updates are averaged inside the new clusters in the same round. The paper asks all
clients for an update in that round; here absent clients stay together with the shared model and continue with
FedAvg among themselves, unless `max_age` lets their last updates count. The paper's third metric, L1, is left
out: it would need all updates in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from mpifl.clustering.distances import cosine_matrix, squared_distances
from mpifl.clustering.partitions import agglomerative, last_uploads
from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    ComparedUploads,
    Needs,
    Notes,
    PlainVisit,
    PlainVisits,
    Plan,
    RememberedUploads,
    Server,
)
from mpifl.core.mixing import by_cluster
from mpifl.core.options import NonNegativeInt, NumModelsOrZero, PositiveFloat


@dataclass(frozen=True)
class FLHC(ComparedUploads, RememberedUploads, PlainVisits, Algorithm):
    """One row, then one per cluster (and the shared model, if somebody was absent).

    Attributes:
        rounds_before: n, server steps of FedAvg before the clustering.
        threshold: where the hierarchy is cut: a distance of updates (euclidean) or 1 - cosine.
        num_clusters: cut the hierarchy into this many clusters instead; 0: cut at `threshold`.
        metric: `euclidean` or `cosine`.
        linkage: `average`, `complete`, `single` or `ward`.
        max_age: oldest update that is clustered, in server steps since the model that it was computed from;
            0: those of the step only; null: the last one of each client.
    """

    rounds_before: NonNegativeInt = 10
    threshold: PositiveFloat = 1.0
    num_clusters: NumModelsOrZero = 0
    metric: Literal["euclidean", "cosine"] = "euclidean"
    linkage: Literal["single", "complete", "average", "ward"] = "average"
    max_age: NonNegativeInt | None = 0

    paper = "briggs2020federated"
    changes = MappingProxyType({"delta": "model"})
    needs = Needs(averages=True)
    gram = "delta"
    remembered = "delta"
    mixes_remembered = False  # only clustered

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = (self.linkage, self.metric) != ("ward", "cosine")
        require(fits, "linkage", self.linkage, "needs metric euclidean")

    def ignored_options(self) -> Mapping[str, str]:
        """`num_clusters` replaces `threshold`."""
        return {"threshold": "num_clusters cuts the hierarchy"} if self.num_clusters else {}

    def compares(self, server: Server) -> bool:
        """Compare updates in one round only."""
        return server.version == self.rounds_before

    def plain_visit(self) -> PlainVisit:
        """Report dw_k."""
        return PlainVisit("delta", change=True)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Cluster after `rounds_before` rounds; in every round average each cluster's updates by samples."""
        assign, keep = server.assign, np.eye(len(server.tables["model"]))
        if self.compares(server):
            last = last_uploads(notes.client)  # a client may occur twice in a buffer
            labels = self._labels(notes["gram"][np.ix_(last, last)])
            assign = np.full(len(assign), labels.max() + 1)
            assign[notes.client[last]] = labels
            keep = np.ones((assign.max() + 1, 1))  # all start from the shared model
        updates = by_cluster(assign[notes.client], len(keep), notes.num_samples * notes.fresh, of="delta")
        return Plan([replace(updates, keep=keep)], assign=assign)

    def _labels(self, gram: np.ndarray) -> np.ndarray:
        """Return the cluster [m] of each update."""
        cosine = self.metric == "cosine"
        distances = np.maximum(1 - cosine_matrix(gram), 0) if cosine else np.sqrt(squared_distances(gram))
        if self.num_clusters:
            return agglomerative(distances, self.linkage, n_clusters=min(self.num_clusters, len(gram)))
        return agglomerative(distances, self.linkage, threshold=self.threshold)
