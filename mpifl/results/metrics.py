"""What runs are evaluated by: accuracy over clients, agreement of partitions, distances of parameters.

Pure functions. Accuracies are fractions in [0, 1]. Spreads over clients have the population form (ddof 0);
over runs the caller says which (`over_runs`), because papers differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import ceil, sqrt

import numpy as np
import torch

from mpifl.core.errors import require

SLICE, MAX_ROWS = 65536, 256  # columns at a time; rows that may be compared


@dataclass(frozen=True)
class AccuracySummary:
    """Accuracy over clients, each counting once. Fractions in [0, 1] unless said otherwise.

    Attributes:
        mean, worst: unweighted mean, and minimum.
        std: population standard deviation (ddof 0).
        variance_pct2: population variance in percent squared (FLT's "var.").
        worst_tenth: mean of the ceil(n / 10) lowest.
        standard_error: binomial sqrt(p (1 - p) / pool) of a mean p over `pool` test samples (FLT's "+-");
            None without a pool.
    """

    mean: float
    worst: float
    std: float
    variance_pct2: float
    worst_tenth: float
    standard_error: float | None = None


def accuracy_summary(accuracy: np.ndarray, pool: int | None = None) -> AccuracySummary:
    """Return the summary of `accuracy` [n], one fraction for each client.

    Args:
        pool: size of the pool of test samples, where a binomial standard error has a meaning.
    """
    values = np.sort(np.asarray(accuracy, np.float64))
    require(values.size > 0, "accuracy", accuracy, "a summary needs at least one client")
    mean = float(values.mean())
    return AccuracySummary(
        mean=mean,
        worst=float(values[0]),
        std=float(values.std()),
        variance_pct2=float((100 * values).var()),
        worst_tenth=float(values[: ceil(len(values) / 10)].mean()),
        standard_error=sqrt(mean * (1 - mean) / pool) if pool else None,
    )


def over_runs(values: np.ndarray, ddof: int = 1) -> tuple[float, float]:
    """Return mean and standard deviation over runs [r].

    EMD-CFL prints the sample form (ddof 1) for accuracy and the population form (ddof 0) for the Rand index.
    One run has no spread: 0.
    """
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=ddof)) if len(values) > ddof else 0.0


def ari(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the adjusted Rand index of two partitions [n]: 1 if both are one cluster, 0 if only one is."""
    from sklearn.metrics import adjusted_rand_score

    if (single := _single(labels, groups)) is not None:
        return single
    return float(adjusted_rand_score(groups, labels))


def nmi(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the normalised mutual information (arithmetic mean of entropies), conventions as `ari`."""
    from sklearn.metrics import normalized_mutual_info_score

    if (single := _single(labels, groups)) is not None:
        return single
    return float(normalized_mutual_info_score(groups, labels))


def _single(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the agreement of partitions of which at least one is a single cluster, None if neither is."""
    alone = [len(np.unique(x)) == 1 for x in (a, b)]
    return float(all(alone)) if any(alone) else None


def _table(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many clients have the i-th label of `a` and the j-th of `b`."""
    rows, i = np.unique(a, return_inverse=True)
    columns, j = np.unique(b, return_inverse=True)
    table = np.zeros((len(rows), len(columns)), np.int64)
    np.add.at(table, (i, j), 1)
    return table


def purity(labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the share of clients that belong to the commonest true group of their cluster."""
    return float(_table(labels, groups).max(axis=1).sum()) / len(labels)


def load(truth: bool) -> None:
    """Import now, before workers wait for it, what takes half a second; `truth`: groups are known."""
    import_module("scipy.optimize")
    if truth:
        import_module("sklearn.metrics")


def churn(old: np.ndarray, new: np.ndarray) -> float:
    """Return the share of clients [n] that changed cluster, after the best matching of the labels."""
    from scipy.optimize import linear_sum_assignment

    if np.array_equal(old, new):  # without a table [clusters, clusters]: there may be one for each client
        return 0.0
    table = _table(old, new)
    return 1.0 - float(table[linear_sum_assignment(table, maximize=True)].sum()) / len(old)


def mixture_kl(true: np.ndarray, estimate: np.ndarray, floor: float = 1e-12) -> float:
    """Return the mean over uploads of KL(true || estimate), in nats. CCFL.

    Args:
        true, estimate: shares [n, K], rows that sum to 1.
        floor: below which an estimated share is not taken, so that the divergence stays finite.
    """
    p, q = np.atleast_2d(true).astype(np.float64), np.maximum(np.atleast_2d(estimate), floor)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / q), 0.0)
    return float(terms.sum(axis=1).mean())


def group_distances(distances: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean distance of pairs of clients within a cluster, and of all pairs. EMD-CFL, table 9.

    Args:
        distances: [n, n] between the clients' parameters, symmetric.
        labels: [n]. Without any pair the mean is nan.
    """
    i, j = np.triu_indices(len(labels), 1)
    pairs = np.asarray(distances, np.float64)[i, j]
    within = pairs[np.asarray(labels)[i] == np.asarray(labels)[j]]
    return _mean(within), _mean(pairs)


def row_distances(rows: torch.Tensor) -> np.ndarray:
    """Return the L2 distances [K, K] of rows [K, d], computed in double precision a slice at a time."""
    gram = np.zeros((len(rows), len(rows)))
    for part in rows.split(SLICE, dim=1):
        x = part.double().numpy()
        gram += x @ x.T
    square = np.diag(gram)
    return np.asarray(np.sqrt(np.maximum(square[:, None] + square - 2 * gram, 0.0)))


def model_distances(rows: torch.Tensor, assign: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return `group_distances` of the rows that clients use; nan for both if they are more than MAX_ROWS."""
    used, which = np.unique(assign, return_inverse=True)
    if len(used) > MAX_ROWS:
        return float("nan"), float("nan")
    return group_distances(row_distances(rows[used])[np.ix_(which, which)], labels)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
