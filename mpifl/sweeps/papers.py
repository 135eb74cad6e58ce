"""The sweeps that reproduce the papers' tables and figures, and their recorded results.

A file `configs/papers/PAPER/TABLE.yaml` is a sweep with all rows of a table. `record` keeps the figures of
finished sweeps in `measured/TABLE.json` beside it, one line per case, with the settings in which the run
differed from the file (for example fewer rounds). It also writes the pages in `docs/reproductions`.
`mpifl list papers` reads the same files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from mpifl.analysis.seed_groups import origins_of
from mpifl.core.devices import CPU
from mpifl.core.errors import UserError, require
from mpifl.core.files import write_atomically
from mpifl.core.textfiles import flat, json_file, yaml_of
from mpifl.experiment import loader
from mpifl.experiment.table_layout import SAMPLE, SEED, TableConfig
from mpifl.results.identity import OF_A_MACHINE, SAME, describe_inputs
from mpifl.results.reader import load

from .cases import Case, case_of, cases, combinations, table_of
from .results import check_case, is_complete, result_of, started_with
from .table import Result, largest_difference, lines, markdown

PAPERS = {  # folder -> the paper
    "emdcfl": "EMD-CFL: Clustered Federated Learning via Embedding Distributions",
    "flt": "FLT: Federated Learning with Taskonomy for Non-IID Data",
    "ucfl": "UCFL: User-Centric Federated Learning",
    "ccfl": "CCFL: Client-Centric Federated Learning under Dynamic Mixtures of Distributions",
    "fedcuau": "FedCUAU: Clustered Federated Learning Using Weight Divergence",
}
FOLDER = loader.SHIPPED / "papers"
PAGES = Path(__file__).parents[2] / "docs" / "reproductions"  # in a checkout
SAME_KEYS = (*OF_A_MACHINE, "evaluation.at_start")  # do not change figures, like the sections in `SAME`
EVERY = "evaluation.every"  # changes only figures that are means over the evaluations
OVER_EVALUATIONS = "_all"  # part of the names of these figures
NOT_RECORDED = "not recorded"  # hardware of cases that earlier versions recorded
MOST_LEFT_OUT = 30  # most rows that a page names as not run
SHOWN_LABELS = 4  # most rows that a list names
PLAIN = re.compile(r"[\w./-]+")  # texts that need no quotes in YAML


@dataclass(frozen=True)
class Sweep:
    """A sweep file of a paper.

    Attributes:
        paper: name of its folder.
        stem: name of the file without `.yaml`.
    """

    paper: str
    stem: str

    @property
    def name(self) -> str:
        """Its name for `mpifl sweep`."""
        return f"papers/{self.paper}/{self.stem}"

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Its configuration, merged with its bases."""
        return loader.read(str(FOLDER / self.paper / f"{self.stem}.yaml"))

    @cached_property
    def table(self) -> TableConfig:
        """Its layout and the published figures."""
        return table_of(self.tree)

    @cached_property
    def cases(self) -> list[Case]:
        """Its cases."""
        return cases(self.tree)

    @cached_property
    def combinations(self) -> list[tuple[dict[str, str], dict[str, Any]]]:
        """The labels and the values of its cases."""
        return combinations(self.tree)

    @property
    def labels(self) -> list[dict[str, str]]:
        """The labels of its cases."""
        return [labels for labels, _ in self.combinations]

    @property
    def measured_file(self) -> Path:
        """The file in which `record` keeps its figures."""
        return FOLDER / self.paper / "measured" / f"{self.stem}.json"

    @cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The record of each case that ran, in the order of the cases."""
        if not self.measured_file.exists():
            return []
        return self.latest(json_file(self.measured_file, "RUN")["cases"])

    @cached_property
    def recorded(self) -> list[tuple[Case, dict[str, Any]]]:
        """The cases that ran, each with its record."""
        kept = {json.dumps(one["labels"]): one for one in self.measured}
        found = ((labels, values, kept.get(json.dumps(labels))) for labels, values in self.combinations)
        return [(case_of(self.tree, labels, values), one) for labels, values, one in found if one is not None]

    def latest(self, kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the last record of each case, in the order of the cases; unknown cases are left out."""
        by_case = {json.dumps(one["labels"]): one for one in kept}
        order = [json.dumps(labels) for labels in self.labels]
        return [by_case[labels] for labels in order if labels in by_case]

    def deciding(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a configuration that decide the figures of the table: dotted key -> value."""
        means = any(OVER_EVALUATIONS in figure.of for figure in self.table.columns)
        same = SAME_KEYS if means else (*SAME_KEYS, EVERY)
        found = flat({name: part for name, part in tree.items() if name not in SAME})
        return {key: value for key, value in found if key not in same}

    def settings(self, case: Case, changed: Mapping[str, Any]) -> str:
        """Return a short digest of a case's settings.

        Only settings that are not defaults are included, so that keys added later do not change it.

        Args:
            case: a case of the file.
            changed: keys in which the run differs; they are left out.
        """
        found = self.deciding(_stated(case.config))
        kept = {key: value for key, value in found.items() if key not in changed}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:10]

    @cached_property
    def outdated(self) -> list[str]:
        """Titles of the cases whose settings in the file have changed since they were recorded."""
        known = [(case, one) for case, one in self.recorded if "settings" in one]
        return [case.title for case, one in known if one["settings"] != self.settings(case, one["changed"])]

    @property
    def outdated_text(self) -> str:
        """A text about the outdated cases; empty if there are none."""
        count = len(self.outdated)
        return f"{count} under other settings than the file's now: {_few(self.outdated)}" if count else ""

    @property
    def results(self) -> list[Result]:
        """The figures of the cases that ran."""
        return [Result(one["labels"], one["values"]) for one in self.measured]

    @property
    def num_rows(self) -> int:
        """The number of rows over all groups of columns, seeds not counted."""
        return len({json.dumps({k: v for k, v in labels.items() if k != SEED}) for labels in self.labels})

    @property
    def changes(self) -> str:
        """The settings in which cases that ran differ from the file, and their rows; empty if none differ."""
        found: dict[str, list[str]] = {}
        for one in self.measured:
            for k, v in one["changed"].items():
                found.setdefault(f"{k} {v}", []).append(_row(one["labels"]))
        total = len(self.measured)
        return ", ".join(
            text + (f" ({len(rows)} of {total} cases: {_few(rows)})" if len(rows) < total else "")
            for text, rows in sorted(found.items())
        )

    @property
    def left_out(self) -> str:
        """The rows of which no case ran; empty if there are none."""
        ran = {_row(case.labels) for case, _ in self.recorded}
        return _few((row for labels in self.labels if (row := _row(labels)) not in ran), MOST_LEFT_OUT)

    @property
    def hours(self) -> float:
        """Wall time of the trainings; cases that only recompute the times of another one are not counted."""
        times = {(one["digest"], one["seconds"]): float(one["seconds"]) for one in self.measured}
        return sum(times.values()) / 3600

    @cached_property
    def trained(self) -> dict[str, dict[str, Any]]:
        """The settings that decide the figures of each case that ran -> its record."""
        out = {}
        for case, one in self.recorded:
            found = {**self.deciding(_stated(case.config)), **one["changed"]}
            out[json.dumps(found, sort_keys=True, default=str)] = one
        return out

    def state(self) -> str:
        """Return whether it was run, how much of it, and the largest difference to a published figure."""
        if not self.measured:
            return f"not run: {self.table.blocked}" if self.table.blocked else "not run"
        text = f"{len(self.measured)} of {len(self.labels)} cases"
        text += f", {self.changes}" if self.changes else ""
        text += f", {self.outdated_text}" if self.outdated else ""
        found = largest_difference(lines(self.table, self.results), self.table)
        return text if found is None else f"{text}; largest difference {found[0]:+.2f} ({found[1]})"


def sweeps(paper: str | None = None) -> list[Sweep]:
    """Return the sweep files of one paper, or of all papers."""
    found = []
    for folder in [paper] if paper else PAPERS:
        files = sorted((FOLDER / folder).glob("[!_]*.yaml"), key=lambda path: _by_number(path.stem))
        found += [sweep for path in files if "table" in (sweep := Sweep(folder, path.stem)).tree]
    return found


def _row(labels: Mapping[str, str]) -> str:
    """Return the title of a case's row and group of columns: its labels without the seed."""
    return ", ".join(label for key, label in labels.items() if key != SEED)


def _few(titles: Iterable[str], most: int = SHOWN_LABELS) -> str:
    """Return the first `most` distinct titles as text."""
    found = list(dict.fromkeys(titles))
    return "; ".join(found[:most]) + "; ..." * (len(found) > most)


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def _by_number(stem: str) -> list[tuple[int, str]]:
    """Return a key that sorts `table10` behind `table9`, and tables before figures."""
    digits = "".join(c if c.isdigit() else " " for c in stem).split()
    kind = 0 if stem.startswith("table") else 1
    return [(kind, ""), (int(digits[0]) if digits else 0, stem)]


def listed() -> str:
    """Return the page of `mpifl list papers`."""
    out = []
    for paper, title in PAPERS.items():
        out += [f"{paper}/  {title}"]
        for sweep in sweeps(paper):
            out += [f"  {sweep.name:36} {sweep.table.title}", f"    {_rows(sweep.num_rows)}; {sweep.state()}"]
    return "\n".join(out)


# -- recording results ---------------------------------------------------------------------------------------


def record(folders: Sequence[str]) -> list[Path]:
    """Record the figures of sweeps beside their files, and in a checkout write the pages.

    Args:
        folders: folders of sweeps, complete or not; earlier records of the same cases are replaced.

    Returns:
        The files that were written.

    Raises:
        UserError: a folder is no sweep of a paper, has no finished case, or one with the run of another
            case; or its cases were computed with different data, files or code of the user.
    """
    written = []
    for folder in map(Path, folders):
        found = _sweep_of(folder)
        new = [*_records(found, folder)]
        require(bool(new), "RUN", str(folder), "has no finished case; run it first")
        _check_inputs(folder)
        text = ",\n".join(f"  {json.dumps(one)}" for one in found.latest([*found.measured, *new]))
        write_atomically(found.measured_file, f'{{"sweep": "{found.name}", "cases": [\n{text}\n]}}\n')
        written.append(found.measured_file)
    if PAGES.is_dir():
        for path, text in pages().items():
            write_atomically(path, text)
            written.append(path)
    return written


def _sweep_of(folder: Path) -> Sweep:
    """Return the paper's sweep that was run in a folder."""
    tree = started_with(folder)
    paper, _, stem = str(tree.get("name", "")).partition("-")
    known = [sweep.stem for sweep in sweeps(paper)] if paper in PAPERS else []
    if stem not in known:
        names = ", ".join(PAPERS)
        raise UserError("RUN", str(folder), f"is not a sweep of a paper (papers/PAPER/TABLE of {names})")
    return Sweep(paper, stem)


def _check_inputs(folder: Path) -> None:
    """Raise `UserError` unless each complete case is the sweep's, and all have the same inputs."""
    complete = [case for case in cases(started_with(folder)) if is_complete(case, folder)]
    for case in complete:
        check_case(case, folder)
    for line in describe_inputs(origins_of([load(case.folder(folder)) for case in complete])):
        remedy = f"its cases differ in {line}; move those away that are not meant, and resume it"
        raise UserError("RUN", str(folder), remedy)


def _records(sweep: Sweep, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of each finished case."""
    names = dict.fromkeys(figure.of for figure in sweep.table.columns)
    for case in sweep.cases:
        done = folder / f"{case.config.name}-{case.slug}"
        if not (done / "summary.json").is_file():
            continue
        run = load(done)
        values = result_of(case.labels, run).values
        environment = json_file(done / "environment.json", "RUN")
        changed, commit = _changed(sweep, case, run.config), environment.get("git_commit") or ""
        ended = datetime.fromtimestamp((done / "summary.json").stat().st_mtime, UTC)
        yield {
            "labels": dict(case.labels),
            "values": {name: _kept(values[name]) for name in names if name in values},
            "changed": changed,
            "settings": sweep.settings(case, changed),
            "date": f"{ended:%Y-%m-%d}",
            "commit": commit[:10] + "+" * commit.endswith("+"),
            **_hardware(run.summary.get("identity", {})),
            "digest": run.summary["digest"][:16],
            "seconds": round(run.summary["wall_seconds"]),
        }


def _hardware(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the hardware of a case: instruction sets of the processors, and the GPU if there was one."""
    device = identity.get("device", CPU.type)
    gpu = {} if device == CPU.type else {"device": device}
    return {"instructions": identity.get("instructions", ""), **gpu}


def _computed_with(record: Mapping[str, Any]) -> str:
    """Return the kind of hardware that decides the last bits of a record's figures; empty if unknown."""
    return str(record.get("device") or record.get("instructions", ""))


def _kept(value: float) -> float:
    """Return a whole number (bytes) unchanged, and any other number with six digits."""
    return value if float(value).is_integer() else float(f"{value:.6g}")


def _changed(sweep: Sweep, case: Case, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which a run differs from its case: dotted key -> the run's value."""
    ours, theirs = (sweep.deciding(tree) for tree in (_tree_of(case), config))
    return {
        key: theirs.get(key)
        for key in dict.fromkeys([*ours, *theirs])
        if key in theirs and ours.get(key) != theirs[key]
    }


def _stated(section: Any) -> dict[str, Any]:
    """Return the fields of a configuration that are not their defaults, and the class of each section."""
    out: dict[str, Any] = {"": type(section).__name__}
    for field in fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            out[field.name] = _stated(value) if is_dataclass(value) else value
    return out


def _tree_of(case: Case) -> dict[str, Any]:
    """Return the configuration of a case, as it would be read from a file."""
    return dict(json.loads(json.dumps(loader.to_tree(case.config), default=str)))


# -- pages ---------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return the pages in `docs/reproductions`: one for each paper, and their index."""
    every = {paper: sweeps(paper) for paper in PAPERS}
    out = {PAGES / "README.md": _index(every)}
    for paper, of_paper in every.items():
        found = [sweep for sweep in of_paper if sweep.measured]
        if found:
            head = f"# {PAPERS[paper]}\n\nWritten by `mpifl record`; see the [index](README.md).\n"
            sections = [_section(sweep, _other_figures(sweep, found)) for sweep in found]
            out[PAGES / f"{paper}.md"] = "\n".join([head, *sections])
    return out


def _index(every: Mapping[str, Sequence[Sweep]]) -> str:
    """Return the index of the pages."""
    head = (
        "# Beside the published figures\n\n"
        "Every table and figure of the five papers, its sweep, and what it gave here. `mpifl sweep SWEEP`\n"
        "runs all rows of one and writes its table beside the published figures; `mpifl record FOLDER`\n"
        "keeps them and writes these pages; `mpifl list papers` prints this list.\n"
    )
    out = [head]
    for paper, title in PAPERS.items():
        out += [f"## {title}\n", "| sweep | table | rows | here |", "|---|---|---|---|"]
        for sweep in every[paper]:
            name = f"[{sweep.name}]({paper}.md)" if sweep.measured else sweep.name
            out.append(f"| {name} | {sweep.table.title} | {sweep.num_rows} | {sweep.state()} |")
        out.append("")
    return "\n".join(out)


def _other_figures(sweep: Sweep, found: Sequence[Sweep]) -> list[str]:
    """Return a sentence for each case that has other figures in another sweep with the same settings.

    Args:
        sweep: the sweep whose section is written.
        found: all recorded sweeps of the paper.
    """
    out = []
    for other in (other for other in found if other.name != sweep.name):
        for settings, one in sweep.trained.items():
            again = other.trained.get(settings, one)
            shared = one["values"].keys() & again["values"].keys()
            if any(one["values"][name] != again["values"][name] for name in shared):
                labels, there = one["labels"], _row(again["labels"])
                seed = f", seed {labels[SEED]}" if SEED in labels else ""
                by, by_other = (
                    " on ".join(filter(None, (case["commit"], _computed_with(case)))) for case in (one, again)
                )
                out.append(
                    f"{_row(labels)}{seed} was run in {other.stem}, too ({there}), by commit {by_other}"
                    f" instead of {by}, and has other figures there. Version or processor differ:"
                    " compare it with rows of its own sweep."
                )
    return out


def _section(sweep: Sweep, others: Sequence[str]) -> str:
    """Return the section of a page about one sweep.

    Args:
        sweep: a sweep with recorded cases.
        others: sentences about cases that were also run in other sweeps.
    """
    table, ran = sweep.table, sweep.measured
    dates, commits = (sorted({one[key] for one in ran}) for key in ("date", "commit"))
    seeds = sorted({one["labels"].get(SEED, "0") for one in ran})
    options = "".join(f" --{key} {_word(value)}" for key, value in _common_changes(sweep).items())
    facts = [
        f"{len(ran)} of {len(sweep.labels)} cases",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}",
        *([sweep.outdated_text] if sweep.outdated else []),
        f"{sweep.hours:.1f} hours of wall time in all",
        f"{dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}",
        *_kinds_of_hardware(ran),
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
        + " (+: with changes that were not committed)" * any(commit.endswith("+") for commit in commits),
    ]
    parts = [
        f"## {table.title}\n",
        f"```bash\nmpifl sweep {sweep.name} --data.root DIR{options}\n```\n",
        f"{'; '.join(facts)}.{f' Other than in the file: {sweep.changes}.' if sweep.changes else ''}\n",
        markdown(table, sweep.results, hints=False),
    ]
    if table.spread:
        whole = [figure.label for figure in table.columns if figure.deviation != SAMPLE]
        more = f"; population standard deviation of {', '.join(whole)}" if whole else ""
        here = f"sample standard deviation over the seeds{more}"
        parts.append(f'Published "+-": {table.spread}. Here: {here}.\n')
    if mixed := _few(_mixed_rows(ran), MOST_LEFT_OUT):
        gpus = any("device" in one for one in ran)
        what = "Seeds of these rows were computed " + (
            "on different GPUs or processors" if gpus else "with different instructions of the processor"
        )
        parts.append(f"{what}: {mixed}.\n")
    parts += [f"Not run: {left_out}.\n"] if (left_out := sweep.left_out) else []
    parts += [f"{text}\n" for text in (table.differences, table.notes, *others, *table.findings) if text]
    return "\n".join(parts)


def _word(value: Any) -> str:
    """Return a value quoted for a shell's command line, where options are read as YAML."""
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and yaml_of(value, "", value) == value
    return shlex.quote(value if plain else json.dumps(value))


def _kinds_of_hardware(ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text with the number of records for each kind of hardware; nothing if none is recorded."""
    counts = Counter(_computed_with(one) or NOT_RECORDED for one in ran)
    known = [f"{kind} ({n} case{'s' * (n > 1)})" for kind, n in sorted(counts.items())]
    return [f"computed with {', '.join(known)}"] if {*counts} != {NOT_RECORDED} else []


def _mixed_rows(ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows whose seeds are known to have been computed with different hardware."""
    kinds: dict[str, set[str]] = {}
    for one in ran:
        instructions = one.get("instructions", "").partition(" ")[
            0
        ]  # the part after a space says that they were limited to these
        kind = one.get("device") or instructions
        kinds.setdefault(_row(one["labels"]), set()).update([kind] if kind else [])
    return [row for row, found in kinds.items() if len(found) > 1]


def _common_changes(sweep: Sweep) -> dict[str, Any]:
    """Return the changes that all cases share, which were given on the command line."""
    first, *others = [one["changed"] for one in sweep.measured]
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
