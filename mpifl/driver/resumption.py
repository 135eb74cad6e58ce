"""Which options a resumed run may change, and what must be as it was at its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, require
from mpifl.core.textfiles import flat
from mpifl.core.version import in_use
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.results.identity import OF_A_MACHINE, SAME

MAY_CHANGE = (*SAME, *OF_A_MACHINE, "rounds", "stop")
PLACE = ("output.folder", "output.id")  # where a run is: that of a resumed run is given
EACH_ROUND = ("output.clients", "output.updates")  # decide which rows each round writes: may not change
AGAIN = "or begin a new run"


def about(config: Config, identity: Mapping[str, Any], data: Mapping[str, str], start: str) -> dict[str, Any]:
    """Return what the numbers of a run depend on, as a checkpoint records it; on rank 0.

    Args:
        config: the configuration.
        identity: everything that decides the last bits of the run's numbers, see `results.identity`.
        data: description of the data, see `Federation.content`.
        start: checksum of the initial weights that were read from a file; empty if all are drawn.
    """
    tree = {name: part for name, part in loader.settings(config).items() if name not in MAY_CHANGE}
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()
    output = {key: value for key, value in flat({"output": vars(config.output)}) if key in EACH_ROUND}
    out = {"config": digest, "surroundings": dict(identity), "data": dict(data), "start": start}
    out["version"] = in_use()
    return {**out, "output": output, "files": loader.sums_of(config)}


def check_same(
    config: Config, folder: Path, now: Mapping[str, Any], step: int, then: Mapping[str, Any]
) -> None:
    """Refuse to go on from a checkpoint that does not fit the run.

    Args:
        config: the configuration of the resumed run.
        folder: the run folder.
        now: the return value of `about`.
        step: step of the checkpoint.
        then: the same as `now`, at the checkpoint.

    Raises:
        UserError: configuration, data, the user's files, initial weights or the rows that each round writes
            differ, or the run has no steps left.
    """
    if now["config"] != then["config"]:
        for key, was, asked in _differing(folder, loader.to_tree(config), {*MAY_CHANGE}):
            raise UserError(key, asked, f"the run began with {was!r}; leave it so, {AGAIN}")
        what = "config.yaml was edited, or a default has changed since the checkpoint; begin a new run"
        raise UserError("RUN", str(folder), what)
    for name in sorted({*then["data"], *now["data"]}):
        was, here = then["data"].get(name), now["data"].get(name)
        what = f"{name} of the data: {was} at the checkpoint, {here} now; bring the old data back, {AGAIN}"
        require(was == here, "RUN", str(folder), what)
    for key, value in now["output"].items():
        was = then["output"][key]
        remedy = f"the rounds before were written with {was!r}; leave it so, {AGAIN}"
        require(value == was, key, value, remedy)
    files = loader.files_of(config)
    for key in (key for key in loader.FILES_OF_TIMES if key in now["files"]):
        remedy = f"holds other content than at the checkpoint; bring the old one back, {AGAIN}"
        unchanged = then["files"].get(key, now["files"][key]) == now["files"][key]
        require(unchanged, key, str(files[key]), remedy)
    key, value = (
        ("model.weights", config.weights) if config.start.run is None else ("start.run", config.start.run)
    )
    remedy = f"holds other weights than at the checkpoint; bring the old ones back, {AGAIN}"
    require(then["start"] == now["start"], key, value, remedy)
    remedy = f"step {step} is the last that the run has taken; use more rounds"
    require(config.rounds > step, "rounds", config.rounds, remedy)


def refuse_changes(folder: Path, tree: Mapping[str, Any]) -> None:
    """Refuse to resume a complete run with changed options that decide numbers or rows of tables.

    Args:
        folder: the run folder.
        tree: its configuration with the changes, as nested mappings.

    Raises:
        UserError: such an option differs, or an option is invalid.
    """
    for key, was, now in _differing(folder, tree, {*MAY_CHANGE} - {"stop"}, EACH_ROUND):
        remedy = f"{folder} is complete, and was run with {was!r}; run it anew"
        remedy += f": mpifl run {folder / 'config.yaml'} --{key} {now} --output.id NAME"
        raise UserError(key, now, remedy)


def refuse_place(folder: Path, changes: Mapping[str, Any]) -> None:
    """Refuse to resume a run under another name or in another folder than its own.

    Args:
        folder: the run folder.
        changes: the changed options, as nested mappings.

    Raises:
        UserError: `output.folder` or `output.id` is changed.
    """
    stored, asked = dict(flat(loader.read(str(folder / "config.yaml")))), dict(flat(changes))
    for key in PLACE:
        remedy = f"has no effect: the run goes on in {folder}; leave it out"
        require(asked.get(key, stored.get(key)) == stored.get(key), key, asked.get(key), remedy)


def _differing(
    folder: Path, tree: Mapping[str, Any], free: Set[str], bound: Collection[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of each option that differs from the configuration in a run folder.

    Args:
        folder: the run folder.
        tree: the other configuration, as nested mappings.
        free: keys and sections that do not count.
        bound: keys in these sections that count all the same.
    """
    stored = loader.read(str(folder / "config.yaml"))
    was, now = (dict(flat(loader.to_tree(loader.from_tree(Config, t)))) for t in (stored, tree))
    for key in {**now, **was}:
        if (key in bound or not free & {key, key.partition(".")[0]}) and now.get(key) != was.get(key):
            yield key, was.get(key), now.get(key)
