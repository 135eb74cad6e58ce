"""Measurements beside those of `mpifl bench`: forecasts, populations, and their command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from campaigns import forecast, population, reclustering
from support.measurements import command

from mpifl.core.errors import UserError

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


def forecast_of(words):
    return command("forecasts", forecast.measure_forecasts, {"turns": 3}, words)


def test_the_forecast_of_plans_is_compared_turn_by_turn(monkeypatch, tmp_path):
    """A forecast of 90 s for runs that took 60, 120 and 90."""
    took = iter((60.0, 120.0, 90.0))

    def command_of(words):
        assert words[1:5] == ["c.yaml", "--rounds", "2", "--seed"]
        return ("a round ...; 90 s of processors in all", 9.0) if words[0] == "plan" else ("", next(took))

    monkeypatch.setattr(forecast, "RUNS", {"small": ("c.yaml", "--rounds", "2")})
    monkeypatch.setattr(forecast, "_mpifl", command_of)
    file = tmp_path / "figures.json"
    assert forecast_of(["--turns", "3", "--json", str(file), "--seed", "1"]) == 0
    ratio = {"median": 1.0, "low": 0.75, "high": 1.5}
    assert json.loads(file.read_text()) == {"small": {"foretold": 90.0, "taken": 90.0, "ratio": ratio}}


@pytest.mark.nightly
def test_a_plan_is_measured_beside_its_run(monkeypatch, capsys):
    monkeypatch.setattr(forecast, "RUNS", {"small": (TINY, "--rounds", "2")})
    figures = forecast.measure_forecasts(1, ["--local.epochs", "2"])["small"]
    assert figures["ratio"]["median"] == figures["foretold"] / figures["taken"] > 0
    assert f"{figures['taken']:.2f} taken" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_plan_that_is_refused_is_told_of(monkeypatch):
    monkeypatch.setattr(forecast, "RUNS", {"small": (TINY, "--rounds", "2")})
    with pytest.raises(UserError, match=r"mpifl plan .*--rounds 2 --epochs 2.*unknown key"):
        forecast.measure_forecasts(1, ["--epochs", "2"])
    monkeypatch.setattr(forecast, "_mpifl", lambda _: ("a round ...; 2 min 5 s of processors in all", 1.0))
    with pytest.raises(UserError, match="use fewer --rounds"):
        forecast.measure_forecasts(1, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy every_arrival", "only synchronous rounds"),
        ("--rounds 3", "rounds = 3: the measurement"),
        ("--data.scenario.clients 7", "data.scenario.clients = 7: the measurement"),
        ("--turns 0", "--turns = 0: use 1 or more"),
    ],
)
def test_what_a_measurement_chooses_or_cannot_measure_is_refused(monkeypatch, capsys, options, message):
    monkeypatch.setattr(population, "Job", None)
    defaults = {"ranks": 3, "turns": 7}
    assert command("populations", population.compare_populations, defaults, options.split()) == 2
    assert message in capsys.readouterr().err


def test_what_clustering_again_costs_is_measured_of_each_method(tmp_path, capsys):
    file = tmp_path / "figures.json"
    defaults = {"clients": 1000, "new": 10, "turns": 5}
    words = ["--clients", "24", "--new", "4", "--turns", "2", "--json", str(file)]
    assert command("clustering", reclustering.measure, defaults, words) == 0
    figures = json.loads(file.read_text())["ms"]
    assert figures.keys() == reclustering.CASES.keys()
    assert all(0 < f["low"] <= f["median"] <= f["high"] for f in figures.values())
    assert command("clustering", reclustering.measure, defaults, ["--new", "600"]) == 2
    assert "--new = 600" in capsys.readouterr().err
