"""Texts become what the type of an option says: each way of writing a value is decided once."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge
from support.each import for_each

from mpifl.core.conversion import converted, untyped
from mpifl.core.errors import UserError
from mpifl.core.units import ENDINGS

WRONG = object()
READ = {  # text -> as int, as float, as bool, as what it looks like; WRONG: refused
    "10": (10, 10.0, WRONG, 10),
    "+7": (7, 7.0, WRONG, 7),
    "-0": (0, 0.0, WRONG, 0),
    "10_000": (10000, 10000.0, WRONG, 10000),
    "0x10": (16, 16.0, WRONG, 16),
    "0b11": (3, 3.0, WRONG, 3),
    "0o17": (15, 15.0, WRONG, 15),
    "012": (WRONG, 12.0, WRONG, 12.0),
    "1__0": (WRONG, WRONG, WRONG, "1__0"),
    "1.10": (WRONG, 1.1, WRONG, 1.1),
    ".5": (WRONG, 0.5, WRONG, 0.5),
    "1e-3": (WRONG, 0.001, WRONG, 0.001),
    "1.5E+3": (WRONG, 1500.0, WRONG, 1500.0),
    "1_0.5": (WRONG, 10.5, WRONG, 10.5),
    "yes": (WRONG, WRONG, True, True),
    "On": (WRONG, WRONG, True, True),
    "TRUE": (WRONG, WRONG, True, True),
    "no": (WRONG, WRONG, False, False),
    "off": (WRONG, WRONG, False, False),
    "false": (WRONG, WRONG, False, False),
    "y": (WRONG, WRONG, WRONG, "y"),
    "": (WRONG, WRONG, WRONG, ""),
    "null": (WRONG, WRONG, WRONG, "null"),
    "nan": (WRONG, WRONG, WRONG, "nan"),
    ".inf": (WRONG, WRONG, WRONG, ".inf"),
    "1e400": (WRONG, WRONG, WRONG, "1e400"),
    "9" * 5000: (WRONG, WRONG, WRONG, "9" * 5000),
    "2024-05-01": (WRONG, WRONG, WRONG, "2024-05-01"),
    "12:30": (WRONG, WRONG, WRONG, "12:30"),
    "\u0663": (WRONG, WRONG, WRONG, "\u0663"),
    "20ms": (WRONG, WRONG, WRONG, "20ms"),
}


@for_each("text", READ, ids=lambda text: text[:12] or "empty")
def test_a_text_is_read_by_the_type_of_its_option(text):
    *typed, looks = READ[text]
    for kind, wanted in zip((int, float, bool), typed, strict=True):
        if wanted is WRONG:
            with pytest.raises(
                UserError, match=rf"^k = .*: must be (of type {kind.__name__}|a finite number)$"
            ):
                converted(kind, text, "k")
        else:
            found = converted(kind, text, "k")
            assert (found, type(found)) == (wanted, kind)
            assert converted(Annotated[kind, Ge(0)] | None, text, "k") == wanted
    assert converted(str, text, "k") == converted(object, text, "k") == text
    assert converted(Literal["a"], text, "k") == text  # `check_values` knows the choices
    assert (untyped(text), type(untyped(text))) == (looks, type(looks))
    assert converted(dict[str, Any], {"3": [text, {"x": text}]}, "k") == {"3": [looks, {"x": looks}]}


def test_an_integer_beyond_any_float_looks_like_a_text():
    assert untyped("9" * 400) == "9" * 400
    with pytest.raises(UserError, match="is too large"):
        converted(int, "9" * 400, "k")


@for_each(
    ("kind", "value", "wanted"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (str, 7, "7"),
        (str, 1.5, "1.5"),
        (int | None, None, None),
        (tuple[int, ...], ["1", 2], (1, 2)),
        (tuple[float, int], ("1", "2"), (1.0, 2)),
        (dict[str, float], {1: "2"}, {"1": 2.0}),
        (list, ["1", "on"], [1, True]),
        (int, True, WRONG),
        (float, False, WRONG),
        (str, True, WRONG),
        (bool, 1, WRONG),
        (int, 2.0, WRONG),
        (int, None, WRONG),
        (str, None, WRONG),
        (str, ["a"], WRONG),
        (str, "a\tb", WRONG),
        (float, math.nan, WRONG),
        (float, 10**400, WRONG),
        (int, 2**63, WRONG),
        (int, "9223372036854775808", WRONG),
        (tuple[int, ...], "1", WRONG),
        (tuple[int, ...], ["1.5"], WRONG),
        (tuple[float, int], ["1"], WRONG),
        (dict[str, float], ["1"], WRONG),
        (list, "1", WRONG),
    ],
)
def test_values_of_python_and_containers(kind, value, wanted):
    if wanted is WRONG:
        with pytest.raises(UserError, match=r"^k = "):
            converted(kind, value, "k")
    else:
        found = converted(kind, value, "k")
        assert (found, type(found)) == (wanted, type(wanted))


def test_a_number_may_have_the_unit_of_its_option():
    """A whole number stays exact where a fraction of Python would not."""
    seconds, size = ENDINGS["_s"], ENDINGS["bytes"]
    assert converted(float, "20ms", "k", seconds) == 0.02
    assert converted(tuple[float, ...] | None, ["1min", "2"], "k", seconds) == (60.0, 2.0)
    assert converted(int, "2kB", "k", size) == 2000
    assert converted(int, "9007199254740993", "k", size) == 2**53 + 1
    for kind, text, match in (
        (int, "1bit", "must be a whole number of bytes"),
        (float, "1Mb", "can be bits or bytes"),
        (float, "yes", "is not a number; seconds are asked"),
        (bool, "1s", "must be of type bool"),
    ):
        with pytest.raises(UserError, match=match):
            converted(kind, text, "k", size if kind is int else seconds)


@for_each(
    ("hint", "value", "list_of_it"),
    [
        (tuple[str, ...], "sold", ": [sold]"),
        (tuple[float, ...], "4", ": [4]"),
        (tuple[float, ...] | None, 4, ": [4]"),
        (tuple[int, ...], "4, 8", ": [4, 8]"),
        (tuple[object, ...], "mine.py:Echo", ": [mine.py:Echo]"),
        (tuple[float, ...], "sold", ""),
        (tuple[str, ...], "a: b", ""),
        (tuple[Literal["a"], ...], "b", ""),
        (tuple[int, int], "4", ""),
        (tuple[str, ...], {"a": "b"}, ""),
    ],
)
def test_a_value_in_place_of_a_list_is_shown_as_a_list_if_it_fits(hint, value, list_of_it):
    with pytest.raises(UserError) as error:
        converted(hint, value, "k")
    assert error.value.remedy == f"must be a list{list_of_it}"


def test_a_time_in_place_of_a_list_keeps_its_unit():
    with pytest.raises(UserError) as error:
        converted(tuple[float, ...], "4 min", "k", ENDINGS["_s"])
    assert error.value.remedy == "must be a list: [4 min]"
