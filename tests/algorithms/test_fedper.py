"""FedPer: the body is shared, the head is the client's, and fine-tuning comes after."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import UserError


def test_fedper_shares_the_body_and_nothing_else(tmp_path):
    done = toy.run(CATALOGUE["fedper"](), toy.Tiny(), tmp_path, steps=2)
    layout = done.server_step.problem.layout
    (body,), (head,) = layout.part("body"), layout.part("head")
    models = done.models()
    assert_close(models[:, body], done.server.tables["body"].expand(6, -1), rtol=0, atol=0)
    assert float(torch.pdist(models[:, head]).min()) > 1e-3
    assert done.server.tables["body"].shape == (1, body.stop - body.start)


def test_fedper_is_fine_tuned_where_asked_and_trains_alike(tmp_path):
    tuned, plain = (
        toy.run(CATALOGUE["fedper"](tune_epochs=n), toy.Tiny(), tmp_path / str(n), steps=2) for n in (3, 0)
    )
    assert_close(tuned.models(), plain.models(), rtol=0, atol=0)
    assert_array_equal(tuned.scores["loss_initial"], plain.scores["loss"])
    assert tuned.scores["loss"].mean() < plain.scores["loss"].mean() - 0.02
    assert "loss_initial" not in plain.scores
    with pytest.raises(UserError, match="tune_epochs"):
        CATALOGUE["fedper"](tune_epochs=-1)
