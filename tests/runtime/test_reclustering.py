"""Statistics that are taken again: whose, when, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.runs import CONFIG

from mpifl import cli
from mpifl.results.reader import read_rows
from mpifl.simulation.reclustering import Recluster

DRIFT = ("--drift", "{kind: swap, at: [3], share: 0.5}")


def run(folder, *options: str):
    """Run the small configuration with eight clients and return its folder."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(folder / "cache")]
    assert cli.main(["run", str(CONFIG), "--quiet", "--evaluation.every", "1", *place, *options]) == 0
    return folder / "tiny-x"


def test_statistics_are_due_by_age_and_by_round():
    """Taken in rounds 0, 2 and 4: in round 5, those of 0 and 2 are two rounds old; so are those before 3."""
    taken = np.array([0, 2, 4])
    assert_array_equal(Recluster(every=2).due(taken, 5), [True, True, False])
    assert_array_equal(Recluster(at=(3,)).due(taken, 5), [True, True, False])
    assert_array_equal(Recluster(at=(3,)).due(taken, 2), [False, False, False])
    assert_array_equal(Recluster(every=4, at=(3, 5)).due(taken, 4), [True, True, False])
    assert not Recluster()


@pytest.mark.parametrize("method", ["{name: fedclust, num_clusters: 2}", "{name: flexcfl, num_groups: 2}"])
def test_a_method_that_looks_again_finds_the_new_groups(method, tmp_path):
    """Four of eight clients change places in round 3; all send statistics again in round 4, as many bytes."""
    done = run(tmp_path, "--algorithm", method, "--rounds", "5", *DRIFT, "--recluster", "{at: [4]}")
    found = [float(row["ari"]) for row in read_rows(done / "metrics.csv")]
    assert found[1] == found[3] == found[4] == 1.0
    assert found[2] < 0
    sent = {
        int(row["step"]): (int(row["messages"]), int(row["bytes"]))
        for row in read_rows(done / "ledger.csv")
        if row["name"] in ("signature", "delta") and row["direction"] == "up"
    }
    assert sent.keys() == {0, 4}
    assert sent[0] == sent[4]
    assert sent[0][0] == 8


def test_under_partial_participation_each_client_sends_them_when_it_next_takes_part(tmp_path):
    """Half of the clients take part; nobody sends twice for one round in `at`."""
    options = ("--algorithm", "{name: fedclust, num_clusters: 2}", "--participation", "0.5", "--rounds", "6")
    done = run(tmp_path, *options, "--recluster", "{at: [3]}")
    visits = read_rows(done / "visits.csv")
    took_part = {step: {r["client"] for r in visits if int(r["step"]) == step} for step in range(3, 7)}
    first = {
        k: min(step for step in took_part if k in took_part[step]) for k in set().union(*took_part.values())
    }
    expected = {step: sum(at == step for at in first.values()) for step in range(3, 7)}
    sent = {
        int(row["step"]): int(row["messages"])
        for row in read_rows(done / "ledger.csv")
        if row["name"] == "signature" and row["direction"] == "up"
    }
    assert sent == {0: 8, **{step: n for step, n in expected.items() if n}}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--algorithm", "ucfl", "--recluster", "{every: 1}"], "recluster"),
        (["--algorithm", "fedclust", "--recluster", "{every: 2}"], "recluster.every"),
        (["--algorithm", "fedclust", "--recluster", "{at: [3]}"], "recluster.at"),
        (["--algorithm", "fedclust", "--recluster", "{at: [2, 2]}"], "recluster.at"),
        (["--algorithm", "ccfl", "--policy", "every_arrival", "--recluster", "{every: 1}"], "recluster"),
    ],
)
def test_what_has_no_effect_is_refused(options, key, tmp_path, capsys):
    """Of a run of two rounds."""
    place = ["--output.folder", str(tmp_path), "--data.cache", str(tmp_path)]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, *options]) == 2
    assert f"mpifl: {key} = " in capsys.readouterr().err
