"""FedEM: E and M step by hand, the mixture's prediction, and the limit of one component."""

from __future__ import annotations

import math

import pytest
import torch
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedem import FedEM
from mpifl.core.federation import Split
from mpifl.training.evaluation import evaluate_mixture


def test_the_e_and_m_step_by_hand():
    """pi = (3/4, 1/4); losses of two samples: (0, ln 3) under component 0, (ln 3, 0) under component 1.

    Sample 0: 3/4 against 1/4 * 1/3 = 1/12, q = (9/10, 1/10). Sample 1: 3/4 * 1/3 = 1/4 against 1/4, q = (1/2,
    1/2). pi <- ((0.9 + 0.5) / 2, (0.1 + 0.5) / 2) = (0.7, 0.3).
    """
    client = byhand.Told([[0.0, math.log(3)], [math.log(3), 0.0]])
    state = {"pi": torch.tensor([0.75, 0.25])}
    q, pi = FedEM(num_components=2).expect(byhand.message(model=[[0.0], [1.0]]), state, client)
    assert_close(q, torch.tensor([[0.9, 0.5], [0.1, 0.5]]))
    assert_close(pi, torch.tensor([0.7, 0.3]))


def test_components_are_averaged_by_samples():
    """n = 1, 3 and K = 2: row c takes 1/4 of component c of upload 0 and 3/4 of that of upload 1."""
    plan = FedEM(num_components=2).aggregate(
        byhand.server(3, model=[[0.0], [0.0]]), byhand.notes([1, 3], client=[0, 2], component=[1, 1])
    )
    assert_allclose(plan.mixings[0].weights, [[0.25, 0, 0.75, 0], [0, 0.25, 0, 0.75]])
    assert_allclose(plan.assign, [1, 0, 1])


def test_the_mixture_predicts():
    """Chances of label 1: (0.1, 0.8) under component 0, (0.6, 0.3) under component 1; pi = (0.25, 0.75).

    Mixed: 0.025 + 0.45 = 0.475 and 0.2 + 0.225 = 0.425, so both samples are labelled 0; one of them is a 0.
    Loss: -(ln 0.525 + ln 0.425) / 2.
    """
    client = byhand.Told([], [[[0.9, 0.1], [0.2, 0.8]], [[0.4, 0.6], [0.7, 0.3]]])
    split = Split(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = evaluate_mixture(client, torch.tensor([[0.0], [1.0]]), torch.tensor([0.25, 0.75]), split)
    assert scores["accuracy"] == 0.5
    assert_allclose(scores["loss"], -(math.log(0.525) + math.log(0.425)) / 2, rtol=1e-6)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedem_with_one_component_is_fedavg(participation, tmp_path):
    agree(Limit("C = 1", "fedem", {"num_components": 1}), "fedavg", participation, tmp_path)


def test_components_go_apart_and_shares_stay_at_the_client(tmp_path):
    """The ledger counts K models each way, and nothing else."""
    done = toy.run(FedEM(), toy.Tiny(), tmp_path)
    d, rounds, clients = done.server_step.problem.layout.size, 3, 6
    assert (
        done.server_step.ledger.total("up")
        == done.server_step.ledger.total("down")
        == 4 * 3 * d * rounds * clients
    )
    assert float(torch.cdist(*2 * (done.server.tables["model"],)).max()) > 0.1


def test_emdcfl_judges_the_last_component_as_trained(tmp_path):
    done = toy.run(FedEM(variant="emdcfl"), toy.Tiny(), tmp_path)
    message, state, client = done.served[2]
    assert_close(done.scores["loss"][2], client.evaluate(state["last"])["loss"])
    assert not torch.equal(state["last"], message["model"][-1])
