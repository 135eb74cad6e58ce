"""Statistics that are taken again: whose, when, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.cases import OPTIONS
from support.nightly import covering, mostly_nightly
from support.runs import CONFIG

from mpifl import cli
from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.registry import CATALOGUE
from mpifl.algorithms.ucfl import UCFL
from mpifl.experiment.schema import Newcomers
from mpifl.results.reader import load, read_rows
from mpifl.simulation.delays import Constant, Exponential
from mpifl.simulation.network import Links
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, Synchronous
from mpifl.simulation.reclustering import Recluster, Since

DRIFT = ("--drift", "{kind: swap, at: [3], share: 0.5}")


FLEXCFL = ("--algorithm", "{name: flexcfl, num_groups: 2}")


def directions(folder) -> dict[int, int]:
    """Return server step -> how many clients of FlexCFL sent their statistics."""
    rows = read_rows(folder / "ledger.csv")
    return {
        int(r["step"]): int(r["messages"]) for r in rows if (r["name"], r["direction"]) == ("delta", "up")
    }


def run(folder, *options: str):
    """Run the small configuration with eight clients and return its folder."""
    place = ["--output.folder", str(folder), "--output.id", "x", "--data.cache", str(folder / "cache")]
    assert cli.main(["run", str(CONFIG), "--quiet", "--evaluation.every", "1", *place, *options]) == 0
    return folder / "tiny-x"


def test_statistics_are_due_by_age_and_by_round():
    """Taken in rounds 0, 2 and 4: in round 5, those of 0 and 2 are two rounds old; so are those before 3."""

    def due(step=5, **options):
        taken, visits, seconds = np.array([0, 2, 4]), np.array([1, 3, 0]), np.array([9.0, 4.5, 0.5])
        return Recluster(**options).due(Since(step, taken, visits, seconds, np.array([0.1, np.nan, 0.3])))

    assert_array_equal(due(every=2), [True, True, False])
    assert_array_equal(due(at=(3,)), [True, True, False])
    assert_array_equal(due(2, at=(3,)), [False, False, False])
    assert_array_equal(due(4, every=4, at=(3, 5)), [True, True, False])
    assert_array_equal(due(visits=2), [False, True, False])
    assert_array_equal(due(seconds=4.5), [True, True, False])
    assert_array_equal(due(loss_rise=0.05), [True, False, False])  # the third has not visited since
    assert not Recluster()


@pytest.mark.parametrize("method", ["{name: fedclust, num_clusters: 2}", "{name: flexcfl, num_groups: 2}"])
def test_a_method_that_looks_again_finds_the_new_groups(method, tmp_path):
    """Four of eight clients change places in round 3; all send statistics again in round 4, as many bytes."""
    done = run(tmp_path, "--algorithm", method, "--rounds", "5", *DRIFT, "--recluster", "{at: [4]}")
    found = [float(row["ari"]) for row in read_rows(done / "metrics.csv")]
    assert found[1] == found[3] == found[4] == 1.0
    assert found[2] < 0
    sent = {
        int(row["step"]): (int(row["messages"]), int(row["bytes"]))
        for row in read_rows(done / "ledger.csv")
        if row["name"] in ("signature", "delta") and row["direction"] == "up"
    }
    assert sent.keys() == {0, 4}
    assert sent[0] == sent[4]
    assert sent[0][0] == 8


def test_under_partial_participation_each_client_sends_them_when_it_next_takes_part(tmp_path):
    """Half of the clients take part; nobody sends twice for one round in `at`."""
    options = ("--algorithm", "{name: fedclust, num_clusters: 2}", "--participation", "0.5", "--rounds", "6")
    done = run(tmp_path, *options, "--recluster", "{at: [3]}")
    visits = read_rows(done / "visits.csv")
    took_part = {step: {r["client"] for r in visits if int(r["step"]) == step} for step in range(3, 7)}
    first = {
        k: min(step for step in took_part if k in took_part[step]) for k in set().union(*took_part.values())
    }
    expected = {step: sum(at == step for at in first.values()) for step in range(3, 7)}
    sent = {
        int(row["step"]): int(row["messages"])
        for row in read_rows(done / "ledger.csv")
        if row["name"] == "signature" and row["direction"] == "up"
    }
    assert sent == {0: 8, **{step: n for step, n in expected.items() if n}}


def test_a_client_whose_loss_rises_sends_its_statistics_at_its_next_visit(tmp_path):
    """Four of eight clients change places in round 3 and see it by their loss: they send in round 4."""
    done = run(tmp_path, *FLEXCFL, "--rounds", "5", *DRIFT, "--recluster", "{loss_rise: 0.5}")
    assert directions(done) == {0: 8, 4: 4}
    assert [float(row["ari"]) for row in read_rows(done / "metrics.csv")][-1] == 1.0


def test_statistics_are_taken_again_after_seconds_of_the_clock(tmp_path):
    """Rounds last 2 s: statistics from 0 s are more than 3.5 s old at 4 s, in round 3; then in round 5."""
    options = ("--rounds", "5", "--delay", "{name: constant, value_s: 2}")
    done = run(tmp_path, *FLEXCFL, *options, "--recluster", "{seconds: 3.5}")
    assert directions(done) == {0: 8, 3: 8, 5: 8}


def bytes_of(folder, *names: str) -> dict[int, int]:
    """Return server step -> bytes of what has these names, in both directions."""
    found: dict[int, int] = {}
    for row in read_rows(folder / "ledger.csv"):
        if row["name"] in names:
            found[int(row["step"])] = found.get(int(row["step"]), 0) + int(row["bytes"])
    return found


def test_clustering_again_has_its_bytes_and_computation_after_each_change(tmp_path):
    """Statistics in rounds 0, 3 and 5: none after the change in round 2, two after that in round 3."""
    drift = ("--drift", "{kind: swap, at: [2, 3], share: 0.25}")
    done = run(tmp_path, *FLEXCFL, "--rounds", "5", *drift, "--recluster", "{at: [3, 5]}")
    sent = bytes_of(done, "delta")
    assert sent.keys() == {0, 3, 5}
    before, after = load(done).summary["drift"]
    assert before["clustering_bytes_up"] == before["clustering_bytes_down"] == before["clustering_flops"] == 0
    up = {s: n for s, n in sent.items() if s}
    assert after["clustering_bytes_up"] == sum(up.values())
    shown = sum(size for step, size in bytes_of(done, "init").items() if step)
    assert after["clustering_bytes_down"] == shown
    work = {
        int(r["step"]): int(r["flops"])
        for r in read_rows(done / "computation.csv")
        if r["purpose"] == "statistics"
    }
    assert after["clustering_flops"] == work[3] + work[5]
    columns = read_rows(done / "metrics.csv")
    every = bytes_of(done, "delta", "init")
    assert [int(row["clustering_bytes"]) for row in columns] == [
        sum(size for step, size in every.items() if step <= at) for at in range(6)
    ][-len(columns) :]


def test_looks_of_clients_at_each_other_are_bytes_of_clustering(tmp_path):
    """EMD-CFL's clients look at each other in round 1, and again in round 3."""
    options = ("--algorithm", "{name: emdcfl, sample_cap: 32, epsilon: 0.05}", "--rounds", "4")
    done = run(tmp_path, *options, "--recluster", "{at: [3]}")
    moved = [int(row["clustering_bytes"]) for row in read_rows(done / "metrics.csv")][-4:]
    sent = bytes_of(done, "extractor", "embedding")
    assert sent.keys() == {1, 3}
    assert moved == [sent[1], sent[1], sent[1] + sent[3], sent[1] + sent[3]]


