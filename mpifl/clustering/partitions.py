"""Clustering: agglomerative, k-means, spectral; labels of a partition; projection on the simplex.

Labels are int64 [n], numbered by first appearance unless said otherwise. The same input gives the same output
on any rank: seeds are given, ties go to the first, and sums run on one thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpifl.core.errors import require

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

FAR = 2.0**1022  # an unknown distance; a sum of two is finite, the mean with known ones far beyond these
EPS = 2.0**-52  # of float64, without NumPy: `mpifl list` imports this
ITERATIONS = 300  # most iterations of k-means
MANY = 256  # points and columns beyond which k-means runs along principal axes
AXES = 4  # principal axes beyond k; with 4 the sum of squares is as low as with all columns
GRAIN = 2.0**-40  # of principal coordinates, in units of the largest
TOLERANCE = 1e-4  # scikit-learn's: k-means ends once its centres move less, in units of the mean variance
LINKAGES = ("single", "complete", "average", "ward")


class Undecided(Exception):
    """Rounding would decide: computed in another way, the choice may be another one."""


class Clusters(NamedTuple):
    """A clustering with centres.

    Attributes:
        labels: int64 [n].
        centres: [k, d].
    """

    labels: np.ndarray
    centres: np.ndarray


class Choice(NamedTuple):
    """A clustering whose number of clusters was chosen by a score.

    Attributes:
        labels: int64 [n].
        centres: [k, d].
        k: the number that was chosen.
        scores: the score of every number tried.
    """

    labels: np.ndarray
    centres: np.ndarray
    k: int
    scores: dict[int, float]


def canonical(labels: np.ndarray) -> np.ndarray:
    """Return `labels` [n] renumbered 0, 1, ... by first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def last_uploads(clients: np.ndarray) -> np.ndarray:
    """Return the index of the last upload of each client, ascending.

    Args:
        clients: client of each upload of a step, int64 [m]; in a buffer a client may occur more than once.
    """
    _, from_the_end = np.unique(clients[::-1], return_index=True)
    return np.sort(len(clients) - 1 - from_the_end)


