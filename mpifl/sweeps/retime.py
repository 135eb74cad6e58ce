"""Computes the times of finished synchronous runs with another network; trains nothing.

The run folder records the downloads and uploads of each client in each round (`visits.csv`, `ledger.csv`).
The simulator of a run computes times from these records, so the result equals that of a new run to the bit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError, require
from mpifl.core.files import write_json
from mpifl.core.rng import key
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.experiment.section_checks import check_sections
from mpifl.results import run_folder as folders
from mpifl.results.reader import Run, load
from mpifl.results.recovery import recoveries_so_far, recovery_figures
from mpifl.simulation.durations import VisitDuration, visit_duration
from mpifl.traffic.ledger import Moved
from mpifl.training.per_client import local_configs, names_devices

from .cases import Case, started_with, unchecked_cases
from .results import Found, is_complete, is_sweep, keep

OF_OUTPUT = ("folder", "id", "label")
ASYNCHRONOUS = "which upload comes first depends on the network: run it again under the new one"
TIMED = ("network", "delay", "availability", "devices")
SECTIONS = (*TIMED, "output")  # sections that `retime` may change
UNCHANGED = "its times stay as they are; give another network, delay, availability or devices, as in "
UNCHANGED += "--network.name wired"
SOME_VISITS = "lacks visits (output.clients), from which the times are computed; run it again with all"
NO_VISITS = "has no visits.csv, from which the times are computed; run it again"
BY_DEVICE = "averages its metrics by devices, which change: run it again, or leave `devices` as they are"
OTHER_TRAINING = "clients train in another way on other devices (per_client): run it again"
DECIDED_BY_TIME = "times decide what the run computes; run it anew with the other times"
COMPUTED = "times follow from what networks compute, which the run folder does not hold: run it again"
ENERGY = "the energy of the run follows from its times: run it again"
PER_SAMPLE = "has seconds per sample, and "
SOME_SAMPLES = f"{PER_SAMPLE}the run evaluated some clients only, whose samples it knows; run it again"
CHANGING = f"{PER_SAMPLE}the samples of this run's clients change from visit to visit: run it again"
NEW_FILES = ("config.yaml", "metrics.csv", "summary.json", "visits.csv", "clients.csv")  # written, not copied


def retime(name: str, options: Sequence[str]) -> tuple[Path, str]:
    """Write a copy of a run, or of all runs of a sweep, with the times of another network.

    The copy is placed beside the run or sweep; the copy of a run of a sweep is placed beside the sweep.

    Args:
        name: the folder of the run or sweep.
        options: command-line options of the sections `network`, `delay`, `availability` and `devices`, and
            the options `folder`, `id` and `label` of `output`.

    Returns:
        The new folder, and a text to print.

    Raises:
        UserError: the run is asynchronous or has no `visits.csv`; an option is invalid, belongs to another
            section or has no effect; no option changes any time.
    """
    asked = loader.overrides(options)
    for section in asked:
        require(section in SECTIONS, section, asked[section], f"re-timing changes only {', '.join(SECTIONS)}")
    output = asked.get("output")
    for key_of_output, value in output.items() if isinstance(output, Mapping) else ():
        remedy = f"a copy has the files of its run; of output, re-timing changes only {', '.join(OF_OUTPUT)}"
        require(key_of_output in OF_OUTPUT, f"output.{key_of_output}", value, remedy)
    require(not asked.keys() <= {"output"}, "RUN", name, UNCHANGED)
    if is_sweep(Path(name)):
        return _retime_sweep(Path(name), asked)
    run = load(name)
    parent = run.folder.resolve().parent
    parent = parent.parent if is_sweep(parent) else run.folder.parent
    place = {"output": {"folder": str(parent), "id": None}}
    config = loader.from_tree(Config, loader.merged(loader.merged(run.config, place), asked))
    check_sections(config)
    check(run, config)
    require(not _keeps_times(run, config), "RUN", name, UNCHANGED)
    folder = write_retimed(run, config)
    return folder, f"results: {folder}"


# -- a sweep -------------------------------------------------------------------------------------------------


def _retime_sweep(old: Path, asked: Mapping[str, Any]) -> tuple[Path, str]:
    """Write a sweep with copies of all complete synchronous cases; see `retime`."""
    began = started_with(old)
    before = unchecked_cases(began)
    place = {"output": {"folder": str(old.parent), "id": None}}
    tree = loader.merged(loader.merged(began, place), asked)
    after = unchecked_cases(tree)
    valid = [(a, b) for a, b in zip(before, after, strict=True) if a.can_run or is_complete(a, old)]
    _check_effect(valid, began["vary"], asked)
    timed = [(a, b) for a, b in valid if a.config.policy.fixed_visits]
    ready = [(load(a.folder(old)), b) for a, b in timed if is_complete(a, old)]
    require(bool(ready), "RUN", str(old), "has no complete case" if timed else ASYNCHRONOUS)
    for run, new in ready:
        check(run, new.config)
    alike = all(_keeps_times(run, new.config) for run, new in ready)
    require(not alike, "RUN", str(old), UNCHANGED)
    name, output = after[0].name, after[0].output
    new_id = _new_name(old.name, ready[0][1].config, asked)
    chosen = output.id or folders.unused_id(Path(output.folder), name, new_id)
    folder = folders.create(output.folder, name, chosen)
    tree = loader.merged(tree, {"output": {"id": chosen}})
    keep(tree, folder)
    for run, new in ready:
        write_retimed(run, new.placed(folder))
    found = Found(folder)
    found.write()
    found.draw()
    text = found.text()
    if left := len(after) - len(ready):
        why = "not complete there, or asynchronous: which upload comes first depends on the network"
        text += f"\n{left} of {len(after)} cases have no copy ({why}); mpifl resume {folder} runs them"
    return folder, text


def _check_effect(
    some_cases: Sequence[tuple[Case, Case]], vary: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Raise `UserError` if a varied key of the sweep overrides a requested section in one of the cases.

    Args:
        some_cases: cases before and after the change.
        vary: what the sweep varies.
        asked: the requested sections.
    """
    for old, new in some_cases:
        wanted = loader.from_tree(Config, loader.merged(loader.to_tree(old.config), asked))
        for section in (name for name in asked if name != "output"):
            remedy = f"case {new.slug} has another one, by what the sweep varies ({', '.join(vary)}); "
            remedy += "leave it out, or retime single runs"
            same = getattr(wanted, section) == getattr(new.config, section)
            require(same, section, asked[section], remedy)


