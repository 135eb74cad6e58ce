"""The first methods by hand: FedProx, SCAFFOLD, IFCA, FedPer, CFL, EMD-CFL, Oracle, UCFL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, worlds
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import apply_plan
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData, Split
from mpifl.core.mixing import Plan
from mpifl.core.parameters import Layout
from mpifl.core.rng import key
from mpifl.core.types import Server
from mpifl.training.corrections import proximal, unsquared

PROX = {
    "standard": (2.0, 1.75),  # 1 -> 1 + 1.5 = 2.5 -> 2.5 - 0.5 (-1.5 + 2 * 1.5)
    "unsquared": (1.0, 2.75),  # 1 -> 2.5 -> 2.5 - 0.5 (-1.5 + 1)
}


@pytest.mark.parametrize("variant", PROX)
def test_fedprox_pulls_towards_the_global_model(variant):
    """F(w) = (w - 4)^2 / 2, eta = 0.5, x = 1: the first step has no pull, the second has mu (w - x) or mu."""
    mu, expected = PROX[variant]
    method = CATALOGUE["fedprox"](mu=mu, variant=variant)
    client = byhand.Quadratic([4.0], lr=0.5, steps=2)
    report, _ = method.local_update(byhand.message(model=[[1.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([expected]))


def test_the_unsquared_pull_has_length_mu_in_every_tensor():
    """Tensors (3, 4) and (0, 5) and a running mean, anchored at (0, 0), (0, 0): mu = 2 times (0.6, 0.8), (0,
    1).

    A tensor that is where it was is not pulled. Whole vectors would be divided by sqrt(50).
    """
    layout = Layout(("a", "b", "mean"), ((2,), (2,), (1,)), 4)
    pull = unsquared(2.0, torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0]), layout)
    w, g = torch.tensor([3.0, 4.0, 0.0, 5.0]), torch.ones(4)
    assert_close(pull(g, w), torch.tensor([2.2, 2.6, 1.0, 3.0]))
    assert_close(pull(g, torch.tensor([0.0, 0.0, 0.0, 5.0])), torch.tensor([1.0, 1.0, 1.0, 3.0]))


def test_the_proximal_pull_leaves_running_statistics_alone():
    pull = proximal(2.0, torch.tensor([1.0, 9.0]))
    assert_close(pull(torch.tensor([0.5]), torch.tensor([4.0])), torch.tensor([6.5]))


def test_a_visit_of_scaffold():
    """F(y) = (y - 4)^2 / 2, eta = 0.5, x = 0, c = 1, c_k = 0: y = 0, then 1.5, then 1.5 + 0.75 = 2.25.

    c_k+ = 0 - 1 + (0 - 2.25) / (2 * 0.5) = -3.25; it sends 2.25 and -3.25. Next visit with c = 0, x = 2.25:
    drift 3.25, y = 2.25 - 0.5 (-1.75 + 3.25) = 1.5, then 1.5 - 0.5 (-2.5 + 3.25) = 1.125;
    c_k+ = -3.25 + (2.25 - 1.125) = -2.125.
    """
    method, client = CATALOGUE["scaffold"](), byhand.Quadratic([4.0], lr=0.5, steps=2)
    told = byhand.message(model=[[0.0]], control=[[1.0]])
    report, state = method.local_update(told, {}, client, byhand.KEY)
    assert_close(dict(report.vectors), {"model": torch.tensor([2.25]), "control": torch.tensor([-3.25])})
    assert_close(state["control"], torch.tensor([-3.25]))
    told = byhand.message(model=[[2.25]], control=[[0.0]])
    report, state = method.local_update(told, state, client, byhand.KEY)
    assert_close(dict(report.vectors), {"model": torch.tensor([-1.125]), "control": torch.tensor([1.125])})
    assert_close(state["control"], torch.tensor([-2.125]))


def test_the_server_of_scaffold():
    """2 of 4 clients, eta_g = 0.5: x += 0.5 (dy_1 + dy_2) / 2; c += (dc_1 + dc_2) / 4; all count alike."""
    server = byhand.server(4, model=[[0.0]], control=[[0.0]])
    plan = CATALOGUE["scaffold"](server_lr=0.5).aggregate(server, byhand.notes([1, 99], [0, 3]))
    x, c = plan.mixings
    assert (x.into, c.into, c.of) == ("model", "control", "control")
    assert_allclose(x.weights, [[0.25, 0.25]])
    assert_allclose(c.weights, [[0.25, 0.25]])
    assert_allclose(x.keep, [1.0])
    assert_allclose(c.keep, [1.0])


def test_a_client_of_ifca_trains_the_model_that_fits_best():
    """Models 0, 5, 9 for F(w) = (w - 4)^2 / 2: model 1; one step of 0.5: 5 - 0.5 = 4.5."""
    method = CATALOGUE["ifca"](num_clusters=3)
    told = byhand.message(model=[[0.0], [5.0], [9.0]])
    report, _ = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert int(report.notes["cluster"]) == 1
    assert_close(report.vectors["model"], torch.tensor([4.5]))


@pytest.mark.parametrize(("select_on", "cluster", "trained"), [("train", 1, 4.5), ("val", 2, 6.5)])
def test_a_client_of_ifca_compares_where_it_is_told_and_trains_on_its_training_data(
    select_on, cluster, trained
):
    """Targets: 4 in training, 10 in validation, 0 in test. Nearest of the models 0, 5, 9 are 5, 9 and 0.

    One step of 0.5 towards the training target: 5 - 0.5 = 4.5, or 9 - 2.5 = 6.5.
    """
    method = CATALOGUE["ifca"](num_clusters=3, select_on=select_on)
    client = byhand.Quadratic([4.0], val=[10.0], test=[0.0])
    report, _ = method.local_update(byhand.message(model=[[0.0], [5.0], [9.0]]), {}, client, byhand.KEY)
    assert int(report.notes["cluster"]) == cluster
    assert_close(report.vectors["model"], torch.tensor([trained]))
    sets = {"models": torch.tensor([[0.0], [9.0], [0.0], [5.0], [0.0], [9.0]])}
    tried = CATALOGUE["ifca"](num_clusters=3, restarts=2, select_on=select_on).fingerprint(
        client, sets, byhand.KEY
    )
    assert_array_equal(tried.notes["tried"], [0, 0] if select_on == "train" else [1, 2])


def test_ifca_under_emdcfl_compares_means_of_batches_of_the_validation_data():
    """Losses 2 on 64 samples and 1 on one more, against 1.6 on all: the mean over samples prefers the second,
    1.98 > 1.6, the mean of the means of both batches, 1.5, the first. On training data the third is best.
    """

    class Client(byhand.Told):
        def loss(self, vector, split=None):
            return float(self.losses(vector, split).mean())

        @property
        def data(self):
            return ClientData(byhand.images(0, 2), byhand.images(1, 65), byhand.images(2, 2))

    losses = [[9.0, 9.0], [9.0, 9.0], [0.0, 0.0]]
    client = Client(losses, val=[[2.0] * 64 + [1.0], [1.6] * 65, [9.0] * 65])
    models = byhand.message(model=[[0.0], [1.0], [2.0]])
    for options, chosen in (
        ({"variant": "emdcfl"}, 0),
        ({"select_on": "val", "loss_batch": 64}, 0),
        ({"variant": "emdcfl", "loss_batch": 0}, 1),
        ({"select_on": "val"}, 1),
        ({"variant": "emdcfl", "select_on": "train"}, 2),
        ({}, 2),
    ):
        assert int(CATALOGUE["ifca"](num_clusters=3, **options).model_of(models, {}, client)[0]) == chosen
    method = CATALOGUE["ifca"](num_clusters=3, variant="emdcfl")
    assert method.needs.validation
    (mixing,) = method.aggregate(
        byhand.server(2, model=[[0.0]] * 3), byhand.notes([1, 3], cluster=[1, 1])
    ).mixings
    assert_allclose(mixing.weights[1], [0.25, 0.75])


@pytest.mark.parametrize(("weighted", "row"), [(False, [0.5, 0.5, 0]), (True, [0.25, 0.75, 0])])
def test_the_server_of_ifca_keeps_an_empty_cluster_and_remembers_choices(weighted, row):
    """Clients 0, 2 chose 1, client 3 chose 0, nobody 2; client 1 was away."""
    method = CATALOGUE["ifca"](num_clusters=3, weighted=weighted)
    server = byhand.server(4, model=[[0.0], [5.0], [9.0]])
    plan = method.aggregate(server, byhand.notes([1, 3, 2], [0, 2, 3], cluster=[1, 1, 0]))
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights, [[0, 0, 1], row, [0, 0, 0]])
    assert_array_equal(mixing.keep, [0, 0, 1])
    assert_array_equal(plan.assign, [1, 0, 1, 0])


def test_fedper_shares_the_body_and_nothing_else(tmp_path):
    done = worlds.run(CATALOGUE["fedper"](), worlds.Tiny(), tmp_path, steps=2)
    layout = done.server_step.problem.layout
    (body,), (head,) = layout.part("body"), layout.part("head")
    models = done.models()
    assert_close(models[:, body], done.server.tables["body"].expand(6, -1), rtol=0, atol=0)
    assert float(torch.pdist(models[:, head]).min()) > 1e-3
    assert done.server.tables["body"].shape == (1, body.stop - body.start)


def test_fedper_is_fine_tuned_where_asked_and_trains_alike(tmp_path):
    tuned, plain = (
        worlds.run(CATALOGUE["fedper"](tune_epochs=n), worlds.Tiny(), tmp_path / str(n), steps=2)
        for n in (3, 0)
    )
    assert_close(tuned.models(), plain.models(), rtol=0, atol=0)
    assert_array_equal(tuned.scores["loss_initial"], plain.scores["loss"])
    assert tuned.scores["loss"].mean() < plain.scores["loss"].mean() - 0.02
    assert "loss_initial" not in plain.scores
    with pytest.raises(UserError, match="tune_epochs"):
        CATALOGUE["fedper"](tune_epochs=-1)


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
    done = worlds.run(
        method, worlds.Tiny(12, equal=True), tmp_path, steps=12, participation=0.5, local=worlds.LOCAL
    )
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


def linked(distance: list[list[float]], n: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, assignment and labels of EMD-CFL's first round with epsilon 0.1."""
    method, server = CATALOGUE["emdcfl"](epsilon=0.1), byhand.server(len(n), model=[[0.0]])
    peer = np.tile(np.arange(len(n)), (len(n), 1))
    plan = method.aggregate(server, byhand.notes(n, distance=distance, peer=peer))
    (mixing,) = plan.mixings
    return mixing.weights, plan.assign, plan.algorithm_state["labels"]


