"""Small complete runs that tests share: their options, and how to read their folders."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from mpifl import cli
from mpifl.results.reader import OF_CLIENTS
from mpifl.training.precision import has_bfloat16

HERE = Path(__file__).parents[1]
CONFIG = HERE / "configs" / "tiny.yaml"
OWN = HERE / "support" / "own_metrics.py"
TASK_CONFIG = HERE / "configs" / "tasks.yaml"
SCRIPT = HERE / "mpi" / "many.py"  # runs them all with one start of Python
HALF = ["--participation", "0.5", "--rounds", "3"]
HOSTED = ["--system.hosting", "groups"]
SIGN_FLIP = ["--attack", "{name: sign_flip, share: 0.25, factor: 4}"]
CHARGED = [
    *("--costs", "all", "--delay.name", "exponential", "--devices"),
    "{name: classes, classes: {a: {share: 0.5, watts: 3}, b: {share: 0.5, speed: 3, watts: 8}}}",
]
RUNS: dict[str, list[str]] = {
    "fedavg": HALF,
    "fedavg-stacked": [*HALF, "--system.stack", "3"],
    "scaffold-stacked": ["--algorithm", "scaffold", *HALF, "--system.stack", "3"],
    "scaffold": ["--algorithm", "scaffold", *HALF],
    "scaffold-hosted": ["--algorithm", "scaffold", *HALF, *HOSTED],
    "ifca": ["--algorithm", "{name: ifca, num_clusters: 3}", *HALF, "--seed", "1"],  # two rows are chosen
    "fedper": ["--algorithm", "fedper", *HALF],
    "pfedgraph": ["--algorithm", "pfedgraph", *HALF],  # products of rows that are read one by one
    "kept-optimisers": [*HALF, "--local.keep_optimizer", "true", "--local.momentum", "0.9"],
    "cfl": ["--algorithm", "{name: cfl, warmup: 1, eps1: 100, eps2: 0}", *HALF],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}"],
    "emdcfl-half": [
        *("--algorithm", "{name: emdcfl, sample_cap: 32, solver: sinkhorn}", *HALF),
        *("--evaluation.distances", "true", "--evaluation.matrices", "[parameters, gradients, angles]"),
    ],
    "emdcfl-server": [
        *("--algorithm", "{name: emdcfl, sample_cap: 32, solver: sinkhorn}", *HALF),
        *("--system.exchange", "{name: mpi, distances: server}"),
    ],
    "emdcfl-local": [
        *("--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}", "--system.exchange", "local")
    ],
    "pacfl": ["--algorithm", "pacfl", *HALF],
    "ucfl": ["--algorithm", "ucfl", *HALF],
    "ucfl-hosted": ["--algorithm", "ucfl", *HALF, *HOSTED],
    "ucfl-reduced": ["--algorithm", "ucfl", *HALF, "--system.collective", "reduce"],
    "fedavg-measured": [*HALF, "--system.cost.name", "measured"],
    "fedavg-gathered": [*HALF, "--system.collective", "gather"],
    "ucfl-4": ["--algorithm", "{name: ucfl, streams: 4}", *HALF],
    "compressed": [
        *HALF,
        *("--payload", "{dtype: bfloat16, compression: {name: qsgd, bits: 4}, error_feedback: true}"),
        *("--network.name", "wireless-slow"),
    ],
    "compressed-downloads": [
        *("--algorithm", "{name: ifca, num_clusters: 2}", *HALF),
        *("--payload", "{compression: top_k, error_feedback: true, downloads: {name: qsgd, bits: 6}}"),
    ],
    "fedbuff-downloads": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 4}", "--rounds", "3"),
        *("--payload.downloads", "{name: qsgd, bits: 6}"),
    ],
    "private": [
        *("--algorithm", "{name: ifca, num_clusters: 2}", *HALF),
        *(
            "--privacy",
            "{name: central, clip: 0.5, noise_multiplier: 0.5, sampling: poisson, quantile: 0.5, "
            "quantile_noise: 2.0, count_noise: 2.0}",
        ),
    ],
    "secure": [*HALF, "--secure_aggregation", "masks"],
    "secure-ring": [
        *("--rounds", "3", "--privacy", "{name: central, clip: 0.5, noise_multiplier: 0.5}"),
        *("--secure_aggregation", "{name: masks, neighbours: 4, bits: 32, dropout: 0.2, threshold: 0.5}"),
    ],
    "private-local": [*HALF, "--privacy", "{name: local, clip: 0.5, noise_multiplier: 0.1}"],
    "costs-all-looks": ["--algorithm", "{name: emdcfl, sample_cap: 16}", *HALF, *CHARGED],
    "costs-all": ["--algorithm", "{name: ifca, num_clusters: 3}", *HALF, *CHARGED],
    "costs-all-events": [*("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}"), *HALF, *CHARGED],
    "over-selection": [
        *(
            "--algorithm",
            "scaffold",
            *HALF,
            "--delay.name",
            "exponential",
            "--network.uplink_bytes_s",
            "9kB/s",
        ),
        *("--policy", "{name: over_selection, extra: 0.5, late: sent, deadline_s: 3s}"),
    ],
    "partial-work": [
        *("--algorithm", "fedem", *HALF, "--delay.name", "exponential", "--local.epochs", "2"),
        *("--policy", "{name: partial_work, deadline_s: 500ms, stragglers: 0.5}"),
    ],
    "classes": [
        *HALF,
        *(
            "--devices",
            "{name: classes, classes: {a: {share: 0.25, speed: 2, uplink_bytes_s: 9kB/s}, b: {share: 0.75}}}",
        ),
        *("--per_client", "{a: {epochs: 3}, 0-1: {batch_size: 8}}", "--system.stack", "2"),
        *("--availability", "{profile: [1, 0.5], day_s: 4, spread_s: 2}"),
    ],
    "median": [*HALF, *SIGN_FLIP, "--robust", "median"],
    "krum-ifca": [
        *("--algorithm", "{name: ifca, num_clusters: 2}", "--rounds", "2"),
        *("--attack", "{name: noise, clients: [2], sigma: 2}", "--robust", "{name: multi_krum, f: 1}"),
    ],
    "norm-bound": [*HALF, "--attack", "{name: scale, share: 0.2}", "--robust", "norm_bound"],
    "label-flip": [*HALF, "--attack", "{name: label_flip, share: 0.2}"],
    "fedbuff-trimmed": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 4}", "--rounds", "3", *SIGN_FLIP),
        *("--robust", "{name: trimmed_mean, beta: 0.25}"),
    ],
    "drift": [
        *("--algorithm", "{name: ifca, num_clusters: 2}", *HALF, "--rounds", "4", "--evaluation.every", "1"),
        *("--drift", "{kind: swap, at: [3], share: 0.5}"),
    ],
    "drift-oracle": [
        *("--algorithm", "oracle", *HALF, "--rounds", "4", "--drift", "{kind: arrival, at: [2, 3]}")
    ],
    "drift-again": [
        *("--algorithm", "{name: fedclust, num_clusters: 2}", *HALF, "--rounds", "4"),
        *("--drift", "{kind: swap, at: [2], share: 0.5}", "--recluster", "{at: [3]}"),
    ],
    "drift-events": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", *HALF, "--rounds", "5"),
        *("--drift", "{kind: concept, at: [2], gradual: 2, share: 0.5}"),
    ],
    "drift-by-time": [  # rounds of 1 s; the one that begins at 2 s is the third
        *("--algorithm", "{name: flexcfl, num_groups: 2}", *HALF, "--rounds", "5", "--evaluation.every", "1"),
        *("--drift", "{kind: swap, at_s: [1.5], share: 0.5}", "--recluster", "{seconds: 2, loss_rise: 0.5}"),
    ],
    "drift-by-time-events": [
        *("--algorithm", "{name: fedclust, num_clusters: 2}", "--policy", "{name: buffer, size: 2}", *HALF),
        *(
            "--rounds",
            "8",
            "--delay.name",
            "exponential",
            "--drift",
            "{kind: swap, at_s: [0.8, 2], share: 0.3}",
        ),
        *(
            "--recluster",
            "{seconds: 1, loss_rise: 0.2}",
            "--leavers",
            "{share: 0.25, leaves_s: 0.5, spread_s: 2}",
        ),
    ],
    "drift-by-time-oracle": [
        *("--algorithm", "oracle", *HALF, "--rounds", "6"),
        *("--drift", "{kind: swap, at_s: [1.5], gradual_s: 2, share: 0.8}"),
    ],
    "drift-by-time-oracle-events": [
        *("--algorithm", "oracle", "--policy", "{name: buffer, size: 2}", *HALF, "--rounds", "8"),
        *("--delay.name", "exponential", "--drift", "{kind: swap, at_s: [0.3], gradual_s: 1.5, share: 0.8}"),
    ],
    "events-looks": [
        *("--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}", "--policy", "every_arrival"),
        *("--rounds", "10", "--delay.name", "exponential", "--cohort_size", "4"),
    ],
    "events-looks-timed": [
        *("--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}", "--policy", "every_arrival"),
        *("--rounds", "14", "--cohort_size", "4", "--network.uplink_bytes_s", "9kB/s", *CHARGED),
    ],
    "events-kept": [
        *("--algorithm", "{name: fesem, num_clusters: 2}", "--policy", "{name: buffer, size: 2}"),
        *("--rounds", "5", "--delay.name", "exponential", "--cohort_size", "4"),
    ],
    "events-split": [
        *("--algorithm", "{name: cfl, warmup: 2, eps1: 100, eps2: 0, max_age: 20}", "--rounds", "10"),
        *("--policy", "every_arrival", "--delay.name", "exponential", "--cohort_size", "4"),
    ],
    "fedbuff": [*("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}"), *HALF],
    "fedbuff-hosted": [*("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", *HALF, *HOSTED)],
    "own-metric": [*HALF, "--evaluation.metrics", f"[{OWN}:top2, {OWN}:recalled, {OWN}:careless]"],
    "own-module": [*HALF, "--model", f"{{name: custom, path: {OWN}:CarelessNet, head: head}}"],
    "lora": [
        *("--algorithm", "{name: ifca, num_clusters: 3}", *HALF, "--seed", "1"),
        *("--model", "{name: lenet5, lora: {rank: 2}}", "--data.scenario.resize", "16"),
    ],
    "lora-ranks": [
        *("--algorithm", "fedper", *HALF, "--model.lora", "{rank: 3, train: [], ranks: {0-3: 1, 5: 2}}")
    ],
    "lora-products": [
        *("--algorithm", "{name: ifca, num_clusters: 3}", *HALF, "--seed", "1"),
        *("--model.lora", "{rank: 3, average: product, ranks: {0-3: 1, 5: 2}}"),
    ],
    "lora-norms": [
        *(*HALF, "--model", "{name: resnet20, lora: {rank: 1, layers: [layer3*], train: ['*bn?']}}")
    ],
    "ucfl-parallel": ["--algorithm", "{name: ucfl, streams: 4, parallel: true}", *HALF],
    "updates": [*HALF, "--output.updates", "true"],
    "updates-of-nobody": [
        *("--cohort_size", "1", "--rounds", "4", "--output.updates", "true"),
        *("--privacy", "{name: central, clip: 0.5, noise_multiplier: 0.5, sampling: poisson}"),
    ],
    "evaluated": [*HALF, "--evaluation.finetune_epochs", "2", "--evaluation.train", "true"],
    "stopped-at-target": [
        *("--participation", "0.5", "--rounds", "30", "--evaluation.every", "2"),
        *("--stop", "{target: 0.4, metric: accuracy_worst}"),
    ],
    "stopped-without-patience": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 3}", "--rounds", "60"),
        *("--evaluation.every", "2", "--delay", "{name: exponential, mean_s: 2}"),
        *("--stop", "{patience: 2, metric: loss, min_delta: 0.05}"),
    ],
    "started": [*HALF, "--start.run", "FOLDER/tiny-fedavg"],
}
TASKS = {
    "regression": ["--task", "regression"],
    "multi_label": ["--task", "multi_label", "--data.source.kind", "multi_hot"],
    "next_token": [
        *("--model", "{name: transformer, width: 8, layers: 1, heads: 2}"),
        *("--task", "next_token", "--data.source.kind", "tokens"),
    ],
    "segmentation": [
        *("--model", "{name: unet, channels: [2, 4]}", "--task", "segmentation"),
        *("--data.source", "{name: shapes, train: 48, test: 12, side: 16, outline: true}"),
        *("--data.scenario.permutes", "labels"),
    ],
    "classification": [
        *("--data.source.kind", "classes", "--model.hidden", "[]"),
        *("--task.metrics", "[macro_f1, balanced_accuracy, top5]"),
    ],
}
TASK_METHODS = {
    "fedavg": [],
    "ifca": ["--algorithm", "{name: ifca, num_clusters: 2}"],
    "fedem": ["--algorithm", "{name: fedem, num_components: 2}"],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 16}"],
    "ucfl": ["--algorithm", "{name: ucfl, noise_batch: 0.5}"],
    "moon": ["--algorithm", "moon"],
}
TASK_RUNS = {
    f"{task}-{method}": [str(TASK_CONFIG), *TASKS[task], *TASK_METHODS[method]]
    for task in TASKS
    for method in TASK_METHODS
}
RUNS |= TASK_RUNS
RUNS["segmentation-fedper"] = [str(TASK_CONFIG), *TASKS["segmentation"], "--algorithm", "fedper"]
if has_bfloat16(torch.device("cpu")):
    BFLOAT16 = [*HALF, "--local.precision", "bfloat16", "--local.momentum", "0.9"]
    RUNS |= {"bfloat16": BFLOAT16, "bfloat16-stacked": [*BFLOAT16, "--system.stack", "3"]}


class Runs:
    """The run folders in one place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / f"tiny-{name}"

    def summary(self, name: str) -> dict[str, Any]:
        """Return the `summary.json` of a run."""
        return json.loads((self.of(name) / "summary.json").read_text())

    def environment(self, name: str) -> dict[str, Any]:
        """Return the `environment.json` of a run."""
        return json.loads((self.of(name) / "environment.json").read_text())

    def table(self, name: str, file: str) -> list[dict[str, str]]:
        """Return the rows of a CSV file."""
        with (self.of(name) / file).open() as lines:
            return list(csv.DictReader(lines))

    def mpi_bytes(self, *names: str) -> Counter[str]:
        """Return the bytes of each MPI call, summed over runs."""
        rows = (row for name in names for row in self.table(name, "mpi_traffic.csv"))
        total: Counter[str] = Counter()
        for row in rows:
            total[row["call"]] += int(row["bytes"])
        return total


