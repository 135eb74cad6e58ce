"""FedAvg with fine-tuning: FedAvg's model, evaluated one step later."""

from __future__ import annotations

import pytest
from numpy.testing import assert_array_equal
from support import byhand, toy
from torch.testing import assert_close

from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.fedavg_ft import FedAvgFT
from mpifl.algorithms.fedprox import FedProx
from mpifl.core.errors import UserError


def test_without_tuning_it_is_fedavg(tmp_path):
    tuned, none, fedavg = (
        toy.run(a, toy.Tiny(), tmp_path / str(i), participation=0.5)
        for i, a in enumerate((FedAvgFT(tune_epochs=3), FedAvgFT(tune_epochs=0), FedAvg()))
    )
    for run in (tuned, none):
        assert_close(run.server.tables["model"], fedavg.server.tables["model"], rtol=0, atol=0)
        assert_array_equal(run.scores["accuracy_initial"], fedavg.scores["accuracy"])
    assert_array_equal(none.scores["loss"], fedavg.scores["loss"])
    assert tuned.scores["loss"].mean() < fedavg.scores["loss"].mean() - 0.02


def test_two_evaluations_of_one_model_agree(tmp_path):
    """Fine-tuning is addressed by client and visit: judging twice gives the same numbers."""
    done = toy.run(FedAvgFT(), toy.Tiny(), tmp_path)
    again = done.server_step.evaluate(done.server, done.notes[-1].client)
    assert_array_equal(again["loss"], done.scores["loss"])


def test_how_far_tuning_moves_each_module_by_hand():
    """From (0, 0, 0) to targets (4, 6, 8), rate 0.5, one epoch of one step: body by 2, head by (3, 4): 5."""
    client = byhand.Quadratic([4.0, 6.0, 8.0])
    client.layout = byhand.FLAT
    message = byhand.message(model=[[0.0, 0.0, 0.0]])
    scores = FedAvgFT(tune_sizes=True).evaluate(message, {}, client, client.data.test)
    assert {n: s for n, s in scores.items() if "size" in n} == {
        "tuned_size_body": 2.0,
        "tuned_size_head": 5.0,
    }


def test_with_mu_it_trains_as_fedprox(tmp_path):
    tuned, fedprox, fedavg = (
        toy.run(a, toy.Tiny(), tmp_path / str(i), participation=0.5)
        for i, a in enumerate((FedAvgFT(mu=0.1), FedProx(mu=0.1), FedAvg()))
    )
    assert_close(tuned.server.tables["model"], fedprox.server.tables["model"], rtol=0, atol=0)
    assert_array_equal(tuned.scores["accuracy_initial"], fedprox.scores["accuracy"])
    assert float((tuned.server.tables["model"] - fedavg.server.tables["model"]).abs().max()) > 1e-4
    with pytest.raises(UserError, match="mu"):
        FedAvgFT(mu=-1.0)
