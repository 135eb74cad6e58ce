"""FedAsync: the server blends in every upload on arrival; a stale upload has less weight.

Xie et al., "Asynchronous Federated Optimization", OPT 2020, Algorithm 1. alpha_t = alpha s(t - tau), w <- (1
- alpha_t) w + alpha_t w_k; local objective with a proximal term rho/2 ||w - w_tau||^2. Staleness functions,
section 5.2: constant s = 1; polynomial s(x) = (x + 1)^-a; hinge s(x) = 1 if x <= b, else 1 / (a (x - b) + 1).
Several uploads of one step are blended in one after the other, in order of arrival. In rounds, where all
arrive at once, the order is drawn at random for each round.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.core.method import Algorithm, Needs, Notes, PlainVisit, PlainVisits, Plan, Server
from mpifl.core.mixing import in_turn
from mpifl.core.options import NonNegativeFloat, PositiveShare


@dataclass(frozen=True)
class BlendedUploads(PlainVisits, Algorithm, ABC):
    """Uploads are blended into rows, the less the staler they are.

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
    policies = ("every_arrival", "drawn_staleness", "client_decides")  # one upload a step
    needs = Needs(weighs_staleness=True)

    def plain_visit(self) -> PlainVisit:
        """Train with a proximal term towards the downloaded model."""
        return PlainVisit(mu=self.rho or None)

    def rates(self, lag: np.ndarray) -> np.ndarray:
        """Return alpha_t = alpha s(lag) [m]."""
        s = np.ones(len(lag))
        if self.staleness == "polynomial":
            s = (lag + 1.0) ** -self.a
        if self.staleness == "hinge":
            s = np.where(lag <= self.b, 1.0, 1 / (self.a * np.maximum(lag - self.b, 0) + 1))
        return self.alpha * s


@dataclass(frozen=True)
class FedAsync(BlendedUploads):
    """One model, changed at every arrival."""

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Blend each upload in, one after the other."""
        return Plan([in_turn(self.rates(notes.staleness), order=notes.arrival)])
