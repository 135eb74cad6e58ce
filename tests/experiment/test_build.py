"""What a configuration becomes before the first step: initial weights, who is evaluated, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from torch import nn

from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment.schema import EvaluationConfig, Seeds, SystemConfig
from mpifl.models import MODELS


def initial(**seeds: int) -> Callable[[int], torch.Tensor]:
    """Return j -> the j-th initial vector."""
    config = toy.config_of(CATALOGUE["fedavg"](), seed=Seeds(**seeds))
    return toy.context_of(config, toy.Tiny()).problem.init


def first(j: int = 0, **seeds: int) -> torch.Tensor:
    """Return the j-th initial vector."""
    return initial(**seeds)(j)


@pytest.mark.parametrize("seed", ["data", "training", "system"])
def test_initial_weights_follow_the_models_seed_alone(seed):
    assert torch.equal(first(), first(**{seed: 7}))
    assert not torch.equal(first(), first(model=7))
    assert torch.equal(first(2, model=7), first(2, model=7, **{seed: 9}))


def test_initial_weights_are_independent_and_draw_nothing_from_the_process():
    init = initial()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert not torch.equal(init(0), init(1))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("asked", "clients"),
    [
        (None, range(7)),
        (7, range(7)),
        (99, range(7)),
        (1, [0]),
        (2, [0, 6]),
        (3, [0, 3, 6]),
        (4, [0, 2, 4, 6]),
    ],
)
def test_judged_clients_are_evenly_spaced_from_the_first_to_the_last(asked, clients):
    config = toy.config_of(CATALOGUE["fedavg"](), evaluation=EvaluationConfig(clients=asked))
    context = toy.context_of(config, toy.Tiny(7, 1))
    assert_array_equal(context.evaluated_clients, np.array(clients))


class Normed:
    """A model with batch norm."""

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return the network."""
        module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, num_classes))
        module.embed = nn.Flatten()
        return module


class Drawing(nn.Sequential):
    """A network that draws by a function, which no layer says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(nn.functional.dropout(x, training=self.training))


class Dropped:
    """A model of this network."""

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return the network."""
        return Drawing(nn.Flatten(), nn.Linear(16, num_classes))


@pytest.mark.parametrize(
    "model", [MODELS["flt_mlp"](), Normed(), Dropped()], ids=["dropout", "batch norm", "function"]
)
def test_a_model_whose_clients_cannot_share_a_step_is_not_stacked(model, tmp_path):
    fedavg, world = CATALOGUE["fedavg"](), toy.Tiny()
    with pytest.raises(UserError, match=r"system\.stack = 2"):
        toy.start(fedavg, world, tmp_path, Single(), model=model, system=SystemConfig(stack=2))
    alone, _ = toy.start(fedavg, world, tmp_path, Single(), model=model, system=SystemConfig(stack=0))
    assert alone.config.stack == 1
