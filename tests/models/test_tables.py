"""Models of tables: sizes and values by hand, embeddings of categories, what does not fit."""

import pytest
import torch
from support.refusal import refusal_of
from torch.testing import assert_close

from mpifl.core.federation import DataInfo
from mpifl.core.parameters import Layout
from mpifl.models import MODELS, seeded_model

MIXED = DataInfo((3,), 2, "features", categories=(0, 5, 0))
NUMBERS = DataInfo((3,), 2, "features", "numbers", categories=(0, 5, 0))
PLAIN = DataInfo((4,), 3, "features")
ROWS = torch.tensor([[0.5, 4.0, -1.0], [1.5, 0.0, 2.0]])


@pytest.mark.parametrize(
    ("name", "options", "info", "size", "width"),
    [
        ("logistic", {}, PLAIN, 4 * 3 + 3, 4),
        ("logistic", {}, MIXED, (2 + 5) * 2 + 2, 7),
        ("linear", {}, NUMBERS, (2 + 5) * 2 + 2, 7),
        ("table_mlp", {"hidden": (6,)}, PLAIN, 4 * 6 + 6 + 6 * 3 + 3, 6),
        ("table_mlp", {"hidden": (6, 4)}, MIXED, 5 * 3 + 5 * 6 + 6 + 6 * 4 + 4 + 4 * 2 + 2, 4),
        ("table_mlp", {"hidden": (6,), "embedding": 1}, MIXED, 5 * 1 + 3 * 6 + 6 + 6 * 2 + 2, 6),
    ],
)
def test_sizes_are_those_by_hand_and_the_head_is_declared(name, options, info, size, width):
    net = seeded_model(MODELS[name](**options), info, 0)
    x = ROWS if info.categories else torch.rand(2, 4)
    assert Layout.of(net).size == size
    assert net.embed(x).shape == (2, width)
    assert_close(net(x), net.head(net.embed(x)))
    net(x).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert all(net.get_submodule(block) is not None for block in net.blocks)


def test_regression_sees_a_category_as_a_one_in_its_place():
    net = seeded_model(MODELS["linear"](), NUMBERS, 0)
    assert_close(net.embed(ROWS)[0], torch.tensor([0.5, 0, 0, 0, 0, 1, -1]))


def test_a_category_has_its_row_of_the_embedding():
    net = seeded_model(MODELS["table_mlp"](), MIXED, 0)
    found = net.body.inputs(ROWS)
    assert_close(found[:, :2], ROWS[:, [0, 2]])
    assert_close(found[:, 2:], net.body.inputs.tables[0].weight[[4, 0]])


@pytest.mark.parametrize(
    ("name", "options", "info", "key"),
    [
        ("logistic", {}, NUMBERS, "model.name"),
        ("linear", {}, MIXED, "model.name"),
        ("table_mlp", {}, DataInfo((1, 8, 8), 3, "features"), "model.name"),
        ("table_mlp", {}, DataInfo((8,), 3, "tokens", vocabulary=5), "model.name"),
    ],
)
def test_what_cannot_work_is_refused(name, options, info, key):
    with refusal_of(key):
        seeded_model(MODELS[name](**options), info, 0)
