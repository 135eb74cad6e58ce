"""The EMD-CFL repository's updates: differences of whole state dicts, counters of batches included."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from torch import nn

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.client import Client
from mpifl.core.types import Message, Report
from mpifl.models.modules import Net
from mpifl.training.config import LocalConfig

LOCAL = LocalConfig(epochs=4, batch_size=5, lr=0.05, momentum=0.9, weight_decay=1e-3)
COUNTERS = [  # method, its options under which a visit is plain training, the upload that is compared
    ("cfl", {}, "update"),
    ("cflgp", {"num_clusters": 2}, "profile"),
    ("flexcfl", {"num_groups": 2}, "direction"),
    ("pfedgraph", {"lam": 0.0}, "delta"),
    ("fedsac", {"lam": 0.0}, "delta"),
]


@dataclass(frozen=True)
class Normed:
    """A network with two batch norms."""

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Net:
        """Return the network for images of 16 numbers."""
        layers = nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4)
        return Net(nn.Sequential(nn.Flatten(), *layers), nn.Linear(4, num_classes))


def independent(client: Client, key: Any) -> torch.Tensor:
    """Return the change of a whole state dict [numbers] by PyTorch's own modules and SGD, in float64."""
    module = Normed().build((1, 4, 4), toy.CLASSES)
    state = {
        name: client.init[s].view(shape)
        for (name, s), shape in zip(client.layout.slices.items(), client.layout.shapes, strict=True)
    }
    module.load_state_dict(state, strict=False)
    module.double().train()
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for batch in client.batches(key):
        optimizer.zero_grad()
        F.cross_entropy(module(batch.x.double()), batch.y).backward()
        optimizer.step()
    changes = [value.double() - before[name] for name, value in module.state_dict().items()]
    return torch.cat([change.flatten() for change in changes])


def visits(method: Any, folder: Path) -> tuple[list[Report], torch.Tensor]:
    """Return what six clients report of their first visit, and their changes [6, numbers] by PyTorch."""
    step, _ = toy.start(method, toy.Tiny(), folder, model=Normed(), local=LOCAL)
    step.initialize()
    reports, changes = [], []
    for k in range(6):
        client, key = step.worker.client(k, 0, 1), toy.key(0, "visit", k)
        tables = {"model": client.init[None], "direction": torch.zeros(1, client.layout.num_parameters)}
        message = Message(tables, dict.fromkeys(tables, (0,)))
        reports.append(method.local_update(message, {}, client, key)[0])
        changes.append(independent(client, key))
    return reports, torch.stack(changes)


@pytest.mark.parametrize(("name", "options", "upload"), COUNTERS)
def test_products_of_updates_are_those_of_state_dicts(name, options, upload, tmp_path):
    """12 to 16 steps each and two layers: their counters alone give 2 * 12 * 12 and more."""
    method = CATALOGUE[name](variant="emdcfl", **options)
    reports, changes = visits(method, tmp_path)
    u = torch.stack([report.vectors[upload] for report in reports]).double()
    assert_allclose(u @ u.T, changes @ changes.T, rtol=1e-5)
    steps = changes.max(1).values  # nothing moves as far as a counter
    assert (steps >= 8).all()
    assert len(steps.unique()) > 1


@pytest.mark.parametrize("name", ["cfl", "pfedgraph", "fedsac"])
def test_without_the_variant_parameters_alone_are_compared(name, tmp_path):
    reports, _ = visits(CATALOGUE[name](), tmp_path)
    upload = dict((n, u) for n, _, u in COUNTERS)[name]
    parameters = 16 * 6 + 6 + 2 * 6 + 6 * 4 + 4 + 2 * 4 + 4 * 3 + 3
    assert all(report.vectors[upload].shape == (parameters,) for report in reports)


def test_a_model_without_batch_norm_has_nothing_to_count(tmp_path):
    for name, options, upload in COUNTERS:
        method = CATALOGUE[name](variant="emdcfl", **options)
        step, _ = toy.start(method, toy.Tiny(), tmp_path / name)
        step.initialize()
        client = step.worker.client(0, 0, 1)
        message = Message({"model": client.init[None]}, {"model": (0,)})
        report, _ = method.local_update(message, {}, client, toy.key(0))
        assert report.vectors[upload].numel() == client.layout.size * (2 if name == "cflgp" else 1)


def graph_of(name: str, variant: str, folder: Path, **options: Any) -> np.ndarray:
    """Return the graph [6, 6] after a round of many steps on a network with batch norm."""
    local = LocalConfig(epochs=40, batch_size=4, lr=0.002)
    method, world = CATALOGUE[name](variant=variant, lam=0.0, **options), toy.Tiny(equal=True)
    done = toy.run(method, world, folder, steps=1, model=Normed(), local=local)
    return np.asarray(done.server.algorithm_state["graph"])


@pytest.mark.in_turn
def test_counters_make_pfedgraph_average_everyone_alike(tmp_path):
    """120 steps: the counters' part of a product is 2 * 120^2, the rest below 10: all cosines are near 1.

    Without them groups differ, and nobody of the other group has the weight of the own one.
    """
    assert_allclose(graph_of("pfedgraph", "emdcfl", tmp_path / "a"), 1 / 6, atol=1e-3)
    X = graph_of("pfedgraph", "paper", tmp_path / "b")
    assert (np.diag(X) > 0.25).all()
    assert X[:3, 3:].max() < 1 / 6


