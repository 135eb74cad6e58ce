"""A user's own network: found by path, checked before it is trusted."""

import re
from dataclasses import dataclass

import pytest
import torch
from support import toy
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.experiment import loader
from mpifl.models import MODELS, LoRA, build_model
from mpifl.models.mlp import MLP

SOURCE = """
import torch
from torch import nn


class Good(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 6), nn.Tanh())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(6, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


class Scaled(Good):
    def inner(self, x):
        return 2 * self.features(x)

    def forward(self, x):
        return self.classifier(self.inner(x))


class Counting(Good):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.add_(len(x))
        return super().forward(x)


class Twins(Good):  # PyTorch trains them as one, a flat vector would hold both
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.twin = nn.Parameter(self.classifier[1].weight.data)

    def forward(self, x):
        return nn.functional.linear(self.features(x), self.twin)


class Softmaxed(Good):
    def forward(self, x):
        return torch.log_softmax(super().forward(x), dim=1)


class Odd(Good):
    def pair(self, x):
        return self.features(x), x

    def by_weight(self, x):
        return self.features(x) @ self.classifier[1].weight.T

    def part(self, x):
        return nn.functional.linear(x.flatten(2), torch.ones(3, 7))


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(x.flatten(1))


class Unflat(Fixed):
    def forward(self, x):
        return self.fc(x)


class Halving(Good):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Dropping(Good):
    def forward(self, x):
        return self.classifier(nn.functional.dropout(self.features(x)))


class Double(Good):
    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.double()

    def forward(self, x):
        return super().forward(x.double())


class Lazy(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten())
        self.fc = nn.LazyLinear(num_classes)

    def forward(self, x):
        return self.fc(self.body(x))


class LeftOver(Lazy):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.more = nn.LazyLinear(2)


def number(num_classes):
    return num_classes


class Rows(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(shape[0], 4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(torch.tanh(self.first(x)))


class Inner(Rows):
    def inner(self, x):
        return torch.tanh(self.first(x)) + 2

    def forward(self, x):
        return self.fc(self.inner(x))


class Words(nn.Module):
    def __init__(self, shape, num_classes, vocabulary):
        super().__init__()
        self.words = nn.Embedding(vocabulary, 3)
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x):  # one output for each token
        return self.fc(torch.tanh(self.words(x)))


class Sentences(Words):
    def __init__(self, shape, num_classes, vocabulary):
        super().__init__(shape, num_classes, vocabulary)
        self.fc = nn.Linear(3 * shape[0], num_classes)

    def forward(self, x):
        return self.fc(torch.tanh(self.words(x)).flatten(1))


class Pixels(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).movedim(1, -1))


class Two(Rows):
    def __init__(self, num_classes):
        super().__init__((2,), num_classes)


def failing():
    raise RuntimeError("no luck")


def make(num_classes):
    return Good((1, 4, 4), num_classes)
"""


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def build(place, name, shape=(1, 4, 4), num_classes=10, **options):
    return MODELS["custom"](path=f"{place}:{name}", **options).build(shape, num_classes)


def test_network_from_a_file_meets_the_contract(place):
    net = build(place, "Good", head="classifier.1", block=("features.1",))
    x = torch.rand(3, 1, 4, 4)
    assert net.training
    assert net.embed(x).shape == (3, 6)
    assert_close(net.eval()(x), net.head(net.embed(x)))
    assert net.blocks == ("body.net.features.1", "head")
    assert [n for n, _ in net.named_parameters()][-2:] == ["head.weight", "head.bias"]
    assert all(net.get_submodule(b) is not None for b in net.blocks)


