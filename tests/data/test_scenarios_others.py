"""CCFL's drift, FedCUAU's mixed alphas, and the usual scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, histogram, label_distance, open_federation
from mpifl.data.scenarios.relations import _orders
from mpifl.data.scenarios.ucfl import label_permutations
from mpifl.data.transforms import PermuteLabels, rotated


@pytest.fixture(scope="module")
def ccfl(open_small):
    """Return a small CCFL federation."""
    return open_small(
        "fashionmnist", "ccfl", smallest=100, largest=300, public=200, test_images=80, validation=0.1
    )


def test_ccfl_draws_new_data_at_every_visit(ccfl):
    sizes = np.array(
        [
            [len(ccfl.labels(k, "train", v)) + len(ccfl.labels(k, "val", v)) for v in range(5)]
            for k in range(20)
        ]
    )
    assert sizes.min() >= 100
    assert sizes.max() <= 300
    assert len(np.unique(sizes)) > 40
    np.testing.assert_array_equal(sizes[:, 0], ccfl.sizes[:20, :2].sum(axis=1))
    assert not np.array_equal(ccfl.labels(3, "train", 0)[:50], ccfl.labels(3, "train", 1)[:50])


CYCLES = {"smallest": 20, "largest": 60, "public": 40, "test_images": 20}


@pytest.mark.parametrize(
    ("scenario", "options", "awaits"),
    [
        ("ccfl", CYCLES | {"validation": 0.3}, False),
        ("ccfl", CYCLES | {"validation": 0.3}, True),
        ("ccfl", CYCLES | {"static": True}, False),
        ("population", {"clients": 5, "samples": 12, "test_images": 4, "validation": 0.2}, False),
        ("dirichlet", {"clients": 5, "alpha": 1.0}, False),
    ],
)
def test_the_number_of_samples_is_that_of_the_visit(scenario, options, awaits, open_small):
    federation = open_small("fashionmnist", scenario, **options)
    if awaits:
        federation.await_drift(0.2, 5)
    found = [[len(federation.client(k, v).train) for v in range(4)] for k in range(3)]
    assert found == [[federation.num_samples(k, v) for v in range(4)] for k in range(3)]
    np.testing.assert_array_equal(np.array(found)[:, 0], federation.sizes[:3, 0])
    assert (len(np.unique(found)) > 3) == federation.changes


def test_ccfl_mixtures_favour_the_main_cluster(ccfl):
    mixtures = np.array([[ccfl.mixture(k, v) for v in range(5)] for k in range(80)])
    np.testing.assert_allclose(mixtures.sum(axis=2), 1.0)
    main = mixtures[np.arange(80), :, ccfl.groups]
    assert 0.39 < main.min() < 0.45
    assert 0.85 < main.max() < 0.91
    others = (1 - main.mean()) / 3
    for shift in (1, 2, 3):  # the rest falls evenly on the others
        np.testing.assert_allclose(
            mixtures[np.arange(80), :, (ccfl.groups + shift) % 4].mean(), others, atol=0.02
        )


def test_ccfl_samples_are_turned_as_their_mixture_says(ccfl):
    """The first pixel of an upright image is its label: the corner that holds it tells the cluster."""
    corners = [(0, 0), (27, 0), (27, 27), (0, 27)]
    for k, visit in ((0, 0), (41, 2)):
        parts = [ccfl.samples(k, split, visit) for split in ("train", "val")]
        x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        hits = np.array([(x[:, 0, i, j] == y).mean() for i, j in corners])
        np.testing.assert_allclose(
            hits, ccfl.mixture(k, visit), atol=0.03
        )  # other pixels hit by chance: 1 in 255


def test_ccfl_tests_on_the_main_cluster_alone_where_asked(open_small):
    options = {"smallest": 100, "largest": 300, "public": 200, "test_images": 80}
    mixed, main = (
        open_small("fashionmnist", "ccfl", **options, test_on=which) for which in ("mixture", "main")
    )
    corners = [(0, 0), (27, 0), (27, 27), (0, 27)]
    for k, cluster in ((0, 0), (41, 2)):
        x, y = main.samples(k, "test", 1)
        hits = np.array([(x[:, 0, i, j] == y).mean() for i, j in corners])
        np.testing.assert_allclose(hits, np.arange(4) == cluster, atol=0.06)
        np.testing.assert_array_equal(main.samples(k, "train", 1)[0], mixed.samples(k, "train", 1)[0])


def test_ccfl_public_sets_are_test_images_no_client_is_tested_on(ccfl):
    public = ccfl.public()
    assert [len(split) for split in public] == [200] * 4
    upright = {x.numpy().tobytes() for x in public[0].x}
    for group in range(1, 4):
        np.testing.assert_array_equal(torch.rot90(public[0].x, group, (2, 3)), public[group].x)
    for k in (0, 79):
        data = ccfl.client(k, 3).test
        assert len(data) == 80
        turned = [torch.rot90(x, -g, (1, 2)).contiguous().numpy().tobytes() for x in data.x for g in range(4)]
        assert not upright & set(turned)


def test_ccfl_exams_are_test_images_that_the_server_does_not_train_with(open_small):
    """500 test images, 200 of them public: 300 are left for the exam, 90 where no more are asked for."""
    options = {"smallest": 50, "largest": 60, "public": 200, "test_images": 20}
    for asked, length in ((8000, 300), (90, 90)):
        federation = open_small("fashionmnist", "ccfl", exam=asked, **options)
        public, group_test_sets = federation.public(), federation.group_test_sets()
        assert [len(split) for split in group_test_sets] == [length] * 4
        seen = {x.numpy().tobytes() for x in public[0].x}
        assert not seen & {x.numpy().tobytes() for x in group_test_sets[0].x}
        for group in range(1, 4):
            np.testing.assert_array_equal(
                torch.rot90(group_test_sets[0].x, group, (2, 3)), group_test_sets[group].x
            )


def test_ccfl_static_stays_as_it_was(open_small):
    options = {"smallest": 100, "largest": 300, "public": 200, "test_images": 80}
    static = open_small("fashionmnist", "ccfl", static=True, **options)
    moving = open_small("fashionmnist", "ccfl", **options)
    torch.testing.assert_close(static.client(5, 9).train.x, static.client(5, 0).train.x)
    torch.testing.assert_close(static.client(5, 9).train.x, moving.client(5, 0).train.x)
    np.testing.assert_array_equal(static.mixture(5, 9), moving.mixture(5, 0))


def test_ccfl_is_the_papers_world_on_real_files(open_real):
    federation = open_real("fashionmnist", "ccfl")
    assert federation.num_clients == 80
    assert [len(split) for split in federation.public()] == [2000] * 4
    sizes = federation.sizes
    assert 500 <= sizes[:, 0].min() < 600
    assert 1900 < sizes[:, 0].max() <= 2000
    assert (sizes[:, 2] == 500).all()


@pytest.mark.parametrize("clusters", [2, 3, 4, 6])
def test_ccfl_angles_divide_the_circle(open_small, clusters):
    options = {"smallest": 50, "largest": 60, "public": 50, "test_images": 20}
    federation = open_small("fashionmnist", "ccfl", clusters=clusters, clients=20 * clusters, **options)
    upright, *others = (split.x.numpy() for split in federation.public())
    pixels = np.rint((upright * 0.3530 + 0.2860) * 255).astype(np.uint8)
    for i, turned in enumerate(others, 1):
        back = np.rint((turned * 0.3530 + 0.2860) * 255).astype(np.uint8)
        np.testing.assert_array_equal(back, rotated(pixels, i * 360 / clusters))


def test_fedcuau_groups_differ_in_heterogeneity(open_real):
    federation = open_real("cifar10", "fedcuau")
    np.testing.assert_array_equal(federation.sizes, [[500, 0, 100]] * 100)
    np.testing.assert_array_equal(federation.groups, np.repeat([0, 1, 2, 3], 25))
    distance = label_distance(histogram(federation)).reshape(4, 25)
    means = distance.mean(axis=1)
    assert means[0] < 0.2 < means[1] < means[2] < means[3]
    train, test = (histogram(federation, split)[75:80] for split in ("train", "test"))
    assert np.abs(train / 500 - test / 100).sum(axis=1).max() < 0.6, "test follows the same q_k"


def test_fedcuau_tests_clients_on_the_classes_they_train_on(open_small):
    """With alpha 0.02 a client draws from one or two of ten classes, in training and test alike.

    Only the last clients of a group take what others left over.
    """
    options = {"clients": 4, "samples": 100, "test_images": 20, "alphas": (0.02,)}
    federation = open_small("cifar10", "fedcuau", **options)
    train, test = (histogram(federation, split) for split in ("train", "test"))
    for k in range(3):
        assert (train[k] > 0).sum() <= 4
        assert test[k][train[k] > 0].sum() >= 18, "of 20 test images"
    assert len(np.unique(train.argmax(1))) > 1, "clients differ, or this would say nothing"


def test_fedcuau_groups_share_nothing(open_small):
    federation = open_small("cifar10", "fedcuau", clients=20, samples=50, test_images=10)
    owners: dict[bytes, set[int]] = {}
    for k in range(20):
        for split in ("train", "test"):
            for image in federation.samples(k, split)[0]:
                owners.setdefault(image.tobytes(), set()).add(k)
    assert len(owners) == 20 * 60
    assert all(len(who) == 1 for who in owners.values())


def opened(cache, scenario: str, **options):
    """Open a federation of digits."""
    return open_federation(DataConfig(cache=str(cache), scenario=SCENARIOS[scenario](**options)), 0)


def test_iid_clients_look_like_the_whole(cache):
    federation = opened(cache, "iid", clients=10)
    assert federation.sizes[:, 0].max() - federation.sizes[:, 0].min() <= 1
    assert federation.sizes.sum() == 1797
    assert label_distance(histogram(federation)).max() < 0.5


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1e5])
@pytest.mark.parametrize("by", ["class", "client"])
@pytest.mark.parametrize("clients", [2, 300])
def test_dirichlet_worlds_exist_for_every_alpha_and_leave_nobody_empty(cache, alpha, by, clients):
    federation = opened(cache, "dirichlet", alpha=alpha, by=by, clients=clients, min_samples=2)
    assert federation.sizes[:, 0].min() >= 2
    assert federation.sizes[:, 2].min() >= 1
    assert federation.sizes[:, 0].sum() == 1438


def test_dirichlet_skew_grows_as_alpha_falls(cache):
    distances = [
        label_distance(histogram(opened(cache, "dirichlet", alpha=a))).mean() for a in (100.0, 1.0, 0.05)
    ]
    assert distances[0] < distances[1] < distances[2]


def test_test_images_follow_each_clients_classes(cache):
    federation = opened(cache, "dirichlet", alpha=0.1, clients=5)
    train, test = histogram(federation, "train"), histogram(federation, "test")
    expected = train / train.sum(axis=0) * test.sum(axis=0)
    np.testing.assert_allclose(test, expected, atol=1.0)


def test_own_test_samples_are_a_share_and_all_means_all(cache):
    own = opened(cache, "iid", clients=10, test="own", test_share=0.25, validation=0.1)
    assert own.sizes[-1].tolist() == [96, 11, 36]  # 143 = 36 + 107, 107 = 11 + 96
    whole = opened(cache, "iid", clients=10, test="all")
    assert (whole.sizes[:, 2] == 359).all()


def test_pathological_clients_hold_few_classes(cache):
    counts = histogram(opened(cache, "shards", clients=20, shards=2))
    assert ((counts > 0).sum(axis=1) <= 4).all(), "a shard may straddle two classes"
    assert np.median((counts > 0).sum(axis=1)) <= 3


def test_quantity_skew_varies_sizes_but_not_classes(cache):
    normal = opened(cache, "lognormal", clients=10, sigma=1.0).sizes[:, 0]
    assert normal.max() > 3 * normal.min()
    power = np.sort(opened(cache, "powerlaw", clients=10, exponent=1.0).sizes[:, 0])[::-1]
    expected = 1438 / np.arange(1, 11) / (1 / np.arange(1, 11)).sum()
    np.testing.assert_allclose(power, expected, atol=1.0)
    flat = opened(cache, "lognormal", clients=10, sigma=0.0).sizes[:, 0]
    assert flat.max() - flat.min() <= 1


def test_compositions_are_products_of_groups(cache):
    """2 angles x 2 permutations x 5 subsets = 20 groups of 2 clients, each with two classes and names."""
    federation = opened(cache, "composed", clients=40, angles=(0.0, 90.0), permutations=2, subsets=5)
    np.testing.assert_array_equal(federation.groups, np.repeat(np.arange(20), 2))
    assert federation.facts["labels"][0] == tuple(range(10))
    assert federation.sizes.sum() == 1797, "shared out: every image once"
    plain = opened(cache, "iid").pool
    original = {image.tobytes(): label for image, label in zip(plain.images, plain.labels, strict=True)}
    for k in range(40):
        angle, name, subset = np.unravel_index(federation.groups[k], (2, 2, 5))
        table = np.array(federation.facts["labels"][name])
        assert set(federation.labels(k)) <= set(table[federation.facts["classes"][subset]])
        x, y = federation.samples(k)
        assert [table[original[image.tobytes()]] for image in rotated(x, -90.0 * angle)] == y.tolist()


def test_composed_copies_give_every_group_everything(cache):
    federation = opened(cache, "composed", clients=6, permutations=3, copies=True, alpha=0.5, validation=0.2)
    for group in range(3):
        assert federation.sizes[federation.groups == group].sum() == 1797


def test_a_million_clients_open_in_seconds_and_only_the_visited_are_drawn(cache):
    import time

    start = time.process_time()
    federation = opened(cache, "population", alpha=0.1)
    assert federation.num_clients == 1_000_000
    data = federation.client(999_999)
    assert (len(data.train), len(data.test)) == (100, 20)
    assert time.process_time() - start < 5
    x, _ = federation.samples(123_456)
    assert len({image.tobytes() for image in x}) == 100, "all different within a client"
    distance = [np.bincount(federation.labels(k), minlength=10).max() for k in range(50)]
    assert np.mean(distance) > 50, "alpha 0.1 leaves most clients with one or two classes"


@pytest.mark.parametrize("seed", range(4))
def test_groups_never_have_the_same_relation(seed):
    """Of two classes, every second draw would change nothing, and the groups would be the same."""
    orders = _orders(key(seed, "data"), 2, 2)
    np.testing.assert_array_equal(orders, [[0, 1], [1, 0]])
    with pytest.raises(UserError, match=r"groups = 3: there are only 2 orders of 2; take fewer groups"):
        _orders(key(seed, "data"), 3, 2)


@pytest.mark.parametrize("seed", range(4))
def test_groups_never_have_the_same_labels(seed):
    """As above, for `composed` and `mixed`; of ten classes no draw is repeated, and it is that of UCFL C."""
    pool = SOURCES["generated"](kind="classes", outputs=2, train=40).load(Path(), Path())
    ten = SOURCES["generated"](kind="classes", outputs=10, train=40).load(Path(), Path())
    drawn = label_permutations(10, 3, key(seed, "data"))
    plain, permuted = {"clients": 2}, {"clients": 2, "permute_labels": True}

    composed = SCENARIOS["composed"](clients=4, permutations=2)
    assert composed.compose(pool, key(seed, "data")).facts["labels"] == ((0, 1), (1, 0))
    composed = SCENARIOS["composed"](clients=6, permutations=3)
    assert composed.compose(ten, key(seed, "data")).facts["labels"] == (tuple(range(10)), *drawn[1:])
    with pytest.raises(UserError, match=r"permutations = 3: there are only 2 orders of 2 classes, .* fewer"):
        composed.compose(pool, key(seed, "data"))

    mixed = SCENARIOS["mixed"](groups=(permuted, plain))
    assert mixed.compose(pool, key(seed, "data")).ops == (PermuteLabels(((1, 0), (0, 1))),)
    mixed = SCENARIOS["mixed"](groups=(permuted, plain, permuted))
    tables = (drawn[0], tuple(range(10)), drawn[2])
    assert mixed.compose(ten, key(seed, "data")).ops == (PermuteLabels(tables),)
    with pytest.raises(UserError, match=r"groups = 3: there are only 2 orders of 2 classes, .* fewer"):
        mixed.compose(pool, key(seed, "data"))


@pytest.mark.parametrize("name", ["digits", "npz"])
def test_pixels_of_images_change_places_and_keep_their_values(tmp_path, name):
    """Of an archive of images in colour there are only statistics per channel."""
    source = SOURCES[name]()
    if name == "npz":
        x = np.random.default_rng(0).integers(0, 255, (200, 4, 4, 3)).astype(np.uint8)
        np.savez(tmp_path / "colours.npz", x_train=x, y_train=np.arange(200) % 5)
        source = SOURCES[name](path=str(tmp_path / "colours.npz"))
    scenario = SCENARIOS["relations"](clients=4, groups=2)
    federation = open_federation(DataConfig(cache=str(tmp_path), source=source, scenario=scenario), 1)
    for k in range(4):
        seen, labels = federation.samples(k)
        before = federation.pool.inputs[federation.partition.of(k, "train", 0).index]
        flat, stored = seen.reshape(len(seen), -1), before.reshape(len(before), -1)
        np.testing.assert_array_equal(np.sort(flat), np.sort(stored))
        assert np.array_equal(seen, before) == (k < 2)
        np.testing.assert_array_equal(federation.labels(k), labels)
