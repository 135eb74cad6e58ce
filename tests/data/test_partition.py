"""Partitions: by hand on a few numbers, and that they end for every parameter."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpifl.core.rng import key
from mpifl.data.partition.csr import Csr, everyone, from_lists, from_owner, hold_out, stack, thinned
from mpifl.data.partition.dirichlet import (
    at_least,
    dirichlet,
    mixtures_by_shares,
    owners_by_class,
    owners_by_client,
    owners_by_shares,
    owners_like,
    take_by_mixture,
)
from mpifl.data.partition.shards import (
    balanced,
    bounds,
    cut,
    cut_by_class,
    exponential_sizes,
    owners_by_shards,
    owners_by_weight,
)
from mpifl.data.scenario import FixedPartition, Partition


def rng(name: str = "test") -> np.random.Generator:
    return key(0, name).numpy()


def test_remainders_go_one_each_to_the_last_or_all_to_the_very_last():
    np.testing.assert_array_equal(np.diff(bounds(11, 4, spread=True)), [2, 3, 3, 3])
    np.testing.assert_array_equal(np.diff(bounds(11, 4, spread=False)), [2, 2, 2, 5])
    np.testing.assert_array_equal(np.diff(bounds(5421, 10, spread=False)), [542] * 9 + [543])


def test_a_cut_is_contiguous():
    parts = cut(np.arange(5), 2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_a_cut_by_class_gives_every_part_the_same_histogram():
    labels = np.repeat([0, 1, 2], 6)
    parts = cut_by_class(np.arange(18), labels, 3, rng())
    for part in parts:
        np.testing.assert_array_equal(np.bincount(labels[part]), [2, 2, 2])
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(18))


def test_balancing_keeps_the_first_images_of_each_class(tiny_pool):
    chosen = balanced(tiny_pool.labels[np.array([0, 3, 6, 1, 4, 2])], np.array([0, 3, 6, 1, 4, 2]))
    assert chosen.tolist() == [0, 1, 2]


def test_rows_of_owners_hold_what_they_own():
    owner = np.array([1, 0, -1, 1, 2])
    rows = from_owner(owner, np.array([10, 11, 12, 13, 14]), 4, rng())
    assert [sorted(np.asarray(rows.of(k)).tolist()) for k in range(4)] == [[11], [10, 13], [14], []]
    np.testing.assert_array_equal(rows.sizes, [1, 2, 1, 0])


def test_shared_rows_are_stored_once():
    shared = everyone(np.array([7, 8, 9]), 1000)
    assert len(shared.index) == 3
    assert shared.of(999).tolist() == [7, 8, 9]
    assert shared.sizes.sum() == 3000


def test_holding_out_takes_a_ceiling_and_leaves_one():
    """0.1 of 5420, 5430, 1, 0 and 2 samples: 542, 543, 0 (one must stay), 0 and 1."""
    sizes = [5420, 5430, 1, 0, 2]
    whole = from_lists(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    kept, held = hold_out(whole, 0.1)
    np.testing.assert_array_equal(held.sizes, [542, 543, 0, 0, 1])
    np.testing.assert_array_equal(kept.sizes + held.sizes, sizes)
    for k in range(5):
        both = np.concatenate([kept.of(k), held.of(k)])
        np.testing.assert_array_equal(np.sort(both), whole.of(k))


def test_a_share_of_each_row_is_kept_rounded_up_and_in_order():
    """A third of 6, 4, 1 and 0 samples: 2, 2, 1, 0; rows that begin in the middle, with and without index."""
    offsets, row = np.array([2, 8, 12, 13, 13]), np.array([3, 0, 1, 2])
    for index in (None, np.arange(20)[::-1]):
        whole = Csr(offsets, index, row)
        kept = thinned(whole, 1 / 3, rng())
        np.testing.assert_array_equal(kept.sizes, [0, 2, 2, 1])
        for k in range(4):
            rest, mine = np.arange(20)[whole.of(k)] if index is None else whole.of(k), kept.of(k)
            np.testing.assert_array_equal(rest[np.isin(rest, mine)], mine)


def test_every_sample_of_a_row_is_as_likely_to_be_kept():
    """Half of four samples, 4,000 rows: each place in a row 2,000 times, within four deviations (31.6)."""
    whole = from_lists(list(np.arange(16_000).reshape(4_000, 4)))
    counts = np.bincount(thinned(whole, 0.5, rng()).index % 4, minlength=4)
    np.testing.assert_allclose(counts, 2_000, atol=127)


def test_stacking_puts_clients_after_one_another():
    both = stack([from_lists([np.array([1]), np.array([2, 3])]), from_lists([np.array([4])])])
    assert [both.of(k).tolist() for k in range(3)] == [[1], [2, 3], [4]]


def test_contiguous_rows_need_no_index():
    assert Csr(np.array([5, 7, 10])).of(1) == slice(7, 10)


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.1, 1.0, 1e3, 1e8])
def test_dirichlet_draws_are_finite_for_every_alpha(alpha: float):
    draws = dirichlet(rng(), alpha, (50, 7))
    np.testing.assert_allclose(draws.sum(axis=1), 1.0)
    assert (draws >= 0).all()


def test_dirichlet_draws_have_the_right_mean_and_variance():
    """Dir(0.5 1_4): mean 1/4, variance (1/4)(3/4)/(1 + 2) = 0.0625."""
    draws = dirichlet(rng(), 0.5, (200_000, 4))
    np.testing.assert_allclose(draws.mean(axis=0), 0.25, atol=0.004)
    np.testing.assert_allclose(draws.var(axis=0), 0.0625, atol=0.002)


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 10.0, 1e6])
@pytest.mark.parametrize("clients", [1, 7, 500])
def test_a_dirichlet_split_by_class_gives_every_sample_away_once(alpha: float, clients: int):
    labels = np.arange(1000) % 10
    owner = owners_by_class(labels, clients, alpha, rng())
    assert owner.shape == (1000,)
    assert owner.min() >= 0
    assert owner.max() < clients


def test_a_dirichlet_split_by_class_with_a_huge_alpha_is_even():
    owner = owners_by_class(np.zeros(1000, np.int64), 10, 1e8, rng())
    np.testing.assert_allclose(np.bincount(owner), 100, atol=2)


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1e6])
def test_a_dirichlet_split_by_client_gives_the_sizes_asked_for(alpha: float):
    labels = np.arange(1000) % 10
    sizes = np.array([400, 300, 200, 100])
    owner, mixtures = owners_by_client(labels, sizes, alpha, rng())
    np.testing.assert_array_equal(np.bincount(owner), sizes)
    assert mixtures.shape == (4, 10)


def test_clients_of_given_sizes_share_classes_as_a_dirichlet_split_does():
    """Shares n_c p_c[k] of client k, normalised; of a tiny alpha they lie below what a float holds."""
    stock, draws = np.array([100, 300]), dirichlet(rng(), 0.5, (2, 4))
    wanted = (draws * stock[:, None]).T
    np.testing.assert_array_equal(
        mixtures_by_shares(stock, 4, 0.5, rng()), wanted / wanted.sum(1, keepdims=True)
    )
    tiny = mixtures_by_shares(np.full(10, 100), 50, 1e-6, rng())
    np.testing.assert_allclose(tiny.sum(axis=1), 1.0)
    assert (tiny.max(axis=1) > 1 - 1e-9).sum() >= 40, "all but those who own two or three classes"
    assert len(np.unique(tiny.argmax(axis=1))) > 5


def test_a_tiny_alpha_leaves_clients_of_given_sizes_one_class_as_long_as_it_lasts():
    labels = np.arange(2000) % 10
    owner = owners_by_shares(labels, np.full(50, 40), 1e-6, rng())
    classes = [len(np.unique(labels[owner == k])) for k in range(50)]
    assert np.mean(classes[:10]) < 2
    assert (np.bincount(owner) == 40).all()


def test_a_used_up_class_leaves_the_draw():
    """Both clients want class 0 only; it has 3 samples, so the second gets 1 of it and 1 of class 1."""
    taken = take_by_mixture(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2, 2]), np.array([3, 5]), rng())
    np.testing.assert_array_equal(taken, [[2, 0], [1, 1]])


def test_the_last_clients_take_what_is_left():
    """25 clients of 50 use up 1250 samples: whatever they wanted, the classes they got sum to the stock."""
    labels = np.arange(1250) % 10
    owner, mixtures = owners_by_client(labels, np.full(25, 50), 0.1, rng())
    counts = np.stack([np.bincount(labels[owner == k], minlength=10) for k in range(25)])
    np.testing.assert_array_equal(counts.sum(axis=0), 125)
    wanted = np.abs(counts / 50 - mixtures).sum(axis=1)
    assert wanted[:3].mean() < 0.3 < wanted[-3:].mean()


def test_test_images_follow_the_training_shares():
    """Client 0 holds all of class 0, client 1 a quarter of class 1: test images fall 4 : 0 and 1 : 3."""
    owner = owners_like(
        np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]),
        np.array([0, 0, 1, 1, 1, 1]),
        np.array([0, 0, 1, 2, 2, 2]),
        3,
        rng(),
    )
    assert owner[:4].tolist() == [0] * 4
    assert sorted(owner[4:8].tolist()) == [1, 2, 2, 2]
    assert owner[8] == -1, "nobody holds class 2"


def test_a_share_that_is_a_whole_number_of_samples_is_not_rounded_down():
    """29 of 100, though 0.29 * 100 is 28.999999999999996."""
    model = np.repeat([0, 1], [29, 71])
    owner = owners_like(np.zeros(100, int), np.zeros(100, int), model, 2, rng())
    assert_array_equal(np.bincount(owner), [29, 71])


def test_shares_of_parts_and_weights_are_rounded_as_numbers_are():
    """7 of 100 are held out, though 0.07 * 100 is 7.000000000000001; thirds of 10 end at 3, 7 and 10."""
    whole = from_owner(np.zeros(100, int), np.arange(100), 1, rng())
    kept, held = hold_out(whole, 0.07)
    assert (len(kept.index), len(held.index)) == (93, 7)
    assert_array_equal(np.bincount(owners_by_weight(10, np.ones(3), rng())), [3, 4, 3])


def test_the_rich_give_until_everyone_has_enough():
    """Sizes 6, 3, 0, 0 with a minimum of 2: four move from those above the level 2, sizes end 2..3."""
    owner = np.array([0] * 6 + [1] * 3)
    sizes = np.bincount(at_least(owner, 4, 2, rng()), minlength=4)
    assert sizes.sum() == 9
    assert sizes.min() == 2
    np.testing.assert_array_equal(at_least(owner, 2, 2, rng()), owner)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_the_richest_give_and_are_cut_down_to_one_level(name):
    """6, 6 and 0 samples, at least 2 each: both give one. 5, 4 and 0, at least 3: 3 each."""
    for sizes, minimum, expected in (([6, 6, 0], 2, [5, 5, 2]), ([5, 4, 0], 3, [3, 3, 3])):
        owner = np.repeat(np.arange(3), sizes)
        found = at_least(owner, 3, minimum, rng(name))
        np.testing.assert_array_equal(np.bincount(found, minlength=3), expected)
        assert (found != owner).sum() == expected[2], "nobody else moves"


def test_shards_hold_few_classes():
    labels = np.arange(1000) % 10
    owner = owners_by_shards(labels, 50, 2, rng())
    np.testing.assert_array_equal(np.bincount(owner), 20)
    assert max(len(np.unique(labels[owner == k])) for k in range(50)) <= 2


def test_weights_give_sizes_in_proportion():
    owner = owners_by_weight(100, np.array([1.0, 3.0, 6.0]), rng())
    np.testing.assert_array_equal(np.bincount(owner), [10, 30, 60])


@pytest.mark.parametrize(
    ("total", "clients", "x", "low", "median", "p90", "high", "first"),
    [
        (12_000, 240, 9.477e-5, 26, 29, 115, 259, 124),
        (4_800, 240, 7.384e-5, 11, 13, None, 105, None),
        (12_000, 60, 1.959e-3, 101, 107, None, 1256, 128),
        (4_800, 60, 1.657e-3, 41, None, None, 429, None),
    ],
)
def test_exponential_sizes_are_those_of_flts_scenario_4(total, clients, x, low, median, p90, high, first):
    sizes, root = exponential_sizes(total, clients)
    assert sizes.sum() == total
    assert root == pytest.approx(x, rel=5e-4)
    assert sizes.min() == low
    assert sizes.max() == high
    assert first is None or sizes[0] == first
    assert median is None or np.sort(sizes)[clients // 2] == median  # the upper one
    assert p90 is None or np.sort(sizes)[int(0.9 * clients)] == p90


@pytest.mark.nightly
def test_a_hundred_thousand_clients_start_within_ten_seconds_and_a_gigabyte(tmp_path):
    """A Dirichlet split of a million samples over 100,000 clients, in a fresh process, imports included.

    The peak is read from /proc: what getrusage tells survives exec, so it may be that of the test runner.
    """
    program = f"""
