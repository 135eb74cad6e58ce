"""Hard clustering by hand: FeSEM, CFL-GP, FL+HC, HypCluster, IFCA's variants, PACFL, FedClust, PCA+kM+HC,
FLT,
FlexCFL, and UCFL's kernel.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, worlds
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.clustering.server_plans import linked_clients, pulled, related_plan, related_server
from mpifl.core.capabilities import OneShotStatistics, uses
from mpifl.core.errors import UserError
from mpifl.core.federation import ClientData, Split
from mpifl.core.parameters import Layout
from mpifl.core.types import ProblemInfo

FLAT = Layout(
    ("body.w", "head.weight"), ((1,), (2, 1)), 3, ("head",), num_outputs=2
)  # a body of one number, a head of two


def world(n: list[int], layout: Layout = FLAT) -> ProblemInfo:
    """Return a federation of clients with `n` samples whose j-th initial vector is (j, j, ...)."""
    return ProblemInfo(len(n), 2, np.array(n), layout, lambda j: torch.full((layout.size,), float(j)))


def gram(points: list[list[float]]) -> np.ndarray:
    """Return the products [n, n] of `points`."""
    x = np.array(points)
    return x @ x.T


# ---- FeSEM: models 0, 1, 9 with n = 1, 3, 2 and centres 0, 8

POINTS = [[0.0], [1.0], [9.0]]
APART = [[0.0, 8.0], [1.0, 7.0], [9.0, 1.0]]


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("flt", [[1 / 4, 3 / 4, 0], [0, 0, 1]]),  # by samples
        ("flexcfl", [[1 / 2, 1 / 2, 0], [0, 0, 1]]),  # each the same
        ("emdcfl", [[1 / 4, 3 / 4, 0], [0, 0, 1]]),
    ],
)
def test_fesem_assigns_to_the_nearest_centre_and_averages(variant, weights):
    """0 and 1 are nearest to centre 0, 9 to centre 8."""
    method = CATALOGUE["fesem"](num_clusters=2, variant=variant)
    server = byhand.server(3, version=1, model=[[0.0], [8.0]])
    apart = np.tile(APART, 2) if variant == "flt" else APART  # from the rows, and from the centres of k-means
    plan = method.aggregate(server, byhand.notes([1, 3, 2], gram=gram(POINTS), row_distance=apart))
    assert_allclose(plan.mixings[0].weights[:2], weights)
    if variant == "flt":
        assert_allclose(plan.mixings[0].weights[2:], [[1 / 2, 1 / 2, 0], [0, 0, 1]])
    assert_array_equal(plan.assign, [0, 0, 1])


def test_k_means_of_fesem_goes_on_from_its_own_centres_not_from_the_averages_by_samples():
    """Models 0, 6.9 and 10. Clusters had the means 2 and 9, by samples 5 and 9: 6.9 is nearer to 9 than to 2,
    and nearer to 5 than to 9.
    """
    models, centres, averages = np.array([0.0, 6.9, 10.0]), np.array([2.0, 9.0]), np.array([5.0, 9.0])
    apart = np.abs(models[:, None] - np.concatenate([averages, centres]))
    told = {"n": [1, 3, 2], "gram": gram(models[:, None].tolist()), "row_distance": apart}
    assert_array_equal(averages[np.abs(models[1] - averages).argmin()], 5.0)
    plan = CATALOGUE["fesem"](num_clusters=2).aggregate(
        byhand.server(3, version=1, model=[[5.0], [9.0], [2.0], [9.0]]), byhand.notes(**told)
    )
    assert_array_equal(plan.assign, [0, 1, 1])


def test_fesem_remembers_the_absent_except_under_flexcfl():
    """Client 1 is absent: its last model 1 counts under `flt`, not under `flexcfl`."""
    notes = byhand.notes([1, 3, 2], gram=gram(POINTS), row_distance=APART)
    notes = replace(notes, fresh=np.array([True, False, True]))
    both = replace(notes, columns={**notes.columns, "row_distance": np.tile(APART, 2)})
    server = byhand.server(3, version=1, model=[[0.0], [8.0]])
    first = {
        v: CATALOGUE["fesem"](num_clusters=2, variant=v).aggregate(server, told)
        for v, told in (("flt", both), ("flexcfl", notes))
    }
    assert_allclose(first["flt"].mixings[0].weights[0], [1 / 4, 3 / 4, 0])
    assert_allclose(first["flexcfl"].mixings[0].weights[0], [1, 0, 0])


def test_a_visit_of_fesem_is_held_near_the_centre_under_emdcfl():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, c = 0, mu = 1: 0 -> 2 (no pull at c), then 2 - 0.5 (-2 + 1) = 2.5."""
    client = byhand.Quadratic([4.0], lr=0.5, steps=2)
    method = CATALOGUE["fesem"](variant="emdcfl", mu=1.0)
    report, _ = method.local_update(byhand.message(model=[[0.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([2.5]))


def fesem(assign: list[int], told: dict[str, object], version: int = 1, **options: object) -> np.ndarray:
    """Return the assignment after one step on as many clients."""
    server = byhand.server(len(assign), version=version, model=[[0.0]] * options.get("num_clusters", 2))
    server.assign[:] = assign
    if options.get("variant", "flt") == "flt":  # the rows, then the centres of k-means
        told = {**told, "row_distance": np.tile(told["row_distance"], 2)}
    return CATALOGUE["fesem"](**{"num_clusters": 2, **options}).aggregate(server, byhand.notes(**told)).assign


def test_fesems_later_steps_keep_the_numbers_of_the_centres():
    """Centres 8 and 0: the third client is nearest to the first of them. In the first step clusters are
    numbered as they appear, and under `emdcfl` they stay as they were drawn.
    """
    told = {"n": [1, 3, 2], "gram": gram(POINTS), "row_distance": [row[::-1] for row in APART]}
    assert_array_equal(fesem([0, 0, 0], told), [1, 1, 0])
    assert_array_equal(fesem([0, 0, 0], told, version=0), [0, 0, 1])
    assert_array_equal(fesem([1, 0, 1], told, version=0, variant="emdcfl"), [1, 0, 1])
    assert_array_equal(fesem([1, 0, 1], told, version=1, variant="emdcfl"), [1, 1, 0])


def test_a_centre_that_is_nearest_to_nobody_moves_to_the_farthest_client():
    """Centres 0, 8, 50 for 0, 1, 9: nobody is nearest to 50. Clients 1 and 9 are 1 from their centres, the
    first of them is 1: k-means goes on from 0.5, 9 and 1.
    """
    apart = [[0.0, 8.0, 50.0], [1.0, 7.0, 49.0], [9.0, 1.0, 41.0]]
    told = {"n": [1, 3, 2], "gram": gram(POINTS), "row_distance": apart}
    assert_array_equal(fesem([0, 0, 0], told, num_clusters=3), [0, 2, 1])


def test_fesem_with_fewer_clients_than_centres_has_one_for_each():
    told = {"n": [1, 3], "gram": gram(POINTS[1:]), "row_distance": [row * 2 for row in APART[1:]]}
    assert_array_equal(fesem([0, 0], told, num_clusters=4), [0, 1])


def test_with_initial_models_the_unseen_count_in_k_means_and_in_the_average():
    """w^0 = 2, n = 1, 3, 2, 1, 1. Clients 0 and 1 have taken part, with models 10 and 11: k-means with two
    centres puts them together, (10 + 3 * 11) / 4, and the three at w^0 elsewhere. Without, they are apart.

    Next client 2 has model 3: nearest to w^0, whose centre becomes (2 * 3 + 2 * 2) / 4 = 2.5.
    """
    method = CATALOGUE["fesem"](num_clusters=2, initial_models=True)
    state = {"num_samples": np.array([1, 3, 2, 1, 1]), "moved": np.zeros(2)}
    server = byhand.server(5, state, model=[[2.0]] * 5)
    told = {"gram": gram([[10.0], [11.0]]), "row_distance": [[8.0] * 5, [9.0] * 5]}
    notes = byhand.notes([1, 3], client=[0, 1], **told)
    plan = method.aggregate(server, notes)
    assert plan.assign.tolist() in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])
    near, away = plan.assign[4], plan.assign[0]
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights[[away, 2 + away]], [[1 / 4, 3 / 4], [1 / 2, 1 / 2]])
    assert_allclose(mixing.weights[[near, 2 + near, 4]], 0)
    assert_allclose(mixing.keep[[away, 2 + away]], 0)
    assert_allclose(mixing.keep[[near, 2 + near, 4]], [[0, 0, 0, 0, 1]] * 3)
    assert_allclose(plan.algorithm_state["moved"][[away, near]], [8.5, 0.0])
    alone = byhand.notes([1, 3], client=[0, 1], gram=told["gram"], row_distance=[[8.0] * 4, [9.0] * 4])
    assert_array_equal(CATALOGUE["fesem"](num_clusters=2).aggregate(server, alone).assign[:2], [0, 1])

    rows = np.zeros(5)
    rows[[away, near, 2 + away, 2 + near, 4]] = [10.75, 2.0, 10.5, 2.0, 2.0]
    later = byhand.server(5, dict(plan.algorithm_state), version=1, model=rows[:, None].tolist())
    models = np.array([10.0, 11.0, 3.0])
    told = {"gram": gram(models[:, None].tolist()), "row_distance": np.abs(models[:, None] - rows)}
    plan = method.aggregate(later, byhand.notes([1, 3, 2], client=[0, 1, 2], **told))
    assert_array_equal(plan.assign, [away, away, near, near, near])
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights[[near, 2 + near], 2], [1 / 2, 1 / 3])
    assert_allclose(mixing.keep[[near, 2 + near], 4], [1 / 2, 2 / 3])
    assert_allclose(plan.algorithm_state["moved"][near], 1 / 3)


