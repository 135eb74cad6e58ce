"""FedBuff: the server steps along the mean of B buffered updates.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with
policy `buffer`. w <- w + eta_g / B sum_k s(lag_k) (w_k - w_tau); s(x) = 1 / sqrt(1 + x). The normaliser is
the size of the buffer; `normalise="weights"` takes the sum of the staleness weights instead (FedScale's
choice).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Needs, Notes, PlainVisit, PlainVisits, Plan, Server
from mpifl.core.mixing import add


@dataclass(frozen=True)
class FedBuff(PlainVisits, Algorithm):
    """One model, changed by a buffer of updates.

    Attributes:
        server_lr: eta_g, step of the server along the mean update; running statistics are averaged.
        staleness_a: a in s(x) = (1 + x)^-a; 0 ignores staleness.
        normalise: divisor of the sum of updates: `size` (of the buffer) or `weights` (sum of staleness
            weights).
    """

    server_lr: float = 1.0
    staleness_a: float = 0.5
    normalise: str = "size"

    paper = "nguyen2022federated"
    changes = MappingProxyType({"delta": "model"})
    needs = Needs(weighs_staleness=True, averages=True)

    def __post_init__(self) -> None:
        require(self.server_lr > 0, "server_lr", self.server_lr, "use a positive step")
        require(self.staleness_a >= 0, "staleness_a", self.staleness_a, "use 0 or more")
        require(self.normalise in ("size", "weights"), "normalise", self.normalise, "use size or weights")

    def plain_visit(self) -> PlainVisit:
        """Report the update w_k - w_tau."""
        return PlainVisit("delta", change=True)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Step along the weighted mean."""
        s = (1.0 + notes.staleness) ** -self.staleness_a  # [m]
        total = len(notes) if self.normalise == "size" else s.sum()
        return Plan([add(np.atleast_2d(self.server_lr * s / total), of="delta")])
