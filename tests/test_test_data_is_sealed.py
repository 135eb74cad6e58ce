"""Test data serve evaluations and nothing else, in every method of the catalogue, in both engines.

The test images of this world carry a mark. They may be read by the engine while it judges, which hands them
to `evaluate`, and by `Client.evaluate`; no hook may read them otherwise, nothing may be trained on them, and
what a client scores on them must be the mean of what it scores on parts of them: it is not, where a model is
tuned or chosen on them. Where a visit evaluated on them, all that is trained must be as with other test data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from support import toy
from support.cases import CASES, PARAMS, named

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm
from mpifl.core.client import Client
from mpifl.core.errors import UserError, require
from mpifl.core.federation import ClientData, Split
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.core.rng import Key, key
from mpifl.core.types import Message, Notes, Report, Server, State, Vector
from mpifl.experiment.schema import EvaluationConfig
from mpifl.runtime.asynchronous import AsynchronousEngine
from mpifl.runtime.hook_errors import ClientError
from mpifl.runtime.worker import Worker
from mpifl.simulation.policies import Barrier, Buffer, EveryArrival
from mpifl.training.client import LocalClient
from mpifl.training.learner import Learner

MARK = 0.1234567  # the first pixel of a test image
PARTS = (slice(0, 1), slice(1, 2), slice(2, None))  # of the test images of a client
POLICIES = (EveryArrival(), Buffer(2), Barrier())


class SealedData(ClientData):
    """A client's data, of which the test split raises while it is sealed."""

    @classmethod
    def of(cls, data: ClientData, world: SealedWorld) -> SealedData:
        """Return `data` in a world that seals their test split."""
        out = object.__new__(cls)
        out.__dict__.update(train=data.train, val=data.val, extra=data.extra, _test=data.test, _world=world)
        return out

    @property
    def test(self) -> Split:
        """The test split, marked; raises unless the engine itself reads it to evaluate."""
        assert self.__dict__["_world"].judging, "test data are read by a method"
        test = self.__dict__["_test"]
        x = test.x.clone()
        x[:, 0, 0, 0] = MARK
        return replace(test, x=x)


class SealedWorld(toy.Tiny):
    """A federation whose test data are sealed, except while the engine judges outside of hooks."""

    judging, judged_in_hooks, others = False, 0, False

    def client(self, k: int, visit: int = 0) -> ClientData:
        """Return a client's data, the test split sealed."""
        data = super().client(k, visit)
        if self.others:
            return replace(data, test=Split(-data.test.x, (data.test.y + 1) % self.num_classes))
        return SealedData.of(data, self)

    @contextmanager
    def now(self, judging: bool) -> Iterator[None]:
        """Unseal the test data, or seal them again, for a while."""
        before, self.judging = self.judging, judging
        try:
            yield
        finally:
            self.judging = before


def sealed(algorithm: Algorithm, world: SealedWorld) -> Algorithm:
    """Return a method in whose hooks test data are sealed, and whose scores are means over test images."""

    def wrapped(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **named: Any) -> Any:
            with world.now(judging=False):
                result = found(*args, **named)
                if name == "evaluate":
                    assert_mean(algorithm, result, *args)
            return result

        return hook

    return toy.with_hooks(algorithm, wrapped)


def assert_mean(
    algorithm: Algorithm,
    whole: dict[str, float],
    message: Message,
    state: State,
    client: Client,
    split: Split,
) -> None:
    """Assert that scores are means over images: those of parts, weighted, give the whole."""
    parts = [Split(split.x[part], split.y[part]) for part in PARTS]
    scores = [algorithm.evaluate(message, state, client, part) for part in parts]
    for name, value in whole.items():
        mean = sum(len(p) * s[name] for p, s in zip(parts, scores, strict=True)) / len(split)
        assert_allclose(value, mean, rtol=1e-4, err_msg=f"{name} is no mean over test images")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SealedWorld:
    """A sealed world, and a learner that refuses marked images."""
    out = SealedWorld()
    evaluate, judged = Worker.evaluate, LocalClient.evaluate
    received = AsynchronousEngine._received_metrics  # rank 0 evaluates what clients received, by itself

    def unsealed(worker: Worker, *args: Any) -> Any:
        with out.now(judging=True):
            return evaluate(worker, *args)

    def unsealed_there(engine: AsynchronousEngine, *args: Any) -> Any:
        with out.now(judging=True):
            return received(engine, *args)

    def counted(client: LocalClient, vector: Vector, split: Split | None = None) -> dict[str, float]:
        if split is None and not out.judging:
            out.judged_in_hooks += 1
        with out.now(judging=split is None or out.judging):
            return judged(client, vector, split)

    def refusing(name: str) -> Any:
        inner = getattr(Learner, name)

        def work(learner: Learner, *args: Any, **named: Any) -> Any:
            for split in (a for a in (*args, *named.values()) if isinstance(a, Split)):
                assert not (split.x[:, 0, 0, 0] == torch.tensor(MARK)).any(), f"{name} on test data"
            return inner(learner, *args, **named)

        return work

    monkeypatch.setattr(Worker, "evaluate", unsealed)
    monkeypatch.setattr(AsynchronousEngine, "_received_metrics", unsealed_there)
    monkeypatch.setattr(LocalClient, "evaluate", counted)
    for name in ("sgd", "gradient", "batches"):
        monkeypatch.setattr(Learner, name, refusing(name))
    return out


