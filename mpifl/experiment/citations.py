"""The papers behind a configuration as BibTeX entries: of its method, policy, codec, model, data and more."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from mpifl.core.errors import name_of
from mpifl.core.options import Options

ENTRIES = Path(__file__).parents[1] / "papers.bib"


def entry(paper: str, cls: type | None = None) -> str:
    """Return a BibTeX entry.

    Args:
        paper: its key in `papers.bib`, of mpifl or beside the module of a class; or an entry; empty for none.
        cls: the class; None for one of mpifl.
    """
    found = _entries(ENTRIES).get(paper)
    if found is not None or cls is None or not paper or paper.startswith("@"):
        return found or paper
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    beside = Path(file).with_name(ENTRIES.name) if file else ENTRIES
    return _entries(beside).get(paper, paper) if beside.is_file() else paper


@cache
def _entries(file: Path) -> dict[str, str]:
    """Return key -> entry of a file of BibTeX entries."""
    blocks = re.split(r"\n(?=@)", "\n" + file.read_text(encoding="utf-8"))[1:]
    return {re.split("[{,]", block, maxsplit=2)[1].strip(): block.strip() for block in blocks}


def cited(configurations: Iterable[Any]) -> str:
    """Return the entries of all that configurations use, each once, after a line that says what uses it.

    Args:
        configurations: objects of `Config`.
    """
    users: dict[str, dict[str, None]] = {}
    for config in configurations:
        pre_trains = config.algorithm.auxiliary() is not None
        for user, paper, cls in _papers(config, ""):
            if user.startswith("data.public") and not pre_trains:
                continue  # a default without effect
            users.setdefault(entry(paper, cls), {})[user] = None
    return "\n\n".join(f"% {', '.join(some)}\n{text}" for text, some in users.items())


def _papers(section: Any, path: str) -> Iterator[tuple[str, str, type]]:
    """Yield what uses each paper (`policy buffer`), its key or entry, and the class; the method first."""
    for field in sorted(fields(section), key=lambda f: f.name != "algorithm"):
        value, place = getattr(section, field.name), f"{path}.{field.name}".lstrip(".")
        if isinstance(value, Options):
            yield from ((f"{place} {name_of(value)}", paper, type(value)) for paper in value.papers())
            yield from _papers(value, place)
