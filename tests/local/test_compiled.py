"""Networks trained by loops in C: what PyTorch's steps make of them, on every kind of register."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from mpifl.core import native
from mpifl.core.federation import Split
from mpifl.core.rng import key
from mpifl.local import Learner, LocalConfig
from mpifl.local.compiled import Network
from mpifl.models import MODELS

pytestmark = pytest.mark.skipif(
    not native.NETWORKS, reason="the loops in C were not built, or cannot run here"
)

TAKEN = ["mlp", "ifca_mlp", "lenet5", "flt_cnn_cifar", "leaf_cnn", "ccfl_cnn", "cfl_cnn"]
LEFT = ["flt_mlp", "flt_cnn_mnist", "resnet18_cifar", "emdcnn"]
CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum and decay": LocalConfig(epochs=2, batch_size=7, lr=0.05, momentum=0.9, weight_decay=0.01),
    "steps": LocalConfig(steps=7, batch_size=5, lr=0.1, momentum=0.5),
    "one batch": LocalConfig(batch_size=100, lr=0.1),
}


def split(n: int, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> Split:
    """Return made-up images."""
    draws = torch.Generator().manual_seed(n)
    x = torch.randn(n, *shape, generator=draws)
    return Split(x, torch.randint(0, classes, (n,), generator=draws))


def learner_of(module: nn.Module, compiled: bool = True) -> Learner:
    """Return a learner of a copy of the module."""
    learner = Learner(module)
    learner.compiled = compiled
    return learner


def both(build, samples: Split, config: LocalConfig, **options):
    """Return what both kinds of loops make of the same network, and its learner in the first."""
    found = []
    for compiled in (True, False):
        torch.manual_seed(3)
        learner = learner_of(build(), compiled)
        found.append(learner.sgd(learner.init, samples, config, key(1), **options))
        if compiled:
            used = learner
    return (*found, used)


def agree(ours, theirs, start: torch.Tensor) -> None:
    """Demand models that differ by 1e-4 of the largest change, and equal losses."""
    change = float((theirs.vector - start).abs().max())
    assert float((ours.vector - theirs.vector).abs().max()) <= 1e-4 * change
    assert (ours.steps, ours.lr, ours.momentum) == (theirs.steps, theirs.lr, theirs.momentum)
    assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", TAKEN)
def test_the_models_of_the_papers_agree_with_pytorch(name, config):
    ours, theirs, learner = both(lambda: MODELS[name]().build((1, 28, 28), 10), split(23), config)
    assert all(learner._networks.values())
    agree(ours, theirs, learner.init)


@pytest.mark.parametrize("name", LEFT)
def test_what_the_loops_do_not_know_is_left_to_pytorch(name):
    learner = learner_of(MODELS[name]().build((3, 32, 32), 10))
    learner.sgd(learner.init, split(4, (3, 32, 32)), CONFIGS["plain"], key(1))
    assert list(learner._networks.values()) == [None]


@st.composite
def networks(draw):
    """Return the shape of images and a network of convolutions, pooling and dense layers for them."""
    c, h, w = draw(st.integers(1, 3)), draw(st.integers(6, 13)), draw(st.integers(6, 13))
    shape, layers = (c, h, w), []
    for _ in range(draw(st.integers(0, 3))):
        side, out = draw(st.integers(1, 5)), draw(st.integers(1, 9))
        margin = draw(st.integers(0, side - 1))
        if min(h, w) + 2 * margin < side + 1:
            break
        layers += [nn.Conv2d(c, out, side, padding=margin)]
        c, h, w = out, h + 2 * margin - side + 1, w + 2 * margin - side + 1
        layers += draw(st.sampled_from([[], [nn.ReLU()]]))
        if min(h, w) > 1 and draw(st.booleans()):
            layers += [draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2)]))]
            h, w = h // 2, w // 2
    layers, width = [*layers, nn.Flatten()], c * h * w
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 40))
        layers, width = [*layers, nn.Linear(width, out), nn.ReLU()], out
    return shape, nn.Sequential(*layers, nn.Linear(width, 4))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(network=networks(), batch=st.integers(1, 40), momentum=st.sampled_from([0.0, 0.9]))
def test_any_small_network_agrees_with_pytorch(network, batch, momentum):
    shape, module = network
    samples = split(37, shape, classes=4)
    config = LocalConfig(batch_size=batch, lr=0.02, momentum=momentum, weight_decay=0.1)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    learner = learner_of(module)
    ours = learner.sgd(start, samples, config, key(2))
    assert all(learner._networks.values())
    learner.compiled = False
    agree(ours, learner.sgd(start, samples, config, key(2)), start)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cfl_cnn"])
def test_wide_and_narrow_registers_give_the_same_bits(name):
    learner = learner_of(MODELS[name]().build((1, 28, 28), 10))
    found = []
    try:
        for on in (False, True):
            native.narrow(on)
            trained = learner.sgd(learner.init, split(23), CONFIGS["momentum and decay"], key(1))
            found += [trained.vector, learner.gradient(trained.vector, split(23))]
    finally:
        native.narrow(False)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_a_direction_that_changes_nothing_changes_no_bit(name):
    learner = learner_of(MODELS[name]().build((1, 28, 28), 10))
    for config in CONFIGS.values():
        plain = learner.sgd(learner.init, split(23), config, key(1))
        directed = learner.sgd(learner.init, split(23), config, key(1), direction=lambda g, w: g)
        assert torch.equal(plain.vector, directed.vector)
        assert plain.steps == directed.steps


def test_a_direction_sees_gradient_and_weights():
    towards = torch.linspace(-1, 1, 7850)
    options = {"direction": lambda g, w: g + 0.1 * (w - towards)}
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))  # noqa: E731
    ours, theirs, learner = both(build, split(23), CONFIGS["momentum and decay"], **options)
    agree(ours, theirs, learner.init)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize(
    ("name", "part"), [("mlp", "head"), *(("lenet5", p) for p in ("head", "body", "block", "stage", "trunk"))]
)
def test_parts_of_a_model_agree_with_pytorch(name, part, directed):
    build = lambda: MODELS[name]().build((1, 28, 28), 10)  # noqa: E731
    chosen = Learner(build()).layout.part(part)
    options = {"direction": lambda g, w: g + 0.1 * w} if directed else {}
    ours, theirs, learner = both(build, split(23), CONFIGS["momentum and decay"], part=chosen, **options)
    assert all(learner._networks.values())
    agree(ours, theirs, learner.init)
    moved = (ours.vector != learner.init).nonzero().flatten()
    inside = torch.cat([torch.arange(s.start, s.stop) for s in chosen])
    assert torch.isin(moved, inside).all()
    assert len(moved) > 0.5 * len(inside)


def test_a_part_of_a_layer_is_left_to_pytorch():
    learner = learner_of(MODELS["mlp"]().build((1, 28, 28), 10))
    for part in [(slice(0, 784 * 200),), (slice(0, 10),), ()]:
        assert Network.of(learner.flat.module, learner.layout, (1, 28, 28), part) is None


def test_the_gradient_over_all_samples_agrees_with_pytorch():
    learner = learner_of(MODELS["lenet5"]().build((1, 28, 28), 10))
    ours = learner.gradient(learner.init, split(300))
    learner.compiled = False
    assert_close(ours, learner.gradient(learner.init, split(300)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("n", [0, 1, 70, 200])
@pytest.mark.parametrize("name", TAKEN)
def test_logits_and_embeddings_agree_with_pytorch(name, n):
    learner = learner_of(MODELS[name]().build((1, 28, 28), 10))
    x = split(n).x
    with torch.no_grad():
        module = learner.flat.load(learner.init, train=False)
        assert_close(learner.outputs(learner.init, x), module(x), rtol=1e-4, atol=1e-5)
        assert_close(learner.outputs(learner.init, x, embedding=True), module.embed(x), rtol=1e-4, atol=1e-5)


def test_a_network_of_one_layer_embeds_by_pytorch():
    learner = learner_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    assert learner.outputs(learner.init, split(3).x, embedding=True) is None
    assert learner.outputs(learner.init, split(3).x.double()) is None


def test_a_label_that_is_no_class_is_an_error():
    learner = learner_of(MODELS["mlp"]().build((1, 28, 28), 5))
    with pytest.raises(IndexError, match="no class"):
        learner.sgd(learner.init, split(23), CONFIGS["plain"], key(1))


def test_vectors_of_other_kinds_and_lengths():
    learner = learner_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    config, start = CONFIGS["momentum and decay"], torch.linspace(-1, 1, 7850)
    one = learner.sgd(start, split(23), config, key(1))
    wide = torch.zeros(2 * len(start), dtype=torch.float64)
    wide[::2] = start
    same = learner.sgd(wide[::2], split(23), config, key(1), direction=lambda g, w: g.double())
    assert torch.equal(one.vector, same.vector)
    x = split(23).x
    assert torch.equal(learner.outputs(start, x), learner.outputs(wide[::2], x))
    with pytest.raises(ValueError, match="7850 numbers"):
        learner.outputs(start[1:], x)
    with pytest.raises(ValueError, match="7850 numbers"):
        learner.sgd(start, split(23), config, key(1), direction=lambda g, w: g[:5])


def test_what_is_not_finite_stays_so():
    learner = learner_of(MODELS["lenet5"]().build((1, 28, 28), 10))
    broken = split(5)
    broken.x[2, 0, 5, 5] = torch.nan
    assert learner.sgd(learner.init, broken, CONFIGS["plain"], key(1)).vector.isnan().any()


def test_modules_with_more_than_layers_in_order_are_left_to_pytorch():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(2 * x)

    shared = nn.Linear(16, 16)
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    hooked[1].register_forward_hook(lambda module, x, y: 2 * y)
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3))
    frozen[1].requires_grad_(False)
    strided = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(), nn.Linear(2, 3))
    known = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    for module, expected in [
        (known, True),
        (Twice(nn.Flatten(), nn.Linear(16, 3)), False),
        (nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared), False),
        (hooked, False),
        (frozen, False),
        (strided, False),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, 3)), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), False),
    ]:
        layout = Learner(module).layout
        assert (Network.of(module, layout, (1, 4, 4)) is not None) == expected, module
