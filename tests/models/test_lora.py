"""Low-rank adapters: sizes and values by hand, what is frozen stays, whole runs send adapters only."""

import json

import numpy as np
import pytest
import torch
from support.nightly import mostly_nightly
from support.refusal import refusal_of
from support.runs import CONFIG
from torch import nn
from torch.testing import assert_close

import mpifl
from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.core.parameters import Layout, flatten
from mpifl.core.rng import key
from mpifl.experiment.build import initial_vectors
from mpifl.models import MODELS, LoRA, check_adapted, checksum, seeded_model
from mpifl.models.lora import adapt, count_whole
from mpifl.models.modules import LoRAConv2d, LoRALinear
from mpifl.training.batched import stackable

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
TINY_MODEL = {"name": "mlp", "hidden": [12], "lora": {"rank": 2}}
COUNTS = [  # network, options of LoRA, image, numbers in the vector
    ("mlp", {"rank": 2}, GREY, 2 * (784 + 200) + 2010),
    ("mlp", {"rank": 2, "train": ()}, GREY, 2 * (784 + 200) + 2 * (200 + 10)),
    ("mlp", {"rank": 3, "train": (), "layers": ("fc1",)}, GREY, 3 * (784 + 200)),
    ("lenet5", {"rank": 2, "layers": ("conv*",)}, COLOUR, 2 * (3 * 25 + 6) + 2 * (6 * 25 + 16) + 850),
    ("lenet5", {"rank": 1, "layers": ("body.fc?",), "train": ()}, COLOUR, 400 + 120 + 120 + 84),
    ("resnet20", {"rank": 1, "layers": ("layer3.2*",), "train": ("layer3.2.bn1",)}, COLOUR, 2 * 640 + 4 * 64),
]


def seeded(model, seed: int, shape, num_classes: int, j: int = 0) -> nn.Module:
    """Return a network with the j-th initial weights of a seed."""
    return seeded_model(model, DataInfo(shape, num_classes), seed, j)


