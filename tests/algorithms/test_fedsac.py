"""FedSaC: overlap and graph by hand, and its limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose
from support import byhand, toy

from mpifl.algorithms.fedsac import FedSaC, graph, overlap, principal_directions
from mpifl.core.errors import UserError


def test_overlap_by_hand():
    """Bases (e1, e2) and (cos 60 e1 + sin 60 e3, e1).

    Cosines: row e1: 1/2, 1; row e2: 0, 0. Greedy: e1 with the second (angle 0), then e2 with the first (90
    degrees): mean 45 degrees, c = cos 45. With itself: angles 0, 0, c = 1.
    """
    first = np.array([[1.0, 0, 0], [0, 1, 0]])
    second = np.array([[0.5, 0, np.sqrt(3) / 2], [1, 0, 0]])
    c = np.sqrt(0.5)
    assert_allclose(overlap(np.stack([first, second])), [[1, c], [c, 1]], atol=1e-7)


def test_the_graph_by_hand():
    """c = (1, 0.5, 0), d = (-1, -0.5, 0.25), p = (1/2, 1/4, 1/4), lambda = (1, 2).

    (c + 2 d) / 2 = (-0.5, -0.25, 0.25); p - that = (1, 0.5, 0): t = (1.5 - 1) / 2 = 0.25, x = (0.75, 0.25,
    0).
    """
    c, d, p = np.array([[1.0, 0.5, 0.0]]), np.array([[-1.0, -0.5, 0.25]]), np.array([0.5, 0.25, 0.25])
    assert_allclose(graph(c, d, p, 1.0, 2.0), [[0.75, 0.25, 0.0]], atol=1e-12)


def test_the_graph_minimises_its_objective():
    rng = np.random.default_rng(0)
    c, d, p = rng.uniform(0, 1, (1, 5)), rng.uniform(-1, 1, (1, 5)), rng.dirichlet(np.ones(5))
    others = np.vstack([rng.dirichlet(np.ones(5), 500), np.eye(5), graph(c, d, p, 0.9, 1.4)])
    values = (others**2).sum(1) + others @ (0.9 * c[0] + 1.4 * d[0] - 2 * p)
    assert values.argmin() == len(others) - 1


def test_principal_directions_have_a_sign():
    """Points along (-3, 4) around (1, 1): the only direction is (-0.6, 0.8), its largest entry positive."""
    points = np.array([1.0, 1.0]) + np.outer([-2.0, -1.0, 0.0, 3.0], [-3.0, 4.0])
    found = principal_directions(points, 2)
    assert_allclose(found, [[-0.6, 0.8], [0, 0]], atol=1e-6)


def test_the_overlap_is_that_of_the_directions_that_there_are():
    """Bases (e1, e2), (e1, none) and none at all: c = 1 with themselves, and of e1 with e1."""
    bases = np.array([[[1.0, 0], [0, 1]], [[1, 0], [0, 0]], [[0, 0], [0, 0]]])
    assert_allclose(overlap(bases), [[1, 1, 0], [1, 1, 0], [0, 0, 0]], atol=1e-7)


def test_more_directions_than_embeddings_have_numbers_are_refused(tmp_path):
    words = r"algorithm\.num_directions = 9; embeddings have 8 numbers; use 8"
    with pytest.raises(UserError, match=words):
        toy.run(FedSaC(num_directions=9), toy.Tiny(), tmp_path, steps=1, evaluate=False)


def test_features_cost_three_directions(tmp_path):
    done = toy.run(FedSaC(), toy.Tiny(), tmp_path, steps=1, evaluate=False)
    assert done.server_step.ledger.total("up") == 4 * 6 * (done.server_step.problem.layout.size + 3 * 8)


def test_fedsac_without_terms_is_fedavg(tmp_path):
    options = {"lambda1": 0.0, "lambda2": 0.0, "lam": 0.0}
    agree(Limit("lambda = 0", "fedsac", options), "fedavg", 1.0, tmp_path)


def test_positions_of_sequences_are_rows_of_the_features():
    """Two sequences of two positions: the features vary along the first axis alone."""
    client = byhand.Quadratic([1.0, 1.0])
    client.embed = lambda w, x, train_mode=False: torch.tensor(
        [[[0.0, 1.0], [1.0, 1.0]], [[2.0, 1.0], [3.0, 1.0]]]
    )
    message = byhand.message(model=[[1.0, 2.0]], direction=[[0.0, 0.0]])
    report, _ = FedSaC(num_directions=1).local_update(message, {}, client, byhand.KEY)
    assert_allclose(report.notes["basis"], [[1.0, 0.0]], atol=1e-6)