def test_with_initial_models_and_all_clients_fesem_is_as_without(tmp_path):
    methods = (CATALOGUE["fesem"](num_clusters=2, initial_models=on) for on in (False, True))
    plain, more = (worlds.run(m, worlds.Tiny(), tmp_path / str(i)) for i, m in enumerate(methods))
    assert_array_equal(plain.server.assign, more.server.assign)
    assert_close(plain.server.tables["model"], more.server.tables["model"][:4], rtol=0, atol=0)
    for options in ({"variant": "flexcfl"}, {"variant": "emdcfl"}):
        with pytest.raises(UserError, match="initial_models"):
            CATALOGUE["fesem"](initial_models=True, **options)


def test_flexcfls_fesem_leaves_the_absent_where_they_are():
    notes = byhand.notes([1, 3, 2], gram=gram(POINTS), row_distance=APART)
    notes = replace(notes, fresh=np.array([True, True, False]))
    server = byhand.server(3, version=1, model=[[0.0], [8.0]])
    method = CATALOGUE["fesem"](num_clusters=2, variant="flexcfl")
    assert_array_equal(method.aggregate(server, notes).assign, [0, 0, 0])


@pytest.mark.parametrize(
    ("variant", "centres"), [("flt", [0.0] * 4), ("emdcfl", [0.0, 0.0]), ("flexcfl", [0.0, 1.0])]
)
def test_fesems_centres_start_alike_except_under_flexcfl(variant, centres):
    """Under `flt` all clients begin in cluster 0; otherwise they are drawn, 40 of them not all alike."""
    server = CATALOGUE["fesem"](num_clusters=2, variant=variant).setup(world([1] * 40), None, byhand.KEY)
    assert_close(server.tables["model"][:, 0], torch.tensor(centres))
    assert_array_equal(np.unique(server.assign), [0] if variant == "flt" else [0, 1])


# ---- CFL-GP


@pytest.mark.parametrize(("step", "beta"), [(1, 1.0), (3, 1.0), (5, 1 / 2), (9, 1 / 3)])
def test_the_profile_of_cflgp_is_an_average_over_rounds(step, beta):
    """K = 2, period 2, round t = step - 1: beta = 1 / (floor((t + 1) / 4) + 1); G <- (1 - beta) 8 + beta 2.

    The client is in cluster 0, whose visit from 0 towards 4 with rate 0.5 gives v = 2.
    """
    method = CATALOGUE["cflgp"](num_clusters=2, period=2, protocol="gap")
    told, state = byhand.message(step, model=[[0.0]]), {"profile": torch.tensor([[8.0]])}
    report, state = method.local_update(told, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["profile"], torch.tensor([[(1 - beta) * 8 + beta * 2]]))
    assert_close(report.vectors["delta"], torch.tensor([2.0]))


def test_cflgp_trains_the_criterion_model_beside_the_own_one():
    """In cluster 1 with model 6 and criterion model 0: the model moves by (4 - 6) / 2 = -1, v = (4 - 0) / 2 =
    2.
    """
    method = CATALOGUE["cflgp"](num_clusters=2, protocol="gap")
    told = byhand.message(1, model=[[6.0], [0.0]])
    report, state = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(report.vectors["delta"], torch.tensor([-1.0]))
    assert_close(state["profile"], torch.tensor([[2.0]]))


