"""FedAvg: the average of the clients' models, weighted by samples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1.

With `memory` the average runs over all clients in every step, as in FLT's repository (Jamali-Rad et al.,
TNNLS 2022, `all_clients`): who does not take part counts with the last model that it uploaded, and with the
initial model before it ever took part. Legend: w^0 the initial model, wbar_k the last upload of client k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.core.capabilities import Capability, declared
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Message,
    Notes,
    ProblemInfo,
    RememberedUploads,
    Report,
    Server,
    State,
)
from mpifl.core.mixing import Mixing, Plan, average


@dataclass(frozen=True)
class FedAvg(RememberedUploads, Algorithm):
    """One model for all: w <- sum_k n_k w_k / sum_k n_k.

    Attributes:
        memory: average over all clients, also over the last models of those who do not take part.
    """

    memory: bool = False

    paper = "mcmahan2017communication"

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """Uploads are remembered with `memory` only."""
        return declared(type(self)) - (frozenset() if self.memory else {RememberedUploads})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from one model; with memory a second row keeps w^0."""
        server = super().setup(problem, fingerprints, key)
        if not self.memory:
            return server
        w0 = server.tables["model"]
        return replace(
            server,
            tables={"model": torch.cat([w0, w0])},
            algorithm_state={"num_samples": problem.num_samples},
        )

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the global model."""
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return self._over_everyone(server, notes) if self.memory else Plan([average(notes)])

    def _over_everyone(self, server: Server, notes: Notes) -> Plan:
        """Return w <- (sum_k n_k wbar_k + sum_j n_j w^0) / sum n, j over those who never took part."""
        n = server.algorithm_state["num_samples"].copy()
        n[notes.client] = notes.num_samples  # data may change from visit to visit
        unseen = n.sum() - n[notes.client].sum()
        weights = np.stack([n[notes.client] / n.sum(), np.zeros(len(notes))])  # [2, m]
        keep = np.array([[0.0, unseen / n.sum()], [0.0, 1.0]])  # [2, 2]
        return Plan([Mixing(weights, keep=keep)], algorithm_state={"num_samples": n})
