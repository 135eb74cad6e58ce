"""Corrections of the gradient are the gradients of their terms; shared steps at a client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import byhand
from torch.testing import assert_close

from mpifl.core.client import Direction, proximal
from mpifl.core.parameters import Layout
from mpifl.core.rng import key
from mpifl.training.corrections import aligned, scaled, train_aligned, unsquared
from mpifl.training.evaluation import best_model, component_losses, evaluate_mixture, responsibilities

G, W = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([1.0, 2.0, -1.0, 3.0])
ANCHOR = torch.tensor([0.0, 4.0, 1.0, 1.0])
LAYOUT = Layout(("a", "head.b"), ((2,), (1, 2)), 4)


def added(direction: Direction) -> torch.Tensor:
    """Return what a direction adds to the gradient; the gradient stays what it is."""
    before = G.clone()
    out = direction(G, W) - G
    assert_close(before, G, rtol=0, atol=0)
    return out


def gradient(term: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a term at W by PyTorch."""
    w = W.double().requires_grad_()
    return torch.autograd.grad(term(w), w)[0].float()


def test_a_proximal_term_pulls_to_its_anchor():
    """mu/2 ||w - x||^2: mu (w - x) = 0.1 (1, -2, -2, 2)."""
    assert_close(added(proximal(0.1, ANCHOR)), torch.tensor([0.1, -0.2, -0.2, 0.2]))
    assert_close(added(proximal(0.1, ANCHOR)), gradient(lambda w: 0.05 * (w - ANCHOR).square().sum()))
    longer = torch.cat([ANCHOR, torch.tensor([99.0])])
    assert_close(
        added(proximal(0.1, longer)), added(proximal(0.1, ANCHOR)), msg="a buffer behind it does not count"
    )


def test_the_unsquared_term_is_a_norm_of_each_tensor():
    """mu (||w_a - x_a|| + ||w_b - x_b||): the gaps (1, -2) and (-2, 2) each become of length mu."""
    found = added(unsquared(0.1, ANCHOR, LAYOUT))
    assert_close(
        found, gradient(lambda w: 0.1 * sum((w[s] - ANCHOR[s]).norm() for s in LAYOUT.slices.values()))
    )
    assert_close(torch.stack([found[:2].norm(), found[2:].norm()]), torch.tensor([0.1, 0.1]))
    assert_close(unsquared(0.1, W, LAYOUT)(G, W), G, msg="at the anchor nothing pulls")


def test_the_aligned_term_is_the_projection_on_a_direction():
    """- lam <v, w> / ||w||."""
    v = torch.tensor([0.5, 0.0, -0.5, 1.0])
    assert_close(added(aligned(0.3, v)), gradient(lambda w: -0.3 * (w @ v.double()) / w.norm()))


def test_a_scaled_direction_leaves_the_gradient_itself_behind():
    seen: list[torch.Tensor] = []
    assert_close(scaled(0.25, seen)(G, W), 0.25 * G)
    (left,) = seen
    assert_close(left, G)


@pytest.mark.parametrize(("variant", "sign"), [("paper", 1.0), ("repo", -1.0)])
def test_training_towards_a_direction_measures_the_update_from_the_common_start(variant, sign):
    """A step of 0.5 from (3, 4), where F is flat: only the cosine term moves it, by (v - <v, u> u) / 5."""
    client = byhand.Quadratic([3.0, 4.0], init=[1.0, 1.0])
    message = byhand.message(model=[[3.0, 4.0]], direction=[[1.0, 0.0]])
    trained, vectors = train_aligned(client, message, 0.2, variant, key(0))
    u, v = torch.tensor([0.6, 0.8]), torch.tensor([1.0, 0.0])
    expected = torch.tensor([3.0, 4.0]) + sign * 0.5 * 0.2 * (v - 0.6 * u) / 5
    assert_close(trained.vector, expected)
    assert_close(vectors["delta"], expected - 1)
    assert_close(vectors["direction"], expected / expected.norm())


# -- components ----------------------------------------------------------------------------------------------


class Split:
    """Two samples of classes 0 and 1."""

    x, y = torch.zeros(2, 1), torch.tensor([0, 1])

    def __len__(self) -> int:
        return 2


def test_a_mixture_is_judged_by_the_shares_of_its_components():
    """Model 0 says (0.9, 0.1) of both samples, model 1 (0.2, 0.8). With shares 0.25, 0.75: (0.375, 0.625)."""
    chances = [[[0.9, 0.1], [0.9, 0.1]], [[0.2, 0.8], [0.2, 0.8]]]
    client = byhand.Told([[0.0], [0.0]], chances)
    models = torch.tensor([[0.0], [1.0]])
    scores = evaluate_mixture(client, models, torch.tensor([0.25, 0.75]), Split())
    assert scores["accuracy"] == 0.5
    assert scores["loss"] == pytest.approx(
        -(torch.tensor([0.375, 0.625]).double().log().mean().item()), rel=1e-5
    )
    scores = evaluate_mixture(client, models, torch.tensor([1.0, 0.0]), Split())
    assert scores["loss"] == pytest.approx(-(torch.tensor([0.9, 0.1]).double().log().mean().item()), rel=1e-5)


def test_losses_of_components_and_the_best_model():
    """Mean losses 2, 1, 1: the first of the best is model 1."""
    client = byhand.Told([[1.0, 3.0], [0.5, 1.5], [2.0, 0.0]])
    models = torch.tensor([[0.0], [1.0], [2.0]])
    assert_close(component_losses(client, models), torch.tensor([[1.0, 3.0], [0.5, 1.5], [2.0, 0.0]]))
    client.loss = lambda w, split=None: float(client.losses(w).mean())
    assert best_model(client, models) == 1


NAN, INF = float("nan"), float("inf")


def test_a_model_whose_loss_is_nan_is_never_the_best():
    client = byhand.Told([[NAN, 1.0], [0.5, 0.5]])
    models = torch.tensor([[0.0], [1.0]])
    client.loss = lambda w, split=None: float(client.losses(w).mean())
    assert best_model(client, models) == 1
    assert best_model(client, models, batch=1) == 1
    assert_close(component_losses(client, models), torch.tensor([[INF, 1.0], [0.5, 0.5]]))


def test_a_component_that_explains_nothing_has_no_share():
    scores = torch.tensor([[-INF, -INF, 0.0], [-1.0, -INF, 0.0]])
    assert_close(responsibilities(scores), torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.5, 0.5]]))


def test_a_component_without_a_share_has_no_say_although_it_diverged():
    client = byhand.Told([[0.0], [0.0]], [[[NAN, NAN], [NAN, NAN]], [[0.2, 0.8], [0.2, 0.8]]])
    models = torch.tensor([[0.0], [1.0]])
    scores = evaluate_mixture(client, models, torch.tensor([0.0, 1.0]), Split())
    assert scores["loss"] == pytest.approx(-(torch.tensor([0.2, 0.8]).double().log().mean().item()), rel=1e-5)
    assert evaluate_mixture(client, models, torch.tensor([0.5, 0.5]), Split())["accuracy"] == 0.0
