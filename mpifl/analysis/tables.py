"""Tables of text cells with marks, as aligned text, Markdown, LaTeX and HTML.

The text of a cell is neutral: each output format writes `+-` and `inf` in its own way. Marks show the result
of a test: `BEST` is shown in bold, `TIED` is not distinguishable from the best.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

BEST, TIED = "best", "tied"
SUFFIX = {BEST: " *", TIED: " ~", "": ""}
BOLD_ON, BOLD_OFF = "\033[1m", "\033[0m"

COLUMN_PT = 240.0  # width of a column of a two-column paper, in points
SIZES = (("small", 0.9), ("footnotesize", 0.8), ("scriptsize", 0.7))  # of LaTeX, relative to 10 points
GAP_PT = 3.0  # \\tabcolsep: on each side of a column
TITLE = 10  # characters in a line of a title
WIDTHS = {  # of characters of Computer Modern at 10 points, in points (cmr10.tfm)
    **dict.fromkeys("0123456789aovxy", 5.1),
    **dict.fromkeys("bdhnpquk", 5.56),
    **dict.fromkeys("cezrst", 4.3),
    **dict.fromkeys("ijl.,:;'!| ", 2.9),
    **dict.fromkeys("mw", 7.8),
    **dict.fromkeys("fI()[]-", 3.6),
    **dict.fromkeys("%+=<>~*", 7.8),
}
WIDEST = 7.5  # of the other characters, capital letters among them
LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "#": r"\#",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
}


INFINITY = re.compile(r"(?<![^\s\[(+-])inf(?![^\s\]),])")  # as a number, not as part of a word


def signed(text: str, plus_minus: str, infinity: str) -> str:
    """Return a text with the given signs in place of `+-`, and of `inf` where it stands alone."""
    return INFINITY.sub(lambda _: infinity, text).replace("+-", plus_minus)


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: the text of the cell.
        mark: `BEST`, `TIED`, or empty.
    """

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        columns: titles of the columns; the text after the last comma is the unit.
        rows: rows with one cell for each column.
        notes: notes below the table, one line each.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Iterable[str], rows: Iterable[Iterable[str]], notes: Iterable[str] = ()) -> Table:
        """Return a table of texts without marks."""
        return cls(tuple(columns), tuple(tuple(map(Cell, row)) for row in rows), tuple(notes))

    def column(self, title: str) -> list[Cell]:
        """Return the cells of a column."""
        at = self.columns.index(title)
        return [row[at] for row in self.rows]


def as_text(table: Table, bold: bool = False) -> str:
    """Return a table as aligned text; `*` marks the best, `~` those not distinguishable from it.

    Args:
        table: the table; its notes are left out.
        bold: whether to show the best in bold too, which only terminals can.
    """
    out = [[*table.columns], *([cell.text for cell in row] for row in table.rows)]
    for at in range(len(table.columns)):
        if any(row[at].mark for row in table.rows):
            marks = ["", *(SUFFIX[row[at].mark] for row in table.rows)]
            for line, mark in zip(out, marks, strict=True):
                line[at] += mark.ljust(2)
    wide = [max(map(len, column)) for column in zip(*out, strict=True)]
    lines = []
    for i, line in enumerate(out):
        padded = [c.rjust(w) if at else c.ljust(w) for at, (c, w) in enumerate(zip(line, wide, strict=True))]
        if bold and i:
            cells = zip(padded, table.rows[i - 1], strict=True)
            padded = [f"{BOLD_ON}{text}{BOLD_OFF}" if c.mark == BEST else text for text, c in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def as_markdown(table: Table) -> str:
    """Return a table in Markdown, with its notes below."""

    def text(cell: Cell) -> str:
        plain = signed(cell.text, "±", "∞").replace("|", "\\|")
        return f"**{plain}**" if cell.mark == BEST else f"{plain}{SUFFIX[cell.mark].replace('~', chr(8776))}"

    head = [title.replace("|", "\\|") for title in table.columns]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[*map(text, row)] for row in table.rows]
    marked = [note.replace("* best:", "**bold**: best:").replace(" ~ ", " ≈ ") for note in table.notes]
    notes = [f"\n{note}" for note in marked]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *notes, ""])


# -- LaTeX ---------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Return a text with the special characters of LaTeX escaped; `+-` becomes a sign."""
    return "".join(LATEX.get(c, c) for c in text.replace("+-", "±"))


