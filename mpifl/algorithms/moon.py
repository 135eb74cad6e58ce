"""MOON: local training pulls representations towards the global model's, away from the last local model's.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. Legend: z embedding of a sample
under the model in training, z_glob under the global model, z_prev under the client's last local model. Loss:
cross-entropy + mu con, con = -log( exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z,
z_prev) / tau)) ). In the first visit z_prev is the initial model's. Differs: z is the input of the last
layer, without the authors' projection head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mpifl.core.method import Algorithm, Client, Key, Loss, Needs, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.module_calls import embedding_of
from mpifl.core.options import NonNegativeFloat, PositiveFloat
from mpifl.core.task import Task
from mpifl.core.types import Message, Notes, Report, Server, State


@dataclass(frozen=True)
class MOON(RowUpdates, Algorithm):
    """One model for all; each client keeps its last local one.

    Attributes:
        mu: weight of the contrastive loss; 0 is FedAvg.
        temperature: tau, temperature of the contrastive loss.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    paper = "li2021model"
    asks = ("loss",)
    needs = Needs(client_state=True, averages=True)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train with the contrastive loss; keep the local model for the next visit."""
        w = message["model"][0]
        models = w, state.get("model", client.init)

        def embedded(x: torch.Tensor) -> list[torch.Tensor]:
            return [client.embed(v, x).flatten(1) for v in models]

        stored = [] if client.augments else embedded(client.data.train.x)

        def fixed(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
            return [z[index] for z in stored] or embedded(x)

        trained = client.sgd(w, key, loss=contrastive(fixed, self.mu, self.temperature, client.task))
        metrics = {"train_loss": trained.loss}
        kept = state if state and not trained.steps else {"model": trained.vector}
        return client.report(model=trained.vector, metrics=metrics), kept

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])


def contrastive(
    fixed: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]], mu: float, tau: float, task: Task
) -> Loss:
    """Return the loss.

    Args:
        fixed: images of a batch and their indices -> z_glob and z_prev, each [b, e].
        mu: weight of the contrastive loss.
        tau: its temperature.
        task: the task.
    """

    def loss(module: Any, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        z = embedding_of(module, x)
        z_glob, z_prev = fixed(x, index)
        near = F.cosine_similarity(z.flatten(1), z_glob) / tau
        far = F.cosine_similarity(z.flatten(1), z_prev) / tau
        return task.loss(module.head(z), y) + mu * F.softplus(far - near).mean()

    return loss
