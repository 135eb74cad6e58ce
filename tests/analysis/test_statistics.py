"""Intervals, tests and ranks: by hand, against scipy, against a published example, and in any order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from mpifl.analysis import statistics
from mpifl.analysis.statistics import cliques, critical_difference, estimate, holm, paired_p, rank

VALUES = some.lists(some.floats(-100, 100, width=32), min_size=2, max_size=9)


def test_an_interval_by_students_t_by_hand():
    """1, 2, 4: mean 7/3, variance 7/3; t(0.975; 2) = 4.30265, so -+ 4.30265 sqrt(7/9)."""
    said = estimate(np.array([1.0, 2.0, 4.0]))
    half = 4.30265 * np.sqrt(7 / 9)
    np.testing.assert_allclose([said.mean, said.std**2], [7 / 3, 7 / 3])
    np.testing.assert_allclose([said.low, said.high], [7 / 3 - half, 7 / 3 + half], rtol=1e-5)
    assert said.seeds == 3


@pytest.mark.parametrize("kind", statistics.INTERVALS)
def test_one_seed_has_no_interval_and_equal_seeds_have_an_empty_one(kind):
    one, equal = (estimate(np.array(x), kind) for x in ([0.5], [0.5, 0.5, 0.5]))
    assert (one.mean, one.seeds) == (0.5, 1)
    assert np.isnan([one.std, one.low, one.high]).all()
    assert (equal.std, equal.low, equal.high) == (0.0, 0.5, 0.5)


def test_percentiles_of_resamples_are_those_of_all_resamples():
    """Of four values there are 4^4 resamples: about a twentieth of all their means lies beyond each end."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    means = np.array([np.mean(x) for x in product(values, repeat=4)])
    said = estimate(values, "percentile", 0.9)
    for beyond, inside in ((means < said.low, means <= said.low), (means > said.high, means >= said.high)):
        assert beyond.mean() <= 0.055
        assert inside.mean() >= 0.045


def test_bca_follows_a_skewed_sample_to_the_side_of_its_tail():
    """Against percentiles both ends move towards the tail; scipy with the named generator gives the same."""
    values = np.array([1.0, 1.1, 1.3, 1.2, 1.0, 9.0, 1.4, 1.2])
    bca, plain = estimate(values, "bootstrap"), estimate(values, "percentile")
    assert plain.low < bca.low < bca.mean < plain.high < bca.high
    rng = np.random.Generator(np.random.PCG64(statistics.BOOTSTRAP_SEED))
    ends = stats.bootstrap((np.sort(values),), np.mean, n_resamples=9999, rng=rng).confidence_interval
    np.testing.assert_array_equal([bca.low, bca.high], ends)


@settings(max_examples=15, deadline=None)
@given(VALUES, some.randoms(), some.sampled_from(statistics.INTERVALS))
def test_no_estimate_depends_on_the_order_of_the_seeds(values, random, kind):
    mixed = list(values)
    random.shuffle(mixed)
    np.testing.assert_array_equal(_ends(mixed, kind), _ends(values, kind))


def _ends(values, kind):
    said = estimate(np.array(values), kind)
    return [said.mean, said.std, said.low, said.high]


