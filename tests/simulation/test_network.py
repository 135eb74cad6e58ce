"""Links, broadcasts and computing times turned into the time of a round, by hand and by closed form."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.simulation.availability import Availability
from mpifl.simulation.delays import Constant
from mpifl.simulation.durations import visit_duration
from mpifl.simulation.network import (
    NETWORKS,
    TIERS,
    LinkRates,
    Links,
    NetworkTiers,
    NetworkTrace,
    Wired,
    WirelessFast,
    WirelessSlow,
)
from mpifl.traffic.ledger import Moved

MODEL = 400  # bytes
M = 20  # clients of a cohort
HARMONIC = (1 / np.arange(1, M + 1)).sum()


def moved(*sizes: tuple[int, int], trains: bool = True) -> list[Moved]:
    """Return visits of clients 0, 1, ... with their bytes down and up."""
    return [Moved(1, k, 0, trains, down, up) for k, (down, up) in enumerate(sizes)]


def end(network, visits, casts=0, seconds=1.0, start=10.0, availability=None) -> float:
    """Return when a round is over that starts at 10; computing takes a second."""
    present = availability or Availability()
    duration = visit_duration(Constant(seconds), network, present, key(0), len(visits), MODEL)
    return duration.round_end(start, visits, casts)


def test_a_round_over_own_links_lasts_as_long_as_its_slowest_client():
    """1 s of computing, two latencies of 0.5 s, and 300 / 100 + 50 / 10 s for client 1."""
    links = Links(uplink_bytes_s=10, downlink_bytes_s=100, latency_s=0.5)
    assert_allclose(end(links, moved((100, 50), (300, 50))), 10 + 1 + 1 + 3 + 5)


def test_rho_is_the_uplink_time_over_the_downlink_time():
    assert Links(downlink_bytes_s=100, rho=4).rates(0, 0, key(0), MODEL) == LinkRates(100, 25)


def test_group_broadcasts_are_sent_one_after_the_other():
    """Two rows of 400 bytes at 100 bytes a second, then computing, then 400 bytes up at 50."""
    links = Links(downlink_bytes_s=100, uplink_bytes_s=50, cast="group")
    visits = moved((400, 400), (400, 400), (400, 400))
    assert_allclose(end(links, visits, casts=800), 10 + 8 + 1 + 8)
    assert_allclose(end(links, visits, casts=400), 10 + 4 + 1 + 8)


def test_a_group_broadcast_goes_at_the_rate_of_the_slowest(tmp_path):
    """Links of 100 and 50 bytes a second: 800 bytes in 16 s for both, each with a latency of its own."""
    file = tmp_path / "links.csv"
    file.write_text("client,downlink_bytes_s,uplink_bytes_s,latency_s\n0,100,inf,0\n1,50,inf,0.5\n")
    visits = moved((400, 0), (800, 0))
    assert_allclose(end(NetworkTrace(str(file), cast="group"), visits, casts=800), 10 + 16 + 0.5 + 1 + 0.5)
    narrow = NetworkTrace(str(file), cast="group", server_bytes_s=25)
    assert_allclose(end(narrow, visits, casts=800), 10 + 32 + 0.5 + 1 + 0.5)


def test_the_servers_link_is_shared():
    """100 bytes a second for all: downloads end at 1, 2, 3; computing 1 s; uploads of 200 bytes follow each
    other.

    Client 0 is ready at 2 and done at 4, the others wait: 6, 8.
    """
    assert_allclose(end(Links(server_bytes_s=100), moved(*[(100, 200)] * 3)), 10 + 8)
    slow = Links(server_bytes_s=100, uplink_bytes_s=20)
    assert_allclose(end(slow, moved((100, 200))), 10 + 1 + 1 + 10, err_msg="its own link is the slower")


def test_downloads_over_the_servers_link_wait_for_all_before_them():
    """Of 100, 200 and 300 bytes at 100 a second the last is there after 6 seconds; computing takes one."""
    visits = moved((100, 0), (200, 0), (300, 0))
    assert_allclose(end(Links(server_bytes_s=100), visits), 10 + 6 + 1)
    slow = Links(server_bytes_s=100, downlink_bytes_s=50, latency_s=0.5)
    assert_allclose(
        end(slow, visits), 10 + 3 + 6 + 0.5 + 1 + 0.5, err_msg="3 s of waiting, 6 over its own link"
    )


def test_statistics_take_no_computing_time():
    assert_allclose(end(Links(uplink_bytes_s=10), moved((0, 50), trains=False)), 10 + 5)
    assert end(Links(), []) == 10


ALTERNATING = Availability(profile=(1, 0), day_s=20)  # there from 0 to 10 s, from 20 to 30, ...


@pytest.mark.parametrize("network", [{}, {"server_bytes_s": 1e15}, {"cast": "group"}])
def test_a_client_that_is_away_sends_nothing(network):
    """1 s of computing and 24 s of upload: 10 of the 25 in each phase, the last 5 from 40 on.

    Statistics of 24 s that are asked for at 10 are sent from 20 to 30, from 40 to 50, and from 60 on.
    """
    links = Links(uplink_bytes_s=10, **network)
    assert_allclose(end(links, moved((0, 240)), start=0.0, availability=ALTERNATING), 45)
    sent = moved((0, 240), trains=False)
    assert_allclose(end(links, sent, start=10.0, availability=ALTERNATING), 64)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("availability", [ALTERNATING, Availability(on_s=2, off_s=2)])
def test_a_servers_link_that_limits_nothing_changes_no_time(availability, trains):
    visits = moved(*[(40 * k, 90 - 10 * k) for k in range(8)], trains=trains)
    own = {"uplink_bytes_s": 5, "downlink_bytes_s": 20, "latency_s": 0.25}
    for start in (0.0, 3.0, 12.5):
        expected = end(Links(**own), visits, start=start, availability=availability)
        found = end(Links(**own, server_bytes_s=1e15), visits, start=start, availability=availability)
        assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("system", "rho", "computing"),
    [(WirelessSlow(), 4, 1 + HARMONIC), (WirelessFast(), 2, 1.0), (Wired(), 1, 1.0)],
)
@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_the_systems_of_ucfl_have_their_closed_form(system, rho, computing, streams):
    """Mean of a round over T_dl: streams + T_min + H_m / mu + rho. 300 rounds, four standard errors."""
    rounds = 300
    duration = visit_duration(Constant(0), system, Availability(), key(0), M, MODEL)
    times = [
        duration.round_end(0.0, [Moved(t, k, t, True, MODEL, MODEL) for k in range(M)], streams * MODEL)
        for t in range(rounds)
    ]
    expected = streams + rho + computing
    error = np.sqrt((1 / np.arange(1, M + 1) ** 2).sum() / rounds) if rho == 4 else 1e-9
    assert_allclose(np.mean(times), expected, atol=4 * error)


def test_tiers_stay_with_their_clients_and_have_their_shares():
    network = NetworkTiers(("lte", "wan"), (0.25, 0.75))
    links = [network.rates(k, 0, key(0), MODEL) for k in range(400)]
    assert links == [network.rates(k, 3, key(0), MODEL) for k in range(400)]
    assert_allclose(
        np.mean([link == TIERS["lte"] for link in links]), 0.25, atol=4 * np.sqrt(0.25 * 0.75 / 400)
    )


@pytest.mark.parametrize(
    ("tier", "down", "up", "latency"),
    [("lte", 20, 5, 0.05), ("wifi", 100, 40, 0.01), ("wan", 1000, 1000, 0.03)],
)
def test_tiers_are_in_megabits_and_messages_in_bytes(tier, down, up, latency):
    """What is called R Mbit/s moves R * 10^6 bits, an eighth as many bytes, in a second."""
    network = NetworkTiers((tier,), (1.0,))
    visits = moved((down * 10**6 // 8, 3 * up * 10**6 // 8))
    assert_allclose(end(network, visits), 10 + 1 + 1 + 3 + 2 * latency)


def test_a_spread_makes_clients_differ_for_good():
    network = Links(uplink_bytes_s=100, downlink_bytes_s=200, spread=1.0)
    links = [network.rates(k, 0, key(0), MODEL) for k in range(50)]
    assert len({link.up for link in links}) == 50
    assert all(link.down == pytest.approx(2 * link.up) for link in links)
    assert links[3] == network.rates(3, 9, key(0), MODEL)


def test_a_trace_gives_each_visit_its_link(tmp_path):
    file = tmp_path / "links.csv"
    file.write_text("client,downlink_bytes_s,uplink_bytes_s,latency_s\n0,100,10,0.5\n1,inf,20,\n0,200,40,0\n")
    network = NetworkTrace(str(file))
    network.check(2)
    assert [network.rates(0, v, key(0), MODEL) for v in range(3)] == [
        LinkRates(100, 10, 0.5),
        LinkRates(200, 40, 0.0),
        LinkRates(100, 10, 0.5),
    ]
    assert network.rates(1, 0, key(0), MODEL) == LinkRates(inf, 20, 0.0)


HEAD = "client,downlink_bytes_s,uplink_bytes_s\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}0,1,1\n", "has no row of client 1; give every client one"),
        (f"{HEAD}0,1,1\n1,1,1\n2,1,1\n", "has rows of client 2; there are 2 clients"),
        (f"{HEAD}0,1,1\n1,-5,1\n", "line 3 = .*: use positive rates"),
        (f"{HEAD}0,1,1\n1,nan,1\n", "line 3 = .*: use positive rates"),
        ("client,seconds\n0,1\n", "needs a client, downlink_bytes_s and uplink_bytes_s"),
    ],
)
def test_a_broken_trace_of_links_is_refused(text, message, tmp_path):
    file = tmp_path / "links.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        NetworkTrace(str(file)).check(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(server_bytes_s=0.0), "server_bytes_s = 0.0"),
        (lambda: Links(rho=2.0), "rho = 2.0: needs downlink_bytes_s"),
        (lambda: Links(spread=-1.0), "spread = -1.0"),
        (lambda: WirelessSlow(mean_s=-1.0), "mean_s = -1.0"),
        (lambda: NetworkTiers(("5g",), (1.0,)), "use some of lte, wifi, wan"),
        (lambda: NetworkTiers(("lte",), (0.5,)), "one share per tier"),
        (lambda: NetworkTrace("/nowhere.csv").check(1), "there is no such file"),
    ],
)
def test_impossible_networks_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_every_network_can_be_named_in_a_configuration():
    assert set(NETWORKS) == {"links", "wireless-slow", "wireless-fast", "wired", "tiers", "trace"}
