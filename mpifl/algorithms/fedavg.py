"""FedAvg: the average of the clients' models, weighted by samples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpifl.core.method import Algorithm, Client, Key, Message, Needs, Notes, Report, RowUpdates, Server, State
from mpifl.core.mixing import Plan, average


@dataclass(frozen=True)
class FedAvg(RowUpdates, Algorithm):
    """One model for all: w <- sum_k n_k w_k / sum_k n_k."""

    paper = "mcmahan2017communication"
    needs = Needs(averages=True)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the global model."""
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])
