"""`output.trace`: what the trace of a run on three ranks says, and that it changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import deaths
from support import toy
from support.runs import CONFIG, SCRIPT, Runs, assert_same_run
from support.traces import assert_nested, bars, bytes_sent, end_of, events_of, shares, visits_of

from mpifl import cli
from mpifl.core.timing import PHASES
from mpifl.results.trace_file import RANKS, VIRTUAL

TRACE = ["--output.trace", "true"]
HALF = ["--participation", "0.5", "--rounds", "3"]
EVENTS = [
    *("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 3, max_staleness: 2}", "--rounds", "12"),
    *("--cohort_size", "5", "--delay", "{name: exponential, mean_s: 2}"),
]
KINDS = {"fedavg": HALF, "scaffold": ["--algorithm", "scaffold", *HALF], "fedbuff": EVENTS}
RUNS = {name: [*options, *TRACE] for name, options in KINDS.items()}
RUNS |= {f"{name}-off": KINDS[name] for name in ("fedavg", "fedbuff")}


@pytest.fixture(scope="module")
def there(mpirun, tmp_path_factory) -> Runs:
    """Runs on three ranks, made in one start."""
    folder = tmp_path_factory.mktemp("runs")
    end = mpirun(3, SCRIPT, CONFIG, folder, json.dumps(RUNS), timeout=600, env=toy.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    return Runs(folder)


@pytest.mark.parametrize("name", KINDS)
def test_a_trace_is_valid_and_its_bars_nest(name, there):
    events = events_of(there.of(name))
    for rank in range(3):
        mine = bars(events, rank)
        assert_nested(mine)
        assert {e["name"] for e in mine if e["cat"] == "phase"} <= {*PHASES}
    rows = {e["tid"] for e in events if e["pid"] == RANKS and e["ph"] == "M" and e["name"] == "thread_name"}
    assert rows == {1, 2, 3}


@pytest.mark.parametrize("name", KINDS)
def test_all_of_a_ranks_time_between_start_and_end_of_the_rounds_lies_in_a_phase(name, there):
    """The engine's own time, beside the other phases, is small; how small depends on what else runs here."""
    events = events_of(there.of(name))
    for rank in range(3):
        spent = shares(events, rank)
        assert sum(spent.values()) == pytest.approx(1, abs=1e-4)
        assert spent["engine"] < 0.5, spent
        assert spent["train" if rank else "wait"] > 0
    for command in bars(events, 1, "command"):
        inside = [e for e in bars(events, 1, "phase") if command["ts"] <= e["ts"] < end_of(command)]
        assert inside, command


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_its_calls_are_those_of_mpi_traffic(name, there):
    sent = bytes_sent(events_of(there.of(name)))
    for row in there.table(name, "mpi_traffic.csv"):
        key = int(row["rank"]), row["call"], row["purpose"]
        assert sent.pop(key, 0) == int(row["bytes"]), key
    assert not any(sent.values()), "of calls that the table does not have"


@pytest.mark.parametrize("name", KINDS)
def test_each_message_has_an_arrow_forward_in_time(name, there):
    ends: dict[str, dict[int, float]] = {"s": {}, "f": {}}
    for event in events_of(there.of(name)):
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], "one arrow for each message"
            ends[event["ph"]][event["id"]] = event["ts"]
    assert set(ends["s"]) == set(ends["f"]) != set()
    assert all(ends["s"][number] < arrived for number, arrived in ends["f"].items())


@pytest.mark.parametrize("name", KINDS)
def test_each_visit_that_trained_is_in_one_training_phase(name, there):
    rows = there.table(name, "events.csv" if name == "fedbuff" else "visits.csv")
    trained = sorted(
        (int(row["client"]), int(row["visit"])) for row in rows if row.get("trains", "True") == "True"
    )
    assert trained
    found = visits_of(events_of(there.of(name)), "train")
    if name == "fedbuff":  # visits under way at the end have trained, too
        assert len(found) == len({*found})
        assert {*trained} <= {*found}
    else:
        assert found == trained


