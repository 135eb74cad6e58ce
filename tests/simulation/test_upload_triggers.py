"""When clients that decide for themselves upload: at rates, and after drift."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from faults import halted
from numpy.testing import assert_allclose, assert_array_equal
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data.federation import PartitionUntilDrift
from mpifl.data.scenario import Partition, SampleIndex
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import WallTime
from mpifl.simulation.delays import Constant, Exponential, Measured
from mpifl.simulation.network import Links
from mpifl.simulation.policies import ClientDecides, EveryArrival
from mpifl.simulation.upload_triggers import Drift, OneEachStep, PoissonRates, WhenDone

FEDASYNC = CATALOGUE["fedasync"]()


class Shares(Partition):
    """Two groups; client k's share of the second one in its c-th data is a + k of a list, in turn."""

    def __init__(self, shares: list[float]) -> None:
        self.shares, self.sizes = shares, np.ones((6, 3), np.int64)

    def mixture(self, k: int, visit: int) -> np.ndarray:
        """Return the shares."""
        share = self.shares[(visit + k) % len(self.shares)]
        return np.array([1 - share, share])

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the number of the data in place of addresses."""
        return SampleIndex(np.array([visit]), 0)


SHARES = [0.0, 0.1, 0.35, 0.3, 0.75, 0.75, 0.7, 0.2]


class Moving(toy.Tiny):
    """Clients whose data change in every cycle."""

    def await_drift(self, threshold: float, longest: int) -> None:
        """Wait."""
        self.drifted = PartitionUntilDrift(Shares(SHARES), threshold, longest)

    def cycle(self, k: int, visit: int) -> int:
        """Return the number of the data."""
        return self.drifted.cycle(k, visit)

    def client(self, k: int, visit: int = 0):
        """Return other samples for each."""
        return super().client(k + 100 * self.cycle(k, visit)) if visit else super().client(k)

    def _split(self, k: int, name: str, column: int):
        return toy.draw(name, k, int(self.sizes[k % 100, column]), int(self.groups[k % 100]))


def deciding(folder, steps, uploads, federation=None, **changes) -> toy.Run:
    """Run FedAsync with clients that decide."""
    policy = ClientDecides(uploads=uploads)
    return toy.events(FEDASYNC, federation or toy.Tiny(), folder, steps, policy=policy, **changes)


def test_a_visit_meets_the_first_data_that_drifted_enough():
    """Shares 0, .1, .35, .3, .75, .75, .7, .2, in turn. From 0, .35 is the first that is .25 away; from there
    .75 (.3 is too near), then .2, and from there .75 once more.
    """
    waiting = PartitionUntilDrift(Shares(SHARES), 0.25, 100)
    assert [waiting.cycle(0, v) for v in range(5)] == [0, 2, 4, 7, 12]
    assert waiting.of(0, "train", 3).index == [7]
    assert_allclose(waiting.mixture(0, 2), [0.25, 0.75])
    assert waiting.cycle(1, 1) == 1  # from .1, .35 is .25 away
    assert [PartitionUntilDrift(Shares(SHARES), 0.25, 3).cycle(0, v) for v in range(4)] == [0, 2, 4, 7]
    assert [PartitionUntilDrift(Shares(SHARES), 0.25, 2).cycle(0, v) for v in range(4)] == [0, 2, 4, 6]
    assert PartitionUntilDrift(Shares(SHARES), 0.25, 100).cycle(0, 4) == 12  # asked out of turn


def test_samples_are_counted_in_the_data_that_a_visit_meets():
    """Ten times as many as the number of the data: 4 and 12 of client 0, 1 of client 1."""
    counted = type("Counted", (Shares,), {"num_held": lambda self, k, split, visit: 10 * visit})
    waiting = PartitionUntilDrift(counted(SHARES), 0.25, 100)
    assert waiting.sizes_of("test", np.array([0, 0, 1]), np.array([2, 4, 1])).tolist() == [40, 120, 10]


def test_without_a_threshold_clients_upload_in_every_cycle(tmp_path):
    """That is `every_arrival` with all clients under way, whatever the delays."""
    every = toy.events(
        FEDASYNC, toy.Tiny(), tmp_path / "a", 20, policy=EveryArrival(), delay=Exponential(2.0)
    )
    moving = Moving()
    moving.client = toy.Tiny().client  # as if the data stood still
    drift = deciding(tmp_path / "b", 20, Drift(threshold=0.0), moving, delay=Exponential(2.0))
    toy.same(toy.state_of(every.server), toy.state_of(drift.server))
    assert every.arrivals == drift.arrivals


def test_clients_upload_when_their_data_have_drifted(tmp_path):
    """Cycles of two seconds: client 0 at the ends of its cycles 0, 2, 4, 7 and 12."""
    moving = Moving()
    done = deciding(tmp_path, 24, Drift(threshold=0.25), moving, delay=Constant(2.0))
    for k in range(6):
        times = [row["time"] for row in done.arrivals if row["client"] == k]
        assert times == [2.0 * (moving.cycle(k, v) + 1) for v in range(len(times))]
        assert len(times) >= 3
    assert [row["time"] for row in done.arrivals if row["client"] == 0][:4] == [2, 6, 10, 16]


def durations(folder, seconds: dict[int, float]) -> Measured:
    """Return delays from a file: each client takes so long, the others 1000 seconds."""
    file = folder / "durations.csv"
    rows = [f"{k},{seconds.get(k, 1000)}\n" for k in range(6)]
    file.write_text("client,seconds\n" + "".join(rows))
    return Measured(str(file))


def visits_of(done: toy.Run) -> list[tuple[float, int]]:
    """Return (time, client) of each arrival."""
    return [(row["time"], row["client"]) for row in done.arrivals]


def test_clients_upload_when_their_visits_are_over(tmp_path):
    """Client 0 takes 2 s, client 4 takes 3 s. At 6 both arrive, client 4's visit began first; both then read
    the rows of step 5.
    """
    delay = durations(tmp_path, {0: 2.0, 4: 3.0})
    done = deciding(tmp_path, 7, WhenDone(), delay=delay)
    assert visits_of(done) == [(2, 0), (3, 4), (4, 0), (6, 4), (6, 0), (8, 0), (9, 4)]
    assert [row["staleness"] for row in done.arrivals] == [0, 1, 1, 1, 1, 0, 1]


def test_links_and_absences_delay_uploads(tmp_path):
    """Half a second of latency in each direction makes 3 s of 2, a download of a second 4 s. Away from 0.5 to
    the end of its first absence, a client needs that much longer.
    """
    delay = durations(tmp_path, {0: 2.0})
    late = deciding(tmp_path / "a", 2, WhenDone(), delay=delay, network=Links(latency_s=0.5))
    assert visits_of(late) == [(3.0, 0), (6.0, 0)]
    size = 4 * late.server_step.problem.layout.size
    links = Links(latency_s=0.5, downlink_bytes_s=size)
    assert_allclose(
        [t for t, _ in visits_of(deciding(tmp_path / "b", 2, WhenDone(), delay=delay, network=links))], [4, 8]
    )
    away = Availability(on_s=1.5, off_s=4.0)
    done = deciding(tmp_path / "c", 3, WhenDone(), delay=delay, availability=away)
    context = toy.context_of(toy.config_of(FEDASYNC, availability=away), toy.Tiny())
    presence = context.duration.presence
    end, start = [], presence.next_available(0, 0.0)
    for _ in range(3):
        end.append(presence.end(0, start, 2.0))
        start = presence.next_available(0, end[-1])
    assert end[-1] > 8
    assert_allclose([t for t, _ in visits_of(done)], end)


def test_steps_are_not_called_seconds(tmp_path):
    """One upload a step: there is no virtual time in seconds, and what would need it is refused."""
    assert set(deciding(tmp_path / "a", 3, OneEachStep()).times) == {None}
    assert deciding(tmp_path / "b", 3, WhenDone()).times == [0.0, 1.0, 1.0, 1.0]
    for name, value in (
        ("delay", Constant(2.0)),
        ("network", Links(latency_s=1.0)),
        ("availability", Availability(off_s=1)),
    ):
        with pytest.raises(UserError, match=f"{name} = .* has no effect"):
            deciding(tmp_path, 2, OneEachStep(), **{name: value})
        with pytest.raises(UserError, match=f"{name} = .* has no effect"):
            deciding(tmp_path, 2, WhenDone(), clock=WallTime(), **{name: value})
    with pytest.raises(UserError, match=r"draws who uploads; use policy\.uploads when_done, or clock"):
        deciding(tmp_path, 2, OneEachStep(), clock=WallTime())


def test_clients_upload_at_rates_of_their_own(tmp_path):
    """Gaps of one client are exponential: 400 of them have the mean of its rate within 15 %, and a variance
    of its square within 40 %.
    """
    rates = PoissonRates(mean_s=3.0, sigma=1.0)
    duration = ClientDecides(uploads=rates).upload_interval(pace_of(toy.Tiny()), toy.Tiny())
    means = [rates.mean(k, duration.key) for k in range(400)]
    assert 0.85 < np.log(np.array(means) / 3.0).std() < 1.15
    for k in range(2):
        gaps = np.array([duration.delay.seconds(k, v, duration.key) for v in range(400)])
        assert gaps.mean() == pytest.approx(means[k], rel=0.15)
        assert gaps.var() == pytest.approx(means[k] ** 2, rel=0.4)
    done = deciding(tmp_path, 30, rates, delay=Constant(0.5))
    for k in range(6):
        times = [0.0, *(row["time"] for row in done.arrivals if row["client"] == k)]
        own = ClientDecides(uploads=rates).upload_interval(pace_of(toy.Tiny(), Constant(0.5)), toy.Tiny())
        expected = [own.delay.seconds(k, v, own.key) for v in range(len(times) - 1)]
        assert_allclose([b - a for a, b in pairwise(times)], expected)
        assert min(expected, default=0.5) >= 0.5


def pace_of(federation, delay=None):
    """Return the duration of a bare run."""
    config = toy.config_of(FEDASYNC, delay=delay or Constant(0.0))
    return toy.context_of(config, federation).duration


def test_rates_may_come_from_a_file(tmp_path):
    file = tmp_path / "rates.csv"
    file.write_text("client,mean_s\n" + "".join(f"{k},{k + 1}\n" for k in range(6)))
    rates = PoissonRates(file=str(file))
    assert_array_equal([rates.mean(k, key(0)) for k in range(6)], np.arange(1.0, 7.0))
    assert len(deciding(tmp_path / "run", 12, rates).arrivals) == 12


@pytest.mark.parametrize(
    ("uploads", "federation"), [(PoissonRates(mean_s=3.0), toy.Tiny), (Drift(threshold=0.25), Moving)]
)
def test_runs_go_on_from_a_saved_state(uploads, federation, tmp_path):
    common = {"algorithm": FEDASYNC, "steps": 12, "policy": ClientDecides(uploads=uploads)}
    one = halted.run(folder=tmp_path / "one", at=-1, federation=federation(), **common)
    first = halted.run(folder=tmp_path / "two", at=5, federation=federation(), **common)
    saved = halted.read(tmp_path / "two", 5)
    then = halted.run(folder=tmp_path / "two", saved=saved, at=-1, federation=federation(), **common)
    halted.compare(one, first, then)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Drift(threshold=-0.1), "threshold = -0.1"),
        (lambda: PoissonRates(file="a.csv", mean_s=99.0), "mean_s = 99.0: has no effect beside file"),
        (lambda: PoissonRates(file="a.csv", sigma=3.0), "sigma = 3.0: has no effect beside file"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1\n", "has no row of client 1; give every client one"),
        ("0,1\n9,1\n", "rows of client 9; there are 6 clients"),
        ("0,-1\n", "line 2 = -1.0: use a positive number"),
        ("0,soon\n", "needs a client and the mean seconds between its uploads"),
    ],
)
def test_files_that_do_not_fit_are_refused(rows, message, tmp_path):
    (tmp_path / "rates.csv").write_text("client,mean_s\n" + rows)
    with pytest.raises(UserError, match=message):
        deciding(tmp_path, 2, PoissonRates(file=str(tmp_path / "rates.csv")))


def test_what_does_not_fit_together_is_refused_at_the_start(tmp_path):
    with pytest.raises(UserError, match="do not change from visit to visit"):
        deciding(tmp_path, 2, Drift())
    with pytest.raises(UserError, match="rates need simulated seconds"):
        deciding(tmp_path, 2, PoissonRates(), clock=WallTime())
