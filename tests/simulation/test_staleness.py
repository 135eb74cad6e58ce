"""The step size of stale uploads, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import toy

from mpifl.core.algorithm import Algorithm
from mpifl.core.mixing import add, average, blend
from mpifl.core.plan import Mixing, Plan
from mpifl.core.types import Notes, Server
from mpifl.simulation.policies import POLICIES, Barrier, EveryArrival
from mpifl.simulation.staleness import damp, step_sizes


def notes_of(lag, num_samples=None) -> Notes:
    """Return notes of so many uploads."""
    m = len(lag)
    n = np.ones(m, int) if num_samples is None else np.array(num_samples)
    return Notes(np.arange(m), n, np.array(lag), np.ones(m, bool))


def test_damping_keeps_a_part_of_the_old_rows_by_hand():
    """Weights 1/4 and 3/4, rates 0.8 and 0.4: 0.2 and 0.3 of the uploads, 1 - 0.5 of the old row."""
    plan = Plan([average(notes_of([0, 0], [1, 3]))])
    (mixing,) = damp(plan, np.array([0.8, 0.4]), {"model": 1}).mixings
    assert_allclose(mixing.weights, [[0.2, 0.3]])
    assert_allclose(mixing.keep, [0.5])


def test_damping_leaves_rows_alone_that_no_upload_enters():
    """Row 0 takes upload 0, row 1 stays; row 2 is a copy of row 0, which no upload has a say in."""
    weights = np.array([[1.0], [0.0], [0.0]])
    keep = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0]], float)
    (mixing,) = damp(Plan([Mixing(weights, keep=keep)]), np.array([0.25]), {"model": 3}).mixings
    assert_allclose(mixing.weights, [[0.25], [0], [0]])
    assert_allclose(mixing.keep, [[0.75, 0, 0], [0, 1, 0], [1, 0, 0]])


def test_damping_scales_what_is_added_to_models_and_leaves_control_variates_whole():
    plan = Plan([add(np.array([[0.5]])), add(np.array([[0.5]]), into="control")])
    model, control = damp(plan, np.array([0.5]), {"model": 1, "control": 1}).mixings
    assert_allclose([model.weights[0, 0], model.keep[0]], [0.25, 1.0])
    assert_allclose([control.weights[0, 0], control.keep[0]], [0.5, 1.0])


def test_damping_damps_all_components_of_an_upload():
    """Two uploads of two components each: their rates are 1 and 0.5."""
    weights = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    (mixing,) = damp(Plan([Mixing(weights)]), np.array([1.0, 0.5]), {"model": 2}).mixings
    assert_allclose(mixing.weights, [[0.5, 0, 0.25, 0], [0, 0.5, 0, 0.25]])
    assert_allclose(mixing.row_sums(), 1.0)
    assert_allclose(mixing.keep, [0.25, 0.25])


@pytest.mark.parametrize("keep", [None, np.ones((2, 3)), np.ones((2, 1))])
def test_a_mixing_that_changes_the_number_of_rows_is_not_damped(keep):
    """Rows anew, of three or of one; what follows on the two rows is damped."""
    anew, then = Mixing(np.ones((2, 1)), keep=keep), blend(np.array([[0.5], [0.5]]))
    first, second = damp(
        Plan([anew, then]), np.array([0.5]), {"model": 3 if keep is None else keep.shape[1]}
    ).mixings
    assert first is anew
    assert_allclose([second.weights[:, 0], second.keep], [[0.25, 0.25], [0.75, 0.75]])
    (new,) = damp(Plan([Mixing(np.ones((2, 1)), into="other")]), np.array([0.5]), {"model": 2}).mixings
    assert new.keep is None, "a table that was not there"


@dataclass(frozen=True)
class Regroup(Algorithm):
    """Clusters anew at each step: two rows, then three, each the mean of the uploads."""

    def setup(self, problem, fingerprints, key):
        """Begin with two rows."""
        return Server({"model": problem.init(0)[None].repeat(2, 1)}, np.arange(problem.num_clients) % 2)

    def local_update(self, message, state, client, key):
        """Upload ones."""
        return client.report(model=torch.ones_like(message["model"][0])), state

    def aggregate(self, server, notes):
        """Change the number of rows."""
        K, m = 2 + (server.version + 1) % 2, len(notes.client)
        return Plan([Mixing(np.full((K, m), 1 / m))], assign=np.arange(len(server.assign)) % K)


@pytest.mark.parametrize("policy", [EveryArrival(rate=0.5), POLICIES["buffer"](size=3, rate=0.5)])
def test_a_method_may_change_the_number_of_rows_in_damped_steps(policy, tmp_path):
    done = toy.events(Regroup(), toy.Tiny(), tmp_path, 4, policy=policy)
    assert [len(s.tables["model"]) for s in done.servers] == [2, 3, 2, 3, 2]
    assert_allclose(done.server.tables["model"], 1.0)


def test_nothing_is_damped_at_rate_one():
    plan = Plan([blend(np.array([[0.3]]))])
    assert damp(plan, np.ones(1), {"model": 1}) is plan


def test_step_sizes_by_lag():
    assert_allclose(EveryArrival(rate=0.6, staleness_a=0.5).step_sizes(np.array([0, 3])), [0.6, 0.3])
    assert_allclose(Barrier().step_sizes(np.array([0, 0])), [1, 1])


def test_an_exponent_that_is_neither_none_nor_one():
    """rate 0.6, lags 0 and 3, a = 1/2: 0.6 and 0.6 / 2."""
    assert_allclose(step_sizes(np.array([0, 3]), 0.6, 0.5), [0.6, 0.3])