def moved(net: nn.Module) -> nn.Module:
    """Return the network with other adapters than those that it began with, in evaluation mode."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    return net.eval()


@pytest.mark.parametrize(("name", "options", "shape", "size"), COUNTS)
def test_the_vector_holds_adapters_and_what_is_trained_whole(name, options, shape, size):
    net = seeded(MODELS[name](lora=LoRA(**options)), 0, shape, 10)
    assert Layout.of(net).size == len(flatten(net)) == size


@pytest.mark.parametrize(("name", "options", "shape", "size"), COUNTS)
def test_the_whole_model_has_as_many_numbers_with_adapters_as_without(name, options, shape, size):
    plain = seeded(MODELS[name](), 0, shape, 10)
    whole = Layout.of(plain).size
    assert count_whole(plain) == whole > size
    assert count_whole(seeded(MODELS[name](lora=LoRA(**options)), 0, shape, 10)) == whole


def test_frozen_weights_that_two_layers_share_are_counted_once():
    """Layers a and b share [3, 3], with a bias each: 9 + 2 * 3; c is adapted: 3 + 1."""
    net = nn.Sequential()
    for name, layer in (("a", nn.Linear(3, 3)), ("b", nn.Linear(3, 3)), ("c", nn.Linear(3, 1))):
        net.add_module(name, layer)
    net.b.weight = net.a.weight
    net.frozen = adapt(net, LoRA(rank=1, layers=("c",), train=()))
    assert count_whole(net) == 9 + 6 + 4


def test_an_adapted_layer_adds_a_product_of_two_thin_matrices():
    """W = [[1, 2]], b = 3, A = [[1, 0], [0, 1]], B = [[1, 1]], alpha 4, r 2: (1 + 2) x1 + (2 + 2) x2 + 3."""
    plain = nn.Linear(2, 1)
    plain.load_state_dict({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
    layer = LoRALinear(plain, rank=2, alpha=4.0)
    with torch.no_grad():
        layer.lora_A.copy_(torch.eye(2))
        layer.lora_B.copy_(torch.tensor([[1.0, 1.0]]))
    assert_close(layer(torch.tensor([[10.0, 100.0]])), torch.tensor([[30.0 + 400.0 + 3.0]]))
    assert [n for n, _ in layer.named_parameters()] == ["lora_A", "lora_B"]


def test_dropout_drops_inputs_of_the_adapter_alone_and_only_in_training():
    """W = 0, A = [1, ..., 1], B = [1]: half of 1000 inputs of 1 are dropped, the others are doubled."""
    plain = nn.Linear(1000, 1)
    plain.load_state_dict({"weight": torch.zeros(1, 1000), "bias": torch.zeros(1)})
    layer = LoRALinear(plain, rank=1, alpha=1.0, dropout=0.5)
    with torch.no_grad():
        layer.lora_A.fill_(1.0)
        layer.lora_B.fill_(1.0)
    x = torch.ones(1, 1000)
    with key(0).seeded():
        found = layer(x).item()
    assert found % 2 == 0
    assert 0 < abs(found - 1000) < 4 * 2 * (1000 * 0.25) ** 0.5
    assert layer.eval()(x).item() == 1000
    with pytest.raises(UserError, match="has no effect without adapters"):
        LoRA(dropout=0.1)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20", "flt_cnn_mnist"])
def test_fresh_adapters_change_nothing_and_merged_ones_compute_the_same(name):
    model, shape = MODELS[name](lora=LoRA(rank=2, alpha=3, train=())), (1, 28, 28)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    net, whole = seeded(model, 7, shape, 10), seeded(MODELS[name](), 7, shape, 10)
    assert_close(
        net.eval()(x), whole.eval()(x), msg="the frozen network is the one that training would start from"
    )
    merged = model.merged(moved(net), DataInfo(shape, 10))
    assert_close(merged(x), net(x))
    assert not torch.allclose(merged(x), whole(x), atol=1e-3)
    assert {type(m) for m in merged.modules()}.isdisjoint({LoRALinear, LoRAConv2d})
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in whole.named_parameters()]


def test_initial_vectors_differ_in_adapters_and_head_and_follow_the_seed():
    model = MODELS["mlp"](hidden=(5,), lora=LoRA(rank=2))
    a, b, c, d = (seeded(model, s, GREY, 3, j) for s, j in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert_close(flatten(a), flatten(b), rtol=0, atol=0)
    for other in (c, d):
        assert not torch.equal(a.body.fc1.lora_A, other.body.fc1.lora_A)
        assert not torch.equal(a.head.weight, other.head.weight)
        assert not other.body.fc1.lora_B.any()
    assert checksum(a) == checksum(b) != checksum(d)
    assert checksum(MODELS["mlp"]().build(GREY, 3)) == ""


ADAPTERS_ALONE = {
    "rounds": 3,
    "task": "regression",
    "algorithm": {"name": "ifca", "num_clusters": 2},
    "model": {"name": "mlp", "hidden": [16], "lora": {"rank": 4, "train": []}},
    "local": {"lr": 0.05, "epochs": 2, "batch_size": 16},
    "data": {
        "source": {"name": "generated", "kind": "numbers", "outputs": 1, "train": 400, "test": 100},
        "scenario": {"name": "relations", "clients": 8, "groups": 2},
    },
    "evaluation": {"every": 0},
}


def test_ifca_finds_the_groups_where_only_adapters_are_trained(tmp_path):
    """Behind B = 0 all of its initial models would be one, and every client would take the first."""
    run = mpifl.run(ADAPTERS_ALONE, output={"folder": str(tmp_path)})
    assert run.metrics.iloc[-1]["ari"] == 1.0


def test_one_model_starts_from_the_frozen_one_and_several_at_the_share_that_is_documented():
    model, info = MODELS["mlp"](hidden=(5,), lora=LoRA(rank=2, train=())), DataInfo(GREY, 3)
    whole, added = (initial_vectors(model, 0, info, apart) for apart in (False, True))
    net = seeded(model, 0, GREY, 3)
    assert_close(whole(0), flatten(net), rtol=0, atol=0)
    assert not torch.equal(added(0), whole(0))
    nn.utils.vector_to_parameters(added(1), net.parameters())
    layer = net.body.fc1
    share = (layer.delta().std() / layer.weight.std()).item()
    assert share == pytest.approx(0.3, rel=0.05)  # of the weights that were drawn beside this A
    head = MODELS["mlp"](hidden=(5,), lora=LoRA(rank=2))  # another head each: that is enough
    drawn = initial_vectors(head, 0, info, True)(1)
    assert_close(drawn, flatten(seeded(head, 0, GREY, 3, 1)), rtol=0, atol=0)


def test_models_that_all_start_from_one_run_are_warned_of(tmp_path, capsys):
    place = {"folder": str(tmp_path), "id": "one", "model": True}
    one = mpifl.run(
        ADAPTERS_ALONE, algorithm="fedavg", model={"name": "mlp", "hidden": [4]}, rounds=1, output=place
    )
    later = {
        "algorithm": "hypcluster",
        "model": {"name": "mlp", "hidden": [4]},
        "start": {"run": str(one.folder)},
    }
    mpifl.run(ADAPTERS_ALONE, **later, rounds=1, output={**place, "id": "two"})
    assert "start.run: all initial models of HypCluster are the same" in capsys.readouterr().err


def test_gradients_reach_the_adapters_and_nothing_frozen_moves():
    model = MODELS["resnet20"](lora=LoRA(rank=1))
    net = moved(seeded(model, 0, COLOUR, 3)).train()
    before = {name: b.clone() for name, b in net.named_buffers()}
    net(torch.rand(4, *COLOUR)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
    assert before.keys() == net.frozen
    for name, buffer in net.named_buffers():
        assert_close(buffer, before[name], rtol=0, atol=0)


def test_clients_with_adapters_can_be_stacked_unless_batch_norm_is_trained():
    assert stackable(MODELS["mlp"](lora=LoRA(rank=1)).build(GREY, 3))
    assert stackable(MODELS["resnet20"](lora=LoRA(rank=1)).build(COLOUR, 3))
    assert not stackable(MODELS["resnet20"](lora=LoRA(rank=1, train=("*bn1",))).build(COLOUR, 3))


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"layers": ("fc1",)}, "lora.layers", "no effect without adapters; give model.lora.rank"),
        ({"train": ()}, "lora.train", "no effect"),
        ({"rank": 1, "layers": ("conv1",)}, "model.lora.layers", "it has: body.fc1, head"),
        ({"rank": 1, "train": ("haed",)}, "model.lora.train", "no module with parameters"),
        ({"rank": 1, "layers": ("fc1",), "train": ("body",)}, "model.lora.layers", "trained whole"),
    ],
)
def test_what_cannot_be_is_refused(options, key, words):
    with refusal_of(key, words):
        MODELS["mlp"](lora=LoRA(**options)).build(GREY, 10)


class Tied(nn.Module):
    """Uses the weights of a layer without calling it, and counts the batches that it saw."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.counts = nn.Linear(4, 4), counts
        self.register_buffer("seen", torch.zeros(1))
        self.head = nn.Linear(4, 2)
        self.frozen: frozenset[str] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += float(self.training and self.counts)
        return self.head(self.first(x) if self.counts else x @ self.first.weight)


