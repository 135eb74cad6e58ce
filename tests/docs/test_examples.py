"""The examples run, and do what they say."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import mpifl
from mpifl import cli
from mpifl.core import capabilities
from mpifl.core.capabilities import Capability
from mpifl.core.imports import load_object
from mpifl.core.types import Server

ROOT = Path(mpifl.__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples name their files from the root of the repository."""
    monkeypatch.chdir(ROOT)


def run(config: str, folder: Path, *options: str) -> Path:
    """Run a configuration from the root of the repository; return its run folder."""
    words = ["run", config, "-q", "--output.folder", str(folder), *options]
    assert cli.main(words) == 0
    (out,) = folder.iterdir()
    return out


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    return json.loads((folder / "summary.json").read_text())


def test_the_plain_loop_ends_where_the_engine_does(tmp_path):
    plain = load_object("docs/examples/plain_fedavg.py:main", "example")(3)
    done = run("docs/examples/fedavg.yaml", tmp_path / "runs", "--rounds", "3")
    with (done / "clients.csv").open() as file:
        engine = np.array([float(row["accuracy"]) for row in csv.DictReader(file)])
    assert plain.shape == engine.shape == (12,)
    assert plain.mean() > 0.7
    assert_allclose(plain.mean(), engine.mean(), atol=0.005)
    assert_allclose(plain, engine, atol=0.034)  # two of 60 test images: last bits of averages may differ


def test_the_plain_loop_is_short_and_uses_no_engine():
    source = (EXAMPLES / "plain_fedavg.py").read_text()
    assert source.count("\n") < 120
    for engine in ("mpifl.runtime", "mpifl.aggregation", "mpifl.comm", "mpifl.experiment"):
        assert engine not in source


def test_the_clustered_method_finds_the_rotations(tmp_path):
    done = summary(run("docs/examples/clustered.yaml", tmp_path / "runs", "--rounds", "4"))
    assert done["ari"] == 1.0
    assert done["num_clusters"] == 4


def test_the_clustered_method_with_one_cluster_is_fedavg(tmp_path):
    one = run(
        "docs/examples/clustered.yaml", tmp_path / "one", "--rounds", "4", "--algorithm.num_clusters", "1"
    )
    fedavg = run(
        "docs/examples/clustered.yaml", tmp_path / "fedavg", "--rounds", "4", "--algorithm", "fedavg"
    )
    assert summary(one)["digest"] == summary(fedavg)["digest"]


def test_feddyn_gives_equal_digests(capsys):
    assert cli.main(["check", "docs/examples/feddyn_method.py:FedDyn", "--ranks", "1"]) == 0
    said = capsys.readouterr().out
    assert "ok   the same run again: the same digest" in said
    assert "resumed: the same digest" in said


def test_feddyn_takes_its_server_step_by_hand():
    """alpha 1/2, two of four clients: h <- [0, 0, 1] - 1/4 (mean - x), x <- mean - 2 h."""
    method = load_object("docs/examples/feddyn_method.py:FedDyn", "example")(alpha=0.5)
    nobody = np.zeros(4, np.int64)
    h = torch.tensor([[0.0, 0.0, 1.0]])
    old = Server({"model": torch.tensor([[1.0, 2.0, 3.0, 8.0]]), "h": h}, nobody)  # the last one: a buffer
    mean = torch.tensor([[3.0, 2.0, 1.0, 9.0]])
    new = Server({"model": mean, "h": h}, nobody, {"share": np.array(0.5)}, version=1)
    done = method.server_update(old, new)
    assert_allclose(done.tables["h"], [[-0.5, 0.0, 1.5]])
    assert_allclose(done.tables["model"], [[4.0, 2.0, -2.0, 9.0]])


