"""A run under another network, without training: to the bit what a run under that network says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.experiment import loader
from mpifl.simulation.delays import _durations
from mpifl.sweeps.retime import retime as retimed

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
UCFL = ["--algorithm", "{name: ucfl, streams: 3}", "--participation", "0.5", "--evaluation.every", "1"]
SLOW = ["--network.name", "wireless-slow"]
THIN = ["--network", "{name: links, uplink_bytes_s: 3000}"]
NETWORKS = {
    "slow": SLOW,
    "shared": ["--network", "{name: tiers, server_bytes_s: 20000}", "--delay", "{name: uniform}"],
    "away": ["--network", "{name: links, uplink_bytes_s: 3000, spread: 0.5}", "--availability.off_s", "4"],
}


def retime(name: str, options: list[str]) -> Path:
    """Return the folder of a copy."""
    return retimed(name, options)[0]


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
    for file in ("visits.csv", "assignments.csv"):
        assert (again / file).read_text() == (direct / file).read_text()


def test_a_run_of_adapters_is_retimed_by_the_size_of_the_whole_model(tmp_path):
    adapters = ["--model.lora.rank", "2", "--rounds", "2"]
    common = ["run", str(TINY), *adapters, "-q", "--output.folder", str(tmp_path)]
    assert cli.main([*common, "--output.id", "plain"]) == 0
    assert cli.main([*common, "--output.id", "wired", "--network.name", "wired"]) == 0
    again = retime(str(tmp_path / "tiny-plain"), ["--network.name", "wired"])
    assert column(again, "virtual_seconds") == column(tmp_path / "tiny-wired", "virtual_seconds")
    assert float(column(again, "virtual_seconds")[-1]) < 2 * 3  # of the whole model


def test_recovery_from_drift_is_retimed(tmp_path):
    """Data change at rounds 2 and 4 of 6: steps stay, seconds are those of the other network."""
    drift = ["--drift", "{kind: swap, at: [2, 4], share: 0.5, recurring: true}", "--evaluation.every", "1"]
    for name, network in (("plain", []), ("slow", SLOW)):
        place = ["--output.folder", str(tmp_path), "--output.id", name, "--rounds", "6", "-q"]
        assert cli.main(["run", str(TINY), *drift, *place, *network]) == 0
    again, direct = retime(str(tmp_path / "tiny-plain"), SLOW), tmp_path / "tiny-slow"
    assert column(again, "recovery_seconds") == column(direct, "recovery_seconds")
    told = [json.loads((f / "summary.json").read_text())["drift"] for f in (again, direct)]
    assert told[0] == told[1] != []


def test_a_retimed_run_can_be_retimed(runs):
    once = retime(str(runs / "tiny-plain"), NETWORKS["shared"])
    again = retime(str(once), ["--delay.name", "constant", *SLOW])
    assert column(again, "virtual_seconds") == column(runs / "tiny-slow", "virtual_seconds")


def test_only_times_may_change(runs):
    with pytest.raises(UserError, match=r"algorithm = .*: re-timing changes only network"):
        retime(str(runs / "tiny-plain"), ["--algorithm.name", "fedavg"])
    with pytest.raises(UserError, match=r"network\.uplink_bytes_s = -1"):
        retime(str(runs / "tiny-plain"), ["--network.uplink_bytes_s", "-1"])


@pytest.mark.parametrize("which", ["run", "sweep"])
def test_a_copy_has_the_files_of_its_run_and_a_place_and_label_of_its_own(which, runs, tmp_path):
    folder = runs / "tiny-plain"
    if which == "sweep":
        place = ["--output.folder", str(tmp_path), "--output.id", "s", "--rounds", "1", "-q"]
        assert cli.main(["sweep", str(TINY), "--vary", "{seed: [0]}", *place]) == 0
        folder = tmp_path / "tiny-s"
    for name, value in (
        *(("clients", "none"), ("updates", "true"), ("model", "false"), ("client_models", "true")),
        *(("callbacks", "[tensorboard]"), ("foldr", "x")),
    ):
        with pytest.raises(UserError, match=rf"output\.{name} = .*changes only folder, id, label"):
            retime(str(folder), [*SLOW, f"--output.{name}", value])
    place = {"folder": str(tmp_path / "there"), "id": which, "label": "slow"}
    again = retime(str(folder), [*SLOW, "--output", str(place)])
    assert again == tmp_path / "there" / f"tiny-{which}"
    kept = yaml.safe_load((again / ("sweep.yaml" if which == "sweep" else "config.yaml")).read_text())
    assert kept["output"]["label"] == "slow"


def test_a_second_copy_in_another_folder_has_a_number(runs, tmp_path):
    options = [*SLOW, "--output.folder", str(tmp_path)]
    names = [retime(str(runs / "tiny-plain"), options).name for _ in range(2)]
    assert names == ["tiny-plain-wireless-slow", "tiny-plain-wireless-slow~1"]


def test_seconds_of_samples_that_change_from_visit_to_visit_are_not_computed(tmp_path):
    """A run folder has the samples of one visit of each client."""
    ccfl = (
        "{name: ccfl, clusters: 2, clients: 8, smallest: 20, largest: 40, test_images: 9, public: 9, exam: 9}"
    )
    (tmp_path / "phone.csv").write_text("device,seconds_per_sample\nphone,10ms\n")
    phone = ["--devices", f"{{name: measured, file: {tmp_path / 'phone.csv'}}}"]
    place = ["--output.folder", str(tmp_path), "--output.id", "drift", "--rounds", "2", "-q"]
    assert cli.main(["run", str(TINY), "--algorithm", "fedavg", "--data.scenario", ccfl, *place]) == 0
    with pytest.raises(UserError, match=r"devices = .*: has seconds per sample, and .* change"):
        retime(str(tmp_path / "tiny-drift"), phone)
    assert retime(str(tmp_path / "tiny-drift"), SLOW).is_dir()


def test_a_sweep_is_retimed_beside_it_and_what_depends_on_the_network_is_left(tmp_path):
    """Each copy has the times of a run under that network; the asynchronous case is for `mpifl resume`."""
    vary = "{policy: {rounds: rounds, async: every_arrival}, seed: [0, 1], local.lr: [0.1]}"
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "-q"]
    method = ["--algorithm", "fedasync", "--participation", "0.5", "--evaluation.every", "1"]
    only = ["--only", "policy=rounds", "--only", "seed=0"]
    assert cli.main(["sweep", str(TINY), *method, "--vary", vary, *place, *only]) == 0
    folder, text = retimed(str(tmp_path / "tiny-x"), THIN)
    assert folder == tmp_path / "tiny-x-links"
    assert "3 of 4 cases have no copy (not complete there, or asynchronous: which upload" in text
    assert {p.name for p in folder.iterdir()} == {
        *("sweep.yaml", "sweep.csv", "sweep.md", "sweep.png", "tiny-rounds-0-0.1")
    }
    direct = [*method, "--policy", "rounds", "--seed", "0", *place[:2], "--output.id", "direct", "-q", *THIN]
    assert cli.main(["run", str(TINY), *direct]) == 0
    for name in ("virtual_seconds", "accuracy_mean"):
        assert column(folder / "tiny-rounds-0-0.1", name) == column(tmp_path / "tiny-direct", name)
    assert cli.main(["resume", str(folder), "-q"]) == 0
    with (folder / "sweep.csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == 4
    one, _ = retimed(str(tmp_path / "tiny-x" / "tiny-rounds-0-0.1"), THIN)
    assert one == tmp_path / "tiny-rounds-0-0.1-links", "beside the sweep, not inside"
    again, _ = retimed(str(tmp_path / "tiny-x"), [*THIN, "--output.id", "mine"])
    assert again == tmp_path / "tiny-mine"


def test_what_a_sweep_varies_is_not_changed_for_all_of_its_cases(tmp_path):
    place = ["--output.folder", str(tmp_path), "--output.id", "x", "-q", "--rounds", "1"]
    links = "{name: links, uplink_bytes_s: %d}"
    vary = f"{{network: {{thin: {links % 3000}, wide: {links % 30000}}}}}"
    assert cli.main(["sweep", str(TINY), "--vary", vary, *place]) == 0
    with pytest.raises(UserError, match=r"network = .*case thin has another one, by what the sweep varies"):
        retimed(str(tmp_path / "tiny-x"), ["--network", "{name: links, uplink_bytes_s: 10}"])
    folder, _ = retimed(str(tmp_path / "tiny-x"), ["--delay", "uniform"])
    assert folder == tmp_path / "tiny-x-uniform"
    with (folder / "sweep.csv").open() as lines:
        assert [row["network"] for row in csv.DictReader(lines)] == ["thin", "wide"]


def test_a_sweep_without_a_run_that_can_be_copied_is_refused(tmp_path):
    for name, policy, message in (
        ("a", "every_arrival", "which upload comes first"),
        ("b", "rounds", "no complete"),
    ):
        folder = tmp_path / f"tiny-{name}"
        folder.mkdir()
        tree = f"base: {TINY}\nname: tiny\nalgorithm: fedasync\nvary: {{policy: [{policy}]}}\n"
        (tmp_path / "c.yaml").write_text(tree)
        whole = loader.read(str(tmp_path / "c.yaml"))
        (folder / "sweep.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        with pytest.raises(UserError, match=message):
            retimed(str(folder), SLOW)


def test_an_asynchronous_run_is_not_retimed(runs):
    options = ["--policy", "every_arrival", "--algorithm", "fedasync", "--rounds", "2"]
    place = ["--output.folder", str(runs), "--output.id", "async", "-q"]
    assert cli.main(["run", str(TINY), *options, *place]) == 0
    with pytest.raises(UserError, match="which upload comes first depends on the network"):
        retime(str(runs / "tiny-async"), NETWORKS["slow"])


@pytest.mark.parametrize("options", [[], ["--output.label", "x"], ["--network", "links"]])
@pytest.mark.parametrize("which", ["run", "sweep"])
def test_a_copy_with_equal_times_is_refused(which, options, runs, tmp_path):
    folder = runs / "tiny-plain"
    if which == "sweep":
        place = ["--output.folder", str(tmp_path), "--output.id", "s", "--rounds", "1", "-q"]
        assert cli.main(["sweep", str(TINY), "--vary", "{seed: [0]}", *place]) == 0
        folder = tmp_path / "tiny-s"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(UserError, match=r"RUN = .*: its times stay as they are; give another network, delay"):
        retime(str(folder), options)
    assert sorted(folder.parent.iterdir()) == before


def test_a_file_of_the_same_name_that_has_changed_since_is_another_delay(tmp_path):
    file = tmp_path / "delays.csv"
    for seconds in ("1", "2"):
        file.write_text("client,seconds\n" + "".join(f"{k},{seconds}\n" for k in range(8)))
        delay = ["--delay", f"{{name: measured, file: {file}}}"]
        _durations.cache_clear()
        if seconds == "1":
            place = ["--output.folder", str(tmp_path), "--output.id", "a", "-q"]
            assert cli.main(["run", str(TINY), *delay, *place]) == 0
    again = retime(str(tmp_path / "tiny-a"), delay)
    assert (column(tmp_path / "tiny-a", "virtual_seconds")[-1], column(again, "virtual_seconds")[-1]) == (
        "2.0",
        "4.0",
    )


def test_the_help_names_the_keys(capsys):
    with pytest.raises(SystemExit):
        cli.main(["retime", "--help"])
    said = capsys.readouterr().out
    assert all(key in said for key in ("network", "delay", "availability", "devices", "output.label"))
