"""Plans that several methods share, by hand: clusters found once, linked clients, new clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.clustering.server_plans import (
    inherited,
    joined,
    linked_clients,
    pulled,
    regrouped,
    related_plan,
    related_server,
)
from mpifl.core.parameters import Layout
from mpifl.core.types import ProblemInfo

PAIR = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)  # 0 and 1 are related, 2 is alone


def problem_of(n: list[int]) -> ProblemInfo:
    """Return a federation of clients with `n` samples and models of one number."""
    return ProblemInfo(
        len(n), 2, np.array(n), Layout(("w",), ((1,),), 1), lambda j: torch.full((1,), float(j))
    )


@pytest.mark.parametrize(("num_clusters", "expected"), [(0, [0, 0, 1, 1, 1, 2]), (2, [0, 0, 1, 1, 1, 0])])
def test_ward_finds_the_number_of_clusters_unless_it_is_given(num_clusters, expected):
    """Two, three and one clients with rows of their own: three clusters. Of the centres the nearest are those
    of 110000 and 000001, sqrt 3 apart: they are one of two.
    """
    groups = np.array([0, 0, 1, 1, 1, 2])
    related, labels = groups[:, None] == groups[None, :], np.array(expected)
    linked = linked_clients(related, "ward", num_clusters)
    assert_array_equal(linked, labels[:, None] == labels[None, :])


def test_ward_reads_rows_as_points_and_not_as_distances():
    """Rows 1100, 1110, 0111, 0011: distances 1, sqrt 3, 2 from the first, 1 between the last two: {0, 1}, {2,
    3}.
    """
    related = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]], bool)
    labels = np.array([0, 0, 1, 1])
    assert_array_equal(linked_clients(related, "ward", 2), labels[:, None] == labels[None, :])


def test_those_who_give_no_statistics_use_the_initial_model():
    """Clients 0, 2, 4 of 5 are known, 0 ~ 4: rows {0, 4}, {2} and the initial model for 1 and 3."""
    linked = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], bool)
    server = related_server(problem_of([1, 2, 3, 4, 5]), np.array([0, 2, 4]), linked)
    assert_array_equal(server.assign, [0, 2, 1, 2, 0])
    assert_array_equal(server.algorithm_state["known"], [1, 0, 1, 0, 1])
    assert server.tables["model"].shape == (3, 1)
    full = np.eye(5)
    full[0, 4] = full[4, 0] = 1
    assert_array_equal(server.algorithm_state["linked"], full)


def test_remembered_models_count_only_if_all_clients_do():
    """0 ~ 1, n = 1, 3, 2; client 1 was there before, not now. With all: (1, 3) / 4; without: client 0 alone.

    Client 2 was never there: with all it counts as the initial model, without its row stays.
    """
    server = related_server(problem_of([1, 3, 2]), np.arange(3), PAIR)
    notes = replace(byhand.notes([1, 3]), fresh=np.array([True, False]))
    (mixing,) = related_plan(server, notes, all_clients=True).mixings
    assert_allclose(mixing.weights, [[1 / 4, 3 / 4], [0, 0], [0, 0]])
    assert_allclose(mixing.keep, [[0, 0, 0], [0, 0, 1], [0, 0, 1]])
    (mixing,) = related_plan(server, notes, all_clients=False).mixings
    assert_allclose(mixing.weights, [[1, 0], [0, 0], [0, 0]])
    assert_allclose(mixing.keep, [[0, 0, 0], [0, 1, 0], [0, 0, 1]])


def old_server():
    """Return a server that knows 0, 1, 2 of six, with 0 ~ 1: rows {0, 1}, {2}, and the initial model."""
    return related_server(problem_of([1] * 6), np.arange(3), PAIR)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [2, 4, 0, 3, 1]])
def test_rows_of_new_clients_start_where_their_relatives_are(order):
    """3 is related to 2 and to 4, 4 to 3: sets {0, 1}, {2, 3}, {2, 3, 4}, {3, 4}; client 5 stays unknown.

    Rows 0 and 1 have old members and start from theirs. Row 2 is new client 3's: from old client 2's. Row 3
    is that of 4, whose only relative is new: from the initial model, which is the last row before and after.
    """
    full = np.array(
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]], np.uint8
    )
    clients = np.array(order)
    plan = regrouped(old_server(), clients, full[np.ix_(clients, clients)], told=np.array([9]))
    (mixing,) = plan.mixings
    assert_array_equal(mixing.keep, [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]])
    assert mixing.weights.shape == (5, 0)
    assert_array_equal(plan.assign, [0, 0, 1, 2, 3, 4])
    assert_array_equal(plan.algorithm_state["known"], [1, 1, 1, 1, 1, 0])
    assert_array_equal(plan.algorithm_state["linked"][:5, :5], full)
    assert_array_equal(plan.algorithm_state["linked"][5], [0, 0, 0, 0, 0, 1])
    assert_array_equal(plan.algorithm_state["told"], [9])
    assert "num_samples" not in plan.algorithm_state


def test_a_row_with_old_and_new_members_starts_from_the_old_ones():
    """Known are 1 and 2, apart; new client 0 joins 2. Their row is numbered 0 and starts from 2's, row 1."""
    server = related_server(problem_of([1] * 3), np.array([1, 2]), np.eye(2, dtype=bool))
    assert_array_equal(server.assign, [2, 0, 1])
    linked = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], bool)
    plan = regrouped(server, np.arange(3), linked)
    assert_array_equal(plan.assign, [0, 1, 0])
    assert_array_equal(plan.mixings[0].keep, [[0, 1, 0], [1, 0, 0], [0, 0, 1]])


