"""Options of the components of a configuration: their types say which values they take.

    lr: PositiveFloat = 0.01                                     # must be above 0
    beta: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1         # must be in [0, 0.5)
    optimizer: Literal["sgd", "adam"] = "sgd"                    # use one of sgd, adam
    clients: PositiveInt | None = None                           # must be 1 or more, or null

Objects check their values when they are made, from a file or in Python. The messages, the pages of
`mpifl show` and the JSON Schema are made of the same types. `__post_init__` checks relations between options.
`core.conversion` reads the texts of files and of the command line.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, GroupedMetadata, Gt, Interval, Le, Lt, MaxLen, MinLen, MultipleOf

from .errors import UserError

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitInterval = Annotated[float, Interval(ge=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
FinitePositive = Annotated[float, Interval(gt=0, lt=math.inf)]
FiniteNonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]


@dataclasses.dataclass(frozen=True)
class AtMostClients:
    """Marks the type of an option of a method that may not be larger than the number of clients."""


NumModels = Annotated[int, Ge(1), AtMostClients()]
NumModelsOrZero = Annotated[int, Ge(0), AtMostClients()]

NUMBERS = {int: Integral, float: Real}


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What the message says about other values, instead of the bounds or choices.

    Attributes:
        text: the remedy.
    """

    text: str


class Options:
    """A frozen dataclass whose fields are options; its objects check their values.

    A class with a `__post_init__` of its own calls that of this class first.

    Attributes:
        paper: where it was published, a key of `papers.bib` or a BibTeX entry; empty for nowhere.
    """

    paper: ClassVar[str] = ""

    def papers(self) -> tuple[str, ...]:
        """Return what is cited for this section under its options; see `paper`."""
        return (self.paper,) if self.paper else ()

    def __post_init__(self) -> None:
        """Raise `UserError` for a value that its type rules out."""
        check_values(type(self), vars(self))


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Return the keys of a section and their types, with bounds: the fields of its dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def check_values(cls: type, values: Mapping[str, Any]) -> None:
    """Check values of options against their types.

    Args:
        cls: the dataclass whose fields are the options.
        values: name of an option -> value; some may be missing.

    Raises:
        UserError: a value has another type, is none of the choices or lies outside the bounds.
    """
    for name, fault in _faults(cls):
        if name in values and (remedy := fault(values[name])):
            raise UserError(name, values[name], remedy)


@cache
def _faults(cls: type) -> list[tuple[str, Callable[[Any], str]]]:
    return [(name, fault) for name, hint in types_of(cls).items() if (fault := fault_of(hint)) is not None]


@cache
def fault_of(hint: Any) -> Callable[[Any], str] | None:
    """Return the function that says what is wrong with a value, '' for nothing; None if any value will do."""
    hint, bounds = without_bounds(hint)
    inner = _fault_inside(hint)
    remedy = next((bound.text for bound in bounds if isinstance(bound, Remedy)), "")
    outside = remedy or bounds_text(bounds)
    if not bounds:
        return inner

    def fault(value: Any) -> str:
        if inner is not None and (wrong := inner(value)):
            return wrong if wrong.startswith("must be of type") else remedy or wrong
        return "" if all(holds(bound, value) for bound in bounds) else outside

    return fault


def _fault_inside(hint: Any) -> Callable[[Any], str] | None:
    """Return `fault_of` a type without bounds of its own."""
    args = get_args(hint)
    if is_union(hint):
        return _fault_of_union(args)
    if get_origin(hint) is Literal:
        known = f"use one of {', '.join(word or repr(word) for word in args)}"
        return lambda value: "" if isinstance(value, str) and value in args else known
    if get_origin(hint) is tuple:
        return _fault_of_list(args)
    if hint in NUMBERS:
        number = NUMBERS[hint]
        wrong = f"must be of type {hint.__name__}"
        return lambda value: "" if isinstance(value, number) and not isinstance(value, bool) else wrong
    if hint in (str, bool):
        return lambda value: "" if isinstance(value, hint) else f"must be of type {hint.__name__}"
    return None


def _fault_of_union(args: Sequence[Any]) -> Callable[[Any], str] | None:
    """Return `fault_of` a type or null; any value fits other unions."""
    others = [arg for arg in args if arg is not type(None)]
    fault = fault_of(others[0]) if len(others) == 1 else None
    if fault is None:
        return None
    return lambda value: f"{wrong}, or null" if value is not None and (wrong := fault(value)) else ""


