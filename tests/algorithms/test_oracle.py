"""Oracle by hand: averages of the true groups."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.algorithms.registry import CATALOGUE


def test_the_oracle_averages_true_groups_and_leaves_strangers_alone():
    """Groups 0, 0, 1, 1; n = 1, 3, 2; client 3 never came: it keeps the initial row, alone."""
    server = byhand.server(4, {"groups": [0, 0, 1, 1]}, model=[[7.0]])
    plan = CATALOGUE["oracle"]().aggregate(server, byhand.notes([1, 3, 2], [0, 1, 2]))
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights, [[0.25, 0.75, 0], [0, 0, 1], [0, 0, 0]])
    assert_allclose(mixing.keep, [[0], [0], [1]])
    assert_array_equal(plan.assign, [0, 0, 1, 2])
    assert len(np.unique(plan.algorithm_state["labels"])) == 3
