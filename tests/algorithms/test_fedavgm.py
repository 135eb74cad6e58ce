"""FedAvgM: two steps by hand, and the limit without momentum."""

from __future__ import annotations

import pytest
from algorithms.test_limits import Limit, agree
from numpy.testing import assert_allclose
from support import byhand

from mpifl.algorithms.fedavgm import FedAvgM


def test_two_steps_by_hand():
    """beta = 0.25, server_lr = 2; w = 1, v = 0, averaged 2: v = 1, w = 3. Averaged 2 again: v = 0.25 - 1, w =
    1.5.

    The second column is a buffer: it is averaged.
    """
    method = FedAvgM(beta=0.25, server_lr=2.0)
    old = byhand.server(1, model=[[1.0, 9.0]], momentum=[[0.0]])
    for averaged, w, v in ((2.0, 3.0, 1.0), (2.0, 1.5, -0.75)):
        mixed = byhand.server(1, model=[[averaged, 7.0]], momentum=old.tables["momentum"].tolist())
        old = method.server_update(old, mixed)
        assert_allclose(old.tables["model"], [[w, 7.0]])
        assert_allclose(old.tables["momentum"], [[v]])


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_momentum_it_is_fedavg(participation, tmp_path):
    agree(Limit("beta = 0", "fedavgm", {"beta": 0.0}), "fedavg", participation, tmp_path)
