"""The table that a sweep writes in the layout of a paper, beside the published numbers.

The section `table` of a sweep names the figures and the published numbers. `vary.rows` and `vary.columns`
define the rows and the groups of columns. Figures of several seeds are shown as mean and standard deviation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from mpifl.analysis import tables
from mpifl.analysis.comparison import SPREADS
from mpifl.analysis.statistics import estimate, rank
from mpifl.analysis.tables import as_markdown
from mpifl.core.case_names import labels_of
from mpifl.core.errors import UserError, nearest, require
from mpifl.results.metrics import over_runs

ROWS, COLUMNS, SEED = "rows", "columns", "seed"  # keys of `vary` with a place of their own in the table
FIGURE_KEYS = ["of", "percent", "digits", "better", "deviation"]
MORE, LESS = "more", "less"
METRIC = "metric_"  # prefix of figures that stand for the metric of each case, whatever it is
SAMPLE = "sample"
DEVIATIONS = {SAMPLE: 1, "population": 0}  # -> ddof, the number subtracted from the number of seeds
INTERVALS = ("t", "bootstrap", "percentile")
CONFIDENCE = 0.95
MAX_DIGITS = 15  # decimals of a figure
MAX_FIXED = 1e15  # a larger figure is from a run that diverged
NUMBER = re.compile(
    r"\s*(-?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d+)?)(?!,\d)"
)  # a published text begins with it


@dataclass(frozen=True)
class TableConfig:
    """The layout of a sweep's results, beside the figures that a paper prints.

    Attributes:
        title: the table or figure of the paper.
        figures: label -> `{of: a column of metrics.csv (last evaluation) or a number of summary.json,
            percent: whether to show hundredths, digits: number of decimals, better: more or less, for ranks,
            deviation: the standard deviation over seeds, sample or population}`.
        published: row -> list of published figures in the order of `figures`, as numbers or as texts that
            begin with the number. Use null, or a shorter list, where the paper prints none. If there are
            groups of columns, the rows are below the label of their group.
        spread: meaning of the paper's "+-".
        interval: 95 % confidence interval of the mean over seeds, shown instead of the standard deviation: t,
            bootstrap or percentile; empty shows the deviation.
        ranks: whether to add average ranks of the rows over the groups of columns, with Friedman's test and
            the critical difference, for figures with at least three rows and two complete groups.
        blocked: why the table cannot be run with the available data; empty if it can.
        notes: how the paper was interpreted where this decides the results.
        differences: what differs from the table of the sweep's base, whose notes also apply.
        findings: the results and the tested causes of differences, paragraph by paragraph, for
            `docs/reproductions`.
    """

    title: str
    figures: dict[str, Any]
    published: dict[str, Any] = field(default_factory=dict)
    spread: str = ""
    interval: str = ""
    ranks: bool = False
    blocked: str = ""
    notes: str = ""
    differences: str = ""
    findings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.title), "title", self.title, "say which table of which paper it is")
        known = self.interval in ("", *INTERVALS)
        require(known, "interval", self.interval, f"use one of {', '.join(INTERVALS)}, or leave it out")
        remedy = "name at least one, as in {ARI: {of: ari}}"
        require(bool(self.figures), "figures", self.figures, remedy)
        for label, given in self.figures.items():
            path = f"figures.{label}"
            fits = isinstance(given, dict) and isinstance(given.get("of"), str)
            require(fits, path, given, "use a mapping such as {of: accuracy_mean, percent: true}")
            for key in given:
                if key not in FIGURE_KEYS:
                    raise UserError(f"{path}.{key}", given[key], f"unknown key; {nearest(key, FIGURE_KEYS)}")
            percent, digits = given.get("percent", False), given.get("digits", 0)
            require(isinstance(percent, bool), f"{path}.percent", percent, "use true or false")
            fits = isinstance(digits, int) and not isinstance(digits, bool) and 0 <= digits <= MAX_DIGITS
            require(fits, f"{path}.digits", digits, f"use a number of decimals, 0 to {MAX_DIGITS}")
            better = given.get("better", MORE)
            require(better in (MORE, LESS), f"{path}.better", better, f"use {MORE} or {LESS}")
            kind = given.get("deviation", SAMPLE)
            require(kind in DEVIATIONS, f"{path}.deviation", kind, f"use {' or '.join(DEVIATIONS)}")

    @property
    def columns(self) -> list[Figure]:
        """The figures, in order."""
        return [
            Figure(
                label,
                given["of"],
                given.get("percent", False),
                given.get("digits", 2),
                given.get("better", MORE),
                given.get("deviation", SAMPLE),
            )
            for label, given in self.figures.items()
        ]

    def check(self, vary: Mapping[str, Any]) -> None:
        """Check the published numbers against the labels of a sweep.

        Args:
            vary: the sweep's `vary`.

        Raises:
            UserError: a published row or group of columns does not exist in the sweep, or a row has too many
                figures.
        """
        groups = labels_of(vary[COLUMNS]) if COLUMNS in vary else [""]
        lines = labels_of(vary.get(down(vary), []))
        tables = self.published if COLUMNS in vary else {"": self.published} if self.published else {}
        for group, rows in tables.items():
            path = f"published.{group}".rstrip(".")
            if group not in groups:
                raise UserError(path, group, f"vary.columns has no such label; {nearest(group, groups)}")
            require(isinstance(rows, dict), path, rows, "use a mapping of rows to lists of figures")
            for row, given in rows.items():
                if str(row) not in lines:
                    raise UserError(f"{path}.{row}", row, f"no such row; {nearest(str(row), lines)}")
                fits = isinstance(given, list) and len(given) <= len(self.figures)
                require(fits, f"{path}.{row}", given, f"use a list of {len(self.figures)} figures or fewer")

    def text_of(self, group: str, row: str) -> list[str]:
        """Return the published figures of a row as the paper prints them; empty texts for missing ones."""
        rows = self.published.get(group, {}) if group else self.published
        given = {str(label): values for label, values in rows.items()}.get(row, [])
        texts = ["" if value is None else str(value) for value in given]
        return texts + [""] * (len(self.figures) - len(texts))


@dataclass(frozen=True)
class Figure:
    """A column of the table.

    Attributes:
        label: the label in the paper.
        of: column of `metrics.csv` at the last evaluation, or a number of `summary.json` (dotted).
        percent: whether to show hundredths.
        digits: number of decimals.
        better: `more` or `less`, for ranks; for `metric_mean` and similar figures, the metric decides.
        deviation: standard deviation over seeds, `sample` or `population`.
    """

    label: str
    of: str
    percent: bool
    digits: int
    better: str
    deviation: str

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
        return 100 * value if self.percent else value


@dataclass(frozen=True)
class Result:
    """The final figures of one case.

    Attributes:
        labels: varied key -> label of its value.
        values: name -> number; see `Figure.of`.
        better: 1 if higher values of the case's metric are better, -1 if lower ones are, 0 if unknown.
    """

    labels: Mapping[str, str]
    values: Mapping[str, float]
    better: int = 0


@dataclass(frozen=True)
class Cell:
    """One figure of one row: the published value, and the values of the seeds that ran.

    Attributes:
        published: the figure as the paper prints it; empty if it prints none.
        values: value of each seed that has the figure, in the unit of the table.
        digits: number of decimals.
        interval: kind of the confidence interval; empty shows the standard deviation.
        deviation: `sample` or `population`.
        seeds: number of seeds that ran, including those without the figure.
    """

    published: str
    values: tuple[float, ...]
    digits: int
    interval: str = ""
    deviation: str = SAMPLE
    seeds: int = 1

    @property
    def measured(self) -> str:
        """Mean with standard deviation or interval over several seeds; the count if some lack the figure."""
        if not self.values:
            return ""
        centre, spread = over_runs(np.array(self.values), DEVIATIONS[self.deviation])
        more = f" ± {self._text(spread)}" if len(self.values) > 1 and np.isfinite(spread) else ""
        if more and self.interval and np.isfinite(self.values).all():
            found = estimate(np.array(self.values), self.interval, CONFIDENCE)
            more = f" [{self._text(found.low)}, {self._text(found.high)}]"
        few = f" ({len(self.values)} of {self.seeds})" if len(self.values) < self.seeds else ""
        return f"{self._text(centre)}{more}{few}"

    def _text(self, value: float) -> str:
        return f"{value:.{self.digits}f}" if abs(value) < MAX_FIXED else f"{value:.4g}"

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if none ran."""
        return float(np.mean(self.values)) if self.values else float("nan")

    @property
    def difference(self) -> float | None:
        """The mean minus the published number; None if one of them is missing."""
        number = NUMBER.match(self.published)
        if number is None or not self.values:
            return None
        return self.mean - float(number[1])


