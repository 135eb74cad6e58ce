"""FedAvg as a method of mpifl: the loop of plain_fedavg.py without the loop.

Run from the root of the repository, alone or with any number of ranks, to the same numbers:

    mpifl run docs/examples/fedavg.yaml
    mpirun -n 3 mpifl run docs/examples/fedavg.yaml
"""

from __future__ import annotations

from dataclasses import dataclass

from mpifl.core.method import Algorithm, Client, Key, Message, Notes, Plan, Report, Server, State
from mpifl.core.mixing import average


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """One model for all clients: w <- sum_k n_k w_k / sum_k n_k."""

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the downloaded model on the client's data."""
        trained = client.sgd(message["model"][0], key)
        return client.report(model=trained.vector, metrics={"train_loss": trained.loss}), state

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the uploads by numbers of samples."""
        return Plan([average(notes)])
