"""What a run folder holds: its files, every column of its tables, and every entry of `summary.json`.

`mpifl list columns`, `mpifl show COLUMN` and the page on columns of the site are made from it. Columns that
an evaluation gives are described where they are computed (`results/columns.py`), those of records in the
docstrings of the records, and the others here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from textwrap import wrap

from mpifl.core.computation import PURPOSES, Work
from mpifl.core.metric import METRICS
from mpifl.core.timing import PHASES
from mpifl.results.columns import MAIN, OF_CLUSTERS, OF_SCORES
from mpifl.runtime.hook_errors import Dropped
from mpifl.traffic.ledger import Entry, Moved

from .docstrings import meanings

SUMMARY = "summary.json"
METRIC = "|".join(METRICS)
SPREADS = "mean|worst|std|pooled|variance|standard|honest|targets|cluster|before|received|group|device"
WORDS: dict[str, tuple[str, str]] = {  # word in names of columns -> what it stands for, and its pattern
    "METRIC": ("the task's first metric, such as accuracy", METRIC),
    "SCORE": (
        "a metric, or one on a further set, such as accuracy_train",
        rf"(?:{METRIC})(?:_(?!{SPREADS})\w+)?",
    ),
    "SET": ("train, or a further test set", r"\w+"),
    "PART": ("groupG, clusterC or device_CLASS", r"(?:group\d+|cluster\d+|device_\w+)"),
    "MODULE": ("a module of the model", r"\w+"),
    "PURPOSE": (f"one of {', '.join(PURPOSES)}", "|".join(PURPOSES)),
    "PHASE": (f"one of {', '.join(PHASES)}", "|".join(PHASES)),
    "WAY": ("up or down", "up|down"),
    "G": ("number of a true group", r"\d+"),
    "OWN": ("name of a metric of your own", "(?!)"),
    "NAME": ("a name that a method or trainer gives", "(?!)"),
}
UNITS = (  # what names contain -> unit
    ("bytes", "bytes"),
    ("flops", "FLOP"),
    ("joules", "J"),
    ("seconds", "s"),
    ("PHASE", "s"),
    ("recovered_after_s", "s"),
    ("begins_s", "s"),
)
SECONDS = ("time", "start", "elapsed", "cpu", "idle")  # other columns in seconds
STEP = "server step; under `rounds` the round"
CLIENT = "number of the client, from 0"
COSTS = {  # passes and samples so far, and FLOPs by purpose
    **{name: f"{text}; of all clients so far, without evaluation" for name, text in meanings(Work).items()},
    "flops_PURPOSE": "FLOPs so far by purpose",
    "joules": "energy that all clients have used so far (`devices` with `watts`)",
}
OF_RUN = {  # columns of metrics.csv that no score gives
    "round": f"{STEP}, after which was evaluated; 0: before the first",
    "seconds": "real time since the start of the run",
    "virtual_seconds": "time on the clock of the simulated federation",
    "train_loss": "mean training loss of the visits, weighted by their samples",
    "NAME": "what clients report from training (`client.report(metrics=...)`), mean over clients",
    "federation_bytes_WAY": "bytes that clients have uploaded or downloaded so far",
    **COSTS,
    "METRIC_before": "metric of clients' own models before their last upload, mean over clients",
    "METRIC_before_std": "standard deviation over clients of the same",
    "METRIC_received": "metric of the models that clients received for their last upload, mean over clients",
    "METRIC_received_std": "standard deviation over clients of the same",
    "METRIC_cluster": "mean over clusters of the metric of each row on its group's own test set",
    "METRIC_cluster_std": "standard deviation over clusters of the same",
    "METRIC_cluster_all": "mean of METRIC_cluster over all evaluations so far",
    "METRIC_cluster_all_std": "standard deviation over clusters of each one's mean over all evaluations",
    "mixture_kl": "KL(true || estimated mixture) of clients' last uploads, in nats, mean over clients",
    "mixture_kl_uploads": "KL(true || estimated mixture) in nats, mean over all uploads so far",
    "recovery_steps": "server steps until the score is back after a change of data, mean over the changes so "
    "far; nan if one is not recovered from (`drift`)",
    "recovery_seconds": "seconds of the run's clock until the score is back, mean over the same changes",
    "recovered": "share of the changes of data so far from which the score has recovered",
    "score_lost": "what the score lacked of its value before each change of data, times server steps; sum",
    "clustering_bytes": "bytes that one-shot statistics and looks at each other have moved so far, up and "
    "down together (`drift`, `recluster`)",
    "client_distance": "mean L2 distance of the models of two clients (`evaluation.distances`)",
    "client_distance_within_clusters": "the same of two clients of one cluster",
    "client_distance_within_groups": "the same of two clients of one true group",
    "head_distance": "mean L2 distance of the last layers of two clients (`evaluation.distances`)",
    "head_distance_within_clusters": "the same of two clients of one cluster",
    "head_distance_within_groups": "the same of two clients of one true group",
    "epsilon": "epsilon of differential privacy spent so far, at `privacy.delta`",
    "clip": "norm to which updates are clipped in the next round (`privacy.quantile`)",
    "secure_dropped": "uploads lost so far by drop-outs of secure aggregation",
    "secure_skipped": "rows left unchanged so far, because too few clients were left to open their sum",
    "robust_too_small": "rows of the last step whose uploads were too few for the robust rule",
    "lora_lost": "what ranks of adapters lost of the mean products in the last step, relative to these",
    "arrivals": "uploads that have arrived so far (asynchronous policies)",
    "refusal_rate": "share of these that changed nothing, as they were too stale",
    "staleness_mean": "mean number of server steps between download and arrival, over all uploads so far",
    "late_clients": "clients of the last round that were left out, as they were too slow",
    "work_mean": "mean share of their work that clients of the last round did (`partial_work`)",
}
VISIT_BYTES = {"bytes_WAY": "bytes that the client uploaded or downloaded"}
DEVICE = {"device": "class of the client's device (`devices`)"}
GROUP = {"group": "number of the true group; -1 if there is none"}
TABLES: dict[str, tuple[str, Mapping[str, str]]] = {  # file -> what it holds, and its columns
    "metrics.csv": (
        "one row for each evaluation",
        {name: text for figure in (MAIN, *OF_SCORES, *OF_CLUSTERS) for name, text in figure.meanings.items()}
        | OF_RUN,
    ),
    "clients.csv": (
        "final figures of each evaluated client",
        {
            "client": CLIENT,
            "cluster": "number of its estimated cluster",
            "SCORE": "its score",
            "loss": "its loss on its test samples",
            "loss_SET": "its loss on another set",
            "train": "number of its training samples",
            "val": "number of its validation samples",
            "test": "number of its test samples",
            **GROUP,
            **DEVICE,
            "attacker": "1 if it attacks, otherwise 0",
            "epsilon": "its epsilon, under local privacy",
            "client_name": "its name in the source, or in the file of the split",
        },
    ),
    "clusters.csv": (
        "the final cluster of each client beside its true group",
        {
            "client": CLIENT,
            "cluster": "number of its estimated cluster",
            **GROUP,
            "placed": "1 if its cluster is known, 0 if it is still where it began",
            "client_name": "its name in the source, or in the file of the split",
        },
    ),
    "assignments.csv": (
        "the cluster of each client at the first evaluation, and every change of one at later ones",
        {"round": f"{STEP} of the evaluation", "client": CLIENT, "cluster": "number of its cluster"},
    ),
    "groups.csv": (
        "the true group of each client at first, and every change of one (`drift`)",
        {"since": f"first {STEP} with this group", "client": CLIENT, **GROUP},
    ),
    "presence.csv": (
        "which clients have joined and left (`newcomers`, `leavers`)",
        {
            "step": f"first {STEP} in which it takes part, or takes part no more",
            "seconds": "time on the run's clock at which it does so, under policies that count seconds",
            "client": CLIENT,
            "event": "joins or leaves",
        },
    ),
    "ledger.csv": ("what a federation would have sent, by step, direction and kind", meanings(Entry)),
    "visits.csv": ("what each client downloaded and uploaded in each step", {**meanings(Moved), **DEVICE}),
    "client_traffic.csv": ("the total traffic of each client", {"client": CLIENT, **VISIT_BYTES}),
    "computation.csv": (
        "what a federation would compute, by step and purpose",
        {"step": STEP, "purpose": f"one of {', '.join(PURPOSES)}", **meanings(Work)},
    ),
    "client_computation.csv": (
        "the computation of each client by purpose, in the whole run",
        {"client": CLIENT, "purpose": f"one of {', '.join(PURPOSES)}", **meanings(Work)},
    ),
    "client_energy.csv": (
        "the energy of each client (`devices` with `watts`)",
        {"client": CLIENT, "joules": "energy that it used in the run"},
    ),
    "events.csv": (
        "one row for each upload that arrives (asynchronous policies)",
        {
            "time": "when it arrives, on the run's clock",
            "client": CLIENT,
            "visit": "number of the client's earlier visits",
            "start": "when the visit started, on the run's clock",
            "read_version": "server steps made when the client downloaded",
            "arrival_version": "server steps made when the upload arrives",
            "staleness": "the difference of the two, in server steps",
            "weight": "largest weight of the upload in a row of the server",
            "accepted": "1 if the upload entered the server's step, 0 if it was refused",
            **DEVICE,
        },
    ),
    "updates.csv": (
        "the update of each client of each round, by module of the model (`output.updates`)",
        {
            "round": STEP,
            "client": CLIENT,
            "block": "module of the model",
            "size": "L2 norm of the update",
            "mean_cosine": "its cosine with the mean update of the round",
            "pair_cosine": "its mean cosine with the other updates of the same true group",
            "distance": "its L2 distance to the mean update; in the last layer FedCUAU's CUAU",
            **GROUP,
        },
    ),
    "dropped.csv": ("visits that failed twice and were left out (`on_client_error`)", meanings(Dropped)),
    "timing.csv": (
        "seconds of each rank between two evaluations",
        {
            "round": f"{STEP} of the evaluation",
            "rank": "number of the rank",
            "PHASE": "seconds in a phase of its work",
            "cpu": "processor time",
            "elapsed": "all seconds",
            "idle": "seconds without a task, of workers of asynchronous runs",
        },
    ),
    "mpi_traffic.csv": (
        "what MPI sent since the last start, by rank, call and purpose",
        {
            "rank": "number of the rank that sent",
            "call": "MPI call",
            "purpose": "what it is for",
            "calls": "number of calls",
            "messages": "number of messages",
            "bytes": "bytes sent",
            "seconds": "seconds in these calls",
        },
    ),
    SUMMARY: (
        "final figures of the run",
        {
            "format": "number of the format of run folders",
            "name": "name of the configuration",
            "algorithm": "name of the method",
            "rounds": "server steps that were taken",
            "seed": "seeds of data, model, training and system",
            "ranks": "number of MPI ranks",
            "clients": "number of clients",
            "model_parameters": "number of parameters of the model that are trained",
            "whole_model_bytes": "bytes of the whole model, where a part is frozen",
            "drop_single": "whether batches of one sample are left out",
            "input_shape": "shape of one sample",
            "num_classes": "number of classes, labels, numbers or different tokens",
            "class_names": "names of these",
            "data_info": "what else a model must know of samples and labels",
            "samples_change": "whether clients' samples change from visit to visit",
            "digest": "SHA-256 of the final state, equal for any number of ranks",
            "settings": "what decides numbers and differs from its default",
            "identity": "what decides the last bits of the numbers",
            "data": "digests of samples, split and files of the data",
            "files": "checksums of your own files of times, links, weights and arrivals",
            "ended": "why the run ended before its last round, and when",
            "metric": "the task's first metric, where that is not accuracy",
            "directions": "of your own metrics: 1 if more is better, -1 if less is",
            "METRIC_mean": "the same as in the last row of metrics.csv",
            "METRIC_worst": "the same as in the last row of metrics.csv",
            "METRIC_std": "the same as in the last row of metrics.csv",
            "OWN_mean": "mean of a metric of your own at the end",
            "ari": "the same as in the last row of metrics.csv",
            "num_clusters": "the same as in the last row of metrics.csv",
            "num_unplaced": "the same as in the last row of metrics.csv",
            "federation_bytes_WAY": "bytes that clients uploaded or downloaded in the run",
            "federation_bytes_expected": "forecast of these, and why it is missing or differs",
            **COSTS,
            "flops_expected": "forecast of the FLOPs of clients, and why it is missing or differs",
            "mpi_bytes": "bytes that MPI sent since the last start of the run",
            "mpi_bytes_complete": "false if the traffic of lost ranks is not known",
            "peak_bytes": "largest memory of each rank",
            "wall_seconds": "real time of the run",
            "client_models": "which models clients use at the end: rows of the server, or others",
            "served": "which rows clients use, where they are in model.safetensors",
            "privacy": "epsilon, delta and what was spent",
            "asynchronous": "staleness, concurrency and rates of an asynchronous run",
            "beginning": "runs of a sweep from which the results of the first phases came",
            "visits_dropped": "visits that failed twice and were left out",
            "ranks_lost": "number of ranks that were lost",
            "retimed_from": "the run of which this is a copy with other times (`mpifl retime`)",
            "updates": "means of updates.csv by module, and by true group",
            "parameter_distance": "mean L2 distance of the rows of two clients",
            "parameter_distance_within_groups": "the same of two clients of one true group",
            "drift": "a row for each change of data, with the following entries",
            "drift.step": f"first {STEP} with the new data",
            "drift.before": "last score before the change",
            "drift.worst": "worst score until the next change",
            "drift.recovered_after": "server steps until the first evaluation after the worst whose score "
            "has the share `drift.recovered` of that before; 0: it never fell so far, null: it is not back",
            "drift.lost": "what evaluations lack of the score before, times the server steps between them",
            "drift.begins_s": "time on the run's clock when the step begins",
            "drift.recovered_after_s": "seconds from then to the evaluation that recovered_after counts to",
            "drift.clustering_bytes_WAY": "what statistics and looks moved until the next change",
            "drift.clustering_flops": "what statistics and looks computed until the next change",
        },
    ),
}


@dataclass(frozen=True)
class Column:
    """A column of a table, or an entry of `summary.json`.

    Attributes:
        file: the file.
        name: its name; words in capitals stand for others (`WORDS`).
        meaning: what it is.
    """

    file: str
    name: str
    meaning: str

    @property
    def unit(self) -> str:
        """The unit, by the name; empty for a share, a count or a number without one."""
        last = self.name.rpartition(".")[2]
        if last in SECONDS:
            return "s"
        counts = last.endswith(("_expected", "_complete")) or last.startswith("updates")
        return "" if counts else next((unit for word, unit in UNITS if word in last), "")

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that it stands for."""
        parts = re.split(f"({'|'.join(sorted(WORDS, key=len, reverse=True))})", self.name)
        texts = (f"(?:{WORDS[part][1]})" if part in WORDS else re.escape(part) for part in parts)
        return re.compile("".join(texts))


