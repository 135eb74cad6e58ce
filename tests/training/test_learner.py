"""The learner against PyTorch's own optimisers, step for step, with and without kernels."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.each import for_each
from torch import nn
from torch.testing import assert_close

from mpifl.core.errors import MethodError, UserError
from mpifl.core.federation import Split
from mpifl.core.parameters import Layout, flatten
from mpifl.core.rng import key
from mpifl.kernels import bindings
from mpifl.models import MODELS
from mpifl.training import backend
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner

KEY = key(3, "visit", 0, 0)


@pytest.fixture(params=[True, False], ids=["kernels", "pytorch"], autouse=True)
def kernels(request, monkeypatch):
    """Test with and without kernels, where they were built."""
    if not bindings.TRAINING_AVAILABLE and request.param:
        pytest.skip("the kernels were not built")
    monkeypatch.setattr(bindings, "TRAINING_AVAILABLE", request.param)


SPLIT = toy.draw("train", 0, 23, 0)


def built(name: str = "mlp", **options) -> nn.Module:
    """Return a small network with weights of its own seed."""
    torch.manual_seed(11)
    return MODELS[name](**options).build((1, 4, 4), 3)


class Normed(nn.Module):
    """A network with batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def batches(n: int, config: LocalConfig) -> list[torch.Tensor]:
    """Return the index of each batch: epoch e is the permutation at `epoch`, e below the visit's key."""
    orders = [torch.from_numpy(KEY.of("epoch", e).numpy().permutation(n)) for e in range(config.epochs)]
    return [index for order in orders for index in order.split(config.batch_size)]


def reference(model: nn.Module, config: LocalConfig, step: int = 1, names: str = "", prox: float = 0.0):
    """Train as a PyTorch user would; return the vector and the losses of the steps, one for each sample."""
    moving = [p for name, p in model.named_parameters() if name.startswith(names)]
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.SGD
    options = {} if config.optimizer == "adam" else {"momentum": config.momentum}
    optimizer = kind(moving, lr=config.lr_at(step), weight_decay=config.weight_decay, **options)
    anchor = [p.detach().clone() for p in moving]
    losses = []
    for index in batches(len(SPLIT), config):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(SPLIT.x[index]), SPLIT.y[index])
        pull = sum(((p - a) ** 2).sum() for p, a in zip(moving, anchor, strict=True))
        (loss + prox / 2 * pull).backward()
        optimizer.step()
        losses += [loss.item()] * len(index)
    return flatten(model), losses


CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum": LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.9),
    "decay": LocalConfig(epochs=2, batch_size=5, lr=0.1, weight_decay=0.1),
    "momentum and decay": LocalConfig(epochs=3, batch_size=4, lr=0.05, momentum=0.5, weight_decay=0.01),
    "one batch": LocalConfig(epochs=3, batch_size=64, lr=0.2, momentum=0.9),
    "adam": LocalConfig(epochs=2, batch_size=5, lr=0.01, optimizer="adam"),
    "adam and decay": LocalConfig(epochs=2, batch_size=5, lr=0.01, weight_decay=0.1, optimizer="adam"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_flat_loop_is_the_optimiser_of_pytorch(config):
    learner = Learner(built(hidden=(7,)))
    trained = learner.sgd(learner.init, SPLIT, config, KEY)
    expected, losses = reference(built(hidden=(7,)), config)
    assert_close(trained.vector, expected, rtol=1e-5, atol=1e-6)
    assert trained.steps == len(batches(len(SPLIT), config))
    assert_allclose(trained.loss, sum(losses) / len(losses), rtol=1e-5)
    assert (expected - learner.init).abs().max() > 0.01, (
        "training must move the weights for this to say anything"
    )


class Turned(nn.Module):
    """A network whose gradients come in another memory format than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(memory_format=torch.channels_last)))


def test_gradients_in_another_memory_format_are_the_same_gradients():
    torch.manual_seed(0)
    learner, config = Learner(Turned()), CONFIGS["momentum"]
    trained = learner.sgd(learner.init, SPLIT, config, KEY)
    torch.manual_seed(0)
    model = Turned()
    loss = F.cross_entropy(model(SPLIT.x), SPLIT.y)
    strides = [g.stride() for g in torch.autograd.grad(loss, list(model.parameters()))]
    assert strides != [p.stride() for p in model.parameters()], "otherwise this says nothing"
    assert_close(trained.vector, reference(model, config)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_momentum_does_not_cross_visits(optimizer):
    learner = Learner(built())
    config = LocalConfig(batch_size=5, lr=0.05, momentum=0.9 * (optimizer == "sgd"), optimizer=optimizer)
    first = learner.sgd(learner.init, SPLIT, config, KEY)
    learner.sgd(torch.randn_like(learner.init), SPLIT, config, KEY.of("other"))
    again = learner.sgd(learner.init, SPLIT, config, KEY)
    assert_close(again.vector, first.vector, rtol=0, atol=0)


@for_each("steps", [0, 1, 4, 5, 7, 12])
def test_a_number_of_steps_is_counted_in_batches_pass_after_pass(steps):
    """23 samples in batches of 6 are four batches a pass, the last of five: 7 steps are a pass and three."""
    config = LocalConfig(steps=steps, epochs=99, batch_size=6, lr=0.1)
    learner = Learner(built())
    trained = learner.sgd(learner.init, SPLIT, config, KEY)
    assert trained.steps == steps
    orders = [torch.from_numpy(KEY.of("epoch", e).numpy().permutation(23)).split(6) for e in range(3)]
    expected = [index.tolist() for order in orders for index in order][:steps]
    assert [index.tolist() for index in learner.batches(SPLIT, config, KEY)] == expected


def test_the_learning_rate_follows_the_server_steps():
    """0.1 * 0.5^(t-1), times 0.1 from step 3 on: 0.1, 0.05, 0.0025."""
    config = LocalConfig(epochs=1, batch_size=5, lr=0.1, lr_decay=0.5, milestones=(2,), gamma=0.1)
    assert_allclose([config.lr_at(t) for t in (1, 2, 3)], [0.1, 0.05, 0.0025])
    learner = Learner(built())
    trained = learner.sgd(learner.init, SPLIT, config, KEY, step=3)
    assert_allclose(trained.lr, 0.0025)
    assert_close(trained.vector, reference(built(), config, step=3)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["head", "body"])
@pytest.mark.parametrize(
    "config", [CONFIGS["momentum and decay"], CONFIGS["adam and decay"]], ids=["sgd", "adam"]
)
def test_only_the_part_moves(name, config):
    learner = Learner(built(hidden=(7,)))
    part = learner.layout.part(name)
    trained = learner.sgd(learner.init, SPLIT, config, KEY, part=part)
    expected, _ = reference(built(hidden=(7,)), config, names=name)
    assert_close(trained.vector, expected, rtol=1e-5, atol=1e-6)
    fixed = learner.layout.part("body" if name == "head" else "head")
    for s in fixed:
        assert_close(trained.vector[s], learner.init[s], rtol=0, atol=0)
    assert all(p.requires_grad for p in learner.flat.module.parameters()), "nothing stays frozen"


class Tied(nn.Module):
    """A network with two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        one, two = nn.Linear(16, 16), nn.Linear(16, 16)
        two.weight = one.weight
        self.body, self.head = nn.Sequential(nn.Flatten(), one, nn.ReLU(), two), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("names", [("head.weight", "head.bias"), ("body.1.weight",), ("body.3.bias",)])
def test_only_the_part_of_a_network_with_shared_weights_moves(names):
    """A shared weight lies in the vector once."""
    torch.manual_seed(0)
    learner = Learner(Tied())
    part = tuple(learner.layout.slices[name] for name in names)
    trained = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.1), KEY, part=part)
    moved = trained.vector != learner.init
    assert {name for name, s in learner.layout.slices.items() if moved[s].any()} == set(names)
    assert all(p.requires_grad for p in learner.flat.module.parameters()), "nothing stays frozen"


