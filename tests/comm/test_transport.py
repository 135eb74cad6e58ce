"""What MPI carried, counted by call and purpose."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from support.each import for_each

from mpifl.comm import transport as transports
from mpifl.comm.single import Single
from mpifl.comm.transport import Mismatch, MpiTraffic, device_ranks, divided, on_server
from mpifl.core import timing
from mpifl.core.timing import Stopwatch


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


def test_what_is_done_on_the_server_is_counted_under_its_purpose(monkeypatch):
    alone, purposes = Single(), []
    monkeypatch.setattr(alone, "bcast", lambda value, purpose: purposes.append(purpose) or value)
    assert on_server(alone, lambda: 7) == 7
    assert on_server(alone, lambda: 8, everywhere=False, purpose="end") == 8
    assert purposes == ["start", "end"]


def test_traffic_counts_a_call_that_failed_too():
    traffic = MpiTraffic()

    def fail():
        with traffic("send", "notes", sent=5):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert traffic.bytes == 5


@pytest.mark.parametrize(
    ("nodes", "count", "groups"),
    [
        ((0, 0, 0, 0), 1, [[0, 1, 2, 3]]),
        ((0, 0, 0, 0), 2, [[0, 1], [2, 3]]),
        ((0, 0, 0, 0, 0), 2, [[0, 1, 2], [3, 4]]),  # the first groups are the larger ones
        ((0, 1, 0, 1), 2, [[0, 2], [1, 3]]),  # ranks that a launcher placed node by node
        ((0, 1, 0, 1, 0, 1), 4, [[0, 2], [4, 1], [3], [5]]),
        ((0, 0, 0), 3, [[0], [1], [2]]),
    ],
)
def test_groups_are_of_equal_size_and_of_neighbours(nodes, count, groups):
    assert divided(nodes, count) == groups


def test_workers_of_all_groups_share_the_devices_of_a_node_before_servers_do():
    """Four groups of a server and a worker: on four GPUs each worker has its own, whatever its rank."""
    assert device_ranks((0,) * 8, divided((0,) * 8, 4)) == [4, 0, 5, 1, 6, 2, 7, 3]
    assert device_ranks((0,) * 4, divided((0,) * 4, 4)) == [0, 1, 2, 3], "each trains"
    assert device_ranks((0, 0, 1, 1), [[0, 1, 2, 3]]) == [1, 0, 0, 1]


def test_one_process_is_one_group():
    alone = Single()
    assert alone.split(1) is alone


def test_a_run_that_would_end_the_process_fails_its_test_instead(ends):
    """At once, and at its end if that was in another thread, whose failure no test sees."""
    with pytest.raises(pytest.fail.Exception, match="exit code 3"):
        Single().abort(3)
    assert ends == [3]
    ends.clear()


@for_each(
    ("call", "said"),
    [
        (lambda t: t.Bcast(torch.zeros(2, 3, dtype=torch.float64), "rows"), "rows: .*float64 .2, 3.*float32"),
        (lambda t: t.Bcast(torch.zeros(3, 2).T, "rows"), "not contiguous"),
        (lambda t: t.Reduce(torch.zeros(1, 3), "mix", torch.int64), "mix: .*float32 .*int64"),
        (lambda t: t.Gatherv(torch.zeros(2, 3), [1], "mix"), r"\[2, 3\].*\[1, any\]"),
        (lambda t: t.Gatherv(torch.zeros(3), [3], "mix"), r"\[3\].*\[3, any\]"),
        (lambda t: t.Reduce_scatter(torch.zeros(2, 3), [3], "mix"), r"\[2, 3\].*\[3, any\]"),
        (lambda t: t.Alltoallv(torch.zeros(5), [4], [4], "robust"), r"\[5\].*\[4\]"),
        (lambda t: t.Alltoallv(torch.zeros(5), [4], [4], "asked", [2]), r"5 numbers, parts end behind"),
        (lambda t: t.Allgatherv(torch.zeros(5), [4], "asked"), r"\[5\].*\[4\]"),
    ],
)
def test_a_block_of_another_type_or_size_than_agreed_never_reaches_mpi(call, said):
    with pytest.raises(Mismatch, match=said):
        call(Single())


def test_every_exchange_of_ranks_tells_the_loss_of_one():
    """`guarded` turns MPI's error about a lost rank into `RankLost`, by which runs go on without it."""
    source = Path(transports.__file__).with_name("mpi.py").read_text()
    (mpi,) = (c for c in ast.parse(source).body if isinstance(c, ast.ClassDef) and c.name == "Mpi")
    methods = {f.name: f for f in mpi.body if isinstance(f, ast.FunctionDef)}
    guarded = {name for name, f in methods.items() if "guarded" in map(ast.unparse, f.decorator_list)}
    exchanges = {
        "scatter",
        "scatter_rows",
        "gather_rows",
        "gather",
        "gather_traffic",
        "run_guarded",
        "barrier",
    }
    exchanges |= {"barrier", "Bcast", "Reduce", "Gatherv", "Reduce_scatter", "Alltoallv", "Allgatherv"}
    exchanges |= {"isend", "poll", "compare_clocks"}
    assert guarded == exchanges


def test_calls_that_only_wait_count_as_waiting_wherever_they_are_made(monkeypatch):
    now = 10.0
    for module in (timing, transports):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    traffic, watch = MpiTraffic(), Stopwatch()
    traffic.watch = watch
    with watch("reduce"):
        now += 1
        with traffic("barrier", "control"):
            now += 4
        with traffic("reduce", "mix:model"):
            now += 2
    with watch("wait"), traffic("receive", "orders"):
        now += 8
    seconds = watch.take()
    assert (seconds["reduce"], seconds["wait"]) == (3, 12)
    assert sum(seconds[phase] for phase in timing.PHASES) == seconds["elapsed"] == 15
