"""HypCluster: K hypotheses; each client trains the one with the lowest loss, the server averages by samples.

Mansour et al., "Three Approaches for Personalization with Applications to Federated Learning", 2020,
Algorithm HypCluster. As IFCA's model averaging, except that a cluster's clients are weighted by samples, and
that the paper considers any number of hypotheses from independent starts. At test time a client uses its last
training choice; a client that never took part chooses when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpifl.core.computation import Asked, Held
from mpifl.core.method import (
    Algorithm,
    Client,
    Downloads,
    Key,
    Needs,
    PlainVisit,
    PlainVisits,
    Plan,
    RowUpdates,
)
from mpifl.core.mixing import by_cluster, updated
from mpifl.core.options import NumModels
from mpifl.core.types import Message, Notes, ProblemInfo, Server, State, Vector
from mpifl.training.evaluation import fitting_model


@dataclass(frozen=True)
class HypCluster(PlainVisits, RowUpdates, Algorithm):
    """K rows, all read by everyone.

    Attributes:
        num_clusters: K, number of hypotheses.
    """

    num_clusters: NumModels = 4

    trained = "cluster"
    evaluates_rows = True
    paper = "mansour2020three"
    needs = Needs(averages=True, different_starts=True)
    downloads = Downloads(reads="all", serves="own", serves_unseen="all")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models."""
        return problem.server(self.num_clusters)

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the served hypothesis, or the best-fitting of several."""
        return fitting_model(client, message["model"])

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses of all hypotheses, and a training."""
        return [Asked("loss", held.train, self.num_clusters), Asked("sgd", held.train)]

    def plain_visit(self) -> PlainVisit:
        """Train the best hypothesis."""
        return PlainVisit(choice="cluster")

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each hypothesis by samples; one that nobody chose stays as it is."""
        k = notes["cluster"].astype(int)
        assign = updated(server.assign, notes.client, k)
        return Plan([by_cluster(k, self.num_clusters, notes.num_samples)], assign=assign)