class Alone(Runs):
    """Runs made in this process, each when it is first asked for.

    Args:
        folder: an empty folder.
        runs: id -> options, which may begin with a configuration; FOLDER in them stands for the folder.
        common: options of all runs.
    """

    def __init__(self, folder: Path, runs: Mapping[str, Sequence[str]], *common: str) -> None:
        super().__init__(folder)
        self.runs, self.common = runs, common

    def of(self, name: str) -> Path:
        """Return the folder of a run."""
        folder = super().of(name)
        if not folder.exists():
            options = [option.replace("FOLDER", str(self.folder)) for option in self.runs[name]]
            place = ["--output.folder", str(self.folder), "--output.id", name]
            own = [] if options[:1] and not options[0].startswith("--") else [str(CONFIG)]
            assert cli.main(["run", *own, *options, "--quiet", *place, *self.common]) == 0, name
        return folder


TABLES = (
    *("metrics.csv", "clients.csv", "clusters.csv", "ledger.csv", "visits.csv", "client_traffic.csv"),
    *("computation.csv", "client_computation.csv"),
)
SOMETIMES = ("events.csv", "dropped.csv")  # of asynchronous runs, and of those in which clients fail
CLOCKS = ("seconds",)  # columns of wall-clock times
OF_A_LAUNCH = (
    *("wall_seconds", "mpi_bytes", "mpi_bytes_complete", "peak_bytes", "ranks", "ranks_lost", "asynchronous"),
)
OF_A_CLOCK = ("arrivals", "refused", "staleness_mean", "staleness_max", "concurrency", "clock_seconds")


