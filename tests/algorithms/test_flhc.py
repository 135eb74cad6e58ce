"""FL+HC by hand: one hierarchy of the clients' updates, cut once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE

POINTS = [[0.0], [1.0], [9.0]]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"threshold": 2.0}, [0, 0, 1]),  # distances 1, 9, 8: 0 and 1 merge
        ({"threshold": 0.5}, [0, 1, 2]),
        ({"threshold": 8.6}, [0, 0, 0]),  # {0, 1} to 2: (9 + 8) / 2 = 8.5
        ({"threshold": 8.6, "linkage": "complete"}, [0, 0, 1]),  # max(9, 8) = 9
        ({"num_clusters": 2}, [0, 0, 1]),
    ],
)
def test_flhc_cuts_the_hierarchy_of_updates_once(options, labels):
    server = byhand.server(4, version=2, model=[[0.0]])
    method = CATALOGUE["flhc"](rounds_before=2, **options)
    assert method.compares(server)
    plan = method.aggregate(server, byhand.notes([1, 3, 2], gram=byhand.gram(POINTS)))
    assert_array_equal(plan.assign, [*labels, max(labels) + 1])  # client 3 was absent
    assert_array_equal(plan.mixings[0].keep, np.ones((max(labels) + 2, 1)))
    for k in range(max(labels) + 1):
        n = np.array([1, 3, 2]) * (np.array(labels) == k)
        assert_allclose(plan.mixings[0].weights[k], n / n.sum())


def test_flhc_clusters_clients_though_a_buffer_holds_two_uploads_of_one():
    """Client 0 sent 9, then 1, and client 1 sent 0: one cluster, and none of the 9 alone."""
    server, places = byhand.server(3, version=2, model=[[0.0]]), np.array(POINTS)[[2, 0, 1]].tolist()
    method = CATALOGUE["flhc"](rounds_before=2, threshold=2.0)
    plan = method.aggregate(server, byhand.notes([1] * 3, [0, 1, 0], gram=byhand.gram(places)))
    assert_array_equal(plan.assign, [0, 0, 1])
    assert_allclose(plan.mixings[0].weights, [[1 / 3] * 3, [0] * 3])


def test_flhc_may_cluster_directions():
    """(1, 0), (9, 0), (0, 1): by direction the first two are one, by distance the first and the last."""
    directions = byhand.gram([[1.0, 0.0], [9.0, 0.0], [0.0, 1.0]])
    for metric, labels in (("cosine", [0, 0, 1]), ("euclidean", [0, 1, 0])):
        method = CATALOGUE["flhc"](rounds_before=2, metric=metric, num_clusters=2)
        server = byhand.server(3, version=2, model=[[0.0]])
        assert_array_equal(method.aggregate(server, byhand.notes([1] * 3, gram=directions)).assign, labels)


def test_a_visit_of_flhc_reports_its_update():
    report, _ = CATALOGUE["flhc"]().local_update(
        byhand.message(model=[[6.0]]), {}, byhand.Quadratic([4.0]), byhand.KEY
    )
    assert_close(report.vectors["delta"], torch.tensor([-1.0]))


def test_flhc_averages_everybody_before_and_clusters_after():
    """Round 1 of 2: (1, 3, 2) / 6. Round 4, clusters {0, 2} and {1}: (1, 0, 2) / 3 and client 1 alone."""
    method = CATALOGUE["flhc"](rounds_before=2)
    early = method.aggregate(byhand.server(3, version=1, model=[[0.0]]), byhand.notes([1, 3, 2]))
    assert_allclose(early.mixings[0].weights, [[1 / 6, 1 / 2, 1 / 3]])
    server = byhand.server(3, version=4, model=[[0.0], [5.0]])
    server.assign[:] = [0, 1, 0]
    late = method.aggregate(server, byhand.notes([1, 3, 2]))
    assert_allclose(late.mixings[0].weights, [[1 / 3, 0, 2 / 3], [0, 1, 0]])
    assert_array_equal(late.mixings[0].keep, np.eye(2))
