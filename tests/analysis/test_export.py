"""Tidy tables: one row an observation, numbers are numbers, and what is written is what is read."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd
import pytest
from support.comparisons import group_of, run_of
from support.runs import run_each

from mpifl import cli
from mpifl.analysis import export
from mpifl.analysis.comparison import Comparison, independent
from mpifl.analysis.export import final_frame, frame
from mpifl.analysis.seed_groups import Group, gather

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
RUNS = {
    "fedavg-0": [],
    "fedprox-1": ["--algorithm", "{name: fedprox, mu: 0.5}", "--seed", "1"],
    "fedbuff": ["--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--local.lr", "1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two synchronous runs and an asynchronous one, of two rounds each."""
    return run_each(tmp_path_factory.mktemp("runs"), RUNS)


def test_a_row_is_a_run_and_evaluation_and_a_column_a_varied_key(folder):
    found = frame(gather([str(folder)]), "metrics")
    assert found["run"].tolist() == [f"tiny-{name}" for name in sorted(RUNS) for _ in range(2)]
    assert found.loc[found["method"] == "fedprox", "algorithm.mu"].tolist() == [0.5, 0.5]
    assert found["algorithm.mu"].isna().sum() == 4
    assert found["local.lr"].tolist() == [0.1, 0.1, 1.0, 1.0, 0.1, 0.1]
    assert found["seed.training"].tolist() == [0, 0, 0, 0, 1, 1]
    assert not {"data.source.name", "local.epochs", "output.id"} & set(found.columns)
    with (folder / "tiny-fedavg-0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert found["accuracy_mean"].tolist()[:2] == [float(row["accuracy_mean"]) for row in rows]


def test_steps_of_asynchronous_runs_are_no_rounds(folder):
    found = frame(gather([str(folder)]), "metrics")
    late = found["asynchronous"]
    assert found.loc[late, "method"].unique().tolist() == ["fedbuff"]
    assert found.loc[~late, "round"].tolist() == [1, 2, 1, 2]
    assert found.loc[~late, ["server_step", "arrivals"]].isna().all().all()
    assert found.loc[late, "round"].isna().all()
    assert found.loc[late, "server_step"].tolist() == [1, 2]
    assert found.loc[late, "arrivals"].tolist() == [2, 4]


def test_columns_have_types(folder):
    found = frame(gather([str(folder)]), "metrics")
    kinds = {name: str(kind) for name, kind in found.dtypes.items()}
    whole = ("round", "server_step", "arrivals", "federation_bytes_up", "num_clusters", "seed.data")
    assert {kinds[name] for name in whole} == {"Int64"}
    assert {kinds[name] for name in ("accuracy_mean", "loss", "virtual_seconds", "local.lr")} == {"Float64"}
    assert {kinds[name] for name in ("run", "configuration", "policy.name")} == {"string"}
    assert kinds["asynchronous"] == "boolean"
    found = frame(gather([str(folder / "tiny-fed[ap]*")]), "metrics")
    empty = {name: str(found[name].dtype) for name in ("server_step", "arrivals")}
    assert found[[*empty]].isna().all().all()
    assert set(empty.values()) == {"Float64"}, "of synchronous runs: no text"


@pytest.mark.parametrize("table", ["metrics", "final", "clients"])
def test_parquet_is_read_back_as_it_was_and_csv_with_equal_numbers(table, folder, tmp_path, capsys):
    files = [tmp_path / f"t.{ending}" for ending in ("parquet", "csv")]
    for file in files:
        assert cli.main(["export", str(folder), "--table", table, "--out", str(file)]) == 0
    groups = gather([str(folder)])
    found = final_frame(groups) if table == "final" else frame(groups, table)
    assert f"{files[0]}: {len(found)} rows, {len(found.columns)} columns\n" in capsys.readouterr().out
    pd.testing.assert_frame_equal(pd.read_parquet(files[0]), found)
    again = pd.read_csv(files[1])
    assert list(again.columns) == list(found.columns)
    for name in found.select_dtypes(["Int64", "Float64"]):
        pd.testing.assert_series_equal(
            again[name].astype("float64"), found[name].astype("Float64").astype("float64"), check_dtype=False
        )


def test_without_a_file_csv_is_printed(folder, capsys):
    assert cli.main(["export", str(folder), "--table", "clients"]) == 0
    text = capsys.readouterr().out
    found = pd.read_csv(io.StringIO(text))
    assert len(found) == 3 * 8
    assert found.groupby("run")["client"].apply(list).tolist() == [list(range(8))] * 3
    assert {"accuracy", "train", "test", "bytes_up", "bytes_down"} <= set(found.columns)


def test_final_figures_carry_time_and_event_of_the_target(folder):
    """A target of 0 is met at the first evaluation; one of 1 nowhere: the time is then the end of the run."""
    groups = gather([str(folder)])
    met, never = final_frame(groups, 0.0), final_frame(groups, 1.0)
    assert (met["reached"].tolist(), never["reached"].tolist()) == ([True] * 3, [False] * 3)
    assert met["round_to_target"].tolist() == [1.0] * 3
    assert never["round_to_target"].tolist() == [2.0] * 3
    both = never["federation_bytes_up"] + never["federation_bytes_down"]
    assert never["bytes_to_target"].tolist() == both.astype(float).tolist()
    assert {str(never[f"{axis}_to_target"].dtype) for axis in ("round", "bytes")} == {"Int64"}
    assert never["accuracy_mean"].tolist() == [r.series["accuracy_mean"][-1] for g in groups for r in g.runs]
    assert (never["ranks"].tolist(), never["clients"].tolist()) == ([1] * 3, [8] * 3)


def test_runs_that_wrote_no_clients_are_named(folder, tmp_path, capsys):
    more = run_each(tmp_path, {"none": ["--output.clients", "none"]})
    capsys.readouterr()
    assert cli.main(["export", str(folder), str(more), "--table", "clients"]) == 0
    said = capsys.readouterr()
    assert "1 of 4 runs have no table clients and are left out: tiny-none (output.clients: none)" in said.err
    assert "tiny-none" not in said.out
    assert cli.main(["export", str(more), "--table", "clients"]) == 2
    assert "output.clients" in capsys.readouterr().err


def test_runs_are_named_by_as_much_of_their_folders_as_tells_them_apart(folder, tmp_path):
    for place, name in (("a/runs", "fedavg-0"), ("b/runs", "fedavg-0"), ("b/runs", "fedprox-1")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / f"tiny-{name}").symlink_to(folder / f"tiny-{name}")
    found = final_frame(gather([str(tmp_path / "a/runs"), str(tmp_path / "b/runs")]))
    assert found["run"].tolist() == ["a/runs/tiny-fedavg-0", "b/runs/tiny-fedavg-0", "tiny-fedprox-1"]


def test_the_target_is_that_of_comparisons_where_a_run_is_there_twice(monkeypatch):
    """Means are 0.7 without the repeated run, and 0.633 with it."""
    monkeypatch.setattr(export, "_metrics", lambda run: [{}])
    group = group_of("a", [0.8, 0.6])
    again = Group("a", (*group.runs, run_of("a", [0.6], 1)))
    assert final_frame([again])["target"].tolist() == [Comparison(independent([again])[0]).target] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.xlsx"], "use a file that ends in .csv or .parquet"),
        (["--target", "0.5"], "--target = 0.5: has no effect"),
        (["--table", "final", "--target", "5"], "use an accuracy in [0, 1]"),
        (["--out", "/nowhere/x.csv"], "cannot be written"),
        (["--size", "3"], "option = '--size'"),
    ],
)
def test_bad_exports_get_one_line(options, message, folder, capsys):
    assert cli.main(["export", str(folder), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_parquet_without_its_package_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for runs in (folder, "/nowhere"):  # before any run is read
        assert cli.main(["export", str(runs), "--out", "x.parquet"]) == 2
        assert 'needs pyarrow: pip install "mpifl[parquet]"' in capsys.readouterr().err


def test_a_broken_package_is_not_called_missing(folder, tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ImportError("libarrow.so: undefined symbol")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", broken)
    with pytest.raises(ImportError, match="undefined symbol"):
        export.export([str(folder)], "metrics", str(tmp_path / "x.parquet"))


def test_a_pattern_names_runs(folder, capsys):
    assert cli.main(["export", str(folder / "tiny-fed[ap]*")]) == 0
    found = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert sorted(found["method"].unique()) == ["fedavg", "fedprox"]
