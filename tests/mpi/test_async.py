"""Asynchronous runs over ranks: the same digest for any number of them, and replays of what really
happened.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import worlds
from support.runs import columns_of

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "tiny.yaml"
FEW = ["--cohort_size", "5", "--rounds", "12", "--delay", "{name: exponential, mean_s: 2}"]
CCFL = [
    *("--policy", "client_decides", "--rounds", "16", "--data.scenario"),
    "{name: ccfl, clusters: 2, clients: 8, smallest: 20, largest: 40, test_images: 20, public: 40, exam: 40}",
]
BARS = "bar_loss: -1, bar_gap: -1, bar_distance: -1, pretrain_epochs: 1"
RUNS: dict[str, list[str]] = {
    "fedasync": ["--algorithm", "fedasync", "--policy", "every_arrival", *FEW],
    "fedbuff": ["--algorithm", "fedbuff", "--policy", "{name: buffer, size: 3, max_staleness: 2}", *FEW],
    "ccfl": ["--algorithm", f"{{name: ccfl, {BARS}}}", *CCFL],
    "ccfl_one": [
        "--algorithm",
        f"{{name: ccfl, {BARS}}}",
        *CCFL[:-1],
        CCFL[-1].replace("clusters: 2", "clusters: 1"),
    ],
    "fedsoft": ["--algorithm", "{name: fedsoft_async, pretrain_epochs: 1}", *CCFL],
    "local": ["--algorithm", "local", *CCFL],
    "drift": [
        *("--algorithm", "fedasync", *CCFL, "--delay", "{name: exponential, mean_s: 2}"),
        *("--policy", "{name: client_decides, uploads: {name: drift, threshold: 0.15}}"),
    ],
    "ccfl_delayed": [
        *("--algorithm", f"{{name: ccfl, {BARS}}}", *CCFL, "--delay", "{name: exponential, mean_s: 2}"),
        *("--policy", "{name: client_decides, uploads: when_done}", "--availability", "{on_s: 9, off_s: 3}"),
        *("--network", "{name: links, uplink_bytes_s: 9000, latency_s: 0.1}"),
    ],
    "rates": [
        *("--algorithm", "fedasync", "--rounds", "12", "--availability", "{on_s: 20, off_s: 5}"),
        *("--policy", "{name: client_decides, uploads: {name: rates, mean_s: 3}}"),
    ],
    "waves": ["--algorithm", "scaffold", "--policy", "{name: waves, size: 4, every_s: 1500ms}", *FEW],
    "phones": [
        *("--algorithm", "fedasync", "--policy", "every_arrival", "--cohort_size", "5", "--rounds", "12"),
        *("--devices", "{name: measured, file: phones.csv}", "--per_client", "{0-3: {epochs: 2}}"),
        *("--availability", "{profile: [1, 0.2], day_s: 40}"),
    ],
    "scaffold": ["--algorithm", "scaffold", "--policy", "{name: buffer, size: 2}", *FEW],
    "drawn": ["--algorithm", "fedasync", "--policy", "{name: drawn_staleness, most: 3}", "--rounds", "12"],
    "linked": [
        *("--algorithm", "{name: ifca, num_clusters: 2}", "--policy", "every_arrival", *FEW),
        *(
            "--network",
            "{name: links, uplink_bytes_s: 9000, latency_s: 0.1}",
            "--availability",
            "{on_s: 5, off_s: 5}",
        ),
    ],
}
REAL = {  # on the wall clock, slow clients held back
    name: [*RUNS[name], "--clock", "{name: wall, scale: 0.004}"]
    for name in ("fedasync", "fedbuff", "ccfl", "drift")
}


class Place:
    """Runs on so many ranks (None: no mpirun), each once."""

    def __init__(self, mpirun: Any, folder: Path, cache: Path, ranks: int | None) -> None:
        self.mpirun, self.folder, self.cache, self.ranks = mpirun, folder, cache, ranks

    def run(self, runs: dict[str, list[str]]) -> None:
        """Run all in one start."""
        program = (HERE / "many.py", CONFIG, self.folder, json.dumps(runs), "--data.cache", self.cache)
        end = self.mpirun(self.ranks, *program, timeout=600, env=worlds.PYTHONPATH)
        assert end.returncode == 0, end.stderr

    def summary(self, name: str) -> dict[str, Any]:
        """Return what a run says of itself."""
        return json.loads((self.folder / f"tiny-{name}" / "summary.json").read_text())

    def table(self, name: str, file: str = "events.csv") -> list[dict[str, str]]:
        """Return the rows of a file."""
        with (self.folder / f"tiny-{name}" / file).open() as lines:
            return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def at(mpirun, tmp_path_factory):
    """Return a function ranks -> a place where all virtual runs were made, each place in one start.

    Three ranks also run on the wall clock; one process also replays what they did.
    """
    cache, places = tmp_path_factory.mktemp("cache"), {}

    def make(ranks: int | None) -> Place:
        if ranks not in places:
            runs = RUNS if ranks != 6 else {name: RUNS[name] for name in ("fedbuff", "ccfl")}
            if ranks == 3:
                runs = runs | {f"real-{name}": options for name, options in REAL.items()}
            if ranks is None:
                runs = runs | replays_of(make(3))
            places[ranks] = Place(mpirun, tmp_path_factory.mktemp("runs"), cache, ranks)
            places[ranks].run(runs)
        return places[ranks]

    return make


def replays_of(place: Place) -> dict[str, list[str]]:
    """Return the runs that repeat what happened at a place on the wall clock."""
    traces = {name: place.folder / f"tiny-real-{name}" / "events.csv" for name in REAL}
    return {
        f"again-{name}": [*RUNS[name], "--clock", f"{{name: replay, trace: {trace}}}"]
        for name, trace in traces.items()
    }


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(6, marks=pytest.mark.nightly)])
def test_virtual_time_gives_the_same_run_on_any_number_of_ranks(ranks, at):
    alone, there = at(None), at(ranks)
    for name in RUNS if ranks != 6 else ("fedbuff", "ccfl"):
        assert there.summary(name)["ranks"] == ranks
        one, other = alone.summary(name), there.summary(name)
        assert one["digest"] == other["digest"], name
        assert alone.table(name) == there.table(name), name
        assert alone.table(name, "ledger.csv") == there.table(name, "ledger.csv"), name
        for figure in ("accuracy_mean", "accuracy_worst", "federation_bytes_up", "federation_bytes_down"):
            assert one[figure] == other[figure], name
        files = [place.folder / f"tiny-{name}" / "metrics.csv" for place in (alone, there)]
        assert columns_of(files[0]) == columns_of(files[1]), name


@pytest.mark.parametrize("ranks", [None, 3])
def test_the_replay_of_a_wall_clock_run_is_that_run_on_any_number_of_ranks(ranks, at):
    """What three ranks really did, replayed by one process and by three."""
    there, here = at(3), at(ranks)
    if ranks == 3:
        here.run(replays_of(there))
    for name in REAL:
        real, again = there.summary(f"real-{name}"), here.summary(f"again-{name}")
        assert real["digest"] == again["digest"], name
        assert there.table(f"real-{name}") == here.table(f"again-{name}"), name
    assert {row["accepted"] for row in there.table("real-fedbuff")} <= {"0", "1"}


def test_a_trace_of_another_run_ends_all_ranks_with_one_line(at, mpirun):
    """The error is found on rank 0 while the others serve: they must hear of it."""
    place = at(3)
    trace = place.folder / "tiny-fedasync" / "events.csv"
    options = [*RUNS["fedbuff"], "--clock", f"{{name: replay, trace: {trace}}}"]
    command = [
        "-m",
        "mpifl",
        "run",
        str(CONFIG),
        "--output.folder",
        str(place.folder),
        "--output.id",
        "wrong",
    ]
    end = mpirun(3, *command, *options, "--data.cache", str(place.cache), env=worlds.PYTHONPATH)
    assert end.returncode == 2
    assert "no trace of such a run" in end.stderr
    assert end.stderr.count("mpifl: ") == 1
    assert "Traceback" not in end.stderr


def test_a_run_says_how_asynchronous_it_was(at):
    """Concurrency, staleness, refusals, updates per second; the workers' idle share of their serving time."""
    place = at(3)
    for name in RUNS:
        said, events = place.summary(name)["asynchronous"], place.table(name)
        assert said["arrivals"] == len(events) == sum(said["staleness_histogram"].values())
        assert said["refused"] == sum(row["accepted"] == "0" for row in events)
        lags = [int(row["staleness"]) for row in events]
        assert said["staleness_mean"] == pytest.approx(sum(lags) / len(lags))
        last = place.table(name, "metrics.csv")[-1]
        for figure in ("arrivals", "refusal_rate", "staleness_mean"):
            assert float(last[figure]) == said[figure], (name, figure)
        steps = name in ("ccfl", "ccfl_one", "fedsoft", "local", "drawn")
        at_last = float(events[-1]["time"])
        if name == "waves":  # the clock stops at the end of the last wave
            assert at_last <= said["clock_seconds"] < at_last + 1.5
            assert said["clock_seconds"] % 1.5 == 0
        else:
            assert said["clock_seconds"] == (None if steps else at_last)
        assert len(said["worker_idle_share"]) == 2
        assert all(0 <= share <= 1 for share in said["worker_idle_share"])
        assert 0 < said["server_cpu_share"] < 1.1
    assert place.summary("fedbuff")["asynchronous"]["refused"] > 0
    assert place.summary("fedasync")["asynchronous"]["concurrency"] == pytest.approx(5)
    timing = place.table("fedasync", "timing.csv")
    assert [row["rank"] for row in timing if row["idle"]] == ["1", "2"]


