"""Clusterings, by hand and against brute force."""

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.clustering import partitions as G
from mpifl.core.errors import UserError

LINE = np.abs(
    np.subtract.outer([0.0, 1.0, 5.0, 7.0], [0.0, 1.0, 5.0, 7.0])
)  # distances of 4 points on a line


def test_canonical_numbers_labels_by_first_appearance():
    assert_array_equal(G.canonical(np.array([7, 2, 7, 9, 2])), [0, 1, 0, 2, 1])


def test_match_labels_renames_for_most_agreement():
    """New 0 meets old 1 three times, new 1 meets old 0 twice: swap. The new one gets the free number 2."""
    old = np.array([1, 1, 1, 0, 0, 0])
    new = np.array([0, 0, 0, 1, 1, 2])
    assert_array_equal(G.match_labels(new, old), [1, 1, 1, 0, 0, 2])


def test_match_labels_is_as_good_as_trying_all_permutations():
    rng = np.random.default_rng(0)
    for _ in range(20):
        old, new = rng.integers(0, 4, size=(2, 15))
        best = max((np.array(p)[new] == old).sum() for p in permutations(range(4)))
        assert (G.match_labels(new, old) == old).sum() == best


def test_match_labels_keeps_the_partition():
    rng = np.random.default_rng(1)
    for _ in range(20):
        old, new = rng.integers(0, 3, size=12), rng.integers(0, 6, size=12)
        assert_array_equal(G.canonical(G.match_labels(new, old)), G.canonical(new))


def test_clients_with_identical_neighbourhoods_share_a_label():
    """Clients 0 and 2 see {0, 2}, client 1 sees {1, 3}, client 3 sees {1, 2, 3}: three groups, not two."""
    adjacency = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 1, 1]])
    assert_array_equal(G.neighbourhoods(adjacency), [0, 1, 0, 2])


def test_quantile_groups_split_at_empirical_quantiles():
    """The empirical median of 1..4 is 2: 1 and 2 are low. Thirds: P_1/3 = second value, P_2/3 = third."""
    values = np.array([4.0, 1, 3, 2])
    assert_array_equal(G.quantile_groups(values, 2), [1, 0, 1, 0])
    assert_array_equal(G.quantile_groups(values, 3), [2, 0, 1, 0])
    assert_array_equal(G.quantile_groups(values, 1), [0, 0, 0, 0])


