"""Changes of the gradient that several methods make before a step; see `Client.sgd`."""

from __future__ import annotations

import torch

from mpifl.core.client import Client, Direction, Trained
from mpifl.core.parameters import Layout
from mpifl.core.rng import Key
from mpifl.core.types import Message, Vector


def proximal(mu: float, anchor: Vector) -> Direction:
    """Return the direction of F(w) + mu/2 ||w - anchor||^2; buffers behind `anchor` do not count."""

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return g + mu * (w - anchor[: len(w)])

    return direction


def unsquared(mu: float, anchor: Vector, layout: Layout) -> Direction:
    """Return the direction of F(w) + mu sum_l ||w_l - anchor_l|| over tensors l. EMD-CFL repository."""
    tensors = [s for s in layout.slices.values() if s.stop <= layout.num_parameters]

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pull = [torch.nn.functional.normalize(w[s] - anchor[s], dim=0) for s in tensors]
        return g + mu * torch.cat(pull)

    return direction


def aligned(lam: float, v: Vector) -> Direction:
    """Return the direction of F(w) - lam <v, w> / ||w||: w is drawn towards the direction of `v` [p]."""

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        norm = w.norm()
        return g - lam * (v / norm - (torch.dot(v, w) / norm**3) * w)

    return direction


def train_aligned(
    client: Client, message: Message, lam: float, variant: str, key: Key
) -> tuple[Trained, dict[str, Vector]]:
    """Train a client's own mixture towards the direction of those it collaborates with. pFedGraph and FedSaC.

    Args:
        variant: `repo` trains away from it; `emdcfl` trains towards the model received and measures the
            update from there, otherwise from the common initial model.

    Returns:
        What was trained, and the vectors of the report: `model`, its update `delta`, and its own `direction`.
    """
    start, p = message["model"][0], client.layout.num_parameters
    if variant == "emdcfl":
        trained = client.sgd(start, key, direction=aligned(lam, start[:p] / start[:p].norm()))
        return trained, {"model": trained.vector, "delta": (trained.vector - start)[:p]}
    lam = -lam if variant == "repo" else lam
    trained = client.sgd(start, key, direction=aligned(lam, message["direction"][0]))
    w = trained.vector[:p]
    return trained, {"model": trained.vector, "delta": w - client.init[:p], "direction": w / w.norm()}


def scaled(alpha: float, seen: list[torch.Tensor]) -> Direction:
    """Return the direction alpha g; the gradient itself is left in `seen`."""

    def direction(g: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(g.clone())
        return alpha * g

    return direction
