"""Values as bytes and back, and digests of values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from mpifl.core.packed import Damaged, NotPackable, digest, packed, unpacked


def test_values_come_back_with_their_types():
    rows = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    value = {
        "numbers": (1, 2.5, float("nan"), True, None, "text"),
        "list": [np.int64(3), np.float32(0.1), np.array([[True, False]]), np.zeros((0, 2))],
        ("up", "embedding", 3): {"row": rows[1], "twice": rows, "again": rows},
        "equal rows": torch.ones(4)[None].expand(1000, -1),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
    }
    back = unpacked(packed(value))
    assert list(back) == list(value)
    assert repr(back["numbers"]) == repr(value["numbers"])
    for one, other in zip(back["list"], value["list"], strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    exchanged = back["up", "embedding", 3]
    torch.testing.assert_close(exchanged["row"], rows[1], rtol=0, atol=0)
    assert exchanged["twice"] is exchanged["again"], "one tensor stays one"
    assert back["equal rows"].shape == (1000, 4)
    assert back["equal rows"].stride(0) == 0
    assert len(packed(value["equal rows"])) < 500, "stored once"
    assert back["scalar"].dtype == torch.float64
    assert back["scalar"].shape == ()


def test_tensors_that_the_reader_has_are_not_stored():
    w, other = torch.randn(1000), torch.randn(1000)
    small, back = packed({"w": w, "of": other}, [w]), torch.zeros(1000)
    assert 4000 < len(small) < 5000
    found = unpacked(small, known=[back])
    assert found["w"] is back
    torch.testing.assert_close(found["of"], other, rtol=0, atol=0)


def test_what_is_cut_or_changed_is_not_read():
    data = packed({"w": torch.ones(9)})
    changed = bytearray(data)
    changed[-1] ^= 1
    for wrong in (b"", data[:20], data[:-1], bytes(changed)):
        with pytest.raises(Damaged):
            unpacked(wrong)


@pytest.mark.parametrize("value", [object(), np.array(["a"]), {1, 2}, torch.ones(2, dtype=torch.bfloat16)])
def test_other_values_are_refused(value):
    with pytest.raises(NotPackable):
        packed([value])


def test_digests_differ_where_values_do():
    values = [
        *(0, 0.0, False, None, "0", (), [0], [[0]], [0, 0], {"a": 0}, {"b": 0}, Fraction(1, 2), b"0"),
        *(np.zeros(1), np.zeros((1, 1)), np.zeros(1, np.float32), np.zeros(8, np.uint8), np.float64(0)),
        *(torch.zeros(2), torch.zeros(2, 1), torch.zeros(3), np.nan, ["ab", "c"], ["a", "bc"]),
    ]
    assert len({digest(value) for value in values}) == len(values)
    w = torch.arange(6.0).reshape(2, 3)
    assert digest(w.t()) == digest(w.t().contiguous())
    with pytest.raises(NotPackable):
        digest(object())
