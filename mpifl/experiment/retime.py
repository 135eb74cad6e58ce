"""A finished synchronous run under another network, without training again.

What each client of each round downloaded and uploaded is in the run folder; time follows from it, by the same
lines of code as in a run, so the result is the same to the bit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mpifl.core.errors import require
from mpifl.core.rng import key
from mpifl.results import run_folder as folders
from mpifl.results.reader import Run, load
from mpifl.simulation.durations import VisitDuration, visit_duration
from mpifl.simulation.policies import Synchronous
from mpifl.traffic.ledger import Moved

from . import loader
from .schema import Config, check_effects

SECTIONS = ("network", "delay", "availability", "output")


def retime(name: str, options: Sequence[str]) -> Path:
    """Write a copy of a run folder with the times of another network; return it.

    Args:
        options: of the sections `network`, `delay`, `availability` and `output`.
    """
    run, asked = load(name), loader.overrides(options)
    for section in asked:
        require(section in SECTIONS, section, asked[section], f"re-timing changes only {', '.join(SECTIONS)}")
    before = loader.renamed(run.config)
    old = loader.from_tree(Config, before)
    remedy = "which upload comes first depends on the network: run it again under the new one"
    require(isinstance(old.policy, Synchronous), "RUN", name, remedy)
    known = run.rows("visits.csv")
    require(bool(known), "RUN", name, "has no visits.csv, from which times are worked out; run it again")
    place = {"output": {"folder": str(run.folder.parent), "id": None}}
    tree = loader.merged(loader.merged(before, place), asked)
    config = loader.from_tree(Config, tree)
    check_effects(config)
    return written(run, config)


def same_training(a: Config, b: Config) -> bool:
    """Return whether two synchronous runs differ in their times at most."""
    rest = [replace(c, network=a.network, delay=a.delay, availability=a.availability) for c in (a, b)]
    rounds = isinstance(a.policy, Synchronous) and isinstance(b.policy, Synchronous)
    return rounds and replace(rest[0], output=b.output) == rest[1]


def written(run: Run, config: Config) -> Path:
    """Write the folder of a run as it would be under the times of `config`; return it."""
    steps = [int(row["round"]) for row in run.rows("metrics.csv")]
    times = dict(_times(run, pace_of(run, config)))
    folder = folders.create(config.output.folder, config.name, config.output.id or _name(run, config))
    for path in run.folder.iterdir():
        if path.is_file() and path.name not in ("config.yaml", "metrics.csv", "summary.json"):
            shutil.copy(path, folder)
    (folder / "config.yaml").write_text(loader.dump(config))
    new = zip(run.rows("metrics.csv"), steps, strict=True)
    folders.write_csv(folder / "metrics.csv", [{**row, "virtual_seconds": times[t]} for row, t in new])
    folders.write_json(folder / "summary.json", {**run.summary, "retimed_from": run.folder.name})
    return folder


def pace_of(run: Run, config: Config) -> VisitDuration:
    """Return how long visits take under a configuration."""
    n, model_bytes = int(run.summary["clients"]), 4 * int(run.summary["model_parameters"])
    system = key(config.seed.system)
    return visit_duration(config.delay, config.network, config.availability, system, n, model_bytes)


def _times(run: Run, duration: VisitDuration) -> Iterator[tuple[int, float]]:
    """Yield each step and when it is over."""
    casts: Counter[int] = Counter()
    for row in run.rows("ledger.csv"):
        casts[int(row["step"])] += int(row["group_bytes"]) * (row["direction"] == "down")
    moved = [_moved(row) for row in run.rows("visits.csv")]
    by_step = {step: list(rows) for step, rows in groupby(moved, key=lambda m: m.step)}
    now = 0.0
    for step in range(int(run.summary["rounds"]) + 1):
        now = duration.round_end(now, by_step.get(step, []), casts[step])
        yield step, now


def _moved(row: dict[str, Any]) -> Moved:
    """Return a row of `visits.csv`."""
    step, client, visit, down, up = (
        int(row[n]) for n in ("step", "client", "visit", "bytes_down", "bytes_up")
    )
    return Moved(step, client, visit, row["trains"] == "True", down, up)


def _name(run: Run, config: Config) -> str:
    """Return the id of the new folder: the old one's, and the network."""
    was = run.folder.name.removeprefix(f"{config.name}-")
    network = loader.to_tree(config)["network"]["name"]
    return folders.free(run.folder.parent, config.name, f"{was}-{network}")