def _new_name(old: str, config: Config, asked: Mapping[str, Any]) -> str:
    """Return the id of a sweep's copy: the sweep's id and the name of the first changed section."""
    section = next((name for name in SECTIONS if name in asked and name != "output"), "")
    word = loader.to_tree(config)[section].get("name", section) if section else "again"
    return f"{old.removeprefix(f'{config.name}-')}-{word}"


# -- a run ---------------------------------------------------------------------------------------------------


def check(run: Run, config: Config) -> None:
    """Raise `UserError` unless the times of a finished run can be computed for another configuration.

    Args:
        run: the finished run.
        config: its configuration with another network, delay, availability or devices.
    """
    old, folder, devices = loader.from_tree(Config, run.config), str(run.folder), config.devices
    require(config.policy.fixed_visits, "RUN", folder, ASYNCHRONOUS)
    for one in (old, config):
        for name, seconds in one.decided_by_time.items():
            raise UserError(name, seconds, DECIDED_BY_TIME)
    require(run.written == "all", "RUN", folder, SOME_VISITS)
    require(bool(run.rows("visits.csv")), "RUN", folder, NO_VISITS)
    timed = config.costs == old.costs == "training"
    require(timed, "costs", "all", COMPUTED)
    require(not (old.devices.has_power or devices.has_power), "devices", "watts", ENERGY)
    same = old.devices == devices
    require(same or not names_devices(config.per_client), "devices", devices, OTHER_TRAINING)
    require(same or "device" not in old.evaluation.by, "devices", devices, BY_DEVICE)
    if devices.needs_samples:
        known = len(run.rows("clients.csv")) == int(run.summary["clients"])
        require(known, "devices", devices, SOME_SAMPLES)
        require(not run.summary.get("samples_change"), "devices", devices, CHANGING)


def _keeps_times(run: Run, config: Config) -> bool:
    """Return whether a run has the same times, and the same timed sections, under a configuration.

    Times can differ although the sections are equal, because a file that a section names may have changed.
    """
    old = loader.from_tree(Config, run.config)
    if any(getattr(old, section) != getattr(config, section) for section in TIMED):
        return False
    times = dict(_round_ends(run, _visit_duration(run, config)))
    return all(float(row["virtual_seconds"]) == times[int(row["round"])] for row in run.rows("metrics.csv"))