def test_a_new_clients_row_starts_from_an_old_relative_and_not_from_itself():
    """Known are 1 and 2, apart; new client 0 is related to 2, and 1 to 2: sets {0, 2}, {1, 2}, {0, 1, 2}."""
    server = related_server(problem_of([1] * 3), np.array([1, 2]), np.eye(2, dtype=bool))
    linked = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    plan = regrouped(server, np.arange(3), linked)
    assert_array_equal(plan.assign, [0, 1, 2])
    assert_array_equal(plan.mixings[0].keep, [[0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])


def test_clients_that_part_both_start_from_the_row_they_shared():
    """0 and 1 shared row 0; as new client 3 comes they are no longer related."""
    linked = np.eye(4, dtype=bool)
    linked[1, 3] = linked[3, 1] = True
    plan = regrouped(old_server(), np.arange(4), linked)
    assert_array_equal(plan.assign, [0, 1, 2, 1, 3, 3])
    assert_array_equal(plan.mixings[0].keep, [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("labels", "old", "names"),
    [
        ([0, 0, 0, 1, 1, 2], [1, 3, 3, -1, -1, 2], [3, 3, 3, 4, 4, 2]),  # what most were called; new ones 4
        ([0, 0, 1, 1], [2, 1, -1, 0], [1, 1, 0, 0]),  # the smallest of equals
        ([0, 1, 2], [-1, -1, -1], [4, 5, 6]),  # new clients in the order of their groups
    ],
)
def test_groups_inherit_the_name_of_most_of_their_old_members(labels, old, names):
    found, parents = inherited(np.array(labels), np.array(old), 4, again=np.array(old) < 0)
    assert_array_equal(found, names)
    assert parents == [-1] * (len({*names}) - len({*names} & {*old}))


def test_a_cluster_that_splits_keeps_its_number_where_most_of_its_members_are():
    """0 to 4 were cluster 1 and all sent again: {0, 1, 2} stay, {3, 4} are new and come from 1. 5, which did
    not send, keeps cluster 2 for 6, which did; {7} sent too, and comes from 2.
    """
    labels, old = np.array([0, 0, 0, 1, 1, 2, 2, 3]), np.array([1, 1, 1, 1, 1, 2, 2, 2])
    again = np.array([True] * 5 + [False, True, True])
    found, parents = inherited(labels, old, 3, again)
    assert_array_equal(found, [1, 1, 1, 3, 3, 2, 2, 4])
    assert parents == [1, 2]


def test_the_parts_of_a_cluster_start_from_its_model():
    server = byhand.server(4, model=[[1.0], [2.0], [9.0]])
    server.assign[:] = [0, 0, 0, 1]
    server.algorithm_state["known"] = np.array([True, True, True, True])
    plan = joined(server, np.array([1, 2, 3]), np.array([0, 2, 3]), [0])
    assert_array_equal(plan.assign, [0, 0, 2, 3])
    (moved,) = plan.mixings
    assert_array_equal(moved.keep @ [1.0, 2.0, 9.0], [1.0, 2.0, 1.0, 9.0, 9.0])


def test_new_clusters_start_from_the_initial_model():
    """Rows 0 and 1 and the initial one; clients 2 and 3 found cluster 2, client 4 is not known yet."""
    server = byhand.server(5, {"known": [1, 1, 0, 0, 0]}, model=[[1.0], [2.0], [9.0]])
    server.assign[:] = [0, 1, 2, 2, 2]
    server.algorithm_state["known"] = server.algorithm_state["known"].astype(bool)
    plan = joined(server, np.array([2, 3]), np.array([2, 2]), bases=np.ones(5))
    assert_array_equal(plan.assign, [0, 1, 2, 2, 3])
    (mixing,) = plan.mixings
    assert_array_equal(mixing.keep @ server.tables["model"].numpy(), [[1], [2], [9], [9]])
    assert_array_equal(plan.algorithm_state["known"], [True, True, True, True, False])
    assert_array_equal(plan.algorithm_state["bases"], np.ones(5))


def test_who_joins_an_old_cluster_moves_no_row():
    server = byhand.server(3, model=[[1.0], [2.0], [9.0]])
    server.assign[:] = [0, 1, 2]
    server.algorithm_state["known"] = np.array([True, True, False])
    plan = joined(server, np.array([2]), np.array([1]))
    assert plan.mixings == []
    assert_array_equal(plan.assign, [0, 1, 1])


def test_models_are_pulled_by_the_others_and_not_by_themselves():
    """Norms 3 and 4 at rate 2: scales 2/3 and 1/2. Row 0: (3, 0) + (0, 4) / 2; row 1: (0, 4) + 2/3 (3, 0)."""
    w = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    whole = np.array([[3.0, 2.0], [2.0, 4.0]])
    assert_allclose(pulled(w, 2.0, normalised=False), whole, rtol=1e-6)
    assert_allclose(pulled(w, 2.0), whole / [[1.5], [5 / 3]], rtol=1e-6)
