"""The section `table` of a sweep: its figures, and the numbers that a paper prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen

from mpifl.core.case_names import label_among, labels_of
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.metric import SPREADS
from mpifl.core.options import Options, PositiveFloat

ROWS, COLUMNS, SEED = "rows", "columns", "seed"  # keys of `vary` with a place of their own in the table
MORE, LESS = "more", "less"
OF_SWEEPS = ("vary", "table", "tune", "tuned", "chooses_for")  # sections that a case of a sweep does not have
FIGURES = "figures"  # value of `across`
METRIC = "metric_"  # prefix of figures that stand for the metric of each case, whatever it is
SAMPLE = "sample"
DEVIATIONS = {SAMPLE: 1, "population": 0}  # -> ddof, the number subtracted from the number of seeds
MAX_DIGITS = 15  # decimals of a figure


@dataclass(frozen=True)
class Figure(Options):
    """A column of the table of a sweep.

    Attributes:
        of: a column of `metrics.csv` at the last evaluation (`accuracy_mean_max`: the largest mean over all
            evaluations), or a number of `summary.json` (dotted).
        percent: whether to show hundredths.
        per: the unit in which the figure is shown, such as 1e9 for GFLOP of `flops`.
        digits: number of decimals.
        better: `more` or `less`, for ranks; for `metric_mean` and similar figures, the metric decides.
        deviation: standard deviation over seeds, `sample` or `population`.
    """

    of: str
    percent: bool = False
    per: PositiveFloat = 1.0
    digits: Annotated[int, Interval(ge=0, le=MAX_DIGITS)] = 2
    better: Literal["more", "less"] = "more"
    deviation: Literal["sample", "population"] = "sample"

    def direction(self, own: Collection[int]) -> int:
        """Return 1 if higher figures are better, -1 if lower ones are, 0 if the rows' metrics disagree.

        Args:
            own: directions of the rows' metrics, which decide for `metric_mean` and similar figures.
        """
        told = {*own} - {0}
        if not told or not self.of.startswith(METRIC) or any(word in self.of for word in SPREADS):
            return 1 if self.better == MORE else -1
        return told.pop() if len(told) == 1 else 0

    def scaled(self, value: float) -> float:
        """Return a value in the unit of the table."""
        return (100 * value if self.percent else value) / self.per


@dataclass(frozen=True)
class TuneConfig(Options):
    """Options of the rows of a sweep that are chosen on validation data before it runs.

    Each candidate runs once in each group of columns and is evaluated on validation samples
    (`data.evaluate_on`). The best one by the mean over clients of the metric at the end is taken, of equal
    ones the first; the sweep then runs with it, evaluated on test samples.

    Attributes:
        rows: label of `vary.rows` -> keys and the values to try, as in `vary`; each combination is a
            candidate. Other rows have none.
        seed: the seed that candidates run with; no seed of the sweep.
    """

    rows: Annotated[dict[str, dict[str, Any]], MinLen(1)]
    seed: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for row, keys in self.rows.items():
            remedy = "use a mapping of keys to lists of values, as in algorithm.num_clusters: [2, 4]"
            lists = isinstance(keys, Mapping) and all(isinstance(v, (list, Mapping)) for v in keys.values())
            require(lists and bool(keys) and all(map(len, keys.values())), f"rows.{row}", keys, remedy)


@dataclass(frozen=True)
class TableConfig(Options):
    """The layout of a sweep's results, beside the figures that a paper prints.

    Attributes:
        title: the table or figure of the paper.
        figures: label -> the figure: `{of: accuracy_mean, percent: true}`.
        published: row -> list of published figures in the order of `figures`, as numbers or as texts that
            begin with the number, shown as they are written. Use null, or a shorter list, where the paper
            prints none. If there are groups of columns, the rows are below the label of their group.
        spread: meaning of the paper's "+-".
        interval: 95 % confidence interval of the mean over seeds, shown instead of the standard deviation: t,
            bootstrap or percentile; empty shows the deviation.
        ranks: whether to add average ranks of the rows over the groups of columns, with Friedman's test and
            the critical difference, for figures with at least three rows and two complete groups.
        across: what stands across: the `figures`, in a table for each group of columns, or the groups of
            `columns`, in a table for each figure; the latter shows no published numbers.
        blocked: why the table cannot be run with the available data; empty if it can.
        notes: how the paper was interpreted where this decides the results.
        differences: what differs from the table of the sweep's base, whose notes also apply.
        findings: the results and the tested causes of differences, paragraph by paragraph, for
            `docs/reproductions`.
    """

    title: Annotated[str, MinLen(1)]
    figures: Annotated[dict[str, Figure], MinLen(1)]
    published: dict[str, object] = field(default_factory=dict)
    spread: str = ""
    interval: Literal["", "t", "bootstrap", "percentile"] = ""
    ranks: bool = False
    across: Literal["figures", "columns"] = "figures"
    blocked: str = ""
    notes: str = ""
    differences: str = ""
    findings: tuple[str, ...] = ()

    def check(self, vary: Mapping[str, Any]) -> None:
        """Check the published numbers against the labels of a sweep.

        Args:
            vary: the sweep's `vary`.

        Raises:
            UserError: a published row or group of columns does not exist in the sweep, or a row has too many
                figures.
        """
        remedy = "needs vary.columns, and shows no published numbers; use figures"
        fits = self.across == FIGURES or (COLUMNS in vary and not self.published)
        require(fits, "table.across", self.across, remedy)
        groups = labels_of(vary[COLUMNS]) if COLUMNS in vary else [""]
        lines = labels_of(vary.get(down(vary), []))
        tables: Mapping[str, Any] = (
            self.published if COLUMNS in vary else {"": self.published} if self.published else {}
        )
        for group, rows in tables.items():
            path = f"published.{group}".rstrip(".")
            if label_among(group, groups) is None:
                raise UserError(path, group, f"vary.columns has no such label; {nearest(group, groups)}")
            require(isinstance(rows, dict), path, rows, "use a mapping of rows to lists of figures")
            for row, given in rows.items():
                if label_among(row, lines) is None:
                    raise UserError(f"{path}.{row}", row, f"no such row; {nearest(str(row), lines)}")
                fits = isinstance(given, list) and len(given) <= len(self.figures)
                require(fits, f"{path}.{row}", given, f"use a list of {len(self.figures)} figures or fewer")

    def text_of(self, group: str, row: str) -> list[str]:
        """Return the published figures of a row as the paper prints them; empty texts for missing ones."""
        rows: Any = _labelled(self.published, group) if group else self.published
        given = _labelled(rows or {}, row)
        texts = ["" if value is None else str(value) for value in given or []]
        return texts + [""] * (len(self.figures) - len(texts))


def _labelled(values: Mapping[Any, Any], label: str) -> Any:
    """Return the value under a label, see `label_among`; None for none."""
    return next((value for given, value in values.items() if label_among(given, (label,))), None)


def down(keys: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the varied key whose labels are the rows: `rows`, else the first one but columns and seed."""
    return ROWS if ROWS in keys else next((key for key in keys if key not in (COLUMNS, SEED)), "")
