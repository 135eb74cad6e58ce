"""FedBN: batch norm stays at the clients; without any it is FedAvg."""

from __future__ import annotations

import pytest
import torch
from algorithms.test_limits import Limit, agree
from support import toy
from torch import nn
from torch.testing import assert_close

from mpifl.algorithms.fedbn import FedBN
from mpifl.core.parameters import Layout, take, width
from mpifl.models import MODELS


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_batch_norm_it_is_fedavg(participation, tmp_path):
    agree(Limit("no batch norm", "fedbn"), "fedavg", participation, tmp_path)


def test_the_norm_part_holds_parameters_and_running_statistics():
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LayerNorm(2)))
    assert width(layout.part("norm")) == 8
    assert width(layout.part("unnormed")) == 8 + 4
    names = ("1.weight", "1.bias", "1.running_mean", "1.running_var")
    together = torch.cat([torch.arange(layout.size)[layout.slices[n]] for n in names])
    assert_close(take(torch.arange(layout.size), layout.part("norm")), together)


def test_batch_norm_stays_at_home(tmp_path):
    settings = {"model": MODELS["resnet20"](), "local": toy.LocalConfig(lr=0.05, batch_size=4)}
    done = toy.run(FedBN(), toy.Tiny(), tmp_path, steps=2, **settings)
    layout, models = done.server_step.problem.layout, done.models()
    shared, norm = (take(models, layout.part(part)) for part in ("unnormed", "norm"))
    assert_close(shared, shared[:1].expand(6, -1), rtol=0, atol=0)
    assert float((norm[0] - norm[5]).abs().max()) > 1e-3
    assert done.server.tables["shared"].shape[1] == shared.shape[1] < layout.size
