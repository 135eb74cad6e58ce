"""The step size of stale uploads, worked out by hand."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose

from mpifl.core.mixing import Mixing, Plan, add, average, blend
from mpifl.core.types import Notes
from mpifl.simulation.policies import Barrier, EveryArrival
from mpifl.simulation.staleness import damp


def notes_of(lag, num_samples=None) -> Notes:
    """Return notes of so many uploads."""
    m = len(lag)
    n = np.ones(m, int) if num_samples is None else np.array(num_samples)
    return Notes(np.arange(m), n, np.array(lag), np.ones(m, bool))


def test_damping_keeps_a_part_of_the_old_rows_by_hand():
    """Weights 1/4 and 3/4, rates 0.8 and 0.4: 0.2 and 0.3 of the uploads, 1 - 0.5 of the old row."""
    plan = Plan([average(notes_of([0, 0], [1, 3]))])
    (mixing,) = damp(plan, np.array([0.8, 0.4])).mixings
    assert_allclose(mixing.weights, [[0.2, 0.3]])
    assert_allclose(mixing.keep, [0.5])


def test_damping_leaves_rows_alone_that_no_upload_enters():
    """Row 0 takes upload 0, row 1 stays; row 2 is a copy of row 0, which no upload has a say in."""
    weights = np.array([[1.0], [0.0], [0.0]])
    keep = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0]], float)
    (mixing,) = damp(Plan([Mixing(weights, keep=keep)]), np.array([0.25])).mixings
    assert_allclose(mixing.weights, [[0.25], [0], [0]])
    assert_allclose(mixing.keep, [[0.75, 0, 0], [0, 1, 0], [1, 0, 0]])


def test_damping_scales_what_is_added_to_models_and_leaves_control_variates_whole():
    plan = Plan([add(np.array([[0.5]])), add(np.array([[0.5]]), into="control")])
    model, control = damp(plan, np.array([0.5])).mixings
    assert_allclose([model.weights[0, 0], model.keep[0]], [0.25, 1.0])
    assert_allclose([control.weights[0, 0], control.keep[0]], [0.5, 1.0])


def test_damping_damps_all_components_of_an_upload():
    """Two uploads of two components each: their rates are 1 and 0.5."""
    weights = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    (mixing,) = damp(Plan([Mixing(weights)]), np.array([1.0, 0.5])).mixings
    assert_allclose(mixing.weights, [[0.5, 0, 0.25, 0], [0, 0.5, 0, 0.25]])
    assert_allclose(mixing.row_sums(), 1.0)
    assert_allclose(mixing.keep, [0.25, 0.25])


def test_a_step_that_changes_the_number_of_rows_is_not_damp():
    split = Mixing(np.zeros((2, 1)), keep=np.ones((2, 1)))
    assert damp(Plan([split]), np.array([0.5])).mixings == [split]


def test_nothing_is_damped_at_rate_one():
    plan = Plan([blend(np.array([[0.3]]))])
    assert damp(plan, np.ones(1)) is plan


def test_step_sizes_by_lag():
    assert_allclose(EveryArrival(rate=0.6, staleness_a=0.5).step_sizes(np.array([0, 3])), [0.6, 0.3])
    assert_allclose(Barrier().step_sizes(np.array([0, 0])), [1, 1])
