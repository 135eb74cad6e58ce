"""Rules that end a run before its last round: a target, patience, and budgets of time and bytes.

Rank 0 applies the rules of a run after each step, in this order, and the first that holds ends the run. A
rule sees only figures of the federation so far, under the names of `metrics.csv`, so the rows of that file
restore the state of a resumed run's rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from mpifl.core.directions import reaches
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.options import FiniteNonNegative, FinitePositive, Options, PositiveInt
from mpifl.core.units import in_bytes

SENT = ("federation_bytes_up", "federation_bytes_down")
SECTION = "stop"
Figures = Mapping[str, float]  # column of `metrics.csv` -> value


@dataclass(frozen=True)
class StopConfig(Options):
    """When a run ends before its last round: after the first step at which one of these rules holds.

    The last step is evaluated in any case. Without a key, a run takes all of its rounds.

    Attributes:
        metric: what `target` and `patience` look at: a metric (`accuracy`, which stands for `accuracy_mean`),
            or any column of `metrics.csv` (`accuracy_worst`, `loss`). null: the mean of the task's metric.
        better: whether `more` or `less` of it is better; null: as the metric has it.
        target: the run ends once the metric is as good as this, in the unit of `metrics.csv` (accuracies are
            in [0, 1]).
        patience: the run ends after this many evaluations in a row that were not better than the best before
            them by more than `min_delta`.
        min_delta: least change of the metric that counts as better, for `patience`.
        seconds: the run ends once the clock of the federation (column `virtual_seconds`) shows this time.
        wall_seconds: the run ends once it has taken this much real time. Where it then ends depends on the
            machine, so this is the only rule under which equal settings may give other numbers.
        bytes: the run ends once clients have sent and received this many bytes in total.
    """

    metric: str | None = None
    better: Literal["more", "less"] | None = None
    target: float | None = None
    patience: PositiveInt | None = None
    min_delta: FiniteNonNegative = 0.0
    seconds: FinitePositive | None = None
    wall_seconds: FinitePositive | None = None
    bytes: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "has no effect without stop.patience; give it, or leave this out"
        require(self.patience is not None or not self.min_delta, "min_delta", self.min_delta, remedy)
        known = self.target is None or isfinite(self.target)
        require(known, "target", self.target, "use a finite number")
        for name in ("metric", "better"):
            remedy = "has no effect without stop.target or stop.patience; give one, or leave this out"
            given = getattr(self, name)
            require(given is None or self.evaluates, name, given, remedy)

    @property
    def evaluates(self) -> bool:
        """Whether a rule looks at evaluations."""
        return self.target is not None or self.patience is not None

    @property
    def given(self) -> bool:
        """Whether there is any rule."""
        return self != StopConfig()

    def rules(self, metric: str, direction: int) -> list[StopRule]:
        """Return new rules.

        Args:
            metric: the metric that `target` and `patience` look at.
            direction: 1 if higher is better in it, -1 if lower is.
        """
        found: list[StopRule] = []
        if self.target is not None:
            found.append(Target(metric, direction, self.target))
        if self.patience is not None:
            found.append(Patience(metric, direction, self.patience, self.min_delta))
        if self.seconds is not None:
            found.append(Budget("seconds", ("virtual_seconds",), self.seconds, _virtual))
        if self.bytes is not None:
            found.append(Budget("bytes", SENT, self.bytes, _sent))
        if self.wall_seconds is not None:
            found.append(Budget("wall_seconds", ("seconds",), self.wall_seconds, _real, False))
        return found

    def __str__(self) -> str:
        """Return the rules in words."""
        what = self.metric or "the task's metric"
        parts = [] if self.target is None else [f"{what} reaches {self.target:g}"]
        if self.patience is not None:
            gain = f" by more than {self.min_delta:g}" if self.min_delta else ""
            parts.append(f"{what} is not better{gain} in {self.patience} evaluations")
        parts += [] if self.seconds is None else [f"{self.seconds:g} virtual seconds are over"]
        parts += [] if self.bytes is None else [f"{in_bytes(self.bytes)} are sent"]
        parts += [] if self.wall_seconds is None else [f"{self.wall_seconds:g} real seconds are over"]
        return ", or ".join(parts)


def _virtual(spent: float, limit: float) -> str:
    return f"{spent:.6g} virtual seconds were over, of a budget of {limit:g}"


def _sent(spent: float, limit: float) -> str:
    return f"{in_bytes(spent)} were sent, of a budget of {in_bytes(limit)}"


def _real(spent: float, limit: float) -> str:
    return f"{spent:.4g} real seconds were over, of a budget of {limit:g}"


class StopRule(ABC):
    """A rule that can end a run; on rank 0.

    Attributes:
        name: its key in the section `stop`.
        repeats: whether it holds at the same step of every run with equal settings.
    """

    name: str
    repeats: bool = True

    @abstractmethod
    def after(self, figures: Figures, evaluated: bool) -> str:
        """Return why the run ends after this step; empty to go on.

        Args:
            figures: `round`, `seconds`, `virtual_seconds` (if there is a clock) and the bytes so far (if a
                rule limits them); after an evaluation, all of its columns.
            evaluated: whether the step was evaluated.
        """


class Target(StopRule):
    """Ends a run once a metric is as good as a target.

    Args:
        metric: the metric.
        direction: 1 if higher is better, -1 if lower is.
        target: the target.
    """

    def __init__(self, metric: str, direction: int, target: float) -> None:
        self.name = "target"
        self.metric, self.direction, self.target = metric, direction, target

    def after(self, figures: Figures, evaluated: bool) -> str:
        """Compare an evaluation with the target."""
        if not evaluated:
            return ""
        column, value = column_of(self.metric, figures)
        met = bool(reaches(value, self.target, self.direction))
        return f"{column} {value:.6g} reached the target {self.target:g}" if met else ""


class Patience(StopRule):
    """Ends a run after some evaluations in a row without a better value of a metric.

    Args:
        metric: the metric.
        direction: 1 if higher is better, -1 if lower is.
        patience: number of evaluations.
        min_delta: an evaluation is better only if it exceeds the best one so far by more than this.

    Attributes:
        best: the best value so far; None before the first that is a number.
        waited: number of evaluations since then.
    """

    def __init__(self, metric: str, direction: int, patience: int, min_delta: float) -> None:
        self.name = "patience"
        self.metric, self.direction = metric, direction
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.waited = 0

    def after(self, figures: Figures, evaluated: bool) -> str:
        """Count an evaluation that is not better; NaN never is."""
        if not evaluated:
            return ""
        column, value = column_of(self.metric, figures)
        first = self.best is None and value == value
        if first or (self.best is not None and self.direction * (value - self.best) > self.min_delta):
            self.best, self.waited = value, 0
            return ""
        self.waited += 1
        if self.waited < self.patience:
            return ""
        best = "" if self.best is None else f" than {self.best:.6g}"
        best += f" by more than {self.min_delta:g}" if best and self.min_delta else ""
        return f"{column} was not better{best} in {self.waited} evaluations"


class Budget(StopRule):
    """Ends a run once it has spent a budget.

    Args:
        name: its key in the section `stop`.
        columns: the columns whose sum is spent.
        limit: the budget.
        words: returns the reason, of what was spent and the budget.
        repeats: whether equal settings spend the same.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        limit: float,
        words: Callable[[float, float], str],
        repeats: bool = True,
    ) -> None:
        self.name, self.columns, self.limit, self.words = name, columns, limit, words
        self.repeats = repeats

    def after(self, figures: Figures, evaluated: bool) -> str:
        """Compare what was spent with the budget, after every step."""
        spent = sum(figures[column] for column in self.columns)
        return self.words(spent, self.limit) if spent >= self.limit else ""


