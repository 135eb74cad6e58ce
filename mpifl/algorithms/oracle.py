"""Oracle: FedAvg inside the true groups, the upper bound of clustered methods.

The baseline of EMD-CFL and UCFL ("Clustered Federated Learning via Embedding Distributions", section 4): the
same loop as EMD-CFL with the true neighbourhoods, absent members' last models included, clients never seen
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.cluster.neighbourhoods import neighbourhood_labels, neighbourhood_plan
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.client import Client
from mpifl.core.errors import require
from mpifl.core.mixing import Plan
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State, World

from .emdcfl import EMDCFL


@dataclass(frozen=True)
class Oracle(Algorithm):
    """One row per true group."""

    paper = EMDCFL.paper
    needs: ClassVar[Needs] = Needs(groups=True, memory="model")

    def check(self, world: World) -> None:
        """The truth must be known."""
        require(world.groups is not None, "name", "oracle", "this scenario has no true groups; take another")

    def setup(self, world: World, prints: Notes | None, key: Key) -> Server:
        """Remember the truth."""
        assert world.groups is not None
        start = np.zeros(world.num_clients, np.int64)
        return Server({"model": world.init(0)[None]}, start, {"groups": world.groups})

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the group's model."""
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average per true group."""
        group = server.memo["groups"][notes.client]
        return neighbourhood_plan(server, notes, group[:, None] == group[None, :])

    def labels(self, server: Server) -> np.ndarray:
        """Name the groups seen so far."""
        return neighbourhood_labels(server)
