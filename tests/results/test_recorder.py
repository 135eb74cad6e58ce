"""The columns of metrics.csv: by hand, and from a run."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import own_scenarios, toy
from support.nightly import covering

import mpifl
from mpifl import cli
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData
from mpifl.experiment.schema import EvaluationConfig
from mpifl.results import columns
from mpifl.results import recorder as recorder_module
from mpifl.results.reader import load
from mpifl.results.recorder import Recorder, digest
from mpifl.sweeps.retime import retime
from mpifl.training.tasks import NextToken, Regression

TRAINED = ("mean", "worst", "std", "variance", "standard_error")
TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"


def metrics_row(*given, **more):
    return columns.metrics_row(columns.Evaluation(*given, **more))


def test_targets_purity_churn_and_standard_error_by_hand():
    """Accuracy 0.9, 0.7, 0.8 with 600 test samples: sqrt(0.8 * 0.2 / 600); targets are clients 0 and 1: 0.8.

    Clusters 0 0 1 against groups 0 1 1: the commonest group of each cluster has 1 + 1 of 3 clients. Before,
    the clusters were 5 5 5: after matching, one of three clients has moved.
    """
    scores = {
        "accuracy": np.array([0.9, 0.7, 0.8]),
        "loss": np.ones(3),
        "accuracy_backdoor": np.array([0.5, 0.3, 0.1]),
    }
    aimed = np.array([True, True, False])
    row = metrics_row(
        scores, np.array([0, 0, 1]), np.array([0, 1, 1]), pool=600, aimed=aimed, before=np.array([5, 5, 5])
    )
    assert_allclose(row["accuracy_standard_error"], np.sqrt(0.8 * 0.2 / 600))
    assert_allclose(row["accuracy_targets_mean"], 0.8)
    assert_allclose(row["accuracy_backdoor_targets_mean"], 0.4)
    assert_allclose([row["accuracy_backdoor_mean"], row["accuracy_backdoor_worst"]], [0.3, 0.1])
    assert_allclose(row["purity"], 2 / 3)
    assert_allclose(row["churn"], 1 / 3)


def test_accuracy_on_all_test_samples_and_by_group_by_hand():
    """Accuracy 0.9, 0.7, 0.8 on 10, 30, 60 samples: 9 + 21 + 48 of 100. Groups 0 0 1: means 0.8 and 0.8;
    clusters 0, unknown, 2: 0.9 and 0.8. One client has no accuracy after tuning: (0.5 * 10 + 0.4 * 60) / 70.
    """
    scores = {
        "accuracy": np.array([0.9, 0.7, 0.8]),
        "loss": np.ones(3),
        "accuracy_tuned": np.array([0.5, np.nan, 0.4]),
    }
    by = {"group": np.array([0, 0, 1]), "cluster": np.array([0, -1, 2])}
    row = metrics_row(scores, np.zeros(3, int), None, samples={"test": np.array([10, 30, 60])}, by=by)
    assert_allclose(row["accuracy_pooled"], 0.78)
    assert_allclose([row["accuracy_group0_mean"], row["accuracy_group1_mean"]], [0.8, 0.8])
    assert_allclose([row["accuracy_cluster0_mean"], row["accuracy_cluster2_mean"]], [0.9, 0.8])
    assert_allclose(row["accuracy_tuned_pooled"], 29 / 70)
    assert_allclose(row["accuracy_tuned_group0_mean"], 0.5)
    assert not any("cluster-1" in name or "cluster1" in name for name in row)
    assert not any(
        "pooled" in name or "group" in name for name in metrics_row(scores, np.zeros(3, int), None)
    )


@pytest.mark.filterwarnings("error")
def test_a_metric_of_ones_own_may_be_infinite():
    """NumPy warned of a subtraction, and named a file of its own."""
    scores = {"accuracy": np.array([0.5, 1.0]), "loss": np.ones(2), "mine": np.array([1.0, np.inf])}
    row = metrics_row(scores, np.zeros(2, int), None, own=["mine"])
    assert (row["mine_mean"], row["mine_min"], row["mine_max"]) == (np.inf, 1.0, np.inf)
    assert np.isnan(row["mine_std"])


def test_each_accuracy_is_weighted_by_the_samples_of_its_own_set_by_hand():
    """Two clients with 10 and 30 test samples, 3 and 1 in `hard`, 1 and 4 in `very_hard`, 8 and 2 in `train`.

    Accuracies 1 and 0: 10 of 40, 3 of 4, 1 of 5 and 8 of 10. `accuracy_so_hard` is no score on `hard`: there
    is no `accuracy_so`.
    """
    sets = {"test": [10, 30], "hard": [3, 1], "very_hard": [1, 4], "train": [8, 2]}
    stems, ends = (
        ("accuracy", "accuracy_initial"),
        {"": 1 / 4, "_hard": 3 / 4, "_very_hard": 1 / 5, "_train": 4 / 5},
    )
    expected = {f"{stem}{end}": value for stem in stems for end, value in ends.items()}
    expected |= {"accuracy_finetuned": 1 / 4, "accuracy_so_hard": 1 / 4}
    scores = {name: np.array([1.0, 0.0]) for name in (*expected, "loss")}
    samples = {name: np.array(sizes) for name, sizes in sets.items()}
    row = metrics_row(scores, np.zeros(2, int), None, samples=samples)
    assert_allclose([row[f"{name}_pooled"] for name in expected], [*expected.values()])


def test_a_recorder_averages_over_classes_of_devices(tmp_path):
    """Clients 1, 4 and 5 of 6 on a phone, a tablet and a phone: (0.1 + 0.4) / 2 and 0.8."""
    devices = ["server", "phone", "phone", "server", "tablet", "phone"]
    recorder = Recorder(tmp_path, toy.Tiny(), ("device",), devices)
    row = judged(recorder, 1, [0.1, 0.8, 0.4], [1, 4, 5], [0] * 6)
    found = {name: value for name, value in row.items() if name.startswith("accuracy_device_")}
    assert found == {"accuracy_device_phone_mean": 0.25, "accuracy_device_tablet_mean": 0.8}


def test_a_recorder_averages_over_the_groups_and_clusters_of_the_evaluated_clients(tmp_path):
    """Clients 1, 4 and 5 of 6 in groups 0, 1, 1 and clusters 2, 0, 2."""
    recorder = Recorder(tmp_path, toy.Tiny(), ("group", "cluster"))
    row = judged(recorder, 1, [0.1, 0.8, 0.4], [1, 4, 5], [9, 2, 9, 9, 0, 2])
    found = {name: row[f"accuracy_{name}_mean"] for name in ("group0", "group1", "cluster0", "cluster2")}
    assert_allclose(list(found.values()), [0.1, 0.6, 0.8, 0.25])
    assert "accuracy_cluster9_mean" not in row
    (tmp_path / "plain").mkdir()
    plain = judged(Recorder(tmp_path / "plain", toy.Tiny()), 1, [0.1, 0.8, 0.4], [1, 4, 5], [0] * 6)
    assert not any("group" in name or "cluster0" in name for name in plain)


def test_what_nobody_knows_is_nan():
    row = metrics_row({"accuracy": np.array([0.5]), "loss": np.ones(1)}, np.zeros(1, int), None)
    assert all(np.isnan(row[name]) for name in ("accuracy_standard_error", "ari", "nmi", "purity", "churn"))


def test_a_client_whose_model_diverged_counts_as_infinitely_bad_by_hand():
    """Client 0 has 20 samples and a loss of NaN, client 1 one sample, whose R2 is undefined, client 3 none.

    Means of the mean squared error: infinite; of group 1, without client 0, (1 + 3) / 2. R2 of group 1: that
    of client 2. Of a user's metric nobody knows the worse direction.
    """
    nan = np.nan
    scores = {
        "mse": np.array([nan, 1.0, 3.0, nan]),
        "r2": np.array([nan, nan, 0.5, nan]),
        "loss": np.array([nan, 1.0, 3.0, nan]),
        "mine": np.array([nan, 1.0, 3.0, nan]),
    }
    task, by = Regression(("mse", "r2")), {"group": np.array([0, 1, 1, 1])}
    whose = {"own": ["mine"], "honest": np.array([False, True, True, True]), "by": by, "task": task}
    row = metrics_row(scores, np.zeros(4, int), None, samples={"test": np.array([20, 1, 5, 0])}, **whose)
    assert [row[f"mse_{what}"] for what in ("mean", "worst", "worst_tenth")] == [np.inf] * 3
    assert row["loss"] == np.inf
    assert row["r2_mean"] == row["r2_worst"] == -np.inf
    assert np.isnan([row["mse_std"], row["r2_std"], row["mine_mean"], row["mine_max"]]).all()
    assert [row["mse_group0_mean"], row["mse_group1_mean"], row["r2_group1_mean"]] == [np.inf, 2.0, 0.5]
    assert [row["mse_honest_mean"], row["mse_honest_worst"], row["mine_group1_mean"]] == [2.0, 3.0, 2.0]
    well = {name: values[1:] for name, values in scores.items()}
    whose = {"own": ["mine"], "task": task}
    row = metrics_row(well, np.zeros(3, int), None, samples={"test": np.array([1, 5, 0])}, **whose)
    found = [row[name] for name in ("mse_mean", "mse_worst", "r2_mean", "loss", "mine_mean")]
    assert found == [2.0, 3.0, 0.5, 2.0, 2.0]


def test_of_errors_the_worst_is_the_largest_on_every_set():
    scores = {name: np.array([1.0, 3.0, 2.0]) for name in ("mse", "loss", "mse_train", "loss_train")}
    row = metrics_row(scores, np.zeros(3, int), None, task=Regression(("mse", "r2")))
    assert (row["mse_worst"], row["mse_train_worst"]) == (3.0, 3.0)
    shares = {"r2": scores["mse"], "r2_train": scores["mse"], "loss": scores["loss"]}
    row = metrics_row(shares, np.zeros(3, int), None, task=Regression(("r2",)))
    assert (row["r2_worst"], row["r2_train_worst"]) == (1.0, 1.0)


def test_models_that_diverged_count_on_the_set_on_which_they_were_measured():
    """Client 0 has samples in `train` alone, and client 1's sequences there have no token that counts."""
    nan, scores = np.nan, {}
    for end, perplexity, tokens in (("", [nan, 2.0], [0, 9]), ("_train", [nan, nan], [9, 0])):
        scores[f"perplexity{end}"] = np.array(perplexity)
        scores[f"loss{end}"] = np.log(scores[f"perplexity{end}"])
        scores |= {f"sums.{name}{end}": np.array(tokens, float) for name in ("n", "hits", "loss")}
    samples = {"test": np.array([0, 3]), "train": np.array([3, 3])}
    row = metrics_row(scores, np.zeros(2, int), None, samples=samples, task=NextToken(("perplexity",)))
    assert [row["perplexity_mean"], row["perplexity_worst"], row["perplexity_std"]] == [2.0, 2.0, 0.0]
    assert [row["perplexity_train_mean"], row["perplexity_train_worst"]] == [np.inf, np.inf]


