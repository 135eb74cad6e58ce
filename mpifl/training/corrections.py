"""Corrections of the gradient that several methods share; see `direction` of `Client.sgd`."""

from __future__ import annotations

import torch

from mpifl.core.client import Client, Direction, Trained
from mpifl.core.parameters import Layout
from mpifl.core.rng import Key
from mpifl.core.types import Message, Report, Vector

from .evaluation import change_on_arrival, state_change


def unsquared(mu: float, anchor: Vector, layout: Layout) -> Direction:
    """Return the direction of F(w) + mu sum_l ||w_l - anchor_l|| over the tensors l. EMD-CFL repository.

    Args:
        mu: weight of the term.
        anchor: [d].
        layout: positions of the tensors in the vector.
    """
    tensors = [s for s in layout.slices.values() if s.stop <= layout.num_parameters]

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pull = [torch.nn.functional.normalize(w[s] - anchor[s], dim=0) for s in tensors]
        return g + mu * torch.cat(pull)

    return direction


def aligned(lam: float, v: Vector) -> Direction:
    """Return the direction of F(w) - lam <v, w> / ||w||, which rotates w towards `v` [p]."""

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = w.norm()
        return g - lam * (v / norm - (torch.dot(v, w) / norm**3) * w)

    return direction


def train_aligned(
    client: Client, message: Message, lam: float, variant: str, key: Key
) -> tuple[Trained, dict[str, Vector]]:
    """Train a client's own mixture towards the direction of its collaborators' models. pFedGraph and FedSaC.

    Args:
        client: the client.
        message: rows `model` [1, d] and `direction` [1, p].
        lam: weight of the cosine term.
        variant: `repo` reverses the sign of that term. `emdcfl` trains towards the received model; its update
            is the change of the state dict since then. In all other variants the update is the change of the
            parameters since the common initial model.
        key: random key of the order of the batches.

    Returns:
        The outcome of the training, and the vectors of the report: `model`, its update `delta` and, except
        for `emdcfl`, its own `direction`.
    """
    start, p = message["model"][0], client.layout.num_parameters
    if variant == "emdcfl":
        trained = client.sgd(start, key, direction=aligned(lam, start[:p] / start[:p].norm()))
        return trained, {"model": trained.vector, "delta": state_change(client, start, trained)}
    lam = -lam if variant == "repo" else lam
    trained = client.sgd(start, key, direction=aligned(lam, message["direction"][0]))
    w = trained.vector[:p]
    return trained, {"model": trained.vector, "delta": w - client.init[:p], "direction": w / w.norm()}


def aligned_vectors(report: Report, w: Vector) -> dict[str, Vector]:
    """Return `delta` and `direction` (if sent) of a `train_aligned` report whose model arrives as `w` [d]."""
    delta = change_on_arrival(report.vectors["delta"], report.vectors["model"], w)
    if "direction" not in report.vectors:
        return {"delta": delta}
    own = w[: len(report.vectors["direction"])]
    return {"delta": delta, "direction": own / own.norm().clamp_min(1e-30)}


def scaled(alpha: float, seen: list[torch.Tensor]) -> Direction:
    """Return the direction alpha g.

    Args:
        alpha: factor.
        seen: every gradient [p] is appended to it.
    """

    def direction(g: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(g.clone())
        return alpha * g

    return direction