def test_emdcfl_averages_neighbourhoods_which_need_not_be_clusters():
    """0 ~ 1 ~ 2, not 0 ~ 2; n = 1, 2, 3: rows (1, 2, 0) / 3, (1, 2, 3) / 6, (0, 2, 3) / 5."""
    near, far = 0.05, 0.5
    weights, assign, labels = linked([[0, near, far], [near, 0, near], [far, near, 0]], [1, 2, 3])
    assert_allclose(weights, [[1 / 3, 2 / 3, 0], [1 / 6, 2 / 6, 3 / 6], [0, 2 / 5, 3 / 5]])
    assert_array_equal(assign, [0, 1, 2])
    assert_array_equal(labels, [0, 1, 2])


def test_emdcfl_links_only_where_both_are_near_and_everyone_with_itself():
    """0 finds 1 near, 1 finds 0 far; 2 and 3 are near although 3 is far from itself; 0.1 is not below 0.1."""
    distance = np.full((4, 4), 0.9)
    distance[0, 1] = distance[2, 3] = distance[3, 2] = 0.05
    distance[0, 2] = distance[2, 0] = 0.1
    distance[1, 2], distance[2, 1] = 0.05, 0.1
    weights, _, labels = linked(distance.tolist(), [1, 1, 1, 3])
    assert_array_equal(labels, [0, 1, 2, 2])
    assert_allclose(weights, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.25, 0.75]])


