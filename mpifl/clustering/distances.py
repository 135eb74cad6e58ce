"""Distances between clients: of updates, of sets of points, of subspaces, of histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, combinations
from typing import Any, Generic, TypeVar

import numpy as np

from mpifl.core.errors import require
from mpifl.core.gram import cosine_matrix as cosine_matrix  # for methods, which find all distances here
from mpifl.core.gram import squared_distances as squared_distances
from mpifl.core.imports import hidden

T = TypeVar("T")
QUANTUM = 2.0**-26  # of numbers in columns of length 1, see `rounded_columns`
SINKHORN_START = 0.03  # entropic penalty of the potentials that an assignment starts from, in largest costs
SINKHORN_STEPS = 10  # that find these potentials
FEW = 64  # rows of square costs, below which an assignment starts from nothing
BLOCK = 32  # clients whose distances are measured together


def madc(cosines: np.ndarray) -> np.ndarray:
    """Return the mean of absolute differences of pairwise cosines [n, n]. FedGroup.

    d_ij = mean over k != i, j of |S_ik - S_jk|; zero where there is no such k.
    """
    n = len(cosines)
    gaps = np.abs(cosines[:, None, :] - cosines[None, :, :])  # [n, n, n]
    others = ~(np.eye(n, dtype=bool)[:, None, :] | np.eye(n, dtype=bool)[None, :, :])
    return np.asarray((gaps * others).sum(2) / max(n - 2, 1) * (1 - np.eye(n)))


def euclidean_matrix(rows: np.ndarray) -> np.ndarray:
    """Return the Euclidean distances [n, n] between `rows` [n, d], from their differences."""
    from scipy.spatial.distance import pdist, squareform

    return np.asarray(squareform(pdist(np.asarray(rows, np.float64))))


def cost_matrix(x: np.ndarray, y: np.ndarray, metric: str = "cosine") -> np.ndarray:
    """Return the distances [n, m] between points [n, d] and [m, d].

    Args:
        x: points [n, d].
        y: points [m, d].
        metric: `cosine`, 1 - cos in [0, 2], a zero vector having cosine 0 with everything; or `euclidean`.
    """
    require(metric in ("cosine", "euclidean"), "metric", metric, "give cosine or euclidean")
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if metric == "euclidean":
        from scipy.spatial.distance import cdist

        return np.asarray(cdist(x, y))
    cosines = _unit(x) @ _unit(y).T
    np.clip(cosines, -1.0, 1.0, out=cosines)
    return np.asarray(np.subtract(1.0, cosines, out=cosines))


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return `rows` [n, d] scaled to length 1; zero rows stay zero."""
    norms = np.sqrt((rows * rows).sum(1, keepdims=True))  # as np.linalg.norm, in half the time for few rows
    norms[norms == 0.0] = 1.0
    return np.asarray(rows / norms)


def emd(
    x: np.ndarray, y: np.ndarray, metric: str = "cosine", solver: str = "exact", reg: float = 0.1
) -> float:
    """Return the earth mover's distance of two samples with uniform masses. EMD-CFL, sec. 3.

    min over G >= 0 with G1 = 1/n, G'1 = 1/m of <G, D>, D the distances between the points.

    Args:
        x: samples [n, d].
        y: samples [m, d].
        metric: ground distance, `cosine` or `euclidean`.
        solver: `exact`, or `sinkhorn`, the cost <G, D> of the plan with an entropic penalty.
        reg: weight of the entropic penalty, in units of D.
    """
    require(solver in ("exact", "sinkhorn"), "solver", solver, "give exact or sinkhorn")
    require(len(x) > 0 and len(y) > 0, "samples", (len(x), len(y)), "each side needs at least one sample")
    costs = cost_matrix(x, y, metric)
    return _sinkhorn(costs, reg) if solver == "sinkhorn" else _exact(costs)


@cache
def _optimal_transport() -> Any:
    """Return POT, imported without scikit-learn: 75 MB less in every rank, and POT can do without."""
    with hidden("sklearn"):
        import ot
    return ot


def _exact(costs: np.ndarray) -> float:
    """Return the optimum of the transport problem with uniform masses."""
    if costs.shape[0] == costs.shape[1]:  # some optimal plan is a permutation (Birkhoff)
        shifted = _near_optimal(costs) if len(costs) >= FEW else None
        return _assignment_cost(costs, shifted) / len(costs)
    ot = _optimal_transport()
    a, b = (np.full(size, 1.0 / size) for size in costs.shape)
    # the masses are those of two distributions, and the potentials are not read
    return float(ot.emd2(a, b, costs, numItermax=10_000_000, check_marginals=False, center_dual=False))


