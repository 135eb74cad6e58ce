"""Networks trained by the kernels agree with PyTorch, with every vector width."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch import nn
from torch.testing import assert_close

from mpifl.core.client import WeightedLoss
from mpifl.core.federation import Split
from mpifl.core.parameters import flatten
from mpifl.core.rng import key
from mpifl.kernels import bindings
from mpifl.kernels.network import Network
from mpifl.models import MODELS
from mpifl.models.modules import Net
from mpifl.training.backend import Request
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner
from mpifl.training.model_context import ModelContext
from mpifl.training.tasks import NextToken

pytestmark = pytest.mark.skipif(
    not bindings.TRAINING_AVAILABLE, reason=bindings.PROBLEM or "the kernels are there"
)

DROPOUTS = nn.Dropout | nn.Dropout2d
EXAMPLES = int(os.environ.get("MPIFL_EXAMPLES", "60"))  # generated networks; more under the sanitizers
DROPPING = ["flt_mlp", "flt_cnn_mnist"]
TAKEN = ["mlp", "ifca_mlp", "lenet5", "flt_cnn_cifar", "cfl_cnn", *DROPPING]
LEFT = ["resnet18_cifar", "emdcfl_cnn", "leaf_cnn", "ccfl_cnn"]
CONFIGS = {
    "plain": LocalConfig(epochs=2, batch_size=5, lr=0.1),
    "momentum and decay": LocalConfig(epochs=2, batch_size=7, lr=0.05, momentum=0.9, weight_decay=0.01),
    "steps": LocalConfig(steps=7, batch_size=5, lr=0.1, momentum=0.5),
    "one batch": LocalConfig(batch_size=100, lr=0.1),
    "augmented": LocalConfig(epochs=2, batch_size=7, lr=0.05, momentum=0.5, augment="crop_flip"),
}


def split(n: int, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> Split:
    """Return made-up images."""
    draws = torch.Generator().manual_seed(n)
    x = torch.randn(n, *shape, generator=draws)
    return Split(x, torch.randint(0, classes, (n,), generator=draws))


def by_pytorch(learner: Learner) -> Learner:
    """Return a learner of a copy of the same module, without kernels."""
    return Learner(deepcopy(learner.flat.module), kernels=False, init=learner.init)


def both(build, samples: Split, config: LocalConfig, **options):
    """Return what kernels and PyTorch make of the same network, and its learner in the first."""
    found = []
    for kernels in (True, False):
        torch.manual_seed(3)
        learner = Learner(build(), kernels=kernels)
        found.append(learner.sgd(learner.init, samples, config, key(1), **options))
        if kernels:
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
    assert learner.kernels.networks
    assert all(learner.kernels.networks.values())
    agree(ours, theirs, learner.init)


@pytest.mark.parametrize("how", ["plain", "direction", "adam", "augmented"])
@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_losses_with_weights_of_samples_agree_with_pytorch(name, how):
    """As FedEM and FedRC train components; some samples count for nothing."""
    weights = torch.rand(23, generator=torch.Generator().manual_seed(2)) * 2
    weights[::5] = 0
    config = CONFIGS["augmented" if how == "augmented" else "momentum and decay"]
    config = LocalConfig(epochs=2, batch_size=7, lr=0.01, optimizer="adam") if how == "adam" else config
    asked = {"loss": WeightedLoss(weights, ModelContext(nn.Linear(1, 1), "cpu").task)}
    if how == "direction":
        asked["direction"] = lambda g, w: 0.5 * g
    ours, theirs, learner = both(lambda: MODELS[name]().build((1, 28, 28), 10), split(23), config, **asked)
    assert next(iter(learner.kernels.networks.values())) is not None
    if how == "adam":  # divides by the root of a square: tiny gradients differ by more
        assert_close(ours.vector, theirs.vector, rtol=0, atol=1e-3 * 0.01 * 8)
        assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    else:
        agree(ours, theirs, learner.init)
    other, _, _ = both(lambda: MODELS[name]().build((1, 28, 28), 10), split(23), config)
    assert abs(other.loss - ours.loss) > 0.01


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_what_pytorch_draws(name):
    """Each visit draws by its own key, whatever was drawn before, and what is drawn counts."""
    build = lambda rate: MODELS[name](dropout=rate).build((1, 28, 28), 10)  # noqa: E731
    config = CONFIGS["momentum and decay"]
    ours, theirs, learner = both(lambda: build(0.3), split(23), config)
    agree(ours, theirs, learner.init)
    torch.rand(7)
    assert torch.equal(learner.sgd(learner.init, split(23), config, key(1)).vector, ours.vector)
    assert not torch.equal(learner.sgd(learner.init, split(23), config, key(2)).vector, ours.vector)
    without, _, _ = both(lambda: build(0.0), split(23), config)
    assert abs(without.loss - ours.loss) > 1e-3
    directed = learner.sgd(learner.init, split(23), config, key(1), direction=lambda g, w: g)
    assert torch.equal(directed.vector, ours.vector)


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_off_unless_outputs_are_asked_for_as_in_training(name):
    learner, samples = Learner(MODELS[name]().build((1, 28, 28), 10)), split(30)
    other = by_pytorch(learner)
    for asked in ({}, {"embedding": True}, {"train_mode": True}):
        ours, theirs = (one.outputs(one.init, samples.x, **asked) for one in (learner, other))
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert learner.kernels.outputs(learner.init, samples.x) is not None
    assert learner.kernels.outputs(learner.init, samples.x, train_mode=True) is None
    gradients = [one.gradient(one.init, samples, 7) for one in (learner, other)]
    assert float((gradients[0] - gradients[1]).norm()) <= 1e-5 * float(gradients[1].norm())


def test_a_layer_that_drops_everything_is_left_to_pytorch():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(1.0), nn.Linear(8, 3))
    assert Network.of(net, ModelContext(net).layout, (1, 4, 4)) is None


def test_losses_of_another_kind_are_left_to_pytorch():
    learner = Learner(MODELS["mlp"]().build((1, 28, 28), 10))
    samples, task = split(6), ModelContext(nn.Linear(1, 1), "cpu").task
    asked = Request(learner.init, samples, CONFIGS["plain"], key(1))
    own = type("Own", (WeightedLoss,), {"__call__": lambda *_: None})
    taken = {
        WeightedLoss(torch.ones(6), task): True,
        WeightedLoss(torch.ones(6).double(), task): False,
        WeightedLoss(torch.ones(5), task): False,
        WeightedLoss(torch.ones(6), NextToken()): False,
        own(torch.ones(6), task): False,
    }
    for loss, known in taken.items():
        assert learner.kernels.accepts(asked._replace(loss=loss)) == known


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_do_not_know_is_left_to_pytorch(name):
    learner = Learner(MODELS[name]().build((3, 32, 32), 10))
    learner.sgd(learner.init, split(4, (3, 32, 32)), CONFIGS["plain"], key(1))
    assert list(learner.kernels.networks.values()) == [None]


def known_layer(draw, shape: tuple[int, ...]) -> nn.Module:
    """Return a layer of a kind that the kernels know, for images of `shape`."""
    kind = draw(
        st.sampled_from(
            ["relu", "flatten", "pool", "drop", "conv", "conv"]
            if len(shape) == 3
            else ["relu", "flatten", "drop", "dense"]
        )
    )
    if kind == "relu":
        return nn.ReLU()
    if kind == "flatten":
        return nn.Flatten()
    if kind == "drop":
        rate = draw(st.sampled_from([0.0, 0.1, 0.5]))
        return nn.Dropout2d(rate) if len(shape) == 3 else nn.Dropout(rate)
    if kind == "dense":
        return nn.Linear(shape[0], draw(st.integers(1, 40)))
    if kind == "pool":
        return draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d((2, 2), 2)]))
    side = draw(st.integers(1, 6))
    return nn.Conv2d(shape[0], draw(st.integers(1, 9)), side, padding=draw(st.integers(0, side - 1)))


def other_layer(draw, shape: tuple[int, ...]) -> nn.Module:
    """Return a layer that the kernels do not know, or whose options they do not."""
    if len(shape) < 3:
        plain = [
            nn.Linear(shape[0], 5, bias=False),
            nn.Tanh(),
            nn.Identity(),
            nn.LeakyReLU(),
            nn.Softmax(1),
            nn.AlphaDropout(0.2),
        ]
        return draw(
            st.sampled_from([*plain, nn.LayerNorm(shape), nn.Unflatten(1, (1, 1, shape[0])), nn.Sequential()])
        )
    sides = st.tuples(st.integers(1, 3), st.integers(1, 3))
    pools = [
        nn.MaxPool2d(draw(sides), stride=draw(sides), ceil_mode=draw(st.booleans())),
        nn.MaxPool2d(2, padding=1, dilation=draw(st.integers(1, 2))),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, padding=1, count_include_pad=draw(st.booleans())),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(draw(sides), stride=draw(sides)),
        nn.AdaptiveAvgPool2d(2),
    ]
    c = shape[0]
    convolutions = [
        nn.Conv2d(c, 3, draw(sides), padding="same"),
        nn.Conv2d(c, 3, 3, padding="valid"),
        nn.Conv2d(c, 3, draw(sides), padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))),
        nn.Conv2d(
            c, 3, 3, padding=1, padding_mode=draw(st.sampled_from(["reflect", "replicate", "circular"]))
        ),
        nn.Conv2d(c, 3, 2, stride=draw(sides), dilation=draw(sides)),
        nn.Conv2d(c, 2 * c, 2, groups=c),
        nn.Conv2d(c, 3, 2, bias=False),
        nn.Conv2d(c, 3, 2, padding=2),
    ]
    others = [
        nn.Flatten(2),
        nn.Flatten(1, 2),
        nn.Flatten(-2),
        nn.Linear(shape[-1], 3),
        nn.GroupNorm(1, c),
        nn.Identity(),
        nn.Dropout(0.2),  # of single pixels
    ]
    return draw(st.sampled_from([*pools, *convolutions, *others]))


@st.composite
def networks(draw, most: int = 7, sides: int = 11):
    """Return the shape of images, a network of layers in any order for them, and whether the kernels know all
    its layers and begin with its first.
    """
    flat = draw(st.integers(0, 9)) == 0
    start = (draw(st.integers(1, 60)),) if flat else tuple(draw(st.integers(1, m)) for m in (3, sides, sides))
    shape, layers, known = start, [], True
    rare = draw(st.booleans())
    for _ in range(draw(st.integers(0, most))):
        other = rare and draw(st.integers(0, 3)) == 0
        layer = (other_layer if other else known_layer)(draw, shape)
        if layers and draw(st.integers(0, 7)) == 0:
            layer = draw(st.sampled_from(layers))  # a second time
        try:
            with torch.no_grad():
                out, _ = layer(torch.zeros(2, *shape)), layer(torch.zeros(1, *shape))
        except (RuntimeError, ValueError, IndexError):
            continue  # does not fit
        after = tuple(out.shape[1:])
        samples_apart = out.dim() > 1 and len(out) == 2
        if not samples_apart or 0 in after or torch.Size(after).numel() > 3000:
            continue
        if not bool(out.isfinite().all()):  # a window of padding alone, through which PyTorch cannot go back
            continue
        if type(layer) is nn.ReLU and layers and isinstance(layers[-1], nn.Conv2d | nn.Linear):
            layer = nn.ReLU(inplace=draw(st.booleans()))  # elsewhere PyTorch may refuse to go back
        elif type(layer) is nn.ReLU and layer.inplace:  # one that comes a second time
            layer = nn.ReLU()
        known = known and not other
        layers, shape = [*layers, layer], after
    if len(shape) > 1 or draw(st.booleans()):
        layers, shape = [*layers, nn.Flatten()], (torch.Size(shape).numel(),)
    layers = [*layers, nn.Linear(shape[0], 4)]
    known = known and can_begin(layers)
    cut = draw(st.integers(0, len(layers)))
    layers = [nn.Sequential(*layers[:cut]), *layers[cut:]] if draw(st.booleans()) else layers
    return start, nn.Sequential(*layers), known


def can_begin(layers: Sequence[nn.Module]) -> bool:
    """Return whether the kernels can begin with these layers: they change no sample in place."""
    first = next(m for m in layers if not (type(m) is nn.Flatten or (isinstance(m, DROPOUTS) and not m.p)))
    pooled = any(type(m) is nn.Conv2d for m in layers) and not isinstance(first, nn.ReLU | DROPOUTS)
    return pooled or isinstance(first, nn.Conv2d | nn.Linear)


def parts_of(learner: Learner) -> st.SearchStrategy:
    """Return a strategy for what is trained: everything, or some of the layers."""
    owners = sorted({name.rpartition(".")[0] for name in learner.layout.names})
    slices = learner.layout.slices

    def part(chosen: list[str]) -> tuple[slice, ...]:
        return tuple(s for name, s in slices.items() if name.rpartition(".")[0] in chosen)

    some = st.lists(st.sampled_from(owners), min_size=1, unique=True).map(part)
    return st.one_of(st.none(), some)


def disagree(learner: Learner, samples: Split, config: LocalConfig, **options) -> str:
    """Return in what the kernels and PyTorch differ by more than rounding; empty for nothing."""
    found = []
    for one in (learner, by_pytorch(learner)):
        trained = one.sgd(one.init, samples, config, key(2), **options)
        logits = one.outputs(one.init, samples.x)
        found.append((trained, one.gradient(one.init, samples, 16), logits))
    (ours, gradient, logits), (theirs, expected, right) = found
    if not bool(theirs.vector.isfinite().all()):  # too large a rate for these layers: nothing to compare
        return "" if not bool(ours.vector.isfinite().all()) else "model"
    scale = float((theirs.vector - learner.init).abs().max())
    if not bool((ours.vector - theirs.vector).abs().max() <= 1e-4 * scale + 1e-7):
        return "model"
    if (ours.steps, ours.lr, ours.momentum) != (theirs.steps, theirs.lr, theirs.momentum):
        return "steps"
    if abs(ours.loss - theirs.loss) > 1e-5 * abs(theirs.loss) + 1e-6:
        return "loss"
    if not bool((gradient - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-7):
        return "gradient"
    return "" if torch.allclose(logits, right, rtol=1e-4, atol=1e-5) else "logits"


def generated_networks(examples: int, **sizes):
    """Return a test of so many networks; called, it returns how many the kernels took of those they know."""

    def test() -> tuple[int, int]:
        known_ones, taken = 0, 0

        @settings(
            max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(network=networks(**sizes), data=st.data())
        def agree_with_pytorch(network, data):
            nonlocal known_ones, taken
            shape, module, known = network
            torch.manual_seed(data.draw(st.integers(0, 9)))
            for p in module.parameters():
                p.data = torch.randn(p.shape) * (0.3 if p.dim() == 1 else p[0].numel() ** -0.5)
            learner = Learner(module)
            n = data.draw(st.sampled_from([1, 2, 5, 17, 37]))
            config = LocalConfig(
                batch_size=data.draw(st.one_of(st.sampled_from([1, n, 16, 32]), st.integers(1, 40))),
                epochs=data.draw(st.integers(1, 2)),
                steps=data.draw(st.sampled_from([None, 1, 3])),
                lr=0.02,
                momentum=data.draw(st.sampled_from([0.0, 0.9])),
                weight_decay=data.draw(st.sampled_from([0.0, 0.1])),
            )
            directed = data.draw(st.integers(0, 3)) == 0
            options = {"direction": lambda g, w: g + 0.1 * w} if directed else {}
            options["part"] = data.draw(parts_of(learner))
            why = [disagree(learner, split(n + i, shape, classes=4), config, **options) for i in (0, 100)]
            # a pixel at a ReLU's bend may fall on either side; not in other samples too
            assert not all(why), why
            known_ones += known
            taken += known and any(learner.kernels.networks.values())

        agree_with_pytorch()
        return known_ones, taken

    return test


@pytest.mark.in_turn
def test_generated_networks_agree_with_pytorch():
    """Any order of layers with any options, odd sizes, batches of one, single samples, cut last batches."""
    known, taken = generated_networks(EXAMPLES)()
    assert taken > 0.9 * known > 10, "the kernels should take nearly all they know"


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)])
def test_layers_behind_the_pooling_of_odd_sides_are_known(pool):
    torch.manual_seed(4)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.ReLU(), pool, nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(12, 4)
    )
    learner = Learner(module)
    assert disagree(learner, split(9, (1, 8, 10), classes=4), LocalConfig(batch_size=4)) == ""
    assert all(learner.kernels.networks.values())


@pytest.mark.parametrize("between", [(), (nn.ReLU(),)])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)])
def test_dropout_leaves_the_pooling_before_it_its_gradients(pool, between):
    """Max pooling goes back by its output, which dropout changes."""
    torch.manual_seed(4)
    dropout = nn.Dropout2d(0.4)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), pool, *between, dropout, nn.Flatten(), nn.Linear(36, 4))
    learner = Learner(module)
    assert disagree(learner, split(9, (1, 8, 10), classes=4), LocalConfig(batch_size=4)) == ""
    assert all(learner.kernels.networks.values())


@pytest.mark.nightly
def test_many_generated_networks_agree_with_pytorch():
    known, taken = generated_networks(1500, most=12, sides=17)()
    assert taken > 0.9 * known > 250


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cfl_cnn", *DROPPING])
def test_wide_and_narrow_vectors_give_the_same_bits(name):
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    found = []
    try:
        for on in (False, True):
            bindings.use_narrow_vectors(on)
            trained = learner.sgd(learner.init, split(23), CONFIGS["momentum and decay"], key(1))
            found += [trained.vector, learner.gradient(trained.vector, split(23))]
    finally:
        bindings.use_narrow_vectors(False)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_a_direction_that_changes_nothing_changes_no_bit(name):
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    for config in CONFIGS.values():
        plain = learner.sgd(learner.init, split(23), config, key(1))
        directed = learner.sgd(learner.init, split(23), config, key(1), direction=lambda g, w: g)
        assert torch.equal(plain.vector, directed.vector)
        assert plain.steps == directed.steps


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["mlp", "cfl_cnn"])
def test_adam_takes_the_steps_of_its_paper_on_the_gradients_of_the_kernels(name, decay):
    """Kingma and Ba, Algorithm 1, in float64, on the gradients that a direction sees and changes.

    Each of them is PyTorch's gradient of that batch at the weights of that step. A step is 0.01 at most;
    where gradient and decay cancel, their last bits decide how much of it is taken.
    """
    torch.manual_seed(3)
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    config = LocalConfig(epochs=2, batch_size=9, lr=0.01, optimizer="adam", weight_decay=decay)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
        apart = (ours.double() - reference).abs()
        assert float(apart.mean()) < 1e-7
        assert float(apart.max()) < 1e-3

    def direction(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((g.clone(), w.clone()))
        return g + 0.1 * w

    samples = split(23)
    done = learner.sgd(learner.init, samples, config, key(1), direction=direction)
    assert all(learner.kernels.networks.values())
    assert (done.steps, len(seen), done.momentum) == (6, 6, 0.0)
    x = seen[0][1].double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    pytorch = by_pytorch(learner)
    batches = learner.batches(samples, config, key(1))
    for t, ((g, w), index) in enumerate(zip(seen, batches, strict=True), start=1):
        near(w, x)
        assert_close(g, pytorch.gradient(w, Split(samples.x[index], samples.y[index])), rtol=1e-3, atol=1e-5)
        g = g.double() + (0.1 + decay) * w.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = w.double() - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    near(done.vector, x)


def test_adam_without_a_direction_is_adam_with_one_that_changes_nothing():
    learner = Learner(MODELS["lenet5"]().build((1, 28, 28), 10))
    config = LocalConfig(epochs=2, batch_size=5, lr=0.01, optimizer="adam", weight_decay=0.1)
    plain = learner.sgd(learner.init, split(23), config, key(1))
    directed = learner.sgd(learner.init, split(23), config, key(1), direction=lambda g, w: g)
    assert_close(plain.vector, directed.vector, rtol=0, atol=0)
    head = learner.layout.part("head")
    moved = (learner.sgd(learner.init, split(23), config, key(1), part=head).vector != learner.init).nonzero()
    assert_array_equal(moved.flatten(), torch.cat([torch.arange(s.start, s.stop) for s in head]))


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
    assert all(learner.kernels.networks.values())
    agree(ours, theirs, learner.init)
    moved = (ours.vector != learner.init).nonzero().flatten()
    inside = torch.cat([torch.arange(s.start, s.stop) for s in chosen])
    assert torch.isin(moved, inside).all()
    assert len(moved) > 0.5 * len(inside)


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("part", ["all", "head", "body"])
@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_visits_in_one_call_have_the_bits_of_visits_one_by_one(name, part, change):
    """One without a step, one of a single step, one of two epochs; what is not trained stays as it was."""
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    chosen = None if part == "all" else learner.layout.part(part)
    network = Network.of(learner.flat.module, learner.layout, (1, 28, 28), chosen)
    samples, counts = [split(n) for n in (9, 4, 23)], np.array([0, 4, 46])
    orders = [key(1, i).numpy().permutation(len(s)) for i, s in enumerate(samples)]
    taken = [np.tile(order, 2)[:count] for order, count in zip(orders, counts, strict=True)]
    out = [torch.full_like(learner.init, torch.nan) for _ in samples]
    lengths = np.cumsum(counts) - counts, counts, np.array([9, 4, 23])
    rates = 0.05, 0.9, 0.01
    starts = [learner.init] * len(samples)
    together = network.train_visits(
        starts, out, samples, np.concatenate(taken), lengths, 7, rates, change=change
    )
    for i, (some, order) in enumerate(zip(samples, orders, strict=True)):
        epochs = [order] * (counts[i] // len(order))
        vector, _, loss = network.train(learner.init, some, epochs, 7, rates, None)
        expected = vector - learner.init if change else vector
        assert torch.equal(out[i], expected)
        assert together[0][i] == pytest.approx(loss, rel=1e-12, nan_ok=True)
        assert together[1][i] == expected.abs().max()


def test_a_part_of_a_layer_is_left_to_pytorch():
    learner = Learner(MODELS["mlp"]().build((1, 28, 28), 10))
    for part in [(slice(0, 784 * 200),), (slice(0, 10),), ()]:
        assert Network.of(learner.flat.module, learner.layout, (1, 28, 28), part) is None


def test_the_gradient_over_all_samples_agrees_with_pytorch():
    learner = Learner(MODELS["lenet5"]().build((1, 28, 28), 10))
    ours = learner.gradient(learner.init, split(300))
    assert_close(ours, by_pytorch(learner).gradient(learner.init, split(300)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("n", [0, 1, 70, 200])
@pytest.mark.parametrize("name", TAKEN)
def test_logits_and_embeddings_agree_with_pytorch(name, n):
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    x = split(n).x
    with torch.no_grad():
        module = learner.flat.load(learner.init, train=False)
        assert_close(learner.outputs(learner.init, x), module(x), rtol=1e-4, atol=1e-5)
        assert_close(learner.outputs(learner.init, x, embedding=True), module.embed(x), rtol=1e-4, atol=1e-5)


def test_a_network_of_one_layer_embeds_by_pytorch():
    learner = Learner(Net(nn.Flatten(), nn.Linear(784, 10)))
    assert learner.kernels.outputs(learner.init, split(3).x) is not None
    assert learner.kernels.outputs(learner.init, split(3).x, embedding=True) is None
    assert learner.kernels.outputs(learner.init, split(3).x.double()) is None


def test_a_head_of_several_layers_embeds_by_pytorch():
    """The embedding is the input of the head, here before its ReLU; the kernels know the last layer's."""
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(784, 5)), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))
    learner = Learner(Net(body, head))
    assert learner.kernels.outputs(learner.init, split(3).x) is not None
    assert learner.kernels.outputs(learner.init, split(3).x, embedding=True) is None