def test_the_recorder_knows_the_samples_of_every_set_whatever_the_metric(tmp_path):
    recorder = Recorder(tmp_path, toy.Tiny(), task=Regression(("mse",)))
    scores = {"mse": [1.0, 2.0], "loss": [1.0, 2.0], "mse_train": [np.nan, 1.0], "loss_train": [np.nan, 1.0]}
    row = recorder.record_evaluation(
        1,
        1.0,
        scores={name: np.array(values) for name, values in scores.items()},
        clients=np.array([1, 4]),
        labels=np.zeros(6, int),
        train={},
        traffic={},
        timing=[],
    )
    assert [row["mse_mean"], row["loss"], row["mse_train_mean"]] == [1.5, 1.5, np.inf]


def judged(
    recorder: Recorder, step: int, accuracy: list[float], clients: list[int], labels: list[int]
) -> dict:
    """Enter an evaluation of some clients; return its figures."""
    scores = {"accuracy": np.array(accuracy), "loss": 1 - np.array(accuracy)}
    timing = [{"train": 1.5}, {"train": 2.5}]
    return recorder.record_evaluation(
        step,
        1.23456,
        scores=scores,
        clients=np.array(clients),
        labels=np.array(labels),
        train={"train_loss": 0.5},
        traffic={"b": 7},
        timing=timing,
        virtual_seconds=2.5,
    )


