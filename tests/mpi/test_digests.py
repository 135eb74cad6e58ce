"""Whole runs: the same digest for any number of ranks, and bytes on the wire as Open MPI's monitor counts
them.

All runs of one number of ranks share one mpirun (`many.py`): starting Python costs more than the runs. Other
tests' claims that a key gives the same tables for any number of ranks stand here, too, as runs of `RUNS`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns.mpi_bytes import ALGORITHMS, parse_monitoring
from numpy.testing import assert_allclose
from support import toy
from support.runs import CONFIG, HOSTED, RUNS, SCRIPT, TABLES, Alone, Runs, columns_of

from mpifl.results.reader import load

pytestmark = pytest.mark.in_turn

FEW = (  # on one process and on three ranks; all of them, also on other numbers of ranks, are nightly
    "costs-all-looks",
    *("fedavg", "fedavg-gathered", "fedavg-measured", "ifca", "cfl", "emdcfl-half", "emdcfl-server"),
    *("pacfl", "ucfl", "ucfl-reduced", "ucfl-4"),
    *("compressed", "private", "secure", "partial-work", "median", "norm-bound"),
    *("drift", "drift-by-time-events", "events-looks", "events-looks-timed", "events-split"),
    *("scaffold-hosted", "ucfl-hosted", "fedbuff-hosted", "stopped-at-target"),
    *("own-metric", "lora-products", "updates", "evaluated", "started"),
    "next_token-fedem",
)
PLACES = {  # name -> ranks, options of all runs, their names
    "3 ranks": (3, ["--system.placement_seed", "1"], FEW),  # clients change places
    "2 ranks": (2, [], [*RUNS]),
    "4 ranks": (4, ["--system.placement_seed", "1"], [*RUNS]),
    "6 ranks": (6, [], [*RUNS]),
}
MONITOR = {"OMPI_MCA_pml_monitoring_enable": "2", "OMPI_MCA_pml_monitoring_enable_output": "3", **ALGORITHMS}
CALLS = ("bcast", "reduce", "gatherv", "reduce_scatter", "alltoallv", "allgatherv", "send")
USUAL, *NIGHTLY = PLACES


class There(Runs):
    """The runs of a place, in one start, watched by Open MPI's monitor."""

    def __init__(self, folder: Path, place: str) -> None:
        super().__init__(folder)
        self.ranks, self.options, self.names = PLACES[place]
        self.prefix = folder / "monitor" / "m"

    def monitored(self) -> dict[str, Any]:
        """Return what the monitor saw; without one, skip the test."""
        if not list(self.prefix.parent.iterdir()):
            pytest.skip("this MPI has no monitoring (Open MPI has)")
        return parse_monitoring(str(self.prefix))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A folder of prepared data that all runs share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory) -> Alone:
    """The runs of one process."""
    return Alone(tmp_path_factory.mktemp("alone"), RUNS, "--data.cache", str(cache))


@pytest.fixture(
    scope="module", params=[USUAL, *(pytest.param(p, marks=pytest.mark.nightly(seconds=60)) for p in NIGHTLY)]
)
def there(request, mpirun, cache, tmp_path_factory) -> There:
    """The runs over ranks."""
    runs = There(tmp_path_factory.mktemp("runs"), request.param)
    runs.prefix.parent.mkdir()
    env = {**toy.PYTHONPATH, **MONITOR, "OMPI_MCA_pml_monitoring_filename": str(runs.prefix)}
    own = {  # hosting fixes the places of clients
        name: [*RUNS[name], *(() if HOSTED[0] in RUNS[name] else runs.options)] for name in runs.names
    }
    program = SCRIPT, CONFIG, runs.folder, json.dumps(own)
    end = mpirun(runs.ranks, *program, "--data.cache", cache, timeout=600, env=env)
    assert end.returncode == 0, end.stderr
    return runs


def test_digests_and_tables_do_not_depend_on_the_ranks(alone, there):
    for name in there.names:
        one, other = alone.summary(name), there.summary(name)
        for summary in (one, other):
            summary["settings"].pop("start", None)  # names the folder of another run
        assert one["ranks"] == 1
        assert other["ranks"] == there.ranks
        for figure in one:
            if figure not in ("ranks", "mpi_bytes", "wall_seconds", "peak_bytes", "asynchronous"):
                assert one[figure] == other[figure], f"{name}: {figure}"
        for file in TABLES:
            mine, theirs = (columns_of(runs.of(name) / file) for runs in (alone, there))
            assert mine == theirs, f"{name}: {file}"


