"""JSON of users and of other programs: every string that is read can be written and printed."""

from __future__ import annotations

import json

import pytest

from mpifl.core.errors import UserError
from mpifl.core.textfiles import json_file, json_of

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
    assert json_file(file, "RUN", escapes=True) == {"a": [r"\ud800"]}
    file.write_text('{"\\udcff": {"n": 1, "t": "\\ud83d\\ude00", "l": ["x", null, "\\udcff"]}}')
    whole = {"n": 1, "t": "\U0001f600", "l": ["x", None, r"\udcff"]}
    assert json_file(file, "RUN", escapes=True) == {r"\udcff": whole}
