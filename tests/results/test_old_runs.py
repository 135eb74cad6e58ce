"""Run folders, checkpoints and configurations of earlier releases are read, compared, retimed and resumed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose
from support.runs import columns_of

from mpifl import cli
from mpifl.analysis.seed_groups import gather
from mpifl.experiment import loader
from mpifl.results.identity import machine
from mpifl.results.reader import OLD_NAMES, load, renamed
from mpifl.supervision.logging import warn_once

OLD = Path(__file__).parents[1] / "old_runs" / "0.1.0"
EXPECTED = OLD / "expected"
STOPPED = sorted(folder.name for folder in OLD.glob("*-stopped"))
MENDED = ("scaffold-stopped", "async-scaffold-stopped")  # compressed changes were coded as models until 0.3
CONFIGURATIONS = {"cohorts": "cohorts", "number": "number"}  # file -> expected figures
KEYS: dict[str, Any] = json.loads((OLD / "keys.json").read_text())
DIGEST_DEPENDS_ON = ("processor", "instructions", "compiler", "torch", "numpy", "scipy", "scikit-learn")


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy of the folders of 0.1.0, as the current directory."""
    shutil.copytree(OLD, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def same_machine(identity: dict[str, Any]) -> bool:
    """Return whether this machine computes the last bits of the machine that wrote a summary."""
    here = machine()
    return all(here[name] == identity[name] for name in DIGEST_DEPENDS_ON)


def assert_same_figures(folder: Path, expected: Path, trained: bool = True) -> None:
    """Raise unless a run has the accuracies of another, and on the same kind of machine its digest.

    Without `trained` only the visits, their times and their bytes are compared.
    """
    for name in ("metrics.csv",) * trained + ("events.csv", "visits.csv"):
        if (expected / name).exists():
            ours, theirs = (renamed(columns_of(place / name)) for place in (folder, expected))
            assert len(next(iter(ours.values()))) == len(next(iter(theirs.values())))
            new = {column for column in ours if column.endswith("_pooled")}  # came with release 0.3
            new.add("accuracy_standard_error")  # since then a test image counts once
            if "staleness_mean" in theirs:
                new.add("train_loss")  # weighted by samples since 0.3, as in rounds
            for column in {*ours, *theirs} - {"trains"} - new:
                values = [[float(v or "nan") for v in table[column]] for table in (ours, theirs)]
                # train_loss of the old release is the mean over batches, of this one over samples
                wide = 0.02 if column == "train_loss" else 1e-4
                assert_allclose(*values, rtol=wide, atol=1e-4, err_msg=f"{name}: {column}")
    if (expected / "summary.json").exists():
        ours, theirs = (
            renamed(json.loads((place / "summary.json").read_text())) for place in (folder, expected)
        )
        if trained and same_machine(renamed(theirs["identity"])):
            assert ours["digest"] == theirs["digest"]
        for name in ("federation_bytes_up", "federation_bytes_down", "rounds", "clients", "model_parameters"):
            assert ours[name] == theirs[name]


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_is_resumed_to_the_digest_that_the_old_release_reached(name, old):
    assert cli.main(["resume", name, "--quiet"]) == 0
    assert_same_figures(old / name, EXPECTED / name, trained=name not in MENDED)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_gives_the_digest_of_the_old_release(name, old):
    assert cli.main(["run", f"configurations/{name}.yaml", "--output.id", "again", "--quiet"]) == 0
    again, before = Path("runs") / f"{name}-again", old / f"{name}-finished"
    assert_same_figures(again, EXPECTED / CONFIGURATIONS[name])
    if same_machine(load(before).summary["identity"]):
        assert load(again).summary["digest"] == load(before).summary["digest"]


@pytest.mark.nightly
def test_finished_runs_are_reported(old):
    runs = ["methods-x", "cohorts-finished", "number-finished", "arrivals-finished", "ucfl-finished"]
    assert cli.main(["report", *runs, "--out", "page", "--quiet"]) == 0
    page = (old / "page" / "report.html").read_text()
    assert all(word in page for word in ("fedavg", "ifca", "ditto", "fedasync", "fedbuff", "45.09"))
    drawn = {path.stem for path in (old / "page" / "figures").glob("*.svg")}
    assert {"accuracy", "bytes", "fairness", "matrices", "staleness", "time", "worst"} <= drawn, drawn


def test_finished_runs_are_compared_as_by_the_old_release(old):
    runs = ["methods-x", "cohorts-finished", "arrivals-finished"]
    assert cli.main(["compare", *runs, "--csv", "compare.csv"]) == 0
    with (EXPECTED / "compare.csv").open() as before, (old / "compare.csv").open() as after:
        for then, now in zip(csv.DictReader(before), csv.DictReader(after), strict=True):
            assert (now["run"], now["seeds"], now["rounds"]) == (then["run"], then["seeds"], then["rounds"])
            assert now["ari_mean"] == "" or f"{float(now['ari_mean']):.2f}" == then["ARI"]
            for column, name in (("accuracy, %", "accuracy"), ("worst client, %", "worst")):
                mean, _, std = then[column].partition(" +- ")
                assert f"{float(now[f'{name}_mean']):.2f}" == mean
                assert not std or f"{float(now[f'{name}_std']):.2f}" == std
            for column, name in (("MB up", "mb_up"), ("MB down", "mb_down"), ("virtual s", "virtual_s")):
                assert f"{float(now[f'{name}_mean']):.4g}" == then[column]
            reached = 0 if then["MB to target"] == "never" else 1  # of at most two seeds
            assert int(now["seeds"]) - int(now["unreached"]) == reached


def test_old_names_are_said_once(old, capsys):
    warn_once.cache_clear()
    for _ in range(2):
        load("cohorts-finished"), load("ucfl-finished")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "wire.csv is now mpi_traffic.csv" in said[0]


def test_an_old_run_and_a_new_one_of_its_configuration_are_one_group(old):
    assert cli.main(["run", "configurations/cohorts.yaml", "--output.id", "again", "--quiet"]) == 0
    (group,) = gather(["cohorts-finished", "runs/cohorts-again"])
    assert (group.name, len(group.runs)) == ("ditto", 2)


def test_every_table_of_an_old_run_is_read(old):
    for folder in ("cohorts-finished", "arrivals-finished"):
        run = load(folder)
        for path in (old / folder).glob("*.csv"):
            with path.open(newline="") as lines:
                count = len([*csv.DictReader(lines)])
            assert len(run.rows(OLD_NAMES.get(path.name, path.name))) == count
        assert run.rows("mpi_traffic.csv")
        assert run.rows("client_traffic.csv")
        assert all("bytes_up" in row for row in run.rows("visits.csv"))
        assert run.metrics["round"].iloc[-1] == run.summary["rounds"]


RETIMED = {
    "retimed-ifca": ("methods-x/methods-ifca-0", ["--network.name", "wireless-slow"]),
    "retimed-cohorts": ("cohorts-finished", ["--network", "{name: tiers, server_bytes_s: 20000}"]),
}


@pytest.mark.parametrize("name", RETIMED)
def test_a_finished_run_is_retimed_as_by_the_old_release(name, old):
    run, network = RETIMED[name]
    assert cli.main(["retime", run, *network, "--output.id", "retimed", "--quiet"]) == 0
    (again,) = old.glob("*-retimed")  # beside a sweep, too
    assert columns_of(again / "metrics.csv") == columns_of(EXPECTED / name / "metrics.csv")


def test_the_events_of_an_old_run_are_replayed(old):
    replay = ["--clock", "{name: replay, trace: arrivals-finished/events.csv}"]
    place = ["--output.folder", ".", "--output.id", "replayed", "--quiet"]
    assert cli.main(["run", "arrivals-finished/config.yaml", *replay, *place]) == 0
    events = [(old / f"arrivals-{which}" / "events.csv").read_text() for which in ("finished", "replayed")]
    assert events[0] == events[1]
    assert_same_figures(old / "arrivals-replayed", EXPECTED / "arrivals-replayed")


def test_an_unfinished_folder_of_several_runs_is_resumed(old):
    """One of four cases is missing; the table comes out as it was, but for seconds and with all digits."""
    folder = old / "methods-x"
    shutil.rmtree(folder / "methods-ifca-1")
    assert cli.main(["resume", "methods-x", "--quiet"]) == 0
    (table,) = folder.glob("*.csv")
    assert table.name == "sweep.csv"
    ours, theirs = columns_of(table), columns_of(OLD / "methods-x" / "study.csv")
    for rows in (ours, theirs):
        del rows["wall_seconds"]
    assert len({*ours.pop("virtual_seconds")}) == 4  # a column that the old table did not have
    for name in ("accuracy_mean", "accuracy_worst"):  # which 0.2 rounded
        ours[name] = [f"{float(text):.4f}" for text in ours[name]]
    assert ours == theirs


@pytest.mark.parametrize("section", [*KEYS])
def test_every_key_of_the_old_release_is_understood(section, tmp_path):
    """Each class with all its fields, in a configuration with all other keys."""
    whole = KEYS["whole"]
    for fields in [{}] if section == "whole" else KEYS[section]:
        over: dict[str, Any] = fields
        for part in reversed(section.split(".") if fields else []):
            over = {part: over}
        if section == "policy.uploads":
            over["policy"]["name"] = "client_decides"
        tree = loader.merged(whole, over)
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(tree))  # JSON is YAML
        found = loader.load(str(file))
        assert found.rounds == whole["rounds"]
