"""Clients that never took part: the model they are evaluated by, and whether they count as clustered."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.results.columns import Evaluation, metrics_row

EVEN = torch.tensor([0.5, 0.5])
ROWS = [[0.0], [5.0], [9.0]]
CHOOSERS = {
    "ifca": {"num_clusters": 3},
    "hypcluster": {"num_clusters": 3},
    "fesem": {"num_clusters": 3},
    "fedce": {"num_clusters": 3},
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_a_client_chooses_its_row_when_it_is_judged_before_its_first_visit(name):
    """Targets: 8 in training, 4 in validation, -1 in test. Rows 0, 5, 9: nearest to them are 9, 5 and 0.

    Training data decide; FedCE compares on validation data. A client that was visited is served its row
    alone.
    """
    method, server = CATALOGUE[name](**CHOOSERS[name]), byhand.server(2, model=ROWS)
    assert method.serves_unseen(server, 1) == {"model": (0, 1, 2)}
    assert method.serves(server, 1) == {"model": (0,)}
    client = byhand.Quadratic([8.0], val=[4.0], test=[-1.0])
    chosen = method.model_of(byhand.message(model=ROWS), {}, client)
    assert_close(chosen, torch.tensor([5.0 if name == "fedce" else 9.0]))
    assert_close(method.model_of(byhand.message(model=[[0.0]]), {}, client), torch.tensor([0.0]))


def test_ifca_compares_on_the_split_it_trains_by():
    client = byhand.Quadratic([8.0], val=[4.0], test=[-1.0])
    method = CATALOGUE["ifca"](num_clusters=3, select_on="val")
    assert_close(method.model_of(byhand.message(model=ROWS), {}, client), torch.tensor([5.0]))


def test_ifca_with_weight_sharing_serves_the_body_and_all_heads():
    server = byhand.server(2, body=[[7.0]], head=[[0.0], [5.0]])
    served = CATALOGUE["ifca"](num_clusters=2, share="body").serves_unseen(server, 1)
    assert served == {"body": (0,), "head": (0, 1)}


@pytest.mark.parametrize("name", CHOOSERS)
def test_those_never_visited_are_judged_by_their_best_row(name, tmp_path):
    """Two of six clients took part once. Of the rest, each is evaluated by the row of lowest loss on its own
    data.
    """
    method = CATALOGUE[name](num_clusters=2, **({"variant": "flexcfl"} if name == "fesem" else {}))
    done = toy.run(method, toy.Tiny(), tmp_path, steps=1, participation=1 / 3)
    seen, rows = done.notes[0].client, done.server.tables["model"]
    unseen = np.setdiff1d(np.arange(6), seen)
    for k in range(6):
        client = done.served[k][2]
        split = client.data.val if name == "fedce" else client.data.train
        best = int(np.argmin([client.loss(w, split) for w in rows]))
        row = best if k in unseen else int(done.server.assign[k])
        assert_close(done.scores["loss"][k], client.evaluate(rows[row])["loss"])
    chosen = {int((rows == done.model(k)).all(1).nonzero()[0]) for k in unseen.tolist()}
    assert chosen == {0, 1}, "in this world the groups choose different rows"


@pytest.mark.parametrize("name", ["fedem", "fedrc"])
def test_mixtures_of_models_find_the_shares_of_a_client_on_its_training_data(name):
    """Losses 0 under component 0 and ln 3 under 1: shares (3/4, 1/4) from even ones. FedRC's C is even.

    Chances of label 0 are 0.9 and 0.1: mixed 0.7. A client that was visited has its shares.
    """
    client = byhand.Told([[0.0] * 10, [math.log(3)] * 10], [[[0.9, 0.1]] * 10, [[0.1, 0.9]] * 10])
    told = byhand.message(model=[[0.0], [1.0]], labels=[[1.0, 1.0], [1.0, 1.0]])
    split = byhand.images(2, 10)
    option = "num_components" if name == "fedem" else "num_clusters"
    scores = CATALOGUE[name](**{option: 2}).evaluate(told, {}, client, split)
    assert_allclose(scores["loss"], -math.log(0.7), rtol=1e-6)
    own = CATALOGUE[name](**{option: 2}).evaluate(told, {"pi": EVEN}, client, split)
    assert_allclose(own["loss"], -math.log(0.5), rtol=1e-6)


def test_fedsoft_mixes_the_centres_by_the_clients_training_samples():
    """Centre 0 fits six of ten samples, centre 1 four: 0.4. Later it has a model of its own."""
    client = byhand.Told([[1.0] * 10, [0.0] * 4 + [2.0] * 6])
    message = byhand.message(model=[[0.0], [1.0]])
    assert_close(CATALOGUE["fedsoft"]().model_of(message, {}, client), torch.tensor([0.4]))
    state = {"model": torch.tensor([7.0])}
    assert_close(CATALOGUE["fedsoft"]().model_of(message, state, client), torch.tensor([7.0]))


def test_everyone_else_is_judged_as_before(tmp_path):
    """With everybody visited the hook for the others is not asked."""
    done = toy.run(CATALOGUE["ifca"](num_clusters=2), toy.Tiny(), tmp_path, steps=1)
    assert [len(message["model"]) for message, _, _ in done.served.values()] == [1] * 6


# ---- agreement with the truth

SCORES = {"accuracy": np.full(4, 0.5), "loss": np.ones(4)}
LABELS, GROUPS = np.array([0, 1, 2, 2]), np.array([0, 1, 1, 1])


def test_agreement_counts_those_whose_cluster_is_known():
    """Clients 0 and 1 are apart as they should be; 2 and 3 stand in cluster 2, where all began.

    Of all: 0 | 1 | {2, 3} against 0 | {1, 2, 3}: pairs together in both 1, in clusters 1, in groups 3, of 6:
    (1 - 0.5) / (2 - 0.5) = 1/3.
    """
    row = metrics_row(Evaluation(SCORES, LABELS, GROUPS, placed=np.array([True, True, False, False])))
    assert_allclose([row[name] for name in ("ari", "nmi", "purity")], 1.0)
    assert (row["num_clusters"], row["num_unplaced"]) == (2, 2)
    assert_allclose(row["ari_everyone"], 1 / 3)
    whole = metrics_row(Evaluation(SCORES, LABELS, GROUPS))
    assert_allclose([whole["ari"], whole["ari_everyone"]], 1 / 3)
    assert (whole["num_clusters"], whole["num_unplaced"]) == (3, 0)
    nobody = metrics_row(Evaluation(SCORES, LABELS, GROUPS, placed=np.zeros(4, bool)))
    assert np.isnan([nobody[name] for name in ("ari", "nmi", "purity")]).all()


def test_clusters_are_known_by_visits_or_by_statistics():
    """Client 0 was visited, client 1 gave its statistics as a newcomer; UCFL and FedCUAU hear from all at
    first.
    """
    visited = np.array([True, False, False])
    server = byhand.server(3, {"known": [False, True, False]}, model=[[0.0]])
    for name, expected in (
        ("ifca", [1, 0, 0]),
        ("cfl", [1, 0, 0]),
        ("flt", [1, 1, 0]),
        ("pacfl", [1, 1, 0]),
        ("ucfl", [1, 1, 1]),
        ("fedcuau", [1, 1, 1]),
        ("clustered_async", [1, 1, 1]),
    ):
        assert_array_equal(CATALOGUE[name]().placed(server, visited), np.array(expected, bool), err_msg=name)
    assert_array_equal(visited, [True, False, False])


def test_choosing_at_evaluation_changes_no_state(tmp_path):
    """What is chosen for a judgement stays there: rows, assignment and algorithm state are as after the
    last step.
    """
    done = toy.run(CATALOGUE["ifca"](num_clusters=2), toy.Tiny(), tmp_path, steps=1, participation=1 / 3)
    before = toy.state_of(replace(done.server))
    done.server_step.evaluate(done.server, np.arange(6))
    toy.same(before, toy.state_of(done.server), "judging")
    unseen = np.setdiff1d(np.arange(6), done.notes[0].client)
    assert_array_equal(done.server.assign[unseen], 0)
