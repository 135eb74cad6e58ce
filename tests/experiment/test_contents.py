"""The descriptions of files and columns: every column of a run is there, and pages name no other."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from support.runs import CONFIG

from mpifl import cli
from mpifl.core.metric import METRICS
from mpifl.core.timing import PHASES
from mpifl.experiment import contents
from mpifl.results.reader import COLUMNS

ROOT = Path(__file__).parents[2]
RUNS = {
    "moving": [
        *("--algorithm", "{name: flexcfl, num_groups: 2}", "--drift", "{kind: swap, at: [2], share: 0.5}"),
        *("--recluster", "{at: [3]}", "--leavers", "{share: 0.2, leaves: 3}", "--newcomers", "{share: 0.2}"),
        *("--output.updates", "true", "--evaluation.distances", "true", "--evaluation.train", "true"),
        *("--evaluation.by", "[group, cluster]", "--rounds", "3", "--evaluation.every", "1"),
    ],
    "devices": [
        *("--costs", "all", "--delay.name", "exponential", "--evaluation.by", "[device]"),
        *("--devices", "{name: classes, classes: {a: {share: 0.5, watts: 3}, b: {share: 0.5, watts: 8}}}"),
        *("--attack", "{name: sign_flip, share: 0.25, factor: 4}", "--robust", "median", "--rounds", "2"),
    ],
    "private": [
        *("--privacy", "{name: central, clip: 0.5, quantile: 0.5, quantile_noise: 4.0}", "--rounds", "2")
    ],
    "arrivals": [
        *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}", "--delay.name", "exponential"),
        *("--rounds", "4"),
    ],
    "adapters": [
        *("--model.lora", "{rank: 3, average: product, ranks: {0-3: 1}}", "--rounds", "2"),
        *("--policy", "{name: over_selection, extra: 0.5}", "--delay.name", "exponential"),
        *("--participation", "0.5"),
    ],
    "masks": ["--secure_aggregation", "{name: masks, dropout: 0.3, threshold: 0.5}", "--rounds", "2"],
}


def undescribed(folder: Path) -> list[str]:
    """Return the columns and entries of a run folder that no description fits."""
    out = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as lines:
            names = next(csv.reader(lines), [])
        out += [f"{path.name}: {n}" for n in names if not _known(path.name, n)]
    summary = json.loads((folder / "summary.json").read_text())
    names = [*summary, *(f"drift.{name}" for row in summary.get("drift", ()) for name in row)]
    return [*out, *(f"summary.json: {name}" for name in names if not _known("summary.json", name))]


def _known(file: str, name: str) -> bool:
    return any(column.file == file for column in contents.named(name))


@pytest.mark.parametrize("name", RUNS)
def test_every_column_that_a_run_writes_is_described(name, tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "--data.cache", str(tmp_path / "cache")]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, *RUNS[name]]) == 0
    assert undescribed(tmp_path / "tiny-x") == []


def test_a_column_that_nobody_describes_is_found(tmp_path):
    (tmp_path / "ledger.csv").write_text("step,colour\n")
    (tmp_path / "summary.json").write_text('{"digest": "0", "drift": [{"stop": 1}]}')
    assert undescribed(tmp_path) == ["ledger.csv: colour", "summary.json: drift.stop"]


def test_what_the_reader_requires_is_described():
    names = [(file, name) for file, columns in COLUMNS.items() for name in columns]
    assert [pair for pair in names if not _known(*pair)] == []


@pytest.mark.parametrize(
    ("asked", "name", "unit"),
    [
        ("accuracy_worst", "METRIC_worst", ""),
        ("perplexity_mean", "METRIC_mean", ""),
        ("accuracy_train_mean", "SCORE_mean", ""),
        ("accuracy_group2_mean", "SCORE_PART_mean", ""),
        ("clustering_bytes", "clustering_bytes", "bytes"),
        ("federation_bytes_up", "federation_bytes_WAY", "bytes"),
        ("flops_choice", "flops_PURPOSE", "FLOP"),
        ("recovery_seconds", "recovery_seconds", "s"),
        ("recovery_steps", "recovery_steps", ""),
    ],
)
def test_a_column_is_found_by_its_name(asked, name, unit):
    found = contents.named(asked)[0]
    assert (found.file, found.name, found.unit) == ("metrics.csv", name, unit)


def test_a_figure_over_clients_is_no_score_of_a_client():
    assert [found.file for found in contents.named("accuracy_worst")] == ["metrics.csv", "summary.json"]
    assert "clients.csv" in [found.file for found in contents.named("accuracy_train")]


def test_an_entry_of_a_row_of_drift_is_found_with_and_without_its_file():
    for asked in ("drift.recovered_after_s", "summary.json.drift.recovered_after_s"):
        (found,) = contents.named(asked)
        assert (found.file, found.unit) == ("summary.json", "s")


def test_no_description_is_empty_and_each_name_is_matched_by_its_own_pattern():
    words = {"METRIC": next(iter(METRICS)), "SCORE": "accuracy_train", "SET": "train", "PART": "group0"}
    words |= {"MODULE": "fc", "PURPOSE": "choice", "PHASE": PHASES[0], "WAY": "up", "G": "0"}
    for column in contents.columns():
        assert column.meaning
        if {"OWN", "NAME"} & {*re.findall("[A-Z]+", column.name)}:
            continue
        name = re.sub("[A-Z]+", lambda m: words[m[0]], column.name)
        assert column.pattern.fullmatch(name), column.name


def test_the_commands_explain_columns(capsys):
    assert cli.main(["show", "accuracy_worst"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("accuracy_worst: column of metrics.csv")
    assert "worst client" in rest[0]
    assert cli.main(["show", "ledger.csv"]) == 0
    page = capsys.readouterr().out
    assert "group_bytes: column of ledger.csv, in bytes" in page
    assert cli.main(["list", "columns"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "clustering_bytes" and line.endswith("[bytes]") for line in lines)
    assert cli.main(["show", "acuracy_pooled"]) == 2
    assert "did you mean 'accuracy_pooled'?" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["running", "costs", "drift", "asynchrony"])
def test_files_that_pages_name_in_tables_are_described_with_their_columns(page):
    """The first cell of a row that names a table of a run, and rows of tables of columns."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    files = {name for cell in cells for name in re.findall(r"`(\w+\.csv)`", cell)}
    assert files <= {*contents.TABLES}
    tables = re.findall(r"^\| (?:column|figure) \| .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert tables or page == "running"
    assert [n for n in names if not contents.named(n) and not contents.named(f"drift.{n}")] == []


def test_the_page_on_running_has_every_table_of_a_run():
    text = (ROOT / "docs" / "running.md").read_text()
    elsewhere = {"events.csv", "dropped.csv", "client_energy.csv"}  # of asynchronous runs, failures, watts
    assert [file for file in contents.TABLES if f"`{file}`" not in text and file not in elsewhere] == []
