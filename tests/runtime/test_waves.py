"""Semi-asynchronous waves: by hand, as rounds, and replayed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import Replay, WallTime
from mpifl.simulation.delays import Constant, Exponential, Measured
from mpifl.simulation.policies import Barrier, Synchronous, Waves

SLOW = Exponential(mean_s=2.0)


def events(name, folder, steps=4, federation=None, **changes) -> toy.Run:
    """Run a method of the catalogue."""
    return toy.events(CATALOGUE[name](), federation or toy.Tiny(), folder, steps, **changes)


@pytest.fixture
def steady(tmp_path) -> Measured:
    """Client k computes for k + 1 seconds."""
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n" + "".join(f"{k},{k + 1}\n" for k in range(4)))
    return Measured(str(file))


@pytest.mark.parametrize(
    ("policy", "times", "rows"),
    [
        # 0 and 1 make the first wave, and begin again at 2; 2 and 0 arrive at 3, one of them a wave late
        (Waves(size=2), [0, 2, 3], [(1, 0, 0), (2, 1, 0), (3, 2, 1), (3, 0, 0)]),
        # at 2.5 those of 1 and 2 s; they begin again, and all four are there before 5
        (
            Waves(every_s=2.5),
            [0, 2.5, 5],
            [(1, 0, 0), (2, 1, 0), (3, 2, 1), (3.5, 0, 0), (4, 3, 1), (4.5, 1, 0)],
        ),
        # three make a wave at 3, which is also a time; 0 to 2 begin again; 0 and 3 are there at 4, 1 at 5
        (
            Waves(size=3, every_s=3.0),
            [0, 3, 5],
            [(1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 3, 1), (4, 0, 0), (5, 1, 0)],
        ),
    ],
    ids=["size", "time", "both"],
)
def test_waves_by_hand(policy, times, rows, steady, tmp_path):
    done = events("fedavg", tmp_path, 2, toy.Tiny(4), policy=policy, delay=steady)
    assert done.times == times
    assert [(row["time"], row["client"], row["staleness"]) for row in done.arrivals] == rows
    starts = {row["start"] for row in done.arrivals}
    assert starts <= set(times), "clients start at the ends of waves alone"


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_waves_of_whole_cohorts_are_rounds_bit_for_bit(participation, tmp_path):
    size = round(6 * participation)
    rounds, barrier, waves = (
        events("scaffold", tmp_path / str(i), policy=policy, delay=SLOW, participation=participation)
        for i, policy in enumerate((Synchronous(), Barrier(), Waves(size=size)))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(waves.server))
    assert waves.arrivals == barrier.arrivals
    assert waves.times == rounds.times


def as_trace(rows: list[dict], path: Path) -> Replay:
    """Write arrivals as a run folder has them; return the clock that follows them."""
    lines = [",".join(map(str, row.values())) for row in rows]
    path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return Replay(str(path))


@pytest.mark.parametrize("clock", [{}, {"clock": WallTime(scale=0.01)}], ids=["virtual", "wall"])
@pytest.mark.parametrize("policy", [Waves(size=2), Waves(every_s=0.05), Waves(size=3, every_s=0.07)])
def test_waves_are_replayed_to_the_same_rows(policy, clock, tmp_path):
    common = {"policy": policy, "participation": 0.67}
    delay = SLOW if clock else Exponential(mean_s=0.04)
    done = events("fedbuff", tmp_path / "one", 5, delay=delay, **common, **clock)
    trace = as_trace(done.arrivals, tmp_path / "events.csv")
    again = events("fedbuff", tmp_path / "two", 5, clock=trace, **common)
    assert again.arrivals == done.arrivals
    toy.same(toy.state_of(again.server), toy.state_of(done.server))


@pytest.mark.parametrize("policy", [Waves(size=2), Waves(every_s=10.0), Waves(size=2, every_s=7.0)])
def test_waves_of_clients_that_come_and_go_are_replayed(policy, tmp_path):
    away = Availability(on_s=2.0, off_s=100.0)
    done = events("fedbuff", tmp_path / "one", 6, policy=policy, delay=Constant(1.0), availability=away)
    trace = as_trace(done.arrivals, tmp_path / "events.csv")
    again = events("fedbuff", tmp_path / "two", 6, clock=trace, policy=policy)
    assert again.arrivals == done.arrivals
    toy.same(toy.state_of(again.server), toy.state_of(done.server))


@pytest.mark.parametrize("policy", [Waves(every_s=7.0), Waves(size=3, every_s=7.0)])
@pytest.mark.parametrize("seconds", [(0, 0, 0, 0), (0, 7, 0, 7), (7, 0, 14, 3.5)])
def test_waves_are_replayed_whose_visits_end_at_the_instant_of_a_step(seconds, policy, tmp_path):
    """Some take no time: they read what the server makes at a multiple of 7 s, and arrive at once."""
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n" + "".join(f"{k},{s}\n" for k, s in enumerate(seconds)))
    common = {"policy": policy, "cohort_size": 3}
    done = events("fedbuff", tmp_path / "one", 6, toy.Tiny(4), delay=Measured(str(file)), **common)
    trace = as_trace(done.arrivals, tmp_path / "events.csv")
    again = events("fedbuff", tmp_path / "two", 6, toy.Tiny(4), clock=trace, **common)
    assert again.arrivals == done.arrivals
    toy.same(toy.state_of(again.server), toy.state_of(done.server))


def test_waves_go_on_where_clients_come_and_go(tmp_path):
    """No wave without an upload, no run without an end; times are multiples of half a second."""
    away = Availability(profile=(1.0, 0.0, 0.0), day_s=6.0, spread_s=6.0)
    done = events(
        "fedavg", tmp_path, 12, policy=Waves(every_s=0.5), delay=Exponential(0.3), availability=away
    )
    assert all(time * 2 == int(time * 2) for time in done.times)
    assert all(a < b for a, b in pairwise(done.times))
    assert len({row["arrival_version"] for row in done.arrivals}) == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Waves(), "give size, every_s or both"),
        (lambda: Waves(size=2).concurrency(6, 1), "policy.size = 2: only 1 visits are under way"),
        (lambda: Waves(size=2).check(CATALOGUE["ccfl"]()), "takes one upload at a time"),
        (lambda: Waves(size=2).check(CATALOGUE["cflgp"]()), "runs under policy rounds only"),
    ],
)
def test_waves_that_cannot_be_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_times_of_waves_are_multiples_whatever_is_rounded():
    policy, now = Waves(every_s=0.1), 0.0
    for number in range(1, 2000):
        now = policy.next_tick(now)
        assert now == number * 0.1


def test_a_wave_of_which_nobody_is_there_goes_on_with_others(tmp_path):
    """Each client is there for a fifth of the time; two are drawn, and one makes a wave."""
    here = Availability(on_s=5.0, off_s=20.0)
    asked = {"cohort_size": 2, "policy": Waves(size=1), "delay": Constant(1.0), "availability": here}
    done = events("fedavg", tmp_path, 6, **asked)
    assert len(done.arrivals) >= 6
    assert sorted(done.times) == done.times


def test_nobody_is_under_way_while_all_are_away(tmp_path):
    """The clock goes on to the next return, and so does the time of the next wave."""
    here = Availability(on_s=2.0, off_s=1000.0)
    asked = {"policy": Waves(every_s=10.0), "delay": Constant(1.0), "availability": here}
    done = events("fedavg", tmp_path, 6, **asked)
    assert sorted(done.times) == done.times
    assert all(row["start"] <= row["time"] for row in done.arrivals)
    busy = sum(row["time"] - row["start"] for row in done.arrivals)
    left = sum(done.times[-1] - visit.start for visit in done.engine.clock.visits)
    assert done.engine.summary()["concurrency"] == pytest.approx((busy + left) / done.times[-1])
