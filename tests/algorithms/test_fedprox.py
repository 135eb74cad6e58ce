"""FedProx by hand: the squared pull towards the global model, and the unsquared one."""

from __future__ import annotations

import pytest
import torch
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.client import proximal
from mpifl.core.parameters import Layout
from mpifl.training.corrections import unsquared

PROX = {
    "standard": (2.0, 1.75),  # 1 -> 1 + 1.5 = 2.5 -> 2.5 - 0.5 (-1.5 + 2 * 1.5)
    "unsquared": (1.0, 2.75),  # 1 -> 2.5 -> 2.5 - 0.5 (-1.5 + 1)
}


@pytest.mark.parametrize("variant", PROX)
def test_fedprox_pulls_towards_the_global_model(variant):
    """F(w) = (w - 4)^2 / 2, eta = 0.5, x = 1: the first step has no pull, the second has mu (w - x) or mu."""
    mu, expected = PROX[variant]
    method = CATALOGUE["fedprox"](mu=mu, variant=variant)
    client = byhand.Quadratic([4.0], lr=0.5, steps=2)
    report, _ = method.local_update(byhand.message(model=[[1.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([expected]))


def test_the_unsquared_pull_has_length_mu_in_every_tensor():
    """Tensors (3, 4) and (0, 5) and a running mean, anchored at (0, 0), (0, 0): mu = 2 times (0.6, 0.8), (0,
    1).

    A tensor that is where it was is not pulled. Whole vectors would be divided by sqrt(50).
    """
    layout = Layout(("a", "b", "mean"), ((2,), (2,), (1,)), 4)
    pull = unsquared(2.0, torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0]), layout)
    w, g = torch.tensor([3.0, 4.0, 0.0, 5.0]), torch.ones(4)
    assert_close(pull(g, w), torch.tensor([2.2, 2.6, 1.0, 3.0]))
    assert_close(pull(g, torch.tensor([0.0, 0.0, 0.0, 5.0])), torch.tensor([1.0, 1.0, 1.0, 3.0]))


def test_the_proximal_pull_leaves_running_statistics_alone():
    pull = proximal(2.0, torch.tensor([1.0, 9.0]))
    assert_close(pull(torch.tensor([0.5]), torch.tensor([4.0])), torch.tensor([6.5]))
