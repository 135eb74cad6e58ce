"""Uploads that are remembered where they arrive one by one: FLT, FeSEM, EMD-CFL and others under arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import cases, toy
from support.cases import OPTIONS
from support.nightly import covering, mostly_nightly

from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import RememberedUploads, uses
from mpifl.core.federation import ClientData
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.core.rng import Key
from mpifl.core.types import Notes, Server
from mpifl.simulation.delays import Constant, Delay, Exponential
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, Synchronous
from mpifl.simulation.reclustering import Recluster

SLOW = Exponential(mean_s=2.0)
ANY_AGE: Mapping[str, Any] = {"max_age": None}
REMEMBERING = [  # method and options
    ("flt", {}),
    ("flt", {"all_clients": False}),
    ("pca_km_hc", {}),
    ("fesem", {"num_clusters": 2}),
    ("fesem", {"num_clusters": 2, "variant": "flexcfl"}),
    ("fesem", {"num_clusters": 2, "variant": "emdcfl"}),
    ("fesem", {"num_clusters": 2, "initial_models": True}),
    ("emdcfl", {}),
    ("emdcfl", {"looks": "seen", "epsilon": 0.5}),
    ("emdcfl", {"looks": "together", "epsilon": 0.5}),
    ("emdcfl", {"samples": "server", "epsilon": 0.5}),
    ("oracle", {}),
    ("fedavg_memory", {}),
    ("cfl", ANY_AGE),
    ("cfl", {"max_age": 1}),
    ("flhc", ANY_AGE),
    ("ucfl", ANY_AGE),
    ("ucfl", {"max_age": 2}),
]


@pytest.fixture(autouse=True)
def _plane(monkeypatch):
    """UMAP compiles for ten seconds."""
    monkeypatch.setattr("mpifl.algorithms.flt.umap_plane", toy.plane)


def run(name: str, options: Mapping[str, Any], folder, steps: int = 5, **changes: Any) -> toy.Run:
    """Run a method on six clients."""
    method = CATALOGUE[name](**OPTIONS.get(name, {}) | options)
    return toy.events(method, toy.Tiny(), folder, steps, **changes)


FULL_BUFFERS = [  # of the usual run: each way to remember
    *("pca_km_hc", "fesem num_clusters=2", "emdcfl looks=seen epsilon=0.5", "oracle", "cfl max_age=1"),
    "ucfl max_age=None",
]


def named(case: tuple[str, Mapping[str, Any]] | float) -> str:
    """Return the name of a case, on one line."""
    return cases.named(case) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize(("case", "participation"), covering(REMEMBERING, [1.0, 0.5], ids=named))
def test_a_barrier_is_synchronous_rounds_bit_for_bit(case, participation, tmp_path):
    rounds, barrier = (
        run(*case, tmp_path / str(i), policy=policy, participation=participation)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))
    toy.same(dict(rounds.scores), dict(barrier.scores))
    for way in ("up", "down"):
        assert rounds.server_step.ledger.total(way) == barrier.server_step.ledger.total(way)


@pytest.mark.parametrize("case", mostly_nightly(REMEMBERING, FULL_BUFFERS, named))
def test_equal_delays_and_a_full_buffer_are_rounds(case, tmp_path):
    same = {"delay": Constant(1.0)}
    rounds = run(*case, tmp_path / "r", policy=Synchronous(), **same)
    buffer = run(*case, tmp_path / "b", policy=Buffer(size=6), **same)
    toy.same(toy.state_of(rounds.server), toy.state_of(buffer.server))


@dataclass(frozen=True)
class Mean(RememberedUploads, Algorithm):
    """The mean of the last uploads; `seen` has the notes of each step."""

    max_age: int | None = None
    seen: list[Notes] = field(default_factory=list, compare=False)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Remember the notes, and average."""
        self.seen.append(notes)
        return Plan([average(notes, weights=np.ones(len(notes)))])


def columns(notes: Notes) -> list[tuple[int, bool, int]]:
    """Return client, freshness and age of each report."""
    return [*zip(notes.client.tolist(), notes.fresh.tolist(), notes.staleness.tolist(), strict=True)]