def run_each(out: Path, runs: Mapping[str, Sequence[str]]) -> Path:
    """Run the tiny configuration with each set of options, evaluated after each round; return their folder.

    Args:
        out: the folder.
        runs: id -> options.
    """
    for name, options in runs.items():
        place = ["--output.folder", str(out), "--output.id", name, "--evaluation.every", "1", "-q"]
        assert cli.main(["run", str(CONFIG), *place, *options]) == 0
    return out


def columns_of(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV file by name, without those of wall clocks."""
    with path.open(newline="") as file:
        heads, *rows = csv.reader(file)
    return {name: [row[i] for row in rows] for i, name in enumerate(heads) if name not in CLOCKS}


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the entries of `summary.json` about the numbers of a run, not about its ranks and seconds."""
    tree = json.loads((folder / "summary.json").read_text())
    events = tree.get("asynchronous", {})
    kept = {name: value for name, value in tree.items() if name not in OF_A_LAUNCH}
    return kept | {name: events[name] for name in OF_A_CLOCK if name in events}


def assert_same_run(one: Path, other: Path) -> None:
    """Raise unless two run folders hold the same run.

    Every number in every file must be equal, except for wall-clock times, MPI traffic and where it ran.
    Neither folder may contain checkpoints or half-written files.
    """
    output = yaml.safe_load((one / "config.yaml").read_text()).get("output", {})
    sometimes = (*SOMETIMES, *(OF_CLIENTS if output.get("clients") == "none" else ()))
    for name in dict.fromkeys((*TABLES, *sometimes)):
        if name in sometimes and not (one / name).exists() and not (other / name).exists():
            continue
        mine, theirs = columns_of(one / name), columns_of(other / name)
        assert [*mine] == [*theirs], f"{name}: columns"
        for column, values in mine.items():
            assert values == theirs[column], f"{name}: {column}"
    assert figures_of(one) == figures_of(other), "summary.json"
    with np.load(one / "algorithm_state.npz") as mine, np.load(other / "algorithm_state.npz") as theirs:
        assert sorted(mine.files) == sorted(theirs.files), "algorithm_state.npz"
        for name in mine.files:
            np.testing.assert_array_equal(mine[name], theirs[name], f"algorithm_state.npz: {name}")
    models = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert sorted(models[0]) == sorted(models[1]), "model.safetensors"
    for name, rows in models[0].items():
        torch.testing.assert_close(rows, models[1][name], rtol=0, atol=0, equal_nan=True)
    mine, theirs = (set(columns_of(folder / "timing.csv")["round"]) for folder in (one, other))
    assert mine == theirs, "timing.csv: rounds"
    for folder in (one, other):
        assert not (folder / "checkpoints").exists()
        assert not [*folder.glob("*.tmp"), *folder.glob(".*")]
