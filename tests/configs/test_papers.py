"""Every configuration that travels with mpifl loads; those of the papers say which table they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.each import for_each
from support.paper_numbers import mentions
from support.paper_sweeps import paper_sweeps

from mpifl.experiment import loader
from mpifl.experiment.schema import Config
from mpifl.sweeps import sweep, tuning
from mpifl.sweeps.cases import Case, unchecked_cases

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.yaml"))
WHOLE = [name for name in FILES if not Path(name).name.startswith("_")]
PAPERS = [name for name in WHOLE if name.startswith("papers/")]
TABLES = {f"{one.name}.yaml" for one in paper_sweeps()}


def first_of_each_value(cases: list[Case]) -> list[Case]:
    """Return the cases of a sweep in which a value of one of its keys occurs first."""
    known: set[tuple[str, str]] = set()
    chosen = []
    for case in cases:
        new = {(key, str(label)) for key, label in case.labels.items()} - known
        known |= new
        chosen += [case] * bool(new)
    return chosen


@pytest.mark.nightly(seconds=30)
def test_no_two_cases_of_a_sweep_are_the_same_run():
    for name in (n for n in WHOLE if n.startswith("sweeps/")):
        tree = loader.read(str(FOLDER / name))
        assert sweep.cases(tree if (tune := tuning.tune_of(tree)) is None else tuning.first_stage(tree, tune))


@pytest.mark.parametrize("folder", sorted({Path(name).parent.as_posix() for name in WHOLE}))
def test_configurations_load_and_say_themselves_again(folder):
    """Of a sweep, the cases that have a value for the first time."""
    for name in (n for n in WHOLE if Path(n).parent.as_posix() == folder):
        if name in TABLES:  # tests/sweeps/test_papers.py reads all of their cases
            continue
        tree = loader.read(str(FOLDER / name))
        tune = tuning.tune_of(tree)
        tree = tree if tune is None else tuning.first_stage(tree, tune)  # rows may differ in candidates alone
        cases = first_of_each_value(unchecked_cases(tree)) if "vary" in tree else []
        studied = [case.config for case in cases]
        for config in studied or [loader.load(str(FOLDER / name))]:
            again = loader.from_tree(Config, loader.to_tree(config))
            assert again == config, name
            stem, paper = Path(name).stem, Path(name).parent.name
            assert config.name.removesuffix(tuning.SUFFIX) in (stem, f"{paper}-{stem}"), name


def test_a_papers_configuration_says_which_table_it_is():
    """The number in a file's name is one of its first line's: `table3-cnn.yaml`, "Tables 3 and 9, CNN"."""
    for name in PAPERS:
        first = (FOLDER / name).read_text().splitlines()[0]
        found = re.match(r"(table|fig)(\d+)", Path(name).stem)
        if found:
            kind = {"table": "Table", "fig": "Figure"}[found[1]]
            assert re.match(rf"# {kind}s? [\dIV]", first), f"{name}: {first}"
            assert found[2] in mentions(first, kind)[0], f"{name}: {first}"


EMDCFL_ROWS = [
    *(
        "Oracle",
        "EMD-CFL",
        "EMD-CFL (as printed)",
        "CFL",
        "PACFL",
        "FedClust",
        "IFCA",
        "FlexCFL",
        "FeSEM",
        "CFLGP",
    ),
    *("FedEM", "FedSoft", "FedRC", "FedCE", "FedAvg", "FedProx", "pFedGraph", "FedSaC"),
]


@for_each(
    ("table", "column", "num_clusters", "distance", "degrees"),
    [
        ("table1", "RM", 4, 5, 12),
        ("table1", "RC", 4, 45, 12),
        ("table2", None, 4, 8, 11),
        ("table3", "BM", 3, 4, 2.5),
        ("table3", "BC", 3, 28, 10.5),
        *(("table10", version, 2, 5, 12) for version in ("Min", "Two", "Base")),
        *(("table11", version, 2, 45, 12) for version in ("Min", "Two", "Base")),
    ],
)
def test_emdcfl_runs_17_rows_and_the_printed_one_with_the_k_and_thresholds_of_the_data(
    table, column, num_clusters, distance, degrees
):
    """FedClust's threshold is a distance, PACFL's an angle; all runs have the splits of seed 0."""
    tree = loader.read(str(FOLDER / "papers" / "emdcfl" / f"{table}.yaml"))
    cases = [case for case in unchecked_cases(tree) if case.labels.get("columns") == column]
    found = {case.labels["rows"]: case.config.algorithm for case in cases if case.labels["seed"] == "1"}
    assert list(found) == EMDCFL_ROWS
    assert found["FedClust"].threshold == distance
    assert found["PACFL"].threshold == degrees
    given = [
        getattr(method, key)
        for row, method in found.items()
        for key in ("num_clusters", "num_groups", "num_components")
        if hasattr(method, key) and row != "FedClust"
    ]
    assert given == [num_clusters] * 8
    seeds = {(case.config.seed.data, case.config.seed.model, case.config.seed.training) for case in cases}
    assert seeds == {(0, 1, 1), (0, 2, 2), (0, 3, 3)}
    published = tree["table"]["published"]
    assert list(published if column is None else published[column]) == EMDCFL_ROWS