TAKING = ["pacfl", "fedclust", "flexcfl", "flt", "pca_km_hc", "ucfl"]
KEPT = {"ucfl": {"keep_gradients": True, "max_age": None, "streams": 2}}


@pytest.fixture(name="plane")
def _plane(monkeypatch):
    """UMAP compiles for ten seconds."""
    monkeypatch.setattr("mpifl.algorithms.flt.umap_plane", toy.plane)


def again(name, folder, steps=6, **changes) -> toy.Run:
    """Run a method on six clients whose statistics are two steps old at most."""
    method = CATALOGUE[name](**OPTIONS.get(name, {}) | KEPT.get(name, {}))
    return toy.events(method, toy.Tiny(), folder, steps, **changes)


def messages(done: toy.Run, *names: str) -> dict[int, int]:
    """Return server step -> how many messages of these names clients sent."""
    found: dict[int, int] = {}
    for row in done.server_step.ledger.rows():
        if row["name"] in names and row["direction"] == "up":
            found[row["step"]] = found.get(row["step"], 0) + row["messages"]
    return found


def statistics_of(done: toy.Run) -> dict[int, int]:
    """Return server step -> messages that clients sent as statistics after training had begun."""
    found = messages(done, "basis", "signature", "delta", "centroids", "gradient")
    return {step: count for step, count in found.items() if step}


