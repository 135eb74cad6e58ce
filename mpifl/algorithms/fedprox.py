"""FedProx: FedAvg whose clients are held near the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2. Local objective:
F_k(w) + mu/2 ||w - x||^2. Variant `unsquared` has the penalty mu sum_l ||w_l - x_l|| over tensors l instead,
as in the EMD-CFL repository, which produced that paper's FedProx rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpifl.core.method import Algorithm, Client, Key, Needs, PlainVisit, PlainVisits, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeFloat
from mpifl.core.types import Message, Notes, Report, Server, State
from mpifl.training.corrections import unsquared


@dataclass(frozen=True)
class FedProx(PlainVisits, RowUpdates, Algorithm):
    """FedAvg with a proximal term.

    Attributes:
        mu: weight of the proximal term.
        variant: `standard` (squared norm) or `unsquared` (sum of the norms of all tensors).
    """

    mu: NonNegativeFloat = 0.1
    variant: Literal["standard", "unsquared"] = "standard"

    paper = "li2020federated"
    asks = ("direction",)
    trains_once = True
    needs = Needs(averages=True)

    def plain_visit(self) -> PlainVisit | None:
        """Train with the squared term."""
        return PlainVisit(mu=self.mu) if self.variant == "standard" else None

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train with the gradient of the penalty added."""
        if self.variant == "standard":
            return super().local_update(message, state, client, key)
        x = message["model"][0]
        w = client.sgd(x, key, direction=unsquared(self.mu, x, client.layout))
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])
