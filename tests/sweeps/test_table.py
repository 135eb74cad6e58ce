"""The table of a sweep in a paper's layout; parts of a sweep that several processes share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.each import for_each

from mpifl.cli import main
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.experiment.loader import from_tree
from mpifl.experiment.table_layout import TableConfig
from mpifl.sweeps import sweep as sweeping
from mpifl.sweeps.cases import ALL, Part, cases, read
from mpifl.sweeps.table import Cell, Result, largest_difference, lines, markdown

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
TABLE = {
    "title": "Table 1",
    "figures": {"avg": {"of": "accuracy_mean", "percent": True}, "ARI": {"of": "ari"}},
    "published": {"FedAvg": ["24.2 (2.6)", None], "Local": [38.3, 0]},
}
ROWS = {"FedAvg": {"algorithm": "fedavg"}, "Local": {"algorithm": "local", "local": {"lr": 0.2}}}


def sweep(name, options, transport, quiet=False, part=ALL):
    """Run a sweep as the command line does."""
    return sweeping.sweep(lambda: read(name, options), transport, quiet, part)


def tree(**keys):
    return {"base": TINY, "name": "t", "vary": {"rows": ROWS, "seed": [0, 1]}, "table": TABLE, **keys}


def file_of(tmp_path, **keys):
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree(**keys), sort_keys=False))
    return str(path)


def whole(**keys):
    """Return a tree without a base, for `cases`."""
    own = {k: v for k, v in tree(**keys).items() if k != "base"}
    return {**own, "algorithm": "fedavg", "model": "mlp"}


def test_rows_lay_parts_of_a_configuration_over_the_sweep():
    found = {case.slug: case.config for case in cases(whole())}
    assert [*found] == ["FedAvg-0", "FedAvg-1", "Local-0", "Local-1"]
    assert type(found["Local-1"].algorithm).__name__ == "Local"
    assert (found["FedAvg-1"].local.lr, found["Local-1"].local.lr) == (0.01, 0.2)
    assert found["Local-1"].seed.model == 1


def test_a_group_of_columns_changes_single_rows():
    columns = {"A": {"rounds": 3}, "B": {"rounds": 4, "rows": {"Local": {"local": {"lr": 0.5}}}}}
    vary = {"rows": ROWS, "columns": columns}
    found = {c.slug: (c.config.rounds, c.config.local.lr) for c in cases(whole(vary=vary, table=None))}
    assert found == {"FedAvg-A": (3, 0.01), "FedAvg-B": (4, 0.01), "Local-A": (3, 0.2), "Local-B": (4, 0.5)}


@for_each(
    ("change", "message"),
    [
        ({"vary": {"rows": {"A": "fedavg"}}}, "vary.rows = 'fedavg'"),
        ({"vary": {"rows": ROWS, "columns": {"X": {"rows": {"Locl": {}}}}}}, "vary.columns.X.rows = 'Locl'"),
        ({"table": {**TABLE, "published": {"FedAvgg": [1, 2]}}}, "published.FedAvgg"),
        ({"table": {**TABLE, "published": {"FedAvg": [1, 2, 3]}}}, "use a list of 2 figures"),
        ({"table": {**TABLE, "figures": {}}}, "table.figures"),
        ({"table": {**TABLE, "interval": "normal"}}, "table.interval"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "better": "lower"}}}}, "table.figures.a.better"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "percnt": True}}}}, "table.figures.a.percnt"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "digits": -1}}}}, "table.figures.a.digits = -1"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "digits": True}}}}, "table.figures.a.digits"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "digits": 10**11}}}}, "table.figures.a.digits"),
        ({"table": {**TABLE, "figures": {"a": {"of": "ari", "deviation": 1}}}}, "table.figures.a.deviation"),
        ({"table": {"title": "T", "figures": TABLE["figures"], "titel": 1}}, "table.titel"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_its_key_named(change, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        cases(whole(**change))


def results(**accuracies):
    return [
        Result({"rows": row, "seed": str(seed)}, {"accuracy_mean": value, "ari": 1.0})
        for row, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


def test_figures_of_seeds_stand_beside_the_published_ones():
    """By hand: the mean of .25 and .27 is 26 %, their sample deviation 1.41 points."""
    table = from_tree(TableConfig, TABLE)
    found = results(FedAvg=[0.25, 0.27], Local=[0.4])
    text = markdown(table, found)
    assert "| FedAvg | 24.2 (2.6) | 26.00 ± 1.41 | - | 1.00 ± 0.00 | 2 |" in text
    assert "| Local | 38.3 | 40.00 | 0 | 1.00 | 1 |" in text
    difference, where = largest_difference(lines(table, found), table)
    assert (round(difference, 2), where) == (1.8, "FedAvg avg")


@for_each(
    ("published", "number"),
    [
        ("47.7 (2.2)", 47.7),
        (".840 (.008)", 0.84),
        ("-0.01+-0.02", -0.01),
        ("1e-05", 1e-5),
        ("5E-4", 5e-4),
        ("1e3 +- 2", 1000),
        ("88.", 88),
        ("3, in the text", 3),
        ("1,234.5", None),  # a thousand or a fraction
        ("12,345", None),
        ("about 3", None),
    ],
)
def test_a_published_text_begins_with_its_number(published, number):
    assert Cell(published, (100.0,), 1).difference == (None if number is None else 100 - number)


def test_a_figure_of_fewer_seeds_than_the_row_says_so():
    """Cluster 1 has no clients with seed 2; ARI is 1 with all three."""
    table = from_tree(TableConfig, {"title": "T", "figures": {"c1": {"of": "c1"}, "ARI": {"of": "ari"}}})
    found = [
        Result({"rows": "A", "seed": str(i)}, {"ari": 1.0, **v}) for i, v in enumerate([{"c1": 0.3}] * 2)
    ]
    found.append(Result({"rows": "A", "seed": "2"}, {"ari": 1.0}))
    assert "| A | 0.30 ± 0.00 (2 of 3) | 1.00 ± 0.00 | 3 |" in markdown(table, found)


def test_a_figure_that_no_case_has_is_named():
    figures = {"avg": {"of": "acuracy_mean"}, "ARI": {"of": "ari"}}
    text = markdown(from_tree(TableConfig, {"title": "T", "figures": figures}), results(A=[0.5]))
    assert "avg: no case has acuracy_mean; did you mean 'accuracy_mean'?" in text
    assert "ARI: " not in text


def test_fewer_than_three_rows_have_no_ranks():
    table = from_tree(TableConfig, {**TABLE, "ranks": True, "published": {}})
    text = markdown(table, results(A=[0.5]))
    assert "no ranks: " in text
    assert "Average ranks" not in text


def test_the_deviation_is_that_of_the_paper():
    """EMD-CFL's Rand index of three runs, 1, 1 and 0, is printed as 0.67 ± 0.47; the sample form is 0.58."""
    for kind, shown in (("population", "0.67 ± 0.47"), ("sample", "0.67 ± 0.58")):
        table = {"title": "T", "figures": {"ARI": {"of": "ari", "deviation": kind}}}
        found = [Result({"rows": "A", "seed": str(i)}, {"ari": v}) for i, v in enumerate((1.0, 1.0, 0.0))]
        assert f"| A | {shown} | 3 |" in markdown(from_tree(TableConfig, table), found)