LATE = {"all": Newcomers(), "late": Newcomers(groups=(1,), joins=3)}


@pytest.mark.parametrize(("name", "late", "participation"), covering(TAKING, [*LATE], [1.0, 0.5]))
def test_statistics_under_a_barrier_are_those_of_rounds(name, late, participation, plane, tmp_path):
    common = {"recluster": Recluster(every=2), "newcomers": LATE[late], "participation": participation}
    rounds, barrier = (
        again(name, tmp_path / str(i), policy=policy, **common)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))
    assert statistics_of(rounds) == statistics_of(barrier) != {}
    for way in ("up", "down"):
        assert rounds.server_step.ledger.total(way) == barrier.server_step.ledger.total(way)


@pytest.mark.parametrize("name", mostly_nightly(TAKING, ["pacfl", "ucfl"]))
def test_statistics_with_equal_delays_and_a_full_buffer_are_those_of_rounds(name, plane, tmp_path):
    common = {"recluster": Recluster(every=2), "delay": Constant(1.0)}
    rounds, buffer = (
        again(name, tmp_path / str(i), policy=policy, **common)
        for i, policy in enumerate((Synchronous(), Buffer(size=6)))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(buffer.server))


def test_under_arrivals_a_client_sends_statistics_before_the_visit_for_which_they_are_due(tmp_path):
    """Due after six steps: before each visit that starts then, once; the visit takes longer by its messages.

    A link of 10 kB/s up, nothing else takes time but one second of computation.
    """
    options = {"delay": Constant(1.0), "network": Links(uplink_bytes_s=1e4), "policy": EveryArrival()}
    plain = again("fedclust", tmp_path / "p", 30, **options)
    done = again("fedclust", tmp_path / "a", 30, recluster=Recluster(every=6), **options)
    taken, sent = dict.fromkeys(range(6), 0), {}
    for row in sorted(done.arrivals, key=lambda row: row["start"]):
        if row["read_version"] + 1 - taken[row["client"]] >= 6:
            taken[row["client"]] = row["read_version"] + 1
            sent[taken[row["client"]]] = sent.get(taken[row["client"]], 0) + 1
    assert {k: n for k, n in statistics_of(done).items() if k <= 24} == {
        k: n for k, n in sent.items() if k <= 24
    }
    seconds = {
        name: {round(row["time"] - row["start"], 6) for row in run.arrivals}
        for name, run in (("plain", plain), ("again", done))
    }
    size = next(
        row["bytes"] // row["messages"]
        for row in done.server_step.ledger.rows()
        if row["name"] == "signature" and row["direction"] == "up"
    )
    (usual,) = seconds["plain"]
    assert seconds["again"] == {usual, round(usual + size / 1e4, 6)}


