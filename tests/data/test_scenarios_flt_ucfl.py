"""FLT's and UCFL's scenarios: the counts, groups and permutations of algorithms.md sections 7.2 and 7.3."""

from __future__ import annotations

import numpy as np
import pytest
from support.refusal import refusal_of

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, histogram, open_federation
from mpifl.data.pool import Pool
from mpifl.data.transforms import rotated

MNIST_COUNTS = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def test_flt1_gives_each_client_runs_of_two_classes(open_real):
    """Client i of a cluster takes images [300 i, 300 (i + 1)) of its classes, as far as they go."""
    federation = open_real("mnist", "flt1")
    counts = histogram(federation)
    np.testing.assert_array_equal(federation.groups, np.repeat(np.arange(5), 20))
    classes = federation.facts["classes"]
    assert sorted(c for pair in classes for c in pair) == list(range(10))
    place = np.arange(100) % 20
    for group, pair in enumerate(classes):
        for label in pair:
            expected = np.clip(MNIST_COUNTS[label] - 300 * place[:20], 0, 300)
            np.testing.assert_array_equal(counts[20 * group : 20 * (group + 1), label], expected)
    assert counts.sum() == np.minimum(MNIST_COUNTS, 6000).sum() == 58_862
    assert federation.to_tensor.mean == (0.0,), "ToTensor only"


def test_flt1_tests_on_every_test_image_of_the_clusters_classes(open_real):
    federation = open_real("mnist", "flt1")
    tested = histogram(federation, "test")
    whole = np.bincount(federation.pool.labels[60_000:])
    for k in (0, 19, 20, 99):
        pair = federation.facts["classes"][federation.groups[k]]
        np.testing.assert_array_equal(tested[k], np.where(np.isin(np.arange(10), pair), whole, 0))


def test_flt1s_published_defect_fills_up_with_the_last_image(open_real):
    federation = open_real("mnist", "flt1", short="minus_one")
    np.testing.assert_array_equal(federation.sizes[:, 0], 600)
    last = federation.pool.images[59_999]
    filled = sum(int((federation.samples(k)[0] == last).all(axis=(1, 2, 3)).sum()) for k in range(100))
    assert filled >= 60_000 - 58_862