def write_retimed(run: Run, config: Config) -> Path:
    """Write the run folder that a finished run would have with the times of `config`.

    Args:
        run: a run that passes `check`.
        config: its configuration with another network, delay, availability or devices.

    Returns:
        The new run folder.
    """
    duration = _visit_duration(run, config)
    times, devices = dict(_round_ends(run, duration)), duration.devices
    folder = folders.create(config.output.folder, config.name, config.output.id or _new_id(run, config))
    for path in run.folder.iterdir():
        left_out = path.name in NEW_FILES or path.name.startswith(".")  # hidden files belong to callbacks
        if path.is_file() and not left_out:
            shutil.copy(path, folder)
    (folder / "config.yaml").write_text(loader.dump(config))
    for name in ("visits.csv", "clients.csv"):
        folders.write_csv(folder / name, (_with_device(row, devices) for row in run.rows(name)))
    rows = [{**row, "virtual_seconds": times[int(row["round"])]} for row in run.rows("metrics.csv")]
    changes_of_data = _recoveries(run, config, times, rows)
    folders.write_csv(folder / "metrics.csv", rows)
    files = {key: value for key, value in run.files.items() if key not in loader.FILES_OF_TIMES}
    files |= {key: value for key, value in loader.sums_of(config).items() if key in loader.FILES_OF_TIMES}
    changes = {"settings": loader.settings(config), "retimed_from": run.folder.name, "files": files}
    told = {"drift": changes_of_data} if changes_of_data else {}
    kept = {name: value for name, value in run.summary.items() if name != "beginning"}  # it computes nothing
    write_json(folder / "summary.json", folders.without_infinity({**kept, **changes, **told}))
    return folder


def _recoveries(
    run: Run, config: Config, times: Mapping[int, float], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return `drift` of `summary.json` with other times; `recovery_seconds` in rows of `metrics.csv` follows.

    Args:
        run: the run.
        config: its configuration with other times.
        times: when each round ends.
        rows: the rows of `metrics.csv`, which are changed.
    """
    before = run.summary.get("drift", [])
    events, found = [row["step"] for row in before], list[dict[str, Any]]()
    known, begins = list[tuple[int, float, float]](), {step: times[step - 1] for step in events}
    steps, scores = run.series["round"].astype(int).tolist(), run.series[f"{run.metric.name}_mean"].tolist()
    for row, step, score in zip(rows if events else (), steps, scores, strict=False):
        known.append((step, score, times[step]))
        found = recoveries_so_far(known, begins, events, config.drift.recovered, run.metric.better)
        if any(seconds for _, _, seconds in known):
            row["recovery_seconds"] = recovery_figures(found, timed=True)["recovery_seconds"]
    of_time, changed = ("begins_s", "recovered_after_s"), list[dict[str, Any]]()
    for old, event in zip(before, found, strict=True):
        new = {name: event[name] for name in of_time if name in event}  # none without a clock
        kept = {name: value for name, value in old.items() if name in new or name not in of_time}
        changed.append({**kept, **new})
    return changed


def _visit_duration(run: Run, config: Config) -> VisitDuration:
    """Return the durations of visits under a configuration."""
    clients, vector_bytes = int(run.summary["clients"]), 4 * int(run.summary["model_parameters"])
    model_bytes = int(run.summary.get("whole_model_bytes", vector_bytes))  # written if a part is frozen
    system = key(config.seed.system)
    times = config.delay, config.network, config.availability, system, clients, model_bytes
    if not config.devices.needs_samples:
        return visit_duration(*times, config.devices)
    sizes = {int(row["client"]): int(row["train"]) for row in run.rows("clients.csv")}
    fleet = config.devices.fleet(clients, system.of("devices"))
    differing = local_configs(config.local, config.per_client, fleet.names, clients)
    single = bool(run.summary.get("drop_single", False))
    trained = {k: differing.get(k, config.local).num_trained(n, single) for k, n in sizes.items()}
    fleet = replace(fleet, samples=lambda k, visit: trained[k])
    return visit_duration(*times, config.devices, fleet)


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


def _with_device(row: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """Return a row of a table with the device of its client; without that column if all are alike."""
    rest = {name: value for name, value in row.items() if name != "device"}
    return {**rest, "device": devices[int(row["client"])]} if devices else rest


def _moved(row: Mapping[str, str]) -> Moved:
    """Return a row of `visits.csv` as `Moved`."""
    numbers = (int(row[n]) for n in ("step", "client", "visit", "bytes_down", "bytes_up"))
    step, client, visit, bytes_down, bytes_up = numbers
    return Moved(step, client, visit, row["trains"] == "True", bytes_down, bytes_up)


def _new_id(run: Run, config: Config) -> str:
    """Return the id of the new folder: the run's id and the name of the network."""
    old_id = run.folder.name.removeprefix(f"{config.name}-")
    network = loader.to_tree(config)["network"]["name"]
    return folders.unused_id(Path(config.output.folder), config.name, f"{old_id}-{network}")
