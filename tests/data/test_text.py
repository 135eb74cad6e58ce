"""Characters of a text, and groups with alphabets of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support.refusal import refusal_of

import mpifl
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data.pool import Pool
from mpifl.data.scenarios.relations import Alphabets, PermuteTokens, Relations
from mpifl.data.sources.scikit import Digits
from mpifl.data.sources.text import ALPHABET, Text


def read(row: np.ndarray) -> str:
    return "".join(ALPHABET[i] for i in row)


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text("Abc  d\nef=\n\n" * 12, encoding="utf-8")
    return tmp_path


def test_every_position_is_followed_by_the_next_character(root):
    """`abc def` has 7 characters, so each of 12 documents has one sequence of 4 and its last character."""
    pool = Text(path="text.txt", length=4).load(root, root)
    assert (len(pool.inputs), pool.num_train, pool.vocabulary, pool.num_classes) == (12, 10, 49, 49)
    assert (pool.kind, pool.label_kind) == ("tokens", "tokens")
    assert {read(row) for row in pool.inputs} == {"abc "}
    assert {read(row) for row in pool.labels} == {"bc d"}
    assert_array_equal(pool.origin, [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 4, 9])


def test_the_character_after_a_sequence_is_a_class(root):
    pool = Text(path="text.txt", length=4, predict="last", samples=11).load(root, root)
    assert (len(pool.inputs), pool.label_kind) == (11, "classes")
    assert read(pool.labels) == "d" * 11


def test_the_help_texts_of_python_need_no_file():
    pool = Text(samples=50).load(Path(), Path())
    assert pool.inputs.shape == (50, 32)
    assert "assert" in read(pool.inputs[0])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"length": 0}, "length"),
        ({"predict": "all"}, "predict"),
        ({"samples": -1}, "samples"),
        ({"path": "nowhere.txt"}, "data.source.path"),
        ({"path": "text.txt", "length": 40}, "data.source.length"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(root, options, key):
    with refusal_of(key):
        Text(**options).load(root, root)


def test_tokens_and_labels_are_renamed_alike_and_what_does_not_count_stays():
    rename = PermuteTokens(np.array([[0, 1, 2], [1, 2, 0]]), labels=True)
    x, y = np.array([[0, 1], [0, 1]], np.int16), np.array([[1, -100], [1, -100]], np.int16)
    for labels, expected in ((y, [[1, -100], [2, -100]]), (np.array([2, 2]), [2, 0])):
        tokens, found = rename(x, labels, np.array([0, 1]))
        assert_array_equal(tokens, [[0, 1], [1, 2]])
        assert_array_equal(found, expected)
        assert (tokens.dtype, found.dtype) == (x.dtype, labels.dtype)
    assert_array_equal(PermuteTokens(np.array([[1, 0]]), labels=False)(x, y, np.zeros(2, int))[1], y)


@pytest.mark.parametrize("copies", [True, False])
def test_groups_have_permutations_of_their_own_and_divide_the_samples(root, copies):
    pool = Text(samples=200).load(root, root)
    spec = Alphabets(clients=6, groups=3, moved=0.2, copies=copies, validation=0.0).compose(pool, key(0))
    tables = spec.ops[0].orders
    assert_array_equal(np.sort(tables, 1), np.tile(np.arange(49), (3, 1)))
    assert [(row != np.arange(49)).sum() for row in tables] == [0, 10, 10]
    assert_array_equal(spec.groups, [0, 0, 1, 1, 2, 2])
    splits = spec.splits()
    held = [set(np.arange(len(pool.labels))[splits["train"].of(k)]) for k in range(6)]
    assert len(held[0] | held[1]) == (160 if copies else 52)  # 160 = 2 * 26 + 4 * 27
    assert not held[0] & held[1]
    assert bool(held[0] & (held[2] | held[3])) == copies


def test_a_share_of_a_clients_own_sequences_can_test_it(root):
    pool = Text(path="text.txt", length=4).load(root, root)
    splits = (
        Alphabets(clients=2, groups=2, moved=0.2, validation=0.0, test_share=0.4)
        .compose(pool, key(0))
        .splits()
    )
    for k in range(2):
        train, test = (set(splits[part].of(k).tolist()) for part in ("train", "test"))
        assert (len(train), len(test)) == (6, 4)
        assert train | test == set(range(10)), "the training part of the source, and nothing else"


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("scenario", [Alphabets, Relations])
def test_labels_that_are_no_tokens_are_not_renamed(scenario, kind):
    """They are as many as tokens, but say which of 12 labels apply, or are 12 numbers."""
    tokens = np.arange(480).reshape(40, 12) % 12
    pool = Pool(tokens, (tokens % 5 == 0).astype(kind), 30, 12, vocabulary=12)
    x, y = scenario(clients=4, groups=2).compose(pool, key(0)).ops[0](tokens, pool.labels, np.ones(40, int))
    assert_array_equal(y, pool.labels)
    assert (x != tokens).any()


def test_images_have_no_alphabet():
    with pytest.raises(UserError, match="needs sequences of tokens"):
        Alphabets().compose(Digits().load(Path(), Path()), key(0))


def test_a_run_of_next_characters_finds_the_alphabets_with_adapters_alone(tmp_path):
    """An LSTM as a whole, a transformer with adapters: the adapters' bytes are a part of the model's."""
    tree = {
        "rounds": 1,
        "algorithm": "oracle",
        "task": "next_token",
        "data": {
            "source": {"name": "text", "samples": 120, "length": 8},
            "scenario": {"name": "alphabets", "clients": 4, "groups": 2},
            "cache": str(tmp_path / "cache"),
        },
        "output": {"folder": str(tmp_path)},
    }
    small = {"name": "transformer", "width": 8, "heads": 2, "layers": 1}
    lora = {"rank": 2, "train": [], "layers": ["*.q"]}
    models = {"lstm": {"name": "lstm", "hidden": 8, "layers": 1}, "lora": {**small, "lora": lora}}
    done = {n: mpifl.run(tree, model=m, name=n, local={"lr": 0.1}) for n, m in models.items()}
    for run in done.values():
        assert np.isfinite(run.summary["perplexity_mean"])
        assert run.summary["ari"] == 1
    assert done["lora"].summary["model_parameters"] == 2 * (8 + 8)
    assert done["lora"].model(client=3)(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 49)
