"""The dispatch of visits, by hand: when clients start, and when the server steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpifl.core.rng import key
from mpifl.simulation.availability import Availability, Presence
from mpifl.simulation.clock import VirtualClock
from mpifl.simulation.delays import Constant
from mpifl.simulation.dispatcher import Dispatcher
from mpifl.simulation.durations import visit_duration
from mpifl.simulation.network import Links
from mpifl.simulation.policies import AsynchronousPolicy, Buffer, ClientDecides, EveryArrival, Waves
from mpifl.simulation.sampling import Sampler
from mpifl.simulation.upload_triggers import WhenDone


def dispatcher_of(
    policy: AsynchronousPolicy, seconds: float = 1.0, returns: dict[int, float] | None = None, **told
) -> Dispatcher:
    """Return the dispatch of four clients, of which two train at a time.

    Args:
        policy: when clients start, and when the server steps.
        seconds: of a visit.
        returns: client -> when it comes back, of clients that are away at first; None for none.
        told: further arguments of the dispatcher.
    """
    duration = visit_duration(Constant(seconds), Links(), Availability(), key(0), 4)
    if returns is not None:
        duration = replace(duration, presence=AwayAtFirst(returns))
    return Dispatcher(policy, VirtualClock(duration), Sampler(4, 2, key(1)), key(1), **told)


class AwayAtFirst(Presence):
    """Clients that are there from a time of their own on."""

    def __init__(self, returns: dict[int, float]) -> None:
        super().__init__(Availability(), key(0))
        self.returns, self.always = returns, False

    def next_available(self, client: int, time: float) -> float:
        """Return that time, or the given one."""
        return max(time, self.returns.get(client, 0.0))

    def is_available(self, client: int, time: float) -> bool:
        """Return whether it has come."""
        return time >= self.returns.get(client, 0.0)

    def end(self, client: int, start: float, work: float) -> float:
        """Return the end of work without a pause."""
        return start + work


def fill(dispatcher: Dispatcher, version: int = 0, waiting: int = 0) -> list[int]:
    """Return the clients that start."""
    started = []

    def start(client: int, read: int) -> None:
        assert read == version
        started.append(dispatcher.begin(client, 0, read, 0, 0).client)

    dispatcher.fill(version, waiting, None, start)
    return started


def test_clients_start_after_the_last_arrival_of_an_instant():
    """Two visits end at 1; the place of the first is free until the second has arrived."""
    times = []
    dispatcher = dispatcher_of(Buffer(size=2), on_time=lambda *told: times.append(told))
    first = fill(dispatcher)
    assert [len(first), dispatcher.num_started, sorted(first)] == [2, 2, sorted(dispatcher.busy)]
    one = dispatcher.next_arrival(None)
    assert not dispatcher.server_steps(one, 1)
    assert fill(dispatcher, waiting=1) == []
    two = dispatcher.next_arrival(None)
    assert {one.client, two.client} == {*first}
    assert dispatcher.server_steps(two, 2)
    assert len(fill(dispatcher, version=1)) == 2
    assert (dispatcher.num_started, dispatcher.filled) == (4, 1)
    assert times == [(1.0, 2), (1.0, 1)], "the clock's time, and the visits under way until then"


def test_the_server_steps_at_a_time_if_any_upload_waits():
    dispatcher = dispatcher_of(Waves(every_s=0.75))
    fill(dispatcher)
    assert dispatcher.next_arrival(None) is None
    assert (dispatcher.clock.now, dispatcher.tick) == (0.75, 1.5)
    assert not dispatcher.server_steps(None, 0)
    assert dispatcher.server_steps(None, 1)


@pytest.mark.parametrize("policy", [Buffer(size=2), EveryArrival(), ClientDecides(uploads=WhenDone())])
def test_a_client_that_comes_back_starts_at_once_if_a_place_is_free(policy):
    """Visits of 100 s; clients 1 and 2 come back at 10 and 20 s, client 3 at 30.

    Two train at a time: client 0 from the start, client 1 from 10 s on. Where all train, so do the others.
    """
    times = []
    dispatcher = dispatcher_of(
        policy, 100.0, {1: 10.0, 2: 20.0, 3: 30.0}, on_time=lambda *told: times.append(told)
    )
    several = isinstance(policy, ClientDecides)
    assert fill(dispatcher) == [0, 1, 2, 3][: 4 if several else 2]
    starts = [visit.start for visit in sorted(dispatcher.clock.visits)]
    assert starts == ([0.0, 10.0, 20.0, 30.0] if several else [0.0, 10.0])
    assert times == [(start, count) for count, start in enumerate(starts) if count]
    assert [dispatcher.next_arrival(None).client, dispatcher.clock.now] == [0, 100.0]


def test_within_a_wave_nobody_starts_who_comes_back():
    dispatcher = dispatcher_of(Waves(size=2), 100.0, {1: 10.0, 2: 10.0, 3: 10.0})
    assert fill(dispatcher) == [0]
    assert [dispatcher.next_arrival(None).client, dispatcher.clock.now] == [0, 100.0]


def test_a_return_after_the_next_arrival_is_looked_at_then():
    dispatcher = dispatcher_of(EveryArrival(), 5.0, {1: 6.0, 2: 7.0, 3: 8.0})
    assert fill(dispatcher) == [0]
    assert dispatcher.next_arrival(None).client == 0
    assert fill(dispatcher, 1) == [0, 1]
    assert [visit.start for visit in sorted(dispatcher.clock.visits)] == [5.0, 6.0]


@pytest.mark.parametrize(("limit", "refused"), [(None, [False] * 4), (2, [False, False, False, True])])
def test_uploads_of_the_largest_staleness_are_taken(limit, refused):
    policy = Buffer(size=2, max_staleness=limit)
    assert [policy.refuses(lag) for lag in range(4)] == refused