@pytest.mark.parametrize("label", [-100, -1, 5, 10**12])
def test_a_label_that_is_no_class_is_an_error(label):
    """Wherever it stands, -100 included, which PyTorch would leave out; no logit beyond the last is read."""
    learner, samples = Learner(MODELS["mlp"]().build((1, 28, 28), 5)), split(23, classes=5)
    samples.y[17] = label
    with pytest.raises(IndexError, match="not a class"):
        learner.sgd(learner.init, samples, CONFIGS["plain"], key(1))
    with pytest.raises(IndexError, match="not a class"):
        learner.gradient(learner.init, samples)


def test_vectors_of_other_kinds_and_lengths():
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["lenet5", "flt_cnn_cifar", "mlp"])
def test_what_is_not_finite_stays_so(name, value):
    """A broken pixel of one sample, at each place of a window: its logits, and the model after a visit."""
    learner = Learner(MODELS[name]().build((1, 28, 28), 10))
    for place in [(4, 4), (4, 5), (5, 4), (5, 5)]:
        broken = split(5)
        broken.x[2, 0, *place] = value
        with torch.no_grad():
            expected = learner.flat.load(learner.init, train=False)(broken.x)
        assert_close(learner.outputs(learner.init, broken.x), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
        finite = [not learner.sgd(learner.init, broken, CONFIGS["plain"], key(1)).vector.isnan().any()]
        theirs = by_pytorch(learner).sgd(learner.init, broken, CONFIGS["plain"], key(1))
        finite += [not theirs.vector.isnan().any()]
        assert finite[0] == finite[1]


@pytest.mark.parametrize("largest", [True, False])
def test_a_window_with_a_nan_pools_to_nan_and_takes_its_gradient(largest):
    """One 2x2 window a sample with the NaN at each place, in a network whose weights are all 1."""
    pool = nn.MaxPool2d(2) if largest else nn.AvgPool2d(2)
    module = nn.Sequential(nn.Conv2d(1, 1, 1), pool, nn.Flatten(), nn.Linear(1, 2))
    learner, x = Learner(module), torch.ones(4, 1, 2, 2)
    for i in range(4):
        x.view(4, 4)[i, i] = torch.nan
    assert learner.outputs(learner.init, x).isnan().all()
    samples = Split(x[:1], torch.zeros(1, dtype=torch.int64))
    moved = learner.sgd(learner.init, samples, CONFIGS["plain"], key(1)).vector
    expected = by_pytorch(learner).sgd(learner.init, samples, CONFIGS["plain"], key(1)).vector
    assert torch.equal(moved.isnan(), expected.isnan())


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)], ids=["max", "mean"])
def test_equal_pixels_share_a_gradient_as_in_pytorch(pool):
    """Pixels of 1 or 2 and kernels of one weight: most windows hold their largest value several times."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1), pool, nn.Flatten(), nn.Linear(2 * 3 * 2, 3))
    samples = split(23, (1, 7, 4), classes=3)
    samples.x.copy_((samples.x > 0) + 1)
    assert not disagree(Learner(module), samples, CONFIGS["plain"])


def test_pytorchs_default_kind_of_numbers_does_not_matter():
    samples, module = split(23), MODELS["lenet5"]().build((1, 28, 28), 10)
    plain = Learner(copy.deepcopy(module)).sgd(flatten(module), samples, CONFIGS["plain"], key(1))
    torch.set_default_dtype(torch.float64)
    try:
        other = Learner(copy.deepcopy(module))
        assert torch.equal(other.sgd(flatten(module), samples, CONFIGS["plain"], key(1)).vector, plain.vector)
        assert other.outputs(plain.vector, samples.x).dtype == torch.float32
        assert all(other.kernels.networks.values())
    finally:
        torch.set_default_dtype(torch.float32)


# -- what is more than layers one after the other is PyTorch's ----------------------------------------------


def small(**changes: nn.Module) -> Net:
    """Return a network that the kernels take, for images 1x4x4."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU())
    return Net(changes.get("body", body), changes.get("head", nn.Linear(8, 3)))


