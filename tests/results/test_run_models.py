"""`Run.model`: the model that a client was evaluated by, as a module; `Run.plot`: its curves."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.runs import CONFIG
from torch import nn

import mpifl
from mpifl import cli
from mpifl.comm.single import Single
from mpifl.core.errors import Stopped
from mpifl.driver.run import run
from mpifl.experiment.build import build
from mpifl.experiment.loader import load
from mpifl.results import recorder

NETWORK = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(shape[0] * shape[1] * shape[2], 7)
        self.last = nn.Linear(7, num_classes)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)).relu())
"""
KEPT = {"client_models": True}
CASES = {
    "rows": ("fedavg", {}),
    "clusters": ({"name": "ifca", "num_clusters": 2}, KEPT),
    "chosen": ({"name": "ifca", "num_clusters": 3}, {}),
    "chosen heads": ({"name": "ifca", "num_clusters": 2, "share": "body"}, {}),
    "hypotheses": ({"name": "hypcluster", "num_clusters": 3}, {}),
    "centres": ({"name": "fesem", "num_clusters": 2}, {}),
    "experts": ({"name": "fedce", "num_clusters": 2}, {}),
    "copies": ({"name": "fedcuau", "tune_epochs": 0}, {}),
    "heads": ("fedper", KEPT),
    "personal": ("ditto", KEPT),
    "events": ("fedbuff", {}),
}


@pytest.mark.parametrize(("algorithm", "output"), CASES.values(), ids=CASES)
def test_the_model_of_a_client_scores_what_its_table_says(tmp_path, algorithm, output):
    policy = {"name": "buffer", "size": 2} if algorithm == "fedbuff" else "rounds"
    options = {"algorithm": algorithm, "policy": policy, "cohort_size": 6, "rounds": 3}
    run = mpifl.run(str(CONFIG), output={"folder": str(tmp_path), **output}, **options)
    federation = build(mpifl.load_config(str(run.folder / "config.yaml")), Single()).federation
    for k, accuracy in zip(run.clients["client"], run.clients["accuracy"], strict=True):
        test, model = federation.client(k).test, run.model(client=k)
        assert isinstance(model, nn.Module)
        assert not model.training
        with torch.no_grad():
            hits = int((model(test.x).argmax(1) == test.y).sum())
        assert hits / len(test) == accuracy


@pytest.mark.parametrize("name", ["ifca", "hypcluster", "fedce", "fesem"])
def test_clients_that_no_visit_reached_have_the_model_that_they_choose(tmp_path, name):
    """Two of eight are visited; each other one is evaluated with the best of the server's models for it."""
    method = {"name": name, "num_clusters": 3}
    options = {"cohort_size": 2, "rounds": 1, "output": {"folder": str(tmp_path)}}
    run = mpifl.run(str(CONFIG), algorithm=method, **options)
    served = load_file(run.folder / "model.safetensors")["served.model"]
    assert run.summary["client_models"] == "served"
    assert served.min() >= 0
    assert served.shape == (8,)
    federation = build(mpifl.load_config(str(run.folder / "config.yaml")), Single()).federation
    for k, accuracy in zip(run.clients["client"], run.clients["accuracy"], strict=True):
        test = federation.client(k).test
        with torch.no_grad():
            hits = int((run.model(client=k)(test.x).argmax(1) == test.y).sum())
        assert hits / len(test) == accuracy


BESIDE = """
from dataclasses import dataclass, replace
import torch
from mpifl.algorithms.hypcluster import HypCluster


@dataclass(frozen=True)
class Beside(HypCluster):
    paper = "mansour2020three"

    def setup(self, problem, fingerprints, key):
        server = super().setup(problem, fingerprints, key)
        return replace(server, tables={**server.tables, "beside": torch.zeros(2, 3)})
"""


