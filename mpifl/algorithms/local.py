"""Local training: every client alone, no communication.

The baseline of every paper here. A client continues from its own model; all start from the same initial
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm, Client, Key, Needs, Plan
from mpifl.core.types import Message, Notes, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains alone."""

    paper = "mcmahan2017communication"
    needs = Needs(client_state=True, alone=True)

    def reads(self, server: Server, k: int) -> Reads:
        """Download nothing: all clients know the initial model from the seed."""
        return {}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train on from the client's own model."""
        trained = client.sgd(self.model_of(message, state, client), key)
        return client.report(metrics={"train_loss": trained.loss}), {"model": trained.vector}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Mix nothing."""
        return Plan([])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own model."""
        return state.get("model", client.init)

    def labels(self, server: Server) -> np.ndarray:
        """Return a cluster of its own for every client."""
        return np.arange(len(server.assign))