class Seen(byhand.Quadratic):
    """A client whose images are told: training, validation, test; under w the embedding of x is w x."""

    def __init__(self, number: int, *splits: list[float]) -> None:
        super().__init__([1.0, 1.0], init=[0.0, 0.0])
        self.layout = Layout(("body.w", "head.weight"), ((1,), (1,)), 2, ("head",))
        self.id = number
        self._data = ClientData(
            *(Split(torch.tensor(x)[:, None], torch.zeros(len(x)).long()) for x in splits)
        )

    data = property(lambda self: self._data)

    def embed(self, vector, x, *, train_mode=False):
        return vector[0] * x


class Neighbour:
    """Another client, and what was told to it and asked of it."""

    def __init__(self, client: Seen, wanted: bool = True) -> None:
        self.id, self.client, self.told, self.asked, self.wanted = client.id, client, [], [], wanted

    def send(self, payload):
        self.told.append(payload)

    def ask(self, payload, answer):
        self.asked.append(payload)
        return answer(self.client, payload)


@pytest.mark.parametrize(("against", "distance"), [("val", 8.0), ("train", 18.0)])
def test_a_client_of_emdcfl_measures_others_under_its_own_extractor(against, distance):
    """Extractor 2; own images 0 and 2 in training, 1 and 3 in validation: tau = 2 |1 - 0| = 2.

    The other has 5, 7 in validation: 2 * 5 = 10, less tau 8; in training 10, 12: 20 - 2 = 18. Test images, 90
    and 99, count nowhere.
    """
    own = Seen(0, [0.0, 2.0], [1.0, 3.0], [90.0, 90.0])
    other = Neighbour(Seen(1, [10.0, 12.0], [5.0, 7.0], [99.0, 99.0]))
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, against=against)
    look = method.probe(own, {"model": torch.tensor([2.0, 7.0])}, [Neighbour(own), other], byhand.KEY)
    assert_allclose(look.findings["distance"], [0.0, distance], atol=1e-4)
    assert_allclose(look.notes["tau"], 2.0, rtol=1e-6)
    assert_close(other.asked[0], torch.tensor([2.0]))
    assert_close(other.told[0].abs().sort(0).values, torch.tensor([[0.0], [4.0]]))


