"""Every model: parameter counts of the papers, the contract of body and head, sizes that cannot work."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch
from support.each import for_each
from support.refusal import refusal_of
from torch import nn
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.parameters import Layout
from mpifl.core.torchvision_compat import torchvision
from mpifl.models import AUTOENCODERS, MODELS

GREY, COLOUR, LARGE = (1, 28, 28), (3, 32, 32), (3, 224, 224)
VISION = ("resnet18", "resnet50", "efficientnet_b3", "vit_b_16", "convnext_base")
# have files of their own
OTHERS = ("table_mlp", "linear", "logistic", "lstm", "transformer", "huggingface", "custom")
SMALL = tuple(name for name in MODELS if name not in (*VISION, *OTHERS))

COUNTS = [  # name, options, image, classes, parameters, embedding
    ("mlp", {}, GREY, 10, 159_010, 200),
    ("mlp", {"hidden": (200, 50)}, GREY, 10, 157_000 + 10_050 + 510, 50),
    ("mlp", {"hidden": ()}, GREY, 10, 7_850, 784),
    ("emdcfl_cnn", {}, GREY, 10, 3_287_178, 128),
    ("emdcfl_cnn", {}, (3, 28, 28), 10, 3_288_330, 128),
    ("flt_mlp", {}, GREY, 10, 159_010, 200),
    ("flt_mlp", {}, GREY, 62, 169_462, 200),
    ("flt_mlp", {}, COLOUR, 10, 616_610, 200),
    ("flt_cnn_mnist", {}, GREY, 10, 21_840, 50),
    ("flt_cnn_cifar", {}, COLOUR, 10, 62_006, 84),
    ("leaf_cnn", {}, GREY, 47, 6_572_975, 2048),
    ("leaf_cnn", {}, GREY, 62, 6_603_710, 2048),
    ("lenet5", {}, COLOUR, 10, 62_006, 84),
    ("lenet5", {}, GREY, 62, 48_846, 84),
    ("ifca_mlp", {}, GREY, 10, 159_010, 200),
    ("ccfl_cnn", {}, GREY, 10, 582_026, 512),
    ("ccfl_cnn", {"padding": "same"}, GREY, 10, 1_663_370, 512),
    ("cfl_cnn", {}, GREY, 62, 18_506, 256),
    ("resnet18_cifar", {}, COLOUR, 100, 11_220_132, 512),
    ("resnet18_cifar", {}, COLOUR, 10, 11_173_962, 512),
    ("resnet20", {}, COLOUR, 10, 269_722, 64),
    ("resnet18", {}, LARGE, 10, 11_181_642, 512),
    ("resnet50", {}, LARGE, 1000, 25_557_032, 2048),
    ("efficientnet_b3", {}, LARGE, 1000, 12_233_232, 1536),
    ("vit_b_16", {}, LARGE, 1000, 86_567_656, 768),
    ("convnext_base", {}, LARGE, 1000, 88_591_464, 1024),
]


def build(name, shape=GREY, num_classes=10, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](**options).build(shape, num_classes)


def parameters_and_embedding_are_those_of_the_paper(name, options, shape, classes, count, width):
    with torch.device("meta"):  # shapes only: no memory, no arithmetic
        model = MODELS[name](**options).build(shape, classes)
        x = torch.zeros(2, *shape)
        assert sum(p.numel() for p in model.parameters()) == count
        assert model.embed(x).shape == (2, width)
        assert model(x).shape == (2, classes)
        assert model.head.weight.shape == (classes, width)


COUNTED = ("name", "options", "shape", "classes", "count", "width")
test_parameters_and_embedding_are_those_of_the_paper = for_each(
    COUNTED, [case for case in COUNTS if case[2] != LARGE or case[0] == "resnet18"]
)(parameters_and_embedding_are_those_of_the_paper)


@pytest.mark.nightly(spread=True)
@pytest.mark.parametrize(COUNTED, [case for case in COUNTS if case[2] == LARGE])
def test_so_are_those_of_large_networks(name, options, shape, classes, count, width):
    parameters_and_embedding_are_those_of_the_paper(name, options, shape, classes, count, width)


@pytest.mark.parametrize(
    ("name", "node", "head", "side"),
    [
        ("resnet18", "avgpool", "fc", 64),
        ("resnet50", "avgpool", "fc", 32),
        ("efficientnet_b3", "avgpool", "classifier.1", 32),
        pytest.param("vit_b_16", "encoder", "heads.head", 32, marks=pytest.mark.nightly),
        pytest.param("convnext_base", "classifier.1", "classifier.2", 32, marks=pytest.mark.nightly),
    ],
)
def test_networks_of_torchvision_embed_what_enters_their_last_layer(name, node, head, side):
    """The network as torchvision makes it, with our weights: what leaves a module of it, and its logits."""
    options = {"image_size": side} if name == "vit_b_16" else {}
    ours = build(name, (3, side, side)).eval()
    theirs = getattr(torchvision().models, name)(num_classes=10, **options).eval()
    state = {
        re.sub(r"^head\.", f"{head}.", k).removeprefix("body.net."): v for k, v in ours.state_dict().items()
    }
    theirs.load_state_dict(state)
    seen = []
    theirs.get_submodule(node).register_forward_hook(lambda module, given, made: seen.append(made))
    x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(ours(x), theirs(x), rtol=0, atol=0)
        z = seen[0][:, 0] if name == "vit_b_16" else seen[0].flatten(1)
        assert_close(ours.embed(x), z, rtol=0, atol=0)


@for_each("name", SMALL)
def test_logits_are_the_head_of_the_embedding(name):
    model = build(name).eval()
    x = torch.rand(3, *GREY, generator=torch.Generator().manual_seed(1))
    assert_close(model(x), nn.functional.linear(model.embed(x), model.head.weight, model.head.bias))


@for_each("name", [*SMALL, *VISION])
def test_head_and_cluster_block_end_the_parameters(name):
    with torch.device("meta"):
        model = MODELS[name]().build((3, 32, 32), 10)
    layout = Layout.of(model)
    assert layout.blocks == model.blocks
    assert model.blocks[-1] == "head"
    for name in model.blocks:
        assert isinstance(model.get_submodule(name), nn.Module)
    trainable = [n for n, _ in model.named_parameters()]
    assert trainable[-2:] == ["head.weight", "head.bias"]
    inside = [any(n.startswith(f"{b}.") for b in model.blocks) for n in trainable]
    assert inside == sorted(inside)  # trunk first, block last
    assert not inside[0] or model.blocks == ("body.fc1", "head")  # one hidden layer: the block is everything


@for_each("name", SMALL)
def test_every_parameter_is_used_in_forward_order(name):
    """Gradients reach all parameters, and modules are called in the order in which they are listed."""
    model, called = build(name), []
    for label, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda *_, label=label: called.append(label))
    model(torch.rand(4, *GREY)).sum().backward()
    listed = list(dict.fromkeys(n.rpartition(".")[0] for n, _ in model.named_parameters()))
    assert [c for c in called if "shortcut" not in c] == [n for n in listed if "shortcut" not in n]
    assert all(p.grad is not None for p in model.parameters())


@for_each("name", SMALL)
def test_initial_weights_come_from_the_global_generator(name):
    a, b, c = (nn.utils.parameters_to_vector(build(name, seed=s).parameters()) for s in (5, 5, 6))
    assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("emdcfl_cnn", 2),
        ("leaf_cnn", 4),
        ("cfl_cnn", 16),
        ("lenet5", 16),
        ("flt_cnn_cifar", 16),
        ("flt_cnn_mnist", 16),
    ],
)
def test_least_image_size_is_exact_and_named(name, side):
    x = torch.rand(2, 1, side, side)
    assert build(name, (1, side, side)).eval()(x).shape == (2, 10)
    with refusal_of("model.name", rf"model.name = '{name}'.*{side}x{side}"):
        build(name, (1, side, side - 1))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12)])
def test_the_cnn_of_emdcfl_takes_any_size_and_can_be_narrow(shape):
    model = build("emdcfl_cnn", shape, channels=(4, 8), embedding=16)
    assert model.embed(torch.rand(2, *shape)).shape == (2, 16)


@pytest.mark.parametrize(
    ("name", "options", "shape", "key"),
    [
        ("ccfl_cnn", {"padding": "same"}, (1, 3, 28), "model.name"),
        ("resnet18", {}, (2, 32, 32), "model.name"),
        ("vit_b_16", {}, (3, 32, 48), "model.name"),
        ("vit_b_16", {}, (3, 28, 28), "model.name"),
        ("convnext_base", {}, (3, 28, 28), "model.name"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(name, options, shape, key):
    with refusal_of(key):
        build(name, shape, **options)


def test_dropout_comes_before_the_relu_in_flt_mlp_and_not_in_evaluation():
    model = build("flt_mlp")
    kinds = [type(m).__name__ for m in model.body]
    assert kinds == ["Flatten", "Linear", "Dropout", "ReLU"]
    x = torch.rand(2, *GREY)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_lenet5_pools_by_mean_and_draws_its_convolutions_he_uniform():
    """Bound sqrt(6 / fan_in): sqrt(6 / 75) = 0.283 for 3 channels of 5x5; torch's default stops at 0.115."""
    model = build("lenet5", COLOUR)
    assert isinstance(model.body.pool1, nn.AvgPool2d)
    largest = model.body.conv1.weight.abs().max().item()
    assert 0.27 < largest <= (6 / 75) ** 0.5


