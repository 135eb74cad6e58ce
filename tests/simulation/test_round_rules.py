"""Rounds that look at the clock: who is kept, and how much each does; by hand and as identities."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import toy
from support.cases import OPTIONS
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.capabilities import NewClients, SecondLook
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.experiment.schema import Newcomers, SystemConfig
from mpifl.forecast.traffic import forecast
from mpifl.simulation.delays import Constant, Exponential, Measured
from mpifl.simulation.network import Links
from mpifl.simulation.policies import OverSelection, PartialWork, Synchronous
from mpifl.simulation.round_rules import FirstArrivals, RoundStart, ShortenedVisits
from mpifl.training.config import LocalConfig
from mpifl.training.per_client import LocalChanges

STEPS = {0: (2, 2), 1: (3, 3), 2: (3, 3), 3: (4, 4), 4: (2, 2), 5: (3, 3)}  # of `toy.Tiny`, batches of 5
SLOW = Exponential(mean_s=2.0)


def begin(*clients: int, wanted: int = 2, step: int = 1) -> RoundStart:
    """Return a round that begins at 10; client k computes for k + 1 seconds."""
    ks = np.array(clients)
    return RoundStart(
        step, ks, wanted, 10.0, lambda k, w: 10.0 + (k + 1) * float(w), STEPS.__getitem__, key(0)
    )


@pytest.mark.parametrize(
    ("deadline", "kept", "until"),
    [
        (None, [1, 2], -np.inf),
        (3.0, [1, 2], -np.inf),  # both are back at the deadline
        (2.5, [1], 12.5),
        (0.5, [1], 10.5),  # nobody is back: the server waits for the first
    ],
)
def test_the_first_are_kept_and_one_at_least(deadline, kept, until):
    plan = FirstArrivals(deadline, False).plan(begin(1, 2, 4, 5))
    assert plan.cohort.tolist() == kept
    assert sorted([*plan.cohort, *plan.late]) == [1, 2, 4, 5]
    assert plan.until == until


def test_all_are_kept_where_fewer_are_there_than_wanted():
    plan = FirstArrivals(None, False).plan(begin(3, 5, wanted=4))
    assert (plan.cohort.tolist(), plan.late.tolist(), plan.until) == ([3, 5], [], -np.inf)


@pytest.mark.parametrize(
    ("unit", "work"),
    [
        # 2 s: 2/3 of 3 s, 2/4 of 4 s; not even one of two batches fits 5 s, and one of three 6 s
        (False, {2: Fraction(2, 3), 3: Fraction(1, 2), 4: Fraction(1, 2), 5: Fraction(1, 3)}),
        (True, {}),  # of one epoch each does one at least
    ],
)
def test_as_many_parts_as_fit_and_one_at_least(unit, work):
    assert ShortenedVisits(2.0, 0.0, unit).plan(begin(*range(6))).work == work


def test_stragglers_are_a_share_of_each_round_and_do_any_part():
    rule = ShortenedVisits(None, 0.5, False)
    plans = [rule.plan(begin(*range(6), step=step)).work for step in range(1, 200)]
    assert {len(work) for work in plans} == {0, 1, 2, 3}, "three are drawn; some of them do all their work"
    done = {k: {work[k] for work in plans if k in work} for k in range(6)}
    assert done[3] == {Fraction(n, 4) for n in (1, 2, 3)}
    assert plans[0] == rule.plan(begin(*range(6), step=1)).work


# -- whole runs ----------------------------------------------------------------------------------------------


def run(name, folder, policy, steps=3, **changes) -> toy.Run:
    """Run a method of the catalogue under a policy."""
    return toy.events(CATALOGUE[name](), toy.Tiny(), folder, steps, policy=policy, **changes)


@pytest.fixture
def steady(tmp_path) -> Measured:
    """Client k computes for k + 1 seconds."""
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n" + "".join(f"{k},{k + 1}\n" for k in range(6)))
    return Measured(str(file))


@pytest.mark.parametrize("policy", [OverSelection(extra=0.0), PartialWork(deadline_s=1e6)])
@pytest.mark.parametrize("name", ["scaffold", "emdcfl"])
def test_rules_that_change_nothing_are_rounds_bit_for_bit(policy, name, tmp_path):
    world = {"delay": SLOW, "participation": 0.5, "network": Links(uplink_bytes_s=2000.0)}
    plain, ruled = (run(name, tmp_path / str(i), p, **world) for i, p in enumerate((Synchronous(), policy)))
    toy.same(toy.state_of(plain.server), toy.state_of(ruled.server))
    assert plain.times == ruled.times
    assert plain.server_step.ledger.rows() == ruled.server_step.ledger.rows()


@pytest.mark.parametrize("late", ["stopped", "sent"])
def test_the_ledger_of_over_selection_is_exact(late, steady, tmp_path):
    """Of four of six clients the two fastest are mixed; all four download, two or four upload."""
    policy = OverSelection(extra=1.0, late=late)
    done = run("fedavg", tmp_path, policy, 4, delay=steady, participation=1 / 3)
    ledger, size = done.server_step.ledger, 4 * done.server_step.problem.layout.size
    for step in range(1, 5):
        rows = [m for m in ledger.moved if m.step == step]
        kept = [m.client for m in rows if m.trains]
        assert (len(rows), len(kept)) == (4, 2)
        assert kept == sorted(m.client for m in rows)[:2]
        assert done.times[step] - done.times[step - 1] == kept[-1] + 1
        assert {m.bytes_down for m in rows} == {size}
        assert {m.bytes_up for m in rows if not m.trains} == ({0} if late == "stopped" else {size})
    assert ledger.total("down") == 4 * 4 * size
    assert ledger.total("up") == 4 * size * (2 if late == "stopped" else 4)
    assert done.server_step.visits.sum() == 8
    entries = [row for row in ledger.rows() if row["direction"] == "down"]
    assert {row["cast"] for row in entries} == {"broadcast"}, "those that are left out read it, too"


@pytest.mark.parametrize("link", [Links(), Links(uplink_bytes_s=2000.0)], ids=["free", "linked"])
@pytest.mark.parametrize("late", ["stopped", "sent"])
def test_statistics_of_new_clients_that_are_late_are_in_the_ledger(late, link, steady, tmp_path):
    """Two begin FlexCFL. A new client downloads a model more, and if it sends, uploads one more; who was left
    out is new again.
    """
    policy, method = OverSelection(extra=1.0, late=late), CATALOGUE["flexcfl"](2, alpha=1, iterations=2)
    world = {"delay": steady, "network": link, "cohort_size": 2}
    done = toy.events(method, toy.Tiny(), tmp_path, 5, policy=policy, **world)
    ledger, size = done.server_step.ledger, 4 * done.server_step.problem.layout.size
    known = {m.client for m in ledger.moved if not m.step}
    assert len(known) == 2
    for step in range(1, 6):
        rows = [m for m in ledger.moved if m.step == step]
        assert [m.trains for m in rows].count(0) == 2
        for m in rows:
            models = 1 if m.client in known else 2
            assert m.bytes_down == models * size
            assert m.bytes_up == (models * size if m.trains or late == "sent" else 0)
        known |= {m.client for m in rows if m.trains}
    assert any(m.bytes_down == 2 * size for m in ledger.moved if not m.trains), "new clients were left out"
    casts = [row for row in ledger.rows() if row["name"] == "init" and row["step"]]
    assert len(casts) == len({row["step"] for row in casts}), "who is left out reads with the others"


def test_late_uploads_are_as_large_as_those_of_clients_that_read_as_many_rows(steady, tmp_path):
    """A client of FedCUAU uploads what it downloads: a trunk, and 1 to 3 copies of a block by its cluster."""
    policy, method = OverSelection(extra=1.0, late="sent"), CATALOGUE["fedcuau"](num_clusters=3)
    with pytest.warns(UserWarning, match="late uploads of clients .* the size of another's in the ledger"):
        done = toy.events(method, toy.Tiny(), tmp_path, 6, policy=policy, delay=steady, cohort_size=2)
    moved = [m for m in done.server_step.ledger.moved if m.step]
    sizes = {m.step: {u.bytes_up for u in moved if u.step == m.step and u.trains} for m in moved}
    late = [m for m in moved if not m.trains and m.bytes_down in sizes[m.step]]
    assert len({m.bytes_down for m in late}) > 1
    assert [m.bytes_up for m in late] == [m.bytes_down for m in late]


def test_who_was_left_out_meets_another_delay_next_time(tmp_path):
    """Client 5 takes 100 s at its first start and a tenth at the second: then 4, the slowest, is left out."""
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n" + "".join(f"{k},{k + 1}\n" for k in range(5)) + "5,100\n5,0.1\n")
    world = {"delay": Measured(str(file)), "cohort_size": 5}
    done = run("fedavg", tmp_path, OverSelection(extra=0.2), 2, **world)
    assert done.times == [0.0, 5.0, 9.0]
    assert done.engine.clock.left_out.tolist() == [0, 0, 0, 0, 1, 1]
    assert done.server_step.visits.tolist() == [2, 2, 2, 2, 1, 1]


def test_a_round_ends_at_its_deadline_if_not_all_are_back(steady, tmp_path):
    policy = OverSelection(extra=0.5, deadline_s=2.5)
    done = run("fedavg", tmp_path, policy, 1, delay=steady, cohort_size=4)
    assert done.times == [0.0, 2.5]
    assert done.server_step.visits.tolist() == [1, 1, 0, 0, 0, 0]
    assert done.reported[1]["late_clients"] == 4


AS_DONE = {"2": 2, "3": 2, "4": 1, "5": 1}


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova"])
def test_partial_work_is_that_of_clients_with_fewer_steps(name, steady, tmp_path):
    """A deadline of 2 s: as `test_as_many_parts_as_fit_and_one_at_least`; the round waits for client 4."""
    fewer = {k: LocalChanges(steps=steps) for k, steps in AS_DONE.items()}
    done = run(name, tmp_path / "a", PartialWork(deadline_s=2.0), 2, delay=steady)
    same = run(name, tmp_path / "b", Synchronous(), 2, delay=steady, per_client=fewer)
    toy.same(toy.state_of(done.server), toy.state_of(same.server))
    assert done.times == [0.0, 2.5, 5.0]
    assert done.reported[2]["work_mean"] == pytest.approx((1 + 1 + 2 / 3 + 1 / 2 + 1 / 2 + 1 / 3) / 6)


def test_partial_work_in_epochs_and_in_stacks(steady, tmp_path):
    """Three epochs: in 4 s client 3 does all, 4 (5 s) two, 5 (6 s) two; 2 and the others all."""
    world = {"delay": steady, "local": LocalConfig(epochs=3, batch_size=5, lr=0.05)}
    policy = PartialWork(deadline_s=4.0, unit="epochs")
    one = run("fedavg", tmp_path / "1", policy, 2, **world)
    fewer = {"4-5": LocalChanges(epochs=2)}
    same = run("fedavg", tmp_path / "2", Synchronous(), 2, **world, per_client=fewer)
    toy.same(toy.state_of(one.server), toy.state_of(same.server))
    stacked = run("fedavg", tmp_path / "3", policy, 2, **world, system=SystemConfig(stack=6, device="cpu"))
    assert_close(stacked.server.tables["model"], one.server.tables["model"], rtol=1e-4, atol=1e-5)


def test_downloads_and_uploads_count_towards_a_deadline(tmp_path):
    """Over a slow link nothing fits, and everybody does one batch; over a fast one all finish."""
    size = 4.0 * toy.context_of(toy.config_of(CATALOGUE["fedavg"]()), toy.Tiny()).problem.layout.size
    slow, fast = Links(uplink_bytes_s=size / 3), Links(uplink_bytes_s=size * 100)
    policy = PartialWork(deadline_s=2.0)
    done = [run("fedavg", tmp_path / str(i), policy, 1, network=net) for i, net in enumerate((slow, fast))]
    assert done[0].reported[1]["work_mean"] == pytest.approx(np.mean([1 / n for n, _ in STEPS.values()]))
    assert done[1].reported[1]["work_mean"] == 1.0


LONG = {"flt": pytest.mark.nightly}  # UMAP is compiled first
BESIDE = [
    pytest.param(name, marks=LONG.get(name, ()))
    for name, method in CATALOGUE.items()
    if {NewClients, SecondLook} & method(**OPTIONS.get(name, {})).capabilities
]


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_sent_beside_uploads_counts_towards_a_deadline_or_a_run_says_so(name, tmp_path):
    """The longest of rounds without a deadline, where newcomers send statistics, is not in time for it."""
    looks, method = issubclass(CATALOGUE[name], SecondLook), CATALOGUE[name](**OPTIONS.get(name, {}))
    links = Links(uplink_bytes_s=2000.0, downlink_bytes_s=2000.0)
    world = {"newcomers": Newcomers(share=0.5, joins=2), "delay": Constant(1.0), "network": links}
    free = toy.events(method, toy.Tiny(), tmp_path / "a", 3, policy=Synchronous(), **world)
    deadline = np.diff(free.times).max() - 1e-6
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        policy = PartialWork(deadline_s=deadline)
        done = toy.events(method, toy.Tiny(), tmp_path / "b", 3, policy=policy, **world)
    whole = np.array([record.train["work_mean"] == 1.0 for record in done.records[1:]])
    lines = [str(w.message) for w in said if "network" in str(w.message)]
    assert ["second look" in line for line in lines] == [True] * looks
    assert looks or (np.diff(done.times)[whole] <= deadline).all()
    assert looks or not whole.all()


def test_the_forecast_counts_those_that_only_download():
    """Per round; in all nobody knows who is back in time. Partial work sends what rounds send."""
    over, part, plain = (
        forecast(
            toy.context_of(toy.config_of(CATALOGUE["fedavg"](), policy=policy, cohort_size=2), toy.Tiny())
        )
        for policy in (OverSelection(extra=1.0), PartialWork(deadline_s=0.1), Synchronous())
    )
    assert over.per_round == (2 * plain.per_round[0], plain.per_round[1])
    assert (over.total, over.why) == (None, "who is back in time")
    assert part.total == plain.total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": OverSelection(0.5)}, "policy.extra = 0.5: has no effect on rounds of all clients"),
        (
            {"policy": PartialWork(1.0), "network": Links(downlink_bytes_s=9.0, cast="group")},
            "network.cast = 'group': who is back first is known for links of the clients' own",
        ),
    ],
)
def test_rules_that_cannot_hold_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        toy.context_of(toy.config_of(CATALOGUE["fedavg"](), **changes), toy.Tiny())


@pytest.mark.parametrize(("make", "message"), [(lambda: PartialWork(), "give deadline_s, or stragglers")])
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_cohorts_are_those_of_rounds_with_more_clients(tmp_path):
    """Who is drawn does not depend on the policy: four for two, or four for four."""
    over = run("fedavg", tmp_path / "a", OverSelection(extra=1.0), delay=SLOW, cohort_size=2)
    four = run("fedavg", tmp_path / "b", Synchronous(), delay=SLOW, cohort_size=4)
    drawn = [[m.client for m in done.server_step.ledger.moved] for done in (over, four)]
    assert_array_equal(drawn[0], drawn[1])


def test_stragglers_are_the_nearest_number_and_others_each_round_with_parts_of_their_own():
    """0.29 of 10 clients are 3; of 100 mini-batches, each does a number of its own."""
    rounds = [
        ShortenedVisits(None, 0.29, False).plan(
            RoundStart(step, np.arange(10), 10, 0.0, lambda k, w: 0.0, lambda k: (100, 100), key(0))
        )
        for step in range(1, 6)
    ]
    assert max(len(plan.work) for plan in rounds) == 3  # a straggler may draw all of its work
    assert len({tuple(plan.work) for plan in rounds}) > 1
    assert all(len(set(plan.work.values())) > 1 for plan in rounds)


def test_a_deadline_counts_from_the_start_of_its_round():
    """The round begins at 10 and ends at 12: client 1 needs 2 s, client 3 needs 4 s for 4 batches."""
    assert ShortenedVisits(2.0, 0.0, False).plan(begin(1, 3)).work == {3: Fraction(1, 2)}
