"""Robust rules by hand, against versions in plain Python, and what attackers can make of them."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.each import for_each
from support.nightly import mostly_nightly

from mpifl.core.errors import UserError
from mpifl.protection.robust_rules import (
    RULES,
    CoordinateRule,
    DistanceRule,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    NoRule,
    TrimmedMean,
    selected,
)

MEMBERS = np.array([[1, -2], [2, 0], [9, 4], [3, 1]], np.float32)


def apart(x: np.ndarray) -> np.ndarray:
    """Return the squared distances [n, n] between rows of x."""
    return ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(2)


def point(rule: CoordinateRule | DistanceRule, x: np.ndarray) -> np.ndarray:
    """Return what a rule makes of equally weighted uploads x [n, d] to a row of zeros."""
    if isinstance(rule, CoordinateRule):
        return rule.row(x.astype(np.float32)).astype(np.float64)
    squares = (x.astype(np.float64) ** 2).sum(1) if rule.from_row else apart(x)
    return rule.weights(squares, np.full(len(x), 1 / len(x))) @ x


def test_median_by_hand():
    assert_array_equal(Median().row(MEMBERS), [2.5, 0.5])
    assert_array_equal(Median().row(MEMBERS[:3]), [2, 0])
    assert_array_equal(Median().row(MEMBERS[:2]), [1.5, -1])
    assert_array_equal(Median().row(MEMBERS[:1]), MEMBERS[0])


def test_trimmed_mean_by_hand():
    """Of four values and beta = 1/4 the largest and the smallest are left out; 0.3 of ten are three."""
    assert_array_equal(TrimmedMean(0.25).row(MEMBERS), [2.5, 0.5])
    assert_array_equal(TrimmedMean(0.2).row(MEMBERS), [3.75, 0.75])
    assert [TrimmedMean(0.3).trimmed(n) for n in (1, 2, 3, 4, 10, 11)] == [0, 0, 0, 1, 3, 3]


def test_krum_by_hand():
    """Points 0, 1, 3, 20 with f = 0: of n - f - 2 = 2 neighbours each.

    Scores: 0: 1 + 9 = 10; 1: 1 + 4 = 5; 3: 4 + 9 = 13; 20: 289 + 361. With f = 1 there must be 5: the f that
    4 points allow is 0.
    """
    x = np.array([[0.0], [1.0], [3.0], [20.0]])
    for f in (0, 1):
        assert_array_equal(selected(apart(x), f, 1), [1])
    assert_array_equal(selected(apart(x), 0, 2), [0, 1])
    assert_allclose(Krum(f=0).weights(apart(x), np.array([0.1, 0.2, 0.3, 0.4])), [0, 1, 0, 0])
    assert_allclose(MultiKrum(f=0, select=2).weights(apart(x), np.full(4, 0.5)), [1, 1, 0, 0])
    assert_allclose(MultiKrum(f=0).weights(apart(x), np.full(4, 0.25)), np.full(4, 0.25))
    assert_allclose(Krum(f=0).weights(apart(x[:2]), np.array([0.3, 0.7])), [0.5, 0.5])


def test_multi_krum_never_selects_more_than_can_be_honest():
    """Points 0 to 4 and 90 with f = 1, of which 6 were to be selected: the last one stays out."""
    x = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [90.0]])
    assert_allclose(MultiKrum(f=1, select=6).weights(apart(x), np.full(6, 1 / 6)), [*[0.2] * 5, 0])
    assert_allclose(MultiKrum(f=1, select=6).weights(apart(x[1:]), np.full(5, 0.2)), [*[0.25] * 4, 0])


def test_norm_bound_by_hand():
    """Norms 1, 2, 8: the median is 2, so the third counts a quarter; a bound of 4 makes it a half."""
    squares, w = np.array([1.0, 4.0, 64.0]), np.array([0.5, 0.25, 0.25])
    assert_allclose(NormBound().weights(squares, w), [0.5, 0.25, 0.25 / 4])
    assert_allclose(NormBound(4.0).weights(squares, w), [0.5, 0.25, 0.25 / 2])
    assert_array_equal(NormBound(9.0).weights(squares, w), w)
    assert_array_equal(NormBound(9.0).weights(np.zeros(3), w), w)


def test_geometric_median_by_hand():
    """Points 0, 3, 9 of weights 0.3, 0.3, 0.4: 3 is the most central; 0.6 of the weight lies within 3 of it.

    Start: weights 0.3 / 3, 0.3 / 3, 0.4 / 6, which is 3.375. One step from there, at distances 3.375, 0.375
    and 5.625.
    """
    x, weights = np.array([[0.0], [3.0], [9.0]]), np.array([0.3, 0.3, 0.4])
    w = GeometricMedian(steps=1).weights(apart(x), 2 * weights)
    beta = weights / [3.375, 0.375, 5.625]
    assert_allclose(w, 2 * beta / beta.sum(), rtol=1e-9)
    many = GeometricMedian(steps=2000).weights(apart(x), np.full(3, 1 / 3))
    assert_allclose(many @ x, [3], atol=1e-4)  # in one dimension it is the median


def krum_of(x: np.ndarray, f: int) -> int:
    """Return the number that Krum selects, in plain Python."""
    n, best = len(x), (math.inf, -1)
    for i in range(n):
        near = sorted(sum((a - b) ** 2 for a, b in zip(x[i], x[j], strict=True)) for j in range(n) if j != i)
        best = min(best, (sum(near[: n - f - 2]), i))
    return best[1]


def geometric_median_of(x: np.ndarray) -> np.ndarray:
    """Return the limit of smoothed Weiszfeld steps on the points themselves, from their mean."""
    z = x.mean(0)
    for _ in range(20000):
        beta = np.array([1 / max(1e-6, math.dist(p, z)) for p in x])
        z = (beta[:, None] * x).sum(0) / beta.sum()
    return z


@pytest.mark.parametrize("n", mostly_nightly([3, 4, 7, 10], [4, 7]))
def test_rules_agree_with_versions_of_their_own(n):
    x = np.random.default_rng(n).normal(size=(n, 5)).astype(np.float32).astype(np.float64)
    medians = [statistics.median(column) for column in x.T.tolist()]
    assert_allclose(point(Median(), x), np.float32(medians), rtol=0, atol=0)
    k = int(0.2 * n)
    trimmed = [statistics.fmean(sorted(column)[k : n - k]) for column in x.T.tolist()]
    assert_allclose(point(TrimmedMean(0.2), x), trimmed, rtol=1e-6, atol=1e-7)
    f = (n - 3) // 2
    assert_array_equal(point(Krum(f=f), x), x[krum_of(x, f)])
    assert_allclose(point(GeometricMedian(), x), geometric_median_of(x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("far", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(("honest", "attackers"), [(8, 2), (6, 4), (6, 5)])
def test_the_geometric_median_stays_among_the_honest_wherever_the_others_are(honest, attackers, far):
    """RFA: at most 2 / (1 - 2 s) times the largest distance of an honest upload from their centre."""
    x = np.random.default_rng(0).normal(size=(honest, 20))
    z = point(GeometricMedian(), np.concatenate([x, np.full((attackers, 20), far)]))
    share = attackers / (honest + attackers)
    reach = np.linalg.norm(x - x.mean(0), axis=1).max()
    assert np.linalg.norm(z - x.mean(0)) <= 2 / (1 - 2 * share) * reach


EVERY = [Median(), TrimmedMean(0.3), Krum(f=3), MultiKrum(f=3), GeometricMedian(steps=50)]


@pytest.mark.parametrize("rule", EVERY, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("lie", [-1e3, 1e6])
def test_three_of_ten_attackers_cannot_carry_a_rule_away_and_they_can_a_mean(rule, lie):
    x = np.random.default_rng(0).normal(size=(10, 4))
    honest = np.abs(x[3:]).max()
    x[:3] = lie
    assert np.abs(point(rule, x)).max() <= 2 * honest
    assert np.abs(x.mean(0)).min() > 100 * honest


def test_half_of_the_attackers_carry_the_median_away():
    x = np.random.default_rng(0).normal(size=(10, 4))
    x[:5] = 1e6
    assert point(Median(), x).min() > 1e5


def test_a_bounded_norm_lets_no_single_upload_move_a_row_by_more_than_its_share_of_the_bound():
    x = np.random.default_rng(0).normal(size=(10, 4))
    without = point(NormBound(1.0), np.vstack([np.zeros((1, 4)), x[1:]]))
    x[0] = 1e6
    assert np.linalg.norm(point(NormBound(1.0), x) - without) <= 0.1 + 1e-12


@pytest.mark.parametrize("rule", [*EVERY, NormBound()], ids=lambda r: type(r).__name__)
def test_the_order_of_the_members_does_not_matter(rule):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(9, 6)).astype(np.float32).astype(np.float64)
    for _ in range(5):
        assert_allclose(point(rule, x[rng.permutation(9)]), point(rule, x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [TrimmedMean(0.0), MultiKrum(f=0), NormBound(1e9)], ids=str)
def test_rules_that_leave_nobody_out_are_the_mean(rule):
    x = np.random.default_rng(2).normal(size=(8, 5)).astype(np.float32).astype(np.float64)
    assert_allclose(point(rule, x), x.mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [*EVERY, NormBound()], ids=lambda r: type(r).__name__)
def test_one_member_is_taken_as_it_is_and_two_by_their_mean(rule):
    x = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert_allclose(point(rule, x[:1]), x[0], rtol=1e-6)
    if not isinstance(rule, NormBound):  # cuts the longer one
        assert_allclose(point(rule, x), [2, 4], rtol=1e-6)
    assert rule.too_small(2)


def test_zeros_of_either_sign_are_one_zero():
    zeros = np.array([[0.0], [-0.0], [-0.0]], np.float32)
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        assert not np.signbit(Median().row(zeros[order])).any()


@for_each(
    ("make", "said"),
    [
        (lambda: TrimmedMean(0.1).check(8), "beta = 0.1: leaves none of 8 uploads out"),
        (lambda: Krum(f=4).check(10), "use at most 3"),
        (lambda: MultiKrum(f=0, select=11).check(10), "select = 11: a step has 10 uploads"),
        (lambda: MultiKrum(f=2, select=9).check(10), "select = 9: a step has 10 uploads, and 2 may be"),
        (lambda: Median().check(1), "has no effect on steps of one upload"),
        (lambda: Median().check(2), "name = 'median': needs 3 uploads, and a step has 2; use a larger"),
        (lambda: NormBound().check(2), "name = 'norm_bound': needs 3 uploads, and a step has 2"),
        (lambda: GeometricMedian().check(2), "name = 'geometric_median': needs 3 uploads"),
        (lambda: Krum(f=0).check(2), "name = 'krum': needs 3 uploads, and a step has 2"),
        (lambda: Krum(f=1).check(2), "and a step has 2; use a larger cohort or buffer"),
        (lambda: MultiKrum(f=0).check(2), "name = 'multi_krum': needs 3 uploads, and a step has 2"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(UserError) as error:
        make()
    assert said in str(error.value)


@for_each(
    ("rule", "least"),
    [
        (Median(), 3),
        (GeometricMedian(), 3),
        (NormBound(), 3),
        (NormBound(2.0), 2),
        (TrimmedMean(0.25), 4),
        (TrimmedMean(0.0), 2),
        (Krum(f=0), 3),
        (Krum(f=2), 7),
        (MultiKrum(f=1), 5),
    ],
    ids=repr,
)
def test_the_smallest_step_of_a_rule_is_the_smallest_group_that_it_guarantees_anything_for(rule, least):
    for uploads in range(1, 10):
        if uploads < least:
            with pytest.raises(UserError):
                rule.check(uploads)
        else:
            rule.check(uploads)


def test_the_geometric_median_of_two_is_the_heavier_one_whatever_it_says():
    """Between two points the summed distance w_1 s + w_2 (1 - s) is least at the larger weight's end."""
    squares = apart(np.array([[0.0, 0.0], [3.0, 4.0]]))
    assert_allclose(GeometricMedian(steps=100).weights(squares, np.array([0.4, 0.6])), [0, 1], atol=1e-6)


