"""Groups of runs that differ only in their seeds: their titles, curves and table of final figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import require

from .reader import Run, load

HIDDEN = ("name", "seed", "output", "system", "vary", "table")  # sections that no title names
ALGORITHM = "algorithm.name"
AXES = {  # axis -> its title
    "round": "rounds",
    "bytes": "MB sent, up and down",
    "virtual_seconds": "virtual time, s",
}


@dataclass(frozen=True)
class Curve:
    """A column of `metrics.csv` over an axis, for the runs of a group.

    Attributes:
        x: Position of each common evaluation; mean over the runs.
        mean: Mean over the runs.
        low: Minimum over the runs.
        high: Maximum over the runs.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Group:
    """Runs of one configuration with different seeds.

    Attributes:
        name: The algorithm, and the values in which the group differs from the others.
        runs: The runs.
    """

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def rounds(self) -> np.ndarray:
        """The rounds in which all runs were evaluated."""
        common = set.intersection(*(set(r.metrics["round"].tolist()) for r in self.runs))
        places = [str(run.folder) for run in self.runs]
        require(bool(common), "RUN", places, "were not evaluated in any common round")
        return np.array(sorted(common))

    def column(self, name: str) -> np.ndarray:
        """Return a column of `metrics.csv` at the common rounds [runs, rounds], NaN where it is missing."""
        return np.stack([_at(_values(r, name), r.metrics["round"], self.rounds) for r in self.runs])

    def curve(self, axis: str, name: str) -> Curve:
        """Return a column over an axis.

        Args:
            axis: One of `AXES`.
            name: The column.
        """
        x, y = self.column(axis).mean(0), self.column(name)
        return Curve(x, y.mean(0), y.min(0), y.max(0))

    def has(self, name: str) -> bool:
        """Return whether a column holds any number."""
        return bool(np.isfinite(self.column(name)).any())

    def final(self, name: str) -> np.ndarray:
        """Return a column at the last evaluation of each run [runs]."""
        return np.array([_values(r, name)[-1] for r in self.runs])

    def reached(self, target: float, axis: str) -> np.ndarray:
        """Return where each run first has a mean accuracy.

        Args:
            target: The accuracy, in [0, 1].
            axis: One of `AXES`.

        Returns:
            The position on the axis [runs]; NaN for never.
        """
        out = []
        for run in self.runs:
            there = np.flatnonzero(run.metrics["accuracy_mean"] >= target)
            out.append(_values(run, axis)[there[0]] if len(there) else np.nan)
        return np.array(out)


def _values(run: Run, name: str) -> np.ndarray:
    """Return a column of a run; `bytes` is the sum of both directions."""
    metrics = run.metrics
    if name == "bytes":
        return np.asarray(metrics["federation_bytes_up"] + metrics["federation_bytes_down"])
    return metrics.get(name, np.full(len(metrics["round"]), np.nan))


def _at(values: np.ndarray, rounds: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return values[np.searchsorted(rounds, wanted)]


def folders(names: Sequence[str]) -> list[Path]:
    """Return run folders.

    Args:
        names: Run folders, and folders that hold run folders, such as those of sweeps.
    """
    out: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(p.parent for p in path.glob("*/config.yaml")) if path.is_dir() else []
        out += inside if inside and not (path / "config.yaml").exists() else [path]
    return out


def gather(names: Sequence[str]) -> list[Group]:
    """Return the groups of some runs, in the order of their first runs.

    Args:
        names: Run folders, and folders that hold run folders.

    Raises:
        UserError: A folder is no finished run.
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
    """Return a title for each configuration: its algorithm, and the values that others with it do not share.

    Values are compared between sections of the same name only; the network is named wherever it differs.
    """
    titles = []
    for tree in trees:
        same = [t for t in trees if t.get(ALGORITHM) == tree.get(ALGORITHM)]
        parts = [str(tree.get(ALGORITHM, "run"))]
        for key, value in tree.items():
            section = f"{key.rsplit('.', 1)[0]}.name" if "." in key else ""
            others = trees if key == "network.name" else same
            others = [t for t in others if key == section or t.get(section) == tree.get(section)]
            if key != ALGORITHM and any(t.get(key) != value for t in others):
                short = key.rsplit(".", 1)[-1]
                parts.append(str(value) if short == "name" else f"{short} {value}")
        titles.append(", ".join(parts))
    return [t if titles.count(t) == 1 else f"{t} ({i})" for i, t in enumerate(titles, 1)]


# -- the table -----------------------------------------------------------------------------------------------


def default_target(groups: Sequence[Group]) -> float:
    """Return 95 % of the best final mean accuracy."""
    return 0.95 * max(float(g.final("accuracy_mean").mean()) for g in groups)


def table(groups: Sequence[Group], target: float) -> list[dict[str, str]]:
    """Return a row of final figures for each group: means over seeds, with sample standard deviations.

    Args:
        groups: The groups.
        target: The mean accuracy whose rounds, bytes and time are wanted, in [0, 1].
    """
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
        row["rounds to target"] = _reached(g.reached(target, "round"))
        row["MB to target"] = _reached(g.reached(target, "bytes") / 1e6)
        row["virtual s to target"] = _reached(g.reached(target, "virtual_seconds"))
        rows.append(row)
    empty = [name for name in rows[0] if all(row[name] == "" for row in rows)]
    return [{k: v for k, v in row.items() if k not in empty} for row in rows]


def _mean(values: np.ndarray, form: str = "{:.2f}") -> str:
    return form.format(values.mean()) if np.isfinite(values).all() else ""


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.2f}" + (f" +- {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def _reached(values: np.ndarray) -> str:
    """Return the mean over the runs that reached the target, with their number where not all did."""
    found = values[np.isfinite(values)]
    note = f" ({len(found)} of {len(values)})" if 0 < len(found) < len(values) else ""
    return f"{found.mean():.4g}{note}" if len(found) else "never"
