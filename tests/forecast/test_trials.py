"""What fails after training only is tried before it; a failure at the end leaves the other results."""

from __future__ import annotations

import pytest
from support.runs import CONFIG

from mpifl import cli
from mpifl.results.run_folder import is_complete

METRICS = """
def broken(outputs, labels):
    raise ZeroDivisionError("so it is")

def text(outputs, labels):
    return "good"
"""
METHOD = """
from dataclasses import dataclass
from mpifl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def evaluate(self, message, state, client, split):
        return client.evaluate(message["model"][0], split)

    def model_of(self, message, state, client):
        if client.id == 5:
            raise ZeroDivisionError("client 5")
        return message["model"][0]
"""


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("broken", 1, "own.py:broken, client 0: ZeroDivisionError: so it is"),
        ("text", 2, "own.py:text: client 0: returned str"),
    ],
)
def test_a_metric_that_fails_is_told_before_training(tmp_path, capsys, name, code, says):
    (tmp_path / "own.py").write_text(METRICS)
    options = ["--evaluation.metrics", f"[{tmp_path / 'own.py'}:{name}]", "--output.folder", str(tmp_path)]
    for command in ("run", "plan"):
        assert cli.main([command, str(CONFIG), *options, "-q"]) == code
        assert says in capsys.readouterr().err
    assert not [*tmp_path.glob("*/run.json")]


@pytest.mark.parametrize(
    ("policy", "rows", "says"),
    [
        ("every_arrival", ["1,0,0,0,0", "2,1,0,0,0", "3,2,0,0,7"], "the trace ends before the run"),
        (
            "every_arrival",
            ["1,0,0,0,0", "2,1,0,1,0", "3,2,0,2,1"],
            "client 1': reads version 0, and the server is at 1",
        ),
        ("barrier", ["1,0,0,0,0", "2,1,0,0,0", "3,0,1,1,3", "4,1,1,2,1"], "client 0 reads version 3"),
    ],
)
def test_arrivals_that_are_not_those_of_such_a_run_are_told_before_training(
    tmp_path, capsys, policy, rows, says
):
    trace = tmp_path / "events.csv"
    trace.write_text("\n".join(["time,client,visit,start,read_version", *rows]))
    options = ["--clock", f"{{name: replay, trace: {trace}}}", "--output.folder", str(tmp_path)]
    options += ["--policy", policy, "--cohort_size", "2", "--rounds", "3"]
    assert cli.main(["run", str(CONFIG), *options, "-q"]) == 2
    assert says in capsys.readouterr().err
    assert not [*tmp_path.glob("*/run.json")]


def test_a_model_that_cannot_be_written_leaves_the_other_results(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(METHOD)
    options = ["--algorithm.name", f"{tmp_path / 'mine.py'}:Mine", "--output.client_models", "true"]
    options += ["--output.folder", str(tmp_path), "--output.id", "a", "-q"]
    assert cli.main(["run", str(CONFIG), *options]) == 1
    assert "client 5" in capsys.readouterr().err
    folder = tmp_path / "tiny-a"
    assert is_complete(folder)
    assert (folder / "model.safetensors").exists()
    assert not (folder / "client_models.safetensors").exists()
    assert cli.main(["resume", str(folder), "-q"]) == 0, "there is nothing left to do"
