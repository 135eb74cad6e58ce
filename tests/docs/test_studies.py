"""The examples of studies and launchers: Optuna in one process and over ranks, Hydra, submitit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import toy

import mpifl
from mpifl.core.imports import load_object

STUDIES = Path(mpifl.__file__).parents[1] / "docs" / "examples" / "studies"


def runs(folder: Path) -> dict[str, mpifl.Run]:
    """Return the runs anywhere in a folder, by the paths of their folders in it."""
    files = sorted(folder.rglob("summary.json"))
    return {file.parent.relative_to(folder).as_posix(): mpifl.load(file.parent) for file in files}


def program(name: str, *words: str, folder: Path) -> str:
    """Run an example in a folder, in a process of its own; return what it printed."""
    command = [sys.executable, str(STUDIES / name), *words]
    environment = {**os.environ, **toy.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_study_prunes_trials_whose_runs_are_complete_and_short(tmp_path):
    study = load_object(str(STUDIES / "optuna_study.py:main"), "example")(str(tmp_path), "4")
    found = runs(tmp_path)
    assert [trial.state.name for trial in study.trials] == [*["COMPLETE"] * 3, "PRUNED"]
    for trial in study.trials:
        run = found[f"study-trial-{trial.number}"]
        reported = run.metrics["accuracy_mean"].tolist()
        assert [*trial.intermediate_values.values()] == reported
        assert run.summary["rounds"] == len(reported)
        assert run.config["local"]["lr"] == trial.params["lr"]
        assert bool(run.ended) == (trial.state.name == "PRUNED") == (len(reported) < 12)
    assert study.best_value == max(run.summary["accuracy_mean"] for run in found.values() if not run.ended)


@pytest.mark.nightly
def test_a_study_over_ranks_runs_its_batches_as_sweeps(mpirun, tmp_path):
    """Each case reports to its trial from its own group of ranks; Optuna's journal knows all of them."""
    end = mpirun(4, STUDIES / "optuna_jobs.py", tmp_path, "3", "2", env=toy.PYTHONPATH, timeout=300)
    assert end.returncode == 0, end.stderr
    study = load_object(str(STUDIES / "optuna_jobs.py:opened"), "example")(str(tmp_path / "journal.log"))
    found = {run.summary["settings"]["local"]["lr"]: run for run in runs(tmp_path).values()}
    assert len(study.trials) == len(found) == 6
    for trial in study.trials:
        run = found[trial.params["lr"]]
        assert [*trial.intermediate_values.values()] == run.metrics["accuracy_mean"].tolist()
        assert run.summary["ranks"] == 2
        assert (trial.state.name == "PRUNED") == bool(run.ended)
    assert f"best: trial {study.best_trial.number}" in end.stdout


@pytest.mark.nightly
def test_hydra_makes_the_configuration_and_the_folder(tmp_path):
    program("hydra_launch.py", "--multirun", "local.lr=0.02,0.1", "rounds=2", folder=tmp_path)
    found = [*runs(tmp_path).values()]
    assert [run.config["local"]["lr"] for run in found] == [0.02, 0.1]
    assert {run.summary["rounds"] for run in found} == {2}
    assert {run.folder.parent.name for run in found} == {"0", "1"}


@pytest.mark.nightly
def test_submitit_submits_runs_that_go_on_when_they_are_submitted_again(tmp_path):
    words = "local", "rates", "0.02", "0.1"
    first = program("submitit_launch.py", *words, folder=tmp_path)
    found = runs(tmp_path)
    assert [*found] == ["rates/rate-0.02", "rates/rate-0.1"]
    assert f"lr 0.1: accuracy {found['rates/rate-0.1'].summary['accuracy_mean']:.3f}" in first
    identity = json.loads((found["rates/rate-0.1"].folder / "run.json").read_text())["id"]
    assert program("submitit_launch.py", *words, folder=tmp_path) == first
    assert json.loads((found["rates/rate-0.1"].folder / "run.json").read_text())["id"] == identity
