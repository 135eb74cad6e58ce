"""Whole private runs: epsilon wherever it is told, equal to the library's for the same schedule."""

from __future__ import annotations

import csv
import json
from math import isclose
from pathlib import Path

import pytest
from support.runs import CONFIG

from mpifl import cli
from mpifl.experiment.starting_model import earlier_privacy
from mpifl.protection.accountant import Accountant
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy, Privacy

dp = pytest.importorskip("dp_accounting")
RELATION = dp.NeighboringRelation
HALF = ["--participation", "0.5", "--rounds", "3", "--evaluation.every", "1"]
METHODS = {"fedavg": "fedavg", "ifca": "{name: ifca, num_clusters: 2}"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache of prepared data that all runs share."""
    return tmp_path_factory.mktemp("cache")


def run(folder: Path, cache: Path, *options: str) -> Path:
    """Return the folder of a run of 8 clients, 4 of whom take part in each of 3 rounds."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(cache)]
    assert cli.main(["run", str(CONFIG), *place, *HALF, *options]) == 0
    return folder / "tiny-x"


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def epsilons(event, times: int, relation) -> list[float]:
    """Return what the library says after 0, 1, ... and so many times of an event."""
    accountant, out = dp.rdp.RdpAccountant(neighboring_relation=relation), [0.0]
    for _ in range(times):
        accountant.compose(event)
        out.append(accountant.get_epsilon(1e-4))
    return out


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("fedavg", "fixed"),
        ("ifca", "poisson"),
        pytest.param("ifca", "fixed", marks=pytest.mark.nightly),
        pytest.param("fedavg", "poisson", marks=pytest.mark.nightly),
    ],
)
def test_epsilon_of_a_run_is_the_librarys_for_its_schedule(method, sampling, tmp_path, cache, capsys):
    """4 of 8 clients without replacement, sensitivity 2 C; or each with probability 1/2, sensitivity C."""
    chosen = f"{{name: central, clip: 0.5, noise_multiplier: 3, delta: 1.0e-4, sampling: {sampling}}}"
    folder = run(tmp_path, cache, "--algorithm", METHODS[method], "--privacy", chosen)
    if sampling == "fixed":
        event = dp.SampledWithoutReplacementDpEvent(8, 4, dp.GaussianDpEvent(1.5))
        expected = epsilons(event, 3, RELATION.REPLACE_ONE)[1:]
    else:
        event = dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(3.0))
        expected = epsilons(event, 3, RELATION.ADD_OR_REMOVE_ONE)[1:]
    told = [float(row["epsilon"]) for row in rows(folder / "metrics.csv")]
    assert all(isclose(a, b, rel_tol=1e-12) for a, b in zip(told, expected, strict=True))
    about = json.loads((folder / "summary.json").read_text())["privacy"]
    assert isclose(about["epsilon"], expected[-1], rel_tol=1e-12)
    assert about["delta"] == 1e-4
    assert f"epsilon {expected[-1]:.3g}" in capsys.readouterr().out
    options = ["--algorithm", METHODS[method], "--privacy", chosen, "--data.cache", str(cache), *HALF]
    assert cli.main(["plan", str(CONFIG), *options]) == 0
    assert f"epsilon = {expected[-1]:.4g} at delta = 0.0001 after 3 rounds" in capsys.readouterr().out


def test_local_privacy_tells_epsilon_of_each_client_by_its_visits(tmp_path, cache):
    chosen = "{name: local, clip: 0.5, noise_multiplier: 3, delta: 1.0e-4}"
    folder = run(tmp_path, cache, "--privacy", chosen)
    visits = [0] * 8
    for row in rows(folder / "visits.csv"):
        visits[int(row["client"])] += 1
    known = epsilons(dp.GaussianDpEvent(1.5), max(visits), RELATION.REPLACE_ONE)
    assert len(set(visits)) > 1
    for row in rows(folder / "clients.csv"):
        assert isclose(float(row["epsilon"]), known[visits[int(row["client"])]], rel_tol=1e-12)
    last = rows(folder / "metrics.csv")[-1]
    assert isclose(float(last["epsilon"]), known[max(visits)], rel_tol=1e-12)


@pytest.mark.in_turn
def test_a_run_from_the_model_of_a_private_run_adds_what_that_run_spent(tmp_path, cache, capsys):
    """3 rounds, and 3 more of another noise over the same clients: as the library composes all six."""
    chosen = "{{name: central, clip: 0.5, noise_multiplier: {}, delta: 1.0e-4}}"
    earlier = run(tmp_path / "a", cache, "--privacy", chosen.format(3))
    capsys.readouterr()
    folder = run(tmp_path / "b", cache, "--privacy", chosen.format(5), "--start.run", str(earlier))
    assert "same clients; it is contained in the epsilon" in capsys.readouterr().err
    library = dp.rdp.RdpAccountant(neighboring_relation=RELATION.REPLACE_ONE)
    for z in (3, 5):
        library.compose(dp.SampledWithoutReplacementDpEvent(8, 4, dp.GaussianDpEvent(z / 2)), 3)
    expected = library.get_epsilon(1e-4)
    assert isclose(float(rows(folder / "metrics.csv")[-1]["epsilon"]), expected, rel_tol=1e-12)
    about = json.loads((folder / "summary.json").read_text())["privacy"]
    assert isclose(about["epsilon"], expected, rel_tol=1e-12)
    assert [(one["noise_multiplier"], one["times"]) for one in about["spent"]] == [(3, 3), (5, 3)]
    plain = run(tmp_path / "c", cache)
    capsys.readouterr()
    weights = ["--model.weights", str(plain / "model.safetensors")]
    assert cli.main(["plan", str(CONFIG), *HALF, "--privacy", chosen.format(3), *weights]) == 0
    assert "does not cover what its model tells" in capsys.readouterr().err


