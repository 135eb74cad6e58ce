"""Trainers in place of mpifl's own loop (`local.trainer`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import SGDClassifier
from support import toy
from support.cases import CASES, named
from support.nightly import mostly_nightly
from torch import nn
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import asked_of_trainer
from mpifl.core.client import proximal
from mpifl.core.errors import MethodError, UserError
from mpifl.core.federation import DataInfo, Split
from mpifl.core.metric import Metric
from mpifl.core.rng import key
from mpifl.core.trainer import Fit, FitContext, Gift, Samples, Trainer
from mpifl.experiment.schema import StopConfig, SystemConfig
from mpifl.experiment.section_checks import check_sections, stop_metric
from mpifl.models import MODELS
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.tasks import Regression
from mpifl.training.trainers.pytorch import Torch
from mpifl.training.trainers.scikit import Sklearn

FEW = [  # of the usual run: what methods ask of a trainer, in each way in which they do
    *(
        case
        for case in CASES[: len(CATALOGUE)]
        if case[0] in ("cfl", "flt", "ifca", "pfedme", "ucfl", "feddrift")
    ),
    *("fedavg", "fedprox", "scaffold", "ditto", "apfl", "fedrep", "fedbabu", "fedem", "fedcuau", "moon"),
    *("perfedavg", "fedfomo", "fednova", "local", "emdcfl", "ccfl", "hypcluster", "fedrc"),
]
SHAPE, LOCAL = (1, 6, 6), LocalConfig(epochs=2, batch_size=7, lr=0.05, momentum=0.9, weight_decay=1e-3)


def samples(n: int = 24) -> Split:
    """Return samples of three classes."""
    drawn = key(0, "samples").torch()
    return Split(torch.randn(n, *SHAPE, generator=drawn), torch.arange(n) % 3)


def learners(trainer: Trainer, module: nn.Module | None = None) -> tuple[Learner, Learner]:
    """Return the learner with mpifl's own loop, and that with a trainer, of one model."""
    module = module or MODELS["mlp"](hidden=(8,)).build(SHAPE, 3)
    return Learner(deepcopy(module), kernels=False), Learner(module, trainer=trainer, rounds=4)


@dataclass(frozen=True)
class Bare(Torch):
    """Gives no more than it is told to."""

    only: tuple[str, ...] = ()

    @property
    def gives(self) -> tuple[Gift, ...]:
        return self.only  # type: ignore[return-value]


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", mostly_nightly(CASES, FEW, named))
def test_a_method_asks_a_trainer_for_no_more_than_it_declares_and_trains_as_in_the_own_loop(case, tmp_path):
    """A trainer that gives what is declared suffices; plain SGD of PyTorch gives the numbers of the loop."""
    name, options = case
    method, system = CATALOGUE[name](**options), SystemConfig(kernels=False)
    asked = asked_of_trainer(method)

    def trained(trainer: Trainer | None) -> dict[str, Any]:
        local = toy.LOCAL if trainer is None else replace(toy.LOCAL, trainer=trainer)
        given: dict[str, Any] = {"local": local, "system": system, "steps": 2, "evaluate": trainer is None}
        return toy.state_of(toy.run(method, toy.Tiny(), tmp_path / str(trainer is None), **given).server)

    trainer = Bare(lr=toy.LOCAL.lr, only=(*asked, "outputs"))
    if "sgd" in asked:
        with pytest.raises(UserError, match=r"local\.trainer"):
            trained(replace(trainer, only=tuple(gift for gift in trainer.only if gift != "sgd")))
        return
    before, after = trained(None), trained(trainer)
    assert before.keys() == after.keys()
    for what, value in before.items():
        if isinstance(value, torch.Tensor):
            assert_close(after[what], value, rtol=0, atol=1e-4, msg=f"{what} of {name}")


