"""Source huggingface with a tokenizer: texts, pairs, tags, next tokens, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import texts

from mpifl.core.errors import UserError
from mpifl.data import DataConfig, open_federation
from mpifl.data.pool import Pool
from mpifl.data.scenarios import SCENARIOS
from mpifl.data.sources.huggingface import HuggingFace

V = len(texts.SPECIAL) + len(texts.WORDS)
NUMBER = {word: i for i, word in enumerate((*texts.SPECIAL, *texts.WORDS))}
PAD, UNK, CLS, SEP, MASK = range(5)


def tokens(text: str) -> list[int]:
    return [NUMBER[word] for word in text.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer `bert`, and one without special tokens but one for the end, `gpt`."""
    place = tmp_path_factory.mktemp("tokenizers")
    texts.save_tokenizer(place / "bert")
    texts.save_tokenizer(place / "gpt", pair=False, eos_token="[SEP]")
    return place


def loaded(folder: Path, rows, tokenizer: str = "bert", **options) -> Pool:
    """Return the pool of some rows."""
    texts.save_rows(folder / "rows" / "train.jsonl", rows)
    given = {"path": str(folder / "rows"), "tokenizer": str(folder / tokenizer), "test_share": 0.0}
    return HuggingFace(**(given | options)).load(Path(), folder)


def test_texts_are_the_tokens_of_the_tokenizer_with_its_padding(folder):
    rows = [{"text": "the room was fine", "label": 1}, {"text": "dull unheard film", "label": 0}]
    pool = loaded(folder, rows)
    expected = [
        [CLS, *tokens("the room was fine"), SEP],
        [CLS, NUMBER["dull"], UNK, NUMBER["film"], SEP, PAD],
    ]
    np.testing.assert_array_equal(pool.inputs, expected)
    np.testing.assert_array_equal(pool.labels, [1, 0])
    assert (pool.vocabulary, pool.num_classes, pool.label_kind) == (V, 2, "classes")
    assert dict(pool.special) == {"padding": 0, "mask": 4, "class": 2, "separator": 3, "unknown": 1}
    np.testing.assert_array_equal(loaded(folder, rows, length=4).inputs[0], [CLS, *tokens("the room"), SEP])


def test_a_pair_has_the_token_after_which_the_second_text_begins(folder):
    rows = [
        {"text": "the room", "other": "it was fine", "label": 0},
        {"text": "dull", "other": "film", "label": 1},
    ]
    pool = loaded(folder, rows, second="other")
    expected = [CLS, *tokens("the room"), SEP, *tokens("it was fine"), SEP]
    np.testing.assert_array_equal(pool.inputs[0], expected)
    assert dict(pool.special)["second"] == SEP


@pytest.mark.parametrize("names", [None, ["O", "GOOD", "BAD"]])
def test_a_tag_stands_at_the_first_token_of_its_word(folder, names):
    rows = [
        {"tokens": ["the", "fine-room", "was", "dull"], "ner_tags": [0, 1, 0, 2]},
        {"tokens": ["we", "found"], "ner_tags": [0, 0]},
    ]
    if names:
        rows = [{**row, "ner_tags": [names[tag] for tag in row["ner_tags"]]} for row in rows]
    pool = loaded(folder, rows)
    one, two, three = (sorted(names).index(n) for n in names) if names else (0, 1, 2)
    # `fine-room` makes the tokens fine, [UNK] (the hyphen) and room
    expected = [
        [-100, one, two, -100, -100, one, three, -100],
        [-100, one, one, -100, -100, -100, -100, -100],
    ]
    np.testing.assert_array_equal(pool.labels, expected)
    assert (pool.label_kind, pool.num_classes) == ("tags", 3)
    assert pool.class_names == (tuple(sorted(names)) if names else ("0", "1", "2"))
    assert pool.vocabulary == V


def test_next_tokens_follow_their_positions_and_long_texts_make_several_samples(folder):
    rows = [{"text": "the room was fine and we found it"}, {"text": "dull film"}, {"text": "the"}]
    pool = loaded(folder, rows, "gpt", labels="next", length=4)
    long = tokens("the room was fine and we found it")
    expected = [long[:4], long[5:7], tokens("dull")]
    for row, labels, own in zip(pool.inputs, pool.labels, expected, strict=True):
        assert row.tolist()[: len(own)] == own
        assert set(row.tolist()[len(own) :]) <= {SEP}  # the end of a text pads, as there is no other token
        assert (labels[len(own) :] == -100).all()
    np.testing.assert_array_equal(pool.labels[0], long[1:5])
    assert pool.num_classes == pool.vocabulary == V
    assert dict(pool.special)["padding"] == SEP


