"""MyMethod: a method of your own.

    mpifl run quickstart --algorithm '{name: "my_method.py:MyMethod"}'
    mpifl check my_method.py:MyMethod

As it stands, it is FedAvg that gives clients with a higher loss a larger weight. `docs/writing-a-method.md`
explains the six hooks that most methods need, `mpifl/core/algorithm.py` all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm, Client, Key, Message, Notes, Plan, Report, Server, State
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeFloat


@dataclass(frozen=True)
class MyMethod(Algorithm):
    """What it does, in one sentence.

    Attributes:
        power: the weight of a client is n_k * loss_k^power; 0 is FedAvg.
    """

    power: NonNegativeFloat = 0.5
    paper = "@misc{my_method, author = {Author}, title = {Title}, year = {2026}}"

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the downloaded model; report its loss before training, and upload the trained model."""
        start = message["model"][0]  # the row that the server assigned to this client, float32 [d]
        before = client.loss(start)
        trained = client.sgd(start, key)
        report = client.report({"before": before}, {"train_loss": trained.loss}, model=trained.vector)
        return report, state

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the uploads into the one model."""
        weights = notes.num_samples * np.power(notes["before"], self.power)  # [m], ordered by client
        return Plan([average(notes, weights=weights)])
