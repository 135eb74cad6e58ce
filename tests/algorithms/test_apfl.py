"""APFL: a visit by hand, the global row, and its limits."""

from __future__ import annotations

import pytest
import torch
from algorithms.test_limits import Limit, agree
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.apfl import APFL
from mpifl.algorithms.fedavg import FedAvg

PLAIN = toy.LocalConfig(epochs=2, batch_size=5, lr=0.05)


def test_a_visit_by_hand():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, alpha = 0.5, w = 0, v = 2: bar = 1, its gradient -3. Two batches.

    First: w <- 0 - 0.5 (-4) = 2; v <- 2 - 0.5 * 0.5 (-3) = 2.75; <v - w, g> = 2 * -3: alpha <- 0.5 + 0.5 * 6
    = 3.5, kept at 1. Second: bar = v = 2.75, g = -1.25: w <- 3, v <- 2.75 + 0.5 * 1.25 = 3.375.
    """
    state = {"model": torch.tensor([2.0]), "alpha": torch.tensor(0.5)}
    client = byhand.Quadratic([4.0], steps=1)
    client.batches = lambda key: iter(list(byhand.Quadratic.batches(client, key, epochs=2)))
    report, new = APFL().local_update(byhand.message(model=[[0.0]]), state, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([3.0]))
    assert_close(new["model"], torch.tensor([3.375]))
    assert float(new["alpha"]) == 1.0


def test_alpha_by_hand():
    """As above with eta = 0.0625: alpha <- 0.5 + 0.0625 * 6 = 0.875; and not at all when it is fixed."""
    for adaptive, alpha in ((True, 0.875), (False, 0.5)):
        state = {"model": torch.tensor([2.0]), "alpha": torch.tensor(0.5)}
        client = byhand.Quadratic([4.0], lr=0.0625)
        _, new = APFL(adaptive=adaptive).local_update(
            byhand.message(model=[[0.0]]), state, client, byhand.KEY
        )
        assert float(new["alpha"]) == alpha


def test_alpha_is_learned_once_in_a_visit():
    """As above with two batches, eta = 0.0625: the second does not move alpha from 0.875.

    First: w <- 0.25, v <- 2 + 0.0625 * 0.5 * 3 = 2.09375. Second: bar = 0.875 v + 0.125 w = 1.86328125, its
    gradient -2.13671875: v <- v + 0.0625 * 0.875 * 2.13671875 = 2.21060181; w <- 0.484375.
    """
    state = {"model": torch.tensor([2.0]), "alpha": torch.tensor(0.5)}
    client = byhand.Quadratic([4.0], lr=0.0625, steps=2)
    report, new = APFL().local_update(byhand.message(model=[[0.0]]), state, client, byhand.KEY)
    assert float(new["alpha"]) == 0.875
    assert_close(report.vectors["model"], torch.tensor([0.484375]))
    assert_close(new["model"], torch.tensor([2.2106018]))


def test_a_client_is_judged_by_its_mixture_with_the_current_global_model():
    """v = 2, w = 6, alpha = 0.25: 5. Before the first visit v is the initial model, 1, and alpha the first,
    0.5.
    """
    client, message = byhand.Quadratic([4.0], init=[1.0]), byhand.message(model=[[6.0]])
    state = {"model": torch.tensor([2.0]), "alpha": torch.tensor(0.25)}
    assert_close(APFL().model_of(message, state, client), torch.tensor([5.0]))
    assert_close(APFL().model_of(message, {}, client), torch.tensor([3.5]))


@pytest.mark.parametrize("options", [{}, {"alpha": 0.9, "adaptive": False}])
def test_its_global_row_is_fedavgs(options, tmp_path):
    apfl, fedavg = (
        toy.run(a, toy.Tiny(), tmp_path / str(i), participation=0.5, local=PLAIN)
        for i, a in enumerate((APFL(**options), FedAvg()))
    )
    assert_close(apfl.server.tables["model"], fedavg.server.tables["model"], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_a_private_share_it_is_fedavg(participation, tmp_path):
    limit = Limit("alpha = 0", "apfl", {"alpha": 0.0, "adaptive": False}, settings={"local": PLAIN})
    agree(limit, "fedavg", participation, tmp_path)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_a_global_share_it_is_local_training(participation, tmp_path):
    limit = Limit("alpha = 1", "apfl", {"alpha": 1.0, "adaptive": False}, settings={"local": PLAIN})
    agree(limit, "local", participation, tmp_path)
