"""Per-FedAvg: both variants by hand, and the limit without the inner step."""

from __future__ import annotations

import pytest
import torch
from algorithms.test_limits import Limit, agree
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.perfedavg import PerFedAvg


@pytest.mark.parametrize(("variant", "w"), [("fo", 1.5), ("hf", 1.125)])
def test_a_step_by_hand(variant, w):
    """F(w) = (w - 4)^2 / 2, alpha = 0.25, beta = 0.5, w = 0: theta = 0 + 0.25 * 4 = 1, g' = -3.

    First order: w <- 1.5. The Hessian is 1, so h = g' and Hessian-free: w <- 0.5 * (3 - 0.25 * 3) = 1.125.
    """
    method = PerFedAvg(alpha=0.25, beta=0.5, variant=variant, delta=0.5)
    report, _ = method.local_update(byhand.message(model=[[0.0]]), {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([w]))


def test_clients_are_judged_one_step_later():
    """w = 2, gradient -2, alpha = 0.25: 2.5."""
    method = PerFedAvg(alpha=0.25)
    model = method.model_of(byhand.message(model=[[2.0]]), {}, byhand.Quadratic([4.0]))
    assert_close(model, torch.tensor([2.5]))


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_the_inner_step_it_is_fedavg(participation, tmp_path):
    plain = toy.LocalConfig(epochs=2, batch_size=5, lr=0.05)
    limit = Limit("alpha = 0", "perfedavg", {"alpha": 0.0, "beta": 0.05}, settings={"local": plain})
    agree(limit, "fedavg", participation, tmp_path)
