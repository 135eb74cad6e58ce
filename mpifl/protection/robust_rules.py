"""Robust rules that replace a mean of uploads, so that some clients may send arbitrary values.

A rule replaces the weighted mean in a row of a mixing: sum_j w_j x_j = s * mean becomes s * rule, with
s = sum_j w_j. There are two kinds of rules, which need different computations:

- `CoordinateRule`: each coordinate by itself, from the values of all members (median, trimmed mean);
- `DistanceRule`: weights of the members, from the distances between them or from the row they enter (Krum,
  norm bound, geometric median); the mixing is then carried out with these weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from mpifl.core.errors import UserError, name_of, require
from mpifl.core.metric import least
from mpifl.core.options import NonNegativeInt, Options, PositiveFloat, PositiveInt
from mpifl.core.registry import Registry

TOLERANCE = 1e-6  # of the mean distance to the uploads: a shorter step of the geometric median is the last
LARGER = "use a larger cohort or buffer"


@dataclass(frozen=True)
class NoRule(Options):
    """Take the method's weighted mean."""


class Rule(Options, ABC):
    """A replacement for the mean of a group of uploads."""

    def check(self, uploads: int) -> None:
        """Refuse a rule that has no effect on a step, or cannot withstand as many attackers as it promises.

        Args:
            uploads: number of uploads in a step.

        Raises:
            UserError: the rule is refused; names the key of the section `robust`, its value and a remedy.
        """
        require(uploads >= 2, "name", name_of(self), "has no effect on steps of one upload; leave it out")
        self.check_options(uploads)
        if self.too_small(uploads):
            least = next(n for n in count(uploads + 1) if not self.too_small(n))
            remedy = f"needs {least} uploads, and a step has {uploads}; {LARGER}, or leave it out"
            raise UserError("name", name_of(self), remedy)

    def check_options(self, uploads: int) -> None:
        """Refuse options that do not fit a step of two uploads or more; arguments are those of `check`."""
        assert uploads >= 2, "`check` refuses steps of one upload"

    @abstractmethod
    def too_small(self, members: int) -> bool:
        """Return whether a group is too small for the rule's guarantee; it then gets the closest result."""

    def applies(self, upload: str, statistics: Collection[str]) -> bool:
        """Return whether the rule replaces the mean of an upload.

        Args:
            upload: name of the upload.
            statistics: names of uploads that do not represent parameters (`Algorithm.statistics`).
        """
        return True


