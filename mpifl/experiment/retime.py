"""Computes the times of a finished synchronous run under another network; trains nothing.

The run folder holds what each client downloaded and uploaded in each round (`visits.csv`, `ledger.csv`). The
simulator that times a run times these records, so the result equals that of a new run to the bit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mpifl.core.errors import require
from mpifl.core.rng import key
from mpifl.results import run_folder as folders
from mpifl.results.reader import OLD_NAMES, Run, load
from mpifl.simulation.durations import VisitDuration, visit_duration
from mpifl.traffic.ledger import Moved

from . import loader
from .schema import Config, check_sections

SECTIONS = ("network", "delay", "availability", "output")  # that `retime` may change
NEW_FILES = ("config.yaml", "metrics.csv", "summary.json", "visits.csv")  # written, not copied


def retime(name: str, options: Sequence[str]) -> Path:
    """Write a copy of a run folder with the times of another network.

    Args:
        name: The run folder.
        options: Command-line options of the sections `network`, `delay`, `availability` and `output`.

    Returns:
        The new run folder.

    Raises:
        UserError: The run is asynchronous or has no `visits.csv`; an option is invalid or of another section.
    """
    run, asked = load(name), loader.overrides(options)
    for section in asked:
        require(section in SECTIONS, section, asked[section], f"re-timing changes only {', '.join(SECTIONS)}")
    old = loader.from_tree(Config, run.config)
    remedy = "which upload comes first depends on the network: run it again under the new one"
    require(old.policy.fixed_visits, "RUN", name, remedy)
    remedy = "has no visits.csv, from which the times are computed; run it again"
    require(bool(run.rows("visits.csv")), "RUN", name, remedy)
    place = {"output": {"folder": str(run.folder.parent), "id": None}}
    config = loader.from_tree(Config, loader.merged(loader.merged(run.config, place), asked))
    check_sections(config)
    return write_retimed(run, config)


def same_training(a: Config, b: Config) -> bool:
    """Return whether two runs are synchronous and differ at most in network, delays and availability."""
    rest = [replace(c, network=a.network, delay=a.delay, availability=a.availability) for c in (a, b)]
    rounds = a.policy.fixed_visits and b.policy.fixed_visits
    return rounds and replace(rest[0], output=b.output) == rest[1]


def write_retimed(run: Run, config: Config) -> Path:
    """Write the run folder that a finished run would have under the times of `config`.

    Args:
        run: A synchronous run.
        config: Its configuration with another network, delay or availability.

    Returns:
        The new run folder.
    """
    times = dict(_round_ends(run, _visit_duration(run, config)))
    folder = folders.create(config.output.folder, config.name, config.output.id or _new_id(run, config))
    for path in run.folder.iterdir():
        if path.is_file() and path.name not in NEW_FILES:
            shutil.copy(path, folder / OLD_NAMES.get(path.name, path.name))
    (folder / "config.yaml").write_text(loader.dump(config))
    folders.write_csv(folder / "visits.csv", run.rows("visits.csv"))
    rows = [{**row, "virtual_seconds": times[int(row["round"])]} for row in run.rows("metrics.csv")]
    folders.write_csv(folder / "metrics.csv", rows)
    changes = {"format": folders.FORMAT, "retimed_from": run.folder.name}
    folders.write_json(folder / "summary.json", {**run.summary, **changes})
    return folder


def _visit_duration(run: Run, config: Config) -> VisitDuration:
    """Return the durations of visits under a configuration."""
    clients, model_bytes = int(run.summary["clients"]), 4 * int(run.summary["model_parameters"])
    system = key(config.seed.system)
    return visit_duration(config.delay, config.network, config.availability, system, clients, model_bytes)


def _round_ends(run: Run, duration: VisitDuration) -> Iterator[tuple[int, float]]:
    """Yield each round and the virtual second at which it ends."""
    cast_bytes: Counter[int] = Counter()
    for row in run.rows("ledger.csv"):
        cast_bytes[int(row["step"])] += int(row["group_bytes"]) * (row["direction"] == "down")
    moved = [_moved(row) for row in run.rows("visits.csv")]
    by_step = {step: list(rows) for step, rows in groupby(moved, key=lambda m: m.step)}
    now = 0.0
    for step in range(int(run.summary["rounds"]) + 1):
        now = duration.round_end(now, by_step.get(step, []), cast_bytes[step])
        yield step, now


def _moved(row: Mapping[str, str]) -> Moved:
    """Return a row of `visits.csv`."""
    numbers = (int(row[n]) for n in ("step", "client", "visit", "bytes_down", "bytes_up"))
    step, client, visit, bytes_down, bytes_up = numbers
    return Moved(step, client, visit, row["trains"] == "True", bytes_down, bytes_up)


def _new_id(run: Run, config: Config) -> str:
    """Return the id of the new folder: that of the run, and the name of the network."""
    old_id = run.folder.name.removeprefix(f"{config.name}-")
    network = loader.to_tree(config)["network"]["name"]
    return folders.unused_id(run.folder.parent, config.name, f"{old_id}-{network}")
