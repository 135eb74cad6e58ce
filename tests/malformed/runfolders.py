"""Malformed run folders: a right one, in which one file is changed, under each command that reads it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from malformed.case import CONFIG, NASTY, Case, mutated_bytes, mutated_text
from malformed.configurations import leaves, with_value, written
from malformed.tables import changed_cell

from mpifl.cli import main

READERS = (["compare"], ["report"], ["retime", "--network.name", "wired"], ["resume"])
ROUNDS = ["--rounds", "3", "--evaluation.every", "1", "--algorithm", "{name: ucfl, streams: 3}"]
EVENTS = ["--rounds", "4", "--evaluation.every", "1", "--algorithm", "fedasync", "--policy", "every_arrival"]
ODD: tuple[Any, ...] = (3, [[]], "\ud800", None)  # in place of an entry
STUDY = ["--rounds", "1", "--vary", "{seed: [0, 1]}"]


def right(folder: Path) -> dict[str, Path]:
    """Make the right ones: of rounds, of events, a run that can go on, a sweep."""
    place = ["-q", "--output.folder", str(folder), "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    for name, options in (("rounds", ROUNDS), ("events", EVENTS)):
        assert main(["run", str(CONFIG), *options, *place, "--output.id", name]) == 0
    assert main(["sweep", str(CONFIG), *STUDY, *place[:3], "--output.id", "study"]) == 0
    begun = shutil.copytree(folder / "tiny-rounds", folder / "tiny-begun")
    (begun / "summary.json").unlink()
    return {name: folder / f"tiny-{name}" for name in ("rounds", "events", "begun", "study")}


def changed(path: Path, rng: random.Random) -> str:
    """Change a file; return what was done."""
    way = rng.choice(("bytes", "bytes", "kind", "kind", "kind", "missing"))
    if way == "missing":
        path.unlink()
        return "missing"
    if way == "kind" and path.suffix == ".csv" and path.stat().st_size:
        what, text = changed_cell(path.read_text(), rng)
        path.write_text(text)
    elif way == "kind" and path.suffix in (".json", ".yaml"):
        tree: Any = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
        where, value = rng.choice([*leaves(tree)]), rng.choice(NASTY)
        what = f"{'.'.join(map(str, where))} = {repr(value)[:40]}"
        tree = with_value(tree, where, value)
        text = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree)
        path.write_bytes(text.encode(errors="replace"))
    elif way == "kind" and path.suffix in (".yaml", ".md"):
        what, text = mutated_text(path.read_text(), rng)
        path.write_text(text)
    else:
        what, data = mutated_bytes(path.read_bytes(), rng)
        path.write_bytes(data)
    return what


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases."""
    rng, runs = random.Random(f"run folders {seed}"), right(folder / "right")
    for number in range(count):
        command = rng.choice((READERS[0], READERS[0], READERS[1], READERS[2], READERS[2], READERS[3]))
        name = rng.choice(("begun", "study") if command == ["resume"] else ("rounds", "rounds", "events"))
        copy = shutil.copytree(runs[name], folder / f"{number}" / "run")
        files = [p for p in sorted(copy.rglob("*")) if p.is_file() and p.suffix not in (".log", ".png")]
        read = [p for p in files if p.suffix in (".csv", ".json", ".yaml", ".npz")]
        path = rng.choice(files if command == ["resume"] else read)
        what = f"{command[0]}: {path.relative_to(copy)}: {changed(path, rng)}"
        argv = [command[0], str(copy), *(["-q"] if command[0] != "compare" else []), *command[1:]]
        yield Case(what, argv, trains=True)


def entries(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases of `compare`: all that there are, whatever the seed and the count.

    Every section and every value of `summary.json` and `config.yaml` has each of `ODD` in its place.
    """
    runs = right(folder / "right")
    for name, file in product(("rounds", "events"), ("summary.json", "config.yaml")):
        text = (runs[name] / file).read_text()
        tree: Any = json.loads(text) if file == "summary.json" else yaml.safe_load(text)
        for number, (where, value) in enumerate(product(leaves(tree), ODD)):
            copy = folder / f"{name}-{file}-{number}"
            shutil.copytree(runs[name], copy, copy_function=os.link)
            (copy / file).unlink()
            new = with_value(tree, where, value)
            (copy / file).write_text(json.dumps(new) if file == "summary.json" else written(new))
            yield Case(f"{name}: {file}: {'.'.join(map(str, where))} = {value!r}", ["compare", str(copy)])