def test_emdcfl_looks_at_no_more_images_than_its_cap():
    """Five images each, cap 3: three embeddings go to the other."""
    own, other = Seen(0, [1.0] * 5, [1.0] * 5, [9.0]), Neighbour(Seen(1, [4.0] * 5, [4.0] * 5, [9.0]))
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, sample_cap=3)
    look = method.probe(own, {"model": torch.tensor([1.0, 0.0])}, [other], byhand.KEY)
    assert len(other.told[0]) == 3
    assert_allclose(look.findings["distance"], [3.0], atol=1e-4)


@pytest.mark.parametrize(("share", "sent"), [(1.0, 20), (0.25, 7), (0.01, 2)])
def test_emdcfl_takes_a_share_of_a_clients_images(share, sent):
    """Of 20 images in training and 8 in validation 0.25 are 7, and two are the least; no cap of 512."""
    own, other = Seen(0, [1.0] * 20, [1.0] * 8, [9.0]), Neighbour(Seen(1, [4.0] * 20, [4.0] * 8, [9.0]))
    own.num_samples = other.client.num_samples = 20
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0, sample_share=share)
    method.probe(own, {"model": torch.tensor([1.0, 0.0])}, [other], byhand.KEY)
    assert len(other.told[0]) == sent
    answered = method._embed(other.client, torch.tensor([1.0]), "val", byhand.KEY)
    assert len(answered) == min(sent, 8)


def test_emdcfl_exchanges_nothing_with_those_it_does_not_look_at():
    own = Seen(0, [0.0, 2.0], [1.0, 3.0], [9.0])
    others = [Neighbour(Seen(k, [10.0, 12.0], [5.0, 7.0], [9.0]), wanted=k == 2) for k in (1, 2)]
    method = CATALOGUE["emdcfl"](metric="euclidean", projection=1.0)
    look = method.probe(own, {"model": torch.tensor([2.0, 7.0])}, [Neighbour(own), *others], byhand.KEY)
    assert_allclose(look.findings["distance"], [0.0, np.nan, 8.0], atol=1e-4)
    assert_array_equal(look.findings["peer"], [0, 1, 2])
    assert [len(o.asked) for o in others] == [0, 1]


