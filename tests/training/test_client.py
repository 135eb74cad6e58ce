"""A client's evaluation, embeddings, losses and gradients."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from support import toy
from torch import nn
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.federation import Split
from mpifl.core.parameters import put, take
from mpifl.core.progress import stages
from mpifl.core.rng import key
from mpifl.training.client import LocalClient, LocalClients, public_clients
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.pytorch_backend import EVAL_BATCH


@pytest.fixture
def client() -> LocalClient:
    """Client 2 of the tiny federation at its fourth visit."""
    torch.manual_seed(5)
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    return LocalClient(2, toy.Tiny(), learner, toy.LOCAL, visit=3, step=7)


def test_a_client_knows_its_place_and_size(client):
    assert (client.id, client.visit, client.num_samples) == (2, 3, 14)
    assert len(client.data.train) == 14
    assert len(client.init) == client.layout.size


def test_accuracy_and_loss_by_hand(client):
    """Zero weights, head bias (0, 9, 0): every sample is called 1; of labels 0 1 2 0 1 2 0 1 2 a third is so.

    Loss of a right one: log(1 + 2 e^-9) = 0.000247; of a wrong one: 9 + that.
    """
    vector = torch.zeros(client.layout.size)
    vector[client.layout.slices["head.bias"]] = torch.tensor([0.0, 9.0, 0.0])
    scores = client.evaluate(vector)
    assert_allclose(scores["accuracy"], 1 / 3)
    assert_allclose(scores["loss"], 6 + np.log1p(2 * np.exp(-9)), rtol=1e-6)
    assert_allclose(client.loss(vector, client.data.test), scores["loss"], rtol=1e-6)
    assert_allclose(client.losses(vector, client.data.test)[1], np.log1p(2 * np.exp(-9)), rtol=1e-3)


def test_what_is_not_said_otherwise_is_trained_and_compared_on_training_data_and_judged_on_test_data(client):
    train, test, w = client.data.train, client.data.test, client.init
    assert client.evaluate(w) == client.evaluate(w, test) != client.evaluate(w, client.data.val)
    assert_close(client.losses(w), client.losses(w, train), rtol=0, atol=0)
    assert client.loss(w) == client.loss(w, train)
    assert_allclose(client.loss(w), client.losses(w).double().mean())
    assert_close(client.gradient(w), client.gradient(w, train), rtol=0, atol=0)
    a, b = client.sgd(w, key(1)), client.sgd(w, key(1), split=train)
    assert_close(a.vector, b.vector, rtol=0, atol=0)
    seen = torch.cat([batch.y for batch in client.batches(key(1))])
    assert sorted(seen.tolist()) == sorted(train.y.tolist())


def test_the_epochs_of_a_call_count_also_where_local_steps_are_given():
    """14 samples in batches of 5 are 3 mini-batches a pass; 7 steps are for trainings that say nothing."""
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    local = toy.LocalConfig(steps=7, batch_size=5)
    client = LocalClient(2, toy.Tiny(), learner, local)

    def taken(**changes):
        trained = client.sgd(client.init, key(1), **changes).steps
        assert len(list(client.batches(key(1), **changes))) == trained
        return trained

    assert [taken(), taken(lr=0.1), taken(epochs=2), taken(epochs=0)] == [7, 7, 6, 0]
    assert [taken(steps=4), taken(epochs=2, steps=4)] == [4, 4]


def test_an_empty_split_scores_nan(client):
    empty = Split(torch.zeros(0, *toy.SHAPE), torch.zeros(0, dtype=torch.int64))
    assert np.isnan(list(client.evaluate(client.init, empty).values())).all()


@pytest.mark.parametrize("name", ["loss", "losses"])
def test_the_loss_of_an_empty_split_is_refused_and_none_of_training_data(name, client):
    empty = Split(torch.zeros(0, *toy.SHAPE), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(UserError, match=r"data\.scenario = 'client \d': has no samples"):
        getattr(client, name)(client.init, empty)


def test_logits_are_the_head_of_the_embedding(client):
    x = client.data.train.x
    head = take(client.init, client.layout.part("head"))
    weight, bias = head[:24].view(3, 8), head[24:]
    embedded = client.embed(client.init, x)
    assert embedded.shape == (14, 8)
    assert_close(client.logits(client.init, x), F.linear(embedded, weight, bias), rtol=1e-6, atol=1e-6)
    other = put(client.init, client.layout.part("head"), torch.zeros(27))
    assert_close(client.embed(other, x), embedded, rtol=0, atol=0)


def test_evaluation_in_batches_is_evaluation(client):
    x = torch.randn(EVAL_BATCH + 3, *toy.SHAPE)
    whole = client.logits(client.init, x)
    assert_close(whole[-3:], client.logits(client.init, x[-3:]), rtol=1e-5, atol=1e-6)


def test_training_uses_the_clients_step_for_its_rate_and_may_change_settings(client):
    trained = client.sgd(client.init, key(0), lr=0.5, lr_decay=0.5, epochs=2)
    assert_allclose(trained.lr, 0.5**7)
    assert trained.steps == 2 * 3  # 14 samples in batches of 5
    assert client.sgd(client.init, key(0), split=client.data.val).steps == 2


def test_a_report_carries_size_and_vectors(client):
    report = client.report({"loss": 1.0}, {"train_loss": 2.0}, model=client.init)
    assert (report.client, report.num_samples) == (2, 14)
    assert set(report.vectors) == {"model"}
    assert report.notes == {"loss": 1.0}
    assert report.metrics == {"train_loss": 2.0}


def test_a_training_at_the_server_says_which_mini_batch_it_is_at_and_that_of_a_client_is_no_stage():
    """FLT's autoencoder takes an hour on CIFAR-10."""
    model, autoencoder = (toy.mlp(8).build(toy.SHAPE, toy.CLASSES) for _ in range(2))
    learner = Learner(model, kernels=False, auxiliary=Learner(autoencoder, kernels=False))
    federation, seen = toy.Tiny(), []

    def loss(module, x, y, index):
        seen.append([str(stage) for stage in stages()])
        return F.cross_entropy(module(x), y)

    data = federation.client(2).train
    (house,) = (c.auxiliary for c in public_clients(federation, learner, toy.LOCAL, [data]))
    house.sgd(house.init, key(1), loss=loss, epochs=2, batch_size=5)
    assert len(data) == 14
    assert seen == [[f"training on the server's data, {done} of 6 mini-batches"] for done in range(6)]
    assert stages() == []
    seen.clear()
    LocalClient(2, federation, learner, toy.LOCAL).sgd(house.init, key(1), loss=loss)
    assert seen
    assert not any(seen)