def test_each_step_has_the_last_upload_of_every_client_with_its_age(tmp_path):
    """Whoever arrives is fresh; the others are as old as the steps since the rows that they had read."""
    method = Mean()
    done = toy.events(method, toy.Tiny(), tmp_path, 8, policy=EveryArrival(), delay=SLOW, cohort_size=2)
    last: dict[int, int] = {}
    for step, (row, notes) in enumerate(zip(done.arrivals, method.seen, strict=True)):
        last[row["client"]] = row["read_version"]
        expected = [(k, k == row["client"], step - version) for k, version in sorted(last.items())]
        assert columns(notes) == expected
    assert max(age for _, _, age in expected) > 2


def test_the_row_is_the_mean_of_what_each_client_sent_last(tmp_path):
    """Undamped, although a single upload arrives: 1/n each of the n clients that have uploaded so far."""
    method = Mean()
    done = toy.events(method, toy.Tiny(), tmp_path, 4, policy=EveryArrival(rate=0.6), delay=SLOW)
    clients = [row["client"] for row in done.arrivals]
    assert_allclose(
        [row["weight"] for row in done.arrivals], [1 / len({*clients[: i + 1]}) for i in range(4)]
    )


def test_uploads_older_than_max_age_do_not_count(tmp_path):
    method = Mean(max_age=2)
    toy.events(method, toy.Tiny(), tmp_path, 12, policy=EveryArrival(), delay=SLOW, cohort_size=3)
    ages = [age for notes in method.seen for _, fresh, age in columns(notes) if not fresh]
    assert max(ages) == 2


def test_uploads_older_than_max_age_do_not_count_in_rounds_either(tmp_path):
    """A third of the clients take part: those of the last two rounds count, with ages 1 and 2."""
    method = Mean(max_age=2)
    toy.events(method, toy.Tiny(), tmp_path, 8, policy=Synchronous(), cohort_size=2)
    for notes in method.seen:
        assert set(notes.staleness[notes.fresh].tolist()) == {0}
        assert set(notes.staleness[~notes.fresh].tolist()) <= {1, 2}
    assert any((notes.staleness == 2).any() for notes in method.seen)


@pytest.mark.parametrize("name", ["cfl", "flhc"])
def test_a_method_that_never_splits_runs_as_it_did_without_remembering(name, tmp_path):
    """Buffers of two, slow clients: remembered updates are compared and change nothing else."""
    never = {"cfl": {"eps1": 0.0}, "flhc": {"rounds_before": 99}}[name]
    without, remembering = (
        run(name, never | {"max_age": age}, tmp_path / str(age), policy=Buffer(size=2), delay=SLOW)
        for age in (0, None)
    )
    toy.same(toy.state_of(without.server), toy.state_of(remembering.server))


def test_cfl_splits_at_a_single_arrival_and_moves_clients_that_are_absent(tmp_path):
    """A cluster of three or more splits at one arrival: clients of its second half move without a visit."""
    options = {"warmup": 2, "eps1": 1e9, "eps2": 0.0, "max_age": None}
    done = run("cfl", options, tmp_path, 12, policy=EveryArrival(), delay=SLOW)
    assigned = [server.assign for server in done.servers]
    step = next(i for i in range(1, 13) if (assigned[i] != assigned[i - 1]).any())
    arrived = [row["client"] for row in done.arrivals[:step]]
    assert len({*arrived}) >= 3
    moved = set(np.flatnonzero(assigned[step] != assigned[step - 1]).tolist())
    assert moved - {arrived[-1]}


def test_emdcfl_compares_each_pair_once_whatever_the_order_of_arrivals(tmp_path):
    """Once all have arrived, as many embeddings and extractors have been sent as in one round of all."""
    rounds = run("emdcfl", {}, tmp_path / "r", 1, policy=Synchronous())
    arrivals = run("emdcfl", {}, tmp_path / "a", 16, policy=EveryArrival(), delay=SLOW)
    assert set(range(6)) == {row["client"] for row in arrivals.arrivals}
    found = [run.server.algorithm_state["distance"] for run in (rounds, arrivals)]
    assert not np.isnan(found[1]).any()
    assert_array_equal(np.isnan(found[0]), np.isnan(found[1]))
    for name in ("extractor", "embedding"):
        sent = [
            sum(row["messages"] for row in run.server_step.ledger.rows() if row["name"] == name)
            for run in (rounds, arrivals)
        ]
        assert sent[0] == sent[1] > 0


