"""Layers of wide networks by the kernels inside PyTorch's loop: how exact they are, and who takes which."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from support import toy
from support.each import for_each
from torch import nn
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.federation import Split
from mpifl.core.rng import key
from mpifl.experiment.placement import place
from mpifl.experiment.schema import SystemConfig
from mpifl.kernels import bindings, convolutions
from mpifl.kernels.wide_layers import MIN_TILES, ChannelsLast
from mpifl.models import MODELS
from mpifl.models.cnn import CcflCNN, EmdcflCNN, LeafCNN
from mpifl.models.resnet import ResNet18Cifar
from mpifl.results.identity import CONVOLUTIONS, WINOGRAD, line
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner

pytestmark = pytest.mark.skipif(
    not bindings.TRAINING_AVAILABLE, reason=bindings.PROBLEM or "the kernels are there"
)

LAST = torch.channels_last
SHAPES = [  # n, c, o, H, W, side of the kernels, margin
    (8, 32, 32, 8, 8, 3, 1),
    (2, 64, 32, 28, 28, 3, 1),
    (3, 32, 96, 13, 18, 3, 1),
    (33, 64, 64, 4, 4, 3, 1),
    (40, 96, 32, 1, 3, 3, 1),
    (50, 160, 32, 2, 5, 3, 1),
    (5, 64, 32, 13, 18, 3, 0),  # as many tiles of the input as of the output
    (32, 32, 32, 5, 5, 3, 0),  # more of the input
    (7, 32, 64, 9, 6, 3, 2),
    (8, 32, 64, 12, 12, 5, 0),
    (5, 64, 32, 13, 10, 5, 0),
    (64, 32, 32, 5, 5, 5, 0),
    (5, 32, 96, 7, 12, 5, 1),
    (4, 32, 64, 14, 14, 5, 2),
    (40, 96, 32, 1, 3, 5, 2),
    (7, 64, 32, 5, 8, 5, 3),
    (9, 32, 32, 2, 3, 5, 4),
]
ROUNDED = 5e-6  # of the largest number; PyTorch's are below 1e-6, and 5e-6 in gradients of weights


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Return the names of the functions of the kernels that are called from now on."""
    found: list[str] = []
    for name in ("convolve", "convolve_input_grad", "convolve_kernels_grad"):
        known = getattr(convolutions, name)

        def spy(*args, name=name, known=known, **named):
            found.append(name)
            return known(*args, **named)

        monkeypatch.setattr(convolutions, name, spy)
    return found


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(shape: tuple[int, ...], bias: bool, kernels: bool = True, dtype: torch.dtype = torch.float32):
    """Return output and gradients of a convolution of drawn images."""
    n, c, o, h, w, k, margin = shape
    x, weight, offset = draw(n, c, h, w), draw(o, c, k, k, seed=1) / (k * k * c) ** 0.5, draw(o, seed=2)
    asked = [t.to(dtype).requires_grad_() for t in (x, weight, *([offset] if bias else []))]
    with ChannelsLast() if kernels else nullcontext():
        y = torch.conv2d(asked[0], asked[1], asked[2] if bias else None, padding=margin)
    return [y.detach(), *torch.autograd.grad(y, asked, draw(*y.shape, seed=3).to(dtype))]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions_and_gradients_agree_with_float64(shape, bias, calls):
    for ours, exact in zip(gradients(shape, bias), gradients(shape, bias, False, torch.float64), strict=True):
        assert ours.shape == exact.shape
        assert float((ours - exact).abs().max()) <= ROUNDED * float(exact.abs().max())
    n, _, _, h, w, k, margin = shape
    side, more = convolutions.TILE_SIDES[k], 2 * margin + 1 - k
    tiles_in, tiles_out = (-(-(h + m) // side) * -(-(w + m) // side) for m in (0, more))
    assert n * tiles_out >= MIN_TILES[k]
    back = "convolve_input_grad" if tiles_out < tiles_in else "convolve"
    assert calls == ["convolve", back, "convolve_kernels_grad"]


def test_sums_over_many_tiles_stay_exact():
    """A gradient of weights from 2304 tiles, in blocks."""
    shape = (16, 32, 32, 24, 24, 5, 2)
    for ours, exact in zip(
        gradients(shape, False), gradients(shape, False, False, torch.float64), strict=True
    ):
        assert float((ours - exact).abs().max()) <= ROUNDED * float(exact.abs().max())


@for_each("shape", SHAPES, ids=str)
def test_narrow_and_wide_vectors_have_the_same_bits(shape):
    found = []
    try:
        for narrow in (True, False):
            bindings.use_narrow_vectors(narrow)
            found.append(gradients(shape, True))
    finally:
        bindings.use_narrow_vectors(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_layout_of_images_changes_no_bit():
    weight, x = draw(32, 32, 3, 3), draw(8, 32, 9, 9)
    found = []
    for images in (x, x.contiguous(memory_format=LAST), x.repeat(1, 1, 1, 2)[..., :9]):
        with ChannelsLast():
            found.append(torch.conv2d(images, weight, padding=1))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(("side", "padding"), [(3, "same"), (5, "same"), (5, "valid"), (5, [1, 1])], ids=str)
def test_gradients_can_be_differentiated_again(side, padding, calls):
    found = []
    for kernels in (True, False):
        x, weight = draw(16, 32, 8, 8).requires_grad_(), draw(32, 32, side, side, seed=1).requires_grad_()
        with ChannelsLast() if kernels else nullcontext():
            y = torch.conv2d(x, weight, None, padding=padding).square().sum()
        first = torch.autograd.grad(y, (x, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().mean() for g in first), (x, weight)))
    assert calls[0] == "convolve"
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


OTHERS = {
    "float64": lambda: (draw(8, 32, 8, 8).double(), draw(32, 32, 3, 3).double(), None, 1, 1),
    "few pixels": lambda: (draw(MIN_TILES[3] - 1, 32, 4, 4), draw(32, 32, 3, 3), None, 1, 1),
    "few pixels, 5x5": lambda: (draw(MIN_TILES[5] - 1, 32, 6, 6), draw(32, 32, 5, 5)),
    "few channels": lambda: (draw(32, 16, 8, 8), draw(32, 16, 3, 3), None, 1, 1),
    "one channel": lambda: (draw(32, 1, 8, 8), draw(32, 1, 3, 3), None, 1, 1),
    "larger kernels": lambda: (draw(32, 32, 8, 8), draw(32, 32, 7, 7), None, 1, 3),
    "no square": lambda: (draw(32, 32, 8, 8), draw(32, 32, 3, 5), None, 1, 1),
    "stride": lambda: (draw(32, 32, 8, 8), draw(32, 32, 3, 3), None, 2, 1),
    "two margins": lambda: (draw(32, 32, 8, 8), draw(32, 32, 5, 5), None, 1, (2, 1)),
    "a margin as wide as the kernels": lambda: (draw(32, 32, 8, 8), draw(32, 32, 3, 3), None, 1, 3),
    "dilation": lambda: (draw(32, 32, 8, 8), draw(32, 32, 3, 3), None, 1, 1, 2),
    "groups": lambda: (draw(32, 64, 8, 8), draw(64, 32, 3, 3), None, 1, 1, 1, 2),
    "one image": lambda: (draw(32, 64, 64), draw(32, 32, 3, 3), None, 1, 1),
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_what_the_kernels_do_not_know_is_left_to_pytorch(given, calls):
    x, *options = given()
    if x.dim() == 3:
        x = x[:, :32, :32].repeat(1, 1, 1)
    with ChannelsLast():
        found = torch.conv2d(x, *options)
    assert_close(found, torch.conv2d(x, *options), rtol=1e-4, atol=1e-4)
    assert calls == []


def test_wrapped_tensors_are_left_to_pytorch(calls):
    """A stack of clients' models goes through `torch.func`."""
    x, weights = draw(8, 32, 8, 8), draw(3, 32, 32, 3, 3)
    with ChannelsLast():
        stacked = torch.vmap(lambda w: torch.conv2d(x, w, padding=1))(weights)
    assert calls == []
    assert_close(stacked[1], torch.conv2d(x, weights[1], padding=1), rtol=1e-4, atol=1e-4)


MODELS_TAKEN = {
    "emdcfl_cnn": (EmdcflCNN(channels=(64, 64), embedding=16), (1, 8, 8)),
    "resnet18": (ResNet18Cifar(width=32), (3, 8, 8)),
    "ccfl_cnn": (CcflCNN(channels=(32, 32), embedding=16), (1, 20, 20)),
    "leaf_cnn": (LeafCNN(channels=(32, 32), embedding=16), (1, 8, 8)),
}
CONFIG = LocalConfig(epochs=1, batch_size=48, lr=0.05, momentum=0.9)


def learner_of(name: str, kernels: bool = True) -> tuple[Learner, Split]:
    options, shape = MODELS_TAKEN[name]
    torch.manual_seed(3)
    labels = torch.randint(0, 10, (48,), generator=torch.Generator().manual_seed(0))
    return Learner(options.build(shape, 10), kernels=kernels), Split(draw(48, *shape), labels)


@pytest.mark.parametrize("name", MODELS_TAKEN)
def test_a_step_is_as_close_to_float64_as_pytorchs(name, calls):
    found = {}
    for kernels in (True, False):
        learner, samples = learner_of(name, kernels)
        types = [type(m) for m in learner.flat.module.modules()]
        found[kernels] = learner.sgd(learner.init, samples, CONFIG, key(1)).vector
        assert [type(m) for m in learner.flat.module.modules()] == types
        assert bool(calls) == kernels
        calls.clear()
    module = copy.deepcopy(learner.flat.module).double().train()
    module.load_state_dict({n: t.double() for n, t in learner_state(name).items()})
    loss = nn.functional.cross_entropy(module(samples.x.double()), samples.y)
    moved = torch.autograd.grad(loss, list(module.parameters()))
    p = learner.layout.num_parameters
    exact = learner.init[:p].double() - CONFIG.lr * torch.cat([g.reshape(-1) for g in moved])
    change = float((exact - learner.init[:p]).norm())
    ours, theirs = (float((found[kernels][:p] - exact).norm()) / change for kernels in (True, False))
    assert ours <= max(4 * theirs, 1e-5)
    assert_close(found[True][p:], found[False][p:], rtol=1e-4, atol=1e-5)  # running means


def learner_state(name: str) -> dict[str, torch.Tensor]:
    """Return the initial state of a model."""
    return learner_of(name)[0].flat.module.state_dict()


@pytest.mark.parametrize("name", MODELS_TAKEN)
def test_logits_and_gradients_of_learners_are_the_kernels(name, calls):
    made = {}
    for kernels in (True, False):
        learner, samples = learner_of(name, kernels)
        vector = learner.init
        made[kernels] = [
            learner.outputs(vector, samples.x),
            learner.outputs(vector, samples.x, embedding=True),
        ]
        made[kernels].append(learner.gradient(vector, samples))
        assert bool(calls) == kernels
        calls.clear()
    for ours, theirs in zip(made[True], made[False], strict=True):
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())


def test_with_more_threads_pytorch_keeps_all_layers(calls):
    learner, samples = learner_of("emdcfl_cnn")
    torch.set_num_threads(2)
    learner.sgd(learner.init, samples, CONFIG, key(1))
    assert calls == []
    torch.set_num_threads(1)
    learner.sgd(learner.init, samples, CONFIG, key(1))
    assert calls != []


def test_a_visit_has_the_same_bits_after_any_other(calls):
    """A workspace of an earlier visit may be larger, and full of other numbers."""
    learner, samples = learner_of("emdcfl_cnn")
    first = learner.sgd(learner.init, samples, CONFIG, key(1)).vector
    other, more = learner_of("resnet18")
    other.sgd(other.init, more, CONFIG, key(2))
    assert torch.equal(learner.sgd(learner.init, samples, CONFIG, key(1)).vector, first)


def test_networks_of_the_small_kernels_stay_theirs(calls):
    learner = Learner(MODELS["lenet5"]().build((1, 28, 28), 10))
    learner.sgd(learner.init, Split(draw(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)), CONFIG, key(1))
    assert all(learner.kernels.networks.values())
    assert calls == []


def images(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).contiguous(memory_format=LAST)


SPACE = convolutions.convolve_workspace(32, 64) if bindings.TRAINING_AVAILABLE else 1
X, G, WEIGHT, WORKSPACE = (
    images(2, 32, 5, 6),
    images(2, 64, 3, 4),
    torch.zeros(64, 32, 3, 3),
    torch.zeros(SPACE),
)
GIVEN = {
    "convolve": (X, WEIGHT, torch.zeros(64), 0, WORKSPACE),
    "convolve_input_grad": (G, WEIGHT, X.shape, 0, WORKSPACE),
    "convolve_kernels_grad": (X, G, 3, 0, WORKSPACE),
}
WRONG_IMAGES = {
    "channels first": torch.zeros(2, 32, 5, 6),
    "float64": X.double(),
    "no image": images(0, 32, 5, 6),
    "no strip": images(2, 31, 5, 6),
    "other channels": images(2, 64, 5, 6),
    "too few pixels": images(2, 32, 5, 2),
}
WRONG_WEIGHTS = {
    "float64": WEIGHT.double(),
    "gaps": torch.zeros(64, 32, 3, 6)[..., ::2],
    "no square": torch.zeros(64, 32, 2, 3),
    "7x7": torch.zeros(64, 32, 7, 7),
}
WRONG_GRADIENTS = {
    "channels first": torch.zeros(2, 64, 3, 4),
    "other sides": images(2, 64, 3, 3),
    "fewer images": images(1, 64, 3, 4),
    "float64": G.double(),
}
WRONG_WORKSPACES = {"small": torch.zeros(SPACE - 1), "float64": torch.zeros(SPACE).double()}
WRONG = {
    "convolve": (
        *((0, wrong) for wrong in WRONG_IMAGES.values()),
        *((1, wrong) for wrong in WRONG_WEIGHTS.values()),
        *((2, torch.zeros(63)), (3, -1), (3, 3)),
        *((4, wrong) for wrong in WRONG_WORKSPACES.values()),
    ),
    "convolve_input_grad": (
        *((0, wrong) for wrong in WRONG_GRADIENTS.values()),
        *((1, wrong) for wrong in WRONG_WEIGHTS.values()),
        *((2, (2, 64, 5, 6)), (2, (2, 32, 5, 5)), (2, (2, 32, 2, 6)), (3, 1), (3, 3)),
        *((4, wrong) for wrong in WRONG_WORKSPACES.values()),
    ),
    "convolve_kernels_grad": (
        *((0, wrong) for name, wrong in WRONG_IMAGES.items() if name != "other channels"),
        *((1, wrong) for wrong in WRONG_GRADIENTS.values()),
        *((2, 5), (2, 7), (3, 1), (3, 3)),
        *((4, wrong) for wrong in WRONG_WORKSPACES.values()),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_convolutions_refuse_what_they_cannot_read(name):
    call = getattr(convolutions, name)
    call(*GIVEN[name])
    for which, wrong in WRONG[name]:
        given = list(GIVEN[name])
        given[which] = wrong
        with pytest.raises(ValueError, match=r"must|fewer"):
            call(*given)


def test_the_identity_names_wide_convolutions_and_their_rounding():
    """Outputs of a ResNet are within what the line says, and networks without such layers say nothing."""
    learner = Learner(ResNet18Cifar(width=32).make((3, 16, 16), 10))
    x, start = draw(8, 3, 16, 16), learner.init
    found = learner.outputs(start, x, train_mode=True).double()
    exact = copy.deepcopy(learner.flat.load(start, train=True)).double()(x.double()).detach()
    assert "rounding 1e-5" in WINOGRAD
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    assert identity_of(ResNet18Cifar(width=32))[CONVOLUTIONS] == WINOGRAD
    assert WINOGRAD in line(identity_of(ResNet18Cifar(width=32)))
    assert CONVOLUTIONS not in identity_of(toy.mlp(8))
    assert CONVOLUTIONS not in identity_of(ResNet18Cifar(width=32), kernels=False)


def identity_of(model: object, kernels: bool = True) -> dict[str, object]:
    """Return the identity of a run of a network on one rank."""
    config = toy.config_of(CATALOGUE["fedavg"](), model=model, system=SystemConfig(kernels=kernels))
    context = toy.context_of(config, toy.Tiny())
    return dataclasses.replace(context, places=(place(context.transport, "cpu", ""),)).identity
