"""Replayed traces."""

from __future__ import annotations

from math import inf

from mpifl.simulation.trace import Trace


def test_a_trace_tells_each_start_once_and_goes_on_from_its_place(tmp_path):
    """Clients 0 and 1 start at 0, client 0 again at 1.5."""
    file = tmp_path / "events.csv"
    file.write_text("time,client,visit,start,read_version\n1.5,0,0,0,0\n2.0,1,0,0,0\n3.0,0,1,1.5,1\n")
    trace = Trace(str(file), 2)
    assert trace.starting(0.0, 0, set()) == [(0, 0), (1, 0)]
    assert trace.starting(0.0, 0, set()) == []
    assert (trace.next_time(), trace.pop().client, trace.next_start()) == (1.5, 0, 1.5)
    again = Trace(str(file), 2)
    again.load_state_dict(trace.state_dict())
    assert again.starting(0.0, 0, set()) == []
    assert (again.next_time(), again.starting(1.5, 1, {1})) == (2.0, [(0, 1)])
    assert again.arrival(0, 1) == 3.0
    assert (again.next_start(), trace.next_start()) == (inf, 1.5)


def test_starts_of_one_instant_wait_for_their_version_and_their_client(tmp_path):
    """Visits take no time: client 0 makes three at 0, the last of them on new rows; also after saving."""
    file = tmp_path / "events.csv"
    rows = ["0,0,0,0,0", "0,1,0,0,0", "0,0,1,0,0", "0,0,2,0,1"]
    file.write_text("\n".join(["time,client,visit,start,read_version", *rows]) + "\n")
    trace, again = Trace(str(file), 2), Trace(str(file), 2)
    assert trace.starting(0.0, 0, set()) == [(0, 0), (1, 0)]
    assert trace.starting(0.0, 0, {0, 1}) == []
    assert trace.next_start() == inf
    again.load_state_dict(trace.state_dict())
    for one in (trace, again):
        assert one.starting(0.0, 0, {1}) == [(0, 0)]
        assert one.starting(0.0, 0, {1}) == []
        assert one.starting(0.0, 1, {1}) == [(0, 1)]