def test_network_from_an_imported_module_and_from_a_function(place, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert build("mine", "Good", head="classifier.1").head.out_features == 10
    assert build(place, "make", head="classifier.1", num_classes=4).head.out_features == 4


def test_a_network_may_take_rows_of_a_table_or_volumes(place):
    for shape in ((16,), (2, 2, 2, 2)):
        net = build(place, "Fixed", head="fc", shape=shape)
        assert net(torch.rand(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize(("name", "embed"), [("Rows", ""), ("Inner", "inner")])
def test_a_network_gets_categories_of_a_table_as_zeros_and_ones(place, name, embed):
    """Two categories that differ by one differ as much as two that differ by four."""
    info = DataInfo((2,), 3, "features", categories=(0, 5))
    options = MODELS["custom"](path=f"{place}:{name}", head="fc", embed=embed, block=("first",))
    net = build_model(options, info).eval()
    weight = net.body.net.first.weight
    assert weight.shape == (4, 6)
    x = torch.tensor([[0.5, 4.0]])
    coded = torch.tensor([[0.5, 0, 0, 0, 0, 1.0]])
    assert_close(net.embed(x), torch.tanh(coded @ weight.T + net.body.net.first.bias) + (2 if embed else 0))
    assert net.blocks == ("body.net.first", "head")


def test_a_width_without_categories_is_refused_with_the_reason(place):
    info = DataInfo((2,), 3, "features", categories=(0, 5))
    with pytest.raises(UserError, match="categories are zeros and ones: 2 columns are 6 numbers"):
        build_model(MODELS["custom"](path=f"{place}:Two", head="fc"), info)


TOKENS = DataInfo((5,), 7, "tokens", "tokens", vocabulary=7)


def test_a_module_takes_tokens_and_has_an_output_for_each(place):
    net = build_model(MODELS["custom"](path=f"{place}:Words", head="fc"), TOKENS).eval()
    x = torch.arange(10).reshape(2, 5) % 7
    assert net(x).shape == (2, 5, 7)
    assert net.embed(x).shape == (2, 5, 3)
    assert_close(net(x), net.head(torch.tanh(net.body.net.words(x))))


def test_a_module_takes_tokens_and_has_one_output_for_all(place):
    info = DataInfo((5,), 3, "tokens", "classes", vocabulary=7)
    net = build_model(MODELS["custom"](path=f"{place}:Sentences", head="fc"), info)
    assert net(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 3)
    with pytest.raises(UserError, match="not its last layer applied to its embedding"):
        build_model(MODELS["custom"](path=f"{place}:Words", head="fc"), info)


def test_a_module_has_an_output_for_each_pixel(place):
    info = DataInfo((1, 4, 6), 3, "images", "masks")
    net = build_model(MODELS["custom"](path=f"{place}:Pixels", head="fc"), info)
    assert net(torch.zeros(2, 1, 4, 6)).shape == (2, 4, 6, 3)
    assert net.embed(torch.zeros(2, 1, 4, 6)).shape == (2, 4, 6, 4)
    with pytest.raises(UserError, match=r"in place of a 1x1 convolution, on x.movedim\(1, -1\)"):
        build_model(MODELS["custom"](path=f"{place}:Pixels", head="conv"), info)


def test_embedding_can_be_a_method(place):
    net = build(place, "Scaled", head="classifier.1", embed="inner").eval()
    x = torch.rand(2, 1, 4, 4)
    assert_close(net.embed(x), net.body.net.inner(x))


def test_checks_of_a_network_leave_its_buffers_as_they_were(place):
    """Its buffers count samples, in evaluation too; those of the checks are none of the clients'."""
    net = build(place, "Counting", head="classifier.1")
    assert net.body.net.seen.tolist() == [0, 0, 0]
    net(torch.rand(4, 1, 4, 4))
    assert net.body.net.seen.tolist() == [4, 4, 4]


def test_lazy_layers_take_their_sizes_from_the_samples(place):
    net = build(place, "Lazy", head="fc")
    assert net(torch.rand(3, 1, 4, 4)).shape == (3, 10)
    assert net.head.in_features == 8


@pytest.mark.parametrize(
    ("train", "sent"),
    [
        (("classifier",), {"classifier.1.weight", "classifier.1.bias"}),
        (("bias",), {"features.1.bias", "classifier.1.bias"}),
        (("features.?.weight", "classifier.1.bias"), {"features.1.weight", "classifier.1.bias"}),
    ],
)
def test_only_what_is_named_is_trained_and_sent(train, sent, place, tmp_path):
    """A module, the ends of names, a pattern: 3 rounds of 6 clients send these numbers of 4 bytes."""
    options = MODELS["custom"](path=f"{place}:Good", train=train)
    done = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, model=options, evaluate=False)
    learner, layout = done.server_step.config.clients.learner, done.server_step.problem.layout
    assert set(layout.names) == sent
    assert int(done.server_step.ledger.up.sum()) == 3 * 6 * 4 * layout.size
    drawn = dict(build(place, "Good", shape=toy.SHAPE, num_classes=toy.CLASSES).named_parameters())
    state = learner.flat.load(done.server.tables["model"][0]).state_dict()
    assert drawn.keys() == state.keys()
    still = {name for name, buffer in learner.flat.module.named_buffers()}
    assert still == drawn.keys() - sent


def test_a_name_of_nothing_is_refused_and_so_are_names_beside_adapters(place):
    with pytest.raises(UserError, match=r"model\.train = 'tail'"):
        MODELS["custom"](path=f"{place}:Good", train=("tail",)).build((1, 4, 4), 3)
    with pytest.raises(UserError, match=r"model\.lora\.train"):
        MODELS["custom"](path=f"{place}:Good", train=("features",), lora=LoRA(2)).build((1, 4, 4), 3)


def test_a_module_without_a_named_head_is_taken_as_one_whole(place, tmp_path):
    """It trains, under methods that need neither its embedding nor a part of it."""
    options = MODELS["custom"](path=f"{place}:Good")
    net = build_model(options, DataInfo((1, 4, 4), 10))
    assert type(net).__name__ == "Good"
    done = toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path / "a", model=options)
    assert done.scores["accuracy"].mean() > 0.4
    for method in ("fedper", "emdcfl"):
        with pytest.raises(UserError, match=r"model\.head"):
            toy.run(CATALOGUE[method](), toy.Tiny(), tmp_path / method, model=options)
    for wrong in ({"embed": "inner"}, {"block": ("features",)}):
        with pytest.raises(UserError, match=r"no effect without model\.head"):
            build(place, "Good", **wrong)
    table = DataInfo((2,), 3, "features", categories=(0, 5))
    with pytest.raises(UserError, match="columns of categories are encoded"):
        build_model(MODELS["custom"](path=f"{place}:Two"), table)


@pytest.mark.parametrize(
    ("name", "options", "key", "words"),
    [
        ("Good", {"head": "features"}, "model.head", "nn.Linear"),
        ("Good", {"head": "classifier.1", "embed": "codes"}, "model.embed", "no such method"),
        ("Good", {"head": "classifier.1", "block": ("layer4",)}, "model.block", "no such module"),
        ("Scaled", {"head": "classifier.1", "embed": "features"}, "model.embed", "not its last layer"),
        ("Softmaxed", {"head": "classifier.1"}, "model.embed", "not its last layer"),
        ("Odd", {"head": "classifier.1", "embed": "pair"}, "model.embed", "its `pair` returns a tuple"),
        ("Odd", {"head": "classifier.1", "embed": "by_weight"}, "model.embed", "`by_weight` fails .*weight"),
        ("Odd", {"head": "classifier.1", "embed": "part"}, "model.embed", "its `part` fails .*2x16 and 7x3"),
        ("Good", {"head": "features.1"}, "model.head", "6 logits"),
        ("Fixed", {"head": "fc", "num_classes": 3}, "model.head", "10 logits, but the data has 3"),
        ("Fixed", {"head": "fc", "shape": (1, 5, 5)}, "model.path", "does not take samples"),
        ("Unflat", {"head": "fc"}, "model.path", r"\[n, 1, 4, 4\], and x.flatten\(1\) makes it \[n, 16\]"),
        ("Halving", {"head": "classifier.1"}, "model.path", r"writes into the samples .* x = 2 \* x"),
        ("Dropping", {"head": "classifier.1"}, "model.path", "draws in evaluation, too"),
        ("Double", {"head": "classifier.1"}, "model.path", r"features.1.weight is float64, .*\.float\(\)"),
        ("LeftOver", {"head": "fc"}, "model.path", "more.weight belongs to a lazy layer"),
        ("Twins", {"head": "classifier.1"}, "model.path", "classifier.1.weight and twin are two parameters"),
        ("number", {"head": "fc"}, "model.path", "torch.nn.Module"),
        ("failing", {"head": "fc"}, "model.path", "no luck"),
        ("Nothing", {"head": "fc"}, "model.path", "has no 'Nothing'"),
    ],
)
def test_networks_that_do_not_fit_are_refused(place, name, options, key, words):
    with refusal_of(key, words):
        build(place, name, **options)


def test_a_whole_module_that_lacks_a_flattening_is_told_the_shape_of_a_batch(place, tmp_path):
    with refusal_of("model.path", r"\[n, 1, 4, 4\], and x.flatten\(1\) makes it \[n, 16\]"):
        toy.run(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, model=MODELS["custom"](path=f"{place}:Unflat"))


def test_a_module_in_place_of_a_models_section_is_told_the_section_that_takes_it(place):
    with refusal_of("model.name", rf"use {{name: custom, path: {re.escape(place)}:Good, head: NAME}}"):
        loader.class_of(MODELS, f"{place}:Good", "model.name")
    with refusal_of("model.name", "is not a dataclass"):
        loader.class_of(MODELS, f"{place}:make", "model.name")


@pytest.mark.parametrize("path", ["", "mine.py", "nowhere.py:Net", "no_such_package.net:Net"])
def test_paths_that_lead_nowhere_are_refused(path):
    with refusal_of("model.path"):
        MODELS["custom"](path=path, head="fc").build((1, 4, 4), 10)


def test_file_with_an_error_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import torch\ndef:")
    with pytest.raises(UserError, match=r"broken.py:Net': cannot be imported: SyntaxError"):
        MODELS["custom"](path=f"{path}:Net", head="fc").build((1, 4, 4), 10)


def test_a_build_of_ones_own_below_a_model_builds_the_network():
    built = []

    @dataclass(frozen=True)
    class Mine(MLP):
        def build(self, shape, num_classes):
            built.append((shape, num_classes))
            return super().build(shape, num_classes)

    assert build_model(Mine(hidden=(3,)), DataInfo((1, 2, 2), 5)).head.out_features == 5
    assert built == [((1, 2, 2), 5)]