def test_matrices_distances_and_updates_do_not_either(alone, there):
    assert "client_distance" in columns_of(alone.of("emdcfl-half") / "metrics.csv")
    mine, theirs = (dict(np.load(runs.of("emdcfl-half") / "matrices.npz")) for runs in (alone, there))
    assert [*mine] == ["parameters", "gradients", "angles", "smallest_angles"]
    for name, values in mine.items():
        np.testing.assert_array_equal(theirs[name], values, name)
    one, other = ((runs.of("updates") / "updates.csv").read_bytes() for runs in (alone, there))
    assert one == other
    assert one.count(b"\n") == 1 + 3 * 4 * 2, "a head; rounds, clients, blocks of the network"
    (row,) = alone.table("evaluated", "metrics.csv")
    assert "accuracy_train_standard_error" in row
    assert row["accuracy_finetuned_mean"] != row["accuracy_mean"]


def test_only_the_collective_may_change_without_changing_the_digest(alone, there):
    digests = {name: alone.summary(name)["digest"] for name in there.names}
    assert digests.pop("fedavg-gathered") == digests.pop("fedavg-measured") == digests["fedavg"]
    assert digests.pop("ucfl-reduced") == digests["ucfl"]
    assert digests.pop("emdcfl-server") == digests["emdcfl-half"]
    assert digests.pop("emdcfl-local", digests.get("emdcfl")) == digests.get("emdcfl")
    for name in ("secure", "own-metric", "updates", "evaluated"):
        assert digests.pop(name) == digests["fedavg"], f"{name} changes nothing"
    for name in ("scaffold", "ucfl", "fedbuff"):
        assert digests.pop(f"{name}-hosted") == alone.summary(name)["digest"], f"{name}: where clients are"
    assert len(set(digests.values())) == len(digests), "every other run is one of its own"


def test_the_runs_do_what_they_are_there_for(alone, there):
    """Clusters split, groups are found, and each of the three ways to mix is walked."""
    assert there.summary("cfl")["num_clusters"] >= 3
    assert there.summary("ifca")["num_clusters"] >= 2
    assert there.summary("emdcfl-half")["num_clusters"] >= 2
    several = there.ranks > 2  # workers
    assert (there.mpi_bytes("ucfl")["reduce_scatter"] > 0) == several, "rows live with their readers"
    assert there.mpi_bytes("ucfl-4")["reduce_scatter"] == 0
    assert there.mpi_bytes("fedavg")["reduce"] > 0 == there.mpi_bytes("fedavg")["gatherv"]
    assert there.mpi_bytes("cfl")["gatherv"] > 0, "products of all pairs"
    gathered, reduced = there.mpi_bytes("fedavg-gathered"), there.mpi_bytes("ucfl-reduced")
    assert gathered["gatherv"] > 0 == gathered["reduce"]
    assert reduced["reduce"] > 0 == reduced["reduce_scatter"]
    assert alone.summary("fedavg")["mpi_bytes"] == 0
    looks = Counter[str]()
    for row in there.table("emdcfl-server", "mpi_traffic.csv"):
        looks[row["purpose"]] += int(row["bytes"])
    assert looks["embedding"] > 0
    assert (looks["extractor"] > 0) == several, "one worker hosts all clients"
    assert there.mpi_bytes("median")["alltoallv"] > 0 == there.mpi_bytes("median")["reduce"]
    assert there.mpi_bytes("norm-bound")["alltoallv"] > 0 < there.mpi_bytes("norm-bound")["reduce"]


def test_statistics_before_training_come_by_gatherv(there):
    """PACFL: 32 bytes of each worker, no computation; of each client U [64, 30], its size, 3 integers."""
    rows = [row for row in there.table("pacfl", "mpi_traffic.csv") if row["purpose"] == "statistics"]
    sent = Counter({row["call"]: 0 for row in rows})
    for row in rows:
        sent[row["call"]] += int(row["bytes"])
    assert sent["gatherv"] == 32 * (there.ranks - 1) + 8 * (3 * 8 + 64 * 30 * 4 + 8)


def test_costs_that_choose_the_collective_are_measured_and_kept(there):
    costs = [there.environment(name)["mpi_costs"] for name in ("fedavg", "fedavg-measured")]
    assert costs[0] is None
    assert min(costs[1]["latency_s"], costs[1]["bytes_s"]) > 0
    assert set(costs[1]["reduce"]) == {"once_s", "block_s", "byte_s"}
    assert np.isfinite([*costs[1]["gather"].values()]).all()


