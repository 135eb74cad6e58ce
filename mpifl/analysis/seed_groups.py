"""Groups of runs that differ only in their seeds: their titles, curves, and costs of a target."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.case_names import slugs_of
from mpifl.core.directions import reaches
from mpifl.core.errors import UserError, first_of, require
from mpifl.core.metric import Metric
from mpifl.core.textfiles import flat, yaml_file
from mpifl.results.identity import Origin, describe_inputs
from mpifl.results.reader import Run, is_unfinished, load
from mpifl.supervision.logging import warn_once

from .survival import Reached

ALGORITHM = "algorithm.name"
REPORT = "report.html"  # in a folder that `mpifl report` wrote
VIRTUAL = "virtual_seconds"
AXES = {  # axis -> its title; see `rounds_title`
    "round": "rounds",
    "bytes": "MB sent, up and down",
    VIRTUAL: "virtual time, s",
}


@dataclass(frozen=True)
class Group:
    """Runs of one configuration with different seeds.

    Attributes:
        name: the user's label or the algorithm, and the values in which the group differs from the others.
        runs: the runs.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def metric(self) -> Metric:
        """The metric of the runs."""
        return self.runs[0].metric

    @property
    def stepped(self) -> bool:
        """Whether rounds are steps of an asynchronous server, which may take as little as one upload each."""
        return "asynchronous" in self.runs[0].summary

    @property
    def word(self) -> str:
        """The word for one of its rounds: `round`, or `step` for an asynchronous server."""
        return "step" if self.stepped else "round"

    @cached_property
    def rounds(self) -> np.ndarray:
        """The rounds in which all runs were evaluated.

        Runs that rules of `stop` ended may have none in common: then it is the last round of the longest one,
        which stands for the last evaluation of each.
        """
        common = set.intersection(*(set(_values(r, "round").tolist()) for r in self.runs))
        if not common and any(run.ended for run in self.runs):
            common = {float(self.lengths[1])}
        places = [str(run.folder) for run in self.runs]
        require(bool(common), "RUN", places, "were not evaluated in any common round")
        return np.array(sorted(common))

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of rounds of the shortest and of the longest run."""
        counts = [int(_values(run, "round")[-1]) for run in self.runs]
        return min(counts), max(counts)

    def column(self, name: str) -> np.ndarray:
        """Return a column of `metrics.csv` at the common rounds [runs, rounds]; NaN where it is missing."""
        steps = [_values(run, "round") for run in self.runs]
        places = [np.minimum(np.searchsorted(of, self.rounds), len(of) - 1) for of in steps]
        return np.stack([_values(r, name)[at] for r, at in zip(self.runs, places, strict=True)])

    def has(self, name: str) -> bool:
        """Return whether a column holds any number."""
        return bool(np.isfinite(self.column(name)).any())

    def final(self, name: str) -> np.ndarray:
        """Return a column at the last evaluation of each run [runs]."""
        return np.array([_values(r, name)[-1] for r in self.runs])

    def reached(self, target: float, axis: str) -> Reached:
        """Return where the mean metric of each run first is as good as a target, if ever.

        A mean that misses the target only by rounding meets it.

        Args:
            target: target value of the metric, such as an accuracy in [0, 1].
            axis: one of `AXES`.
        """
        positions, met = [], []
        for run in self.runs:
            better, values = run.metric.better, _values(run, f"{run.metric.name}_mean")
            there = np.flatnonzero(reaches(values, target, better))
            positions.append(_values(run, axis)[there[0] if len(there) else -1])
            met.append(len(there) > 0)
        return Reached(np.array(positions, np.float64), np.array(met, bool))


def axes_of(groups: Sequence[Group], known: Iterable[str]) -> list[str]:
    """Return axes in the order in which they are shown.

    Virtual time is the first where groups ran under different policies: a round of one policy is not that of
    another, and does not take as long.

    Args:
        groups: the groups.
        known: the axes, rounds first.
    """
    axes = [*known]
    policies = {json.dumps(group.runs[0].config.get("policy"), sort_keys=True) for group in groups}
    timed = VIRTUAL in axes and all(bool(np.nan_to_num(g.column(VIRTUAL)).any()) for g in groups)
    if len(policies) > 1 and timed:
        axes.remove(VIRTUAL)
        axes.insert(0, VIRTUAL)
    return axes


def rounds_title(groups: Sequence[Group]) -> str:
    """Return the title of an axis of rounds; it tells rounds from steps of an asynchronous server."""
    stepped = {group.stepped for group in groups}
    if len(stepped) > 1:
        return "rounds (asynchronous runs: server steps)"
    return "server steps" if stepped == {True} else "rounds"


def _values(run: Run, name: str) -> np.ndarray:
    """Return a column of a run [evaluations], NaN if it has none; `bytes` is the sum of both directions."""
    metrics = run.series
    if name == "bytes":
        return np.asarray(metrics["federation_bytes_up"] + metrics["federation_bytes_down"], np.float64)
    if name not in metrics:
        return np.full(len(metrics["round"]), np.nan)
    return np.asarray(metrics[name], np.float64)


def folders(names: Sequence[str]) -> list[Path]:
    """Return run folders.

    Args:
        names: run folders, folders that hold run folders or sweeps, and patterns of either. `runs` stands for
            all runs in it, those of its sweeps last and in the order of `vary`. An existing name is not
            treated as a pattern, such as `17[1].srv` from a PBS job array. Folders of reports, which `runs/*`
            also matches, are skipped.
    """
    out: list[Path] = []
    for path in map(Path, (found for name in names for found in matched(name))):
        if _is_run(path) or not path.is_dir():
            out.append(path)
            continue
        inside = sorted(path.glob("*"))
        runs = _cases([p for p in inside if _is_run(p)], path)
        for other in (s for s in inside if not _is_run(s)):
            runs += _cases([p.parent for p in sorted(other.glob("*/config.yaml"))], other)
        reports = any((folder / REPORT).is_file() for folder in (path, *inside))
        out += runs or ([] if reports else [path])
    return out


def _cases(runs: list[Path], folder: Path) -> list[Path]:
    """Return the runs of a folder; those of a sweep in the order of the values in its `vary`."""
    file = folder / "sweep.yaml"
    try:
        tree = yaml_file(file, "RUN") if file.is_file() else {}
        order = {slug: i for i, slug in enumerate(slugs_of(tree["vary"]))}
    except (UserError, TypeError, KeyError, AttributeError):  # no sweep, or one that cannot be read
        return runs

    def place(run: Path) -> int:
        ends = (run.name[i + 1 :] for i, letter in enumerate(run.name) if letter == "-")
        return next((order[end] for end in ends if end in order), len(order))

    return sorted(runs, key=place)


def _is_run(path: Path) -> bool:
    return os.path.exists(path / "config.yaml")


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders, each with as much of its path as makes it unique."""
    ends = {path: ["/".join(path.parts[-n:]) for n in range(1, len(path.parts) + 1)] for path in paths}
    many = Counter(end for found in ends.values() for end in found)
    return [next((end for end in ends[path] if many[end] == 1), str(path)) for path in paths]