SPENT = {"sampling": "fixed", "noise_multiplier": 3.0, "num_clients": 4, "num_sampled": 2, "times": 3}
DATA = {"samples": "s", "split": "p"}


@pytest.mark.parametrize(
    ("earlier", "data", "privacy", "added", "said"),
    [
        ({"epsilon": 1.5, "spent": [SPENT]}, DATA, CentralPrivacy(1.0), 1, "is contained"),
        ({"epsilon": 1.5, "spent": [SPENT]}, DATA, LocalPrivacy(1.0), 1, "is contained"),
        ({"epsilon": 1.5, "spent": [SPENT]}, DATA, CentralPrivacy(1.0, sampling="poisson"), 0, "otherwise"),
        ({"epsilon": 1.5, "spent": [{**SPENT, "num_clients": 5}]}, DATA, CentralPrivacy(1.0), 0, "otherwise"),
        ({"epsilon": 1.5, "spent": [{"times": 3}]}, DATA, CentralPrivacy(1.0), 0, "does not say how"),
        ({"epsilon": 1.5}, DATA, CentralPrivacy(1.0), 0, "does not say how"),
        ({"epsilon": 1.5, "spent": [SPENT]}, {**DATA, "split": "q"}, CentralPrivacy(1.0), 0, "divided"),
        ({"epsilon": 1.5, "spent": [SPENT]}, {}, CentralPrivacy(1.0), 0, "not known"),
        ({"epsilon": 1.5, "spent": [SPENT]}, {"samples": "t", "split": "p"}, CentralPrivacy(1.0), 0, ""),
        ({"epsilon": 1.5, "spent": [SPENT]}, DATA, Privacy(), 0, "no epsilon holds"),
        ({}, DATA, CentralPrivacy(1.0), 0, "does not cover"),
        ({}, DATA, Privacy(), 0, ""),
    ],
)
def test_what_cannot_be_added_is_said(earlier, data, privacy, added, said, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"data": data, "privacy": earlier}))
    found = earlier_privacy("start.run", str(tmp_path), DATA, Accountant(privacy, 4, 2))
    assert len(found.spent) == added
    assert said in found.line
    assert bool(said) == bool(found.line)


@pytest.mark.parametrize("late", ["sent", "stopped"])
def test_uploads_that_come_too_late_are_sent_all_the_same(late, tmp_path, cache, capsys):
    """Of 8 drawn clients 4 are waited for; the noise of the others' uploads is all that hides them."""
    rounds = ["--policy", f"{{name: over_selection, extra: 1.0, late: {late}}}", "--delay", "exponential"]
    chosen = ["--privacy", "{name: local, clip: 0.5, noise_multiplier: 3, delta: 1.0e-4}"]
    folder = run(tmp_path, cache, *rounds, *chosen)
    visits = [0] * 8
    for row in rows(folder / "visits.csv"):
        visits[int(row["client"])] += int(row["bytes_up"]) > 0
    assert (visits == [3] * 8) == (late == "sent")
    known = epsilons(dp.GaussianDpEvent(1.5), 3, RELATION.REPLACE_ONE)
    for row in rows(folder / "clients.csv"):
        assert isclose(float(row["epsilon"]), known[visits[int(row["client"])]], rel_tol=1e-12)
    told = [float(row["epsilon"]) for row in rows(folder / "metrics.csv")]
    assert isclose(told[-1], known[max(visits)], rel_tol=1e-12)
    about = json.loads((folder / "summary.json").read_text())["privacy"]
    assert isclose(about["epsilon"], known[max(visits)], rel_tol=1e-12)


def test_the_forecast_of_masked_traffic_is_the_ledger(tmp_path, cache):
    folder = run(tmp_path, cache, "--secure_aggregation", "{name: masks, neighbours: 2, bits: 32}")
    summary = json.loads((folder / "summary.json").read_text())
    expected = summary["federation_bytes_expected"]
    assert expected["why"] == ""
    assert expected["up"] == summary["federation_bytes_up"] == 3 * 4 * (64 + 4 + 2 * 124 + 4 * 910)
    assert expected["down"] == summary["federation_bytes_down"]
    assert rows(folder / "metrics.csv")[-1]["secure_dropped"] == "0"
