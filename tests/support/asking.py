"""A method whose clients ask each other, by numbers that say who asked whom, and steps of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mpifl.comm.transport import Transport
from mpifl.core.capabilities import Question, RememberedUploads, SecondLook
from mpifl.core.method import Algorithm, Plan
from mpifl.core.mixing import average
from mpifl.runtime.protocol import LookPlan, TaskBatch
from mpifl.runtime.worker import VisitResults

from . import toy


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
    question: ClassVar[str] = "extractor"

    def local_update(self, message, state, client, key):
        """Upload the downloaded model, with the client's number in front."""
        model = message["model"][0].clone()
        model[0] = client.id
        return client.report(model=model), state

    def ask(self, client, own, key):
        """Ask with the number, five times, and show it twice."""
        client.loss(client.init)
        self._fail("ask", client.id)
        number = own["model"][:1]
        return Question(number.repeat(5), number.repeat(2), {"told": client.id})

    def answer(self, client, payload, key):
        """Return both numbers as one, three times."""
        asker = int(payload[0])
        client.embed(client.init, client.data.val.x[: 1 + client.id])
        self._fail("answer", asker, client.id)
        return 10 * payload[:3].reshape(1, 3) + client.id

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


def steps(
    method: Algorithm,
    folder: Path,
    cohorts: list[list[int]],
    transport: Transport | None = None,
    seen: Callable[[LookPlan], object] = lambda looks: None,
    **changes: object,
) -> toy.Run:
    """Take a step with each of these cohorts of six clients; `seen` is called with each second look."""
    out = toy.Run()
    out.server_step, _ = toy.start(method, toy.Tiny(), folder, transport, **changes)
    look = out.server_step.look

    def watched(batch: TaskBatch, results: VisitResults) -> VisitResults:
        assert batch.looks is not None
        seen(batch.looks)
        return look(batch, results)

    out.server_step.look = watched
    out.servers.append(out.server_step.initialize())
    for cohort in cohorts:
        server, notes = toy.step_of(out.server_step, out.server, np.array(cohort))
        out.servers.append(server)
        out.notes.append(notes)
    return out
