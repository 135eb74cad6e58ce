"""CCFL and FedSoft-Async by hand: the client's step, what the server makes of its own sets, their figures.

The server's rules are in `tests/runtime/test_asynchronous_rules.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.ccfl import CCFL
from mpifl.algorithms.fedsoft_async import FedSoftAsync
from mpifl.core.parameters import Layout
from mpifl.core.types import ProblemInfo
from mpifl.experiment.run import figures


def owned(target: float, num_samples: int) -> byhand.Quadratic:
    """Return a labelled set of the server's, as a client."""
    client = byhand.Quadratic([target])
    client.num_samples = num_samples
    return client


def test_a_client_of_ccfl_is_held_near_what_it_received():
    """F(w) = (w - 4)^2 / 2, eta = 0.5, rho = 0.5, received 1: 1 -> 2.5, then 2.5 - 0.5 (-1.5 + 0.5 * 1.5) =
    2.875.

    Before the answer it scores 1 / (1 + F) on its test data, whose target is 3: F = 0.125^2 / 2.
    """
    client = byhand.Quadratic([4.0], steps=2, test=[3.0])
    report, state = CCFL(rho=0.5).local_update(byhand.message(model=[[1.0]]), {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([2.875]))
    assert_allclose(report.metrics["accuracy_before"], 1 / (1 + 0.125**2 / 2))
    assert not state


def test_a_client_of_fedsoft_async_counts_its_samples_and_starts_from_their_mixture():
    """Ten samples: losses 1 under model 0, 0 or 2 under model 1: 1 fits four, 0 six: mu = (0.6, 0.4).

    Models 0 and 1 are mixed to 0.4; target 0, eta = 0.5, rho = 0.5, two steps: 0.4 -> 0.2, then
    0.2 - 0.5 (0.2 + 0.5 (0.2 - 0.4)) = 0.15.
    """
    client = byhand.Told([[1.0] * 10, [0.0] * 4 + [2.0] * 6])
    client.steps = 2
    message = byhand.message(model=[[0.0], [1.0]])
    report, _ = FedSoftAsync(rho=0.5).local_update(message, {}, client, byhand.KEY)
    assert_allclose(report.notes["mu"], [0.6, 0.4])
    assert_close(report.vectors["model"], torch.tensor([0.15]))
    assert_allclose(report.metrics["accuracy_before"], 1 / (1 + 100.15**2 / 2), rtol=1e-5)


def test_fedsoft_async_serves_the_clients_own_mixture():
    server = byhand.server(2, {"mu": [[0.6, 0.4], [0.1, 0.9]], "changed": [0, 0]}, model=[[0.0], [1.0]])
    assert_array_equal(FedSoftAsync().serves(server, 1)["model"], [0.1, 0.9])
    assert FedSoftAsync().reads(server, 1) == {"model": (0, 1)}


def test_ccfl_answers_with_the_clients_own_mixture():
    server = byhand.server(2, {"u": [[0.6, 0.4], [0.1, 0.9]]}, model=[[0.0], [1.0]])
    assert_array_equal(CCFL().reads(server, 1)["model"], [0.1, 0.9])
    assert_array_equal(CCFL().mixtures(server), server.algorithm_state["u"])


@pytest.mark.parametrize("method", [CCFL(pretrain_epochs=3), FedSoftAsync(pretrain_epochs=3)])
def test_the_first_models_are_trained_on_the_servers_sets(method):
    """From the common 2 towards 4 and 8, three epochs of one step, rate 0.5: 3, 3.5, 3.75 and 5, 6.5, 7.25.

    All mixtures are even at first.
    """
    public = owned(4.0, 10), owned(8.0, 10)
    layout = Layout(("w",), ((1,),), 1)
    world = ProblemInfo(3, 2, np.ones(3), layout, lambda j: torch.full((1,), 2.0 + j), public=public)
    server = method.setup(world, None, byhand.KEY)
    assert_close(server.tables["model"], torch.tensor([[3.75], [7.25]]))
    assert_array_equal(method.mixtures(server), np.full((3, 2), 0.5))
    assert_array_equal(server.algorithm_state["changed"], [0, 0])
    assert public[0].calls[0].key != public[1].calls[0].key, "each draws batches of its own"


PUBLIC = owned(4.0, 300), owned(8.0, 100)


def test_the_server_judges_an_upload_by_sums_over_sixteen_batches():
    """w = 2: losses 2 and 18 on the two sets, times 16, whatever their sizes."""
    assert_allclose(CCFL().inspect({"model": torch.tensor([2.0])}, PUBLIC)["l"], [32, 288])


def test_the_server_appraises_each_model_on_its_own_set_when_it_changed():
    """Rows 2 and 6 for targets 4 and 8: losses 2 and 2, times 16. Then row 1 becomes 5: 4.5; row 0 is not
    looked at again (its note says 77).
    """
    first = CCFL().appraise(None, byhand.server(1, model=[[2.0], [6.0]]), PUBLIC)
    assert_allclose(first.algorithm_state["own"], [32, 32])
    old = replace(first, algorithm_state={**first.algorithm_state, "own": np.array([77.0, 32.0])})
    new = replace(old, tables={"model": torch.tensor([[2.0], [5.0]])})
    assert_allclose(CCFL().appraise(old, new, PUBLIC).algorithm_state["own"], [77, 72])
    assert_allclose(old.algorithm_state["own"], [77, 32])


# ---- the figures of both


@pytest.fixture
def context():
    """Return a run of two clients whose true mixtures are (1/2, 1/2) at visit 2 and (1, 0) at visit 0."""
    truth = {(0, 2): [0.5, 0.5], (1, 0): [1.0, 0.0]}

    def evaluate(vector, split):
        return {"accuracy": {(0.0, "a"): 0.9, (1.0, "b"): 0.7}.get((float(vector[0]), split), 0.0)}

    federation = SimpleNamespace(
        mixture=lambda k, visit: np.array(truth[k, visit]), group_test_sets=lambda: ("a", "b")
    )
    problem = SimpleNamespace(public=[SimpleNamespace(evaluate=evaluate)])
    return SimpleNamespace(config=SimpleNamespace(algorithm=CCFL()), federation=federation, problem=problem)


def test_the_estimate_is_compared_with_the_truth_of_the_last_visit(context):
    """Visits 3 and 0: KL((1/2, 1/2) || (1/4, 3/4)) = ln(4/3) / 2 and KL((1, 0) || (1/2, 1/2)) = ln 2, halved.

    Rows 0 and 1 score 0.9 and 0.7 on the test sets of their own groups.
    """
    server = byhand.server(2, {"u": [[0.25, 0.75], [0.5, 0.5]]}, model=[[0.0], [1.0]])
    record = SimpleNamespace(server=server, evaluated_clients=np.arange(2))
    found = figures(context, record, np.array([3, 0]))
    assert_allclose(found["mixture_kl"], (np.log(4 / 3) / 2 + np.log(2)) / 2)
    assert_allclose(found["accuracy_cluster"], 0.8)
