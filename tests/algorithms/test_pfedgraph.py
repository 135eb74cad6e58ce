"""pFedGraph: the graph and the local term by hand, its variants and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.pfedgraph import PFedGraph, graph
from mpifl.clustering.server_plans import dissimilarity
from mpifl.training.corrections import aligned


def test_the_graph_by_hand():
    """d_0 = (-1, -0.6, 0.2), p = (1/2, 1/4, 1/4), alpha = 0.8: p - d / 1.6 = (1.125, 0.625, 0.125).

    All three above t = (1.875 - 1) / 3 = 0.2917? The last is not; of two: t = (1.75 - 1) / 2 = 0.375.
    x = (0.75, 0.25, 0).
    """
    X = graph(np.array([[-1.0, -0.6, 0.2]]), np.array([0.5, 0.25, 0.25]), 0.8)
    assert_allclose(X, [[0.75, 0.25, 0.0]], atol=1e-12)


def test_the_graph_minimises_its_objective():
    """alpha ||x||^2 + (d - 2 alpha p)'x is larger at every other point of the simplex."""
    rng = np.random.default_rng(0)
    d, p, alpha = rng.uniform(-1, 1, (1, 5)), rng.dirichlet(np.ones(5)), 0.8
    others = np.vstack([rng.dirichlet(np.ones(5), 500), np.eye(5), graph(d, p, alpha)])
    values = alpha * (others**2).sum(1) + others @ (d[0] - 2 * alpha * p)
    assert values.argmin() == len(others) - 1


def test_cosines_above_nine_tenths_count_as_one():
    """dw = (1, 0), (1, 0.1), (0, 1): cosines 0.995 and 0.0995; emdcfl does not clip."""
    dw = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    assert_allclose(dissimilarity(dw @ dw.T)[0], [-1, -1, 0], atol=1e-9)
    assert_allclose(dissimilarity(dw @ dw.T, None)[0], [-1, -0.99504, 0], atol=1e-5)


def test_absent_clients_keep_their_rows():
    """Clients 0 and 2 of 3 took part, with orthogonal updates and p = (1/2, 1/2), alpha = 0.5.

    p - d = (3/2, 1/2): t = 1/2, x = (1, 0): each keeps its own model; client 1 keeps its row.
    """
    server = byhand.server(3, {"graph": np.eye(3)}, model=[[0.0]] * 3, direction=[[0.0]] * 3)
    told = byhand.notes([4, 4], client=[0, 2], gram=[[2.0, 0.0], [0.0, 3.0]])
    plan = PFedGraph(alpha=0.5).aggregate(server, told)
    assert [m.into for m in plan.mixings] == ["model", "direction"]
    for mixing in plan.mixings:
        assert_allclose(mixing.weights, [[1, 0], [0, 0], [0, 1]], atol=1e-9)
        assert_array_equal(mixing.keep, [0, 1, 0])


def test_a_client_that_comes_twice_has_the_row_of_its_last_upload_in_the_graph():
    """Orthogonal updates of clients 0, 0 and 1, p = 1/3, alpha = 5: the last two rows are almost uniform."""
    server = byhand.server(2, {"graph": np.eye(2)}, model=[[0.0]] * 2, direction=[[0.0]] * 2)
    told = byhand.notes([4, 4, 4], client=[0, 0, 1], gram=np.eye(3).tolist())
    plan = PFedGraph(alpha=5.0).aggregate(server, told)
    graph, weights = plan.algorithm_state["graph"], plan.mixings[0].weights
    assert_allclose(graph.sum(1), 1)
    assert_allclose(graph, np.stack([weights[:, :2].sum(1), weights[:, 2]], 1))


def test_the_local_term_is_the_gradient_of_the_cosine():
    """w = (3, 4), v = (1, 0): <v, w> / ||w|| = 0.6; its gradient is v / 5 - 3 w / 125 = (0.128, -0.096)."""
    w, v, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert_close(aligned(0.5, v)(g, w), torch.tensor([1 - 0.064, 1 + 0.048]))
    assert_close(aligned(0.5, torch.zeros(2))(g, w), g)


@pytest.mark.parametrize(("variant", "sign"), [("paper", 1.0), ("repo", -1.0)])
def test_the_authors_code_has_the_other_sign(variant, sign):
    """F is flat at w = target = (3, 4): one step of rate 0.5 moves w by sign * 0.5 * lam * gradient of the
    cosine.
    """
    client, lam = byhand.Quadratic([3.0, 4.0]), 0.5
    message = byhand.message(model=[[3.0, 4.0]], direction=[[1.0, 0.0]])
    report, _ = PFedGraph(lam=lam, variant=variant).local_update(message, {}, client, byhand.KEY)
    assert_close(report.vectors["delta"], torch.tensor([3 + sign * 0.032, 4 - sign * 0.024]))


def test_what_the_server_can_work_out_is_not_counted(tmp_path):
    """One model up; down the own mixture and its direction, p numbers."""
    for variant, down in (("paper", 2), ("emdcfl", 1)):
        done = toy.run(PFedGraph(variant=variant), toy.Tiny(), tmp_path / variant, steps=2)
        ledger, d = done.server_step.ledger, done.server_step.problem.layout.size
        assert (ledger.total("up"), ledger.total("down")) == (4 * d * 12, 4 * down * d * 12)


def test_a_graph_held_at_p_is_fedavg(tmp_path):
    agree(Limit("alpha large", "pfedgraph", {"alpha": 1e9, "lam": 0.0}), "fedavg", 1.0, tmp_path)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_graph_that_only_sees_oneself_is_local_training(participation, tmp_path):
    options = {"alpha": 1e-6, "lam": 0.0, "variant": "emdcfl"}
    agree(Limit("alpha -> 0", "pfedgraph", options), "local", participation, tmp_path)