@pytest.mark.parametrize("what", ["", "direction", "loss", "part", "augment", "work"])
def test_plain_sgd_of_pytorch_takes_the_steps_of_the_own_loop(what):
    own, other = learners(Torch(lr=0.05, options={"momentum": 0.9, "weight_decay": 1e-3}))  # as `LOCAL` says
    config, asked = LOCAL, dict[str, Any]()
    if what == "direction":
        asked["direction"] = proximal(0.5, own.init)
    elif what == "loss":
        asked["loss"] = lambda module, x, y, index: (module(x).square().mean(1) * (index + 1)).mean()
    elif what == "part":
        asked["part"] = own.layout.part("head")
    elif what == "augment":
        config = replace(config, augment="crop_flip")
    elif what == "work":
        config = replace(config, steps=3)
    a = own.sgd(own.init, samples(), config, key(1), **asked)
    b = other.sgd(own.init, samples(), config, key(1), **asked)
    assert (a.steps, a.lr, a.momentum) == (b.steps, b.lr, b.momentum)
    assert b.samples == config.num_trained(24)
    assert_close(b.vector, a.vector, rtol=0, atol=1e-6 * a.steps)
    assert b.loss == pytest.approx(a.loss, rel=1e-5)
    assert not torch.equal(a.vector, own.init)


@pytest.mark.parametrize("over", ["visit", "run"])
def test_the_rate_falls_over_a_visit_or_over_the_rounds(over):
    """Cosine: (1 + cos(pi t / T)) / 2 of the rate, t steps of T, or rounds of rounds, after the warm-up."""
    torch_trainer = Torch(lr=0.1, scheduler="cosine", schedule_over=over, warmup=0.25)
    seen, rates = torch_trainer._optimizer, []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    object.__setattr__(torch_trainer, "_optimizer", lambda module: Spy(module.parameters(), lr=0.1))
    assert seen is not None
    _, other = learners(torch_trainer)
    config = LocalConfig(steps=8, batch_size=7, lr_decay=0.5)
    for step in (1, 3):
        other.sgd(other.init, samples(), config, key(0), step=step)
    shares = [1 / 3, 2 / 3, *((1 + math.cos(math.pi * t / 6)) / 2 for t in range(6))]
    rounds_1_and_3 = [1 / 2] * 8 + [(1 + math.cos(math.pi / 3)) / 2] * 8  # warm-up, then the second of three
    shares = rounds_1_and_3 if over == "run" else shares * 2
    factors = [1.0] * 8 + [0.25] * 8  # local.lr_decay
    assert rates == pytest.approx([0.1 * f * s for f, s in zip(factors, shares, strict=True)])


def test_accumulated_batches_are_one_step_on_their_mean_gradient():
    """Two batches of 7 accumulated take the step of one batch of 14."""
    own, other = learners(Torch(lr=0.05, accumulate=2))
    split, order = samples(14), key(3)
    a = own.sgd(own.init, split, LocalConfig(lr=0.05, batch_size=14), order)
    b = other.sgd(own.init, split, LocalConfig(lr=0.05, batch_size=7), order)
    assert (b.steps, b.samples) == (1, 14)
    assert_close(b.vector, a.vector, rtol=0, atol=1e-6)


