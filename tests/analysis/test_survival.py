"""What a target takes where runs never reach it: a published example, by hand, and in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mpifl.analysis import survival
from mpifl.analysis.survival import Reached, horizon, kaplan_meier, logrank, median, restricted

RUNS = some.lists(some.tuples(some.integers(0, 9), some.booleans()), min_size=2, max_size=9)


def reached(*positions: float | str) -> Reached:
    """Return runs: a number met the target there, a text `6+` ended there without it."""
    texts = [str(p) for p in positions]
    ends = [not text.endswith("+") for text in texts]
    return Reached(np.array([float(text.rstrip("+")) for text in texts]), np.array(ends))


SIX_MP = (
    "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+",
    "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23",
)


def test_a_published_example():
    """Remission of leukemia, 6-MP and placebo (Freireich et al. 1963): medians 23 and 8 weeks.

    The log-log intervals are [13, open) and [4, 11]; the log-rank chi-square is 16.79.
    """
    treated, placebo = (reached(*line.split()) for line in SIX_MP)
    a, b = median(treated), median(placebo)
    assert (a.value, a.low, a.high, a.runs, a.unmet, a.beyond) == (23, 13, np.inf, 21, 12, 35)
    assert (b.value, b.low, b.high, b.unmet) == (8, 4, 11, 0)
    narrow = median(placebo, confidence=0.5)
    assert 4 < narrow.low <= 8 <= narrow.high < 11
    at, share = kaplan_meier(treated)
    np.testing.assert_allclose(share[[0, 1, 3]], [18 / 21, 18 / 21 * 16 / 17, 18 / 21 * 16 / 17 * 14 / 15])
    assert at[[0, 1, 3]].tolist() == [6, 7, 10]
    from scipy.stats import chi2

    statistic, p = logrank(treated, placebo)
    assert p == pytest.approx(chi2.sf(16.79, 1), rel=5e-3)
    assert statistic == pytest.approx(-np.sqrt(16.79), rel=5e-3), "fewer relapses than expected"


def test_medians_by_hand():
    """Half of 2, 4 is reached from 2 on, all from 4: the middle. With 2, 9+ half stays: reached at 2."""
    assert median(reached(2, 4)).value == 3
    assert median(reached(2, "9+")).value == 2
    assert median(reached(2, 4, 7)).value == 4
    assert median(reached("1+", "9+", 2)).value == 2  # 1 ended before: half of the two that are left at 2
    never = median(reached(2, "9+", "5+"))
    assert (never.value, never.beyond, never.unmet) == (np.inf, 9, 2)
    one = median(reached(5))
    assert one.value == 5
    assert np.isnan([one.low, one.high]).all()


def test_the_usual_treatments_of_runs_that_never_arrive_name_the_wrong_winner():
    """Lucky reaches the target after 3 or 4 in two of five runs, steady after 5 to 7 in all.

    Means over the runs that arrived: 3.5 against 6. Runs of six rounds, with the last one for those that did
    not arrive: 5 against 5.8. The median of lucky is beyond all that was observed.
    """
    lucky, steady = reached(3, 4, "8+", "8+", "8+"), reached(5, 6, 6, 6, 7)
    assert lucky.position[lucky.met].mean() < steady.position.mean()
    short = np.minimum(lucky.position, 6)
    assert (short.mean(), np.minimum(steady.position, 6).mean()) == (5, 5.8)
    assert median(lucky).value == np.inf > median(steady).value == 6


def test_restricted_means_by_hand():
    """The first run that ends without the target ends at 6: until there 3, 4, 6, 6 and 5, 6, 6 are known."""
    groups = reached(3, 4, "8+", "6+"), reached(5, 6, 7)
    until = horizon(groups)
    assert until == 6
    assert restricted(groups[0], until).tolist() == [3, 4, 6, 6]
    assert restricted(groups[1], until).tolist() == [5, 6, 6]
    assert horizon([groups[1]]) == np.inf
    assert restricted(groups[1], np.inf).tolist() == [5, 6, 7]
    with pytest.raises(AssertionError, match="a run ends before"):
        restricted(groups[0], 7)


def test_a_log_rank_test_of_nothing_and_of_equal_runs():
    np.testing.assert_equal(logrank(reached("5+", "5+"), reached("4+", "5+")), (0.0, np.nan))
    assert logrank(reached(5, 5), reached(5, 5)) == (0.0, 1.0)


@settings(max_examples=12, deadline=None)
@given(RUNS, some.randoms())
def test_neither_medians_nor_tests_depend_on_the_order_of_the_runs(runs, random):
    mixed = list(runs)
    random.shuffle(mixed)
    a, b = (Reached(np.array([p for p, _ in r], float), np.array([m for _, m in r])) for r in (runs, mixed))
    for kind in ("t", "bootstrap"):
        np.testing.assert_equal(median(a, kind), median(b, kind))
    other = reached(1, 3, "4+")
    np.testing.assert_allclose(logrank(a, other), logrank(b, other), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(RUNS)
def test_medians_of_many_samples_at_once_are_those_one_by_one(runs):
    found = Reached(np.array([p for p, _ in runs], float), np.array([m for _, m in runs]))
    together = survival._medians(found.position[None], found.met[None])
    assert together[0] == pytest.approx(median(found).value)
    said = median(found)
    assert said.low <= said.value or np.isinf(said.value)
    assert said.high >= said.value


@settings(max_examples=12, deadline=None)
@given(some.lists(some.integers(0, 50), min_size=1, max_size=9))
def test_without_censoring_the_median_is_the_median(values):
    found = Reached(np.array(values, float), np.ones(len(values), bool))
    assert median(found).value == np.median(values)


def test_bootstrap_intervals_of_medians_are_those_of_all_resamples():
    """Of 27 resamples of 1, 2, 3, 7 have the median 1, 13 have 2, 7 have 3: quantiles 0.2, 0.8 are 1, 3."""
    said = median(reached(1, 2, 3), "bootstrap", 0.6)
    assert (said.low, said.high) == (1, 3)
    said = median(reached(1, 2, 3), "bootstrap", 0.4)
    assert (said.low, said.high) == (2, 2)
    said = median(reached(1, 2, "3+"), "percentile", 0.6)
    assert (said.low, said.value, said.high) == (1, 2, np.inf)
