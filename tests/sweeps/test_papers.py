"""Every row of every table of the papers would begin: a configuration, its data, its first step.

All rows are read in every suite; those of `SOON` are planned in every suite, all others in the nightly part.
Planning opens the clients, builds the model, runs the method's checks and works out the first step; it trains
nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.each import check_each
from support.paper_numbers import mentions
from support.paper_sweeps import paper_sweeps

from mpifl.comm.single import Single
from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.experiment.table_layout import COLUMNS, ROWS
from mpifl.forecast.plan import describe
from mpifl.sweeps import papers
from mpifl.sweeps.cases import Case

SWEEPS = {sweep.name.removeprefix("papers/"): sweep for sweep in paper_sweeps()}
SOON = ("ccfl/table1-fashionmnist",)  # small data
LONG = {"emdcfl/table10-small": 60, "emdcfl/table3-small": 40, "flt/table6": 40}  # seconds to plan all rows
DRAWING, SETTINGS = "a drawing", "settings"
ENTRIES: dict[str, dict[str, str | tuple[str, ...]]] = {
    # paper -> number of a table (T) or figure (F) -> the files that run it, or what it is instead
    "emdcfl": {
        "F1": DRAWING,
        "F2": "fig2",
        **dict.fromkeys(("F3", "F4", "F5", "F6", "F7"), DRAWING),  # images of the data
        **{f"F{n}": f"fig{n}" for n in (8, 9, 10, 11, 12, 13, 14)},
        **{f"F{n}": "fig14" for n in (15, 16, 17)},
        **{f"T{n}": f"table{n}" for n in (1, 2, 3, 4, 6, 9, 10, 11)},
        "T5": SETTINGS,
        "T7": "table2",
        "T8": "table3",
    },
    "flt": {
        **{f"T{n}": f"table{n}" for n in (1, 2, 3, 4, 5, 6)},
        **{f"T{n + 6}": f"table{n}" for n in (1, 2, 3, 4)},
        "F1": DRAWING,
        "F2": DRAWING,  # a toy network
        **{f"F{n}": f"fig{n}" for n in (3, 11, 12)},
        **{f"F{n}": "table3" for n in (4, 8, 10)},
        **{f"F{n}": "table4" for n in (5, 9)},
        "F6": "table1",
        "F7": "table2",
    },
    "ucfl": {
        **dict.fromkeys(("T1", "T2", "F2"), ("table1-a", "table1-b", "table1-c")),
        "F1": DRAWING,
        **{f"F{n}": f"fig{n}" for n in (3, 4, 5, 7)},
        "F6": ("fig6-a", "fig6-b"),
    },
    "ccfl": {
        **dict.fromkeys(("T1", "F4"), ("table1-fashionmnist", "table1-cifar100", "table1-miniimagenet")),
        "T2": SETTINGS,
        "F1": DRAWING,
        "F2": DRAWING,
        "F3": ("table1-fashionmnist", "table1-miniimagenet"),
        **{f"F{n}": "table1-fashionmnist" for n in (7, 8, 9)},
        "F5": ("fig5-clients", "fig5-rho", "fig5-adjustment"),
        "F6": "fig6",
        "F10": "fig6",
        **{f"F{n}": "table1-cifar100" for n in (11, 12, 13, 14)},
        **{f"F{n}": "table1-miniimagenet" for n in (15, 16, 17)},
        "F18": "fig18",
        **{f"F{n}": "fig19" for n in (19, 20, 21)},
    },
    "fedcuau": {
        "T1": "table1",
        **{f"T{n}": (f"table{n}", f"table{n}-femnist") for n in (3, 4)},
        "T2": SETTINGS,
        "F1": "fig1",
        "F2": DRAWING,
        "F3": "fig3",
    },
}
LARGE = ("resnet18", "resnet50", "efficientnet_b3", "vit_b_16", "convnext_base", "resnet18_cifar")
CHANNELS = 32
SIDE = 32  # pixels: a whole client at 224 x 224 is 2.7 GB
PLANNED: set[str] = set()  # rows of several tables that are the same run are planned once
PUBLIC = 100  # images of each of CCFL's sets, on which every model is judged
STANDIN_POINTS, STANDIN_CLIENTS = 20_000, 200  # of fewer images than EMNIST has


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """Return a folder for prepared data that all plans share, emptied in the end."""
    folder = tmp_path_factory.mktemp("prepared")
    yield folder
    shutil.rmtree(folder)


def rows_of(sweep: papers.Sweep) -> list[Case]:
    """Return the cases of the rows and groups of columns, at the first value of all other keys."""
    first = {key: label for key, label in sweep.cases[0].labels.items() if key not in (ROWS, COLUMNS)}
    return [case for case in sweep.cases if first.items() <= case.labels.items()]


def varied(sweep: papers.Sweep, pairs: bool) -> list[Case]:
    """Return cases in which each value of a key occurs; with pairs, each row in each group of columns."""
    known: set[tuple[tuple[str, str], ...]] = set()
    chosen = []
    for case in sweep.cases:
        labels = [(key, str(label)) for key, label in case.labels.items()]
        new = {(one,) for one in labels}
        new |= {tuple(one for one in labels if one[0] in (ROWS, COLUMNS))} if pairs else set()
        if new - known:
            chosen.append(case)
        known |= new
    return chosen


@pytest.mark.in_turn
@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_row_is_a_configuration_of_its_own(pairs):
    """Each value of every key; at night, each row in each group of columns."""

    def check(name: str, sweep: papers.Sweep) -> None:
        assert sweep.tree["name"] == name.replace("/", "-")
        cases = varied(sweep, pairs)
        assert not pairs or {row.slug for row in rows_of(sweep)} <= {case.slug for case in cases}
        for case in cases:
            again = loader.from_tree(Config, loader.to_tree(case.config))
            assert again == case.config, case.slug

    check_each(check, ((name, (name, sweep)) for name, sweep in SWEEPS.items()))


def test_every_file_of_a_paper_is_a_sweep_with_a_table():
    files = {p.relative_to(papers.FOLDER).as_posix() for p in papers.FOLDER.glob("*/[!_]*.yaml")}
    assert files == {f"{name}.yaml" for name in SWEEPS}
    assert {Path(name).parts[0] for name in SWEEPS} == set(papers.PAPERS)


def test_every_table_and_figure_of_the_papers_has_an_entry_that_names_it():
    """The files of an entry say the number in their first lines and in their titles."""
    for paper, entries in ENTRIES.items():
        for number, runs in entries.items():
            kind = {"T": "Table", "F": "Figure"}[number[0]]
            for stem in (runs,) if isinstance(runs, str) else runs:
                if stem in (DRAWING, SETTINGS):
                    continue
                text = (papers.FOLDER / paper / f"{stem}.yaml").read_text()
                for said in (text.splitlines()[0], SWEEPS[f"{paper}/{stem}"].table.title):
                    assert number[1:] in set().union(*mentions(said, kind)), f"{paper} {number}: {said}"


@pytest.mark.nightly
def test_a_published_row_is_run_once():
    """No two rows of a table are the same run, and each published row is one of the rows."""
    for name, sweep in SWEEPS.items():
        groups = sweep.tree["vary"].get("columns")
        printed = [sweep.table.published] if groups is None else [*sweep.table.published.values()]
        labels = {case.labels.get("rows") for case in sweep.cases}
        if "rows" in sweep.tree["vary"]:
            assert all(str(row) in labels for rows in printed for row in rows), name
        trees = {
            json.dumps({k: v for k, v in loader.to_tree(case.config).items() if k != "name"}, default=str)
            for case in sweep.cases
        }
        assert len(trees) == len(sweep.cases), name


@pytest.mark.parametrize(
    "name",
    [
        n if n in SOON else pytest.param(n, marks=pytest.mark.nightly(spread=True, seconds=LONG.get(n, 15)))
        for n in SWEEPS
    ],
)
def test_every_row_is_planned(name, cache):
    sweep = SWEEPS[name]
    found = [case for i, case in enumerate(rows_of(sweep)) if i == 0 or not is_large(case.config)]
    configs = [small(sweep, case, cache) for case in found]
    absent = {case.config.data.source.name for case, c in zip(found, configs, strict=True) if not c}
    for config in configs:
        if config is not None and what_is_planned(config) not in PLANNED:
            PLANNED.add(what_is_planned(config))
            page = describe(config, Single())
            assert f"{config.rounds} rounds" in page
            assert "federation in all" in page or "bytes" in page
    if not any(configs):
        pytest.skip(f"no data root holds {', '.join(sorted(absent))}: set MPIFL_DATA")


def is_large(config: Config) -> bool:
    """Return whether a row's network is large: of those, only the first row of a table is planned.

    The papers' tables for MNIST stand there with fewer channels, too (`-small`), and are planned entirely.
    FLT fits a plane to all clients, and counts as large.
    """
    tree = loader.to_tree(config)
    model, slow = tree["model"], tree["algorithm"]["name"] == "flt"
    return slow or model["name"] in LARGE or max(model.get("channels", [0])) > CHANNELS


def what_is_planned(config: Config) -> str:
    """Return what a plan depends on; rates and epochs are not among it."""
    tree = loader.to_tree(config)
    keys = ("algorithm", "model", "data", "policy", "participation", "cohort_size", "rounds", "newcomers")
    return json.dumps([tree[key] for key in keys], default=str)


def small(sweep: papers.Sweep, case: Case, cache: Path) -> Config | None:
    """Return a case whose images are small, on the data root that holds them; None where none does."""
    source, scenario = case.config.data.source, case.config.data.scenario
    root = root_with(source)
    if root is None:
        return None
    parts = {"resize": SIDE} if getattr(scenario, "resize", None) == 224 else {}
    parts |= {"public": PUBLIC} if sweep.paper == "ccfl" and hasattr(scenario, "public") else {}
    if root == Path(os.environ.get("MPIFL_STANDIN") or "/nowhere/at/all"):
        parts |= {"points": STANDIN_POINTS} if hasattr(scenario, "points") else {}
        parts |= {"clients": STANDIN_CLIENTS} if getattr(scenario, "name", "") == "flt4" else {}
    changes = {"root": str(root), "cache": str(cache), "scenario": parts}
    config: Config = loader.from_tree(Config, loader.merged(loader.to_tree(case.config), {"data": changes}))
    return config


def root_with(source) -> Path | None:
    """Return the data root that holds a source's files (MPIFL_DATA, or MPIFL_STANDIN for EMNIST), or None."""
    for variable in ("MPIFL_DATA", "MPIFL_STANDIN"):
        root = Path(os.environ.get(variable) or "/nowhere")
        if all(path.exists() for path in source.files(root)):
            return root
    return None


def test_bytes_are_recorded_exactly():
    figures = Path(__file__).parents[2] / "configs" / "papers" / "flt" / "measured"  # a package has none
    record = json.loads((figures / "table6.json").read_text())
    down = {one["labels"]["rows"]: one["values"]["federation_bytes_down"] for one in record["cases"]}
    assert down["FLT Enc1"] == 4 * (100 * 25_956 + 2_000 * 159_010), "N W_enc + rho N W T"
