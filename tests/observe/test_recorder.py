"""The columns of metrics.csv: by hand, and from a run."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.testing import assert_allclose

from mpifl import cli
from mpifl.observe.recorder import metrics_row

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"


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
    row = metrics_row(scores, np.array([0, 0, 1]), np.array([0, 1, 1]), 600, aimed, np.array([5, 5, 5]))
    assert_allclose(row["accuracy_standard_error"], np.sqrt(0.8 * 0.2 / 600))
    assert_allclose(row["accuracy_targets_mean"], 0.8)
    assert_allclose(row["accuracy_backdoor_targets_mean"], 0.4)
    assert_allclose([row["accuracy_backdoor_mean"], row["accuracy_backdoor_worst"]], [0.3, 0.1])
    assert_allclose(row["purity"], 2 / 3)
    assert_allclose(row["churn"], 1 / 3)


def test_what_nobody_knows_is_nan():
    row = metrics_row({"accuracy": np.array([0.5]), "loss": np.ones(1)}, np.zeros(1, int), None)
    assert all(np.isnan(row[name]) for name in ("accuracy_standard_error", "ari", "nmi", "purity", "churn"))


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return metrics.csv of the only run in a folder."""
    (path,) = folder.glob("*/metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_fine_tuned_accuracy_is_a_column_that_does_not_depend_on_ranks(tmp_path, mpirun):
    options = ["--evaluation.finetune_epochs", "2", "--rounds", "2", "-q"]
    for place, number in (("alone", None), ("ranks", 3)):
        done = mpirun(number, "-m", "mpifl", "run", TINY, *options, "--output.folder", tmp_path / place)
        assert done.returncode == 0, done.stderr
    alone, together = rows_of(tmp_path / "alone"), rows_of(tmp_path / "ranks")
    for name in ("accuracy_finetuned_mean", "accuracy_finetuned_worst", "accuracy_mean", "loss"):
        assert [row[name] for row in alone] == [row[name] for row in together]
    assert alone[0]["accuracy_finetuned_mean"] != alone[0]["accuracy_mean"]


def test_fine_tuning_changes_nothing_else(tmp_path):
    for epochs in ("0", "1"):
        options = ["--evaluation.finetune_epochs", epochs, "--rounds", "2", "-q"]
        assert cli.main(["run", str(TINY), *options, "--output.folder", str(tmp_path / epochs)]) == 0
    plain, tuned = rows_of(tmp_path / "0"), rows_of(tmp_path / "1")
    for name in ("accuracy_mean", "loss", "ari"):
        assert [row[name] for row in plain] == [row[name] for row in tuned]
    assert "accuracy_finetuned_mean" not in plain[0]


def test_groups_that_join_after_the_end_are_judged_but_never_train(tmp_path):
    late = ["--newcomers", "{groups: [1], joins: 9}", "--evaluation.every", "1", "-q"]
    assert cli.main(["run", str(TINY), *late, "--output.folder", str(tmp_path)]) == 0
    (ledger,) = tmp_path.glob("*/ledger.csv")
    with ledger.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["messages"] for row in rows} == {"4"}
    (clients,) = tmp_path.glob("*/clients.csv")
    assert len(clients.read_text().splitlines()) == 9
