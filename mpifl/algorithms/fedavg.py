"""FedAvg: the average of the clients' models, weighted by samples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpifl.core.algorithm import Algorithm, Paper
from mpifl.core.client import Client
from mpifl.core.mixing import Plan, average
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """One model for all: w <- sum_k n_k w_k / sum_k n_k."""

    paper: ClassVar[Paper] = Paper(
        "mcmahan2017communication",
        "McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Aguera y Arcas, B.",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "AISTATS",
        2017,
        "https://arxiv.org/abs/1602.05629",
    )

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the global model."""
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])
