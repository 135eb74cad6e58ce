"""Visits that only train, in one call: the numbers of visits one by one, and only where that is declared."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.fedprox import FedProx
from mpifl.algorithms.registry import CATALOGUE
from mpifl.comm.single import Single
from mpifl.core.algorithm import Algorithm, plain_visit
from mpifl.core.capabilities import PlainVisit, PlainVisits
from mpifl.core.errors import CodeFailed, MethodError
from mpifl.core.federation import ClientData, Federation, Split
from mpifl.core.torch_state import state
from mpifl.data import open_federation
from mpifl.experiment import loader
from mpifl.experiment.build import build_engine, build_server_step
from mpifl.experiment.schema import EvaluationConfig
from mpifl.kernels import bindings
from mpifl.runtime.plain_visits import PlainVisitRunner
from mpifl.simulation.policies import EveryArrival
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
class Other(FedAvg):
    """FedAvg with another hook of its own."""

    def aggregate(self, server, notes):
        """Average."""
        return super().aggregate(server, notes)


@dataclass(frozen=True)
class Near(FedProx):
    """FedProx that says something else of the update that it inherits."""

    def plain_visit(self):
        """Claim to be FedAvg."""
        return PlainVisit()


@dataclass(frozen=True)
class Vague(FedAvg):
    """A method that says nothing that can be used."""

    def local_update(self, message, state, client, key):
        """Train."""
        return super().local_update(message, state, client, key)

    def plain_visit(self):
        """Say a word."""
        return "yes"


def one_by_one(cls: type[Algorithm]) -> type[Algorithm]:
    """Return a method with an update of its own, which is the one that it inherits."""

    def local_update(self, message, state, client, key):
        return cls.local_update(self, message, state, client, key)

    return type(f"{cls.__name__}OneByOne", (cls,), {"local_update": local_update})


OneByOne = one_by_one(FedAvg)


def test_update_and_declaration_count_where_they_are_of_one_class():
    assert plain_visit(FedAvg()) == plain_visit(Other()) == PlainVisit()
    assert plain_visit(OneByOne()) is None
    touched = FedAvg()
    object.__setattr__(touched, "local_update", lambda *_: None)
    assert plain_visit(touched) is None
    assert plain_visit(FedProx(mu=0.5)) == PlainVisit(mu=0.5)
    assert plain_visit(one_by_one(FedProx)()) is None
    assert plain_visit(Near()) is None
    with pytest.raises(MethodError, match=r"Vague.plain_visit: returned str.*return PlainVisit"):
        plain_visit(Vague())
    assert plain_visit(CATALOGUE["emdcfl"]()) is None  # has the default update, and declares nothing


def calls_of(monkeypatch, owner, name):
    """Return a list that grows with what each call of a method returns."""
    found, made = getattr(owner, name), []

    def wrapped(*args, **named):
        made.append(found(*args, **named))
        return made[-1]

    monkeypatch.setattr(owner, name, wrapped)
    return made


def rounds_of(method, local, folder, num_rounds=3):
    """Return the rows, notes, bytes, visits and metrics of a few rounds."""
    context = toy.context_of(toy.config_of(method, local=local, participation=0.5), toy.Tiny())
    step = build_server_step(context, ClientStore("test", str(folder)))
    sampler = Sampler(6, context.decisions.num_sampled, context.system_key)
    server, notes, metrics = step.initialize(), [], []
    for t in range(1, num_rounds + 1):
        server, made = toy.step_of(step, server, sampler(t))
        notes.append(made)
        metrics.append(step.train_metrics)
    return server, notes, [step.ledger.total(way) for way in ("down", "up")], step.visits.tolist(), metrics


def assert_same_rounds(method, other, local, tmp_path):
    """Assert that two methods make the same numbers of the same rounds."""
    one = rounds_of(method, local, tmp_path / "one")
    two = rounds_of(other, local, tmp_path / "two")
    (server, notes, *told), (server1, notes1, *told1) = one, two
    assert server.tables.keys() == server1.tables.keys()
    for name, table in server.tables.items():
        assert_array_equal(table, server1.tables[name])
    assert_array_equal(server.assign, server1.assign)
    assert told == told1
    for a, b in zip(notes, notes1, strict=True):
        for column in ("client", "num_samples", "fresh"):
            assert_array_equal(getattr(a, column), getattr(b, column))
        assert a.columns.keys() == b.columns.keys()
        for name in a.columns:
            assert_array_equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype


@pytest.mark.parametrize("name", LOCALS)
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.7)])
def test_visits_in_one_call_are_visits_one_by_one(method, name, monkeypatch, tmp_path):
    together = calls_of(monkeypatch, KernelBackend, "train_visits")
    assert_same_rounds(method, one_by_one(type(method))(**vars_of(method)), LOCALS[name], tmp_path)
    assert len(together) == 3
    assert all(outcome is not None for outcome in together)


PLAIN = {
    **{name: cls() for name, cls in CATALOGUE.items() if PlainVisits in cls.__mro__},
    "fedavg_ft near": CATALOGUE["fedavg_ft"](mu=0.3),
    "cfl emdcfl": CATALOGUE["cfl"](variant="emdcfl"),
    "fesem flexcfl": CATALOGUE["fesem"](variant="flexcfl", num_clusters=2),
    "ucfl streams": CATALOGUE["ucfl"](streams=2, noise_batch=4),
    "ifca restarts": CATALOGUE["ifca"](restarts=2, num_clusters=3),
}
SLOW = {"flt": pytest.mark.nightly}  # trains an auxiliary network and fits UMAP


@pytest.mark.filterwarnings("ignore:algorithm.noise_batch")
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in sorted(PLAIN)])
def test_every_method_makes_its_plain_visits_as_its_local_update_does(name, monkeypatch, tmp_path):
    """Other uploads, a proximal term, a choice of models, uploads that are compared or remembered."""
    together = calls_of(monkeypatch, PlainVisitRunner, "run")
    method = PLAIN[name]
    assert_same_rounds(method, one_by_one(type(method))(**vars_of(method)), LOCALS["two epochs"], tmp_path)
    assert len(together) == 3
    assert all(made is not None for made in together)


def arrivals_of(method, folder):
    """Return the server, the rows of events.csv and the bytes of a few arrivals."""
    changes = {"rounds": 8, "policy": EveryArrival(), "evaluation": EvaluationConfig(every=0)}
    context = toy.context_of(toy.config_of(method, **changes), toy.Tiny())
    step, rows = build_server_step(context, ClientStore("test", str(folder))), []
    server = build_engine(context, step, rows.extend).run(lambda record: None)
    return server, rows, [step.ledger.total(way) for way in ("down", "up")]


@pytest.mark.parametrize("method", [CATALOGUE["fedasync"](rho=0.3), CATALOGUE["fedbuff"](), FedAvg()])
def test_single_visits_of_asynchronous_runs_go_the_same_way(method, monkeypatch, tmp_path):
    together = calls_of(monkeypatch, PlainVisitRunner, "run_visit")
    one = arrivals_of(method, tmp_path / "one")
    assert len(together) >= 8
    assert all(made is not None for made in together)
    two = arrivals_of(one_by_one(type(method))(**vars_of(method)), tmp_path / "two")
    toy.same(toy.state_of(one[0]), toy.state_of(two[0]))
    assert one[1:] == two[1:]


def vars_of(method: Algorithm) -> dict[str, Any]:
    """Return the fields of a method."""
    return {f.name: getattr(method, f.name) for f in fields(method)}


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
        context = toy.context_of(
            toy.config_of(FedAvg(), model=config.model, local=LOCALS["two epochs"]), federation
        )
        step = build_server_step(context, ClientStore("t", str(tmp_path / str(stored))))
        server, _ = toy.step_of(step, step.initialize(), np.arange(federation.num_clients))
        models.append(server.tables["model"])
    assert_array_equal(*models)


def test_data_that_change_a_setting_leave_it_to_no_other_client(tmp_path):
    """A data set whose reading stops PyTorch from recording gradients, and takes denormal numbers as 0."""
    seen, before, step = [], state(), None

    class Changes(toy.Tiny):
        def client(self, k, visit=0):
            if step is not None:
                seen.append(state() == before)
                torch.set_grad_enabled(False)
                torch.set_flush_denormal(True)
            return super().client(k, visit)

    context = toy.context_of(toy.config_of(FedAvg()), Changes(), Single())
    made = build_server_step(context, ClientStore("test", str(tmp_path)))
    server = made.initialize()
    step = made
    toy.step_of(step, server, np.arange(6))
    assert seen == [True] * 6
    assert state() == before


def test_a_client_that_fails_is_named(tmp_path):
    """A label that is no class: visits one by one say whose it is."""

    class Wrong(toy.Tiny):
        def client(self, k, visit=0):
            found = super().client(k, visit)
            y = found.train.y.clone()
            y[0] = 99 if k == 4 else y[0]
            return ClientData(Split(found.train.x, y), found.val, found.test)

    context = toy.context_of(toy.config_of(FedAvg()), Wrong(), Single())
    step = build_server_step(context, ClientStore("test", str(tmp_path)))
    with pytest.raises(CodeFailed, match="client 4"):
        toy.step_of(step, step.initialize(), np.arange(6))


def test_visits_in_one_call_end_now_and_then(monkeypatch, tmp_path):
    """As many visits as are allowed in one call: a rank that is stopped must hear of it."""
    monkeypatch.setattr("mpifl.runtime.plain_visits.RUN", (4, 1 << 13))
    together = calls_of(monkeypatch, LocalClients, "train_visits")
    context = toy.context_of(toy.config_of(FedAvg()), toy.Tiny())
    step = build_server_step(context, ClientStore("test", str(tmp_path)))
    toy.step_of(step, step.initialize(), np.arange(6))
    assert [len(made.loss) for made in together] == [4, 2]
    assert step.config.counter.total() == 6


MORE = {  # with other options visits do more
    "ucfl": {"parallel": True, "streams": 2},
    "fedprox": {"variant": "unsquared"},
    "ifca": {"select_on": "val"},
    "fesem": {"variant": "emdcfl"},
    "flexcfl": {"migration": 1.0},
}


@pytest.mark.parametrize("name", MORE)
def test_options_under_which_visits_do_more_are_not_plain(name):
    assert plain_visit(CATALOGUE[name]()) is not None
    assert plain_visit(CATALOGUE[name](**MORE[name])) is None