def test_what_is_left_at_the_end_of_a_visit_is_a_step_too():
    """Batches of 7, 7, 7 | 3: the last of them moves the model by its own gradient."""
    split, order, config = samples(24), key(3), LocalConfig(batch_size=7)
    own, other = learners(Torch(lr=0.05, accumulate=3))
    made = other.sgd(own.init, split, config, order)
    assert (made.steps, made.samples) == (2, 24)
    batches = [*own.batches(split, config, order)]
    w = own.init.clone()
    for index in (torch.cat(batches[:3]), batches[3]):
        w = w - 0.05 * own.gradient(w, Split(split.x[index], split.y[index]))
    assert_close(made.vector, w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gift", ["direction", "loss", "part", "gradient", "outputs"])
def test_what_a_method_has_not_declared_is_refused_when_it_asks(gift):
    """Nothing that a method asks for is lost without a word."""
    learner = Learner(toy.mlp(8).build(toy.SHAPE, toy.CLASSES), trainer=Bare())
    client = LocalClient(0, toy.Tiny(), learner, LOCAL)
    asks = {
        "direction": lambda: client.sgd(client.init, key(0), direction=lambda g, w: g),
        "loss": lambda: client.sgd(client.init, key(0), loss=lambda module, x, y, index: module(x).sum()),
        "part": lambda: client.sgd(client.init, key(0), part=client.layout.part("head")),
        "gradient": lambda: client.gradient(client.init),
        "outputs": lambda: client.loss(client.init),
    }
    with pytest.raises(MethodError, match=f"asks = .'{gift}',"):
        asks[gift]()
    with pytest.raises(MethodError, match=r"asks = .'sgd',"):
        client.sgd(client.init, key(0), lr=0.1)
    assert client.sgd(client.init, key(0)).steps


def test_gradients_are_clipped_labels_smoothed_and_products_rounded():
    split, config = samples(), LocalConfig(steps=1, batch_size=24)
    _, clipped = learners(Torch(lr=1.0, clip_norm=0.01))
    moved = clipped.sgd(clipped.init, split, config, key(0)).vector - clipped.init
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    _, smooth = learners(Torch(label_smoothing=0.2))
    logits = smooth.outputs(smooth.init, split.x).log_softmax(1)
    wanted = -0.8 * logits[range(24), split.y].mean() - 0.2 * logits.mean()
    assert smooth.sgd(smooth.init, split, config, key(0)).loss == pytest.approx(float(wanted), rel=1e-5)
    own, coarse = learners(Torch(lr=0.05, autocast="bfloat16"))
    a, b = (one.sgd(own.init, split, LOCAL, key(0)).vector for one in (learners(Torch(lr=0.05))[1], coarse))
    assert b.dtype == torch.float32
    assert 0 < float((a - b).norm()) < 0.1 * float((a - own.init).norm())


def test_batches_come_alike_from_the_samples_and_from_a_loader():
    seen: dict[str, list[torch.Tensor]] = {}

    @dataclass(frozen=True)
    class Listing(Trainer):
        def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
            assert len(data) == 24
            assert data[5][0].shape == SHAPE
            seen["batches"] = [x for x, _, _ in data.batches()]
            seen["loader"] = [x for x, _ in data.loader()]
            seen["workers"] = [x for x, _ in data.loader(num_workers=1)]
            x, y = data.arrays()
            x[:] = 0
            assert data.x.any()
            assert y.dtype == np.int64
            return Fit(0.0, context.num_steps, 48)

    _, other = learners(Listing())
    other.sgd(other.init, samples(), replace(LOCAL, augment="crop_flip"), key(0))
    assert len(seen["batches"]) == 8
    for name in ("loader", "workers"):
        assert_close(seen[name], seen["batches"], rtol=0, atol=0)


def test_workers_load_the_same_batches():
    one, two = (learners(Torch(lr=0.1, workers=w))[1] for w in (0, 1))
    two.flat.vector.copy_(one.init)
    a, b = (x.sgd(one.init, samples(), LOCAL, key(0)).vector for x in (one, two))
    assert_close(a, b, rtol=0, atol=0)


@dataclass(frozen=True)
class Rude(Trainer):
    """Replaces the tensors of the module, draws from global generators, and freezes parameters."""

    how: str = "tensors"

    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        for p in module.parameters():
            if self.how == "tensors":
                p.data = p.data + torch.rand(()) + np.random.rand()
            elif self.how == "sizes":
                p.data = torch.zeros(p.numel() + 1)
        if self.how == "nothing":
            return None  # type: ignore[return-value]
        return Fit(1.0, 1, len(data))


def test_weights_are_read_from_tensors_that_a_trainer_has_put_in_their_place():
    _, other = learners(Rude())
    module = other.flat.module
    first, second = (other.sgd(other.init, samples(), LOCAL, key(7)).vector for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(other.sgd(other.init, samples(), LOCAL, key(8)).vector, first)
    moved = first - other.init
    assert 0 < float(moved.min()) < float(moved.max()) < 2  # two draws for each tensor
    other.flat.load(torch.zeros_like(first))
    assert not any(p.any() for p in module.parameters())  # they lie in the vector again
    assert all(
        p.grad is not None and p.grad.data_ptr() >= other.flat.grad.data_ptr() for p in module.parameters()
    )


@pytest.mark.parametrize("how", ["sizes", "nothing"])
def test_a_trainer_that_resizes_or_returns_nothing_is_refused(how):
    _, other = learners(Rude(how))
    with pytest.raises(UserError, match=r"local\.trainer"):
        other.sgd(other.init, samples(), LOCAL, key(0))


def test_frozen_parameters_stay_under_weight_decay():
    module = MODELS["mlp"](hidden=(8,)).build(SHAPE, 3)
    module.head.requires_grad_(False)
    _, other = learners(Torch("AdamW", lr=0.1, options={"weight_decay": 0.5}), module)
    after = other.sgd(other.init, samples(), LOCAL, key(0)).vector
    head = other.layout.part("head")
    for part, moves in ((head, False), (other.layout.part("body"), True)):
        assert all(torch.equal(after[s], other.init[s]) != moves for s in part)


@dataclass(frozen=True)
class Pair(Trainer):
    """Trains a module with two inputs and two outputs, and evaluates it itself."""

    gives = ()
    metrics = (Metric("gap", "gap", better=-1, percent=False),)

    def fit(self, module: nn.Module, data: Samples, context: FitContext) -> Fit:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x, y, _ in data.batches():
            optimizer.zero_grad()
            logits, size = module(x[:, :, :3], x[:, :, 3:])
            (nn.functional.cross_entropy(logits, y) + 0.1 * size).backward()
            optimizer.step()
        return Fit(0.5, context.num_steps, len(data), {"size": size.item()})

    def evaluate(self, module: nn.Module, data: Samples) -> Mapping[str, float]:
        logits, _ = module(data.x[:, :, :3], data.x[:, :, 3:])
        hits = float((logits.argmax(1) == data.y).double().mean())
        return {"accuracy": hits, "loss": float(nn.functional.cross_entropy(logits, data.y)), "gap": 1 - hits}


class TwoInputs(nn.Module):
    """Neither has a last linear layer, nor takes or returns one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3, bias=False), nn.Parameter(torch.zeros(3))

    def forward(self, top: torch.Tensor, bottom: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([top, bottom], 2).flatten(1)
        return self.a(x[:, :8]) + self.b, self.b.square().sum()


@dataclass(frozen=True)
class TwoInputsModel:
    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return TwoInputs()


def test_a_module_with_several_inputs_and_outputs_runs_and_its_metrics_are_written(tmp_path):
    local = replace(toy.LOCAL, trainer=Pair())
    done = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, model=TwoInputsModel(), local=local)
    assert_close(done.scores["gap"], 1 - done.scores["accuracy"], rtol=0, atol=1e-12)
    assert done.scores["accuracy"].mean() > 0.5
    assert done.server_step.train_metrics["fit_size"] > 0
    with pytest.raises(UserError, match="hypcluster takes losses and outputs of models"):
        toy.run(CATALOGUE["hypcluster"](), toy.Tiny(), tmp_path / "2", model=TwoInputsModel(), local=local)


def test_a_run_may_end_by_a_metric_of_its_trainer():
    """Its direction is the trainer's: less of a gap is better."""
    local = replace(toy.LOCAL, trainer=Pair())
    for name in ("gap_mean", "gap"):
        config = toy.config_of(CATALOGUE["fedavg"](), local=local, stop=StopConfig(metric=name, target=0.2))
        check_sections(config)
        assert stop_metric(config) == (name, -1)
    wrong = toy.config_of(CATALOGUE["fedavg"](), local=local, stop=StopConfig(metric="gain", target=0.2))
    with pytest.raises(UserError, match=r"stop\.metric = 'gain'"):
        check_sections(wrong)


WRONG = [
    ({"optimizer": "Addam"}, "Adam"),
    ({"options": {"beta": 0.9}}, "options.beta"),
    ({"options": {"momentum": -1.0}}, "options"),
    ({"schedule_over": "run"}, "schedule_over"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_options_that_an_optimiser_does_not_take_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        Torch(**options)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "NAdam", "Adagrad", "Rprop", "ASGD", "Adafactor"])
def test_other_optimisers_train_alike_every_time(name):
    _, other = learners(Torch(name))
    first, second = (other.sgd(other.init, samples(), LOCAL, key(0)) for _ in range(2))
    assert_close(first.vector, second.vector, rtol=0, atol=0)
    assert not torch.equal(first.vector, other.init)
    assert first.steps == 8
    assert math.isnan(first.lr)


def classes_of(split: Split, count: int) -> Split:
    """Return samples with labels of so many classes, which a plane separates."""
    shift = torch.randn(count, *SHAPE, generator=key(3, "means").torch())
    y = torch.arange(len(split)) % count
    return Split(split.x + shift[y], y)


@pytest.mark.parametrize("count", [2, 3])
def test_a_linear_model_of_scikit_learn_is_trained_as_scikit_learn_trains_it(count):
    """Fed by hand with the same batches, its coefficients are those of the layer: one row for two classes."""
    options = {"loss": "log_loss", "learning_rate": "constant", "eta0": 0.05}
    module = MODELS["logistic"]().build(SHAPE, count)
    learner = Learner(module, trainer=Sklearn(options=options))
    split, config = classes_of(samples(), count), LocalConfig(epochs=2, batch_size=7)
    made = learner.sgd(torch.zeros_like(learner.init), split, config, key(1))
    hand = SGDClassifier(random_state=key(1).seed % 2**32, **options)
    for index in learner.batches(split, config, key(1)):
        hand.partial_fit(split.x[index].flatten(1).double().numpy(), split.y[index].numpy(), np.arange(count))
    learner.flat.load(made.vector)
    weight, bias = (p.detach().double().numpy() for p in module.parameters())
    if count == 2:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    np.testing.assert_allclose(weight, hand.coef_, atol=1e-5)
    np.testing.assert_allclose(bias, hand.intercept_, atol=1e-5)
    hits = learner.outputs(made.vector, split.x).argmax(1) == split.y
    assert hits.float().mean() > 0.9
    assert (made.steps, made.samples) == (8, 48)
    assert 0 < made.loss < math.log(count)


def test_a_regression_of_scikit_learn_is_trained():
    module = MODELS["linear"]().build_for(DataInfo((4,), 1, "features", "numbers"))
    learner = Learner(module, trainer=Sklearn("SGDRegressor", {"eta0": 0.05}), task=Regression())
    x = torch.randn(200, 4, generator=key(0, "x").torch())
    split = Split(x, x[:, :1] - 2 * x[:, 1:2])
    made = learner.sgd(learner.init, split, LocalConfig(epochs=5), key(1))
    assert float(Regression().loss(learner.outputs(made.vector, x), split.y)) < 0.01


@pytest.mark.parametrize("name", ["penalties", "warm_start"])
def test_options_that_scikit_learn_does_not_take_are_refused(name):
    with pytest.raises(UserError, match=f"options.{name}"):
        Sklearn(options={name: True})


@pytest.mark.parametrize(
    ("model", "options", "said"), [("mlp", {}, "one linear layer"), ("logistic", {"alpha": -1.0}, "alpha")]
)
def test_what_scikit_learn_cannot_train_is_refused(model, options, said):
    made = Learner(MODELS[model]().build(SHAPE, 3), trainer=Sklearn(options=options))
    with pytest.raises(UserError, match=said):
        made.sgd(made.init, samples(), LOCAL, key(0))
