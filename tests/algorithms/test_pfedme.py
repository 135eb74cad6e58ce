"""pFedMe: a visit and the server's step by hand."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import pytest
import torch
from numpy.testing import assert_allclose
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.pfedme import PFedMe
from mpifl.core.rng import key
from mpifl.training.client import LocalClient
from mpifl.training.learner import Learner


def test_a_visit_by_hand():
    """F(w) = (w - 4)^2 / 2, lambda = 2, eta_p = 0.25, eta = 0.25, K = 2, R = 2, mu = 0, w = 0.

    theta <- theta - 0.25 (theta - 4 + 2 (theta - w_i)) = 1 + 0.25 theta + 0.5 w_i: 1, 1.25.
    w_i <- 0 - 0.25 * 2 (0 - 1.25) = 0.625. Again, from theta = 1.25: 1.625, 1.71875.
    w_i <- 0.625 + 0.5 (1.71875 - 0.625) = 1.171875.
    """
    method = PFedMe(lam=2.0, personal_lr=0.25, lr=0.25, inner_steps=2, local_rounds=2, mu=0.0)
    report, state = method.local_update(
        byhand.message(model=[[0.0]]), {}, byhand.Quadratic([4.0]), byhand.KEY
    )
    assert_close(state["model"], torch.tensor([1.71875]))
    assert_close(report.vectors["model"], torch.tensor([1.171875]))


def test_mu_is_weight_decay_of_theta():
    """As above with mu = 0.4, K = R = 1, theta from w = 1: 1 - 0.25 (1 - 4 + 0 + 0.4) = 1.65."""
    method = PFedMe(lam=2.0, personal_lr=0.25, inner_steps=1, local_rounds=1, mu=0.4)
    _, state = method.local_update(byhand.message(model=[[1.0]]), {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["model"], torch.tensor([1.65]))


def test_the_server_keeps_a_share_of_its_model():
    """beta = 0.25, n = 1, 3: w <- 0.75 w + 0.0625 w_0 + 0.1875 w_1."""
    (mixing,) = PFedMe(beta=0.25).aggregate(byhand.server(2, model=[[0.0]]), byhand.notes([1, 3])).mixings
    assert_allclose(mixing.weights, [[0.0625, 0.1875]])
    assert_allclose(mixing.keep, [0.75])


@pytest.mark.parametrize("rounds", [1, 7])
def test_a_visit_takes_as_many_batches_as_local_rounds(rounds):
    """Two batches an epoch: seven local rounds wrap around. On each batch theta takes its inner steps."""
    client = byhand.Quadratic([4.0], steps=2)
    method = PFedMe(local_rounds=rounds, inner_steps=3)
    method.local_update(byhand.message(model=[[0.0]]), {}, client, byhand.KEY)
    assert [call.changes["epochs"] for call in client.calls] == [3] * rounds
    assert len({call.key for call in client.calls}) == rounds


def test_a_client_is_judged_by_theta_and_before_its_first_visit_by_the_initial_model():
    client = byhand.Quadratic([4.0], init=[7.0])
    assert PFedMe().serves(byhand.server(1, model=[[0.0]]), 0) == {}
    for state, expected in (({"model": torch.tensor([2.0])}, 2.0), ({}, 7.0)):
        assert_close(PFedMe().model_of(byhand.message(), state, client), torch.tensor([expected]))


def test_a_visit_without_batches_is_quiet():
    """A plan does not train; it gets w back, and nobody is warned of an empty mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report, state = PFedMe().local_update(
            byhand.message(model=[[1.0]]),
            {"model": torch.tensor([7.0])},
            byhand.Quadratic([4.0], steps=0),
            byhand.KEY,
        )
    assert_close(state["model"], torch.tensor([7.0]))  # without a step, theta stays
    assert_close(report.vectors["model"], torch.tensor([1.0]))
    assert math.isnan(report.metrics["train_loss"])