def test_a_line_says_once_which_models_diverged(tmp_path, capsys):
    recorder = Recorder(tmp_path, toy.Tiny(4))
    judged(recorder, 1, [0.5, 0.6, 0.7, 0.8], [0, 1, 2, 3], [0, 0, 0, 0])
    assert capsys.readouterr().err == ""
    for step in (2, 3):
        row = judged(recorder, step, [0.5, np.nan, 0.7, np.nan], [0, 1, 2, 3], [0, 0, 0, 0])
        assert (row["accuracy_worst"], row["loss"]) == (-np.inf, np.inf)
    (line,) = capsys.readouterr().err.splitlines()
    said = (
        "mpifl: after step 2 the loss of 2 of 4 clients is not finite: their models diverged (clients 1, 3)"
    )
    assert line == f"{said}; a smaller local.lr may help"


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def test_each_judged_client_has_its_own_cluster_samples_and_group_in_its_row(tmp_path):
    """Clients 1 and 4 of 6 are evaluated: 11 and 8 training samples, clusters 7 and 3, groups 0 and 1."""
    federation = toy.Tiny()
    recorder = Recorder(tmp_path, federation)
    judged(recorder, 1, [0.25, 0.75], [1, 4], [9, 7, 9, 9, 3, 9])
    recorder.close(None, [], [], [], {}, {})
    assert table(tmp_path / "clients.csv") == [
        {"client": "1", "cluster": "7", "accuracy": "0.25", "loss": "0.75", **sizes(11), "group": "0"},
        {"client": "4", "cluster": "3", "accuracy": "0.75", "loss": "0.25", **sizes(8), "group": "1"},
    ]
    assert [row["train"] for row in table(tmp_path / "timing.csv")] == ["1.5", "2.5"]


