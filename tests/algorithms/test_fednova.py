"""FedNova: a step by hand, and the limit of equal steps."""

from __future__ import annotations

import numpy as np
import pytest
from algorithms.test_limits import MOMENTUM, Limit, agree
from numpy.testing import assert_allclose
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fednova import FedNova, accumulation
from mpifl.core.mixing import sample_weights


def test_a_step_by_hand():
    """x = 1, tau = (2, 4), n = (1, 3), w = (5, 3): d = (2, 0.5), p = (1/4, 3/4).

    sum p d = 0.875, tau_eff = 0.5 + 3 = 3.5, x <- 1 + 3.0625. The second column is a buffer: x + sum p_i
    change.
    """
    notes = byhand.notes([1, 3], accumulation=[2.0, 4.0])
    old = byhand.server(1, {"num_parameters": 1}, model=[[1.0, 8.0]])
    plan = FedNova().aggregate(old, notes)
    assert_allclose(plan.mixings[0].weights, [[0.25, 0.75]])
    d = np.array([[2.0, -4.0], [0.5, 0.0]])
    mixed = byhand.server(
        1,
        {**old.algorithm_state, **plan.algorithm_state},
        model=(old.tables["model"].numpy() + sample_weights(notes) @ d).astype(np.float32),
    )
    assert_allclose(FedNova().server_update(old, mixed).tables["model"], [[4.0625, 7.0]])


def test_accumulation_by_hand():
    """Momentum 1/4, three steps of gradient 1: velocities 1, 5/4, 21/16; the model moves by 57/16 rates."""
    assert accumulation(3, 0.25) == 57 / 16
    assert accumulation(7, 0.0) == 7.0


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("local", [toy.LOCAL, MOMENTUM])
def test_with_equal_steps_it_is_fedavg(participation, local, tmp_path):
    limit = Limit("equal steps", "fednova", {}, {"equal": True}, {"local": local})
    agree(limit, "fedavg", participation, tmp_path)


def test_with_unequal_steps_it_is_not(tmp_path):
    runs = [toy.run(a, toy.Tiny(), tmp_path / str(a), 1) for a in (FedNova(), _fedavg())]
    assert float((runs[0].models() - runs[1].models()).abs().max()) > 1e-3


@pytest.mark.in_turn
def test_running_statistics_stay_averages(tmp_path):
    """Batch norm's variances would turn negative if they were stretched like the parameters."""
    from mpifl.models import MODELS

    settings = {"model": MODELS["resnet20"](), "local": toy.LocalConfig(lr=1e-6, batch_size=2)}
    runs = [toy.run(a, toy.Tiny(), tmp_path / str(a), 1, **settings) for a in (FedNova(), _fedavg())]
    buffers = runs[0].server_step.problem.layout.part("buffers")[0]
    assert_close(runs[0].model(0)[buffers], runs[1].model(0)[buffers], rtol=1e-4, atol=1e-5)


def _fedavg():
    from mpifl.algorithms.fedavg import FedAvg

    return FedAvg()