import time; start = time.process_time()
import numpy as np
from pathlib import Path
rng = np.random.default_rng(0)
np.savez({str(tmp_path / "big.npz")!r}, x_train=np.zeros((1_000_000, 4, 4), np.uint8),
y_train=rng.integers(0, 62, 1_000_000),
         x_test=np.zeros((1000, 4, 4), np.uint8), y_test=rng.integers(0, 62, 1000))
from mpifl.data import *
made = time.process_time()
config = DataConfig(cache={str(tmp_path)!r}, source=SOURCES["npz"](path={str(tmp_path / "big.npz")!r}),
                    scenario=SCENARIOS["dirichlet"](clients=100_000, alpha=0.1, validation=0.1))
federation = open_federation(config, 0)
assert federation.sizes[:, :2].sum() == 1_000_000 and federation.sizes[:, :2].sum(1).min() >= 1
assert len(federation.client(99_999).train) == federation.sizes[99_999, 0]
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(time.process_time() - start, int(peak.split()[1]) / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, gibibytes = (float(word) for word in done.stdout.split())
    assert seconds < 10, seconds
    assert gibibytes < 1, gibibytes


@pytest.mark.parametrize("kind", ["index", "slices", "shared"])
def test_the_samples_of_several_clients_are_those_of_each(kind):
    if kind == "index":
        csr = from_lists([np.array([3, 1]), np.array([], int), np.array([7, 8, 9]), np.array([2])])
    elif kind == "slices":
        csr = Csr(np.array([0, 2, 2, 5, 6]))
    else:
        csr = from_lists([np.array([3, 1]), np.array([7, 8, 9])], np.array([1, 0, 0, 1]))
    clients = np.array([2, 0, 1, 3, 2])
    index, sizes = csr.of_all(clients)
    each = [np.arange(12)[csr.of(k)] for k in clients.tolist()]
    assert_array_equal(index, np.concatenate(each))
    assert_array_equal(sizes, [len(part) for part in each])
    assert index.dtype == sizes.dtype == np.int64
    partition = FixedPartition(dict.fromkeys(("train", "val", "test"), csr), None)
    both = partition.of_all(clients, "train", clients), Partition.of_all(partition, clients, "train", clients)
    for found in both:
        assert_array_equal(found[0], index)
        assert_array_equal(found[1], sizes)