def test_cflgp_looks_at_profiles_every_other_round_until_the_tenth():
    """Period 2: rounds 0, 2, ..., 8. Then clients of other clusters than the first download the criterion
    model, row 0, too. Under `emdcfl` every round looks, and nobody downloads more than the own model.
    """
    method, server = CATALOGUE["cflgp"](num_clusters=2, period=2), byhand.server(2, model=[[0.0], [5.0]])
    server.assign[:] = [0, 1]
    looks = [method.compares(replace(server, version=t)) for t in range(12)]
    assert_array_equal(looks, [t % 2 == 0 and t < 10 for t in range(12)])
    assert [method.reads(server, k)["model"] for k in (0, 1)] == [(0,), (1, 0)]
    assert method.reads(replace(server, version=1), 1)["model"] == (1,)
    assert method.serves(server, 1)["model"] == (1,)
    emdcfl = CATALOGUE["cflgp"](num_clusters=2, period=2, variant="emdcfl")
    assert all(emdcfl.compares(replace(server, version=t)) for t in range(12))
    assert emdcfl.reads(server, 1)["model"] == (1,)


def test_cflgp_under_emdcfl_writes_the_block_of_the_own_cluster():
    """K = 2, round t = 1: beta = 1 / (floor(2 / 2) + 1) = 1/2. Cluster 1: 6 -> 5, v = -1: (6 - 1) / 2."""
    method = CATALOGUE["cflgp"](num_clusters=2, variant="emdcfl")
    told = byhand.message(2, model=[[6.0]])
    told = replace(told, rows={"model": (1,)})
    state = {"profile": torch.tensor([[8.0], [6.0]])}
    report, state = method.local_update(told, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert_close(state["profile"], torch.tensor([[8.0], [2.5]]))
    assert_close(report.vectors["profile"], torch.tensor([8.0, 2.5]))
    assert_close(report.vectors["model"], torch.tensor([5.0]))
    assert "delta" not in report.vectors


def test_cflgp_may_take_one_gradient_instead_of_a_visit():
    """A visit of three mini-batches, 0 -> 2 -> 3 -> 3.5; protocol `gradient` takes the first only."""
    for protocol, moved in (("gradient", 2.0), ("gap", 3.5)):
        method = CATALOGUE["cflgp"](num_clusters=2, protocol=protocol)
        client = byhand.Quadratic([4.0], steps=3)
        report, _ = method.local_update(byhand.message(2, model=[[0.0]]), {}, client, byhand.KEY)
        assert_close(report.vectors["delta"], torch.tensor([moved]))


def test_cflgp_clusters_profiles_and_keeps_the_old_names():
    """Profiles (1, 0), (0, 1), (1, 0), (0, 1): {0, 2} and {1, 3}. Old labels 1, 0, 1, 1 agree best with 1, 0,
    1, 0.

    Rows move by plain means of what their members found, whatever their samples.
    """
    server = byhand.server(4, model=[[0.0], [0.0]])
    server.assign[:] = [1, 0, 1, 1]
    notes = byhand.notes([9, 1, 1, 1], gram=gram([[1, 0], [0, 1], [1, 0], [0, 1]]))
    plan = CATALOGUE["cflgp"](num_clusters=2).aggregate(server, notes)
    assert_array_equal(plan.assign, [1, 0, 1, 0])
    assert_allclose(plan.mixings[0].weights, [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]])
    assert_array_equal(plan.mixings[0].keep, [1, 1])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"num_clusters": 3}, [0, 1, 2]),
        ({"num_clusters": 3, "starts": "alike"}, [0, 0, 0]),
        ({"num_clusters": 3, "variant": "emdcfl"}, [0, 0, 0]),
        ({"num_clusters": 0, "max_clusters": 3}, [0, 0, 0]),
        ({"num_clusters": 3, "variant": "emdcfl", "starts": "independent"}, [0, 1, 2]),
    ],
)
def test_the_models_of_cflgp_start_independently_where_k_is_given(options, rows):
    """The j-th initial vector is (j, j, j); everyone is in cluster 0."""
    server = CATALOGUE["cflgp"](**options).setup(world([1] * 4), None, byhand.KEY)
    assert_array_equal(server.tables["model"][:, 0], rows)
    assert_array_equal(server.assign, [0] * 4)


def test_cflgp_finds_the_number_of_clusters():
    """Three directions, each of three clients with a little noise: K = 0 finds 3."""
    noise = 0.01 * np.array([[1, -1, 0], [0, 1, -1], [-1, 0, 1]])
    points = np.repeat(np.eye(3), 3, axis=0) + np.tile(noise, (3, 1))
    server = byhand.server(9, model=[[0.0]] * 5)
    notes = byhand.notes([1] * 9, gram=gram(points.tolist()))
    plan = CATALOGUE["cflgp"](num_clusters=0, max_clusters=5).aggregate(server, notes)
    assert len(np.unique(plan.assign)) == 3
    assert all(len(set(plan.assign[3 * g : 3 * g + 3])) == 1 for g in range(3))


# ---- FL+HC


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"threshold": 2.0}, [0, 0, 1]),  # distances 1, 9, 8: 0 and 1 merge
        ({"threshold": 0.5}, [0, 1, 2]),
        ({"threshold": 8.6}, [0, 0, 0]),  # {0, 1} to 2: (9 + 8) / 2 = 8.5
        ({"threshold": 8.6, "linkage": "complete"}, [0, 0, 1]),  # max(9, 8) = 9
        ({"num_clusters": 2}, [0, 0, 1]),
    ],
)
def test_flhc_cuts_the_hierarchy_of_updates_once(options, labels):
    server = byhand.server(4, version=2, model=[[0.0]])
    method = CATALOGUE["flhc"](rounds_before=2, **options)
    assert method.compares(server)
    plan = method.aggregate(server, byhand.notes([1, 3, 2], gram=gram(POINTS)))
    assert_array_equal(plan.assign, [*labels, max(labels) + 1])  # client 3 was absent
    assert_array_equal(plan.mixings[0].keep, np.ones((max(labels) + 2, 1)))
    for k in range(max(labels) + 1):
        n = np.array([1, 3, 2]) * (np.array(labels) == k)
        assert_allclose(plan.mixings[0].weights[k], n / n.sum())


