"""Names of clients, and when clients join and leave, in the files of the run folder."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.runs import CONFIG

from mpifl import cli
from mpifl.results.reader import load

HOSPITALS = ("Aachen", 'Bern, "Insel"', "Cork")


def run(folder: Path, *options: str):
    """Run the small configuration, of eight clients, and return the run."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(folder / "cache")]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, *options]) == 0
    return load(next(folder.glob("*-x")))


def hospitals(folder: Path, *options: str):
    """Return a run on a table with the names of the clients, of which the second has the fewest rows."""
    rows = [
        (7 * i % 5, i % 2, name)
        for name, count in zip(HOSPITALS, (16, 12, 20), strict=True)
        for i in range(count)
    ]
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("a", "y", "hospital"), *rows])
    source = f"{{name: table, path: {folder / 't.csv'}, target: [y], client: hospital}}"
    scenario = "{name: natural, test: own}"
    config = folder / "t.yaml"
    config.write_text(
        f"algorithm: fedavg\nmodel: {{name: mlp, hidden: [4]}}\nrounds: 1\n"
        f"data: {{source: {source}, scenario: {scenario}}}\n"
    )
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(folder / "cache")]
    assert cli.main(["run", str(config), "--quiet", *place, *options]) == 0
    return load(next(folder.glob("*-x")))


def test_clients_of_a_table_have_their_names(tmp_path):
    found = hospitals(tmp_path)
    for table in (found.clients, found.clusters):
        assert [*zip(table.client, table.client_name, strict=True)] == [*enumerate(HOSPITALS)]


def test_names_are_those_of_the_clients_whose_rows_are_written(tmp_path):
    found = hospitals(tmp_path, "--data.scenario.clients", "2", "--evaluation.clients", "1")
    names = [*found.clusters.client_name]
    assert len(names) == 2
    assert {*names} < {*HOSPITALS}
    assert [*found.clients.client_name] == names[:1]


def test_clients_without_names_have_no_column_of_them(tmp_path):
    found = run(tmp_path, "--rounds", "1")
    assert "client_name" not in found.clients
    assert not (found.folder / "presence.csv").exists()
    assert [*found.presence] == ["client", "event"]


def test_who_joins_and_leaves_and_when_is_told_by_step(tmp_path):
    """Of eight clients two join from round 2 and two leave from round 3 on; who leaves at 9 has not left."""
    late, left = "{share: 0.25, joins: 2}", "{share: 0.25, leaves: 3}"
    found = run(tmp_path, "--rounds", "4", "--newcomers", late, "--leavers", left)
    told = [*zip(found.presence.step, found.presence.event, strict=True)]
    assert told == [(2, "joins")] * 2 + [(3, "leaves")] * 2
    trained = found.visits[found.visits.trains]
    gone = {*found.presence.client[found.presence.event == "leaves"]}
    new = {*found.presence.client[found.presence.event == "joins"]}
    assert not gone & {*trained.client[trained.step >= 3]}
    assert gone <= {*trained.client[trained.step == 2]}
    assert not new & {*trained.client[trained.step < 2]}
    later = run(tmp_path / "later", "--rounds", "4", "--leavers", "{share: 0.25, leaves: 9}")
    assert len(later.presence) == 0


def test_who_leaves_at_a_time_is_told_in_seconds_of_the_clock(tmp_path):
    options = (
        "--algorithm",
        "fedasync",
        "--policy",
        "every_arrival",
        "--rounds",
        "24",
        "--delay.name",
        "constant",
    )
    found = run(tmp_path, *options, "--leavers", "{share: 0.25, leaves_s: 1.5}")
    assert [*zip(found.presence.seconds, found.presence.event, strict=True)] == [(1.5, "leaves")] * 2
    assert found.metrics.virtual_seconds.iloc[-1] > 1.5
    gone = found.events[found.events.client.isin(found.presence.client)]
    assert (gone.start < 1.5).all()


@pytest.mark.parametrize(("clients", "lines"), [("sample", 1), ("none", 0)])
def test_a_large_population_writes_the_events_of_the_clients_whose_rows_are_written(
    clients, lines, tmp_path, monkeypatch
):
    """With one client in the sample, the file has its events at most; with none, there is no file."""
    monkeypatch.setattr("mpifl.results.recorder.SAMPLE", 1)
    found = run(
        tmp_path, "--rounds", "3", "--leavers", "{share: 0.8, leaves: 2}", "--output.clients", clients
    )
    if not lines:
        assert not (found.folder / "presence.csv").exists()
    else:
        assert len(found.presence) <= lines
        assert {*found.presence.client} <= {*found.clusters.client}
