"""Every number of every method, scenario, source and model, as large as no machine can serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from malformed.case import CONFIG, Case
from malformed.configurations import leaves, run, value_at, with_value, written

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES
from mpifl.experiment.loader import load, to_tree
from mpifl.models import MODELS

LARGE = (2**31, 10**15)
SECTIONS = {"algorithm": CATALOGUE, "data.scenario": SCENARIOS, "data.source": SOURCES, "model": MODELS}
WORLDS = (  # what a named choice may need beside it
    [],
    ["--data.scenario", "{name: iid, clients: 4}", "--model", "mlp"],
    ["--data.scenario", "{name: iid, clients: 4}", "--data.source", "{name: generated, kind: tokens}"],
)


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases: all there are, whatever the seed and the count."""
    number = 0
    for label, section, tree in _trees():
        for path in leaves(tree):
            value = value_at(tree, path)
            if not ".".join(path).startswith(section) or not _is_number(value):
                continue
            for large in LARGE:
                place, number = folder / str(number), number + 1
                place.mkdir()
                new = [large] * len(value) if isinstance(value, list | tuple) else large
                (place / "input.yaml").write_text(written(with_value(tree, path, new)))
                yield run(f"{label}: {'.'.join(path)} = {large}", place / "input.yaml")


def _trees() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the whole configuration, then every section with each of its choices."""
    yield "run", "", to_tree(load(str(CONFIG), []))
    for section, choices in SECTIONS.items():
        for name in choices:
            for world in WORLDS:
                try:
                    yield name, section, to_tree(load(str(CONFIG), [*world, f"--{section}", name]))
                    break
                except UserError:
                    continue  # it does not fit beside the others, or has fields without defaults


def _is_number(value: Any) -> bool:
    """Return whether a large number may stand in place of a value: a number, numbers, or nothing."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(_is_number(v) and v is not None for v in value)
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
