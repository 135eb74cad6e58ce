"""FeSEM by hand: the nearest centre, k-means between rounds, empty centres and unseen clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError

# models 0, 1, 9 with n = 1, 3, 2 and centres 0, 8
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
    plan = method.aggregate(server, byhand.notes([1, 3, 2], gram=byhand.gram(POINTS), row_distance=apart))
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
    told = {"n": [1, 3, 2], "gram": byhand.gram(models[:, None].tolist()), "row_distance": apart}
    assert_array_equal(averages[np.abs(models[1] - averages).argmin()], 5.0)
    plan = CATALOGUE["fesem"](num_clusters=2).aggregate(
        byhand.server(3, version=1, model=[[5.0], [9.0], [2.0], [9.0]]), byhand.notes(**told)
    )
    assert_array_equal(plan.assign, [0, 1, 1])


def test_fesem_remembers_the_absent_except_under_flexcfl():
    """Client 1 is absent: its last model 1 counts under `flt`, not under `flexcfl`."""
    notes = byhand.notes([1, 3, 2], gram=byhand.gram(POINTS), row_distance=APART)
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
    told = {"n": [1, 3, 2], "gram": byhand.gram(POINTS), "row_distance": [row[::-1] for row in APART]}
    assert_array_equal(fesem([0, 0, 0], told), [1, 1, 0])
    assert_array_equal(fesem([0, 0, 0], told, version=0), [0, 0, 1])
    assert_array_equal(fesem([1, 0, 1], told, version=0, variant="emdcfl"), [1, 0, 1])
    assert_array_equal(fesem([1, 0, 1], told, version=1, variant="emdcfl"), [1, 1, 0])


def test_a_centre_that_is_nearest_to_nobody_moves_to_the_farthest_client():
    """Centres 0, 8, 50 for 0, 1, 9: nobody is nearest to 50. Clients 1 and 9 are 1 from their centres, the
    first of them is 1: k-means goes on from 0.5, 9 and 1.
    """
    apart = [[0.0, 8.0, 50.0], [1.0, 7.0, 49.0], [9.0, 1.0, 41.0]]
    told = {"n": [1, 3, 2], "gram": byhand.gram(POINTS), "row_distance": apart}
    assert_array_equal(fesem([0, 0, 0], told, num_clusters=3), [0, 2, 1])


def test_fesem_with_fewer_clients_than_centres_has_one_for_each():
    told = {"n": [1, 3], "gram": byhand.gram(POINTS[1:]), "row_distance": [row * 2 for row in APART[1:]]}
    assert_array_equal(fesem([0, 0], told, num_clusters=4), [0, 1])


def test_with_initial_models_the_unseen_count_in_k_means_and_in_the_average():
    """w^0 = 2, n = 1, 3, 2, 1, 1. Clients 0 and 1 have taken part, with models 10 and 11: k-means with two
    centres puts them together, (10 + 3 * 11) / 4, and the three at w^0 elsewhere. Without, they are apart.

    Next client 2 has model 3: nearest to w^0, whose centre becomes (2 * 3 + 2 * 2) / 4 = 2.5.
    """
    method = CATALOGUE["fesem"](num_clusters=2, initial_models=True)
    state = {"num_samples": np.array([1, 3, 2, 1, 1]), "moved": np.zeros(2)}
    server = byhand.server(5, state, model=[[2.0]] * 5)
    told = {"gram": byhand.gram([[10.0], [11.0]]), "row_distance": [[8.0] * 5, [9.0] * 5]}
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
    told = {"gram": byhand.gram(models[:, None].tolist()), "row_distance": np.abs(models[:, None] - rows)}
    plan = method.aggregate(later, byhand.notes([1, 3, 2], client=[0, 1, 2], **told))
    assert_array_equal(plan.assign, [away, away, near, near, near])
    (mixing,) = plan.mixings
    assert_allclose(mixing.weights[[near, 2 + near], 2], [1 / 2, 1 / 3])
    assert_allclose(mixing.keep[[near, 2 + near], 4], [1 / 2, 2 / 3])
    assert_allclose(plan.algorithm_state["moved"][near], 1 / 3)


def test_with_initial_models_and_all_clients_fesem_is_as_without(tmp_path):
    methods = (CATALOGUE["fesem"](num_clusters=2, initial_models=on) for on in (False, True))
    plain, more = (toy.run(m, toy.Tiny(), tmp_path / str(i)) for i, m in enumerate(methods))
    assert_array_equal(plain.server.assign, more.server.assign)
    assert_close(plain.server.tables["model"], more.server.tables["model"][:4], rtol=0, atol=0)
    for options in ({"variant": "flexcfl"}, {"variant": "emdcfl"}):
        with pytest.raises(UserError, match="initial_models"):
            CATALOGUE["fesem"](initial_models=True, **options)


def test_flexcfls_fesem_leaves_the_absent_where_they_are():
    notes = byhand.notes([1, 3, 2], gram=byhand.gram(POINTS), row_distance=APART)
    notes = replace(notes, fresh=np.array([True, True, False]))
    server = byhand.server(3, version=1, model=[[0.0], [8.0]])
    method = CATALOGUE["fesem"](num_clusters=2, variant="flexcfl")
    assert_array_equal(method.aggregate(server, notes).assign, [0, 0, 0])


@pytest.mark.parametrize(
    ("variant", "centres"), [("flt", [0.0] * 4), ("emdcfl", [0.0, 0.0]), ("flexcfl", [0.0, 1.0])]
)
def test_fesems_centres_start_alike_except_under_flexcfl(variant, centres):
    """Under `flt` all clients begin in cluster 0; otherwise they are drawn, 40 of them not all alike."""
    server = CATALOGUE["fesem"](num_clusters=2, variant=variant).setup(
        byhand.problem([1] * 40), None, byhand.KEY
    )
    assert_close(server.tables["model"][:, 0], torch.tensor(centres))
    assert_array_equal(np.unique(server.assign), [0] if variant == "flt" else [0, 1])
