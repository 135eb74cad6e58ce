"""The asynchronous methods' rules, worked out by hand on a few numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.types import Notes, Server

FEDASYNC, FEDBUFF, CCFL, FEDSOFT = (CATALOGUE[n] for n in ("fedasync", "fedbuff", "ccfl", "fedsoft_async"))


def notes_of(lag, **columns) -> Notes:
    """Return notes of clients 0, 1, ... with these lags."""
    m = len(lag)
    lists = {name: np.array(value) for name, value in columns.items()}
    return Notes(np.arange(m), np.ones(m, int), np.array(lag), np.ones(m, bool), lists)


def server_of(rows=1, version=0, num_clients=3, **algorithm_state) -> Server:
    """Return a server with so many rows."""
    algorithm_state = {name: np.array(value, float) for name, value in algorithm_state.items()}
    return Server({"model": torch.zeros(rows, 2)}, np.zeros(num_clients, np.int64), algorithm_state, version)


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        ("constant", [0.6, 0.6, 0.6]),
        ("polynomial", [0.6, 0.3, 0.2]),  # 0.6 (1, 4, 9)^-0.5
        ("hinge", [0.6, 0.6, 0.6 / 3]),  # up to b = 4 whole, at 8: 1 / (0.5 * 4 + 1)
    ],
)
def test_fedasync_weighs_by_staleness(staleness, expected):
    """alpha = 0.6, a = 0.5, b = 4; lags 0, 3 and 8."""
    method = FEDASYNC(staleness=staleness)
    for lag, alpha in zip([0, 3, 8], expected, strict=True):
        (mixing,) = method.aggregate(server_of(), notes_of([lag])).mixings
        assert_allclose((mixing.weights[0, 0], mixing.keep[0]), (alpha, 1 - alpha))


def test_fedasync_blends_several_uploads_one_after_the_other():
    """alpha 0.6, 0.3, 0.2 in turn: w <- .8 (.7 (.4 w + .6 u0) + .3 u1) + .2 u2 = .224 w + .336 u0 + .24 u1 +
    .2 u2.
    """
    (mixing,) = FEDASYNC().aggregate(server_of(), notes_of([0, 3, 8])).mixings
    assert_allclose(mixing.weights, [[0.336, 0.24, 0.2]])
    assert_allclose(mixing.keep, [0.224])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1 / 2, 1 / 4]),  # size 2; s = 1, 1/2
        ({"normalise": "weights"}, [2 / 3, 1 / 3]),  # sum of s = 3/2
        ({"staleness_a": 0.0}, [1 / 2, 1 / 2]),
        ({"server_lr": 0.1}, [0.05, 0.025]),
    ],
)
def test_fedbuff_divides_by_the_buffer_or_by_the_weights(options, expected):
    """Lags 0 and 3: s = (1 + lag)^-0.5 = 1 and 1/2. The old row stays whole."""
    (mixing,) = FEDBUFF(**options).aggregate(server_of(), notes_of([0, 3])).mixings
    assert_allclose(mixing.weights, [expected])
    assert_allclose(mixing.keep, [1.0])
    assert mixing.of == "delta"


U = np.exp(7 * np.array([0.831944, 0.726389, 0.441667]) / 2)
U = U / U.sum()


def test_ccfl_estimates_the_mixture_by_hand():
    """K = 3, c1 = .5, c2 = c3 = .25, bars 8, 0, 0, A = 7.

    l = (10, 12, 20) minus 8 is (2, 4, 12), of 18: 1 - l / sum = (8/9, 7/9, 1/3).
    d1 = (1, 1, 2) of 4: (3/4, 3/4, 1/2). d2 = (1, 2, 2) of 5: (4/5, 3/5, 3/5).
    Sum with c: (.444444 + .1875 + .2, .388889 + .1875 + .15, .166667 + .125 + .15) = (.831944, .726389,
        .441667), which is
    2 in all; halved, times 7, softmax: (.513808, .355102, .131089).
    """
    scores = np.array([[10, 12, 20], [1, 1, 2], [1, 2, 2]], float)
    u = CCFL().estimate(scores)
    assert_allclose(u, [0.513808, 0.355102, 0.131089], atol=2e-6)
    assert_allclose(u, U, atol=2e-6)
    least = CCFL(bar_loss=-1).estimate(scores)  # (0, 2, 10) of 12: the best cluster counts in full
    total = 0.5 * np.array([1, 10 / 12, 2 / 12]) + 0.25 * np.array([0.75 + 0.8, 0.75 + 0.6, 0.5 + 0.6])
    raw = np.exp(7 * total / 2)
    assert_allclose(least, raw / raw.sum(), atol=1e-7)
    twice = np.exp(10 * CCFL(sharpen=(10.0,)).estimate(scores))
    assert_allclose(CCFL(sharpen=(10.0, 10.0)).estimate(scores), twice / twice.sum())


@pytest.mark.parametrize(
    ("clusters", "sharpen", "largest"), [(2, 3, 0.9526), (3, 3, 0.5142), (4, 7, 0.4205), (6, 15, 0.2671)]
)
def test_no_share_of_ccfl_exceeds_that_of_a_perfect_fit(clusters, sharpen, largest):
    """Scores of 0 for one cluster and 1 for the others: u = 1 / (K - 1) and (K - 2) / (K - 1)^2 each.

    Their difference is 1 / (K - 1)^2, so that the share is 1 / (1 + (K - 1) exp(-A / (K - 1)^2)). No other
    scores have a larger one.
    """
    method = CCFL(sharpen=(float(sharpen),), bar_loss=0)
    fit = np.ones((3, clusters))
    fit[:, 0] = 0
    assert_allclose(method.estimate(fit)[0], largest, atol=5e-5)
    assert_allclose(largest, 1 / (1 + (clusters - 1) * np.exp(-sharpen / (clusters - 1) ** 2)), atol=5e-5)
    drawn = np.random.default_rng(0).exponential(size=(1000, 3, clusters)) ** 4
    assert max(method.estimate(scores).max() for scores in drawn) <= largest + 5e-5


def test_ccfl_with_one_cluster_is_all_that_cluster():
    """K = 1: the brackets sum to K - 1 = 0, and nothing is divided by it."""
    assert_array_equal(CCFL().estimate(np.array([[10.0], [1.0], [2.0]])), [1.0])


@pytest.mark.parametrize("size", [1000, 2000, 4000])
def test_the_loss_score_of_ccfl_does_not_depend_on_the_size_of_the_public_set(size):
    """A mean loss of 0.5 on D_k scores 8 = 16 * 0.5, the paper's bar, whatever |D_k|."""

    class Public(byhand.Quadratic):
        num_samples = size

        def loss(self, vector, split=None):
            return 0.5

    public = Public.__new__(Public)
    assert_allclose(CCFL().inspect({"model": torch.zeros(1)}, [public])["l"], [8.0])


