"""Clusters found once: who joins which, under which name, and from which row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.clustering.server_plans import inherited, joined, pulled


@pytest.mark.parametrize(
    ("labels", "old", "names"),
    [
        ([0, 0, 0, 1, 1, 2], [3, 1, 1, -1, -1, 2], [1, 1, 1, 4, 4, 2]),  # what most were called; new ones 4
        ([0, 0, 1, 1], [2, 1, -1, 0], [1, 1, 0, 0]),  # the smallest of equals
        ([0, 1, 2], [-1, -1, -1], [4, 5, 6]),  # newcomers in the order of their groups
    ],
)
def test_groups_inherit_the_name_of_most_of_their_old_members(labels, old, names):
    assert_array_equal(inherited(np.array(labels), np.array(old), 4), names)


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
