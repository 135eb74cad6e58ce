"""Every option refuses the values that its type rules out, in files and in Python."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt, MaxLen, MinLen, MultipleOf
from support.each import check_each, for_each

from mpifl.core.algorithm import Algorithm
from mpifl.core.errors import UserError
from mpifl.core.options import (
    Options,
    bounds_text,
    check_values,
    choices_of,
    is_union,
    type_text,
    types_of,
    without_bounds,
)
from mpifl.experiment.loader import from_tree
from mpifl.experiment.schema import CHOICES, Config
from mpifl.experiment.table_layout import Figure


def sections(cls: type, path: str) -> Iterator[tuple[type, str]]:
    """Yield every dataclass of the configuration, and a path at which its options may stand."""
    yield cls, path
    for name, hint in types_of(cls).items():
        at = f"{path}.{name}".lstrip(".")
        for chosen in CHOICES.get((cls, name), {}).values():
            yield from sections(chosen, at)
        kinds = (hint, *get_args(without_bounds(hint)[0]))
        inner = [one for one in kinds if isinstance(one, type) and dataclasses.is_dataclass(one)]
        if (cls, name) not in CHOICES and inner:
            yield from sections(inner[0], at)


EVERY = [*dict(sections(Config, "")).items()]


def values(hint: Any) -> tuple[list[Any], list[Any]]:
    """Return values just outside the bounds of a type, and the values at its bounds that it includes."""
    hint, bounds = without_bounds(hint)
    if is_union(hint):
        return values(get_args(hint)[0])
    if get_origin(hint) is tuple and not bounds and get_args(hint)[-1] is Ellipsis:
        bad, good = values(get_args(hint)[0])
        return [(one,) for one in bad], [(one,) for one in good]
    if get_origin(hint) is Literal:
        return ["none of them", 1], [*get_args(hint)]
    bad: list[Any] = []
    good: list[Any] = []
    for bound in bounds:
        match bound:
            case Gt(low):
                bad.append(low)
            case Ge(low):
                bad.append(low - 1 if hint is int else math.nextafter(low, -math.inf))
                good.append(low)
            case Lt(high):
                bad.append(high)
            case Le(high):
                bad.append(high + 1 if hint is int else math.nextafter(high, math.inf))
                good.append(high)
            case MinLen(1):
                bad.append("" if hint is str else {} if get_origin(hint) is dict else ())
    others = ["seven", None, *([math.nan] if bounds else [])] if hint in (int, float) else []
    return [*bad, *others], good


CASES = [
    (f"{cls.__name__}.{name}", (cls, path, name, hint))
    for cls, path in EVERY
    for name, hint in types_of(cls).items()
    if any(values(hint))
]
WANTED: Mapping[Any, Any] = {
    Algorithm: "fedavg",
    Any: "mlp",
    str: "x",
    float: 1.0,
    dict[str, Figure]: {"ARI": {"of": "ari"}},
    dict[str, dict[str, Any]]: {"IFCA": {"local.lr": [0.1]}},
}


def options(cls: type, name: str, value: Any) -> dict[str, Any]:
    """Return one option, and those that have no default."""
    wanted = [f for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory]
    return {**{f.name: WANTED[without_bounds(types_of(cls)[f.name])[0]] for f in wanted}, name: value}


def test_there_are_many_options_with_bounds():
    assert len(CASES) > 150


def refuses_what_is_outside(cls: type, path: str, name: str, hint: Any) -> None:
    """Check the values of an option in a file and in Python."""
    bad, good = values(hint)
    for value in bad:
        if value is None and is_union(hint):
            continue
        with pytest.raises(UserError) as error:
            from_tree(cls, options(cls, name, value), path)
        assert error.value.key == f"{path}.{name}".lstrip(".")
        with pytest.raises(UserError) as error:
            cls(**options(cls, name, value))
        assert error.value.key == name
        assert error.value.remedy
    for value in good:
        check_values(cls, {name: value})


def test_every_option_refuses_values_just_outside_its_bounds():
    check_each(refuses_what_is_outside, CASES)


def test_every_section_checks_itself_and_keeps_the_bounds_of_its_base():
    for cls, _ in EVERY:
        assert issubclass(cls, Options), cls
        for base in filter(dataclasses.is_dataclass, cls.__mro__[1:]):
            for name, hint in types_of(base).items():
                bounded = without_bounds(hint)[1] or choices_of(hint)
                assert not bounded or types_of(cls)[name] == hint, f"{cls.__name__}.{name}"


@for_each(
    ("hint", "text"),
    [
        (Annotated[float, Gt(0)], "float > 0"),
        (Annotated[int, Ge(2)] | None, "int >= 2 or null"),
        (Annotated[float, Lt(3)], "float < 3"),
        (Annotated[float, Le(0.5)], "float <= 0.5"),
        (Annotated[float, Interval(gt=0, le=1)], "float in (0, 1]"),
        (Annotated[float, Interval(ge=0, lt=math.inf)], "float >= 0 finite"),
        (Annotated[int, Interval(ge=2), MultipleOf(2)], "int >= 2 a multiple of 2"),
        (tuple[Annotated[float, Gt(0)], ...], "list of float > 0"),
        (tuple[int, int, int], "list of 3 int"),
        (Annotated[str, MinLen(1), MaxLen(1)], "str not empty of length 1 or less"),
        (dict[str, Any], "mapping"),
    ],
)
def test_a_type_in_words(hint, text):
    assert type_text(hint) == text


def test_choices_are_found_inside_other_types():
    assert choices_of(tuple[Literal["a", "b"], ...] | None) == ("a", "b")
    assert choices_of(str) == ()
    assert bounds_text(()) == ""


@dataclasses.dataclass(frozen=True)
class Some(Options):
    shares: tuple[Annotated[float, Gt(0)], ...] = ()
    words: tuple[Literal["a", "b"], ...] = ()
    pair: tuple[int, int] = (0, 0)
    size: Annotated[int, Ge(1)] | None = None
    mode: Literal["a", "b"] | None = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shares": (1.0, 0.0)}, "shares = [1.0, 0.0]: each must be above 0"),
        ({"words": ["c"]}, "words = ['c']: use some of a, b"),
        ({"words": "a"}, "words = 'a': must be a list"),
        ({"pair": (1,)}, "pair = [1]: must be a list of 2 values"),
        ({"size": 0}, "size = 0: must be 1 or more, or null"),
        ({"size": True}, "size = True: must be of type int, or null"),
        ({"mode": "c"}, "mode = 'c': use one of a, b, or null"),
    ],
)
def test_a_message_names_key_value_and_remedy(given, message):
    with pytest.raises(UserError) as error:
        Some(**given)
    assert str(error.value) == message


@dataclasses.dataclass(frozen=True)
class Plain:
    size: Annotated[int, Ge(1)] = 1


def test_the_options_of_a_plain_dataclass_are_checked_in_files():
    with pytest.raises(UserError, match=r"model\.size = 0: must be 1 or more"):
        from_tree(Plain, {"size": 0}, "model")


OTHER_SUBJECT = {  # they share words with an option, and have another meaning
    ("PFedMe", "OPTIMIZERS"),
    ("HuggingFace", "readable_labels"),  # what numbers can be read as; texts have other words
    *(("Regression", name) for name in ("METRICS", "metrics", "known")),
}


def test_the_words_of_an_option_are_the_keys_of_the_dictionary_they_choose_from():
    """A dictionary or tuple beside the class that has two of the words has all of them and no other."""
    compared = set()
    for cls in {base for one, _ in EVERY for base in one.__mro__ if dataclasses.is_dataclass(base)}:
        places = {**vars(sys.modules[cls.__module__]), **vars(cls)}
        places.pop("__builtins__", None)
        for option, words in ((name, {*choices_of(hint)}) for name, hint in types_of(cls).items()):
            for name, known in places.items():
                if isinstance(known, (Mapping, tuple)) and all(isinstance(key, str) for key in known):
                    common = words.intersection(known)
                    if len(common) > 1 and (cls.__name__, name) not in OTHER_SUBJECT:
                        assert {*known} == words, f"{cls.__name__}.{option} and {name}"
                        compared.add((cls.__name__, option, name))
    assert len(compared) > 15
    assert {("FLT", "distance", "DISTANCES"), ("Regression", "criterion", "CRITERIA")} <= compared
