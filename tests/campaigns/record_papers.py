"""Records the results of sweeps of papers' tables, for `mpifl list papers` and `docs/reproductions`.

    python tests/campaigns/record_papers.py SWEEP...

The figures of finished sweeps go into `measured/TABLE.json` beside the sweep's file
(`configs/papers/PAPER/TABLE.yaml`), one line per case, with the settings in which the run differed from the
file. The pages in `docs/reproductions` are written from these files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpifl.analysis.seed_groups import origins_of
from mpifl.core.devices import CPU
from mpifl.core.errors import UserError, require
from mpifl.core.files import write_atomically
from mpifl.core.textfiles import flat, json_file, yaml_of
from mpifl.experiment import loader
from mpifl.experiment.table_layout import SAMPLE, SEED
from mpifl.results.identity import OF_A_MACHINE, SAME, describe_inputs
from mpifl.results.reader import load
from mpifl.sweeps import papers
from mpifl.sweeps.cases import Case, case_of, cases, started_with
from mpifl.sweeps.papers import Sweep, few, row_title, sweeps
from mpifl.sweeps.results import check_case, is_complete, result_of
from mpifl.sweeps.table import markdown

PAGES = Path(__file__).parents[2] / "docs" / "reproductions"
NOT_RECORDED = "not recorded"  # hardware of cases that earlier versions recorded
MOST_LEFT_OUT = 30  # most rows that a page names as not run
SAME_KEYS = (*OF_A_MACHINE, "evaluation.at_start")  # do not change figures, like the sections in `SAME`
EVERY = "evaluation.every"  # changes only figures over all evaluations
OVER_EVALUATIONS = ("_all", "_mean_max")  # parts of the names of these figures: means, largest values
PLAIN = re.compile(r"[\w./-]+")  # texts that need no quotes in YAML


def record(folders: Sequence[str]) -> list[Path]:
    """Record the figures of sweeps beside their files, and write the pages.

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
    for path, text in pages().items():
        write_atomically(path, text)
        written.append(path)
    return written


def _sweep_of(folder: Path) -> Sweep:
    """Return the paper's sweep that was run in a folder."""
    tree = started_with(folder)
    paper, _, stem = str(tree.get("name", "")).partition("-")
    known = [sweep.stem for sweep in sweeps(paper)] if paper in papers.PAPERS else []
    if stem not in known:
        names = ", ".join(papers.PAPERS)
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
    names = dict.fromkeys(figure.of for figure in sweep.table.figures.values())
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
            "settings": _settings(sweep, case, changed),
            "date": f"{ended:%Y-%m-%d}",
            "commit": commit[:10] + "+" * commit.endswith("+"),
            **_hardware(run.summary.get("identity", {})),
            "digest": run.summary["digest"][:16],
            "seconds": round(run.summary["wall_seconds"]),
        }


def _recorded(sweep: Sweep) -> list[tuple[Case, dict[str, Any]]]:
    """Return the cases that ran, each with its record."""
    kept = {json.dumps(one["labels"]): one for one in sweep.measured}
    found = ((labels, values, kept.get(json.dumps(labels))) for labels, values in sweep.combinations)
    return [(case_of(sweep.tree, labels, values), one) for labels, values, one in found if one is not None]


