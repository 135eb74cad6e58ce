"""The recording of what a rank does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from math import isnan

import numpy as np
import pytest

from mpifl.core import timeline
from mpifl.core.timeline import Kind, Recording
from mpifl.core.timing import NO_TIMELINE, NOBODY, Stopwatch


def test_phases_are_kept_with_client_visit_and_step_and_outer_ones_come_first():
    recording = Recording()
    watch = Stopwatch(recording)
    recording.at_step(3)
    with watch("visits"):
        with watch("load", 7, 2):
            pass
        with watch("train", np.array([4, 5, 9]), np.array([0, 1, 0])):
            pass
    outer, load, train = recording.events()
    assert [(e.kind, e.step, e.first, e.second) for e in (outer, load)] == [
        (Kind("phase", "visits"), 3, NOBODY, NOBODY),
        (Kind("phase", "load"), 3, 7, 2),
    ]
    assert (train.first, train.second, train.more) == (4, 0, ((5, 1), (9, 0)))
    assert outer.start <= load.start <= load.end <= train.start <= train.end <= outer.end


def test_a_full_ring_drops_the_oldest_events_and_counts_them(monkeypatch):
    monkeypatch.setattr(timeline, "FIRST_ROWS", 2)  # the ring grows twice
    recording = Recording(most=7)
    for number in range(10):
        recording.call("send", "notes", number, number + 0.5, 100 + number, 1)
    assert recording.dropped == 3
    assert [e.first for e in recording.events()] == [103, 104, 105, 106, 107, 108, 109]
    assert next((e.start, e.end) for e in recording.events()) == (3.0, 3.5)


def test_a_call_for_several_clients_of_which_a_part_was_overwritten_is_left_out():
    recording = Recording(most=4)
    recording.enter("train", 1.0, [1, 2, 3], [0, 0, 0])
    recording.leave("train", 1.0, 2.0, [1, 2, 3], [0, 0, 0])
    for number in (3.0, 4.0):
        recording.call("send", "notes", number, number, 1, 1)
    assert [e.kind.name for e in recording.events()] == ["send", "send"]


def test_events_are_read_while_another_thread_records():
    """As by the watchdog of a run that is slow, not stuck; each call is of a new kind."""
    recording, before = Recording(most=50), sys.getswitchinterval()

    def record() -> None:
        for number in range(20_000):
            recording.call(f"call {number}", "notes", number, number, 1, 1)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            recorded = pool.submit(record)
            while not recorded.done():
                assert all(event.kind.what == "mpi" for event in recording.events())
            recorded.result()
    finally:
        sys.setswitchinterval(before)
    assert len(recording.events()) == 50


def test_a_phase_under_way_has_no_end():
    recording = Recording()
    watch = Stopwatch(recording)
    with watch("train", 3, 1):
        (event,) = recording.events()
    assert (event.kind.name, event.first, event.second) == ("train", 3, 1)
    assert isnan(event.end)


@pytest.mark.parametrize(("ranks", "rows"), [(1, 500_000), (10, 200_000), (1000, 20_000)])
def test_all_ranks_together_keep_a_bounded_number_of_events(ranks, rows):
    assert Recording.of_rank(ranks).most == rows


def test_a_profiler_gets_ranges_with_the_names_of_the_phases():
    said = []

    class Ranges:
        def range_push(self, name):
            said.append(name)

        def range_pop(self):
            said.append("end")

    watch = Stopwatch(Recording(ranges=Ranges()))
    with watch("evaluate"), watch("load", 1, 0):
        pass
    with pytest.raises(OSError, match="disk"), watch("train"):
        raise OSError("disk")
    assert said == ["evaluate", "load", "end", "end", "train", "end"]


def test_the_timeline_of_a_run_without_a_trace_keeps_nothing():
    with NO_TIMELINE.command("step"), Stopwatch()("train", 1, 0):
        NO_TIMELINE.sent(1)
    assert not vars(NO_TIMELINE)


def test_a_call_for_several_clients_may_lie_across_the_end_of_the_ring():
    recording = Recording(most=4)
    for number in (1.0, 2.0, 3.0):
        recording.call("send", "notes", number, number, 1, 1)
    recording.enter("train", 4.0, [7, 8], [0, 3])
    recording.leave("train", 4.0, 5.0, [7, 8], [0, 3])
    *_, train = recording.events()
    assert (train.first, train.more) == (7, ((8, 3),))