def matched(name: str) -> list[str]:
    """Return the paths that match a pattern; a name that exists or matches nothing is returned as it is."""
    return [name] if os.path.exists(name) else sorted(glob(name)) or [name]


def gather(names: Sequence[str], finished_only: bool = False) -> list[Group]:
    """Return the groups of some runs, in the order of their first runs.

    Runs of one configuration under several names form one group, unless runs with different names have the
    same seeds. In that case each name is a group, and titles contain the names.

    Args:
        names: run folders, and folders that hold run folders or sweeps; see `folders`.
        finished_only: whether to leave out unfinished runs, with a warning.

    Raises:
        UserError: there is no run, or a folder is not a finished run; with `finished_only`, a folder is not a
            run, or no run is finished.
    """
    paths = list(dict.fromkeys(folders(names)))
    require(bool(paths), "RUN", list(names), "name at least one run folder")
    if finished_only:
        unfinished = [path for path in paths if is_unfinished(path)]
        remedy = f"none of {len(paths)} runs is finished; wait for one, or resume it"
        require(len(unfinished) < len(paths), "RUN", list(names), remedy)
        if unfinished:
            which = first_of([*map(str, unfinished)])
            warn_once(f"{len(unfinished)} of {len(paths)} runs are not finished and left out: {which}")
        paths = [path for path in paths if path not in unfinished]
    runs = [load(path) for path in paths]
    names_of: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        names_of.setdefault((run.label, str(run.config.get("seed"))), set()).add(name_of(run))
    apart = {label for (label, _), own in names_of.items() if len(own) > 1}
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.label, name_of(run) if run.label in apart else ""), []).append(run)
    first = [group[0] for group in found.values()]
    trees = [({"name": name_of(run)} if run.label in apart else {}) | tree_of(run) for run in first]
    heads = [run.own_label or str(tree.get(ALGORITHM, "run")) for run, tree in zip(first, trees, strict=True)]
    named = titles(trees, heads)
    return [Group(name, tuple(group)) for name, group in zip(named, found.values(), strict=True)]


