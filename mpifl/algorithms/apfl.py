"""APFL: each client mixes a private model with the global one, and learns how much of each.

Deng et al., "Adaptive Personalized Federated Learning", 2020, Algorithm 1. Legend: w global model and the
client's copy of it, v private model, mixed model bar = alpha v + (1 - alpha) w. For each mini-batch: w <- w -
eta grad f(w), then v <- v - eta alpha grad f(bar). Once per visit, at the first mini-batch as in the authors'
code, alpha <- alpha - eta <v - w, grad f(bar)>, clipped to [0, 1]. w is averaged by samples as in FedAvg.
Clients are evaluated with alpha v + (1 - alpha) w, where w is the current global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpifl.core.method import Algorithm, Client, Key, Needs, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.options import UnitInterval
from mpifl.core.types import Message, Notes, Report, Server, State, Vector
from mpifl.training.corrections import scaled
from mpifl.training.evaluation import mean_loss


@dataclass(frozen=True)
class APFL(RowUpdates, Algorithm):
    """One shared row w; each client keeps v and alpha.

    Attributes:
        alpha: initial share of the private model; 0 without `adaptive` is FedAvg.
        adaptive: learn alpha.
    """

    alpha: UnitInterval = 0.5
    adaptive: bool = True

    paper = "deng2020adaptive"
    asks = ("direction",)
    needs = Needs(client_state=True, sgd="plain", new_optimizer=True, averages=True)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Update w, then v, on each mini-batch of a visit."""
        w, p = message["model"][0], client.layout.num_parameters
        losses: list[tuple[float, int]] = []
        v, alpha = state.get("model", client.init), float(state.get("alpha", self.alpha))
        for t, batch in enumerate(client.batches(key)):
            one: dict[str, Any] = {"split": batch, "epochs": 1, "batch_size": len(batch)}
            bar = mixed(v, w, alpha)
            step = client.sgd(w, key.of("w", t), **one)
            slope = 0.0
            if alpha or (self.adaptive and t == 0):
                seen: list[torch.Tensor] = []
                moved = client.sgd(bar, key.of("v", t), direction=scaled(alpha, seen), **one).vector
                slope = float(torch.dot((v - w)[:p].double(), seen[0].double()))
                v = v + (moved - bar)  # v - eta alpha grad f(bar)
            if self.adaptive and t == 0:
                alpha = min(max(alpha - step.lr * slope, 0.0), 1.0)
            w = step.vector
            losses.append((step.loss, len(batch)))
        told = {"train_loss": mean_loss(losses), "alpha": alpha}
        kept = {"model": v, "alpha": torch.tensor(alpha, dtype=torch.float64)}
        return client.report(model=w, metrics=told), kept

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the copies of w by samples."""
        return Plan([average(notes)])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return alpha v + (1 - alpha) w."""
        alpha = float(state.get("alpha", self.alpha))
        return mixed(state.get("model", client.init), message["model"][0], alpha)


def mixed(v: Vector, w: Vector, alpha: float) -> Vector:
    """Return alpha v + (1 - alpha) w."""
    return w + alpha * (v - w)
