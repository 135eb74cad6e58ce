"""The second look: who asks whom, what arrives, what is counted, and whose failure leaves whom out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy

from mpifl.core.capabilities import Question, RememberedUploads, SecondLook
from mpifl.core.method import Algorithm, Plan
from mpifl.core.mixing import average
from mpifl.runtime.hook_errors import ClientError
from mpifl.traffic.compression import Payload


@dataclass(frozen=True)
class Asking(SecondLook, Algorithm):
    """Each client asks each other, by its own number; the answer is 10 times that, and the peer's number.

    Attributes:
        fails: a hook that fails.
        at: the asking client, or the asking client and the peer, for which it fails.
        times: how often it fails.
    """

    fails: str = ""
    at: tuple[int, ...] = ()
    times: int = 2
    failed: ClassVar[list[str]] = []

    def local_update(self, message, state, client, key):
        """Upload the downloaded model, with the client's number in front."""
        model = message["model"][0].clone()
        model[0] = client.id
        return client.report(model=model), state

    def ask(self, client, own, key):
        """Ask with the number, and show it twice."""
        self._fail("ask", client.id)
        number = own["model"][:1]
        return Question(number.clone(), number.repeat(2), {"told": client.id})

    def answer(self, client, payload, key):
        """Return both numbers as one."""
        asker = int(payload[0])
        self._fail("answer", asker, client.id)
        return 10 * payload.reshape(1, 1).repeat(1, 3) + client.id

    def compare(self, shown, answered, notes):
        """Return the answer, and what was shown and told."""
        self._fail("compare", int(shown[0]), int(answered[0, 0]) % 10)
        return {"answer": float(answered.mean()), "shown": float(shown.sum()) + 100 * notes["told"]}

    def _fail(self, hook: str, *at: int) -> None:
        if hook == self.fails and at == self.at and self.failed.count(hook) < self.times:
            self.failed.append(hook)
            raise RuntimeError("no")

    def aggregate(self, server, notes):
        """Average."""
        return Plan([average(notes)])


@dataclass(frozen=True)
class AskingOnce(Asking):
    """Clients ask in round 1 only those with larger numbers."""

    def probes(self, server, step):
        """Look in round 1."""
        return step == 1

    def pairs(self, server, clients, fresh):
        """Look at larger ones."""
        return clients[:, None] < clients[None, :]


@dataclass(frozen=True)
class Remembering(RememberedUploads, Asking):
    """Absent clients ask and are asked, too."""


@pytest.fixture(autouse=True)
def none_failed():
    Asking.failed.clear()


def steps(method: Algorithm, folder: Path, cohorts: list[list[int]], **changes: object) -> toy.Run:
    """Take a step with each of these cohorts of six clients."""
    out = toy.Run()
    out.server_step, _ = toy.start(method, toy.Tiny(), folder, **changes)
    out.servers.append(out.server_step.initialize())
    for cohort in cohorts:
        server, notes = toy.step_of(out.server_step, out.server, np.array(cohort))
        out.servers.append(server)
        out.notes.append(notes)
    return out


def test_each_client_of_a_step_asks_each_other(tmp_path):
    """Client 2 asks 4: 10 * 2 + 4; its shown numbers are 2 + 2, told 2."""
    (notes,) = steps(Asking(), tmp_path, [[1, 2, 4]]).notes
    nobody = np.nan
    assert_array_equal(notes["answer"], [[nobody, 12, 14], [21, nobody, 24], [41, 42, nobody]])
    assert_array_equal(notes["shown"], [[nobody, 102, 102], [204, nobody, 204], [408, 408, nobody]])
    assert_array_equal(notes["peer"], [[1, 2, 4]] * 3)
    assert_array_equal(notes["told"], [1, 2, 4])