@cache
def columns() -> tuple[Column, ...]:
    """Return all columns, file by file."""
    return tuple(
        Column(file, name, text) for file, (_, found) in TABLES.items() for name, text in found.items()
    )


def named(name: str) -> list[Column]:
    """Return what a name means in each file that has it: a column of this name, else the first that fits."""
    out = []
    for file in TABLES:
        mine = [column for column in columns() if column.file == file]
        exact = [column for column in mine if name in (column.name, f"{file}.{column.name}")]
        fits = (column for column in mine if column.pattern.fullmatch(name))
        out += exact[:1] or [column for column in [next(fits, None)] if column is not None]
    return out


def listed() -> Iterator[str]:
    """Yield the lines of `mpifl list columns`."""
    yield "words in capitals stand for others: " + "; ".join(f"{w}: {text}" for w, (text, _) in WORDS.items())
    for file, (about, _) in TABLES.items():
        yield f"{file}: {about}"
        for column in columns():
            if column.file == file:
                unit = f" [{column.unit}]" if column.unit else ""
                yield f"  {column.name:32} {column.meaning}{unit}"


def page(name: str) -> str:
    """Return what `mpifl show` says of a file or a column; empty if there is none of that name."""
    if name in TABLES:
        found = [column for column in columns() if column.file == name]
        head = [f"{name}: {TABLES[name][0]}", ""]
        return "\n".join([*head, *(line for column in found for line in _lines(column, column.name))])
    return "\n".join(line for column in named(name) for line in _lines(column, name))


def _lines(column: Column, asked: str) -> list[str]:
    """Return the lines that explain a column, under the name that was asked for."""
    unit = f", in {column.unit}" if column.unit else ""
    as_listed = "" if asked == column.name else f" (one of {column.name})"
    what = "entry" if column.file == SUMMARY else "column"
    return [
        f"{asked}: {what} of {column.file}{unit}{as_listed}",
        *(f"    {line}" for line in wrap(column.meaning, 100)),
    ]
