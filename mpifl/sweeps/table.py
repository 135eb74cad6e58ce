"""The table that a sweep writes in the layout of a paper, beside the published numbers.

The section `table` of a sweep names the figures and the published numbers. `vary.rows` and `vary.columns`
define the rows and the groups of columns. Figures of several seeds are shown as mean and standard deviation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

import numpy as np

from mpifl.analysis.statistics import estimate, rank
from mpifl.analysis.tables import Table, as_markdown
from mpifl.experiment.table_layout import (
    COLUMNS,
    DEVIATIONS,
    FIGURES,
    LESS,
    MORE,
    ROWS,
    SAMPLE,
    SEED,
    TableConfig,
    down,
)
from mpifl.results.metrics import over_runs

CONFIDENCE = 0.95
LIMITS = {"accuracy_mean": (0.0, 1.0), "accuracy_worst": (0.0, 1.0), "ari": (-1.0, 1.0)}  # ranges of figures
UNLIMITED = (-np.inf, np.inf)
MAX_FIXED = 1e15  # a larger figure is from a run that diverged
NUMBER = re.compile(
    r"\s*(-?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d+)?)(?!,\d)"
)  # a published text begins with it


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
        limits: the range of the figure, at which intervals end.
    """

    published: str
    values: tuple[float, ...]
    digits: int
    interval: str = ""
    deviation: str = SAMPLE
    seeds: int = 1
    limits: tuple[float, float] = UNLIMITED

    @property
    def measured(self) -> str:
        """Mean with standard deviation or interval over several seeds; the count if some lack the figure."""
        if not self.values:
            return ""
        centre, spread = over_runs(np.array(self.values), DEVIATIONS[self.deviation])
        more = f" ± {self._text(spread)}" if len(self.values) > 1 and np.isfinite(spread) else ""
        if more and self.interval and np.isfinite(self.values).all():
            found = estimate(np.array(self.values), self.interval, CONFIDENCE, self.limits)
            wide = self._text(found.low) != self._text(found.high)
            more = f" [{self._text(found.low)}, {self._text(found.high)}]" if wide else ""
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
    for figure, published in zip(table.figures.values(), texts, strict=True):
        values = [result.values.get(figure.of) for result in results]
        shown = tuple(figure.scaled(v) for v in values if v is not None)
        low, high = map(figure.scaled, LIMITS.get(figure.of, UNLIMITED))
        cells.append(
            Cell(published, shown, figure.digits, table.interval, figure.deviation, len(results), (low, high))
        )
    return Line(group, labels, tuple(cells), len(results), better=results[0].better)


def largest_difference(found: Sequence[Line], table: TableConfig) -> tuple[float, str] | None:
    """Return the largest difference to a published number and its place; None if there is none."""
    places = [
        (cell.difference, " ".join(filter(None, (line.group, *line.labels, label))))
        for line in found
        for cell, label in zip(line.cells, table.figures, strict=True)
        if cell.difference is not None
    ]
    return max(places, key=lambda place: abs(place[0]), default=None)