def test_what_is_exchanged_is_counted_for_each_pair_that_looks(tmp_path):
    """Clients 0, 1, 2 ask 3 larger ones in all: a number up and down, two shown and three answered."""
    done = steps(AskingOnce(), tmp_path, [[0, 1, 2], [0, 1, 2]])
    rows = {(r["direction"], r["name"]): r for r in done.server_step.ledger.rows() if r["step"] == 1}
    assert (rows["up", "embedding"]["messages"], rows["up", "embedding"]["bytes"]) == (6, 3 * 4 * (2 + 3))
    d = done.server.tables["model"].shape[1]
    assert (rows["up", "model"]["messages"], rows["up", "model"]["bytes"]) == (3 + 3, 4 * (3 * d + 3))
    down = [r for r in done.server_step.ledger.rows() if r["step"] == 1 and r["direction"] == "down"]
    assert sorted((r["messages"], r["bytes"]) for r in down) == [(3, 4 * 3), (3, 4 * 3 * d)]
    assert "answer" in done.notes[0].columns
    assert "answer" not in done.notes[1].columns
    assert_array_equal(np.isnan(done.notes[0]["told"]), [False, False, True])


@pytest.mark.parametrize(("hook", "at"), [("ask", (1,)), ("answer", (1, 2)), ("compare", (1, 4))])
def test_the_client_that_asks_is_left_out_if_a_hook_fails_twice(hook, at, tmp_path):
    """Client 1 asks 2 and 4; the others still ask it, who has nothing to hide."""
    done = steps(Asking(hook, at), tmp_path, [[1, 2, 4]], on_client_error="drop")
    (notes,) = done.notes
    assert notes.client.tolist() == [2, 4]
    assert_array_equal(notes["answer"], [[21, np.nan, 24], [41, 42, np.nan]])
    assert [(d.step, d.client, d.reason) for d in done.server_step.dropped] == [(1, 1, "RuntimeError: no")]
    assert_array_equal(done.server_step.visits, [0, 0, 1, 0, 1, 0])
    rows = done.server_step.ledger.rows()
    assert sum(r["messages"] for r in rows if r["name"] == "embedding") == 2 * 2 * 2
    model, n = done.server.tables["model"][0], toy.Tiny().sizes[[2, 4], 0]
    assert float(model[0]) == pytest.approx((2 * n[0] + 4 * n[1]) / n.sum(), rel=1e-5)


def test_a_hook_that_fails_once_is_called_again(tmp_path):
    done = steps(Asking("answer", (1, 2), times=1), tmp_path, [[1, 2, 4]], on_client_error="drop")
    assert done.notes[0].client.tolist() == [1, 2, 4]
    assert done.server_step.dropped == []


@pytest.mark.parametrize(("hook", "at"), [("ask", (1,)), ("answer", (1, 2)), ("compare", (1, 4))])
def test_a_failing_hook_ends_a_run_that_leaves_nobody_out(hook, at, tmp_path):
    with pytest.raises(ClientError, match=rf"Asking.{hook}: .*no"):
        steps(Asking(hook, at), tmp_path, [[1, 2, 4]])


def test_a_client_whose_look_fails_counts_with_its_remembered_upload(tmp_path):
    """In round 2 the clients 1 and 2 come, 1 fails; it brings the upload of round 1 and is still asked."""
    method = Remembering("answer", (1, 2))
    done = steps(method, tmp_path, [[1, 4], [1, 2]], on_client_error="drop")
    last = done.notes[1]
    assert last.client.tolist() == [1, 2, 4]
    assert last.fresh.tolist() == [False, True, False]
    nobody = [np.nan] * 3
    assert_array_equal(last["answer"], [nobody, [21, np.nan, 24], [41, 42, np.nan]])
    assert_array_equal(done.server_step.visits, [0, 1, 1, 0, 1, 0])


def test_messages_are_rounded_as_they_arrive(tmp_path):
    """In bfloat16, 1 + 2^-9 arrives as 1: payload, shown and answered."""

    class Fine(Asking):
        def ask(self, client, own, key):
            return Question(torch.tensor([1 + 2**-9]), torch.tensor([1 + 2**-9]), {})

        def answer(self, client, payload, key):
            return torch.stack([payload[0] - 1, torch.tensor(1 + 2**-9)])

        def compare(self, shown, answered, notes):
            return {"arrived": float((shown - 1).abs().sum() + answered[0].abs() + (answered[1] - 1).abs())}

    (notes,) = steps(Fine(), tmp_path, [[1, 2]], payload=Payload("bfloat16")).notes
    assert_array_equal(notes["arrived"], [[np.nan, 0], [0, np.nan]])
