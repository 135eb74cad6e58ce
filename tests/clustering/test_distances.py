"""Distances between clients, by hand."""

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.clustering import distances as D
from mpifl.core.errors import UserError


def test_euclidean_matrix_is_the_root_of_the_squared_distances():
    rows = np.random.default_rng(0).normal(size=(6, 4))
    assert_allclose(D.euclidean_matrix(rows) ** 2, D.squared_distances(rows @ rows.T), atol=1e-12)


def test_cosine_cost_ignores_length_and_counts_zero_vectors_as_orthogonal():
    """(2, 0) against (5, 0), (0, 1), (-1, 0) and (0, 0): 1 - cos = 0, 1, 2 and 1."""
    y = np.array([[5.0, 0], [0, 1], [-1, 0], [0, 0]])
    assert_allclose(D.cost_matrix(np.array([[2.0, 0]]), y), [[0, 1, 2, 1]])


def test_emd_of_two_points_against_two_takes_the_cheaper_matching():
    """0 and 10 against 1 and 12 on a line: |0 - 1| and |10 - 12|, half the mass each: (1 + 2) / 2 = 1.5."""
    assert D.emd([[0.0], [10.0]], [[1.0], [12.0]], "euclidean") == pytest.approx(1.5)


def test_emd_of_unequal_sizes_splits_the_mass():
    """0 against 1 and 3: half the mass travels 1, half travels 3: 2.

    And 0, 0, 6 against 0, 6: of the two thirds at 0 a sixth travels 6: (2/3 - 1/2) * 6 = 1.
    """
    assert D.emd([[0.0]], [[1.0], [3.0]], "euclidean") == pytest.approx(2.0)
    assert D.emd([[0.0], [0.0], [6.0]], [[0.0], [6.0]], "euclidean") == pytest.approx(1.0)


def test_cosine_emd_of_opposite_directions_is_two():
    x = np.array([[1.0, 0], [0, 3.0]])
    assert D.emd(x, -x) == pytest.approx(1.0)  # (1, 0) to (0, -3) is cheaper than to (-1, 0): cost 1, not 2
    assert D.emd(x[:1], -x[:1]) == pytest.approx(2.0)
    assert D.emd(x, 7 * x) == pytest.approx(0.0, abs=1e-12)


def test_matching_and_transport_agree_for_equal_sizes():
    import ot

    rng = np.random.default_rng(1)
    x, y = np.maximum(rng.normal(size=(2, 40, 8)), 0)
    uniform = np.full(40, 1 / 40)
    assert D.emd(x, y) == pytest.approx(ot.emd2(uniform, uniform, D.cost_matrix(x, y)), abs=1e-10)


