"""LG-FedAvg: the head travels, the representation stays."""

from __future__ import annotations

import pytest
from support import toy
from torch.testing import assert_close

from mpifl.algorithms.lgfedavg import LGFedAvg
from mpifl.core.parameters import take


@pytest.mark.parametrize(("shared", "private"), [("head", "body"), ("block", "trunk")])
def test_what_is_shared_is_common_and_the_rest_is_not(shared, private, tmp_path):
    done = toy.run(LGFedAvg(shared=shared), toy.Tiny(), tmp_path, model=toy.mlp(8, 6))
    layout = done.server_step.problem.layout
    common, own = (take(done.models(), layout.part(part)) for part in (shared, private))
    assert_close(common, common[:1].expand(6, -1), rtol=0, atol=0)
    assert float((own[0] - own[5]).abs().max()) > 0.01
    assert done.server_step.ledger.total("up") == 4 * 3 * 6 * common.shape[1]


def test_the_shared_part_is_the_mean_by_samples(tmp_path):
    done = toy.run(LGFedAvg(), toy.Tiny(), tmp_path, steps=1)
    n = done.notes[0].num_samples
    plan = LGFedAvg().aggregate(done.servers[0], done.notes[0])
    assert plan.mixings[0].into == plan.mixings[0].of == "shared"
    assert_close(plan.mixings[0].weights[0], n / n.sum())


def test_one_client_trains_alone(tmp_path):
    from algorithms.test_limits import Limit, agree

    agree(Limit("one client", "lgfedavg", {}, {"num_clients": 1, "num_groups": 1}), "local", 1.0, tmp_path)
