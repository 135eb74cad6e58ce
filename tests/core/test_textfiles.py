"""Texts of users and of other programs: every string of JSON can be written, scalars of YAML are texts."""

from __future__ import annotations

import errno
import json
import os

import pytest

from mpifl.core.errors import UserError
from mpifl.core.textfiles import RepeatedKey, is_file, json_file, json_mapping, json_of, yaml_of, yaml_text

LONE = {  # texts in which a string holds half of a pair of surrogates
    "high": r'{"a": ["\ud800"]}',
    "low": r'{"a": "\udcff"}',
    "key": r'{"x\uD83Dy": 1}',
    "low before high": r'["\ude00\ud83d"]',
    "high, then a pair": r'["\ud83d\ud83d\ude00"]',
    "after an escaped backslash": r'["\\\ud800"]',
    "bytes": b'["\xed\xa0\x80"]',
}
WHOLE = {  # texts that look like it
    "pair": r'["\ud83d\ude00"]',
    "two pairs": r'["\ud83d\ude00\ud83d\ude00"]',
    "escaped backslash": r'["\\ud800"]',
    "bytes": '["\u00e9\U0001f600"]'.encode(),
    "byte order mark": b'\xef\xbb\xbf["x"]',
}


@pytest.mark.parametrize("text", LONE.values(), ids=LONE.keys())
def test_half_a_pair_of_surrogates_is_no_text(text):
    with pytest.raises(ValueError, match=r"surrogate|codec can't decode"):
        json_of(text)


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE.keys())
def test_whole_pairs_and_escaped_backslashes_are_read_as_by_json(text):
    assert json_of(text) == json.loads(text)
    json.dumps(json_of(text), ensure_ascii=False).encode()


def test_a_json_file_with_half_a_pair_is_refused_by_its_key(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text(LONE["high"])
    with pytest.raises(UserError, match=r"RUN = '.*summary\.json': is not JSON: .*surrogate"):
        json_file(file, "RUN")


TWICE = ['{"a": 1, "a": 2}', '[{"b": {"a": [1], "x": 0, "a": [1]}}]', r'{"a": 1, "\u0061": 1}']


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_stands_twice_in_an_object_of_json_is_refused(tmp_path, text):
    """As in YAML, at any depth, however it is written, and though both values are equal."""
    with pytest.raises(RepeatedKey, match="the key 'a' appears twice"):
        json_of(text)
    file = tmp_path / "summary.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"RUN = '.*summary\.json': the key 'a' appears twice"):
        json_file(file, "RUN")
    assert json_mapping(file) == {}
    assert json_of('[{"a": 1, "b": {"a": 2}}, {"a": 3}]') == [{"a": 1, "b": {"a": 2}}, {"a": 3}]


def test_scalars_of_yaml_are_texts_as_they_are_written_except_null():
    """Keys, too; what `yaml_text` writes of texts, and of values of Python, gives the same texts again."""
    text = "- 1.10\n- {1_000: 0x10, on: no, 3: 2024-05-01, d: 12:30}\n- [~, null, '', 'null', '1', .inf]\n-\n"
    tree = yaml_of(text, "k", text)
    assert tree == [
        "1.10",
        {"1_000": "0x10", "on": "no", "3": "2024-05-01", "d": "12:30"},
        [None, None, "", "null", "1", ".inf"],
        None,
    ]
    assert yaml_of(yaml_text(tree), "k", text) == tree
    assert yaml_text({"a": ["1.10", "null", None]}) == "a:\n- 1.10\n- 'null'\n- null\n"
    assert yaml_of(yaml_text({"a": (1, 0.5, True)}), "k", text) == {"a": ["1", "0.5", "true"]}
    assert yaml_of("[1.10, on, '1']", "k", text, typed=True) == [1.1, True, "1"]


def test_a_file_in_a_closed_folder_is_not_called_missing(monkeypatch):
    """Root may look into all folders, so the system call is told to refuse."""

    def refuse(*_) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    assert is_file(__file__, "CONFIG")
    assert not is_file("nowhere.yaml", "CONFIG")
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError) as refused:
        is_file("closed/a.yaml", "CONFIG")
    assert (refused.value.key, refused.value.value) == ("CONFIG", "closed/a.yaml")