@pytest.mark.parametrize(
    ("counts", "words"), [(True, "seen.*changes in training"), (False, "without calling it")]
)
def test_adapters_that_are_passed_by_and_frozen_buffers_that_move_are_found(counts, words):

    net = Tied(counts)
    net.frozen = adapt(net, LoRA(rank=1))
    with pytest.raises(UserError, match=words):
        check_adapted(net, torch.rand(2, 4))


def run(tmp_path, *options: str) -> int:
    """Run the tiny configuration with adapters; return the exit code."""
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--data.cache", str(tmp_path / "cache")]
    return cli.main(["run", str(CONFIG), "--quiet", *place, "--model", json.dumps(TINY_MODEL), *options])


def test_a_run_sends_the_adapters_and_gives_the_merged_model_back(tmp_path):
    """fc1 has 64 inputs and 12 outputs, 2 * 76 numbers; the head 12 * 10 + 10: 282 * 4 bytes each way."""
    assert run(tmp_path, "--output.client_models", "true") == 0
    done = mpifl.load_run(tmp_path / "tiny-x")
    sent = [float(row["bytes"]) for row in done.rows("ledger.csv") if row["direction"] == "up"]
    assert sum(sent) == 2 * 8 * 282 * 4
    model = done.model(client=3)
    assert [tuple(p.shape) for p in model.parameters()] == [(12, 64), (12,), (10, 12), (10,)]
    net = seeded(MODELS["mlp"](hidden=(12,), lora=LoRA(rank=2)), 0, (1, 8, 8), 10)
    assert_close(model.body.fc1.bias, net.body.fc1.bias, rtol=0, atol=0)
    assert torch.linalg.matrix_rank((model.body.fc1.weight - net.body.fc1.weight).detach(), rtol=1e-3) == 2
    summary = json.loads((tmp_path / "tiny-x" / "summary.json").read_text())
    assert summary["identity"]["frozen"] == checksum(net)
    summary["identity"]["frozen"] = "0"
    (tmp_path / "tiny-x" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="no longer those of the run"):
        mpifl.load_run(tmp_path / "tiny-x").model(client=3)


