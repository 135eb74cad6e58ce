"""Small parts of the asynchronous engine by hand, and in which order it takes uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.asking import Remembering
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.plan import Mixing, Plan
from mpifl.runtime.asynchronous import AsyncStats, largest_weight, rows_read
from mpifl.simulation.clock import Replay
from mpifl.simulation.delays import Constant, Exponential, Uniform
from mpifl.simulation.network import Links
from mpifl.simulation.policies import Buffer, EveryArrival, Synchronous

TABLE = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])


def test_what_a_visit_reads_of_a_server():
    server = toy.Server({"model": TABLE}, np.zeros(1, int))
    assert_close(rows_read(server, "model", (1,)), TABLE[1:2])
    assert rows_read(server, "model", (1,)).data_ptr() == TABLE[1].data_ptr(), "a single row is no copy"
    assert_close(rows_read(server, "model", (2, 1)), TABLE[[2, 1]])
    assert_close(rows_read(server, "model", np.array([0.0, 0.5, 0.5])), torch.tensor([[55.0, 110.0]]))


def test_the_largest_weight_of_an_upload_of_two_components():
    plan = Plan([Mixing(np.array([[0.1, 0.0, 0.5, 0.0], [0.0, -0.7, 0.0, 0.2]]))])
    assert [largest_weight(plan, j, 2) for j in (0, 1)] == [0.7, 0.5]
    assert largest_weight(Plan([]), 0, 1) == 0.0


def test_an_upload_of_the_largest_staleness_is_taken(tmp_path):
    """Three visits are under way, and FedAsync steps at each arrival: lags of 0, 1 and 2."""
    for limit in (0, 1, 2):
        asked = {"cohort_size": 3, "policy": EveryArrival(max_staleness=limit)}
        done = toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path / str(limit), 8, **asked)
        taken = {row["staleness"] for row in done.arrivals if row["accepted"]}
        refused = {row["staleness"] for row in done.arrivals if not row["accepted"]}
        assert limit in taken
        assert max(taken) == limit
        assert min(refused, default=limit + 1) == limit + 1


def test_uploads_of_a_step_are_in_the_order_of_their_clients_whenever_they_came(tmp_path):
    done = toy.events(
        CATALOGUE["fedbuff"](),
        toy.Tiny(),
        tmp_path,
        5,
        cohort_size=4,
        policy=Buffer(3),
        delay=Uniform(0.5, 1.5),
    )
    arrived = [row["client"] for row in done.arrivals][:15]
    assert arrived != [k for i in range(0, 15, 3) for k in sorted(arrived[i : i + 3])], (
        "they did come otherwise"
    )
    for i, notes in enumerate(done.notes):
        assert_array_equal(notes.client, np.sort(notes.client))
        assert_array_equal(notes.client[notes.arrival], arrived[3 * i : 3 * i + 3])


def test_fedasync_blends_uploads_of_a_buffer_as_they_arrived(tmp_path):
    """alpha = 0.6: the last weighs 0.6, whoever it comes from, the one before 0.6 * 0.4, and so on."""
    method, policy = CATALOGUE["fedasync"](staleness="constant"), Buffer(3)
    asked = {"cohort_size": 4, "policy": policy, "delay": Uniform(0.5, 1.5)}
    done = toy.events(method, toy.Tiny(), tmp_path, 5, **asked)
    for plan, notes in zip(done.plans, done.notes, strict=True):
        assert_allclose(plan.mixings[0].weights[0, notes.arrival], [0.6 * 0.16, 0.6 * 0.4, 0.6])


def test_fedasync_prefers_no_client_by_its_number_in_rounds(tmp_path):
    """Each is the last in some of 30 rounds."""
    method = CATALOGUE["fedasync"](staleness="constant")
    done = toy.run(method, toy.Tiny(), tmp_path, steps=30, evaluate=False)
    last = [int(plan.mixings[0].weights[0].argmax()) for plan in done.plans]
    assert {*last} == {*range(6)}


def test_a_tally_by_hand():
    """Two visits for 2 s, then three for 1 s: 7 visit-seconds in 3 s. Lags 0, 2, 2, one of them refused."""
    stats = AsyncStats()
    stats.advance(2.0, 2)
    stats.advance(3.0, 3)
    for lag, accepted in ((0, True), (2, False), (2, True)):
        stats.add(lag, accepted)
    said = stats.summary(steps=2, virtual=3.0, real=6.0, idle=[0.25], server=0.5)
    assert said == {
        "arrivals": 3,
        "refusal_rate": 1 / 3,
        "staleness_mean": 4 / 3,
        "refused": 1,
        "staleness_max": 2,
        "staleness_histogram": {"0": 1, "2": 2},
        "concurrency": pytest.approx(7 / 3),
        "clock_seconds": 3.0,
        "updates_per_clock_second": pytest.approx(2 / 3),
        "updates_per_second": pytest.approx(1 / 3),
        "arrivals_per_second": 0.5,
        "worker_idle_share": [0.25],
        "server_cpu_share": 0.5,
    }


def test_idle_seconds_of_workers_are_their_share_of_all_seconds(tmp_path):
    """A worker that says 1 of 4 s, and then 2 of 4 s: 3 of 8."""
    done = toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path, 1)
    assert done.engine.summary()["worker_idle_share"] == []
    for idle in (1.0, 2.0):
        done.engine.last_served = idle, 4.0
        done.engine._evaluate(done.server)
    assert done.engine.summary()["worker_idle_share"] == [0.375]


def test_the_ledger_books_an_arrival_and_a_download_in_the_step_that_they_are_part_of(tmp_path):
    """A visit that reads version v belongs to step v + 1; so does an upload that arrives at version v."""
    asked = {"cohort_size": 4, "policy": Buffer(2), "delay": Uniform(0.5, 1.5)}
    done = toy.events(CATALOGUE["fedbuff"](), toy.Tiny(), tmp_path, 5, **asked)
    ledger, size = done.server_step.ledger, 4 * done.server_step.problem.layout.size
    versions = [row["read_version"] for row in done.arrivals] + [v.version for v in done.engine.clock.visits]
    started = Counter(versions)
    assert len(started) > 3
    for step in range(7):
        assert ledger.total("up", step) == 2 * size * (1 <= step <= 5)
        assert ledger.total("down", step) == started[step - 1] * size
        for way in ("up", "down"):
            entries = [e.bytes for e in ledger.entries.values() if (e.step, e.direction) == (step, way)]
            assert sum(entries) == ledger.total(way, step)


@dataclass(frozen=True)
class LaterAsks(Remembering):
    """Client 1 asks client 0 in the second step and the third."""

    def probes(self, server, step):
        """Look in these steps."""
        return step in (2, 3)

    def pairs(self, server, clients, fresh):
        """Look at smaller ones."""
        return clients[:, None] > clients[None, :]


LINKS = Links(downlink_bytes_s=500.0, uplink_bytes_s=1000.0)
TWO: Mapping[str, Any] = {"policy": EveryArrival(), "delay": Constant(1.0)}


def dues(done: toy.Run) -> list[tuple[int, int, float]]:
    """Return client, visit and time of each arrival."""
    return [(row["client"], row["visit"], pytest.approx(row["time"])) for row in done.arrivals]


def test_a_visit_lasts_longer_by_what_its_client_has_asked_and_answered_since_it_began_the_last(tmp_path):
    """Models of 163 numbers: a visit takes u = 1 + 652 / 500 + 652 / 1000 = 2.956 s.

    A look costs client 1, up, a question of 5 numbers, 2 shown and a note: 32 bytes, 0.032 s; client 0 a
    question down and an answer of 3 numbers up: 20 / 500 + 12 / 1000 = 0.052 s. Both arrive at u, in steps 1
    and 2, and look: they arrive next at 2 u + 0.052 and 2 u + 0.032. So client 1 makes step 3 and looks at
    client 0, whose visit is under way and ends when it was to end: 0.052 s come to the visit after it, and
    0.032 s to client 1's, which ends at 3 u + 0.064. Client 0's ends at 3 u + 0.104.
    """
    u, two = 2.956, toy.Tiny(2, equal=True)
    expected = [
        *((0, 0, u), (1, 0, u)),
        *((1, 1, 2 * u + 0.032), (0, 1, 2 * u + 0.052)),
        *((1, 2, 3 * u + 0.064), (0, 2, 3 * u + 0.104)),
        *((1, 3, 4 * u + 0.064), (0, 3, 4 * u + 0.104)),
    ]
    done = toy.events(LaterAsks(), two, tmp_path / "a", 8, network=LINKS, **TWO)
    assert expected == dues(done)
    free = toy.events(LaterAsks(), two, tmp_path / "b", 8, **TWO)
    assert [row["time"] for row in free.arrivals] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def test_samples_that_a_client_stores_at_the_server_lengthen_its_next_visit(tmp_path):
    """With its first upload each stores 18 samples of 16 numbers: 1152 bytes, at 1000 a second."""
    method = CATALOGUE["emdcfl"](samples="server")
    done = toy.events(method, toy.Tiny(2, equal=True), tmp_path, 6, network=LINKS, **TWO)
    u = 2.956
    expected = [(k, v, t) for v, t in enumerate((u, 2 * u + 1.152, 3 * u + 1.152)) for k in (0, 1)]
    assert sorted(dues(done), key=lambda due: due[1::-1]) == expected


def test_a_replay_has_the_times_of_visits_that_looks_lengthened(tmp_path):
    world = {"policy": EveryArrival(), "cohort_size": 3}
    one = toy.events(
        Remembering(), toy.Tiny(), tmp_path / "a", 9, network=LINKS, delay=Exponential(2.0), **world
    )
    rows = [",".join(one.arrivals[0]), *(",".join(map(str, row.values())) for row in one.arrivals)]
    trace = tmp_path / "events.csv"
    trace.write_text("\n".join(rows) + "\n")
    again = toy.events(Remembering(), toy.Tiny(), tmp_path / "b", 9, clock=Replay(str(trace)), **world)
    toy.same(toy.state_of(one.server), toy.state_of(again.server))
    assert (again.arrivals, again.times) == (one.arrivals, one.times)


def test_with_equal_delays_and_a_full_buffer_only_the_times_of_looks_differ_from_rounds(tmp_path):
    """Clients with equally many samples look alike: the look that ends round 1 lengthens the second visits.

    A client sends 5 questions of 136 numbers, shows 5 times 12 * 7, answers 5 times with 6 * 7, and tells one
    number: 5.244 s; it receives 5 questions: 5.44 s. It embeds 18 samples, then 5 times 6 of them; a training
    on 12 samples takes 1 s, and 656 FLOPs a sample, of which an embedding takes 256.
    """
    method = CATALOGUE["emdcfl"](epsilon=0.5)
    world = {"network": LINKS, "delay": Constant(1.0), "costs": "all", "participation": 1.0}
    rounds, buffer = (
        toy.events(method, toy.Tiny(equal=True), tmp_path / name, 4, policy=policy, **world)
        for name, policy in (("rounds", Synchronous()), ("buffer", Buffer(size=6)))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(buffer.server))
    assert buffer.server_step.ledger.total("up") == rounds.server_step.ledger.total("up")
    u, look = 2.956, 5.244 + 5.44 + 48 / 12 * 256 / 656
    assert_allclose(rounds.times, [0, u + look, 2 * u + look, 3 * u + look, 4 * u + look], rtol=1e-12)
    assert_allclose(buffer.times, [0, u, *rounds.times[2:]], rtol=1e-12)
