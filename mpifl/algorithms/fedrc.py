"""FedRC: FedEM with a label correction, so that clusters follow p(y | x) and not how often a label occurs.

Guo et al., "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust
Clustering", ICML 2024, Algorithm 1. Legend: theta_k models, omega (FedEM's pi) the client's shares of them,
q[k, s] weight of sample s in cluster k, C[k, y] share of label y in cluster k: q[k, s] ~ omega_k
exp(-l(theta_k; s)) / C[k, y_s]. Table `labels` holds the mean over clients of sum_s q[k, s] [y_s = y];
clients normalise it to get C.
Variant `emdcfl` is that of FedEM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mpifl.core.computation import Asked, Held
from mpifl.core.method import Client, Key, Plan
from mpifl.core.mixing import Mixing, componentwise
from mpifl.core.options import NumModels
from mpifl.core.types import Message, Notes, ProblemInfo, Server

from .fedem import MixtureOfModels, losses_and_trainings

FLOOR = 1e-8  # of the label sums


@dataclass(frozen=True)
class FedRC(MixtureOfModels):
    """K rows of models and K rows of label sums, all read by everyone.

    Attributes:
        num_clusters: K, number of clusters.
    """

    num_clusters: NumModels = 3

    paper = "guo2024fedrc"
    needs = replace(MixtureOfModels.needs, classes=True)
    statistics = ("labels",)

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses and the trainings of all models."""
        return losses_and_trainings(held, self.num_clusters)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models and a constant C."""
        return problem.server(self.num_clusters, labels=torch.ones(self.num_clusters, problem.num_classes))

    def corrected(self, scores: torch.Tensor, message: Message, client: Client) -> torch.Tensor:
        """Return log omega_k - l(theta_k; s) - log C[k, y_s]."""
        C = F.normalize(message["labels"].clamp_min(FLOOR), p=1, dim=1).to(scores)  # [K, L]
        return scores - C[:, client.data.train.y].log()

    def further_uploads(self, q: torch.Tensor, message: Message, client: Client) -> dict[str, Any]:
        """Return the label sums [K, L]."""
        return {"labels": q @ F.one_hot(client.data.train.y, message["labels"].shape[1]).to(q)}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the models by samples, and the label sums over the clients that take part."""
        once = np.full((self.num_clusters, len(notes)), 1 / len(notes))
        sums = Mixing(componentwise(once), into="labels", of="labels")
        plan = super().aggregate(server, notes)
        return replace(plan, mixings=[*plan.mixings, sums])
