"""What MPI carried, counted by call and purpose."""

from __future__ import annotations

import pytest

from mpifl.comm.transport import MpiTraffic


def test_traffic_counts_calls_messages_and_bytes_by_purpose():
    traffic = MpiTraffic()
    with traffic("bcast", "rows", sent=100, messages=2):
        pass
    with traffic("bcast", "rows", sent=10, messages=1):
        pass
    with traffic("send", "notes", sent=1):
        pass
    rows = {(r["call"], r["purpose"]): r for r in traffic.rows(3)}
    assert {k: rows["bcast", "rows"][k] for k in ("rank", "calls", "messages", "bytes")} == {
        "rank": 3,
        "calls": 2,
        "messages": 3,
        "bytes": 110,
    }
    assert traffic.bytes == 111


def test_traffic_counts_a_call_that_failed_too():
    traffic = MpiTraffic()

    def fail():
        with traffic("send", "notes", sent=5):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert traffic.bytes == 5
