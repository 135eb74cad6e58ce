"""Small whole runs that tests share: what they are, and how their folders are read."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "tiny.yaml"
SCRIPT = HERE / "mpi" / "many.py"  # runs them all in one start of Python
HALF = ["--participation", "0.5", "--rounds", "3"]
RUNS: dict[str, list[str]] = {
    "fedavg": HALF,
    "fedavg-stacked": [*HALF, "--system.stack", "3"],
    "scaffold-stacked": ["--algorithm", "scaffold", *HALF, "--system.stack", "3"],
    "scaffold": ["--algorithm", "scaffold", *HALF],
    "ifca": ["--algorithm", "{name: ifca, num_clusters: 3}", *HALF],
    "fedper": ["--algorithm", "fedper", *HALF],
    "cfl": ["--algorithm", "{name: cfl, warmup: 1, eps1: 100, eps2: 0}", *HALF],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}"],
    "emdcfl-half": ["--algorithm", "{name: emdcfl, sample_cap: 32, solver: sinkhorn}", *HALF],
    "ucfl": ["--algorithm", "ucfl", *HALF],
    "ucfl-reduced": ["--algorithm", "ucfl", *HALF, "--system.collective", "reduce"],
    "fedavg-gathered": [*HALF, "--system.collective", "gather"],
    "ucfl-4": ["--algorithm", "{name: ucfl, streams: 4}", *HALF],
    "compressed": [
        *HALF,
        *("--payload", "{dtype: bfloat16, compression: {name: qsgd, bits: 4}, error_feedback: true}"),
        *("--network.name", "wireless-slow"),
    ],
    "fedbuff": [*("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}"), *HALF],
    "ucfl-parallel": ["--algorithm", "{name: ucfl, streams: 4, parallel: true}", *HALF],
}


class Runs:
    """The folders of all runs at one place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def summary(self, name: str) -> dict[str, Any]:
        """Return what a run says of itself."""
        return json.loads((self.folder / f"tiny-{name}" / "summary.json").read_text())

    def table(self, name: str, file: str) -> list[dict[str, str]]:
        """Return the rows of a CSV file."""
        with (self.folder / f"tiny-{name}" / file).open() as lines:
            return list(csv.DictReader(lines))

    def wire(self, *names: str) -> Counter[str]:
        """Return the bytes of each call."""
        rows = (row for name in names for row in self.table(name, "wire.csv"))
        total: Counter[str] = Counter()
        for row in rows:
            total[row["call"]] += int(row["bytes"])
        return total
