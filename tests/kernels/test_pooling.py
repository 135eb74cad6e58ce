"""Pooling by the kernels against PyTorch's layers: the same bits, forward and backward."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from support.each import for_each
from torch import nn
from torch.testing import assert_close

from mpifl.kernels import bindings, pooling
from mpifl.kernels.pooling import MIN_NUMEL, AvgPool, MaxPool, use_fast_pooling
from mpifl.models import MODELS
from mpifl.models.modules import Embedder, Net
from mpifl.training.learner import Learner

pytestmark = pytest.mark.skipif(not bindings.AVAILABLE, reason="the kernels were not built")
PAIRS = {"max": (nn.MaxPool2d(2), MaxPool(2)), "avg": (nn.AvgPool2d(2), AvgPool(2))}


def images(*shape: int) -> torch.Tensor:
    """Return rectified noise with ties, infinities and NaN in it."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).relu()
    x.view(-1)[:: x.numel() // 7] = torch.inf
    x.view(-1)[3 :: x.numel() // 5] = torch.nan
    return x


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    "shape",
    [
        (32, 6, 24, 24),
        (1, 1, 128, 130),
        (3, 7, 30, 34),
        (1, 1, 8, 2048),
        (1, 1, 8, 2050),
        (4, 2, 3, 5),
        (20, 8, 25, 25),
    ],
    ids=str,
)
def test_value_and_gradient_have_the_bits_of_pytorch(kind, shape):
    found = []
    for layer in PAIRS[kind]:
        x = images(*shape).requires_grad_()
        out = layer(x)
        torch.manual_seed(0)
        out.backward(torch.randn_like(out))
        found.append((out.detach(), x.grad))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.nan_to_num(-7), ours.nan_to_num(-7))
    assert found[0][0].isnan().any()
    assert found[0][1].any()


def test_relu_behind_a_maximum_has_the_bits_of_relu_before_it():
    layers = {"conv": nn.Conv2d(3, 8, 3), "relu": nn.ReLU(), "pool": nn.MaxPool2d(2)}
    before = nn.Sequential(OrderedDict(layers))
    models, found = (before, use_fast_pooling(deepcopy(before))), []
    x = torch.randn(16, 3, 34, 34)
    x[3, :, :9], x[5, :, 9:] = torch.nan, torch.inf
    for model in models:
        out = model(x)
        out[6:].square().sum().backward()
        found.append((out.detach(), model.conv.weight.grad, model.conv.bias.grad))
    assert [name for name, _ in models[1].named_children()] == ["conv", "pool", "relu"]
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.nan_to_num(-7), ours.nan_to_num(-7))
    assert found[0][0].isnan().any()
    assert found[0][1].any()


@pytest.mark.parametrize("kept", ["hook", "average", "other windows", "used twice", "own class"])
def test_relu_stays_before_pooling_where_the_order_may_matter(kept):
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    if kept == "hook":
        relu.register_forward_hook(lambda *_: None)
    pool = nn.AvgPool2d(2) if kept == "average" else nn.MaxPool2d(3) if kept == "other windows" else pool
    own = type("Own", (nn.Sequential,), {})
    layers = [nn.Conv2d(3, 8, 3), relu, pool, *([relu] if kept == "used twice" else [])]
    found = use_fast_pooling((own if kept == "own class" else nn.Sequential)(*layers))
    assert [type(layer).__name__ for layer in found][1] == "ReLU"


class Taps(nn.Module):
    """A user's network that takes a Sequential apart: embeddings are means before and behind its pooling."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x):
        early = self.features[:2](x)
        return torch.cat([early.mean((2, 3)), self.features[2](early).mean((2, 3))], 1)


def test_the_layers_of_a_users_own_module_keep_their_order():
    """Its code may take parts of a Sequential; those of the package's networks are applied as they stand."""
    x, own = torch.randn(2, 1, 8, 8), Net(Embedder(Taps(), "forward"), nn.Linear(8, 3))
    before = own(x).detach()
    assert torch.equal(use_fast_pooling(own)(x), before)
    assert [type(layer) for layer in own.body.net.features] == [nn.Conv2d, nn.ReLU, MaxPool]
    ours = use_fast_pooling(MODELS["flt_cnn_cifar"]().build((1, 28, 28), 10))
    names = [type(layer).__name__ for layer in ours.modules()]
    assert names.index("MaxPool") < names.index("ReLU")


