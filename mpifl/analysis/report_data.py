"""The content of the report as plain data that can be serialised as JSON; the page draws it.

Most numbers are rounded to four or five digits and long curves are thinned, so that a report of hundreds of
runs takes only a few megabytes.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from mpifl.core.computation import FIGURES, PURPOSES
from mpifl.core.errors import UserError, first_of, require
from mpifl.core.metric import ACCURACY, Metric, metric_of_column
from mpifl.core.textfiles import json_mapping
from mpifl.results import identity
from mpifl.results.reader import Run

from . import drift, statistics_drawn
from .comparison import Comparison, column_of
from .figures import pair_matrices, phase_seconds, silhouette_of
from .seed_groups import Group, axes_of, rounds_title

AXES = {  # column -> title, unit, factor that converts to the unit
    "round": ("rounds", "", 1.0),
    "bytes": ("bytes of the federation, up and down", "MB", 1e-6),
    "virtual_seconds": ("virtual time", "s", 1.0),
    "seconds": ("wall time", "s", 1.0),
}
LIKE_ROUNDS = {"bytes": 0.01, "virtual_seconds": 0.01, "seconds": 0.05}  # tolerances of `_like_rounds`
NO_CURVES = (
    *("round", "seconds", "virtual_seconds", "federation_bytes_up", "federation_bytes_down"),
    *("flops", *(f"flops_{purpose}" for purpose in PURPOSES), *FIGURES),
    "joules",
)
TITLES = {  # column of metrics.csv -> its title
    "accuracy_mean": "mean accuracy over clients",
    "accuracy_worst": "accuracy of the worst client",
    "accuracy_worst_tenth": "mean accuracy of the worst tenth of clients",
    "accuracy_std": "standard deviation of accuracy over clients",
    "accuracy_variance": "variance of accuracy over clients",
    "accuracy_standard_error": "binomial standard error of the accuracy",
    "accuracy_pooled": "accuracy on all test samples together",
    "loss": "mean test loss over clients",
    "train_loss": "mean training loss of the visits",
    "num_clusters": "clusters found",
    "num_unplaced": "clients whose cluster is not known",
    "ari": "adjusted Rand index (ARI)",
    "nmi": "normalised mutual information (NMI)",
    "purity": "purity of clusters",
    "ari_everyone": "ARI, unplaced clients included",
    "churn": "churn: share of clients that changed cluster",
}
MAX_CURVE_NUMBERS = 400_000  # of all curves; more are thinned
MIN_POINTS = 20  # of a thinned curve
MAX_DETAIL_NUMBERS = 500_000  # of all single runs; runs beyond it are left out of the sections on single runs
RECORD_DIGITS = 12  # of the target, and of values compared with it
MAX_MATRIX = 240  # rows of a drawn matrix; larger ones are averaged over neighbours
CLIENT_NUMBERS = ("client", "cluster", "group", "train")  # integer columns of clients.csv
MAX_STAGES = 10  # evaluations in the drawing of clusters over rounds
MAX_LAGS = 60  # bars of a histogram of staleness


def rounded(value: float, digits: int = 4) -> float | int | None:
    """Return a number rounded to `digits` significant digits; None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def _rounded(values: Sequence[float] | np.ndarray, digits: int = 4) -> list[float | int | None]:
    return [rounded(float(v), digits) for v in values]


# -- curves --------------------------------------------------------------------------------------------------


