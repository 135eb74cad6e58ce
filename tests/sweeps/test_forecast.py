"""How long a sweep takes: the total of a stratified sample by hand, which cases are measured, the lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import yaml
from numpy.testing import assert_allclose
from support.runs import CONFIG

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.sweeps import forecast
from mpifl.sweeps.cases import read, unchecked_cases, with_configurations
from mpifl.sweeps.forecast import Stratum, chosen, lines, total_of

VARY = "{algorithm: [fedavg, {name: ifca, num_clusters: 2}], local.lr: [0.1, 0.2, 0.3], seed: [0, 1]}"


def tree(vary: str = VARY) -> dict[str, Any]:
    """Return the configuration of a sweep of small runs: two methods, three rates, two seeds."""
    return read(str(CONFIG), ["--vary", vary])


def test_the_total_of_a_stratified_sample():
    """4 cases of 2 s and 4 s (mean 3), 2 cases both measured at 10 s: 12 + 20 s.

    The first stratum's deviation is sqrt(2): variance 16 * 2 / 2 * (1 - 2 / 4) = 8; the second has none left.
    """
    found = total_of([Stratum(4, [2.0, 4.0]), Stratum(2, [10.0, 10.0])], longest=10.0)
    assert_allclose([found.total, found.error, found.longest], [32.0, 8**0.5, 10.0])
    low, mean, high = found.wall(2)
    assert mean == 16.0
    assert_allclose(low, (32 - 2 * 8**0.5) / forecast.OFF / 2)
    assert_allclose(high, (32 + 2 * 8**0.5) * forecast.OFF / 2 + 10)


def test_a_stratum_of_one_measured_case_has_the_relative_deviation_of_the_others():
    """sqrt(2) / 3 of the mean: of 6 s it is 2 sqrt(2); one of 3 cases is known: 9 * 8 * (1 - 1/3) = 48."""
    found = total_of([Stratum(2, [2.0, 4.0]), Stratum(3, [6.0])], longest=6.0)
    assert_allclose([found.total, found.error], [24.0, 48**0.5])


def test_a_single_case_that_is_measured_leaves_no_error_of_the_sample():
    assert total_of([Stratum(1, [5.0])], longest=5.0) == forecast.SweepTime(5.0, 0.0, 5.0)


def test_as_many_cases_of_each_value_of_the_first_key_are_measured():
    cases = unchecked_cases(with_configurations(tree()))
    strata = chosen(cases, 4)
    assert [count for count, _ in strata] == [6, 6]
    assert Counter(case.labels["algorithm"] for _, some in strata for case in some) == {
        "fedavg": 2,
        "ifca": 2,
    }
    titles = [case.title for _, some in strata for case in some]
    assert len({*titles}) == 4
    assert titles == [case.title for _, some in chosen(cases, 4) for case in some], "drawn by a fixed key"
    assert sum(len(some) for _, some in chosen(cases, 100)) == 12


def test_the_lines_say_how_long_and_how_it_was_estimated(monkeypatch):
    """FedAvg takes 60 s, IFCA 120 s: 6 of each are 18 minutes of a core, 9 minutes with two at a time."""
    monkeypatch.setattr(forecast, "available_cores", lambda: 2)
    of = {"fedavg": 60.0, "ifca": 120.0}
    said = lines(tree(), 2, lambda config: of[type(config.algorithm).__name__.lower()], most=4)
    assert said[0].split(maxsplit=1)[1].startswith("12 cases, all trained: about 9 min 0 s with --jobs 2")
    assert "4 cases" in said[1]
    assert "18 min of a free core" in said[1]
    four = lines(tree(), 4, lambda config: 60.0, most=4)
    assert "about 6 min 0 s with --jobs 4" in four[0]
    assert "more than the 2 cores" in four[0]


def test_cases_that_cannot_be_measured_are_counted(monkeypatch):
    def seconds(config: Any) -> float:
        if type(config.algorithm).__name__ == "IFCA":
            raise UserError("algorithm", "ifca", "cannot be measured here")
        return 60.0

    said = lines(tree(), 1, seconds, most=4)
    assert "not counted: 6 cases" in said[-1]
    assert lines(tree("{algorithm: [ifca]}"), 1, seconds)[0].endswith("no case could be measured")


def test_runs_that_are_trained_once_for_several_networks_count_once():
    vary = "{algorithm: [fedavg], network: [{name: wired}, {name: wireless-slow}]}"
    said = lines(tree(vary), 1, lambda config: 60.0)
    assert "2 cases, 1 trained: about 60 s" in said[0]


@pytest.mark.in_turn
def test_plan_says_how_long_a_sweep_takes(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    vary = yaml.safe_load("{algorithm: [fedavg, fedprox], seed: [0, 1]}")
    file.write_text(yaml.safe_dump({"base": str(CONFIG), "vary": vary, "rounds": 2}))
    place = ["--data.cache", str(tmp_path / "cache"), "-q"]
    assert cli.main(["plan", str(file), "--jobs", "1", *place]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sweep ")]
    assert len(said) == 1
    assert "4 cases" in said[0]
    assert cli.main(["plan", str(file), *place]) == 0
    assert "--jobs" in capsys.readouterr().out, "without it, the page says how to ask"


def test_a_sweep_without_a_method_of_its_own_is_planned_by_its_first_case(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    base = yaml.safe_load(CONFIG.read_text())
    del base["algorithm"]
    file.write_text(yaml.safe_dump({**base, "vary": {"algorithm": ["fedprox", "fedavg"]}}))
    assert cli.main(["plan", str(file), "--time", "no", "--data.cache", str(tmp_path / "cache"), "-q"]) == 0
    assert "algorithm fedprox, the first of the sweep" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "x"]])
def test_a_wrong_number_of_jobs_is_refused(words, tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"base": str(CONFIG), "vary": {"seed": [0, 1]}}))
    assert cli.main(["plan", str(file), *words]) == 2
    assert "--jobs" in capsys.readouterr().err


def test_a_run_takes_no_number_of_jobs(capsys):
    assert cli.main(["plan", str(CONFIG), "--jobs", "2"]) == 2
    assert "--jobs = 2" in capsys.readouterr().err
