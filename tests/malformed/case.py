"""A case of malformed input, and the mutations that make it. Every draw comes from a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSED, EITHER = (2,), (0, 2)
CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
CONFIGS = Path(__file__).parents[2] / "configs"

NASTY: Sequence[Any] = (
    *(None, True, -1, 0, 3, 1.5, -0.5, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 1e-308),
    *(
        2**31,
        2**62,
        2**63,
        -(2**63),
        10**400,
        "",
        "x",
        "x" * 300,
        "a\0b",
        "a\nb",
        "\ud800",
        "../x",
        "/",
        "nan",
    ),
    *("1e400", "é", "~", "null", "2024-99-99", "12:30", "a.py:X", "no.such:X", "os:getcwd", ":", "/dev/zero"),
    *([], [[]], [1, 2, 3], ["x"], [None], [float("nan")], [-1], {}, {"name": "x"}, {"name": []}, {1: 2}),
)
NUMBERS = (-1, 0, 1, 2, 7, -0.5, 0.5, 1.5, 1000, 1e-308, 1e15, 1e308, 2**31, 2**62)


def fitting(value: Any, rng: random.Random) -> Any:
    """Return something else in place of a value: mostly of its own kind, so that it gets farther."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if rng.random() < 0.3 or not (numeric or isinstance(value, (tuple, list))):
        return rng.choice(NASTY)
    if numeric:
        number = rng.choice(NUMBERS)
        return int(number) if isinstance(value, int) and abs(number) < 2**63 else number
    return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, len(value), 7)))]


@dataclass(frozen=True)
class Case:
    """One command on malformed input.

    Attributes:
        name: what is wrong.
        argv: of `mpifl`.
        codes: exit codes that are right; 0 is among them where the mutation may have left the input valid.
        trains: train what is accepted; otherwise an accepted run ends where its training would begin.
        variables: of the environment.
    """

    name: str
    argv: Sequence[str]
    codes: Sequence[int] = EITHER
    trains: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def mutated_bytes(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return what was done to some bytes, and the result."""
    at = rng.randrange(len(data)) if data else 0
    few = rng.randbytes(rng.choice((1, 4, 40)))
    changes: dict[str, Callable[[], bytes]] = {
        "bit flipped": lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        "byte replaced": lambda: data[:at] + few[:1] + data[at + 1 :],
        "bytes inserted": lambda: data[:at] + few + data[at:],
        "bytes removed": lambda: data[:at] + data[at + len(few) :],
        "truncated": lambda: data[:at],
        "head replaced": lambda: few + data[len(few) :],
        "head flipped": lambda: bytes([data[0] ^ 1 << rng.randrange(8)]) + data[1:],
        "repeated": lambda: data + data[at:],
        "zeros": lambda: data[:at] + bytes(len(data) - at),
        "noise": lambda: rng.randbytes(len(data)),
        "empty": lambda: b"",
    }
    what = rng.choice([*changes]) if data else "empty"
    return f"{what} at {at}", changes[what]()


def mutated_text(text: str, rng: random.Random) -> tuple[str, str]:
    """Return what was done to some lines of text, and the result."""
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line = lines[at]
    place = rng.randrange(len(line))
    odd = rng.choice(
        [*"{}[]:,-?&*!|>%@`\"'#~ \t\0\r\x07\ufeff0", "\n", "\n\n", "<<: ", "!!", "- ", "é", "\u2028"]
    )
    value = rng.choice(
        ("", "~", "-1", "0", "1.5", ".nan", ".inf", "1e999", "9" * 400, "x" * 300, "[]", "{}", "010")
    )
    changes: dict[str, Callable[[], list[str]]] = {
        "character inserted": lambda: [*lines[:at], line[:place] + odd + line[place:], *lines[at + 1 :]],
        "character removed": lambda: [*lines[:at], line[:place] + line[place + 1 :], *lines[at + 1 :]],
        "line twice": lambda: [*lines[: at + 1], *lines[at:]],
        "line removed": lambda: [*lines[:at], *lines[at + 1 :]],
        "line indented": lambda: [*lines[:at], "  " + line, *lines[at + 1 :]],
        "line cut": lambda: [*lines[:at], line[:place]],
        "lines swapped": lambda: [*lines[at:], *lines[:at]],
        "value replaced": lambda: [*lines[:at], f"{line.partition(':')[0]}: {value}\n", *lines[at + 1 :]],
    }
    what = rng.choice([*changes])
    return f"{what} in line {at + 1}", "".join(changes[what]())
