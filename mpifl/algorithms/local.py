"""Local training: every client alone, no communication.

The baseline of every paper here. A client continues from its own model; all start from the same initial
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan
from mpifl.core.types import Message, Notes, Report, Server, State


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains alone."""

    paper = "mcmahan2017communication"
    needs = Needs(client_state=True, alone=True)
    downloads = Downloads(reads="none", serves="none")

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train on from the client's own model."""
        trained = client.sgd(self.model_of(message, state, client), key)
        return client.report(metrics={"train_loss": trained.loss}), {"model": trained.vector}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Mix nothing."""
        return Plan([])

    def labels(self, server: Server) -> np.ndarray:
        """Return a cluster of its own for every client."""
        return np.arange(len(server.assign))