def test_flhc_clusters_clients_though_a_buffer_holds_two_uploads_of_one():
    """Client 0 sent 9, then 1, and client 1 sent 0: one cluster, and none of the 9 alone."""
    server, places = byhand.server(3, version=2, model=[[0.0]]), np.array(POINTS)[[2, 0, 1]].tolist()
    method = CATALOGUE["flhc"](rounds_before=2, threshold=2.0)
    plan = method.aggregate(server, byhand.notes([1] * 3, [0, 1, 0], gram=gram(places)))
    assert_array_equal(plan.assign, [0, 0, 1])
    assert_allclose(plan.mixings[0].weights, [[1 / 3] * 3, [0] * 3])


def test_flhc_may_cluster_directions():
    """(1, 0), (9, 0), (0, 1): by direction the first two are one, by distance the first and the last."""
    directions = gram([[1.0, 0.0], [9.0, 0.0], [0.0, 1.0]])
    for metric, labels in (("cosine", [0, 0, 1]), ("euclidean", [0, 1, 0])):
        method = CATALOGUE["flhc"](rounds_before=2, metric=metric, num_clusters=2)
        server = byhand.server(3, version=2, model=[[0.0]])
        assert_array_equal(method.aggregate(server, byhand.notes([1] * 3, gram=directions)).assign, labels)


def test_a_visit_of_flhc_reports_its_update():
    report, _ = CATALOGUE["flhc"]().local_update(
        byhand.message(model=[[6.0]]), {}, byhand.Quadratic([4.0]), byhand.KEY
    )
    assert_close(report.vectors["delta"], torch.tensor([-1.0]))


def test_flhc_averages_everybody_before_and_clusters_after():
    """Round 1 of 2: (1, 3, 2) / 6. Round 4, clusters {0, 2} and {1}: (1, 0, 2) / 3 and client 1 alone."""
    method = CATALOGUE["flhc"](rounds_before=2)
    early = method.aggregate(byhand.server(3, version=1, model=[[0.0]]), byhand.notes([1, 3, 2]))
    assert_allclose(early.mixings[0].weights, [[1 / 6, 1 / 2, 1 / 3]])
    server = byhand.server(3, version=4, model=[[0.0], [5.0]])
    server.assign[:] = [0, 1, 0]
    late = method.aggregate(server, byhand.notes([1, 3, 2]))
    assert_allclose(late.mixings[0].weights, [[1 / 3, 0, 2 / 3], [0, 1, 0]])
    assert_array_equal(late.mixings[0].keep, np.eye(2))


# ---- HypCluster and IFCA's variants


def test_a_client_of_hypcluster_trains_the_best_hypothesis_and_the_server_weighs_by_samples():
    """Hypotheses 0, 5 for F(w) = (w - 4)^2 / 2: 5, which moves to 4.5. n = 1, 3: (1, 3) / 4; nobody took
    0.
    """
    method, told = CATALOGUE["hypcluster"](num_clusters=2), byhand.message(model=[[0.0], [5.0]])
    report, _ = method.local_update(told, {}, byhand.Quadratic([4.0]), byhand.KEY)
    assert (int(report.notes["cluster"]), float(report.vectors["model"])) == (1, 4.5)
    plan = method.aggregate(byhand.server(2, model=[[0.0], [5.0]]), byhand.notes([1, 3], cluster=[1, 1]))
    assert_allclose(plan.mixings[0].weights, [[0, 0], [1 / 4, 3 / 4]])
    assert_array_equal(plan.mixings[0].keep, [1, 0])


def test_a_visit_of_ifcas_gradient_variant_is_one_step_on_all_training_data():
    """Model 5 fits best: one step of rate 0.5 towards 4 is an update of -0.5, without momentum."""
    method, client = CATALOGUE["ifca"](num_clusters=2, variant="gradient"), byhand.Quadratic([4.0])
    report, _ = method.local_update(byhand.message(model=[[0.0], [5.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([-0.5]))
    expected = {"epochs": 1, "batch_size": client.num_samples, "momentum": 0.0, "optimizer": "sgd"}
    assert client.calls[0].changes == expected


def test_ifcas_weight_sharing_sends_body_and_head():
    """Body 1 under heads (0, 0) and (2, 2), target (3, 2, 2), rate 0.5: the second head fits; (2, 2, 2)."""
    method, client = CATALOGUE["ifca"](num_clusters=2, share="body"), byhand.Quadratic([3.0, 2.0, 2.0])
    client.layout = FLAT
    told = byhand.message(body=[[1.0]], head=[[0.0, 0.0], [2.0, 2.0]])
    report, _ = method.local_update(told, {}, client, byhand.KEY)
    assert int(report.notes["cluster"]) == 1
    expected = {"body": torch.tensor([2.0]), "head": torch.tensor([2.0, 2.0])}
    assert_close(dict(report.vectors), expected)


def test_ifcas_gradient_step_divides_by_all_who_take_part():
    """Clients 0, 1 chose model 1, client 2 model 0: each gradient counts 1/3, and both models stay."""
    method = CATALOGUE["ifca"](num_clusters=2, variant="gradient")
    plan = method.aggregate(
        byhand.server(3, model=[[0.0], [5.0]]), byhand.notes([1, 3, 2], cluster=[1, 1, 0])
    )
    assert_allclose(plan.mixings[0].weights, [[0, 0, 1 / 3], [1 / 3, 1 / 3, 0]])
    assert_array_equal(plan.mixings[0].keep, [1, 1])


def test_ifcas_weight_sharing_averages_the_body_over_all_and_heads_over_their_own():
    method = CATALOGUE["ifca"](num_clusters=2, share="body")
    server = byhand.server(3, body=[[0.0]], head=[[0.0], [5.0]])
    body, head = method.aggregate(server, byhand.notes([1, 3, 2], cluster=[1, 1, 0])).mixings
    assert (body.into, head.into) == ("body", "head")
    assert_allclose(body.weights, [[1 / 3, 1 / 3, 1 / 3]])
    assert_allclose(head.weights, [[0, 0, 1], [1 / 2, 1 / 2, 0]])


def test_ifcas_restarts_take_the_first_set_that_spreads_the_clients():
    """Three sets for four clients: all on one model; 3 and 1; 2 and 2. A share of 0.25 is one client: set
    1.
    """
    tried = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    method = CATALOGUE["ifca"](num_clusters=2, restarts=3, least=0.25)
    server = method.setup(world([1] * 4), byhand.notes([1] * 4, tried=tried), byhand.KEY)
    assert_close(server.tables["model"][:, 0], torch.tensor([2.0, 3.0]))
    method = replace(method, least=0.5)
    server = method.setup(world([1] * 4), byhand.notes([1] * 4, tried=tried), byhand.KEY)
    assert_close(server.tables["model"][:, 0], torch.tensor([4.0, 5.0]))


# ---- PACFL


def bases(*angles: float) -> np.ndarray:
    """Return one unit vector of the plane for each angle, in degrees: bases [n, 2, 1]."""
    a = np.deg2rad(angles)
    return np.stack([np.cos(a), np.sin(a)], axis=1)[:, :, None].astype(np.float32)


def test_pacfl_merges_while_clusters_are_within_the_threshold():
    """Lines at 0, 10 and 40 degrees. {0, 10} are 10 apart, and 35 = (40 + 30) / 2 from 40."""
    for threshold, labels in ((5, [0, 1, 2]), (12, [0, 0, 1]), (36, [0, 0, 0])):
        fingerprints = byhand.notes([1, 3, 2], basis=bases(0, 10, 40))
        server = CATALOGUE["pacfl"](threshold=threshold).setup(world([1, 3, 2]), fingerprints, byhand.KEY)
        assert_array_equal(server.assign, labels)
        assert len(server.tables["model"]) == max(labels) + 2


def test_newcomers_of_pacfl_join_or_found_a_cluster():
    """0 and 10 degrees know each other; a newcomer at 5 joins them, one at 80 founds cluster 1."""
    method, fingerprints = CATALOGUE["pacfl"](threshold=12), byhand.notes([1, 1], basis=bases(0, 10))
    server = method.setup(world([1] * 4), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 1])  # new_clients use the initial model
    plan = method.assign_new_clients(server, byhand.notes([1, 1], [2, 3], basis=bases(5, 80)))
    assert_array_equal(plan.assign, [0, 0, 0, 1])
    assert_array_equal(
        plan.mixings[0].keep, [[1, 0], [0, 1], [0, 1]]
    )  # the new row starts from the initial one


def signature(train: Split, val: Split, **options: object) -> np.ndarray:
    """Return the absolute entries of what a client of PACFL sends; columns without a number are left out."""

    class Client(byhand.Quadratic):
        data = ClientData(train, val, Split(99 * torch.ones(1, 1, 1, 2), torch.zeros(1).long()))

    client = Client([0.0])
    client.layout = FLAT
    U = CATALOGUE["pacfl"](**options).fingerprint(client, {}, byhand.KEY).notes["basis"]
    return np.abs(U[:, ~np.isnan(U[0])])


PLANES = Split(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])[:, None, None], torch.tensor([0, 0, 1]))
ACROSS = Split(torch.tensor([[0.0, 5.0]])[:, None, None], torch.tensor([0]))