@pytest.mark.parametrize(
    ("looks", "pairs"),
    [
        ("together", [[False, False, False], [False, False, True], [False, True, False]]),
        ("once", [[False, False, True], [False, False, True], [True, True, False]]),
        ("seen", [[True] * 3] * 3),
    ],
)
def test_pairs_of_emdcfl_look_once_and_in_the_repository_again_and_again(looks, pairs):
    """0 and 1 have looked at each other; now 1 and 2 take part, 0 was seen before."""
    W = np.full((4, 4), np.nan)
    W[:2, :2] = [[0, 0.3], [0.2, 0]]
    server = byhand.server(4, {"distance": W}, model=[[0.0]])
    clients, fresh = np.array([0, 1, 2]), np.array([False, True, True])
    assert_array_equal(CATALOGUE["emdcfl"](looks=looks).pairs(server, clients, fresh), pairs)


def test_what_pairs_of_emdcfl_found_once_counts_for_ever():
    """0 ~ 1 were found near in round 1; round 2 adds 1 ~ 2, 0 is absent. 0 and 2 have not met, 3 nobody."""
    W = np.full((4, 4), np.nan)
    W[:2, :2] = [[0, 0.01], [0.01, 0]]
    server = byhand.server(4, {"distance": W}, version=1, model=[[0.0]])
    nobody = [np.nan] * 3
    new, peer = [nobody, [np.nan, 0, 0.02], [np.nan, 0.02, 0]], [nobody, [0, 1, 2], [0, 1, 2]]
    notes = byhand.notes([1, 1, 2], [0, 1, 2], distance=new, peer=peer)
    plan = CATALOGUE["emdcfl"](epsilon=0.1).aggregate(server, notes)
    found = plan.algorithm_state["distance"]
    assert_allclose(found[:3, :3], [[0, 0.01, np.nan], [0.01, 0, 0.02], [np.nan, 0.02, 0]])
    assert np.isnan(found[3]).all()
    assert_array_equal(
        plan.algorithm_state["linked"], [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    )
    assert "frozen" not in plan.algorithm_state


def test_emdcfl_finds_the_groups_and_freezes_them(tmp_path):
    done = worlds.run(CATALOGUE["emdcfl"](epsilon=0.1), worlds.Tiny(), tmp_path)
    assert_array_equal(done.server.algorithm_state["labels"], [0, 0, 0, 1, 1, 1])
    W = done.server.algorithm_state["distance"]
    assert_array_equal(np.diag(W), 0)
    assert W[:3, :3].max() < 0.1 < W[:3, 3:].min()
    assert "distance" not in done.notes[1].columns, "one look is enough"
    assert_array_equal(W, np.round(W, 4))


def test_the_projection_of_emdcfl_has_rows_of_unit_length_and_belongs_to_its_client():
    from mpifl.algorithms.emdcfl import _projection

    R = _projection(40, 36, key(0, "probe", 1))
    assert R.shape == (40, 36)
    assert_close(R.norm(dim=1), torch.ones(40))
    assert_close(R, _projection(40, 36, key(0, "probe", 1)), rtol=0, atol=0)
    assert float((R - _projection(40, 36, key(0, "probe", 2))).abs().max()) > 0.1


def test_the_oracle_averages_true_groups_and_leaves_strangers_alone():
    """Groups 0, 0, 1, 1; n = 1, 3, 2; client 3 never came: it keeps the initial row, alone."""
    server = byhand.server(4, {"groups": [0, 0, 1, 1]}, model=[[7.0]])
    plan = CATALOGUE["oracle"]().aggregate(server, byhand.notes([1, 3, 2], [0, 1, 2]))
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights, [[0.25, 0.75, 0], [0, 0, 1], [0, 0, 0]])
    assert_allclose(mixing.keep, [[0], [0], [1]])
    assert_array_equal(plan.assign, [0, 0, 1, 2])
    assert len(np.unique(plan.algorithm_state["labels"])) == 3


