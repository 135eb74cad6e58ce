"""docs/methods.md: what its tables say of each method is what the method says, and what its ledger counts."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest
from support.each import for_each

import mpifl
from mpifl.algorithms.registry import CATALOGUE, METHODS
from mpifl.comm.single import Single
from mpifl.core.capabilities import ComparedUploads, OneShotStatistics, RememberedUploads, SecondLook, uses
from mpifl.driver.run import run
from mpifl.experiment import citations
from mpifl.experiment.loader import load
from mpifl.results.reader import load as load_run
from mpifl.results.reader import read_rows

ROOT = Path(mpifl.__file__).parents[1]
PAGE = (ROOT / "docs" / "methods.md").read_text().partition("## Side by side")[0]
ROWS = {  # name -> paper, what the server keeps, down / up, also needs
    name: cells
    for name, *cells in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
}
ROUNDS, ONCE = 4, 2  # of a run; the first of them, which send what is sent once
SHORT = ["--rounds", ROUNDS, "--evaluation.every", 0, "--output.model", False, "--local.epochs", 1]
SHORT += ["--data.scenario.clients", 8]
UPLOADS = ["--rounds", 24, "--evaluation.every", 0, "--output.model", False, "--data.scenario.clients", 8]
QUICK = {  # what takes long in a method, and does not change a round's traffic
    "flt": ["--algorithm.pretrain_epochs", 1, "--algorithm.finetune_epochs", 1],
    "fedbuff": ["--policy.size", 2],
    "csafl": ["--policy", "{name: waves, size: 1}"],  # as many downloads in a step as uploads
}


USUAL = (  # one of each way to move models; all others, nightly
    *("fedavg", "scaffold", "ifca", "ucfl", "fedcuau", "fedbuff", "local"),
)


def test_every_method_has_a_row_under_its_heading():
    found = [(title or name) for title, name in re.findall(r"^## (.*)|^\| `(\w+)`", PAGE, re.MULTILINE)]
    assert found == [word for title, some in METHODS.items() for word in (title, *some)]
    assert list(ROWS) == list(CATALOGUE)


@for_each("name", CATALOGUE)
def test_a_row_says_what_the_method_says(name):
    """Its paper, the beginning of its docstring, and what it asks of the engine."""
    paper, keeps, _, needs = ROWS[name]
    method = CATALOGUE[name]()
    entry = citations.entry(type(method).paper)
    assert paper.split()[0].rstrip(",") in entry
    assert all(year in entry for year in re.findall(r"\b(?:19|20)\d\d$", paper))
    summary = " ".join((inspect.getdoc(type(method)) or "").split("\n\n")[0].split())
    assert summary.startswith(keeps.rstrip("."))
    asked = [
        ("client state", method.needs.client_state),
        ("one-shot statistics", uses(method, OneShotStatistics)),
        ("remembered uploads", uses(method, RememberedUploads)),
        ("second look", uses(method, SecondLook)),
        ("Gram matrix", uses(method, ComparedUploads) and method.gram is not None),
    ]
    assert needs == (", ".join(what for what, is_so in asked if is_so) or "-")


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.nightly) for n in CATALOGUE]
)
def test_a_row_says_what_a_client_moves_in_a_round(name, tmp_path):
    """The ledger of a short run of `configs/algorithms/NAME.yaml`, after what is sent once."""
    synchronous = load(f"algorithms/{name}").policy.synchronous
    options = [*(SHORT if synchronous else UPLOADS), *QUICK.get(name, []), "--output.folder", tmp_path]
    if not synchronous and load(f"algorithms/{name}").cohort_size:
        options += ["--cohort_size", 4]
    folder = run(load(f"algorithms/{name}", [str(option) for option in options]), Single(), quiet=True)
    assert folder is not None
    counted = by_rounds(folder) if synchronous else by_uploads(folder)
    assert ROWS[name][2] == " / ".join(counted)


def by_rounds(folder: Path) -> list[str]:
    """Return what a client moves down and up in one round, in models, over all clients and later rounds."""
    moved = [row for row in read_rows(folder / "visits.csv") if int(row["step"]) > ONCE]
    assert len({row["step"] for row in moved}) == ROUNDS - ONCE
    return [spread({int(row[f"bytes_{way}"]) for row in moved}, folder) for way in ("down", "up")]


def by_uploads(folder: Path) -> list[str]:
    """Return what is moved down and up for one upload, in models, once every client is under way."""
    moved, uploads = {"down": defaultdict(int), "up": defaultdict(int)}, defaultdict(int)
    for row in read_rows(folder / "ledger.csv"):
        moved[row["direction"]][int(row["step"])] += int(row["bytes"])
        if row["direction"] == "up" and row["name"] in ("model", "delta"):
            uploads[int(row["step"])] += int(row["messages"])
    steps = range(ONCE + 1, max(uploads))
    return [spread({moved[way][t] // uploads[t] for t in steps}, folder) for way in ("down", "up")]


def spread(numbers: set[int], folder: Path) -> str:
    """Return the least and the largest of some numbers of bytes, in models of the run."""
    model = 4 * load_run(folder).summary["model_parameters"]
    return "-".join(dict.fromkeys(f"{round(n / model, 2):g}" for n in (min(numbers), max(numbers))))
