"""pFedGraph: every client gets its own average, weighted by a collaboration graph inferred from updates.

Ye et al., "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023, Algorithm 1.
Legend: dw_i update of client i, d_ij = -cos(dw_i, dw_j), p_j = n_j / n. Row i of the graph minimises alpha
||x||^2 + (d_i - 2 alpha p)'x on the simplex, which is the projection of p - d_i / (2 alpha): no QP solver.
Local loss: cross-entropy - lam <v_i, w> / ||w||, with v_i = sum_j x_ij w_j / ||w_j|| in table `direction`
(zero in round 1, so that there is no such term).

The authors' code adds the cosine term, against its own objective (variant `repo`). As in that code, dw is the
change since the initial model without buffers, and cosines above 0.9 count as 1. Variant `emdcfl` follows the
EMD-CFL repository: dw is the change of the whole state dict since the start of the round,
including batch counters (`num_batches_tracked`; on a ResNet all cosines are then near 1, and the graph is
uniform averaging); cosines are not clipped; v_i is the direction of the received model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.clustering.partitions import simplex_projection
from mpifl.clustering.server_plans import dissimilarity, graph_plan, own_models
from mpifl.core.method import Algorithm, Client, ComparedUploads, Downloads, Key, Needs, Plan, Trained
from mpifl.core.mixing import sample_weights
from mpifl.core.options import NonNegativeFloat, PositiveFloat
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector
from mpifl.training.corrections import aligned_vectors, train_aligned


@dataclass(frozen=True)
class CollaborationGraph(ComparedUploads, Algorithm, ABC):
    """N rows, one for each client, which reads its own; table `direction` has the v_i."""

    variant: Literal["paper", "repo", "emdcfl"] = "paper"

    asks = ("direction",)
    needs = Needs(row_per_client=True)
    downloads = Downloads(serves="own")
    gram = "delta"

    @abstractmethod
    def pull(self) -> float:
        """Return lam, the weight of the cosine term in local training."""

    @abstractmethod
    def graph(self, d: np.ndarray, notes: Notes) -> np.ndarray:
        """Return the graph X [m, m] from the dissimilarities of the updates d [m, m]."""

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clients alike, with zero directions."""
        return own_models(problem, directions=self.variant != "emdcfl")

    def reads(self, server: Server, k: int) -> Reads:
        """Download the own mixture and the direction to train towards."""
        return {name: (k,) for name in server.tables}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train towards v_i; the server computes the compared update from the upload."""
        trained, vectors = train_aligned(client, message, self.pull(), self.variant, key)
        notes, metrics = self.notes_of(trained, client), {"train_loss": trained.loss}
        return client.report(notes, metrics, unsent=("delta", "direction"), based_on=None, **vectors), {}

    def notes_of(self, trained: Trained, client: Client) -> dict[str, np.ndarray]:
        """Return the notes of a visit. Default: none."""
        return {}

    def unsent_vectors(self, report: Report, arrived: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return update and direction of the model as it arrives."""
        return aligned_vectors(report, arrived["model"])

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """w_i <- sum_j x_ij w_j, and v_i likewise, over the clients that take part."""
        d = dissimilarity(notes["gram"], None if self.variant == "emdcfl" else -0.9)
        return graph_plan(server, notes, self.graph(d, notes))


@dataclass(frozen=True)
class PFedGraph(CollaborationGraph):
    """N rows, one for each client, which reads its own.

    Attributes:
        alpha: weight of the term that holds the graph near the clients' shares of samples; a large value is
            FedAvg.
        lam: weight of the cosine term in local training.
        variant: `paper`, `repo` (opposite sign of the cosine term) or `emdcfl` (changes of whole state dicts
            since the start of the round, cosines not clipped, local term towards the received model).
    """

    alpha: PositiveFloat = 0.8
    lam: NonNegativeFloat = 0.01

    paper = "ye2023personalized"

    def pull(self) -> float:
        """Return lam."""
        return self.lam

    def graph(self, d: np.ndarray, notes: Notes) -> np.ndarray:
        """Return the graph that stays near the clients' shares of samples."""
        return graph(d, sample_weights(notes), self.alpha)


def graph(d: np.ndarray, p: np.ndarray, alpha: float) -> np.ndarray:
    """Return argmin of alpha ||x_i||^2 + (d_i - 2 alpha p)'x_i on the simplex, for every row i [m, m]."""
    return simplex_projection(p - d / (2 * alpha))
