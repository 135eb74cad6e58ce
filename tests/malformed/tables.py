"""Malformed tables: traces that a clock replays, delays, links and rates of clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from malformed.case import CONFIG, Case, mutated_bytes, mutated_text

CLIENTS = range(8)
ASYNCHRONOUS = ["--algorithm", "fedasync", "--policy", "every_arrival", "--cohort_size", "3", "--rounds", "5"]
DECIDING = ["--algorithm", "fedasync", "--rounds", "5"]
CELLS = (
    "",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-300",
    "9" * 400,
    "x",
    "1.5",
    "8",
    "\0",
    '"',
    "é",
    "1,2",
)


def trace() -> str:
    """Return a right trace: clients 0, 1 and 2 in turn, each visit from the rows right before it."""
    rows = ["time,client,visit,start,read_version"]
    for step in range(9):
        client, visit = step % 3, step // 3
        start = 0.0 if not visit else float(step - 2)
        rows.append(f"{step + 1}.0,{client},{visit},{start},{0 if not visit else step - 2}")
    return "\n".join(rows) + "\n"


def kinds() -> dict[str, tuple[str, list[str]]]:
    """Return, for each kind, a right table and the options that read it; FILE stands for its place."""
    delays = "client,seconds\n" + "".join(f"{k},{k + 1}.5\n{k},0.5\n" for k in CLIENTS)
    links = "client,downlink_bytes_s,uplink_bytes_s,latency_s\n" + "".join(
        f"{k},1e6,2e5,0.1\n" for k in CLIENTS
    )
    rates = "client,mean_s\n" + "".join(f"{k},{k + 1}\n" for k in CLIENTS)
    return {
        "trace": (trace(), [*ASYNCHRONOUS, "--clock", "{name: replay, trace: FILE}"]),
        "delays": (delays, [*ASYNCHRONOUS, "--delay", "{name: measured, file: FILE}"]),
        "links": (links, [*ASYNCHRONOUS, "--network", "{name: trace, file: FILE}"]),
        "links of rounds": (links, ["--network", "{name: trace, cast: group, file: FILE}"]),
        "rates": (
            rates,
            [*DECIDING, "--policy", "{name: client_decides, uploads: {name: rates, file: FILE}}"],
        ),
    }


def changed_cell(text: str, rng: random.Random) -> tuple[str, str]:
    """Return what was put into a cell, and the table."""
    lines = [line.split(",") for line in text.splitlines()]
    row, value = rng.randrange(len(lines)), rng.choice(CELLS)
    column = rng.randrange(len(lines[row]))
    lines[row][column] = value
    return f"{value[:20]!r} in line {row + 1}", "\n".join(",".join(line) for line in lines) + "\n"


def make(folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Write and yield the cases."""
    rng = random.Random(f"tables {seed}")

    def case(name: str, data: bytes, options: list[str], codes: tuple[int, ...] = (0, 2)) -> Case:
        nonlocal count
        count -= 1
        place = folder / f"{count}"
        place.mkdir()
        (place / "table.csv").write_bytes(data)
        options = [word.replace("FILE", str(place / "table.csv")) for word in options]
        return Case(
            name, ["run", str(CONFIG), "-q", *options, "--output.folder", str(place / "runs")], codes, True
        )

    for name, (text, options) in kinds().items():
        yield case(f"{name}: right", text.encode(), options, (0,))
        yield case(f"{name}: empty", b"", options, (2,))
        nowhere = [word.replace("FILE", "/dev/zero") for word in options]
        yield case(f"{name}: a device", b"", nowhere, (2,))
    while count > 0:
        name, (text, options) = rng.choice([*kinds().items()])
        way = rng.choice(("cell", "cell", "cell", "text", "bytes"))
        if way == "bytes":
            what, data = mutated_bytes(text.encode(), rng)
        else:
            what, new = (changed_cell if way == "cell" else mutated_text)(text, rng)
            data = new.encode()
        yield case(f"{name}: {what}", data, options)
