"""The columns of `metrics.csv` that an evaluation gives: `MAIN`, `OF_SCORES` and `OF_CLUSTERS` list them.

Accuracies are fractions; `accuracy_variance` and `accuracy_train_variance` are in percent squared. NaN means
that a value is undefined, and the client is left out. If its loss is not finite although it has samples, its
model diverged: such a client counts with infinite error, or minus infinity where higher is better, and the
figures of a user's metric are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from mpifl.core.metric import ACCURACY, Metric
from mpifl.core.task import SUMS, Task

from .metrics import accuracy_summary, ari, churn, nmi, pooled, purity, spread

LOSS = Metric("loss", "loss", -1, percent=False)
Columns = dict[str, float | int]
Of = TypeVar("Of")


@dataclass(frozen=True)
class Evaluation:
    """What the models of clients scored, and what is known of the clients.

    Attributes:
        scores: name -> value of each evaluated client [n], or sums that metrics are computed from [n, ...].
        labels: estimated cluster of every client [N].
        groups: true group of every client [N]; None if there are none.
        pool: number of distinct test samples, for the binomial standard error; None computes no error.
        aimed: which of the evaluated clients are targets of a backdoor, bool [n]; None if there are none.
        before: `labels` at the previous evaluation; None at the first.
        stayed: whose true group is that of the previous evaluation, bool [N]; None where no group changes.
        placed: whose cluster is known, bool [N]; None for all.
        samples: set (`test`, `train` or a further test set) -> number of samples of each evaluated client
            [n]. Without it, only tasks whose sums include `n` show which models diverged.
        by: kind -> label of each evaluated client [n], -1 for none.
        own: names of the user's metrics.
        honest: which of the evaluated clients are not attackers, bool [n]; None if there are no attackers.
        task: the task, which defines the metrics; None takes accuracy.
    """

    scores: Mapping[str, np.ndarray]
    labels: np.ndarray
    groups: np.ndarray | None
    pool: int | None = None
    aimed: np.ndarray | None = None
    before: np.ndarray | None = None
    stayed: np.ndarray | None = None
    placed: np.ndarray | None = None
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    by: Mapping[str, np.ndarray] = field(default_factory=dict)
    own: Sequence[str] = ()
    honest: np.ndarray | None = None
    task: Task | None = None

    @property
    def metrics(self) -> Sequence[Metric]:
        """The task's metrics, the main one first."""
        return (ACCURACY,) if self.task is None else self.task.scored

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The scores without the sums, see `with_diverged`."""
        return with_diverged(self.scores, self.metrics, self.samples)

    @cached_property
    def known(self) -> np.ndarray:
        """Whose cluster is known, bool [N]."""
        return np.ones(len(self.labels), bool) if self.placed is None else self.placed

    @cached_property
    def parts(self) -> list[tuple[str, np.ndarray]]:
        """The name of each label of each kind in columns, and which clients have the label, bool [n]."""
        out = []
        for kind, of in self.by.items():
            named = of.dtype.kind == "U"
            for j in np.unique(of if named else of[of >= 0]).tolist():
                out.append((f"{kind}_{j}" if named else f"{kind}{j}", of == j))
        return out


@dataclass(frozen=True)
class Score:
    """One score of an evaluation.

    Attributes:
        name: its name, such as `accuracy` or `accuracy_train`.
        values: value of each evaluated client [n].
        metric: the task's metric that it belongs to; None for other scores.
        found: the evaluation.
    """

    name: str
    values: np.ndarray
    metric: Metric | None
    found: Evaluation

    @property
    def weights(self) -> np.ndarray | None:
        """The number of samples of each client in the set on which it was measured; None if unknown."""
        return self.found.samples.get(measured_on(self.name, self.found.values, self.found.samples))

    @property
    def worst(self) -> Callable[..., Any]:
        """The function that returns the worst of several values."""
        return np.nanmax if self.metric is not None and self.metric.better < 0 else np.nanmin


@dataclass(frozen=True)
class Figure(Generic[Of]):
    """Some columns of `metrics.csv`.

    Attributes:
        meanings: pattern of the name of each -> what it is; `experiment/contents.py` has the words in
            capitals.
        columns: returns them; none where they do not apply.
    """

    meanings: Mapping[str, str]
    columns: Callable[[Of], Columns]


# -- of scores -----------------------------------------------------------------------------------------------


def _main(found: Evaluation) -> Columns:
    metric, loss = found.metrics[0], {"loss": _without_nan(found.values["loss"], np.nanmean)}
    if metric != ACCURACY:
        return {**spread(found.values[metric.name], metric), **loss}
    return {**accuracy_summary(found.values["accuracy"], found.pool), **loss}


def _own(score: Score) -> Columns:
    found, name, values = score.found, score.name, score.values
    mine = next((o for o in found.own if name == o or name.startswith(f"{o}_")), None)
    if mine is None:
        return {}
    bad = diverged(name.removeprefix(mine), found.scores, found.samples)
    there = values[~np.isnan(values) | bad]
    whats = (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max))
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite values
        row = {f"{name}_{what}": float(of(there)) if len(there) else np.nan for what, of in whats}
    return row | {f"{name}_{part}_mean": _weighted_mean(values, of, bad) for part, of in found.parts}


def _tuned(score: Score) -> Columns:
    if not score.name.startswith("tuned_size_"):
        return {}
    parts = [("", np.ones(len(score.values), bool)), *((f"_{part}", of) for part, of in score.found.parts)]
    return {f"{score.name}{part}_mean": _weighted_mean(score.values, of) for part, of in parts}


def _on_all_samples(score: Score) -> Columns:
    if score.weights is None or score.metric != ACCURACY:
        return {}
    return {f"{score.name}_pooled": _weighted_mean(score.values, score.weights)}


def _of_parts(score: Score) -> Columns:
    if score.metric is None:
        return {}
    return {f"{score.name}_{part}_mean": _weighted_mean(score.values, of) for part, of in score.found.parts}


def _over_clients(score: Score) -> Columns:
    if score.metric is None or score.name == score.found.metrics[0].name:
        return {}
    spreads = (("mean", np.nanmean), ("worst", score.worst), ("std", np.nanstd))
    return {f"{score.name}_{what}": _without_nan(score.values, of) for what, of in spreads}


def _on_training_data(score: Score) -> Columns:
    if score.metric != ACCURACY or score.name != "accuracy_train":
        return {}
    found = accuracy_summary(score.values, None if score.weights is None else int(score.weights.sum()))
    return {f"accuracy_train_{what}": found[f"accuracy_{what}"] for what in ("variance", "standard_error")}


def _honest(score: Score) -> Columns:
    honest = score.found.honest
    if score.metric is None or honest is None or not honest.any():
        return {}
    figures = (("mean", np.nanmean), ("worst", score.worst))
    return {f"{score.name}_honest_{what}": _without_nan(score.values[honest], of) for what, of in figures}


def _targets(score: Score) -> Columns:
    aimed = score.found.aimed
    if score.metric is None or aimed is None or not aimed.any():
        return {}
    return {f"{score.name}_targets_mean": _without_nan(score.values[aimed], np.nanmean)}


MAIN = Figure(
    {
        "METRIC_mean": "mean over clients of the task's first metric",
        "METRIC_worst": "the task's first metric of the worst client",
        "METRIC_std": "population standard deviation over clients of the task's first metric",
        "METRIC_worst_tenth": "mean of the task's first metric over the worst tenth of the clients",
        "accuracy_variance": "population variance of accuracy over clients, in percent squared (FLT's var.)",
        "accuracy_standard_error": "binomial standard error of the mean accuracy over all test samples",
        "loss": "mean over clients of the loss on test samples",
    },
    _main,
)
OF_SCORES = (
    Figure(
        {
            "tuned_size_MODULE_mean": "how far fine-tuning moves a module of the model, mean over clients "
            "(`algorithm.tune_sizes`)",
            "tuned_size_MODULE_PART_mean": "the same over the clients of a part (`evaluation.by`)",
        },
        _tuned,
    ),
    Figure(
        {
            "OWN_mean": "mean over clients of a metric of your own (`evaluation.metrics`)",
            "OWN_std": "population standard deviation over clients of a metric of your own",
            "OWN_min": "least value of a metric of your own",
            "OWN_max": "greatest value of a metric of your own",
            "OWN_PART_mean": "mean of a metric of your own over the clients of a part (`evaluation.by`)",
        },
        _own,
    ),
    Figure(
        {
            "accuracy_pooled": "accuracy on the test samples of all clients together",
            "accuracy_SET_pooled": "accuracy on all samples of a further set together",
        },
        _on_all_samples,
    ),
    Figure(
        {"SCORE_PART_mean": "mean over the clients of a group, cluster or device class (`evaluation.by`)"},
        _of_parts,
    ),
    Figure(
        {
            "SCORE_mean": "mean over clients of a further metric, or of a metric on a further set",
            "SCORE_worst": "the same of the worst client",
            "SCORE_std": "population standard deviation over clients of the same",
        },
        _over_clients,
    ),
    Figure(
        {
            "accuracy_train_variance": "variance over clients of the accuracy on training data, in percent "
            "squared (`evaluation.train`)",
            "accuracy_train_standard_error": "binomial standard error of the mean accuracy on training data",
        },
        _on_training_data,
    ),
    Figure(
        {
            "SCORE_honest_mean": "mean over the clients that do not attack",
            "SCORE_honest_worst": "the worst client of those that do not attack",
        },
        _honest,
    ),
    Figure({"SCORE_targets_mean": "mean over the clients that a backdoor aims at"}, _targets),
)

# -- of clusters ---------------------------------------------------------------------------------------------


def _together(found: Evaluation) -> Columns:
    return {} if found.task is None else {**pooled(found.scores, found.task)}


def _counts(found: Evaluation) -> Columns:
    clusters = len(np.unique(found.labels[found.known]))
    return {"num_clusters": clusters, "num_unplaced": int((~found.known).sum())}


def _agreement(found: Evaluation) -> Columns:
    known, labels, groups = found.known, found.labels, found.groups
    row: Columns = dict.fromkeys(("ari", "nmi", "purity", "ari_everyone"), float("nan"))
    if groups is not None:
        row["ari_everyone"] = ari(labels, groups)
        if np.count_nonzero(known) > 1:  # one client agrees with everything
            for name, agreement in (("ari", ari), ("nmi", nmi), ("purity", purity)):
                row[name] = agreement(labels[known], groups[known])
    return row


def _churn(found: Evaluation) -> Columns:
    before, stayed, labels = found.before, found.stayed, found.labels
    row: Columns = {"churn": float("nan") if before is None else churn(before, labels)}
    if stayed is not None:
        row["churn_without_cause"] = float("nan")
        if before is not None and stayed.any():
            row["churn_without_cause"] = churn(before[stayed], labels[stayed])
    return row


OF_CLUSTERS = (
    Figure({"SCORE_pooled": "a metric on the samples of all clients together"}, _together),
    Figure(
        {
            "num_clusters": "number of clusters among the clients whose cluster is known",
            "num_unplaced": "number of clients whose cluster is not known yet",
        },
        _counts,
    ),
    Figure(
        {
            "ari": "adjusted Rand index of clusters and true groups, over clients whose cluster is known; "
            "1: they agree, 0: as by chance",
            "nmi": "normalised mutual information of clusters and true groups, over the same clients; 0 to 1",
            "purity": "share of clients that belong to the most frequent true group of their cluster",
            "ari_everyone": "adjusted Rand index over all clients, also those whose cluster is not known yet",
        },
        _agreement,
    ),
    Figure(
        {
            "churn": "share of clients that changed cluster since the evaluation before, clusters matched",
            "churn_without_cause": "churn among the clients whose true group did not change (`drift`)",
        },
        _churn,
    ),
)


def metrics_row(found: Evaluation) -> Columns:
    """Return the columns of an evaluation, in the order of `metrics.csv`."""
    row = MAIN.columns(found)
    for name, values in found.values.items():
        metric = next((m for m in found.metrics if m.of(name)), None)
        for of_score in OF_SCORES:
            row |= of_score.columns(Score(name, values, metric, found))
    for figure in OF_CLUSTERS:
        row |= {name: value for name, value in figure.columns(found).items() if name not in row}
    return row


def with_diverged(
    scores: Mapping[str, np.ndarray],
    metrics: Iterable[Metric],
    samples: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Return scores without the sums; NaN of a client whose model diverged becomes the worst value.

    Arguments are those of `Evaluation`.
    """
    out = {name: v for name, v in scores.items() if not name.startswith(SUMS)}
    for name, values in out.items():
        metric = next((m for m in (LOSS, *metrics) if m.of(name)), None)
        if metric is not None:
            bad = np.isnan(values) & diverged(name.removeprefix(metric.name), scores, samples)
            out[name] = np.where(bad, -metric.better * np.inf, values) if bad.any() else values
    return out


