"""HypCluster by hand: a client trains its best hypothesis, the server weighs by samples."""

from __future__ import annotations

from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.algorithms.registry import CATALOGUE


def test_a_client_of_hypcluster_trains_the_best_hypothesis_and_the_server_weighs_by_samples():
    """Hypotheses 0, 5 for F(w) = (w - 4)^2 / 2: 5, which moves to 4.5. n = 1, 3: (1, 3) / 4; nobody took
    0.
    """
    method, told = CATALOGUE["hypcluster"](num_clusters=2), byhand.message(model=[[0.0], [5.0]])
    report, _ = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert (int(report.notes["cluster"]), float(report.vectors["model"])) == (1, 4.5)
    plan = method.aggregate(byhand.server(2, model=[[0.0], [5.0]]), byhand.notes([1, 3], cluster=[1, 1]))
    assert_allclose(plan.mixings[0].weights, [[0, 0], [1 / 4, 3 / 4]])
    assert_array_equal(plan.mixings[0].keep, [1, 0])