@pytest.mark.parametrize(
    "shape", [(2, 64, 28, 28), (3, 35, 14, 30), (5, 3, 36, 34), (1, 2048, 2, 4)], ids=str
)
def test_channels_last_have_the_bits_of_pytorch_too(shape):
    found = []
    for layer in PAIRS["max"]:
        x = images(*shape).contiguous(memory_format=torch.channels_last).requires_grad_()
        out = layer(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)))
        found.append((out.detach(), x.grad))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.nan_to_num(-7), ours.nan_to_num(-7))
        assert ours.is_contiguous(memory_format=torch.channels_last)
    assert found[1][0].isnan().any()
    assert found[1][1].any()


@pytest.mark.parametrize("kind", PAIRS)
def test_what_is_not_contiguous_goes_to_pytorch(kind):
    theirs, ours = PAIRS[kind]
    x = torch.randn(16, 8, 24, 24).contiguous(memory_format=torch.channels_last)
    assert torch.equal(theirs(x), ours(x))


@pytest.mark.parametrize("kind", PAIRS)
def test_a_gradient_has_a_gradient(kind):
    """d/dx of the squared gradient of the sum of squares, as PyTorch's layer has it."""
    found = []
    for layer in PAIRS[kind]:
        x = torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(2)).requires_grad_()
        assert x.numel() >= MIN_NUMEL
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert torch.allclose(*found)
    assert found[0].any()


def test_only_plain_windows_of_two_are_replaced():
    plain = [nn.MaxPool2d(2), nn.AvgPool2d((2, 2)), nn.MaxPool2d(2, 2)]
    other = [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(3),
    ]
    found = use_fast_pooling(nn.Sequential(*plain, nn.Sequential(*other)))
    assert [type(layer) for layer in found[:3]] == [MaxPool, AvgPool, MaxPool]
    assert list(found[3]) == other


def test_what_something_was_added_to_is_not_replaced():
    """A hook, or a method given to one layer, would be lost with the layer."""
    layers = [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AvgPool2d(2)]
    layers[0].register_forward_hook(lambda module, x, y: 2 * y)
    layers[1].register_full_backward_hook(lambda module, gx, gy: None)
    layers[2].forward = lambda x: x[..., ::2, ::2]
    found = use_fast_pooling(nn.Sequential(*layers))
    assert list(found)[:3] == layers[:3]
    assert type(found[3]) is AvgPool
    x = torch.ones(1, 1, 256, 256)
    assert torch.equal(found[0](x), 2 * torch.ones(1, 1, 128, 128))


@for_each("seed", range(8))
def test_any_window_pools_to_the_bits_and_places_of_pytorch(seed):
    """Ties, zeros of both signs, infinities and NaN in all combinations; lines of any even length."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0])[: 7 if seed % 2 else 6]
    h, w = (2 * int(n) for n in torch.randint(1, 40, (2,), generator=draws))
    x = values[torch.randint(seed % 4 // 2, len(values), (3, 2, h, w), generator=draws)]
    out, where = pooling.max_pool2x2(x)
    expected, index = nn.functional.max_pool2d(x, 2, return_indices=True)
    assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    row, column = where.long() // 2, where.long() % 2
    place = (2 * torch.arange(h // 2)[:, None] + row) * w + 2 * torch.arange(w // 2) + column
    assert torch.equal(place, index)
    assert_close(pooling.avg_pool2x2(x), nn.functional.avg_pool2d(x, 2), rtol=0, atol=0, equal_nan=True)
    assert_close(bindings.max_abs(x.view(-1)), float(x.abs().max()), rtol=0, atol=0, equal_nan=True)


def test_windows_rounded_up_stay_pytorchs():
    layers = use_fast_pooling(nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)))
    x = torch.randn(64, 4, 15, 15)
    assert layers(x).shape == (64, 4, 8, 8)


def test_a_learner_pools_with_the_kernels(monkeypatch):
    module = Learner(MODELS["lenet5"]().build((1, 28, 28), 10)).flat.module
    calls = []
    true = pooling.avg_pool2x2
    monkeypatch.setattr(pooling, "avg_pool2x2", lambda x: calls.append(x.shape) or true(x))
    module(torch.zeros(32, 1, 28, 28))
    assert calls == [(32, 6, 24, 24), (32, 16, 8, 8)]
