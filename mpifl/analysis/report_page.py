"""Builds the page of a report, one HTML file that needs no network, from the files of `report_page/`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from html import escape
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from mpifl.core import version
from mpifl.core.timing import PHASES
from mpifl.core.units import in_bytes

from . import drift, report_data, survival
from .seed_groups import Group, metric_of
from .tables import BEST, TIED, Cell, Table, signed

HERE = Path(__file__).with_name("report_page")
SCRIPTS = ("page.js", "curves.js", "seeds.js", "details.js", "start.js")
LIBRARY = "plotly-cartesian.min.js"  # plotly.js 4.1.1, MIT licence: plotly-LICENSE.txt
TITLES = {  # section -> its title in the navigation
    "what": "What was run",
    "curves": "Curves",
    "final": "Final figures",
    "drift": "Drift",
    "statistics": "Over seeds",
    "traffic": "Bytes",
    "clusters": "Clusters and clients",
    "staleness": "Staleness",
    "time": "Time",
    "runs": "Runs",
    "files": "Figures for papers",
}
LISTS = (
    "local training",
    "evaluation",
    "seeds",
)  # facts that are lists: the table shows only entries that differ
NO_COLUMNS = ("seeds", "machine", "algorithm", "started")  # facts that other columns of the table show
LATER = (  # columns that are hidden first if a table has no room
    *("MB by MPI", "ranks", "finished", "digest", "wall s"),
    *("not reached", "seeds", "rounds", "std over clients", "unplaced clients", "virtual s", "clusters"),
)
MAX_COMMANDS = 3
WIDE = ' class="text"'  # of cells with long texts
WORD = ' class="word"'  # of cells with short ones
MAX_WORDS = 40  # of a fact that is a column of the table of runs


def page(
    groups: Sequence[Group],
    target: float,
    final: Table,
    runs: Table,
    files: Mapping[str, str],
    statistics: str = "",
    seeds: Mapping[str, Any] | None = None,
) -> str:
    """Return the whole page.

    Args:
        groups: the groups of runs.
        target: target value of the mean accuracy, in [0, 1], or of the mean of the runs' other metric.
        final: final figures, a row for each group.
        runs: a row for each run, in the order of the groups.
        files: name of a figure in `figures/` beside the page -> its title.
        statistics: HTML of figures and tables over seeds; empty for none.
        seeds: data of the figures over seeds, see `report_data.seeds`; None for none.
    """
    metric = metric_of(groups)
    curves = report_data.curves(groups)
    traffic = report_data.traffic(groups)
    details, left_out = report_data.details(groups)
    known = [report_data.facts(run) for group in groups for run in group.runs]
    common, different = _divided(known)
    stale = any(detail["staleness"] for detail in details)
    changes = drift.table(groups)
    shown = {
        "drift": changes is not None,
        "statistics": bool(statistics),
        "traffic": bool(traffic),
        "staleness": stale,
        "files": bool(files),
    }
    data = {
        "groups": [{"name": g.name, "seeds": len(g.runs)} for g in groups],
        "metric": {
            "id": f"{metric.name}_mean",
            "title": metric.title,
            "unit": metric.unit,
            "better": metric.better,
        },
        "target": report_data.rounded(metric.scale * target, report_data.RECORD_DIGITS),
        "curves": curves,
        "traffic": traffic,
        "seeds": seeds or {},
        "details": details,
        "start": max(
            range(len(details)), key=lambda i: (not details[i]["told"], _known(details[i]["score"]))
        ),
        "phases": PHASES,
    }
    count = sum(len(g.runs) for g in groups)
    title = f"{count} run{'s' * (count > 1)} of {len(groups)} configuration{'s' * (len(groups) > 1)}"
    if count == 1:
        title = f"{groups[0].name}: {groups[0].runs[0].folder.name}"
    several = any(len(g.runs) > 1 for g in groups)
    parts = {
        "title": escape(f"mpifl: {title}"),
        "subtitle": escape(_subtitle(known, common)),
        "style": (HERE / "page.css").read_text(),
        "nav": "".join(f'<a href="#{n}">{t}</a>' for n, t in TITLES.items() if shown.get(n, True)),
        "tiles": _tiles(groups, target),
        "facts": _facts(common, different),
        "commands": _commands(groups),
        "curves_note": escape(_curves_note(curves, several)),
        "final_note": escape(
            f"{'Means over seeds. ' if several else ''}Bytes are those of the federation, by unicast. "
            "A click on a title sorts."
        ),
        "final_table": as_html(final, "final-table"),
        "drift_table": "" if changes is None else as_html(changes, "drift-table"),
        "statistics": statistics,
        "details_note": escape(
            "These figures, staleness and the time of ranks are of one run at a time."
            if count > 1
            else "What the run found at its end."
        )
        + (f" {left_out} runs are left out here, so that this file stays small." if left_out else ""),
        "runs_table": as_html(_with_facts(runs, known, different), "runs-table"),
        "files": "".join(_file(name, text) for name, text in files.items()),
        "files_note": "Drawn for print beside this page: PDF with its fonts, SVG, PNG.",
        "footer": escape(
            f"Written by mpifl {version.in_use()} on {datetime.now():%Y-%m-%d %H:%M}. This file needs no "
            "network. Charts: plotly.js, MIT licence, Plotly Technologies Inc."
        ),
        "library": (HERE / LIBRARY).read_text(),
        "script": "\n".join((HERE / name).read_text() for name in SCRIPTS),
        "data": _embedded(data),
    }
    text = (HERE / "page.html").read_text()
    for name, there in shown.items():
        block = re.compile(f"<!-- if {name} -->\n(.*?)<!-- end {name} -->\n", re.DOTALL)
        text = block.sub(r"\1" if there else "", text)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text)


def _embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON that is safe inside a script element, whatever labels contain."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- what was run --------------------------------------------------------------------------------------------


def _divided(known: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the facts that all runs share, and the names of the others."""
    names = dict.fromkeys(name for facts in known for name in facts)
    common = {n: known[0][n] for n in names if len({facts.get(n) for facts in known}) == 1}
    return common, [n for n in names if n not in common]