@pytest.mark.parametrize("prox", [0.0, 0.7])
@pytest.mark.parametrize(
    "config", [CONFIGS["momentum and decay"], CONFIGS["adam and decay"]], ids=["sgd", "adam"]
)
def test_what_a_user_froze_stays_as_it_is(config, prox):
    """Trained as a whole and by its head, in this order: the second must not thaw it either."""
    model = built(hidden=(7,))
    model.body.requires_grad_(False)
    learner = Learner(model)
    (body,) = learner.layout.part("body")
    options = {"direction": lambda g, w: g + prox * (w - learner.init)} if prox else {}
    expected, _ = reference(built(hidden=(7,)), config, names="head", prox=prox)
    for part in (None, learner.layout.part("head"), None):
        trained = learner.sgd(learner.init, SPLIT, config, KEY, part=part, **options)
        assert_close(trained.vector, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained.vector[body], learner.init[body])


def test_a_direction_is_added_to_the_gradient_as_a_penalty_would():
    """The gradient of mu/2 |w - x|^2 is mu (w - x); decay and momentum come after it."""
    config = LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.9)
    learner = Learner(built())
    x = learner.init.clone()
    trained = learner.sgd(x, SPLIT, config, KEY, direction=lambda g, w: g + 0.7 * (w - x))
    assert_close(trained.vector, reference(built(), config, prox=0.7)[0], rtol=1e-5, atol=1e-6)
    assert (trained.vector - learner.sgd(x, SPLIT, config, KEY).vector).abs().max() > 1e-3


def test_a_loss_sees_images_labels_and_their_numbers():
    seen = []

    def loss(module, x, y, index):
        assert_close(SPLIT.x[index], x)
        assert_close(SPLIT.y[index], y)
        seen.extend(index.tolist())
        return 3 * F.cross_entropy(module(x), y)

    config = LocalConfig(batch_size=5, lr=0.02)
    learner = Learner(built())
    thrice = learner.sgd(learner.init, SPLIT, config, KEY, loss=loss)
    faster = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.06), KEY)
    assert sorted(seen) == list(range(23))
    assert_close(thrice.vector, faster.vector, rtol=1e-5, atol=1e-6)
    assert_allclose(thrice.loss, 3 * faster.loss, rtol=1e-5)


def test_batches_are_addressed_by_the_key():
    learner = Learner(built())
    config = LocalConfig(batch_size=5, lr=0.1)
    one, same, other = (learner.sgd(learner.init, SPLIT, config, k).vector for k in (KEY, KEY, KEY.of("x")))
    assert_close(one, same, rtol=0, atol=0)
    assert (one - other).abs().max() > 1e-4


def test_dropout_is_addressed_by_the_key_too():
    learner = Learner(built("flt_mlp"))
    config = LocalConfig(batch_size=64, lr=0.1)  # one batch: only dropout can differ
    one = learner.sgd(learner.init, SPLIT, config, KEY).vector
    torch.rand(17)  # whatever was drawn before does not matter
    same, other = (learner.sgd(learner.init, SPLIT, config, k).vector for k in (KEY, KEY.of("x")))
    assert_close(one, same, rtol=0, atol=0)
    assert (one - other).abs().max() > 1e-4


def test_a_network_without_an_embedding_is_refused_where_one_is_needed():
    """MOON ended in a traceback."""
    learner = Learner(nn.Linear(4, 2), "cpu")
    with pytest.raises(UserError, match=r"a network without `embed`'.*mpifl\.models\.Net"):
        learner.outputs(learner.init, torch.zeros(3, 4), embedding=True)
    assert learner.outputs(learner.init, torch.zeros(3, 4)).shape == (3, 2)