def test_masks_hide_a_share_of_ordinary_tokens_and_labels_are_what_they_hide(folder):
    rows = [{"text": " ".join(texts.WORDS * 3), "shop": i % 5} for i in range(60)]
    plain = loaded(folder, [{**row, "label": 0} for row in rows], labels="classes")
    pool = loaded(folder, rows, labels="masked", client="shop")
    chosen = pool.labels != -100
    ordinary = ~np.isin(plain.inputs, range(5))
    assert not (chosen & ~ordinary).any()
    np.testing.assert_array_equal(np.where(chosen, pool.labels, pool.inputs), plain.inputs)
    share = chosen.sum() / ordinary.sum()
    n = ordinary.sum()
    assert abs(share - 0.15) < 4 * np.sqrt(0.15 * 0.85 / n)
    masked = (pool.inputs[chosen] == MASK).mean()
    kept = (pool.inputs[chosen] == pool.labels[chosen]).mean()
    m = chosen.sum()
    assert abs(masked - 0.8) < 4 * np.sqrt(0.16 / m)
    assert abs(kept - (0.1 + 0.1 / (V - 5))) < 4 * np.sqrt(0.1 / m)
    np.testing.assert_array_equal(loaded(folder, rows, labels="masked", client="shop").inputs, pool.inputs)
    assert pool.label_kind == "masked_tokens"
    assert pool.origin is not None
    assert np.bincount(pool.origin).tolist() == [12] * 5
    few = loaded(folder, [{"text": "fine"}, {"text": "dull film"}], labels="masked", mask_share=0.01)
    assert (few.labels != -100).sum(1).tolist() == [1, 1]


def test_no_piece_of_a_training_text_is_a_test_sample(folder):
    lengths = [4 if i % 3 else 26 for i in range(len(texts.WORDS))]  # one piece of three tokens, or nine
    rows = [
        {"text": " ".join([word] * n), "shop": word} for word, n in zip(texts.WORDS, lengths, strict=True)
    ]
    pool = loaded(folder, rows, "gpt", labels="next", length=2, test_share=0.3, client="shop")
    train, test = set(pool.inputs[pool.train].ravel()), set(pool.inputs[pool.test].ravel())
    assert (train & test) <= {SEP}
    assert len(pool.test) + len(pool.train) == sum(1 if n == 4 else 9 for n in lengths)
    assert len(test - {SEP}) == 5
    words = {NUMBER[name]: i for i, name in enumerate(pool.origin_names)}
    np.testing.assert_array_equal(pool.origin, [words[row[0]] for row in pool.inputs.tolist()])


def test_a_column_of_groups_is_the_ground_truth_of_natural(folder, tmp_path):
    texts.save_rows(tmp_path / "rows" / "train.jsonl", texts.in_two_languages(60))
    given = {"path": str(tmp_path / "rows"), "tokenizer": str(folder / "bert"), "client": "shop"}
    config = DataConfig(
        cache=str(tmp_path / "cache"),
        source=HuggingFace(**given, group="language"),
        scenario=SCENARIOS["natural"](min_samples=1),
    )
    np.testing.assert_array_equal(open_federation(config, 0).groups, [0, 0, 0, 1, 1, 1])
    with pytest.raises(UserError, match="client shop 0 is in several groups"):
        HuggingFace(**given, group="label").load(Path(), tmp_path)
    with pytest.raises(UserError, match="needs client, too"):
        HuggingFace(**(given | {"client": None}), group="label")


@pytest.mark.parametrize("kind", ["csv", "parquet", "one file"])
def test_other_files_give_the_same_samples(folder, tmp_path, kind):
    import pandas as pd

    rows = texts.reviews(20)
    frame = pd.DataFrame(rows)
    pool = loaded(folder, rows)
    path = tmp_path
    if kind == "csv":
        frame.to_csv(tmp_path / "train.csv", index=False)
    elif kind == "parquet":
        frame.to_parquet(tmp_path / "train-00000.parquet")
    else:
        path = texts.save_rows(tmp_path / "any.jsonl", rows)
    other = HuggingFace(path=str(path), tokenizer=str(folder / "bert"), test_share=0.0).load(Path(), tmp_path)
    np.testing.assert_array_equal(other.inputs, pool.inputs)
    np.testing.assert_array_equal(other.labels, pool.labels)