def _subtitle(known: Sequence[Mapping[str, str]], common: Mapping[str, str]) -> str:
    dates = sorted({facts["finished"] for facts in known if "finished" in facts})
    parts = [common.get(name, "") for name in ("algorithm", "data", "scenario", "clients")]
    parts = [part.split(" (")[0] for part in parts]
    parts += [f"finished {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"] if dates else []
    return " · ".join(p for p in parts if p)


def _facts(common: Mapping[str, str], different: Sequence[str]) -> str:
    """Return the facts that all runs share, as a list of terms, with a link to the facts that differ."""
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in common.items())
    where = f'<a href="#runs">table of runs</a>: {escape(", ".join(different))}'
    more = f"<dt>differs</dt><dd>{where}</dd>" if different else ""
    return f"<dl>{terms}{more}</dl>"


def _commands(groups: Sequence[Group]) -> str:
    """Return the commands that repeat the runs: one for each sweep, and one for each other run."""
    runs = [run for group in groups for run in group.runs]
    commands = [*dict.fromkeys(report_data.command(run, len(runs) > 1) for run in runs)]
    if len(commands) > 1:  # each ends with an output.id, and runs of one name need different ones
        commands = [f"{code}-{i}" for i, code in enumerate(commands, 1)]
    out = [
        f'<div class="command"><code>{escape(code)}</code><button type="button">Copy</button></div>'
        for code in commands[:MAX_COMMANDS]
    ]
    rest = len(commands) - MAX_COMMANDS
    more = (
        f'<p class="note">and so on for {rest} more, with the folders of the table of runs.</p>'
        if rest > 0
        else ""
    )
    began = report_data.started_by(runs[0]) if len(runs) == 1 else ""
    began = f'<p class="note">It was started by: {escape(began)}</p>' if began else ""
    return f'<p class="note">To repeat {"it" if len(runs) == 1 else "them"}:</p>{"".join(out)}{more}{began}'


def _tiles(groups: Sequence[Group], target: float) -> str:
    """Return the key figures: of the only configuration, or of the best configurations."""
    alone = len(groups) == 1

    def last(group: Group, name: str) -> float:
        return float(group.final(name).mean())

    def of(group: Group, what: str) -> str:
        return what if alone else f"{what}: {group.name}"

    metric = metric_of(groups)

    def shown(value: float) -> str:
        return f"{100 * value:.2f} %" if metric.percent else f"{value:.4g}"

    mean, least = f"{metric.name}_mean", f"{metric.name}_worst"
    best = max(groups, key=lambda g: _known(metric.better * last(g, mean)))
    worst = max(groups, key=lambda g: _known(metric.better * last(g, least)))
    said = f"mean {metric.title}"
    tiles = [
        (shown(last(best, mean)), of(best, said if alone else f"best {said}")),
        (shown(last(worst, least)), of(worst, "worst client" if alone else "best worst client")),
    ]
    found = [g for g in groups if g.has("ari") and last(g, "ari") == last(g, "ari")]
    if found:
        ari = max(found, key=lambda g: last(g, "ari"))
        clusters = f"{last(ari, 'num_clusters'):.3g} cluster{'s' * (last(ari, 'num_clusters') != 1)}"
        tiles.append(
            (f"{last(ari, 'ari'):.2f}", of(ari, f"ARI, {clusters}" if alone else f"best ARI, {clusters}"))
        )
    met = {g.name: bytes_ for g in groups if (bytes_ := _bytes_to(g, target))}
    if met:
        name = min(met, key=lambda n: met[n])
        what = f"to {metric.text(target)} {metric.title}"
        tiles.append((in_bytes(met[name]), what if alone else f"least {what}: {name}"))
    if alone:
        total = last(best, "federation_bytes_up") + last(best, "federation_bytes_down")
        tiles.append((in_bytes(total), "of the federation, up and down"))
        if best.has("virtual_seconds"):
            tiles.append((f"{last(best, 'virtual_seconds'):,.4g} s", "virtual time"))
    ran = [run for g in groups for run in g.runs if "retimed_from" not in run.summary]  # others are copies
    if ran:
        seconds = sum(float(run.summary["wall_seconds"]) for run in ran)
        took = f"{seconds:,.4g} s" if seconds < 7200 else f"{seconds / 3600:.3g} h"
        tiles.append((took, "wall time" if len(ran) == 1 else "wall time of all runs"))
    return "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)


