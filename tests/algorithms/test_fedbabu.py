"""FedBABU: the head stands still, and the two evaluations."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.fedbabu import FedBABU
from mpifl.core.parameters import take


def test_only_the_body_moves(tmp_path):
    done = toy.run(FedBABU(), toy.Tiny(), tmp_path)
    layout, init = done.server_step.problem.layout, done.server_step.problem.init(0)
    head, body = layout.part("head"), layout.part("body")
    assert_close(take(done.models(), head), take(init, head).expand(6, -1), rtol=0, atol=0)
    assert float((take(done.model(0), body) - take(init, body)).abs().max()) > 0.02
    assert done.server_step.ledger.total("up") == 4 * 3 * 6 * done.server.tables["body"].shape[1]


def test_clients_are_judged_before_and_after_fine_tuning(tmp_path):
    tuned, not_tuned = (toy.run(FedBABU(tune_epochs=e), toy.Tiny(), tmp_path / str(e)) for e in (5, 0))
    assert_allclose(tuned.scores["accuracy_initial"], not_tuned.scores["accuracy"])
    assert_array_equal(not_tuned.scores["accuracy"], not_tuned.scores["accuracy_initial"])
    assert tuned.scores["loss"].mean() < tuned.scores["loss_initial"].mean() - 0.05
    assert_close(tuned.server.tables["body"], not_tuned.server.tables["body"], rtol=0, atol=0)


@pytest.mark.parametrize("part", ["body", "head"])
def test_a_part_is_tuned(part, tmp_path):
    done = toy.run(FedBABU(tune_part=part), toy.Tiny(), tmp_path)
    whole = toy.run(FedBABU(), toy.Tiny(), tmp_path / "whole")
    assert done.scores["loss"].mean() < done.scores["loss_initial"].mean()
    assert not (done.scores["loss"] == whole.scores["loss"]).any()
