"""Newcomers of asynchronous runs: when they join, what they start from, and how they are evaluated."""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.rng import key
from mpifl.experiment import build, loader
from mpifl.experiment.schema import EvaluationConfig, Leavers, Newcomers
from mpifl.simulation.availability import Availability, Presence
from mpifl.simulation.clock import DrawnClock, Replay
from mpifl.simulation.delays import Constant
from mpifl.simulation.policies import (
    Barrier,
    Buffer,
    ClientDecides,
    DrawnStaleness,
    EveryArrival,
    Synchronous,
)
from mpifl.simulation.upload_triggers import WhenDone

GROUP = (3, 4, 5)  # the second half of six clients
WHEN_DONE = ClientDecides(WhenDone())


def run(name, folder, steps, newcomers, options=None, **changes) -> toy.Run:
    """Run a method on six clients; those of group 1 are newcomers."""
    method = CATALOGUE[name](**(options or {}))
    return toy.events(method, toy.Tiny(), folder, steps, newcomers=newcomers, **changes)


def firsts(arrivals) -> dict[int, dict]:
    """Return the first arrival of each client."""
    out: dict[int, dict] = {}
    for row in arrivals:
        out.setdefault(row["client"], row)
    return out


def test_newcomers_read_the_rows_of_their_time_and_nobody_waits_for_them(tmp_path):
    """Visits last a second. Three clients upload at 1 and 2 s, six uploads in all: a step each.

    The newcomers join at 2.5 s, read version 6, and arrive at 3.5 s, after the uploads 7 to 9.
    """
    late = Newcomers(groups=(1,), joins_s=2.5)
    found = run("ccfl", tmp_path, 15, late, {"pretrain_epochs": 0}, policy=WHEN_DONE, delay=Constant(1.0))
    rows = [(row["time"], row["client"] in GROUP, row["read_version"]) for row in found.arrivals]
    assert [time for time, _, _ in rows] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [3.5] * 3 + [4.0] * 3
    assert [new for _, new, _ in rows] == [False] * 9 + [True] * 3 + [False] * 3
    assert [read for _, new, read in rows if new] == [6, 6, 6]
    assert [found.arrivals[i]["start"] for i in (9, 10, 11)] == [2.5] * 3
    assert found.engine.summary()["concurrency"] == pytest.approx((3 * 4.0 + 3 * 1.5) / 4.0)


def test_newcomers_are_drawn_from_the_step_on_in_which_they_join(tmp_path):
    """Who is drawn for step 7 has read what six steps made."""
    late = Newcomers(groups=(1,), joins=7)
    found = run("ccfl", tmp_path, 60, late, {"pretrain_epochs": 0}, policy=ClientDecides())
    assert [row["time"] for row in found.arrivals] == list(range(1, 61))
    assert not {row["client"] for row in found.arrivals[:6]} & {*GROUP}
    assert {row["client"] for row in found.arrivals[6:]} == set(range(6))
    for k, row in firsts(found.arrivals).items():
        assert row["read_version"] == (6 if k in GROUP else 0)


@pytest.mark.in_turn
def test_newcomers_may_join_one_by_one(tmp_path):
    late = Newcomers(groups=(1,), joins_s=2.0, spread_s=4.0)
    found = run("fedasync", tmp_path, 40, late, policy=WHEN_DONE, delay=Constant(0.5))
    starts = {k: row["start"] for k, row in firsts(found.arrivals).items()}
    new = [starts[k] for k in GROUP]
    assert len(set(new)) == 3
    assert all(2 <= start < 6 for start in new)
    assert new == [2 + 4 * key(0).of("joins", k).numpy().random() for k in GROUP]
    by_step = Newcomers(groups=(1,), joins=3, spread=30)
    found = run("ccfl", tmp_path, 80, by_step, {"pretrain_epochs": 0}, policy=ClientDecides())
    read = [firsts(found.arrivals)[k]["read_version"] for k in GROUP]
    assert read == [3 + key(0).of("joins", k).below(31) - 1 for k in GROUP]
    assert len(set(read)) == 3


def test_a_newcomer_of_ccfl_starts_from_the_mean_of_the_cluster_models_of_its_time(tmp_path):
    """4.1, 5.1: the initial tuple is the averaged cluster model with the current epoch as its time stamp."""
    late = Newcomers(groups=(1,), joins=9)
    heard = []
    method = toy.observed_method(
        CATALOGUE["ccfl"](bar_loss=-1.0, bar_gap=-1.0, bar_distance=-1.0),
        lambda hook, args, result: heard.append(args) if hook == "local_update" else None,
    )
    found = toy.events(method, toy.Tiny(), tmp_path, 60, newcomers=late, policy=ClientDecides())
    first: dict[int, torch.Tensor] = {}
    for message, _, client, _ in heard:
        first.setdefault(client.id, message["model"][0])
    mean = found.servers[8].tables["model"].double().mean(0).float()
    assert not torch.equal(found.servers[8].tables["model"], found.servers[0].tables["model"])
    for k in GROUP:
        assert_close(first[k], mean, rtol=1e-6, atol=1e-7)
    stale = firsts(found.arrivals)
    assert all(stale[k]["staleness"] == stale[k]["arrival_version"] - 8 for k in GROUP)


