"""Statistics over seeds and problems: intervals, paired tests, average ranks.

All functions are pure functions of arrays. Results do not depend on the order of the runs: values are sorted
before they are resampled, and the caller forms the pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mpifl.core.directions import ROUNDING

INTERVALS = ("t", "bootstrap", "percentile")
TESTS = ("t", "wilcoxon")
TEST_NAMES = {"t": "paired t test", "wilcoxon": "Wilcoxon signed-rank test"}
GENERATOR, BOOTSTRAP_SEED, RESAMPLES = "PCG64", 20_260, 9_999  # of every bootstrap


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: mean of the values.
        std: sample standard deviation (ddof 1); NaN for one seed.
        low: lower end of the interval for the mean; NaN for one seed.
        high: upper end of the interval; NaN for one seed.
        seeds: number of values.
    """

    mean: float
    std: float
    low: float
    high: float
    seeds: int


def estimate(
    values: np.ndarray,
    kind: str = "t",
    confidence: float = 0.95,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> Estimate:
    """Return the mean, the sample standard deviation and a confidence interval for the mean.

    Args:
        values: finite values, one for each seed [seeds].
        kind: `t` (mean -+ t quantile x standard error), `bootstrap` (bias-corrected and accelerated; Efron
            1987) or `percentile` (percentiles of the means of resamples).
        confidence: confidence level of the interval, in (0, 1).
        limits: between which values the mean lies, whatever the values: the interval ends there.
    """
    x = np.sort(np.asarray(values, np.float64))
    n = len(x)
    with np.errstate(over="ignore", invalid="ignore"):  # of runs that diverged
        centre, spread = float(x.mean()), float(x.std(ddof=1)) if n > 1 else np.nan
    if n < 2:
        return Estimate(centre, np.nan, np.nan, np.nan, n)
    if spread == 0.0:
        return Estimate(centre, 0.0, centre, centre, n)
    if kind == "t":
        from scipy import stats  # heavy: only when something is computed

        half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * spread / np.sqrt(n))
        low, high = centre - half, centre + half
    else:
        low, high = _bootstrap(x, kind, confidence)
    return Estimate(centre, spread, max(low, limits[0]), min(high, limits[1]), n)


def _bootstrap(x: np.ndarray, kind: str, confidence: float) -> tuple[float, float]:
    """Return a bootstrap interval for the mean; percentiles if the BCa formula is undefined."""
    from scipy import stats

    ends = (np.nan, np.nan)
    for method in ("BCa", "percentile") if kind == "bootstrap" else ("percentile",):
        with warnings.catch_warnings():  # undefined for two different values: percentiles are taken
            warnings.simplefilter("ignore", (RuntimeWarning, stats.DegenerateDataWarning))
            found = stats.bootstrap(
                (x,), np.mean, n_resamples=RESAMPLES, confidence_level=confidence, method=method, rng=_rng()
            ).confidence_interval
        ends = float(found.low), float(found.high)
        if np.isfinite(ends).all():
            break
    return ends


def _rng() -> np.random.Generator:
    """Return a freshly seeded generator for a bootstrap, so that equal runs give equal intervals."""
    return np.random.Generator(np.random.PCG64(BOOTSTRAP_SEED))


def resampled(values: np.ndarray) -> np.ndarray:
    """Return bootstrap resamples of rows, drawn with the generator of all bootstraps.

    Args:
        values: the rows [runs, ...].

    Returns:
        The resamples [RESAMPLES, runs, ...].
    """
    return np.asarray(values[_rng().integers(len(values), size=(RESAMPLES, len(values)))])


