"""FlexCFL by hand: groups of directions, the cold start, newcomers, the inter-group step and migration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.clustering.server_plans import pulled
from mpifl.core.capabilities import OneShotStatistics, uses
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData, Split
from mpifl.core.parameters import Layout


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_flexcfl_groups_directions_not_lengths(measure):
    """Directions (1, 0), (5, .1), (0, 1), (.1, 3): {0, 1} and {2, 3}; rows start from w_0 + plain means."""
    dw = [[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 3.0]]
    method = CATALOGUE["flexcfl"](num_groups=2, measure=measure)
    fingerprints = byhand.notes([9, 1, 1, 1], gram=byhand.gram(dw))
    server = method.setup(byhand.problem([9, 1, 1, 1]), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 1])
    start, directions = method.initial_plan(server, fingerprints).mixings
    assert_allclose(start.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 0]])
    assert_array_equal(start.keep, [1, 1, 1])
    assert (start.of, directions.into) == ("delta", "direction")


def flexcfl_of_emdcfl(num_groups: int, n: list[int]) -> tuple[Any, Any]:
    """Return the method and its first server, in which nobody has a group."""
    method = CATALOGUE["flexcfl"](num_groups=num_groups, variant="emdcfl")
    return method, method.setup(byhand.problem(n), None, byhand.KEY)


def test_round_1_of_flexcfl_under_emdcfl_is_the_first_training():
    """Everyone trains the initial model, row 2. Directions (1, 0), (5, .1), (0, 1), (.1, 3): {0, 1} and
    {2, 3}, each member counting the same, whatever its samples; no inter-group step follows.
    """
    method, server = flexcfl_of_emdcfl(2, [9, 1, 2, 3])
    assert_array_equal(server.assign, [2] * 4)
    assert not uses(method, OneShotStatistics)
    dw = [[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 3.0]]
    told = byhand.notes([9, 1, 2, 3], gram=byhand.gram(dw), steps=[4, 5, 6, 6])
    plan = method.aggregate(server, told)
    models, directions = plan.mixings
    assert_allclose(models.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 0]])
    assert_allclose(directions.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    assert (models.of, directions.of, directions.into) == ("model", "direction", "direction")
    assert_array_equal(plan.assign, [0, 0, 1, 1])
    assert_array_equal(plan.algorithm_state["batches"], [4, 6])  # 4.5 is cut off
    rows = byhand.server(4, plan.algorithm_state, 1, model=[[3.0], [4.0], [0.0]])
    assert method.server_update(server, rows) is rows


def test_who_comes_later_joins_a_group_of_flexcfl_under_emdcfl():
    """g = (10, 0) and (0, 10); client 2's dw = (1, 2) is nearer to the second, which it only joins. Group 0
    averages the others by their 9 and 3 samples; its counter grows by (9 * 3 + 3 * 7) / 12.
    """
    method, server = flexcfl_of_emdcfl(2, [9, 3, 2])
    server = replace(server, version=3, tables={**server.tables, "direction": torch.eye(2) * 10})
    server.assign[:] = [0, 0, 2]
    server.algorithm_state["known"][:2] = True
    apart = [[0, 14.0], [0, 14.0], [85**0.5, 65**0.5]]
    told = byhand.notes([9, 3, 2], norm=[10, 10, 5**0.5], row_distance=apart, steps=[3, 7, 5])
    plan = method.aggregate(server, told)
    assert_allclose(plan.mixings[0].weights, [[0.75, 0.25, 0], [0, 0, 0], [0, 0, 0]])
    assert_array_equal(plan.assign, [0, 0, 1])
    assert plan.algorithm_state["known"].all()
    assert_array_equal(plan.algorithm_state["batches"], [4, 0])


def test_who_comes_later_joins_by_the_update_that_arrived():
    """dw = (1, 2) is sent ten times as large: (10, 20) has cosines 1 / sqrt(5) with g = (10, 0), 2 / sqrt(5)
    with (0, 1), and 0 with the group without members, although sqrt(5) is the length before the attack.
    """
    method, server = flexcfl_of_emdcfl(3, [9, 3, 2])
    server = replace(server, version=3, tables={**server.tables, "direction": torch.zeros(3, 2)})
    server.tables["direction"][:2] = torch.tensor([[10.0, 0.0], [0.0, 1.0]])
    server.assign[:] = [0, 0, 3]
    server.algorithm_state["known"][:2] = True
    assert method.compares(server), "the products tell the length"
    arrived = np.array([[10.0, 0.0], [10.0, 0.0], [10.0, 20.0]])
    apart = np.linalg.norm(arrived[:, None] - server.tables["direction"].numpy(), axis=2)
    sent = {"gram": byhand.gram(arrived), "norm": [10, 10, 5**0.5], "row_distance": apart}
    plan = method.aggregate(server, byhand.notes([9, 3, 2], steps=[3, 7, 5], **sent))
    assert_array_equal(plan.assign, [0, 0, 1])
    assert not method.compares(replace(server, algorithm_state=plan.algorithm_state))


def test_the_inter_group_step_of_emdcfl_divides_by_norms_of_state_dicts():
    """Four layers count batches: w = (3, 4) after 6 batches has norm sqrt(25 + 4 * 36) = 13, (0, 2) after 8
    sqrt(4 + 4 * 64) = sqrt(260). With rate 5: w_1 = (3, 4 + 10 / sqrt(260)), w_2 = (15 / 13, 2 + 20 / 13).

    The counters move likewise and are cut off: 6 + 40 / 16.12 = 8.48, 8 + 30 / 13 = 10.3.
    """
    state = {"batches": [6.0, 8.0], "counter": 2.0}
    server = byhand.server(2, state, 2, model=[[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]])
    new = CATALOGUE["flexcfl"](num_groups=2, variant="emdcfl").server_update(None, server)
    moved = [[3.0, 4 + 10 / 260**0.5], [15 / 13, 2 + 20 / 13], [7.0, 7.0]]
    assert_close(new.tables["model"], torch.tensor(moved))
    assert_array_equal(new.algorithm_state["batches"], [8, 10])


def test_flexcfl_under_emdcfl_groups_nobody_anew():
    with pytest.raises(UserError, match="migration"):
        CATALOGUE["flexcfl"](variant="emdcfl", migration=0.1)


def test_flexcfl_founds_its_groups_on_a_sample_of_alpha_m_clients():
    """Three groups, alpha = 4: twelve different clients of those present, in order; another draw for another
    key.

    Where fewer are present all of them found.
    """
    method, present = CATALOGUE["flexcfl"](num_groups=3, alpha=4), np.arange(5, 105)
    draws = [method.initial_clients(byhand.problem([1] * 105), present, byhand.KEY.of(i)) for i in range(2)]
    for drawn in draws:
        assert len(np.unique(drawn)) == 12
        assert np.isin(drawn, present).all()
        assert_array_equal(drawn, np.sort(drawn))
    assert not np.array_equal(*draws)
    assert_array_equal(
        method.initial_clients(byhand.problem([1] * 105), present[:7], byhand.KEY), present[:7]
    )


def test_flexcfls_short_training_takes_mini_batches():
    """From (0, 0) towards (4, 4), eta = 0.5: 3 after two mini-batches, of which a whole visit has one.

    The second number is a running mean: it moves the model and has no part in direction or length.
    """
    client = byhand.Quadratic([4.0, 4.0], steps=1)
    client.layout = Layout(("w", "mean"), ((1,), (1,)), 1)
    method = CATALOGUE["flexcfl"](iterations=2)
    report = method.fingerprint(client, {"init": torch.zeros(1, 2)}, byhand.KEY)
    assert_close(report.vectors["delta"], torch.tensor([3.0, 3.0]))
    assert_close(report.vectors["direction"], torch.tensor([3.0]))
    assert float(report.notes["norm"]) == 3.0


def test_newcomers_of_flexcfl_join_the_most_similar_direction():
    """g = (10, 0) and (0, 1); dw = (1, 2): cosines 1 / sqrt(5) and 2 / sqrt(5): group 1.

    The server knows lengths and distances: |dw - g| = sqrt(85) and sqrt(2).
    """
    method, server = (
        CATALOGUE["flexcfl"](num_groups=2),
        byhand.server(
            3, {"known": [True, True, False]}, model=[[0.0]] * 3, direction=[[10.0, 0.0], [0.0, 1.0]]
        ),
    )
    server.assign[:] = [0, 1, 2]
    notes = byhand.notes([1], [2], norm=[5**0.5], row_distance=[[85**0.5, 2**0.5]])
    assert_array_equal(method.assign_new_clients(server, notes).assign, [0, 1, 1])


def test_the_inter_group_step_of_flexcfl():
    """w = (3, 4), (0, 2), eta_G = 1: scales 1/5 and 1/2.

    w_1 = ((3, 4) + (0, 1)) / 1.5 = (2, 10/3); w_2 = ((0, 2) + (0.6, 0.8)) / 1.2 = (0.5, 7/3).
    Without the denominator: (3, 5) and (0.6, 2.8).
    """
    w = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert_close(pulled(w, 1.0), torch.tensor([[2.0, 10 / 3], [0.5, 7 / 3]]))
    assert_close(pulled(w, 1.0, normalised=False), torch.tensor([[3.0, 5.0], [0.6, 2.8]]))
    rows = [[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]]
    for eta, variant, second in (
        (1.0, "paper", 10 / 3),
        (None, "paper", 4.0),
        (None, "emdcfl", 9.0),
        (0.0, "emdcfl", 4.0),
    ):
        method = CATALOGUE["flexcfl"](num_groups=2, eta_g=eta, variant=variant)
        moved = method.server_update(None, byhand.server(2, {"counter": 0.0}, 2, model=rows))
        assert_close(moved.tables["model"][0, 1], torch.tensor(second))
    method = CATALOGUE["flexcfl"](num_groups=2, eta_g=1.0)
    new = method.server_update(None, byhand.server(2, model=[[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]]))
    assert_close(new.tables["model"], torch.tensor([[2.0, 10 / 3], [0.5, 7 / 3], [7.0, 7.0]]))


@pytest.mark.parametrize(("limit", "known"), [(0.2, False), (0.5, True)])
def test_a_client_of_flexcfl_whose_labels_shifted_is_grouped_anew(limit, known):
    """Labels 0, 0, 0, 1 became 0, 1, 1, 0: shares (3, 1) / 4 and (2, 2) / 4 are 0.25 apart."""
    shifted = Split(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]))

    class Client(byhand.Quadratic):
        @property
        def data(self):
            return ClientData(shifted, shifted, shifted)

    method, then = CATALOGUE["flexcfl"](num_groups=1, migration=limit), {"labels": torch.tensor([3, 1])}
    report, state = method.local_update(byhand.message(model=[[0.0]]), then, Client([4.0]), byhand.KEY)
    assert_array_equal(state["labels"], [3, 1] if known else [2, 2])
    server = byhand.server(1, {"known": [True]}, model=[[0.0], [0.0]], direction=[[1.0]])
    plan = method.aggregate(server, byhand.notes([4], shifted=[report.notes["shifted"]]))
    assert_array_equal(plan.algorithm_state["known"], [known])
    assert_allclose(plan.mixings[0].weights[0], [float(known)])
    assert plan.mixings[0].keep[0] == (not known), "what was trained on other labels enters no group"
