"""CCFL's drift, FedCUAU's mixed alphas, and the usual scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, histogram, label_distance, open_federation
from mpifl.data.pool import Pool
from mpifl.data.scenarios.relations import _orders
from mpifl.data.scenarios.ucfl import label_permutations
from mpifl.data.transforms import PermuteLabels, rotated

PARTS = {"smallest": 100, "largest": 300, "public": 200, "test_images": 80}


def _hits(federation, k, visit, *splits):
    """Return the share of client `k`'s images that are turned as each of the four clusters'.

    The first pixel of an upright image is its label: the corner that holds it tells the cluster.
    """
    x, y = map(np.concatenate, zip(*(federation.samples(k, split, visit) for split in splits), strict=True))
    return np.array([(x[:, 0, i, j] == y).mean() for i, j in [(0, 0), (27, 0), (27, 27), (0, 27)]])


@pytest.fixture(scope="module")
def ccfl(open_small):
    """Return a small CCFL federation."""
    return open_small("fashionmnist", "ccfl", **PARTS, validation=0.1)


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
    for k, visit in ((0, 0), (41, 2)):
        hits = _hits(ccfl, k, visit, "train", "val")
        np.testing.assert_allclose(
            hits, ccfl.mixture(k, visit), atol=0.03
        )  # other pixels hit by chance: 1 in 255


def test_ccfl_tests_on_the_main_cluster_alone_where_asked(open_small):
    mixed, main = (
        open_small("fashionmnist", "ccfl", **PARTS, test_on=which) for which in ("mixture", "main")
    )
    for k, cluster in ((0, 0), (41, 2)):
        np.testing.assert_allclose(_hits(main, k, 1, "test"), np.arange(4) == cluster, atol=0.06)
        np.testing.assert_array_equal(main.samples(k, "train", 1)[0], mixed.samples(k, "train", 1)[0])


def test_ccfl_takes_the_rest_of_a_visit_from_one_other_cluster_where_asked(open_small):
    """Two clusters a visit instead of four; which is the other one changes, and the test images follow it."""
    one = open_small("fashionmnist", "ccfl", **PARTS, others="one")
    mixtures = np.array([[one.mixture(k, v) for v in range(5)] for k in range(80)])
    assert ((mixtures > 0).sum(axis=2) == 2).all()
    main = mixtures[np.arange(80), :, one.groups]
    assert 0.39 < main.min() < main.max() < 0.91
    taken = [(mixtures[np.arange(80), :, (one.groups + shift) % 4] > 0).mean() for shift in (1, 2, 3)]
    np.testing.assert_allclose(taken, 1 / 3, atol=0.08)
    for k, visit in ((0, 0), (41, 2)):
        np.testing.assert_allclose(_hits(one, k, visit, "train"), one.mixture(k, visit), atol=0.03)
        np.testing.assert_allclose(_hits(one, k, visit, "test"), one.mixture(k, visit), atol=0.06)


@pytest.mark.parametrize("others", ["all", "one"])
def test_ccfl_tests_on_another_mixture_of_the_same_kind_where_asked(others, open_small):
    """The visit's own training data, but test images whose shares are drawn anew."""
    mixed, redrawn = (
        open_small("fashionmnist", "ccfl", **PARTS, others=others, test_on=which)
        for which in ("mixture", "redrawn")
    )
    own, anew, others_kept = [], [], []
    for k in range(0, 80, 4):
        np.testing.assert_array_equal(redrawn.samples(k, "train", 1)[0], mixed.samples(k, "train", 1)[0])
        trained, tested = mixed.mixture(k, 1), _hits(redrawn, k, 1, "test")
        own.append(trained[mixed.groups[k]])
        anew.append(tested[redrawn.groups[k]])
        trained[mixed.groups[k]] = tested[mixed.groups[k]] = 0
        others_kept.append(trained.argmax() == tested.argmax())
    assert 0.36 < min(anew) < 0.55 < 0.75 < max(anew) < 0.94  # a share ~ U[0.4, 0.9], too
    assert abs(np.corrcoef(own, anew)[0, 1]) < 0.5
    assert 0 < sum(others_kept) < 14  # a third of 20 by chance
    assert len(redrawn.samples(0, "test", 1)[1]) == 80


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
    static = open_small("fashionmnist", "ccfl", static=True, **PARTS)
    moving = open_small("fashionmnist", "ccfl", **PARTS)
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
    with pytest.raises(UserError, match=r"groups = 3: there are only 2 orders of 2; use fewer groups"):
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


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_users_of_ucfl_c_never_have_the_labels_of_another_group(classes):
    """Draws that repeat none are what they were; of two classes, one seed in two repeated the first."""
    count = min(classes, 4)
    for seed in range(50):
        draws = [key(seed, "data").of("labels", g).numpy().permutation(classes) for g in range(count)]
        tables = label_permutations(classes, count, key(seed, "data"))
        assert len(set(tables)) == count
        for g, draw in enumerate(map(tuple, draws)):
            assert (tables[g] == draw) == (draw not in tables[:g])
    with pytest.raises(UserError, match=r"permutations = 3: there are only 2 orders of 2 classes; use fewer"):
        label_permutations(2, 3, key(0, "data"))


