"""Sweeps in one process: what they find, without what is measured on this machine."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from mpifl.comm.single import Single
from mpifl.sweeps.cases import read
from mpifl.sweeps.sweep import sweep

from .runs import CONFIG

RESULTS = ("digest", "federation", "accuracy", "ari", "comput", "flops", "energy", "drift")  # of summary.json
MEASURED = ("seconds", "real_seconds", "train_seconds")
TABLES = ("clients", "clusters", "assignments", "client_traffic", "client_computation", "visits")
TABLES += ("ledger", "computation", "metrics", "events", "updates", "groups")


def swept(folder: Path, options: list[str], share: str | None, name: str | None = None) -> Path:
    """Run a sweep in one process; return its folder."""
    options = [*options, "--output.folder", str(folder), "--output.id", name or f"share-{share}"]
    options += [] if share is None else ["--system.share_beginnings", share]
    found = sweep(lambda: read(str(CONFIG), options), Single(), quiet=True)
    assert found is not None
    return found


def results(folder: Path) -> dict[str, dict[str, object]]:
    """Return case -> all of its results that are not measured on this machine."""
    found = {}
    for run in sorted(path.parent for path in folder.glob("*/summary.json")):
        summary = json.loads((run / "summary.json").read_text())
        kept = {k: v for k, v in summary.items() if k.startswith(RESULTS)}
        for table in TABLES:
            if (run / f"{table}.csv").is_file():
                with (run / f"{table}.csv").open() as lines:
                    rows = [{k: v for k, v in r.items() if k not in MEASURED} for r in csv.DictReader(lines)]
                kept[table] = [[*row.items()] for row in rows]  # in the order of columns
        if (run / "algorithm_state.npz").is_file():
            arrays = np.load(run / "algorithm_state.npz")
            kept |= {name: arrays[name].tobytes() for name in arrays.files}
        found[run.name] = kept
    return found


def records(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return case -> what its summary says of its beginning."""
    summaries = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}
    return {name: summary.get("beginning", {}) for name, summary in sorted(summaries.items())}