@dataclass(frozen=True)
class Line:
    """A row of the table.

    Attributes:
        group: label of its group of columns; empty if there are no groups.
        labels: its labels: the label of the row, and those of other varied keys.
        cells: one cell for each figure.
        seeds: number of seeds that ran.
        asked: number of seeds that the sweep asks for.
        better: direction of the metric, see `Result`.
    """

    group: str
    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    seeds: int
    asked: int = 0
    better: int = 0


def down(keys: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the varied key whose labels are the rows: `rows`, else the first one but columns and seed."""
    return ROWS if ROWS in keys else next((key for key in keys if key not in (COLUMNS, SEED)), "")


def of_seeds(ran: int, asked: int) -> str:
    """Return the number of seeds that ran, and the number asked for if some are missing."""
    return f"{ran} of {asked}" if ran < asked else str(ran)


def lines(
    table: TableConfig, results: Sequence[Result], every: Sequence[Mapping[str, str]] = ()
) -> list[Line]:
    """Return the rows of a table, in the order of the results.

    Args:
        table: the layout.
        results: results of the cases that ran.
        every: labels of all cases that the sweep asks for; empty: those of the results.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Result]] = {}
    for result in results:
        groups.setdefault(_group(result.labels), []).append(result)
    asked = Counter(map(_group, every))
    return [replace(_line(table, *place, found), asked=asked[place]) for place, found in groups.items()]