def column_of(metric: str, figures: Figures) -> tuple[str, float]:
    """Return the column of `metrics.csv` that a metric stands for, and its value.

    Raises:
        UserError: there is no such column.
    """
    for column in (metric, f"{metric}_mean"):
        if column in figures:
            return column, float(figures[column])
    remedy = f"no such column of metrics.csv; {nearest(metric, [*figures])}"
    raise UserError(f"{SECTION}.metric", metric, remedy)


@dataclass(frozen=True)
class Ending:
    """Why a run ended before its last round.

    Attributes:
        rule: name of the rule.
        step: the last step.
        reason: the reason in words.
        repeats: whether a run with equal settings ends at the same step.
    """

    rule: str
    step: int
    reason: str
    repeats: bool = True


class StopRules:
    """The rules of a run; on rank 0.

    Args:
        rules: the rules, of which the first that holds ends the run.

    Attributes:
        ending: why the run ended; None while it goes on.
    """

    def __init__(self, rules: Iterable[StopRule] = ()) -> None:
        self.rules = [*rules]
        self.ending: Ending | None = None

    def after(self, figures: Figures, evaluated: bool) -> Ending | None:
        """Apply all rules after a step; return why the run ends, None to go on.

        An evaluation before the first step ends no run and is none that patience counts.

        Args:
            figures: see `StopRule.after`.
            evaluated: whether the step was evaluated.
        """
        step = int(figures["round"])
        if self.ending is None and step:
            reasons = [(rule, rule.after(figures, evaluated)) for rule in self.rules]  # each has a state
            holding = (Ending(rule.name, step, why, rule.repeats) for rule, why in reasons if why)
            self.ending = next(holding, None)
        return self.ending
