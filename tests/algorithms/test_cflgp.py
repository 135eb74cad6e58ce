"""CFL-GP by hand: profiles of gradients, when they are clustered, and how many clusters there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE


@pytest.mark.parametrize(("step", "beta"), [(1, 1.0), (3, 1.0), (5, 1 / 2), (9, 1 / 3)])
def test_the_profile_of_cflgp_is_an_average_over_rounds(step, beta):
    """K = 2, period 2, round t = step - 1: beta = 1 / (floor((t + 1) / 4) + 1); G <- (1 - beta) 8 + beta 2.

    The client is in cluster 0, whose visit from 0 towards 4 with rate 0.5 gives v = 2.
    """
    method = CATALOGUE["cflgp"](num_clusters=2, period=2, protocol="gap")
    told, state = byhand.message(step, model=[[0.0]]), {"profile": torch.tensor([[8.0]])}
    report, state = method.local_update(told, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["profile"], torch.tensor([[(1 - beta) * 8 + beta * 2]]))
    assert_close(report.vectors["delta"], torch.tensor([2.0]))


def test_cflgp_trains_the_criterion_model_beside_the_own_one():
    """In cluster 1 with model 6 and criterion model 0: the model moves by (4 - 6) / 2 = -1, v = (4 - 0) / 2 =
    2.
    """
    method = CATALOGUE["cflgp"](num_clusters=2, protocol="gap")
    told = byhand.message(1, model=[[6.0], [0.0]])
    report, state = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(report.vectors["delta"], torch.tensor([-1.0]))
    assert_close(state["profile"], torch.tensor([[2.0]]))


def test_cflgp_looks_at_profiles_every_other_round_until_the_tenth():
    """Period 2: rounds 0, 2, ..., 8. Then clients of other clusters than the first download the criterion
    model, row 0, too. Under `emdcfl` every round looks, and nobody downloads more than the own model.
    """
    method, server = CATALOGUE["cflgp"](num_clusters=2, period=2), byhand.server(2, model=[[0.0], [5.0]])
    server.assign[:] = [0, 1]
    looks = [method.compares(replace(server, version=t)) for t in range(12)]
    assert_array_equal(looks, [t % 2 == 0 and t < 10 for t in range(12)])
    assert [method.reads(server, k)["model"] for k in (0, 1)] == [(0,), (1, 0)]
    assert method.reads(replace(server, version=1), 1)["model"] == (1,)
    assert method.serves(server, 1)["model"] == (1,)
    emdcfl = CATALOGUE["cflgp"](num_clusters=2, period=2, variant="emdcfl")
    assert all(emdcfl.compares(replace(server, version=t)) for t in range(12))
    assert emdcfl.reads(server, 1)["model"] == (1,)


def test_cflgp_under_emdcfl_writes_the_block_of_the_own_cluster():
    """K = 2, round t = 1: beta = 1 / (floor(2 / 2) + 1) = 1/2. Cluster 1: 6 -> 5, v = -1: (6 - 1) / 2."""
    method = CATALOGUE["cflgp"](num_clusters=2, variant="emdcfl")
    told = byhand.message(2, model=[[6.0]])
    told = replace(told, rows={"model": (1,)})
    state = {"profile": torch.tensor([[8.0], [6.0]])}
    report, state = method.local_update(told, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["profile"], torch.tensor([[8.0], [2.5]]))
    assert_close(report.vectors["profile"], torch.tensor([8.0, 2.5]))
    assert_close(report.vectors["model"], torch.tensor([5.0]))
    assert "delta" not in report.vectors


def test_cflgp_may_take_one_gradient_instead_of_a_visit():
    """A visit of three mini-batches, 0 -> 2 -> 3 -> 3.5; protocol `gradient` takes the first only."""
    for protocol, moved in (("gradient", 2.0), ("gap", 3.5)):
        method = CATALOGUE["cflgp"](num_clusters=2, protocol=protocol)
        client = byhand.Quadratic([4.0], steps=3)
        report, _ = method.local_update(byhand.message(2, model=[[0.0]]), {}, client, byhand.KEY)
        assert_close(report.vectors["delta"], torch.tensor([moved]))


def test_cflgp_clusters_profiles_and_keeps_the_old_names():
    """Profiles (1, 0), (0, 1), (1, 0), (0, 1): {0, 2} and {1, 3}. Old labels 1, 0, 1, 1 agree best with 1, 0,
    1, 0.

    Rows move by plain means of what their members found, whatever their samples.
    """
    server = byhand.server(4, model=[[0.0], [0.0]])
    server.assign[:] = [1, 0, 1, 1]
    notes = byhand.notes([9, 1, 1, 1], gram=byhand.gram([[1, 0], [0, 1], [1, 0], [0, 1]]))
    plan = CATALOGUE["cflgp"](num_clusters=2).aggregate(server, notes)
    assert_array_equal(plan.assign, [1, 0, 1, 0])
    assert_allclose(plan.mixings[0].weights, [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]])
    assert_array_equal(plan.mixings[0].keep, [1, 1])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"num_clusters": 3}, [0, 1, 2]),
        ({"num_clusters": 3, "starts": "alike"}, [0, 0, 0]),
        ({"num_clusters": 3, "variant": "emdcfl"}, [0, 0, 0]),
        ({"num_clusters": 0, "max_clusters": 3}, [0, 0, 0]),
        ({"num_clusters": 3, "variant": "emdcfl", "starts": "independent"}, [0, 1, 2]),
    ],
)
def test_the_models_of_cflgp_start_independently_where_k_is_given(options, rows):
    """The j-th initial vector is (j, j, j); everyone is in cluster 0."""
    server = CATALOGUE["cflgp"](**options).setup(byhand.problem([1] * 4), None, byhand.KEY)
    assert_array_equal(server.tables["model"][:, 0], rows)
    assert_array_equal(server.assign, [0] * 4)


def test_cflgp_finds_the_number_of_clusters():
    """Three directions, each of three clients with a little noise: K = 0 finds 3."""
    noise = 0.01 * np.array([[1, -1, 0], [0, 1, -1], [-1, 0, 1]])
    points = np.repeat(np.eye(3), 3, axis=0) + np.tile(noise, (3, 1))
    server = byhand.server(9, model=[[0.0]] * 5)
    notes = byhand.notes([1] * 9, gram=byhand.gram(points.tolist()))
    plan = CATALOGUE["cflgp"](num_clusters=0, max_clusters=5).aggregate(server, notes)
    assert len(np.unique(plan.assign)) == 3
    assert all(len(set(plan.assign[3 * g : 3 * g + 3])) == 1 for g in range(3))