class Doubled(Net):
    """Forward does more than its parts; so say the next ones of `embed`, a base class, an instance."""

    def forward(self, x):
        return super().forward(2 * x)


class DoubledEmbedding(Net):
    def embed(self, x):
        return 2 * super().embed(x)


class DoubledTwice(DoubledEmbedding):
    pass


class OwnSequence(nn.Module):
    """`sequence` is an attribute here, and means something else."""

    def __init__(self):
        super().__init__()
        self.sequence = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return self.sequence(2 * x)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledSequence(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


class Scaled(nn.Parameter):
    pass


def with_patched_forward(part: str) -> nn.Module:
    net = small()
    owner = net.get_submodule(part)
    true = owner.forward
    owner.forward = lambda x: 2 * true(x)
    return net


def with_patched_embed() -> nn.Module:
    net = small()
    net.embed = lambda x: 2 * net.body(x)
    return net


def with_hook(register: str, hook, part: str = "body.1", **options) -> nn.Module:
    net = small()
    getattr(net.get_submodule(part), register)(hook, **options)
    return net


def with_tensor_hook(register: str, hook) -> nn.Module:
    net = small()
    getattr(net.head.weight, register)(hook)
    return net


def with_buffer(value: torch.Tensor) -> nn.Module:
    net = small()
    net.head.register_buffer("count", value)
    return net


def with_extra_layer() -> nn.Module:
    net = small()
    net.extra = nn.Linear(2, 2)  # unused, and yet decayed by weight decay
    return net


def with_shared_weights() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    net[3].weight = net[1].weight
    return net


def with_frozen_layer() -> nn.Module:
    net = small()
    net.body[1].requires_grad_(False)
    return net


def with_other_parameter() -> nn.Module:
    net = small()
    net.head.weight = Scaled(net.head.weight.data)
    return net


def with_shared_layer() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(16, 3))