def test_the_signature_of_pacfl_spans_the_images_of_each_class():
    """Class 0 has images (2, 0) and (0, 1), class 1 only (3, 3): u = (1, 0) and (1, 1) / sqrt(2), up to
    sign. Validation images play no part; under `emdcfl` they are all.
    """
    assert_allclose(signature(PLANES, ACROSS, p=1), [[1, 0.5**0.5], [0, 0.5**0.5]], atol=1e-6)
    assert_allclose(signature(PLANES, ACROSS, p=1, variant="emdcfl"), [[0], [1]], atol=1e-6)


def test_pacfl_under_emdcfl_takes_each_channel_for_an_image():
    """An image of channels (1, 0) and (0, 2): the first direction is (0, 1); as one image it would have four
    numbers.
    """
    two = Split(torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]]), torch.tensor([0]))
    assert_allclose(signature(PLANES, two, p=1, variant="emdcfl"), [[0], [1]], atol=1e-6)
    assert_allclose(signature(two, PLANES, p=1).shape, (4, 1))


def line(*images: list[int], dtype: torch.dtype = torch.float32) -> Split:
    """Return images of two pixels, all of class 0."""
    return Split(torch.tensor(images, dtype=dtype)[:, None, None], torch.zeros(len(images)))


class Stored(byhand.Quadratic):
    """A client whose stored images point elsewhere than its tensors."""

    data = ClientData(line([1, 0], [1, 0]), line([3, 3]), line([0, 0]))

    def __init__(self) -> None:
        super().__init__([0.0])
        self.layout = FLAT

    def pixels(self, split: str = "train") -> Split:
        """Return the images as they are stored."""
        stored = {"train": ([255, 255], [200, 200]), "val": ([0, 200],)}
        return line(*stored[split], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("options", "direction"),
    [
        ({}, [0.5**0.5, 0.5**0.5]),
        ({"pixels": "normalised"}, [1.0, 0.0]),
        ({"variant": "emdcfl"}, [0.5**0.5, 0.5**0.5]),
        ({"variant": "emdcfl", "pixels": "raw"}, [0.0, 1.0]),
    ],
)
def test_pacfl_sees_stored_pixels_and_under_emdcfl_normalised_ones(options, direction):
    """Training images (255, 255), (200, 200), normalised (1, 0); validation (0, 200), normalised (3, 3)."""
    U = CATALOGUE["pacfl"](p=1, **options).fingerprint(Stored(), {}, byhand.KEY).notes["basis"]
    assert_allclose(np.abs(U[:, 0]), direction, atol=1e-6)


def test_pacfls_budget_is_shared_among_the_classes():
    """Four of six images are of class 0: of three vectors it has two, class 1 one. By p each has one."""
    x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [3.0, 3.0]])
    both = signature(Split(x[:, None, None], torch.tensor([0, 0, 0, 0, 1, 1])), ACROSS, p=1, budget=3)
    assert_allclose(both, [[1, 0, 0.5**0.5], [0, 1, 0.5**0.5]], atol=1e-6)


@pytest.mark.parametrize(("angle", "labels"), [("columns", [0, 1]), ("smallest", [0, 0])])
def test_pacfl_measures_the_angle_that_is_asked_for(angle, labels):
    """Vectors at 0 and 175 degrees: 175 apart as columns, 5 as lines."""
    fingerprints = byhand.notes([1, 1], basis=bases(0, 175))
    server = CATALOGUE["pacfl"](threshold=12, angle=angle).setup(world([1, 1]), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, labels)


# ---- FedClust


