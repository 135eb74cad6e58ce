"""A run under another network, without training: to the bit what a run under that network says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.experiment.retime import retime

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
UCFL = ["--algorithm", "{name: ucfl, streams: 3}", "--participation", "0.5", "--evaluation.every", "1"]
SLOW = ["--network.name", "wireless-slow"]
NETWORKS = {
    "slow": SLOW,
    "shared": ["--network", "{name: tiers, server_bytes_s: 20000}", "--delay", "{name: uniform}"],
    "away": ["--network", "{name: links, uplink_bytes_s: 3000, spread: 0.5}", "--availability.off_s", "4"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run without a network, and one under each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, network in {"plain": [], **NETWORKS}.items():
        place = ["--output.folder", str(folder), "--output.id", name, "--rounds", "4", "-q"]
        assert cli.main(["run", str(TINY), *UCFL, *place, *network]) == 0
    return folder


def column(folder: Path, name: str) -> list[str]:
    """Return a column of `metrics.csv` as it is written."""
    with (folder / "metrics.csv").open() as lines:
        return [row[name] for row in csv.DictReader(lines)]


@pytest.mark.parametrize("name", NETWORKS)
def test_retiming_gives_what_running_gives(name, runs):
    again = retime(str(runs / "tiny-plain"), NETWORKS[name])
    direct = runs / f"tiny-{name}"
    assert column(again, "virtual_seconds") == column(direct, "virtual_seconds")
    assert column(again, "virtual_seconds") != column(runs / "tiny-plain", "virtual_seconds")
    assert column(again, "accuracy_mean") == column(direct, "accuracy_mean")
    assert (again / "visits.csv").read_text() == (direct / "visits.csv").read_text()


def test_a_retimed_run_can_be_retimed(runs):
    once = retime(str(runs / "tiny-plain"), NETWORKS["shared"])
    again = retime(str(once), ["--delay.name", "constant", *SLOW])
    assert column(again, "virtual_seconds") == column(runs / "tiny-slow", "virtual_seconds")


def test_only_times_may_change(runs):
    with pytest.raises(UserError, match=r"algorithm = .*: re-timing changes only network"):
        retime(str(runs / "tiny-plain"), ["--algorithm.name", "fedavg"])
    with pytest.raises(UserError, match=r"network\.uplink_bytes_s = -1"):
        retime(str(runs / "tiny-plain"), ["--network.uplink_bytes_s", "-1"])


def test_an_asynchronous_run_is_not_retimed(runs):
    options = ["--policy", "every_arrival", "--algorithm", "fedasync", "--rounds", "2"]
    place = ["--output.folder", str(runs), "--output.id", "async", "-q"]
    assert cli.main(["run", str(TINY), *options, *place]) == 0
    with pytest.raises(UserError, match="which upload comes first depends on the network"):
        retime(str(runs / "tiny-async"), NETWORKS["slow"])
