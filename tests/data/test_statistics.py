"""What a federation reports about itself: names of groups, targets, number of test samples, histograms."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.data import SCENARIOS, DataConfig, build, histogram, label_distance


def test_a_backdoor_world_names_its_targets(open_small):
    for source, scenario, count in (
        ("mnist", "emdcfl_backdoor_mnist", 30),
        ("cifar10", "emdcfl_backdoor_cifar", 15),
    ):
        federation = open_small(source, scenario)
        assert_array_equal(federation.targets, np.arange(count // 3))
        assert federation.extra == ("backdoor",)
        assert federation.names[0].startswith("targets")
    assert open_small("mnist", "iid").targets is None


@pytest.mark.parametrize(
    ("source", "scenario", "options", "names"),
    [
        ("mnist", "emdcfl_mnist", {"version": "two", "clients": 8}, ("-3, 3 degrees", "177, 183 degrees")),
        (
            "mnist",
            "fedcuau",
            {"clients": 4, "samples": 20, "test_images": 4, "alphas": (9.0, 0.5)},
            ("alpha 9", "alpha 0.5"),
        ),
        ("mnist", "composed", {"clients": 4, "angles": (0.0, 90.0), "subsets": 2}, None),
        (
            "cifar10",
            "ucfl_c",
            {"clients": 4, "test_images": 50},
            tuple(f"permutation {g} of the labels" for g in range(4)),
        ),
    ],
)
def test_groups_are_named(open_small, source, scenario, options, names):
    federation = open_small(source, scenario, **options)
    assert len(set(federation.names)) == int(federation.groups.max()) + 1
    assert names is None or federation.names == names


def test_shared_test_images_count_once(open_small):
    """UCFL C tests everybody on the same images, FLT 2 clusters share a class; others are disjoint."""
    assert open_small("cifar10", "ucfl_c", clients=4, test_images=50).test_pool == 50
    flt2 = open_small("mnist", "flt2", clients=10, images=30)
    assert flt2.test_pool == len(flt2.pool.test) < flt2.sizes[:, 2].sum()
    iid = open_small("mnist", "iid", clients=7)
    assert iid.test_pool == iid.sizes[:, 2].sum() == len(iid.pool.test)
    drift = open_small("mnist", "ccfl", clients=4, smallest=20, largest=40, test_images=30, public=100)
    assert drift.test_pool == 120


@pytest.mark.parametrize("limit", [0, build.MATERIALIZE_LIMIT_BYTES], ids=["as they are", "stored rotated"])
def test_an_image_that_is_rotated_for_two_groups_counts_once(tmp_path, monkeypatch, limit):
    """Each of two groups divides the same 350 test images between its four clients."""
    monkeypatch.setattr(build, "MATERIALIZE_LIMIT_BYTES", limit)
    scenario = SCENARIOS["rotated"](clients=8, angles=(0.0, 90.0))
    federation = build.open_federation(DataConfig(cache=str(tmp_path), scenario=scenario), 0)
    assert federation.sizes[:, 2].sum() == 700
    assert federation.test_pool == 350


def test_only_drifting_worlds_change(open_small):
    sizes = {"clients": 4, "smallest": 20, "largest": 40, "test_images": 30, "public": 100}
    assert open_small("mnist", "ccfl", **sizes).changes
    assert not open_small("mnist", "ccfl", static=True, **sizes).changes
    assert not open_small("mnist", "population", clients=9, samples=5).changes
    assert not open_small("mnist", "emdcfl_mnist", clients=4).changes


def test_a_histogram_of_some_clients_is_part_of_the_whole(open_small):
    federation = open_small("mnist", "dirichlet", alpha=0.3, clients=9)
    whole = histogram(federation)
    assert_array_equal(whole.sum(1), federation.sizes[:, 0])
    assert_array_equal(histogram(federation, clients=[2, 7]), whole[[2, 7]])


def test_the_label_distance_of_unequal_clients_by_hand():
    """Together 5 and 1 of 6: client 0, all of class 0, is |1 - 5/6| + 1/6 away; client 1, even,
    1/3 + 1/3.
    """
    assert_allclose(label_distance(np.array([[4, 0], [1, 1]])), [1 / 3, 2 / 3])
    assert_allclose(label_distance(np.array([[3, 0], [0, 0], [1, 0]])), [0, 1, 0], err_msg="nothing is far")
