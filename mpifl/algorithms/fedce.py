"""FedCE: clients evaluate all models in each visit; their association with clusters grows over the rounds.

Cai et al., "FedCE: Personalized Federated Learning Method based on Clustering Ensembles", ACM MM 2023. No
official code is known; this follows the EMD-CFL repository. Legend: L_i vector of client c's batch-mean
validation losses under model w_i, b the model of smallest mean, h[c, i] association. In a visit h[c, b] grows
by 1 and the other h[c, i] by exp(-delta ||L_b - L_i||_2). The client trains w_b and is evaluated with it, or
before its first visit with the w_b it would train. Server: w_i <- sum_c a_ci w_c, a_.i = softmax_c h[c, i].

Variant `emdcfl` keeps a defect of that repository: each of a visit's K comparisons adds 1 to the association
of the best model so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan
from mpifl.core.mixing import rows, updated
from mpifl.core.options import NonNegativeFloat, NumModels
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State, Vector
from mpifl.training.evaluation import component_losses

VAL_BATCH = 64  # samples


@dataclass(frozen=True)
class FedCE(Algorithm):
    """K rows, all read by everyone, each trained by those whom it fits best.

    Attributes:
        num_clusters: K, number of clusters.
        delta: how fast the growth of the association falls with the distance between loss vectors.
        variant: `paper`, or `emdcfl` (the EMD-CFL repository, with its defect in the association).
    """

    num_clusters: NumModels = 4
    delta: NonNegativeFloat = 0.5
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "cai2023fedce"
    evaluates_rows = True
    asks = ("outputs",)
    needs = Needs(min_cohort=2, validation=True, different_starts=True)
    downloads = Downloads(reads="all", serves="own", serves_unseen="all")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models and h = 0."""
        h = np.zeros((problem.num_clients, self.num_clusters))
        return problem.server(self.num_clusters, algorithm_state={"association": h})

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the served model, or the best of several."""
        models = message["model"]
        return models[self._compare(models, client)[0] if len(models) > 1 else 0]

    def _compare(self, models: torch.Tensor, client: Client) -> tuple[int, np.ndarray]:
        """Return the best of `models` [K, d] on validation data, and the growth [K] of the association."""
        losses = component_losses(client, models, client.data.val)  # [K, n]
        L = torch.stack([batch.mean(1) for batch in losses.split(VAL_BATCH, dim=1)], 1)
        return association(L.cpu().double().numpy(), self.delta, self.variant == "emdcfl")

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Compare the models, train the best."""
        b, h = self._compare(message["model"], client)
        w = client.sgd(message["model"][b], key)
        notes = {"association": h, "best": b}
        return client.report(notes, {"train_loss": w.loss}, unsent=("best",), model=w.vector), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """w_i <- sum_c softmax_c(h[c, i]) w_c."""
        h = server.algorithm_state["association"].copy()  # [N, K]
        np.add.at(h, notes.client, notes["association"])  # a client may occur twice
        assign = updated(server.assign, notes.client, notes["best"])
        ours = h[notes.client].T  # [K, m]
        a = np.exp(ours - ours.max(1, keepdims=True))
        return Plan([rows(a)], assign=assign, algorithm_state={"association": h})


def association(L: np.ndarray, delta: float, running: bool = False) -> tuple[int, np.ndarray]:
    """Return the best model b and the growth [K] of the association.

    Args:
        L: batch losses [K, batches].
        delta: decay of the paper's exponential.
        running: add 1 to the best model so far after every comparison, instead of once to the best model.
    """
    mean = L.mean(1)
    b = int(mean.argmin())
    known = np.isfinite(L).all(1)  # a model that diverged has no association
    growth = np.zeros(len(L))
    growth[known] = np.exp(-delta * np.linalg.norm(L[known] - L[b], axis=1))
    growth[b] = 0.0 if running else 1.0
    if running:
        for i in range(len(L)):
            growth[int(mean[: i + 1].argmin())] += 1.0
    return b, growth
