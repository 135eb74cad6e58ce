"""`trace.json`: times, names and arguments of its events."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from support.traces import assert_nested, bars, bytes_sent, events_of

from mpifl.core.timeline import Recording
from mpifl.core.timing import ClockReading
from mpifl.results import trace_file
from mpifl.results.trace_file import Alignment, append, create, lines_of_arrivals, lines_of_rank

SAME = Alignment(ClockReading(100.0, began=100.0))


def test_times_of_a_rank_are_moved_to_the_clock_of_rank_0():
    """The clock of this rank is 10 s behind at its 90 s, and 10.5 s at its 190 s: it loses 5 ms a second."""
    drifts = Alignment(ClockReading(90.0, 10.0, 2e-5, began=100.0), ClockReading(190.0, 10.5, 1e-5, 200.0))
    assert drifts.nanoseconds(90.0) == 0
    assert drifts.nanoseconds(140.0) == 50_250_000_000
    assert drifts.nanoseconds(190.0) == 100_500_000_000
    assert drifts.error == 2e-5
    steady = Alignment(ClockReading(90.0, 10.0, 2e-5, began=100.0))
    assert steady.nanoseconds(190.0) == 100_000_000_000


def recorded() -> Recording:
    """Return a recording of 1 second: a round, a phase of two clients in it, and a message."""
    recording = Recording()
    recording.at_step(2)
    recording.start = 100.0
    recording.calls_before("send", "layout", 50, 2)
    recording.enter("train", 100.25, [3, 4], [0, 1])
    recording.leave("train", 100.25, 100.5, [3, 4], [0, 1])
    recording.call("reduce", 'mix:"model"', 100.6, 100.7, 4096, 1)
    recording.sent(17)
    recording.received(18)
    return recording


def test_events_have_the_names_arguments_and_microseconds_of_the_format(tmp_path):
    create(tmp_path, {"run": "tiny"})
    append(tmp_path, lines_of_rank(recorded(), 1, 3, SAME, ""))
    events = events_of(tmp_path)
    train, reduce = bars(events, 1, "phase", "mpi")
    assert (train["name"], train["ts"], train["dur"]) == ("train", 250_000.0, 250_000.0)
    assert train["args"] == {"step": 2, "clients": [3, 4], "visits": [0, 1]}
    assert reduce["args"] == {"purpose": 'mix:"model"', "bytes": 4096, "messages": 1}
    assert bytes_sent(events) == {(1, "send", "layout"): 50, (1, "reduce", 'mix:"model"'): 4096}
    assert [(e["ph"], e["id"]) for e in events if e["ph"] in "sf"] == [("s", 17), ("f", 18)]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert len(names) == 1
    assert names[0].startswith("rank 1: worker, ")


def test_what_is_before_the_begin_of_the_trace_stands_at_its_begin(tmp_path):
    """Perfetto drops events of a time below 0, and counts them as an error of the file.

    The trace began at 100.3 s on the clock of the rank, within its training.
    """
    later = Alignment(ClockReading(100.3, 0.0, 0.0, began=100.3))
    create(tmp_path, {})
    append(tmp_path, lines_of_rank(recorded(), 0, 1, later, ""))
    found = {bar["cat"]: (bar["ts"], bar["dur"]) for bar in bars(events_of(tmp_path), 0)}
    assert found["before"] == (0.0, 0.0)
    assert found["phase"] == (0.0, 200_000.0)
    assert found["mpi"] == (300_000.0, 100_000.0)


def test_the_name_of_a_row_says_how_exact_its_times_are_and_what_was_dropped(tmp_path):
    recording = Recording(most=2)
    for number in range(1005):
        recording.call("send", "notes", number, number, 1, 1)
    far = Alignment(ClockReading(0.0, 1.0, 25e-6))
    name = json.loads(lines_of_rank(recording, 4, 9, far, "")[0])["args"]["name"]
    assert name.endswith(", clock ± 25 us, 1,003 earlier events dropped")


def test_bars_nest_after_times_are_rounded(tmp_path):
    recording, start = Recording(), 100.0
    for number in range(2000):  # starts and ends that agree to the last bits of a double
        low, high = start + number * 1.1e-6, start + (number + 1) * 1.1e-6
        recording.enter("wait", low, -1, -1)
        recording.call("send", "notes", low + 1e-10, high - 1e-10, 1, 1)
        recording.leave("wait", low, high, -1, -1)
    create(tmp_path, {})
    append(tmp_path, lines_of_rank(recording, 0, 1, SAME, ""))
    assert_nested(bars(events_of(tmp_path), 0))


def test_a_phase_under_way_and_a_lost_rank_are_drawn(tmp_path):
    recording = Recording()
    recording.enter("train", 100.0, 3, 1)
    recording.lost(2)
    create(tmp_path, {})
    append(tmp_path, lines_of_rank(recording, 0, 3, SAME, "rank 2 on node7, pid 12"))
    events = events_of(tmp_path)
    (open_,) = [e for e in events if e["ph"] == "B"]
    assert (open_["name"], open_["args"]) == ("train", {"step": 0, "client": 3, "visit": 1})
    (lost,) = [e for e in events if e["ph"] == "i"]
    assert lost["tid"] == 3, "the row of rank 2"
    assert lost["args"]["ranks"] == "rank 2 on node7, pid 12"


ARRIVALS = """time,client,visit,start,read_version,arrival_version,staleness,weight,accepted,device
2.5,7,0,0.0,0,0,0,0.5,1,phone
3.0,2,0,0.5,0,1,1,0.0,0,
"""


def test_clients_have_rows_in_virtual_time(tmp_path):
    (tmp_path / "events.csv").write_text(ARRIVALS)
    lines = [json.loads(line) for line in lines_of_arrivals(tmp_path / "events.csv", "seconds")]
    named = {e["tid"]: e["args"]["name"] for e in lines if e["name"] == "thread_name"}
    assert named == {3: "client 2", 8: "client 7 (phone)"}
    first, second = [e for e in lines if e["ph"] == "X"]
    assert (first["name"], first["tid"], first["ts"], first["dur"]) == ("visit", 8, 0.0, 2.5e6)
    assert (second["name"], second["ts"], second["dur"]) == ("visit, not accepted", 0.5e6, 2.5e6)
    assert second["args"]["staleness"] == 1
    assert lines_of_arrivals(tmp_path / "none.csv", "seconds") == []


def test_only_the_last_arrivals_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MOST_ARRIVALS", 1)
    (tmp_path / "events.csv").write_text(ARRIVALS)
    lines = [json.loads(line) for line in lines_of_arrivals(tmp_path / "events.csv", "server steps")]
    assert lines[0]["args"]["name"] == "virtual time of clients, in server steps, 1 earlier arrivals dropped"
    assert [e["args"]["client"] for e in lines if e["ph"] == "X"] == [2]


def _add(folder: Path, number: int) -> None:
    append(folder, lines_of_rank(recorded(), number, 8, SAME, ""))


def test_ranks_that_write_at_a_time_leave_a_whole_file(tmp_path):
    create(tmp_path, {})
    ranks = [multiprocessing.get_context("fork").Process(target=_add, args=(tmp_path, n)) for n in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    events = events_of(tmp_path)
    assert {e["tid"] for e in events if e["ph"] == "X"} == {*range(1, 9)}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_lock_of_a_rank_that_was_killed_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "LOCK_SECONDS", 0.05)
    create(tmp_path, {})
    (tmp_path / "trace.json.lock").touch()
    start = time.monotonic()
    _add(tmp_path, 0)
    assert time.monotonic() - start < 5
    assert bars(events_of(tmp_path), 0)


def test_a_resumed_run_keeps_the_trace_before(tmp_path):
    create(tmp_path, {})
    _add(tmp_path, 0)
    for _ in range(2):
        create(tmp_path, {})
    assert sorted(os.listdir(tmp_path)) == ["trace-1.json", "trace-2.json", "trace.json"]
    assert not bars(events_of(tmp_path), 0)
    assert '"train"' in (tmp_path / "trace-1.json").read_text()


@pytest.mark.parametrize("present", [True, False])
def test_a_rank_that_does_not_see_the_file_of_rank_0_writes_its_own(present, tmp_path):
    if present:
        create(tmp_path, {})
    _add(tmp_path, 5)
    assert bars(events_of(tmp_path), 5)