def test_embeddings_under_dropout_do_not_depend_on_what_was_drawn_before():
    """In training mode dropout draws; a rank that did other work before must get the same embeddings."""
    learner = Learner(built("flt_mlp"), "cpu", kernels=False)
    x = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        found.append(learner.outputs(learner.init, x, embedding=True, train_mode=True))
        torch.rand(7)
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0], learner.outputs(learner.init, x, embedding=True))


class Noisy(nn.Module):
    """Draws in training and in evaluation, by functions: no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.flatten(1), 0.5, training=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize("train_mode", [False, True])
def test_what_a_network_draws_in_an_evaluation_does_not_depend_on_what_was_drawn_before(train_mode):
    """Nor does what is drawn after it depend on the evaluation."""
    learner, found = Learner(Noisy()), []
    for _ in range(2):
        before = torch.random.get_rng_state()
        outputs = learner.outputs(learner.init, SPLIT.x, train_mode=train_mode)
        found.append((outputs, learner.gradient(learner.init, SPLIT, 256)))
        assert_array_equal(torch.random.get_rng_state(), before)
        torch.rand(7)
    assert_close(found[0], found[1], rtol=0, atol=0)


class Jittering(Noisy):
    """Draws from the generators of NumPy and of Python."""

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) + np.random.rand() + random.random()


def test_what_a_network_draws_from_numpy_and_python_is_addressed_by_the_key_too():
    learner, found = Learner(Jittering()), []
    for k in (KEY, KEY, KEY.of("x")):
        trained = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=64, lr=0.1), k).vector
        found.append((trained, learner.outputs(learner.init, SPLIT.x)))
        np.random.rand(7), random.random()
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert (found[2][0] - found[0][0]).abs().max() > 1e-4


@pytest.mark.parametrize(("samples", "sizes"), [(130, [64, 64, 2]), (129, [64, 65]), (64, [64])])
def test_batch_statistics_are_those_of_64_samples(samples, sizes):
    """As in EMD-CFL's repository; a last batch of one sample has none and joins the one before."""
    learner = Learner(Normed(), "cpu")
    x = torch.rand(samples, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found = learner.outputs(learner.init, x, embedding=True, train_mode=True)
    body = learner.context.flat.load(learner.init, train=True).body
    assert_close(found, torch.cat([body(batch) for batch in x.split(sizes)]))
    assert (found - body(x)).abs().max() > 1e-3 or len(sizes) == 1


def test_one_sample_has_no_batch_statistics():
    learner = Learner(Normed(), "cpu")
    with pytest.raises(UserError, match=r"data\.scenario = .*one sample"):
        learner.outputs(learner.init, torch.rand(1, 1, 4, 4), embedding=True, train_mode=True)


@pytest.mark.parametrize("direction", [None, lambda g, w: g])
@pytest.mark.parametrize("size", [23, 22, 16, 5])
def test_the_loss_of_a_training_is_the_mean_over_samples_whatever_the_batch_size(size, direction):
    """One sample far from the others; weights hardly move."""
    x = SPLIT.x.clone()
    x[4] *= 100
    split = Split(x, SPLIT.y)
    learner = Learner(built(hidden=(7,)))
    config = LocalConfig(epochs=2, batch_size=size, lr=1e-12)
    with torch.no_grad():
        mean = F.cross_entropy(learner.flat.load(learner.init, train=False)(x), SPLIT.y)
    assert_allclose(learner.sgd(learner.init, split, config, KEY, direction=direction).loss, mean, rtol=1e-5)


def test_zero_epochs_return_the_start():
    learner = Learner(built())
    trained = learner.sgd(learner.init + 1, SPLIT, LocalConfig(epochs=0), KEY)
    assert_close(trained.vector, learner.init + 1, rtol=0, atol=0)
    assert trained.steps == 0
    assert math.isnan(trained.loss)


def test_the_result_is_a_copy():
    learner = Learner(built())
    one = learner.sgd(learner.init, SPLIT, LocalConfig(), KEY)
    before = one.vector.clone()
    learner.sgd(learner.init * 2, SPLIT, LocalConfig(), KEY)
    assert_close(one.vector, before, rtol=0, atol=0)


@for_each(("n", "with_norm", "without"), [(11, 2, 3), (10, 2, 2), (1, 0, 1), (12, 3, 3)])
def test_batch_norm_never_meets_a_lone_sample(n, with_norm, without):
    """Batches of 5: of 11 samples the last would hold one, which batch norm cannot take in training."""
    split, config = Split(SPLIT.x[:n], SPLIT.y[:n]), LocalConfig(batch_size=5, lr=0.1)
    torch.manual_seed(0)
    for model, steps in ((Normed(), with_norm), (built(), without)):
        learner = Learner(model)
        trained = learner.sgd(learner.init, split, config, KEY)
        assert trained.steps == steps
        assert torch.isfinite(trained.vector).all()
        assert torch.equal(trained.vector, learner.init) == (steps == 0)


def test_running_means_are_part_of_the_result():
    torch.manual_seed(0)
    learner = Learner(Normed())
    config = LocalConfig(batch_size=5, lr=0.1, momentum=0.9)
    trained = learner.sgd(learner.init, SPLIT, config, KEY)
    torch.manual_seed(0)
    expected, _ = reference(Normed(), LocalConfig(batch_size=5, lr=0.1, momentum=0.9), step=1)
    (buffers,) = learner.layout.part("buffers")
    assert (trained.vector[buffers] - learner.init[buffers]).abs().max() > 1e-2
    assert_close(trained.vector, expected, rtol=1e-5, atol=1e-6)


def test_a_frozen_batch_norm_uses_and_keeps_its_running_means():
    torch.manual_seed(0)
    learner = Learner(Normed())
    head, body = learner.layout.part("head"), learner.layout.part("body")
    trained = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.1), KEY, part=head)
    for s in body:
        assert_close(trained.vector[s], learner.init[s], rtol=0, atol=0)
    assert (trained.vector[head[0]] - learner.init[head[0]]).abs().max() > 1e-3
    learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.1), KEY)
    assert learner.flat.module.body[2].training, "the next visit trains batch norm again"