@pytest.mark.in_turn
def test_counters_leave_fedsac_its_complementarity_term_only(tmp_path):
    """With equal cosines the graph is that of lambda2 = 0; with those of the parameters it is not."""
    alone = graph_of("fedsac", "emdcfl", tmp_path / "a", lambda2=0.0)
    assert_allclose(graph_of("fedsac", "emdcfl", tmp_path / "b"), alone, atol=1e-3)
    sane = [graph_of("fedsac", "paper", tmp_path / f"{x}", lambda2=x) for x in (0.0, 1.4)]
    assert np.abs(sane[0] - sane[1]).max() > 0.1


@pytest.mark.parametrize(("variant", "clusters"), [("paper", 2), ("emdcfl", 1)])
def test_counters_keep_cfl_from_splitting(variant, clusters, tmp_path):
    """The mean update of the parameters stays below 8; twice 15 batches alone make it longer than 20."""
    method = CATALOGUE["cfl"](variant=variant, warmup=1, eps1=8.0, eps2=0.0)
    world = toy.Tiny(equal=True)
    done = toy.run(method, world, tmp_path, steps=2, model=Normed(), local=LOCAL)
    assert len(np.unique(done.server.assign)) == clusters


def test_fesem_under_emdcfl_measures_state_dicts(tmp_path):
    """Two visits of 12 steps each: the centres' counters stand at 12 after one round and at 24 after two.

    A client is 12 batches in two layers from every centre, and what its parameters and statistics are.
    """
    method, world = CATALOGUE["fesem"](num_clusters=2, variant="emdcfl"), toy.Tiny(equal=True)
    done = toy.run(method, world, tmp_path, steps=2, model=Normed(), local=LOCAL)
    counted = [server.tables["model"][:, -1] / 2**0.5 for server in done.servers]
    assert_allclose(torch.stack(counted), [[0, 0], [12, 12], [24, 24]], atol=1e-5)
    assert (done.notes[1]["row_distance"] > 12 * 2**0.5).all()
    size = done.server_step.problem.layout.size
    assert done.server.tables["model"].shape == (2, size + 1)
    assert done.models().shape == (6, size)


def test_fedclust_under_emdcfl_counts_batches_and_averages_models(tmp_path):
    """Clients of 8, 11, 14 and 17 samples take 8, 8, 12 and 16 steps: no two of unequal ones are nearer than
    4 sqrt 2; three clusters within 4 are those of equal steps where little else moves.
    """
    method = CATALOGUE["fedclust"](variant="emdcfl", threshold=4.0)
    local = LocalConfig(epochs=4, batch_size=5, lr=1e-4)
    done = toy.run(method, toy.Tiny(), tmp_path, steps=1, model=Normed(), local=local)
    assert_array_equal(done.server.assign, [0, 0, 1, 2, 0, 0])
    size = done.server_step.problem.layout.size
    assert done.server.tables["signature"].shape == (3, size + 1)
    assert done.server.tables["model"].shape == (4, size)


def test_a_run_of_flexcfl_under_emdcfl_counts_its_first_training_as_round_1(tmp_path):
    """Its traffic is that of T equal rounds; after round 1 each group is the plain mean of its members."""
    method = CATALOGUE["flexcfl"](num_groups=2, variant="emdcfl")
    done = toy.run(method, toy.Tiny(), tmp_path, steps=2, model=Normed(), local=LOCAL)
    ledger, d = done.server_step.ledger, done.server_step.problem.layout.size
    assert (ledger.total("up"), ledger.total("down")) == (4 * d * 12, 4 * d * 12)
    first = done.servers[1]
    rows = [np.flatnonzero(first.assign == j) for j in range(2)]
    for row, weights in zip(rows, done.plans[0].mixings[0].weights, strict=False):
        assert_allclose(weights[row], 1 / len(row))
    steps = [np.mean([[8, 8, 12, 16, 8, 8][k] for k in row]) for row in rows]
    assert_array_equal(first.algorithm_state["batches"], np.floor(steps))


@pytest.mark.parametrize(
    ("name", "options", "upload"),
    [
        ("fedamp", {}, "model"),
        ("flhc", {"rounds_before": 0}, "delta"),
        ("fesem", {"variant": "flt", "num_clusters": 2}, "model"),
    ],
)
def test_products_of_models_are_those_of_their_weights(name, options, upload, tmp_path):
    """Running statistics are no weights; by the EMD-CFL repository's variants above they count."""
    sent = {}

    def told(hook: str, args: Any, result: Any) -> None:
        if hook == "local_update":
            sent[args[2].id] = result[0].vectors[upload]

    step, sampler = toy.start(
        CATALOGUE[name](**options), toy.Tiny(), tmp_path, told=told, model=Normed(), local=LOCAL
    )
    _, notes = toy.step_of(step, step.initialize(), sampler(1))
    p = step.problem.layout.num_parameters
    x = torch.stack([sent[k].reshape(-1)[:p] for k in notes.client.tolist()]).double()
    assert step.problem.layout.size > p
    assert_allclose(notes["gram"], (x @ x.T).numpy(), rtol=1e-6)