@pytest.mark.parametrize("policy", [Synchronous(), EveryArrival()], ids=["rounds", "arrivals"])
def test_statistics_are_taken_again_after_so_many_visits(policy, tmp_path):
    """After two visits, before the third, fifth, ...: as often as its visits allow, whatever the policy."""
    options = {"delay": Exponential(mean_s=1.0), "cohort_size": 3}
    steps = 8 if policy.synchronous else 24
    done = again("fedclust", tmp_path, steps, recluster=Recluster(visits=2), policy=policy, **options)
    visits = done.server_step.visits
    under_way = np.zeros(6, int)
    if not policy.synchronous:
        for visit in done.engine.clock.visits:
            under_way[visit.client] += 1
    begun = visits + under_way
    assert begun.max() > 4
    assert sum(statistics_of(done).values()) == sum(max(0, (n - 1) // 2) for n in begun.tolist())


POLICIES = {"barrier": Barrier(), "buffer": Buffer(size=6)}


@pytest.mark.parametrize(("policy", "looks"), covering([*POLICIES], ["once", "together", "seen"]))
def test_clients_look_at_each_other_again_in_the_steps_of_rounds(policy, looks, tmp_path):
    """All six clients look in round 1 and, all distances being due, in round 4: twice as many questions."""
    method = EMDCFL(epsilon=0.5, looks=looks)
    common = {"recluster": Recluster(at=(4,)), "delay": Constant(1.0)}
    rounds, other = (
        toy.events(method, toy.Tiny(), tmp_path / str(i), 5, policy=policy, **common)
        for i, policy in enumerate((Synchronous(), POLICIES[policy]))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(other.server))
    for done in (rounds, other):
        assert messages(done, "extractor") == {1: 30, 4: 30}


def test_under_arrivals_a_client_looks_again_at_all_when_its_distances_are_due(tmp_path):
    """From step 13 on: each client once, at all five others, which are asked too."""
    method = EMDCFL(epsilon=0.5)
    done = toy.events(
        method,
        toy.Tiny(),
        tmp_path,
        36,
        policy=EveryArrival(),
        delay=Exponential(mean_s=1.0),
        recluster=Recluster(at=(13,)),
    )
    clients = [row["client"] for row in done.arrivals]
    first = {k: clients.index(k, 12) for k in range(6)}
    assert max(clients.index(k) for k in range(6)) < 12, "all have looked before"
    asked = {step: count for step, count in messages(done, "extractor").items() if step >= 13}
    assert asked == {place + 1: 10 for place in first.values()}


def test_ucfl_finds_its_weights_again_if_nothing_has_changed(tmp_path):
    """All gradients are taken again at the same point on the same data."""
    method = UCFL(noise_batch=4.0, keep_gradients=True)
    done = toy.events(method, toy.Tiny(), tmp_path, 3, policy=Synchronous(), recluster=Recluster(at=(2,)))
    before, after = (done.servers[i].algorithm_state["collaboration"] for i in (1, 2))
    assert before is not after
    assert_allclose(before, after, rtol=1e-5)
    plain = toy.events(
        replace(method, keep_gradients=False), toy.Tiny(), tmp_path / "p", 1, policy=Synchronous()
    )
    assert_array_equal(plain.server.algorithm_state["collaboration"], before)


def test_newcomers_of_a_method_with_statistics_join_under_arrivals(tmp_path):
    """Three clients join after 2.5 seconds; each sends its statistics once, before its first visit."""
    late = Newcomers(groups=(1,), joins_s=2.5)
    done = again("pacfl", tmp_path, 30, newcomers=late, policy=EveryArrival(), delay=Constant(1.0))
    assert sum(statistics_of(done).values()) == 3
    first = {row["client"]: row["start"] for row in reversed(done.arrivals)}
    assert min(first[k] for k in (3, 4, 5)) >= 2.5
    assert done.server.algorithm_state["known"].all()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--algorithm", "ucfl", "--recluster", "{visits: 1}"], "recluster"),
        (["--algorithm", "{name: emdcfl, samples: server}", "--recluster", "{every: 1}"], "recluster"),
        (["--algorithm", "fedclust", "--recluster", "{every: 2}"], "recluster.every"),
        (["--algorithm", "fedclust", "--recluster", "{at: [3]}"], "recluster.at"),
        (["--algorithm", "fedclust", "--recluster", "{at: [2, 2]}"], "recluster.at"),
        (["--algorithm", "ccfl", "--policy", "every_arrival", "--recluster", "{every: 1}"], "recluster"),
    ],
)
def test_what_has_no_effect_is_refused(options, key, tmp_path, capsys):
    """Of a run of two rounds."""
    place = ["--output.folder", str(tmp_path), "--data.cache", str(tmp_path)]
    assert cli.main(["run", str(CONFIG), "--quiet", *place, *options]) == 2
    assert f"mpifl: {key} = " in capsys.readouterr().err
