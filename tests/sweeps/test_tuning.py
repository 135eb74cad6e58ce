"""Options of rows chosen on validation data before a sweep runs; rows that a group of columns leaves out."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from mpifl.cli import main
from mpifl.comm.single import Single
from mpifl.core.case_names import slugs_of
from mpifl.core.errors import UserError
from mpifl.experiment.loader import from_tree
from mpifl.experiment.table_layout import TableConfig
from mpifl.results.reader import load
from mpifl.sweeps import tuning
from mpifl.sweeps.cases import ALL, Part, cases, read, unchecked_cases
from mpifl.sweeps.table import Result, markdown

pytestmark = pytest.mark.in_turn

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
VALIDATION = {"data": {"scenario": {"validation": 0.3}}}
VARY = {
    "columns": {
        "few": {"local": {"epochs": 1}},
        "many": {"local": {"epochs": 2}, "rows": {"IFCA": {"rounds": 1}, "Local": {"left_out": "too dear"}}},
    },
    "rows": {
        "Local": {"algorithm": "local"},
        "FedAvg": {"algorithm": "fedavg"},
        "IFCA": {"algorithm": {"name": "ifca", "num_clusters": 3}},
    },
    "seed": [0, 1],
}
TUNE = {
    "seed": 7,
    "rows": {"IFCA": {"algorithm.num_clusters": [1, 2], "local.lr": {"slow": 0.001, "fast": 0.3}}},
}


def tree(**keys):
    own = {"base": TINY, "name": "t", "rounds": 2, "vary": VARY, "tune": TUNE, **VALIDATION}
    return {**own, **keys}


def file_of(tmp_path, **keys):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree(**keys), sort_keys=False))
    return str(path)


def tuned(tmp_path, *options, part=ALL, **keys):
    """Run a sweep as the command line does."""
    place = ["--output.folder", str(tmp_path / "runs"), *options]
    return tuning.sweep(lambda: read(file_of(tmp_path, **keys), place), Single(), True, part)


def choices(folder):
    with (folder.parent / folder.name.replace("t-", "t-tuning-", 1) / "choices.csv").open() as lines:
        return [*csv.DictReader(lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a sweep that one process ran."""
    return tuned(tmp_path_factory.mktemp("whole"), "--output.id", "x")


def test_the_best_candidate_on_validation_data_is_what_the_sweep_runs_with(whole):
    folder, rows = whole, choices(whole)
    assert [row["candidate"] for row in rows[:4]] == [
        f"IFCA, num_clusters {k}, lr {rate}" for k in (1, 2) for rate in ("slow", "fast")
    ]
    for group in ("few", "many"):
        mine = [row for row in rows if row["columns"] == group]
        best = max(mine, key=lambda row: float(row["metric_mean"]))
        assert [row for row in mine if row["chosen"] == "1"] == [best], "of equal ones the first"
        config = load(folder / f"t-{group}-IFCA-1").config
        clusters, rate = best["candidate"].removeprefix("IFCA, num_clusters ").split(", lr ")
        assert config["algorithm"]["num_clusters"] == int(clusters)
        assert config["local"]["lr"] == {"slow": 0.001, "fast": 0.3}[rate]
        assert config["rounds"] == (1 if group == "many" else 2), "the group's own change of the row stays"
        assert config["data"]["evaluate_on"] == "test"
    slug = "few-IFCA__num_clusters_1__lr_slow-7"
    trial = load(folder.parent / "t-tuning-x" / f"t-tuning-{slug}").config
    assert trial["data"]["evaluate_on"] == "validation"
    assert trial["seed"]["data"] == 7
    assert not list(folder.glob("t-many-Local-*")), "left out"


def test_two_processes_with_parts_run_every_candidate_and_case_once(whole, tmp_path):
    """The first part runs the candidates of both, because nobody else does; the other finds them complete."""
    first = tuned(tmp_path, "--output.id", "x", part=Part.of(share="1/2"))
    trials = {path: path.stat().st_mtime_ns for path in first.parent.glob("t-tuning-x/*/summary.json")}
    assert len(trials) == 8
    half = {*first.glob("*/summary.json")}
    assert tuned(tmp_path, "--output.id", "x", part=Part.of(share="2/2")) == first
    assert {path: path.stat().st_mtime_ns for path in trials} == trials
    both = {*first.glob("*/summary.json")}
    assert len(half) == 5
    assert len(both) == 10
    for path in both:
        one, other = (json.loads((f / path.parent.name / path.name).read_text()) for f in (first, whole))
        assert one["digest"] == other["digest"]


