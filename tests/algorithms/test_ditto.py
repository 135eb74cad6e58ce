"""Ditto: a step by hand, and its limits."""

from __future__ import annotations

import torch
from algorithms.test_limits import Limit, agree
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.ditto import Ditto
from mpifl.algorithms.fedavg import FedAvg


def test_ditto_by_hand():
    """F(v) = (v - 4)^2 / 2, eta = 0.5, lambda = 2, w = 1, v = 2.

    v <- 2 - 0.5 (2 - 4 + 2 (2 - 1)) = 2; with w = 0: v <- 2 - 0.5 (-2 + 4) = 1. w_k <- 1 - 0.5 (1 - 4) = 2.5.
    """
    client = byhand.Quadratic([4.0])
    for w, v, trained in ((1.0, 2.0, 2.5), (0.0, 1.0, 2.0)):
        state = {"model": torch.tensor([2.0])}
        report, new = Ditto(lam=2.0).local_update(byhand.message(model=[[w]]), state, client, byhand.KEY)
        assert_close(new["model"], torch.tensor([v]))
        assert_close(report.vectors["model"], torch.tensor([trained]))


def test_dittos_global_row_is_fedavgs(tmp_path):
    ditto, fedavg = (
        toy.run(a, toy.Tiny(), tmp_path / str(a), participation=0.5) for a in (Ditto(), FedAvg())
    )
    assert_close(ditto.server.tables["model"], fedavg.server.tables["model"], rtol=0, atol=0)


def test_ditto_without_pull_is_local_training(tmp_path):
    agree(Limit("lambda = 0", "ditto", {"lam": 0.0}), "local", 0.5, tmp_path)
