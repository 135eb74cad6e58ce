"""FedRep: a shared representation, a private head; first the head is trained, then the body.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm
1. In a visit the head is trained for `head_epochs` with the received body fixed, then the body for
`local.epochs` with the head fixed. Bodies are averaged by samples; heads never leave the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Message,
    Needs,
    Notes,
    Plan,
    ProblemInfo,
    Reads,
    Report,
    RowUpdates,
    Server,
    State,
    Vector,
)
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeInt
from mpifl.core.parameters import put, take


@dataclass(frozen=True)
class FedRep(RowUpdates, Algorithm):
    """One table, `body`; the head is client state, the common initial one before the first visit.

    Attributes:
        head_epochs: epochs for the head in each visit.
    """

    head_epochs: NonNegativeInt = 10

    paper = "collins2021exploiting"
    needs = Needs(client_state=True, averages=True)

    @property
    def holds(self) -> Mapping[str, str]:
        """Table `body` holds the body."""
        return {"body": "body"}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all bodies alike."""
        body = take(problem.init(0), problem.layout.part("body"))
        return Server({"body": body[None]}, np.zeros(problem.num_clients, np.int64))

    def reads(self, server: Server, k: int) -> Reads:
        """Download the body."""
        return {"body": (0,)}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the head, then the body; report the body, keep the head."""
        head, body = client.layout.part("head"), client.layout.part("body")
        w = self.model_of(message, state, client)
        w = client.sgd(w, key.of("head"), part=head, epochs=self.head_epochs).vector
        trained = client.sgd(w, key, part=body)
        report = client.report(body=take(trained.vector, body).clone(), metrics={"train_loss": trained.loss})
        return report, {"head": take(trained.vector, head).clone()}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the bodies by samples."""
        return Plan([average(notes, into="body", of="body")])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the shared body with the client's own head."""
        w = put(client.init, client.layout.part("body"), message["body"][0])
        return put(w, client.layout.part("head"), state["head"]) if "head" in state else w