def test_a_changed_tokenizer_prepares_the_data_again(tmp_path):
    texts.save_tokenizer(tmp_path / "bert")
    texts.save_rows(tmp_path / "rows" / "train.jsonl", texts.reviews(40))
    source = HuggingFace(path=str(tmp_path / "rows"), tokenizer=str(tmp_path / "bert"))
    config = DataConfig(cache=str(tmp_path / "cache"), source=source, scenario=SCENARIOS["iid"](clients=4))
    said: list[str] = []
    first = open_federation(config, 0, said.append).content
    assert open_federation(config, 0, said.append).content == first
    assert said.count("preparing huggingface") == 1
    texts.save_tokenizer(tmp_path / "bert", texts.WORDS[::-1])
    assert open_federation(config, 0, said.append).content["samples"] != first["samples"]
    assert said.count("preparing huggingface") == 2


def test_groups_rename_ordinary_tokens_alone(folder, tmp_path):
    texts.save_rows(tmp_path / "rows" / "train.jsonl", texts.reviews(80))
    source = HuggingFace(path=str(tmp_path / "rows"), tokenizer=str(folder / "bert"))
    for name in ("relations", "alphabets"):
        scenario = SCENARIOS[name](clients=4, groups=2, validation=0.0)
        config = DataConfig(cache=str(tmp_path / "cache"), source=source, scenario=scenario)
        federation = open_federation(config, 0)
        for k in range(4):
            x = federation.client(k).train.x.numpy()
            assert (x[:, 0] == CLS).all()
            assert ((x == SEP).sum(1) == 1).all()
            assert not (np.isin(x, [PAD, SEP])[:, 1:4]).any()  # texts have four words or more
        words = [np.unique(federation.client(k).train.x.numpy()) for k in (0, 3)]
        assert np.isin(words, range(5, V)).any()


REFUSED = {
    "no tokenizer": ({"labels": "next", "tokenizer": None}, "needs a tokenizer"),
    "pair without one": ({"second": "text", "tokenizer": None}, "needs a tokenizer"),
    "vocabulary": ({"vocabulary": 50}, "vocabulary of its own"),
    "label of next": ({"labels": "next", "label": "label"}, "has no effect under labels: next"),
    "share": ({"mask_share": 0.3}, "has no effect without labels: masked"),
    "no folder": ({"tokenizer": "nowhere"}, "there is no such folder"),
    "empty folder": ({"tokenizer": "rows"}, "holds no tokenizer of transformers"),
    "no column": ({"second": "title"}, "there is no such column"),
    "numbers": ({"inputs": "label", "labels": "next"}, "which is no text"),
    "no mask": ({"tokenizer": "gpt", "labels": "masked"}, "has no token for masks"),
    "no label": ({"label": None, "path": "plain"}, "labels: next or masked"),
    "too short": ({"length": 2}, "the tokenizer adds 2 tokens"),
    "tags of another length": ({"path": "tags"}, "row 1 has 1 tags for 2 words"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(folder, monkeypatch, case):
    options, message = REFUSED[case]
    texts.save_rows(folder / "rows" / "train.jsonl", texts.reviews(8))
    texts.save_rows(folder / "plain" / "train.jsonl", [{"text": "fine"}])
    texts.save_rows(folder / "tags" / "train.jsonl", [{"tokens": ["the", "room"], "ner_tags": [0]}])
    monkeypatch.chdir(folder)

    def read() -> None:
        source = HuggingFace(**({"path": "rows", "tokenizer": "bert"} | options))
        source.files(Path())
        source.load(Path(), folder)

    with pytest.raises(UserError, match=message) as found:
        read()
    assert "\n" not in str(found.value)


def test_a_scenario_of_images_names_the_option_that_fits(folder, tmp_path):
    texts.save_rows(tmp_path / "rows" / "train.jsonl", texts.reviews(40))
    source = HuggingFace(path=str(tmp_path / "rows"), tokenizer=str(folder / "bert"))
    scenario = SCENARIOS["rotated"](clients=8, angles=(0.0, 90.0), validation=0.3)
    config = DataConfig(cache=str(tmp_path / "cache"), source=source, scenario=scenario)
    advice = r"--data\.scenario '\{name: relations, clients: 8, validation: 0\.3\}'"
    with pytest.raises(UserError, match=advice):
        open_federation(config, 0)
