"""Rules that take the place of a mean of uploads, so that some of the clients may send what they like.

A rule replaces the weighted mean in a row of a mixing: sum_j w_j x_j = s * mean becomes s * rule, with
s = sum_j w_j. Two kinds differ in what has to be computed where:

- `CoordinateRule`: each coordinate by itself, from the values of all members (median, trimmed mean);
- `DistanceRule`: weights of the members, from distances between them or from the row they enter (Krum, norm
  bound, geometric median); the mixing is then carried out with these weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpifl.core.errors import require


@dataclass(frozen=True)
class NoRule:
    """Take the mean, as the method says."""


class Rule(ABC):
    """What takes the place of the mean of a group of uploads."""

    def check(self, uploads: int) -> None:
        """Refuse a rule that has no effect on a step, or cannot withstand what it promises to.

        Args:
            uploads: of a step.

        Raises:
            UserError: names the key of the section `robust`, its value and a remedy.
        """
        require(uploads >= 2, "name", name_of(self), "has no effect on steps of one upload; leave it out")

    @abstractmethod
    def too_small(self, members: int) -> bool:
        """Return whether a group is too small for what the rule promises; it takes what is nearest to it."""

    def applies(self, upload: str, statistics: Collection[str]) -> bool:
        """Return whether the rule takes the place of the mean of an upload.

        Args:
            upload: its name.
            statistics: names of uploads that do not stand for parameters (`Algorithm.statistics`).
        """
        return True


class CoordinateRule(Rule):
    """A rule that treats each coordinate by itself, and all members alike."""

    @abstractmethod
    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the value of each coordinate, float64 [b].

        Args:
            ordered: what the n members sent, float32 [b, n], ascending in each line.
        """

    def row(self, members: np.ndarray) -> np.ndarray:
        """Return the rule of some uploads, float32 [b].

        Args:
            members: float32 [n, b], n >= 1.
        """
        ordered = np.sort(np.ascontiguousarray(members.T), axis=1)
        found = self.values(ordered) + 0.0  # -0.0 and 0.0 may stand in any order
        return np.asarray(found, np.float32)


@dataclass(frozen=True)
class Median(CoordinateRule):
    """The median of each coordinate; of an even number, the mean of the middle two.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, definition 1. Weights are ignored, as there. Bounded while fewer than half of a group
    attack.
    """

    def too_small(self, members: int) -> bool:
        """Return whether one attacker moves the median at will."""
        return members < 3

    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the middle value, or the mean of two."""
        n = ordered.shape[1]
        return np.asarray((ordered[:, (n - 1) // 2].astype(np.float64) + ordered[:, n // 2]) / 2)


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its largest and its smallest values.

    Yin et al., ICML 2018, definition 2. Weights are ignored, as there. Bounded while at most a share `beta`
    of a group attacks.

    Attributes:
        beta: share of a group that is left out at either end, in [0, 0.5); floor(beta * n) of n members.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.beta < 0.5, "beta", self.beta, "take a share in [0, 0.5)")

    def trimmed(self, members: int) -> int:
        """Return how many of `members` values are left out at either end."""
        return int(self.beta * members + 1e-9)  # 0.3 * 10 is below 3 in floating point

    def check(self, uploads: int) -> None:
        """Refuse a share that leaves nobody out."""
        super().check(uploads)
        least = int(np.ceil(1 / self.beta)) if self.beta else 0
        remedy = f"leaves none of {uploads} uploads out; take a larger share, or {least} uploads or more"
        require(not self.beta or self.trimmed(uploads) > 0, "beta", self.beta, remedy)

    def too_small(self, members: int) -> bool:
        """Return whether nobody is left out."""
        return self.beta > 0 and not self.trimmed(members)

    def values(self, ordered: np.ndarray) -> np.ndarray:
        """Return the mean of what is left, added from the smallest to the largest."""
        n = ordered.shape[1]
        k = self.trimmed(n)
        sums = np.zeros(len(ordered))
        for j in range(k, n - k):  # one by one: the bits must not depend on the width of a block
            sums += ordered[:, j]
        return np.asarray(sums / (n - 2 * k))


class DistanceRule(Rule):
    """A rule that weighs the members of a group by squared distances.

    Attributes:
        from_row: whether distances are those from the row that the members enter, instead of those between
            the members. Uploads that are added to a row (updates) are measured from 0.
    """

    from_row: ClassVar[bool] = False

    def applies(self, upload: str, statistics: Collection[str]) -> bool:
        """Return whether an upload stands for parameters: clients with other labels are no worse."""
        return upload not in statistics

    @abstractmethod
    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the members in the place of `weights`, float64 [n].

        Their sum is that of `weights`, or less where `from_row`: the rest stays with the row.

        Args:
            squares: squared distances between members, float64 [n, n], or from the row, float64 [n].
            weights: of the method, float64 [n], all above 0.
        """


