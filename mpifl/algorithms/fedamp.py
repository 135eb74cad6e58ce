"""FedAMP: the server keeps a model for each client, drawn towards the models close to the client's own.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1. Legend:
w_i model of client i, u_i its cloud model, A(x) = 1 - exp(-x / sigma). u_i <- sum_j xi_ij w_j with xi_ij =
alpha A'(||w_i - w_j||^2) for j != i and xi_ii = 1 - sum of the others; w_i <- argmin F_i(w) + lambda / (2
alpha) ||w - u_i||^2, here by local training from u_i. Clients are evaluated with w_i. Variant `heur`
(HeurFedAMP): xi_ij ~ exp(sigma cos(w_i, w_j)), xi_ii = `self_weight`.

Differs: alpha does not decay over the rounds; distances include batch-norm statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.clustering.distances import cosine_matrix, squared_distances
from mpifl.core.client import proximal
from mpifl.core.method import Algorithm, Client, ComparedUploads, Downloads, Key, Needs, Plan
from mpifl.core.mixing import own_rows
from mpifl.core.options import NonNegativeFloat, PositiveFloat, UnitInterval
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State

EXPONENT = 700  # exp(-x) is 0 for somewhat larger x


@dataclass(frozen=True)
class FedAMP(ComparedUploads, Algorithm):
    """N rows, one cloud model for each client.

    Attributes:
        lam: lambda; the pull towards the client's cloud model has weight lambda / alpha.
        alpha: step of the message passing; alpha (m - 1) / sigma should stay below 1 for m participants.
        sigma: squared distance at which attention has fallen to 1/e (`paper`), sharpness (`heur`).
        self_weight: share of the client's own model (`heur`).
        variant: `paper` or `heur`.
    """

    lam: NonNegativeFloat = 1.0
    alpha: PositiveFloat = 1e4
    sigma: PositiveFloat = 1e6
    self_weight: UnitInterval = 0.5
    variant: Literal["paper", "heur"] = "paper"

    paper = "huang2021personalized"
    asks = ("direction",)
    trains_once = True
    gram = "model"
    needs = Needs(client_state=True, row_per_client=True)
    downloads = Downloads(serves="none")

    def ignored_options(self) -> Mapping[str, str]:
        """`self_weight` belongs to variant `heur`."""
        return {} if self.variant == "heur" else {"self_weight": "only variant heur reads it"}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clients alike."""
        return problem.server(problem.alike(problem.num_clients), np.arange(problem.num_clients))

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train with a proximal term towards u_i."""
        u = message["model"][0]
        w = client.sgd(u, key, direction=proximal(self.lam / self.alpha, u))
        kept = state if state and not w.steps else {"model": w.vector}
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), kept

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """u_i <- sum_j xi_ij w_j over the clients that take part."""
        return Plan([own_rows(self.attention(notes["gram"]), notes, len(server.assign))])

    def attention(self, gram: np.ndarray) -> np.ndarray:
        """Return xi [m, m] from the products of the models."""
        if self.variant == "paper":
            xi = self.alpha / self.sigma * np.exp(-squared_distances(gram) / self.sigma)
        else:
            cosines = cosine_matrix(gram)
            np.fill_diagonal(cosines, -1.0)
            nearest = cosines.max(1, keepdims=True)
            top = np.where(self.sigma * (1.0 - nearest) < EXPONENT, 1.0, nearest)  # any gives the same shares
            xi = np.exp(self.sigma * (cosines - top))
        np.fill_diagonal(xi, 0.0)
        if self.variant == "heur" and len(xi) > 1:
            xi *= (1.0 - self.self_weight) / xi.sum(1, keepdims=True)
        return np.asarray(xi + np.diag(1.0 - xi.sum(1)))