def test_newcomers_are_evaluated_before_and_after_they_join(tmp_path):
    """Like clients in rounds that were never drawn: before their first upload by the mean of the rows."""
    late = Newcomers(groups=(1,), joins=9)
    found = run(
        "ccfl",
        tmp_path,
        8,
        late,
        {"bar_loss": -1.0, "bar_gap": -1.0, "bar_distance": -1.0},
        policy=ClientDecides(),
        evaluation=EvaluationConfig(every=4, at_start=True),
    )
    assert {step: len(scores["accuracy"]) for step, scores in found.scored.items()} == {0: 6, 4: 6, 8: 6}
    mean = found.server.tables["model"].double().mean(0).float()
    for k in GROUP:
        assert_close(found.model(k), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(found.model(found.arrivals[-1]["client"]), found.model(3))


def test_a_drawn_clock_draws_newcomers_as_often_as_others_once_they_are_there():
    """Client 2 of three joins when five steps are done, at the fifth draw of many."""
    clock = DrawnClock(3, key(5), Presence(Availability(), key(0), joins={2: 5.0}))
    turns = {k: np.array([clock.due(k, v, 0, 0) for v in range(400)]) for k in range(3)}
    assert turns[2].min() > 5
    assert_array_equal(np.sort(np.concatenate([turns[k][turns[k] <= 5] for k in (0, 1)])), np.arange(1, 6))
    whose = np.concatenate([np.full(len(t), k) for k, t in turns.items()])[
        np.concatenate([*turns.values()]) <= 905
    ]
    assert all(230 < count < 370 for count in np.bincount(whose)), "900 draws, 300 each"
    unchanged = DrawnClock(3, key(5), Presence(Availability(), key(0)))
    plain = DrawnClock(3, key(5))
    assert [unchanged.due(0, v, 0, 0) for v in range(20)] == [plain.due(0, v, 0, 0) for v in range(20)]


def test_presence_is_that_of_the_model_once_a_client_has_joined():
    """Away until it joins at 4.5 s; then by a profile: there for two seconds, away for two."""
    day = Availability(profile=(1.0, 0.0), day_s=4.0)
    late = Presence(day, key(0)).within({1: 4.5}, {})
    assert [late.is_available(0, t) for t in (0.0, 2.0, 4.5, 6.5)] == [True, False, True, False]
    assert [late.is_available(1, t) for t in (0.0, 4.4, 4.5, 6.5)] == [False, False, True, False]
    assert late.next_available(1, 0.0) == 4.5
    assert late.next_available(1, 6.5) == 8.0
    assert not Presence(Availability(), key(0), joins={1: 1.0}).always
    assert Presence(Availability(), key(0)).within({}, {}).always


@pytest.mark.parametrize(
    ("name", "policy", "late"),
    [
        ("ccfl", WHEN_DONE, Newcomers(groups=(1,), joins_s=2.5, spread_s=3.0)),
        ("ccfl", ClientDecides(), Newcomers(groups=(1,), joins=4, spread=3)),
        ("fedasync", EveryArrival(), Newcomers(groups=(1,), joins_s=2.5)),
        ("fedbuff", Buffer(size=2), Newcomers(groups=(1,), joins_s=2.0, spread_s=2.0)),
        ("fedasync", DrawnStaleness(most=2), Newcomers(groups=(1,), joins=4)),
    ],
)
def test_the_replay_of_a_run_with_newcomers_is_that_run(name, policy, late, tmp_path):
    options = {"pretrain_epochs": 0} if name == "ccfl" else {}
    one = run(name, tmp_path / "one", 16, late, options, policy=policy)
    assert {row["client"] for row in one.arrivals} & {*GROUP}
    trace = tmp_path / "events.csv"
    with trace.open("w", newline="") as file:
        table = csv.DictWriter(file, list(one.arrivals[0]))
        table.writeheader()
        table.writerows(one.arrivals)
    again = run(name, tmp_path / "again", 16, late, options, policy=policy, clock=Replay(str(trace)))
    toy.same(toy.state_of(one.server), toy.state_of(again.server))
    assert again.arrivals == one.arrivals


def test_newcomers_under_a_barrier_are_those_of_rounds(tmp_path):
    late = Newcomers(groups=(1,), joins=3, spread=1)
    rounds, barrier = (
        run("fedavg", tmp_path / str(i), 4, late, policy=policy)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))
    cohorts = defaultdict(set)
    for row in barrier.arrivals:
        cohorts[row["arrival_version"] + 1].add(row["client"])
    assert cohorts[1] == cohorts[2] == {0, 1, 2}
    joined = {k: 3 + key(0).of("joins", k).below(2) for k in GROUP}
    assert cohorts[3] == {0, 1, 2} | {k for k, step in joined.items() if step == 3}
    assert cohorts[4] == set(range(6))


