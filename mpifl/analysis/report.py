"""Writes the report of several runs, one self-contained HTML file with figures, and files of a comparison."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpifl.core.errors import UserError, nearest, require
from mpifl.core.files import write_atomically
from mpifl.core.optional_packages import need_figures
from mpifl.results.identity import describe_differences, describe_inputs
from mpifl.results.reader import Run
from mpifl.results.run_folder import write_csv

from . import report_data
from .comparison import NO_TEST, Choices, Comparison, compare
from .comparison_tables import final_table, numbers, rank_table, test_tables, title_of
from .figures import FIGURES, OF_COMPARISONS, said_of
from .report_page import as_html, page
from .seed_groups import REPORT, Group, origins_of, say_other_inputs
from .tables import Table, as_latex, as_markdown, as_text, narrowed, too_wide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
PLOT = '<figure id="{0}-figure">{1}<div class="plot" role="img" aria-label="{2}"></div></figure>'
ON_PAGE = {  # figure over seeds -> its element on the page; others are images
    "intervals": PLOT.format("intervals", "", "Dots with intervals"),
    "differences": PLOT.format("differences", "", "Dots with intervals"),
    "target": PLOT.format("met", '<ul class="key" id="met-key"></ul>', "Step lines"),
}
IN_PAPERS = (  # columns of a LaTeX table without chosen columns, most important first
    *("accuracy", "mb_to_target", "unreached", "worst", "rounds_to_target", "ari", "seeds"),
)


def report(
    names: Sequence[str],
    folder: str | None,
    choices: Choices | None = None,
    width: float | None = None,
    labels: Mapping[str, str] | None = None,
    finished_only: bool = False,
) -> Path:
    """Write `report.html` and its figures.

    Args:
        names: run folders, folders that hold run folders, and patterns of them.
        folder: output folder; None takes `report` beside the first run.
        choices: what to compute over seeds and problems; None takes the defaults.
        width: width of the figures for papers in inches; their SVG files then have text as outlines. None
            draws figures as wide as a page.
        labels: name of a configuration in legends and tables -> its new name.
        finished_only: whether to leave out unfinished runs, with a warning.

    Returns:
        The path of the HTML file.

    Raises:
        UserError: Matplotlib is not installed, a folder is not a finished run, a choice or label does not fit
            these runs, or the files cannot be written.
    """
    need_figures("report", ", ".join(names))
    comparison = relabelled(compare(names, choices, finished_only), labels or {})
    groups = comparison.groups
    say_other_inputs(groups)
    place = Path(folder) if folder else groups[0].runs[0].folder.parent / "report"
    try:
        (place / "figures").mkdir(parents=True, exist_ok=True)
        figures = place / "figures"
        statistics = _statistics(comparison, figures)
        drawn = {
            name: said_of(title, groups)
            for name, (title, _, draw) in FIGURES.items()
            if _files(name, partial(draw, groups, width), figures, outlines=width is not None)
        }
        rows = _runs(groups)
        over_seeds = report_data.seeds(comparison)
        text = page(groups, comparison.target, final_table(comparison), rows, drawn, statistics, over_seeds)
        write_atomically(place / REPORT, text)
    except OSError as error:
        raise UserError("--out", str(place), f"cannot be written ({error.strerror})") from error
    return place / REPORT


def relabelled(comparison: Comparison, labels: Mapping[str, str]) -> Comparison:
    """Return a comparison with renamed groups.

    Args:
        comparison: the runs.
        labels: name -> new name.

    Raises:
        UserError: there is no group of that name, or two groups would have the same name.
    """
    names = [group.name for group in comparison.groups]
    for name in labels:
        require(name in names, "--label", name, nearest(name, names))
    new = [labels.get(name, name) for name in names]
    twice = next((name for name in new if new.count(name) > 1), None)
    require(twice is None, "--label", twice, "would name two configurations; use different ones")
    groups = tuple(Group(n, group.runs) for n, group in zip(new, comparison.groups, strict=True))
    return replace(comparison, groups=groups) if labels else comparison


def _statistics(comparison: Comparison, folder: Path) -> str:
    """Return HTML with the figures over seeds and problems and their tables; empty if there are none."""
    tables = {"differences": test_tables(comparison)}
    if comparison.choices.ranks:
        tables["ranks"] = [rank_table(comparison)]
    out = []
    for name, (title, text, draw) in OF_COMPARISONS.items():
        held = _files(name, partial(draw, comparison), folder)
        if held:
            links = " ".join(f'<a href="figures/{name}.{form}">{form.upper()}</a>' for form in FORMATS)
            shown = ON_PAGE.get(name) or _image(title, held["svg"])
            more = "".join(map(as_html, tables.get(name, ())))
            out.append(
                f'<h3 id="{name}-title">{title}</h3>\n<p class="note">{text} {links}</p>\n{shown}\n{more}'
            )
    return "".join(out)


def _image(title: str, svg: bytes) -> str:
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'


def _files(
    name: str, draw: Callable[[], Figure | None], folder: Path, outlines: bool = False
) -> dict[str, bytes]:
    """Draw a figure and write it in all formats; return format -> content, empty if there is no figure.

    Args:
        name: name of the files.
        draw: returns the figure.
        folder: output folder.
        outlines: whether text in SVG is drawn as outlines, which look the same everywhere.
    """
    import matplotlib

    fonts_inside = 42  # of PDF: TrueType
    letters: dict[Any, Any] = {
        "svg.fonttype": "path" if outlines else "none",
        "pdf.fonttype": fonts_inside,
        "font.size": 9,
    }
    with matplotlib.rc_context({**letters, "svg.hashsalt": "mpifl"}):
        figure = draw()
        if figure is None:
            return {}
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # one layout for all file formats
        held: dict[str, bytes] = {}
        for form in FORMATS:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=150)
            held[form] = buffer.getvalue()
            (folder / f"{name}.{form}").write_bytes(held[form])
    return held


def _runs(groups: Sequence[Group]) -> Table:
    """Return a table with a row for each run: folder, configuration, seed, final figures, costs, digest."""
    rows = [
        {
            "run": str(run.folder),
            "configuration": group.name,
            "seed": str(run.config.get("seed", {}).get("training", "")),
            **_reached(run),
            "ranks": str(run.summary["ranks"]),
            "MB by MPI": f"{run.summary['mpi_bytes'] / 1e6:.4g}",
            "wall s": f"{run.summary['wall_seconds']:.4g}",
            "digest": str(run.summary["digest"])[:12],
        }
        for group in groups
        for run in group.runs
    ]
    return Table.of(rows[0], [row.values() for row in rows])


def _reached(run: Run) -> dict[str, str]:
    """Return the final figures of a run, as title -> text."""
    metric, last = run.metric, {name: float(values[-1]) for name, values in run.series.items()}
    unit = f", {metric.unit}" if metric.unit else ""
    digits = ".2f" if metric.percent else ".4g"
    wanted = (
        (f"{metric.title}{unit}", f"{metric.name}_mean", metric.scale, digits),
        (f"worst client{unit}", f"{metric.name}_worst", metric.scale, digits),
        ("ARI", "ari", 1.0, ".2f"),
        ("clusters", "num_clusters", 1.0, ".4g"),
        ("MB up", "federation_bytes_up", 1e-6, ".4g"),
        ("MB down", "federation_bytes_down", 1e-6, ".4g"),
        ("GFLOP of clients", "flops", 1e-9, ".4g"),
        ("energy of clients, J", "joules", 1.0, ".4g"),
    )
    values = {title: (last.get(name, math.nan) * scale, form) for title, name, scale, form in wanted}
    return {title: "" if math.isnan(v) else format(v, form) for title, (v, form) in values.items()}


# -- a comparison without a page -----------------------------------------------------------------------------


def text_of(comparison: Comparison, bold: bool = False) -> str:
    """Return the output of `mpifl compare`: the table of final figures with notes, tests and ranks.

    Args:
        comparison: the comparison.
        bold: whether to use bold text, which only terminals can show.
    """
    tables = [final_table(comparison)]
    if comparison.choices.test not in (None, NO_TEST):
        tables += test_tables(comparison)
    if comparison.choices.ranks:
        tables.append(rank_table(comparison))
    return "\n\n".join("\n".join([as_text(table, bold), *table.notes]) for table in tables)


def write_files(
    comparison: Comparison, csv: str | None, latex: str | None, markdown: str | None, figures: str | None
) -> list[str]:
    """Write a comparison to files.

    Args:
        comparison: the runs.
        csv: CSV file with numbers, one row per group; None for none.
        latex: LaTeX file with the table; None for none.
        markdown: Markdown file with all tables; None for none.
        figures: folder for the figures; None for none.

    Returns:
        Lines of text about the files.

    Raises:
        UserError: a file cannot be written, or there is no figure to draw.
    """
    table, said = final_table(comparison), []
    try:
        if csv:
            write_csv(Path(csv), numbers(comparison))
        if latex:
            wanted = [title_of(comparison, key) for key in IN_PAPERS]
            fits, left_out = (table, ()) if comparison.choices.columns else narrowed(table, wanted)
            write_atomically(Path(latex), as_latex(fits))
            more = f"left out {', '.join(left_out)}: --columns chooses" if left_out else too_wide(fits)
            said += [f"{latex}: {more}"] if more else []
        if markdown:
            ranks = [rank_table(comparison)] if comparison.choices.ranks else []
            tables = [table, *test_tables(comparison), *ranks]
            write_atomically(Path(markdown), "\n".join(map(as_markdown, tables)))
        if figures:
            Path(figures).mkdir(parents=True, exist_ok=True)
            drawn = [
                name
                for name, (_, _, draw) in OF_COMPARISONS.items()
                if _files(name, partial(draw, comparison), Path(figures))
            ]
            require(bool(drawn), "--figures", figures, "nothing to draw: these runs have one seed each")
            said.append(f"figures: {figures}: {', '.join(drawn)} ({', '.join(FORMATS)})")
    except OSError as error:
        raise UserError("file", error.filename, f"cannot be written ({error.strerror})") from error
    return said


def warnings(comparison: Comparison) -> list[str]:
    """Return a line for each property in which these runs differ besides their configurations and seeds."""
    runs = [run for group in comparison.groups for run in group.runs] + [*comparison.rerun]
    found = origins_of(runs)
    bits = describe_differences({name: origin.identity for name, origin in found.items()})
    lines = [f"last bits of these runs may differ, {line}" for line in bits]
    return lines + [f"these runs differ in {line}" for line in describe_inputs(found)]