class Counting(nn.Module):
    """Opens a gate with the batches that it has seen, counted in a buffer of integers."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(16, 3), in_place
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.in_place:
                self.seen += 1
            else:
                self.seen = self.seen + 1
        return self.layer(x.flatten(1)) * (1 - torch.exp(-(1 + self.seen) / 5.0))


def test_what_a_buffer_of_integers_counted_is_of_one_visit():
    config = LocalConfig(epochs=2, batch_size=8, lr=0.1)
    learner = Learner(Counting())
    first = learner.sgd(learner.init, SPLIT, config, KEY).vector
    assert int(learner.context.flat.module.seen) == 6, "it counts within the visit"
    assert torch.equal(learner.sgd(learner.init, SPLIT, config, KEY).vector, first)
    plain = Counting()
    plain.load_state_dict(
        dict(zip(("layer.weight", "layer.bias"), _layers(learner.init), strict=True)), strict=False
    )
    for index in batches(len(SPLIT), config):
        plain.zero_grad()
        F.cross_entropy(plain(SPLIT.x[index]), SPLIT.y[index]).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
    assert_close(first, flatten(plain))


def _layers(vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return vector[:48].view(3, 16), vector[48:]


def test_a_network_that_puts_another_tensor_in_the_place_of_a_buffer_is_refused():
    learner = Learner(Counting(in_place=False))
    with pytest.raises(
        UserError, match=r"model = 'seen': its code replaces the buffer; write into it: self.seen.copy_"
    ):
        learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=8), KEY)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6)], ids=["plain", "affine"]
)
@pytest.mark.parametrize("part", ["head", "parameters", "body"])
def test_running_means_move_only_where_they_lie_in_the_part(norm, part):
    model = Normed()
    model.body[2] = norm
    learner = Learner(model)
    part, (buffers,) = learner.layout.part(part), learner.layout.part("buffers")
    trained = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.1), KEY, part=part)
    moved = (trained.vector != learner.init)[buffers]
    assert moved.any() == any(s.start <= buffers.start < s.stop for s in part)


class Scaled(nn.Module):
    """A network with batch norm whose outermost module has a parameter of its own, if `scale`."""

    def __init__(self, scale: bool = True) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(16, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6)) if scale else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.late(self.early(x.flatten(1)) * self.scale))


def test_a_norm_inside_a_part_trains_also_if_a_module_around_it_has_a_frozen_parameter():
    """A factor of 1 that is not trained changes no other number."""
    found = []
    for scale in (True, False):
        torch.manual_seed(0)
        learner = Learner(Scaled(scale))
        slices = learner.layout.slices
        part = tuple(s for name, s in slices.items() if name.startswith(("late", "head")))
        trained = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5, lr=0.1), KEY, part=part)
        found.append({name: trained.vector[s] for name, s in slices.items() if name != "scale"})
        assert (trained.vector != learner.init)[slices["late.1.running_mean"]].all()
    assert_close(*found)


class Sharing(nn.Module):
    """Two blocks with one running scale, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 6))
        self.head, scale = nn.Linear(6, 3), torch.ones(())
        for block in self.body[1:]:
            block.register_buffer("scale", scale)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Scale, and move the scale in training."""
        x = self.body[0](x)
        for block in self.body[1:]:
            x = block(x) * block.scale.clone()
            if self.training:
                block.scale.mul_(0.9)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize("part", [None, "head"])
def test_a_buffer_that_two_modules_hold_is_one_number_of_the_vector(part):
    learner = Learner(Sharing())
    moving = None if part is None else learner.layout.part(part)
    more = {} if moving is None else {"part": moving}
    first = learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=12, lr=0.1), KEY, **more).vector
    assert torch.equal(
        learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=12, lr=0.1), KEY, **more).vector, first
    )
    assert first[-1] == pytest.approx(0.9**4, rel=1e-6), "two blocks, two batches"


def test_batch_norm_that_averages_over_all_batches_of_a_rank_is_refused():
    """Its counter is no part of the vector: a client's mean would depend on who trained there before."""
    with pytest.raises(UserError, match="momentum"):
        Learner(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 3)))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "start", [torch.ones(()), torch.ones(1), torch.ones(3)], ids=lambda x: str(list(x.shape))
)
def test_a_start_of_another_length_is_refused(start, kernels):
    """One number would be copied to all places of the vector."""
    learner = Learner(built(), kernels=kernels)
    with pytest.raises(UserError, match=str(learner.layout.size)):
        learner.sgd(start, SPLIT, CONFIGS["plain"], KEY)


