"""When the server steps."""

from __future__ import annotations

import pytest

from mpifl.simulation.policies import Barrier, Buffer, EveryArrival


@pytest.mark.parametrize(
    ("policy", "waiting", "in_flight", "ready"),
    [
        (Buffer(3), 2, 5, False),
        (Buffer(3), 3, 5, True),
        (Buffer(3), 4, 0, True),
        (EveryArrival(), 1, 5, True),
        (Barrier(), 4, 1, False),
        (Barrier(), 5, 0, True),
    ],
)
def test_when_the_server_steps(policy, waiting, in_flight, ready):
    assert policy.ready(waiting, in_flight) is ready
