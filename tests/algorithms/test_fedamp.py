"""FedAMP: message passing by hand, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms.test_limits import MOMENTUM, Limit, agree
from numpy.testing import assert_allclose
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedamp import FedAMP
from mpifl.algorithms.fedavg import FedAvg

MODELS = np.array([0.0, 1.0, 3.0])


def test_attention_by_hand():
    """w = 0, 1, 3; sigma = 4, alpha = 1: xi_ij = exp(-(w_i - w_j)^2 / 4) / 4.

    Row 0: e^-0.25 / 4, e^-2.25 / 4, the rest for itself.
    """
    xi = FedAMP(alpha=1.0, sigma=4.0).attention(np.outer(MODELS, MODELS))
    near, far = math.exp(-0.25) / 4, math.exp(-2.25) / 4
    assert_allclose(xi[0], [1 - near - far, near, far])
    assert_allclose(xi.sum(1), 1)


def test_the_heuristic_by_hand():
    """w = (1, 0), (0, 1), (-1, 0); sigma = ln 2, self weight 1/2: cosines 0 and -1, so 1 : 1/2 of the other
    half.
    """
    w = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    xi = FedAMP(variant="heur", sigma=math.log(2), self_weight=0.5).attention(w @ w.T)
    assert_allclose(xi[0], [1 / 2, 1 / 3, 1 / 6], rtol=1e-9)


def test_the_heuristic_with_a_large_sigma_gives_all_to_the_nearest():
    """w = (1, 0), (0, 1), (-1, 0); with the default sigma, 1e6, exp(-sigma (1 - cos)) is 0 for every other
    client, but exp(sigma cos) divided by the row's sum is 1 for the nearest one, or 1/2 for two of them.
    """
    w = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    xi = FedAMP(variant="heur").attention(w @ w.T)
    assert_allclose(xi, [[1 / 2, 1 / 2, 0], [1 / 4, 1 / 2, 1 / 4], [0, 1 / 2, 1 / 2]])
    assert_allclose(FedAMP(variant="heur").attention(np.ones((1, 1))), [[1]])


def test_the_local_step_by_hand():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, lambda / alpha = 2, u = 1; two steps: 1 + 1.5 = 2.5, then 2.5 - 0.5
    (-1.5 + 3).
    """
    client = byhand.Quadratic([4.0], steps=2)
    report, state = FedAMP(lam=4.0, alpha=2.0).local_update(
        byhand.message(model=[[1.0]]), {}, client, byhand.KEY
    )
    assert_close(report.vectors["model"], torch.tensor([1.75]))
    assert_close(state["model"], torch.tensor([1.75]))


def test_with_equal_attention_the_cloud_models_are_fedavgs(tmp_path):
    """alpha / sigma = 1 / m and sigma large: u_i is the plain mean."""
    method = FedAMP(lam=0.0, alpha=1e12 / 6, sigma=1e12)
    amp, avg = (
        toy.run(a, toy.Tiny(equal=True), tmp_path / str(i), local=MOMENTUM)
        for i, a in enumerate((method, FedAvg()))
    )
    assert_close(amp.server.tables["model"], avg.server.tables["model"].expand(6, -1), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_attention_it_is_local_training(participation, tmp_path):
    limit = Limit("alpha / sigma = 0", "fedamp", {"lam": 0.0, "alpha": 1.0, "sigma": 1e12})
    agree(limit, "local", participation, tmp_path)


def test_the_heuristics_own_share_away_from_one_half_by_hand():
    """As by hand above with self weight 0.2: 0.8 are shared 2 : 1."""
    w = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    xi = FedAMP(variant="heur", sigma=math.log(2), self_weight=0.2).attention(w @ w.T)
    assert_allclose(xi[0], [0.2, 1.6 / 3, 0.8 / 3], rtol=1e-9)
