"""Finished run folders, read and checked: what the report, the comparison and the re-timing stand on."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mpifl.core.errors import UserError, require

from .folder import FORMAT

FRESH_SECONDS = 120  # a file written this lately may still grow
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        config: as a tree. summary: final figures.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.summary["algorithm"])

    @property
    def network(self) -> str:
        """The network's name."""
        return str(self.config.get("network", {}).get("name", "links"))

    @cached_property
    def label(self) -> str:
        """What is the same for runs that differ in their seeds only, and where they lie."""
        tree = {k: v for k, v in self.config.items() if k not in ("seed", "output", "system", "vary")}
        return json.dumps(tree, sort_keys=True, default=str)

    def rows(self, file: str) -> Rows:
        """Return the rows of a CSV file, none where there is no such file."""
        return read_rows(self.folder / file)

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Each column of `metrics.csv`, empty fields as NaN."""
        rows = self.rows("metrics.csv")
        return {name: np.array([float(r[name] or "nan") for r in rows]) for name in rows[0]}

    @cached_property
    def memo(self) -> dict[str, np.ndarray]:
        """The small arrays of the method."""
        path = self.folder / "memo.npz"
        if not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def read_rows(path: Path) -> Rows:
    """Return the rows of a CSV file, none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def load(folder: str | Path) -> Run:
    """Return the run in a folder.

    Raises:
        UserError: where it is no run folder, is not complete, is being written, or has another form.
    """
    path = Path(folder)
    require(path.is_dir(), "RUN", str(folder), "there is no such folder")
    require((path / "config.yaml").is_file(), "RUN", str(folder), "is no run folder: it has no config.yaml")
    if not (path / "summary.json").is_file():
        last = max(p.stat().st_mtime for p in path.iterdir())
        fresh = time.time() - last < FRESH_SECONDS
        state = "is still being written" if fresh else "was never finished"
        remedy = f"{state}: it has no summary.json; wait for its end, or run it again"
        raise UserError("RUN", str(folder), remedy)
    try:
        summary = json.loads((path / "summary.json").read_text())
        config = yaml.load((path / "config.yaml").read_text(), YAML)
    except (ValueError, yaml.YAMLError) as error:
        remedy = f"cannot be read: {' '.join(str(error).split())}"
        raise UserError("RUN", str(folder), remedy) from error
    require(isinstance(summary, dict) and isinstance(config, dict), "RUN", str(folder), "is no run folder")
    form = summary.get("format", 1)
    remedy = f"has format {form} of another version of mpifl; this one reads {FORMAT}: run it again"
    require(form == FORMAT, "RUN", str(folder), remedy)
    run = Run(path, config, summary)
    missing = [f for f in ("metrics.csv", "ledger.csv", "clusters.csv") if not run.rows(f)]
    missing = [f for f in missing if not (path / f).exists() or f == "metrics.csv"]
    require(not missing, "RUN", str(folder), f"is incomplete: it has no {', '.join(missing)}; run it again")
    return run
