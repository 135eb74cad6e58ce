"""The asynchronous engine in one process: what it must agree with, and what policies, clocks and damping
do.
"""

from __future__ import annotations

import csv
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.cases import named
from support.each import for_each
from support.nightly import covering
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.errors import UserError
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import key
from mpifl.experiment.schema import EvaluationConfig
from mpifl.simulation.availability import Availability
from mpifl.simulation.clock import Replay, WallTime
from mpifl.simulation.delays import Constant, Exponential, Tiers, Uniform
from mpifl.simulation.network import Links
from mpifl.simulation.policies import (
    Barrier,
    Buffer,
    ClientDecides,
    DrawnStaleness,
    EveryArrival,
    OverSelection,
    PartialWork,
    Synchronous,
    Waves,
)
from mpifl.simulation.sampling import Sampler
from mpifl.simulation.upload_triggers import WhenDone
from mpifl.simulation.visits import DispatchState
from mpifl.training.config import LocalConfig

CFL = {"warmup": 1, "eps1": 100.0, "eps2": 0.0}
SLOW = Exponential(mean_s=2.0)


def events(name, folder, steps=4, federation=None, options=None, **changes) -> toy.Run:
    """Run a method of the catalogue."""
    method = CATALOGUE[name](**(options or {}))
    return toy.events(method, federation or toy.Tiny(), folder, steps, **changes)


# -- agreement with the synchronous engine ----------------------------------------


def name_of(value: tuple[str, dict[str, object]] | float) -> str:
    """Return the name of a case, or a share."""
    return named(value) if isinstance(value, tuple) else str(value)


SYNCHRONOUS: list[tuple[str, dict[str, object]]] = [
    ("fedavg", {}),
    ("scaffold", {}),
    ("cfl", CFL),
    ("ifca", {"num_clusters": 2}),
    ("fedem", {}),
    ("fedavgm", {}),
    ("fedper", {}),
    ("fedfomo", {"num_models": 2}),
    ("ucfl", {"noise_batch": 4.0}),
]


@pytest.mark.parametrize(("case", "participation"), covering(SYNCHRONOUS, [1.0, 0.5], ids=name_of))
def test_a_barrier_is_synchronous_rounds_bit_for_bit(case, participation, tmp_path):
    name, options = case
    common = {"options": options, "participation": participation}
    rounds = events(name, tmp_path / "r", policy=Synchronous(), **common)
    barrier = events(name, tmp_path / "b", policy=Barrier(), **common)
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))
    toy.same(dict(rounds.scores), dict(barrier.scores))
    assert rounds.server_step.ledger.total("up") == barrier.server_step.ledger.total("up")
    assert rounds.times == barrier.times == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("name", "options"), [("fedavg", {}), ("apfl", {}), ("cfl", CFL)])
def test_what_clients_report_is_weighted_by_samples_under_both_engines(name, options, tmp_path):
    """Clients have 8, 11, 14, 17, 8 and 11 samples."""
    every = {"options": options, "evaluation": EvaluationConfig(every=1, at_start=True)}
    rounds, barrier = (
        events(name, tmp_path / str(i), policy=policy, **every)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    for step in range(1, 5):
        assert rounds.reported[step]["train_loss"] > 0
        for column, value in rounds.reported[step].items():
            assert barrier.reported[step][column] == value, (step, column)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedavg", {}), ("ucfl", {"noise_batch": 4.0}), ("pacfl", {}), ("fedclust", {}), ("flexcfl", {})],
)
def test_rounds_and_barrier_share_their_time_axis(name, options, tmp_path):
    """Delays, a link and absences: a round lasts as long as its slowest client, statistics as messages."""
    world = {
        "options": options,
        "delay": SLOW,
        "network": Links(uplink_bytes_s=2000.0, downlink_bytes_s=8000.0, latency_s=0.05),
        "availability": Availability(on_s=3.0, off_s=2.0),
        "participation": 0.5,
    }
    runs = [events(name, tmp_path / str(p), policy=p, **world) for p in (Synchronous(), Barrier())]
    assert runs[0].times == runs[1].times
    assert min(np.diff(runs[0].times)) > 0.1
    assert (runs[0].times[0] > 0.1) == (name != "fedavg")


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedcuau", {}), ("fedfomo", {"num_models": 2}), ("fedfomo", {"num_models": 2, "variant": "ucfl"})],
)
def test_uploads_of_several_sizes_share_the_time_axis_of_rounds(name, options, recwarn, tmp_path):
    """FedCUAU's uploads depend on the client's cluster; FedFomo's grow when clients read others' models."""
    world = {"options": options, "delay": SLOW, "network": Links(uplink_bytes_s=90.0), "participation": 0.5}
    policies = (Synchronous(), Barrier(), PartialWork(deadline_s=1e6))
    runs = [events(name, tmp_path / str(i), policy=p, **world) for i, p in enumerate(policies)]
    assert runs[0].times == runs[1].times == runs[2].times
    assert not [w for w in recwarn if "network" in str(w.message)]


