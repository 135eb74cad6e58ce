"""FedRep: head first, then the body under it."""

from __future__ import annotations

from support import toy
from torch.testing import assert_close

from mpifl.algorithms.fedrep import FedRep
from mpifl.core.parameters import put, take
from mpifl.core.rng import key


def test_a_visit_trains_the_head_then_the_body(tmp_path):
    """A visit spelled out: the head it keeps is the first stage's, the body it sends the second's."""
    done = toy.run(FedRep(head_epochs=2), toy.Tiny(), tmp_path, steps=0)
    message, _, client = done.served[4]
    layout, address = client.layout, key(0, "visit", 4, 0)
    report, state = FedRep(head_epochs=2).local_update(message, {}, client, address)
    first = client.sgd(client.init, address.of("head"), part=layout.part("head"), epochs=2).vector
    second = client.sgd(first, address, part=layout.part("body")).vector
    assert_close(state["head"], take(first, layout.part("head")))
    assert_close(report.vectors["body"], take(second, layout.part("body")))
    assert_close(put(first, layout.part("body"), report.vectors["body"]), second)


def test_heads_stay_and_differ(tmp_path):
    done = toy.run(FedRep(), toy.Tiny(), tmp_path)
    body, head = (
        take(done.models(), done.server_step.problem.layout.part(part)) for part in ("body", "head")
    )
    assert_close(body, body[:1].expand(6, -1), rtol=0, atol=0)
    assert float((head[0] - head[5]).abs().max()) > 0.05
    assert done.server_step.ledger.total("up") == 4 * 3 * 6 * body.shape[1]
