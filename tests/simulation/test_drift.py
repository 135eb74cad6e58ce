"""Data that change from visit to visit: every visit is trained, counted and evaluated by its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy

from mpifl.algorithms.ifca import IFCA
from mpifl.clustering.server_plans import related_plan, related_server
from mpifl.core.algorithm import Algorithm, apply_plan
from mpifl.core.capabilities import RememberedUploads
from mpifl.core.federation import ClientData
from mpifl.core.mixing import average
from mpifl.core.parameters import Layout
from mpifl.core.plan import Plan
from mpifl.core.types import ProblemInfo
from mpifl.simulation.policies import Buffer
from mpifl.training.client import LocalClient


class Drifting(toy.Tiny):
    """Client k holds 5 + k + 7 v training samples at its visit v, others each time.

    Attributes:
        read: (client, visit) of all data that were asked for.
    """

    def __init__(self) -> None:
        super().__init__(equal=True)
        self.sizes = np.array([[5 + k, 6, 9] for k in range(self.num_clients)], np.int64)
        self.read: list[tuple[int, int]] = []

    def num_samples(self, k: int, visit: int = 0) -> int:
        """Return 5 + k + 7 v."""
        return 5 + k + 7 * visit

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return the data of a visit."""
        self.read.append((k, visit))
        still = super().client(k)
        group = int(self.groups[k])
        return ClientData(
            toy.draw(f"train {visit}", k, self.num_samples(k, visit), group), still.val, still.test
        )


@dataclass(frozen=True)
class Numbered(Algorithm):
    """Uploads a vector of the client's number; the model is the mean by samples."""

    def local_update(self, message, state, client, key):
        """Look at the data, report the number."""
        vector = torch.full((client.layout.size,), float(client.id))
        return client.report({"trained_on": len(client.data.train), "visit": client.visit}, model=vector), {}

    def aggregate(self, server, notes):
        """Average by samples."""
        return Plan([average(notes)])


@dataclass(frozen=True)
class Remembered(RememberedUploads, Numbered):
    """As above, over the last uploads of all clients seen so far."""


def step(federation: Drifting, folder: Any, policy: Any) -> toy.Run:
    """Take five steps with half of the clients."""
    if policy is None:
        return toy.run(Numbered(), federation, folder, steps=5, participation=0.5)
    return toy.events(Numbered(), federation, folder, steps=8, policy=policy)


@pytest.mark.parametrize("policy", [None, Buffer(3)], ids=["rounds", "buffer"])
def test_averages_are_weighted_by_the_samples_of_the_visit(policy, tmp_path):
    """Weights by hand: 5 + k + 7 v_k, divided by their sum."""
    done = step(Drifting(), tmp_path, policy)
    for notes, plan in zip(done.notes, done.plans, strict=True):
        n = 5 + notes.client + 7 * notes["visit"]
        assert_array_equal(notes.num_samples, n)
        assert_array_equal(notes["trained_on"], n)
        assert_allclose(plan.mixings[0].weights[0], n / n.sum(), rtol=1e-12)
    assert max(notes["visit"].max() for notes in done.notes) >= 2


def test_a_client_trains_on_the_data_of_its_visit_and_is_judged_by_those_of_its_last(tmp_path):
    """Six clients, four rounds with half of them: client k reads visits 0, 1, ... in turn. Judged: the last
    of these, or 0 for who was never there.
    """
    federation = Drifting()
    server_step, sampler = toy.start(Numbered(), federation, tmp_path, participation=0.5)
    server, visits = server_step.initialize(), np.zeros(6, np.int64)
    for number in range(1, 5):
        federation.read.clear()
        cohort = sampler(number)
        server, _ = toy.step_of(server_step, server, cohort)
        assert sorted(federation.read) == [(k, visits[k]) for k in cohort.tolist()]
        visits[cohort] += 1
    federation.read.clear()
    server_step.evaluate(server, np.arange(6))
    assert sorted(set(federation.read)) == [(k, max(visits[k] - 1, 0)) for k in range(6)]


def test_a_remembered_upload_counts_with_the_samples_it_was_made_from(tmp_path):
    done = toy.run(Remembered(), Drifting(), tmp_path, steps=5, evaluate=False, participation=0.5)
    visits = np.zeros(6, np.int64)
    for notes in done.notes:
        visits[notes.client[notes.fresh]] += 1
        assert_array_equal(notes.num_samples, 5 + notes.client + 7 * (visits[notes.client] - 1))
    assert not all(notes.fresh.all() for notes in done.notes)


def test_ifcas_gradient_is_that_of_all_samples_of_the_visit(tmp_path, monkeypatch):
    asked = []
    sgd = LocalClient.sgd

    def watched(self, start, key, **changes):
        trained = sgd(self, start, key, **changes)
        asked.append((changes["batch_size"], len(self.data.train), trained.steps))
        return trained

    monkeypatch.setattr(LocalClient, "sgd", watched)
    toy.run(IFCA(num_clusters=2, variant="gradient"), Drifting(), tmp_path, steps=2, evaluate=False)
    assert [batch for batch, _, _ in asked] == [n for _, n, _ in asked]
    assert {steps for *_, steps in asked} == {1}
    assert {n for _, n, _ in asked} == {5 + k + 7 * v for k in range(6) for v in range(2)}


def test_linked_clients_weigh_with_the_samples_of_their_last_visit():
    """All four are linked; known n were 1, 1, 1, 1. Clients 0 and 2 come with 3 and 5: shares 3, 5 of
    3 + 1 + 5 + 1 = 10, and 2 of 10 for the initial row; then 1 comes with 4: 4 of 3 + 4 + 5 + 1 = 13.
    """
    layout = Layout(("w",), ((1,),), 1)
    world = ProblemInfo(4, 2, np.ones(4, np.int64), layout, lambda j: torch.zeros(1))
    server = related_server(world, np.arange(4), np.ones((4, 4), bool))
    notes = byhand.notes([3, 5], client=[0, 2])
    plan = related_plan(server, notes, all_clients=True)
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights[0], [0.3, 0.5])
    assert_allclose(mixing.keep[0], [0, 0.2])
    server = apply_plan(server, plan, server.tables)
    (mixing,) = related_plan(server, byhand.notes([4], client=[1]), all_clients=True).mixings
    assert_allclose(mixing.weights[0], [4 / 13])