def test_who_is_back_first_depends_on_the_upload_of_each(tmp_path):
    """FedCUAU with equal computing: cluster 1 uploads a copy less, and is back before cluster 0."""
    world = {"network": Links(uplink_bytes_s=90.0), "cohort_size": 3}
    done = events("fedcuau", tmp_path, 1, policy=OverSelection(extra=1.0), **world)
    assert done.server.assign[done.records[-1].cohort].tolist() == [1, 1, 1]


class Growing(CATALOGUE["fedasync"]):
    """FedAsync whose clients send a note more from their second visit on."""

    needs = replace(CATALOGUE["fedasync"].needs, client_state=True)

    def local_update(self, message, state, client, key):
        """Remember that the client was there."""
        report, _ = super().local_update(message, {}, client, key)
        return replace(report, notes={"seen": np.zeros(1 + len(state))}), {"seen": torch.ones(1)}


@pytest.mark.parametrize("policy", [EveryArrival(), Barrier(), PartialWork(deadline_s=1e6)])
def test_uploads_of_a_size_that_cannot_be_known_are_named_once(policy, tmp_path):
    world = {"policy": policy, "participation": 1.0, "delay": SLOW}
    with pytest.warns(UserWarning, match=r"network: client \d uploads 660 bytes, .* with 656, ") as said:
        toy.events(Growing(), toy.Tiny(), tmp_path, 9, network=Links(uplink_bytes_s=90.0), **world)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy.events(Growing(), toy.Tiny(), tmp_path / "free", 9, **world)


@pytest.mark.parametrize("policy", [Buffer(size=2), Waves(every_s=0.5), EveryArrival()])
def test_visits_begin_when_the_statistics_have_arrived(policy, tmp_path):
    """FlexCFL's statistics over links: first visits begin at that time, and a replay has the same times."""
    world = {"delay": Constant(1.0), "network": Links(uplink_bytes_s=2000.0), "participation": 0.5}
    rounds = events("flexcfl", tmp_path / "r", 1, **world | {"policy": Synchronous()})
    one = events("flexcfl", tmp_path / "one", policy=policy, **world)
    begin = rounds.times[0]
    assert begin > 0.1
    assert one.times[0] == begin == min(row["start"] for row in one.arrivals)
    assert one.arrivals[0]["time"] == rounds.times[1]
    assert one.engine.stats.busy_seconds <= 3 * (one.engine.clock.now - begin)
    trace = write(one.arrivals, tmp_path / "events.csv")
    again = events("flexcfl", tmp_path / "again", policy=policy, clock=Replay(trace), participation=0.5)
    toy.same(toy.state_of(one.server), toy.state_of(again.server))
    assert (again.arrivals, again.times) == (one.arrivals, one.times)


def test_statistics_hold_the_wall_clock_back(tmp_path):
    world = {"delay": Constant(1.0), "network": Links(uplink_bytes_s=2000.0), "participation": 0.5}
    rounds = events("flexcfl", tmp_path / "r", 1, **world | {"policy": Synchronous()})
    real = events("flexcfl", tmp_path / "real", 2, policy=Buffer(size=2), clock=WallTime(scale=0.01), **world)
    assert real.times[0] == 0.01 * rounds.times[0] <= min(row["start"] for row in real.arrivals)