def guarded(line: str) -> str:
    r"""Return a line of LaTeX that a preceding `\\` or rule does not mistake for its argument."""
    return f"{{}}{line}" if line.startswith(("[", "*")) else line


def as_latex(table: Table, column_pt: float = COLUMN_PT) -> str:
    """Return a table in LaTeX with booktabs rules, in the largest font size that fits a paper's column.

    The best is bold; cells not distinguishable from it carry a superscript. Units are below the titles. Notes
    become comments before the table; if no font size fits, a comment gives the width.

    Args:
        table: the table.
        column_pt: width of the column, in points.
    """

    def cell(given: Cell) -> str:
        text = signed(escaped(given.text), r"$\pm$", r"$\infty$")
        return {BEST: rf"\textbf{{{text}}}", TIED: rf"{text}$^{{\sim}}$"}.get(given.mark, text)

    def title(text: str) -> str:
        lines = [guarded(escaped(line)) for line in _stacked(text)]
        stack = r"\\".join(lines)
        return stack if len(lines) == 1 else rf"\shortstack{{{stack}}}"

    wide = width_pt(table)
    size = next((name for name, scale in SIZES if wide * scale <= column_pt), SIZES[-1][0])
    notes = [f"% {note.replace('* best:', 'bold: best:')}" for note in table.notes]
    notes += [
        "% needs \\usepackage{booktabs}",
        *([] if wide * SIZES[-1][1] <= column_pt else [f"% {too_wide(table, column_pt)}"]),
    ]
    rows = [guarded(" & ".join(map(cell, row))) + r" \\" for row in table.rows]
    return "\n".join(
        [
            *notes,
            rf"{{\{size}\setlength{{\tabcolsep}}{{{GAP_PT:g}pt}}%",
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(table.columns) - 1)}@{{}}}}",
            r"\toprule",
            guarded(" & ".join(map(title, table.columns))) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}}",
            "",
        ]
    )


def width_pt(table: Table) -> float:
    """Return the approximate width of a table in points, in LaTeX with Computer Modern at 10 points."""

    def wide(text: str, mark: str = "") -> float:
        plain = text.replace("+-", "±")
        bold = 1.15 if mark == BEST else 1.0
        return bold * sum(WIDTHS.get(c, WIDEST) for c in plain) + (5.0 if mark == TIED else 0.0)

    total = 0.0
    for at, title in enumerate(table.columns):
        heads = [wide(line) for line in _stacked(title)]
        total += max([*heads, *(wide(row[at].text, row[at].mark) for row in table.rows)])
    return total + 2 * GAP_PT * (len(table.columns) - 1)


def narrowed(
    table: Table, wanted: Sequence[str], column_pt: float = COLUMN_PT
) -> tuple[Table, tuple[str, ...]]:
    """Return a table without the columns that do not fit a paper's column in the second smallest font size.

    Args:
        table: the table; its first column is always kept.
        wanted: titles of columns, most important first; columns not named come last.
        column_pt: width of the paper's column, in points.

    Returns:
        The table, and the titles of the columns that were left out.
    """
    kept = {table.columns[0]}
    order = [title for title in wanted if title in table.columns]
    for title in [*order, *(title for title in table.columns[1:] if title not in wanted)]:
        if width_pt(_only(table, kept | {title})) * SIZES[-2][1] <= column_pt:
            kept.add(title)
    return _only(table, kept), tuple(title for title in table.columns if title not in kept)


def _only(table: Table, titles: Container[str]) -> Table:
    """Return a table with only the columns of the given titles."""
    at = [i for i, title in enumerate(table.columns) if title in titles]
    rows = tuple(tuple(row[i] for i in at) for row in table.rows)
    return Table(tuple(table.columns[i] for i in at), rows, table.notes)


def _stacked(title: str) -> list[str]:
    """Return the lines of a title in LaTeX: its words, wrapped to short lines, and its unit."""
    name, _, unit = title.rpartition(", ")
    return [*textwrap.wrap(name, TITLE), f"({unit})"] if name else textwrap.wrap(unit, TITLE)


def too_wide(table: Table, column_pt: float = COLUMN_PT) -> str:
    """Return a warning for a table that no font size fits into a paper's column; empty if one does."""
    least = width_pt(table) * SIZES[-1][1]
    if least <= column_pt:
        return ""
    size = SIZES[-1][0]
    return f"about {least:.0f} pt wide in {size}, a paper's column has {column_pt:.0f}: choose --columns"
