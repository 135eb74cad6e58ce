"""Steps that several methods share at a client: choose a model, train and evaluate a mixture, fine-tune."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mpifl.core.client import Client, Loss
from mpifl.core.federation import Split
from mpifl.core.rng import Key, key
from mpifl.core.types import Vector


def best_model(client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None) -> int:
    """Return argmin_j F(w_j), the first of equals. IFCA, HypCluster and FeSEM.

    Args:
        client: the client.
        models: [K, d].
        split: what F is taken on; None for the training data.
    """
    return int(np.argmin([client.loss(w, split) for w in models]))


def fitting_model(
    client: Client, models: Sequence[Vector] | torch.Tensor, split: Split | None = None
) -> Vector:
    """Return the model [d] that evaluates a client: the only one it received, or `best_model` of several."""
    return models[best_model(client, models, split) if len(models) > 1 else 0]


def component_losses(client: Client, models: torch.Tensor, split: Split | None = None) -> torch.Tensor:
    """Return the cross-entropy [K, n] of each model [K, d] on each sample of `split` (default: training)."""
    return torch.stack([client.losses(w, split) for w in models])


def train_components(
    client: Client, models: torch.Tensor, q: torch.Tensor, key: Key
) -> tuple[torch.Tensor, float]:
    """Train each model [K, d] on the loss (1/B) sum_s q[k, s] l(theta_k; s), all on the same batches.

    Args:
        client: the client.
        models: components [K, d].
        q: weight [K, n] of each training sample in each component.
        key: addresses the order of the batches.

    Returns:
        The trained models [K, d] and the sum of their mean losses.
    """
    trained = [client.sgd(w, key, loss=_weighted(q_k)) for w, q_k in zip(models, q, strict=True)]
    return torch.stack([t.vector for t in trained]), sum(t.loss for t in trained)


def _weighted(q: torch.Tensor) -> Loss:
    """Return the cross-entropy in which sample s has weight q[s]."""

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (q[index] * F.cross_entropy(module(x), y, reduction="none")).mean()

    return loss


def evaluate_mixture(client: Client, models: torch.Tensor, pi: Vector, split: Split) -> dict[str, float]:
    """Return accuracy and loss of sum_k pi_k softmax(theta_k(x)) on `split`; NaN where it is empty."""
    if not len(split):
        return {"accuracy": float("nan"), "loss": float("nan")}
    chances = torch.stack([client.logits(w, split.x).double().softmax(1) for w in models])  # [K, n, L]
    p = torch.einsum("k,knl->nl", pi.double().to(chances.device), chances)
    hits = int((p.argmax(1) == split.y).sum())
    loss = F.nll_loss(p.clamp_min(1e-300).log(), split.y)
    return {"accuracy": hits / len(split), "loss": float(loss)}


def evaluate_tuned(
    client: Client, vector: Vector, split: Split, epochs: int, part: str = "all"
) -> dict[str, float]:
    """Fine-tune a model on the training data, then evaluate it.

    The order of the batches is addressed by client and visit, not by the training seed.

    Args:
        client: the client.
        vector: the model [d].
        split: what it is evaluated on.
        epochs: passes over the training data.
        part: the part of the vector that is tuned.

    Returns:
        `accuracy` and `loss` after tuning; `accuracy_initial` and `loss_initial` before.
    """
    moving = None if part == "all" else client.layout.part(part)
    address = key(0, "tune", client.id, client.visit)
    tuned = client.sgd(vector, address, part=moving, epochs=epochs).vector
    before = {f"{name}_initial": value for name, value in client.evaluate(vector, split).items()}
    return {**client.evaluate(tuned, split), **before}