def test_a_full_buffer_with_equal_delays_is_fedavg_on_updates(tmp_path):
    """B = m = N, equal n: w + 1/m sum_k (w_k - w) is the mean of the w_k."""
    same = {"federation": toy.Tiny(equal=True), "steps": 3}
    fedavg = events("fedavg", tmp_path / "avg", policy=Synchronous(), **same)
    fedbuff = events("fedbuff", tmp_path / "buff", policy=Buffer(size=6), **same)
    assert {row["staleness"] for row in fedbuff.arrivals} == {0}
    for a, b in zip(fedavg.servers, fedbuff.servers, strict=True):
        assert_close(a.tables["model"], b.tables["model"], rtol=1e-5, atol=1e-7)
    barrier = events("fedbuff", tmp_path / "barrier", policy=Barrier(), **same)
    toy.same(toy.state_of(barrier.server), toy.state_of(fedbuff.server))


@pytest.mark.parametrize("policy", [EveryArrival(), Buffer(size=1, rate=0.6)])
def test_fedavg_one_upload_at_a_time_is_fedasync(policy, tmp_path):
    """(1 - a) w + a w_k with a = 0.6 (1 + lag)^-0.5; a buffer weighs by samples, so equal n and one upload
    there.
    """
    own = Buffer(size=1) if isinstance(policy, Buffer) else policy
    runs = [
        events(name, tmp_path / name, 9, options=options, policy=policy, delay=SLOW)
        for name, options, policy in (("fedavg", {}, policy), ("fedasync", {"rho": 0.0}, own))
    ]
    toy.same(toy.state_of(runs[0].server), toy.state_of(runs[1].server))
    assert len({row["staleness"] for row in runs[0].arrivals}) > 1


def test_clustered_async_with_the_clusters_of_a_file_keeps_clusters_apart(tmp_path):
    """Two clusters are two runs of FedAsync's rule on the arrivals of each; one cluster is FedAsync."""
    file = tmp_path / "clusters.csv"
    file.write_text("client,cluster\n" + "".join(f"{k},{'ab'[k // 3]}\n" for k in range(6)))
    done = events("clustered_async", tmp_path, 12, options={"clusters": str(file)}, delay=SLOW)
    assert_array_equal(done.server.assign, [0, 0, 0, 1, 1, 1])
    for before, after, row in zip(done.servers[:-1], done.servers[1:], done.arrivals, strict=True):
        other = 1 - done.server.assign[row["client"]]
        assert_array_equal(before.tables["model"][other], after.tables["model"][other])
        assert not torch.equal(before.tables["model"][1 - other], after.tables["model"][1 - other])
    one = events("clustered_async", tmp_path / "one", 12, delay=SLOW)
    fedasync = events("fedasync", tmp_path / "fedasync", 12, delay=SLOW)
    toy.same(toy.state_of(one.server), toy.state_of(fedasync.server))


def test_async_ifca_moves_only_the_chosen_row(tmp_path):
    done = events("ifca", tmp_path, 12, options={"num_clusters": 2}, delay=SLOW)
    for before, after, notes in zip(done.servers[:-1], done.servers[1:], done.notes, strict=True):
        other = 1 - int(notes["cluster"][0])
        assert_close(before.tables["model"][other], after.tables["model"][other], rtol=0, atol=0)
    assert len({int(n["cluster"][0]) for n in done.notes}) == 2


# -- policies ----------------------------------------


@dataclass(frozen=True)
class Counting(Algorithm):
    """Notes which version it read; the model does not change."""

    needs: ClassVar[Needs] = Needs(weighs_staleness=True)

    def local_update(self, message, state, client, key):
        """Report the first number of the row that was read, which counts steps."""
        return client.report(
            {"read": float(message["model"][0, 0])}, model=torch.ones(client.layout.size)
        ), {}

    def aggregate(self, server, notes):
        """Add one to everything."""
        return Plan([Mixing(np.full((1, len(notes)), 1 / len(notes)), keep=np.ones(1))])

    def setup(self, world, fingerprints, key):
        """Start from zero."""
        start = super().setup(world, fingerprints, key)
        return type(start)({"model": torch.zeros_like(start.tables["model"])}, start.assign)