def test_the_gradient_is_that_of_the_mean_loss_in_evaluation_mode():
    torch.manual_seed(0)
    model = Normed().eval()
    vector = flatten(model)
    loss = F.cross_entropy(model(SPLIT.x), SPLIT.y)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    learner = Learner(Normed())
    for batch in (256, 7):
        found = learner.gradient(vector, SPLIT, batch)
        assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert len(found) == Layout.of(model).num_parameters


@for_each(
    "wrong",
    [
        {"epochs": -1},
        {"batch_size": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"weight_decay": -1e-9},
        {"optimizer": "rmsprop"},
        {"lr_decay": 0.0},
        {"gamma": -1.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))} = "):
        LocalConfig(**wrong)


def test_permutations_are_those_of_numpy(monkeypatch):
    """Of the kernels, and of NumPy where its draws are others than the kernels know."""
    sizes = np.array([0, 1, 2, 3, 20, 64, 65, 1000, 70_000])
    addresses = [("visit", i, "epoch", 0) for i in range(len(sizes))]
    expected = [key(7, *a).numpy().permutation(n) for a, n in zip(addresses, sizes.tolist(), strict=True)]
    entropy = key(7).entropies(addresses)
    assert entropy[:16] == key(7, *addresses[0]).entropy.to_bytes(16, "little")
    assert_array_equal(backend.permutations(entropy, sizes), np.concatenate(expected))
    if bindings.TRAINING_AVAILABLE:
        assert backend._as_numpy()
    monkeypatch.setattr(backend, "_as_numpy", lambda: False)
    assert_array_equal(backend.permutations(entropy, sizes), np.concatenate(expected))
    assert len(backend.permutations(b"", np.zeros(0, np.int64))) == 0


