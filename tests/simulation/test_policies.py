"""When the server steps."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mpifl.core.rng import key
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, OverSelection, PartialWork
from mpifl.simulation.round_rules import RoundStart


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


@pytest.mark.parametrize(
    ("wanted", "extra", "started"), [(5, 0.3, 7), (100, 0.1, 110), (10, 0.0, 10), (10, 50.0, 200)]
)
def test_over_selection_starts_the_next_whole_number(wanted, extra, started):
    """5 x 1.3 = 6.5; 100 x 1.1 is 110, which floating point puts above; there are 200 clients."""
    assert OverSelection(extra=extra).num_started(wanted, 200) == started


@pytest.mark.parametrize(("unit", "work"), [("steps", Fraction(5, 12)), ("epochs", Fraction(4, 12))])
def test_partial_work_counts_the_unit_that_is_asked_for(unit, work):
    """Three passes of four mini-batches, a second each, and 5.5 seconds: five mini-batches, or one pass."""
    rule = PartialWork(deadline_s=5.5, unit=unit).rule
    begin = RoundStart(1, np.array([0]), 1, 0.0, lambda k, share: 12.0 * share, lambda k: (12, 4), key(0))
    assert rule.plan(begin).work == {0: work}