def test_a_table_that_holds_no_model_does_not_keep_clients_from_the_rows_that_they_choose(tmp_path):
    (tmp_path / "own.py").write_text(BESIDE)
    method = {"name": f"{tmp_path / 'own.py'}:Beside", "num_clusters": 3}
    options = {"cohort_size": 2, "rounds": 1, "output": {"folder": str(tmp_path)}}
    run = mpifl.run(str(CONFIG), algorithm=method, **options)
    assert load_file(run.folder / "model.safetensors")["served.model"].min() >= 0


def test_a_resumed_run_says_the_same_rows(tmp_path):
    ifca = {"name": "ifca", "num_clusters": 3}
    options = {"rounds": 3}
    whole = mpifl.run(str(CONFIG), algorithm=ifca, output={"folder": str(tmp_path), "id": "a"}, **options)

    place = ["--output.folder", str(tmp_path), "--output.id", "b", "--rounds", "3"]
    config = load(str(CONFIG), ["--algorithm", "{name: ifca, num_clusters: 3}", *place])
    asked = iter([False, False])
    with pytest.raises(Stopped):
        run(config, Single(), quiet=True, asked_to_stop=lambda: next(asked, True))
    assert not (tmp_path / "tiny-b" / "model.safetensors").exists()
    assert cli.main(["resume", str(tmp_path / "tiny-b"), "-q"]) == 0
    a, b = (load_file(tmp_path / f"tiny-{name}" / "model.safetensors") for name in ("a", "b"))
    assert torch.equal(a["served.model"], b["served.model"])
    assert whole.summary["client_models"] == "served"


def test_a_soft_method_says_how_its_models_are_kept(tmp_path):
    """FedSoft evaluates a client with a model of its own; the centres are models of the server."""
    options = {"algorithm": "fedsoft", "rounds": 1, "output": {"folder": str(tmp_path)}}
    run = mpifl.run(str(CONFIG), **options)
    said = r"models of their own, .* output.client_models: true, or use cluster= for a model of the server"
    with pytest.raises(mpifl.UserError, match=said):
        run.model(client=0)


def test_the_model_of_a_cluster_is_that_of_its_clients(tmp_path):
    output = {"folder": str(tmp_path)}
    run = mpifl.run(str(CONFIG), algorithm="oracle", output=output)
    for k, cluster in zip(run.clusters["client"], run.clusters["cluster"], strict=True):
        a, b = run.model(client=k).state_dict(), run.model(cluster=cluster).state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(mpifl.UserError, match=r"cluster = 9: there is no such cluster; use one of 0, 1"):
        run.model(cluster=9)
    with pytest.raises(mpifl.UserError, match=r"client = 8: use one of 0 to 7"):
        run.model(client=8)
    with pytest.raises(mpifl.UserError, match=r"give client=, or cluster="):
        run.model()


@pytest.mark.parametrize("clients", ["sample", "none"])
def test_models_of_clients_without_rows_in_the_tables_are_there_too(clients, tmp_path, monkeypatch):
    """Tables hold three of eight clients, or none; models are those of a run that holds them all."""
    monkeypatch.setattr(recorder, "SAMPLE", 3)
    ifca = {"name": "ifca", "num_clusters": 2}
    every, few = (
        mpifl.run(str(CONFIG), algorithm=ifca, output={"folder": str(tmp_path / who), "clients": who, **KEPT})
        for who in ("all", clients)
    )
    for k in range(8):
        a, b = every.model(client=k).state_dict(), few.model(client=k).state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(mpifl.UserError, match=r"client = 8: use one of 0 to 7"):
        few.model(client=8)
    if clients == "none":
        with pytest.raises(mpifl.UserError, match=r"output.clients = 'none': this run did not write"):
            few.model(cluster=0)
    else:
        assert len(few.clusters) == 3
        for cluster in few.clusters["cluster"].unique():
            a, b = every.model(cluster=cluster).state_dict(), few.model(cluster=cluster).state_dict()
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_network_of_the_user_is_an_object_of_its_class(tmp_path):
    (tmp_path / "mine.py").write_text(NETWORK)
    path = f"{tmp_path / 'mine.py'}:Mine"
    model = {"name": "custom", "path": path, "head": "last"}
    run = mpifl.run(str(CONFIG), model=model, output={"folder": str(tmp_path / "runs")})
    module = run.model(client=0)
    assert (type(module).__name__, type(module.last), len(module.state_dict())) == ("Mine", nn.Linear, 4)
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_what_was_not_kept_names_the_key_to_set(tmp_path):
    output = {"folder": str(tmp_path), "model": False}
    plain = mpifl.run(str(CONFIG), output={**output, "id": "plain"})
    with pytest.raises(mpifl.UserError, match=r"output\.model = False: .*output\.model: true"):
        plain.model(client=0)
    own = mpifl.run(str(CONFIG), algorithm="fedper", output={**output, "id": "own", "model": True})
    with pytest.raises(
        mpifl.UserError, match=r"output\.client_models = False: .*output\.client_models: true"
    ):
        own.model(client=0)


