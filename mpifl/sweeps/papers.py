"""The sweeps that reproduce the papers' tables and figures, and their recorded results.

A file `configs/papers/PAPER/TABLE.yaml` is a sweep with all rows of a table. `measured/TABLE.json` beside it
has the recorded figures, one line per case, with the settings in which the run differed from the file (for
example fewer rounds); `tests/campaigns/record_papers.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mpifl.core.textfiles import json_file
from mpifl.experiment import loader
from mpifl.experiment.table_layout import SEED, TableConfig

from .cases import Case, combinations, table_of, unchecked_cases
from .table import Result, largest_difference, lines

PAPERS = {  # folder -> the paper
    "emdcfl": "EMD-CFL: Clustered Federated Learning via Embedding Distributions",
    "flt": "FLT: Federated Learning with Taskonomy for Non-IID Data",
    "ucfl": "UCFL: User-Centric Federated Learning",
    "ccfl": "CCFL: Client-Centric Federated Learning under Dynamic Mixtures of Distributions",
    "fedcuau": "FedCUAU: Clustered Federated Learning Using Weight Divergence",
}
FOLDER = loader.SHIPPED / "papers"
SHOWN_LABELS = 4  # most rows that a list names


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
        """Its cases, which are not checked."""
        return unchecked_cases(self.tree)

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
        """The file with its recorded figures."""
        return FOLDER / self.paper / "measured" / f"{self.stem}.json"

    @cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The record of each case that ran, in the order of the cases."""
        if not self.measured_file.exists():
            return []
        return self.latest(json_file(self.measured_file, "RUN")["cases"])

    def latest(self, kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the last record of each case, in the order of the cases; unknown cases are left out."""
        by_case = {json.dumps(one["labels"]): one for one in kept}
        order = [json.dumps(labels) for labels in self.labels]
        return [by_case[labels] for labels in order if labels in by_case]

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
                found.setdefault(f"{k} {v}", []).append(row_title(one["labels"]))
        total = len(self.measured)
        return ", ".join(
            text + (f" ({len(rows)} of {total} cases: {few(rows)})" if len(rows) < total else "")
            for text, rows in sorted(found.items())
        )

    def state(self) -> str:
        """Return whether it was run, how much of it, and the largest difference to a published figure."""
        if not self.measured:
            return f"not run: {self.table.blocked}" if self.table.blocked else "not run"
        text = f"{len(self.measured)} of {len(self.labels)} cases"
        text += f", {self.changes}" if self.changes else ""
        found = largest_difference(lines(self.table, self.results), self.table)
        return text if found is None else f"{text}; largest difference {found[0]:+.2f} ({found[1]})"


def sweeps(paper: str | None = None) -> list[Sweep]:
    """Return the sweep files of one paper, or of all papers."""
    found = []
    for folder in [paper] if paper else PAPERS:
        files = sorted((FOLDER / folder).glob("[!_]*.yaml"), key=lambda path: _by_number(path.stem))
        found += [sweep for path in files if "table" in (sweep := Sweep(folder, path.stem)).tree]
    return found


def row_title(labels: Mapping[str, str]) -> str:
    """Return the title of a case's row and group of columns: its labels without the seed."""
    return ", ".join(label for key, label in labels.items() if key != SEED)


def few(titles: Iterable[str], most: int = SHOWN_LABELS) -> str:
    """Return the first `most` distinct titles as text."""
    found = list(dict.fromkeys(titles))
    return "; ".join(found[:most]) + "; ..." * (len(found) > most)


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
            rows = f"{sweep.num_rows} row{'s' * (sweep.num_rows != 1)}"
            out += [f"  {sweep.name:36} {sweep.table.title}", f"    {rows}; {sweep.state()}"]
    return "\n".join(out)
