"""Per-FedAvg: a shared model that is good after one gradient step of each client.

Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, Algorithm 1. Each local step draws mini-batches D, D', D'': theta = w - alpha grad
f(w; D); first order (`fo`): w <- w - beta grad f(theta; D'); Hessian-free (`hf`): w <- w - beta (g' - alpha
h), g' = grad f(theta; D'), h = (grad f(w + delta g'; D'') - grad f(w - delta g'; D'')) / (2 delta). Clients
are evaluated with theta = w - alpha grad F_k(w), the gradient over all training data.

Of `local` only epochs, steps and batch_size apply: a visit takes as many steps as FedAvg would. Gradients are
taken in evaluation mode (no dropout; batch norm keeps its initial statistics). The paper averages with equal
weights; here averages are weighted by samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mpifl.core.method import Algorithm, Client, Key, Needs, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeFloat, PositiveFloat
from mpifl.core.types import Message, Notes, Report, Server, State, Vector

# keys of `local`
IGNORED = ("momentum", "weight_decay", "optimizer", "lr_decay", "milestones", "gamma", "augment")


@dataclass(frozen=True)
class PerFedAvg(RowUpdates, Algorithm):
    """One shared row, evaluated one step later.

    Attributes:
        alpha: learning rate of the personalisation step of a client; 0: FedAvg.
        beta: learning rate of the shared model.
        variant: `fo` (first order) or `hf` (Hessian-free).
        delta: length of the finite difference (`hf`).
    """

    alpha: NonNegativeFloat = 0.01
    beta: PositiveFloat = 0.001
    variant: Literal["fo", "hf"] = "fo"
    delta: PositiveFloat = 1e-3

    paper = "fallah2020personalized"
    needs = Needs(
        new_optimizer=True,
        own_gradients=True,
        ignores={"lr": "algorithm.alpha and algorithm.beta", **dict.fromkeys(IGNORED, "")},
        averages=True,
    )

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Step along the gradient of F(w - alpha grad F(w))."""
        w = message["model"][0]
        draws = (client.batches(key.of("inner")), client.batches(key), client.batches(key.of("second")))
        for D, D1, D2 in zip(*draws, strict=True):
            g = client.gradient(_moved(w, client.gradient(w, D), -self.alpha), D1)
            if self.variant == "hf":
                ahead, behind = (client.gradient(_moved(w, g, s * self.delta), D2) for s in (1, -1))
                g = g - self.alpha * (ahead - behind) / (2 * self.delta)
            w = _moved(w, g, -self.beta)
        return client.report(model=w), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return w - alpha grad F_k(w)."""
        w = message["model"][0]
        return _moved(w, client.gradient(w), -self.alpha)


def _moved(w: Vector, g: torch.Tensor, rate: float) -> Vector:
    """Return w [d] with `rate` times a gradient [p] added."""
    return torch.cat([w[: len(g)] + rate * g, w[len(g) :]])