def test_intervals_take_the_place_of_deviations():
    """26 % of two seeds, 1 point of standard error, and t = 12.71 for one degree of freedom: 26 -+ 12.71."""
    text = markdown(
        from_tree(TableConfig, {**TABLE, "interval": "t"}), results(FedAvg=[0.25, 0.27], Local=[0.4])
    )
    assert "| FedAvg | 24.2 (2.6) | 26.00 [13.29, 38.71] | - | 1.00 | 2 |" in text
    assert "| Local | 38.3 | 40.00 | 0 | 1.00 | 1 |" in text
    assert "95 % confidence interval of the mean (t)" in text


def test_ranks_of_rows_over_groups_of_columns():
    """By hand: C is best in all three groups, A and B are tied once and each second once: (2.5 + 2 + 3) / 3.
    A fourth group, in which a row is missing, does not count; of the loss less is better.
    """
    figures = {"acc": {"of": "accuracy_mean"}, "loss": {"of": "loss", "better": "less"}}
    table = from_tree(TableConfig, {"title": "T", "figures": figures, "ranks": True})
    scores = {"X": (0.5, 0.5, 0.9), "Y": (0.6, 0.5, 0.7), "Z": (0.1, 0.2, 0.3), "W": (0.9, 0.8)}
    found = [
        Result({"rows": row, "columns": group}, {"accuracy_mean": value, "loss": 1 - value})
        for group, values in scores.items()
        for row, value in zip("ABC", values, strict=False)
    ]
    last = markdown(table, found).partition("**Average ranks**")[2]
    assert [f"| {row} | {r} | {r} |" in last for row, r in (("A", 2.5), ("B", 2.5), ("C", 1))] == [True] * 3
    assert "acc: 3 groups, more is better; Friedman p = " in last
    assert "Average ranks" not in markdown(table, found[:3]), "one group"
    assert "no ranks" in markdown(table, found[:3])


