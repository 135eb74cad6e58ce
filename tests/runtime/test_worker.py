"""A visit meets the data of its number; a client is evaluated on those of its last visit; in both engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import worlds

from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.client import Client
from mpifl.core.federation import Split
from mpifl.core.mixing import Plan, average
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, Report, Server, State
from mpifl.experiment.schema import EvaluationConfig
from mpifl.simulation.delays import Exponential, Uniform
from mpifl.simulation.policies import Buffer, EveryArrival, Synchronous

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


def visits_so_far(done: worlds.Run, step: int) -> Counter[int]:
    """Return how many visits each client has made when a step is over."""
    return Counter(int(k) for notes in done.notes[:step] for k in notes.client)


@pytest.fixture(scope="module", params=POLICIES, ids=lambda policy: type(policy).__name__)
def done(request, tmp_path_factory) -> worlds.Run:
    """Some steps on drifting data, evaluated at first, every third step, and at last."""
    evaluated = EvaluationConfig(every=3, at_start=True)
    delay = {} if isinstance(request.param, Synchronous) else {"delay": Exponential(2.0)}
    folder = tmp_path_factory.mktemp("drift")
    changes = {"policy": request.param, "evaluation": evaluated, "participation": 0.5, **delay}
    return worlds.events(Met(), worlds.Drifting(), folder, STEPS, **changes)


def test_a_visit_meets_the_data_of_its_number(done):
    world, visits = worlds.Drifting(), Counter[int]()
    for notes in done.notes:
        for j, k in enumerate(notes.client.tolist()):
            data = world.client(k, visits[k])
            assert notes["visit"][j] == visits[k]
            assert (notes["train"][j], notes["val"][j]) == (total(data.train), total(data.val))
            visits[k] += 1
    assert max(visits.values()) > 1
    assert len({*visits.values()}) > 1, "some have come more often than others"


def test_clients_are_evaluated_on_the_data_of_their_last_visit(done):
    world = worlds.Drifting()
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
    done = worlds.run(Keeps(), worlds.Tiny(), tmp_path, steps=3, cohort_size=2)
    visits = done.server_step.visits
    assert set(visits.tolist()) >= {0, 2}
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))
    assert_array_equal(done.scores["version"], 3)


def test_asynchronous_clients_are_evaluated_likewise(tmp_path):
    done = worlds.events(Keeps(), worlds.Tiny(), tmp_path, 7, cohort_size=2, delay=Uniform(0.5, 1.5))
    visits = done.server_step.visits
    assert visits.sum() == 7
    assert_array_equal(done.scores["accuracy"], visits)
    assert_array_equal(done.scores["loss"], np.maximum(visits - 1, 0))
