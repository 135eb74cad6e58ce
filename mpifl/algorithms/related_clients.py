"""What FLT and PCA+kM+HC share: clients whose sets of centroids are close are averaged together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.clustering.server_plans import (
    centroids_of_all,
    linked_clients,
    regrouped,
    related_plan,
    related_server,
)
from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Key, NewClients, PlainVisits, Plan, RememberedUploads
from mpifl.core.mixing import updated
from mpifl.core.options import NumModelsOrZero
from mpifl.core.types import Notes, ProblemInfo, Server


@dataclass(frozen=True)
class RelatedClients(NewClients, PlainVisits, RememberedUploads, Algorithm, ABC):
    """One row per set of related clients, and the initial model.

    Attributes:
        case: `full` (average over related clients) or `ward` (FedAvg in `num_clusters` Ward clusters; 0
            chooses their number).
        num_clusters: number of Ward clusters; 0: that of the largest mean silhouette.
        all_clients: average absent clients, too, by their last model or the initial one.
    """

    case: Literal["full", "ward"] = "full"
    num_clusters: NumModelsOrZero = 0
    all_clients: bool = True

    @property
    def mixes_remembered(self) -> bool:
        """Whether absent clients count."""
        return self.all_clients

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect under case full; use case ward, or 0"
        require(self.case == "ward" or not self.num_clusters, "num_clusters", self.num_clusters, remedy)

    @abstractmethod
    def related(self, centroids: Sequence[np.ndarray], num_initial: int) -> np.ndarray:
        """Return which clients are related, bool [n, n], from the centroids [k, e] of each.

        The first `num_initial` sent theirs before training.
        """

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Link the initial clients."""
        assert fingerprints is not None
        centroids = centroids_of_all(fingerprints, problem.num_clients)
        linked = self._linked(centroids, fingerprints.client)
        return related_server(problem, fingerprints.client, linked, centroids=centroids)

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Link new clients with all known clients, the initial ones first where they are remembered."""
        state = server.algorithm_state
        centroids = updated(state["centroids"], fingerprints.client, fingerprints["centroids"])
        everyone = np.union1d(np.flatnonzero(state["known"]), fingerprints.client)
        if "founders" in state:
            everyone = np.concatenate([state["founders"], np.setdiff1d(everyone, state["founders"])])
        linked = self._linked(centroids, everyone, len(state.get("founders", everyone)))
        return regrouped(server, everyone, linked, centroids=centroids)

    def _linked(
        self, centroids: np.ndarray, clients: np.ndarray, num_initial: int | None = None
    ) -> np.ndarray:
        """Return which of the `clients` [n] are averaged together [n, n], from centroids [N, k, e]."""
        clouds = [c[~np.isnan(c[:, 0])] for c in centroids[clients]]
        related = self.related(clouds, len(clients) if num_initial is None else num_initial)
        return linked_clients(related | np.eye(len(clients), dtype=bool), self.case, self.num_clusters)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average over related clients."""
        return related_plan(server, notes, self.all_clients)