@pytest.mark.parametrize("kind", ["any", "ties", "apart", "equal"])
def test_equal_sizes_are_matched_at_the_least_of_all_matchings(kind):
    """Of all 120 matchings of five points; also where several are the best, or distances differ 1e6-fold."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        x, y = rng.normal(size=(2, 5, 2))
        if kind == "ties":
            x, y = np.rint(x), np.rint(y)
        if kind == "apart":
            x, y = 10.0 ** rng.integers(-3, 4, (5, 1)) * x, y * 1e-3
        if kind == "equal":
            x, y = np.ones((5, 2)), np.ones((5, 2))
        costs = D.cost_matrix(x, y, "euclidean")
        least = min(costs[np.arange(5), list(p)].mean() for p in permutations(range(5)))
        assert D.emd(x, y, "euclidean") == pytest.approx(least, rel=1e-12, abs=1e-300)


def test_sinkhorn_nears_the_exact_distance_from_above_as_the_penalty_vanishes():
    """A plan with a penalty is feasible: it costs the optimum or more. reg 0.0005 is solved in logarithms."""
    rng = np.random.default_rng(2)
    x, y = np.abs(rng.normal(size=(12, 5))), np.abs(rng.normal(size=(9, 5)))
    exact = D.emd(x, y)
    loose, tight = (D.emd(x, y, solver="sinkhorn", reg=reg) for reg in (1.0, 0.0005))
    assert exact - 1e-6 <= tight < loose
    assert tight == pytest.approx(exact, abs=2e-3)


def test_bad_options_of_emd_are_refused():
    x = np.ones((2, 2))
    for options in ({"metric": "cos"}, {"solver": "lp"}, {"solver": "sinkhorn", "reg": 0.0}):
        with pytest.raises(UserError):
            D.emd(x, x, **options)
    with pytest.raises(UserError, match="at least one sample"):
        D.emd(x[:0], x)


def test_matching_distance_divides_the_root_by_the_smaller_number():
    """{(0,0), (10,0)} in {(0,3), (10,4), (50,50)}: squares 9 + 16 = 25, root 5, over 2 centroids: 2.5."""
    x, y = np.array([[0.0, 0], [10, 0]]), np.array([[10.0, 4], [50, 50], [0, 3]])
    assert D.matching_distance(x, y) == pytest.approx(2.5)
    assert D.matching_distance(y, x) == pytest.approx(2.5)


def test_closest_pair_is_the_least_distance():
    assert D.closest_pair(np.array([[0.0, 0], [10, 0]]), np.array([[10.0, 4], [0, 3]])) == pytest.approx(3.0)


def test_angles_of_pacfl_by_hand():
    """Planes e1-e2 and e1-(e2 turned by 30 degrees to e3) share e1: principal angles 0 and 30.

    The second basis is then turned by 45 degrees inside its plane: its columns are (f + e1) / sqrt 2 and
    (f - e1) / sqrt 2 with f = (0, cos 30, sin 30), and the largest product with e1 or e2 is
    1 / sqrt 2: 45 degrees.
    """
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    u = np.eye(3)[:, :2]
    v = np.array([[1, 0], [0, c], [0, s]])
    turned = v @ np.array([[1, -1], [1, 1]]) / np.sqrt(2)
    assert_allclose(D.principal_angles(u, v), [0, 30], atol=1e-6)
    assert_allclose(D.principal_angles(u, turned), [0, 30], atol=1e-6)
    assert D.subspace_angle(u, turned, "columns") == pytest.approx(45)
    assert D.subspace_angle(u, turned, "smallest") == pytest.approx(0, abs=1e-5)
    assert D.subspace_angle(u, turned, "sum") == pytest.approx(30)


def test_column_angle_keeps_signs_and_the_principal_angle_does_not():
    e1 = np.eye(2)[:, :1]
    assert D.subspace_angle(e1, -e1, "columns") == pytest.approx(180)
    assert D.subspace_angle(e1, -e1, "smallest") == pytest.approx(0, abs=1e-5)


def test_spans_of_stacked_bases_need_not_have_orthogonal_columns():
    """Columns e1 and (e1 + e2) / sqrt 2 span the plane e1-e2: no angle to it."""
    u = np.array([[1, np.sqrt(0.5)], [0, np.sqrt(0.5)], [0, 0]])
    assert D.subspace_angle(u, np.eye(3)[:, :2], "sum") == pytest.approx(0, abs=1e-5)


def spans(count: int, columns: int = 3) -> list[np.ndarray]:
    """Return orthonormal float32 columns [100, 1 .. columns] of random subspaces."""
    random = np.random.default_rng(5)
    return [
        np.linalg.qr(random.normal(size=(100, 1 + k % columns)))[0].astype(np.float32) for k in range(count)
    ]


def test_column_angles_have_the_same_bits_whatever_is_measured_with_them():
    """Alone, in a row or in a matrix: sums of products have no rounding that an order could change."""
    rows = [D.rounded_columns(u) for u in spans(70)]
    whole = D.column_angles(rows, rows)
    assert_array_equal(whole, whole.T)
    assert_array_equal(whole[37:41], D.column_angles(rows[37:41], rows))
    assert_array_equal(whole[37, 2:7], D.column_angles(rows[37:38], rows[2:7])[0])
    u, v = spans(70)[37].astype(np.float64), spans(70)[3].astype(np.float64)
    assert whole[37, 3] == D.subspace_angle(v, u)
    assert whole[37, 3] == pytest.approx(np.degrees(np.arccos((u.T @ v).max())), abs=1e-6)


def test_distances_are_measured_again_for_clients_with_new_statistics_only():
    """Of points 0, 1, ..., 49, client 7 comes to 70 and client 30 is new: 2 x 51 pairs, not 51 x 51."""
    pairs: list[int] = []

    def measure(some, others):
        pairs.append(len(some) * len(others))
        return np.abs(np.subtract.outer(some, others))

    kept, first = D.KeptDistances(measure), np.arange(60.0)
    old, everyone = np.delete(np.arange(51), 30), np.arange(51)
    found = kept.among(old, first, lambda k: first[k])
    assert_array_equal(found, np.abs(np.subtract.outer(old, old)))
    pairs.clear()
    second = first.copy()
    second[7] = 70
    found = kept.among(everyone, second, lambda k: second[k], first, np.array([7, 30]))
    assert_array_equal(found, np.abs(np.subtract.outer(second[:51], second[:51])))
    assert sum(pairs) == 2 * 51
    kept.among(everyone, second, lambda k: second[k], first, np.array([7, 30]))
    assert sum(pairs) > 51 * 51 / 2, "they were kept of another array: a step that is repeated"


def test_mean_differences_of_cosines_leave_the_pair_itself_out():
    """Clients 0 and 1: (|0.2 - 0.4| + |0.1 - 0.3|) / 2; clients 2 and 3: (|0.2 - 0.1| + |0.4 - 0.3|) / 2."""
    cosines = np.eye(4)
    cosines[np.triu_indices(4, 1)] = [0.5, 0.2, 0.1, 0.4, 0.3, 0.9]
    cosines = np.maximum(cosines, cosines.T)
    found = D.madc(cosines)
    assert_allclose([found[0, 1], found[1, 0], found[2, 3]], [0.2, 0.2, 0.1])
    assert_allclose(found.diagonal(), 0)
    assert_allclose(D.madc(cosines[:2, :2]), 0, err_msg="two clients have nobody to differ about")


def test_wasserstein_distance_moves_mass_over_bins():
    """(1, 0, 0) to (0, 0, 1): two bins. Counts (2, 2) and (1, 3): a quarter of the mass moves one bin."""
    assert D.wasserstein1(np.array([5, 0, 0]), np.array([0, 0, 1])) == pytest.approx(2.0)
    assert D.wasserstein1(np.array([2, 2]), np.array([1, 3])) == pytest.approx(0.25)


def test_distances_do_not_change_their_arguments():
    x, y = np.random.default_rng(3).normal(size=(2, 5, 3))
    before = x.copy(), y.copy()
    D.emd(x, y)
    D.matching_distance(x, y)
    assert_array_equal((x, y), before)


@pytest.mark.nightly
def test_a_worker_measures_distances_without_scikit_learn():
    """POT would import it, and with it pandas: 75 MB in every rank. Later imports find it."""
    code = (
        "import sys, numpy as np\n"
        "from mpifl.clustering.distances import emd\n"
        "assert emd(np.eye(2), np.eye(3)[:, :2], 'euclidean') > 0\n"
        "print(sorted({'ot', 'sklearn', 'pandas', 'pyarrow', 'torchvision'} & {*sys.modules}))\n"
        "import sklearn"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ot']"


def test_a_larger_penalty_blurs_the_plan_by_hand():
    """Points 0 and 1 on both sides: the share that moves, and the cost, is 1 / (1 + e^(1 / reg))."""
    x = np.array([[0.0], [1.0]])
    for reg in (0.5, 1.0):
        found = D.emd(x, x, "euclidean", "sinkhorn", reg)
        assert_allclose(found, 1 / (1 + np.exp(1 / reg)), rtol=1e-6)