def _known(value: float | None) -> float:
    """Return a value, or minus infinity if it is None or NaN."""
    return -inf if value is None or isnan(value) else value


def _bytes_to(group: Group, target: float) -> float | None:
    """Return the median of the bytes after which runs meet a target, as in tables; None if it is infinite."""
    found = survival.median(group.reached(target, "bytes")).value
    return found if isfinite(found) else None


def _curves_note(curves: Mapping[str, Any], several: bool) -> str:
    said = ["Click a name to hide or show its curve, double click to see it alone; drag to zoom."]
    said += ["Lines are means over seeds, bands go from the least to the most."] if several else []
    if curves["same"]:
        *head, last = [s.split(",")[0] for s in curves["same"]]
        names = f"{', '.join(head)} and {last}" if head else last
        run = "run" if head else "runs"
        said.append(
            f"{names[0].upper()}{names[1:]} {run} in proportion to rounds here: the curves would be the same."
        )
    said += (
        ["Long curves are thinned here; targets are computed on all evaluations."]
        if curves["thinned"]
        else []
    )
    return " ".join(said)


# -- tables --------------------------------------------------------------------------------------------------


def _with_facts(table: Table, known: Sequence[Mapping[str, str]], different: Sequence[str]) -> Table:
    """Return the table of runs with further columns for the facts in which the runs differ."""
    names = tuple(n for n in different if n not in (*table.columns, *NO_COLUMNS))
    shared = {name: _shared_parts([facts.get(name, "") for facts in known]) for name in LISTS}
    more = [tuple(Cell(_own_parts(facts.get(n, ""), shared.get(n, ()))) for n in names) for facts in known]
    rows = tuple((*row, *cells) for row, cells in zip(table.rows, more, strict=True))
    return Table((*table.columns, *names), rows)


def _shared_parts(texts: Sequence[str]) -> set[str]:
    """Return the entries common to all lists."""
    return set.intersection(*(set(text.split(", ")) for text in texts))


def _own_parts(text: str, shared: Collection[str]) -> str:
    """Return a list without the entries common to all lists."""
    return ", ".join(part for part in text.split(", ") if part not in shared)


def as_html(table: Table, name: str = "") -> str:
    """Return a table that scrolls, with its notes; with a name, the page can sort and filter it."""
    marks = {BEST: "<b>{}</b>", TIED: "{} &asymp;", "": "{}"}

    def text(cell: Cell) -> str:
        return marks[cell.mark].format(signed(escape(cell.text), "&plusmn;", "&infin;"))

    kinds = []
    for i in range(len(table.columns) if name else 0):
        texts = [row[i].text for row in table.rows]
        kinds.append(WIDE if max(map(len, texts), default=0) > MAX_WORDS else WORD * _is_words(texts))
    kinds = kinds or [""] * len(table.columns)
    head = "".join(
        f'<th scope="col"{k}{_later(c) if name else ""}>{escape(c)}</th>'
        for c, k in zip(table.columns, kinds, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td{k}>{text(c)}</td>" for c, k in zip(rest, kinds[1:], strict=True))
        + "</tr>\n"
        for first, *rest in table.rows
    )
    notes = "".join(f'<p class="note">{_as_marked(text(Cell(note)))}</p>' for note in table.notes)
    sortable = f' class="sortable" id="{name}"' if name else ""
    whole = f"<table{sortable}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    return f'<div class="scroll tall" tabindex="0">{whole}</div>{notes}'


def _later(title: str) -> str:
    """Return the attribute of a column that is hidden early if a table has no room; empty for others."""
    name = title.partition(",")[0]
    return f' data-later="{LATER.index(name)}"' if name in LATER else ""


def _is_words(texts: Sequence[str]) -> bool:
    """Return whether a column holds words or dates, and so is left-aligned and sorted as text."""
    number = re.compile(r"[<>]?\s*[-+]?(\d+(\.\d+)?\b|inf|nan|never)")
    word = re.compile(r"(?!never|inf|nan)\b[A-Za-z]{3,}|\d{4}-\d\d-\d\d")
    return any(texts) and (not any(map(number.match, texts)) or any(map(word.search, texts)))


def _as_marked(note: str) -> str:
    """Return a note with the marks of the page instead of those of a terminal."""
    return note.replace("* best:", "<b>bold</b>: best:").replace("; ~ ", "; &asymp; ")


def _file(name: str, title: str) -> str:
    links = ", ".join(f'<a href="figures/{name}.{form}">{form.upper()}</a>' for form in ("pdf", "svg", "png"))
    return f"<li>{escape(title)}: {links}</li>"
