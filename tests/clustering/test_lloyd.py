"""K-means from inner products: by hand, and beside scikit-learn, whose decisions it takes or leaves to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpifl.clustering import lloyd as L
from mpifl.clustering import partitions as G

LINE = np.array([0.0, 1.0, 5.0, 7.0, 12.0])


def gram_of(points: np.ndarray) -> np.ndarray:
    """Return the products of points about their mean."""
    x = points - points.mean(0)
    return np.asarray(x @ x.T)


def from_points(which: list[int], points: np.ndarray = LINE[:, None], max_iter: int = 300) -> L.Partition:
    """Return the partition of points with starts at some of them."""
    space = L.Gram(gram_of(points), 100.0)
    return L.lloyd(space, L.starts_at(space, np.eye(len(points))[which][None]), max_iter)


def test_iterations_by_hand():
    """Centres 0 and 1: {0}, {1, 5, 7, 12}; 0 and 6.25: {0, 1}, {5, 7, 12}; 0.5 and 8: as before."""
    assert_array_equal(from_points([0, 1]).labels, [0, 0, 1, 1, 1])
    assert_array_equal(from_points([1, 0]).labels, [1, 1, 0, 0, 0])


def test_labels_are_those_of_the_last_centres_whose_members_are_told():
    """One iteration: {0}, {1, 5, 7, 12} have the centres 0 and 6.25; 1 is nearer to the first."""
    found = from_points([0, 1], max_iter=1)
    assert_array_equal(found.members, [0, 1, 1, 1, 1])
    assert_array_equal(found.labels, [0, 0, 1, 1, 1])


def test_the_start_of_least_inertia_wins_and_the_first_of_equals():
    """0, 1 | 10, 11 | 20, 21 from 0, 1 and 10 ends with 0 | 1 | the rest; from 0, 10, 20 with the pairs."""
    points = np.array([0.0, 1.0, 10.0, 11.0, 20.0, 21.0])[:, None]
    space, at = L.Gram(gram_of(points), 441.0), np.eye(6)
    starts = L.starts_at(space, np.stack([at[[0, 1, 2]], at[[0, 2, 4]], at[[4, 2, 0]]]))
    assert_array_equal(L.lloyd(space, starts, 300).labels, [0, 0, 1, 1, 2, 2])


def test_what_rounding_would_decide_is_undecided():
    """5 lies as far from 0 as from 10; a centre at 0 twice leaves one without members."""
    tie = np.array([0.0, 5.0, 10.0])[:, None]
    with pytest.raises(L.Undecided):
        from_points([0, 2], tie)
    space = L.Points(tie - 5.0)
    empty = np.array([[[1.0, 0, 0], [0, 0, 1.0], [0.5, 0, 0.5]]])  # the mean of both, where 5 is
    with pytest.raises(L.Undecided):
        L.lloyd(space, L.starts_at(space, np.concatenate([empty, empty[:, :1]], 1)), 300)
    far = L.Points(np.array([[-4.0], [-3.0], [7.0]]))
    lonely = L.starts_at(far, np.array([[[1.0, 0, 0], [0, 0, 1.0], [-5.0, 0, 5.0]]]))
    with pytest.raises(L.Undecided):
        L.lloyd(far, lonely, 300)


def clouds(count: int, seed: int) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yield points of several kinds, ties and equal points among them, and a number of clusters."""
    r = np.random.default_rng(seed)
    for i in range(count):
        n, d, groups = (int(r.integers(*span)) for span in ((2, 70), (2, 40), (1, 6)))
        x = r.normal(size=(groups, d))[r.integers(groups, size=n)] + r.choice([0.01, 0.3, 1]) * r.normal(
            size=(n, d)
        )
        kinds = {
            "plain": x,
            "rounded": np.round(x),
            "repeated": x[r.integers(n, size=n)],
            "far from the origin": x + 100 * r.normal(size=d),
            "bits": r.integers(0, 2, (n, d)).astype(float),
            "similarities": np.exp(-((x[:, None] - x[None]) ** 2).sum(2) / d),
            "one apart": np.eye(n, d),
        }
        for kind, points in kinds.items():
            yield f"{i} {kind}", np.ascontiguousarray(points), int(r.integers(1, min(n, 8) + 1))


def test_starts_at_once_give_the_bits_of_scikit_learn(monkeypatch):
    """Labels and centres, also where rounding decides; plain points are decided without scikit-learn."""
    decided = dict.fromkeys((True, False), 0)
    for name, points, k in clouds(8, 0):
        for max_iter in (2, 300):
            monkeypatch.setattr(G, "WIDE", points.shape[1] + 1)
            theirs = G.kmeans(points, k, seed=1, max_iter=max_iter)
            monkeypatch.setattr(G, "WIDE", 2)
            ours = G.kmeans(points, k, seed=1, max_iter=max_iter)
            assert_array_equal(ours.labels, theirs.labels, err_msg=name)
            assert ours.centres.tobytes() == theirs.centres.tobytes(), name
        if "plain" in name:
            try:
                G._at_once(points, k, 1, 10, 300)
                decided[True] += 1
            except L.Undecided:
                decided[False] += 1
    assert decided[True] > decided[False]


def test_products_alone_give_the_labels_of_principal_coordinates():
    """From drawn starts, and from the means of given groups."""
    r = np.random.default_rng(1)
    for name, points, k in clouds(5, 2):
        gram = points @ points.T
        centred = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
        x, groups = G.principal_coordinates(centred, len(gram)), r.integers(0, 2, (k, len(points))) > 0
        groups |= np.eye(k, len(points), dtype=bool)
        theirs = G.kmeans(x, k, init=np.stack([x[group].mean(0) for group in groups])).labels
        assert_array_equal(G.kmeans_of_gram(gram, k, groups=groups), theirs, err_msg=name)
        assert_array_equal(G.kmeans_of_gram(gram, k, n_init=3), G.kmeans(x, k, n_init=3).labels, err_msg=name)
