"""A visit meets the data of its number; a client is evaluated on those of its last visit; in both engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy

from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.fedavg_memory import FedAvgMemory
from mpifl.algorithms.oracle import Oracle
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.client import Client
from mpifl.core.federation import Split
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State
from mpifl.experiment.schema import EvaluationConfig
from mpifl.simulation.delays import Exponential, Uniform
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival, Synchronous

STEPS, POLICIES = 7, (Synchronous(), EveryArrival(), Buffer(2))


def total(split: Split) -> float:
    """Return what tells the samples of a visit from those of any other."""
    return float(split.x.double().sum())


@dataclass(frozen=True)
class Met(Algorithm):
    """FedAvg that notes which samples it met."""

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train, and note what on."""
        met = {"train": total(client.data.train), "val": total(client.data.val), "visit": client.visit}
        trained = client.sgd(message["model"][0], key)
        return client.report(met | {"loss": client.loss(trained.vector)}, model=trained.vector), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Note what it is evaluated on."""
        return {**super().evaluate(message, state, client, split), "test": total(split)}


def visits_so_far(done: toy.Run, step: int) -> Counter[int]:
    """Return how many visits each client has made when a step is over."""
    return Counter(int(k) for notes in done.notes[:step] for k in notes.client)


@pytest.fixture(scope="module", params=POLICIES, ids=lambda policy: type(policy).__name__)
def done(request, tmp_path_factory) -> toy.Run:
    """Some steps on drifting data, evaluated at first, every third step, and at last."""
    evaluated = EvaluationConfig(every=3, at_start=True)
    delay = {} if isinstance(request.param, Synchronous) else {"delay": Exponential(2.0)}
    folder = tmp_path_factory.mktemp("drift")
    changes = {"policy": request.param, "evaluation": evaluated, "participation": 0.5, **delay}
    return toy.events(Met(), toy.Drifting(), folder, STEPS, **changes)


def test_a_visit_meets_the_data_of_its_number(done):
    world, visits = toy.Drifting(), Counter[int]()
    for notes in done.notes:
        for j, k in enumerate(notes.client.tolist()):
            data = world.client(k, visits[k])
            assert notes["visit"][j] == visits[k]
            assert (notes["train"][j], notes["val"][j]) == (total(data.train), total(data.val))
            visits[k] += 1
    assert max(visits.values()) > 1
    assert len({*visits.values()}) > 1, "some have come more often than others"


def test_clients_are_evaluated_on_the_data_of_their_last_visit(done):
    world = toy.Drifting()
    for step, scores in done.scored.items():
        visits = visits_so_far(done, step)
        expected = [total(world.client(k, max(visits[k] - 1, 0)).test) for k in range(world.num_clients)]
        assert_array_equal(scores["test"], expected, err_msg=f"step {step}")


def test_models_are_evaluated_at_first_every_so_many_steps_and_at_last(done):
    assert [*done.scored] == [0, 3, 6, STEPS]
    losses = np.array([scores["loss"] for scores in done.scored.values()])
    assert len({row.tobytes() for row in losses}) == 4, "each time the model of that step"


@dataclass(frozen=True)
class Keeps(Algorithm):
    """A client keeps how often it was visited, and is evaluated by that."""

    needs: ClassVar[Needs] = Needs(client_state=True)

    def local_update(self, message, state, client, key):
        """Count."""
        visits = state.get("visits", torch.zeros(1)) + 1
        return client.report(model=message["model"][0]), {"visits": visits}

    def aggregate(self, server, notes):
        """Average."""
        return Plan([average(notes)])

    def evaluate(self, message, state, client, split):
        """Score the visits, the visit whose data are there, and the version of the rows."""
        kept = float(state["visits"]) if state else 0.0
        return {"accuracy": kept, "loss": float(client.visit), "version": float(message.version)}


def test_clients_are_evaluated_with_their_latest_state_on_the_data_of_their_last_visit(tmp_path):
    """Visited v times: state v, data of visit v - 1; never visited: no state, data of visit 0."""
    done = toy.run(Keeps(), toy.Tiny(), tmp_path, steps=3, cohort_size=2)
    visits = done.server_step.visits
    assert set(visits.tolist()) >= {0, 2}
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))
    assert_array_equal(done.scores["version"], 3)


def test_asynchronous_clients_are_evaluated_likewise(tmp_path):
    done = toy.events(Keeps(), toy.Tiny(), tmp_path, 7, cohort_size=2, delay=Uniform(0.5, 1.5))
    visits = done.server_step.visits
    assert visits.sum() == 7
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))


# -- remembered uploads --------------------------------------------------------------------------------------


def failing(cls: type[Algorithm], fails: dict[int, tuple[int, ...]], **options: object) -> Algorithm:
    """Return a method whose clients fail in some steps: step -> clients."""

    @dataclass(frozen=True)
    class Failing(cls):
        def local_update(self, message, state, client, key):
            if client.id in fails.get(message.step, ()):
                raise RuntimeError("no")
            return super().local_update(message, state, client, key)

    return Failing(**options)


def steps_of(
    algorithm: Algorithm, federation: toy.Tiny, folder: Path, cohorts: list[list[int]], **changes: object
) -> toy.Run:
    """Take a step with each of these cohorts; clients that fail are left out."""
    out = toy.Run()
    server_step, _ = toy.start(
        algorithm, federation, folder, told=out.hear, on_client_error="drop", **changes
    )
    out.server_step = server_step
    out.servers.append(server_step.initialize())
    for cohort in cohorts:
        server, notes = toy.step_of(server_step, out.server, np.array(cohort))
        out.servers.append(server)
        out.notes.append(notes)
    return out


def test_a_client_that_fails_counts_with_its_remembered_upload_like_one_that_is_not_in_the_cohort(tmp_path):
    """FedAvg with memory: the plan of round 2 is that of a round without client 5."""
    everyone = [*range(6)]
    failed = steps_of(failing(FedAvgMemory, {2: (5,)}), toy.Tiny(), tmp_path / "a", [everyone, everyone])
    absent = steps_of(FedAvgMemory(), toy.Tiny(), tmp_path / "b", [everyone, everyone[:5]])
    assert failed.notes[1].fresh.tolist() == absent.notes[1].fresh.tolist() == [True] * 5 + [False]
    assert torch.equal(failed.server.tables["model"], absent.server.tables["model"])
    assert_array_equal(failed.server_step.visits, [2, 2, 2, 2, 2, 1])
    assert [(d.step, d.client) for d in failed.server_step.dropped] == [(2, 5)]


@pytest.mark.parametrize("policy", [Synchronous(), Barrier()], ids=["rounds", "barrier"])
def test_a_client_that_fails_counts_no_longer_once_its_upload_is_too_old(policy, tmp_path):
    """Client 5 trains version 0 and fails in steps 2 to 4, which begin at versions 1 to 3."""

    @dataclass(frozen=True)
    class Forgetting(FedAvgMemory):
        max_age = 2

    method = failing(Forgetting, {2: (5,), 3: (5,), 4: (5,)})
    done = toy.events(method, toy.Tiny(), tmp_path, 5, policy=policy, on_client_error="drop")
    assert [5 in notes.client for notes in done.notes] == [True, True, True, False, True]
    assert [notes.fresh[-1] for notes in done.notes] == [True, False, False, True, True]


def test_a_round_took_the_uploads_of_those_who_did_not_fail(tmp_path):
    """Client 5 fails in rounds 1 and 2, client 0 in round 3."""
    method = failing(FedAvg, {1: (5,), 2: (5,), 3: (0,)})
    done = toy.events(method, toy.Tiny(), tmp_path, 3, policy=Synchronous(), on_client_error="drop")
    before, *after = (list(record.accepted) for record in done.records)
    assert before == []
    assert after == [
        [(k, 0) for k in range(5)],
        [(k, 1) for k in range(5)],
        [*((k, 2) for k in range(1, 5)), (5, 0)],
    ]


def test_a_failure_at_the_first_visit_leaves_nothing_to_remember(tmp_path):
    failed = steps_of(failing(FedAvgMemory, {1: (5,)}), toy.Tiny(), tmp_path, [[*range(6)]])
    assert failed.notes[0].client.tolist() == [0, 1, 2, 3, 4]


def test_clusters_outlive_a_client_that_fails(tmp_path):
    """EMD-CFL and the oracle name clusters by who reports; a failure in round 2 changes none of them."""
    everyone = [*range(6)]
    for cls, options in ((EMDCFL, {"epsilon": 5.0}), (Oracle, {})):
        folder = tmp_path / cls.__name__
        done = steps_of(failing(cls, {2: (1, 4)}, **options), toy.Tiny(), folder, [everyone] * 3)
        labels = [done.server_step.algorithm.labels(server).tolist() for server in done.servers[1:]]
        assert labels[0] == labels[1] == labels[2]
        assigned = [server.assign.tolist() for server in done.servers[1:]]
        assert assigned[0] == assigned[1] == assigned[2]


def test_those_who_were_never_seen_keep_the_first_model_when_another_fails(tmp_path):
    cohorts = [[0, 1, 4], [0, 1, 4], [1, 4]]
    done = steps_of(failing(Oracle, {2: (0,)}), toy.Tiny(), tmp_path, cohorts, participation=0.5)
    first = done.servers[0].tables["model"][0]
    for server in done.servers[1:]:
        assert torch.equal(server.tables["model"][server.assign[5]], first)


@dataclass(frozen=True)
class Looking(EMDCFL):
    """EMD-CFL that notes by the data of which visits clients look and are looked at."""

    looked: ClassVar[list[tuple[int, float, list[float]]]] = []

    def ask(self, client, own, key):
        """Note who asks."""
        self.looked.append((client.id, total(client.data.train), []))
        return super().ask(client, own, key)

    def answer(self, client, payload, key):
        """Note who answers."""
        self.looked[-1][2].append(total(client.data.val))
        return super().answer(client, payload, key)


def test_a_remembered_model_looks_and_is_looked_at_on_the_data_it_was_made_from(tmp_path):
    """Clients 0 and 1 come once, then 2 and 3: all four look in round 2, each on its visit 0."""
    world = toy.Drifting(4)
    Looking.looked.clear()
    steps_of(Looking(looks="seen"), world, tmp_path, [[0, 1], [2, 3]], participation=0.5)
    first = [world.client(k) for k in range(4)]
    vals = [total(data.val) for data in first]
    expected = [(k, total(first[k].train), vals[1 - k : 2 - k]) for k in (0, 1)]
    expected += [(k, total(first[k].train), vals[:k] + vals[k + 1 :]) for k in range(4)]
    assert Looking.looked == expected
