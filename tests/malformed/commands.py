"""Malformed command lines: commands, options and values in any order, and bytes that are no text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from malformed.case import CONFIG, REFUSED, Case

COMMANDS = ("run", "resume", "sweep", "retime", "report", "compare", "plan", "data", "list", "show", "cite")
WORDS = (
    *(
        "",
        "-",
        "--",
        "---",
        "--=",
        "--=1",
        "-x",
        "--help=1",
        "--rounds",
        "--rounds=",
        "--rounds=1=2",
        "rounds",
    ),
    *(
        "--local.lr",
        "--local..lr",
        "--.local",
        "--local.",
        "--a b",
        "--\n",
        "--é",
        "--\udcff",
        "\udcff",
        "a\x07b",
    ),
    *(
        "x" * 300,
        "--" + "x" * 300,
        "--" + "a." * 2000 + "b",
        "9" * 5000,
        "{",
        "}",
        "[1",
        "{a: b: c}",
        "*x",
        "&x",
        "!x",
    ),
    *(
        "~",
        "null",
        "true",
        ".nan",
        "-1",
        "1e999",
        "{}",
        "[]",
        "{name: }",
        "{name: x}",
        "name: [",
        "\t",
        "a\0b",
    ),
    *(
        "--resume",
        "--output.id",
        "../..",
        "--target",
        "2",
        "--csv",
        "--csv=/dev/full",
        "/dev/null",
        "/",
        "..",
        ".",
    ),
    *(
        "--bind-report",
        "--json",
        "--seconds",
        "--quiet=1",
        "--out",
        "--sheet",
        "--algorithm",
        "--algorithm.name",
        "os:system",
    ),
    *("--model.name", "tests", "mpifl.cli:main", "--seed", "--vary", "{seed: [0, 0]}", "--policy", "buffer"),
    *(
        "--data.root",
        "/dev/zero",
        "--data.source",
        "npz",
        "folder",
        "--system.ranks",
        "--system.threads",
        "algorithms",
    ),
)
VARIABLES = (  # what surroundings may hold
    {"MPIFL_START_S": "abc"},
    {"MPIFL_START_S": "nan"},
    {"MPIFL_HANG_S": "-1"},
    {"MPIFL_DATA": "/dev/zero"},
    {"MPIFL_DATA": "x" * 5000},
    {"XDG_CACHE_HOME": "/dev/null"},
    {"XDG_CACHE_HOME": "relative"},
    {"HOME": "/dev/null"},
    {"TMPDIR": "/dev/null"},
    {"OMP_NUM_THREADS": "many"},
    {"CUDA_VISIBLE_DEVICES": "x"},
    {"MALLOC_TRIM_THRESHOLD_": "x"},
    {"COLUMNS": "x"},
    {"LC_ALL": "xx_YY"},
)


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Yield the cases."""
    rng = random.Random(f"commands {seed}")
    place = ["--output.folder", str(folder / "runs")]
    for argv in ([], ["runn"], ["run"], ["show"], ["report"], ["compare"], ["run", ""]):
        yield Case(f"only {argv}", argv, REFUSED)
        count -= 1
    for variables in VARIABLES:
        yield Case(f"{variables}", ["run", str(CONFIG), "-q", *place], variables=variables)
        count -= 1
    while count > 0:
        count -= 1
        command = rng.choice((*COMMANDS, "run", "run", "bench", "calibrate", "doctor", "prepare"))
        words = [rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2, 3, 5, 8)))]
        if command == "bench":
            words = [*words, "W9"]
        if command in ("calibrate", "doctor", "prepare"):  # alone they measure or fetch
            words = ["--no-such-option", *words]
        if command in ("run", "sweep", "plan", "data", "cite") and rng.random() < 0.8:
            words = [str(CONFIG), *words]
        if command == "data":
            words += ["--sheet", str(folder / "sheet.png")]
        name = " ".join([command, *words]).replace(str(CONFIG), "CONFIG")[:80]
        asked = place if command in ("run", "sweep") and rng.random() < 0.9 else []
        yield Case(repr(name), [command, *words, *asked])
