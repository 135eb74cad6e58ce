"""FedBuff: the server steps along the mean of B buffered updates.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with
policy `buffer`. w <- w + eta_g / B sum_k s(lag_k) (w_k - w_tau); s(x) = 1 / sqrt(1 + x). The normaliser is
the size of the buffer; `normalise="weights"` takes the sum of the staleness weights instead (FedScale's
choice).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from mpifl.core.method import Algorithm, Needs, Notes, PlainVisit, PlainVisits, Plan, Server
from mpifl.core.mixing import add
from mpifl.core.options import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class FedBuff(PlainVisits, Algorithm):
    """One model, changed by a buffer of updates.

    Attributes:
        server_lr: eta_g, step of the server along the mean update; running statistics are averaged.
        staleness_a: a in s(x) = (1 + x)^-a; 0 ignores staleness.
        normalise: divisor of the sum of updates: `size` (of the buffer) or `weights` (sum of staleness
            weights).
    """

    server_lr: PositiveFloat = 1.0
    staleness_a: NonNegativeFloat = 0.5
    normalise: Literal["size", "weights"] = "size"

    paper = "nguyen2022federated"
    policies = ("buffer",)
    changes = MappingProxyType({"delta": "model"})
    needs = Needs(weighs_staleness=True, averages=True)

    def plain_visit(self) -> PlainVisit:
        """Report the update w_k - w_tau."""
        return PlainVisit("delta", change=True)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Step along the weighted mean."""
        s = (1.0 + notes.staleness) ** -self.staleness_a  # [m]
        total = len(notes) if self.normalise == "size" else s.sum()
        return Plan([add(np.atleast_2d(self.server_lr * s / total), of="delta")])