class Growing(toy.Tiny):
    """Clients with 10 training samples more at each visit, 1 validation, 30 test samples, and 2 in `hard`."""

    changes = True

    def num_samples(self, k, visit=0):
        """Return them."""
        return int(self.sizes[k, 0]) + 10 * visit

    def client(self, k, visit=0):
        """Return the data of one visit."""
        train = toy.draw("train", k, self.num_samples(k, visit), 0)
        val, test, hard = (toy.draw("val", k, n, 0) for n in (6 + visit, 9 + 30 * visit, 4 + 2 * visit))
        return ClientData(train, val, test, {"hard": hard})


def test_samples_are_those_of_the_visit_that_was_evaluated(tmp_path):
    """Clients 1, 4, 5 made 3, 0, 1 visits.

    Training: 11 + 20, 8 and 11 samples; hits 31 + 2 + 0 of 50. Tests: 9 + 60, 9 and 9; hits 69 + 9 / 4 of 87.
    `hard`: 4 + 4, 4 and 4; hits 8 + 1 of 16. All test samples are taken for different ones: nothing says that
    clients share some.
    """
    federation = Growing()
    recorder = Recorder(tmp_path, federation)
    names = ("accuracy", "accuracy_train", "accuracy_hard", "loss")
    scores = {name: np.array([1.0, 0.25, 0.0]) for name in names}
    row = recorder.record_evaluation(
        1,
        1.0,
        scores=scores,
        clients=np.array([1, 4, 5]),
        labels=np.zeros(6, int),
        train={},
        traffic={},
        timing=[],
        visits=np.array([9, 3, 9, 9, 0, 1]),
    )
    assert_allclose(row["accuracy_train_pooled"], 33 / 50)
    assert_allclose(row["accuracy_train_standard_error"], np.sqrt(5 / 12 * 7 / 12 / 50))
    assert_allclose(row["accuracy_pooled"], (69 + 9 / 4) / 87)
    assert_allclose(row["accuracy_standard_error"], np.sqrt(5 / 12 * 7 / 12 / 87))
    assert_allclose(row["accuracy_hard_pooled"], 9 / 16)
    recorder.close(None, [], [], [], {}, {})
    rows = table(tmp_path / "clients.csv")
    assert [(r["train"], r["val"], r["test"]) for r in rows] == [
        ("31", "8", "69"),
        ("8", "6", "9"),
        ("11", "6", "9"),
    ]


def test_the_standard_error_counts_shared_samples_once_though_sizes_change(tmp_path):
    """Six clients have 54 test samples at first, 50 of them different: there are no more of them later."""
    shared = type("Shared", (Growing,), {"test_pool": 50})()
    recorder = Recorder(tmp_path, shared)
    scores = {name: np.array([0.4, 0.6]) for name in ("accuracy", "loss")}
    row = recorder.record_evaluation(
        1,
        1.0,
        scores=scores,
        clients=np.array([1, 4]),
        labels=np.zeros(6, int),
        train={},
        traffic={},
        timing=[],
        visits=np.full(6, 3),
    )
    assert_allclose(row["accuracy_standard_error"], np.sqrt(0.25 / 50))


def test_a_run_on_data_that_drift_counts_the_samples_it_evaluated_on(tmp_path):
    """Each training accuracy is a whole number of hits among the samples of a client."""
    scenario = {"name": "ccfl", "clusters": 2, "clients": 6, "smallest": 10, "largest": 60, "public": 20}
    scenario |= {"test_images": 20, "exam": 20}
    run = mpifl.run(
        str(TINY),
        data={"scenario": scenario},
        evaluation={"every": 0, "train": True},
        output={"folder": str(tmp_path)},
    )
    clients, last = run.clients, run.metrics.iloc[-1]
    hits = clients["accuracy_train"] * clients["train"]
    assert_allclose(hits, hits.round(), atol=1e-6)
    assert_allclose(last["accuracy_train_pooled"], hits.sum() / clients["train"].sum(), rtol=1e-6)


