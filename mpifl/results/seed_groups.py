"""Runs that differ only in their seeds, taken together: names, curves, final figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import require

from .reader import Run, load

HIDDEN = ("name", "seed", "output", "system", "vary")  # no part of what a run is about
METHOD = "algorithm.name"
AXES = {  # axis -> its title
    "round": "rounds",
    "bytes": "MB sent, up and down",
    "virtual_seconds": "virtual time, s",
}


@dataclass(frozen=True)
class Curve:
    """A figure over an axis: mean, and the range over seeds."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
        name: the method, and what makes the group differ from the others.
    """

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def rounds(self) -> np.ndarray:
        """The evaluated rounds that all runs have."""
        common = set.intersection(*(set(r.metrics["round"].tolist()) for r in self.runs))
        places = [str(run.folder) for run in self.runs]
        require(bool(common), "RUN", places, "were not evaluated in any common round")
        return np.array(sorted(common))

    def column(self, name: str) -> np.ndarray:
        """Return a column of `metrics.csv` at the common rounds [runs, rounds], NaN where it is missing."""
        return np.stack([_at(_values(r, name), r.metrics["round"], self.rounds) for r in self.runs])

    def curve(self, axis: str, name: str) -> Curve:
        """Return a figure over an axis; positions on the axis are means over the runs."""
        x, y = self.column(axis).mean(0), self.column(name)
        return Curve(x, y.mean(0), y.min(0), y.max(0))

    def has(self, name: str) -> bool:
        """Return whether every run has a column with numbers."""
        return bool(np.isfinite(self.column(name)).any())

    def final(self, name: str) -> np.ndarray:
        """Return a figure at the last evaluation of each run [runs]."""
        return np.array([_values(r, name)[-1] for r in self.runs])

    def reached(self, target: float, axis: str) -> np.ndarray:
        """Return where on an axis each run first has the target's mean accuracy [runs], NaN for never."""
        out = []
        for run in self.runs:
            there = np.flatnonzero(run.metrics["accuracy_mean"] >= target)
            out.append(_values(run, axis)[there[0]] if len(there) else np.nan)
        return np.array(out)


def _values(run: Run, name: str) -> np.ndarray:
    """Return a column of a run; `bytes` is what was sent in both directions."""
    metrics = run.metrics
    if name == "bytes":
        return metrics["federation_bytes_up"] + metrics["federation_bytes_down"]
    return metrics.get(name, np.full(len(metrics["round"]), np.nan))


def _at(values: np.ndarray, rounds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the values at some rounds."""
    return values[np.searchsorted(rounds, wanted)]


def folders(names: Sequence[str]) -> list[Path]:
    """Return run folders: those named, and those that lie in a folder that is none itself (a sweep's)."""
    out: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(p.parent for p in path.glob("*/config.yaml")) if path.is_dir() else []
        out += inside if inside and not (path / "config.yaml").exists() else [path]
    return out


def gather(names: Sequence[str]) -> list[Group]:
    """Return the groups of some run folders, in the order of their first runs.

    Raises:
        UserError: for a folder that is no finished run.
    """
    runs = [load(path) for path in dict.fromkeys(folders(names))]
    require(bool(runs), "RUN", list(names), "name at least one run folder")
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    trees = [dict(_flat({k: v for k, v in g[0].config.items() if k not in HIDDEN})) for g in found.values()]
    titles = _titles(trees)
    return [Group(t, tuple(g)) for t, g in zip(titles, found.values(), strict=True)]


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _titles(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the method of each configuration, and what differs between those of one method.

    A key counts among sections of the same name only; the network is named wherever it differs.
    """
    titles = []
    for tree in trees:
        same = [t for t in trees if t.get(METHOD) == tree.get(METHOD)]
        parts = [str(tree.get(METHOD, "run"))]
        for key, value in tree.items():
            section = f"{key.rsplit('.', 1)[0]}.name" if "." in key else ""
            alike = trees if key == "network.name" else same
            alike = [t for t in alike if key == section or t.get(section) == tree.get(section)]
            if key != METHOD and any(t.get(key) != value for t in alike):
                short = key.rsplit(".", 1)[-1]
                parts.append(str(value) if short == "name" else f"{short} {value}")
        titles.append(", ".join(parts))
    return [t if titles.count(t) == 1 else f"{t} ({i})" for i, t in enumerate(titles, 1)]


# -- the table -----------------------------------------------------------------------------------------------


def default_target(groups: Sequence[Group]) -> float:
    """Return 95 % of the best final mean accuracy."""
    return 0.95 * max(float(g.final("accuracy_mean").mean()) for g in groups)


def table(groups: Sequence[Group], target: float) -> list[dict[str, str]]:
    """Return the final figures of each group: means over seeds, and the sample standard deviation."""
    rows = []
    for g in groups:
        row = {"run": g.name, "seeds": str(len(g.runs)), "rounds": f"{g.rounds[-1]:.0f}"}
        row["accuracy, %"] = _spread(100 * g.final("accuracy_mean"))
        row["worst client, %"] = _spread(100 * g.final("accuracy_worst"))
        row["std over clients, %"] = _mean(100 * g.final("accuracy_std"))
        row["ARI"] = _mean(g.final("ari"), "{:.2f}")
        unplaced = g.final("num_unplaced")
        row["unplaced clients"] = _mean(unplaced, "{:.3g}") if unplaced.any() else ""
        row["clusters"] = _mean(g.final("num_clusters"), "{:.3g}")
        row["MB up"] = _mean(g.final("federation_bytes_up") / 1e6, "{:.4g}")
        row["MB down"] = _mean(g.final("federation_bytes_down") / 1e6, "{:.4g}")
        row["virtual s"] = _mean(g.final("virtual_seconds"), "{:.4g}")
        row["rounds to target"] = _reach(g.reached(target, "round"))
        row["MB to target"] = _reach(g.reached(target, "bytes") / 1e6)
        row["virtual s to target"] = _reach(g.reached(target, "virtual_seconds"))
        rows.append(row)
    empty = [name for name in rows[0] if all(row[name] == "" for row in rows)]
    return [{k: v for k, v in row.items() if k not in empty} for row in rows]


def _mean(values: np.ndarray, form: str = "{:.2f}") -> str:
    return form.format(values.mean()) if np.isfinite(values).all() else ""


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.2f}" + (f" +- {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def _reach(values: np.ndarray) -> str:
    """Return the mean of those that got there, and how many did not."""
    there = values[np.isfinite(values)]
    missed = len(values) - len(there)
    note = f" ({len(there)} of {len(values)})" if missed and len(there) else ""
    return f"{there.mean():.4g}{note}" if len(there) else "never"
