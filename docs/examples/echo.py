"""A method without training: each client returns the model it downloaded.

What remains is the cost of the engine and of the messages. `launch/throughput` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.client import Client
from mpifl.core.mixing import Plan, blend
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State


@dataclass(frozen=True)
class Echo(Algorithm):
    """FedAsync without training."""

    paper: ClassVar = CATALOGUE["fedasync"].paper
    needs: ClassVar[Needs] = Needs(weighs_staleness=True)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Return the model."""
        return client.report(model=message["model"][0]), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Blend."""
        return Plan([blend(np.full((1, len(notes)), 0.1))])
