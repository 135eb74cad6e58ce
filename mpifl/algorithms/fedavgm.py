"""FedAvgM: FedAvg with momentum at the server.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019, section 4.3: v <- beta v + dw, w <- w + v, dw the mean update weighted by samples. Buffers are averaged.
`server_lr` is the usual extension; beta 0 and server_lr 1 give FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from mpifl.core.algorithm import Algorithm, Needs, Paper
from mpifl.core.client import Client
from mpifl.core.errors import require
from mpifl.core.mixing import Plan, average
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State, World


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Table `model`, and table `momentum` that nobody reads.

    Attributes:
        beta: momentum of the server.
        server_lr: step of the server along v.
    """

    beta: float = 0.9
    server_lr: float = 1.0

    paper: ClassVar[Paper] = Paper(
        "hsu2019measuring",
        "Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew",
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        "arXiv:1909.06335",
        2019,
        "https://arxiv.org/abs/1909.06335",
    )
    needs: ClassVar[Needs] = Needs(polish=True)

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, "beta", self.beta, "take a value in [0, 1); 0 is FedAvg")
        require(self.server_lr > 0, "server_lr", self.server_lr, "take a positive step")

    def setup(self, world: World, prints: Notes | None, key: Key) -> Server:
        """Start with v = 0."""
        v = torch.zeros(1, world.layout.num_parameters)
        return Server({"model": world.init(0)[None], "momentum": v}, np.zeros(world.num_clients, np.int64))

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the global model."""
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def server_update(self, old: Server, new: Server) -> Server:
        """v <- beta v + dw; w <- w + server_lr v."""
        w, v = old.tables["model"], old.tables["momentum"]
        p = v.shape[1]
        v = self.beta * v + (new.tables["model"] - w)[:, :p]
        model = torch.cat([w[:, :p] + self.server_lr * v, new.tables["model"][:, p:]], 1)
        return replace(new, tables={**new.tables, "model": model, "momentum": v})