def match_labels(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return `new` [n] renumbered so that as many entries as possible agree with `old` [n]. CFL-GP.

    The assignment is optimal (Hungarian method); groups without a partner take the smallest free numbers.
    """
    from scipy.optimize import linear_sum_assignment

    ids, a = np.unique(new, return_inverse=True)
    names, b = np.unique(old, return_inverse=True)
    table = np.zeros((len(ids), len(names)), np.int64)  # members of new group a and old group b
    np.add.at(table, (a, b), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    partner = {int(r): int(names[c]) for r, c in zip(rows, columns, strict=True) if table[r, c] > 0}
    taken = set(partner.values())
    free = (i for i in range(2 * len(ids)) if i not in taken)
    renamed = [partner[i] if i in partner else next(free) for i in range(len(ids))]
    return np.asarray(renamed, np.int64)[a]


def neighbourhoods(adjacency: np.ndarray) -> np.ndarray:
    """Return labels [n]: clients with identical rows of `adjacency` [n, n] share one. EMD-CFL, step 4."""
    found: dict[bytes, int] = {}  # row -> label
    rows = np.packbits(np.asarray(adjacency, bool), axis=1)
    return np.array([found.setdefault(row.tobytes(), len(found)) for row in rows], np.int64)


def quantile_groups(values: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the group 0 .. C-1 of each value [n]: P_{i/C} < value <= P_{(i+1)/C}. FedCUAU, stage 1.

    P_q is the empirical quantile: the least value at or below which lies a share q of all. Groups are
    numbered by value, not by appearance; ties may leave a group empty.
    """
    n = len(values)
    require(1 <= num_groups <= n, "groups", num_groups, f"there are {n} clients to group")
    last = np.arange(1, num_groups) * n  # in units of 1/C: integers, so that no share is rounded up
    edges = np.sort(values)[-(-last // num_groups) - 1]
    return np.searchsorted(edges, values, side="left").astype(np.int64)


def agglomerative(
    distances: np.ndarray,
    linkage: str = "complete",
    *,
    n_clusters: int | None = None,
    threshold: float | None = None,
) -> np.ndarray:
    """Return labels [n] of bottom-up clustering, cut at a number of clusters or at a height.

    Args:
        distances: [n, n], symmetric; Euclidean for Ward's linkage. Only the upper triangle is read.
        linkage: `single`, `complete`, `average` (mean over pairs) or `ward`.
        n_clusters: exactly this many clusters; None where `threshold` is given.
        threshold: clusters merge while their linkage distance is below it; None where `n_clusters` is given.
    """
    require(linkage in LINKAGES, "linkage", linkage, f"give one of {', '.join(LINKAGES)}")
    assert (n_clusters is None) != (threshold is None), "give n_clusters or threshold, not both"
    n = len(distances)
    if n_clusters is not None:
        require(1 <= n_clusters <= n, "n_clusters", n_clusters, f"there are {n} clients to group")
    if n == 1:
        return np.zeros(1, np.int64)
    tree = _tree(np.asarray(distances, np.float64), linkage)
    merges = n - n_clusters if n_clusters is not None else int((tree[:, 2] < threshold).sum())
    return _cut(tree[:merges], n)


def _tree(distances: np.ndarray, method: str) -> np.ndarray:
    """Return SciPy's merges [n - 1, 4] of n nodes by their distances [n, n]: two nodes, height, size."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    return np.asarray(linkage(squareform(distances, checks=False), method))


def _cut(tree: np.ndarray, n: int) -> np.ndarray:
    """Return labels [n] after merges [k, 4] of nodes, numbered as SciPy does: merge i makes node n + i."""
    merges, label = tree[:, :2].astype(np.int64), np.arange(n + len(tree))
    for i in reversed(range(len(merges))):
        label[merges[i]] = label[n + i]  # both children belong where their parent belongs
    return canonical(label[:n])


def merge_closest(distances: np.ndarray, threshold: float, linkage: str = "average") -> np.ndarray:
    """Return labels [n]: merge the closest pair while its distance is at most `threshold`. PACFL.

    Args:
        distances: [n, n], symmetric.
        threshold: in the units of `distances` (degrees for PACFL).
        linkage: distance of a merged cluster to another: `average`, the plain mean of the two rows whatever
            their sizes (WPGMA), `maximum` or `minimum` of the two.
    """
    methods = {"average": "weighted", "maximum": "complete", "minimum": "single"}  # SciPy's names
    require(linkage in methods, "linkage", linkage, f"give one of {', '.join(methods)}")
    d = np.asarray(distances, np.float64)
    near = d <= min(threshold, float(np.finfo(np.float64).max))  # an unknown distance merges nobody
    np.fill_diagonal(near, False)
    labels = _connected(near)  # two clusters are never nearer than the nearest of their members
    for first in np.unique(labels) if linkage != "minimum" else ():
        group = np.flatnonzero(labels == first)
        if np.count_nonzero(near[group]) < len(group) * (len(group) - 1):  # else all of them merge
            inside = d[group][:, group]
            known = np.isfinite(inside)
            tree = _tree(np.where(known, inside, FAR), methods[linkage])
            merges = int((tree[:, 2] <= min(threshold, inside[known].max())).sum())
            found = _cut(tree[:merges], len(group))
            labels[group] = group[np.unique(found, return_index=True)[1]][found]  # the first member of each
    return canonical(labels)


def _connected(near: np.ndarray) -> np.ndarray:
    """Return the first member [n] of the connected component of each node, from `near`, symmetric [n, n]."""
    label = np.where(near.any(1), -1, np.arange(len(near)))
    for first in np.flatnonzero(label < 0).tolist():
        if label[first] >= 0:
            continue
        reached = np.array([first])
        while len(reached):
            label[reached] = first
            reached = np.flatnonzero(near[reached].any(0) & (label < 0))
    return label


def bipartition(similarity: np.ndarray, linkage: str = "complete") -> np.ndarray:
    """Return labels 0 and 1 [n] of the two groups least similar to each other. CFL's split.

    Args:
        similarity: [n, n] cosines of updates.
        linkage: `complete` [code], or `single`, which minimises the largest similarity across [paper].
    """
    require(linkage in ("complete", "single"), "linkage", linkage, "give complete or single")
    return agglomerative(1.0 - similarity, linkage, n_clusters=2)


@cache
def _threads() -> ThreadpoolController:
    """Return what limits the threads of scikit-learn; it looks through all libraries once."""
    import sklearn.cluster  # noqa: F401  (loads them)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def kmeans(
    points: np.ndarray,
    k: int,
    *,
    seed: int = 0,
    n_init: int = 10,
    max_iter: int = ITERATIONS,
    init: np.ndarray | None = None,
) -> Clusters:
    """Return k-means of `points` [n, d]: Lloyd's iterations from k-means++ or from given centres.

    More than 256 points with more than 256 columns are clustered, without `init` and for k up to 252, along
    their first k + 4 principal axes, and the centres are the means in all columns: the centres of the best
    clusters span the first k - 1 axes approximately (Ding and He, "K-means Clustering via Principal Component
    Analysis", ICML 2004). Of 424 drawn weights of UCFL (300 to 1000 users, k from 2 to 8), two had a sum of
    squares more than 1 % above that of all columns, at most 1.6 %; with another seed 19 had.

    Args:
        points: [n, d].
        k: number of clusters, at most n.
        seed: seed of k-means++, below 2**32.
        n_init: number of starts, of which the best is kept (1 with given centres).
        max_iter: most iterations of one start.
        init: centres [k, d] to start from. Then label j belongs to the j-th of them; otherwise labels are
            numbered by first appearance.
    """
    points = np.ascontiguousarray(points, np.float64)
    require(1 <= k <= len(points), "k", k, f"there are {len(points)} points to group")
    if init is None and k + AXES <= MANY < min(points.shape):
        return _kmeans_along_axes(points, k, seed=seed, n_init=n_init, max_iter=max_iter)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    start = (
        {"init": "k-means++", "n_init": n_init}
        if init is None
        else {"init": np.ascontiguousarray(init, np.float64), "n_init": 1}
    )
    model = KMeans(k, **start, max_iter=max_iter, random_state=seed, algorithm="lloyd")
    with _threads().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than k are allowed
        model.fit(points)
    labels, centres = model.labels_.astype(np.int64), model.cluster_centers_
    if init is not None:
        return Clusters(labels, centres)
    used = labels[np.sort(np.unique(labels, return_index=True)[1])]
    empty = np.setdiff1d(np.arange(k), used)
    return Clusters(canonical(labels), centres[np.concatenate([used, empty])])


def _kmeans_along_axes(points: np.ndarray, k: int, *, seed: int, n_init: int, max_iter: int) -> Clusters:
    """Return k-means of the first principal coordinates of `points` [n, d], with the means in all columns."""
    from sklearn.utils.extmath import randomized_svd

    mean, axes = points.mean(0), k + AXES
    with _threads().limit(limits=1):
        left, lengths, _ = randomized_svd(
            points - mean, axes, n_oversamples=AXES, n_iter=2, random_state=seed
        )
        unit = GRAIN * max(float(lengths[0]), float(np.abs(mean).max())) or 1.0
        coordinates = np.rint(left * lengths / unit)  # of equal points they differ by rounding alone
        labels = kmeans(coordinates, k, seed=seed, n_init=n_init, max_iter=max_iter).labels
        members = labels == np.arange(k)[:, None]
        members |= ~members.any(1, keepdims=True)  # a cluster without points is at the mean of all
        return Clusters(labels, members / members.sum(1, keepdims=True) @ points)


def kmeans_of_gram(
    gram: np.ndarray, k: int, *, groups: np.ndarray | None = None, n_init: int = 10
) -> np.ndarray:
    """Return the labels [n] that `kmeans` gives to all principal coordinates of n vectors about their mean.

    Args:
        gram: inner products of the vectors [n, n].
        k: number of clusters, at most n.
        groups: whose means are the centres to start from, bool [k, n]. Then label j belongs to the j-th of
            them; otherwise labels are numbered by first appearance.
        n_init: number of starts without `groups`.
    """
    centred = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
    if groups is not None:
        with suppress(Undecided):  # twenty times faster than by the eigenvectors of a thousand
            return _lloyd(centred, groups, float(np.abs(gram.diagonal()).max()))
    points = principal_coordinates(centred, len(gram))
    if groups is None:
        return kmeans(points, k, n_init=n_init).labels
    return kmeans(points, k, init=np.stack([points[group].mean(0) for group in groups])).labels


def _lloyd(gram: np.ndarray, groups: np.ndarray, largest: float) -> np.ndarray:
    """Return the labels [n] of Lloyd's iterations from the means of groups, with inner products G alone.

    The squared distance of point i from the mean of a set M is G_ii less twice the mean of G_ij over j in M,
    plus the mean of G_jl over j and l in M. Iterations end where scikit-learn's do.

    Args:
        gram: inner products of points about their mean [n, n].
        groups: bool [k, n].
        largest: the largest number that they were computed from: their rounding is relative to it.

    Raises:
        Undecided: two choices are closer than the rounding of both ways to compute, or a cluster is empty.
    """
    k, n = groups.shape
    spread = float(np.maximum(gram.diagonal(), 0.0).sum())
    slack = EPS * (64 * spread + 16 * n * largest)  # of a squared distance, in coordinates and in products
    limit = TOLERANCE * float(gram.trace()) / n**2
    before, was, last = np.full(n, -1), np.zeros(k), np.zeros((k, n))
    for iteration in range(ITERATIONS + 1):
        sizes = groups.sum(1, keepdims=True)
        _clear(sizes)
        weights = groups / sizes
        products = weights @ gram  # of centres with points [k, n]
        lengths = np.einsum("kn,kn->k", weights, products)
        apart = lengths[:, None] - 2 * products  # squared distances less the points' squared lengths
        labels = apart.argmin(0)
        if k > 1:
            first, second = np.partition(apart, 1, axis=0)[:2]
            _clear(second - first, slack)
        if iteration and (iteration == ITERATIONS or (labels == before).all()):
            break
        if iteration:
            shift = float((lengths + was - 2 * np.einsum("kn,kn->k", weights, last)).sum())  # of the centres
            _clear(np.array(abs(shift - limit)), k * slack)
            if shift <= limit:
                break
        before, was, last, groups = labels, lengths, products, labels == np.arange(k)[:, None]
    return np.asarray(labels)


def _clear(gaps: np.ndarray, slack: float = 0.0) -> None:
    """Raise `Undecided` unless all gaps are wider than rounding."""
    if not (gaps > slack).all():  # also NaN is not
        raise Undecided


def silhouette(points: np.ndarray, labels: np.ndarray, metric: str = "euclidean") -> float:
    """Return the mean silhouette, in [-1, 1]; 0 for n clusters, for one cluster, and for equal points.

    Args:
        points: [n, d], or distances [n, n].
        labels: [n].
        metric: `euclidean`, or `precomputed` for distances.
    """
    groups = len(np.unique(labels))
    if not 2 <= groups < len(labels):
        return 0.0
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(np.asarray(points, np.float64), labels, metric=metric))


def kmeans_by_silhouette(
    points: np.ndarray,
    ks: Iterable[int] | None = None,
    *,
    seed: int = 1,
    n_init: int = 10,
    worth: Callable[[int, float], float] | None = None,
) -> Choice:
    """Return k-means with the k of largest mean silhouette, the smallest of equals. UCFL's number of streams.

    Args:
        points: [n, d].
        ks: numbers to try, up to the number of distinct points; None for 1 .. n. If none is left, all points
            form one cluster. One cluster and n have a silhouette of 0.
        seed: seed of k-means++.
        n_init: number of starts for each k.
        worth: c(k, s_k), which the chosen k maximises; None for s_k itself.
    """
    distinct = len(np.unique(points, axis=0))
    known = range(1, len(points) + 1) if ks is None else ks
    tried = [k for k in known if 1 <= k <= distinct]
    runs = {k: kmeans(points, k, seed=seed, n_init=n_init) for k in tried}
    scores = {k: silhouette(points, run.labels) for k, run in runs.items()}
    if not scores:
        return Choice(*kmeans(points, 1, seed=seed, n_init=1), 1, {})
    values = scores if worth is None else {k: worth(k, s) for k, s in scores.items()}
    best = max(values, key=lambda k: (values[k], -k))
    return Choice(*runs[best], best, scores)


def principal_coordinates(gram: np.ndarray, rank: int) -> np.ndarray:
    """Return the coordinates [n, rank] of n vectors along their `rank` first left singular vectors.

    With G = P S Q' [d, n] and gram = G'G = Q S^2 Q', these are the columns of P_rank' G = S Q', one client a
    row. The sign of each coordinate is such that its largest entry is positive.
    """
    values, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
    top = np.argsort(-values, kind="stable")[:rank]
    out = vectors[:, top] * np.sqrt(np.maximum(values[top], 0.0))
    signs = np.sign(out[np.argmax(np.abs(out), axis=0), np.arange(out.shape[1])])
    return np.asarray(out * np.where(signs == 0, 1.0, signs))


def largest_gap(gram: np.ndarray, least: int = 3) -> int:
    """Return the number of singular values before the largest gap, at least `least`. CFL-GP."""
    values = np.sqrt(np.maximum(np.sort(np.linalg.eigvalsh(np.asarray(gram, np.float64)))[::-1], 0.0))
    gaps = values[:-1] - values[1:]
    return min(max(int(np.argmax(gaps)) + 1 if len(gaps) else 1, least), len(values))


def spectral(gram: np.ndarray, k: int, *, seed: int = 42, n_init: int = 10) -> np.ndarray:
    """Return labels [n]: k-means on the k first principal coordinates of the gradient profiles. CFL-GP.

    Args:
        gram: inner products [n, n] of the clients' profiles.
        k: number of clusters.
        seed: seed of k-means++.
        n_init: number of starts.
    """
    return kmeans(principal_coordinates(gram, k), k, seed=seed, n_init=n_init).labels


def spectral_by_silhouette(gram: np.ndarray, k_max: int, *, seed: int = 42, n_init: int = 10) -> Choice:
    """Return spectral clustering with the k in 2 .. `k_max` of largest mean silhouette. CFL-GP, unknown K."""
    points = principal_coordinates(gram, largest_gap(gram))
    return kmeans_by_silhouette(points, range(2, min(k_max, len(points) - 1) + 1), seed=seed, n_init=n_init)


def simplex_projection(v: np.ndarray) -> np.ndarray:
    """Return the point nearest to `v` [..., n] with no negative entry and sum 1, row by row (sort method).

    x = max(v - t, 0), t = max over r of (sum of the r largest - 1) / r. Held, Wolfe and Crowder, 1974.
    """
    v = np.asarray(v, np.float64)
    largest = -np.sort(-v, axis=-1)
    t = ((np.cumsum(largest, axis=-1) - 1.0) / np.arange(1, v.shape[-1] + 1)).max(axis=-1, keepdims=True)
    return np.asarray(np.maximum(v - t, 0.0))