def images(side: int, classes: np.ndarray, num_classes: int) -> Pool:
    """Return black images of some classes."""
    return Pool(np.zeros((len(classes), 1, side, side), np.uint8), classes, len(classes), num_classes)


@pytest.mark.parametrize("scenario", ["ucfl_c", "composed", "mixed"])
def test_labels_of_groups_differ_in_the_classes_that_have_samples(scenario):
    """Of eight classes two have: of the 8! orders, 56 can be told apart."""
    pool = images(4, np.tile([1, 7], 20), 8)
    options = {
        "ucfl_c": {"clients": 12, "permutations": 12, "test_images": 0},
        "composed": {"clients": 12, "permutations": 12},
        "mixed": {"groups": ({"clients": 1, "permute_labels": True},) * 12},
    }[scenario]
    for seed in range(5):
        (op,) = SCENARIOS[scenario](**options).compose(pool, key(seed, "data")).ops
        assert len({(table[1], table[7]) for table in op.tables}) == 12


def test_composed_groups_of_a_subset_never_have_the_same_labels():
    """A permutation of ten classes leaves one or more as they are for 63 % of all seeds."""
    pool = images(4, np.arange(400) % 10, 10)
    for seed in range(20):
        for subsets, permutations in ((10, 3), (5, 3), (2, 4)):
            scenario = SCENARIOS["composed"](
                clients=subsets * permutations, permutations=permutations, subsets=subsets
            )
            facts = scenario.compose(pool, key(seed, "data")).facts
            for part in facts["classes"]:
                assert len({tuple(np.array(table)[part]) for table in facts["labels"]}) == permutations
    for permutations, few in (
        (11, "there are only 10 orders of 1 of 10"),
        (10, "20000 draws gave no further"),
    ):
        scenario = SCENARIOS["composed"](clients=10 * permutations, permutations=permutations, subsets=10)
        with pytest.raises(UserError, match=rf"permutations = {permutations}: {few} .*; use fewer"):
            scenario.compose(pool, key(0, "data"))


@pytest.mark.parametrize(
    ("vocabulary", "groups", "moved"), [(4, 4, 1.0), (3, 3, 1.0), (65, 8, 0.03), (4, 7, 0.1), (49, 4, 1.0)]
)
def test_alphabets_of_groups_differ(vocabulary, groups, moved):
    """Draws that repeat none are what they were; 4 groups of 4 tokens were equal for 87 of 200 seeds."""
    tokens = np.arange(vocabulary * 8).reshape(-1, 4) % vocabulary
    pool = Pool(tokens, tokens, len(tokens), vocabulary, vocabulary=vocabulary)
    scenario = SCENARIOS["alphabets"](clients=groups, groups=groups, moved=moved)
    for seed in range(100):
        (op,) = scenario.compose(pool, key(seed, "data")).ops
        tables = list(map(tuple, op.orders.tolist()))
        assert len(set(tables)) == groups
        for g in range(1, groups):
            table, rng = np.arange(vocabulary), key(seed, "data").of("alphabet", g).numpy()
            chosen = rng.choice(vocabulary, max(2, round(moved * vocabulary)), replace=False)
            table[chosen] = np.roll(chosen, 1)
            assert (tables[g] == tuple(table)) == (tuple(table) not in tables[:g])


