"""Partitions of other simulators: numbers of labels, quantiles, noisy features, and groups that mix them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, export_partition, open_federation
from mpifl.data.partition.shards import owners_by_label_count
from mpifl.data.transforms import Noise

LABELS = np.repeat(np.arange(5), 24)


def opened(
    cache: Path, scenario: str, source: str = "digits", seed: int = 0, table: str | None = None, **options
):
    """Return a federation without a data root."""
    chosen = SOURCES[source](**({} if table is None else {"table": table}))
    return open_federation(
        DataConfig(cache=str(cache), source=chosen, scenario=SCENARIOS[scenario](**options)), seed
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_client_has_so_many_labels_and_equal_parts_of_each(count):
    owner = owners_by_label_count(LABELS, 10, count, key(0).numpy())
    held = [np.unique(LABELS[owner == k]) for k in range(10)]
    assert [len(labels) for labels in held] == [count] * 10
    assert all(k % 5 in labels for k, labels in enumerate(held))
    for label in range(5):
        sizes = [np.count_nonzero(owner[label == LABELS] == k) for k in range(10) if label in held[k]]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == 24


def test_labels_that_no_client_has_belong_to_nobody(cache):
    federation = opened(cache, "label_quantity", clients=4, labels=1)
    assert [np.unique(federation.labels(k)).tolist() for k in range(4)] == [[0], [1], [2], [3]]
    assert [np.unique(federation.labels(k, "test")).tolist() for k in range(4)] == [[0], [1], [2], [3]]
    with pytest.raises(UserError, match=r"labels = 11: more than the 10 labels of the source"):
        opened(cache, "label_quantity", labels=11)


def test_quantiles_of_a_target_cut_a_regression(cache):
    federation = opened(cache, "quantile", "sklearn", table="diabetes", clients=5)
    ranges = [federation.client(k).train.y[:, 0] for k in range(5)]
    assert all(a.max() <= b.min() for a, b in pairwise(ranges))
    assert np.ptp(federation.sizes[:, 0]) <= 1
    tests = [federation.client(k).test.y[:, 0] for k in range(5)]
    for low, high in pairwise(tests):
        assert low.max() <= high.min()
    assert sum(map(len, tests)) == len(federation.pool.test)


def test_quantiles_by_group_are_a_ground_truth(cache):
    federation = opened(cache, "quantile", by="brightness", groups=2, clients=6)
    assert federation.groups.tolist() == [0, 0, 0, 1, 1, 1]
    means = [federation.samples(k)[0].mean((1, 2, 3)) for k in range(6)]
    assert max(m.max() for m in means[:3]) <= min(m.min() for m in means[3:])
    assert federation.names[0].startswith("brightness ")
    column = opened(cache, "quantile", "sklearn", table="diabetes", by="2", groups=2, clients=4)
    x = [column.client(k).train.x[:, 2] for k in range(4)]
    assert max(x[0].max(), x[1].max()) <= min(x[2].min(), x[3].min())


def test_strictness_goes_from_a_sharp_cut_to_none(cache):
    def spread(strictness):
        federation = opened(cache, "quantile", by="brightness", clients=4, strictness=strictness)
        return np.ptp([federation.samples(k)[0].mean() for k in range(4)])

    sharp, half, none = map(spread, (1.0, 0.5, 0.0))
    assert sharp > 1.2 * half > 5 * none


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "size"}, r"by = 'size': target, brightness or the number of a feature"),
        ({"by": "64"}, r"by = 64: a sample has 64 features, numbered from 0"),
        ({"groups": 3}, r"clients = 20: must be a multiple of the 3 groups"),
    ],
)
def test_quantiles_of_nothing_are_refused(cache, options, says):
    with pytest.raises(UserError, match=says):
        opened(cache, "quantile", **options)


def test_noise_grows_with_the_client_and_is_the_same_at_every_visit(cache):
    federation = opened(cache, "feature_noise", sigma=0.2, clients=4)
    plain = opened(cache, "iid", clients=4)
    levels = []
    for k in range(4):
        x, y = federation.samples(k)
        clean, labels = plain.samples(k)
        np.testing.assert_array_equal(y, labels)
        inner = (clean > 100) & (clean < 155)  # is not cut
        levels.append(float((x[inner].astype(float) - clean[inner]).std() / 255))
    np.testing.assert_allclose(levels, [0.05, 0.1, 0.15, 0.2], rtol=0.1)
    np.testing.assert_array_equal(federation.client(1, 0).train.x, federation.client(1, 5).train.x)


def test_noise_by_group_is_in_units_of_each_feature(cache):
    options = {"sigma": 0.5, "groups": 2, "clients": 4}
    federation = opened(cache, "feature_noise", "sklearn", table="wine", **options)
    plain = opened(cache, "iid", "sklearn", table="wine", clients=4)
    assert federation.groups.tolist() == [0, 0, 1, 1]
    apart = [federation.client(k).train.x - plain.client(k).train.x for k in range(4)]
    assert apart[0].abs().max() == apart[1].abs().max() == 0
    for k in (2, 3):
        np.testing.assert_allclose(apart[k].std(0), 0.5, rtol=0.5)
        np.testing.assert_allclose(apart[k].std(), 0.5, rtol=0.1)


def test_noise_does_not_change_its_arguments():
    x = np.full((3, 1, 4, 4), 128, np.uint8)
    out, _ = Noise((0.0, 0.1), 7)(x, np.zeros(3), np.array([0, 1, 1]))
    assert (x == 128).all()
    np.testing.assert_array_equal(out[0], x[0])
    assert out[1].std() > 5
    np.testing.assert_array_equal(out[1], out[2])  # equal samples of one group


def test_an_image_has_other_noise_in_each_group():
    """Numbers of seed and samples beyond 2^53, which a float64 does not hold."""
    x = np.random.default_rng(0).integers(64, 192, (64, 1, 4, 4), np.uint8)
    noise = Noise((0.1, 0.1), (1 << 62) + 12345)
    first, second = (noise(x, np.zeros(64), np.full(64, group))[0] for group in (0, 1))
    assert (first != second).any(axis=(1, 2, 3)).all()


def test_all_clients_may_be_tested_on_one_part_each_with_its_own_noise(cache):
    """Such rows are not stored as images; training images are those that are stored under `test: like`."""
    shared = opened(cache, "feature_noise", clients=4, sigma=0.4, test="all")
    stored = opened(cache, "feature_noise", clients=4, sigma=0.4)
    assert shared.sizes[:, 2].tolist() == [359] * 4
    assert shared.test_pool == 359
    plain = shared.pool.images[1438:].astype(float)
    spread = [(shared.samples(k, "test")[0] - plain).std() for k in range(4)]
    assert spread == sorted(spread)
    assert spread[3] > 2 * spread[0] > 0
    for k in range(4):
        np.testing.assert_array_equal(shared.samples(k)[0], stored.samples(k)[0])


GROUPS = (
    {"name": "dirichlet", "alpha": 0.1, "clients": 3},
    {"name": "label_quantity", "labels": 2, "clients": 2, "angle": 180},
    {"name": "iid", "clients": 2, "permute_labels": True, "noise": 0.1},
)


def test_groups_mix_partitions_and_changes(cache, tmp_path):
    federation = opened(cache, "mixed", groups=GROUPS, validation=0.2)
    assert federation.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert federation.names == (
        "dirichlet, alpha 0.1",
        "label_quantity, labels 2, 180 degrees",
        "iid, labels permuted, noise 0.1",
    )
    assert federation.sizes[:3, :2].sum() == round(1438 * 3 / 7)
    assert federation.sizes[5:, :2].sum() == 1438 - round(1438 * 5 / 7)
    assert [len(np.unique(federation.labels(k))) for k in (3, 4)] == [2, 2]
    scenario = SCENARIOS["mixed"](groups=GROUPS, validation=0.2)
    config = DataConfig(cache=str(cache), source=SOURCES["digits"](), scenario=scenario)
    export_partition(config, 0, tmp_path / "split.csv", "--export")
    again = opened(cache, "partition", path=str(tmp_path / "split.csv"))
    for k in range(7):
        for one, two in zip(federation.samples(k), again.samples(k), strict=True):
            np.testing.assert_array_equal(one, two)


def test_groups_with_copies_all_divide_the_whole_source(cache):
    federation = opened(cache, "mixed", groups=({"clients": 2}, {"clients": 2, "angle": 90}), copies=True)
    assert federation.sizes[:2, 0].sum() == federation.sizes[2:, 0].sum() == 1438
    numbers = opened(
        cache, "mixed", "sklearn", table="diabetes", groups=({"clients": 2}, {"name": "quantile"})
    )
    assert numbers.sizes[:, 0].sum() == 353


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (({"name": "rotated"},), r"groups\[0\].name = 'rotated': unknown name"),
        (({}, {"alpha": 1}), r"groups\[1\].alpha = 1: unknown key"),
        (({"name": "dirichlet", "alpha": "x"},), r"groups\[0\].alpha = 'x': must be of type float"),
        (({"angle": math.inf},), r"groups\[0\].angle = inf: must be finite"),
        (({"noise": -1},), r"groups\[0\].noise = -1: must be 0 or more"),
        (({"validation": 0.1},), r"groups\[0\].validation = 0.1: unknown key"),
        (({"clients": 2.5},), r"groups\[0\].clients = 2.5: must be of type int"),
    ],
)
def test_groups_that_are_none_are_refused(groups, says):
    with pytest.raises(UserError, match=says):
        SCENARIOS["mixed"](groups=groups)


def test_groups_that_do_not_fit_the_source_are_refused(cache):
    for change, says in (
        ({"angle": 90}, r"groups\[0\].angle = 90: samples of this source are features"),
        ({"permute_labels": True}, r"labels of this source are numbers"),
        ({"name": "dirichlet"}, r"groups\[0\].name = 'dirichlet': it divides the samples by class"),
    ):
        with pytest.raises(UserError, match=says):
            opened(cache, "mixed", "sklearn", table="diabetes", groups=({"clients": 2, **change},))