CALLS_OF_A_CLIENT = {
    "embed": lambda learner: learner.outputs(learner.init, SPLIT.x, embedding=True, train_mode=True),
    "gradient": lambda learner: learner.gradient(learner.init, SPLIT),
    "sgd": lambda learner: learner.sgd(learner.init, SPLIT, LocalConfig(), KEY),
}


@pytest.mark.parametrize("call", CALLS_OF_A_CLIENT)
@pytest.mark.parametrize("of", ["direction", "loss"])
def test_a_direction_or_a_loss_that_trains_its_client_is_refused(of, call):
    """The other vector would take the place of the weights in training, or of their gradient; embeddings in
    training mode would restart the draws of dropout.
    """
    learner = Learner(Normed())
    other = CALLS_OF_A_CLIENT[call]

    def direction(g, w):
        other(learner)
        return g

    def loss(module, x, y, index):
        other(learner)
        return F.cross_entropy(module(x), y)

    function = {"direction": direction, "loss": loss}[of]
    message = r"client.sgd: its direction or loss calls .*; it would overwrite .*; compute it before sgd"
    config = LocalConfig(batch_size=5, lr=0.1)
    with pytest.raises(MethodError, match=message):
        learner.sgd(learner.init, SPLIT, config, KEY, **{of: function})
    other(learner)  # the refusal ends with the training


@pytest.mark.parametrize("network", [built, Normed])
def test_a_loss_and_a_direction_may_evaluate_their_client_under_another_vector(network):
    """Distillation, with the teacher's logits computed for each batch, or before for all samples; and a
    direction that looks at the teacher and ignores it.
    """
    learner = Learner(network())
    teacher, config = learner.init + 0.1, LocalConfig(epochs=3, batch_size=5, lr=0.1, momentum=0.5)
    before = learner.outputs(teacher, SPLIT.x)

    def trained(logits, direction=None):
        def loss(module, x, y, index):
            return F.cross_entropy(module(x), y) + (module(x) - logits(x, index)).square().mean()

        return learner.sgd(learner.init, SPLIT, config, KEY, loss=loss, direction=direction).vector

    def direction(g, w):
        learner.outputs(teacher, SPLIT.x, embedding=True)
        return g

    expected = trained(lambda x, index: before[index])
    assert_close(trained(lambda x, index: learner.outputs(teacher, x)), expected, rtol=1e-4, atol=1e-6)
    assert_close(trained(lambda x, index: before[index], direction), expected, rtol=0, atol=0)
    assert (expected - learner.init).abs().max() > 0.01


@pytest.mark.parametrize("part", ["body", None], ids=str)
def test_a_training_of_frozen_weights_alone_is_refused(part):
    """The user's network may freeze the very part that a method trains, such as FedBABU's body."""
    model = Normed()
    for p in (model if part is None else model.body).parameters():
        p.requires_grad_(False)
    learner = Learner(model)
    wanted = None if part is None else learner.layout.part(part)
    message = "model = 'frozen body.1.weight': the method trains this part of the model, all of which is"
    with pytest.raises(UserError, match=message):
        learner.sgd(learner.init, SPLIT, LocalConfig(batch_size=5), KEY, part=wanted)
    assert learner.sgd(learner.init, SPLIT, LocalConfig(epochs=0), KEY, part=wanted).steps == 0
