"""Uploads that are remembered where they arrive one by one: FLT, FeSEM, EMD-CFL and others under arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from support.cases import OPTIONS

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm
from mpifl.core.capabilities import RememberedUploads
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.core.types import Notes, Server
from mpifl.simulation.delays import Constant, Exponential
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, Synchronous

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


def labelled(case: object) -> str:
    """Return the name of a case."""
    return str(case).replace(" ", "") if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("name", "options"), REMEMBERING, ids=labelled)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_barrier_is_synchronous_rounds_bit_for_bit(name, options, participation, tmp_path):
    rounds, barrier = (
        run(name, options, tmp_path / str(i), policy=policy, participation=participation)
        for i, policy in enumerate((Synchronous(), Barrier()))
    )
    toy.same(toy.state_of(rounds.server), toy.state_of(barrier.server))
    toy.same(dict(rounds.scores), dict(barrier.scores))
    for way in ("up", "down"):
        assert rounds.server_step.ledger.total(way) == barrier.server_step.ledger.total(way)


@pytest.mark.parametrize(("name", "options"), REMEMBERING, ids=labelled)
def test_equal_delays_and_a_full_buffer_are_rounds(name, options, tmp_path):
    same = {"delay": Constant(1.0)}
    rounds = run(name, options, tmp_path / "r", policy=Synchronous(), **same)
    buffer = run(name, options, tmp_path / "b", policy=Buffer(size=6), **same)
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