def test_quantile_groups_are_equal_in_size_when_they_can_be():
    values = np.random.default_rng(0).permutation(100.0 * np.arange(100))
    for groups in (2, 4, 5, 25):
        assert_array_equal(np.bincount(G.quantile_groups(values, groups)), np.full(groups, 100 // groups))


def test_ties_stay_in_one_quantile_group():
    assert_array_equal(G.quantile_groups(np.array([1.0, 1, 1, 2]), 2), [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("linkage", "height"), [("single", 4), ("complete", 7), ("average", 5.5), ("ward", np.sqrt(2) * 5.5)]
)
def test_linkages_by_hand(linkage, height):
    """0, 1 | 5, 7: merges at 1 and 2, then min 4, max 7, mean (5 + 7 + 4 + 6) / 4 = 5.5, and for Ward
    sqrt(2 * 2 * 2 / 4) * |0.5 - 6| = sqrt 2 * 5.5."""
    assert_array_equal(G.agglomerative(LINE, linkage, threshold=height * 1.001), [0, 0, 0, 0])
    assert_array_equal(G.agglomerative(LINE, linkage, threshold=height * 0.999), [0, 0, 1, 1])
    assert_array_equal(G.agglomerative(LINE, linkage, threshold=1.5), [0, 0, 1, 2])


def test_a_threshold_that_is_just_met_does_not_merge():
    assert_array_equal(G.agglomerative(LINE, "single", threshold=1.0), [0, 1, 2, 3])


def test_number_of_clusters_is_exact_even_with_ties():
    for k in range(1, 7):
        for linkage in G.LINKAGES:
            labels = G.agglomerative(np.ones((6, 6)) - np.eye(6), linkage, n_clusters=k)
            assert labels.max() + 1 == k


@pytest.mark.parametrize("linkage", ["single", "complete", "average"])
def test_agglomerative_agrees_with_scikit_learn(linkage):
    from sklearn.cluster import AgglomerativeClustering

    points = np.random.default_rng(3).normal(size=(30, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    for k in (2, 5, 11):
        theirs = AgglomerativeClustering(k, metric="precomputed", linkage=linkage).fit_predict(distances)
        assert_array_equal(G.agglomerative(distances, linkage, n_clusters=k), G.canonical(theirs))


def test_one_client_is_one_cluster():
    assert_array_equal(G.agglomerative(np.zeros((1, 1)), threshold=1.0), [0])
    assert_array_equal(G.merge_closest(np.zeros((1, 1)), 1.0), [0])
    assert_array_equal(G.agglomerative(np.zeros((1, 1)), n_clusters=1), [0])


def test_more_clusters_than_clients_are_refused():
    with pytest.raises(UserError, match="4 clients"):
        G.agglomerative(LINE, n_clusters=5)


def test_pacfl_merges_with_the_plain_mean_of_rows():
    """Points 0, 1, 5 and 20: {0, 1} is at (5 + 4) / 2 = 4.5 from 5; together, plain means put 20 at
    ((20 + 19) / 2 + 15) / 2 = 17.25, not at the size-weighted (20 + 19 + 15) / 3 = 18."""
    x = np.array([0.0, 1, 5, 20])
    d = np.abs(np.subtract.outer(x, x))
    assert_array_equal(G.merge_closest(d, 4.4), [0, 0, 1, 2])
    assert_array_equal(G.merge_closest(d, 4.5), [0, 0, 0, 1])  # at most the threshold
    assert_array_equal(G.merge_closest(d, 17.2), [0, 0, 0, 1])
    assert_array_equal(G.merge_closest(d, 17.3), [0, 0, 0, 0])
    assert_array_equal(G.merge_closest(d, 17.3, "maximum"), [0, 0, 0, 1])
    assert_array_equal(G.merge_closest(d, 15.0, "minimum"), [0, 0, 0, 0])


def test_pacfl_with_an_endless_threshold_merges_all_and_with_none_nothing():
    assert_array_equal(G.merge_closest(LINE, np.inf), [0, 0, 0, 0])
    assert_array_equal(G.merge_closest(LINE, 0.5), [0, 1, 2, 3])


def test_pacfl_merging_agrees_with_weighted_linkage_of_scipy():
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    points = np.random.default_rng(4).normal(size=(25, 3))
    d = np.linalg.norm(points[:, None] - points[None], axis=-1)
    tree = linkage(squareform(d, checks=False), "weighted")
    for t in (0.5, 1.0, 2.0):
        assert_array_equal(G.merge_closest(d, t), G.canonical(fcluster(tree, t, "distance")))


JOIN = {"average": lambda a, b: (a + b) / 2, "maximum": np.maximum, "minimum": np.minimum}


def merged_by_brute_force(distances, threshold, linkage):
    """Merge the closest pair, one after the other: all partitions, whichever of equals is taken."""
    d = np.where(np.isnan(distances), np.inf, distances)
    np.fill_diagonal(d, np.inf)
    out, open_ones, seen = set(), [(d, tuple(range(len(d))))], set()
    while open_ones:
        d, label = open_ones.pop()
        if not np.isfinite(d.min()) or d.min() > threshold:
            out.add(tuple(G.canonical(np.array(label)).tolist()))
        else:
            for i, j in np.argwhere(np.triu(d == d.min())).tolist():
                merged, names = d.copy(), tuple(i if each == j else each for each in label)
                merged[i] = merged[:, i] = JOIN[linkage](d[i], d[j])
                merged[i, i], merged[j], merged[:, j] = np.inf, np.inf, np.inf
                state = (names, merged.tobytes())
                if state not in seen:
                    seen.add(state)
                    open_ones.append((merged, names))
    return out


@pytest.mark.parametrize("linkage", ["average", "maximum", "minimum"])
def test_merging_takes_one_of_the_closest_pairs_also_among_many_equals(linkage):
    """Distances are small integers, or unknown."""
    random = np.random.default_rng(2)
    for n in random.integers(2, 7, size=60):
        upper = np.triu(random.choice([1.0, 2.0, 2.0, 3.0, 4.0, np.inf], size=(n, n)), 1)
        d = np.where(upper > 0, upper, 0) + np.where(upper > 0, upper, 0).T
        for threshold in (1.0, 2.5, np.inf):
            found = tuple(G.merge_closest(d, threshold, linkage).tolist())
            assert found in merged_by_brute_force(d, threshold, linkage)


@pytest.mark.parametrize("linkage", ["average", "maximum"])
def test_clients_with_equal_statistics_merge_first_and_count_as_one(linkage):
    """Distances of distinct points have no ties: the partition is that of the distinct ones."""
    random = np.random.default_rng(3)
    for n in random.integers(2, 30, size=20):
        points, same = random.normal(size=(n, 2)), random.integers(n, size=3 * n)
        d = np.linalg.norm(points[:, None] - points[None], axis=2)
        labels = G.merge_closest(d[np.ix_(same, same)], 1.0, linkage)
        used = np.unique(same)
        expected = G.merge_closest(d[np.ix_(used, used)], 1.0, linkage)
        assert_array_equal(labels, G.canonical(expected[np.searchsorted(used, same)]))


@pytest.mark.parametrize("linkage", ["average", "maximum", "minimum"])
def test_merging_in_groups_apart_is_merging_in_all(linkage):
    """Fifty points in groups, some of which are within the threshold throughout, some only step by step."""
    random = np.random.default_rng(5)
    for spread in (0.1, 0.5, 1.0):
        points = random.normal(size=(50, 2)) * spread + 6 * random.integers(0, 3, size=(50, 1))
        d = np.linalg.norm(points[:, None] - points[None], axis=2)
        unknown = np.triu(random.random((50, 50)) < 0.03, 1)
        told = np.where(unknown | unknown.T, np.nan, d)
        for threshold in (0.5, 1.5, 3.0, np.inf):
            (expected,) = merged_by_brute_force(told, threshold, linkage)
            assert_array_equal(G.merge_closest(told, threshold, linkage), expected)


def test_bipartition_separates_opposite_updates():
    similarity = np.array([[1, -0.9, 0.8], [-0.9, 1, -0.7], [0.8, -0.7, 1]])
    assert_array_equal(G.bipartition(similarity), [0, 1, 0])
    assert_array_equal(G.bipartition(similarity, "single"), [0, 1, 0])


def test_single_linkage_minimises_the_largest_similarity_across():
    """The paper's criterion, against all bipartitions of 7 clients."""
    v = np.random.default_rng(5).normal(size=(7, 3))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    s = v @ v.T

    def across(mask):
        return s[np.ix_(mask, ~mask)].max()

    masks = [np.array([(code >> i) & 1 for i in range(7)], bool) for code in range(1, 127)]
    assert across(G.bipartition(s, "single") == 0) == pytest.approx(min(map(across, masks)))


def test_kmeans_finds_separated_points_and_numbers_them_by_appearance():
    points = np.array([[9.0, 9], [0, 0], [9, 10], [0, 1]])
    labels, centres = G.kmeans(points, 2, seed=0)
    assert_array_equal(labels, [0, 1, 0, 1])
    assert_allclose(centres, [[9, 9.5], [0, 0.5]])


def test_kmeans_of_as_many_clusters_as_points():
    points = np.array([[3.0, 0.0], [0.0, 1.0], [7.0, 7.0]])
    labels, centres = G.kmeans(points, 3)
    assert_array_equal(labels, [0, 1, 2])
    assert_array_equal(centres, points)


def test_kmeans_from_given_centres_keeps_their_numbers():
    points = np.array([[9.0, 9], [0, 0], [9, 10], [0, 1]])
    labels, centres = G.kmeans(points, 2, init=np.array([[0, 0], [9, 9]]))
    assert_array_equal(labels, [1, 0, 1, 0])
    assert_allclose(centres, [[0, 0.5], [9, 9.5]])


def test_kmeans_of_coinciding_points_does_not_fail():
    labels, centres = G.kmeans(np.ones((4, 2)), 3)
    assert_array_equal(labels, [0, 0, 0, 0])
    assert centres.shape == (3, 2)


def test_kmeans_needs_as_many_points_as_clusters():
    with pytest.raises(UserError, match="3 points"):
        G.kmeans(np.ones((3, 2)), 4)


def sum_of_squares(points, labels):
    """Return the sum of squared distances of points from the mean of their cluster."""
    return sum(((points[labels == j] - points[labels == j].mean(0)) ** 2).sum() for j in np.unique(labels))


def kmeans_of_all_columns(points, k):
    """Return scikit-learn's labels and the sum of squares of the best of ten starts."""
    from sklearn.cluster import KMeans

    model = KMeans(k, n_init=10, random_state=0).fit(points)
    return G.canonical(model.labels_), model.inertia_


def mixtures(spread, n=300):
    """Return weights [n, n] as UCFL has them, of clients in four groups, from clear (0.1) to mixed (3.0)."""
    random = np.random.default_rng(7)
    x = 2 * np.eye(4, 5)[np.arange(n) % 4] + spread * random.normal(size=(n, 5))
    weights = np.exp(-((x[:, None] - x) ** 2).sum(2) / random.uniform(1, 4, size=(n, 1)))
    return weights / weights.sum(1, keepdims=True)


def test_many_columns_give_the_clusters_of_all_columns_and_their_means():
    points = mixtures(0.1)
    labels, centres = G.kmeans(points, 4)
    assert_array_equal(labels, np.arange(300) % 4)
    assert_array_equal(labels, kmeans_of_all_columns(points, 4)[0])
    assert_allclose(centres, [points[labels == j].mean(0) for j in range(4)], rtol=1e-12)


@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_the_sum_of_squares_of_blurred_groups_with_many_columns_is_within_one_percent(spread, k):
    points = mixtures(spread)
    assert sum_of_squares(points, G.kmeans(points, k).labels) <= 1.01 * kmeans_of_all_columns(points, k)[1]


def test_256_columns_are_all_looked_at():
    points = mixtures(3.0)[:, :256]
    expected = kmeans_of_all_columns(points, 5)[0]
    assert_array_equal(G.kmeans(points, 5).labels, expected)


def test_equal_rows_of_many_columns_share_a_cluster_even_if_there_are_more_clusters():
    rows = np.random.default_rng(0).normal(size=(3, 300))
    labels, centres = G.kmeans(rows[np.arange(300) % 3], 5)
    assert_array_equal(labels, np.arange(300) % 3)
    assert_allclose(centres[:3], rows)
    assert_allclose(centres[3:], np.broadcast_to(rows.mean(0), (2, 300)), atol=1e-15)
    assert set(G.kmeans(rows[np.zeros(300, int)], 4).labels) == {0}


def test_points_at_equal_distances_in_many_columns_lose_one_square_per_cluster():
    """Of the 300 unit vectors, m in one cluster have the sum of squares m - 1."""
    assert sum_of_squares(np.eye(300), G.kmeans(np.eye(300), 4).labels) == pytest.approx(300 - 4)


def test_as_many_clusters_as_points_with_many_columns_are_the_points():
    labels, centres = G.kmeans(np.eye(260), 260, n_init=1)
    assert_array_equal(labels, np.arange(260))
    assert_allclose(centres, np.eye(260))


def test_silhouette_by_hand():
    """0, 1 | 10: first a = 1, b = 10: 0.9; second a = 1, b = 9: 8/9; a lone point counts 0."""
    points = np.array([[0.0], [1], [10]])
    expected = (0.9 + 8 / 9 + 0) / 3
    assert G.silhouette(points, np.array([0, 0, 1])) == pytest.approx(expected)
    distances = np.abs(points - points.T)
    assert G.silhouette(distances, np.array([0, 0, 1]), "precomputed") == pytest.approx(expected)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]])
def test_silhouette_of_trivial_partitions_is_zero(labels):
    assert G.silhouette(np.arange(3.0)[:, None], np.array(labels)) == 0.0


def test_silhouette_chooses_the_number_of_blobs():
    rng = np.random.default_rng(6)
    points = np.repeat([[0, 0], [10, 0], [0, 10]], 5, axis=0) + rng.normal(scale=0.1, size=(15, 2))
    choice = G.kmeans_by_silhouette(points, range(2, 7))
    assert choice.k == 3
    assert set(choice.scores) == {2, 3, 4, 5, 6}
    assert_array_equal(choice.labels, np.repeat([0, 1, 2], 5))


def test_all_numbers_from_one_to_n_are_tried_by_default():
    """One cluster and n have a silhouette of 0."""
    scores = G.kmeans_by_silhouette(np.arange(6.0)[:, None]).scores
    assert set(scores) == {1, 2, 3, 4, 5, 6}
    assert (scores[1], scores[6]) == (0.0, 0.0)


def test_the_smallest_of_equally_good_numbers_is_chosen(monkeypatch):
    monkeypatch.setattr(G, "silhouette", lambda points, labels: 0.25 if len(np.unique(labels)) < 5 else 0.1)
    assert G.kmeans_by_silhouette(np.arange(8.0)[:, None], [4, 3, 2, 5]).k == 2


def test_identical_rows_form_one_cluster():
    choice = G.kmeans_by_silhouette(np.full((5, 3), 0.2))
    assert (choice.k, choice.scores) == (1, {1: 0.0})
    assert_allclose(choice.centres, np.full((1, 3), 0.2))


@pytest.mark.parametrize(
    ("groups", "labels"),
    [
        ([[0], [1, 2, 3, 4]], [0, 0, 1, 1, 1]),
        ([[1, 2, 3, 4], [0]], [1, 1, 0, 0, 0]),
        ([[0, 1], [4]], [0, 0, 0, 1, 1]),
    ],
)
def test_k_means_of_products_by_hand(groups, labels):
    """0, 1, 5, 7, 12 on a line. From 0 and 6.25, means of {0} and the rest: {0, 1}, {5, 7, 12}, which stay.

    From 0.5 and 12: {0, 1, 5}, {7, 12}, whose means 2 and 9.5 keep them.
    """
    x = np.array([0.0, 1.0, 5.0, 7.0, 12.0])
    members = np.array([np.isin(np.arange(5), group) for group in groups])
    assert_array_equal(G.kmeans_of_gram(np.outer(x, x), 2, groups=members), labels)


@pytest.mark.parametrize("kind", ["groups", "groups far from 0", "ties", "equal points", "none"])
def test_products_alone_give_the_labels_of_principal_coordinates(kind):
    """Also where rounding would decide, and scikit-learn does; most groups are found without it."""
    r, undecided = np.random.default_rng(4), 0
    for _ in range(40):
        n, d, k = (int(r.integers(*span)) for span in ((4, 70), (2, 40), (1, 5)))
        x = r.normal(size=(3, d))[r.integers(3, size=n)] + r.choice([0.01, 0.3, 1]) * r.normal(size=(n, d))
        x = {
            "groups": x,
            "groups far from 0": x + 100 * r.normal(size=d),
            "ties": np.round(x),
            "equal points": x[r.integers(n, size=n)],
            "none": np.eye(n),
        }[kind]
        gram, groups = x @ x.T, (r.integers(0, 2, (k, n)) > 0) | np.eye(k, n, dtype=bool)
        centred = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
        points = G.principal_coordinates(centred, n)
        means = np.stack([points[group].mean(0) for group in groups])
        theirs = G.kmeans(points, k, init=means).labels
        assert_array_equal(G.kmeans_of_gram(gram, k, groups=groups), theirs)
        try:
            assert_array_equal(G._lloyd(centred, groups, float(np.abs(gram).max())), theirs)
        except G.Undecided:
            undecided += 1
    assert undecided < 20 if "groups" in kind else undecided > 0


def test_principal_coordinates_equal_the_singular_value_decomposition_up_to_sign():
    profiles = np.random.default_rng(7).normal(size=(40, 6))
    left, _, _ = np.linalg.svd(profiles, full_matrices=False)
    ours = G.principal_coordinates(profiles.T @ profiles, 3)
    assert_allclose(np.abs(ours), np.abs(left[:, :3].T @ profiles).T, atol=1e-9)


@pytest.mark.parametrize("t", [(1, -2, 0), (2, 1, 0), (1, 1, 3), (-3, 1, 1), (1, 2, 3), (1, 0, -4)])
def test_the_largest_principal_coordinate_is_positive(t):
    """Points t (3, 4): coordinates 5 t or -5 t, such that the longest is positive."""
    points = np.outer(t, [3.0, 4.0])
    expected = 5.0 * np.array(t) * np.sign(t[np.argmax(np.abs(t))])
    assert_allclose(G.principal_coordinates(points @ points.T, 1)[:, 0], expected, atol=1e-9)


def test_principal_coordinates_are_in_order_of_their_singular_values():
    gram = np.diag([1.0, 9.0, 4.0])
    assert_allclose(G.principal_coordinates(gram, 2), [[0, 0], [3, 0], [0, 2]], atol=1e-9)


def test_largest_gap_counts_the_values_before_the_fall():
    """Values 10, 9, 8, 1, 0.5: the largest fall, 8 to 1, comes after three; in 10, 1, 0.9, 0.8 after one."""
    assert G.largest_gap(np.diag(np.array([10, 9, 8, 1, 0.5]) ** 2), least=1) == 3
    assert G.largest_gap(np.diag(np.array([10, 1, 0.9, 0.8]) ** 2), least=1) == 1
    assert G.largest_gap(np.diag(np.array([10, 1, 0.9, 0.8]) ** 2)) == 3


def test_spectral_clustering_finds_groups_of_profiles():
    rng = np.random.default_rng(8)
    means = rng.normal(size=(3, 50))
    profiles = np.repeat(means, 4, axis=0) + 0.1 * rng.normal(size=(12, 50))
    gram = profiles @ profiles.T
    assert_array_equal(G.spectral(gram, 3), np.repeat([0, 1, 2], 4))
    choice = G.spectral_by_silhouette(gram, 6)
    assert choice.k == 3
    assert_array_equal(choice.labels, np.repeat([0, 1, 2], 4))


def test_projection_on_the_simplex_by_hand():
    """(0.5, 0.9, -1): t = (0.9 + 0.5 - 1) / 2 = 0.2, hence (0.3, 0.7, 0). (3, 0): t = 2, hence (1, 0)."""
    assert_allclose(G.simplex_projection(np.array([0.5, 0.9, -1])), [0.3, 0.7, 0])
    assert_allclose(G.simplex_projection(np.array([[3.0, 0], [0.25, 0.75]])), [[1, 0], [0.25, 0.75]])


def test_projection_on_the_simplex_is_nearer_than_any_other_point():
    rng = np.random.default_rng(9)
    v = rng.normal(size=(50, 6))
    x = G.simplex_projection(v)
    assert_allclose(x.sum(axis=1), 1)
    assert (x >= 0).all()
    for other in rng.dirichlet(np.ones(6), size=200):
        assert (((v - x) ** 2).sum(axis=1) <= ((v - other) ** 2).sum(axis=1) + 1e-12).all()


@pytest.mark.nightly
def test_importing_loads_no_heavy_library():
    code = (
        "import sys, mpifl.clustering.distances, mpifl.clustering.partitions, mpifl.results.metrics;"
        "print([m for m in ('ot', 'sklearn', 'scipy', 'umap', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_spectral_clustering_may_answer_the_largest_number_allowed():
    """Four pairs of equal profiles on the axes of four dimensions."""
    profiles = np.repeat(np.eye(4), 2, axis=0) * [1.0, 1.1, 1.2, 1.3]
    assert G.spectral_by_silhouette(profiles @ profiles.T, k_max=4).k == 4


def test_as_many_clusters_as_points_can_be_chosen_and_are_the_points():
    points = np.array([[0.0], [0.01], [10.0], [20.0]])
    choice = G.kmeans_by_silhouette(points, worth=lambda k, s: float(k))
    assert choice.k == 4
    assert_array_equal(choice.labels, np.arange(4))
    assert_allclose(choice.centres, points)


def test_pacfl_merges_at_the_threshold_itself():
    assert G.merge_closest(np.array([[0.0, 2.0], [2.0, 0.0]]), 2.0).tolist() == [0, 0]


def test_spectral_clustering_passes_its_seed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(G, "kmeans", lambda points, k, **options: seen.append(options) or G.Clusters([], []))
    G.spectral(np.eye(3), 2, seed=7, n_init=3)
    assert seen == [{"seed": 7, "n_init": 3}]
