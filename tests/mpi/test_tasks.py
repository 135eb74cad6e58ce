"""Runs of every task: finite and equal for any number of ranks, measured by the task's metric; refusals.

All runs of one number of ranks share one start of Python (`many.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import worlds
from support.runs import SCRIPT, columns_of

from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.results.comparison import Choices, compare
from mpifl.results.comparison_tables import final_table
from mpifl.results.reader import load
from mpifl.results.report import report

CONFIG = Path(__file__).parents[1] / "configs" / "tasks.yaml"
TOKENS = ["--model", "{name: transformer, width: 8, layers: 1, heads: 2}", "--task", "next_token"]
TASKS = {
    "regression": ["--task", "regression"],
    "multi_label": ["--task", "multi_label", "--data.source.kind", "multi_hot"],
    "next_token": [*TOKENS, "--data.source.kind", "tokens"],
    "classification": [
        *("--data.source.kind", "classes", "--model.hidden", "[]"),
        *("--task.metrics", "[macro_f1, balanced_accuracy, top5]"),
    ],
}
METHODS = {
    "fedavg": [],
    "ifca": ["--algorithm", "{name: ifca, num_clusters: 2}"],
    "fedem": ["--algorithm", "{name: fedem, num_components: 2}"],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 16}"],
    "ucfl": ["--algorithm", "{name: ucfl, noise_batch: 0.5}"],
    "moon": ["--algorithm", "moon"],
}
FEW = ("fedavg", "fedem")
RUNS = {f"{t}-{m}": [*TASKS[t], *METHODS[m]] for t in TASKS for m in METHODS}
FILES = ("metrics.csv", "clients.csv", "clusters.csv", "ledger.csv")


@pytest.fixture(scope="module")
def runs_at(mpirun, tmp_path_factory):
    """Return a function ranks -> folder of its runs; None is one process."""
    done: dict[int | None, Path] = {}
    cache = tmp_path_factory.mktemp("cache")

    def at(ranks: int | None, methods=FEW) -> Path:
        if ranks not in done:
            done[ranks] = tmp_path_factory.mktemp("runs")
            chosen = {name: options for name, options in RUNS.items() if name.split("-")[1] in methods}
            program = (SCRIPT, CONFIG, done[ranks], json.dumps(chosen), "--data.cache", str(cache))
            end = mpirun(ranks, *program, timeout=900, env=worlds.PYTHONPATH)
            assert end.returncode == 0, end.stderr
        return done[ranks]

    return at


def assert_same(one: Path, other: Path, methods) -> None:
    for name in (f"{t}-{m}" for t in TASKS for m in methods):
        a, b = one / f"tiny-{name}", other / f"tiny-{name}"
        digests = [json.loads((f / "summary.json").read_text())["digest"] for f in (a, b)]
        assert digests[0] == digests[1], name
        for file in FILES:
            assert columns_of(a / file) == columns_of(b / file), f"{name}: {file}"


def test_three_ranks_give_the_bits_of_one_process(runs_at):
    assert_same(runs_at(None), runs_at(3), FEW)


@pytest.mark.nightly
def test_any_number_of_ranks_gives_the_bits_of_one_process(mpirun, tmp_path_factory, tmp_path):
    """The wide table: every task with every method, on 1, 2 and 3 ranks."""
    folders = []
    for ranks in (None, 2, 3):
        folders.append(tmp_path_factory.mktemp("wide"))
        program = (SCRIPT, CONFIG, folders[-1], json.dumps(RUNS), "--data.cache", str(tmp_path))
        end = mpirun(ranks, *program, timeout=1800, env=worlds.PYTHONPATH)
        assert end.returncode == 0, end.stderr
    assert_same(folders[0], folders[1], METHODS)
    assert_same(folders[0], folders[2], METHODS)


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_measured_by_its_metric(task, runs_at):
    """It learns, all figures are finite, and sums stay out of files."""
    run = load(runs_at(None) / f"tiny-{task}-fedavg")
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


def test_tables_and_reports_speak_of_the_metric(runs_at, tmp_path):
    found = compare([str(runs_at(None) / f"tiny-regression-{m}") for m in FEW], Choices(target=0.9))
    table = final_table(found)
    assert "mean squared error" in table.columns
    assert "target: mean mean squared error 0.9" in table.notes[0]
    best = min(float(run.summary["mse_mean"]) for group in found.groups for run in group.runs)
    column = found.column("accuracy")
    winner = found.groups[found.best(found.worlds[0], column)].runs[0]
    assert winner.summary["mse_mean"] == best
    page = report([str(runs_at(None) / f"tiny-next_token-{m}") for m in FEW], str(tmp_path)).read_text()
    assert "best mean perplexity" in page
    assert "accuracy, %" not in page.split("<script")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--task", "next_token"],
            "task.name = 'NextToken': labels of this source are numbers; take regression",
        ),
        ([], "task.name = 'Classification': labels of this source are numbers; take regression"),
        ([*TASKS["next_token"], "--model", "mlp"], "model.name = 'MLP': takes images or features"),
        (["--task", "regression", "--model", "emdcnn"], "model.name = 'EmdCNN'"),
        (["--task", "regression", "--data.scenario", "dirichlet"], "data.scenario.name = 'Dirichlet'"),
        (["--task", "regression", "--data.scenario", "rotated"], "data.scenario.name = 'Rotated'"),
        ([*TASKS["regression"], "--attack", "{name: label_flip, share: 0.5}"], "attack.name = 'LabelFlip'"),
        (["--task.metrics", "[mse]"], "task.metrics = ['mse']: take some of accuracy"),
        *(
            (["--task", "regression", "--algorithm", name], "algorithm.name = ")
            for name in ("fedrc", "pacfl")
        ),
        (["--task", "regression", "--algorithm", "flexcfl"], "it reads the classes of samples"),
        (["--task", "regression", "--algorithm", "flt"], "samples are none"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, message, tmp_path, capsys):
    place = ["--data.cache", str(tmp_path / "cache"), "--output.folder", str(tmp_path)]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1], said


def test_methods_that_read_classes_say_so():
    """What names labels in its file declares it."""
    declared = {name for name, cls in CATALOGUE.items() if cls.needs.classes}
    assert declared == {"ccfl", "fedrc", "fedsoft_async", "flexcfl", "flt", "pacfl"}