def test_ccfl_moves_the_clusters_that_fit_and_not_those_changed_since():
    """u as above: below the mean 1/3 nothing, else u / max u = (1, .691118, 0). Client 0 read version 3, the
    server is at 9.

    t_k - tau = (0, 9, 2) - 3 = (-3, 6, -1) with a = 10, b = 5: (1, 1/61, 1). alpha = .025 (1, .011330, 0).
    F(w_k; D_k) = (11, 11, 22) makes d1 = (1, 1, 2).
    """
    algorithm_state = {
        "u": np.full((3, 3), 1 / 3),
        "changed": [0, 9, 2],
        "own": [11, 11, 22],
        "history": np.zeros((0, 3, 3)),
    }
    notes = notes_of([6], l=[[10.0, 12.0, 20.0]], row_distance=[[1.0, 2.0, 2.0]])
    plan = CCFL(max_lag=20).aggregate(server_of(3, 9, **algorithm_state), notes)
    (mixing,) = plan.mixings
    expected = 0.025 * np.array([1, U[1] / U[0] / 61, 0])
    assert_allclose(mixing.weights[:, 0], expected, rtol=1e-5)
    assert_allclose(mixing.keep, 1 - mixing.weights[:, 0])
    assert_allclose(plan.algorithm_state["u"], [U, np.full(3, 1 / 3), np.full(3, 1 / 3)], atol=2e-6)
    assert_array_equal(plan.algorithm_state["changed"], [10, 10, 2])
    assert_array_equal(plan.assign, [0, 0, 0])


@pytest.mark.parametrize("clusters", [3, 20, 45])
def test_clusters_that_fit_alike_are_all_moved_by_ccfl(clusters):
    """Equal shares are their mean, also where rounding puts the mean above them (K = 20, 45)."""
    even = np.full((3, clusters), 1 / clusters)
    algorithm_state = {
        "u": even,
        "changed": np.zeros(clusters),
        "own": np.full(clusters, 9.0),
        "history": np.zeros((0, 3, clusters)),
    }
    notes = notes_of([0], l=[[9.0] * clusters], row_distance=[[1.0] * clusters])
    (mixing,) = CCFL().aggregate(server_of(clusters, 9, **algorithm_state), notes).mixings
    assert_allclose(mixing.weights[:, 0], np.full(clusters, 0.025))


