"""A client of a mixture of models: weigh its samples, train every component, judge the mixture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mpifl.core.client import Client, Loss
from mpifl.core.federation import Split
from mpifl.core.rng import Key
from mpifl.core.types import Vector


def component_losses(client: Client, models: torch.Tensor, split: Split | None = None) -> torch.Tensor:
    """Return the cross-entropy [K, n] of each model [K, d] on each sample of `split` (default: training)."""
    return torch.stack([client.losses(w, split) for w in models])


def train_components(
    client: Client, models: torch.Tensor, q: torch.Tensor, key: Key
) -> tuple[torch.Tensor, float]:
    """Train each model [K, d] on the loss (1/B) sum_s q[k, s] l(theta_k; s), all on the same batches.

    Args:
        q: weight [K, n] of each training sample in each component.

    Returns:
        The trained models [K, d] and the sum of their mean losses.
    """
    trained = [client.sgd(w, key, loss=_weighted(q_k)) for w, q_k in zip(models, q, strict=True)]
    return torch.stack([t.vector for t in trained]), sum(t.loss for t in trained)


def _weighted(q: torch.Tensor) -> Loss:
    """Return the loss in which sample s counts q[s]."""

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (q[index] * F.cross_entropy(module(x), y, reduction="none")).mean()

    return loss


def judge_mixture(client: Client, models: torch.Tensor, pi: Vector, split: Split) -> dict[str, float]:
    """Return accuracy and loss of sum_k pi_k softmax(theta_k(x)) on `split`; NaN where it is empty."""
    if not len(split):
        return {"accuracy": float("nan"), "loss": float("nan")}
    chances = torch.stack([client.logits(w, split.x).double().softmax(1) for w in models])  # [K, n, L]
    p = torch.einsum("k,knl->nl", pi.double().to(chances.device), chances)
    hits = int((p.argmax(1) == split.y).sum())
    loss = F.nll_loss(p.clamp_min(1e-300).log(), split.y)
    return {"accuracy": hits / len(split), "loss": float(loss)}
