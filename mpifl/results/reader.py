"""Reads and checks finished run folders for `mpifl report`, `compare`, `retime` and `sweep`."""

from __future__ import annotations

import json
import re
import struct
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifl.core.errors import UserError, nearest, require, shortened
from mpifl.core.metric import ACCURACY, Metric
from mpifl.core.textfiles import csv_file, json_file, json_mapping, yaml_file
from mpifl.supervision.progress import FILE

from .identity import Origin, deciding
from .run_folder import check_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from torch import nn

Rows = list[dict[str, str]]

RECENT_SECONDS = 120  # a run that wrote a file this recently may still be running
MAX_FIGURE = 1e15
NO_ROWS = b"\n", b"\r\n"  # a table without rows and columns, as the ledger of a method that sends nothing
MAX_ALGORITHM_STATE_BYTES = 1 << 32
NPZ_ERRORS = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, MemoryError, SyntaxError),
    *(NotImplementedError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error),
)

INTEGER, ANY = re.compile(r"-?[0-9]{1,18}"), re.compile(r".*", re.DOTALL)
NUMBER = re.compile(r"(-?[0-9]{1,300}(\.[0-9]*)?(e[-+]?[0-9]{1,2})?|nan|)")
FIGURE = re.compile(r"(-?[0-9]{1,300}(\.[0-9]*)?(e[-+]?[0-9]{1,3})?|nan|-?inf|)")  # in a run that may diverge
WHOLE = re.compile(r"[0-9]{1,300}")  # without bound: FLOPs
METRICS = ("num_clusters", "ari")
PASSES = ("forward_passes", "forward_samples", "backward_passes", "backward_samples")
SENT = ("federation_bytes_up", "federation_bytes_down")
AGAINST: dict[str, tuple[str, tuple[str, ...], float]] = {  # axis of `Run.plot` -> title, columns, unit
    "rounds": ("rounds", ("round",), 1.0),
    "bytes": ("MB sent, up and down", SENT, 1e6),
    "flops": ("GFLOP of the clients", ("flops",), 1e9),
    "seconds": ("virtual time, s", ("virtual_seconds",), 1.0),
    "wall_seconds": ("real time, s", ("seconds",), 1.0),
}
SPREADS = ("mean", "worst", "std")  # columns of the task's metric, such as accuracy_mean
COLUMNS: dict[str, dict[str, re.Pattern[str]]] = {  # file -> its required columns and their patterns
    "metrics.csv": {
        **dict.fromkeys(("round", "federation_bytes_up", "federation_bytes_down"), INTEGER),
        **dict.fromkeys(METRICS, NUMBER),
    },
    "ledger.csv": {
        **dict.fromkeys(("step", "bytes", "group_bytes"), INTEGER),
        "direction": re.compile("up|down"),
        "kind": ANY,
    },
    "computation.csv": {**dict.fromkeys(("step", *PASSES), INTEGER), "purpose": ANY, "flops": WHOLE},
    "visits.csv": {
        **dict.fromkeys(("step", "client", "visit", "bytes_down", "bytes_up"), INTEGER),
        "trains": re.compile("True|False"),
    },
    "clusters.csv": dict.fromkeys(("client", "cluster", "group"), INTEGER),
    "assignments.csv": dict.fromkeys(("round", "client", "cluster"), INTEGER),
    "groups.csv": dict.fromkeys(("since", "client", "group"), INTEGER),
    "presence.csv": {"client": INTEGER, "event": re.compile("joins|leaves")},
    "timing.csv": {"rank": INTEGER},
    "events.csv": {"staleness": INTEGER, "time": NUMBER},
}
FIGURES = ("ranks", "clients", "rounds", "model_parameters", "mpi_bytes", "wall_seconds")  # of summary.json
OF_CLIENTS = (
    *("clients.csv", "clusters.csv", "assignments.csv", "groups.csv", "presence.csv"),
    *("client_traffic.csv", "client_computation.csv", "visits.csv"),
)


