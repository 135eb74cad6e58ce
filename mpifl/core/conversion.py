"""Texts of configuration files and of the command line, read as the types of options say.

A number, a truth and a unit are recognised only where the type asks for one: a label `1.10` stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args, get_origin

from .errors import UserError, require
from .options import fault_of, is_union, without_bounds
from .units import Unit, quantity

MAX_INTEGER = 2**63 - 1
PLAIN = re.compile(r"[\w./+-]+((:|, ?| )[\w./+-]+)*")  # values that need no quotes inside a list
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def converted(
    hint: Any,
    value: Any,
    key: str,
    unit: Unit | None = None,
    section: Callable[[type, Any, str], Any] | None = None,
) -> Any:
    """Return a value as its type has it: a text becomes a number, a truth or a word.

    A value of type `Any` becomes what it looks like, one of type `object` stays as it is. Bounds and choices
    are not checked here (`check_values`).

    Args:
        hint: the type.
        value: null, texts, lists and mappings of a file, or values from Python.
        key: the key, for messages.
        unit: unit of numbers; None for none.
        section: returns the object of a dataclass, given the class, its value and its key.

    Raises:
        UserError: it has another type, is not finite, too large, or not printable.
    """
    hint, _ = without_bounds(hint)
    origin, args = get_origin(hint), get_args(hint)
    inside = partial(converted, unit=unit, section=section)
    if hint is object or origin is Literal:
        return value
    if hint is Any:
        return untyped(value)
    if is_union(hint):
        kind = next(arg for arg in args if arg is not type(None))
        return None if value is None and type(None) in args else inside(kind, value, key)
    if section is not None and dataclasses.is_dataclass(hint):
        return section(hint, value, key)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(key, value, f"must be a list{_as_list(args, value, inside)}")
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        require(len(kinds) == len(value), key, value, f"must be a list of {len(kinds)} values")
        return tuple(inside(kind, one, key) for kind, one in zip(kinds, value, strict=True))
    if origin is dict:
        require(isinstance(value, Mapping), key, value, "must be a mapping")
        return {str(name): inside(args[1], one, f"{key}.{name}") for name, one in value.items()}
    if hint in (int, float, bool, str):
        return _scalar(hint, value, key, unit)
    kind, found = origin or hint, untyped(value)
    fits = not isinstance(kind, type) or isinstance(found, kind)
    require(fits, key, found, f"must be of type {getattr(kind, '__name__', kind)}")
    return found


def _as_list(args: tuple[Any, ...], value: Any, inside: Callable[[Any, Any, str], Any]) -> str:
    """Return how a list with one value is written, such as `: [4]`; empty if the value fits no list.

    Args:
        args: the types of the list's values.
        value: what was given in place of a list.
        inside: converts a value, given its type, itself and its key.
    """
    written = str(value)
    if args[-1] is not Ellipsis or not PLAIN.fullmatch(written) or written in ("None", "null"):
        return ""
    fault = fault_of(args[0])
    with suppress(UserError):
        found = [inside(args[0], one.strip(), "") for one in written.split(",")]
        if fault is None or not any(map(fault, found)):
            return f": [{written}]"
    return ""


def _scalar(kind: type, value: Any, key: str, unit: Unit | None) -> Any:
    """Return a number, a truth or a text, see `converted`."""
    remedy = f"must be of type {kind.__name__}"
    if not isinstance(value, str):
        fits = isinstance(value, FROM_PYTHON[kind]) and isinstance(value, bool) == (kind is bool)
        quoted = "; quote it" if kind is str and isinstance(value, (list, dict)) else ""
        require(fits, key, value, remedy + quoted)
    try:
        found = FROM_TEXT[kind](value) if isinstance(value, str) else kind(value)
    except OverflowError:  # an integer of hundreds of digits
        found = math.inf
    except ValueError:
        if unit is None or not unit.dimension or kind is bool:
            raise UserError(key, value, remedy) from None
        found = quantity(value, unit, key)
        require(kind is float or found.is_integer(), key, value, f"must be a whole number of {unit.name}")
        found = kind(found)
    if kind is float:
        require(math.isfinite(found), key, value, "must be a finite number")
    elif kind is int:
        require(abs(found) <= MAX_INTEGER, key, value, f"is too large; use at most {MAX_INTEGER}")
    elif kind is str:
        require(found.isprintable(), key, found, "holds characters that cannot be printed; leave them out")
    return found


def _integer(text: str) -> int:
    if not text.isascii():
        raise ValueError(text)
    return int(text, 0)  # 10, 1_000, 0x10; no leading zeros, which are octal in some languages


def _number(text: str) -> float:
    try:
        return float(_integer(text))
    except ValueError:
        if not text.isascii():
            raise
        return float(text)


def _truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise ValueError(text)
    return TRUTHS[text.lower()]


FROM_TEXT: dict[type, Callable[[str], Any]] = {int: _integer, float: _number, bool: _truth, str: str}
FROM_PYTHON: dict[type, Any] = {int: int, float: (int, float), bool: bool, str: (int, float)}


def untyped(value: Any) -> Any:
    """Return a value whose texts, at any depth, have become what they look like: numbers, truths or words."""
    if isinstance(value, Mapping):
        return {name: untyped(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(untyped, value)]
    for read in (_integer, _number, _truth) if isinstance(value, str) else ():
        with suppress(ValueError, OverflowError):  # of an integer of hundreds of digits
            found = read(value)
            return found if math.isfinite(found) else value
    return value