def test_fedclust_cuts_the_distances_of_final_layers_and_newcomers_join_the_nearest():
    """Final layers 0, 1, 9: cut at 2 gives {0, 1}, {9}; their means are 0.5 and 9; 6 joins 9, 3 joins 0.5."""
    method = CATALOGUE["fedclust"](threshold=2.0)
    fingerprints = byhand.notes([1, 3, 2], gram=gram(POINTS))
    server = method.setup(world([1, 3, 2, 1, 1]), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 2, 2])
    (signature,) = method.initial_plan(server, fingerprints).mixings
    assert_allclose(signature.weights, [[0.5, 0.5, 0], [0, 0, 1]])
    plan = method.assign_new_clients(
        server, byhand.notes([1, 1], [3, 4], row_distance=[[5.5, 3.0], [2.5, 6.0]])
    )
    assert_array_equal(plan.assign, [0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [0, 0, 1]),  # complete: {0, 1} is 2.5 from the third
        ({"linkage": "single"}, [0, 0, 0]),  # 1.5
        ({"linkage": "average"}, [0, 0, 0]),  # (2.5 + 1.5) / 2 = 2
        ({"linkage": "average", "threshold": 1.9}, [0, 0, 1]),
        ({"threshold": 2.6}, [0, 0, 0]),
        ({"num_clusters": 3}, [0, 1, 2]),
        ({"linkage": "ward"}, [0, 0, 1]),  # sqrt(4 / 3) * 2 = 2.31
    ],
)
def test_fedclusts_linkage_is_complete_unless_said_otherwise(options, labels):
    """Final layers 0, 1 and 2.5; {0, 1} merge at 1, and the threshold is 2.1."""
    fingerprints = byhand.notes([1, 3, 2], gram=gram([[0.0], [1.0], [2.5]]))
    server = CATALOGUE["fedclust"](**{"threshold": 2.1, **options}).setup(
        world([1, 3, 2]), fingerprints, byhand.KEY
    )
    assert_array_equal(server.assign, labels)


def test_fedclusts_statistics_are_the_final_layer_and_under_emdcfl_everything():
    """From (0, 0, 0) towards (4, 2, 6), eta = 0.5: (2, 1, 3), of which the last two are the head."""
    for variant, sent in (("paper", [1.0, 3.0]), ("emdcfl", [2.0, 1.0, 3.0])):
        client = byhand.Quadratic([4.0, 2.0, 6.0])
        client.layout = FLAT
        method = CATALOGUE["fedclust"](variant=variant)
        report = method.fingerprint(client, {"init": torch.zeros(1, 3)}, byhand.KEY)
        assert_close(report.vectors["signature"], torch.tensor(sent))
        assert client.calls[0].changes == {}


def test_fedclusts_first_training_may_be_shorter_or_longer_than_a_round():
    """Three epochs of a step from 0 towards 6: 3, 4.5, 5.25."""
    client = byhand.Quadratic([0.0, 0.0, 6.0])
    client.layout = FLAT
    report = CATALOGUE["fedclust"](epochs=3).fingerprint(client, {"init": torch.zeros(1, 3)}, byhand.KEY)
    assert_close(report.vectors["signature"], torch.tensor([0.0, 5.25]))


def test_fedclust_under_emdcfl_averages_once_by_samples():
    """Clusters {0, 1} and {2}: signatures are plain means, models are means by samples, and the last row
    stays.
    """
    fingerprints = byhand.notes([1, 3, 2], gram=gram(POINTS))
    method = CATALOGUE["fedclust"](threshold=2.0, variant="emdcfl")
    server = method.setup(world([1, 3, 2]), fingerprints, byhand.KEY)
    signature, model = method.initial_plan(server, fingerprints).mixings
    assert_allclose(signature.weights, [[0.5, 0.5, 0], [0, 0, 1]])
    assert_allclose(model.weights, [[1 / 4, 3 / 4, 0], [0, 0, 1], [0, 0, 0]])
    assert_array_equal(model.keep, [0, 0, 1])
    assert (model.into, model.of) == ("model", "signature")


def test_fedclust_aggregates_in_every_round_but_not_as_emdcfl_had_it():
    server = byhand.server(3, model=[[0.0], [0.0], [0.0]])
    server.assign[:] = [0, 0, 1]
    (mixing,) = CATALOGUE["fedclust"]().aggregate(server, byhand.notes([1, 3, 2])).mixings
    assert_allclose(mixing.weights, [[1 / 4, 3 / 4, 0], [0, 0, 1], [0, 0, 0]])
    assert not CATALOGUE["fedclust"](variant="emdcfl").aggregate(server, byhand.notes([1, 3, 2])).mixings


# ---- FLT and PCA+kM+HC


def test_flt_averages_over_related_clients_with_the_models_of_the_absent():
    """0 ~ 1 ~ 2, not 0 ~ 2; n = 1, 2, 3; client 2 was never there: it counts with the initial model, 3 / 5
    and 3 / 6.

    Without the absent: (1, 2) / 3 for rows 0 and 1, and client 1 alone for row 2.
    """
    linked = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
    server = related_server(world([1, 2, 3]), np.arange(3), linked)
    assert_array_equal(server.assign, [0, 1, 2])
    (mixing,) = related_plan(server, byhand.notes([1, 2]), all_clients=True).mixings
    assert_allclose(mixing.weights, [[1 / 3, 2 / 3], [1 / 6, 2 / 6], [0, 2 / 5], [0, 0]])
    assert_allclose(mixing.keep[:, 3], [0, 3 / 6, 3 / 5, 1])
    (mixing,) = related_plan(server, byhand.notes([1, 2]), all_clients=False).mixings
    assert_allclose(mixing.weights, [[1 / 3, 2 / 3], [1 / 3, 2 / 3], [0, 1], [0, 0]])


def test_flts_ward_clusters_are_those_of_the_rows_of_the_relatedness():
    """Rows 110, 110, 001 have distances 0 and sqrt(3): two clusters are {0, 1} and {2}."""
    related = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)
    expected = [[True, True, False], [True, True, False], [False, False, True]]
    assert_array_equal(linked_clients(related, "ward", 2), expected)
    assert_array_equal(linked_clients(related, "full"), related)


def test_ward_never_parts_clients_with_the_same_links():
    """Two distinct rows, four clusters asked for: two are made."""
    related = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)
    assert_array_equal(linked_clients(related, "ward", 4), related)


