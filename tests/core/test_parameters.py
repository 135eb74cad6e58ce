"""A model as one flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.flat_model import FlatModel
from mpifl.core.parameters import Layout, flatten, put, take, width, within


class Norms(nn.Module):
    """Two layers with a batch norm between them and a head; the stage is `block`."""

    blocks = ("block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.block = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.block(self.norm(self.first(x)))))


@pytest.fixture
def model() -> Norms:
    """A model with 44 parameters: first 15, norm 6, block 12, head 8 = 41; and 6 floating buffers."""
    torch.manual_seed(0)
    return Norms()


def test_the_vector_holds_parameters_then_floating_buffers(model):
    """First 4*3+3 = 15, norm 3+3 = 6, block 9+3 = 12, head 6+2 = 8: p = 41; mean and variance 3+3: d = 47."""
    layout = Layout.of(model)
    assert layout.num_parameters == 41
    assert layout.size == 47
    assert layout.names[-2:] == ("norm.running_mean", "norm.running_var")
    assert "norm.num_batches_tracked" not in layout.names
    vector = flatten(model)
    assert_close(vector[:12].view(3, 4), model.first.weight.detach())
    assert_close(vector[44:], torch.ones(3))


def test_parts_cover_the_vector_and_do_not_overlap(model):
    layout = Layout.of(model)
    for one, other in (("body", "head"), ("trunk", "block"), ("parameters", "buffers")):
        numbers = torch.cat([torch.arange(s.start, s.stop) for n in (one, other) for s in layout.part(n)])
        assert_close(numbers.sort().values, torch.arange(47))
    widths = {n: width(layout.part(n)) for n in ("all", "head", "body", "block", "stage", "buffers")}
    assert widths == {"all": 47, "head": 8, "body": 39, "block": 20, "stage": 12, "buffers": 6}
    assert layout.part("all") == (slice(0, 47),)
    assert layout.part("body") == (slice(0, 33), slice(41, 47)), "the running means belong to the body"
    with pytest.raises(KeyError):
        layout.part("tail")


def test_take_and_put_are_inverse(model):
    layout, vector = Layout.of(model), flatten(model)
    for name in ("all", "head", "body", "stage"):
        part = layout.part(name)
        values = torch.arange(width(part), dtype=torch.float32)
        changed = put(vector, part, values)
        assert_close(take(changed, part), values)
        rest = torch.ones(47, dtype=torch.bool)
        for s in part:
            rest[s] = False
        assert_close(changed[rest], vector[rest])
    rows = torch.stack([vector, 2 * vector])
    assert_close(take(rows, layout.part("body"))[1], 2 * take(vector, layout.part("body")))
    assert take(vector, layout.part("head")).data_ptr() == vector[33:].data_ptr(), "one slice is a view"


def test_a_part_is_found_within_a_whole_of_several_slices():
    """The whole holds 2, 3, 6, 7, 8, 20, 21 at places 0 to 6: the part 3, 7, 8, 21 is at 1, 3, 4, 6."""
    whole = (slice(2, 4), slice(6, 9), slice(20, 22))
    part = (slice(3, 4), slice(7, 9), slice(21, 22))
    places = within(part, whole)
    assert places == (slice(1, 2), slice(3, 5), slice(6, 7))
    vector = torch.arange(30.0)
    assert_close(take(take(vector, whole), places), take(vector, part))


def test_put_leaves_the_original_alone(model):
    vector = flatten(model)
    before = vector.clone()
    put(vector, Layout.of(model).part("head"), torch.zeros(8))
    assert_close(vector, before, rtol=0, atol=0)


def test_binding_a_vector_and_flattening_again_is_the_identity(model):
    flat = FlatModel(model)
    vector = torch.randn(47, generator=torch.Generator().manual_seed(1))
    bound = flat.load(vector)
    assert bound is model
    assert_close(flatten(model), vector, rtol=0, atol=0)
    assert_close(model.norm.running_mean, vector[41:44], rtol=0, atol=0)
    vector.zero_()
    assert flatten(model).abs().sum() > 0, "load copies"


def test_a_bound_model_computes_what_the_free_one_does(model):
    other = Norms()
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)
    vector = flatten(model)
    assert_close(FlatModel(other).load(vector)(x), model(x), rtol=0, atol=0)


def test_views_stay_views_after_training(model):
    """Weights, gradients and running means are seen in the flat buffers without any copy, step after step."""
    flat = FlatModel(model)
    flat.load(flatten(model)).train()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        flat.grad.zero_()
        model(x).square().sum().backward()
        flat.weights.sub_(flat.grad, alpha=0.01)
    for name, s in flat.layout.slices.items():
        owner, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), leaf)
        assert tensor.data_ptr() == flat.vector[s].data_ptr(), name
        if isinstance(tensor, nn.Parameter):
            assert tensor.grad is not None
            assert tensor.grad.data_ptr() == flat.grad[s].data_ptr(), name
    assert flat.grad.abs().sum() > 0
    assert_close(flatten(model), flat.vector, rtol=0, atol=0)
    assert flat.vector[41:44].abs().sum() > 0, "running means moved"


def test_what_a_model_declares_as_frozen_is_in_no_vector():
    """A weight of two numbers trains, a buffer of three is frozen, one of four is not."""
    module = nn.Linear(2, 1, bias=False)
    module.register_buffer("base", torch.ones(3))
    module.register_buffer("mean", torch.full((4,), 2.0))
    module.frozen = ("base",)
    layout = Layout.of(module)
    assert (layout.names, layout.frozen, layout.size) == (("weight", "mean"), ("base",), 6)
    assert flatten(module)[2:].tolist() == [2.0] * 4


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_model_without_a_head_cannot_be_split_at_it(part):
    """FedPer kept an empty head at its clients: it was FedAvg."""
    layout = Layout.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert layout.part("all") == (slice(0, 10),)
    with pytest.raises(UserError, match=r"a network without `head`'.*mpifl\.models\.Net"):
        layout.part(part)


def test_a_model_whose_last_layer_says_no_width_has_no_number_of_classes():
    """FLT and PACFL took it for a model of 0 classes, and ended in a traceback."""
    model = nn.Module()
    model.head = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(UserError, match=r"without `head\.out_features`'.*mpifl\.models\.Net"):
        Layout.of(model).num_classes  # noqa: B018
    model.head = nn.Linear(4, 2)
    assert Layout.of(model).num_classes == 2


def test_a_model_without_buffers_has_an_empty_part():
    layout = Layout.of(nn.Sequential(nn.Linear(2, 2)))
    assert layout.part("buffers") == ()
    assert layout.size == layout.num_parameters == 6
    assert layout.blocks == ("head",)


class Constants(nn.Module):
    """A linear head, and buffers that no training changes beside one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("places", torch.ones(3), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))


