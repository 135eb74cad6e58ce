"""Compares groups of runs over seeds and problems: figures with intervals, tests against the best, ranks.

A *problem* is what the methods are compared on, by default the settings of the section `data`. Within a
problem, each column that has a better and a worse direction is tested: the best group against every other
group, under equal seeds and data, with Holm's correction. The cost of reaching a target is censored data
(`survival`), which is compared by log-rank tests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from mpifl.core.directions import begins, direction
from mpifl.core.errors import UserError, first_of, nearest, require
from mpifl.core.metric import ACCURACY, METRICS, SPREADS, Metric, metric_of_column
from mpifl.results.reader import Run

from . import statistics, survival
from .seed_groups import ALGORITHM, Group, default_target, gather, metric_of, name_of, titles, tree_of
from .statistics import TESTS, Estimate, Ranking
from .survival import Median, Reached
from .tables import BEST, TIED

STD, NO_TEST = "std", "none"
KNOWN_TESTS, KNOWN_INTERVALS = (*TESTS, NO_TEST), (STD, *statistics.INTERVALS)
# columns of no metric, and prefixes of such columns, with values from 0 to 1, and from 0
UNIT_RANGE = ("nmi", "purity")
COUNTED = ("num", "federation_bytes", "seconds", "virtual_seconds", "flops", "joules", "round")


@dataclass(frozen=True)
class Column:
    """A figure of a run, as a column of tables.

    Attributes:
        title: column title; the text after the last comma is the unit.
        of: column of `metrics.csv`, read at the last evaluation; for the cost of a target, one of `AXES`.
        scale: factor that converts values to the unit of the title.
        form: number format, a key of `comparison_tables.FORMS`.
        better: 1 if higher is better, -1 if lower is better, 0 if neither is.
        spread: whether the standard deviation is shown beside the mean.
        target: whether the column is the cost of reaching the target.
        restricted: whether that cost is the restricted mean instead of the median.
    """

    title: str
    of: str
    scale: float = 1.0
    form: str = "f2"
    better: int = 0
    spread: bool = False
    target: bool = False
    restricted: bool = False


TO_TARGET = {"rounds": ("round", 1.0), "mb": ("bytes", 1e-6), "virtual_s": ("virtual_seconds", 1.0)}
UNITS = {"rounds": "rounds", "mb": "MB", "virtual_s": "virtual s"}
COLUMNS: dict[str, Column] = {
    "accuracy": Column("accuracy, %", "accuracy_mean", 100, better=1, spread=True),
    "worst": Column("worst client, %", "accuracy_worst", 100, better=1, spread=True),
    "std": Column("std over clients, %", "accuracy_std", 100, better=-1),
    "ari": Column("ARI", "ari", better=1),
    "unplaced": Column("unplaced clients", "num_unplaced", form="g3"),
    "clusters": Column("clusters", "num_clusters", form="g3"),
    "mb_up": Column("MB up", "federation_bytes_up", 1e-6, "g4"),
    "mb_down": Column("MB down", "federation_bytes_down", 1e-6, "g4"),
    "gflops": Column("GFLOP of clients", "flops", 1e-9, "g4"),
    "joules": Column("energy of clients, J", "joules", form="g4"),
    "recovery": Column("recovery, steps", "recovery_steps", form="g3", better=-1),
    "recovery_s": Column("recovery, s", "recovery_seconds", form="g3", better=-1),
    "mb_clustering": Column("MB to cluster", "clustering_bytes", 1e-6, "g4", -1),
    "lost": Column("score lost", "score_lost", form="g3", better=-1),
    "virtual_s": Column("virtual s", "virtual_seconds", form="g4"),
    **{
        f"{name}_to_target": Column(f"{UNITS[name]} to target", axis, scale, "g4", -1, target=True)
        for name, (axis, scale) in TO_TARGET.items()
    },
    **{
        f"{name}_to_target_mean": Column(
            f"{UNITS[name]} to target, restricted mean", axis, scale, "g4", -1, target=True, restricted=True
        )
        for name, (axis, scale) in TO_TARGET.items()
    },
}
NAMES = ("run", "seeds", "rounds", "unreached")  # table columns that are not figures of a run


@dataclass(frozen=True)
class Choices:
    """The options of a comparison.

    Attributes:
        target: target value of the mean accuracy, in [0, 1], or of the mean of the runs' other metric, whose
            cost is computed; None takes 95 % of the best, see `seed_groups.default_target`.
        test: `t`, `wilcoxon` or `none`; None takes `t` if seeds pair.
        interval: `std` (no interval but the standard deviation), or one of `statistics.INTERVALS`.
        confidence: confidence level of intervals; tests have the level 1 - confidence.
        metric: the column whose tests and ranks are shown: a key of `COLUMNS` (`accuracy` stands for the
            runs' metric, whatever it is), the name of that metric, or a column of `metrics.csv`.
        ranks: whether methods are ranked over problems.
        problem: sections or dotted keys of the configuration that define a problem.
        columns: columns of the table: keys as in `metric`, and `run`, `seeds`, `rounds`, `unreached`; empty
            takes the default columns that hold any value.
    """

    target: float | None = None
    test: str | None = None
    interval: str = STD
    confidence: float = 0.95
    metric: str = "accuracy"
    ranks: bool = False
    problem: tuple[str, ...] = ("data",)
    columns: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        target: str | None = None,
        test: str | None = None,
        interval: str = STD,
        confidence: str | None = None,
        metric: str | None = None,
        ranks: bool = False,
        problem: str | None = None,
        columns: str | None = None,
    ) -> Choices:
        """Return the choices that correspond to the options of a command.

        Raises:
            UserError: a value is not a number or is out of range, a list of keys has an empty or repeated
                entry, or an option has no effect.
        """
        sure = _number("--confidence", confidence or "0.95", "use a share in (0.5, 1), as in 0.95")
        require(0.5 < sure < 1, "--confidence", confidence, "use a share in (0.5, 1), as in 0.95")
        remedy = "has no effect: it says what --test or --ranks shows; name one of them"
        require(metric is None or ranks or test in TESTS, "--metric", metric, remedy)
        sections, shown = _keys("--problem", problem), _keys("--columns", columns)
        return cls(
            target_of(target), test, interval, sure, metric or "accuracy", ranks, sections or ("data",), shown
        )


def target_of(text: str | None) -> float | None:
    """Return the value of the metric given by --target, or None if it is not given.

    Raises:
        UserError: the value is not a finite number.
    """
    if text is None:
        return None
    value = _number("--target", text, "use an accuracy in [0, 1], or a value of the runs' metric")
    require(isfinite(value), "--target", text, "use an accuracy in [0, 1], or a value of the runs' metric")
    return value


def check_target(target: float | None, metric: Metric) -> None:
    """Raise `UserError` for a target that a metric cannot have."""
    fits = target is None or not metric.percent or 0 <= target <= 1
    article = "an" if metric.title[0] in "aeiou" else "a"
    require(fits, "--target", target, f"use {article} {metric.title} in [0, 1]")


def _keys(option: str, text: str | None) -> tuple[str, ...]:
    """Return the comma-separated keys of an option; empty if the option is not given."""
    keys = tuple(key.strip() for key in text.split(",")) if text is not None else ()
    require(all(keys), option, text, "name keys, with commas between them")
    twice = [key for key in keys if keys.count(key) > 1]
    require(not twice, option, twice[:1], "is named twice")
    return keys


def _number(option: str, text: str, remedy: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(option, text, remedy) from error


@dataclass(frozen=True)
class Contrast:
    """A comparison of a group with the best group of its problem, in one column.

    Attributes:
        group: index of the group.
        best: index of the best group.
        difference: group minus best under each seed that both ran, in the unit of the column [pairs]; None
            for a log-rank test, which is unpaired.
        p: p value of the two-sided test; NaN if no test could be made.
        side: -1 if the group is worse in the tested data, 1 if it is better. It can be better because the
            best group has the best mean or median over all of its seeds, whereas a test uses only the common
            seeds, or weighs runs differently. 0 if there is no difference, or if the test and the mean of
            its data disagree on the direction.
        adjusted: p value with Holm's correction over the groups of the problem.
    """

    group: int
    best: int
    difference: np.ndarray | None
    p: float
    side: int
    adjusted: float = np.nan

    @property
    def pairs(self) -> int:
        """Number of seeds that both groups ran."""
        return 0 if self.difference is None else len(self.difference)

    def shown(self, alpha: float) -> bool:
        """Return whether the group is significantly worse at level `alpha`."""
        return self.side < 0 and self.adjusted <= alpha

    def contradicts(self, alpha: float) -> bool:
        """Return whether the test finds a difference at level `alpha`, but the group is not worse."""
        return self.side >= 0 and self.adjusted <= alpha


@dataclass(frozen=True)
class Problem:
    """A problem, and the groups that ran on it.

    Attributes:
        name: the values in which it differs from the other problems; empty if it is the only one.
        members: indices of its groups.
    """

    name: str
    members: tuple[int, ...]


def adapted(column: Column, metric: Metric) -> Column:
    """Return an accuracy column converted to another metric; other columns are returned unchanged."""
    stem, _, what = column.of.partition("_")
    if metric == ACCURACY or stem != ACCURACY.name:
        return column
    said = {"mean": metric.title, "worst": "worst client", "std": "std over clients"}[what]
    return replace(
        column,
        title=f"{said}, {metric.unit}" if metric.unit else said,
        of=f"{metric.name}_{what}",
        scale=metric.scale,
        form="f2" if metric.percent else "g4",
        better=-1 if what == "std" else metric.better,
    )


def column_of(key: str, runs: Sequence[Run]) -> Column:
    """Return a table column.

    Args:
        key: a key of `COLUMNS`, the name of the runs' metric, or a column of `metrics.csv`.
        runs: the runs, of which at least one must have the column.

    Raises:
        UserError: no run has the column.
    """
    metric = runs[0].metric
    if key in COLUMNS:
        return adapted(COLUMNS[key], metric)
    if key == metric.name:
        return adapted(COLUMNS["accuracy"], metric)
    known = list(dict.fromkeys(name for run in runs for name in run.series))
    if key not in known:
        raise UserError("column", key, f"no such column; {nearest(key, [*COLUMNS, *NAMES, *known])}")
    better = direction(key, metric, own_figure(key, runs))
    return Column(key.replace("_", " "), key, form="g4", better=better, spread=True)


def own_figure(key: str, runs: Sequence[Run]) -> tuple[str, int] | None:
    """Return the user-defined figure that a column belongs to, from `evaluation.metrics` or from a task.

    Returns:
        Its name, and 1 if higher is better, -1 if lower is better, 0 if a run does not say or two runs
        disagree; None if the column belongs to no user-defined figure.
    """
    found: dict[str, set[int]] = {}
    for run in runs:
        evaluation, told = run.config.get("evaluation"), run.summary.get("directions")
        paths = evaluation.get("metrics") if isinstance(evaluation, Mapping) else None
        names = [str(p).rpartition(":")[2] for p in paths] if isinstance(paths, (list, tuple)) else []
        said = told if isinstance(told, Mapping) else {}
        for name in dict.fromkeys((*names, *said)):
            found.setdefault(name, set()).add(int(said[name]) if said.get(name) in (1, -1) else 0)
    name = max((name for name in found if begins(key, [name])), key=len, default=None)
    return None if name is None else (name, found[name].pop() if len(found[name]) == 1 else 0)


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs; see `independent` for the runs that are left out.

    Attributes:
        groups: groups of runs that differ only in their seeds, with one run for each choice of seeds.
        choices: the options of the comparison.
        repeated: folders of runs left out because they repeat the seeds and the digest of another run.
        rerun: runs left out because they repeat the seeds of another run, with a different digest.
    """

    groups: tuple[Group, ...]
    choices: Choices = field(default_factory=Choices)
    repeated: tuple[str, ...] = ()
    rerun: tuple[Run, ...] = ()
    _contrasts: dict[tuple[Problem, Column], list[Contrast]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_target(self.choices.target, metric_of(self.groups))
        for key in self.choices.columns:
            if key not in NAMES:
                self.column(key)
        remedy = "has no better and worse values: use another"
        require(self.choices.metric not in NAMES, "--metric", self.choices.metric, remedy)
        metric = self.column(self.choices.metric)
        own = own_figure(metric.of, [run for group in self.groups for run in group.runs])
        told = f"declare {own[0]}.better = 1 or -1 beside the function and run again" if own else ""
        require(metric.better != 0, "--metric", self.choices.metric, told or remedy)
        members = [i for problem in self.problems if self._mixes(problem, metric) for i in problem.members]
        mixed = [self.groups[i].name for i in members if i in self.stepped]
        remedy = f"counts steps of the server in {first_of(mixed)}; use mb_to_target or virtual_s_to_target"
        require(not mixed, "--metric", self.choices.metric, remedy)
        leaves = [key for group in self.groups for key in tree_of(group.runs[0])]
        for section in self.choices.problem:
            known = any(_within(key, [section]) for key in leaves)
            require(known or section == "data", "--problem", section, "no key of these runs' configurations")
        if self.choices.test in TESTS:
            self._check_test(metric)

    def _check_test(self, metric: Column) -> None:
        """Raise `UserError` if the requested test cannot be made for any group."""
        test = self.choices.test
        found = [c for problem in self.problems for c in self.contrasts(problem, metric)]
        problems = ", ".join(self.choices.problem)
        remedy = f"there is nothing to compare: name runs of two configurations with equal {problems}"
        require(bool(found), "--test", test, remedy)
        if all(c.pairs < 2 for c in found) and any(c.difference is not None for c in found):
            pair = [self.groups[i] for i in (found[0].group, found[0].best)]
            seeds = "; ".join(f"{g.name}: {', '.join(seed_of(r) for r in g.runs)}" for g in pair)
            remedy = f"needs two or more seeds that both methods ran on equal data (seeds: {seeds})"
            raise UserError("--test", test, remedy)

    @cached_property
    def target(self) -> float:
        """The target value of the mean accuracy, or of the mean of another metric."""
        given = self.choices.target
        return default_target(self.groups) if given is None else given

    @property
    def alpha(self) -> float:
        """The significance level of tests."""
        return 1 - self.choices.confidence

    def column(self, key: str) -> Column:
        """Return a column of tables by its key."""
        return column_of(key, [run for group in self.groups for run in group.runs])

    # -- figures of a group --------------------------------------------------------------------------------

    def values(self, group: int, column: Column) -> np.ndarray:
        """Return a column of a group, in the column's unit [runs]; infinite for a target that was not met."""
        if not column.target:
            return column.scale * self.groups[group].final(column.of)
        found = self.reached(group, column)
        if column.restricted:
            return survival.restricted(found, self.horizon(self.problem_of(group), column))
        return found.shown

    def reached(self, group: int, column: Column) -> Reached:
        """Return where the runs of a group met the target, in the column's unit."""
        found = self.groups[group].reached(self.target, column.of)
        return Reached(column.scale * found.position, found.met)

    def horizon(self, problem: Problem, column: Column) -> float:
        """Return the horizon of the restricted means of a problem, in the column's unit."""
        return survival.horizon([self.reached(i, column) for i in problem.members if self.has(i, column)])

    def estimate(self, group: int, column: Column) -> Estimate:
        """Return the mean, standard deviation and interval of a column."""
        kind = "t" if self.choices.interval == STD else self.choices.interval
        ends = limits_of(column, self.groups[group].metric)
        return statistics.estimate(self.values(group, column), kind, self.choices.confidence, ends)

    def median(self, group: int, column: Column) -> Median:
        """Return the Kaplan-Meier median of the cost of the target."""
        return survival.median(self.reached(group, column), self.choices.interval, self.choices.confidence)

    def has(self, group: int, column: Column) -> bool:
        """Return whether all runs of a group have a finite value in a column."""
        if column.target:
            return bool(np.isfinite(self.reached(group, column).position).all())
        return bool(np.isfinite(self.groups[group].final(column.of)).all())

    # -- problems ------------------------------------------------------------------------------------------

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """The problems, in the order of their first groups."""
        trees = [self._problem(group.runs[0]) for group in self.groups]
        found: dict[str, list[int]] = {}
        for i, tree in enumerate(trees):
            found.setdefault(json.dumps(tree, sort_keys=True, default=str), []).append(i)
        firsts = [trees[members[0]] for members in found.values()]
        names = self._shared_labels(found.values()) or titles(firsts, [""] * len(firsts))
        return tuple(Problem(n, tuple(m)) for n, m in zip(names, found.values(), strict=True))

    def _shared_labels(self, sets: Collection[Sequence[int]]) -> list[str]:
        """Return, for each set of groups, what their users' labels have in common.

        A sweep labels its cases by the labels of all varied values, such as `ours, digits`. The result is
        empty unless it gives each of two or more sets a name of its own.
        """
        out = []
        for members in sets:
            parts = [(self.groups[i].runs[0].own_label or "").split(", ") for i in members]
            out.append(", ".join(part for part in parts[0] if all(part in other for other in parts)))
        return out if len(out) > 1 and all(out) and len(set(out)) == len(out) else []

    def problem_of(self, group: int) -> Problem:
        """Return the problem of a group."""
        return next(problem for problem in self.problems if group in problem.members)

    @cached_property
    def stepped(self) -> tuple[int, ...]:
        """Indices of the groups whose rounds are steps of an asynchronous server."""
        return tuple(i for i, group in enumerate(self.groups) if group.stepped)

    def _mixes(self, problem: Problem, column: Column) -> bool:
        """Return whether a column counts rounds for some groups of a problem and steps for others."""
        steps = sum(i in self.stepped for i in problem.members)
        return column.of == "round" and 0 < steps < len(problem.members)

    def _problem(self, run: Run) -> dict[str, Any]:
        return {key: value for key, value in tree_of(run).items() if _within(key, self.choices.problem)}

    # -- tests over seeds ----------------------------------------------------------------------------------

    def best(self, problem: Problem, column: Column) -> int:
        """Return the group of a problem with the best mean, or with the lowest median cost of the target.

        Of groups with equal medians, it is that with the lowest restricted mean, then that with the largest
        share of runs that met the target.
        """
        if not column.target or column.restricted:
            return min(problem.members, key=lambda i: -column.better * _mean(self.values(i, column)))
        found = {i: self.reached(i, column) for i in problem.members}
        until = survival.horizon([*found.values()])
        means = {i: _mean(survival.restricted(r, until)) for i, r in found.items()}
        medians = {i: survival.median(r).value for i, r in found.items()}
        return min(problem.members, key=lambda i: (medians[i], means[i], -found[i].met.mean()))

    def contrasts(self, problem: Problem, column: Column) -> list[Contrast]:
        """Return the contrast of each group of a problem with the best; empty if there is none to compare."""
        if (problem, column) not in self._contrasts:
            self._contrasts[problem, column] = self._compare(problem, column)
        return self._contrasts[problem, column]

    def _compare(self, problem: Problem, column: Column) -> list[Contrast]:
        members = [i for i in problem.members if self.has(i, column)]
        if len(members) < 2 or self.choices.test == NO_TEST or self._mixes(problem, column):
            return []
        problem = Problem(problem.name, tuple(members))
        best = self.best(problem, column)
        others = [i for i in members if i != best]
        found = [self._contrast(i, best, column) for i in others]
        adjusted = statistics.holm([c.p for c in found])
        return [replace(c, adjusted=float(p)) for c, p in zip(found, adjusted, strict=True)]

    def _contrast(self, group: int, best: int, column: Column) -> Contrast:
        if column.target and not column.restricted:
            enough = min(len(self.groups[i].runs) for i in (group, best)) > 1
            statistic, p = survival.logrank(self.reached(group, column), self.reached(best, column))
            return Contrast(group, best, None, p if enough else np.nan, int(np.sign(statistic)))
        difference, test = self.paired(group, best, column), self.choices.test or "t"
        side = column.better * statistics.side(difference, test)
        return Contrast(group, best, difference, statistics.paired_p(difference, test), side)

    def paired(self, group: int, best: int, column: Column) -> np.ndarray:
        """Return a column of a group minus that of the best, under equal seeds and data [pairs].

        A difference that is only due to rounding is 0.
        """
        a, b = (self._by_seed(i, column) for i in (group, best))
        common = [key for key in a if key in b]
        return statistics.difference(*(np.array([x[key] for key in common], float) for x in (a, b)))

    def same_seeds(self, group: int, other: int) -> bool:
        """Return whether two groups ran the same seeds on equal data."""
        return {*self._pairs[group]} == {*self._pairs[other]}

    @cached_property
    def _pairs(self) -> list[list[str]]:
        """Seeds and data of the runs of each group."""
        return [[seeds_and_data(run) for run in group.runs] for group in self.groups]

    def _by_seed(self, group: int, column: Column) -> dict[str, float]:
        return dict(zip(self._pairs[group], self.values(group, column).tolist(), strict=True))

    def marks(self, problem: Problem, column: Column) -> dict[int, str]:
        """Return which groups of a problem are the best, by the tests.

        Returns:
            `BEST` for a single best group, if the tests find every other group worse. Otherwise `TIED` for
            the best and each group not distinguishable from it. A group whose runs never met the target is no
            tie, nor is one with too few runs for its test to find any difference. Empty if no test could be
            made, or if all values agree.
        """
        found = self.contrasts(problem, column) if column.better else []
        tested = [c for c in found if not np.isnan(c.adjusted)]
        if not tested or all(c.adjusted == 1.0 and self._agrees(c, column) for c in tested):
            return {}
        alike = [c.group for c in tested if not c.shown(self.alpha)]
        few = {c.group for c in self.undecided(tested, column)[0]}
        tied = [i for i in alike if i not in few and self._meets(i, column)]
        if alike and not tied:
            return {}
        if not tied and len(tested) == len(found):
            return {found[0].best: BEST}
        return {i: TIED for i in (found[0].best, *tied)} if tied else {}

    def _meets(self, group: int, column: Column) -> bool:
        """Return whether any run of a group met the target, in a column of what that costs."""
        return not column.target or bool(self.reached(group, column).met.any())

    def undecided(self, tested: Sequence[Contrast], column: Column) -> tuple[list[Contrast], float]:
        """Return the contrasts whose runs are too few for their test to find any difference, and the least p.

        Args:
            tested: the contrasts of a problem that were tested.
            column: the column.

        Returns:
            Those of which Holm's adjusted p cannot fall to the level; the lowest of these least values, NaN
            without any.
        """
        logrank = column.target and not column.restricted
        if not logrank and (self.choices.test or "t") != "wilcoxon":
            return [], np.nan
        least = [
            survival.least_logrank_p(*(len(self.groups[i].runs) for i in (c.group, c.best)))
            if logrank
            else statistics.least_wilcoxon_p(c.pairs)
            for c in tested
        ]
        adjusted = statistics.holm(least).tolist()
        few = [(c, p) for c, p in zip(tested, adjusted, strict=True) if p > self.alpha]
        return [c for c, _ in few], min((p for _, p in few), default=np.nan)

    def _agrees(self, contrast: Contrast, column: Column) -> bool:
        a, b = (np.sort(self.values(i, column)) for i in (contrast.group, contrast.best))
        return len(a) == len(b) and not statistics.difference(a, b).any()

    # -- ranks over problems -------------------------------------------------------------------------------

    @cached_property
    def methods(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The methods that have runs in each problem: names, and their groups in the order of the problems.

        Raises:
            UserError: there are fewer than two problems or three methods, or a method has no runs in a
                problem.
        """
        many = len(self.problems)
        remedy = "name runs of at least two problems; --problem KEY,... says which keys make a problem"
        require(many > 1, "--ranks", ", ".join(self.choices.problem), f"one problem has no ranks: {remedy}")
        by_label, by_settings = self._placed(True), self._placed(False)
        found = by_label if all(len(places) == many for _, places in by_label) else by_settings
        for name, places in found:
            missing = [problem.name for w, problem in enumerate(self.problems) if w not in places]
            if missing:
                raise UserError("--ranks", name, f"has no runs in {missing[0]}{self._hint()}")
        require(len(found) > 2, "--ranks", [n for n, _ in found], "use three methods; --test compares two")
        own = self._shared_labels([[*places.values()] for _, places in found])
        return tuple(
            (own[i] if own else name, tuple(places[w] for w in range(many)))
            for i, (name, places) in enumerate(found)
        )

    def _placed(self, labels: bool) -> list[tuple[str, dict[int, int]]]:
        """Return each method's name and its group in each problem.

        Groups belong to one method if their settings agree in everything but the problem. If this holds for
        several groups of the same problem, the names of their configurations distinguish them.

        Args:
            labels: whether the groups of a method must also agree in their user's labels.
        """
        runs = [group.runs[0] for group in self.groups]
        rests = [{k: v for k, v in tree_of(r).items() if not _within(k, self.choices.problem)} for r in runs]
        given = [run.own_label if labels else None for run in runs]
        keys = [_key(label, rest) for label, rest in zip(given, rests, strict=True)]
        many = Counter((problem, keys[i]) for problem in self.problems for i in problem.members)
        named = {key for (_, key), number in many.items() if number > 1}  # `gather` has separated them
        heads, trees = dict[str, str](), dict[str, dict[str, Any]]()
        found: dict[str, dict[int, int]] = {}
        for w, problem in enumerate(self.problems):
            for i in problem.members:
                label, tree = given[i], rests[i]
                if keys[i] in named:
                    label, tree = runs[i].own_label, {"name": name_of(runs[i])} | tree
                key = _key(label, tree)
                heads[key], trees[key] = label or str(tree.get(ALGORITHM, "run")), tree
                found.setdefault(key, {}).setdefault(w, i)
        return [*zip(titles([*trees.values()], [*heads.values()]), found.values(), strict=True)]

    def _hint(self) -> str:
        """Return a hint naming the sections outside `--problem` that differ between runs of one algorithm."""
        sections: dict[str, None] = {}
        trees = [tree_of(group.runs[0]) for group in self.groups]
        for tree in trees:
            for other in trees:
                if tree.get("algorithm.name") == other.get("algorithm.name"):
                    sections |= {key.split(".")[0]: None for key in tree if tree[key] != other.get(key)}
        more = [name for name in sections if name not in ("algorithm", *self.choices.problem)]
        names = ",".join([*self.choices.problem, *more])
        return f"; where these differ between problems, too, use --problem {names}" if more else ""

    @cached_property
    def ranking(self) -> Ranking:
        """The ranks of `methods` over the problems in the column `metric`, by means or medians over seeds."""
        column = self.column(self.choices.metric)
        scores = [[self._score(i, column) for i in groups] for _, groups in self.methods]
        return statistics.rank(np.array(scores).T, column.better > 0, self.alpha)

    def _score(self, group: int, column: Column) -> float:
        """Return the score by which a group is ranked."""
        where = self.groups[group].name
        infinite = not column.target and not np.isnan(self.values(group, column)).any()  # ranked last
        there = self.has(group, column) or infinite
        require(there, "--metric", self.choices.metric, f"{where} has no such figure")
        if column.target and not column.restricted:
            return self.median(group, column).value
        return _mean(self.values(group, column))


def limits_of(column: Column, metric: Metric) -> tuple[float, float]:
    """Return between which values a figure lies, in the column's unit; infinite where it has no bound.

    Args:
        column: the column.
        metric: the metric of the runs.
    """
    of = column.of
    known = metric if metric.of(of) else metric_of_column(of)
    if begins(of, ["ari"]):
        low, high = -1.0, 1.0
    elif begins(of, UNIT_RANGE):
        low, high = 0.0, 1.0
    elif known is not None and of.endswith(SPREADS):
        low, high = 0.0, np.inf
    elif known is not None:
        low, high = (0.0, 1.0) if known.percent else (-np.inf, np.inf)
        low = 0.0 if known is METRICS.get(known.name) and known.better < 0 else low  # errors
        high = 1.0 if known is METRICS["r2"] else high
    else:
        low, high = (0.0, np.inf) if column.target or begins(of, COUNTED) else (-np.inf, np.inf)
    return column.scale * low, column.scale * high


def _mean(values: np.ndarray) -> float:
    """Return the mean of values [seeds], bit for bit the same in any order of the seeds."""
    return float(np.sort(values).mean())


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _key(label: str | None, tree: Mapping[str, Any]) -> str:
    """Return a user's label and settings as one string."""
    return json.dumps([label, tree], sort_keys=True, default=str)


def seeds_and_data(run: Run) -> str:
    """Return the seeds and data of a run as a string; two runs with equal ones form a pair."""
    return json.dumps([run.config.get("seed"), run.non_default.get("data")], sort_keys=True, default=str)


def seed_of(run: Run) -> str:
    """Return the seeds of a run as short text: one number if all are equal."""
    seeds = run.config.get("seed")
    values = list(seeds.values()) if isinstance(seeds, Mapping) else [seeds]
    return str(values[0]) if len(set(map(str, values))) == 1 else "/".join(map(str, values))


def independent(groups: Sequence[Group]) -> tuple[tuple[Group, ...], tuple[str, ...], tuple[Run, ...]]:
    """Return groups in which seeds and data occur once, and the runs that are left out.

    A run with the seeds and data of another run of its group is not independent evidence, even if its last
    bits differ, as on another machine or without the kernels. Only the first of such runs is kept.

    Returns:
        The groups; the folders of left-out runs with the same digest as the kept run; the other left-out
        runs.
    """
    out = list[Group]()
    repeated, rerun = list[str](), list[Run]()
    for group in groups:
        seen: dict[str, Run] = {}
        for run in group.runs:
            first = seen.get(seeds := seeds_and_data(run))
            if first is None:
                seen[seeds] = run
            else:
                same = "digest" in run.summary and run.summary["digest"] == first.summary.get("digest")
                if same:
                    repeated.append(str(run.folder))
                else:
                    rerun.append(run)
        out.append(Group(group.name, tuple(seen.values())))
    return tuple(out), tuple(repeated), tuple(rerun)


def compare(names: Sequence[str], choices: Choices | None = None, finished_only: bool = False) -> Comparison:
    """Compare runs.

    Args:
        names: run folders, folders that hold run folders (such as those of sweeps), and patterns of them.
        choices: what to compute; None takes the defaults.
        finished_only: whether to leave out unfinished runs, with a warning.

    Raises:
        UserError: a folder is not a finished run, or a choice does not fit these runs.
    """
    groups, repeated, rerun = independent(gather(names, finished_only))
    return Comparison(groups, choices or Choices(), repeated, rerun)
