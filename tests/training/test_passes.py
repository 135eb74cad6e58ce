"""Passes and FLOPs from shapes, against PyTorch's counter on networks that compute."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from support import toy
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mpifl.core.computation import Work
from mpifl.core.federation import Split
from mpifl.models import MODELS
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.passes import Passes, form_of


def counted(module: nn.Module, x: torch.Tensor, backward: bool, function: str = "forward") -> int:
    """Return what PyTorch's own counter finds while the network computes."""
    with FlopCounterMode(display=False) as counter:
        out = getattr(module, function)(x)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


IMAGES = {"mlp": (1, 8, 8), "emdcfl_cnn": (1, 28, 28), "lenet5": (1, 28, 28), "resnet20": (3, 32, 32)}


@pytest.mark.parametrize("name", IMAGES)
def test_flops_are_those_of_pytorch(name):
    torch.manual_seed(0)
    module = MODELS[name]().build(IMAGES[name], 10)
    passes = Passes(Learner(module, kernels=False).context)
    for n in (3, 7):
        x = torch.zeros(n, *IMAGES[name])
        trained = passes.training(Split(x, torch.zeros(n).long()), LocalConfig(batch_size=n))
        assert trained == Work(0, 0, 1, n, counted(module, x, True))
        assert passes.outputs(x) == Work(1, n, 0, 0, counted(module, x, False))
        assert passes.outputs(x, embedding=True).flops == counted(module, x, False, "embed")


class PerBatch(nn.Module):
    """Its FLOPs are 2 (3 4 5 + b 3 5): a product of its weights, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, 5))

    def forward(self, x):
        return x @ (self.a @ self.b)


class Pairs(nn.Linear):
    """Its FLOPs grow with the square of the batch: 2 (b 3 5 + b b 5)."""

    def __init__(self) -> None:
        super().__init__(3, 5, bias=False)

    def forward(self, x):
        z = super().forward(x)
        return z @ z.T


class Reading(nn.Linear):
    """Its forward pass reads a number, which a tensor without data does not have: 2 (b 3 5)."""

    def __init__(self) -> None:
        super().__init__(3, 5)

    def forward(self, x):
        return super().forward(x) * float(self.weight.sum() > 0)


@pytest.mark.parametrize(
    ("module", "flops"),
    [
        (PerBatch(), lambda b: 2 * (3 * 4 * 5 + b * 3 * 5)),
        (Pairs(), lambda b: 2 * (b * 3 * 5 + b * b * 5)),
        (Reading(), lambda b: 2 * b * 3 * 5),
    ],
)
def test_flops_that_a_batch_has_whatever_its_size(module, flops):
    passes = Passes(Learner(module, kernels=False).context)
    for b in (1, 2, 9, 30):
        assert passes.outputs(torch.zeros(b, 3)).flops == flops(b)
    assert passes.outputs(torch.zeros(300, 3)).flops == flops(256) + flops(44)
    assert passes.outputs(torch.zeros(300, 3)).forward_passes == 2


def test_an_lstm_counts_its_products_although_pytorch_fuses_them():
    """4 gates of 6 units from 3 inputs and 6 states, for 5 steps: 2 (3 + 6) 24 5 = 2160 a sample."""

    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    passes = Passes(Learner(Last(3, 6, batch_first=True), kernels=False).context)
    assert passes.outputs(torch.zeros(2, 5, 3)).flops == 2 * 2160


def test_an_encoder_counts_its_products_although_pytorch_fuses_them():
    """5 tokens of 8 numbers: 2 (5 8) 24 + 2 (5 5 8) 2 + 2 (5 8) 8 + 2 (5 8) 16 2 = 5920 a sample."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    passes = Passes(Learner(encoder, kernels=False).context)
    assert passes.outputs(torch.zeros(3, 5, 8)).flops == 3 * 5920


@pytest.mark.parametrize(
    ("local", "work", "expected"),
    [
        (LocalConfig(epochs=3, batch_size=5), None, (3 * 3, 3 * 14)),
        (LocalConfig(epochs=2, batch_size=7), None, (2 * 2, 2 * 14)),
        (LocalConfig(steps=4, batch_size=5), None, (4, 14 + 5)),
        (LocalConfig(epochs=1, batch_size=50), None, (1, 14)),
        (LocalConfig(epochs=2, batch_size=5), Fraction(2, 3), (4, 14 + 5)),
        (LocalConfig(epochs=0), None, (0, 0)),
    ],
)
def test_batches_and_samples_of_a_training(local, work, expected):
    """14 samples; a visit that ends early has the share of its batches that it made."""
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    client = LocalClient(2, toy.Tiny(), learner, local, work=work)
    with learner.computation.counting() as found:
        steps = client.sgd(client.init, toy.key(1)).steps
    batches, samples = expected
    assert steps == batches
    work = Work(0, 0, batches, samples, 656 * samples)
    assert found.table.tolist() == [[2, 0, *work]]


def test_only_the_gradients_of_the_part_that_is_trained_count():
    """The head alone: forward 304, gradient of its weights 2 (8 3) = 48, none of the hidden layer."""
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    client = LocalClient(2, toy.Tiny(), learner, LocalConfig(batch_size=14))
    with learner.computation.counting() as found:
        client.sgd(client.init, toy.key(1), part=client.layout.part("head"))
    assert found.table[0, -1] == (304 + 48) * 14


def test_a_last_batch_of_one_sample_is_left_out_with_batch_norm():
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    passes = Passes(Learner(module, kernels=False).context)
    made = passes.trainings(form_of((1, 4, 4)), 11, LocalConfig(batch_size=5))
    assert (made.backward_passes, made.backward_samples) == (2, 10)
    joined = passes.outputs(torch.zeros(65, 1, 4, 4), train_mode=True)
    assert (joined.forward_passes, joined.forward_samples, joined.flops) == (1, 65, 304 * 65)


def test_what_a_direction_evaluates_belongs_to_the_training():
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    client = LocalClient(2, toy.Tiny(), learner, LocalConfig(batch_size=14, epochs=2))

    def direction(g, w):
        client.loss(client.init)
        return g

    with learner.computation.counting() as found:
        client.sgd(client.init, toy.key(1), direction=direction)
        client.loss(client.init)
    training, choice = found.table.tolist()
    assert training == [2, 0, 2, 28, 2, 28, (2 * 304 + 2 * 656) * 14]
    assert choice == [2, 1, 1, 14, 0, 0, 304 * 14]


def test_nothing_is_counted_outside():
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES))
    client = LocalClient(2, toy.Tiny(), learner, toy.LOCAL)
    client.sgd(client.init, toy.key(1))
    with learner.computation.counting() as outer:
        with learner.computation.counting() as inner:
            client.loss(client.init)
        client.loss(client.init)
    assert len(inner.table) == len(outer.table) == 1
    assert inner.table.tolist() == outer.table.tolist()