@pytest.mark.parametrize("algorithm", ["fedem", "fedrc"])
def test_clients_that_are_evaluated_by_mixtures_have_no_model_and_no_key_is_named(tmp_path, algorithm):
    output = {"folder": str(tmp_path), "id": "mixed"}
    with pytest.raises(mpifl.UserError, match=r"output\.client_models = True: .*mixtures of several"):
        mpifl.run(str(CONFIG), algorithm=algorithm, output={**output, **KEPT})
    run = mpifl.run(str(CONFIG), algorithm=algorithm, output=output)
    with pytest.raises(mpifl.UserError, match=r"client = 0: .*mixtures of several models; use cluster="):
        run.model(client=0)
    assert run.model(cluster=2).state_dict().keys() == run.model(cluster=0).state_dict().keys()


def test_a_mixture_of_one_model_is_that_model(tmp_path):
    algorithm = {"name": "fedrc", "num_clusters": 1}
    run = mpifl.run(str(CONFIG), algorithm=algorithm, output={"folder": str(tmp_path)})
    a, b = run.model(client=3).state_dict(), run.model(cluster=0).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_curves_have_the_values_of_the_table(tmp_path):
    run = mpifl.run(str(CONFIG), evaluation={"every": 1}, output={"folder": str(tmp_path), "label": "mine"})
    ax = run.plot()
    assert ax.lines[0].get_label() == "mine"
    assert ax.lines[0].get_ydata().tolist() == run.metrics["accuracy_mean"].tolist()
    assert run.plot("loss", against="bytes", label="b", ax=ax, color="k") is ax
    sent = run.metrics["federation_bytes_up"] + run.metrics["federation_bytes_down"]
    assert ax.lines[1].get_xdata().tolist() == (sent / 1e6).tolist()
    assert (
        run.plot(against="seconds").lines[0].get_xdata().tolist() == run.metrics["virtual_seconds"].tolist()
    )
    with pytest.raises(mpifl.UserError, match="did you mean 'accuracy_mean'"):
        run.plot("accuracy_men")
    with pytest.raises(mpifl.UserError, match="use one of rounds, bytes"):
        run.plot(against="steps")


def test_rounds_of_an_asynchronous_run_are_called_steps_of_the_server(tmp_path):
    output = {"folder": str(tmp_path)}
    run = mpifl.run(str(CONFIG), policy="every_arrival", rounds=3, output=output)
    assert run.plot().get_xlabel() == "server steps"
    assert run.plot(against="bytes").get_xlabel() == "MB sent, up and down"


@pytest.mark.parametrize("client", [1.5, "1", True, 8])
def test_what_is_no_number_of_a_client_is_refused(client, tmp_path):
    run = mpifl.run(str(CONFIG), output={"folder": str(tmp_path)})
    with pytest.raises(mpifl.UserError, match=r"client = .*: use one of 0 to 7"):
        run.model(client=client)
