"""MOON: the contrastive loss by hand, and the limit without it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.moon import MOON, contrastive
from mpifl.core.rng import key
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.tasks import Classification


class Plain(torch.nn.Module):
    """Embedding = the input, logits = the embedding."""

    def embed(self, x):
        return x

    def head(self, z):
        return z


def test_the_contrastive_loss_by_hand():
    """z = (1, 0); z_glob = (0, 2), cosine 0; z_prev = (3, 0), cosine 1; tau = 0.5.

    con = -ln(1 / (1 + e^2)) = ln(1 + e^2); the loss adds mu = 2 times it. Row 1 of the fixed embeddings is
    meant.
    """
    z_glob, z_prev = torch.tensor([[9.0, 9.0], [0.0, 2.0]]), torch.tensor([[9.0, 9.0], [3.0, 0.0]])
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    loss = contrastive(lambda _, index: (z_glob[index], z_prev[index]), 2.0, 0.5, Classification())
    value = loss(Plain(), x, y, torch.tensor([1]))
    assert_allclose(value, float(F.cross_entropy(x, y)) + 2 * math.log(1 + math.exp(2)), rtol=1e-6)


class Embedding(byhand.Quadratic):
    """A client whose embedding under w is (w, x); it remembers the loss that it trained by."""

    def embed(self, vector, x, *, train_mode=False):
        return torch.cat([vector.expand(len(x), -1), x], 1)

    def sgd(self, start, key, *, loss=None, **changes):
        self.seen = loss
        return super().sgd(start, key, **changes)


@pytest.mark.parametrize(("state", "previous"), [({}, 1.0), ({"model": torch.tensor([2.0])}, 2.0)])
def test_a_visit_contrasts_the_global_model_with_the_clients_last_one(state, previous):
    """Global model 5, own last model 2, in the first visit the initial 1. A sample x has z_glob = (5, 0) and
    z_prev = (2, 0) or (1, 0), from the training images, which are 0.

    It trains from the global model towards 4 and keeps what came out, 4.5.
    """
    client = Embedding([4.0], init=[1.0])
    asked = []
    method = MOON(mu=2.0, temperature=0.5)

    def spy(*arguments):
        asked.append(arguments)
        return "the loss"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.algorithms.moon.contrastive", spy)
        report, kept = method.local_update(byhand.message(model=[[5.0]]), state, client, byhand.KEY)
    ((fixed, mu, tau, _),) = asked
    z_glob, z_prev = fixed(None, torch.arange(10))
    assert_close(z_glob, torch.tensor([[5.0, 0.0]]).expand(10, -1))
    assert_close(z_prev, torch.tensor([[previous, 0.0]]).expand(10, -1))
    assert (mu, tau, client.seen) == (2.0, 0.5, "the loss")
    assert_close(report.vectors["model"], torch.tensor([4.5]))
    assert_close(kept["model"], torch.tensor([4.5]))


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_contrast_it_is_fedavg(participation, tmp_path):
    agree(Limit("mu = 0", "moon", {"mu": 0.0}), "fedavg", participation, tmp_path)


def test_the_contrast_acts_from_the_second_visit(tmp_path):
    """In the first, the global and the last local model are both the initial one: the contrast has no
    gradient.
    """
    for steps, least, most in ((1, 0.0, 1e-5), (2, 1e-3, 1.0)):
        runs = [toy.run(a, toy.Tiny(), tmp_path / f"{steps} {a}", steps) for a in (MOON(mu=5.0), FedAvg())]
        gap = float((runs[0].models() - runs[1].models()).abs().max())
        assert least <= gap <= most


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_the_three_embeddings_are_of_one_image(kernels, augment):
    """In the first step z is z_glob. With a small tau, con = ln(1 + exp((cos(z, z_prev) - 1) / tau)) is 0,
    and the loss is that of FedAvg; z_glob of other images would have another cosine.
    """
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES), kernels=kernels)
    config = LocalConfig(steps=1, batch_size=8, lr=0.1, augment=augment)
    client = LocalClient(1, toy.Tiny(), learner, config)
    message, address = byhand.message(model=[learner.init.tolist()]), key(3, "visit", 1, 0)
    losses = [
        method.local_update(message, state, client, address)[0].metrics["train_loss"]
        for method, state in ((MOON(temperature=1e-3), {"model": -learner.init}), (FedAvg(), {}))
    ]
    assert_allclose(losses[0], losses[1], atol=1e-5)
