"""Networks for tokens: sizes by hand, what a position may see, what does not fit."""

import pytest
import torch
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo, Split
from mpifl.core.parameters import Layout
from mpifl.core.rng import key
from mpifl.models import MODELS, LoRA, seeded_model
from mpifl.training.backend import Request
from mpifl.training.batched import stackable, train_all
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner

NEXT = DataInfo((8,), 11, "tokens", "tokens", 11)  # 8 positions, 11 tokens, one output for each position
ONE = DataInfo((8,), 3, "tokens", "classes", 11)
SMALL = {
    "lstm": {"embedding": 3, "hidden": 5, "layers": 2},
    "transformer": {"width": 8, "heads": 2, "layers": 2},
}
# 11 * 3; two layers of 4 gates with 3 or 5 inputs, 5 states and two biases each; the head
LSTM_SIZE = 11 * 3 + 4 * (3 * 5 + 5 * 5 + 2 * 5) + 4 * (5 * 5 + 5 * 5 + 2 * 5)
# tokens, positions; per layer q, k, v, out of 8 * 8 + 8, 8 to 32 and back, two norms of 2 * 8; the last norm
TRANSFORMER_SIZE = 11 * 8 + 8 * 8 + 2 * (4 * 72 + 8 * 32 + 32 + 32 * 8 + 8 + 32) + 16


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (n, 8), generator=torch.Generator().manual_seed(seed))


def build(name: str, info: DataInfo, **options):
    return seeded_model(MODELS[name](**{**SMALL[name], **options}), info, 0)


@pytest.mark.parametrize(
    ("name", "info", "size"),
    [
        ("lstm", NEXT, LSTM_SIZE + 5 * 11 + 11),
        ("lstm", ONE, LSTM_SIZE + 5 * 3 + 3),
        ("transformer", NEXT, TRANSFORMER_SIZE + 8 * 11 + 11),
        ("transformer", ONE, TRANSFORMER_SIZE + 8 * 3 + 3),
    ],
)
def test_sizes_are_those_by_hand_and_the_head_is_declared(name, info, size):
    net = build(name, info)
    x = tokens(4)
    assert Layout.of(net).size == size
    assert net(x).shape == ((4, 8, 11) if info is NEXT else (4, 3))
    assert_close(net(x), net.head(net.embed(x)))
    assert all(net.get_submodule(block) is not None for block in net.blocks)
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_the_lstm_of_leaf_has_its_size():
    info = DataInfo((80,), 80, "tokens", "classes", 80)
    with torch.device("meta"):
        assert sum(p.numel() for p in MODELS["lstm"]().build_for(info).parameters()) == 819_920
        small = DataInfo((32,), 64, "tokens", "tokens", 64)
        assert sum(p.numel() for p in MODELS["transformer"]().build_for(small).parameters()) == 110_400


@pytest.mark.parametrize("name", SMALL)
def test_a_position_sees_itself_and_what_is_before_it(name):
    net, x = build(name, NEXT).eval(), tokens(2)
    later = x.clone()
    later[:, 5] = (later[:, 5] + 1) % 11
    one, other = net(x), net(later)
    assert_close(one[:, :5], other[:, :5], rtol=0, atol=0)
    assert (one[:, 5:] != other[:, 5:]).any(-1).all()


@pytest.mark.parametrize("name", SMALL)
def test_training_is_deterministic_and_finite(name):
    split = Split(tokens(12), tokens(12, seed=1)[:, 0] % 3)
    learner = Learner(build(name, ONE))
    config = LocalConfig(epochs=2, batch_size=4, lr=0.1)
    a, b = (learner.sgd(learner.init, split, config, key(0)) for _ in range(2))
    assert_close(a.vector, b.vector, rtol=0, atol=0)
    assert torch.isfinite(a.vector).all()
    assert not torch.equal(a.vector, learner.init)


def test_transformers_can_be_stacked_with_and_without_adapters_and_lstms_cannot():
    split = Split(tokens(6), tokens(6, seed=1)[:, 0] % 3)
    config = LocalConfig(epochs=1, batch_size=4, lr=0.1)
    assert not stackable(build("lstm", ONE))
    for lora in (LoRA(), LoRA(rank=2, layers=("*.q", "*.v"))):
        learner = Learner(build("transformer", ONE, lora=lora))
        requests = [Request(learner.init, split, config, key(i)) for i in range(3)]
        for request, made in zip(requests, train_all(learner.context, requests), strict=True):
            alone = learner.sgd(learner.init, split, config, request.key)
            assert_close(made.vector, alone.vector, rtol=1e-4, atol=1e-5)


def test_adapters_of_queries_and_values():
    """Two layers, q and v of 8 to 8, rank 2: 2 * 2 * 2 * 16 numbers, and the head 8 * 11 + 11."""
    options = LoRA(rank=2, layers=("*.q", "*.v"))
    net = build("transformer", NEXT, lora=options)
    assert Layout.of(net).size == 2 * 2 * 2 * 16 + 99
    assert_close(net(tokens(3)), build("transformer", NEXT)(tokens(3)))


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [("lstm", {"lora": LoRA(rank=1)}, "model.lora.layers"), ("transformer", {"width": 9}, "model.width")],
)
def test_what_cannot_work_is_refused(name, options, key):
    with refusal_of(key):
        build(name, NEXT, **options)


def test_images_are_refused_by_name():
    with pytest.raises(UserError, match="takes tokens, but the samples of this source are images"):
        seeded_model(MODELS["transformer"](), DataInfo((1, 8, 8), 10), 0)