def test_constants_are_in_no_vector_and_a_state_dict_says_which_buffers_travel():
    """Six weights and the mean of two; a cache, a mask of -inf, a count and complex numbers stay at home."""
    model = Constants()
    layout = Layout.of(model)
    assert layout.names == ("head.weight", "head.bias", "mean")
    assert (layout.num_parameters, layout.size) == (6, 8)
    flat = FlatModel(model)
    assert_close(flat.vector[6:], torch.zeros(2))
    assert_close(flat.load(torch.ones(8)).mask, torch.tensor([0.0, float("-inf")]))


def test_what_a_client_writes_into_a_constant_is_gone_for_the_next_one():
    flat = FlatModel(Constants())
    flat.module.places.add_(5.0)
    flat.module.mean.add_(5.0)
    flat.module.phase.mul_(2)
    module = flat.load(torch.arange(8.0))
    assert_close(module.places, torch.ones(3))
    assert_close(module.phase, torch.ones(1, dtype=torch.complex64))
    assert_close(module.mean, torch.tensor([6.0, 7.0]))


def test_a_buffer_that_begins_infinite_and_changes_is_named():
    flat = FlatModel(Constants())
    flat.load(torch.ones(8))
    flat.module.mask.zero_()
    with pytest.raises(UserError, match="'mask'"):
        flat.load(torch.ones(8))


class Tied(nn.Module):
    """A body and a head that share a weight, under two names."""

    blocks = ("body.last", "head")

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential()
        self.body.add_module("first", nn.Linear(3, 2, bias=False))
        self.body.add_module("last", nn.Linear(2, 3))
        self.head = nn.Linear(3, 2, bias=bias)
        self.head.weight = self.body.first.weight


@pytest.mark.parametrize("bias", [True, False])
def test_a_model_whose_head_is_shared_has_no_parts_at_the_head(bias):
    """The trunk is the first layer, and the block has its weight, too; of whole models nothing is wrong."""
    layout = Layout.of(Tied(bias))
    assert layout.size == 6 + 9 + 2 * bias
    assert width(layout.part("all")) == layout.size
    for part in ("head", "body", "block", "trunk"):
        with pytest.raises(UserError, match=r"body\.first\.weight"):
            layout.part(part)


def test_layers_of_one_side_may_share_weights():
    model = Tied()
    model.head.weight = nn.Parameter(torch.ones(2, 3))
    model.body.last = model.body.first
    layout = Layout.of(model)
    assert width(layout.part("body")) == 6
    assert width(layout.part("head")) == 8


def test_a_head_without_a_bias_is_a_head():
    layout = Layout.of(nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 2, bias=False)}))
    assert layout.part("head") == (slice(9, 15),)
