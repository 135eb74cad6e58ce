"""Delay models: their distributions, and that every draw is addressed by client and visit."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.each import for_each

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.simulation.availability import Availability, Presence
from mpifl.simulation.delays import (
    DELAYS,
    Constant,
    Exponential,
    LogNormal,
    Measured,
    ShiftedExponential,
    Tiers,
    Uniform,
)

DRAWN = [Uniform(), Exponential(), ShiftedExponential(), LogNormal(), Tiers()]


def sample(delay, clients=200, visits=20) -> np.ndarray:
    """Return the durations [clients, visits]."""
    return np.array([[delay.seconds(k, v, key(0)) for v in range(visits)] for k in range(clients)])


@pytest.mark.parametrize(
    ("delay", "mean", "std"),
    [
        (Constant(2.0), 2.0, 0.0),
        (Uniform(1.0, 3.0), 2.0, 2 / np.sqrt(12)),
        (Exponential(2.0), 2.0, 2.0),
        (ShiftedExponential(1.0, 2.0), 3.0, 2.0),
        (LogNormal(1.0, 0.5), np.exp(0.125), np.sqrt((np.exp(0.25) - 1) * np.exp(0.25))),
    ],
)
def test_durations_have_the_mean_and_spread_of_their_model(delay, mean, std):
    """4000 draws: the mean within four standard errors, the spread within a tenth."""
    x = sample(delay)
    assert x.min() >= 0
    assert_allclose(x.mean(), mean, atol=4 * std / np.sqrt(x.size) + 1e-12)
    assert_allclose(x.std(), std, rtol=0.1, atol=1e-12)


def test_a_client_keeps_its_tier():
    x = sample(Tiers((1.0, 10.0), (0.7, 0.3)), clients=400, visits=5)
    fast = x.mean(1) < 5
    assert ((x > 0.9 * np.where(fast, 1, 10)[:, None]) & (x < 1.1 * np.where(fast, 1, 10)[:, None])).all()
    assert_allclose(fast.mean(), 0.7, atol=4 * np.sqrt(0.7 * 0.3 / 400))


@pytest.mark.parametrize("delay", DRAWN, ids=lambda d: type(d).__name__)
def test_draws_are_addressed_by_client_and_visit(delay):
    x = sample(delay, 10, 10)
    backwards = [[delay.seconds(k, v, key(0)) for v in range(9, -1, -1)] for k in range(9, -1, -1)]
    np.testing.assert_array_equal(np.array(backwards)[::-1, ::-1], x)
    assert len(np.unique(x)) == 100
    assert delay.seconds(0, 0, key(1)) != x[0, 0]


@pytest.mark.parametrize("m", [1, 10, 50])
def test_the_slowest_of_m_shifted_exponentials_takes_its_closed_form(m):
    """E[max] = T_min + H_m / mu; the maximum's variance is sum 1 / (mu i)^2. 400 rounds, four standard
    errors.
    """
    t_min, mean = 2.0, 3.0
    slowest = sample(ShiftedExponential(t_min, mean), m, 400).max(0)
    harmonic = (1 / np.arange(1, m + 1)).sum()
    error = mean * np.sqrt((1 / np.arange(1, m + 1) ** 2).sum() / 400)
    assert_allclose(slowest.mean(), t_min + mean * harmonic, atol=4 * error)


def test_measured_durations_are_taken_in_turn(tmp_path):
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n0,1.5\n1,2\n0,3\n")
    delay = Measured(str(file))
    delay.check(2)
    assert [delay.seconds(0, v, key(0)) for v in range(5)] == [1.5, 3, 1.5, 3, 1.5]
    assert [delay.seconds(1, v, key(0)) for v in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,seconds\n0,1\n1,-1\n", "line 3 = -1.0: use 0 or more seconds"),
        ("client,seconds\n0,1\n1,nan\n", "line 3 = nan: use 0 or more seconds"),
        ("client,seconds\n0,1\n1,soon\n", "needs a client and its seconds"),
        ("client\n0\n", "needs a client and its seconds"),
        ("client,seconds\n0,1\n", "has no row of client 1; give every client one"),
        ("client,seconds\n0,1\n1,1\n7,1\n", "has rows of client 7; there are 2 clients"),
    ],
)
def test_a_broken_file_of_durations_is_refused(text, message, tmp_path):
    file = tmp_path / f"{abs(hash(text))}.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        Measured(str(file)).check(2)


@for_each(
    ("make", "message"),
    [
        (lambda: Uniform(0.0, inf), "high_s = inf: use at least low_s"),
        (lambda: Uniform(-1.0, 1.0), "low_s = -1.0"),
        (lambda: Uniform(2.0, 1.0), "high_s = 1.0: use at least low_s"),
        (lambda: Exponential(-1.0), "mean_s = -1.0"),
        (lambda: ShiftedExponential(min_s=-1.0), "min_s = -1.0"),
        (lambda: ShiftedExponential(mean_s=-1.0), "mean_s = -1.0"),
        (lambda: LogNormal(sigma=-1.0), "sigma = -1.0"),
        (lambda: Tiers((1.0, 2.0), (0.5, 0.6)), "use one share per tier; they sum to 1"),
        (lambda: Tiers((1.0, 2.0), (1.0,)), "use one share per tier"),
        (lambda: Measured("/nowhere.csv").check(1), "there is no such file"),
    ],
)
def test_negative_and_impossible_delays_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_every_delay_can_be_named_in_a_configuration():
    assert set(DELAYS.values()) == {
        Constant,
        Uniform,
        Exponential,
        ShiftedExponential,
        LogNormal,
        Tiers,
        Measured,
    }


@pytest.mark.in_turn
def test_presence_has_the_share_and_lengths_of_its_model():
    """on 3 s, off 1 s: there three quarters of the time. 200 clients looked at 50 times, 8 s apart."""
    presence = Presence(Availability(3.0, 1.0), key(0))
    here = np.array([[presence.is_available(k, 8.0 * i) for i in range(50)] for k in range(200)])
    assert_allclose(here.mean(), 0.75, atol=4 * np.sqrt(0.75 * 0.25 / here.size) * 1.5)
    assert_allclose(here[:, 0].mean(), 0.75, atol=4 * np.sqrt(0.75 * 0.25 / 200))


@pytest.mark.in_turn
def test_work_waits_while_a_client_is_away():
    """The work done between start and end, counted in small steps, is what was asked."""
    presence = Presence(Availability(1.0, 2.0), key(0))
    for k in range(20):
        start, work = 0.37 * k, 1.3
        end = presence.end(k, start, work)
        ticks = np.arange(start, end, 1e-3)
        assert_allclose(sum(presence.is_available(k, t) for t in ticks) * 1e-3, work, atol=0.02)
        back = presence.next_available(k, end)
        assert presence.is_available(k, back)
        assert back >= end
    always = Presence(Availability(), key(0))
    assert (always.end(0, 2.0, 1.5), always.next_available(0, 2.0)) == (3.5, 2.0)
    assert always.is_available(0, 5.0)


def test_a_visit_that_ends_with_a_phase_is_over_then():
    """There for 1 s of every 2."""
    presence = Presence(Availability(profile=(1.0, 0.0), day_s=2.0), key(0))
    assert [presence.end(0, 0.0, work) for work in (0.5, 1.0, 1.5, 2.0)] == [0.5, 1.0, 2.5, 3.0]
