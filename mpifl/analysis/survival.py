"""The cost of reaching a target as right-censored data, because some runs never reach it.

A run that ends without the target shows only that the target costs more than the run has spent. Leaving such
runs out would favour methods that often fail. Counting their last round as the cost would favour short runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .statistics import resampled

if TYPE_CHECKING:
    from scipy.stats import CensoredData


SLACK = 1e-12  # tolerance, because shares are products of fractions


@dataclass(frozen=True)
class Reached:
    """Where the runs of a group met a target, on one axis (rounds, bytes or seconds).

    Attributes:
        position: position of the first evaluation that meets the target, or else of the last one [runs].
        met: whether the target was met [runs].
    """

    position: np.ndarray
    met: np.ndarray

    @property
    def unmet(self) -> int:
        """Number of runs that never met the target."""
        return int((~self.met).sum())

    @property
    def shown(self) -> np.ndarray:
        """The positions [runs]; infinite where the target was not met."""
        return np.where(self.met, self.position, np.inf)


@dataclass(frozen=True)
class Median:
    """The Kaplan-Meier estimate of a median.

    Attributes:
        value: the median; infinite if the estimated share of runs that met the target by the last observation
            is below one half.
        low: lower end of the interval; NaN for one run.
        high: upper end of the interval; NaN for one run, infinite if the runs do not bound it.
        beyond: the last observed position, which an infinite median exceeds.
        runs: number of runs.
        unmet: number of runs that never met the target.
    """

    value: float
    low: float
    high: float
    beyond: float
    runs: int
    unmet: int


def censored(found: Reached) -> CensoredData:
    """Return the data as SciPy's `CensoredData`."""
    from scipy import stats

    return stats.CensoredData.right_censored(found.position, ~found.met)


def kaplan_meier(found: Reached) -> tuple[np.ndarray, np.ndarray]:
    """Return the estimated share of runs that have not met the target.

    Returns:
        The positions, ascending, and the share from each position on (Kaplan and Meier 1958). Before the
        first position the share is 1.
    """
    from scipy import stats

    survival = stats.ecdf(censored(found)).sf
    return np.asarray(survival.quantiles), np.asarray(survival.probabilities)


def median(found: Reached, kind: str = "t", confidence: float = 0.95) -> Median:
    """Return the Kaplan-Meier median with an interval.

    Args:
        found: the runs.
        kind: `bootstrap` and `percentile` take percentiles of the medians of resampled runs; other kinds take
            the positions at which the log-log band of the share crosses 1/2 (Brookmeyer and Crowley 1982).
        confidence: confidence level of the interval, in (0, 1).
    """
    runs, beyond = len(found.position), float(found.position.max())
    at, share = kaplan_meier(found)
    value = _crossing(at, share)
    if runs < 2:
        low = high = np.nan
    elif kind in ("bootstrap", "percentile"):
        low, high = _bootstrap(found, confidence)
    else:
        from scipy import stats

        with warnings.catch_warnings():  # no band where the share is 0 or 1
            warnings.simplefilter("ignore", RuntimeWarning)
            band = stats.ecdf(censored(found)).sf.confidence_interval(confidence, method="log-log")
        low = _crossing(at, np.where(share == 0.0, 0.0, np.asarray(band.low.probabilities)))
        high = _crossing(at, np.asarray(band.high.probabilities))
    return Median(value, low, high, beyond, runs, found.unmet)


def _crossing(at: np.ndarray, share: np.ndarray) -> float:
    """Return the first position at which a share is at most 1/2; infinite if there is none. NaN never counts.

    If the share stays at 1/2 until it falls again, this is the middle of that stretch: without censoring, the
    usual median of an even number of runs.
    """
    there = np.flatnonzero(share <= 0.5 + SLACK)
    if not len(there):
        return np.inf
    first = there[0]
    below = np.flatnonzero(share < 0.5 - SLACK)
    level = share[first] >= 0.5 - SLACK and len(below) > 0
    return float((at[first] + at[below[0]]) / 2 if level else at[first])


def _bootstrap(found: Reached, confidence: float) -> tuple[float, float]:
    """Return percentiles of the medians of resampled runs."""
    order = np.lexsort((found.met, found.position))
    drawn = resampled(np.column_stack([found.position[order], found.met[order]]))
    medians = _medians(drawn[..., 0], drawn[..., 1] > 0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def _medians(position: np.ndarray, met: np.ndarray) -> np.ndarray:
    """Return the Kaplan-Meier median of each row of [samples, runs]."""
    runs = position.shape[1]
    order = np.lexsort((~met, position), axis=1)  # at one position, runs that met the target come first
    position, met = (np.take_along_axis(x, order, 1) for x in (position, met))
    share = np.cumprod(np.where(met, 1 - 1 / np.arange(runs, 0, -1), 1.0), axis=1)
    row = np.arange(len(position))
    there, below = share <= 0.5 + SLACK, share < 0.5 - SLACK
    first, last = position[row, there.argmax(axis=1)], position[row, below.argmax(axis=1)]
    level = (np.abs(share[row, there.argmax(axis=1)] - 0.5) <= SLACK) & below.any(axis=1)
    return np.where(there.any(axis=1), np.where(level, (first + last) / 2, first), np.inf)


def horizon(groups: Sequence[Reached]) -> float:
    """Return the horizon of the restricted means of groups: the earliest end of a run without the target.

    Up to the horizon, no run of any group is censored. It is infinite if all runs met the target.
    """
    ends = [float(g.position[~g.met].min()) for g in groups if g.unmet]
    return min(ends, default=np.inf)


def restricted(found: Reached, until: float) -> np.ndarray:
    """Return min(position of the target, `until`) of each run [runs].

    Their mean is the restricted mean. It is exact, without an estimate of censored values, as long as no run
    without the target ends before `until` (see `horizon`).
    """
    assert found.met.all() or until <= found.position[~found.met].min(), "a run ends before"
    return np.asarray(np.minimum(found.position, until))


@cache
def least_logrank_p(runs: int, others: int) -> float:
    """Return the smallest p value of the log-rank test: all of a group meet the target before any other.

    Args:
        runs: number of runs of a group.
        others: number of runs of another.
    """
    values = []
    for first, last in ((runs, others), (others, runs)):
        early = Reached(np.arange(first) + 1.0, np.ones(first, bool))
        late = Reached(np.full(last, first + 1.0), np.zeros(last, bool))
        values.append(logrank(early, late)[1])
    return float(np.nanmin(values))


def logrank(a: Reached, b: Reached) -> tuple[float, float]:
    """Return the log-rank test of the hypothesis that two groups need the same (Mantel 1966).

    Returns:
        The test statistic and the two-sided p value. The statistic is standard normal under the hypothesis,
        and positive if more runs of `a` than expected met the target, so that `a` needs less. The p value is
        NaN if no run of either group met the target, and 1 if the statistic has no variance, as when all runs
        met the target at one position.
    """
    if not (a.met.any() or b.met.any()):
        return 0.0, np.nan
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.logrank(censored(a), censored(b))
    statistic, p = float(found.statistic), float(found.pvalue)
    return (0.0, 1.0) if np.isnan(p) else (statistic, p)
