"""Known reductions: where a parameter makes one method another, both give the same models, up to rounding.

A row per reduction: the method, the one it becomes, and the federation and settings under which it does. A
new method adds its rows to FEDAVG, LOCAL or ORACLE.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.mixing import average
from mpifl.core.types import Notes, ProblemInfo

MOMENTUM = toy.LocalConfig(epochs=2, batch_size=5, lr=0.05, momentum=0.5)


@dataclass(frozen=True)
class Limit:
    """A method that becomes another.

    Attributes:
        why: the setting that makes it the other.
        name: of the method.
        options: of the method.
        federation: options of `toy.Tiny`.
        settings: of the configuration.
        steps: how many steps agree.
        parts: participations under which it holds.
    """

    why: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"local": MOMENTUM})
    steps: int = 3
    parts: tuple[float, ...] = (1.0, 0.5)


FEDAVG = [
    Limit("everybody takes part", "fedavg_memory", {}, parts=(1.0,)),
    Limit("mu = 0", "fedprox", {"mu": 0.0}),
    Limit("mu = 0, unsquared", "fedprox", {"mu": 0.0, "variant": "unsquared"}),
    Limit("K = 1", "ifca", {"num_clusters": 1, "weighted": True}),
    Limit("K = 1, equal n", "ifca", {"num_clusters": 1}, {"equal": True}),
    Limit("K = 1", "csafl", {"num_groups": 1}),
    Limit("never splits", "cfl", {"eps1": 0.0, "weighted": True}),
    Limit("never splits, equal n", "cfl", {"warmup": 10**6}, {"equal": True}),
    Limit("one cluster", "fielding", {"num_clusters": 1}),
    Limit("no rise of the error is drift", "feddrift", {"delta": 1.0, "period": 1}),
    # absent members' last models are averaged too: only full participation is FedAvg
    Limit("one cluster", "emdcfl", {"epsilon": 100.0}, parts=(1.0,)),
    Limit("one group", "oracle", {}, {"num_groups": 1}, parts=(1.0,)),
    Limit("equal gradients", "ucfl", {"noise_batch": 4.0}, {"repeated": True}, parts=(1.0,)),
    Limit("equal gradients, one stream", "ucfl", {"noise_batch": 4.0, "streams": 1}, {"repeated": True}),
    Limit("first step, equal n", "scaffold", {}, {"equal": True}, {"local": toy.LOCAL}, steps=1),
    Limit("one client", "fedper", {}, {"num_clients": 1, "num_groups": 1}, parts=(1.0,)),
    Limit("one client", "local", {}, {"num_clients": 1, "num_groups": 1}, parts=(1.0,)),
]
LOCAL = [
    Limit("N clusters", "emdcfl", {"epsilon": 0.03}, {"num_groups": 6}),
    Limit("N groups", "oracle", {}, {"num_groups": 6}),
    Limit("vanishing variance", "ucfl", {"noise_batch": 10.0**6}, parts=(1.0,)),
    Limit("vanishing variance, geometric", "ucfl", {"noise_batch": 10.0**6, "kernel": "geo"}, parts=(1.0,)),
    Limit("one time step", "feddrift", {"start": "own", "period": 10**6}),
    Limit("one client", "fedavg", {}, {"num_clients": 1, "num_groups": 1}, parts=(1.0,)),
]
ORACLE = [
    Limit("the clusters are the groups", "emdcfl", {"epsilon": 0.1}),
    Limit("the clusters are the groups, looks: seen", "emdcfl", {"epsilon": 0.1, "looks": "seen"}),
    Limit("all take part", "emdcfl", {"epsilon": 0.1, "looks": "together"}, parts=(1.0,)),
]


def cases(limits: list[Limit]) -> list[Any]:
    """Return a test case per limit and participation; all but the lowest one are nightly."""
    night = pytest.mark.nightly(spread=True)
    return [
        pytest.param(x, p, id=f"{x.name}: {x.why}, {p:.0%}", marks=[night] * (p > min(x.parts)))
        for x in limits
        for p in x.parts
    ]


def agree(limit: Limit, other: str, participation: float, folder: Any) -> tuple[toy.Run, toy.Run]:
    """Run a method and what it becomes; every client must be evaluated by the same model after every step."""
    federation = toy.Tiny(**limit.federation)
    settings = {"participation": participation, **limit.settings}
    methods = CATALOGUE[limit.name](**limit.options), CATALOGUE[other]()
    runs = [toy.walk(m, federation, folder / str(i), **settings) for i, m in enumerate(methods)]
    for _ in range(limit.steps):
        one, two = (next(run) for run in runs)
        assert_close(one.models(), two.models(), rtol=1e-4, atol=2e-6)
        assert_allclose(one.scores["accuracy"], two.scores["accuracy"])
    moved = (two.models() - two.server_step.problem.init(0)).abs().amax(1)
    assert float(moved.max()) > 0.02, "models must have moved for this to say anything"
    return one, two


@pytest.mark.parametrize(("limit", "participation"), cases(FEDAVG))
def test_becomes_fedavg(limit, participation, tmp_path):
    one, _ = agree(limit, "fedavg", participation, tmp_path)
    assert_close(one.models(), one.models()[:1].expand(len(one.served), -1))


@pytest.mark.parametrize(("limit", "participation"), cases(LOCAL))
def test_becomes_local_training(limit, participation, tmp_path):
    one, two = agree(limit, "local", participation, tmp_path)
    if len(one.served) > 1:
        apart = torch.cdist(one.models(), one.models()) + 1e9 * torch.eye(len(one.served))
        visited = np.unique(np.concatenate([notes.client for notes in one.notes]))
        assert float(apart[visited][:, visited].min()) > 0.01
        labels = one.server_step.algorithm.labels(one.server)
        assert_array_equal(np.unique(labels), np.unique(two.server_step.algorithm.labels(two.server)))


@pytest.mark.parametrize(("limit", "participation"), cases(ORACLE))
def test_becomes_the_oracle(limit, participation, tmp_path):
    one, two = agree(limit, "oracle", participation, tmp_path)
    assert_array_equal(
        one.server_step.algorithm.labels(one.server), two.server_step.algorithm.labels(two.server)
    )


def test_scaffold_differs_from_fedavg_after_its_first_step(tmp_path):
    """The control variates are what the limit above leaves out."""
    runs = [
        toy.run(CATALOGUE[name](), toy.Tiny(equal=True), tmp_path / name, 2)
        for name in ("scaffold", "fedavg")
    ]
    assert float((runs[0].models() - runs[1].models()).abs().max()) > 1e-3


def test_fedprox_differs_from_fedavg_when_mu_is_not_zero(tmp_path):
    runs = [toy.run(CATALOGUE["fedprox"](mu=mu), toy.Tiny(), tmp_path / str(mu), 1) for mu in (0.0, 5.0)]
    assert float((runs[0].models() - runs[1].models()).abs().max()) > 1e-3


def _world(n: np.ndarray) -> ProblemInfo:
    vector = torch.zeros(4)
    return ProblemInfo(len(n), 2, n, layout=None, init=lambda j: vector)


def test_ucfl_weighs_by_samples_where_fingerprints_are_equal():
    """All gradients the same: Delta = 0, w_ij = n_j / sum n in every row, whatever the variances."""
    n = np.array([3, 1, 4])
    columns = {"gram": np.full((3, 3), 7.5), "variance": np.array([0.1, 2.0, 9.0])}
    fingerprints = Notes(np.arange(3), n, np.zeros(3, int), np.ones(3, bool), columns)
    server = CATALOGUE["ucfl"]().setup(_world(n), fingerprints, None)
    assert_allclose(server.algorithm_state["collaboration"], np.tile(n / 8, (3, 1)), rtol=1e-15)
    (mixing,) = CATALOGUE["ucfl"]().aggregate(server, fingerprints).mixings
    assert_allclose(mixing.weights, np.tile(average(fingerprints).weights, (3, 1)), rtol=1e-15)
    assert set(server.algorithm_state) == {"collaboration"}, "N x N numbers, once"
    older = replace(
        server,
        algorithm_state={**server.algorithm_state, "weights": server.algorithm_state["collaboration"].copy()},
    )
    (same,) = CATALOGUE["ucfl"]().aggregate(older, fingerprints).mixings
    assert_array_equal(same.weights, mixing.weights)


def test_ucfl_is_the_identity_where_the_variance_vanishes():
    n = np.array([3, 1, 4])
    gram = np.diag([1.0, 2.0, 3.0])
    fingerprints = Notes(
        np.arange(3), n, np.zeros(3, int), np.ones(3, bool), {"gram": gram, "variance": np.zeros(3)}
    )
    for kernel in ("paper", "geo"):
        server = CATALOGUE["ucfl"](kernel=kernel).setup(_world(n), fingerprints, None)
        assert_array_equal(server.algorithm_state["collaboration"], np.eye(3))


def test_ucfl_by_hand():
    """g = 0, 1, 3 in one dimension, sigma^2 = 0.5, 2, 1/2; n = 1, 1, 2.

    Row 0: 1, e^-1, 2 e^-9 (Delta 0, 1, 9; 2 sigma^2 = 1). Row 1: e^-1/4, 1, 2 e^-1 (1, 0, 4; 4).
    """
    g = np.array([0.0, 1.0, 3.0])
    fingerprints = Notes(
        np.arange(3),
        np.array([1, 1, 2]),
        np.zeros(3, int),
        np.ones(3, bool),
        {"gram": np.outer(g, g), "variance": np.array([0.5, 2.0, 0.5])},
    )
    W = (
        CATALOGUE["ucfl"]()
        .setup(_world(fingerprints.num_samples), fingerprints, None)
        .algorithm_state["collaboration"]
    )
    rows = np.array([[1, np.exp(-1), 2 * np.exp(-9)], [np.exp(-0.25), 1, 2 * np.exp(-1)]])
    assert_allclose(W[:2], rows / rows.sum(1, keepdims=True), rtol=1e-12)