def _sinkhorn(costs: np.ndarray, reg: float) -> float:
    """Return the transport cost of the plan with entropic penalty `reg`."""
    ot = _optimal_transport()
    require(reg > 0, "reg", reg, "the entropic penalty is positive; solver exact has none")
    a, b = (np.full(size, 1.0 / size) for size in costs.shape)
    # exp(-cost / reg) must not underflow; the logarithmic form is about fifteen times slower
    method = "sinkhorn" if costs.max() < 500 * reg else "sinkhorn_log"
    return float(ot.sinkhorn2(a, b, costs, reg, method=method))


def _assignment_cost(costs: np.ndarray, shifted: np.ndarray | None = None) -> float:
    """Return the least cost of a matching of the shorter side of `costs` [a, b] into the longer.

    Args:
        costs: [a, b].
        shifted: the same square costs with numbers subtracted from rows and columns, if the matching is
            to be found in these.
    """
    from scipy.optimize import linear_sum_assignment

    return float(costs[linear_sum_assignment(costs if shifted is None else shifted)].sum())


def _near_optimal(costs: np.ndarray) -> np.ndarray:
    """Return square costs [n, n] less potentials of rows and columns: the same matchings are the best.

    The potentials are those of a few steps of Sinkhorn's algorithm. They are close to the dual solution, from
    which the search for a matching takes a third of the time (n of about 200); for few rows, they take longer
    than the search.
    """
    shifted: np.ndarray = costs - costs.min(1, keepdims=True)
    shifted -= shifted.min(0)
    reg = SINKHORN_START * float(shifted.max())
    if reg == 0.0:
        return shifted
    kernel = shifted.astype(np.float32)
    kernel *= np.float32(-1.0 / reg)
    np.exp(kernel, out=kernel)  # a 1 in every column
    u: np.ndarray = np.ones(len(costs), np.float32)
    for _ in range(SINKHORN_STEPS):
        v = 1.0 / (u @ kernel)
        u = 1.0 / (kernel @ v)
    shifted -= reg * np.log(u)[:, None]
    shifted -= reg * np.log(v)
    return shifted


def matching_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return FLT's distance of two sets of centroids [a, d], [b, d]: matched at least cost. FLT, code.

    With a <= b: min over one-to-one maps of sqrt(sum of squared distances), divided by a.
    """
    squares = cost_matrix(x, y, "euclidean") ** 2
    return float(np.sqrt(_assignment_cost(squares))) / int(min(squares.shape))


def closest_pair(x: np.ndarray, y: np.ndarray) -> float:
    """Return the least Euclidean distance between points of [a, d] and of [b, d]. FLT, paper."""
    return float(cost_matrix(x, y, "euclidean").min())


def pairwise(items: Sequence[np.ndarray], distance: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
    """Return the distances [n, n] between `items`, zeros on the diagonal."""
    out = np.zeros((len(items), len(items)))
    for i, j in combinations(range(len(items)), 2):
        out[i, j] = out[j, i] = distance(items[i], items[j])
    return out


class KeptDistances(Generic[T]):
    """Distances between clients, of which only those of clients with new statistics are measured again.

    They are those of measuring all of them again, bit for bit. They stay in the memory of this process and
    are no part of the state: a resumed run measures all of them once more. The matrix of N clients takes
    8 N^2 bytes: 8 MB for 1,000 clients, 800 MB for 10,000; the items come on top.

    Args:
        measure: items of some clients [m] and of others [n] -> their distances [m, n]. The distance of two
            clients depends on their two items alone, and not on their order.
    """

    def __init__(self, measure: Callable[[Sequence[T], Sequence[T]], np.ndarray]) -> None:
        self.measure = measure
        self._statistics: np.ndarray | None = None  # those that the distances belong to
        self._items: dict[int, T] = {}
        self._apart = np.zeros((0, 0))

    def among(
        self,
        clients: np.ndarray,
        statistics: np.ndarray,
        item: Callable[[int], T],
        before: np.ndarray | None = None,
        new: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the distances [n, n] of clients, zeros on the diagonal.

        Args:
            clients: numbers of the clients, int64 [n].
            statistics: statistics of all clients [N, ...].
            item: number of a client -> what is measured of its statistics.
            before: the array of the last call, from which `statistics` differs in the clients `new` only;
                if it is another one, all distances are measured.
            new: numbers of these clients.
        """
        if before is None or new is None or before is not self._statistics:
            self._items, self._apart = {}, np.zeros((len(statistics), len(statistics)))
            new = clients
        self._statistics, again = None, {*new.tolist()}
        measured = [k for k in clients.tolist() if k in again or k not in self._items]
        self._items |= {k: item(k) for k in measured}
        known = [*(self._items.keys() - {*measured})]
        for lo in range(0, len(measured), BLOCK):
            some, others = measured[lo : lo + BLOCK], [*known, *measured[lo:]]
            found = self.measure([self._items[k] for k in some], [self._items[k] for k in others])
            self._apart[np.ix_(some, others)] = found
            self._apart[np.ix_(others, some)] = found.T
        np.fill_diagonal(self._apart, 0.0)
        self._statistics = statistics
        return submatrix(self._apart, clients)