def curves(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the curves of all groups: axes, metrics, and the values of each group.

    Returns:
        `axes`: rounds, and the axes that are not proportional to rounds, the first of which is shown
        first (see `axes_of`); `known`: all axes; `same`: titles of
        the axes that are proportional to rounds; `metrics`; `thinned`: whether curves are thinned; `groups`:
        for each group the word for a round, its positions on all axes, the mean, minimum and maximum of each
        metric over seeds, the records of its runs (`_records`), and under drift where data change.
    """
    known = axes_of(groups, [a for a in AXES if a == "round" or any(g.has(a) for g in groups)])
    offered = [a for a in known if a == "round" or not _like_rounds(groups, a)]
    metrics, runs = _metrics(groups), [run for group in groups for run in group.runs]
    points = sum(len(g.rounds) * (1 if len(g.runs) == 1 else 3) for g in groups) * max(len(metrics), 1)
    thin = min(1.0, MAX_CURVE_NUMBERS / max(points, 1))
    return {
        "axes": [_axis(a, groups) for a in offered],
        "known": [_axis(a, groups) for a in known],
        "same": [AXES[a][0] for a in known if a not in offered],
        "metrics": [
            _metric(name, _metric_of(name, groups), column_of(name, runs).better) for name in metrics
        ],
        "thinned": thin < 1,
        "groups": [_group_curves(g, known, metrics, thin) for g in groups],
    }


def _axis(name: str, groups: Sequence[Group]) -> dict[str, str]:
    title, unit, _ = AXES[name]
    title = rounds_title(groups) if name == "round" else title
    return {"id": name, "title": title, "unit": unit}


def _like_rounds(groups: Sequence[Group], axis: str) -> bool:
    """Return whether an axis is the same linear function of rounds for all groups, so shows nothing new."""
    pairs = [(g.column("round").mean(0), g.column(axis).mean(0)) for g in groups if g.has(axis)]
    x, y = (np.concatenate(values) for values in zip(*pairs, strict=True))
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if np.ptp(y) == 0:
        return True
    if np.ptp(x) == 0:
        return False
    line = np.polynomial.Polynomial.fit(x, y, 1)
    return bool(np.abs(line(x) - y).max() <= LIKE_ROUNDS[axis] * np.ptp(y))


def _metrics(groups: Sequence[Group]) -> list[str]:
    """Return the columns of `metrics.csv` that hold any number but 0; those with titles come first."""
    names = dict.fromkeys(name for g in groups for run in g.runs for name in run.series)
    names = {n: None for n in (*(t for t in TITLES if t in names), *names) if n not in NO_CURVES}
    return [n for n in names if any(np.nan_to_num(g.column(n)).any() for g in groups)]


def _metric_of(name: str, groups: Sequence[Group]) -> Metric | None:
    """Return the metric that a column belongs to, which may be that of a user's task; None for none."""
    own = (group.metric for group in groups if group.metric.of(name))
    return next(own, metric_of_column(name))


def _title(name: str, metric: Metric | None) -> str:
    """Return the title of a column; columns of other metrics are titled like those of accuracy."""
    if name in TITLES or metric is None:
        return TITLES.get(name, name.replace("_", " "))
    known = TITLES.get(ACCURACY.name + name[len(metric.name) :])
    return name.replace("_", " ") if known is None else known.replace(ACCURACY.title, metric.title)


def _metric(name: str, metric: Metric | None, better: int) -> dict[str, Any]:
    percent, title = _is_percent(name, metric), _title(name, metric)
    kind = "clusters" if metric is None else metric.title
    if kind == "clusters" and name not in ("ari", "nmi", "purity", "churn", "ari_everyone"):
        kind = "clusters" if name.startswith("num_") else "loss and other figures"
    return {"id": name, "title": title, "unit": "%" if percent else "", "kind": kind, "better": better}


def _is_percent(name: str, metric: Metric | None) -> bool:
    return metric is not None and metric.percent and not name.endswith("variance")


def _group_curves(group: Group, axes: Sequence[str], metrics: Sequence[str], thin: float) -> dict[str, Any]:
    count = len(group.rounds)
    keep = np.arange(count)
    if thin < 1 and count > MIN_POINTS:
        keep = np.unique(np.linspace(0, count - 1, max(MIN_POINTS, int(count * thin))).round().astype(int))
    x = {a: _along(a, group.column(a).mean(0)[keep]) for a in axes if group.has(a)}
    y = {}
    for name in metrics:
        if group.has(name):
            percent = _is_percent(name, _metric_of(name, [group]))
            values = group.column(name)[:, keep] * (100 if percent else 1)
            bands = (values.mean(0), values.min(0), values.max(0))
            y[name] = [_rounded(v) for v in (bands if len(group.runs) > 1 else bands[:1])]
    records = [_records(group, run, axes) for run in group.runs]
    found = {"word": group.word, "x": x, "y": y, "records": records}
    if len(steps := drift.steps_of(group)):
        at = {axis: _along(axis, drift.places(group, axis)) for axis in x}
        found["drift"] = {"kind": drift.kind_of(group.runs[0]), "steps": _rounded(steps), "x": at}
    return found


def _records(group: Group, run: Run, axes: Sequence[str]) -> list[list[float | int | None]]:
    """Return the evaluations at which a run's metric was the best so far: its value, position on each axis.

    The first record that is at least as good as a target gives the cost of the target. Values are in the unit
    of tables, with enough digits to meet the same targets.
    """
    alone, metric = Group(group.name, (run,)), run.metric
    values = alone.column(f"{metric.name}_mean")[0]
    better = np.where(np.isnan(values), -np.inf, metric.better * values)
    first = np.flatnonzero(better > np.concatenate([[-np.inf], np.maximum.accumulate(better)[:-1]]))
    places = [_along(a, alone.column(a)[0][first]) for a in axes]
    best = _rounded(metric.scale * values[first], RECORD_DIGITS)
    return [list(row) for row in zip(best, *places, strict=True)]


def _along(axis: str, values: np.ndarray) -> list[float | int | None]:
    """Return values of an axis in its unit, rounded; rounds keep `RECORD_DIGITS` digits."""
    return _rounded(values * AXES[axis][2], RECORD_DIGITS if axis == "round" else 5)


def seeds(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the figures over seeds: intervals, differences to the best, runs at the target."""
    found: dict[str, Any] = {
        "metric": comparison.column(comparison.choices.metric).title,
        "target": statistics_drawn.target_text(comparison),
    }
    if panels := statistics_drawn.intervals(comparison):
        found["intervals"] = [_plain(asdict(panel)) for panel in panels]
    if rows := statistics_drawn.differences(comparison):
        found["differences"] = [{"name": n, "group": g, "bar": _plain(asdict(b))} for n, g, b in rows]
    if met := statistics_drawn.at_target(comparison):
        found["met"] = [{"title": title, "curves": [_plain(asdict(c)) for c in them]} for title, them in met]
    return found


def _plain(value: Any) -> Any:
    """Return a tree whose floats have five digits; those that are not finite are None."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return rounded(value, 5) if isinstance(value, float) else value


def traffic(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Return the MB of the first run of each group by kind and direction; None if nothing was sent."""
    totals = [group.runs[0].bytes_by_kind for group in groups]
    parts = sorted({part for total in totals for part in total})
    if not any(sum(total.values()) for total in totals):
        return None
    return {
        "parts": [f"{kind}, {direction}" for direction, kind in parts],
        "megabytes": [[rounded(total[part] / 1e6, 5) for part in parts] for total in totals],
    }


# -- what was run --------------------------------------------------------------------------------------------


def facts(run: Run) -> dict[str, str]:
    """Return a description of a run, as name -> text; empty texts are left out."""
    config, summary = run.config, run.summary
    chosen, model = _tree(run.non_default.get("model")), _tree(config.get("model"))
    model = {k: v for k, v in model.items() if k in chosen or not isinstance(v, Mapping)}
    data, seen = _tree(config.get("data")), json_mapping(run.folder / "environment.json")
    cohort, share = config.get("cohort_size"), config.get("participation")
    seeds, known = _tree(config.get("seed")), _tree(summary.get("identity"))
    participation = f"share {share} of the clients in every round"
    if cohort is not None:
        participation = f"{cohort} clients a round"
    elif share in (None, 1, 1.0):
        participation = "all clients in every round"
    found = {
        "algorithm": _section(config.get("algorithm")) or run.method,
        "data": _section(data.get("source")),
        "scenario": _section(data.get("scenario")),
        "classes": _some(summary.get("class_names")),
        "clients": f"N = {summary['clients']}",
        "participation": participation,
        "rounds": _rounds(run),
        "model": ", ".join(filter(None, (_section(model), f"{summary['model_parameters']:,} parameters"))),
        "task": _section(config.get("task")) if "task" in run.non_default else "",
        "local training": _entries(config.get("local"), (None, [], 0, "none")),
        **{name: _section(config.get(name)) for name in ("policy", "delay", "network", "payload")},
        "drift": drift.described(run),
        **{n: _entries(run.non_default.get(n)) for n in ("recluster", "newcomers", "leavers")},
        "evaluation": _entries(config.get("evaluation"), (None, False, [], 0)),
        "seeds": (
            f"{next(iter(seeds.values()))} (data, model, training, system)"
            if len(set(map(str, seeds.values()))) == 1
            else _entries(seeds)
        ),
        "versions": _entries(seen.get("packages")),
        "Python": str(seen.get("python", "")),
        "commit": str(seen.get("git_commit") or ""),
        "numeric path": _identity(known),
        "machine": _machine(seen, summary),
        "started": started(run),
        "finished": finished(run),
    }
    return {name: text for name, text in found.items() if text}


def _rounds(run: Run) -> str:
    """Return how many rounds a run took, and why they are fewer than it could have taken."""
    taken = str(run.summary["rounds"])
    return f"{taken} of {run.config.get('rounds')}: {run.ended}" if run.ended else taken


def _entries(tree: object, without: Sequence[object] = ()) -> str:
    """Return the entries of a mapping in one line, other than those with one of some values."""
    return ", ".join(f"{k} {_word(v)}" for k, v in _tree(tree).items() if v not in without)


def _some(names: object, most: int = 20) -> str:
    """Return the first `most` of a list of names in one line; empty for a value that is not a list."""
    return first_of([str(name) for name in names], most) if isinstance(names, list) else ""


def _tree(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _section(value: object) -> str:
    """Return a section of a configuration as text: its name, then its other keys that are not null."""
    if not isinstance(value, Mapping):
        return "" if value is None else str(value)
    name = str(value.get("name", ""))
    parts = [(k, v) for k, v in value.items() if k != "name" and v is not None]
    rest = ", ".join(f"{k} {_section(v) if isinstance(v, Mapping) else _word(v)}" for k, v in parts)
    return f"{name} ({rest})" if name and rest else name or rest


def _word(value: object) -> str:
    """Return a value of a configuration in the form of YAML: true, not True."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_word, value))}]" if isinstance(value, list) else str(value)


def _identity(known: Mapping[str, Any]) -> str:
    try:
        return f"{identity.line(known)}, sums {known.get('sums')}"
    except (KeyError, TypeError, AttributeError):  # it was edited
        return _entries(known)


def _machine(seen: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    processes = [*map(_tree, found)] if isinstance(found := seen.get("processes"), list) else []
    hosts = {str(p.get("host")) for p in processes}
    gpus = {str(p.get("gpu")) for p in processes if p.get("gpu")}
    parts = [ranks, f"{len(hosts)} hosts" if len(hosts) > 1 else "", str(seen.get("processor", ""))]
    return ", ".join(p for p in (*parts, *gpus) if p)


def started(run: Run) -> str:
    """Return when a run began, from its run.json; empty if it does not say."""
    try:
        moment = datetime.fromisoformat(str(json_mapping(run.folder / "run.json").get("started")))
    except ValueError:
        return ""
    return moment.strftime("%Y-%m-%d %H:%M")


def finished(run: Run) -> str:
    """Return when a run ended: the modification time of its summary.json."""
    try:
        end = (run.folder / "summary.json").stat().st_mtime
    except OSError:
        return ""
    return datetime.fromtimestamp(end).strftime("%Y-%m-%d %H:%M")


def command(run: Run, sweep: bool = False) -> str:
    """Return the command that repeats a run or, with `sweep`, the sweep to which it belongs, if any."""
    ranks = int(run.summary["ranks"])
    launch = f"mpirun -n {ranks} " if ranks > 1 else ""
    file = run.folder.parent / "sweep.yaml"
    if sweep and file.is_file():
        return f"{launch}mpifl sweep {shlex.quote(str(file))} --output.id again"
    return f"{launch}mpifl run {shlex.quote(str(run.folder / 'config.yaml'))} --output.id again"


def started_by(run: Run) -> str:
    """Return the command line that started the run; empty if it is not known."""
    words = json_mapping(run.folder / "environment.json").get("command")
    if not isinstance(words, list) or not words:
        return ""
    program = str(words[0]).rsplit("/", 1)[-1]
    return shlex.join(["mpifl" if program == "__main__.py" else program, *map(str, words[1:])])


# -- single runs ---------------------------------------------------------------------------------------------


def details(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], int]:
    """Return the details of single runs, and the number of runs left out to keep the page small.

    The first runs of all groups come before their other seeds.
    """
    most = max(len(g.runs) for g in groups)
    order = [(g, j) for j in range(most) for g in groups if j < len(g.runs)]
    out: list[dict[str, Any]] = []
    numbers = 0
    for group, j in order:
        if numbers > MAX_DETAIL_NUMBERS:
            break
        name = group.name if len(group.runs) == 1 else f"{group.name}, {_seed(group.runs[j])}"
        found = _detail(group.runs[j], name, group.word)
        numbers += len(json.dumps(found)) // 5
        out.append(found)
    return out, len(order) - len(out)


def _seed(run: Run) -> str:
    seed = _tree(run.config.get("seed")).get("training", run.folder.name)
    return f"seed {seed}"


def _detail(run: Run, name: str, word: str) -> dict[str, Any]:
    rows = run.rows("clusters.csv")
    cluster, truth = (np.array([int(r[c]) for r in rows], int) for c in ("cluster", "group"))
    history, silhouette = assignments(run), silhouette_of(run)
    known = bool(len(truth)) and bool((truth >= 0).all())
    rounds = run.series["round"].tolist()
    over = {n: _rounded(run.series[n]) for n in ("ari", "churn", "num_clusters") if n in run.series}
    return {
        "name": name,
        "word": word,
        "told": run.method == "oracle",  # it is given the true groups: other methods come first
        "score": rounded(run.metric.better * float(run.series[f"{run.metric.name}_mean"][-1])),
        "cluster": cluster.tolist(),
        "group": truth.tolist() if known else None,
        "over": {"round": rounds, **{n: v for n, v in over.items() if any(x is not None for x in v)}},
        "flow": flow(history, truth if known else None, cluster, word),
        "kept": bool(history),
        "matrices": _matrices(run, cluster, truth, history),
        "clients": _clients(run),
        "staleness": _staleness(run),
        "phases": [_rounded(spent) for spent in phase_seconds(run).values()] or None,
        "silhouette": None if silhouette is None else [_rounded(row) for row in silhouette],
    }


def assignments(run: Run) -> list[tuple[int, np.ndarray]]:
    """Return the clusters at each evaluation, (round, labels [n]); empty if they were not kept.

    The labels are those of the n clients with a row in `clusters.csv`, in the order of that file.

    Raises:
        UserError: `assignments.csv` names a client that does not exist, or lacks one at the first evaluation.
    """
    count = int(run.summary["clients"])
    rows = run.rows("assignments.csv")
    who = np.array([int(row["client"]) for row in run.rows("clusters.csv")], int)
    labels, out = np.full(count, -1), list[tuple[int, np.ndarray]]()
    changes: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        changes.setdefault(int(row["round"]), []).append((int(row["client"]), int(row["cluster"])))
    if not rows:
        return []
    for step in run.series["round"].astype(int).tolist():
        for client, label in changes.get(step, ()):
            remedy = "assignments.csv names a client that there is not; run it again"
            require(0 <= client < count, "RUN", str(run.folder), remedy)
            labels[client] = label
        out.append((step, labels[who]))
    remedy = "assignments.csv lacks clients of clusters.csv at the first evaluation; run it again"
    require(bool((out[0][1] >= 0).all()), "RUN", str(run.folder), remedy)
    return out


def flow(
    history: Sequence[tuple[int, np.ndarray]],
    truth: np.ndarray | None,
    final: np.ndarray,
    word: str = "round",
) -> dict[str, Any] | None:
    """Return how clients move between clusters over the evaluations, and finally to their true groups.

    Args:
        history: (round, cluster of each client [n]) of each evaluation; empty takes the final clusters.
        truth: true group of each client [n]; None if there are none.
        final: final cluster of each client [n].
        word: the word for a round.

    Returns:
        `columns`: title, kind (`cluster` or `group`) and nodes [label, number of clients]; `links`: for each
        pair of neighbouring columns [label, label, index of the colour, number of clients]; `colours`: the
        true groups, or without them the final clusters, by which clients are coloured; `by`: which of these.
        None if there are fewer than two columns.
    """
    stages = [(f"{word} {step}", labels) for step, labels in history] or [("final clusters", final)]
    changed = [True, *(bool((a != b).any()) for (_, a), (_, b) in pairwise(stages))]
    if len(stages) > MAX_STAGES:  # first, last and those with a change; evenly spaced if these are too many
        keep = sorted({0, len(stages) - 1, *(i for i, new in enumerate(changed) if new)})
        if len(keep) > MAX_STAGES:
            keep = [keep[i] for i in np.unique(np.linspace(0, len(keep) - 1, MAX_STAGES).round().astype(int))]
        stages = [stages[i] for i in keep]
    if truth is not None:
        stages = [*stages, ("true groups", truth)]
    if len(stages) < 2:
        return None
    colour = truth if truth is not None else stages[-1][1]
    colours = sorted(set(colour.tolist()))
    columns, links = [], []
    for title, labels in stages:
        found, sizes = np.unique(labels, return_counts=True)
        kind = "group" if title == "true groups" else "cluster"
        nodes = [[int(v), int(n)] for v, n in zip(found, sizes, strict=True)]
        columns.append({"title": title, "kind": kind, "nodes": nodes})
    for (_, a), (_, b) in pairwise(stages):
        counts = Counter(zip(a.tolist(), b.tolist(), colour.tolist(), strict=True))
        links.append([[int(i), int(j), colours.index(c), n] for (i, j, c), n in sorted(counts.items())])
    by = "group" if truth is not None else "cluster"
    return {"columns": columns, "links": links, "colours": colours, "by": by}


def _matrices(
    run: Run, cluster: np.ndarray, truth: np.ndarray, history: Sequence[tuple[int, np.ndarray]]
) -> dict[str, Any] | None:
    """Return the matrices over pairs of clients, ordered by cluster and true group."""
    count = len(cluster)
    if count < 2:
        return None
    found = [(title, values.astype(float)) for title, _, values in pair_matrices(run)]
    labels = [step for _, step in history] or [cluster]
    order = np.lexsort((np.arange(count), truth, cluster))
    edges = np.unique(np.linspace(0, count, min(count, MAX_MATRIX) + 1).round().astype(int))
    title = "share of evaluations in one cluster" if history else "in one cluster at the end"
    blocks = [(name, _averaged(values[np.ix_(order, order)], edges)) for name, values in found]
    blocks.append((title, _together([row[order] for row in labels], edges)))
    return {
        "clients": [_range(order[a:b].tolist()) for a, b in pairwise(edges)],
        "cluster": cluster[order][edges[:-1]].tolist(),
        "group": truth[order][edges[:-1]].tolist() if (truth >= 0).all() else None,
        "averaged": len(edges) - 1 < count,
        "drawn": [{"title": name, **_image(values)} for name, values in blocks],
    }


def _range(clients: Sequence[int]) -> str:
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {', '.join(map(str, clients))}"


def _averaged(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the means of the blocks of a matrix, ignoring NaN [len(edges) - 1, len(edges) - 1]."""
    clean = np.where(np.isfinite(values), values, np.nan)
    if len(edges) - 1 == len(values):
        return clean
    there = np.isfinite(clean)
    total = np.add.reduceat(np.add.reduceat(np.nan_to_num(clean), edges[:-1], 0), edges[:-1], 1)
    number = np.add.reduceat(np.add.reduceat(there.astype(float), edges[:-1], 0), edges[:-1], 1)
    return np.asarray(np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0))


def _together(labels: Sequence[np.ndarray], edges: np.ndarray) -> np.ndarray:
    """Return the share of pairs of clients in one cluster, by block of clients and over all evaluations.

    Members of each cluster are counted by block, so the matrix over all pairs of clients is never built.
    """
    from scipy import sparse

    sizes = np.diff(edges)
    block = np.repeat(np.arange(len(sizes)), sizes)
    total = np.zeros((len(sizes), len(sizes)))
    for row in labels:
        number = np.unique(row, return_inverse=True)[1]
        members = sparse.csr_array((np.ones(len(row)), (block, number)))  # [blocks, clusters]
        total += (members @ members.T).toarray()
    return np.asarray(total / (len(labels) * np.outer(sizes, sizes)))


def _image(clean: np.ndarray) -> dict[str, Any]:
    """Return a matrix in 255 shades, row by row in base64; shade 255 is NaN."""
    low, high = float(np.nanmin(clean)), float(np.nanmax(clean))
    if low == high:  # nothing differs: one shade in the middle of a scale
        low, high = min(low, 0.0), max(high, 1.0)
    scale = high - low
    shades = np.where(np.isfinite(clean), np.nan_to_num((clean - low) / scale * 254).round(), 255)
    data = base64.b64encode(shades.astype(np.uint8).tobytes()).decode()
    return {"low": rounded(low), "high": rounded(high), "shades": data}


def _clients(run: Run) -> dict[str, Any] | None:
    """Return the scores, cluster, true group and number of training samples of each evaluated client."""
    rows = run.rows("clients.csv")
    if not rows or not {"client", run.metric.name} <= {*rows[0]}:
        return None
    metrics = {name: m for name in rows[0] if (m := metric_of_column(name)) is not None}
    metrics |= {name: run.metric for name in rows[0] if run.metric.of(name)}
    shown = [name for name in rows[0] if name in metrics or name in CLIENT_NUMBERS]
    columns = {name: [_figure(run, row, name) for row in rows] for name in shown}
    columns.setdefault("cluster", [0.0] * len(rows))
    scores = sorted(metrics, key=lambda name: not run.metric.of(name))
    return {
        **{name: _rounded(columns[name], 17) if name in columns else None for name in CLIENT_NUMBERS},
        "scores": {name: _rounded([metrics[name].scale * v for v in columns[name]], 6) for name in scores},
        "titles": {name: _titled(name, metrics[name]) for name in scores},
    }


def _titled(name: str, metric: Metric) -> str:
    """Return the title of a client score, with its unit."""
    said = f"{metric.title}{name[len(metric.name) :].replace('_', ' ')}"
    return f"{said}, {metric.unit}" if metric.unit else said


def _figure(run: Run, row: Mapping[str, str], name: str) -> float:
    try:
        return float(row[name] or "nan")
    except ValueError as error:
        remedy = f"clients.csv: {error} in column {name}; run it again"
        raise UserError("RUN", str(run.folder), remedy) from error


def _staleness(run: Run) -> dict[str, Any] | None:
    """Return the staleness of uploads: a histogram, quantiles, and the quantiles of each client."""
    said = run.summary.get("asynchronous")
    if not said:
        return None
    counts = {int(k): int(n) for k, n in said["staleness_histogram"].items() if n > 0}
    if not counts:
        return None
    lags = np.array(sorted(counts))
    numbers = np.array([counts[lag] for lag in lags.tolist()])
    every, shares = np.repeat(lags, numbers), (0.1, 0.5, 0.9)
    width = max(1, -(-(int(lags[-1]) + 1) // MAX_LAGS))
    bars: Counter[int] = Counter()
    for lag, n in zip(lags.tolist(), numbers.tolist(), strict=True):
        bars[lag // width] += n
    clients: dict[int, list[int]] = {}
    for row in run.rows("events.csv"):
        if row.get("client", "").isdigit() and row["staleness"]:
            clients.setdefault(int(row["client"]), []).append(int(row["staleness"]))
    return {
        "width": width,
        "bars": [[b * width, bars[b]] for b in sorted(bars)],
        "arrivals": int(numbers.sum()),
        "quantiles": [*np.quantile(every, shares, method="inverted_cdf").astype(int).tolist(), int(lags[-1])],
        "clients": [
            [k, len(v), *_rounded(np.quantile(v, shares, method="inverted_cdf"))]
            for k, v in sorted(clients.items())
        ],
    }