def test_pca_links_clients_whose_centroids_match():
    """Centroids {0, 1}, {0, 1.2}, {9}: matching distances 0.1, and 8 or more to the third."""
    fingerprints = byhand.notes([1, 1, 1], centroids=[[[0.0], [1.0]], [[1.2], [0.0]], [[9.0], [np.nan]]])
    method = CATALOGUE["pca_km_hc"](threshold=0.5, case="full")
    server = method.setup(world([1] * 3), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1])
    assert_array_equal(server.algorithm_state["linked"], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


# ---- FlexCFL


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_flexcfl_groups_directions_not_lengths(measure):
    """Directions (1, 0), (5, .1), (0, 1), (.1, 3): {0, 1} and {2, 3}; rows start from w_0 + plain means."""
    dw = [[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 3.0]]
    method = CATALOGUE["flexcfl"](num_groups=2, measure=measure)
    fingerprints = byhand.notes([9, 1, 1, 1], gram=gram(dw))
    server = method.setup(world([9, 1, 1, 1]), fingerprints, byhand.KEY)
    assert_array_equal(server.assign, [0, 0, 1, 1])
    start, directions = method.initial_plan(server, fingerprints).mixings
    assert_allclose(start.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 0]])
    assert_array_equal(start.keep, [1, 1, 1])
    assert (start.of, directions.into) == ("delta", "direction")


def flexcfl_of_emdcfl(num_groups: int, n: list[int]) -> tuple[Any, Any]:
    """Return the method and its first server, in which nobody has a group."""
    method = CATALOGUE["flexcfl"](num_groups=num_groups, variant="emdcfl")
    return method, method.setup(world(n), None, byhand.KEY)


def test_round_1_of_flexcfl_under_emdcfl_is_the_first_training():
    """Everyone trains the initial model, row 2. Directions (1, 0), (5, .1), (0, 1), (.1, 3): {0, 1} and
    {2, 3}, each member counting the same, whatever its samples; no inter-group step follows.
    """
    method, server = flexcfl_of_emdcfl(2, [9, 1, 2, 3])
    assert_array_equal(server.assign, [2] * 4)
    assert not uses(method, OneShotStatistics)
    dw = [[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 3.0]]
    told = byhand.notes([9, 1, 2, 3], gram=gram(dw), steps=[4, 5, 6, 6])
    plan = method.aggregate(server, told)
    models, directions = plan.mixings
    assert_allclose(models.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 0]])
    assert_allclose(directions.weights, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    assert (models.of, directions.of, directions.into) == ("model", "direction", "direction")
    assert_array_equal(plan.assign, [0, 0, 1, 1])
    assert_array_equal(plan.algorithm_state["batches"], [4, 6])  # 4.5 is cut off
    rows = byhand.server(4, plan.algorithm_state, 1, model=[[3.0], [4.0], [0.0]])
    assert method.server_update(server, rows) is rows


def test_who_comes_later_joins_a_group_of_flexcfl_under_emdcfl():
    """g = (10, 0) and (0, 10); client 2's dw = (1, 2) is nearer to the second, which it only joins. Group 0
    averages the others by their 9 and 3 samples; its counter grows by (9 * 3 + 3 * 7) / 12.
    """
    method, server = flexcfl_of_emdcfl(2, [9, 3, 2])
    server = replace(server, version=3, tables={**server.tables, "direction": torch.eye(2) * 10})
    server.assign[:] = [0, 0, 2]
    server.algorithm_state["known"][:2] = True
    apart = [[0, 14.0], [0, 14.0], [85**0.5, 65**0.5]]
    told = byhand.notes([9, 3, 2], norm=[10, 10, 5**0.5], row_distance=apart, steps=[3, 7, 5])
    plan = method.aggregate(server, told)
    assert_allclose(plan.mixings[0].weights, [[0.75, 0.25, 0], [0, 0, 0], [0, 0, 0]])
    assert_array_equal(plan.assign, [0, 0, 1])
    assert plan.algorithm_state["known"].all()
    assert_array_equal(plan.algorithm_state["batches"], [4, 0])


def test_the_inter_group_step_of_emdcfl_divides_by_norms_of_state_dicts():
    """Four layers count batches: w = (3, 4) after 6 batches has norm sqrt(25 + 4 * 36) = 13, (0, 2) after 8
    sqrt(4 + 4 * 64) = sqrt(260). With rate 5: w_1 = (3, 4 + 10 / sqrt(260)), w_2 = (15 / 13, 2 + 20 / 13).

    The counters move likewise and are cut off: 6 + 40 / 16.12 = 8.48, 8 + 30 / 13 = 10.3.
    """
    state = {"batches": [6.0, 8.0], "counter": 2.0}
    server = byhand.server(2, state, 2, model=[[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]])
    new = CATALOGUE["flexcfl"](num_groups=2, variant="emdcfl").server_update(None, server)
    moved = [[3.0, 4 + 10 / 260**0.5], [15 / 13, 2 + 20 / 13], [7.0, 7.0]]
    assert_close(new.tables["model"], torch.tensor(moved))
    assert_array_equal(new.algorithm_state["batches"], [8, 10])


def test_flexcfl_under_emdcfl_groups_nobody_anew():
    with pytest.raises(UserError, match="migration"):
        CATALOGUE["flexcfl"](variant="emdcfl", migration=0.1)


def test_flexcfl_founds_its_groups_on_a_sample_of_alpha_m_clients():
    """Three groups, alpha = 4: twelve different clients of those present, in order; another draw for another
    key.

    Where fewer are present all of them found.
    """
    method, present = CATALOGUE["flexcfl"](num_groups=3, alpha=4), np.arange(5, 105)
    draws = [method.initial_clients(world([1] * 105), present, byhand.KEY.of(i)) for i in range(2)]
    for drawn in draws:
        assert len(np.unique(drawn)) == 12
        assert np.isin(drawn, present).all()
        assert_array_equal(drawn, np.sort(drawn))
    assert not np.array_equal(*draws)
    assert_array_equal(method.initial_clients(world([1] * 105), present[:7], byhand.KEY), present[:7])


def test_flexcfls_short_training_takes_mini_batches():
    """From (0, 0) towards (4, 4), eta = 0.5: 3 after two mini-batches, of which a whole visit has one.

    The second number is a running mean: it moves the model and has no part in direction or length.
    """
    client = byhand.Quadratic([4.0, 4.0], steps=1)
    client.layout = Layout(("w", "mean"), ((1,), (1,)), 1)
    method = CATALOGUE["flexcfl"](iterations=2)
    report = method.fingerprint(client, {"init": torch.zeros(1, 2)}, byhand.KEY)
    assert_close(report.vectors["delta"], torch.tensor([3.0, 3.0]))
    assert_close(report.vectors["direction"], torch.tensor([3.0]))
    assert float(report.notes["norm"]) == 3.0


def test_newcomers_of_flexcfl_join_the_most_similar_direction():
    """g = (10, 0) and (0, 1); dw = (1, 2): cosines 1 / sqrt(5) and 2 / sqrt(5): group 1.

    The server knows lengths and distances: |dw - g| = sqrt(85) and sqrt(2).
    """
    method, server = (
        CATALOGUE["flexcfl"](num_groups=2),
        byhand.server(
            3, {"known": [True, True, False]}, model=[[0.0]] * 3, direction=[[10.0, 0.0], [0.0, 1.0]]
        ),
    )
    server.assign[:] = [0, 1, 2]
    notes = byhand.notes([1], [2], norm=[5**0.5], row_distance=[[85**0.5, 2**0.5]])
    assert_array_equal(method.assign_new_clients(server, notes).assign, [0, 1, 1])


def test_the_inter_group_step_of_flexcfl():
    """w = (3, 4), (0, 2), eta_G = 1: scales 1/5 and 1/2.

    w_1 = ((3, 4) + (0, 1)) / 1.5 = (2, 10/3); w_2 = ((0, 2) + (0.6, 0.8)) / 1.2 = (0.5, 7/3).
    Without the denominator: (3, 5) and (0.6, 2.8).
    """
    w = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert_close(pulled(w, 1.0), torch.tensor([[2.0, 10 / 3], [0.5, 7 / 3]]))
    assert_close(pulled(w, 1.0, normalised=False), torch.tensor([[3.0, 5.0], [0.6, 2.8]]))
    rows = [[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]]
    for eta, variant, second in (
        (1.0, "paper", 10 / 3),
        (None, "paper", 4.0),
        (None, "emdcfl", 9.0),
        (0.0, "emdcfl", 4.0),
    ):
        method = CATALOGUE["flexcfl"](num_groups=2, eta_g=eta, variant=variant)
        moved = method.server_update(None, byhand.server(2, {"counter": 0.0}, 2, model=rows))
        assert_close(moved.tables["model"][0, 1], torch.tensor(second))
    method = CATALOGUE["flexcfl"](num_groups=2, eta_g=1.0)
    new = method.server_update(None, byhand.server(2, model=[[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]]))
    assert_close(new.tables["model"], torch.tensor([[2.0, 10 / 3], [0.5, 7 / 3], [7.0, 7.0]]))


@pytest.mark.parametrize(("limit", "known"), [(0.2, False), (0.5, True)])
def test_a_client_of_flexcfl_whose_labels_shifted_is_grouped_anew(limit, known):
    """Labels 0, 0, 0, 1 became 0, 1, 1, 0: shares (3, 1) / 4 and (2, 2) / 4 are 0.25 apart."""
    shifted = Split(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]))

    class Client(byhand.Quadratic):
        @property
        def data(self):
            return ClientData(shifted, shifted, shifted)

    method, then = CATALOGUE["flexcfl"](num_groups=1, migration=limit), {"labels": torch.tensor([3, 1])}
    report, state = method.local_update(byhand.message(model=[[0.0]]), then, Client([4.0]), byhand.KEY)
    assert_array_equal(state["labels"], [3, 1] if known else [2, 2])
    server = byhand.server(1, {"known": [True]}, model=[[0.0], [0.0]], direction=[[1.0]])
    plan = method.aggregate(server, byhand.notes([4], shifted=[report.notes["shifted"]]))
    assert_array_equal(plan.algorithm_state["known"], [known])
    assert_allclose(plan.mixings[0].weights[0], [float(known)])
    assert plan.mixings[0].keep[0] == (not known), "what was trained on other labels enters no group"