def test_the_rows_in_virtual_time_are_the_arrivals(there):
    drawn = [e for e in events_of(there.of("fedbuff")) if e["ph"] == "X" and e["pid"] == VIRTUAL]
    arrived = there.table("fedbuff", "events.csv")
    assert len(drawn) == len(arrived) > 12
    for event, row in zip(drawn, arrived, strict=True):
        assert event["tid"] == int(row["client"]) + 1
        assert event["ts"] == pytest.approx(1e6 * float(row["start"]), abs=1e-3)
        assert end_of(event) == pytest.approx(1e6 * float(row["time"]), abs=2e-3)
        assert event["args"]["visit"] == int(row["visit"])
        assert (event["name"] == "visit") == (row["accepted"] == "1")
    assert {row["accepted"] for row in arrived} == {"0", "1"}
    assert not [e for e in events_of(there.of("fedavg")) if e["pid"] == VIRTUAL]


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_no_number_changes(name, there):
    assert_same_run(there.of(name), there.of(f"{name}-off"))
    for file in ("ledger.csv", "computation.csv"):
        assert there.table(name, file) == there.table(f"{name}-off", file), file
    assert not (there.of(f"{name}-off") / "trace.json").exists()
    if name == "fedavg":  # messages of an asynchronous run depend on what is ready first
        calls = [
            {
                (r["rank"], r["call"], r["purpose"]): r["messages"]
                for r in there.table(which, "mpi_traffic.csv")
            }
            for which in (name, f"{name}-off")
        ]
        assert calls[0] == calls[1], "the comparison of clocks and the trace itself are not counted"


CLUMSY = '''
from dataclasses import dataclass

from mpifl.algorithms.fedavg import FedAvg as Base
from mpifl.core.algorithm import Algorithm


@dataclass(frozen=True)
class Clumsy(Algorithm):
    """FedAvg; client 5 fails in a visit."""

    paper = Base.paper

    def setup(self, init, fingerprints, key):
        return Base().setup(init, fingerprints, key)

    def aggregate(self, server, notes):
        return Base().aggregate(server, notes)

    def local_update(self, message, state, client, key):
        if client.id == 5 and client.visit == VISIT:
            raise OSError("a disk that hiccups")
        return Base().local_update(message, state, client, key)
'''


def failed(folder: Path, visit: int = 1) -> list[str]:
    """Return the options of a run whose client 5 fails in a visit."""
    (folder / "clumsy.py").write_text(CLUMSY.replace("VISIT", str(visit)))
    place = ["--output.folder", str(folder), "--output.id", "failed", "--data.cache", str(folder / "cache")]
    return ["run", str(CONFIG), "--quiet", "--algorithm", f"{folder / 'clumsy.py'}:Clumsy", *place, *TRACE]


@pytest.mark.parametrize(("visit", "more"), [(1, []), (3, EVENTS[2:])], ids=["rounds", "events"])
def test_a_client_that_fails_leaves_a_trace_that_ends_with_its_visit(visit, more, tmp_path, capsys):
    assert cli.main([*failed(tmp_path, visit), *more]) == 1
    assert "hiccups" in capsys.readouterr().err
    events = events_of(Runs(tmp_path).of("failed"))
    assert_nested(bars(events, 0))
    last = bars(events, 0, "phase")[-1]
    assert (last["name"], last["args"]["client"], last["args"]["visit"]) == ("train", 5, visit)
    if more:
        drawn = [e for e in events if e["ph"] == "X" and e["pid"] == VIRTUAL]
        assert len(drawn) == len(Runs(tmp_path).table("failed", "events.csv")) > 0


@pytest.mark.nightly
def test_a_client_that_fails_on_a_worker_leaves_the_trace_of_all_ranks(mpirun, tmp_path):
    end = mpirun(3, "-m", "mpifl", *failed(tmp_path))
    assert end.returncode == 1
    events = events_of(Runs(tmp_path).of("failed"))
    assert all(bars(events, rank, "phase") for rank in range(3))
    assert (5, 1) in visits_of(events, "train")


STOP = """
import os, signal


class Stop:
    def on_round(self, round):
        if round.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.nightly
def test_a_stopped_and_resumed_run_has_a_trace_of_each_part(tmp_path):
    place = [
        "--output.folder",
        str(tmp_path),
        "--output.id",
        "parts",
        "--data.cache",
        str(tmp_path / "cache"),
    ]
    words = ["run", str(CONFIG), "--quiet", *deaths.RUNS["fedbuff"], *place, *TRACE]
    (tmp_path / "stop.py").write_text(STOP)
    assert cli.main([*words, "--output.callbacks", f"['{tmp_path}/stop.py:Stop']"]) == 75
    folder = Runs(tmp_path).of("parts")
    before = len(events_of(folder))
    assert cli.main(["resume", str(folder), "--quiet"]) == 0
    assert len(json.loads((folder / "trace-1.json").read_text())["traceEvents"]) == before
    drawn = [e for e in events_of(folder) if e["ph"] == "X" and e["pid"] == VIRTUAL]
    assert len(drawn) == len(Runs(tmp_path).table("parts", "events.csv")), "of both parts"