def test_some_rows_need_their_own_candidates_only(tmp_path):
    folder = tuned(tmp_path, "--output.id", "x", part=Part.of(["rows=IFCA", "columns=few", "seed=0"]))
    assert len(choices(folder)) == 4
    assert [path.parent.name for path in folder.glob("*/summary.json")] == ["t-few-IFCA-0"]
    assert tuned(tmp_path, "--output.id", "x") == folder, "the rest is added with the same command"
    assert len([*folder.glob("*/summary.json")]) == 10
    assert len(choices(folder)) == 8


def test_a_sweep_that_stopped_among_its_candidates_goes_on_with_both_stages(tmp_path, monkeypatch):
    """From another folder, and by the command that is printed where it stops."""
    part = Part.of(["rows=IFCA", "columns=few"])
    whole = tuned(tmp_path, "--output.id", "x", part=part)
    trials = whole.parent / "t-tuning-x"
    digests = {path.parent.name: load(path.parent).summary["digest"] for path in whole.glob("*/summary.json")}
    assert len(digests) == 2
    shutil.rmtree(whole)
    shutil.rmtree(next(path.parent for path in trials.glob("*slow*/summary.json")))
    monkeypatch.chdir(tmp_path.parent)
    row = "rows=IFCA, num_clusters 1, lr slow"
    assert main(["resume", str(trials), "-q", "--only", row, "--only", "columns=few"]) == 0
    assert len([*trials.glob("*/summary.json")]) == 4
    found = {path.parent.name: load(path.parent).summary["digest"] for path in whole.glob("*/summary.json")}
    assert found == digests


def test_candidates_that_ran_with_other_settings_are_not_taken(tmp_path):
    part = Part.of(["rows=IFCA", "columns=few", "seed=0"])
    tuned(tmp_path, "--output.id", "x", part=part)
    with pytest.raises(UserError, match=r"local\.batch_size = 7: the run in"):
        tuned(tmp_path, "--output.id", "x", "--local.batch_size", "7", part=part)


def test_without_an_id_both_stages_share_the_one_that_the_first_makes(tmp_path):
    folder = tuned(tmp_path, part=Part.of(["rows=IFCA", "columns=few", "seed=0"]))
    assert {path.name for path in folder.parent.iterdir()} == {
        folder.name,
        folder.name.replace("t-", "t-tuning-", 1),
    }