def _fault_of_list(args: Sequence[Any]) -> Callable[[Any], str] | None:
    """Return `fault_of` a list of values that have one type, of a fixed length unless it ends in `...`."""
    fault, size = fault_of(args[0]), None if args[-1] is Ellipsis else len(args)

    def wrong(value: Any) -> str:
        if not isinstance(value, (tuple, list)):
            return "must be a list"
        if size not in (None, len(value)):
            return f"must be a list of {size} values"
        found = next((text for one in value if fault is not None and (text := fault(one))), "")
        return f"each {found}" if found.startswith("must") else found.replace("use one of", "use some of")

    return wrong


# -- what a type says ----------------------------------------------------------------------------------------


@cache
def without_bounds(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its own bounds, and these bounds one by one."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    inner, *metadata = get_args(hint)
    groups = (one if isinstance(one, GroupedMetadata) else (one,) for one in metadata)
    return inner, tuple(bound for group in groups for bound in group)


def is_union(hint: Any) -> bool:
    """Return whether a type is a union, such as `int | None`."""
    return get_origin(hint) in (Union, types.UnionType)


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the words that a text may be, or that a list may hold; empty if it may be any."""
    hint, _ = without_bounds(hint)
    if get_origin(hint) is Literal:
        return get_args(hint)
    inside = get_args(hint) if is_union(hint) or get_origin(hint) is tuple else ()
    return next((found for one in inside if (found := choices_of(one))), ())


def holds(bound: Any, value: Any) -> bool:
    """Return whether a value respects a bound."""
    match bound:
        case Gt(gt):
            return bool(value > gt)
        case Ge(ge):
            return bool(value >= ge)
        case Lt(lt):
            return bool(value < lt)
        case Le(le):
            return bool(value <= le)
        case MinLen(least):
            return len(value) >= least
        case MaxLen(most):
            return len(value) <= most
        case MultipleOf(step):
            return bool(value % step == 0)
    return True


def bounds_text(bounds: Sequence[Any]) -> str:
    """Return what values must be, such as `must be in (0, 1]`; empty for no bounds."""
    words = [_range(bounds, ("above {}", "{} or more", "below {}", "{} or less")), *_other_bounds(bounds)]
    text = " and ".join(word for word in words if word)
    return f"must be {text}" if text else ""


def type_text(hint: Any) -> str:
    """Return a type in words, such as `float > 0 or null`."""
    hint, bounds = without_bounds(hint)
    words = [_plain_text(hint), _range(bounds, ("> {}", ">= {}", "< {}", "<= {}")), *_other_bounds(bounds)]
    return " ".join(word for word in words if word)


def _range(bounds: Sequence[Any], words: tuple[str, str, str, str]) -> str:
    """Return a range in words, empty for none; `words` are those of a bound alone: > x, >= x, < x, <= x."""
    low, high = _interval(bounds)
    if low and high:
        return f"in {low}, {high}"
    above, from_, below, to = words
    if low:
        return (above if low.startswith("(") else from_).format(low[1:])
    return (below if high.endswith(")") else to).format(high[:-1]) if high else ""


def _interval(bounds: Sequence[Any]) -> tuple[str, str]:
    """Return the ends of an interval, such as `(0` and `1]`; empty without an end."""
    low = high = ""
    for bound in bounds:
        match bound:
            case Gt(gt):
                low = f"({_digits(gt)}"
            case Ge(ge):
                low = f"[{_digits(ge)}"
            case Lt(lt) if lt < math.inf:
                high = f"{_digits(lt)})"
            case Le(le):
                high = f"{_digits(le)}]"
    return low, high


def _digits(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _other_bounds(bounds: Sequence[Any]) -> Iterator[str]:
    for bound in bounds:
        match bound:
            case Lt(math.inf):
                yield "finite"
            case MinLen(1):
                yield "not empty"
            case MinLen(least):
                yield f"of length {least} or more"
            case MaxLen(most):
                yield f"of length {most} or less"
            case MultipleOf(step):
                yield f"a multiple of {step}"


def _plain_text(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if is_union(hint):
        return " or ".join("null" if a is type(None) else type_text(a) for a in args)
    if origin is tuple:
        several = args[-1] is Ellipsis
        return f"list of {type_text(args[0])}" if several else f"list of {len(args)} {type_text(args[0])}"
    if origin is Literal:
        return "str"
    if dict in (hint, origin):
        return "mapping"
    if dataclasses.is_dataclass(hint):
        return "section"
    return "any" if hint is Any else getattr(hint, "__name__", str(hint))