def origins_of(runs: Sequence[Run]) -> dict[str, Origin]:
    """Return short name of the run folder -> the origin of a run's numbers."""
    return dict(zip(short_names([run.folder for run in runs]), (run.origin for run in runs), strict=True))


def say_other_inputs(groups: Sequence[Group]) -> None:
    """Print a line for each input in which runs differ that should have the same: data, files, own code."""
    for line in describe_inputs(origins_of([run for group in groups for run in group.runs])):
        warn_once(f"these runs differ in {line}")


def tree_of(run: Run) -> dict[str, Any]:
    """Return the settings that can appear in the name of a run: dotted key -> value."""
    return dict(flat(run.settings))


def name_of(run: Run) -> str:
    """Return the name of a run's configuration."""
    return str(run.config.get("name", ""))


def titles(trees: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> list[str]:
    """Return a title for each configuration: its head, and the values not shared by others with this head.

    Values are compared only between sections of the same name. If the head is an algorithm, the network is
    also named if it differs from that of a configuration with another head.

    Args:
        trees: dotted key -> value, for each configuration.
        heads: beginning of each title: an algorithm, a user's label, or nothing.
    """
    out = []
    for tree, head in zip(trees, heads, strict=True):
        same = [t for t, other in zip(trees, heads, strict=True) if other == head]
        by_algorithm = head == str(tree.get(ALGORITHM, "run"))
        parts = [head] if head else []
        for key, value in tree.items():
            section = f"{key.rsplit('.', 1)[0]}.name" if "." in key else ""
            others = trees if key == "network.name" and by_algorithm else same
            others = [t for t in others if key == section or t.get(section) == tree.get(section)]
            if not (key == ALGORITHM and by_algorithm) and any(t.get(key) != value for t in others):
                short = key.rsplit(".", 1)[-1]
                parts.append(str(value) if short == "name" else f"{short} {value}")
        out.append(", ".join(parts))
    return [t if out.count(t) == 1 else f"{t} ({i})".strip() for i, t in enumerate(out, 1)]


def metric_of(groups: Sequence[Group]) -> Metric:
    """Return the metric of groups; raise `UserError` unless it is the same for all."""
    found = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    names = [metric.name for metric in found]
    require(len(found) == 1, "RUN", names, "these runs are measured by different metrics; name runs of one")
    return found[0]


def default_target(groups: Sequence[Group]) -> float:
    """Return 95 % of the best final mean accuracy; 105 % of the lowest value if lower is better.

    If the best value is negative, the factors are exchanged. If no group has a finite value, the result is
    NaN, which no run meets.
    """
    metric = metric_of(groups)
    ends = [float(np.sort(g.final(f"{metric.name}_mean")).mean()) for g in groups]
    known = [value for value in ends if np.isfinite(value)]
    if not known:
        return float("nan")  # all runs diverged: none meets it
    best = metric.better * max(metric.better * value for value in known)
    return (0.95 if metric.better * best > 0 else 1.05) * best
