"""Metrics of runs: scores over clients, agreement of partitions, distances of parameters.

All functions are pure. Accuracies are fractions in [0, 1]. Standard deviations over clients are population
standard deviations (ddof 0); over runs the caller chooses (`over_runs`), because papers differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import ceil, log

import numpy as np
import torch

from mpifl.core.gram import squared_distances
from mpifl.core.metric import ACCURACY, Metric
from mpifl.core.task import SUMS, Task

SLICE, MAX_ROWS = 65536, 256  # columns at a time; largest number of rows compared


def accuracy_summary(accuracy: np.ndarray, pool: int | None = None) -> dict[str, float]:
    """Return accuracy over clients, unweighted, as columns of `metrics.csv`; NaN if no client has one.

    Besides those of `spread`, these are the population variance in percent squared (FLT's "var.") and the
    binomial standard error sqrt(p (1 - p) / pool) of the mean p (FLT's "+-").

    Args:
        accuracy: [n], in [0, 1], or minus infinity for a model that diverged; NaN for a client without
            samples, which is ignored.
        pool: number of distinct test samples, for the standard error; None gives NaN.
    """
    known = np.sort(accuracy[~np.isnan(accuracy)])
    found = spread(known, ACCURACY)
    p, worst_tenth = found["accuracy_mean"], found.pop("accuracy_worst_tenth")
    with np.errstate(invalid="ignore"):  # in a run that diverges
        variance = float((100 * known).var()) if len(known) else np.nan
        error = float(np.sqrt(p * (1 - p) / pool)) if pool else np.nan
    found |= {"accuracy_variance": variance, "accuracy_worst_tenth": worst_tenth}
    return {**found, "accuracy_standard_error": error}


def spread(values: np.ndarray, metric: Metric) -> dict[str, float]:
    """Return a metric over clients, unweighted: mean, worst client, standard deviation, worst tenth.

    Args:
        values: [n]; NaN for a client whose test samples do not define a value, which is left out, and the
            worst infinity for a client whose model diverged.
        metric: the metric, which determines whether low or high values are worst.

    Returns:
        Columns of `metrics.csv`; NaN if no client has a value.
    """
    there = values[~np.isnan(values)]
    worst_first = np.sort(there) if metric.better > 0 else -np.sort(-there)
    tenth = worst_first[: ceil(len(there) / 10)]
    figures = (
        ("mean", there, np.mean),
        ("worst", worst_first[:1], np.mean),
        ("std", there, np.std),
        ("worst_tenth", tenth, np.mean),
    )
    with np.errstate(invalid="ignore", over="ignore"):  # in a run that diverges
        return {f"{metric.name}_{what}": float(of(v)) if len(v) else np.nan for what, v, of in figures}


def pooled(scores: Mapping[str, np.ndarray], task: Task) -> dict[str, float]:
    """Return a task's metrics on the samples of all clients together, from the clients' sums.

    Args:
        scores: name -> value or sum of each client [n, ...].
        task: the task, which computes metrics from sums.

    Returns:
        `NAME_pooled` for each metric; for scores with a suffix, such as `NAME_train`, also
        `NAME_train_pooled`. Empty if there are no sums.
    """
    main = task.metric
    suffixes = sorted({name[len(main.name) :] for name in scores if main.of(name)}, key=len, reverse=True)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in scores:
        if name.startswith(SUMS):
            suffix = next(s for s in suffixes if name.endswith(s))
            stem = name[len(SUMS) : len(name) - len(suffix)]
            found.setdefault(suffix, {})[stem] = scores[name].sum(0)
    out: dict[str, float] = {}
    for suffix, sums in found.items():
        figures = task.figures(sums)
        out |= {f"{m.name}{suffix}_pooled": figures[m.name] for m in task.scored}
    return out


def over_runs(values: np.ndarray, ddof: int = 1) -> tuple[float, float]:
    """Return the mean and standard deviation over runs; the standard deviation of one run is 0.

    EMD-CFL reports the sample form (ddof 1) for accuracy and the population form (ddof 0) for the Rand index.

    Args:
        values: [r], one value for each run.
        ddof: 1 for the sample form, 0 for the population form.
    """
    values = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # for runs that diverged
        return float(values.mean()), float(values.std(ddof=ddof)) if len(values) > ddof else 0.0


def ari(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the adjusted Rand index of two partitions.

    Args:
        labels: [n], the estimated cluster of each client.
        groups: [n], the true group of each client.

    Returns:
        The index; by definition 1 if both partitions are a single cluster, 0 if only one of them is.
    """
    if (single := _single(labels, groups)) is not None:
        return single
    table = _table(groups, labels).astype(object)  # Python's integers do not overflow
    squares, by_group, by_label = ((x**2).sum() for x in (table, table.sum(axis=1), table.sum(axis=0)))
    clients = table.sum()
    both, labels_only, groups_only = squares - clients, by_label - squares, by_group - squares
    neither = clients**2 - clients - both - labels_only - groups_only  # of ordered pairs of clients
    if labels_only == groups_only == 0:
        return 1.0
    chance = (both + groups_only) * (groups_only + neither) + (both + labels_only) * (labels_only + neither)
    return float(2.0 * (both * neither - labels_only * groups_only) / chance)


def nmi(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the normalised mutual information of two partitions (arithmetic mean of entropies).

    Arguments and special cases are those of `ari`.
    """
    if (single := _single(labels, groups)) is not None:
        return single
    table, n = _table(groups, labels), len(labels)
    by_group, by_label = table.sum(axis=1), table.sum(axis=0)
    i, j = np.nonzero(table)
    known, product = table[i, j], by_group[i] * by_label[j]
    terms = known / n * (np.log(known) - log(n)) + known / n * (-np.log(product) + log(n) + log(n))
    mutual = float(np.where(np.abs(terms) < np.finfo(float).eps, 0.0, terms).sum())
    entropies = [-float((m / n * (np.log(m) - log(n))).sum()) for m in (by_group, by_label)]
    return max(mutual, 0.0) / (sum(entropies) / 2)


def _single(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the agreement of two partitions if one of them is a single cluster, None if neither is."""
    alone = [len(np.unique(x)) == 1 for x in (a, b)]
    return float(all(alone)) if any(alone) else None


def _table(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many clients have the i-th label of `a` and the j-th of `b` (contingency table)."""
    rows, i = np.unique(a, return_inverse=True)
    columns, j = np.unique(b, return_inverse=True)
    table = np.zeros((len(rows), len(columns)), np.int64)
    np.add.at(table, (i, j), 1)
    return table


def purity(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the share of clients that belong to the most frequent true group of their cluster."""
    return float(_table(labels, groups).max(axis=1).sum()) / len(labels)


def import_scipy_optimize() -> None:
    """Import the module that `churn` needs (a third of a second) while no worker waits for rank 0."""
    import_module("scipy.optimize")


def churn(old: np.ndarray, new: np.ndarray) -> float:
    """Return the share of clients that changed cluster, after the best matching of the labels.

    Args:
        old: [n], labels before.
        new: [n], labels now.
    """
    from scipy.optimize import linear_sum_assignment

    if np.array_equal(old, new):  # avoids a table [clusters, clusters]: each client may have its own
        return 0.0
    table = _table(old, new)
    return 1.0 - float(table[linear_sum_assignment(table, maximize=True)].sum()) / len(old)


def mixture_kl(true: np.ndarray, estimate: np.ndarray, floor: float = 1e-12) -> float:
    """Return the mean over uploads of KL(true || estimate), in nats (CCFL).

    Args:
        true: shares [n, K]; each row sums to 1.
        estimate: estimates of these shares [n, K].
        floor: lower bound of the estimated shares, so that the divergence is finite.
    """
    p, q = np.atleast_2d(true).astype(np.float64), np.maximum(np.atleast_2d(estimate), floor)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / q), 0.0)
    return float(terms.sum(axis=1).mean())


def group_distances(distances: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean distance of pairs of clients within a cluster, and of all pairs (EMD-CFL, table 9).

    Args:
        distances: [n, n], distances between the clients' parameters, symmetric.
        labels: [n], the cluster of each client.

    Returns:
        The two means; NaN if there is no pair.
    """
    i, j = np.triu_indices(len(labels), 1)
    pairs = np.asarray(distances, np.float64)[i, j]
    within = pairs[np.asarray(labels)[i] == np.asarray(labels)[j]]
    return _mean(within), _mean(pairs)


def client_distances(
    products: np.ndarray, labels: np.ndarray, groups: np.ndarray | None, name: str
) -> dict[str, float]:
    """Return the mean distances of the clients' models, as columns of `metrics.csv` (EMD-CFL, table 9).

    Args:
        products: pairwise inner products of the models [m, m].
        labels: estimated cluster of each client [m].
        groups: true group of each client [m]; None if there are none.
        name: name of the columns.

    Returns:
        `{name}` over all pairs, `{name}_within_clusters`, and `{name}_within_groups` if there are groups; NaN
        if there is no pair.
    """
    distances = np.sqrt(squared_distances(products))
    within, everywhere = group_distances(distances, labels)
    out = {name: everywhere, f"{name}_within_clusters": within}
    if groups is not None:
        out[f"{name}_within_groups"] = group_distances(distances, groups)[0]
    return out


def row_distances(rows: torch.Tensor) -> np.ndarray:
    """Return the pairwise L2 distances [K, K] of rows [K, d], computed in float64."""
    gram = np.zeros((len(rows), len(rows)))
    for part in rows.split(SLICE, dim=1):
        x = part.double().numpy()
        gram += x @ x.T
    return np.asarray(np.sqrt(squared_distances(gram)))


def model_distances(rows: torch.Tensor, assign: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return `group_distances` of the rows that clients use; NaN for both if there are over `MAX_ROWS` rows.

    Args:
        rows: the rows [K, d].
        assign: [n], the row of each client.
        labels: [n], the cluster of each client.
    """
    used, which = np.unique(assign, return_inverse=True)
    if len(used) > MAX_ROWS:
        return float("nan"), float("nan")
    return group_distances(row_distances(rows[used])[np.ix_(which, which)], labels)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