@settings(max_examples=30, deadline=None)
@given(VALUES, some.floats(0.6, 0.98))
def test_more_confidence_is_a_wider_interval(values, confidence):
    narrow, wide = (estimate(np.array(values), "t", c) for c in (confidence, 0.99))
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_paired_tests_by_hand():
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3) with two degrees of freedom, p = 1 - t / sqrt(t^2 + 2).

    Signed ranks: all of five positive has probability 2 / 32; with the largest negative, W = 5, and 10 of the
    32 sums of subsets of 1 to 5 are at most 5.
    """
    t = 2 * np.sqrt(3)
    assert paired_p(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 - t / np.sqrt(t**2 + 2))
    assert paired_p(np.arange(1.0, 6), "wilcoxon") == 2 / 32 == statistics.least_wilcoxon_p(5)
    assert paired_p(np.array([1, 2, 3, 4, -5.0]), "wilcoxon") == 20 / 32
    for test in statistics.TESTS:
        assert np.isnan(paired_p(np.array([1.0]), test))
        assert paired_p(np.zeros(4), test) == 1.0
    assert np.isnan(paired_p(np.array([0.1, 0.1, 0.1])))


def test_rounding_makes_no_difference_and_breaks_no_tie():
    """0.3 - 0.2 and 0.2 - 0.1 are not the same number, nor are 0.1 + 0.2 and 0.3."""
    a, b = np.array([0.1 + 0.2, 0.3, 0.2, np.inf, 0.0]), np.array([0.3, 0.2, 0.1, np.inf, 1e-3])
    d = statistics.difference(a, b)
    np.testing.assert_array_equal(d[[0, 3, 4]], [0, 0, -1e-3])
    assert d[1] != d[2]
    assert paired_p(d[:3], "wilcoxon") == paired_p(np.array([0, 0.1, 0.1]), "wilcoxon")
    tied = statistics.without_rounding(np.array([np.inf, 0.3, 1.0, 0.1 + 0.2, np.inf]))
    np.testing.assert_array_equal(tied, [np.inf, 0.3, 1.0, 0.3, np.inf])
    np.testing.assert_array_equal(rank(np.array([[0.3, 0.1 + 0.2, 1.0]] * 2)).ranks, [[2.5, 2.5, 1]] * 2)


def test_the_side_of_a_test_is_that_of_its_statistic_and_of_the_mean():
    """Of 1, 1, 1, 1, -9 the mean is negative, the sum of signed ranks 4 x 2.5 - 5 positive: neither side."""
    mixed = np.array([1, 1, 1, 1, -9.0])
    assert [statistics.side(mixed, test) for test in statistics.TESTS] == [-1, 0]
    assert [statistics.side(-mixed, test) for test in statistics.TESTS] == [1, 0]
    assert statistics.side(np.array([]), "t") == 0


@settings(max_examples=12, deadline=None)
@given(VALUES, some.randoms(), some.sampled_from(statistics.TESTS))
def test_paired_tests_know_neither_order_nor_side(values, random, test):
    mixed = list(values)
    random.shuffle(mixed)
    p = paired_p(np.array(values), test)
    np.testing.assert_array_equal(paired_p(np.array(mixed), test), p)
    np.testing.assert_allclose(paired_p(-np.array(values), test), p)


def test_holms_correction_by_hand():
    """0.01 x 3; 0.03 x 2; 0.04 x 1 is below that and takes its value. What was not tested does not count."""
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    np.testing.assert_allclose(holm([0.01, np.nan, 0.04, 0.03]), [0.03, np.nan, 0.06, 0.06])
    np.testing.assert_allclose(holm([0.9, 0.8]), [1.0, 1.0])
    assert holm([]).shape == (0,)


def test_critical_differences_are_those_of_demsars_table():
    """Table 5a: q at 0.05 and 0.10 for two to ten; and his example, four on 14 data sets: 1.25.

    There the best and the worst average rank, 1.964 and 3.143, are not distinguishable.
    """
    table = {
        0.05: [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164],
        0.10: [1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920],
    }
    for alpha, q in table.items():
        for k, value in enumerate(q, 2):
            scale = np.sqrt(k * (k + 1) / 6)
            assert critical_difference(k, 1, alpha) / scale == pytest.approx(value, abs=1.5e-3)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=5e-3)
    assert cliques(np.array([3.143, 2.000, 2.893, 1.964]), 1.25) == ((3, 1, 2, 0),)


def test_friedman_and_iman_davenport_by_hand():
    """Ranks 1 2 3, 1 2 3, 1 3 2: averages 1, 7/3, 8/3; chi-square 12 * 3 / 12 * 14 / 9; F = 2 c / (6 - c)."""
    found = rank(np.array([[9.0, 5, 1], [9, 5, 1], [9, 1, 5]]))
    np.testing.assert_allclose(found.average, [1, 7 / 3, 8 / 3])
    np.testing.assert_allclose([found.friedman, found.f], [14 / 3, 7.0])
    np.testing.assert_allclose([found.p, found.f_p], [np.exp(-7 / 3), (1 + 2 * 7 / 4) ** -2])


@settings(max_examples=12, deadline=None)
@given(some.integers(3, 6), some.integers(2, 7), some.integers(0, 10**6))
def test_friedmans_statistic_is_scipys_with_ties_too(methods, problems, seed):
    scores = np.random.default_rng(seed).integers(0, 4, (problems, methods)).astype(float)
    scores[0] = np.arange(methods)  # at least one problem without ties
    found = rank(scores)
    said = stats.friedmanchisquare(*scores.T)
    np.testing.assert_allclose([found.friedman, found.p], [said.statistic, said.pvalue])
    assert found.average.sum() == pytest.approx(methods * (methods + 1) / 2)


def test_the_best_has_rank_one_in_both_directions_and_an_unpaid_cost_comes_last():
    scores = np.array([[1.0, 2.0, np.inf], [3.0, 3.0, np.inf]])
    np.testing.assert_array_equal(rank(scores, False).ranks, [[1, 2, 3], [1.5, 1.5, 3]])
    np.testing.assert_array_equal(rank(scores, True).ranks, [[3, 2, 1], [2.5, 2.5, 1]])


def test_cliques_are_the_largest_sets_within_the_difference_by_hand():
    """Ranks 1, 1.8, 3, 3.5, 5 and a difference of 2: {1, 1.8, 3}, {1.8, 3, 3.5}, {3, 3.5, 5}."""
    average = np.array([3.0, 1.0, 5.0, 1.8, 3.5])
    assert cliques(average, 2.0) == ((1, 3, 0), (3, 0, 4), (0, 4, 2))
    assert cliques(average, 0.1) == ()
    assert cliques(average, 4.0) == ((1, 3, 0, 4, 2),)


def test_a_level_that_is_not_95_percent():
    """1, 2, 3: standard error 1 / sqrt(3), t quantile of 90 % with 2 degrees of freedom 2.919986."""
    found = estimate(np.array([1.0, 2.0, 3.0]), "t", 0.9)
    assert (found.low, found.high) == pytest.approx((2 - 2.919986 / 3**0.5, 2 + 2.919986 / 3**0.5), rel=1e-6)
    values = np.array([0.1, 0.4, 0.5, 0.9, 1.6, 2.2])
    for kind in ("bootstrap", "percentile"):
        narrow, wide = (estimate(values, kind, level) for level in (0.5, 0.95))
        assert wide.low < narrow.low < narrow.high < wide.high
