"""IFCA by hand: which model a client trains, what it compares, gradient steps, shared bodies, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData


def test_a_client_of_ifca_trains_the_model_that_fits_best():
    """Models 0, 5, 9 for F(w) = (w - 4)^2 / 2: model 1; one step of 0.5: 5 - 0.5 = 4.5."""
    method = CATALOGUE["ifca"](num_clusters=3)
    told = byhand.message(model=[[0.0], [5.0], [9.0]])
    report, _ = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert int(report.notes["cluster"]) == 1
    assert_close(report.vectors["model"], torch.tensor([4.5]))


@pytest.mark.parametrize(("select_on", "cluster", "trained"), [("train", 1, 4.5), ("val", 2, 6.5)])
def test_a_client_of_ifca_compares_where_it_is_told_and_trains_on_its_training_data(
    select_on, cluster, trained
):
    """Targets: 4 in training, 10 in validation, 0 in test. Nearest of the models 0, 5, 9 are 5, 9 and 0.

    One step of 0.5 towards the training target: 5 - 0.5 = 4.5, or 9 - 2.5 = 6.5.
    """
    method = CATALOGUE["ifca"](num_clusters=3, select_on=select_on)
    client = byhand.Quadratic([4.0], val=[10.0], test=[0.0])
    report, _ = method.local_update(byhand.message(model=[[0.0], [5.0], [9.0]]), {}, client, byhand.KEY)
    assert int(report.notes["cluster"]) == cluster
    assert_close(report.vectors["model"], torch.tensor([trained]))
    sets = {"models": torch.tensor([[0.0], [9.0], [0.0], [5.0], [0.0], [9.0]])}
    tried = CATALOGUE["ifca"](num_clusters=3, restarts=2, select_on=select_on).fingerprint(
        client, sets, byhand.KEY
    )
    assert_array_equal(tried.notes["tried"], [0, 0] if select_on == "train" else [1, 2])


def test_ifca_under_emdcfl_compares_means_of_batches_of_the_validation_data():
    """Losses 2 on 64 samples and 1 on one more, against 1.6 on all: the mean over samples prefers the second,
    1.98 > 1.6, the mean of the means of both batches, 1.5, the first. On training data the third is best.
    """

    class Client(byhand.Told):
        def loss(self, vector, split=None):
            return float(self.losses(vector, split).mean())

        @property
        def data(self):
            return ClientData(byhand.images(0, 2), byhand.images(1, 65), byhand.images(2, 2))

    losses = [[9.0, 9.0], [9.0, 9.0], [0.0, 0.0]]
    client = Client(losses, val=[[2.0] * 64 + [1.0], [1.6] * 65, [9.0] * 65])
    models = byhand.message(model=[[0.0], [1.0], [2.0]])
    for options, chosen in (
        ({"variant": "emdcfl"}, 0),
        ({"select_on": "val", "loss_batch": 64}, 0),
        ({"variant": "emdcfl", "loss_batch": 0}, 1),
        ({"select_on": "val"}, 1),
        ({"variant": "emdcfl", "select_on": "train"}, 2),
        ({}, 2),
    ):
        assert int(CATALOGUE["ifca"](num_clusters=3, **options).model_of(models, {}, client)[0]) == chosen
    method = CATALOGUE["ifca"](num_clusters=3, variant="emdcfl")
    assert method.needs.validation
    (mixing,) = method.aggregate(
        byhand.server(2, model=[[0.0]] * 3), byhand.notes([1, 3], cluster=[1, 1])
    ).mixings
    assert_allclose(mixing.weights[1], [0.25, 0.75])


@pytest.mark.parametrize(("weighted", "row"), [(False, [0.5, 0.5, 0]), (True, [0.25, 0.75, 0])])
def test_the_server_of_ifca_keeps_an_empty_cluster_and_remembers_choices(weighted, row):
    """Clients 0, 2 chose 1, client 3 chose 0, nobody 2; client 1 was away."""
    method = CATALOGUE["ifca"](num_clusters=3, weighted=weighted)
    server = byhand.server(4, model=[[0.0], [5.0], [9.0]])
    plan = method.aggregate(server, byhand.notes([1, 3, 2], [0, 2, 3], cluster=[1, 1, 0]))
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights, [[0, 0, 1], row, [0, 0, 0]])
    assert_array_equal(mixing.keep, [0, 0, 1])
    assert_array_equal(plan.assign, [1, 0, 1, 0])


def test_a_visit_of_ifcas_gradient_variant_is_one_step_on_all_training_data():
    """Model 5 fits best: one step of rate 0.5 towards 4 is an update of -0.5, without momentum."""
    method, client = CATALOGUE["ifca"](num_clusters=2, variant="gradient"), byhand.Quadratic([4.0])
    report, _ = method.local_update(byhand.message(model=[[0.0], [5.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([-0.5]))
    expected = {"epochs": 1, "batch_size": client.num_samples, "momentum": 0.0, "optimizer": "sgd"}
    assert client.calls[0].changes == expected


def test_ifcas_weight_sharing_sends_body_and_head():
    """Body 1 under heads (0, 0) and (2, 2), target (3, 2, 2), rate 0.5: the second head fits; (2, 2, 2)."""
    method, client = CATALOGUE["ifca"](num_clusters=2, share="body"), byhand.Quadratic([3.0, 2.0, 2.0])
    client.layout = byhand.FLAT
    told = byhand.message(body=[[1.0]], head=[[0.0, 0.0], [2.0, 2.0]])
    report, _ = method.local_update(told, {}, client, byhand.KEY)
    assert int(report.notes["cluster"]) == 1
    expected = {"body": torch.tensor([2.0]), "head": torch.tensor([2.0, 2.0])}
    assert_close(dict(report.vectors), expected)


def test_ifcas_gradient_step_divides_by_all_who_take_part():
    """Clients 0, 1 chose model 1, client 2 model 0: each gradient counts 1/3, and both models stay."""
    method = CATALOGUE["ifca"](num_clusters=2, variant="gradient")
    plan = method.aggregate(
        byhand.server(3, model=[[0.0], [5.0]]), byhand.notes([1, 3, 2], cluster=[1, 1, 0])
    )
    assert_allclose(plan.mixings[0].weights, [[0, 0, 1 / 3], [1 / 3, 1 / 3, 0]])
    assert_array_equal(plan.mixings[0].keep, [1, 1])


def test_ifcas_weight_sharing_averages_the_body_over_all_and_heads_over_their_own():
    method = CATALOGUE["ifca"](num_clusters=2, share="body")
    server = byhand.server(3, body=[[0.0]], head=[[0.0], [5.0]])
    body, head = method.aggregate(server, byhand.notes([1, 3, 2], cluster=[1, 1, 0])).mixings
    assert (body.into, head.into) == ("body", "head")
    assert_allclose(body.weights, [[1 / 3, 1 / 3, 1 / 3]])
    assert_allclose(head.weights, [[0, 0, 1], [1 / 2, 1 / 2, 0]])


def test_ifcas_restarts_take_the_first_set_that_spreads_the_clients():
    """Three sets for four clients: all on one model; 3 and 1; 2 and 2. A share of 0.25 is one client: set
    1.
    """
    tried = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    method = CATALOGUE["ifca"](num_clusters=2, restarts=3, least=0.25)
    server = method.setup(byhand.problem([1] * 4), byhand.notes([1] * 4, tried=tried), byhand.KEY)
    assert_close(server.tables["model"][:, 0], torch.tensor([2.0, 3.0]))
    method = replace(method, least=0.5)
    server = method.setup(byhand.problem([1] * 4), byhand.notes([1] * 4, tried=tried), byhand.KEY)
    assert_close(server.tables["model"][:, 0], torch.tensor([4.0, 5.0]))


def test_ifca_begins_with_fedavg_and_then_with_its_body_and_fresh_heads(tmp_path):
    """Three warm rounds: all share the last head, and the other two stay as drawn. Then clients choose."""
    method = CATALOGUE["ifca"](num_clusters=2, share="body", warm_rounds=3)
    world = {"model": toy.mlp(8, 6), "participation": 1.0}
    first = toy.run(method, toy.Tiny(), tmp_path / "0", 1, **world).server_step.initialize()
    assert [method.reads(replace(first, version=v), 0)["head"] for v in (0, 2, 3)] == [(2,), (2,), (0, 1)]
    warm = toy.run(method, toy.Tiny(), tmp_path / "3", 3, **world).server
    assert_close(warm.tables["head"][:2], first.tables["head"][:2])
    assert float((warm.tables["head"][2] - first.tables["head"][2]).abs().max()) > 1e-3
    assert set(warm.assign.tolist()) == {2}
    after = toy.run(method, toy.Tiny(), tmp_path / "4", 4, **world).server
    assert_close(after.tables["head"][2], warm.tables["head"][2])
    assert set(after.assign.tolist()) <= {0, 1}
    with pytest.raises(UserError, match="warm_rounds"):
        CATALOGUE["ifca"](warm_rounds=1)