def keras_adam(value, gradient, moments, t, lr):
    """Return a number after step t of Adam, and change its moments."""
    moments[0] = 0.9 * moments[0] + 0.1 * gradient
    moments[1] = 0.999 * moments[1] + 0.001 * gradient**2
    return value - lr * (moments[0] / (1 - 0.9**t)) / ((moments[1] / (1 - 0.999**t)) ** 0.5 + 1e-8)


def test_the_variant_of_ucfl_moves_both_models_by_adam_and_keeps_its_moments():
    """F(w) = (w - 4)^2 / 2, lambda = 2; theta begins at w_i; one count of steps for both, over two visits."""
    method = PFedMe(lam=2.0, personal_lr=0.25, lr=0.125, inner_steps=2, local_rounds=2, variant="ucfl")
    moments, t, state = {"theta": [0.0, 0.0], "w": [0.0, 0.0]}, 0, {}
    for received in (0.0, 1.0):
        report, state = method.local_update(
            byhand.message(model=[[received]]), state, byhand.Quadratic([4.0], steps=4), byhand.KEY
        )
        w = theta = received
        for _ in range(2):
            for _ in range(2):
                t += 1
                theta = keras_adam(theta, theta - 4 + 2 * (theta - w), moments["theta"], t, 0.25)
            t += 1
            w = keras_adam(w, 2 * (w - theta), moments["w"], t, 0.125)
        assert_close(state["model"], torch.tensor([theta]))
        assert_close(report.vectors["model"], torch.tensor([w]))


def test_the_variant_with_momentum_moves_both_models_by_nesterov():
    """F(w) = (w - 4)^2 / 2, lambda = 2, K = R = 1, eta_p = 0.25, eta = 0.125, w = 0; d = g + 0.9 v.

    g = -4, v = -4, d = -7.6: theta = 1.9; g = 2 (0 - 1.9) = -3.8, d = -7.22: w_i = 0.9025. Again from w = 0:
    v = 0.9 * -4 - 4 = -7.6, d = -4 - 6.84 = -10.84: theta = 2.71; g = -5.42, v = 0.9 * -3.8 - 5.42 = -8.84,
    d = -5.42 - 7.956 = -13.376: w_i = 1.672.
    """
    method = PFedMe(
        lam=2.0, personal_lr=0.25, lr=0.125, inner_steps=1, local_rounds=1, variant="ucfl_nesterov"
    )
    state = {}
    for theta, w in ((1.9, 0.9025), (2.71, 1.672)):
        report, state = method.local_update(
            byhand.message(model=[[0.0]]), state, byhand.Quadratic([4.0]), byhand.KEY
        )
        assert_close(state["model"], torch.tensor([theta]))
        assert_close(report.vectors["model"], torch.tensor([w]))


def test_the_variant_of_ucfl_takes_another_mini_batch_in_each_inner_step():
    client = byhand.Quadratic([4.0], steps=2)
    PFedMe(local_rounds=3, inner_steps=5, variant="ucfl").local_update(
        byhand.message(model=[[0.0]]), {}, client, byhand.KEY
    )
    assert [call.changes["epochs"] for call in client.calls] == [1] * 15
    assert len({call.key for call in client.calls}) == 15


@pytest.mark.parametrize(("variant", "taken"), [("paper", 3), ("ucfl", 6), ("ucfl_nesterov", 6)])
def test_half_of_the_work_is_half_of_the_mini_batches(variant, taken):
    """R = 6 and K = 2: of 6 mini-batches 3 (the paper), or of 12 mini-batches 6, in 3 steps of w_i.

    On each of the paper's all K steps are taken.
    """
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    client = LocalClient(2, toy.Tiny(), learner, toy.LOCAL, work=Fraction(1, 2))
    method, trained, sgd = PFedMe(local_rounds=6, inner_steps=2, variant=variant), [], client.sgd
    client.sgd = lambda *args, **how: trained.append(sgd(*args, **how)) or trained[-1]
    _, state = method.local_update(byhand.message(model=[client.init.tolist()]), {}, client, key(1))
    assert [one.steps for one in trained] == [2 if variant == "paper" else 1] * taken, "K steps on each"
    assert variant == "paper" or int(state["steps"]) == 6 + 3