def counting(folder, steps, num_clients=6, **changes) -> toy.Run:
    """Run `Counting`: the row that a client read is the version it read."""
    done = toy.events(Counting(), toy.Tiny(num_clients), folder, steps, **changes)
    read = np.concatenate([n["read"] for n in done.notes])
    lag = np.concatenate([n.staleness for n in done.notes])
    version = np.repeat(np.arange(steps), [len(n) for n in done.notes])
    assert_array_equal(read, version - lag)
    accepted = [row for row in done.arrivals if row["accepted"]]
    assert sorted(row["staleness"] for row in accepted) == sorted(lag)
    return done


@pytest.mark.parametrize(
    "policy", [Barrier(), EveryArrival(), Buffer(size=3), ClientDecides(), DrawnStaleness(most=3)]
)
def test_staleness_is_the_difference_of_versions(policy, tmp_path):
    delay = SLOW if policy.in_seconds else Constant()
    done = counting(tmp_path, 20, cohort_size=4, policy=policy, delay=delay)
    times = [row["time"] for row in done.arrivals]
    assert times == sorted(times)
    for row in done.arrivals:
        assert row["staleness"] == row["arrival_version"] - row["read_version"]
        assert row["start"] < row["time"]


def test_freed_places_are_filled_at_once(tmp_path):
    done = counting(tmp_path, 30, cohort_size=4, policy=EveryArrival(), delay=SLOW)
    assert done.engine.stats.busy_seconds / done.engine.clock.now == pytest.approx(4)
    for row in done.arrivals[4:]:
        assert row["start"] == 0.0 or row["start"] in {r["time"] for r in done.arrivals}


def test_a_client_is_never_under_way_twice(tmp_path):
    done = counting(tmp_path, 40, cohort_size=5, policy=Buffer(size=2), delay=SLOW)
    for k in range(6):
        spans = sorted((row["start"], row["time"]) for row in done.arrivals if row["client"] == k)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_uploads_that_are_too_stale_are_refused_and_change_nothing(tmp_path):
    done = counting(tmp_path, 30, participation=1.0, policy=EveryArrival(max_staleness=4), delay=Tiers())
    refused = [row for row in done.arrivals if not row["accepted"]]
    assert refused
    assert min(row["staleness"] for row in refused) > 4
    assert max(row["staleness"] for row in done.arrivals if row["accepted"]) <= 4
    assert len(done.arrivals) == 30 + len(refused)
    said = done.engine.summary()
    assert said["refused"] == len(refused)
    assert said["refusal_rate"] == len(refused) / len(done.arrivals)
    assert sum(said["staleness_histogram"].values()) == said["arrivals"] == len(done.arrivals)


def test_drawn_staleness_is_uniform_up_to_its_maximum(tmp_path):
    """300 draws from 0..3: chi-square with 3 degrees of freedom stays below 16.3 (p = 0.001)."""
    done = counting(tmp_path, 300, policy=DrawnStaleness(most=3), model=toy.mlp())
    lags = Counter(row["staleness"] for row in done.arrivals[3:])  # at first there is nothing old to serve
    assert set(lags) == {0, 1, 2, 3}
    expected = 297 / 4
    assert sum((lags[s] - expected) ** 2 / expected for s in range(4)) < 16.3
    assert [row["time"] for row in done.arrivals] == list(range(1, 301))


@pytest.mark.in_turn
def test_clients_decide_uniformly_and_one_a_second(tmp_path):
    """600 uploads of 6 clients: chi-square with 5 degrees of freedom stays below 20.5 (p = 0.001)."""
    done = counting(tmp_path, 600, policy=ClientDecides(), model=toy.mlp())
    assert [row["time"] for row in done.arrivals] == list(range(1, 601))
    uploads = Counter(row["client"] for row in done.arrivals)
    assert sum((uploads[k] - 100) ** 2 / 100 for k in range(6)) < 20.5


def test_an_idle_client_is_drawn_uniformly_without_a_list_of_all():
    busy = {0, 2, 5, 7}
    dispatch = DispatchState(busy, 0, 0, 6, Sampler(9, 6, key(0)), key(0))
    drawn = [dispatch.draw([3], number) for number in range(2000)]
    counts = Counter(drawn)
    assert set(counts) == {1, 4, 6, 8}
    assert min(counts.values()) > 420
    everywhere = DispatchState(busy, 0, 0, 6, Sampler(9, 6, key(0)), key(0), available=lambda k: True)
    assert drawn == [everywhere.draw([3], number) for number in range(2000)]
    assert DispatchState(set(range(9)), 0, 0, 9, Sampler(9, 9, key(0)), key(0)).draw([], 0) is None


