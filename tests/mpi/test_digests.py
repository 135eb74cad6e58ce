"""Whole runs: the same digest for any number of ranks, and bytes on the wire as Open MPI's monitor counts
them.

All runs of one number of ranks share one mpirun (`many.py`): starting Python costs more than the runs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support import worlds
from support.runs import CONFIG, RUNS, SCRIPT, Runs, columns_of

from mpifl.comm.monitoring import ALLTOALLV, parse_monitoring

PLACES = {  # name -> ranks (None: no mpirun), options of all runs
    "alone": (None, []),
    "2 ranks": (2, []),
    "3 ranks": (3, []),
    "4 ranks": (4, ["--system.placement_seed", "1"]),  # clients change places
    "6 ranks": (6, []),
}
MONITOR = {
    "OMPI_MCA_pml_monitoring_enable": "2",
    "OMPI_MCA_pml_monitoring_enable_output": "3",
    **ALLTOALLV,
}


@pytest.fixture(scope="module")
def runs_at(mpirun, tmp_path_factory):
    """Return a function place -> its runs; each place runs once."""
    done: dict[str, Runs] = {}
    cache = tmp_path_factory.mktemp("cache")

    def at(place: str, **how: Any) -> Runs:
        if place not in done:
            ranks, options = PLACES[place]
            folder = tmp_path_factory.mktemp("runs")
            options = ["--data.cache", str(cache), *options]
            env = worlds.PYTHONPATH | how.pop("env", {})
            program = (SCRIPT, CONFIG, folder, json.dumps(RUNS), *options)
            end = mpirun(ranks, *program, timeout=600, env=env, **how)
            assert end.returncode == 0, end.stderr
            done[place] = Runs(folder)
        return done[place]

    return at


@pytest.fixture(scope="module")
def monitored(runs_at, tmp_path_factory) -> tuple[Runs, Path]:
    """The runs over 4 ranks, and the prefix of what the monitor wrote."""
    prefix = tmp_path_factory.mktemp("monitor") / "m"
    env = {**MONITOR, "OMPI_MCA_pml_monitoring_filename": str(prefix)}
    return runs_at("4 ranks", env=env), prefix


@pytest.mark.parametrize(
    "place",
    ["2 ranks", "4 ranks", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("3 ranks", "6 ranks"))],
)
def test_digests_do_not_depend_on_the_ranks(place, runs_at, monitored):
    alone, there = runs_at("alone"), runs_at(place)
    for name in RUNS:
        one, other = alone.summary(name), there.summary(name)
        assert one["ranks"] == 1
        assert other["ranks"] == PLACES[place][0]
        for figure in one:
            if figure not in ("ranks", "mpi_bytes", "wall_seconds", "peak_bytes", "asynchronous"):
                assert one[figure] == other[figure], f"{name}: {figure}"
    kept = [runs.folder / "tiny-emdcfl-half" for runs in (alone, there)]
    mine, theirs = (columns_of(folder / "metrics.csv") for folder in kept)
    assert "client_distance" in mine
    assert mine == theirs
    mine, theirs = (dict(np.load(folder / "matrices.npz")) for folder in kept)
    assert [*mine] == ["parameters", "gradients", "angles", "smallest_angles"]
    for name, values in mine.items():
        np.testing.assert_array_equal(theirs[name], values, name)


def test_only_the_collective_may_change_without_changing_the_digest(runs_at):
    digests = {name: runs_at("alone").summary(name)["digest"] for name in RUNS}
    assert digests.pop("fedavg-gathered") == digests["fedavg"]
    assert digests.pop("ucfl-reduced") == digests["ucfl"]
    assert digests.pop("secure") == digests["fedavg"]
    assert digests.pop("own-metric", digests["fedavg"]) == digests["fedavg"], "a metric changes nothing"
    assert len(set(digests.values())) == len(digests), "every other run is one of its own"


@pytest.mark.parametrize(
    "file", ["clients.csv", "clusters.csv", "ledger.csv", "visits.csv", "client_traffic.csv"]
)
def test_tables_do_not_depend_on_the_ranks_either(file, runs_at, monitored):
    for name in RUNS:
        assert runs_at("alone").table(name, file) == runs_at("4 ranks").table(name, file)


def test_the_runs_do_what_they_are_there_for(runs_at, monitored):
    """Clusters split, groups are found, and each of the three ways to mix is walked."""
    runs = runs_at("4 ranks")
    assert runs.summary("cfl")["num_clusters"] >= 3
    assert runs.summary("ifca")["num_clusters"] >= 2
    assert runs.summary("emdcfl")["num_clusters"] >= 2
    assert runs.mpi_bytes("ucfl")["reduce_scatter"] > 0, "rows live with their readers"
    assert runs.mpi_bytes("ucfl-4")["reduce_scatter"] == 0
    assert runs.mpi_bytes("fedavg")["reduce"] > 0 == runs.mpi_bytes("fedavg")["gatherv"]
    assert runs.mpi_bytes("cfl")["gatherv"] > 0, "products of all pairs"
    gathered, reduced = runs.mpi_bytes("fedavg-gathered"), runs.mpi_bytes("ucfl-reduced")
    assert gathered["gatherv"] > 0 == gathered["reduce"]
    assert reduced["reduce"] > 0 == reduced["reduce_scatter"]
    assert runs_at("alone").summary("fedavg")["mpi_bytes"] == 0
    assert runs.mpi_bytes("median")["alltoallv"] > 0 == runs.mpi_bytes("median")["reduce"]
    assert runs.mpi_bytes("norm-bound")["alltoallv"] > 0 < runs.mpi_bytes("norm-bound")["reduce"]


def test_bytes_are_those_that_open_mpi_monitored(monitored):
    """Every run of 4 ranks, rounds and an asynchronous one, to the byte; `mpi_bytes` is their sum."""
    runs, prefix = monitored
    if not list(prefix.parent.iterdir()):
        pytest.skip("this MPI has no monitoring (Open MPI has)")
    seen, sent = parse_monitoring(str(prefix)), runs.mpi_bytes(*RUNS)
    calls = seen["communicators"]["mpifl"]
    kind = {
        k: sum(count.size for (_, which), count in calls.items() if which == k) for k in ("O2A", "A2O", "A2A")
    }
    assert sent["bcast"] == kind["O2A"]
    assert sent["reduce"] + sent["gatherv"] == kind["A2O"]
    assert sent["reduce_scatter"] + sent["alltoallv"] == kind["A2A"]
    assert sent["send"] == sum(count.size for count in seen["point"].values())
    assert sum(runs.summary(name)["mpi_bytes"] for name in RUNS) == sum(sent.values())
    assert (
        min(sent[call] for call in ("bcast", "reduce", "gatherv", "reduce_scatter", "alltoallv", "send")) > 0
    )


def test_each_rank_counted_what_it_sent_itself(monitored):
    """Sends by rank, as the monitor has them by sender."""
    runs, prefix = monitored
    if not list(prefix.parent.iterdir()):
        pytest.skip("this MPI has no monitoring (Open MPI has)")
    own: Counter[int] = Counter()
    for name in RUNS:
        for row in runs.table(name, "mpi_traffic.csv"):
            own[int(row["rank"])] += int(row["bytes"]) * (row["call"] == "send")
    seen: Counter[int] = Counter()
    for (rank, _), count in parse_monitoring(str(prefix))["point"].items():
        seen[rank] += count.size
    assert own == seen


def test_federation_bytes_are_the_closed_forms(runs_at):
    """d = 64 * 12 + 12 + 12 * 10 + 10 = 910 numbers; 4 of 8 clients in 3 rounds, or 8 in 2.

    EMD-CFL: body 780, floor(0.9 * 12) = 10 columns of 32 images, 8 * 7 pairs, one tau each. UCFL: the initial
    model down, a gradient and a variance up before the first round.
    """
    runs, d = runs_at("alone"), 910
    pairs = 8 * 7
    expected = {
        "fedavg": (4 * 3 * d, 4 * 3 * d),
        "ifca": (4 * 3 * (d + 1), 4 * 3 * 3 * d),
        "emdcfl": (8 * 2 * d + pairs * (780 + 2 * 32 * 10) + 8, 8 * 2 * d + pairs * 780),
        "ucfl": (8 * (d + 1) + 4 * 3 * d, 8 * d + 4 * 3 * d),
        "ucfl-4": (8 * (d + 1) + 4 * 3 * d, 8 * d + 4 * 3 * d),
        "ucfl-parallel": (8 * (d + 1) + 4 * 3 * 4 * d, 8 * d + 4 * 3 * 4 * d),
        "scaffold": (4 * 3 * 2 * d, 4 * 3 * 2 * d),
        "fedper": (4 * 3 * 780, 4 * 3 * 780),
    }
    for name, (up, down) in expected.items():
        summary = runs.summary(name)
        assert summary["federation_bytes_up"] == 4 * up, name
        assert summary["federation_bytes_down"] == 4 * down, name


def test_a_run_folder_is_complete_and_its_figures_agree(runs_at, monitored):
    runs = runs_at("4 ranks")
    for name in RUNS:
        summary, clients = runs.summary(name), runs.table(name, "clients.csv")
        files = {path.name for path in (runs.folder / f"tiny-{name}").iterdir()}
        assert files >= {
            "config.yaml",
            "environment.json",
            "metrics.csv",
            "clients.csv",
            "clusters.csv",
            "ledger.csv",
            "mpi_traffic.csv",
            "timing.csv",
            "model.safetensors",
            "summary.json",
        }
        accuracy = [float(row["accuracy"]) for row in clients]
        assert_allclose(summary["accuracy_mean"], sum(accuracy) / 8)
        assert_allclose(summary["accuracy_worst"], min(accuracy))
        ledger = runs.table(name, "ledger.csv")
        for way in ("up", "down"):
            total = sum(int(row["bytes"]) for row in ledger if row["direction"] == way)
            assert summary[f"federation_bytes_{way}"] == total
        assert summary["mpi_bytes"] == sum(runs.mpi_bytes(name).values())
        (last,) = runs.table(name, "metrics.csv")
        assert float(last["accuracy_mean"]) == summary["accuracy_mean"]
        assert {row["rank"] for row in runs.table(name, "timing.csv")} == {"0", "1", "2", "3"}
        environment = json.loads((runs.folder / f"tiny-{name}" / "environment.json").read_text())
        assert environment["ranks"] == 4


@pytest.mark.skipif(
    "MPIFL_OTHER_PYTHON" not in os.environ, reason="MPIFL_OTHER_PYTHON names no second environment"
)
def test_another_mpi_gives_the_same_digests(runs_at, mpirun, tmp_path):
    """MPIFL_OTHER_PYTHON is the interpreter of an environment with the other of Open MPI and MPICH."""
    program = (SCRIPT, CONFIG, tmp_path, json.dumps(RUNS))
    end = mpirun(3, *program, timeout=600, env=worlds.PYTHONPATH, python=os.environ["MPIFL_OTHER_PYTHON"])
    assert end.returncode == 0, end.stderr
    there, alone = Runs(tmp_path), runs_at("alone")
    libraries = set()
    for name in RUNS:
        assert there.summary(name)["digest"] == alone.summary(name)["digest"], name
        environment = json.loads((tmp_path / f"tiny-{name}" / "environment.json").read_text())
        libraries.add(environment["mpi"].split()[0])
    assert len(libraries) == 1
