"""What FLT and PCA+kM+HC share: clients whose sets of centroids are close are averaged together."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
class Look:
    """Whose centroids are compared.

    Attributes:
        centroids: those of all clients [N, k, e].
        clients: numbers of the clients [n]; the first `num_initial` sent their centroids before training.
        num_initial: how many did.
        before: the centroids of the last look; None for the first.
        new: clients whose centroids differ from these.
    """

    centroids: np.ndarray
    clients: np.ndarray
    num_initial: int
    before: np.ndarray | None = None
    new: np.ndarray | None = None


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
    def related(self, look: Look) -> np.ndarray:
        """Return which of the clients of a look are related, bool [n, n]."""

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Link the initial clients."""
        assert fingerprints is not None
        centroids = centroids_of_all(fingerprints, problem.num_clients)
        linked = self._linked(Look(centroids, fingerprints.client, len(fingerprints.client)))
        return related_server(problem, fingerprints.client, linked, centroids=centroids)

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Link new clients with all known clients, the initial ones first where they are remembered."""
        state = server.algorithm_state
        before, who = state["centroids"], fingerprints.client
        centroids = updated(before, who, fingerprints["centroids"])
        everyone = np.union1d(np.flatnonzero(state["known"]), who)
        if "founders" in state:
            everyone = np.concatenate([state["founders"], np.setdiff1d(everyone, state["founders"])])
        num_initial = len(state.get("founders", everyone))
        linked = self._linked(Look(centroids, everyone, num_initial, before, who))
        return regrouped(server, everyone, linked, centroids=centroids)

    def _linked(self, look: Look) -> np.ndarray:
        """Return which of the clients of a look are averaged together, bool [n, n]."""
        related = self.related(look) | np.eye(len(look.clients), dtype=bool)
        return linked_clients(related, self.case, self.num_clusters)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average over related clients."""
        return related_plan(server, notes, self.all_clients)


def cloud(centroids: np.ndarray) -> np.ndarray:
    """Return the centroids of one client [k, e] without the rows of NaN."""
    return np.asarray(centroids[~np.isnan(centroids[:, 0])])