class Swapping(toy.Tiny):
    """Four clients in two groups; 1 and 2 change places at server step 5, and keep their sizes."""

    def __init__(self) -> None:
        super().__init__(num_clients=4, equal=True)

    def data_set(self, k: int, visit: int, step: int) -> int:
        """Return whether the client has changed."""
        return int(k in (1, 2) and step >= 5)

    def data_sets_of(self, clients: np.ndarray, visits: np.ndarray, step: int) -> np.ndarray:
        """Return `data_set` of several clients."""
        return np.array([self.data_set(k, 0, step) for k in clients.tolist()])

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return samples of the client's group, or of the other one."""
        group = int(self.groups[k]) ^ visit
        splits = ((name, int(self.sizes[k, i])) for i, name in enumerate(("train", "val", "test")))
        return ClientData(*(toy.draw(name, k, n, group) for name, n in splits))


@dataclass(frozen=True)
class OneTenthEach(Delay):
    """Client k takes 1 + k / 10 seconds."""

    def seconds(self, client: int, visit: int, key: Key) -> float:
        """Return them."""
        return 1 + client / 10


def test_a_swap_of_two_clients_under_arrivals_by_hand(tmp_path):
    """All four are under way, and arrive in turn: steps 1 to 4 at 1.0 to 1.3 s, steps 5 to 8 at 2.0 to 2.6 s.

    1 and 2 hold each other's kind of samples from step 5 on. At step 7, the second arrival of client 2, the
    distances of client 2 are due; at step 8 those of 3, whose turn it is, and so on: at steps 9 and 10 those
    of 0 and 1. The model of 2 at step 7 was trained from version 3; remembered are those of 0 (from version
    1, of step 5), of 1 (from version 2, of step 6) and of 3 (from version 0, of step 4).
    """
    method = EMDCFL(epsilon=0.3)
    common = {"policy": EveryArrival(), "delay": OneTenthEach(), "recluster": Recluster(at=(7,))}
    done = toy.events(method, Swapping(), tmp_path, 12, **common)
    rows = [(row["time"], row["client"], row["staleness"]) for row in done.arrivals[:8]]
    assert [(k, lag) for _, k, lag in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), *((k, 3) for k in range(4))]
    assert_allclose([time for time, _, _ in rows], [1.0, 1.1, 1.2, 1.3, 2.0, 2.2, 2.4, 2.6])
    evidence = done.notes[6]  # of step 7
    assert columns(evidence) == [(0, False, 5), (1, False, 4), (2, True, 3), (3, False, 6)]

    def neighbours(step: int) -> list[list[int]]:
        linked = done.servers[step].algorithm_state["linked"]
        return [np.flatnonzero(row).tolist() for row in linked]

    assert neighbours(6) == [[0, 1], [0, 1], [2, 3], [2, 3]]  # as before the swap
    assert neighbours(7) == [
        [0, 1, 2],
        [0, 1],
        [0, 2],
        [3],
    ]  # 2 has looked: it is like 0, and no longer like 3
    assert neighbours(10) == [[0, 2], [1, 3], [0, 2], [1, 3]]  # and 1, the last, like 3
    body = sum(s.stop - s.start for s in done.server_step.problem.layout.part("body"))
    asked = {
        (row["step"], row["direction"]): (row["messages"], row["numbers"])
        for row in totals(done.server_step.ledger.rows(), "extractor")
    }
    first = {step: 2 * (step - 1) for step in (2, 3, 4)}  # with each of those who had arrived, both ways
    again = dict.fromkeys((7, 8, 9, 10), 6)
    expected = {step: (n, n * body) for step, n in (first | again).items()}
    assert asked == {(step, way): n for step, n in expected.items() for way in ("up", "down")}


def totals(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the rows of a ledger with a name, summed over the rows of tables that clients had read."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if row["name"] == name:
            at = row["step"], row["direction"]
            total = found.setdefault(at, {"step": at[0], "direction": at[1], "messages": 0, "numbers": 0})
            total["messages"] += row["messages"]
            total["numbers"] += row["numbers"]
    return [*found.values()]


@dataclass(frozen=True)
class Forgetful(RememberedUploads, Algorithm):
    """A mean of the uploads of the step."""

    max_age = 0  # no option

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average."""
        return Plan([average(notes)])


def test_a_method_whose_uploads_count_for_no_step_remembers_none():
    """As an option, or as what the class says."""
    for method, remembers in ((Mean(), True), (Mean(max_age=1), True), (Mean(max_age=0), False)):
        assert uses(method, RememberedUploads) == remembers
    assert not uses(Forgetful(), RememberedUploads)
