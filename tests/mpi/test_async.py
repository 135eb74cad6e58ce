"""Asynchronous runs over ranks: the same digest for any number of them, and replays of what really
happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import toy
from support.runs import CONFIG, SCRIPT, Alone, Runs, columns_of

pytestmark = pytest.mark.in_turn

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
    f"real-{name}": [*RUNS[name], "--clock", "{name: wall, scale: 0.004}"]
    for name in ("fedasync", "fedbuff", "ccfl_delayed", "drift")
}


def replayed(name: str, trace: str | Path) -> list[str]:
    """Return the options of a run that follows a trace."""
    return [*RUNS[name], "--clock", f"{{name: replay, trace: {trace}}}"]


AGAIN = {name: replayed(name.removeprefix("real-"), f"FOLDER/tiny-{name}/events.csv") for name in REAL}
REFUSED = {  # the trace of another run, long enough
    "refused": [*replayed("fedbuff", "FOLDER/tiny-fedasync/events.csv"), "--rounds", "4"]
}
LATER = ("scaffold", "linked", "real-fedasync", "real-drift")  # nightly
FEW_REAL = [name for name in REAL if name not in LATER]


def replays(names: Iterable[str]) -> dict[str, list[str]]:
    """Return runs on the wall clock, and those that replay them."""
    return {name: REAL[name] for name in names} | {f"again-{name}": AGAIN[name] for name in names}


RANKS = {  # number of ranks -> the runs of its only start
    3: {name: RUNS[name] for name in RUNS if name not in LATER} | replays(FEW_REAL) | REFUSED,
    2: RUNS | replays(REAL),
    6: {name: RUNS[name] for name in ("fedbuff", "ccfl")},
}


class Place(Runs):
    """Runs on so many ranks, made in one start.

    Attributes:
        said: what it wrote to stderr.
    """

    def __init__(self, mpirun: Any, folder: Path, cache: Path, ranks: int) -> None:
        super().__init__(folder)
        program = (SCRIPT, CONFIG, folder, json.dumps(RANKS[ranks]), "--data.cache", cache)
        end = mpirun(ranks, *program, timeout=600, env=toy.PYTHONPATH)
        assert end.returncode == 0, end.stderr
        self.said = end.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A folder of prepared data that all runs share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def at(mpirun, tmp_path_factory, cache):
    """Return a function ranks -> a place, each made once."""
    places: dict[int, Place] = {}

    def make(ranks: int) -> Place:
        if ranks not in places:
            places[ranks] = Place(mpirun, tmp_path_factory.mktemp("runs"), cache, ranks)
        return places[ranks]

    return make


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> Alone:
    """The runs of one process."""
    return Alone(tmp_path_factory.mktemp("alone"), RUNS, "--data.cache", str(cache))


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 6))])
def test_virtual_time_gives_the_same_run_on_any_number_of_ranks(ranks, alone, at):
    there = at(ranks)
    for name in RUNS.keys() & RANKS[ranks].keys():
        assert there.summary(name)["ranks"] == ranks
        one, other = alone.summary(name), there.summary(name)
        assert one["digest"] == other["digest"], name
        assert alone.table(name, "events.csv") == there.table(name, "events.csv"), name
        assert alone.table(name, "ledger.csv") == there.table(name, "ledger.csv"), name
        for figure in ("accuracy_mean", "accuracy_worst", "federation_bytes_up", "federation_bytes_down"):
            assert one[figure] == other[figure], name
        files = [place.of(name) / "metrics.csv" for place in (alone, there)]
        assert columns_of(files[0]) == columns_of(files[1]), name


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_replay_of_a_wall_clock_run_is_that_run_on_any_number_of_ranks(ranks, at, cache, tmp_path):
    """What several ranks really did, replayed by them and by one process."""
    there, names = at(ranks), REAL.keys() & RANKS[ranks].keys()
    traces = {f"again-{name}": replayed(name[5:], there.of(name) / "events.csv") for name in names}
    for here in (there, Alone(tmp_path, traces, "--data.cache", str(cache))):
        for name in names:
            real, again = there.summary(name), here.summary(f"again-{name}")
            assert real["digest"] == again["digest"], name
            assert there.table(name, "events.csv") == here.table(f"again-{name}", "events.csv"), name
    assert {row["accepted"] for row in there.table("real-fedbuff", "events.csv")} <= {"0", "1"}


def test_a_trace_of_another_run_is_refused_on_all_ranks_with_one_line(at):
    """The error is found on rank 0 while the others serve: they must hear of it."""
    said = at(3).said
    assert "not a trace of such a run" in said
    assert said.count("mpifl: ") == 1
    assert "Traceback" not in said


def test_a_run_says_how_asynchronous_it_was(at):
    """Concurrency, staleness, refusals, updates per second; the workers' idle share of their serving time."""
    place = at(3)
    for name in RUNS.keys() & RANKS[3].keys():
        said, events = place.summary(name)["asynchronous"], place.table(name, "events.csv")
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
    with np.load(place.of("ccfl_one") / "algorithm_state.npz") as state:
        assert_array_equal(state["u"], np.ones((8, 1)))
        assert state["changed"][0] > 0, "it moved"
