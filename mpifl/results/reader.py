"""Finished run folders, read and checked: what the report, the comparison and the re-timing stand on."""

from __future__ import annotations

import json
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpifl.core.errors import UserError, require, shortened
from mpifl.core.textfiles import csv_file, json_file, yaml_file

from .run_folder import FORMAT

FRESH_SECONDS = 120  # a file written this lately may still grow
MAX_FIGURE = 1e15
Rows = list[dict[str, str]]
MAX_MEMO_BYTES = 1 << 32
NPZ_FAULTS = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, MemoryError, SyntaxError),
    *(NotImplementedError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error),
)

INTEGER, ANY = re.compile(r"-?[0-9]{1,18}"), re.compile(r".*", re.DOTALL)
NUMBER = re.compile(r"(-?[0-9]{1,300}(\.[0-9]*)?(e[-+]?[0-9]{1,2})?|nan|)")
METRICS = ("accuracy_mean", "accuracy_worst", "accuracy_std", "num_clusters", "ari")
COLUMNS: dict[str, dict[str, re.Pattern[str]]] = {  # of the files that are read again
    "metrics.csv": {
        **dict.fromkeys(("round", "federation_bytes_up", "federation_bytes_down"), INTEGER),
        **dict.fromkeys(METRICS, NUMBER),
    },
    "ledger.csv": {
        **dict.fromkeys(("step", "bytes", "group_bytes"), INTEGER),
        "direction": re.compile("up|down"),
        "kind": ANY,
    },
    "visits.csv": {
        **dict.fromkeys(("step", "client", "visit", "down", "up"), INTEGER),
        "trains": re.compile("True|False"),
    },
    "clusters.csv": dict.fromkeys(("client", "cluster", "group"), INTEGER),
    "timing.csv": {"rank": INTEGER},
    "events.csv": {"staleness": INTEGER, "time": NUMBER},
}
FIGURES = ("ranks", "clients", "rounds", "model_numbers", "mpi_bytes", "wall_seconds")  # of summary.json


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
        """Return the rows of a CSV file, none where there is no such file; numbers are checked."""
        return read_rows(self.folder / file)

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Each column of `metrics.csv`, empty fields as NaN."""
        rows = self.rows("metrics.csv")
        out = {}
        for name in rows[0]:
            try:
                out[name] = np.array([float(r[name] or "nan") for r in rows])
            except ValueError as error:
                remedy = f"metrics.csv: {error} in column {name}; run it again"
                raise UserError("RUN", str(self.folder), remedy) from error
        times = out.get("virtual_seconds", np.zeros(1))
        require(
            not np.isinf(times).any(),
            "RUN",
            str(self.folder),
            "metrics.csv: a time without end; run it again",
        )
        return out

    @cached_property
    def algorithm_state(self) -> dict[str, np.ndarray]:
        """The small arrays of the method."""
        path = self.folder / "memo.npz"
        if not path.exists():
            return {}
        try:
            with zipfile.ZipFile(path) as parts:
                size = sum(part.file_size for part in parts.infolist())
            require(size <= MAX_MEMO_BYTES, "RUN", str(path), f"holds {size} bytes, more than any run writes")
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except UserError:
            raise
        except NPZ_FAULTS as error:
            raise UserError("RUN", str(path), f"cannot be read: {error}; run it again") from error
        odd = [name for name, values in found.items() if values.dtype.kind not in "biuf"]
        require(not odd, "RUN", str(path), f"holds no numbers in {odd[:1]}; run it again")
        return found


def read_rows(path: Path) -> Rows:
    """Return the rows of a CSV file of a run folder, none where there is no such file.

    Raises:
        UserError: where columns are missing, or hold something else than `COLUMNS` has it.
    """
    if not path.exists():
        return []
    kinds = COLUMNS.get(path.name, {})
    out = []
    for place, row in csv_file(path, "RUN", [*kinds]):
        for name, kind in (kinds if path.name != "timing.csv" else dict.fromkeys(row, NUMBER)).items():
            good = kind.fullmatch(row[name]) is not None
            require(good, place, row[name], f"is no value of column {name}; run it again")
        out.append(row)
    return out


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
    summary = json_file(path / "summary.json", "RUN")
    config = yaml_file(path / "config.yaml", "RUN")
    require(isinstance(summary, dict) and isinstance(config, dict), "RUN", str(folder), "is no run folder")
    form = summary.get("format", 1)
    remedy = f"has format {form!r} of another version of mpifl; this one reads {FORMAT}: run it again"
    require(form == FORMAT, "RUN", str(folder), remedy)
    run = Run(path, config, summary)
    missing = [f for f in ("metrics.csv", "ledger.csv", "clusters.csv") if not (path / f).exists()]
    require(not missing, "RUN", str(folder), f"is incomplete: it has no {', '.join(missing)}; run it again")
    _check(run)
    return run


def _check(run: Run) -> None:
    """Raise `UserError` unless what readers count on is there."""
    place, summary, remedy = str(run.folder), run.summary, "; run it again"
    for name in FIGURES:
        value = summary.get(name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_FIGURE
        require(good, "RUN", place, f"has {name} = {shortened(repr(value))} in summary.json{remedy}")
    good = all(isinstance(summary.get(name), str) for name in ("algorithm", "digest"))
    require(good, "RUN", place, f"names no algorithm and digest in summary.json{remedy}")
    lags = summary.get("asynchronous") or {"staleness_histogram": {}}
    lags = lags.get("staleness_histogram") if isinstance(lags, dict) else None
    good = isinstance(lags, dict) and all(
        INTEGER.fullmatch(k) and isinstance(n, int) for k, n in lags.items()
    )
    require(good, "RUN", place, f"has no histogram of staleness in summary.json{remedy}")
    good = all(isinstance(run.config.get(name, {}), dict) for name in ("network", "seed"))
    require(good, "RUN", place, f"has a config.yaml without sections network and seed{remedy}")
    try:
        assert run.label
    except TypeError as error:
        raise UserError("RUN", place, f"has keys in config.yaml that are no words{remedy}") from error
    steps = [int(row["round"]) for row in run.rows("metrics.csv")]
    good = bool(steps) and steps[-1] == summary["rounds"] and all(a < b for a, b in pairwise(steps))
    require(
        good,
        "RUN",
        place,
        f"has rounds {shortened(str(steps))} in metrics.csv, {summary['rounds']} in all{remedy}",
    )
    good = len(run.rows("clusters.csv")) == summary["clients"]
    require(
        good,
        "RUN",
        place,
        f"has a clusters.csv without a row for each of {summary['clients']} clients{remedy}",
    )
