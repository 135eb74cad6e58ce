"""Visits that only train, in one call: the numbers of visits one by one, and only where that is declared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import worlds

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.transport import Single
from mpifl.core.algorithm import Algorithm, only_trains
from mpifl.core.capabilities import PlainVisits, uses
from mpifl.core.errors import CodeFailed
from mpifl.core.federation import ClientData, Federation, Split
from mpifl.data import open_federation
from mpifl.experiment import loader
from mpifl.experiment.build import build_server_step
from mpifl.kernels import bindings
from mpifl.simulation.sampling import Sampler
from mpifl.training.client import LocalClients
from mpifl.training.config import LocalConfig
from mpifl.training.kernel_backend import KernelBackend

pytestmark = pytest.mark.skipif(not bindings.TRAINING_AVAILABLE, reason="the kernels are there")
IID = "--data.scenario={name: iid, clients: 5}"
LOCALS = {
    "two epochs": LocalConfig(epochs=2, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01),
    "steps": LocalConfig(steps=5, batch_size=4, lr=0.1, momentum=0.5, lr_decay=0.9),
    "no step": LocalConfig(epochs=0),
}


@dataclass(frozen=True)
class OneByOne(FedAvg):
    """FedAvg with the update of FedAvg, as its own."""

    def local_update(self, message, state, client, key):
        """Train."""
        return super().local_update(message, state, client, key)


@dataclass(frozen=True)
class Other(FedAvg):
    """FedAvg with another hook of its own."""

    def aggregate(self, server, notes):
        """Average."""
        return super().aggregate(server, notes)


def test_a_class_with_an_update_of_its_own_loses_the_declaration():
    assert only_trains(FedAvg())
    assert only_trains(Other())
    assert not only_trains(OneByOne())
    touched = FedAvg()
    object.__setattr__(touched, "local_update", lambda *_: None)
    assert not only_trains(touched)
    assert not only_trains(CATALOGUE["oracle"]())  # has the default update, and declares nothing


def calls_of(monkeypatch, owner, name):
    """Return a list that grows with what each call of a method returns."""
    found, made = getattr(owner, name), []

    def wrapped(*args, **named):
        made.append(found(*args, **named))
        return made[-1]

    monkeypatch.setattr(owner, name, wrapped)
    return made


@pytest.mark.parametrize("name", LOCALS)
def test_visits_in_one_call_are_visits_one_by_one(name, monkeypatch, tmp_path):
    together = calls_of(monkeypatch, KernelBackend, "train_visits")
    runs = []
    for method in (FedAvg(), OneByOne()):
        context = worlds.config_of(method, local=LOCALS[name], participation=0.5)
        context = worlds.context_of(context, worlds.Tiny())
        folder = ClientStore("test", str(tmp_path / type(method).__name__))
        step = build_server_step(context, folder)
        sampler = Sampler(6, context.decisions.num_sampled, context.system_key)
        server, notes = step.initialize(), []
        for t in (1, 2, 3):
            server, made = step.step(server, sampler(t))
            notes.append(made)
        rows = [step.ledger.total(way) for way in ("down", "up")]
        runs.append((server.tables["model"], notes, rows, step.visits, step.train_metrics))
        assert len(together) == 3
        assert all(outcome is not None for outcome in together)
    (model, notes, rows, visits, metrics), (model1, notes1, rows1, visits1, metrics1) = runs
    assert_array_equal(model, model1)
    assert (rows, metrics) == (rows1, metrics1)
    assert_array_equal(visits, visits1)
    for a, b in zip(notes, notes1, strict=True):
        assert_array_equal(a.client, b.client)
        assert_array_equal(a.num_samples, b.num_samples)


@pytest.mark.parametrize("model", ["mlp", "lenet5"])
def test_samples_are_read_where_they_are_stored(model, monkeypatch, tmp_path):
    """Bytes and a table, by rows (dense layers) and by lanes (convolutions), against tensors of floats."""
    source = ["--data.source={name: synthetic, train: 60, test: 20, shape: [3, 16, 16]}", IID]
    config = loader.load("quickstart", [f"--model={model}", *source])
    federation = open_federation(config.data, config.seed.data)
    assert federation.stored(np.array([1, 3]), np.array([0, 2])) is not None
    models = []
    for stored in (True, False):
        if not stored:
            monkeypatch.setattr(type(federation), "stored", Federation.stored)
        context = worlds.context_of(
            worlds.config_of(FedAvg(), model=config.model, local=LOCALS["two epochs"]), federation
        )
        step = build_server_step(context, ClientStore("t", str(tmp_path / str(stored))))
        server, _ = step.step(step.initialize(), np.arange(federation.num_clients))
        models.append(server.tables["model"])
    assert_array_equal(*models)


def test_a_client_that_fails_is_named(tmp_path):
    """A label that is no class: visits one by one say whose it is."""

    class Wrong(worlds.Tiny):
        def client(self, k, visit=0):
            found = super().client(k, visit)
            y = found.train.y.clone()
            y[0] = 99 if k == 4 else y[0]
            return ClientData(Split(found.train.x, y), found.val, found.test)

    context = worlds.context_of(worlds.config_of(FedAvg()), Wrong(), Single())
    step = build_server_step(context, ClientStore("test", str(tmp_path)))
    with pytest.raises(CodeFailed, match="client 4"):
        step.step(step.initialize(), np.arange(6))


def test_visits_in_one_call_end_now_and_then(monkeypatch, tmp_path):
    """As many visits as are allowed in one call: a rank that is stopped must hear of it."""
    monkeypatch.setattr("mpifl.runtime.worker.RUN", (4, 1 << 13))
    together = calls_of(monkeypatch, LocalClients, "train_visits")
    context = worlds.context_of(worlds.config_of(FedAvg()), worlds.Tiny())
    step = build_server_step(context, ClientStore("test", str(tmp_path)))
    step.step(step.initialize(), np.arange(6))
    assert [len(made.loss) for made in together] == [4, 2]
    assert step.config.counter.total() == 6


def test_every_method_that_declares_plain_visits_has_them():
    """A declaration beside an update of one's own would do nothing."""
    found = {name for name, cls in CATALOGUE.items() if PlainVisits in cls.__mro__}
    assert found == {"fedavg", "fedavgm", "fedadam", "fedyogi", "fedclust", "pacfl"}
    for name in found:
        assert uses(CATALOGUE[name](), PlainVisits)
        assert CATALOGUE[name].local_update is Algorithm.local_update