def _group(labels: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the group of columns of a case, and the labels of its row."""
    rest = tuple(label for key, label in labels.items() if key not in (COLUMNS, SEED))
    return labels.get(COLUMNS, ""), rest


def _line(table: TableConfig, group: str, labels: tuple[str, ...], results: Sequence[Result]) -> Line:
    """Return one row over all of its seeds."""
    keys = [key for key in results[0].labels if key not in (COLUMNS, SEED)]
    alone = len(keys) == 1  # the paper's rows do not depend on other keys
    row = results[0].labels.get(down(results[0].labels), "")
    texts = table.text_of(group, row) if alone or ROWS not in keys else [""] * len(table.figures)
    cells = []
    for figure, published in zip(table.columns, texts, strict=True):
        values = [result.values.get(figure.of) for result in results]
        shown = tuple(figure.scaled(v) for v in values if v is not None)
        cells.append(
            Cell(published, shown, figure.digits, table.interval, figure.deviation, seeds=len(results))
        )
    return Line(group, labels, tuple(cells), len(results), better=results[0].better)


def largest_difference(found: Sequence[Line], table: TableConfig) -> tuple[float, str] | None:
    """Return the largest difference to a published number and its place; None if there is none."""
    places = [
        (cell.difference, " ".join(filter(None, (line.group, *line.labels, figure.label))))
        for line in found
        for cell, figure in zip(line.cells, table.columns, strict=True)
        if cell.difference is not None
    ]
    return max(places, key=lambda place: abs(place[0]), default=None)


def markdown(
    table: TableConfig,
    results: Sequence[Result],
    every: Sequence[Mapping[str, str]] = (),
    hints: bool = True,
) -> str:
    """Return the table as Markdown: published and measured figures of each group of columns, then ranks.

    Args:
        table: the layout.
        results: results of the cases that ran.
        every: labels of all cases that the sweep asks for; empty: those of the results.
        hints: whether to suggest a similar name for a figure that no case has.
    """
    found = lines(table, results, every)
    out = []
    for group in dict.fromkeys(line.group for line in found):
        mine = [line for line in found if line.group == group]
        out += [f"**{group}**\n"] if group else []
        out.append(as_markdown(_of_group(table, mine)))
    ranks = _ranks(table, found) if table.ranks else None
    if ranks is not None:
        out += ["**Average ranks**\n", as_markdown(ranks)]
    elif table.ranks:
        out.append(
            "no ranks: they need three rows and two groups of columns in which all rows have the figure\n"
        )
    known = sorted({name for result in results for name in result.values})
    for figure in table.columns:
        if results and figure.of not in known:
            near = get_close_matches(figure.of, known, n=1, cutoff=0.8) if hints else []
            meant = f"; did you mean {near[0]!r}?" if near else ""
            out.append(f"{figure.label}: no case has {figure.of}{meant}\n")
    return "\n".join(out)


def _of_group(table: TableConfig, found: Sequence[Line]) -> tables.Table:
    """Return the rows of one group of columns."""
    printed = [any(line.cells[i].published for line in found) for i in range(len(table.columns))]
    header = [""] * len(found[0].labels)
    for figure, has in zip(table.columns, printed, strict=True):
        header += [f"{figure.label}, published", f"{figure.label}, here"] if has else [figure.label]
    rows = []
    for line in found:
        row = [*line.labels]
        for cell, has in zip(line.cells, printed, strict=True):
            row += [cell.published or "-"] * has + [cell.measured or "-"]
        rows.append(tuple(tables.Cell(text) for text in (*row, of_seeds(line.seeds, line.asked))))
    several = any(line.seeds > 1 for line in found) and table.interval
    notes = (f"[]: {100 * CONFIDENCE:.0f} % confidence interval of the mean ({table.interval})",)
    return tables.Table((*header, "seeds"), tuple(rows), notes if several else ())


def _ranks(table: TableConfig, found: Sequence[Line]) -> tables.Table | None:
    """Return the average rank of each row over the groups of columns; None if too few are complete.

    Ranks need all rows of a group, their average needs two groups, and Friedman's test three rows. A group
    whose rows have metrics of both directions is not ranked by them.
    """
    rows = list(dict.fromkeys(line.labels for line in found))
    texts, notes = [[" ".join(row)] for row in rows], []
    header = [""]
    for i, figure in enumerate(table.columns):
        means = {(line.group, line.labels): line.cells[i].mean for line in found}
        groups = list(dict.fromkeys(line.group for line in found))
        own = [{line.better for line in found if line.group == group} for group in groups]
        directions = np.array([figure.direction(told) for told in own])
        scores = np.array([[means.get((group, row), np.nan) for row in rows] for group in groups])
        complete = ~np.isnan(scores).any(axis=1) & (directions != 0)
        scores, directions = scores[complete], directions[complete]
        if len(scores) < 2 or len(rows) < 3:
            continue
        better = MORE if (directions > 0).all() else LESS
        said = f"{better} is better" if len({*directions}) == 1 else "as the metric of each says"
        ranking = rank(scores * directions[:, None], True)
        header.append(figure.label)
        for text, average in zip(texts, ranking.average, strict=True):
            text.append(f"{average:.3g}")
        notes.append(
            f"{figure.label}: {len(scores)} groups, {said}; Friedman p = {ranking.p:.2g}; "
            f"averages that differ by less than {ranking.critical_difference:.3g} are not distinguishable"
        )
    if len(header) == 1:
        return None
    return tables.Table(
        tuple(header), tuple(tuple(tables.Cell(text) for text in line) for line in texts), tuple(notes)
    )