HALF = {"participation": 0.5, "rounds": 3}
WAYS = {
    "rounds": {**HALF, "evaluation": {"every": 1, "train": True}},
    "stacked": {**HALF, "system": {"stack": 2}},
    "local": {"algorithm": "local", "rounds": 2},
    "tuned": {
        **HALF,
        "algorithm": {"name": "fedcuau", "over": "fedper", "tune_epochs": 1},
        "evaluation": {"every": 0, "train": True},
    },
    "buffer": {"algorithm": "fedbuff", "policy": {"name": "buffer", "size": 2}, "rounds": 3},
    "mixture": {**HALF, "algorithm": "fedem"},
}


@pytest.mark.parametrize(("way", "scenario"), covering([*WAYS], ["TurningScenario", "FurtherScenario"]))
def test_pooled_accuracies_are_shares_of_the_samples_that_were_evaluated(way, scenario, tmp_path):
    """Sizes follow from the visits; accuracies are whole numbers of hits among them. Some never trained."""
    scenario = {"name": f"{own_scenarios.__file__}:{scenario}"}
    run = mpifl.run(str(TINY), data={"scenario": scenario}, output={"folder": str(tmp_path)}, **WAYS[way])
    rows, last = run.rows("clients.csv"), run.rows("metrics.csv")[-1]
    made = run.rows("events.csv") or [row for row in run.rows("visits.csv") if row["trains"] == "True"]
    visits = Counter(int(row["client"]) for row in made)
    turns = [max(visits[k] - 1, 0) * ("Turning" in scenario["name"]) for k in range(4)]
    assert way == "local" or len({visits[k] for k in range(4)}) > 1
    known = {name: [of[(k + turns[k]) % 4] for k in range(4)] for name, of in own_scenarios.SIZES.items()}
    assert [int(row["test"]) for row in rows] == known["test"]
    pooled = [name.removesuffix("_pooled") for name in last if name.endswith("_pooled")]
    assert {"accuracy", "accuracy_hard"} <= {*pooled}
    for name in pooled:
        which = name.rpartition("_")[2]
        n = own_scenarios.SIZES["train"] if which == "train" else known["hard" if which == "hard" else "test"]
        hits = np.array([float(row[name]) for row in rows]) * n
        assert_allclose(hits, hits.round(), atol=1e-6)
        assert_allclose(float(last[f"{name}_pooled"]), hits.sum() / sum(n))


def sizes(train: int) -> dict[str, str]:
    """Return the columns of a client of `toy.Tiny`."""
    return {"train": str(train), "val": "6", "test": "9"}


def test_the_targets_are_those_of_the_judged_clients_a_backdoor_is_aimed_at(tmp_path):
    federation = toy.Tiny()
    federation.targets = np.array([0, 4, 5])
    row = judged(Recorder(tmp_path, federation), 1, [0.1, 0.8, 0.4], [1, 4, 5], [0] * 6)
    assert_allclose(row["accuracy_targets_mean"], 0.6)


def test_the_standard_error_counts_no_test_sample_twice(tmp_path):
    """Two clients of 9 test samples: a pool of 18, or of 12 where there are no more different ones."""
    federation, shared = toy.Tiny(), type("Shared", (toy.Tiny,), {"test_pool": 12})()
    for number, (world, pool) in enumerate(((federation, 18), (shared, 12))):
        (tmp_path / str(number)).mkdir()
        row = judged(Recorder(tmp_path / str(number), world), 1, [0.4, 0.6], [1, 4], [0] * 6)
        assert_allclose(row["accuracy_standard_error"], np.sqrt(0.25 / pool))


