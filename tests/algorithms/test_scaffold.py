"""SCAFFOLD by hand: a visit, and the server."""

from __future__ import annotations

import torch
from numpy.testing import assert_allclose
from support import byhand
from torch.testing import assert_close

from mpifl.algorithms.registry import CATALOGUE


def test_a_visit_of_scaffold():
    """F(y) = (y - 4)^2 / 2, eta = 0.5, x = 0, c = 1, c_k = 0: y = 0, then 1.5, then 1.5 + 0.75 = 2.25.

    c_k+ = 0 - 1 + (0 - 2.25) / (2 * 0.5) = -3.25; it sends 2.25 and -3.25. Next visit with c = 0, x = 2.25:
    drift 3.25, y = 2.25 - 0.5 (-1.75 + 3.25) = 1.5, then 1.5 - 0.5 (-2.5 + 3.25) = 1.125;
    c_k+ = -3.25 + (2.25 - 1.125) = -2.125.
    """
    method, client = CATALOGUE["scaffold"](), byhand.Quadratic([4.0], lr=0.5, steps=2)
    told = byhand.message(model=[[0.0]], control=[[1.0]])
    report, state = method.local_update(told, {}, client, byhand.KEY)
    assert_close(dict(report.vectors), {"model": torch.tensor([2.25]), "control": torch.tensor([-3.25])})
    assert_close(state["control"], torch.tensor([-3.25]))
    told = byhand.message(model=[[2.25]], control=[[0.0]])
    report, state = method.local_update(told, state, client, byhand.KEY)
    assert_close(dict(report.vectors), {"model": torch.tensor([-1.125]), "control": torch.tensor([1.125])})
    assert_close(state["control"], torch.tensor([-2.125]))


def test_a_visit_of_scaffold_with_momentum():
    """Three numbers, targets 4, 0, -2; eta = 0.5, momentum 0.5, x = 0, c = 1, c_k = 0, two steps.

    v = w - target + 1, then v / 2 + w - target + 1. First: gradients -4, 0, 2; v = -3, 1, 3; y = 1.5, -0.5,
    -1.5. Second: gradients -2.5, -0.5, 0.5; v = -3, 1, 3; y = 3, -1, -3. The first step counts 1.5 times, the
    second once: c_k+ = 0 - 1 - y / (0.5 * 2.5) = -3.4, -0.2, 1.4, the mean (1.5 g_1 + g_2) / 2.5.
    """
    client = byhand.Quadratic([4.0, 0.0, -2.0], lr=0.5, steps=2, momentum=0.5)
    told = byhand.message(model=[[0.0] * 3], control=[[1.0] * 3])
    report, state = CATALOGUE["scaffold"]().local_update(told, {}, client, byhand.KEY)
    assert_close(report.vectors["model"], torch.tensor([3.0, -1.0, -3.0]))
    assert_close(state["control"], torch.tensor([-3.4, -0.2, 1.4]))
    assert_close(report.vectors["control"], state["control"])


def test_the_server_of_scaffold():
    """2 of 4 clients, eta_g = 0.5: x += 0.5 (dy_1 + dy_2) / 2; c += (dc_1 + dc_2) / 4; all count alike."""
    server = byhand.server(4, model=[[0.0]], control=[[0.0]])
    plan = CATALOGUE["scaffold"](server_lr=0.5).aggregate(server, byhand.notes([1, 99], [0, 3]))
    x, c = plan.mixings
    assert (x.into, c.into, c.of) == ("model", "control", "control")
    assert_allclose(x.weights, [[0.25, 0.25]])
    assert_allclose(c.weights, [[0.25, 0.25]])
    assert_allclose(x.keep, [1.0])
    assert_allclose(c.keep, [1.0])


def test_a_client_that_takes_no_step_keeps_its_control():
    state = {"control": torch.tensor([0.5])}
    message = byhand.message(model=[[1.0]], control=[[0.25]])
    report, kept = CATALOGUE["scaffold"]().local_update(
        message, state, byhand.Quadratic([4.0], steps=0), byhand.KEY
    )
    assert_close(kept["control"], state["control"])
    assert_close(report.vectors["control"], torch.zeros(1))
    assert_close(report.vectors["model"], torch.zeros(1))
