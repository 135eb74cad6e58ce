"""FedClust by hand: distances of final layers, linkage, and newcomers."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE

POINTS = [[0.0], [1.0], [9.0]]


def test_fedclust_cuts_the_distances_of_final_layers_and_newcomers_join_the_nearest():
    """Final layers 0, 1, 9: cut at 2 gives {0, 1}, {9}; their means are 0.5 and 9; 6 joins 9, 3 joins 0.5."""
    method = CATALOGUE["fedclust"](threshold=2.0)
    fingerprints = byhand.notes([1, 3, 2], gram=byhand.gram(POINTS))
    server = method.setup(byhand.problem([1, 3, 2, 1, 1]), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 2, 2])
    (signature,) = method.initial_plan(server, fingerprints).mixings
    assert_allclose(signature.weights, [[0.5, 0.5, 0], [0, 0, 1]])
    plan = method.assign_new_clients(
        server, byhand.notes([1, 1], [3, 4], row_distance=[[5.5, 3.0], [2.5, 6.0]])
    )
    assert_array_equal(plan.assign, [0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [0, 0, 1]),  # complete: {0, 1} is 2.5 from the third
        ({"linkage": "single"}, [0, 0, 0]),  # 1.5
        ({"linkage": "average"}, [0, 0, 0]),  # (2.5 + 1.5) / 2 = 2
        ({"linkage": "average", "threshold": 1.9}, [0, 0, 1]),
        ({"threshold": 2.6}, [0, 0, 0]),
        ({"num_clusters": 3}, [0, 1, 2]),
        ({"linkage": "ward"}, [0, 0, 1]),  # sqrt(4 / 3) * 2 = 2.31
    ],
)
def test_fedclusts_linkage_is_complete_unless_said_otherwise(options, labels):
    """Final layers 0, 1 and 2.5; {0, 1} merge at 1, and the threshold is 2.1."""
    fingerprints = byhand.notes([1, 3, 2], gram=byhand.gram([[0.0], [1.0], [2.5]]))
    server = CATALOGUE["fedclust"](**{"threshold": 2.1, **options}).setup(
        byhand.problem([1, 3, 2]), fingerprints, byhand.KEY
    )
    assert_array_equal(server.assign, labels)


def test_fedclusts_statistics_are_the_final_layer_and_under_emdcfl_everything():
    """From (0, 0, 0) towards (4, 2, 6), eta = 0.5: (2, 1, 3), of which the last two are the head."""
    for variant, sent in (("paper", [1.0, 3.0]), ("emdcfl", [2.0, 1.0, 3.0])):
        client = byhand.Quadratic([4.0, 2.0, 6.0])
        client.layout = byhand.FLAT
        method = CATALOGUE["fedclust"](variant=variant)
        report = method.fingerprint(client, {"init": torch.zeros(1, 3)}, byhand.KEY)
        assert_close(report.vectors["signature"], torch.tensor(sent))
        assert client.calls[0].changes == {}


def test_fedclusts_first_training_may_be_shorter_or_longer_than_a_round():
    """Three epochs of a step from 0 towards 6: 3, 4.5, 5.25."""
    client = byhand.Quadratic([0.0, 0.0, 6.0])
    client.layout = byhand.FLAT
    report = CATALOGUE["fedclust"](epochs=3).fingerprint(client, {"init": torch.zeros(1, 3)}, byhand.KEY)
    assert_close(report.vectors["signature"], torch.tensor([0.0, 5.25]))


def test_fedclust_under_emdcfl_averages_once_by_samples():
    """Clusters {0, 1} and {2}: signatures are plain means, models are means by samples, and the last row
    stays.
    """
    fingerprints = byhand.notes([1, 3, 2], gram=byhand.gram(POINTS))
    method = CATALOGUE["fedclust"](threshold=2.0, variant="emdcfl")
    server = method.setup(byhand.problem([1, 3, 2]), fingerprints, byhand.KEY)
    signature, model = method.initial_plan(server, fingerprints).mixings
    assert_allclose(signature.weights, [[0.5, 0.5, 0], [0, 0, 1]])
    assert_allclose(model.weights, [[1 / 4, 3 / 4, 0], [0, 0, 1], [0, 0, 0]])
    assert_array_equal(model.keep, [0, 0, 1])
    assert (model.into, model.of) == ("model", "signature")


def test_fedclust_aggregates_in_every_round_but_not_as_emdcfl_had_it():
    server = byhand.server(3, model=[[0.0], [0.0], [0.0]])
    server.assign[:] = [0, 0, 1]
    (mixing,) = CATALOGUE["fedclust"]().aggregate(server, byhand.notes([1, 3, 2])).mixings
    assert_allclose(mixing.weights, [[1 / 4, 3 / 4, 0], [0, 0, 1], [0, 0, 0]])
    assert not CATALOGUE["fedclust"](variant="emdcfl").aggregate(server, byhand.notes([1, 3, 2])).mixings