SKEWED = ("--data.scenario", "{name: dirichlet, clients: 8, alpha: 0.5}", "--participation", "0.5")
DRIFTING = (
    "--data.scenario",
    "{name: ccfl, clusters: 2, clients: 8, smallest: 20, largest: 40, test_images: 20, public: 40, exam: 40}",
    *("--policy", "client_decides", "--rounds", "20"),
)
METHODS: dict[str, tuple[type[Capability], tuple[str, ...]]] = {  # class -> its capability, options
    "LabelClusters": (capabilities.OneShotStatistics, SKEWED),
    "JoiningLabelClusters": (capabilities.NewClients, (*SKEWED, "--newcomers.share", "0.5")),
    "AverageOfAll": (capabilities.RememberedUploads, SKEWED),
    "AgreeingUpdates": (capabilities.ComparedUploads, SKEWED),
    "Transferable": (capabilities.SecondLook, SKEWED),
    "RoutedArrivals": (capabilities.ServerEvaluation, DRIFTING),
    "NearAverage": (capabilities.PlainVisits, SKEWED),
    "PrivateMedley": (capabilities.RowUpdates, ("--privacy", "{name: central, clip: 1.0}")),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_method_of_a_capability_runs(name, tmp_path):
    capability, options = METHODS[name]
    method = f"docs/examples/capabilities.py:{name}"
    assert capability in capabilities.declared(load_object(method, "example"))
    done = summary(run("tests/configs/tiny.yaml", tmp_path / "runs", "--algorithm.name", method, *options))
    assert np.isfinite(done["accuracy_mean"])
    assert len(done["digest"]) == 64


def test_every_capability_has_a_section_and_an_example():
    page = (ROOT / "docs" / "capabilities.md").read_text()
    known = {c for c in vars(capabilities).values() if isinstance(c, type) and issubclass(c, Capability)}
    assert known - {Capability} == {capability for capability, _ in METHODS.values()}
    for name, (capability, _) in METHODS.items():
        assert f"| `{capability.__name__}` |" in page
        assert f"Example: `{name}`" in page


def test_the_asynchronous_sweep_fills_its_table(tmp_path):
    config = "docs/examples/async_study/sweep.yaml"
    words = ["-q", "--output.folder", str(tmp_path), "--rounds", "20", "--vary.seed", "[0]"]
    assert cli.main(["sweep", config, *words]) == 0
    (folder,) = tmp_path.iterdir()
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy.staleness_a"] for row in rows] == ["ignored", "weighed"]
    assert all(float(row["staleness_max"]) > 0 for row in rows)


@pytest.mark.in_turn
def test_adapters_go_on_from_the_model_of_the_first_run(tmp_path):
    folder = ["-q", "--output.folder", str(tmp_path), "--data.source.samples", "160"]
    small = ["--model", "{width: 8, heads: 2, layers: 1}", "--rounds", "1", *folder]
    assert cli.main(["run", "docs/examples/adapters/base.yaml", *small]) == 0
    weights = ["--model.weights", str(tmp_path / "adapters-base" / "model.safetensors")]
    assert (
        cli.main(["sweep", "docs/examples/adapters/adapt.yaml", *small, *weights, "--vary.seed", "[0]"]) == 0
    )
    with (tmp_path / "adapters-adapt" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedavg", "oracle", "oracle"]
    sent = [float(row["federation_bytes_up"]) for row in rows]
    assert sent[0] == sent[2] > sent[1] == sent[3]


def test_the_echo_leaves_the_model_as_it_is(tmp_path):
    done = run("configs/async/throughput.yaml", tmp_path / "runs", "--rounds", "40")
    assert summary(done)["asynchronous"]["arrivals"] == 40


def test_every_example_is_in_the_list():
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.name not in ("README.md", "__pycache__"):
            assert path.name in page, path.name


def test_accuracy_is_drawn_against_energy(tmp_path, monkeypatch):
    """Two methods, evaluated before training and after each of two rounds: against kJ, and against MB."""
    sweep = {
        **{"name": "energy", "rounds": 2, "costs": "all", "devices": {"name": "alike", "watts": 2}},
        **{"model": {"name": "mlp", "hidden": [64]}, "evaluation": {"every": 1, "at_start": True}},
        "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8}},
        "vary": {"algorithm": {"A": "fedavg", "B": {"name": "ifca", "num_clusters": 2}}},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    place = ["--output.folder", str(tmp_path), "--output.id", "a"]
    assert cli.main(["sweep", str(tmp_path / "sweep.yaml"), "-q", *place]) == 0
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_: drawn.append(figure))
    load_object("docs/examples/energy.py:main", "example")(str(tmp_path / "energy-a"), "x.png")
    left, right = ([line.get_xdata() for line in axes.get_lines()] for axes in drawn[0].axes)
    for energy, sent in zip(left, right, strict=True):
        assert energy[0] == sent[0] == 0
        np.testing.assert_allclose(energy[2], 2 * energy[1])
    np.testing.assert_allclose(left[1][2] / left[0][2], 1 + 2 * 9472 / 20224)  # two losses beside a training


@pytest.mark.in_turn
def test_accuracy_is_drawn_against_epsilon(tmp_path, monkeypatch):
    """Two methods: a line each over four values of epsilon, and four horizontal lines."""
    pytest.importorskip("dp_accounting")
    small = ["--data", "{source: digits, scenario: {name: rotated, clients: 8}}", "--participation", "1.0"]
    small += ["--rounds", "1", "--local.epochs", "1", "--evaluation.clients", "8"]
    place = ["--output.folder", str(tmp_path), "--output.id", "a"]
    assert cli.main(["sweep", "sweeps/privacy", "-q", *small, *place]) == 0
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_: drawn.append(figure))
    load_object("docs/examples/accuracy_against_epsilon.py:main", "example")(
        str(tmp_path / "privacy-a"), "x.png"
    )
    lines = drawn[0].axes[0].get_lines()
    assert [line.get_label() for line in lines] == [
        *("fedavg", "fedavg, clipped, no noise", "fedavg, neither"),
        *("ifca", "ifca, clipped, no noise", "ifca, neither"),
    ]
    assert [len(line.get_xdata()) for line in lines] == [4, 2, 2, 4, 2, 2]
    assert all(np.isfinite(np.asarray(line.get_ydata(), dtype=float)).all() for line in lines)
    assert all(np.diff(lines[0].get_xdata().astype(float)) > 0)
