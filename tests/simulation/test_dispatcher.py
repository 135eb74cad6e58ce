"""The dispatch of visits, by hand: when clients start, and when the server steps."""

from __future__ import annotations

import pytest

from mpifl.core.rng import key
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import VirtualClock
from mpifl.simulation.delays import Constant
from mpifl.simulation.dispatcher import Dispatcher
from mpifl.simulation.network import Links
from mpifl.simulation.policies import AsynchronousPolicy, Buffer, Waves
from mpifl.simulation.sampling import Sampler
from mpifl.simulation.visit_times import visit_duration


def dispatcher_of(policy: AsynchronousPolicy, **told) -> Dispatcher:
    """Return the dispatch of four clients, of which two train at a time, for a second each."""
    clock = VirtualClock(visit_duration(Constant(1.0), Links(), Availability(), key(0), 4))
    return Dispatcher(policy, clock, Sampler(4, 2, key(1)), key(1), **told)


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


@pytest.mark.parametrize(("limit", "refused"), [(None, [False] * 4), (2, [False, False, False, True])])
def test_uploads_of_the_largest_staleness_are_taken(limit, refused):
    policy = Buffer(size=2, max_staleness=limit)
    assert [policy.refuses(lag) for lag in range(4)] == refused