def diverged(
    end: str, scores: Mapping[str, np.ndarray], samples: Mapping[str, np.ndarray]
) -> np.ndarray | np.bool:
    """Return which clients have a loss that is not finite, although it has terms, bool [n]; False if unknown.

    Args:
        end: end of the names of scores on some set, such as `_train`; empty for the test set.
        scores: name -> value or sum of each evaluated client.
        samples: set -> number of samples of each evaluated client.
    """
    loss, held = scores.get(f"loss{end}"), samples.get(measured_on(f"loss{end}", scores, samples))
    terms = scores.get(f"{SUMS}n{end}", held)
    return np.False_ if loss is None or terms is None else ~np.isfinite(loss) & (terms > 0)


def measured_on(name: str, scores: Container[str], sets: Iterable[str]) -> str:
    """Return the set on which a score was measured, by the suffix of its name: `train` of `accuracy_train`.

    Args:
        name: name of the score.
        scores: the names of all scores; a suffix counts only if the name without it is among them.
        sets: the sets other than `train` and `test`; scores on `test` have no suffix.
    """
    for end in sorted({*sets, "train"}, key=len, reverse=True):  # `very_hard` before `hard`
        if name.endswith(f"_{end}") and name.removesuffix(f"_{end}") in scores:
            return end
    return "test"


def _weighted_mean(
    values: np.ndarray, weights: np.ndarray, counted: np.ndarray | np.bool | bool = False
) -> float:
    """Return the weighted mean of values that are not NaN, or `counted`; NaN if their total weight is 0."""
    there = ~np.isnan(values) | counted
    total = weights[there].sum()
    weighted = np.where(weights > 0, values, 0.0)  # 0 times infinity is NaN
    return float(weighted[there] @ weights[there] / total) if total else float("nan")


def _without_nan(values: np.ndarray, of: Callable[[np.ndarray], Any]) -> float:
    """Return a statistic of the values that are not NaN; NaN if there are none."""
    with np.errstate(invalid="ignore", over="ignore"):  # in a run that diverges
        return float(of(values)) if (~np.isnan(values)).any() else float("nan")
