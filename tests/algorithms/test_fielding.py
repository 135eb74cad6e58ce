"""Fielding by hand: clusters of label shares, single moves, and when all clients are clustered anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.types import Notes, Server

SHARES = [[0.9, 0.1], [1.0, 0.0], [0.1, 0.9], [0.0, 1.0]]  # centres (.95, .05) and (.05, .95)
MOVED = [0.2, 0.8]


def method(**options):
    """Return Fielding."""
    return CATALOGUE["fielding"](**options)


def begun(shares: list[list[float]] | None = None, **options) -> Server:
    """Return the server of four clients with ten samples each, in clusters (0, 0, 1, 1)."""
    told = byhand.notes([10] * 4, shares=shares or SHARES)
    server = method(**options).setup(byhand.problem([10] * 4), told, byhand.KEY)
    return replace(server, version=5)


def sent(client: list[int], shares: list[list[float]], n: list[int] | None = None) -> Notes:
    """Return the notes of some clients."""
    return byhand.notes(n or [1] * len(client), client, shares=shares)


def test_the_number_of_clusters_is_that_of_the_largest_silhouette():
    """Two pairs at distance .14, 1.13 or more apart."""
    server = begun()
    assert_array_equal(server.assign, [0, 0, 1, 1])
    assert_allclose(server.algorithm_state["centres"], [[0.95, 0.05], [0.05, 0.95]])
    assert len(server.tables["model"]) == 3, "and the initial model"
    assert_array_equal(begun(num_clusters=1).assign, [0] * 4)
    assert_array_equal(begun(max_clusters=1).assign, [0] * 4)


def test_a_client_sends_the_shares_of_the_classes_in_its_training_data():
    """Ten samples of class 0, of two classes; validation and test data are no part of it."""
    client = byhand.Quadratic([4.0])
    client.layout = replace(client.layout, num_outputs=2)
    report, _ = method().local_update(byhand.message(model=[[6.0]]), {}, client, byhand.KEY)
    assert_array_equal(report.notes["shares"], [1.0, 0.0])
    assert float(report.vectors["model"]) == 5.0
    assert_array_equal(method().fingerprint(client, {}, byhand.KEY).notes["shares"], [1.0, 0.0])


def test_without_drift_clusters_are_averaged_by_samples_and_nobody_moves():
    """n = 1 and 3 in cluster 0; cluster 1 and the initial model stay."""
    plan = method().aggregate(begun(), sent([0, 1], SHARES[:2], [1, 3]))
    assert_allclose(plan.mixings[0].weights, [[1 / 4, 3 / 4], [0, 0], [0, 0]])
    assert len(plan.mixings) == 1
    assert plan.assign is None


def test_a_client_whose_labels_drift_moves_to_the_closest_centre_and_its_upload_enters_no_average():
    """(.2, .8) is closest to (.05, .95). Centres then: p_1 = (1, 0), and (.3 / 3, 2.7 / 3) = (.1, .9).

    The first moved by sqrt(2) * .05, the second as far; theta = .1 allows .1 * sqrt(2) * .9.
    """
    plan = method(theta=0.1).aggregate(begun(), sent([0, 1], [MOVED, SHARES[1]]))
    assert_array_equal(plan.assign, [1, 0, 1, 1])
    assert_allclose(plan.mixings[0].weights, [[0, 1], [0, 0], [0, 0]])
    assert_allclose(plan.algorithm_state["centres"], [[1, 0], [0.1, 0.9]])
    assert "anchors" not in plan.algorithm_state, "they stay"
    assert_array_equal(plan.algorithm_state["since"], [6, 0, 0, 0])


@pytest.mark.parametrize(("theta", "anew"), [(0.05, True), (0.06, False)])
def test_all_are_clustered_anew_when_a_centre_has_moved_by_more_than_theta_of_their_distance(theta, anew):
    """As above: the centres moved by .05 sqrt(2), and were .9 sqrt(2) apart: .0556 of it."""
    plan = method(theta=theta).aggregate(begun(), sent([0, 1], [MOVED, SHARES[1]]))
    assert (len(plan.mixings) == 2) == anew


def test_centres_are_compared_with_those_of_the_last_global_clustering():
    """Two moves of one client: .0278 of the distance each, .0556 together, and theta is .04.

    p_0 goes from .9 to .85, which moves c_0 by .025 sqrt(2), then to .8.
    """
    fielding, server = method(theta=0.04), begun()
    first = fielding.aggregate(server, sent([0], [[0.85, 0.15]]))
    assert len(first.mixings) == 1
    assert_array_equal(first.assign, [0, 0, 1, 1])
    assert_allclose(first.mixings[0].weights[:, 0], [1, 0, 0], err_msg="it stays, and is averaged")
    later = replace(server, algorithm_state={**server.algorithm_state, **first.algorithm_state}, version=6)
    assert len(fielding.aggregate(later, sent([0], [[0.8, 0.2]])).mixings) == 2


def test_a_new_cluster_starts_from_the_mean_of_the_models_that_its_clients_had():
    """p_1 and p_2 change to (.5, .5): three clusters, {0}, {1, 2} and {3}, of rows 0, (0 + 1) / 2 and 1."""
    plan = method(theta=0.0).aggregate(begun(), sent([1, 2], [[0.5, 0.5], [0.5, 0.5]]))
    assert plan.assign[1] == plan.assign[2]
    assert len({*plan.assign.tolist()}) == 3
    rows = plan.mixings[1].keep[plan.assign]
    assert_allclose(rows, [[1, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0], [0, 1, 0]])
    assert_allclose(plan.mixings[1].keep[-1], [0, 0, 1])
    assert_allclose(plan.algorithm_state["centres"][plan.assign[1]], [0.5, 0.5])
    assert_array_equal(plan.algorithm_state["centres"], plan.algorithm_state["anchors"])
    assert_array_equal(plan.algorithm_state["since"], [6] * 4)


def test_with_one_cluster_any_drift_clusters_anew():
    equal = [[0.5, 0.5]] * 4
    plan = method(theta=10.0).aggregate(begun(equal), sent([3], [[0.0, 1.0]]))
    assert_array_equal(plan.assign, [0, 0, 0, 1])


def test_an_upload_from_before_a_client_moved_enters_no_average_and_the_last_shares_count():
    """Client 0 moved at version 5 and read version 4; client 1 sent two uploads, the later one as before."""
    server = begun()
    server = replace(server, algorithm_state={**server.algorithm_state, "since": np.array([5, 0, 0, 0])})
    notes = sent([0, 1, 1], [SHARES[0], MOVED, SHARES[1]])
    plan = method().aggregate(server, replace(notes, staleness=np.array([1, 1, 0])))
    assert_allclose(plan.mixings[0].weights, [[0, 0.5, 0.5], [0, 0, 0], [0, 0, 0]])
    assert plan.assign is None


def test_a_newcomer_joins_the_closest_cluster_before_it_trains():
    """Client 3 was unknown and reads the initial model; (.2, .8) is closest to p_2 = (.1, .9)."""
    told = byhand.notes([10] * 3, shares=SHARES[:3])
    server = method().setup(byhand.problem([10] * 4), told, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 2])
    plan = method().assign_new_clients(server, sent([3], [MOVED]))
    assert_array_equal(plan.assign, [0, 0, 1, 1])
    assert_array_equal(plan.algorithm_state["known"], [True] * 4)
    assert_array_equal(plan.algorithm_state["since"], [0] * 4)


def test_a_run_without_drift_keeps_the_clusters_that_it_began_with(tmp_path):
    done = toy.run(method(num_clusters=2), toy.Tiny(), tmp_path)
    assert_array_equal(done.server.assign, done.servers[0].assign)
    assert len(torch.unique(done.server.tables["model"][done.server.assign], dim=0)) == 2