def submatrix(apart: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Return a copy of the distances [n, n] between some clients, from those between all [N, N]."""
    if np.array_equal(clients, np.arange(len(apart))):
        return apart.copy()  # several times faster
    return np.asarray(apart[np.ix_(clients, clients)])


def rounded_columns(u: np.ndarray) -> np.ndarray:
    """Return the columns of a basis [D, p] as rows [p, D], float64, rounded to multiples of 2^-26.

    Products of columns of length 1 are then sums of multiples of 2^-52 below 2, which float64 adds without
    an error: a cosine is the same whatever is multiplied with it at once, and by whichever library. Entries
    move by less than the rounding of float32 columns.
    """
    return np.rint(np.asarray(u.T, np.float64) / QUANTUM) * QUANTUM


def column_angles(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the least angles [m, n], in degrees, between a column of one basis and one of another.

    Args:
        some: m bases, each with its columns as rows [p, D], see `rounded_columns`.
        others: n bases.
    """
    cosines, left, starts = np.empty((len(some), len(others))), np.concatenate(some), _starts(some)
    blocks = [others[lo : lo + BLOCK] for lo in range(0, len(others), BLOCK)]
    heights = [sum(map(len, block)) for block in blocks]
    columns = np.empty((max(heights), left.shape[1]))  # of one block, small enough for the processor's cache
    for lo, block, height in zip(range(0, len(others), BLOCK), blocks, heights, strict=True):
        products = left @ np.concatenate(block, out=columns[:height]).T
        most = np.maximum.reduceat(products, starts, axis=0)
        cosines[:, lo : lo + BLOCK] = np.maximum.reduceat(most, _starts(block), axis=1)
    return np.asarray(np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0))))


def _starts(rows: Sequence[np.ndarray]) -> list[int]:
    """Return where each of some arrays begins when they are concatenated."""
    return [0, *accumulate(len(each) for each in rows[:-1])]


def principal_angles(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the principal angles, in degrees and ascending, of the spans of columns [D, p] and [D, q]."""
    from scipy.linalg import subspace_angles

    return np.asarray(np.degrees(subspace_angles(np.asarray(u, np.float64), np.asarray(v, np.float64)))[::-1])


def subspace_angle(u: np.ndarray, v: np.ndarray, kind: str = "columns") -> float:
    """Return PACFL's distance, in degrees, of two bases [D, p] and [D, q] with columns of length 1.

    Args:
        u: basis [D, p]; stacked bases of several classes need not be orthogonal to one another.
        v: basis [D, q].
        kind: `columns` [code]: least angle between a column of `u` and one of `v`, signs as they are;
            `smallest` [paper]: smallest principal angle; `sum` [paper]: sum of the principal angles. The last
            two are taken between the spans of the columns.
    """
    require(kind in ("columns", "smallest", "sum"), "angle", kind, "give columns, smallest or sum")
    if kind == "columns":
        return float(column_angles([rounded_columns(u)], [rounded_columns(v)])[0, 0])
    angles = principal_angles(u, v)
    return float(angles[0] if kind == "smallest" else angles.sum())


def wasserstein1(p: np.ndarray, q: np.ndarray) -> float:
    """Return the Wasserstein-1 distance, in bins, of two histograms of any mass and length. FlexCFL."""
    require(p.sum() > 0 and q.sum() > 0, "histogram", (p, q), "a histogram needs at least one count")
    p, q = (np.pad(h, (0, max(len(p), len(q)) - len(h))) for h in (p, q))
    return float(np.abs(np.cumsum(p / p.sum() - q / q.sum())).sum())