double = lambda module, x, y: 2 * y  # noqa: E731
first, second = "register_full_backward_pre_hook", "register_full_backward_hook"
OTHERS = {
    "forward of a subclass": lambda: Doubled(small().body, nn.Linear(8, 3)),
    "embed of a subclass": lambda: DoubledEmbedding(small().body, nn.Linear(8, 3)),
    "embed of a base class": lambda: DoubledTwice(small().body, nn.Linear(8, 3)),
    "another sequence": OwnSequence,
    "a subclass of a layer": lambda: small(head=DoubledLinear(8, 3)),
    "a subclass of Sequential": lambda: DoubledSequence(nn.Flatten(), nn.Linear(16, 3)),
    "forward of one network": lambda: with_patched_forward(""),
    "forward of one layer": lambda: with_patched_forward("head"),
    "embed of one network": with_patched_embed,
    "forward hook": lambda: with_hook("register_forward_hook", double),
    "forward hook of the network": lambda: with_hook("register_forward_hook", double, ""),
    "forward hook with keywords": lambda: with_hook(
        "register_forward_hook", lambda m, a, k, y: 2 * y, with_kwargs=True
    ),
    "forward pre-hook": lambda: with_hook("register_forward_pre_hook", lambda m, x: (2 * x[0],)),
    "backward hook": lambda: with_hook(second, lambda m, gx, gy: (2 * gx[0],), "head"),
    "backward pre-hook": lambda: with_hook(first, lambda m, gy: (2 * gy[0],), "head"),
    "hook of a tensor": lambda: with_tensor_hook("register_hook", lambda g: 2 * g),
    "hook after a gradient": lambda: with_tensor_hook("register_post_accumulate_grad_hook", lambda p: None),
    "buffer": lambda: with_buffer(torch.zeros(2)),
    "buffer of integers": lambda: with_buffer(torch.zeros(2, dtype=torch.int64)),
    "unused layer": with_extra_layer,
    "parametrization": lambda: small(head=nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))),
    "spectral norm": lambda: small(head=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))),
    "weight norm by hooks": lambda: small(head=nn.utils.weight_norm(nn.Linear(8, 3))),
    "pruning": lambda: small(head=torch.nn.utils.prune.random_unstructured(nn.Linear(8, 3), "weight", 0.5)),
    "shared weights": with_shared_weights,
    "shared layer": with_shared_layer,
    "frozen layer": with_frozen_layer,
    "another kind of parameter": with_other_parameter,
    "stride": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(), nn.Linear(2, 3)),
    "dense layer of lines": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, 3)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_what_is_more_than_layers_in_order_is_left_to_pytorch(build):
    torch.manual_seed(3)
    learner, samples = Learner(build()), split(23, (1, 4, 4), classes=3)
    assert Network.of(learner.flat.module, learner.layout, (1, 4, 4)) is None
    found = [learner.sgd(learner.init, samples, CONFIGS["momentum and decay"], key(1)).vector]
    found += [learner.gradient(learner.init, samples)]
    assert learner.kernels.outputs(learner.init, samples.x) is None
    assert learner.kernels.outputs(learner.init, samples.x, embedding=True) is None
    torch.manual_seed(3)
    plain = Learner(build(), kernels=False)
    trained = plain.sgd(plain.init, samples, CONFIGS["momentum and decay"], key(1))
    assert torch.equal(found[0], trained.vector)
    assert torch.equal(found[1], plain.gradient(plain.init, samples))