def test_a_part_that_cuts_a_tensor_or_holds_no_parameter_is_refused():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    client = LocalClient(2, toy.Tiny(), Learner(net), toy.LOCAL)
    slices, p, d = client.layout.slices, client.layout.num_parameters, client.layout.size
    weight = slices["1.weight"]
    cuts = (slice(0, 10),), (slice(5, weight.stop),), (slice(weight.stop, p + 1),), (slice(0, None),)
    for part in cuts:
        with pytest.raises(UserError, match="cuts a tensor; use whole ones"):
            client.sgd(client.init, key(1), part=part)
    for part in (), (slice(0, 0),), (slice(p, d),):
        with pytest.raises(UserError, match="holds no parameter"):
            client.sgd(client.init, key(1), part=part)
    moved = client.sgd(client.init, key(1), part=(weight, slice(p, d))).vector != client.init
    assert moved[weight].any()
    assert not moved[weight.stop : p].any()


def test_half_of_the_work_with_batch_norm_is_half_of_the_mini_batches_that_are_taken():
    """Batches of 13: of 14 samples the last, which holds one, is left out. Four epochs are four steps."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    learner, local = Learner(net), LocalConfig(epochs=4, batch_size=13, lr=0.1)
    world = toy.Tiny()
    assert LocalClients(world, learner, local).num_steps(2, 0) == (4, 1)
    for work, steps in ((None, 4), (Fraction(1, 2), 2), (Fraction(1, 8), 1)):
        client = LocalClient(2, world, learner, local, work=work)
        assert client.sgd(client.init, key(1)).steps == steps
        assert len(list(client.batches(key(1)))) == steps