@pytest.mark.parametrize(
    ("vocabulary", "groups", "moved", "count"), [(4, 8, 1.0, 7), (3, 5, 0.1, 4), (1, 2, 1.0, 1)]
)
def test_more_alphabets_than_there_are_are_refused(vocabulary, groups, moved, count):
    tokens = np.zeros((20, 4), np.int64)
    pool = Pool(tokens, tokens, len(tokens), vocabulary, vocabulary=vocabulary)
    scenario = SCENARIOS["alphabets"](clients=groups, groups=groups, moved=moved)
    with pytest.raises(UserError, match=rf"groups = {groups}: there are only {count} alphabets of .*; use"):
        scenario.compose(pool, key(0, "data"))


def truth(scenario: str, pool: Pool, **options) -> tuple[list[int], tuple[str, ...]]:
    """Return true groups, and what they are called."""
    spec = SCENARIOS[scenario](**options).compose(pool, key(0, "data"))
    assert spec.groups is not None
    assert len(spec.names) == spec.groups.max() + 1
    return spec.groups.tolist(), spec.names


TURNED = {"rotated": {}, "composed": {}, "ucfl_b": {"points": 200}, "ucfl_batch": {"points": 200}}


@pytest.mark.parametrize(("scenario", "options"), TURNED.items())
def test_groups_that_are_turned_alike_are_one(scenario, options):
    """Angles that leave every pixel where it is, too: 7 degrees move none of 8 x 8, and some of 28 x 28."""
    small, large = images(8, np.arange(400) % 10, 10), images(28, np.arange(400) % 10, 10)
    for pool, angles, groups, names in (
        (large, (0, 360, 0), [0, 0, 0], ["0, 360 degrees"]),
        (large, (90, 0, -270, 180), [0, 1, 0, 2], ["90, -270 degrees", "0 degrees", "180 degrees"]),
        (small, (0, 7), [0, 0], ["0, 7 degrees"]),
        (small, (0, 90, 97), [0, 1, 1], ["0 degrees", "90, 97 degrees"]),
        (large, (0, 7), [0, 1], ["0 degrees", "7 degrees"]),
    ):
        found = truth(scenario, pool, clients=len(angles), angles=tuple(map(float, angles)), **options)
        assert found == (groups, tuple(names))


def test_composed_groups_that_differ_in_an_angle_of_none_keep_their_other_differences(cache):
    """Angles 0 and 360, two permutations, five subsets: ten true groups, of two blocks of two clients."""
    options = {"clients": 40, "angles": (0.0, 360.0), "permutations": 2, "subsets": 5}
    federation = opened(cache, "composed", **options)
    np.testing.assert_array_equal(federation.groups, np.tile(np.repeat(np.arange(10), 2), 2))
    assert federation.names[0].startswith("0, 360 degrees, permutation 0 of the labels, classes ")
    for k in range(20):
        assert set(federation.labels(k)) == set(federation.labels(k + 20))


