"""Descriptions of fields, read from the docstrings of their classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache


@cache
def meanings(cls: type) -> dict[str, str]:
    """Return the description of each field of a dataclass or named tuple, inherited fields included.

    Descriptions are read from the block `Attributes:` of the docstrings, in which an entry is `name: text` or
    `name, name: text`. A field without an entry gets the description of the field whose text names it.
    """
    names = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {*_fields(cls)}
    out: dict[str, str] = {}
    for base in cls.__mro__:
        found = _attributes(base)
        heads = [m for m in re.finditer(r"(?:^|(?<=\. ))(\w+(?:, \w+)*): ", found, re.MULTILINE)]
        heads = [m for m in heads if names.intersection(m[1].split(", "))]
        ends = [*(head.start() for head in heads[1:]), len(found)]
        for head, end in zip(heads, ends, strict=False):
            text = found[head.end() : end].split("\n")[0].strip()
            for name in () if text.startswith("see `") else head[1].split(", "):
                out.setdefault(name, text)
    for name in names - set(out):  # explained in the entry of another field
        near = next((f"see {other}: {text}" for other, text in out.items() if f"`{name}`" in text), "")
        out.update({name: near} if near else {})
    return {name: text for name, text in out.items() if name in names}


@cache
def _attributes(cls: type) -> str:
    """Return the block `Attributes:` of the docstring of a class itself, each entry on a line."""
    text = inspect.cleandoc(cls.__doc__ or "") if cls is not object else ""
    block = re.search(r"^Attributes:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\S)", block[1], flags=re.MULTILINE) if block else []
    return "\n".join(" ".join(entry.split()) for entry in entries)


def _fields(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple."""
    return tuple(getattr(cls, "_fields", ()))