def test_rows_without_groups_of_columns_are_tuned_too(tmp_path):
    vary = {"rows": VARY["rows"], "seed": [0]}
    folder = tuned(
        tmp_path, "--output.id", "x", vary=vary, tune={"seed": 7, "rows": {"IFCA": {"local.lr": [1e-6, 0.3]}}}
    )
    (best,) = [row for row in choices(folder) if row["chosen"] == "1"]
    config = load(folder / "t-IFCA-0").config
    assert best["candidate"] == f"IFCA, lr {config['local']['lr']}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tune": {"seed": 1, "rows": TUNE["rows"]}}, r"tune.seed = 1: is a seed of the sweep"),
        ({"tune": {"seed": 7, "rows": {"IFCAA": {"local.lr": [1]}}}}, "did you mean 'IFCA'"),
        ({"tune": {"seed": 7, "rows": {"IFCA": {"local.lr": 1}}}}, "use a mapping of keys to lists"),
        ({"tune": {"seed": 7, "rows": {"IFCA": {"local.lr": []}}}}, "use a mapping of keys to lists"),
        ({"tune": {"seed": 7, "rows": {}}}, "tune.rows"),
        ({"vary": {"algorithm": ["fedavg", "local"], "seed": [0]}}, "tune chooses options of vary.rows"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        tuned(tmp_path, "--output.id", "x", **keys)
    assert not (tmp_path / "runs").exists()


def test_an_invalid_case_of_the_second_stage_is_refused_before_the_first(tmp_path):
    rows = {**VARY["rows"], "FedAvg": {"algorithm": {"name": "fedavg", "alpha": 1}}}
    with pytest.raises(UserError, match="rows FedAvg"):
        tuned(tmp_path, "--output.id", "x", vary={**VARY, "rows": rows})
    assert not (tmp_path / "runs").exists()


def test_the_list_has_the_cases_of_both_stages(tmp_path, capsys):
    main(["sweep", file_of(tmp_path), "--list"])
    said = capsys.readouterr().out
    assert "8 of 8 cases" in said
    assert "10 of 10 cases" in said
    assert "columns many, rows IFCA, num_clusters 2, lr fast, seed 7\n" in said
    assert "columns many, rows Local" not in said


def test_a_row_may_have_been_tuned_to_what_another_row_is(tmp_path):
    rows = {"IFCA": VARY["rows"]["IFCA"], "tuned": VARY["rows"]["IFCA"]}
    vary = {"rows": rows, "seed": [0]}
    tune = {"seed": 7, "rows": {"tuned": {"algorithm.num_clusters": [3]}}}
    folder = tuned(tmp_path, "--output.id", "x", vary=vary, tune=tune)
    found = [load(folder / f"t-{row}-0").metrics["accuracy_mean"].iloc[-1] for row in rows]
    assert found[0] == found[1]
    assert cases(read(str(folder / "sweep.yaml"), []))


def test_a_row_that_a_group_leaves_out_has_no_case_and_a_reason_in_the_table():
    labels = [case.labels for case in unchecked_cases({"vary": VARY})]
    assert [(one["columns"], one["rows"]) for one in labels if one["seed"] == "0"] == [
        ("few", "Local"),
        ("few", "FedAvg"),
        ("few", "IFCA"),
        ("many", "FedAvg"),
        ("many", "IFCA"),
    ]
    assert slugs_of(VARY) == [case.slug for case in unchecked_cases({"vary": VARY})]
    with pytest.raises(UserError, match="leaves out every row"):
        cases({"vary": {"columns": {"A": {"rows": {"X": {"left_out": "why"}}}}, "rows": {"X": {}}}})


FIGURES = {"title": "T", "figures": {"avg": {"of": "accuracy_mean", "percent": True}}}


def found(**scores):
    return [
        Result({"columns": group, "rows": row, "seed": str(seed)}, {"accuracy_mean": value})
        for name, values in scores.items()
        for group, row in [name.split("_")]
        for seed, value in enumerate(values)
    ]


def test_groups_stand_across_in_a_table_for_each_figure():
    """By hand: 0.5 and 0.7 have the mean 60 % and the sample deviation 14.14 points."""
    table = from_tree(TableConfig, {**FIGURES, "across": "columns"})
    text = markdown(table, found(A_x=[0.5, 0.7], B_x=[0.25], B_y=[0.75]), left_out={("A", "y"): "it cannot"})
    assert "**avg**\n\n|  | A | B | seeds |" in text
    assert "| x | 60.00 ± 14.14 | 25.00 | 2 |" in text or "| x | 60.00 ± 14.14 | 25.00 | 1 |" in text
    assert "| y | - | 75.00 | 1 |" in text
    assert "A: no y, it cannot" in text


def test_rows_that_a_group_leaves_out_are_not_ranked():
    """By hand: x, y and z have the ranks 1, 2, 3 in A and 1, 3, 2 in B; w is only in A and changes none."""
    table = from_tree(TableConfig, {**FIGURES, "ranks": True})
    scores = found(A_x=[0.9], A_y=[0.5], A_z=[0.1], A_w=[0.6], B_x=[0.9], B_y=[0.1], B_z=[0.5])
    text = markdown(table, scores, left_out={("B", "w"): "it cannot"})
    ranks = text[text.index("**Average ranks**") :]
    assert "| x | 1 |" in ranks
    assert "| y | 2.5 |" in ranks
    assert "| z | 2.5 |" in ranks
    assert "| w |" not in ranks
    assert "Not ranked, because a group has no such row: w" in ranks


def test_intervals_end_at_the_range_of_a_figure():
    figures = {**FIGURES["figures"], "ARI": {"of": "ari"}, "s": {"of": "wall_seconds"}}
    table = from_tree(TableConfig, {**FIGURES, "figures": figures, "interval": "t"})
    values = [{"accuracy_mean": a, "ari": a, "wall_seconds": a} for a in (0.97, 0.99)]
    results = [Result({"rows": "x", "seed": str(i)}, one) for i, one in enumerate(values)]
    text = markdown(table, results)
    assert re.search(
        r"\| x \| 98.00 \[[\d.]+, 100.00\] \| 0.98 \[[\d.]+, 1.00\] \| 0.98 \[[\d.]+, 1.11\]", text
    )


@pytest.mark.parametrize("published", [{}, {"A": {"x": [50]}}])
def test_groups_across_need_groups_and_no_published_numbers(published):
    vary = {"rows": {"x": {}}, **({"columns": {"A": {}}} if published else {})}
    table = {**FIGURES, "across": "columns", **({"published": published} if published else {})}
    with pytest.raises(UserError, match=r"table.across = .columns."):
        unchecked_cases({"vary": vary, "table": table})
