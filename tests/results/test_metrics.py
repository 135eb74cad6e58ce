"""Metrics, by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from mpifl.core.metric import METRICS
from mpifl.results import metrics as M


def test_summary_of_accuracies_by_hand():
    """0.8, 0.9, 1.0: mean 0.9, variance (0.01 + 0 + 0.01) / 3 = 0.02 / 3, in percent squared 200 / 3.

    A pool of 900: sqrt(0.9 * 0.1 / 900) = 0.01.
    """
    assert M.accuracy_summary(np.array([0.9, 0.8, 1.0]), pool=900) == pytest.approx(
        {
            "accuracy_mean": 0.9,
            "accuracy_worst": 0.8,
            "accuracy_std": np.sqrt(0.02 / 3),
            "accuracy_variance": 200 / 3,
            "accuracy_worst_tenth": 0.8,
            "accuracy_standard_error": 0.01,
        }
    )


def test_worst_tenth_of_twenty_one_clients_are_three():
    """ceil(21 / 10) = 3 lowest of 0, 0.01, ..., 0.2: mean 0.01."""
    values = np.arange(21) / 100
    assert M.accuracy_summary(values)["accuracy_worst_tenth"] == pytest.approx(0.01)
    for name, worst in (("r2", 0.0), ("mse", 0.2)):  # of errors the largest
        found = M.spread(values, METRICS[name])
        assert found[f"{name}_worst"] == worst
        assert found[f"{name}_worst_tenth"] == pytest.approx(abs(worst - 0.01))


def test_a_client_without_test_samples_counts_in_no_figure_of_the_summary():
    """Of 21 clients one has no accuracy: as without it, and of 20 clients the worst tenth are 2, not 3."""
    accuracy = np.arange(20) / 100
    s = M.accuracy_summary(np.insert(accuracy, 7, np.nan), pool=900)
    assert s == M.accuracy_summary(accuracy, pool=900)
    assert s["accuracy_worst_tenth"] == pytest.approx(0.005)


def test_a_summary_of_clients_none_of_whom_has_test_samples_is_nan():
    assert np.isnan([*M.accuracy_summary(np.full(3, np.nan), pool=900).values()]).all()
    assert np.isnan([*M.accuracy_summary(np.array([])).values()]).all()


def test_no_standard_error_without_a_pool():
    assert np.isnan(M.accuracy_summary(np.array([0.5]))["accuracy_standard_error"])


def test_spread_over_runs_has_the_form_that_is_asked_for():
    """EMD-CFL, rotated MNIST: worst clients 215, 215, 214 of 220 give 97.58 +- 0.26 with ddof 1.

    ARI of 1, 1, 0 gives 0.67 +- 0.47 with ddof 0.
    """
    assert_allclose(M.over_runs(100 * np.array([215, 215, 214]) / 220), [97.58, 0.26], atol=0.005)
    assert_allclose(M.over_runs(np.array([1, 1, 0]), ddof=0), [0.67, 0.47], atol=0.005)
    assert M.over_runs(np.array([3.0])) == (3.0, 0.0)


def test_rand_index_by_hand():
    """{0,0,0,1,1,1} against {0,0,1,1,1,1}: table [[2, 1], [0, 3]]; pairs together in both 1 + 3 = 4, in rows
    3 + 3 = 6, in columns 1 + 6 = 7, of 15: expected 6 * 7 / 15 = 2.8; (4 - 2.8) / (6.5 - 2.8) = 12 / 37."""
    assert M.ari(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])) == pytest.approx(12 / 37)


@pytest.mark.parametrize("score", [M.ari, M.nmi])
def test_conventions_for_single_clusters(score):
    one, two = np.zeros(4, int), np.array([0, 0, 1, 1])
    assert score(one, one + 5) == 1
    assert score(one, two) == 0
    assert score(two, one) == 0
    assert score(two, 7 - two) == pytest.approx(1)
    assert score(np.arange(4), np.arange(4)[::-1]) == pytest.approx(1)


def test_normalised_mutual_information_by_hand():
    """Independent halves share none. 0122 against 0011: I = ln 2, entropies 1.5 ln 2 and ln 2: 1 / 1.25."""
    assert M.nmi(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])) == pytest.approx(0, abs=1e-12)
    assert M.nmi(np.array([0, 1, 2, 2]), np.array([0, 0, 1, 1])) == pytest.approx(0.8)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=2, max_size=60))
def test_both_are_to_the_bit_those_of_scikit_learn(pairs):
    """A run does not import it: that takes a second."""
    labels, groups = np.array(pairs).T
    if len({*labels}) > 1 and len({*groups}) > 1:
        assert M.ari(labels, groups) == adjusted_rand_score(groups, labels)
        assert M.nmi(labels, groups) == normalized_mutual_info_score(groups, labels)


def test_purity_by_hand():
    """Cluster 0 holds groups a, a, b, cluster 1 holds b, c: (2 + 1) / 5."""
    assert M.purity(np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2])) == pytest.approx(0.6)


def test_churn_counts_clients_that_moved_and_not_renamed_clusters():
    old = np.array([0, 0, 0, 1, 1])
    assert M.churn(old, np.array([9, 9, 9, 4, 4])) == 0
    assert M.churn(old, np.array([1, 1, 0, 0, 0])) == pytest.approx(0.2)
    assert M.churn(old, np.array([0, 0, 0, 1, 2])) == pytest.approx(0.2)


def test_divergence_of_mixtures_by_hand():
    """(1/2, 1/2) from (1/4, 3/4): ln 2 / 2 + ln(2/3) / 2 = ln(4/3) / 2; (1, 0) from (1/2, 1/2): ln 2."""
    assert M.mixture_kl([0.5, 0.5], [0.25, 0.75]) == pytest.approx(np.log(4 / 3) / 2)
    both = M.mixture_kl([[0.5, 0.5], [1, 0]], [[0.25, 0.75], [0.5, 0.5]])
    assert both == pytest.approx((np.log(4 / 3) / 2 + np.log(2)) / 2)
    assert np.isfinite(M.mixture_kl([1.0, 0.0], [0.0, 1.0]))


def test_distances_within_clusters_and_overall():
    """0, 1 | 5: within 1; overall (1 + 5 + 4) / 3."""
    x = np.array([0.0, 1, 5])
    within, overall = M.group_distances(np.abs(np.subtract.outer(x, x)), np.array([0, 0, 1]))
    assert (within, overall) == pytest.approx((1.0, 10 / 3))
    assert np.isnan(M.group_distances(np.zeros((2, 2)), np.array([0, 1]))[0])


def test_distances_of_the_models_clients_use_by_hand():
    """Rows (0, 0), (3, 4), (0, 8); clients use 0, 1, 2 in groups 0, 0, 1: 5 within, (5 + 8 + 5) / 3 overall.

    The row that nobody uses does not count.
    """
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0], [99.0, 99.0]])
    assign = np.array([0, 1, 2])
    assert_allclose(M.model_distances(rows, assign, np.array([0, 0, 1])), (5.0, 6.0))
    assert all(np.isnan(M.model_distances(torch.zeros(300, 2), np.arange(300), np.zeros(300, int))))


def test_distances_of_the_models_clients_train_by_hand():
    """Models (0, 0), (3, 4), (0, 8): 5, 8, 5 apart. Clusters {0}, {1, 2}, groups {0, 1}, {2}."""
    x = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]])
    found = M.client_distances(x @ x.T, np.array([4, 7, 7]), np.array([0, 0, 1]), "d")
    assert found == pytest.approx({"d": 6.0, "d_within_clusters": 5.0, "d_within_groups": 5.0})
    found = M.client_distances(x @ x.T, np.array([1, 2, 1]), None, "d")
    assert found == pytest.approx({"d": 6.0, "d_within_clusters": 8.0})


def test_nobody_changed_is_found_without_a_table_of_all_pairs_of_clusters():
    everyone_alone = np.arange(1_000_000)
    assert M.churn(everyone_alone, everyone_alone.copy()) == 0.0
