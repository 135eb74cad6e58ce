"""Captured steps give what ordinary steps give; on a GPU they are CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from support import toy
from torch import nn
from torch.testing import assert_close

from mpifl.core.parameters import FlatModel
from mpifl.core.rng import key
from mpifl.models import MODELS
from mpifl.training.config import LocalConfig
from mpifl.training.cuda_graph import CudaGraphBackend
from mpifl.training.learner import Learner

SPLITS = [toy.draw("train", k, n, 0) for k, n in enumerate((23, 10, 4))]  # of 5: with, without, only a rest
CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum and decay": LocalConfig(
        epochs=2, batch_size=5, lr=0.05, momentum=0.9, weight_decay=0.01, lr_decay=0.9
    ),
    "steps": LocalConfig(steps=3, batch_size=5, lr=0.1, momentum=0.5),
    "adam": LocalConfig(batch_size=5, optimizer="adam"),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def captured(learner: Learner) -> dict:
    """Return the steps that a learner has captured."""
    (backend,) = (b for b in learner.backends if isinstance(b, CudaGraphBackend))
    return backend.captured


def trained(
    graphs: bool, config: LocalConfig, name: str, device: str = "cpu", part: str | None = None, **more
):
    """Return what clients make in two rounds with one learner, and the learner."""
    torch.manual_seed(3)
    learner = Learner(MODELS[name]().build((1, 4, 4), 3), device, kernels=False, graphs=graphs)
    if part:
        more["part"] = learner.layout.part(part)
    found = [
        learner.sgd(
            learner.init, type(s)(s.x.to(device), s.y.to(device)), config, key(1, t, k), step=t, **more
        )
        for t in (1, 2)
        for k, s in enumerate(SPLITS)
    ]
    return found, learner


@pytest.mark.parametrize("part", [None, "head"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_replayed_steps_give_the_bits_of_ordinary_ones(config, part):
    plain, _ = trained(False, config, "mlp", part=part)
    replayed, learner = trained(True, config, "mlp", part=part)
    for a, b in zip(plain, replayed, strict=True):
        assert torch.equal(a.vector, b.vector)
        assert (a.steps, a.lr) == (b.steps, b.lr)
        assert_close(a.loss, b.loss)
    assert bool(captured(learner)) == (config.optimizer == "sgd")


def test_a_step_is_captured_once_for_all_clients_and_rounds():
    _, learner = trained(True, CONFIGS["momentum and decay"], "mlp")
    assert len(captured(learner)) == 1


def test_a_method_that_changes_gradients_trains_step_by_step():
    _, learner = trained(True, CONFIGS["plain"], "mlp", direction=lambda g, w: g)
    assert not captured(learner)


def test_a_model_that_draws_numbers_trains_step_by_step():
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)), graphs=True)
    learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert not captured(learner)
    assert isinstance(learner.flat, FlatModel)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_model_with_hooks_trains_step_by_step(register):
    """A captured step would call the hook once and never again."""
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)), graphs=True)
    calls = []
    handle = getattr(learner.flat.module[2], register)(lambda *given: calls.append(1))
    trained = learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert len(calls) == trained.steps
    assert not captured(learner)
    handle.remove()
    learner.sgd(learner.init, SPLITS[0], CONFIGS["plain"], key(1))
    assert captured(learner)


@gpu
@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet18"])
def test_graphs_on_a_gpu_give_what_ordinary_steps_give(name):
    config = LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.9, weight_decay=0.01)
    found = []
    for graphs in (False, True):
        torch.manual_seed(3)
        learner = Learner(MODELS[name]().build((3, 32, 32), 3), "cuda", kernels=False, graphs=graphs)
        split = toy.draw("train", 0, 23, 0)
        x = torch.randn(23, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
        found.append(learner.sgd(learner.init, type(split)(x, split.y.cuda()), config, key(1)).vector)
    assert_close(*found, rtol=1e-4, atol=1e-5)


@gpu
def test_what_a_model_draws_on_a_gpu_depends_on_the_visit_only():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    learner = Learner(model, "cuda")
    split = type(SPLITS[0])(SPLITS[0].x.cuda(), SPLITS[0].y.cuda())
    found = []
    for _ in range(2):
        found.append(learner.sgd(learner.init, split, CONFIGS["plain"], key(1)).vector)
        torch.rand(7, device="cuda")
    assert torch.equal(*found)