def test_ucfls_variance_is_that_of_disjoint_batches():
    """Gradients of batches of 2 of 5 samples around the whole one: (1/2) sum_b |g_b - g|^2, b over the first
    four of a permutation; the fifth sample is in no batch.
    """

    class Client(byhand.Quadratic):
        data = ClientData(*[Split(torch.arange(5.0)[:, None], torch.zeros(5).long())] * 3)

        def gradient(self, vector, split=None):
            return (vector - (split or self.data.train).x).mean(0)

    client = Client([0.0])
    client.num_samples = 5
    k = key(3, "fingerprint", 0)
    order = k.numpy().permutation(5)
    means = [order[:2].mean(), order[2:4].mean()]
    report = CATALOGUE["ucfl"](noise_batch=2).fingerprint(client, {"init": torch.zeros(1, 1)}, k)
    assert_allclose(report.notes["variance"], np.mean([(m - 2.0) ** 2 for m in means]))
    assert_close(report.vectors["gradient"], torch.tensor([-2.0]))


def two_streams(parallel: bool = True) -> tuple[object, object]:
    """Return UCFL with two streams of three users, and its server: W = (1/2, 3/8, 1/8), (0, 1/4, 3/4)."""
    algorithm_state = {
        "collaboration": np.full((3, 3), 1 / 3),
        "weights": [[0.5, 0.375, 0.125], [0.0, 0.25, 0.75]],
    }
    server = byhand.server(3, algorithm_state, model=[[0.0], [2.0]])
    server.assign[:] = [0, 1, 1]
    return CATALOGUE["ucfl"](streams=2, parallel=parallel), server


def test_in_parallel_every_user_trains_every_stream():
    """From 0 and 2 towards 4, eta = 0.5: 2 and 3. Each stream draws batches of its own."""
    method, server = two_streams()
    assert method.reads(server, 2) == {"model": (0, 1)}
    assert method.serves(server, 2) == {"model": (1,)}
    client, keys = byhand.Quadratic([4.0]), []
    plain = client.sgd
    client.sgd = lambda w, key, **changes: (keys.append(key), plain(w, key, **changes))[1]
    report, _ = method.local_update(byhand.message(model=[[0.0], [2.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([[2.0], [3.0]]))
    assert keys == [byhand.KEY.of("stream", 0), byhand.KEY.of("stream", 1)]
    alone, server = two_streams(parallel=False)
    assert alone.reads(server, 2) == {"model": (1,)}
    report, _ = alone.local_update(byhand.message(model=[[2.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([[3.0]]))
    assert keys[2] == byhand.KEY


def test_in_parallel_a_stream_mixes_its_own_component_of_each_upload():
    """Users 0 and 2 took part: W over them is (4/5, 1/5), (0, 1). Uploads hold two components each."""
    method, server = two_streams()
    (mixing,) = method.aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[4 / 5, 0, 1 / 5, 0], [0, 0, 0, 1]])
    alone, server = two_streams(parallel=False)
    (mixing,) = alone.aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[4 / 5, 1 / 5], [0, 1]])


def test_a_users_own_mixture_is_over_those_who_took_part():
    """W row 0 is (1/2, 1/3, 1/6), row 2 is (1/4, 1/4, 1/2); users 0 and 2 took part; user 1 keeps its row."""
    W = [[1 / 2, 1 / 3, 1 / 6], [1, 0, 0], [1 / 4, 1 / 4, 1 / 2]]
    server = byhand.server(3, {"collaboration": W}, model=[[0.0]] * 3)
    (mixing,) = CATALOGUE["ucfl"]().aggregate(server, byhand.notes([1, 9], client=[0, 2])).mixings
    assert_allclose(mixing.weights, [[3 / 4, 1 / 4], [0, 0], [1 / 3, 2 / 3]])
    assert_array_equal(mixing.keep, [0, 1, 0])