def test_ccfl_reports_before_after_clusters_and_mixtures(at):
    (row,) = at(3).table("ccfl", "metrics.csv")
    for name in ("accuracy_mean", "accuracy_before", "accuracy_received", "accuracy_cluster"):
        assert 0 < float(row[name]) <= 1
    assert float(row["accuracy_received"]) != float(row["accuracy_mean"])
    assert row["accuracy_cluster_all"] == row["accuracy_cluster"], "there is one evaluation"
    assert 0 < float(row["mixture_kl"]) < 5
    (row,) = at(3).table("fedsoft", "metrics.csv")
    assert float(row["mixture_kl"]) > 0
    (row,) = at(3).table("local", "metrics.csv")
    assert "mixture_kl" not in row
    assert "accuracy_received" not in row
    assert row["accuracy_before"] != "", "Local's own model"


def test_ccfl_runs_with_one_cluster(at):
    """The cluster is all of every client: the brackets of Algorithm 2 sum to K - 1 = 0."""
    place = at(3)
    (row,) = place.table("ccfl_one", "metrics.csv")
    assert float(row["mixture_kl"]) == 0
    with np.load(place.folder / "tiny-ccfl_one" / "algorithm_state.npz") as state:
        assert_array_equal(state["u"], np.ones((8, 1)))
        assert state["changed"][0] > 0, "it moved"
