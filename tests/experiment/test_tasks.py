"""Runs of every task: measured by the task's metric; refusals. test_digests has them on several ranks."""

from __future__ import annotations

import numpy as np
import pytest
from support.runs import TASK_CONFIG, TASK_RUNS, TASKS, Alone

from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.analysis.comparison import Choices, compare
from mpifl.analysis.comparison_tables import final_table
from mpifl.analysis.report import report
from mpifl.results.reader import load

FEW = ("fedavg", "fedem")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Alone:
    """The runs of this process."""
    cache = tmp_path_factory.mktemp("cache")
    return Alone(tmp_path_factory.mktemp("runs"), TASK_RUNS, "--data.cache", str(cache))


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_measured_by_its_metric(task, alone):
    """It learns, all figures are finite, and sums stay out of files."""
    run = load(alone.of(f"{task}-fedavg"))
    metric, series = run.metric, run.series
    values = series[f"{metric.name}_mean"]
    assert series["loss"][-1] < series["loss"][0]
    assert run.summary[f"{metric.name}_mean"] == pytest.approx(values[-1])
    for name in ("mean", "worst", "std", "worst_tenth", "pooled"):
        assert np.isfinite(series[f"{metric.name}_{name}"]).all()
    worst = series[f"{metric.name}_worst"]
    assert (metric.better * worst <= metric.better * values).all()
    assert not any("sums" in name for name in (*series, *run.rows("clients.csv")[0]))
    assert run.model(client=0)(next(iter(_inputs(run)))).shape[-1] == run.summary["num_classes"]


def _inputs(run):
    from mpifl.data import DataConfig, open_federation
    from mpifl.experiment.loader import from_tree

    federation = open_federation(from_tree(DataConfig, dict(run.config["data"])), 0)
    yield federation.client(0).train.x[:2]


@pytest.mark.usefixtures("no_figures")
def test_tables_and_reports_speak_of_the_metric(alone, tmp_path):
    found = compare([str(alone.of(f"regression-{m}")) for m in FEW], Choices(target=0.9))
    table = final_table(found)
    assert "mean squared error" in table.columns
    assert "target: mean mean squared error 0.9" in table.notes[0]
    best = min(float(run.summary["mse_mean"]) for group in found.groups for run in group.runs)
    column = found.column("accuracy")
    winner = found.groups[found.best(found.problems[0], column)].runs[0]
    assert winner.summary["mse_mean"] == best
    page = report([str(alone.of(f"next_token-{m}")) for m in FEW], str(tmp_path)).read_text()
    assert "best mean perplexity" in page
    assert "accuracy, %" not in page.split("<script")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--task", "next_token"],
            "task.name = 'next_token': labels of this source are numbers; use regression",
        ),
        ([], "task.name = 'classification': labels of this source are numbers; use regression"),
        ([*TASKS["next_token"], "--model", "mlp"], "model.name = 'mlp': takes images or features"),
        (["--task", "regression", "--model", "emdcfl_cnn"], "model.name = 'emdcfl_cnn'"),
        (["--task", "regression", "--data.scenario", "dirichlet"], "data.scenario.name = 'dirichlet'"),
        (["--task", "regression", "--data.scenario", "rotated"], "data.scenario.name = 'rotated'"),
        ([*TASKS["regression"], "--attack", "{name: label_flip, share: 0.5}"], "attack.name = 'label_flip'"),
        (["--task.metrics", "[mse]"], "task.metrics = ['mse']: use some of accuracy"),
        *(
            (["--task", "regression", "--algorithm", name], "algorithm.name = ")
            for name in ("fedrc", "pacfl")
        ),
        (["--task", "regression", "--algorithm", "flexcfl"], "it reads the classes of samples"),
        (["--task", "regression", "--algorithm", "flt"], "samples are not images"),
        (
            ["--task", "regression", "--local.augment", "crop_flip"],
            "local.augment = 'crop_flip': shifts and mirrors images [C, H, W], but samples of this source",
        ),
        (
            ["--task", "regression", "--per_client", "{1: {augment: crop_flip}}"],
            "per_client.1.augment = 'crop_flip': shifts and mirrors images",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, message, tmp_path, capsys):
    place = ["--data.cache", str(tmp_path / "cache"), "--output.folder", str(tmp_path)]
    assert cli.main(["run", str(TASK_CONFIG), "--quiet", *place, *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1], said


def test_methods_that_read_classes_say_so():
    """What names labels in its file declares it."""
    declared = {name for name, cls in CATALOGUE.items() if cls().needs.classes}
    assert declared == {
        "ccfl",
        "fedccfa",
        "feddrift",
        "fedrc",
        "fedsoft_async",
        "fielding",
        "flexcfl",
        "flt",
        "pacfl",
    }