# -- tests over seeds ----------------------------------------------------------------------------------------


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a - b [pairs]; 0 where they differ only by rounding."""
    alike = np.isclose(a, b, rtol=ROUNDING, atol=0.0)
    return np.asarray(np.subtract(a, b, out=np.zeros(len(a)), where=~alike))


def without_rounding(values: np.ndarray) -> np.ndarray:
    """Return values [n] in which those that differ only by rounding are set to the lowest of them."""
    out = np.array(values, np.float64)
    for low, high in pairwise(np.argsort(out, kind="stable")):
        if np.isclose(out[high], out[low], rtol=ROUNDING, atol=0.0):
            out[high] = out[low]
    return out


def paired_p(differences: np.ndarray, test: str = "t") -> float:
    """Return the two-sided p value that paired differences are zero on average.

    Args:
        differences: one method minus the other, under equal seeds [pairs].
        test: `t` (Student's paired t test) or `wilcoxon` (signed ranks; zeros by Pratt's rule).

    Returns:
        The p value; 1 if all differences are zero. NaN for fewer than two pairs, and for a t test of equal
        differences, which have no variance.
    """
    d = np.sort(np.asarray(differences, np.float64))
    if len(d) < 2:
        return np.nan
    if not d.any():
        return 1.0
    from scipy import stats

    if test == "wilcoxon":
        ties = np.sign(d) * without_rounding(np.abs(d))
        return float(stats.wilcoxon(ties, zero_method="pratt").pvalue)
    if np.ptp(d) <= ROUNDING * np.abs(d).max():
        return np.nan
    return float(stats.ttest_1samp(d, 0.0).pvalue)


def side(differences: np.ndarray, test: str = "t") -> int:
    """Return the sign of the effect that a paired test examines.

    Args:
        differences: one method minus the other, under equal seeds [pairs].
        test: as in `paired_p`.

    Returns:
        The sign of the mean difference; for `wilcoxon`, 0 if the sum of signed ranks has another sign.
    """
    d = np.sort(np.asarray(differences, np.float64))
    mean = int(np.sign(d.sum()))
    if test != "wilcoxon" or not len(d):
        return mean
    from scipy import stats

    ranks = np.sign(d) * stats.rankdata(without_rounding(np.abs(d)))
    return mean if np.sign(ranks.sum()) == mean else 0


def least_wilcoxon_p(pairs: int) -> float:
    """Return the smallest p value that the exact signed-rank test can give: 2 / 2^pairs."""
    return min(1.0, 2.0 ** (1 - pairs))


def holm(p: Sequence[float]) -> np.ndarray:
    """Return p values adjusted for several tests (Holm 1979).

    The i-th smallest of n values is multiplied by n - i + 1. The results are made monotone and capped at 1.

    Args:
        p: p values [tests]; NaN for a test that could not be made, which stays NaN and is not counted.
    """
    values = np.asarray(p, np.float64)
    out = np.full(len(values), np.nan)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    out[order] = np.minimum(np.maximum.accumulate(factors * values[order]), 1.0)
    return out


# -- ranks over problems -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Average ranks of methods over problems, and the tests on them (Demsar, JMLR 7, 2006).

    Attributes:
        ranks: rank of each method in each problem [problems, methods]; 1 is best, ties share their mean rank.
        average: average rank of each method over problems [methods].
        friedman: Friedman's chi-square, with methods - 1 degrees of freedom.
        p: its p value.
        f: Iman and Davenport's F, with (methods - 1) and (methods - 1)(problems - 1) degrees of freedom.
        f_p: its p value.
        critical_difference: Nemenyi's critical difference: average ranks that differ by less are not
            distinguishable.
        cliques: largest sets of methods that are not distinguishable; indices of methods, best first.
    """

    ranks: np.ndarray
    average: np.ndarray
    friedman: float
    p: float
    f: float
    f_p: float
    critical_difference: float
    cliques: tuple[tuple[int, ...], ...]


def rank(scores: np.ndarray, higher_is_better: bool = True, alpha: float = 0.05) -> Ranking:
    """Rank methods over problems.

    Args:
        scores: score of each method in each problem [problems, methods], for at least two problems and three
            methods. Infinity is allowed, as the cost of a target that was never met.
        higher_is_better: whether rank 1 goes to the largest score.
        alpha: significance level of the critical difference.
    """
    from scipy import stats

    problems, methods = scores.shape
    assert problems >= 2, "one problem has no average"
    assert methods >= 3, "Friedman's test needs three methods"
    scores = np.stack([without_rounding(row) for row in scores])
    ranks = stats.rankdata(-scores if higher_is_better else scores, axis=1)
    average = ranks.mean(axis=0)
    friedman = float(stats.friedmanchisquare(*ranks.T).statistic) if np.ptp(ranks) else 0.0
    most = problems * (methods - 1)
    f = (problems - 1) * friedman / (most - friedman) if most - friedman > 1e-9 * most else np.inf
    difference = critical_difference(methods, problems, alpha)
    return Ranking(
        ranks,
        average,
        friedman,
        float(stats.chi2.sf(friedman, methods - 1)),
        float(f),
        float(stats.f.sf(f, methods - 1, (methods - 1) * (problems - 1))),
        difference,
        cliques(average, difference),
    )


def critical_difference(methods: int, problems: int, alpha: float = 0.05) -> float:
    """Return Nemenyi's critical difference of average ranks: q sqrt(k (k + 1) / (6 N)).

    q is the studentized range for k means and infinitely many degrees of freedom, divided by sqrt 2.

    Args:
        methods: number of methods k.
        problems: number of problems N.
        alpha: significance level.
    """
    from scipy import stats

    q = float(stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / np.sqrt(2)
    return float(q * np.sqrt(methods * (methods + 1) / (6 * problems)))


def cliques(average: np.ndarray, difference: float) -> tuple[tuple[int, ...], ...]:
    """Return the largest sets of two or more methods whose average ranks lie within a difference.

    Args:
        average: average rank of each method [methods].
        difference: the critical difference.
    """
    order = np.argsort(average, kind="stable")
    out: list[tuple[int, ...]] = []
    reach = 0
    for i, first in enumerate(order):
        inside = int(np.searchsorted(average[order], average[first] + difference + 1e-12, side="right"))
        if inside > max(reach, i + 1):
            out.append(tuple(order[i:inside].tolist()))
            reach = inside
    return tuple(out)