def test_mixed_groups_that_are_equal_in_everything_are_one():
    pool = images(8, np.arange(400) % 10, 10)
    skewed, turned = {"name": "dirichlet", "clients": 2}, {"clients": 1, "angle": 90}
    for groups, expected, names in (
        (({"clients": 1}, {"clients": 2}, {"clients": 1, "angle": 360}), [0, 0, 0, 0], ["iid"]),
        ((skewed, {"clients": 1}, skewed), [0, 0, 1, 0, 0], ["dirichlet", "iid"]),
        (({"clients": 1}, turned, {**turned, "angle": -270.0}), [0, 1, 1], ["iid", "iid, 90 degrees"]),
        (({**turned, "noise": 0.1}, turned), [0, 1], ["iid, 90 degrees, noise 0.1", "iid, 90 degrees"]),
        (({"clients": 1, "permute_labels": True},) * 2, [0, 1], ["iid, labels permuted"] * 2),
        ((skewed, {**skewed, "alpha": 0.1}), [0, 0, 1, 1], ["dirichlet", "dirichlet, alpha 0.1"]),
    ):
        assert truth("mixed", pool, groups=groups) == (expected, tuple(names))
    sizes = ({"clients": 1}, {"clients": 2})
    assert truth("mixed", pool, groups=sizes, copies=True)[0] == [0, 1, 1], "half as many samples each"


def test_groups_of_one_concentration_are_one():
    pool = images(4, np.arange(800) % 10, 10)
    pool = Pool(pool.inputs, pool.labels, 600, 10)
    options = {"clients": 6, "alphas": (0.5, 10.0, 0.5), "samples": 20, "test_images": 5}
    assert truth("fedcuau", pool, **options) == ([0, 0, 1, 1, 0, 0], ("alpha 0.5", "alpha 10"))


def test_groups_without_noise_are_one():
    pool = images(4, np.arange(100) % 10, 10)
    assert truth("feature_noise", pool, clients=4, groups=2, sigma=0.0) == ([0] * 4, ("noise 0",))
    assert truth("feature_noise", pool, clients=4, groups=2, sigma=0.1)[0] == [0, 0, 1, 1]
    numbers = np.arange(40, dtype=np.float32).reshape(20, 2) % 3
    table = Pool(numbers, np.arange(20) % 2, 20, 2, categories=(3, 3))
    with pytest.raises(UserError, match=r"sigma = 0.1: all columns are categories"):
        truth("feature_noise", table, clients=4, groups=2, sigma=0.1)


def test_ranges_of_one_value_are_one_group_and_so_are_all_that_nothing_sorts():
    """Half of 80 labels are 0: two of four ranges hold nothing else, of five the third holds 0 and 1."""
    pool = images(4, np.repeat([0, 1], 40), 2)
    zero, one = "target 0 to 0", "target 1 to 1"
    halves = ("target 0 to 0.5", "target 0.5 to 1")
    assert truth("quantile", pool, clients=4, groups=2) == ([0, 0, 1, 1], halves)
    assert truth("quantile", pool, clients=4, groups=4)[0] == [0, 0, 1, 1]
    groups, names = truth("quantile", pool, clients=5, groups=5)
    assert (groups, names) == ([0, 0, 1, 2, 2], (zero, "target 0 to 1", one))
    assert truth("quantile", pool, clients=4, groups=4, strictness=0.5)[0] == [0, 1, 2, 3]
    assert truth("quantile", pool, clients=4, groups=4, strictness=0.0) == ([0] * 4, ("target 0 to 1",))
    same = images(4, np.zeros(80, np.int64), 1)
    assert truth("quantile", same, clients=4, groups=4, strictness=0.5)[0] == [0] * 4


def test_clusters_of_ccfl_that_are_turned_alike_are_refused():
    pool = Pool(np.zeros((400, 1, 8, 8), np.uint8), np.arange(400) % 10, 300, 10)
    options = {"clients": 60, "smallest": 5, "largest": 10, "public": 5, "test_images": 5}
    SCENARIOS["ccfl"](clusters=24, **options).compose(pool, key(0, "data"))
    with pytest.raises(
        UserError, match=r"clusters = 60: angles 6 degrees apart leave all pixels .*; use fewer"
    ):
        SCENARIOS["ccfl"](clusters=60, **options).compose(pool, key(0, "data"))


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