def test_bytes_are_those_that_open_mpi_monitored(there):
    """Every run, rounds and an asynchronous one, to the byte; `mpi_bytes` is their sum."""
    seen, sent = there.monitored(), there.mpi_bytes(*there.names)
    calls = seen["communicators"]["mpifl"]
    kind = {
        k: sum(count.size for (_, which), count in calls.items() if which == k) for k in ("O2A", "A2O", "A2A")
    }
    assert sent["bcast"] == kind["O2A"]
    assert sent["reduce"] + sent["gatherv"] == kind["A2O"]
    assert sent["reduce_scatter"] + sent["alltoallv"] + sent["allgatherv"] == kind["A2A"]
    assert sent["send"] == sum(count.size for count in seen["point"].values())
    assert sum(there.summary(name)["mpi_bytes"] for name in there.names) == sum(sent.values())
    assert {call for call in CALLS if not sent[call]} <= (
        {"reduce_scatter", "allgatherv"} if there.ranks == 2 else set()
    )


def test_each_rank_counted_what_it_sent_itself(there):
    """Sends by rank, as the monitor has them by sender."""
    seen: Counter[int] = Counter()
    for (rank, _), count in there.monitored()["point"].items():
        seen[rank] += count.size
    own: Counter[int] = Counter()
    for name in there.names:
        for row in there.table(name, "mpi_traffic.csv"):
            own[int(row["rank"])] += int(row["bytes"]) * (row["call"] == "send")
    assert own == seen


def test_federation_bytes_are_the_closed_forms(alone):
    """d = 64 * 12 + 12 + 12 * 10 + 10 = 910 numbers; 4 of 8 clients in 3 rounds, or 8 in 2.

    EMD-CFL: body 780, floor(0.9 * 12) = 10 columns of 32 images, 8 * 7 pairs, one tau each. UCFL: the initial
    model down, a gradient and a variance up before the first round.
    """
    d, pairs = 910, 8 * 7
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
        summary = alone.summary(name)
        assert summary["federation_bytes_up"] == 4 * up, name
        assert summary["federation_bytes_down"] == 4 * down, name


def test_a_run_folder_is_complete_and_its_figures_agree(there):
    for name in there.names:
        summary, clients = there.summary(name), there.table(name, "clients.csv")
        files = {path.name for path in there.of(name).iterdir()}
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
        metric = load(there.of(name)).metric
        values = [float(row[metric.name]) for row in clients]
        assert_allclose(summary[f"{metric.name}_mean"], sum(values) / len(values))
        assert_allclose(summary[f"{metric.name}_worst"], min(values) if metric.better > 0 else max(values))
        ledger = there.table(name, "ledger.csv")
        for way in ("up", "down"):
            total = sum(int(row["bytes"]) for row in ledger if row["direction"] == way)
            assert summary[f"federation_bytes_{way}"] == total
        assert summary["mpi_bytes"] == sum(there.mpi_bytes(name).values())
        *_, last = there.table(name, "metrics.csv")
        assert float(last[f"{metric.name}_mean"]) == summary[f"{metric.name}_mean"]
        assert {row["rank"] for row in there.table(name, "timing.csv")} == {*map(str, range(there.ranks))}
        assert there.environment(name)["ranks"] == there.ranks


@pytest.mark.skipif(
    "MPIFL_OTHER_PYTHON" not in os.environ, reason="MPIFL_OTHER_PYTHON names no second environment"
)
def test_another_mpi_gives_the_same_digests(alone, mpirun, tmp_path):
    """MPIFL_OTHER_PYTHON is the interpreter of an environment with the other of Open MPI and MPICH."""
    program = (SCRIPT, CONFIG, tmp_path, json.dumps(RUNS))
    end = mpirun(3, *program, timeout=600, env=toy.PYTHONPATH, python=os.environ["MPIFL_OTHER_PYTHON"])
    assert end.returncode == 0, end.stderr
    there, libraries = Runs(tmp_path), set()
    for name in RUNS:
        assert there.summary(name)["digest"] == alone.summary(name)["digest"], name
        environment = json.loads((tmp_path / f"tiny-{name}" / "environment.json").read_text())
        libraries.add(environment["mpi"].split()[0])
    assert len(libraries) == 1