def _deciding(sweep: Sweep, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that decide the figures of the table: dotted key -> value."""
    over_all = any(part in figure.of for figure in sweep.table.figures.values() for part in OVER_EVALUATIONS)
    same = SAME_KEYS if over_all else (*SAME_KEYS, EVERY)
    found = flat({name: part for name, part in tree.items() if name not in SAME})
    return {key: value for key, value in found if key not in same}


def _settings(sweep: Sweep, case: Case, changed: Mapping[str, Any]) -> str:
    """Return a short digest of a case's settings.

    Only settings that are not defaults are included, so that keys added later do not change it.

    Args:
        sweep: the sweep.
        case: a case of the file.
        changed: keys in which the run differs; they are left out.
    """
    found = _deciding(sweep, loader.non_default(case.config))
    kept = {key: value for key, value in found.items() if key not in changed}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:10]


def outdated(sweep: Sweep) -> list[str]:
    """Return the titles of the cases whose settings in the file have changed since they were recorded."""
    known = [(case, one) for case, one in _recorded(sweep) if "settings" in one]
    return [case.title for case, one in known if one["settings"] != _settings(sweep, case, one["changed"])]


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
    ours, theirs = (_deciding(sweep, tree) for tree in (_tree_of(case), config))
    return {
        key: theirs.get(key)
        for key in dict.fromkeys([*ours, *theirs])
        if key in theirs and ours.get(key) != theirs[key]
    }


def _tree_of(case: Case) -> dict[str, Any]:
    """Return the configuration of a case, as it would be read from a file."""
    return dict(json.loads(json.dumps(loader.to_tree(case.config), default=str)))


# -- pages ---------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return the pages in `docs/reproductions`: one for each paper, and their index."""
    every = {paper: sweeps(paper) for paper in papers.PAPERS}
    out = {PAGES / "README.md": _index(every)}
    for paper, of_paper in every.items():
        found = [sweep for sweep in of_paper if sweep.measured]
        if found:
            by = "Written by `tests/campaigns/record_papers.py`; see the [index](README.md)."
            head = f"# {papers.PAPERS[paper]}\n\n{by}\n"
            trained = {sweep.name: _trained(sweep) for sweep in found}
            sections = [_section(sweep, _other_figures(sweep, found, trained)) for sweep in found]
            out[PAGES / f"{paper}.md"] = "\n".join([head, *sections])
    return out


def _index(every: Mapping[str, Sequence[Sweep]]) -> str:
    """Return the index of the pages."""
    head = (
        "# Beside the published figures\n\n"
        "Every table and figure of the five papers, its sweep, and what it gave here. `mpifl sweep SWEEP`\n"
        "runs all rows of one and writes its table beside the published figures;\n"
        "`python tests/campaigns/record_papers.py FOLDER` keeps them and writes these pages;\n"
        "`mpifl list papers` prints this list. A title names all tables and figures that a sweep gives.\n"
        "Drawings (EMD-CFL 1 and 3 to 7, FLT 1 and 2, UCFL 1, CCFL 1 and 2, FedCUAU 2) and tables of\n"
        "settings (EMD-CFL 5, CCFL 2, FedCUAU 2) have no sweep.\n"
    )
    out = [head]
    for paper, title in papers.PAPERS.items():
        out += [f"## {title}\n", "| sweep | table | rows | here |", "|---|---|---|---|"]
        for sweep in every[paper]:
            name = f"[{sweep.name}]({paper}.md)" if sweep.measured else sweep.name
            out.append(f"| {name} | {sweep.table.title} | {sweep.num_rows} | {sweep.state()} |")
        out.append("")
    return "\n".join(out)


def _other_figures(
    sweep: Sweep, found: Sequence[Sweep], trained: Mapping[str, Mapping[str, dict[str, Any]]]
) -> list[str]:
    """Return a sentence for each case that has other figures in another sweep with the same settings.

    Args:
        sweep: the sweep whose section is written.
        found: all recorded sweeps of the paper.
        trained: name of each of these -> settings that decide the figures of a case -> its record.
    """
    out = []
    for other in (other for other in found if other.name != sweep.name):
        for settings, one in trained[sweep.name].items():
            again = trained[other.name].get(settings, one)
            shared = one["values"].keys() & again["values"].keys()
            if any(one["values"][name] != again["values"][name] for name in shared):
                labels, there = one["labels"], row_title(again["labels"])
                seed = f", seed {labels[SEED]}" if SEED in labels else ""
                by, by_other = (
                    " on ".join(filter(None, (case["commit"], _computed_with(case)))) for case in (one, again)
                )
                out.append(
                    f"{row_title(labels)}{seed} was run in {other.stem}, too ({there}), by commit {by_other}"
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
    old = outdated(sweep)
    facts = [
        f"{len(ran)} of {len(sweep.labels)} cases",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}",
        *([f"{len(old)} under other settings than the file's now: {few(old)}"] if old else []),
        f"{_hours(sweep):.1f} hours of wall time in all",
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
        whole = [label for label, figure in table.figures.items() if figure.deviation != SAMPLE]
        more = f"; population standard deviation of {', '.join(whole)}" if whole else ""
        here = f"sample standard deviation over the seeds{more}"
        parts.append(f'Published "+-": {table.spread}. Here: {here}.\n')
    if mixed := few(_mixed_rows(ran), MOST_LEFT_OUT):
        gpus = any("device" in one for one in ran)
        what = "Seeds of these rows were computed " + (
            "on different GPUs or processors" if gpus else "with different instructions of the processor"
        )
        parts.append(f"{what}: {mixed}.\n")
    parts += [f"Not run: {left_out}.\n"] if (left_out := _left_out(sweep)) else []
    parts += [f"{text}\n" for text in (table.differences, table.notes, *others, *table.findings) if text]
    return "\n".join(parts)


def _word(value: Any) -> str:
    """Return a value quoted for a shell's command line, where options are read as YAML."""
    plain = (
        isinstance(value, str) and PLAIN.fullmatch(value) and yaml_of(value, "", value, typed=True) == value
    )
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
        # the part after a space says that they were limited to these
        kind = one.get("device") or one.get("instructions", "").partition(" ")[0]
        kinds.setdefault(row_title(one["labels"]), set()).update([kind] if kind else [])
    return [row for row, found in kinds.items() if len(found) > 1]


def _common_changes(sweep: Sweep) -> dict[str, Any]:
    """Return the changes that all cases share, which were given on the command line."""
    first, *others = [one["changed"] for one in sweep.measured]
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}


def _left_out(sweep: Sweep) -> str:
    """The rows of which no case ran; empty if there are none."""
    ran = {row_title(case.labels) for case, _ in _recorded(sweep)}
    return few((row for labels in sweep.labels if (row := row_title(labels)) not in ran), MOST_LEFT_OUT)


def _hours(sweep: Sweep) -> float:
    """Wall time of the trainings; cases that only recompute the times of another one are not counted."""
    times = {(one["digest"], one["seconds"]): float(one["seconds"]) for one in sweep.measured}
    return sum(times.values()) / 3600


def _trained(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """The settings that decide the figures of each case that ran -> its record."""
    out = {}
    for case, one in _recorded(sweep):
        found = {**_deciding(sweep, loader.non_default(case.config)), **one["changed"]}
        out[json.dumps(found, sort_keys=True, default=str)] = one
    return out


def main(words: Sequence[str] | None = None) -> int:
    """Record the sweeps that a command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="folder of a sweep of a paper's table")
    try:
        print(*record(parser.parse_args(words).sweeps), sep="\n")
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