def test_flt1_shards_are_equal_within_a_class(open_real):
    counts = histogram(open_real("mnist", "flt1", short="shards"))
    for label in range(10):
        held = counts[:, label][counts[:, label] > 0]
        np.testing.assert_array_equal(held, MNIST_COUNTS[label] // 20)


def test_flt1_on_cifar_takes_250_of_each_class(open_real):
    federation = open_real("cifar10", "flt1")
    counts = histogram(federation)
    np.testing.assert_array_equal(np.sort(counts, axis=1)[:, -2:], 250)
    np.testing.assert_array_equal(federation.sizes, [[500, 0, 2000]] * 100)
    assert federation.to_tensor.mean == (0.5,) * 3


@pytest.mark.parametrize(
    ("source", "clients", "per_class"), [("mnist", 100, 200), ("cifar10", 100, 166), ("cifar10", 500, 33)]
)
def test_flt2_clusters_overlap_in_one_class_of_the_same_images(open_real, source, clients, per_class):
    federation = open_real(source, "flt2", clients=clients)
    counts = histogram(federation)
    np.testing.assert_array_equal(
        np.sort(counts, axis=1)[:, -4:], [[0, per_class, per_class, per_class]] * clients
    )
    p = [pair[0] for pair in federation.facts["classes"]]
    assert [triple[2] for triple in federation.facts["classes"]] == [*p[1:], p[0]]
    size, shared = clients // 5, federation.facts["classes"][0][2]
    images = []
    for k in (3, size + 3):  # the fourth client of two neighbouring clusters
        x, y = federation.samples(k)
        images.append(sorted(image.tobytes() for image in x[y == shared]))
    assert images[0] == images[1]


@pytest.mark.parametrize(("scenario", "images"), [("flt1", 600), ("flt2", 900)])
def test_clients_of_flt_can_draw_their_images_by_themselves(open_real, scenario, images):
    """300 of each class, none twice within a client; two clients share some 15 of each class."""
    federation = open_real("mnist", scenario, images=images, drawn=True)
    assert federation.sizes[:, 0].tolist() == [images] * 100
    counts, held = histogram(federation), federation.partition
    rows = [held.of(k, "train", 0).index for k in range(100)]
    for k, row in enumerate(rows):
        own = federation.facts["classes"][federation.groups[k]]
        np.testing.assert_array_equal(counts[k], np.where(np.isin(np.arange(10), own), 300, 0))
        assert len(np.unique(row)) == images
    shared = [len(np.intersect1d(rows[i], rows[j])) for i in range(20) for j in range(i)]
    expected = sum(300 * 300 / MNIST_COUNTS[c] for c in federation.facts["classes"][0])
    np.testing.assert_allclose(np.mean(shared), expected, rtol=0.05)
    whole = np.unique(np.concatenate(rows[:20]))
    left = sum(n * (1 - (1 - 300 / n) ** 20) for n in MNIST_COUNTS[federation.facts["classes"][0]])
    np.testing.assert_allclose(len(whole), left, rtol=0.02)


@pytest.mark.parametrize(("scenario", "images"), [("flt1", 22), ("flt2", 33)])
def test_a_client_of_flt_cannot_draw_more_images_than_a_class_has(scenario, images):
    """Ten of each class; the runs of `flt1` end with the class instead."""
    labels = np.arange(200) % 10
    pool = Pool(np.zeros((len(labels), 1, 2, 2), np.uint8), labels, 100, 10)
    with refusal_of("images", "a client needs 11 images of a class that has 10"):
        SCENARIOS[scenario](clients=5, images=images, drawn=True).compose(pool, key(0))
    fits = SCENARIOS[scenario](clients=5, images=images // 11 * 10, drawn=True).compose(pool, key(0))
    assert len(fits.splits()["train"].of(0)) == images // 11 * 10


def test_flt1_and_2_hold_on_any_files(open_small):
    """1369 images of uneven classes, 10 clients: 68 of each class per client, until the class ends."""
    federation = open_small("mnist", "flt1", clients=10)
    have = np.bincount(federation.pool.labels[: federation.pool.num_train])
    counts = histogram(federation)
    for group, pair in enumerate(federation.facts["classes"]):
        for label in pair:
            np.testing.assert_array_equal(
                counts[2 * group : 2 * group + 2, label], [68, min(have[label] - 68, 68)]
            )
    np.testing.assert_array_equal(open_small("mnist", "flt2", clients=20).sizes[:, 0], 22 * 3)
    assert open_small("mnist", "flt1", clients=10, validation=0.1).sizes[0].tolist()[:2] == [122, 14]


def emnist_like(tmp_path, per_class: int):
    """Return a source of 47 classes with `per_class` training and 4 test images each."""
    y, z = np.repeat(np.arange(47), per_class), np.repeat(np.arange(47), 4)
    pixels = np.zeros((len(y), 2, 2), np.uint8)
    np.savez(tmp_path / "e.npz", x_train=pixels, y_train=y, x_test=pixels[: len(z)], y_test=z)
    return SOURCES["npz"](path=str(tmp_path / "e.npz"))


@pytest.mark.parametrize(
    ("clients", "low", "high", "first", "last_low", "last_high"),
    [(2400, 26, 259, 124, 11, 105), (600, 101, 1256, 128, 41, 429)],
)
def test_flt4_has_the_samplers_sizes(tmp_path, clients, low, high, first, last_low, last_high):
    """EMNIST balanced: 2400 images of each of 47 classes; clusters of 12,000, the last of 4,800."""
    config = DataConfig(
        cache=str(tmp_path), source=emnist_like(tmp_path, 2400), scenario=SCENARIOS["flt4"](clients=clients)
    )
    federation = open_federation(config, 0)
    size = clients // 10
    sizes = federation.sizes[:, 0].reshape(10, size)
    np.testing.assert_array_equal(sizes.sum(axis=1), [12_000] * 9 + [4_800])
    for cluster in range(9):
        assert (sizes[cluster].min(), sizes[cluster].max(), sizes[cluster][0]) == (low, high, first)
    assert (sizes[9].min(), sizes[9].max()) == (last_low, last_high)
    labels = np.unique(federation.labels(clients - 1))
    assert set(labels) <= {45, 46}
    assert set(federation.labels(0)) <= set(range(5))
    assert np.unique(federation.labels(size, "test")).tolist() == [5, 6, 7, 8, 9]
    assert np.unique(federation.labels(clients - 1, "test")).tolist() == [45, 46]


def test_flt4_padded_tests_the_last_cluster_on_label_0_too(tmp_path):
    scenario = SCENARIOS["flt4"](clients=100, padded=True)
    config = DataConfig(cache=str(tmp_path), source=emnist_like(tmp_path, 100), scenario=scenario)
    federation = open_federation(config, 0)
    assert np.unique(federation.labels(99, "test")).tolist() == [0, 45, 46]
    assert set(federation.labels(99)) <= {45, 46}


def test_flt3_is_200_writers_tested_on_their_own_hand(open_real):
    federation = open_real("femnist", "flt3")
    assert federation.num_clients == 200
    pool, names = federation.pool, federation.facts["origins"]
    assert len(set(names)) == 200
    for k in (0, 100, 199):
        writer = pool.origin_names.index(names[k])
        for split, part in (("train", pool.train), ("test", pool.test)):
            mine = pool.images[part][pool.origin[part] == writer]
            assert sorted(x.tobytes() for x in federation.samples(k, split)[0]) == sorted(
                x.tobytes() for x in mine
            )


def test_natural_clients_are_writers(open_small):
    federation = open_small("femnist", "natural")
    np.testing.assert_array_equal(federation.sizes, [[n, 0, 2] for n in (15, 14, 13, 12, 11, 10)])
    assert federation.facts["origins"] == [f"f{i}" for i in range(4, 10)]
    few = open_small("femnist", "natural", clients=2, min_samples=14)
    np.testing.assert_array_equal(few.sizes[:, 0], [15, 14])
    own = open_small("femnist", "natural", test="own", test_share=0.2, validation=0.1)
    np.testing.assert_array_equal(own.sizes[0], [10, 2, 3])


def test_real_qmnist_writers_must_be_tested_on_their_own_samples(open_real):

    with pytest.raises(UserError, match="use own or all"):
        open_real("qmnist", "natural")
    federation = open_real("qmnist", "natural", test="own")
    assert federation.num_clients == 539
    assert federation.sizes.sum() == 60_000


@pytest.mark.parametrize(("drawn", "total"), [(False, 1000), (True, 800)])
def test_ucfl_a_splits_80_20_per_user(open_small, drawn, total):
    federation = open_small("emnist", "ucfl_a", source_options={"split": "byclass"}, points=1000, drawn=drawn)
    assert federation.num_clients == 20
    assert federation.sizes.sum() == total / 0.8
    assert abs(federation.sizes[:, 0].sum() - total) <= 20, "a ceiling for each user"
    held = np.ceil(np.round(0.2 * federation.sizes.sum(axis=1), 9))
    np.testing.assert_array_equal(federation.sizes[:, 2], held)
    assert federation.sizes[:, 0].std() > 5, "sizes vary with the Dirichlet draw"
    assert federation.to_tensor.std == (1.0,), "pixels / 255 and nothing else"
    assert federation.groups is None


def test_ucfl_b_turns_blocks_of_users(open_small):
    federation = open_small("emnist", "ucfl_b", source_options={"split": "byclass"}, points=2000)
    np.testing.assert_array_equal(federation.groups, np.repeat([0, 1, 2, 3], 25))
    originals = {
        image.tobytes()
        for image in open_small(
            "emnist", "ucfl_a", source_options={"split": "byclass"}, points=1000
        ).pool.images
    }
    for k, angle in ((0, 90), (25, 180), (50, 270), (99, 0)):
        x, _ = federation.samples(k)
        assert all(image.tobytes() in originals for image in rotated(x, -angle))
        assert angle == 0 or not any(image.tobytes() in originals for image in x)


def test_ucfl_c_renames_the_labels_of_four_groups(open_real):
    federation = open_real("cifar10", "ucfl_c")
    np.testing.assert_array_equal(federation.sizes, [[2500, 0, 1000]] * 20)
    np.testing.assert_array_equal(federation.groups, np.repeat([0, 1, 2, 3], 5))
    tables = np.array(federation.facts["labels"])
    assert len({tuple(row) for row in tables}) == 4
    np.testing.assert_array_equal(np.sort(tables, axis=1), [np.arange(10)] * 4)
    first = federation.pool.labels[50_000:51_000]
    for k in (0, 6, 13, 19):
        y = federation.labels(k, "test")
        np.testing.assert_array_equal(y, tables[federation.groups[k]][first])
    x, _ = federation.samples(8, "test")
    np.testing.assert_array_equal(x, federation.pool.images[50_000:51_000])


def test_ucfl_c_holds_on_any_files(open_small):
    federation = open_small("cifar10", "ucfl_c", test_images=100)
    np.testing.assert_array_equal(federation.sizes, [[50, 0, 100]] * 20)
    label_of = {
        image.tobytes(): label
        for image, label in zip(federation.pool.images, federation.pool.labels, strict=True)
    }
    tables = federation.facts["labels"]
    for k in (0, 19):
        x, y = federation.samples(k)
        assert [tables[federation.groups[k]][label_of[image.tobytes()]] for image in x] == y.tolist()


def test_the_batch_size_study_gives_every_user_as_many(open_small):
    """Figure 7: four rotations, users of one size."""
    federation = open_small(
        "emnist", "ucfl_batch", source_options={"split": "byclass"}, clients=20, points=2000
    )
    np.testing.assert_array_equal(federation.sizes, [[100, 0, 25]] * 20)
    np.testing.assert_array_equal(federation.groups, np.repeat([0, 1, 2, 3], 5))


def test_users_of_the_batch_size_study_are_turned_by_blocks(open_small):
    """Angle 90 for the first block: turned back, its images are the source's; unturned ones are not."""
    given = {"source_options": {"split": "byclass"}, "clients": 8, "points": 800}
    plain = open_small("emnist", "ucfl_batch", **given, angles=())
    assert plain.groups is None
    originals = {image.tobytes() for image in plain.pool.images}
    federation = open_small("emnist", "ucfl_batch", **given)
    for k, angle in ((0, 90), (2, 180), (4, 270), (7, 0)):
        x, _ = federation.samples(k)
        assert all(image.tobytes() in originals for image in rotated(x, -angle))
        assert angle == 0 or not any(image.tobytes() in originals for image in x)


def test_users_of_the_batch_size_study_differ_in_their_labels(open_small):
    """Label distance to all users together: large under alpha = 0.3, smaller under 8, least without shift."""

    def distance(alpha):
        given = {"clients": 8, "points": 1600, "alpha": alpha}
        federation = open_small("emnist", "ucfl_batch", source_options={"split": "byclass"}, **given)
        counts = np.array([np.bincount(federation.labels(k, "train"), minlength=62) for k in range(8)])
        np.testing.assert_array_equal(counts.sum(1), [200] * 8)
        return np.abs(counts / 200 - counts.sum(0) / 1600).sum(1).mean()

    severe, mild, none = (distance(alpha) for alpha in (0.3, 8.0, None))
    assert severe > 1.5 * mild
    assert mild > 1.15 * none


@pytest.mark.parametrize("num_classes", [4, 10])
def test_neighbouring_clusters_of_flt2_share_one_class_in_a_ring(num_classes):
    """Of ten classes in an order p: {p0, p1, p2}, {p2, p3, p4}, ..., {p8, p9, p0}."""
    labels = np.arange(40 * num_classes) % num_classes
    pool = Pool(np.zeros((len(labels), 1, 2, 2), np.uint8), labels, len(labels) // 2, num_classes)
    for seed in range(3):
        classes = (
            SCENARIOS["flt2"](clients=num_classes // 2, images=6).compose(pool, key(seed)).facts["classes"]
        )
        assert sorted({c for own in classes for c in own}) == list(range(num_classes))
        for i, own in enumerate(classes):
            assert len(set(own)) == 3
            assert own[2] == classes[(i + 1) % len(classes)][0]


@pytest.mark.parametrize(
    ("scenario", "first", "last"), [("flt1", [5, 3], [8, 4]), ("flt2", [5, 3, 7], [8, 4, 5])]
)
def test_classes_of_flt_in_the_order_of_the_authors_seed(scenario, first, last):
    """NumPy's seed 321 and `choice(10, 10, replace=False)` give 5 3 7 9 6 2 0 1 8 4 in the repository."""
    order = [int(c) for c in np.random.RandomState(321).choice(10, 10, replace=False)]
    assert order == [5, 3, 7, 9, 6, 2, 0, 1, 8, 4]
    labels = np.arange(400) % 10
    pool = Pool(np.zeros((len(labels), 1, 2, 2), np.uint8), labels, 200, 10)
    for seed in range(2):
        spec = SCENARIOS[scenario](clients=5, images=6, order=order).compose(pool, key(seed))
        assert (spec.facts["classes"][0], spec.facts["classes"][-1]) == (first, last)
        train = pool.labels[spec.splits()["train"].of(4)]
        assert sorted(set(train.tolist())) == sorted(last)


def test_users_of_ucfl_c_are_tested_with_the_labels_of_their_group(open_small):
    """All see the same 50 test images; user k calls class c what its group does, in training and in test."""
    federation = open_small("cifar10", "ucfl_c", clients=4, test_images=50)
    tables, pool = federation.facts["labels"], federation.pool
    assert len(set(tables)) == 4
    for k in range(4):
        for split in ("train", "test"):
            plain = pool.labels[federation.partition.of(k, split, 0).index]
            expected = np.array(tables[federation.groups[k]])[plain]
            np.testing.assert_array_equal(getattr(federation.client(k), split).y, expected)