def test_nobody_starts_who_is_not_there(tmp_path):
    """Two clients, hardly ever there, and not at first: each begins at its first return."""
    away = Availability(on_s=0.1, off_s=9.0)
    done = counting(tmp_path, 10, 2, policy=EveryArrival(), delay=Constant(0.3), availability=away)
    presence = done.engine.clock.duration.presence
    first = {row["client"]: row["start"] for row in done.arrivals if row["visit"] == 0}
    assert first == {k: presence.next_available(k, 0.0) for k in range(2)}
    assert min(first.values()) > 0
    for row in done.arrivals:
        assert presence.is_available(row["client"], row["start"])
        assert row["time"] >= row["start"] + 0.3
    assert max(row["time"] - row["start"] for row in done.arrivals) > 1


# -- the wall clock and its replay ----------------------------------------


def write(rows, path) -> str:
    """Write events as a run folder has them; return the path."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return str(path)


@pytest.mark.parametrize(
    ("name", "policy", "steps"),
    [
        ("fedasync", EveryArrival(), 15),
        ("fedasync", EveryArrival(max_staleness=3), 12),
        ("fedbuff", Buffer(size=3), 6),
        ("scaffold", Buffer(size=2), 6),
        ("fedavg", Barrier(), 3),
        ("ccfl", ClientDecides(WhenDone()), 12),
    ],
)
def test_the_replay_of_a_wall_clock_run_is_that_run(name, policy, steps, tmp_path):
    """Real arrivals in an order of their own; refused ones, and those a buffer held, included."""
    slow = {"delay": Uniform(0.5, 2.0), "cohort_size": 5}
    real = events(name, tmp_path / "real", steps, policy=policy, clock=WallTime(scale=0.01), **slow)
    trace = write(real.arrivals, tmp_path / "events.csv")
    again = events(name, tmp_path / "again", steps, policy=policy, clock=Replay(trace), cohort_size=5)
    toy.same(toy.state_of(real.server), toy.state_of(again.server))
    assert again.arrivals == real.arrivals
    order = [row["client"] for row in real.arrivals]
    virtual = events(name, tmp_path / "virtual", steps, policy=policy, **slow)
    if isinstance(policy, EveryArrival):
        assert order != sorted(order)
    assert len(virtual.servers) == len(real.servers)


REPLAYED = [
    *(EveryArrival(), Buffer(size=3), Buffer(size=6), Barrier(), Waves(size=3), ClientDecides()),
    DrawnStaleness(most=2),
]
DELAYS = [SLOW, Constant(), Constant(0.0)]


@pytest.mark.parametrize(("policy", "delay"), covering(REPLAYED, DELAYS, ids=repr))
def test_the_replay_of_a_virtual_run_is_that_run(policy, delay, tmp_path):
    """Ties too: with equal delays all arrive at the same instant before anyone starts; without, all at 0."""
    delay = delay if policy.in_seconds else Constant()
    one = events("fedasync", tmp_path / "one", 12, policy=policy, delay=delay)
    trace = write(one.arrivals, tmp_path / "events.csv")
    again = events("fedasync", tmp_path / "again", 12, policy=policy, clock=Replay(trace))
    toy.same(toy.state_of(one.server), toy.state_of(again.server))
    assert again.arrivals == one.arrivals
    first, then = one.server_step.ledger, again.server_step.ledger
    assert then.total("up") == first.total("up")
    started, repeated = (run.engine.dispatcher.num_started for run in (one, again))
    started, repeated = (run.engine.dispatcher.num_started for run in (one, again))
    left = started - repeated  # under way at the end, in no row of the trace
    assert first.total("down") - then.total("down") == left * first.total("down") // started
    assert "are not repeated" in Replay(trace).remark


def test_a_replay_does_not_report_what_its_trace_does_not_tell(tmp_path):
    """The last visits are in no row of the trace, and so the rows that they read are not known."""
    evaluation = EvaluationConfig(every=4)
    one = events("ccfl", tmp_path / "one", 12, policy=ClientDecides(), evaluation=evaluation)
    trace = write(one.arrivals, tmp_path / "events.csv")
    again = events(
        "ccfl", tmp_path / "again", 12, policy=ClientDecides(), evaluation=evaluation, clock=Replay(trace)
    )
    for step in (4, 8, 12):
        first, then = dict(one.reported[step]), dict(again.reported[step])
        assert 0 < first.pop("accuracy_received") <= 1
        first.pop("accuracy_received_std")
        assert then == first
    assert one.engine.summary()["concurrency"] == pytest.approx(toy.Tiny().num_clients)
    assert again.engine.summary()["concurrency"] is None, "visits that never arrived were under way, too"


def test_a_trace_of_another_run_is_refused(tmp_path):
    """A step at every second arrival reads other versions than a step at each."""
    one = events("fedasync", tmp_path / "one", 12, delay=SLOW)
    trace = write(one.arrivals, tmp_path / "events.csv")
    with pytest.raises(
        UserError, match="reads version 2, and the server is at 1: this is not a trace of such a run"
    ):
        events("fedasync", tmp_path / "two", 6, policy=Buffer(size=2), clock=Replay(trace))
    with pytest.raises(UserError, match="the trace ends before the run"):
        events("fedasync", tmp_path / "three", 13, clock=Replay(trace))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1,0,0,0,0", "0.5,1,0,0,0"], "line 3 = 0.5: time goes back"),
        (["1,0,0,0,0", "nan,1,0,0,0"], "line 3 = nan: time goes back"),
        (["1,6,0,0,0"], "line 2 = 6: unknown client; there are 6"),
        (["1,-1,0,0,0"], "line 2 = -1: unknown client"),
        (["1,0,1,0,0"], "line 2 = 1: client 0 made 0 visits before this one"),
        (["1,0,0,2,0"], "line 2 = 2.0: a visit starts before it arrives"),
        (["1,zero,0,0,0"], "is not a row of an events.csv"),
        (["1,0,0,0"], "line 2 = .*has 4 fields, the head has 5"),
        (["1,0,0,-1,0"], "line 2 = -1.0: a visit starts before the run"),
    ],
)
def test_a_broken_trace_is_refused_and_its_line_is_named(lines, message, tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("\n".join(["time,client,visit,start,read_version", *lines]) + "\n")
    with pytest.raises(UserError, match=message):
        events("fedasync", tmp_path, clock=Replay(str(path)))


def test_what_is_no_trace_is_refused(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,seconds\n1,2\n")
    with pytest.raises(UserError, match="has no column time, client, visit, start, read_version"):
        events("fedasync", tmp_path, clock=Replay(str(tmp_path / "metrics.csv")))
    with pytest.raises(UserError, match="there is no such file"):
        events("fedasync", tmp_path, clock=Replay(str(tmp_path / "nowhere.csv")))


# -- what cannot run ----------------------------------------


@for_each(
    ("name", "policy", "message"),
    [
        (
            "emdcfl",
            EveryArrival(rate=0.5),
            "policy.rate = 0.5: has no effect on EMDCFL, whose steps are means",
        ),
        ("oracle", Buffer(size=2, staleness_a=0.0), "policy.staleness_a = 0.0: has no effect on Oracle"),
        (
            "flhc",
            EveryArrival(),
            "or algorithm.max_age: null, which lets the last uploads of other clients count",
        ),
        (
            "cfl",
            EveryArrival(),
            "policy.name = 'every_arrival': CFL compares the uploads of a step; use policy",
        ),
        (
            "pfedgraph",
            ClientDecides(),
            "policy.name = 'client_decides': PFedGraph compares the uploads of a step",
        ),
        ("ucfl", EveryArrival(), "UCFL compares the uploads of a step; use policy rounds, barrier or buffer"),
        (
            "fedfomo",
            Buffer(size=2),
            "policy.name = 'buffer': FedFomo needs fresh uploads; use rounds or barrier",
        ),
        (
            "ccfl",
            Buffer(size=2),
            "CCFL takes one upload at a time; use policy every_arrival or client_decides",
        ),
        ("ccfl", Barrier(), "policy.name = 'barrier': CCFL takes one upload at a time"),
        ("ccfl", Synchronous(), "policy.name = 'rounds': CCFL takes one upload at a time; use policy"),
        ("fedsoft_async", OverSelection(), "policy.name = 'over_selection': FedSoftAsync takes one upload"),
        (
            "scaffold",
            EveryArrival(max_staleness=2),
            "policy.max_staleness = 2: a client of SCAFFOLD relies on",
        ),
        (
            "fedsoft",
            Buffer(size=2, max_staleness=0),
            "policy.max_staleness = 0: a client of FedSoft relies on",
        ),
        ("fedbuff", Buffer(size=2, rate=0.1), "policy.rate = 0.1: has no effect on FedBuff"),
        ("ccfl", EveryArrival(staleness_a=3.0), "policy.staleness_a = 3.0: has no effect on CCFL"),
        ("fedavg", Barrier(staleness_a=3.0), "policy.staleness_a = 3.0: has no effect where no upload is"),
        ("fedavg", Barrier(max_staleness=0), "policy.max_staleness = 0: has no effect where no upload is"),
    ],
)
def test_a_method_that_a_policy_cannot_run_says_so(name, policy, message):
    with pytest.raises(UserError, match=message):
        policy.check(CATALOGUE[name]())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffer(size=0), "size = 0: a buffer needs at least one report; use every_arrival for none"),
        (
            lambda: Buffer(size=5).concurrency(8, 4),
            "only 4 visits are under way at a time: the server would wait",
        ),
        (
            lambda: DrawnStaleness(most=6).concurrency(6, 6),
            "up to 7 visits are under way, and there are 6 clients",
        ),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": DrawnStaleness(most=2), "clock": WallTime()}, "fixes the order; use clock virtual"),
        (
            {"policy": ClientDecides(), "availability": Availability(off_s=1.0)},
            "availability = .*has no effect",
        ),
        ({"policy": Buffer(size=4), "cohort_size": 3}, "policy.size = 4: only 3 visits"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_the_start(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        events("fedasync", tmp_path, **changes)


def test_clients_are_grouped_anew_in_rounds_only():
    flexcfl = CATALOGUE["flexcfl"]
    Buffer(size=2).check(flexcfl())
    with pytest.raises(UserError, match="FlexCFL with these options counts on rounds"):
        Buffer(size=2).check(flexcfl(migration=0.1))


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": Waves(every_s=0.5)},
        {"policy": Waves(size=3, every_s=0.5)},
        {"policy": Buffer(size=1)},
        {"policy": Barrier(), "cohort_size": 1},
        {"policy": Synchronous(), "cohort_size": 1},
        {"policy": OverSelection(deadline_s=1.0), "cohort_size": 3},
    ],
)
def test_a_method_that_shares_rows_out_among_uploads_is_not_left_with_one(changes, tmp_path):
    """One upload would make all centres of FedCE equal."""
    with pytest.raises(
        UserError, match=r"cohort_size, policy = .*: a step may have 1 upload, and FedCE needs 2"
    ):
        toy.start(CATALOGUE["fedce"](num_clusters=2), toy.Tiny(), tmp_path, **changes)


@dataclass(frozen=True)
class Failing(CATALOGUE["fedce"]):
    """FedCE of which only client 0 does not fail."""

    def local_update(self, message, state, client, key):
        """Fail."""
        if client.id:
            raise RuntimeError("no")
        return super().local_update(message, state, client, key)


@dataclass(frozen=True)
class FailingAt3(CATALOGUE["fedasync"]):
    """FedAsync of which client 3 always fails."""

    def local_update(self, message, state, client, key):
        """Fail."""
        if client.id == 3:
            raise RuntimeError("no")
        return super().local_update(message, state, client, key)


@pytest.mark.parametrize("most", [0, 2, 4])
def test_staleness_is_drawn_also_where_clients_fail(most, tmp_path):
    policy = DrawnStaleness(most=most)
    done = toy.events(FailingAt3(), toy.Tiny(), tmp_path, 30, policy=policy, on_client_error="drop")
    lags = [row["staleness"] for row in done.arrivals]
    assert done.server.version == 30 == len(lags)
    assert {*lags} == {*range(most + 1)}
    assert len(done.server_step.dropped) > 1
    whole = toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path / "whole", 30, policy=policy)
    assert lags == [row["staleness"] for row in whole.arrivals], "another client takes the place of one"
    assert [row["time"] for row in done.arrivals] == [*range(1, 31)]
    clock = Replay(write(done.arrivals, tmp_path / "events.csv"))
    again = toy.events(FailingAt3(), toy.Tiny(), tmp_path / "again", 30, policy=policy, clock=clock)
    assert again.arrivals == done.arrivals


def test_a_stale_visit_has_the_learning_rate_of_the_step_in_which_it_starts(tmp_path):
    """Not of that in which it arrives, nor of that whose rows it reads. The rate halves with each step."""
    found = {}

    class Asked(CATALOGUE["fedasync"]):
        def local_update(self, message, state, client, key):
            """Note the step and the rate."""
            found[client.id, client.visit] = message.step, client.sgd(message["model"][0], key).lr
            return super().local_update(message, state, client, key)

    local = LocalConfig(epochs=1, batch_size=5, lr=0.1, lr_decay=0.5)
    done = toy.events(Asked(), toy.Tiny(), tmp_path, 12, policy=DrawnStaleness(most=3), local=local)
    assert any(row["read_version"] < row["start"] < row["arrival_version"] for row in done.arrivals)
    for row in done.arrivals:  # the clock counts steps
        step, rate = found[row["client"], row["visit"]]
        assert step == row["start"] + 1
        assert rate == pytest.approx(0.1 * 0.5 ** row["start"])


def test_a_step_with_fewer_uploads_than_the_method_needs_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"aggregate: step 1 has 1 upload, and the method needs 2 or more"):
        toy.run(Failing(num_clusters=2), toy.Tiny(), tmp_path, on_client_error="drop")


def test_a_client_whose_uploads_were_all_too_stale_is_judged_like_one_that_was_never_seen(tmp_path):
    """IFCA chooses for it among all models, by the training loss, instead of row 0."""
    ifca, policy = CATALOGUE["ifca"](num_clusters=2), EveryArrival(max_staleness=0)
    done = toy.events(ifca, toy.Tiny(), tmp_path, 8, cohort_size=6, policy=policy, delay=Tiers())
    taken, visits = done.server_step.taken, done.server_step.visits
    assert taken.sum() == 8 == sum(row["accepted"] for row in done.arrivals)
    unseen = np.flatnonzero((taken == 0) & (visits > 0))
    assert len(unseen), "some only came too late"
    reads = done.server_step.serves(done.server, np.arange(6))
    for k in range(6):
        assert len(reads[k]["model"]) == (1 if taken[k] else 2)


def test_a_table_without_columns_is_mixed_as_in_rounds(tmp_path):
    """FedCUAU has no trunk where the model is a single layer."""
    options = {"model": toy.mlp(), "rounds": 2}
    rounds, barrier = (
        events("fedcuau", tmp_path / str(i), 2, policy=policy, **options)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))


# -- the link ----------------------------------------


def test_a_visit_takes_download_computing_and_upload_by_hand(tmp_path):
    """d = 16 x 8 + 8 + 8 x 3 + 3 = 163 numbers, 4 bytes each, down at 1000 B/s, up at 500 B/s, latency 0.1 s
    twice, 1 s of computing: 0.652 + 1.304 + 0.2 + 1.
    """
    link = Links(uplink_bytes_s=500.0, downlink_bytes_s=1000.0, latency_s=0.1)
    done = events("fedavg", tmp_path, 3, policy=Synchronous(), network=link)
    assert done.server_step.problem.layout.size == 163
    assert_allclose(np.diff(done.times), 0.652 + 1.304 + 0.2 + 1)
    # IFCA downloads K models and uploads one, and the number of its cluster
    done = events(
        "ifca", tmp_path / "ifca", 3, options={"num_clusters": 2}, policy=EveryArrival(), network=link
    )
    assert_allclose(done.times[1], 2 * 0.652 + (163 + 1) * 4 / 500 + 0.2 + 1)
    # CCFL's time stamp goes down and comes back
    world = {"policy": ClientDecides(WhenDone()), "network": link}
    done = events("ccfl", tmp_path / "ccfl", 3, options={"pretrain_epochs": 0}, **world)
    assert_allclose(done.times[1], (163 + 1) * 4 / 1000 + (163 + 1) * 4 / 500 + 0.2 + 1)
