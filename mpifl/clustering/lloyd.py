"""K-means of several starts at once, decided as scikit-learn decides it, from inner products alone.

Lloyd's iterations need no coordinates. With weights a over the points (a mean of members, or one point) and
G the inner products, ||x_i - sum_j a_j x_j||^2 = G_ii - 2 (G a)_i + a'Ga. All starts share each product with
the matrix, which saves most of the time where points have as many coordinates as there are points.

Rounding differs from scikit-learn's. So each choice (a label, a candidate of k-means++, the end of a start,
the better of two starts) is made only where it is clear beyond the rounding of both; otherwise `Undecided` is
raised, and the caller asks scikit-learn. Also a cluster that loses all members is left to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

EPS = float(np.finfo(np.float64).eps)
TOLERANCE = 1e-4  # scikit-learn's: a start ends once its centres move less, in units of the mean variance


class Undecided(Exception):
    """Two choices are closer to each other than rounding, or a cluster is empty."""


class Partition(NamedTuple):
    """The best of all starts.

    Attributes:
        labels: int64 [n].
        members: the labels whose means are the centres, int64 [n]: those one iteration earlier, which differ
            where centres stopped to move before labels did.
    """

    labels: np.ndarray
    members: np.ndarray


class Starts(NamedTuple):
    """The first centres of S starts, sums of the points.

    Attributes:
        weights: of the points in each centre [S, k, n].
        products: inner products of each centre with all points [S, k, n].
    """

    weights: np.ndarray
    products: np.ndarray


class Space(ABC):
    """n points, seen through their inner products.

    Attributes:
        squares: squared length of each point [n].
        width: number of their coordinates.
        slack: bound of the error of a squared distance, ours and scikit-learn's together.
    """

    squares: np.ndarray
    width: int
    slack: float

    @abstractmethod
    def with_points(self, which: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c points with all."""

    @abstractmethod
    def with_sums(self, weights: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c weighted sums of the points with all, from weights [c, n]."""


class Points(Space):
    """Points with coordinates.

    Args:
        points: [n, d]; of mean zero, so that lengths are short and distances exact.
    """

    def __init__(self, points: np.ndarray) -> None:
        self.points, self.width = points, points.shape[1]
        self.squares = np.einsum("nd,nd->n", points, points)
        self.slack = 8 * EPS * sum(points.shape) * float(self.squares.max())

    def with_points(self, which: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c points with all."""
        return np.asarray(self.points[which] @ self.points.T)

    def with_sums(self, weights: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c weighted sums of the points with all."""
        return np.asarray((weights @ self.points) @ self.points.T)


class Gram(Space):
    """Points of mean zero whose inner products are known; scikit-learn would see n principal coordinates.

    Args:
        gram: inner products [n, n].
        largest: the largest number that they were computed from: their rounding is relative to it.
    """

    def __init__(self, gram: np.ndarray, largest: float) -> None:
        self.gram, self.width, self.squares = gram, len(gram), gram.diagonal()
        eigenvectors = 64 * float(np.maximum(self.squares, 0.0).sum())  # the error of coordinates
        self.slack = EPS * (eigenvectors + 16 * len(gram) * largest)

    def with_points(self, which: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c points with all."""
        return np.asarray(self.gram[which])

    def with_sums(self, weights: np.ndarray) -> np.ndarray:
        """Return the inner products [c, n] of c weighted sums of the points with all."""
        return np.asarray(weights @ self.gram)


def starts_at(space: Space, weights: np.ndarray) -> Starts:
    """Return the starts from weights [S, k, n]."""
    S, k, n = weights.shape
    return Starts(weights, space.with_sums(weights.reshape(S * k, n)).reshape(S, k, n))


def drawn_starts(space: Space, k: int, n_init: int, seed: int) -> Starts:
    """Return starts of k-means++, whose centres are points, from the numbers that scikit-learn draws.

    Greedy k-means++: of 2 + log k candidates, drawn in proportion to their squared distance from the nearest
    centre so far, the one is taken that leaves the least sum of such distances.

    Raises:
        Undecided: rounding decides who is drawn or taken.
    """
    n, trials, random = len(space.squares), 2 + int(np.log(k)), np.random.RandomState(seed)
    evenly, taken, drawn = np.ones(n) / n, np.empty((n_init, k), np.int64), np.empty((n_init, k - 1, trials))
    for s in range(n_init):
        taken[s, 0] = random.choice(n, p=evenly)
        drawn[s] = random.uniform(size=(k - 1, trials))
    products, every = np.empty((n_init, k, n)), np.arange(n_init)
    products[:, 0] = space.with_points(taken[:, 0])
    near = _apart(space, taken[:, 0], products[:, 0])  # [S, n]
    for c in range(1, k):
        at = drawn[:, c - 1] * near.sum(1, keepdims=True)  # [S, T]
        edges = near.cumsum(1)
        who = np.stack([np.searchsorted(e, a) for e, a in zip(edges, at, strict=True)]).clip(max=n - 1)
        below = np.where(who > 0, np.take_along_axis(edges, np.maximum(who - 1, 0), 1), -np.inf)
        room = np.minimum(at - below, np.take_along_axis(edges, who, 1) - at)
        _clear(room, n * space.slack)
        with_all = space.with_points(who.ravel()).reshape(n_init, trials, n)
        left = np.minimum(near[:, None], _apart(space, who, with_all))
        sums = left.sum(2)  # [S, T]
        best = sums.argmin(1)
        taken[:, c], products[:, c] = who[every, best], with_all[every, best]
        others = np.where(who == taken[:, c, None], np.inf, sums)
        _clear(others - sums[every, best, None], n * space.slack)
        near = left[every, best]
    return Starts(np.asarray(np.arange(n) == taken[:, :, None], np.float64), products)


def _apart(space: Space, which: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return the squared distances [..., n] of some points [...] from all, from their inner products."""
    apart = space.squares[which][..., None] + space.squares - 2 * products
    return np.asarray(np.maximum(apart, 0.0))


def _clear(gaps: np.ndarray, slack: float) -> None:
    """Raise `Undecided` unless all gaps are wider than rounding."""
    if not (gaps > slack).all():  # also NaN is not
        raise Undecided


def lloyd(space: Space, starts: Starts, max_iter: int) -> Partition:
    """Return the partition of least inertia, the first of equals.

    A start ends once labels stay, its centres move by no more than the tolerance, or after `max_iter`
    iterations; its labels then are those of its last centres.

    Args:
        space: the points.
        starts: the first centres.
        max_iter: most iterations of a start.

    Raises:
        Undecided: rounding decides about a label, the end of a start, or the best one; or a cluster is empty.
    """
    limit = TOLERANCE * float(space.squares.sum()) / len(space.squares) / space.width
    weights, products = starts
    before: np.ndarray | None = None  # labels [S, n] of the iteration before
    was, last = np.zeros(weights.shape[:2]), products  # squared lengths [S, k] of its centres, their products
    running = np.arange(len(weights))
    ended: dict[int, tuple[float, Partition]] = {}
    for iteration in range(max_iter + 1):
        S, k, n = weights.shape
        lengths = np.einsum("skn,skn->sk", weights, products)
        apart = lengths[:, :, None] - 2 * products  # squared distances less the points' squared lengths
        labels = apart.argmin(1)
        if k > 1:
            first, second = np.partition(apart, 1, axis=1)[:, :2].swapaxes(0, 1)
            _clear(second - first, space.slack)
        going = np.ones(S, bool)
        if before is not None:
            shift = (lengths + was - 2 * np.einsum("skn,skn->sk", weights, last)).sum(1)
            going = (labels != before).any(1) & (iteration < max_iter)
            _clear(np.abs(shift - limit)[going], k * space.slack)
            going &= shift > limit
            inertia = space.squares.sum() + apart.min(1).sum(1)
            for s in np.flatnonzero(~going):
                ended[int(running[s])] = float(inertia[s]), Partition(labels[s], before[s])
        if not going.any():
            break
        running, before, was, last = running[going], labels[going], lengths[going], products[going]
        member = before[:, None] == np.arange(k)[:, None]  # [S, k, n]
        sizes = member.sum(2, keepdims=True)
        if not sizes.all():
            raise Undecided
        weights, products = starts_at(space, member / sizes)
    return _best([ended[s] for s in range(len(starts.weights))], n * space.slack)


def _best(ended: list[tuple[float, Partition]], slack: float) -> Partition:
    """Return the partition of least inertia, the first of equals."""
    least, best = ended[0]
    for inertia, found in ended[1:]:
        pairs = np.bincount(found.labels * len(best.labels) + best.labels)
        if np.count_nonzero(pairs) == np.count_nonzero(np.bincount(found.labels)):  # the same clusters
            continue
        _clear(np.array(abs(inertia - least)), slack)
        if inertia < least:
            least, best = inertia, found
    return best