def test_a_recorder_goes_on_where_it_was(tmp_path):
    """What came after the state is gone from the tables; churn is counted from the evaluation before it."""
    recorder = Recorder(tmp_path, toy.Tiny())
    judged(recorder, 1, [0.25, 0.75], [1, 4], [0, 0, 0, 1, 1, 1])
    recorder.arrived([{"time": 1.0, "client": 3}])
    state = json.loads(json.dumps(recorder.state_dict()))
    metrics, events = (tmp_path / "metrics.csv").read_bytes(), (tmp_path / "events.csv").read_bytes()
    for step in (2, 3):
        judged(recorder, step, [1.0, 1.0], [1, 4], [5, 4, 3, 2, 1, 0])
        recorder.arrived([{"time": 1.0 + step, "client": step}])
    recorder.state_dict()
    again = Recorder(tmp_path, toy.Tiny())
    again.load_state_dict(state, metrics, len(events))
    assert (tmp_path / "metrics.csv").read_bytes() == metrics
    assert (tmp_path / "events.csv").read_bytes() == events
    assert again.last == recorder.last | state["last"]
    row = judged(again, 2, [0.5, 0.5], [1, 4], [0, 0, 1, 1, 1, 1])
    assert_allclose(row["churn"], 1 / 6)
    assert [row["round"] for row in table(tmp_path / "metrics.csv")] == ["1", "2"]
    assert [row["round"] for row in again.timing] == [1, 1, 2, 2]
    again.arrived([{"time": 9.0, "client": 0}])
    again.state_dict()
    assert [row["time"] for row in table(tmp_path / "events.csv")] == ["1.0", "9.0"]
    kept = [(row["round"], row["client"], row["cluster"]) for row in table(tmp_path / "assignments.csv")]
    moved = [entry for entry in kept if entry[0] != "1"]
    assert len(kept) - len(moved) == 6, "all clients, and then those that moved since"
    assert moved == [("2", "2", "1")], "what came after the state is gone"


def test_updates_go_on_where_they_were_and_end_as_means(tmp_path):
    """Rounds 1 and 2, a checkpoint after 1: round 2 is written once. Clients 1, 4 are of groups 0, 1."""

    def rows(size):
        return [
            {"client": k, "block": "head", "size": size, "pair_cosine": 0.5, "distance": size + k}
            for k in (1, 4)
        ]

    recorder = Recorder(tmp_path, toy.Tiny())
    judged(recorder, 1, [0.25, 0.75], [1, 4], [0] * 6)
    recorder.record_updates(1, rows(1.0))
    state, metrics = recorder.state_dict(), (tmp_path / "metrics.csv").read_bytes()
    recorder.record_updates(2, rows(7.0))
    again = Recorder(tmp_path, toy.Tiny())
    again.load_state_dict(json.loads(json.dumps(state)), metrics, 0)
    again.record_updates(2, rows(2.0))
    written = [
        (row["round"], row["client"], row["group"], row["size"]) for row in table(tmp_path / "updates.csv")
    ]
    assert written == [
        ("1", "1", "0", "1.0"),
        ("1", "4", "1", "1.0"),
        ("2", "1", "0", "2.0"),
        ("2", "4", "1", "2.0"),
    ]
    again.close(None, [], [], [], {}, {})
    found = json.loads((tmp_path / "summary.json").read_text())["updates"]["head"]
    figures = {"size": 1.5, "pair_cosine": 0.5, "distance": 4.0}
    groups = {"distance_group0": 2.5, "distance_group1": 5.5}
    groups |= {f"{name}_group{g}": figures[name] for name in ("size", "pair_cosine") for g in (0, 1)}
    assert found == figures | groups


def test_updates_have_a_row_for_each_visit_and_block(tmp_path):
    """Two rounds of four clients, two blocks. Over ranks: `tests/mpi/test_digests.py`."""
    options = ["--output.updates", "true", "--participation", "0.5", "--rounds", "2", "-q"]
    assert cli.main(["run", str(TINY), *options, "--output.folder", str(tmp_path)]) == 0
    assert next(tmp_path.glob("*/updates.csv")).read_bytes().count(b"\n") == 1 + 2 * 4 * 2


@pytest.mark.filterwarnings("error")
def test_an_update_of_nothing_has_no_cosine_and_counts_in_no_mean_of_them(tmp_path):
    """Client 0 trains on nothing, or all clients do."""
    options = ["--output.updates", "true", "--output.folder", str(tmp_path), "--rounds", "1", "-q"]
    for name, more in (("one", ["--per_client", "{0: {epochs: 0}}"]), ("all", ["--local.epochs", "0"])):
        assert cli.main(["run", str(TINY), *options, "--output.id", name, *more]) == 0
        rows = table(tmp_path / f"tiny-{name}" / "updates.csv")
        cosines = {r["client"]: float(r["mean_cosine"]) for r in rows if r["block"] == "head"}
        known = [x for x in cosines.values() if x == x]
        assert [k for k, x in cosines.items() if x != x] == (["0"] if name == "one" else [*cosines])
        means = json.loads((tmp_path / f"tiny-{name}" / "summary.json").read_text())["updates"]["head"]
        assert means["mean_cosine"] == (pytest.approx(sum(known) / len(known)) if known else None)