def test_a_client_that_leaves_finishes_its_visit_and_begins_no_other(tmp_path):
    """Visits last a second. Three clients leave at 2.5 s: their last visits are those from 2 to 3 s."""
    left = Leavers(groups=(1,), leaves_s=2.5)
    found = run("fedasync", tmp_path, 24, Newcomers(), policy=WHEN_DONE, delay=Constant(1.0), leavers=left)
    times = [(row["time"], row["client"] in GROUP) for row in found.arrivals]
    assert [time for time, gone in times if gone] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    assert [time for time, gone in times if not gone] == [float(t) for t in range(1, 6) for _ in range(3)]


def cohorts_of(found) -> list[set[int]]:
    """Return who took part in each round, or whose uploads made each step."""
    if found.arrivals:
        rows = [(row["arrival_version"], row["client"]) for row in found.arrivals]
    else:
        moved = found.server_step.ledger.moved
        rows = [(m.step - 1, m.client) for m in moved if m.trains]
    return [{k for at, k in rows if at == step} for step in range(1 + max(at for at, _ in rows))]


@pytest.mark.parametrize("policy", [Synchronous(), Barrier()], ids=["rounds", "barrier"])
def test_cohorts_are_drawn_of_the_clients_that_have_not_left(policy, tmp_path):
    """Half of six clients take part in each round; those of group 1 leave in round 4, or from then on."""
    seen = {}
    for name, left in (
        ("at once", Leavers(groups=(1,), leaves=4)),
        ("apart", Leavers(groups=(1,), leaves=4, spread=40)),
    ):
        options = {"policy": policy, "participation": 0.5, "leavers": left}
        found = run("fedavg", tmp_path / name, 30, Newcomers(), **options)
        seen[name] = [cohort & {*GROUP} for cohort in cohorts_of(found)]
        assert all(len(cohort) == 3 for cohort in cohorts_of(found))
    assert any(seen["at once"][:3])
    assert not any(seen["at once"][3:])
    gone = {k: 4 + key(0).of("leaves", k).below(41) for k in GROUP}
    assert len({*gone.values()}) == 3
    assert all(k not in there for k, step in gone.items() for there in seen["apart"][step - 1 :])


def test_who_has_left_is_not_drawn_to_upload(tmp_path):
    """One upload a step, of a client drawn uniformly: from step 8 on of the first three alone."""
    left = Leavers(groups=(1,), leaves=8)
    found = run(
        "ccfl", tmp_path, 60, Newcomers(), {"pretrain_epochs": 0}, policy=ClientDecides(), leavers=left
    )
    assert [row["time"] for row in found.arrivals] == list(range(1, 61))
    assert {row["client"] for row in found.arrivals[:7]} & {*GROUP}
    assert {row["client"] for row in found.arrivals[7:]} == {0, 1, 2}


def test_presence_ends_where_a_client_leaves():
    """There for two seconds of four by its profile, until it leaves at 5 s; work under way is finished."""
    day = Availability(profile=(1.0, 0.0), day_s=4.0)
    found = Presence(day, key(0)).within({}, {1: 5.0})
    assert [found.is_available(1, t) for t in (0.0, 2.0, 4.9, 5.0, 8.5)] == [True, False, True, False, False]
    assert found.next_available(1, 2.5) == 4.0
    assert found.next_available(1, 5.0) == np.inf
    assert found.next_available(1, 7.0) == np.inf
    assert found.end(1, 4.5, 2.0) == 8.5
    assert found.is_available(0, 8.5)


def test_how_many_clients_leave_and_when_is_said():
    for section, when in (
        ("{share: 0.5, leaves: 3}", "step 3"),
        ("{share: 0.5, leaves: 3, spread: 9}", "to step"),
    ):
        said = []
        config = loader.load("quickstart", ["--leavers", section, "--algorithm", "fedavg"])
        build.build(config, Single(), said.append)
        lines = [line for line in said if line.startswith("leavers")]
        assert len(lines) == 1
        assert "10 of 20" in lines[0]
        assert when in lines[0]