def test_every_rule_has_a_name():
    assert {type(rule) for rule in (*EVERY, NormBound(), NoRule())} == set(RULES.values())


def test_shares_to_trim_whose_product_is_not_whole_are_rounded_down():
    """0.3 of 9 is 2.7; 0.29 of 100 is 29, which floating point puts below."""
    assert [TrimmedMean(0.3).trimmed(n) for n in (9, 10)] == [2, 3]
    assert TrimmedMean(0.29).trimmed(100) == 29


def test_multi_krum_may_select_all_that_can_be_honest():
    """Of 0, 1, 2, 3 and 100 with f = 1, four are honest: their mean is 1.5."""
    x = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
    for select in (4, None):
        assert_allclose(point(MultiKrum(f=1, select=select), x), [1.5])


def test_a_bound_without_a_number_is_the_median_norm():
    """Norms 1, 2 and 9: the bound is 2, not the mean 4."""
    w = NormBound().weights(np.array([1.0, 4.0, 81.0]), np.full(3, 1 / 3))
    assert_allclose(w, [1 / 3, 1 / 3, 2 / 27])


def test_as_many_uploads_may_be_selected_as_can_be_honest():
    MultiKrum(f=1, select=4).check_options(5)
    with pytest.raises(UserError, match="use at most 4"):
        MultiKrum(f=1, select=5).check_options(5)