def test_each_group_of_columns_is_ranked_in_the_direction_of_its_own_metric():
    """By hand: in each group A is best and C worst, by accuracy (more is better) and by error; deviations
    have the direction of the table, and a group whose rows have metrics of both directions does not count.
    """
    figures = {"metric": {"of": "metric_mean"}, "spread": {"of": "metric_std", "better": "less"}}
    table = from_tree(TableConfig, {"title": "T", "figures": figures, "ranks": True})

    def of(group: str, betters: tuple[int, ...], *means: float) -> list[Result]:
        return [
            Result({"rows": row, "columns": group}, {"metric_mean": mean, "metric_std": mean}, better)
            for row, better, mean in zip("ABC", betters, means, strict=True)
        ]

    found = [*of("accuracy", (1, 1, 1), 0.9, 0.8, 0.7), *of("mse", (-1, -1, -1), 1, 2, np.inf)]
    found += of("both", (1, -1, -1), 0.1, 2, 1)
    last = markdown(table, found).partition("**Average ranks**")[2]
    assert [row in last for row in ("| A | 1 | 1.67 |", "| B | 2 | 2.33 |", "| C | 3 | 2 |")] == [True] * 3
    assert "metric: 2 groups, as the metric of each says; Friedman p = " in last
    assert "spread: 3 groups, less is better; Friedman p = " in last
    assert "less is better" in markdown(table, found[3:6] + of("mae", (-1, -1, -1), 1, 2, 3))


def test_published_numbers_stand_in_the_row_and_group_that_they_were_printed_for():
    table = from_tree(TableConfig, {**TABLE, "published": {"B": {"Local": [5, 6]}}})
    found = [Result({"rows": "Local", "columns": c}, {"accuracy_mean": 0.5, "ari": 0.0}) for c in "AB"]
    assert [line.cells[0].published for line in lines(table, found)] == ["", "5"]
    more = [Result({"rows": "Local", "columns": "B", "local.lr": "1"}, {"accuracy_mean": 0.5})]
    assert lines(table, more)[0].cells[0].published == "", "printed for one rate only"
    assert lines(table, more)[0].cells[1].measured == ""