@pytest.mark.parametrize("part", ["number", "row", "name", "assign", "memo", "memo name", "memo kind"])
def test_the_digest_sees_every_part_of_a_server(part):
    tables, assign = {"model": torch.zeros(2, 3), "control": torch.ones(1, 3)}, np.array([0, 1])
    algorithm_state = {"known": np.array([1, 0])}
    before = digest(tables, assign, algorithm_state)
    assert digest(dict(reversed(tables.items())), assign.copy(), dict(algorithm_state)) == before
    if part == "number":
        tables["model"][1, 2] = 1e-30
    elif part == "row":
        tables["model"] = tables["model"].reshape(3, 2)
    elif part == "name":
        tables = {"model": tables["model"], "momentum": tables["control"]}
    elif part == "assign":
        assign = np.array([1, 0])
    elif part == "memo":
        algorithm_state = {"known": np.array([1, 1])}
    elif part == "memo name":
        algorithm_state = {"linked": algorithm_state["known"]}
    else:
        algorithm_state = {"known": algorithm_state["known"].astype(np.uint8)}
    assert digest(tables, assign, algorithm_state) != before


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return metrics.csv of the only run in a folder."""
    (path,) = folder.glob("*/metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_training_accuracy_by_hand():
    """Accuracies 0.9, 0.7 on 50 and 150 training samples: mean 0.8, together 0.75, variance 10^2 in percent
    squared, standard error sqrt(0.8 * 0.2 / 200); those on test data are as without it.
    """
    scores = {"accuracy": np.array([0.5, 0.7]), "loss": np.ones(2)}
    labels = np.zeros(2, int)
    row = metrics_row(
        {**scores, "accuracy_train": np.array([0.9, 0.7])},
        labels,
        None,
        pool=10,
        samples={"train": np.array([50, 150])},
    )
    plain = metrics_row(scores, labels, None, pool=10)
    added = {name: row[name] for name in row.keys() - plain.keys()}
    assert_allclose(
        [added.pop(f"accuracy_train_{n}") for n in ("pooled", *TRAINED)],
        [0.75, 0.8, 0.7, 0.1, 100.0, np.sqrt(0.8 * 0.2 / 200)],
    )
    assert not added
    assert [str(row[name]) for name in plain] == [str(value) for value in plain.values()]


def test_training_accuracy_is_that_of_the_same_model_on_the_training_data(tmp_path):
    """A forward pass in NumPy of the one model, over each client's training samples."""
    world, changes = toy.Tiny(), {"model": toy.mlp(), "evaluation": EvaluationConfig(train=True)}
    done = toy.run(CATALOGUE["fedavg"](), world, tmp_path, **changes)
    w = done.server.tables["model"][0].numpy().astype(np.float64)
    A, b = w[:-3].reshape(3, 16), w[-3:]

    def accuracy(split):
        return ((split.x.flatten(1).numpy() @ A.T + b).argmax(1) == split.y.numpy()).mean()

    for name, part in (("accuracy_train", "train"), ("accuracy", "test")):
        expected = [accuracy(getattr(world.client(k), part)) for k in range(world.num_clients)]
        assert_allclose(done.scores[name], expected)
    assert not np.allclose(done.scores["accuracy"], done.scores["accuracy_train"])


def test_fine_tuning_and_training_accuracy_are_columns_and_change_nothing_else(tmp_path):
    """Over ranks: `tests/mpi/test_digests.py`."""
    more = {
        "plain": [],
        "tuned": ["--evaluation.finetune_epochs", "1"],
        "trained": ["--evaluation.train", "true"],
    }
    for name, keys in more.items():
        options = [*keys, "--rounds", "2", "-q", "--output.folder", str(tmp_path / name)]
        assert cli.main(["run", str(TINY), *options]) == 0
    plain, tuned, trained = (rows_of(tmp_path / name) for name in more)
    assert "accuracy_finetuned_mean" not in plain[0]
    assert tuned[0]["accuracy_finetuned_mean"] != tuned[0]["accuracy_mean"]
    assert [name for name in trained[0] if name not in plain[0]] == [
        f"accuracy_train_{name}" for name in ("pooled", *TRAINED)
    ]
    for name in ("accuracy_mean", "accuracy_variance", "loss", "ari", "federation_bytes_down"):
        for other in (tuned, trained):
            assert [row[name] for row in plain] == [row[name] for row in other]


def test_clients_nobody_has_seen_are_in_no_cluster(tmp_path):
    """Two of eight clients take part in the only round: six are unplaced."""
    options = [
        "--participation",
        "0.25",
        "--rounds",
        "1",
        "-q",
        "--algorithm",
        "{name: ifca, num_clusters: 2}",
    ]
    assert cli.main(["run", str(TINY), *options, "--output.folder", str(tmp_path)]) == 0
    (row,) = rows_of(tmp_path)
    assert row["num_unplaced"] == "6"
    (clusters,) = tmp_path.glob("*/clusters.csv")
    with clusters.open() as file:
        placed = [client for client in csv.DictReader(file) if client["placed"] == "1"]
    (traffic,) = tmp_path.glob("*/client_traffic.csv")
    with traffic.open() as file:
        seen = {client["client"] for client in csv.DictReader(file) if int(client["bytes_up"])}
    assert {client["client"] for client in placed} == seen
    assert len(seen) == 2