def test_a_round_of_adapters_is_as_much_shorter_as_its_bytes_are_fewer(tmp_path):
    """`wired` takes 1 s for the whole model in each direction, and 1 s of computing."""
    ends, sent = [], []
    for number, model in enumerate([{**TINY_MODEL, "lora": {"rank": 0}}, TINY_MODEL]):
        place = {"folder": str(tmp_path), "id": str(number)}
        done = mpifl.run(CONFIG, model=model, algorithm="fedavg", network="wired", rounds=2, output=place)
        ends.append(done.metrics.virtual_seconds.iloc[-1])
        sent.append(done.summary["federation_bytes_up"])
    assert_close(ends, [6.0, 2 + 4 * sent[1] / sent[0]])


def test_adapters_start_from_the_model_of_an_earlier_run(tmp_path):
    whole = {"name": "mlp", "hidden": [12]}
    first = mpifl.run(CONFIG, model=whole, output={"folder": str(tmp_path), "id": "whole"})
    file = str(first.folder / "model.safetensors")
    lora = {"rank": 2, "train": []}
    again = mpifl.run(
        CONFIG,
        model={**whole, "weights": file, "lora": lora},
        output={"folder": str(tmp_path), "id": "lora"},
        local={"lr": 1e-30},
    )
    assert again.summary["accuracy_mean"] == first.summary["accuracy_mean"]
    x = torch.rand(4, 1, 8, 8)
    assert_close(again.model(client=0)(x), first.model(client=0)(x))
    state = first.model(client=0).state_dict()
    torch.save(state, tmp_path / "state.pt")
    net = MODELS["mlp"](hidden=(12,), weights=str(tmp_path / "state.pt")).build((1, 8, 8), 10)
    assert_close(net.state_dict(), state)
    with pytest.raises(UserError, match=r"model has 910 numbers, this one has 974"):
        MODELS["mlp"](hidden=(12, 8), weights=file).build((1, 8, 8), 10)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lgfedavg", "fedclust", "fedcuau"])
def test_methods_that_work_on_a_frozen_head_are_refused(method, tmp_path, capsys):
    assert run(tmp_path, "--algorithm", method, "--model.lora", "{train: [], layers: [fc1]}") == 2
    said = capsys.readouterr().err.strip()
    assert "frozen head" in said
    assert "model.lora.train" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "method",
    mostly_nightly(["pacfl", "ifca", "cfl", "fedsoft", "ucfl", "emdcfl"], ["pacfl", "ucfl", "emdcfl"]),
)
def test_clustered_methods_go_on_with_adapters_alone(method, tmp_path):
    assert run(tmp_path, "--algorithm", method, "--model.lora", "{train: []}") == 0
    assert np.isfinite(mpifl.load_run(tmp_path / "tiny-x").summary["accuracy_mean"])


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2, bias=False), lambda: nn.Conv2d(3, 2, 1, bias=False)]
)
def test_adapters_are_scaled_by_alpha_over_rank(make):
    """rank 2, alpha 6, all numbers of A and B 1: each entry of B A is 2, times 3."""
    net = nn.Sequential(make())
    adapt(net, LoRA(rank=2, alpha=6.0, train=()))
    with torch.no_grad():
        net[0].lora_A.fill_(1.0)
        net[0].lora_B.fill_(1.0)
    assert_close(net[0].delta(), torch.full(net[0].weight.shape, 6.0))
