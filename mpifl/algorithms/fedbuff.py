"""FedBuff: the server steps along the mean of B buffered updates.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with
policy `buffer`. w <- w + eta_g / B sum_k s(lag_k) (w_k - w_tau); s(x) = 1 / sqrt(1 + x). The normaliser is
the size of the buffer; `normalise="weights"` takes the sum of the staleness weights instead (FedScale's
choice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.core.algorithm import Algorithm, Needs, Paper
from mpifl.core.client import Client
from mpifl.core.errors import require
from mpifl.core.mixing import Plan, add
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State


@dataclass(frozen=True)
class FedBuff(Algorithm):
    """One model, changed by a buffer of updates.

    Attributes:
        server_lr: eta_g.
        staleness_a: a in s(x) = (1 + x)^-a; 0 ignores staleness.
        normalise: `size` or `weights`.
    """

    server_lr: float = 1.0
    staleness_a: float = 0.5
    normalise: str = "size"

    paper: ClassVar[Paper] = Paper(
        "nguyen2022federated",
        "Nguyen, John and Malik, Kshitiz and Zhan, Hongyuan and Yousefpour, Ashkan and Rabbat, Mike and "
        "Malek, Mani and Huba, Dzmitry",
        "Federated Learning with Buffered Asynchronous Aggregation",
        "AISTATS",
        2022,
        "https://arxiv.org/abs/2106.06639",
    )
    needs: ClassVar[Needs] = Needs(asynchronous=True)

    def __post_init__(self) -> None:
        require(self.server_lr > 0, "server_lr", self.server_lr, "take a positive step")
        require(self.staleness_a >= 0, "staleness_a", self.staleness_a, "take 0 or more")
        require(self.normalise in ("size", "weights"), "normalise", self.normalise, "take size or weights")

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Report the update w_k - w_tau."""
        x = message["model"][0]
        w = client.sgd(x, key)
        return client.report(delta=w.vector - x, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Step along the weighted mean."""
        s = (1.0 + notes.staleness) ** -self.staleness_a  # [m]
        total = len(notes) if self.normalise == "size" else s.sum()
        return Plan([add(np.atleast_2d(self.server_lr * s / total), of="delta")])
