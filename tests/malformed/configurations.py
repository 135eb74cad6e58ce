"""Malformed configurations: files that are none, YAML with faults, fields with values they cannot take."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from malformed.case import CONFIG, CONFIGS, REFUSED, Case, fitting, mutated_text

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.experiment.loader import load, to_tree

WORLDS = (  # what the fields of a configuration are taken from
    [],
    ["--policy", "{name: buffer, size: 2}", "--delay", "{name: uniform}", "--network", "{name: tiers}"],
    ["--policy", "{name: client_decides, uploads: {name: rates}}", "--availability.off_s", "10"],
    ["--payload", "{compression: {name: top_k}, error_feedback: true}", "--network", "{name: wired}"],
    ["--data.scenario", "{name: ccfl, clients: 8, smallest: 20, largest: 40}", "--policy", "client_decides"],
    ["--data.source", "{name: synthetic}", "--data.scenario", "{name: dirichlet, clients: 8}"],
    ["--data.scenario", "{name: population, clients: 50}", "--model", "{name: flt_mlp}"],
    ["--system.cost", "{name: given}", "--delay", "{name: tiers}", "--clock", "{name: wall, scale: 0.1}"],
)
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
TEXTS = {  # none of these can be right
    "empty": b"",
    "one word": b"quickstart",
    "a list": b"- 1\n",
    "NUL": b"rounds: 3\0",
    "UTF-16": "rounds: 3\n".encode("utf-16"),
    "Latin-1": b"name: \xe9\n",
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "alias bomb": BOMB.encode(),
    "alias of itself": b"vary: &a [*a]\n",
    "unknown alias": b"vary: *a\n",
    "nested brackets": b"vary: " + b"[" * 100_000,
    "nested mappings": b"vary: " + b"{a: " * 10_000,
    "nested dashes": b"- " * 50_000,
    "nested by aliases": b"".join(b"a%d: &a%d [*a%d]\n" % (i, i, max(i - 1, 0)) for i in range(1000)),
    "a key twice": b"rounds: 1\nrounds: 2\n",
    "a key twice, deep": b"local: {lr: 1, epochs: 2, lr: 3}\n",
    "a mapping as key": b"? {a: 1}\n: 2\n",
    "a tag": b"!!python/object/apply:os.getcwd []\n",
    "a broken date": b"name: !!timestamp 2024-99-99\n",
    "two documents": b"rounds: 1\n---\nrounds: 2\n",
    "a tab": b"local:\n\tlr: 1\n",
    "its own base": b"base: input.yaml\n",
    "no base": b"base: nowhere.yaml\n",
    "a folder as base": b"base: /\n",
    "a device as base": b"base: /dev/zero\n",
    "a list as base": b"base: [a]\n",
    "NUL in its base": b'base: "a\\0b"\n',
    "an endless base": f"base: {'x' * 5000}\n".encode(),
    "merge of a number": b"<<: 3\n",
    "half a string": b'name: "x\n',
    "a megabyte and more": b"# " + b"x" * (2 << 20),
    "100,000 keys": b"".join(b"k%d: 1\n" % i for i in range(100_000)),
}
FIXED = {"base": str(CONFIG), "output": {"model": False}}


def leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value and of every section."""
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, key))


def value_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return what is at a path."""
    for key in path:
        tree = tree[key]
    return tree


def with_value(tree: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a tree with one value replaced."""
    head, *rest = path
    below = tree.get(head)
    new = with_value(below if isinstance(below, Mapping) else {}, tuple(rest), value) if rest else value
    return {**tree, head: new}


def written(tree: Any) -> str:
    """Return a tree as YAML; what cannot be written in UTF-8 is escaped."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)


def run(name: str, file: Path, codes: tuple[int, ...] = (0, 2), command: str = "run") -> Case:
    """Return the case of a configuration file."""
    place = ["--output.folder", str(file.parent / "runs")]
    return Case(name, [command, str(file), *(["-q", *place] if command == "run" else place)], codes)


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases."""
    rng = random.Random(f"configurations {seed}")

    def file(content: bytes) -> Path:
        nonlocal count
        count -= 1
        place = folder / f"{count}"
        place.mkdir()
        (place / "input.yaml").write_bytes(content)
        return place / "input.yaml"

    for name, content in TEXTS.items():
        yield run(name, file(content), REFUSED)
    pipe = file(b"")
    pipe.unlink()
    os.mkfifo(pipe)
    yield run("a pipe", pipe, REFUSED)
    yield run("a folder", pipe.parent, REFUSED)
    chain = file(b"base: 0.yaml\n")
    for i in range(1500):
        (chain.parent / f"{i}.yaml").write_text(f"base: {i + 1}.yaml\n")
    yield run("1500 bases", chain, REFUSED)
    shipped = [p for p in sorted(CONFIGS.rglob("*.yaml")) if p.stem[0] != "_" and "bench" not in p.parts]
    trees = [to_tree(load(str(CONFIG), options)) for options in WORLDS]
    methods = []
    for name in CATALOGUE:
        try:
            methods.append(to_tree(load(str(CONFIG), ["--algorithm", name])))
        except UserError:  # one that has fields without defaults
            continue
    while count > 0:
        kind = rng.choice(("text", "field", "field", "method"))
        if kind == "text":
            source = rng.choice([CONFIG, *shipped])
            text = source.read_text()
            for _ in range(rng.choice((1, 1, 2, 5))):
                what, text = mutated_text(text or "x: 1\n", rng)
            text = text.replace("base: ", f"base: {source.parent}/")
            yield run(f"{source.stem}: {what}", file(text.encode(errors="replace")))
            continue
        tree = rng.choice(trees if kind == "field" else methods)
        command = rng.choice(("run", "run", "run", "plan", "data", "sweep"))
        if tree["algorithm"]["name"] == "flt":
            command = "run"  # to plan it is to embed every client's data
        inside = [p for p in leaves(tree) if kind == "field" or p[0] == "algorithm"]
        path = rng.choice(inside)
        value = fitting(value_at(tree, path), rng)
        changed = with_value({**tree, "vary": {"seed": [0, 1]}} if command == "sweep" else tree, path, value)
        label = f"{'.'.join(path)} = {repr(value)[:40]}"
        try:
            content = written(changed).encode()
        except (UnicodeEncodeError, yaml.YAMLError):  # half a surrogate pair
            continue
        yield run(f"{command}: {label}", file(content), command=command)
