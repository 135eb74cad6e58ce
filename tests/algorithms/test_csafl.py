"""CSAFL: groups and steps by hand, and the limit of one group in buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.csafl import CSAFL
from mpifl.algorithms.fedavg import FedAvg
from mpifl.simulation.delays import Tiers
from mpifl.simulation.policies import Buffer, Waves


def test_clients_whose_gradients_have_one_direction_are_one_group():
    """Gradients (1, 0, 0), (0, 5, 0), (9, 1, 0) and (0, 1, 0): lengths do not matter."""
    gram = byhand.gram([[1.0, 0, 0], [0, 5, 0], [9, 1, 0], [0, 1, 0]])
    server = CSAFL(num_groups=2).setup(byhand.problem([1] * 4), byhand.notes([1] * 4, gram=gram), byhand.KEY)
    assert_array_equal(server.assign, [0, 1, 0, 1])
    assert_close(server.tables["model"], torch.zeros(2, 3))


def test_a_client_sends_the_gradient_at_the_initial_model():
    report = CSAFL().fingerprint(
        byhand.Quadratic([3.0, 5.0]), {"init": torch.tensor([[1.0, 1.0]])}, byhand.KEY
    )
    assert_close(dict(report.vectors), {"gradient": torch.tensor([-2.0, -4.0])})


def test_a_group_moves_towards_the_uploads_of_its_members_the_less_the_staler_they_are():
    """Groups of clients 0 and 1, of client 2, and one that uploads nothing; n = 1, 3, 2; lags 0, 3, 8.

    s = 1, 1/2, 1/3. Group 0: w <- (1/4) w_0 + (3/4) (1/2) w_1 + (3/4) (1/2) w. Group 1: w <- w_2 / 3 + (2/3)
    w.
    """
    server = replace(byhand.server(3, model=[[0.0]] * 3), assign=np.array([0, 0, 1]))
    notes = replace(byhand.notes([1, 3, 2]), staleness=np.array([0, 3, 8]))
    (mixing,) = CSAFL(num_groups=3).aggregate(server, notes).mixings
    assert_allclose(mixing.weights, [[1 / 4, 3 / 8, 0], [0, 0, 1 / 3], [0, 0, 0]])
    assert_allclose(mixing.keep, [3 / 8, 2 / 3, 1])


def test_fresh_uploads_replace_the_model_of_their_group():
    server = replace(byhand.server(3, model=[[0.0]]), assign=np.zeros(3, np.int64))
    (mixing,) = CSAFL(num_groups=1).aggregate(server, byhand.notes([1, 3, 3])).mixings
    assert_array_equal(mixing.keep, [0.0])
    assert_allclose(mixing.weights, [[1 / 7, 3 / 7, 3 / 7]])


@pytest.mark.parametrize("policy", [Buffer(size=2), Waves(every_s=2.0)])
def test_one_group_is_fedavg_whose_steps_the_policy_damps(policy, tmp_path):
    """FedAvg under `buffer` and `waves` has rate 1 and exponent 1/2."""
    same = {"policy": policy, "delay": Tiers(), "participation": 0.5}
    one, two = (
        toy.events(method, toy.Tiny(), tmp_path / str(i), 6, **same)
        for i, method in enumerate((CSAFL(num_groups=1), FedAvg()))
    )
    assert max(row["staleness"] for row in one.arrivals) > 0
    for a, b in zip(one.servers, two.servers, strict=True):
        assert_close(a.tables["model"], b.tables["model"], rtol=1e-5, atol=1e-6)


def test_the_groups_of_the_data_are_found_and_kept_apart(tmp_path):
    done = toy.events(CSAFL(num_groups=2), toy.Tiny(), tmp_path, 6, policy=Waves(every_s=2.0), delay=Tiers())
    assert_array_equal(done.server.assign, toy.Tiny().groups)
    apart = done.server.tables["model"][0] - done.server.tables["model"][1]
    assert float(apart.abs().max()) > 0.05
    assert done.server_step.algorithm.placed(done.server, np.zeros(6, bool)).all()
