"""Compares runs: a self-contained HTML report with its figures, and tables as text, CSV and LaTeX."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpifl.core.errors import UserError, require

from .figures import FIGURES
from .identity import describe_differences
from .run_folder import write_csv
from .seed_groups import Group, default_target, gather, table

FORMATS = ("svg", "png", "pdf")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #bbb; }
nav a { margin-right: 1.1em; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .3em .6em; text-align: right; }
th { border-bottom: 2px solid #111; vertical-align: bottom; } td { border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } td { white-space: nowrap; }
img { max-width: 100%; } p.note { color: #444; }
@media print { nav { display: none; } h2 { break-after: avoid; } img { break-inside: avoid; } }
"""


def report(names: Sequence[str], folder: str | None, target: float | None) -> Path:
    """Write `report.html` and its figures.

    Args:
        names: Run folders, and folders that hold run folders.
        folder: Where to write; None for `report` beside the first run.
        target: Mean accuracy whose bytes and time are wanted, in [0, 1]; None for 95 % of the best.

    Returns:
        The HTML file.

    Raises:
        UserError: A folder is no finished run, or the files cannot be written.
    """
    groups = gather(names)
    target = default_target(groups) if target is None else target
    place = Path(folder) if folder else groups[0].runs[0].folder.parent / "report"
    try:
        (place / "figures").mkdir(parents=True, exist_ok=True)
        sections = [s for name in FIGURES if (s := _section(name, groups, place / "figures"))]
        (place / "report.html").write_text(_page(groups, target, sections))
    except OSError as error:
        raise UserError("--out", str(place), f"cannot be written ({error.strerror})") from error
    return place / "report.html"


def _section(name: str, groups: Sequence[Group], folder: Path) -> str | None:
    """Draw a figure, write its files and return its HTML; None where there is nothing to draw."""
    import matplotlib

    title, text, draw = FIGURES[name]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mpifl", "font.size": 9}):
        figure = draw(groups)
        if figure is None:
            return None
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # one layout for all file formats
        held: dict[str, bytes] = {}
        for form in FORMATS:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=150)
            held[form] = buffer.getvalue()
            (folder / f"{name}.{form}").write_bytes(held[form])
    small = min(("svg", "png"), key=lambda form: len(held[form]))
    kind = {"svg": "image/svg+xml", "png": "image/png"}[small]
    data = base64.b64encode(held[small]).decode()
    links = " ".join(f'<a href="figures/{name}.{form}">{form.upper()}</a>' for form in FORMATS)
    return (
        f'<h2 id="{name}">{title}</h2>\n<p class="note">{text} {links}</p>\n'
        f'<img alt="{title}" src="data:{kind};base64,{data}">\n'
    )


def _page(groups: Sequence[Group], target: float, sections: Sequence[str]) -> str:
    """Return the whole page."""
    shown = [name for name in FIGURES if any(f'id="{name}"' in s for s in sections)]
    links = [("final", "Final figures"), *((n, FIGURES[n][0]) for n in shown), ("runs", "Runs")]
    nav = " ".join(f'<a href="#{name}">{title}</a>' for name, title in links)
    runs = sum(len(g.runs) for g in groups)
    rows = table(groups, target)
    title = f"mpifl: {runs} run{'s' * (runs > 1)} of {len(groups)} configuration{'s' * (len(groups) > 1)}"
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>mpifl report</title>',
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
            f'<h1>{title}</h1>\n<nav>{nav}</nav>\n<h2 id="final">Final figures</h2>',
            f'<p class="note">Means over seeds and sample standard deviation. Target: mean accuracy '
            f"{100 * target:.2f} %. Bytes are those of the federation, by unicast.</p>",
            f'<div class="scroll">{_html_table(rows)}</div>',
            *sections,
            f'<h2 id="runs">Runs</h2>\n<div class="scroll">{_html_table(_run_rows(groups))}</div>',
            "</body></html>\n",
        )
    )


def _run_rows(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return a row for each run: folder, configuration, seed, ranks and digest."""
    return [
        {
            "run": str(run.folder),
            "configuration": group.name,
            "seed": str(run.config.get("seed", {}).get("training", "")),
            "ranks": str(run.summary["ranks"]),
            "MB by MPI": f"{run.summary['mpi_bytes'] / 1e6:.4g}",
            "wall s": f"{run.summary['wall_seconds']:.4g}",
            "digest": str(run.summary["digest"])[:12],
        }
        for group in groups
        for run in group.runs
    ]


def _html_table(rows: Sequence[Mapping[str, str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}>{html.escape(c).replace('+-', '&plusmn;')}</{tag}>" for c in cells)
            + "</tr>\n"
        )

    body = "".join(line("td", [row.get(c, "") for c in rows[0]]) for row in rows)
    return f"<table>\n{line('th', list(rows[0]))}{body}</table>"


# -- the table alone -----------------------------------------------------------------------------------------


def compare(names: Sequence[str], target: float | None) -> tuple[list[dict[str, str]], float]:
    """Return the table of final figures, and the target accuracy in it.

    Args:
        names: Run folders, and folders that hold run folders.
        target: Mean accuracy whose bytes and time are wanted, in [0, 1]; None for 95 % of the best.
    """
    groups = gather(names)
    target = default_target(groups) if target is None else target
    return table(groups, target), target


def warnings(names: Sequence[str]) -> list[str]:
    """Return a line for each entry in which the identities of these runs differ."""
    runs = [run for group in gather(names) for run in group.runs]
    return describe_differences({run.folder.name: run.summary.get("identity", {}) for run in runs})


def as_text(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table as aligned text."""
    lines = [list(rows[0]), *([row[c] for c in rows[0]] for row in rows)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    wide[0] *= -1  # to the left
    return "\n".join(
        "  ".join(_padded(c, w) for c, w in zip(line, wide, strict=True)).rstrip() for line in lines
    )


def _padded(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def as_latex(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table in LaTeX, with the rules of booktabs."""
    marks = str.maketrans({"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#"})

    def line(cells: Sequence[str]) -> str:
        return " & ".join(c.translate(marks).replace("+-", r"$\pm$") for c in cells) + r" \\"

    rules = ["\\toprule", line(list(rows[0])), "\\midrule"]
    rules += [line([row[c] for c in rows[0]]) for row in rows]
    spec = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join([f"\\begin{{tabular}}{{{spec}}}", *rules, "\\bottomrule", "\\end{tabular}", ""])


def accuracy(text: str | None) -> float | None:
    """Return the accuracy that --target names, None for none.

    Raises:
        UserError: it is not in [0, 1].
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0 <= value <= 1, "--target", text, "take an accuracy in [0, 1]")
    return value


def write_tables(rows: Sequence[Mapping[str, str]], csv: str | None, latex: str | None) -> None:
    """Write the rows of a comparison.

    Args:
        rows: a row for each group of runs.
        csv: CSV file to write; None for none.
        latex: LaTeX file to write; None for none.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        if csv:
            write_csv(Path(csv), rows)
        if latex:
            Path(latex).write_text(as_latex(rows))
    except OSError as error:
        raise UserError("--csv, --latex", error.filename, f"cannot be written ({error.strerror})") from error
