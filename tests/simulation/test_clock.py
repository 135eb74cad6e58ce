"""Clocks by hand: which upload arrives next, and when places are filled."""

from __future__ import annotations

import time
from math import inf

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpifl.core.rng import key
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import DrawnClock, VirtualClock, WallClock
from mpifl.simulation.delays import Constant
from mpifl.simulation.durations import Loads, LookLoads, visit_duration
from mpifl.simulation.network import Links
from mpifl.simulation.visits import Visit


def visit(due: float, number: int) -> Visit:
    """Return a visit of client `number`."""
    return Visit(due, number, number, 0, 0, 0.0)


def duration(**link) -> VirtualClock:
    """Return a virtual clock over links."""
    return VirtualClock(visit_duration(Constant(1.0), Links(**link), Availability(), key(0), 3))


class Polled:
    """A pool without visits that counts the polls."""

    polls = 0

    def finished(self) -> list[int]:
        """Return visit 0, which was trained before."""
        return [0]

    def poll(self) -> None:
        """Count."""
        self.polls += 1


def test_places_are_filled_after_the_last_arrival_of_an_instant():
    clock = duration()
    for number, due in enumerate((2.0, 1.0, 2.0)):
        clock.add(visit(due, number))
    seen = []
    for _ in range(3):
        arrived = clock.pop(None)
        seen.append((arrived.client, clock.now, clock.is_tied()))
    assert seen == [(1, 1.0, False), (0, 2.0, True), (2, 2.0, False)]


def test_a_drawn_clock_has_one_upload_a_second_from_the_first_on():
    """Without a key visits arrive in the order of their starts; with one each second belongs to a client."""
    clock = DrawnClock()
    assert [clock.due(k, 0, 0, 0) for k in (4, 2, 4)] == [1.0, 2.0, 3.0]
    clock = DrawnClock(3, key(5))
    dues = [[clock.due(k, v, 0, 0) for v in range(400)] for k in range(3)]
    seconds = np.sort(np.concatenate(dues))
    assert seconds[0] == 1
    assert_array_equal(seconds[:900], np.arange(1, 901), "nobody's second is lost, none is shared")
    half = DrawnClock(3, key(5))
    first = [half.due(0, v, 0, 0) for v in range(10)]
    again = DrawnClock(3, key(5))
    again.load_state_dict(half.state_dict())
    assert first + [again.due(0, v, 0, 0) for v in range(10, 400)] == dues[0]


class Slow:
    """A pool in which a poll trains the next visit, for 20 ms."""

    def __init__(self, *numbers: int) -> None:
        self.waiting, self.done = [*numbers], []

    def finished(self) -> list[int]:
        return self.done

    def poll(self) -> None:
        time.sleep(0.02)
        self.done.append(self.waiting.pop(0))


def test_real_arrivals_are_stamped_after_they_were_trained():
    clock = WallClock(visit_duration(Constant(1.0), Links(), Availability(), key(0), 3))
    clock.start()
    clock.add(visit(0.0, 0))
    assert clock.pop(Slow(0)).number == 0
    assert clock.now >= 0.02


def test_a_time_at_which_the_server_steps_comes_before_what_is_trained_after_it():
    clock, pool = WallClock(visit_duration(Constant(1.0), Links(), Availability(), key(0), 3)), Slow(0)
    clock.start()
    clock.add(visit(0.0, 0))
    assert clock.pop(pool, 0.01) is None
    assert clock.now == 0.01
    assert clock.pop(pool).number == 0


def test_real_time_goes_on_to_the_first_return_with_polls_on_the_way():
    away = Availability(on_s=0.1, off_s=9.0)
    clock = WallClock(visit_duration(Constant(1.0), Links(), away, key(0), 2), scale=0.001)
    first = min(clock.duration.presence.next_available(k, 0.0) for k in range(2))
    pool = Polled()
    clock.start()
    clock.advance(2, pool)
    assert clock.now >= 0.001 * first > 0
    assert pool.polls > 0


@pytest.mark.parametrize(("scale", "seconds"), [(0.5, 0.5 * 2 * (1 + 3)), (0.0, 0.0)])
def test_work_in_looks_holds_a_visit_back_in_real_time(scale, seconds):
    """A training takes 2 s, and 3 times that work is done beside it; with scale 0 nobody is held back."""
    load = [lambda client, visit: 1.0] * 2
    loads = Loads(*load, LookLoads(*load))
    times = visit_duration(Constant(2.0), Links(), Availability(), key(0), 3, loads=loads)
    clock = WallClock(times, scale)
    assert clock.due(0, 0, 0, 0, look=3.0) == seconds
    assert (clock.looks is not None) == (scale > 0)


def test_who_uploads_is_drawn_anew_after_a_thousand_steps():
    clock = DrawnClock(2, key(0))
    steps = {int(clock.due(0, 0, 0, 0)) for _ in range(1300)}
    first, second = {s for s in steps if s <= 1024}, {s - 1024 for s in steps if 1024 < s <= 2048}
    assert min(len(first), len(second)) > 400
    assert first != second


@pytest.mark.parametrize(("due", "is_back"), [(9.0, True), (0.01, False)])
def test_real_time_goes_on_to_a_return_unless_an_upload_arrives_first(due, is_back):
    """Client 1 comes back after 0.1 s; visit 0 is trained, and held back until it is due."""
    away = Availability(profile=(0.0, 1.0), day_s=0.2)
    clock, pool = WallClock(visit_duration(Constant(1.0), Links(), away, key(0), 2), scale=1.0), Polled()
    clock.start()
    clock.add(visit(due, 0))
    assert clock.goes_to_start(inf, [1], pool) == is_back
    assert (clock.now >= 0.1) == is_back
    assert pool.polls > 0
    assert not clock.goes_to_start(clock.now, [1], pool), "the server steps before"
    if not is_back:
        assert clock.pop(pool).client == 0