def test_lenet5_may_draw_its_dense_layers_he_uniform_too():
    """sqrt(6 / 120) = 0.224 for 120 inputs, of 84 in the head 0.267; torch's default is 1 / sqrt(inputs)."""
    plain, he = (build("lenet5", COLOUR, he_uniform=which) for which in ("convolutions", "all"))
    for layer, inputs in (("body.fc2", 120), ("head", 84)):
        largest = [m.get_submodule(layer).weight.abs().max().item() for m in (plain, he)]
        assert largest[0] <= inputs**-0.5
        assert 0.97 * (6 / inputs) ** 0.5 < largest[1] <= (6 / inputs) ** 0.5


def test_grey_images_are_repeated_for_torchvision_models():
    model = build("resnet18", (1, 32, 32)).eval()
    x = torch.rand(2, 1, 32, 32)
    assert_close(model(x), model(x.repeat(1, 3, 1, 1)))


def test_resnet20_subsamples_in_its_shortcut():
    """A shortcut from 16 to 32 channels: 8 zero channels before, 8 after, every second pixel."""
    shortcut = build("resnet20", COLOUR).body.layer2[0].shortcut
    x = torch.rand(1, 16, 5, 5)
    out = shortcut(x)
    assert out.shape == (1, 32, 3, 3)
    assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().sum() + out[:, 24:].abs().sum() == 0


