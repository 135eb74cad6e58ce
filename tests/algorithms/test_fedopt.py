"""FedAdam and FedYogi: two steps by hand."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose
from support import byhand, toy

from mpifl.algorithms.fedopt import FedAdam, FedYogi


@pytest.mark.parametrize(("cls", "v2"), [(FedAdam, 5.0), (FedYogi, 5.5)])
def test_two_steps_by_hand(cls, v2):
    """eta = 1, beta1 = 0.25, beta2 = 0.5, tau = 1: m_0 = 0, v_0 = 1, x = 0.

    Averaged 3: Delta = 3, m = 2.25; v = (1 + 9) / 2 = 5 for Adam, 1 + 9 / 2 = 5.5 for Yogi; x = 2.25 / (sqrt
    v + 1). Averaged x + sqrt 5: Delta^2 = 5, m = 0.5625 + 0.75 sqrt 5; Adam: v = (5 + 5) / 2 = 5; Yogi: 5.5 -
    5 / 2 = 3. The second column is a buffer: it is averaged.
    """
    method = cls(server_lr=1.0, beta1=0.25, beta2=0.5, tau=1.0)
    old = byhand.server(1, model=[[0.0, 9.0]], first=[[0.0]], second=[[1.0]])
    moments = {"first": [[0.0]], "second": [[1.0]]}
    new = method.server_update(old, byhand.server(1, model=[[3.0, 7.0]], **moments))
    x = 2.25 / (v2**0.5 + 1)
    assert_allclose(new.tables["model"], [[x, 7.0]], rtol=1e-6)
    assert_allclose(new.tables["second"], [[v2]])
    moments = {"first": [[2.25]], "second": [[v2]]}
    last = method.server_update(new, byhand.server(1, model=[[x + 5**0.5, 5.0]], **moments))
    m, v = 0.5625 + 0.75 * 5**0.5, {FedAdam: 5.0, FedYogi: 3.0}[cls]
    assert_allclose(last.tables["second"], [[v]], rtol=1e-5)
    assert_allclose(last.tables["model"], [[x + m / (v**0.5 + 1), 5.0]], rtol=1e-5)


@pytest.mark.parametrize("cls", [FedAdam, FedYogi])
def test_nobody_downloads_the_moments(cls, tmp_path):
    done = toy.run(cls(), toy.Tiny(), tmp_path)
    assert done.server_step.ledger.total("down") == 4 * 3 * 6 * done.server_step.problem.layout.size
    assert float(done.server.tables["first"].abs().max()) > 0