# ---- UCFL


@pytest.mark.parametrize(
    ("kernel", "exponent"),
    [("paper", [[0, -2.0], [-0.5, 0]]), ("geo", [[0, -1.0], [-1.0, 0]])],
)
def test_ucfls_kernel(kernel, exponent):
    """Gradients 0 and 2, Delta = 4; sigma^2 = 1 and 4: exponents -4 / 2 and -4 / 8, or -4 / (2 * 2) for both.

    n = 2, 6: w_01 = 3 e^x / (1 + 3 e^x), w_10 = e^x / (e^x + 3).
    """
    fingerprints = byhand.notes([2, 6], gram=gram([[0.0], [2.0]]), variance=[1.0, 4.0])
    server = CATALOGUE["ucfl"](noise_batch=1, kernel=kernel).setup(world([2, 6]), fingerprints, byhand.KEY)
    W = np.array([1, 3]) * np.exp(exponent)
    assert_allclose(server.algorithm_state["collaboration"], W / W.sum(1, keepdims=True))


def test_ucfls_streams_are_the_means_of_rows():
    """Two pairs of equal gradients, far apart: rows (1/2, 1/2, 0, 0) and (0, 0, 1/2, 1/2); two streams are
    those.
    """
    fingerprints = byhand.notes([2] * 4, gram=gram([[0.0], [0.0], [99.0], [99.0]]), variance=[1.0] * 4)
    for streams in (2, -1):
        server = CATALOGUE["ucfl"](noise_batch=1, streams=streams).setup(
            world([2] * 4), fingerprints, byhand.KEY
        )
        assert_array_equal(server.assign, [0, 0, 1, 1])
        assert_allclose(server.algorithm_state["weights"], [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], atol=1e-12)


@pytest.mark.parametrize(
    ("noise_batch", "alone"), [(5.0, 0), (9.0, 0), (10.0, 1), (25.0, 2), (30.0, 3), (0.5, 0), (0.75, 0)]
)
def test_ucfl_tells_how_many_clients_hold_too_few_samples_for_a_variance(noise_batch, alone):
    """10, 20 and 30 samples: of a batch that holds all samples, sigma is 0 and its client is alone."""
    fingerprints = byhand.notes([10, 20, 30], gram=gram([[0.0], [1.0], [2.0]]), variance=[1.0] * 3)
    method = CATALOGUE["ucfl"](noise_batch=noise_batch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        method.setup(world([10, 20, 30]), fingerprints, byhand.KEY)
    assert [f"{alone} of 3 clients" in str(w.message) for w in told] == [True] * bool(alone)
    assert all("the paper's limit" in str(w.message) for w in told)
