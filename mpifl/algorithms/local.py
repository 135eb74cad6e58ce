"""Local training: every client alone, no communication.

The baseline of every paper here. A client continues from its own model, all from the same initial one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.core.algorithm import Algorithm, Needs, Paper
from mpifl.core.client import Client
from mpifl.core.mixing import Plan
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains alone."""

    paper: ClassVar[Paper] = Paper(
        "mcmahan2017communication",
        "McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Aguera y Arcas, B.",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "AISTATS",
        2017,
        "https://arxiv.org/abs/1602.05629",
    )
    needs: ClassVar[Needs] = Needs(state=True)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the initial model, known to all from the seed; nothing that changes."""
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
        """Every client is a cluster of its own."""
        return np.arange(len(server.assign))