@dataclass(frozen=True)
class _KrumRule(DistanceRule):
    """Uploads that are closest to their neighbours."""

    f: int = 1

    def __post_init__(self) -> None:
        require(self.f >= 0, "f", self.f, "take 0 or more attackers")

    @abstractmethod
    def count(self, members: int) -> int | None:
        """Return how many of `members` are selected; None for n - f."""

    def check(self, uploads: int) -> None:
        """Refuse more attackers than Krum withstands."""
        super().check(uploads)
        most = max((uploads - 3) // 2, 0)
        remedy = f"Krum withstands f among 2 f + 3 uploads, and a step has {uploads}; take at most {most}"
        require(self.f <= most, "f", self.f, remedy)
        count, remedy = self.count(uploads), f"a step has {uploads} uploads; take at most that"
        require(count is None or count <= uploads, "select", count, remedy)

    def too_small(self, members: int) -> bool:
        """Return whether there are fewer than 2 f + 3."""
        return members < 2 * self.f + 3

    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return equal weights of those that are selected."""
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
    n - f - 2 uploads that are nearest to it; equal scores go to the client of the lower number. Weights are
    ignored, as there. A group of fewer than 2 f + 3 takes the largest f that it allows; one or two members,
    their mean.

    Attributes:
        f: attackers that a group withstands.
    """

    def count(self, members: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True)
class MultiKrum(_KrumRule):
    """The mean of the uploads that are closest to their neighbours; scores and small groups as for `krum`.

    Attributes:
        f: attackers that a group withstands.
        select: uploads whose mean is taken; null takes n - f.
    """

    select: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.select is None or self.select >= 1, "select", self.select, "take 1 or more, or null")

    def count(self, members: int) -> int | None:
        """Return `select`."""
        return self.select


def total(weights: np.ndarray) -> np.ndarray:
    """Return the sums over the last axis; 1 where they are 1 but for rounding."""
    sums = weights.sum(-1)
    return np.where(np.isclose(sums, 1.0, rtol=0, atol=1e-9), 1.0, sums)


def selected(squares: np.ndarray, f: int, select: int | None) -> np.ndarray:
    """Return the members that Krum selects, by score.

    Args:
        squares: squared distances, float64 [n, n], n >= 3.
        f: attackers; fewer where n < 2 f + 3.
        select: number of members; None for n - f.
    """
    n = len(squares)
    f = min(f, (n - 3) // 2)
    apart = squares + np.diag(np.full(n, np.inf))
    nearest = np.sort(apart, axis=1)[:, : n - f - 2]
    scores = nearest.sum(1)
    count = n - f if select is None else min(select, n)
    return np.sort(np.argsort(scores, kind="stable")[:count])


@dataclass(frozen=True)
class NormBound(DistanceRule):
    """The method's weighted mean of updates that are cut to a norm.

    Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019, section 4: update u
    becomes u / max(1, |u| / bound). The update of an upload is its difference from the row that it enters; of
    uploads that are added to a row, the upload. A bounded share of harm, not none: take it against scaled
    updates.

    Attributes:
        bound: the largest norm; null takes the median norm of the group (weights ignored).
    """

    from_row: ClassVar[bool] = True
    bound: float | None = None

    def __post_init__(self) -> None:
        require(self.bound is None or self.bound > 0, "bound", self.bound, "take a norm above 0, or null")

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
    """The point with the least weighted sum of distances to the uploads.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning" (RFA), IEEE Transactions on
    Signal Processing 2022, algorithm 2: smoothed Weiszfeld steps from the weighted mean. The method's weights
    count. Every iterate is a mean of the uploads, so all steps need their distances only once. Bounded while
    less than half of the weight attacks.

    Attributes:
        steps: of Weiszfeld's algorithm.
        smoothing: distances below this count as this, in units of the weights of the model.
    """

    steps: int = 10
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "take 1 or more steps")
        require(self.smoothing > 0, "smoothing", self.smoothing, "take a distance above 0")

    def too_small(self, members: int) -> bool:
        """Return whether one attacker may have half of the weight."""
        return members < 3

    def weights(self, squares: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the last iterate."""
        alpha = weights / weights.sum()
        share = alpha  # of each upload in the iterate
        for _ in range(self.steps):
            along = squares @ share
            apart = np.sqrt(np.maximum(along - share @ along / 2, 0.0))  # |x_j - z|, z = sum_i share_i x_i
            beta = alpha / np.maximum(apart, self.smoothing)
            share = beta / beta.sum()
        return np.asarray(share * total(weights))


RULES: dict[str, type] = {
    "none": NoRule,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "norm_bound": NormBound,
    "geometric_median": GeometricMedian,
}


def name_of(rule: Rule | NoRule) -> str:
    """Return the name of a rule in a configuration."""
    return next((name for name, known in RULES.items() if type(rule) is known), type(rule).__name__)
