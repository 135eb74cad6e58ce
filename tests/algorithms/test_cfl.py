"""CFL by hand: when a cluster splits, who leaves, and what becomes of absent members."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import apply_plan
from mpifl.core.parameters import Layout
from mpifl.core.plan import Plan
from mpifl.core.types import Server

UPDATES = np.array([[1.0, 0.0], [-1.0, 0.1], [1.0, 0.1], [-1.0, -0.2]])


def tree(num_clients: int, model: list[list[float]], version: int = 5) -> Server:
    """Return a server of CFL whose rows are leaves, with no updates of halves."""
    state = {"children": [[-1, -1]] * len(model), "cached": [[-1, -1]], "cached_norm": [0.0]}
    return byhand.server(num_clients, state, version, model=model, update=[[0.0, 0.0]])


def split(
    options: dict, updates: np.ndarray = UPDATES, version: int = 5
) -> tuple[np.ndarray, np.ndarray, object]:
    """Return weights, keep and assignment after one step of CFL on a single cluster."""
    server = tree(len(updates), [[0.0, 0.0]], version)
    notes = byhand.notes([1, 2, 3, 4][: len(updates)], gram=updates @ updates.T)
    plan = CATALOGUE["cfl"](**{"eps1": 0.4, "eps2": 0.9, "warmup": 5, **options}).aggregate(server, notes)
    (mixing,) = plan.mixings
    assert mixing.of == "delta"
    return mixing.weights, mixing.keep, plan.assign


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_cfl_splits_where_updates_cancel(linkage):
    """Updates (1, 0), (-1, .1), (1, .1), (-1, -.2): mean 0 (< 0.4), longest 1.02 (> 0.9): {0, 2} and {1, 3}.

    Both children start from the parent's row and take the mean update of their members.
    """
    weights, keep, assign = split({"linkage": linkage})
    assert_array_equal(assign == assign[0], [True, False, True, False])
    assert sorted(map(tuple, weights.tolist())) == [(0.0, 0.5, 0.0, 0.5), (0.5, 0.0, 0.5, 0.0)]
    assert_array_equal(keep, [[1.0], [1.0]])
    for k, row in enumerate(weights):
        assert_array_equal(np.flatnonzero(row), np.flatnonzero(assign == k))


@pytest.mark.parametrize(
    ("options", "updates", "version"),
    [
        ({}, UPDATES, 4),  # still warming up
        ({}, UPDATES[:2], 5),  # two members
        ({"eps2": 1.1}, UPDATES, 5),  # nobody moves much
        ({}, np.abs(UPDATES), 5),  # all move one way: the mean is long
        ({"gamma_max": 1.0}, UPDATES, 5),  # sqrt((1 - alpha) / 2) < 1
    ],
    ids=["warm-up", "two members", "short updates", "long mean", "gamma"],
)
def test_cfl_does_not_split_otherwise(options, updates, version):
    weights, keep, assign = split(options, updates, version)
    assert_allclose(weights, np.full((1, len(updates)), 1 / len(updates)))
    assert_array_equal(keep, [[1.0]])
    assert_array_equal(assign, 0)


def test_cfl_splits_when_one_client_still_moves():
    """Updates (2, 0), (-0.4, 0), (-0.4, 0.1), (-0.4, -0.1): mean (0.2, 0), longest 2; their mean length is
    0.8, the root of their mean square 1.06.

    0.2 < 0.4 and 2 > 1.5: client 0 leaves. With eps2 = 2.1 nobody moves enough, with eps1 = 0.15 the mean is
    too long.
    """
    updates = np.array([[2.0, 0.0], [-0.4, 0.0], [-0.4, 0.1], [-0.4, -0.1]])
    weights, _, assign = split({"eps2": 1.5}, updates)
    assert_array_equal(assign == assign[0], [True, False, False, False])
    assert sorted(map(tuple, weights.tolist())) == [(0.0, 1 / 3, 1 / 3, 1 / 3), (1.0, 0.0, 0.0, 0.0)]
    for options in ({"eps2": 2.1}, {"eps2": 1.5, "eps1": 0.15}):
        assert_array_equal(split(options, updates)[2], 0)


def test_cfls_linkage_decides_who_leaves():
    """Directions at 0, 50, 110 and 180 degrees: complete linkage joins 0 with 50 and 110 with 180 (50 and 70
    apart); single linkage, in which neighbours chain, leaves 180 alone.
    """
    angles = np.deg2rad([0.0, 50.0, 110.0, 180.0])
    updates = np.stack([np.cos(angles), np.sin(angles)], 1)
    for linkage, apart in (("complete", [0, 0, 1, 1]), ("single", [0, 0, 0, 1])):
        _, _, assign = split({"linkage": linkage, "eps1": 9.0}, updates)
        assert_array_equal(assign != assign[0], np.array(apart, bool))


@pytest.mark.parametrize(
    ("bound", "shortest", "splits"),
    [(0.9, 1.0, True), (1.0, 1.0, False), (-1, 1.0, True), (-1, 0.001, False)],
)
def test_cfl_may_ask_that_clients_are_near_the_mean_of_their_side(bound, shortest, splits):
    """Updates (1, 0), (1, 1), (-1, 0), (-2, 0): sides {0, 1} and {2, 3}; the largest cosine across is
    -1 / sqrt 2: gamma must be below sqrt((1 + 0.7071) / 2) = 0.9239.

    Measured, gamma_i = ||dw_i - mean|| / ||mean|| is 0.5 / sqrt(1.25) = 0.447 on the first side and 0.5 / 1.5
    = 0.333 on the second, or with (-0.001, 0) for (-1, 0) there 0.9995 / 1.0005 = 0.999.
    """
    updates = np.array([[1.0, 0.0], [1.0, 1.0], [-shortest, 0.0], [-2.0, 0.0]])
    _, _, assign = split({"gamma_max": bound, "eps1": 9.0}, updates)
    assert_array_equal(assign != assign[0], [False, False, splits, splits])


def test_the_client_farthest_from_the_mean_of_its_side_decides():
    """(1, 0), (1, 0), (1, 1.5) and (-1, 0): cosine across at most -0.5547, bound 0.8817. The third is
    1 from the mean (1, 0.5), whose length is 1.118: 0.894, too far; the root mean square would be 0.632.
    """
    updates = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.5], [-1.0, 0.0]])
    _, _, assign = split({"gamma_max": -1, "eps1": 9.0}, updates)
    assert_array_equal(assign, 0)
    updates[2, 1] = 1.4  # 0.9333 of 1.1035: 0.8457, bound 0.8892
    assert_array_equal(split({"gamma_max": -1, "eps1": 9.0}, updates)[2] != 0, [False, False, False, True])


def carried_out(server: Server, plan: Plan, **uploads: np.ndarray) -> Server:
    """Return the server after a plan, its rows by NumPy."""
    tables = {name: rows.numpy().astype(float) for name, rows in server.tables.items()}
    for m in plan.mixings:
        tables[m.into] = m.keep @ tables[m.into] + m.weights @ uploads[m.of]
    return apply_plan(server, plan, {name: torch.tensor(rows) for name, rows in tables.items()})


def test_absent_members_of_a_cluster_that_splits_descend_its_tree():
    """Of cluster 0 = {0, .., 5} clients 1, 2 and 3 take part; updates (-1, .1), (1, .1), (-1, -.2): 2 leaves.

    The others wait at row 2, which stays (5, 5), as does none of the children. Client 0 moves by (1, 0) from
    there: nearest to that of client 2, row 1. Clients 4 and 5 move by (-1, .5) and (-2, 2): cosines 0.92 and
    0.78 with client 1, -0.84 and -0.64 with client 2. Their visits enter no average; afterwards nobody waits,
    and the updates are dropped.
    """
    method, three = CATALOGUE["cfl"](eps1=9.0, eps2=0.0, warmup=5), UPDATES[1:4]
    server = tree(6, [[5.0, 5.0]])
    plan = method.aggregate(server, byhand.notes([1] * 3, [1, 2, 3], gram=three @ three.T))
    assert_array_equal(plan.assign, [2, 0, 1, 0, 2, 2])
    server = carried_out(server, plan, delta=three, update=three)
    assert_allclose(server.tables["model"], [[4, 4.95], [6, 5.1], [5, 5]])
    assert_allclose(server.tables["update"], [[0, 0], *three])
    for who, dw, placed in (
        ([0, 2], [[1.0, 0.0], [3.0, 0.0]], [1, 0, 1, 0, 2, 2]),
        ([1, 4, 5], [[0.0, 1.0], [-1.0, 0.5], [-2.0, 2.0]], [1, 0, 1, 0, 0, 0]),
    ):
        before, dw = server.tables["model"].numpy(), np.array(dw)
        apart = np.linalg.norm(dw[:, None] - server.tables["update"].numpy(), axis=2)
        plan = method.aggregate(server, byhand.notes([1] * len(who), who, gram=dw @ dw.T, row_distance=apart))
        assert_array_equal(plan.assign, placed)
        server = carried_out(server, plan, delta=dw, update=dw)
        moved = before + ([[0, 0], [3, 0], [0, 0]] if 2 in who else [[0, 1], [0, 0], [0, 0]])
        assert_allclose(server.tables["model"], moved)
    assert_array_equal(server.tables["update"], [[0, 0]])
    assert_array_equal(server.algorithm_state["cached"], [[-1, -1]])


def test_whoever_waits_above_a_cluster_that_splits_finds_its_halves():
    """Client 6 waits at row 2 above clusters 0 = {0, 1, 2} and 1. All of cluster 0 take part as it splits
    into {0, 2} and {1}: w_0 stays as row 4, in the place of 0. Client 6 then comes down in two visits.
    """
    method = CATALOGUE["cfl"](eps1=9.0, eps2=0.0, warmup=5)
    state = {
        "children": [[-1, -1], [-1, -1], [0, 1]],
        "cached": [[-1, -1], [2, 0], [2, 1]],
        "cached_norm": [0.0, 1.0, 1.0],
    }
    rows = [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    server = byhand.server(7, state, 9, model=rows, update=[[0.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    server.assign[:] = [0, 0, 0, 1, 1, 1, 2]
    dw = UPDATES[:3]
    apart = np.linalg.norm(dw[:, None] - server.tables["update"].numpy(), axis=2)
    plan = method.aggregate(server, byhand.notes([1] * 3, gram=dw @ dw.T, row_distance=apart))
    assert_array_equal(plan.algorithm_state["children"], [[-1, -1], [-1, -1], [4, 1], [-1, -1], [0, 3]])
    assert_array_equal(plan.assign, [0, 3, 0, 1, 1, 1, 2])
    server = carried_out(server, plan, delta=dw, update=dw)
    assert_allclose(server.tables["model"][4], [0, 0])
    for moved, row in (([0.1, 2.0], 4), ([-3.0, 0.0], 3)):
        mine = np.array([moved])
        apart = np.linalg.norm(mine[:, None] - server.tables["update"].numpy(), axis=2)
        plan = method.aggregate(server, byhand.notes([1], [6], gram=mine @ mine.T, row_distance=apart))
        server = carried_out(server, plan, delta=mine, update=mine)
        assert server.assign[6] == row
    assert len(server.tables["update"]) == 1


def test_who_waits_goes_where_updates_point_the_same_way_however_long_they_are():
    """(1, 0.2) points as (10, 0) does (cosine 0.98), and is nearer to (0, 0.5) (cosine 0.2)."""
    state = {
        "children": [[-1, -1], [-1, -1], [0, 1]],
        "cached": [[-1, -1], [2, 0], [2, 1]],
        "cached_norm": [0.0, 10.0, 0.5],
    }
    updates = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 0.5]])
    server = byhand.server(3, state, 9, model=[[0.0, 0.0]] * 3, update=updates.tolist())
    server.assign[:] = [0, 1, 2]
    mine = np.array([[1.0, 0.2]])
    apart = np.linalg.norm(mine[:, None] - updates, axis=2)
    told = byhand.notes([1], [2], gram=mine @ mine.T, row_distance=apart)
    assert_array_equal(CATALOGUE["cfl"]().aggregate(server, told).assign, [0, 1, 0])


def test_members_of_cfl_are_clients_though_a_buffer_holds_two_uploads_of_one():
    """Four uploads of two clients are two members, who do not split. With a third client the last upload of
    client 0, (-1, -0.2), is near that of client 1; its first, (1, 0), moves the same row."""
    method = CATALOGUE["cfl"](eps1=9.0, eps2=0.0, warmup=5)
    for who, assign, weights in (
        ([0, 1, 0, 1], [0, 0, 0, 0], [[1 / 4] * 4]),
        ([0, 1, 2, 0], [0, 0, 1, 2], [[1 / 3, 1 / 3, 0, 1 / 3], [0, 0, 1, 0], [0] * 4]),
    ):
        notes = byhand.notes([1] * 4, who, gram=UPDATES @ UPDATES.T)
        plan = method.aggregate(tree(4, [[0.0, 0.0]]), notes)
        assert_array_equal(plan.assign, assign)
        assert_allclose(plan.mixings[0].weights, weights)


def test_without_absent_members_cfl_keeps_no_tree():
    plan = CATALOGUE["cfl"](eps1=9.0, eps2=0.0, warmup=5).aggregate(
        tree(4, [[0.0, 0.0]]), byhand.notes([1] * 4, gram=UPDATES @ UPDATES.T)
    )
    assert_array_equal(plan.algorithm_state["children"], [[-1, -1], [-1, -1]])
    assert [m.into for m in plan.mixings] == ["model"]


def test_clients_that_come_after_a_split_of_cfl_find_their_group(tmp_path):
    """Two groups of six, half of the clients in each round, one split: everyone ends with its own group."""
    method = CATALOGUE["cfl"](warmup=1, eps1=0.5, eps2=0.0)
    done = toy.run(method, toy.Tiny(12, equal=True), tmp_path, steps=12, participation=0.5, local=toy.LOCAL)
    rows = [set(done.server.assign[g].tolist()) for g in (slice(0, 6), slice(6, 12))]
    assert len(done.server.tables["model"]) >= 3
    assert not rows[0] & rows[1]


def test_a_child_starts_from_its_parents_row():
    """Cluster 1 = {1, 2, 3} splits into rows 1 and 2, both from row 1; cluster 0 = {0} keeps its own."""
    server = tree(4, [[3.0, 0.0], [5.0, 0.0]])
    server.assign[:] = [0, 1, 1, 1]
    plan = CATALOGUE["cfl"](eps1=9.0, eps2=0.0, warmup=5).aggregate(
        server, byhand.notes([1] * 4, gram=UPDATES @ UPDATES.T)
    )
    assert_array_equal(plan.mixings[0].keep, [[1, 0], [0, 1], [0, 1]])
    assert_array_equal(plan.assign, [0, 1, 2, 1])


def test_a_visit_of_cfl_compares_parameters_and_under_emdcfl_everything():
    """A model of one parameter and one running mean, from (0, 0) towards (4, 2), eta = 0.5: dw = (2, 1)."""
    client = byhand.Quadratic([4.0, 2.0])
    client.layout = Layout(("w", "mean"), ((1,), (1,)), 1)
    for variant, compared in (("paper", [2.0]), ("emdcfl", [2.0, 1.0])):
        method = CATALOGUE["cfl"](variant=variant)
        report, _ = method.local_update(byhand.message(model=[[0.0, 0.0]]), {}, client, byhand.KEY)
        assert_close(report.vectors["delta"], torch.tensor([2.0, 1.0]))
        assert_close(report.vectors["update"], torch.tensor(compared))
        assert report.unsent == ("update",)


def test_cfl_weighs_by_samples_if_asked_and_under_emdcfl():
    for options in ({"weighted": True}, {"variant": "emdcfl"}):
        assert_allclose(split({"eps1": 0.0, **options})[0], [[0.1, 0.2, 0.3, 0.4]])
    assert_allclose(split({"eps1": 0.0, "variant": "emdcfl", "weighted": False})[0], [[0.25] * 4])


@pytest.mark.parametrize(("variant", "first"), [("paper", 20), ("emdcfl", 1)])
def test_cfl_splits_after_20_rounds_and_under_emdcfl_from_the_second_on(variant, first):
    options = {"variant": variant, "warmup": None}
    splits = [len(split(options, version=t)[0]) == 2 for t in range(22)]
    assert_array_equal(splits, [t >= first for t in range(22)])
