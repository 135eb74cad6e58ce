"""FedDrift by hand: drift that a client detects, models that are made, joined, merged and replaced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand, toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError
from mpifl.core.types import Message, Notes, Server

GONE = -1


def method(**options):
    """Return FedDrift with three rows, time steps of two rounds and delta 0.1."""
    return CATALOGUE["feddrift"](**{"period": 2, "delta": 0.1, "max_models": 3, **options})


def server_of(assign: list[int], version: int = 2, **state: list[float]) -> Server:
    """Return a server of three rows after time step 0, in which each client trained its row."""
    assigned, R = np.array(assign), 3
    lives = np.isin(np.arange(R), assigned)
    full = {
        "compared": np.zeros(len(assign), np.int64),
        "losses": np.full((len(assign), R), np.nan),
        "samples": np.ones(len(assign)),
        "born": np.full(R, -1),
        "used": np.where(lives, 0, -1),
        "since": np.zeros(R, np.int64),
        "visits": np.bincount(assigned, minlength=R).astype(float),
    }
    full |= {name: np.array(value) for name, value in state.items()}
    made = byhand.server(len(assign), full, version, model=[[0.0]] * R)
    return replace(made, assign=assigned)


def notes_of(n: list[int], cluster: list[int], drift: list[float], losses: list[list[float]]) -> Notes:
    """Return the notes of clients 0, 1, ..., all of whom compared the models."""
    return byhand.notes(n, cluster=cluster, drift=drift, losses=losses)


@pytest.mark.parametrize(("delta", "drift"), [(0.3, 1.0), (0.5, 0.0)])
def test_a_client_detects_drift_by_the_rise_of_its_least_loss_and_trains_the_best_model(delta, drift):
    """Target 4, rows 0 and 2 hold models 0 and 5: F = 8 and 1/2, last 1/10. Drift iff 1/2 > 1/10 + delta.

    A step of rate 1/2 moves 5 to 4.5.
    """
    told = Message({"model": torch.tensor([[0.0], [5.0]])}, {"model": (0, 2)}, version=2, step=3)
    state = {"time": torch.tensor(0), "loss": torch.tensor(0.1)}
    report, kept = method(measure="loss", delta=delta).local_update(
        told, state, byhand.Quadratic([4.0]), byhand.KEY
    )
    assert (report.notes["cluster"], report.notes["drift"]) == (2, drift)
    assert_allclose(report.notes["losses"], [8.0, np.nan, 0.5])
    assert (float(report.vectors["model"]), float(kept["loss"]), int(kept["time"])) == (4.5, 0.5, 1)


@pytest.mark.parametrize(("select_on", "row", "loss"), [("train", 1, 0.5), ("val", 0, 2.0)])
def test_models_are_compared_on_training_or_validation_data(select_on, row, loss):
    """Targets 4 and 2: of models 0 and 5, F = 8 and 1/2 in training, 2 and 9/2 in validation."""
    client = byhand.Quadratic([4.0], val=[2.0])
    compared = method(measure="loss", select_on=select_on)
    report, kept = compared.local_update(byhand.message(model=[[0.0], [5.0]]), {}, client, byhand.KEY)
    assert (report.notes["cluster"], float(kept["loss"])) == (row, loss)


def test_a_client_compares_once_in_a_time_step():
    """Version 3 is the second round of time step 1: one model, nothing is compared or sent."""
    state = {"time": torch.tensor(1), "loss": torch.tensor(0.1)}
    told = Message({"model": torch.tensor([[5.0]])}, {"model": (2,)}, version=3, step=4)
    report, kept = method(measure="loss").local_update(told, state, byhand.Quadratic([4.0]), byhand.KEY)
    assert report.notes["cluster"] == 2
    assert np.isnan([report.notes["drift"], *report.notes["losses"]]).all()
    assert set(report.unsent) == {"drift", "losses"}
    assert kept == state


def test_errors_are_counted_on_training_data():
    """Ten samples of label 0; the two models give them logits (1, 0) and (0, 1): errors 0 and 1."""
    logits = [[[1.0, 0.0]] * 10, [[0.0, 1.0]] * 10]
    client = byhand.Told([[0.0] * 10] * 2, logits)
    report, _ = method().local_update(byhand.message(model=[[0.0], [1.0]]), {}, client, byhand.KEY)
    assert_allclose(report.notes["losses"], [0.0, 1.0, np.nan])


def test_all_models_are_downloaded_once_in_a_time_step_except_those_that_others_train_alone():
    """Row 2 was made in this time step. Client 0 has compared, client 1 not, client 2 has the new model."""
    server = server_of([0, 1, 2], compared=[1, 0, 1], born=[-1, -1, 1])
    reads = [method().reads(server, k)["model"] for k in range(3)]
    assert reads == [(0,), (0, 1), (2,)]
    later = replace(server, version=4)
    assert [method().reads(later, k)["model"] for k in range(3)] == [(0, 1, 2)] * 3


def test_each_client_that_detects_drift_gets_a_copy_of_its_best_model_which_it_trains_alone():
    """Clients 1 and 2 leave row 0, for rows 1 and 2; n = 1, 3, 2. Nothing merges: one model has clients."""
    notes = notes_of([1, 3, 2], [0, 0, 0], [0, 1, 1], [[0.1, np.nan, np.nan]] + [[0.9, np.nan, np.nan]] * 2)
    plan = method().aggregate(server_of([0, 0, 0]), notes)
    assert_array_equal(plan.assign, [0, 1, 2])
    copied, averaged = plan.mixings
    assert_array_equal(copied.keep, [[1, 0, 0], [1, 0, 0], [1, 0, 0]])
    assert_array_equal(averaged.weights, np.eye(3))
    assert_array_equal(plan.algorithm_state["born"], [-1, 1, 1])
    assert_array_equal(plan.algorithm_state["since"], [0, 3, 3])


def test_under_eager_all_who_detect_drift_in_a_time_step_share_a_model_also_in_a_later_round():
    """Clients 1 and 2 share row 1 with weights 3/5 and 2/5; client 0 joins it a round later."""
    eager = method(variant="eager")
    notes = notes_of([3, 2], [0, 0], [1, 1], [[0.9, np.nan, np.nan]] * 2)
    plan = eager.aggregate(server_of([0, 0, 0]), replace(notes, client=np.array([1, 2])))
    assert_array_equal(plan.assign, [0, 1, 1])
    assert_allclose(plan.mixings[1].weights[1], [3 / 5, 2 / 5])
    later = replace(server_of([0, 1, 1], version=3), algorithm_state=plan.algorithm_state)
    plan = eager.aggregate(later, notes_of([4], [0], [1], [[0.9, np.nan, np.nan]]))
    assert_array_equal(plan.assign, [1, 1, 1])
    assert len(plan.mixings) == 1, "the model exists: nothing is copied"


LOSSES = [[0.10, 0.15, 0.90], [0.16, 0.10, 0.90], [0.80, 0.80, 0.20]]


def test_models_that_fit_each_others_clients_are_merged_by_how_often_they_were_trained():
    """L of LOSSES is [[.1, .16, .8], [.15, .1, .8], [.9, .9, .2]], with model i in row i.

    D_01 = max(.16 - .1, .15 - .1, 0) = .06 <= .1; D_02 = max(.7, .7) and D_12 are larger. Visits were
    1, 2, 1 and are 2, 3, 2: row 0 becomes 2/5 of row 0 and 3/5 of row 1, which is free then.
    """
    server = server_of([0, 1, 2], visits=[1, 2, 1])
    plan = method().aggregate(server, notes_of([1, 1, 1], [0, 1, 2], [0, 0, 0], LOSSES))
    assert_array_equal(plan.assign, [0, 0, 2])
    assert_allclose(plan.mixings[-1].keep, [[2 / 5, 3 / 5, 0], [0, 1, 0], [0, 0, 1]])
    assert_array_equal(plan.mixings[0].weights, np.eye(3))
    assert_array_equal(plan.algorithm_state["used"], [1, GONE, 1])
    assert_array_equal(plan.algorithm_state["visits"], [5, 0, 2])
    none = method(merge_delta=0.05).aggregate(server, notes_of([1, 1, 1], [0, 1, 2], [0, 0, 0], LOSSES))
    assert_array_equal(none.assign, [0, 1, 2])


def test_linkage_is_complete():
    """D_01 = D_12 = .1 and D_02 = .3: 0 and 1 merge, and stay apart from 2; single linkage would join all."""
    losses = [[0.1, 0.2, 0.4], [0.2, 0.1, 0.2], [0.4, 0.2, 0.1]]
    plan = method(delta=0.15).aggregate(
        server_of([0, 1, 2]), notes_of([1, 1, 1], [0, 1, 2], [0, 0, 0], losses)
    )
    assert_array_equal(plan.assign, [0, 0, 2])


def test_the_loss_of_a_cluster_weighs_its_clients_by_samples():
    """Clients 0 and 1 have row 0, n = 1 and 3; client 2 row 1. L_10 = (.3 + 3 * .1) / 4 = .15, L_00 = .1.

    D = max(L_01 - L_00, L_10 - L_11, 0) = max(.1 - .1, .15 - .1) = .05. With equal weights it is .1.
    """
    losses = [[0.1, 0.3, np.nan], [0.1, 0.1, np.nan], [0.1, 0.1, np.nan]]
    plan = method(delta=0.07).aggregate(
        server_of([0, 0, 1]), notes_of([1, 3, 1], [0, 0, 1], [0, 0, 0], losses)
    )
    assert_array_equal(plan.assign, [0, 0, 0])


def test_clients_that_compare_in_a_later_round_are_merged_with_those_of_this_time_step():
    """Client 0 reports in the first round of time step 1 and client 1 in the second; client 2 is absent."""
    first = method().aggregate(server_of([0, 1, 2]), notes_of([1], [0], [0], LOSSES[:1]))
    assert_array_equal(first.assign, [0, 1, 2])
    later = replace(server_of([0, 1, 2], version=3), algorithm_state=first.algorithm_state)
    late = replace(notes_of([1], [1], [0], LOSSES[1:2]), client=np.array([1]))
    assert_array_equal(method().aggregate(later, late).assign, [0, 0, 2])
    next_step = replace(later, version=4)
    assert_array_equal(method().aggregate(next_step, late).assign, [0, 1, 2])


def test_the_model_unused_for_longest_makes_room_and_without_one_a_client_keeps_its_best():
    """Rows 1 and 2 have no client; 2 was used in time step 0, 1 in time step 1."""
    alone = notes_of([1], [0], [1], [[0.9] * 3])
    server = server_of([0, 0], version=4, compared=[1, 1], used=[1, 1, 0], visits=[4, 1, 1])
    plan = method().aggregate(server, alone)
    assert_array_equal(plan.assign, [2, 0])
    assert_array_equal(plan.mixings[0].keep, [[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    full = server_of([0, 1, 2], version=4, compared=[1, 1, 1], used=[1, 1, 1])
    plan = method(merge_delta=0.0).aggregate(full, alone)
    assert_array_equal(plan.assign, [0, 1, 2])
    assert_array_equal(plan.mixings[0].weights[:, 0], [1, 0, 0])


def test_an_upload_from_a_model_that_was_replaced_since_is_left_out():
    """Row 1 holds another model since version 2. Client 1 read version 1, and compares anew later."""
    server = server_of([0, 1, 1], since=[0, 2, 0])
    notes = replace(notes_of([1, 1, 1], [1, 1, 0], [0, np.nan, 0], LOSSES), staleness=np.array([1, 0, 1]))
    plan = method().aggregate(server, notes)
    assert_array_equal(plan.assign, [0, 1, 0])
    assert_array_equal(plan.mixings[0].weights, [[0, 0, 1], [0, 1, 0], [0, 0, 0]])
    assert_array_equal(plan.algorithm_state["losses"][0], [np.nan] * 3)
    assert_allclose(plan.algorithm_state["losses"][2], [0.8, np.nan, 0.2])


@pytest.mark.usefixtures("flat_plane")
def test_clients_that_begin_alone_find_their_groups(tmp_path):
    """Two groups of three: six models in time step 0, then one for each group."""
    alone = CATALOGUE["feddrift"](period=6, start="own", delta=0.2)
    done = toy.run(alone, toy.Tiny(equal=True), tmp_path, steps=7)
    assert_array_equal(done.servers[6].assign, np.arange(6))
    assert_array_equal(done.server.assign, [0, 0, 0, 3, 3, 3])


def test_more_clients_than_models_cannot_begin_alone():
    with pytest.raises(UserError, match=r"max_models = 3: with start: own each of the 4 clients"):
        method(start="own").check(byhand.problem([1] * 4))
    with pytest.raises(UserError, match="variant eager merges no models"):
        method(start="own", variant="eager")
