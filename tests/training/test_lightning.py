"""The trainer `lightning`: a LightningModule's own steps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpifl.core.client import proximal
from mpifl.core.errors import UserError
from mpifl.core.federation import Split
from mpifl.core.optional_packages import optional
from mpifl.core.rng import key
from mpifl.models import MODELS
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.trainers.lightning import Lightning

SHAPE, LOCAL = (1, 6, 6), LocalConfig(epochs=2, batch_size=7, lr=0.05)
N = 24


@cache
def net_class() -> type[nn.Module]:
    """Return the module's class; Lightning takes seconds to load, in each process that collects tests."""
    try:
        pl: Any = optional("lightning.pytorch", "lightning", "local.trainer", "lightning")
    except UserError as error:
        pytest.skip(str(error))

    class Net(pl.LightningModule):  # type: ignore[misc]
        """An MLP that trains on half of the cross-entropy, at a rate that is halved after each pass."""

        def __init__(self, by_hand: bool = False, halves: bool = True) -> None:
            super().__init__()
            with key(0, "net").seeded():
                self.net = MODELS["mlp"](hidden=(8,)).build(SHAPE, 3)
            self.automatic_optimization, self.halves, self.seen = not by_hand, halves, list[float]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = 0.5 * nn.functional.cross_entropy(self(x), y)
            self.log("half", loss, on_step=False, on_epoch=True)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            gamma = 0.5 if self.halves else 1.0
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)]

    return Net


def network(**options: bool) -> nn.Module:
    """Return a new module."""
    return net_class()(**options)


def samples() -> Split:
    """Return samples of three classes."""
    return Split(torch.randn(N, *SHAPE, generator=key(0, "samples").torch()), torch.arange(N) % 3)


def by_hand(start: torch.Tensor, rates: list[float], config: LocalConfig, mu: float = 0.0) -> torch.Tensor:
    """Return what plain SGD on half of the loss gives, pass after pass at its rate."""
    net = Learner(deepcopy(network().net), kernels=False)
    w, order = start.clone(), list(net.batches(samples(), config, key(1)))
    per_pass = -(-N // config.batch_size)
    for number, index in enumerate(order):
        split = samples()
        module = net.flat.load(w, train=True)
        net.flat.grad.zero_()
        (0.5 * nn.functional.cross_entropy(module(split.x[index]), split.y[index])).backward()
        w = w - rates[number // per_pass] * (net.flat.grad + mu * (w - start))
    return w


@pytest.mark.in_turn
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_a_module_takes_its_own_steps_and_a_method_adds_to_its_gradients(mu):
    """Passes of 4 batches at rates 0.1 and 0.05, as its scheduler says."""
    learner = Learner(network(), trainer=Lightning())
    asked = {"direction": proximal(mu, learner.init)} if mu else {}
    made = learner.sgd(learner.init, samples(), LOCAL, key(1), **asked)
    assert_close(made.vector, by_hand(learner.init, [0.1, 0.05], LOCAL, mu), rtol=0, atol=1e-6)
    assert (made.steps, made.samples) == (8, 2 * N)
    assert made.loss == pytest.approx(0.5, abs=0.2)  # half of the cross-entropy, log 3 at first
    assert set(made.metrics) == {"half"}
    again = learner.sgd(learner.init, samples(), LOCAL, key(1), **asked)
    assert_close(again.vector, made.vector, rtol=0, atol=0)


def test_a_share_of_the_work_ends_a_pass_early():
    learner, config = Learner(network(), trainer=Lightning()), replace(LOCAL, steps=6)
    made = learner.sgd(learner.init, samples(), config, key(1))
    assert (made.steps, made.samples) == (6, N + 14)
    assert_close(made.vector, by_hand(learner.init, [0.1, 0.05], config), rtol=0, atol=1e-6)


def test_accumulated_batches_report_their_whole_loss():
    learner = Learner(network(halves=False), trainer=Lightning(accumulate=4))
    made = learner.sgd(learner.init, samples(), replace(LOCAL, epochs=1), key(1))
    outputs = learner.outputs(learner.init, samples().x)
    assert made.steps == 1
    assert made.loss == pytest.approx(
        0.5 * float(nn.functional.cross_entropy(outputs, samples().y)), rel=1e-5
    )


def test_manual_optimisation_trains_and_refuses_terms_of_a_method():
    learner = Learner(network(by_hand=True, halves=False), trainer=Lightning())
    made = learner.sgd(learner.init, samples(), LOCAL, key(1))
    assert_close(made.vector, by_hand(learner.init, [0.1, 0.1], LOCAL), rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="manual optimisation"):
        learner.sgd(learner.init, samples(), LOCAL, key(1), direction=proximal(1.0, learner.init))


def test_another_module_is_refused():
    learner = Learner(MODELS["mlp"](hidden=(8,)).build(SHAPE, 3), trainer=Lightning())
    with pytest.raises(UserError, match="LightningModule"):
        learner.sgd(learner.init, samples(), LOCAL, key(1))


def test_the_tasks_of_a_scheduler_are_not_taken_for_those_of_lightning(monkeypatch):
    """Under srun Lightning would expect as many devices as Slurm has tasks, and wait for them."""
    for name, value in (("NTASKS", "4"), ("NTASKS_PER_NODE", "4"), ("PROCID", "2"), ("JOB_NAME", "fl")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    learner = Learner(network(), trainer=Lightning())
    assert learner.sgd(learner.init, samples(), LOCAL, key(1)).steps == 8