def test_the_network_that_these_change_is_taken():
    learner = Learner(small())
    assert Network.of(learner.flat.module, learner.layout, (1, 4, 4)) is not None
    assert learner.outputs(learner.init, split(3, (1, 4, 4)).x, embedding=True).shape == (3, 8)


def test_a_hook_counts_from_when_it_is_added_until_it_is_removed():
    """Whether a rank trained before makes no difference: what it does depends on what is there now."""
    learner, samples = Learner(small()), split(23, (1, 4, 4), classes=3)
    module, shape = learner.flat.module, (1, 4, 4)
    x = samples.x
    for add in (
        lambda: module.head.register_forward_hook(double),
        lambda: module.head.weight.register_hook(lambda g: 2 * g),
        lambda: nn.modules.module.register_module_forward_hook(double),
        lambda: nn.modules.module.register_module_full_backward_hook(lambda m, gx, gy: None),
    ):
        assert learner.kernels.outputs(learner.init, x) is not None
        handle = add()
        try:
            assert learner.kernels.outputs(learner.init, x) is None
            assert Network.of(module, learner.layout, shape) is None
        finally:
            handle.remove()
    assert learner.kernels.outputs(learner.init, x) is not None


def test_a_method_given_to_a_layer_or_to_its_class_later_counts(monkeypatch):
    learner, x = Learner(small()), split(3, (1, 4, 4)).x
    assert learner.kernels.outputs(learner.init, x) is not None
    with monkeypatch.context() as patch:
        patch.setattr(learner.flat.module.head, "forward", lambda x: x[:, :3])
        assert learner.kernels.outputs(learner.init, x) is None
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x[:, :3])
        assert learner.kernels.outputs(learner.init, x) is None
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda self, x: self.head(self.embed(2 * x)))
        assert Network.of(learner.flat.module, learner.layout, (1, 4, 4)) is None
    assert learner.kernels.outputs(learner.init, x) is not None