def run(algorithm: Algorithm, world: SealedWorld, folder: Path, **changes: Any) -> toy.Run:
    """Take two steps of a method and evaluate after each, also after fine-tuning."""
    evaluated = EvaluationConfig(every=1, at_start=True, finetune_epochs=1)
    take = toy.events if "policy" in changes else toy.run
    world.judged_in_hooks = 0
    out = take(sealed(algorithm, world), world, folder / "marked", steps=2, evaluation=evaluated, **changes)
    if world.judged_in_hooks:
        world.others = True
        other = take(algorithm, world, folder / "others", steps=2, evaluation=evaluated, **changes)
        world.others = False
        toy.same(toy.state_of(other.server), toy.state_of(out.server), "what was evaluated bears on it")
    return out


@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", PARAMS)
def test_no_method_trains_or_chooses_on_test_data(case, world, tmp_path):
    name, options = case
    done = run(CATALOGUE[name](**options), world, tmp_path)
    assert {"accuracy", "loss", "accuracy_finetuned"} <= done.scores.keys()


@pytest.mark.nightly(spread=True)
@pytest.mark.usefixtures("flat_plane")
@pytest.mark.parametrize("case", CASES, ids=named)
def test_nor_does_any_under_a_policy(case, world, tmp_path):
    name, options = case
    method = CATALOGUE[name](**options)
    for policy in POLICIES:
        try:
            policy.check(method)
            require(policy.least_uploads(world.num_clients) >= method.needs.min_cohort, "", 0, "too few")
        except UserError:
            continue
        done = run(method, world, tmp_path / "events", policy=policy)
        assert {"accuracy", "loss", "accuracy_finetuned"} <= done.scores.keys()
        return
    assert method.needs.round_number, "of the others, one policy takes each"


@dataclass(frozen=True)
class Leak(Algorithm):
    """FedAvg with one of some leaks."""

    where: str = "visit"

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train, perhaps on test data."""
        split = client.data.test if self.where == "visit" else None
        trained = client.sgd(message["model"][0], key, split=split).vector
        accuracy = client.evaluate(trained)["accuracy"] if self.where in ("judged", "metric") else 0.0
        if self.where == "judged" and accuracy < 0.5:
            trained = message["model"][0]
        return client.report(metrics={"accuracy": accuracy}, model=trained), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average."""
        return Plan([average(notes)])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the model, perhaps after a step on test data."""
        w = message["model"][0]
        return client.sgd(w, key(0), split=client.data.test).vector if self.where == "model" else w

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Judge, perhaps a model that was tuned or chosen on the very images."""
        w = self.model_of(message, state, client)
        if self.where == "tuned":
            w = client.sgd(w, key(0), split=split).vector
        if self.where == "chosen":
            w = min((w, 2 * w, -w), key=lambda v: client.loss(v, split))
        return client.evaluate(w, split)


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        ("visit", "read by a method"),
        ("judged", "bears on it"),
        ("model", "read by a method"),
        ("tuned", "sgd on test data"),
        ("chosen", "no mean"),
    ],
)
def test_this_world_sees_leaks(world, tmp_path, where, seen):
    for harmless in ("nowhere", "metric"):
        run(Leak(harmless), world, tmp_path / harmless)
    with pytest.raises((AssertionError, ClientError), match=seen):
        run(Leak(where), world, tmp_path / "leak")
