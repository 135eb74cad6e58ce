"""FedRC: FedEM with a label correction, so that clusters follow p(y | x) and not how often a label occurs.

Guo et al., "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust
Clustering", ICML 2024, Algorithm 1. Legend: theta_k models, omega the client's shares of them, q[k, s] weight
of sample s in cluster k, C[k, y] share of label y in cluster k: q[k, s] ~ omega_k exp(-l(theta_k; s)) / C[k,
y_s]. Table `labels` holds the mean over clients of sum_s q[k, s] [y_s = y]; clients normalise it to get C.
Variant `emdcfl` is that of FedEM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Key, Needs, Plan
from mpifl.core.mixing import Mixing, componentwise, sample_weights
from mpifl.core.options import NumModels
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State
from mpifl.training.evaluation import component_losses, evaluate_mixture, responsibilities, train_components

FLOOR = 1e-8  # of the label sums


@dataclass(frozen=True)
class FedRC(Algorithm):
    """K rows of models and K rows of label sums, all read by everyone.

    Attributes:
        num_clusters: K, number of clusters.
        variant: `paper` (evaluate the mixture) or `emdcfl` (evaluate the last model as the client
            trained it).
    """

    num_clusters: NumModels = 3
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "guo2024fedrc"
    needs = Needs(
        client_state=True,
        averages=True,
        classes=True,
        sample_losses=True,
        different_starts=True,
        several_models=True,
    )
    statistics = ("labels",)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models and a constant C."""
        models = torch.stack([problem.init(j) for j in range(self.num_clusters)])
        labels = torch.ones(self.num_clusters, problem.num_classes)
        return Server({"model": models, "labels": labels}, np.zeros(problem.num_clients, np.int64))

    def reads(self, server: Server, k: int) -> Reads:
        """Download all models and label sums."""
        everything = tuple(range(self.num_clusters))
        return {"model": everything, "labels": everything}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """E step, omega, label sums, weighted training, in this order."""
        q, omega = self._expect(message, state, client)
        sums = q @ F.one_hot(client.data.train.y, message["labels"].shape[1]).to(q)  # [K, L]
        theta, loss = train_components(client, message["model"], q, key)
        notes = {"cluster": int(omega.argmax())}
        report = client.report(notes, {"train_loss": loss}, unsent=("cluster",), model=theta, labels=sums)
        return report, {"omega": omega} | ({"last": theta[-1]} if self.variant == "emdcfl" else {})

    def _expect(self, message: Message, state: State, client: Client) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [K, n] and the new omega [K]."""
        omega = state.get("omega", torch.full((self.num_clusters,), 1 / self.num_clusters))
        losses = component_losses(client, message["model"])  # [K, n]
        C = F.normalize(message["labels"].clamp_min(FLOOR), p=1, dim=1).to(losses)  # [K, L]
        score = omega.to(losses).log()[:, None] - losses - C[:, client.data.train.y].log()
        q = responsibilities(score)
        return q, q.mean(1).cpu()

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """theta_k <- sum_i n_i theta_ik / n; average the label sums over the clients that take part."""
        n = np.tile(sample_weights(notes), (self.num_clusters, 1))  # [K, m]
        once = np.full_like(n, 1 / len(notes))
        assign = server.assign.copy()
        assign[notes.client] = notes["cluster"]
        sums = Mixing(componentwise(once), into="labels", of="labels")
        return Plan([Mixing(componentwise(n)), sums], assign=assign)

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate sum_k omega_k softmax(theta_k(x))."""
        if self.variant == "emdcfl":
            return client.evaluate(state.get("last", message["model"][-1]), split)
        omega = state["omega"] if "omega" in state else self._expect(message, state, client)[1]
        return evaluate_mixture(client, message["model"], omega, split)