@pytest.mark.in_turn
def test_two_processes_share_a_sweep_and_its_table(tmp_path):
    file, place = file_of(tmp_path), ["--output.folder", str(tmp_path), "--output.id", "x"]
    one = sweep(file, place, Single(), True, Part.of(share="1/2"))
    assert one == tmp_path / "t-x"
    assert {p.name for p in one.glob("t-*")} == {"t-FedAvg-0", "t-Local-0"}
    sweep(file, place, Single(), True, Part.of(share="2/2"))
    alone = sweep(file, [*place[:-1], "alone"], Single(), True)
    for name in ("table.md", "sweep.md"):
        mine, theirs = ((f / name).read_text() for f in (one, alone))
        assert without_seconds(mine) == without_seconds(theirs), name
    rows = [line.split(" | ") for line in (one / "table.md").read_text().splitlines() if "FedAvg" in line]
    values = [
        json.loads((one / f"t-FedAvg-{s}" / "summary.json").read_text())["accuracy_mean"] for s in (0, 1)
    ]
    assert rows[0][2].startswith(f"{50 * sum(values):.2f} ± ")


def without_seconds(text: str) -> list[list[str]]:
    """Return the cells of a table without its last column, wall seconds."""
    return [line.split(" | ")[:-1] for line in text.splitlines()]


def test_a_sweep_of_another_configuration_is_not_joined(tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--rounds", "1"]
    file = file_of(tmp_path)
    sweep(file, place, Single(), True, Part.of(only=["rows=Local", "seed=1"]))
    assert [p.name for p in (tmp_path / "t-x").glob("t-*")] == ["t-Local-1"]
    with pytest.raises(
        UserError, match=r"^local.lr = 0.3: the sweep in .*t-x has 0.2; give another output.id"
    ):
        sweep(file, [*place, "--local.lr", "0.3"], Single(), True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "3/2"], "--case = '3/2'"),
        (["--case", "x"], "--case = 'x'"),
        (["--only", "rows"], "--only = 'rows'"),
        (["--only", "row=Local"], "--only = 'row'"),
        (["--only", "rows=Locl"], "--only = 'rows=Locl'"),
    ],
)
def test_a_part_that_is_not_there_is_refused(options, message, tmp_path, capsys):
    assert main(["sweep", file_of(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_labels_with_commas_are_chosen():
    vary = {"model.hidden": [[8], [8, 8], [4]], "seed": [0]}
    for text, expected in (
        ("[8, 8]", ["[8, 8]"]),
        ("[8, 8],[4]", ["[8, 8]", "[4]"]),
        ("[4], [8]", ["[8]", "[4]"]),
    ):
        part = Part.of(only=[f"model.hidden={text}"])
        part.check(vary)
        found = part.chosen(cases(whole(vary=vary, table=None)))
        assert sorted(case.labels["model.hidden"] for case in found) == sorted(expected)


def test_numbers_that_label_cases_are_named_as_they_are_written_or_shown():
    """`0.10` of a list has the label 0.1; a label of a mapping stays as it is."""
    vary = {"local.lr": ["0.10", "1e-3"], "seed": ["0"]}
    table = {"title": "T", "figures": TABLE["figures"], "published": {"0.10": ["1"], "0.001": ["2"]}}
    assert len(cases(whole(vary=vary, table=table))) == 2
    found = from_tree(TableConfig, table)
    assert [found.text_of("", label)[0] for label in ("0.1", "0.001")] == ["1", "2"]
    part = Part.of(only=["local.lr=1e-3"])
    part.check(vary)
    assert [c.config.local.lr for c in part.chosen(cases(whole(vary=vary, table=None)))] == [0.001]
    columns = {"X": {"rows": {"1.0": {"rounds": "3"}}}}
    rows = {"1.0": {"rounds": "5"}}
    (case,) = cases(whole(vary={"rows": rows, "columns": columns}, table=None))
    assert case.config.rounds == 3


def test_cases_are_listed_without_running_any(tmp_path, capsys):
    assert main(["sweep", file_of(tmp_path), "--list", "--only", "seed=1"]) == 0
    assert capsys.readouterr().out == "rows FedAvg, seed 1\nrows Local, seed 1\n2 of 4 cases\n"
    assert not list(tmp_path.glob("t-*"))