@pytest.mark.parametrize(
    ("name", "shape", "count"), [("flt_ae", GREY, 51_577), ("flt_ae_cifar", COLOUR, None)]
)
def test_autoencoders_encode_and_rebuild(name, shape, count):
    model = AUTOENCODERS[name]().build(shape)
    x = torch.rand(2, *shape)
    assert model.embed(x).shape == (2, 128)
    assert model(x).shape == x.shape
    if count is not None:
        assert sum(p.numel() for p in model.parameters()) == count
    with pytest.raises(UserError, match="multiples of 4"):
        AUTOENCODERS[name]().build((1, 30, 28))


def test_grey_autoencoder_gives_images_between_zero_and_one():
    out = AUTOENCODERS["flt_ae"](code=8).build(GREY)(100 * torch.randn(2, *GREY))
    assert out.min() >= 0
    assert out.max() <= 1


@for_each("name", [*MODELS, *AUTOENCODERS])
def test_options_are_frozen_and_documented(name):
    options = {**MODELS, **AUTOENCODERS}[name]
    assert options.__doc__
    assert callable(options.build)
    with pytest.raises(FrozenInstanceError):
        options().anything = 1


@pytest.mark.in_turn
def test_importing_the_models_does_not_import_torchvision():
    code = "import sys, mpifl.models; print('torchvision' in sys.modules, 'safetensors' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