def _table(file: str) -> cached_property[DataFrame]:
    """Return the attribute of a run that holds a table of its folder."""
    return cached_property(lambda run: run._frame(file))


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    The tables of its folder are pandas DataFrames, read on first access.

    Attributes:
        folder: the run folder.
        config: the resolved configuration, as nested mappings.
        summary: the content of `summary.json`.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    def __repr__(self) -> str:
        rounds, metric = self.summary.get("rounds"), self.metric
        value = self.summary.get(f"{metric.name}_mean")
        return f"Run({str(self.folder)!r}: {self.method}, {rounds} rounds, mean {metric.title} {value})"

    @cached_property
    def metric(self) -> Metric:
        """The main metric of the run, which is the first metric of its task; accuracy for classification."""
        told = self.summary.get("metric")
        if told is None:
            return ACCURACY
        try:
            return Metric(**told)
        except TypeError as error:
            remedy = "names no metric in summary.json; run it again"
            raise UserError("RUN", str(self.folder), remedy) from error

    @property
    def ended(self) -> str:
        """Why the run ended before its last round, by a rule of `stop` or a callback; empty if it did not."""
        about = self.summary.get("ended")
        return str(about.get("reason", "")) if isinstance(about, Mapping) else ""

    @cached_property
    def changes(self) -> list[dict[str, Any]]:
        """A row for each change of data, ascending by `step`: `drift` of `summary.json`; empty without drift.

        Raises:
            UserError: `summary.json` has something else there.
        """
        rows = self.summary.get("drift", [])
        good = isinstance(rows, list) and all(
            isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows
        )
        require(good, "RUN", str(self.folder), "has a drift in summary.json without steps; run it again")
        return list(rows)

    @property
    def method(self) -> str:
        """The name of the algorithm."""
        return str(self.summary["algorithm"])

    @property
    def network(self) -> str:
        """The name of the network."""
        return str(self.config.get("network", {}).get("name", "links"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration without seeds, output, machine and all else that does not affect the numbers."""
        return {k: v for k, v in deciding(self.config).items() if k != "seed"}

    @cached_property
    def non_default(self) -> dict[str, Any]:
        """The `settings` that differ from their defaults."""
        return {k: v for k, v in self.summary["settings"].items() if k != "seed"}

    @cached_property
    def label(self) -> str:
        """The settings as a string, equal for runs that differ only in their seeds.

        Runs of one configuration have different strings if their user gave them different labels.
        """
        tree = self.non_default
        tree |= {} if self.own_label is None else {"output.label": self.own_label}
        return json.dumps(tree, sort_keys=True, default=str)

    @property
    def origin(self) -> Origin:
        """The origin of the run's numbers: settings, data, code and machine."""
        seed = self.config.get("seed")
        return Origin(
            self.label,
            json.dumps(self.non_default.get("data"), sort_keys=True, default=str),
            str(seed.get("data") if isinstance(seed, Mapping) else seed),
            self.summary["identity"],
            self.summary["data"],
            self.files,
        )

    @property
    def files(self) -> Mapping[str, str]:
        """Checksums of the user's own files by the key that names them; empty for none."""
        return dict(self.summary.get("files", {}))

    @property
    def written(self) -> str:
        """Which clients have rows in the tables of clients: `all`, `sample` or `none`."""
        output = self.config.get("output")
        return str(output.get("clients", "all")) if isinstance(output, Mapping) else "all"

    @property
    def own_label(self) -> str | None:
        """The label that the user gave the run (`output.label`); None if there is none."""
        output = self.config.get("output")
        label = output.get("label") if isinstance(output, Mapping) else None
        return None if label is None else str(label)

    def rows(self, file: str) -> Rows:
        """Return the rows of a CSV file of the run folder; see `read_rows`."""
        return read_rows(self.folder / file, self._required(file))

    def _required(self, file: str) -> dict[str, re.Pattern[str]]:
        """Return the required columns of a file, and the patterns of their values."""
        required = dict(COLUMNS.get(file, {}))
        if file == "metrics.csv":
            required |= {f"{self.metric.name}_{what}": FIGURE for what in SPREADS}
        return required

    # -- tables, as pandas DataFrames ------------------------------------------------------------------------

    metrics = _table("metrics.csv")
    """`metrics.csv`: a row for each evaluation."""
    clients = _table("clients.csv")
    """`clients.csv`: a row for each evaluated client, with its final scores, cluster and samples."""
    clusters = _table("clusters.csv")
    """`clusters.csv`: the final cluster and true group of each client."""
    assignments = _table("assignments.csv")
    """`assignments.csv`: the clusters at the first evaluation, and all changes at later ones."""
    groups = _table("groups.csv")
    """`groups.csv`: the true groups at the beginning, and all later changes; empty if there are none."""
    presence = _table("presence.csv")
    """`presence.csv`: which clients joined and left during the run; empty if all were always there."""
    ledger = _table("ledger.csv")
    """`ledger.csv`: the bytes a federation would have sent, by step, direction and kind."""
    computation = _table("computation.csv")
    """`computation.csv`: passes, samples and FLOPs by step and purpose."""
    client_computation = _table("client_computation.csv")
    """`client_computation.csv`: passes, samples and FLOPs of each client by purpose, in the whole run."""
    visits = _table("visits.csv")
    """`visits.csv`: the bytes each client downloaded and uploaded at each visit."""
    events = _table("events.csv")
    """`events.csv`: a row for each upload of an asynchronous run; empty for synchronous runs."""
    timing = _table("timing.csv")
    """`timing.csv`: the seconds of each phase between two evaluations, for each rank."""
    client_traffic = _table("client_traffic.csv")
    """`client_traffic.csv`: the total traffic of each client, sent and received."""
    mpi_traffic = _table("mpi_traffic.csv")
    """`mpi_traffic.csv`: the data sent through MPI, by rank, call and purpose."""
    dropped = _table("dropped.csv")
    """`dropped.csv`: the visits that failed and were left out; empty if there were none."""

    @cached_property
    def updates(self) -> DataFrame:
        """`updates.csv`: how the update of each client agrees with the mean, by round and module.

        Raises:
            UserError: the run did not write this table.
        """
        remedy = "this run did not write updates.csv; run it with output.updates: true"
        require((self.folder / "updates.csv").exists(), "output.updates", False, remedy)
        return self._frame("updates.csv")

    def _frame(self, file: str) -> DataFrame:
        from .frames import frame_of

        required = self._required(file)
        remedy = f"this run did not write {file}; run it with output.clients: all or sample"
        require(self.written != "none" or file not in OF_CLIENTS, "output.clients", "none", remedy)
        return frame_of(self.folder / file, required)

    # -- models and figures ----------------------------------------------------------------------------------

    def model(self, *, client: int | None = None, cluster: int | None = None) -> nn.Module:
        """Return the final model of a client, or of a cluster, in evaluation mode.

        The model of a client is the one with which it is evaluated, before any fine-tuning by the evaluation.
        Methods that give clients models of their own keep them only with `output.client_models: true`. A
        user's network (`model.name: custom`) is returned as an object of the user's class.

        Args:
            client: number of a client.
            cluster: number of a cluster, as in `clusters`; give either this or `client`.

        Raises:
            UserError: the run kept no models (the message names the key to set), there is no such client or
                cluster, or both or neither of them are given.
        """
        from .run_models import model_of

        clusters = None if cluster is None else self.clusters
        return model_of(self.folder, self.config, self.summary, clusters, client, cluster)

    def plot(
        self,
        metric: str | None = None,
        against: str = "rounds",
        label: str | None = None,
        ax: Axes | None = None,
        **style: Any,
    ) -> Axes:
        """Draw a column of `metrics.csv` and return the axes.

        Args:
            metric: the column; None takes the mean of the task's metric (`accuracy_mean` for classification).
            against: `rounds`, `bytes` (up and down), `flops` (of the clients), `seconds` (virtual time) or
                `wall_seconds`.
            label: label in the legend; None takes the run's label or its method.
            ax: axes to draw into; None creates new axes.
            style: keyword arguments of `Axes.plot`.

        Raises:
            UserError: there is no such column or axis, or Matplotlib, which makes axes, is not installed.
        """
        metric, metrics = metric or f"{self.metric.name}_mean", self.metrics
        require(metric in metrics, "metric", metric, nearest(metric, list(metrics)))
        require(against in AGAINST, "against", against, f"use one of {', '.join(AGAINST)}")
        title, columns, unit = AGAINST[against]
        remedy = f"this run has no column {columns[0]}; use wall_seconds"
        require(columns[0] in metrics, "against", against, remedy)
        if against == "rounds" and "asynchronous" in self.summary:
            title = "server steps"
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise UserError("plot", metric, 'needs matplotlib: pip install "mpifl[report]"') from error

            ax = pyplot.subplots(figsize=(4.5, 3.0), layout="constrained")[1]
        x = sum(metrics[column] for column in columns) / unit
        ax.plot(x, metrics[metric], **{"label": label or self.own_label or self.method, "lw": 1.5, **style})
        ax.set(xlabel=title, ylabel=metric.replace("_", " "))
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=8)
        return ax

    # -- arrays ----------------------------------------------------------------------------------------------

    @cached_property
    def series(self) -> dict[str, np.ndarray]:
        """The columns of `metrics.csv`, float64 [evaluations]; empty fields are NaN."""
        rows = self.rows("metrics.csv")
        out = {}
        for name in rows[0]:
            try:
                out[name] = np.array([float(r[name] or "nan") for r in rows])
            except ValueError as error:
                remedy = f"metrics.csv: {error} in column {name}; run it again"
                raise UserError("RUN", str(self.folder), remedy) from error
        times = out.get("virtual_seconds", np.zeros(1))
        remedy = "metrics.csv: a time without end; run it again"
        require(not np.isinf(times).any(), "RUN", str(self.folder), remedy)
        return out

    @cached_property
    def bytes_by_kind(self) -> Counter[tuple[str, str]]:
        """The bytes of the federation by direction (up, down) and kind, from `ledger.csv`."""
        total: Counter[tuple[str, str]] = Counter()
        for row in self.rows("ledger.csv"):
            total[row["direction"], row["kind"]] += int(row["bytes"])
        return total

    @cached_property
    def algorithm_state(self) -> dict[str, np.ndarray]:
        """The arrays of `algorithm_state.npz`, by name; empty if there is no such file."""
        return self._arrays("algorithm_state.npz")

    @cached_property
    def matrices(self) -> dict[str, np.ndarray]:
        """The matrices over clients in `matrices.npz`, by name; empty if there is no such file."""
        return self._arrays("matrices.npz")

    def _arrays(self, file: str) -> dict[str, np.ndarray]:
        path = self.folder / file
        if not path.exists():
            return {}
        try:
            with zipfile.ZipFile(path) as parts:
                size = sum(part.file_size for part in parts.infolist())
            remedy = f"holds {size} bytes, more than any run writes"
            require(size <= MAX_ALGORITHM_STATE_BYTES, "RUN", str(path), remedy)
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except UserError:
            raise
        except NPZ_ERRORS as error:
            raise UserError("RUN", str(path), f"cannot be read: {error}; run it again") from error
        odd = [name for name, values in found.items() if values.dtype.kind not in "biuf"]
        require(not odd, "RUN", str(path), f"holds no numbers in {odd[:1]}; run it again")
        return found


def read_rows(path: Path, required: Mapping[str, re.Pattern[str]] | None = None) -> Rows:
    """Return the rows of a CSV file of a run folder.

    Args:
        path: the file.
        required: columns that it must have, and the patterns of their values; None takes those of `COLUMNS`.

    Returns:
        One dictionary per row; an empty list if there is no such file.

    Raises:
        UserError: a required column is missing, or a value does not match the pattern of its column.
    """
    kinds = COLUMNS.get(path.name, {}) if required is None else required
    if not path.exists() or path.read_bytes() in NO_ROWS:
        return []
    out = []
    for place, row in csv_file(path, "RUN", [*kinds]):
        checked = kinds if path.name != "timing.csv" else dict.fromkeys(row, NUMBER)
        for name, kind in checked.items():
            good = kind.fullmatch(row[name]) is not None
            require(good, place, row[name], f"is not a value of column {name}; run it again")
        out.append(row)
    return out


def is_unfinished(path: Path) -> bool:
    """Return whether a folder holds an unfinished run."""
    return (path / "config.yaml").is_file() and not (path / "summary.json").is_file()


def load(folder: str | Path) -> Run:
    """Return the run in a folder.

    Raises:
        UserError: the folder is not a run folder, is incomplete, is still being written, or has the format of
            another version.
    """
    path = Path(folder)
    require(path.is_dir(), "RUN", str(folder), "there is no such folder")
    remedy = "is not a run folder: it has no config.yaml"
    if (path / "sweep.yaml").is_file():
        remedy = "is the folder of a sweep; name one of its run folders, or read it with mpifl.load_sweep"
    require((path / "config.yaml").is_file(), "RUN", str(folder), remedy)
    if is_unfinished(path):
        last = max(p.stat().st_mtime for p in path.iterdir())
        ended = json_mapping(path / FILE).get("end")  # it was stopped, or failed
        recent = time.time() - last < RECENT_SECONDS and not ended
        state = "is still being written" if recent else "was never finished"
        wait = "wait for its end, " if recent else ""
        others = "or name other runs (compare, report and export leave it out with --finished)"
        remedy = f"{state}: it has no summary.json; {wait}resume it, {others}"
        raise UserError("RUN", str(folder), remedy)
    summary = json_file(path / "summary.json", "RUN")
    config = yaml_file(path / "config.yaml", "RUN", typed=True)
    require(isinstance(summary, dict) and isinstance(config, dict), "RUN", str(folder), "is not a run folder")
    check_format(summary.get("format"), path)
    run = Run(path, config, summary)
    needed = ["metrics.csv", "ledger.csv", *(["clusters.csv"] if run.written != "none" else [])]
    missing = [f for f in needed if not (path / f).exists()]
    require(not missing, "RUN", str(folder), f"is incomplete: it has no {', '.join(missing)}; run it again")
    _check(run)
    return run


def _check(run: Run) -> None:
    """Raise `UserError` unless `summary.json`, `config.yaml` and the tables hold what other modules read."""
    summary = run.summary

    def check(condition: bool, problem: str) -> None:
        require(condition, "RUN", str(run.folder), f"{problem}; run it again")

    for name in FIGURES:
        value = summary.get(name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_FIGURE
        check(good, f"has {name} = {shortened(repr(value))} in summary.json")
    good = all(isinstance(summary.get(name), str) for name in ("algorithm", "digest"))
    check(good, "names no algorithm and digest in summary.json")
    for name in ("settings", "identity", "data"):
        check(isinstance(summary.get(name), dict), f"has no mapping {name} in summary.json")
    check(isinstance(summary.get("files", {}), dict), "has files in summary.json that are no mapping")
    lags = summary.get("asynchronous") or {"staleness_histogram": {}}
    lags = lags.get("staleness_histogram") if isinstance(lags, dict) else None
    good = isinstance(lags, dict) and all(
        INTEGER.fullmatch(k) and isinstance(n, int) for k, n in lags.items()
    )
    check(good, "has no histogram of staleness in summary.json")
    good = all(isinstance(run.config.get(name, {}), dict) for name in ("network", "seed"))
    check(good, "has a config.yaml without sections network and seed")
    rows = run.rows("metrics.csv")
    steps = [int(row["round"]) for row in rows]
    good = bool(steps) and steps[-1] == summary["rounds"] and all(a < b for a, b in pairwise(steps))
    check(good, f"has rounds {shortened(str(steps))} in metrics.csv, {summary['rounds']} in all")
    for name in (*(f"{run.metric.name}_{what}" for what in SPREADS), *SENT):
        told, last = summary.get(name), rows[-1].get(name)
        alike = not last or (isinstance(told, (int, float)) and told == float(last))
        same = told is None or alike  # infinity and NaN are null
        check(same, f"has {name} = {last} in the last row of metrics.csv, {told} in summary.json")
    good = run.written != "all" or len(run.rows("clusters.csv")) == summary["clients"]
    check(good, f"has a clusters.csv without a row for each of {summary['clients']} clients")
