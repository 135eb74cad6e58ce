"""FedAsync: the server blends in every upload on arrival; a stale upload has less weight.

Xie et al., "Asynchronous Federated Optimization", OPT 2020, Algorithm 1. alpha_t = alpha s(t - tau), w <- (1
- alpha_t) w + alpha_t w_k; local objective with a proximal term rho/2 ||w - w_tau||^2. Staleness functions,
section 5.2: constant s = 1; polynomial s(x) = (x + 1)^-a; hinge s(x) = 1 if x <= b, else 1 / (a (x - b) + 1).
Several uploads of one step are blended in one after the other, in order of arrival. In rounds, where all
arrive at once, the order is drawn at random for each round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.core.method import Algorithm, Needs, Notes, PlainVisit, PlainVisits, Plan, Server
from mpifl.core.mixing import in_turn
from mpifl.core.options import NonNegativeFloat, PositiveShare


@dataclass(frozen=True)
class FedAsync(PlainVisits, Algorithm):
    """One model, changed at every arrival.

    Attributes:
        alpha: mixing rate of a fresh upload.
        staleness: staleness function: `constant`, `polynomial` or `hinge`.
        a: decay of the polynomial (x + 1)^-a and of the hinge 1 / (a (x - b) + 1); x is the staleness.
        b: largest staleness at which the hinge is 1.
        rho: weight of the proximal term.
    """

    alpha: PositiveShare = 0.6
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: NonNegativeFloat = 0.5
    b: NonNegativeFloat = 4.0
    rho: NonNegativeFloat = 0.005

    paper = "xie2020asynchronous"
    needs = Needs(weighs_staleness=True)

    def plain_visit(self) -> PlainVisit:
        """Train with a proximal term towards the downloaded model."""
        return PlainVisit(mu=self.rho or None)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Blend each upload in, one after the other."""
        alpha = self.alpha * weight_of(self.staleness, notes.staleness, self.a, self.b)  # [m]
        return Plan([in_turn(alpha, order=notes.arrival)])


def weight_of(staleness: str, lag: np.ndarray, a: float, b: float) -> np.ndarray:
    """Return s(lag) [m]."""
    if staleness == "polynomial":
        return (lag + 1.0) ** -a
    if staleness == "hinge":
        return np.where(lag <= b, 1.0, 1 / (a * np.maximum(lag - b, 0) + 1))
    return np.ones(len(lag))