def markdown(
    table: TableConfig,
    results: Sequence[Result],
    every: Sequence[Mapping[str, str]] = (),
    hints: bool = True,
    left_out: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> str:
    """Return the table as Markdown: published and measured figures of each group of columns, then ranks.

    Args:
        table: the layout.
        results: results of the cases that ran.
        every: labels of all cases that the sweep asks for; empty: those of the results.
        hints: whether to suggest a similar name for a figure that no case has.
        left_out: (group of columns, row) -> why the group has no such row. Such a row is in no average rank.
    """
    found = lines(table, results, every)
    out = _of_figures(table, found, left_out) if table.across != FIGURES else []
    for group in dict.fromkeys(line.group for line in found) if table.across == FIGURES else ():
        mine = [line for line in found if line.group == group]
        out += [f"**{group}**\n"] if group else []
        out.append(as_markdown(_of_group(table, mine)))
        out += [f"{row}: not here, {why}\n" for (where, row), why in left_out.items() if where == group]
    missing = {row for _, row in left_out}
    ranked = [line for line in found if not missing & {*line.labels}]
    ranks = _ranks(table, ranked) if table.ranks else None
    if ranks is not None:
        out += ["**Average ranks**\n", as_markdown(ranks)]
        out += [f"Not ranked, because a group has no such row: {', '.join(sorted(missing))}\n"] * bool(
            missing
        )
    elif table.ranks:
        out.append(
            "no ranks: they need three rows and two groups of columns in which all rows have the figure\n"
        )
    known = sorted({name for result in results for name in result.values})
    for label, figure in table.figures.items():
        if results and figure.of not in known:
            near = get_close_matches(figure.of, known, n=1, cutoff=0.8) if hints else []
            meant = f"; did you mean {near[0]!r}?" if near else ""
            out.append(f"{label}: no case has {figure.of}{meant}\n")
    return "\n".join(out)


def _of_group(table: TableConfig, found: Sequence[Line]) -> Table:
    """Return the rows of one group of columns."""
    printed = [any(line.cells[i].published for line in found) for i in range(len(table.figures))]
    header = [""] * len(found[0].labels)
    for label, has in zip(table.figures, printed, strict=True):
        header += [f"{label}, published", f"{label}, here"] if has else [label]
    rows = []
    for line in found:
        row = [*line.labels]
        for cell, has in zip(line.cells, printed, strict=True):
            row += [cell.published or "-"] * has + [cell.measured or "-"]
        rows.append([*row, of_seeds(line.seeds, line.asked)])
    several = any(line.seeds > 1 for line in found) and table.interval
    notes = (f"[]: {100 * CONFIDENCE:.0f} % confidence interval of the mean ({table.interval})",)
    return Table.of([*header, "seeds"], rows, notes if several else ())


def _of_figures(
    table: TableConfig, found: Sequence[Line], left_out: Mapping[tuple[str, str], str]
) -> list[str]:
    """Return the table of each figure, with the groups of columns across, and what the groups leave out."""
    groups = list(dict.fromkeys(line.group for line in found))
    rows = list(dict.fromkeys(line.labels for line in found))
    cells = {(line.group, line.labels): line for line in found}
    several = any(line.seeds > 1 for line in found) and table.interval
    notes = (
        (f"[]: {100 * CONFIDENCE:.0f} % confidence interval of the mean ({table.interval})",)
        if several
        else ()
    )
    out = []
    for i, label in enumerate(table.figures):
        texts = []
        for row in rows:
            there = [cells.get((group, row)) for group in groups]
            shown = ["-" if line is None else line.cells[i].measured or "-" for line in there]
            ran = [(line.seeds, line.asked) for line in there if line is not None]
            fewest = min(ran, key=lambda one: one[0] - one[1])
            texts.append([*row, *shown, of_seeds(*fewest)])
        header = [""] * len(rows[0]) + [*groups, "seeds"]
        out += [f"**{label}**\n", as_markdown(Table.of(header, texts, notes))]
    out += [f"{group}: no {row}, {why}\n" for (group, row), why in left_out.items() if group in groups]
    return out


def _ranks(table: TableConfig, found: Sequence[Line]) -> Table | None:
    """Return the average rank of each row over the groups of columns; None if too few are complete.

    Ranks need all rows of a group, their average needs two groups, and Friedman's test three rows. A group
    whose rows have metrics of both directions is not ranked by them.
    """
    rows = list(dict.fromkeys(line.labels for line in found))
    texts, notes = [[" ".join(row)] for row in rows], []
    header = [""]
    for i, (label, figure) in enumerate(table.figures.items()):
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
        header.append(label)
        for text, average in zip(texts, ranking.average, strict=True):
            text.append(f"{average:.3g}")
        notes.append(
            f"{label}: {len(scores)} groups, {said}; Friedman p = {ranking.p:.2g}; "
            f"averages that differ by less than {ranking.critical_difference:.3g} are not distinguishable"
        )
    return Table.of(header, texts, notes) if len(header) > 1 else None
