"""Robust mixings on one rank against float64 versions of their own; over MPI: tests/comm/bodies.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.core.errors import MethodError
from mpifl.core.mixing import add, average, by_cluster, carry
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.plan import Mixing, with_statistics_apart
from mpifl.core.types import Notes
from mpifl.protection import robust_mixer
from mpifl.protection.robust_mixer import RobustMixer, busiest_bytes, columns_of_ranks
from mpifl.protection.robust_rules import (
    CoordinateRule,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    Rule,
    TrimmedMean,
)

RULES = [Median(), TrimmedMean(0.2), Krum(f=1), MultiKrum(f=1), NormBound(), GeometricMedian()]


def mixed(
    rule: Rule, mixings: list[Mixing], old: np.ndarray, uploads: np.ndarray, statistics: Sequence[str] = ()
) -> np.ndarray:
    """Return the table `model` after mixings by a rule."""
    vectors = [torch.from_numpy(u.astype(np.float32)) for u in uploads]
    max_abs = np.abs(uploads).max(1)
    tables = Tables(Single())
    tables.central = {"model": torch.from_numpy(old.astype(np.float32))}
    mixer = RobustMixer(Single(), Mixer(Single(), tables), rule, statistics)
    info = (max_abs, np.zeros(len(uploads), np.int64))
    return mixer.mix(mixings, lambda name: info, {"model": vectors})["model"].numpy()


def expected(rule: Rule, members: np.ndarray, weights: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return the row of a rule in float64: weights add up to 1."""
    x = members.astype(np.float64)
    if isinstance(rule, Median):
        return np.median(x, axis=0)
    if isinstance(rule, TrimmedMean):
        k = int(0.2 * len(x))
        return np.sort(x, axis=0)[k : len(x) - k].mean(0)
    if isinstance(rule, NormBound):
        norms = np.linalg.norm(x - centre, axis=1)
        return centre + (weights * np.minimum(1, np.median(norms) / norms)) @ (x - centre)
    squares = ((x[:, None] - x[None]) ** 2).sum(2)
    return rule.weights(squares, weights) @ x


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_statistics_stay_means_under_a_rule_of_distances(rule):
    """Sums of labels (0, 9), (9, 0) ... are far from each other because clients hold other labels."""
    uploads = np.array([[0, 9], [9, 0], [8, 0], [9, 0.0], [0, 8]])
    mean = by_cluster(np.zeros(5, np.int64), 1, np.ones(5))
    found = mixed(rule, [mean], np.zeros((1, 2)), uploads, ("model",))
    by_coordinate = isinstance(rule, CoordinateRule)
    means = expected(rule, uploads, np.full(5, 0.2), np.zeros(2)) if by_coordinate else uploads.mean(0)
    assert_allclose(found, [means], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("width", [1, 255, 700])
def test_clusters_take_the_rule_of_their_members(rule, width):
    """Members 0, 2, 4, 6, 8 of row 0; 1, 3, 5, 7 of row 2; row 1 stays."""
    rng = np.random.default_rng(width)
    old = rng.normal(size=(3, width)).astype(np.float32)
    uploads = rng.normal(size=(9, width)).astype(np.float32)
    n = rng.integers(1, 9, 9).astype(float)
    labels = np.array([0, 2] * 4 + [0])
    found = mixed(rule, [by_cluster(labels, 3, n)], old, uploads)
    assert_array_equal(found[1], old[1])
    for row in (0, 2):
        some = labels == row
        right = expected(rule, uploads[some], n[some] / n[some].sum(), old[row].astype(np.float64))
        assert_allclose(found[row], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_updates_are_added_to_their_row(rule):
    """A step of 0.5 times the mean of updates: half of the rule is added; norms are those of the updates."""
    rng = np.random.default_rng(3)
    old, uploads = rng.normal(size=(1, 40)).astype(np.float32), rng.normal(size=(5, 40)).astype(np.float32)
    found = mixed(rule, [add(np.full((1, 5), 0.1))], old, uploads)
    right = old[0] + 0.5 * expected(rule, uploads, np.full(5, 0.2), np.zeros(40))
    assert_allclose(found[0], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_blocks_of_any_size_give_the_same_bits(rule, monkeypatch):
    rng = np.random.default_rng(4)
    old, uploads = rng.normal(size=(2, 1500)), rng.normal(size=(7, 1500))
    mixing = by_cluster(np.array([0, 0, 1, 1, 1, 0, 0]), 2, np.ones(7))
    whole = mixed(rule, [mixing], old, uploads)
    monkeypatch.setattr(robust_mixer, "SCRATCH", 1)
    assert_array_equal(mixed(rule, [mixing], old, uploads), whole)


def test_mixings_follow_each_other_and_those_without_uploads_are_as_ever():
    old, uploads = np.array([[4.0, 8.0]]), np.array([[0.0, 1.0], [2.0, 5.0], [100.0, 3.0]])
    split = carry(np.array([[1.0], [0.5]]))  # rows (4, 8), (2, 4)
    found = mixed(Median(), [split, by_cluster(np.array([1, 1, 1]), 2, np.ones(3))], old, uploads)
    assert_array_equal(found, [[4, 8], [2, 3]])


def test_groups_that_are_too_small_are_counted():
    old, uploads = np.zeros((3, 2)), np.arange(12.0).reshape(6, 2)
    vectors = [torch.from_numpy(u.astype(np.float32)) for u in uploads]
    tables = Tables(Single())
    tables.central = {"model": torch.from_numpy(old.astype(np.float32))}
    mixer = RobustMixer(Single(), Mixer(Single(), tables), Median())
    labels = np.array([0, 1, 1, 2, 2, 2])
    info = (np.abs(uploads).max(1), np.zeros(6, np.int64))
    mixer.mix([by_cluster(labels, 3, np.ones(6))], lambda name: info, {"model": vectors})
    assert mixer.num_too_small == 2


@pytest.mark.parametrize("rule", [NormBound(1e6), MultiKrum(f=0)], ids=str)
def test_rules_that_leave_nobody_out_have_the_bits_of_the_mean(rule):
    rng = np.random.default_rng(5)
    old, uploads = rng.normal(size=(1, 99)), rng.normal(size=(4, 99)).astype(np.float32)
    notes = Notes(np.arange(4), np.full(4, 3), np.zeros(4, np.int64), np.ones(4, bool))
    tables = Tables(Single())
    tables.central = {"model": torch.from_numpy(old.astype(np.float32))}
    vectors = {"model": [torch.from_numpy(u) for u in uploads]}
    info = (np.abs(uploads).max(1).astype(np.float64), np.zeros(4, np.int64))
    mean = Mixer(Single(), tables).mix([average(notes)], lambda name: info, vectors)["model"]
    assert_array_equal(mixed(rule, [average(notes)], old, uploads), mean.numpy())


def test_huge_lies_leave_the_distances_of_the_others_exact():
    """The grid of a distance is that of its two members: a lie of 1e18 blurs none between honest ones."""
    rng = np.random.default_rng(6)
    uploads = (1.0 + 1e-3 * rng.normal(size=(7, 300))).astype(np.float32)
    uploads[0] = 1e18
    found = mixed(Krum(f=1), [average(_notes(7))], np.zeros((1, 300)), uploads)
    squares = ((uploads[:, None].astype(np.float64) - uploads[None]) ** 2).sum(2)
    assert_array_equal(found[0], uploads[int(Krum(f=1).weights(squares, np.full(7, 1 / 7)).argmax())])


@pytest.mark.parametrize("rule", [Krum(f=1), MultiKrum(f=1), NormBound(), GeometricMedian()], ids=str)
def test_a_large_weight_that_all_share_leaves_distances_exact(rule):
    """Updates of about 1e-3 a coordinate beside a weight of 1e6, which no upload changes.

    Exponents of the bound and of the distances are 70 bits apart, more than a float64 has.
    """
    rng = np.random.default_rng(8)
    old = rng.normal(size=(1, 1100)).astype(np.float32)
    old[0, 300] = 1e6
    lengths = np.array([9.0, 2.0, 1.6, 1.3, 1.1, 1.0])[:, None]
    uploads = (old + 1e-3 * lengths * rng.normal(size=(6, 1100))).astype(np.float32)
    uploads[:, 300] = 1e6
    found = mixed(rule, [average(_notes(6))], old, uploads)
    right = expected(rule, uploads, np.full(6, 1 / 6), old[0].astype(np.float64))
    assert_allclose((found - old)[0], right - old[0], atol=1e-6)


LAYOUT = Layout(("weight", "running_var"), ((590,), (10,)), 590)


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "mixed apart"])
@pytest.mark.parametrize("rule", [Krum(f=1), MultiKrum(f=1), NormBound(), GeometricMedian()], ids=str)
def test_running_statistics_do_not_count_in_distances_and_have_the_shares_of_the_weights(rule, apart):
    """The variances of uploads 0 and 1 are far from the others; the weights of the last one are.

    Apart: the weights move by twice the mean, the statistics are means.
    """
    rng = np.random.default_rng(9)
    old = rng.normal(size=(1, 600)).astype(np.float32)
    uploads = rng.normal(size=(6, 600)).astype(np.float32)
    uploads[:2, 590:] = 1e3 * rng.uniform(size=(2, 10))
    uploads[5, :590] *= 50
    n = average(_notes(6))
    parts, table = VectorParts(LAYOUT), {"model": torch.from_numpy(old)}
    mixing = replace(n, weights=2 * n.weights, keep=np.array([-1.0])) if apart else n
    done = with_statistics_apart([mixing], table, parts)
    assert bool(done.tables) == apart
    tables = Tables(Single())
    tables.central = {**table, **done.tables}
    mixer = RobustMixer(Single(), Mixer(Single(), tables), rule, (), parts)
    info = (np.abs(uploads).max(1).astype(np.float64), np.zeros(6, np.int64))
    vectors = {"model": [torch.from_numpy(u) for u in uploads]}
    found = done.joined(mixer.mix(done.mixings, lambda name: info, vectors))["model"].numpy()[0]

    x, row = uploads.astype(np.float64), old[0].astype(np.float64)
    squares = ((x[:, None, :590] - x[None, :, :590]) ** 2).sum(2)
    if rule.from_row:
        squares = ((x - row)[:, :590] ** 2).sum(1)
    share = rule.weights(squares, np.full(6, 1 / 6))
    by_rule = share @ x + (1 - share.sum()) * row
    expected = np.concatenate([(2 * by_rule - row if apart else by_rule)[:590], by_rule[590:]])
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_weights_below_0_are_refused():
    with pytest.raises(MethodError, match="negative weights are not an average"):
        mixed(Median(), [Mixing(np.array([[1.5, -0.5]]))], np.zeros((1, 3)), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("columns", "ranks", "height"), [(1, 3, 4), (1000, 3, 7), (70_000, 4, 100), (64, 2, 1)]
)
def test_ranks_share_the_columns_out(columns, ranks, height):
    passes = [*columns_of_ranks(columns, ranks, height, 64)]
    parts = [c for one in passes for c in one]
    assert all(len(one) == ranks for one in passes)
    assert np.concatenate([np.arange(c.start, c.stop) for c in parts]).tolist() == list(range(columns))
    widest = max(c.stop - c.start for c in parts)
    assert widest <= max(64, robust_mixer.SCRATCH // height)
    if columns >= 64 * ranks and len(passes) == 1:
        assert min(c.stop - c.start for c in parts[:-1]) > 0


def test_bytes_of_the_busiest_rank_by_hand():
    """10 uploads of 1000 on 4 ranks: 10 * 256 numbers, 744 results at rank 0; 45 distances of two int64."""
    assert busiest_bytes(1, 10, 1000, 4, Median()) == 4 * (2560 + 744)
    assert busiest_bytes(1, 10, 1000, 4, Krum()) == 4 * 2560 + 16 * 45
    assert busiest_bytes(1, 10, 1000, 1, Krum()) == 0


def _notes(m: int) -> Notes:
    return Notes(np.arange(m), np.full(m, 3), np.zeros(m, np.int64), np.ones(m, bool))