def test_one_placed_client_agrees_with_nothing(tmp_path):
    """It would agree with any partition: an index of 1."""
    options = ["--cohort_size", "1", "--rounds", "8", "-q", "--algorithm", "{name: ifca, num_clusters: 2}"]
    options += ["--evaluation.every", "1", "--output.folder", str(tmp_path)]
    assert cli.main(["run", str(TINY), *options]) == 0
    first, *_, last = rows_of(tmp_path)
    assert first["num_unplaced"] == "7"
    assert int(last["num_unplaced"]) < 7
    for name in ("ari", "nmi", "purity"):
        assert first[name] in ("", "nan")
        assert float(last[name]) <= 1


def test_groups_that_join_after_the_end_are_evaluated_but_never_train(tmp_path):
    late = ["--newcomers", "{groups: [1], joins: 9}", "--evaluation.every", "1", "-q"]
    assert cli.main(["run", str(TINY), *late, "--output.folder", str(tmp_path)]) == 0
    (ledger,) = tmp_path.glob("*/ledger.csv")
    with ledger.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["messages"] for row in rows} == {"4"}
    (clients,) = tmp_path.glob("*/clients.csv")
    assert len(clients.read_text().splitlines()) == 9


FILES = {"clients.csv", "clusters.csv", "assignments.csv", "client_traffic.csv", "visits.csv"}
IFCA = ["--algorithm", "{name: ifca, num_clusters: 2}", "--rounds", "2", "--evaluation.every", "1", "-q"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """A run for each choice of `output.clients`; a sample is of 3 clients."""
    parent, out = tmp_path_factory.mktemp("written"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "SAMPLE", 3)
        for choice in ("all", "sample", "none"):
            place = ["--output.folder", str(parent), "--output.id", choice, "--output.clients", choice]
            assert cli.main(["run", str(TINY), *IFCA, *place]) == 0
            (out[choice],) = parent.glob(f"*-{choice}")
    return out


def test_tables_of_clients_hold_all_a_sample_or_nobody_and_totals_count_everybody(written):
    runs = {choice: load(str(folder)) for choice, folder in written.items()}
    assert len({run.summary["digest"] for run in runs.values()}) == 1
    for name in ("ledger.csv", "metrics.csv"):
        tables = [[{**row, "seconds": ""} for row in run.rows(name)] for run in runs.values()]
        assert tables[0] == tables[1] == tables[2]
    kept = {row["client"] for row in runs["sample"].rows("clusters.csv")}
    assert len(kept) == 3
    for name in FILES - {"clients.csv"}:
        every, some = (runs[choice].rows(name) for choice in ("all", "sample"))
        assert some == [row for row in every if row["client"] in kept]
        assert len(some) < len(every)
    assert {path.name for path in written["sample"].iterdir()} >= FILES
    assert not FILES & {path.name for path in written["none"].iterdir()}


def test_what_reads_clients_that_were_not_written_says_so(written):
    with pytest.raises(UserError, match=r"did not write visits\.csv"):
        assert load(str(written["none"])).visits
    for choice in ("sample", "none"):
        with pytest.raises(UserError, match="lacks visits"):
            retime(str(written[choice]), ["--network.name", "wireless-slow"])


@pytest.mark.nightly
@pytest.mark.parametrize("choice", ["sample", "none"])
def test_a_report_of_a_run_without_the_rows_of_all_clients_is_written(written, choice, tmp_path):
    assert cli.main(["report", str(written[choice]), "--out", str(tmp_path)]) == 0
    assert "accuracy" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--policy", "every_arrival", "--algorithm", "fedasync"], "clock.trace repeats them"),
        (["--evaluation.matrices", "[parameters]"], "evaluation.matrices are ordered"),
        (["--output.updates", "true"], "writes a row for each client"),
    ],
)
def test_what_needs_the_rows_of_all_clients_is_refused(tmp_path, capsys, options, remedy):
    place = ["--output.folder", str(tmp_path), "--output.clients", "sample"]
    assert cli.main(["run", str(TINY), *place, *options, "-q"]) == 2
    assert remedy in capsys.readouterr().err