def test_a_layer_used_twice_is_applied_twice():
    """One ReLU object after both layers: a module's children name it once."""
    relu = nn.ReLU()
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3))
    learner, samples = Learner(module), split(23, (1, 4, 4), classes=3)
    assert not disagree(learner, samples, CONFIGS["plain"])
    assert len(Network.of(learner.flat.module, learner.layout, (1, 4, 4)).layers) == 5


@pytest.mark.parametrize("flat", [False, True])
def test_flattening_what_is_flat_changes_nothing(flat):
    convolution = [] if flat else [nn.Conv2d(1, 2, 3)]
    width = 16 if flat else 8
    module = nn.Sequential(
        *convolution, nn.Flatten(), nn.Flatten(), nn.ReLU(), nn.Flatten(), nn.Linear(width, 3)
    )
    learner = Learner(module)
    if not flat:
        assert Network.of(learner.flat.module, learner.layout, (1, 4, 4)) is not None
    for n in (1, 2, 23):
        assert not disagree(learner, split(n, (1, 4, 4), classes=3), CONFIGS["plain"])


def test_images_of_another_kind_or_order_in_memory_are_left_to_pytorch():
    learner = Learner(MODELS["lenet5"]().build((3, 32, 32), 10))
    images = split(5, (3, 32, 32))
    crosswise = Split(images.x.contiguous(memory_format=torch.channels_last), images.y)
    labels = torch.empty(10, dtype=torch.int64)
    labels[::2] = images.y
    apart = Split(images.x, labels[::2])
    expected = learner.sgd(learner.init, images, CONFIGS["plain"], key(1)).vector
    for other in (crosswise, apart):
        found = learner.sgd(learner.init, other, CONFIGS["plain"], key(1)).vector
        assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert not torch.equal(found, expected), "the last bits are PyTorch's"
    with pytest.raises(RuntimeError):  # PyTorch's: the weights are float32
        learner.sgd(learner.init, Split(images.x.double(), images.y), CONFIGS["plain"], key(1))