@pytest.mark.parametrize(("lag", "refused"), [(2, False), (3, True)])
def test_ccfl_refuses_uploads_older_than_the_number_of_clients(lag, refused):
    """N = 3: t - tau = (version + 1) - (version - lag) = lag + 1 may be 3. The stored mixture stays."""
    algorithm_state = {
        "u": np.full((3, 2), 1 / 2),
        "changed": [0, 0],
        "own": [1, 1],
        "history": np.zeros((0, 3, 2)),
    }
    notes = notes_of([lag], l=[[10.0, 12.0]], row_distance=[[1.0, 2.0]])
    plan = CCFL().aggregate(server_of(2, 9, **algorithm_state), notes)
    assert (not plan.mixings) == refused
    assert (plan.algorithm_state is None) == refused


def test_ccfl_moves_no_cluster_by_a_loss_that_is_nan():
    """With one of three losses unknown, the shares are those of the other two; with all, nothing happens."""
    nan = float("nan")

    def state(clusters):
        return {
            "u": np.full((3, clusters), 1 / clusters),
            "changed": np.zeros(clusters),
            "own": np.full(clusters, 8.0),
            "history": np.full((1, 3, clusters), 30.0),
        }

    def plan(losses):
        clusters = len(losses)
        notes = notes_of([0], l=[losses], row_distance=[[1.0] * clusters])
        return CCFL(adjust_from=1).aggregate(server_of(clusters, 9, **state(clusters)), notes)

    fewer, more = plan([10.0, 12.0]), plan([10.0, nan, 12.0])
    assert_allclose(more.algorithm_state["u"][0, [0, 2]], fewer.algorithm_state["u"][0])
    assert more.algorithm_state["u"][0, 1] == 0
    assert_allclose(more.algorithm_state["changed"], [10, 0, 0])
    assert not plan([nan, nan, nan]).mixings


def test_ccfl_leaves_clusters_alone_whose_scores_are_unusual():
    """Ten past losses 1..10 in both clusters: their 70th percentile, this upload's among them, lies below 9.9
    and above 5.
    """
    history = np.stack([np.full((3, 2), float(x)) for x in range(1, 11)])
    algorithm_state = {"u": np.full((3, 2), 1 / 2), "changed": [0, 0], "own": [5, 5], "history": history}
    notes = notes_of([0], l=[[5.0, 9.9]], row_distance=[[5.0, 5.0]])
    adjusting = CCFL(adjust_from=5, bar_loss=0.0, sharpen=(0.0,))  # sharpen 0: both clusters fit identical
    free = CCFL(bar_loss=0.0, sharpen=(0.0,))
    for method, expected in ((free, [0.025, 0.025]), (adjusting, [0.025, 0.0])):
        (mixing,) = method.aggregate(server_of(2, 9, **algorithm_state), notes).mixings
        assert_allclose(mixing.weights[:, 0], expected)


def test_fedsoft_async_moves_every_cluster_by_its_share():
    """mu = (.7, .2, .1), read at 3, t_k = (0, 9, 8): t_k - tau = (-3, 6, 5): alpha = .025 (.7, .2 / 61, .1 /
    51).
    """
    algorithm_state = {"mu": np.full((3, 3), 1 / 3), "changed": [0, 9, 8]}
    plan = FEDSOFT().aggregate(server_of(3, 9, **algorithm_state), notes_of([6], mu=[[0.7, 0.2, 0.1]]))
    assert_allclose(plan.mixings[0].weights[:, 0], 0.025 * np.array([0.7, 0.2 / 61, 0.1 / 51]))
    assert_allclose(plan.algorithm_state["mu"][0], [0.7, 0.2, 0.1])
    assert_array_equal(plan.algorithm_state["changed"], [10, 10, 10])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,cluster\n0,a\n", "its clients are not 0 to 2"),
        ("client,cluster\n0,a\n1,a\n3,b\n", "its clients are not 0 to 2"),
        ("client,label\n0,a\n1,a\n2,b\n", "needs the columns client and cluster"),
        ("client,cluster\nzero,a\n", "needs the columns client and cluster"),
    ],
)
def test_labels_that_do_not_fit_the_population_are_refused(text, message, tmp_path):
    from mpifl.algorithms.clustered_async import read_labels

    file = tmp_path / "clusters.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_labels(str(tmp_path), 3)
    file.write_text("client,cluster\n0,7\n1,3\n2,7\n")
    assert_array_equal(read_labels(str(tmp_path), 3), [0, 1, 0])
    with pytest.raises(UserError, match=r"^clusters = .*there is no such file or run folder"):
        read_labels(str(tmp_path / "nowhere"), 3)
    file.unlink()
    with pytest.raises(UserError, match=r"has no clusters\.csv: use the folder of a finished run"):
        read_labels(str(tmp_path), 3)