class CoordinateRule(Rule):
    """A rule that treats each coordinate by itself, and all members alike."""

    @abstractmethod
    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the value of each coordinate, float64 [b].

        Args:
            ordered: values that the n members sent, float32 [b, n], sorted for each coordinate.
        """

    def row(self, members: np.ndarray) -> np.ndarray:
        """Return the rule's value for a group of uploads, float32 [b].

        Args:
            members: the uploads, float32 [n, b], n >= 1.
        """
        ordered = np.sort(np.ascontiguousarray(members.T), axis=1)
        found = self.values(ordered) + 0.0  # makes -0.0 0.0: sorting leaves the two in any order
        return np.asarray(found, np.float32)


@dataclass(frozen=True)
class Median(CoordinateRule):
    """The median of each coordinate; for an even number of uploads, the mean of the middle two.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, definition 1. Weights are ignored, as in the paper. The result is bounded while fewer
    than half of a group attack.
    """

    paper = "yin2018byzantine"

    def too_small(self, members: int) -> bool:
        """Return whether a single attacker can move the median at will."""
        return members < 3

    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the middle value, or the mean of the middle two."""
        n = ordered.shape[1]
        return np.asarray((ordered[:, (n - 1) // 2].astype(np.float64) + ordered[:, n // 2]) / 2)


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its largest and its smallest values.

    Yin et al., ICML 2018, definition 2. Weights are ignored, as in the paper. The result is bounded while at
    most a share `beta` of a group attacks.

    Attributes:
        beta: share of a group that is left out at each end, in [0, 0.5); floor(beta * n) of n members.
    """

    paper = "yin2018byzantine"

    beta: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1

    def trimmed(self, members: int) -> int:
        """Return how many of `members` values are left out at each end."""
        return int(self.beta * members + 1e-9)  # 0.3 * 10 is below 3 in floating point

    def check_options(self, uploads: int) -> None:
        """Refuse a share that leaves nobody out."""
        least = int(np.ceil(1 / self.beta)) if self.beta else 0
        remedy = f"leaves none of {uploads} uploads out; use a larger share, or {least} uploads or more"
        require(not self.beta or self.trimmed(uploads) > 0, "beta", self.beta, remedy)

    def too_small(self, members: int) -> bool:
        """Return whether nobody is left out."""
        return self.beta > 0 and not self.trimmed(members)

    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the mean of the remaining values, added from the smallest to the largest."""
        n = ordered.shape[1]
        k = self.trimmed(n)
        sums = np.zeros(len(ordered))
        for j in range(k, n - k):  # one by one: the bits must not depend on the width of a block
            sums += ordered[:, j]
        return np.asarray(sums / (n - 2 * k))


class DistanceRule(Rule):
    """A rule that weights the members of a group by squared distances.

    Attributes:
        from_row: whether distances are measured from the row that the members enter, instead of between the
            members. For uploads that are added to a row (updates), they are measured from 0.
    """

    from_row: ClassVar[bool] = False

    def applies(self, upload: str, statistics: Collection[str]) -> bool:
        """Return whether an upload represents parameters: distant statistics may be due to other labels."""
        return upload not in statistics

    @abstractmethod
    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the rule's weights of the members, which replace `weights`, float64 [n].

        They have the same sum as `weights`, or a smaller one if `from_row`: the row keeps the rest.

        Args:
            squares: squared distances between members, float64 [n, n], or from the row, float64 [n].
            weights: weights of the method, float64 [n], all above 0.
        """


@dataclass(frozen=True)
class _KrumRule(DistanceRule):
    """The uploads that are closest to their neighbours."""

    f: NonNegativeInt = 1

    @abstractmethod
    def count(self, members: int) -> int | None:
        """Return how many of `members` are selected; None for n - f."""

    def check_options(self, uploads: int) -> None:
        """Refuse more attackers than Krum withstands, or a selection of more uploads than can be honest."""
        most = max((uploads - 3) // 2, 0)
        way = f"use at most {most}" if uploads >= 3 else LARGER
        remedy = f"Krum withstands f among 2 f + 3 uploads, and a step has {uploads}; {way}"
        require(self.f <= most, "f", self.f, remedy)
        count, most = self.count(uploads), uploads - self.f
        remedy = f"a step has {uploads} uploads, and {self.f} may be attackers'; use at most {most}"
        require(count is None or count <= most, "select", count, remedy)

    def too_small(self, members: int) -> bool:
        """Return whether there are fewer than 2 f + 3 members."""
        return members < 2 * self.f + 3

    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return equal weights for the selected members, and 0 for the others."""
        n = len(squares)
        chosen = selected(squares, self.f, self.count(n)) if n > 2 else np.arange(n)
        out = np.zeros(n)
        out[chosen] = total(weights) / len(chosen)
        return out


@dataclass(frozen=True)
class Krum(_KrumRule):
    """The one upload that is closest to its neighbours.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent", NeurIPS 2017. The score of an upload is the sum of its squared distances to the
    n - f - 2 uploads that are nearest to it; of equal scores, the client with the lower number wins. Weights
    are ignored, as in the paper. A group of fewer than 2 f + 3 uploads uses the largest f that it allows; for
    one or two uploads, the rule is their mean.

    Attributes:
        f: number of attackers that a group withstands.
    """

    paper = "blanchard2017machine"

    def count(self, members: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True)
class MultiKrum(_KrumRule):
    """The mean of the uploads that are closest to their neighbours; scores and small groups as for `krum`.

    Attributes:
        f: number of attackers that a group withstands.
        select: number of uploads whose mean is taken, at most n - f of a group; null takes n - f.
    """

    paper = "blanchard2017machine"

    select: PositiveInt | None = None

    def count(self, members: int) -> int | None:
        """Return `select`."""
        return self.select


def total(weights: np.ndarray) -> np.ndarray:
    """Return the sums over the last axis; exactly 1 where they are 1 up to rounding."""
    sums = weights.sum(-1)
    return np.where(np.isclose(sums, 1.0, rtol=0, atol=1e-9), 1.0, sums)


def selected(squares: np.ndarray, f: int, select: int | None) -> np.ndarray:
    """Return the indices of the members with the best Krum scores, ascending.

    Args:
        squares: squared distances, float64 [n, n], n >= 3.
        f: number of attackers; reduced if n < 2 f + 3.
        select: number of members to select, at most n - f; None for n - f.
    """
    n = len(squares)
    f = min(f, (n - 3) // 2)
    apart = squares + np.diag(np.full(n, np.inf))
    nearest = np.sort(apart, axis=1)[:, : n - f - 2]
    scores = nearest.sum(1)
    count = n - f if select is None else min(select, n - f)
    return np.sort(np.argsort(scores, kind="stable")[:count])


@dataclass(frozen=True)
class NormBound(DistanceRule):
    """The method's weighted mean of updates that are clipped to a norm.

    Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019, section 4: update u
    becomes u / max(1, |u| / bound). The update of an upload is its difference from the row that it enters, or
    the upload itself if uploads are added to a row. Each attacker's harm is bounded, not removed: use this
    rule against scaled updates.

    Attributes:
        bound: largest norm of an update; null takes the median norm of the group (ignoring weights).
    """

    paper = "sun2019can"

    from_row: ClassVar[bool] = True
    bound: PositiveFloat | None = None

    def too_small(self, members: int) -> bool:
        """Return whether the median norm may be an attacker's."""
        return self.bound is None and members < 3

    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weights times min(1, bound / norm)."""
        norms = np.sqrt(squares)
        bound = float(np.median(norms)) if self.bound is None else self.bound
        return np.asarray(weights * np.minimum(1.0, bound / np.maximum(norms, 1e-300)))


@dataclass(frozen=True)
class GeometricMedian(DistanceRule):
    """The geometric median: the point with the smallest weighted sum of distances to the uploads.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning" (RFA), IEEE Transactions on
    Signal Processing 2022, algorithm 2: smoothed Weiszfeld steps with the method's weights. They end when a
    step moves the point by less than 1e-6 of the mean distance to the uploads. The paper starts from the
    weighted mean, which an attacker moves at will and a few steps do not bring back; here the start is near
    the upload with the smallest summed distance. Every iterate is a weighted mean of the uploads, so the
    distances between uploads are computed only once for all steps. The result is bounded while attackers have
    less than half of the weight.

    Attributes:
        steps: most steps of Weiszfeld's algorithm.
        smoothing: smallest distance that is used, in units of the model's parameters; smaller distances are
            replaced by it.
    """

    paper = "pillutla2022robust"

    steps: PositiveInt = 1000
    smoothing: PositiveFloat = 1e-6

    def too_small(self, members: int) -> bool:
        """Return whether one attacker may have half of the weight."""
        return members < 3

    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the last iterate."""
        alpha = weights / weights.sum()
        share = self._start(np.sqrt(squares), alpha)  # weight of each upload in the iterate
        for _ in range(self.steps):
            along = squares @ share
            apart = np.sqrt(np.maximum(along - share @ along / 2, 0.0))  # |x_j - z|, z = sum_i share_i x_i
            beta = alpha / np.maximum(apart, self.smoothing)
            before, share = share, beta / beta.sum()
            step = share - before
            if -(step @ squares @ step) / 2 <= (TOLERANCE * (alpha @ apart)) ** 2:  # |z - z before|^2
                break
        return np.asarray(share * total(weights))

    def _start(self, distances: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        """Return the weights of a first point that fewer than half of the weight cannot move at will.

        Uploads count in full within the distance r of the most central one, within which more than half of
        the weight lies, and r / distance times beyond.
        """
        apart = distances[least(distances @ alpha)]
        order = np.argsort(apart, kind="stable")
        r = apart[order][np.searchsorted(np.cumsum(alpha[order]), 0.5 + 1e-9)]
        share = alpha / np.maximum(apart, max(r, self.smoothing))
        return np.asarray(share / share.sum())


RULES: Registry[type[Options]] = Registry(
    "protections",
    Rule,
    {
        "none": NoRule,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "krum": Krum,
        "multi_krum": MultiKrum,
        "norm_bound": NormBound,
        "geometric_median": GeometricMedian,
    },
)
