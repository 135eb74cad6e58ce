"""FedCE: association and aggregation by hand, and the limit of one cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.fedce import FedCE, association
from mpifl.core.federation import ClientData

L = np.array([[3.0, 5.0], [0.0, 1.0], [0.0, 3.0]])  # [K, batches]


def test_association_by_hand():
    """Means 4, 0.5, 1.5: b = 1. Distances to L_1: 5, 0, 2. delta = 0.5: e^-2.5, 1, e^-1."""
    b, growth = association(L, 0.5)
    assert b == 1
    assert_allclose(growth, [math.exp(-2.5), 1, math.exp(-1)])


def test_emdcfl_increments_the_running_best():
    """Best so far: 0, then 1, then 1: model 0 grows by 1 beside its e^-2.5, model 1 by 2."""
    _, growth = association(L, 0.5, running=True)
    assert_allclose(growth, [1 + math.exp(-2.5), 2, math.exp(-1)])


class Validated(byhand.Told):
    """A client with 70 validation samples whose losses are told."""

    @property
    def data(self):
        return ClientData(byhand.images(0, 10), byhand.images(1, 70), byhand.images(2, 6))


def test_models_are_compared_by_means_over_batches_of_validation_data():
    """Model 1 has losses 1 on the first 64 samples and 0 on the other 6: batch means (1, 0). Model 0 has
    (0.6, 0.6).

    Means of batches are 0.6 and 0.5: model 1 is the best, although its mean over samples, 0.91, is not.
    ||L_1 - L_0|| = sqrt(0.16 + 0.36): with delta = 0.5 the other grows by exp(-0.36056). It trains from 1 to
    0.5.
    """
    client = Validated([], val=[[0.6] * 70, [1.0] * 64 + [0.0] * 6])
    message = byhand.message(model=[[0.0], [1.0]])
    report, _ = FedCE(num_clusters=2).local_update(message, {}, client, byhand.KEY)
    assert int(report.notes["best"]) == 1
    assert_allclose(report.notes["association"], [math.exp(-0.5 * math.sqrt(0.52)), 1], rtol=1e-6)
    assert_close(report.vectors["model"], torch.tensor([0.5]))


def test_aggregation_by_hand():
    """h[., 0] = (0, ln 3) after the visit: a = (1/4, 3/4). h[., 1] = (1, 1): halves. Samples do not count."""
    server = byhand.server(
        3, {"association": [[0.0, 0.5], [7.0, 7.0], [math.log(3), 0]]}, model=[[0.0], [0.0]]
    )
    told = byhand.notes([5, 50], client=[0, 2], association=[[0.0, 0.5], [0.0, 1.0]], best=[1, 0])
    plan = FedCE(num_clusters=2).aggregate(server, told)
    assert_allclose(plan.mixings[0].weights, [[0.25, 0.75], [0.5, 0.5]])
    assert_array_equal(plan.assign, [1, 0, 0])
    assert_allclose(plan.algorithm_state["association"], [[0, 1], [7, 7], [math.log(3), 1]])


def test_a_client_that_comes_twice_in_a_buffer_grows_by_both_visits():
    server = byhand.server(2, {"association": [[1.0, 0.0], [7.0, 7.0]]}, model=[[0.0], [0.0]])
    told = byhand.notes([5, 5], client=[0, 0], association=[[0.0, 0.5], [0.25, 1.0]], best=[0, 1])
    plan = FedCE(num_clusters=2).aggregate(server, told)
    assert_allclose(plan.algorithm_state["association"], [[1.25, 1.5], [7, 7]])
    assert_array_equal(plan.assign, [1, 0])


def test_fedce_with_one_cluster_and_equal_n_is_fedavg(tmp_path):
    agree(Limit("K = 1, equal n", "fedce", {"num_clusters": 1}, {"equal": True}), "fedavg", 1.0, tmp_path)


@pytest.mark.parametrize("running", [False, True])
def test_a_model_that_diverged_is_never_the_best(running):
    b, growth = association(np.array([[np.inf, 1.0], [0.5, 0.5]]), 0.0, running)
    assert b == 1
    assert_allclose(growth, [1.0 if running else 0.0, 1.0])
