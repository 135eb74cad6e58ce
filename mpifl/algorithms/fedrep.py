"""FedRep: a shared representation, a private head; first the head is trained, then the body.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm
1. In a visit the head is trained for `head_epochs` with the received body fixed, then the body for
`local.epochs` with the head fixed. Bodies are averaged by samples; heads never leave the clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpifl.core.computation import Asked, Held
from mpifl.core.method import Client, Key, Message, ProblemInfo, Report, State
from mpifl.core.options import NonNegativeInt

from .shared_part import SharedPart


@dataclass(frozen=True)
class FedRep(SharedPart):
    """One table, `body`; the head is client state, the common initial one before the first visit.

    Attributes:
        head_epochs: epochs for the head in each visit.
    """

    head_epochs: NonNegativeInt = 10

    paper = "collins2021exploiting"
    asks = ("part",)

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the trainings of the head and of the body."""
        head = Asked("sgd", held.train, changes={"epochs": self.head_epochs, "steps": None}, part="head")
        return [head, Asked("sgd", held.train, part="body")]

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the head, then the body; report the body, keep the head."""
        head, body = client.layout.part("head"), client.layout.part("body")
        w = self.model_of(message, state, client)
        w = client.sgd(w, key.of("head"), part=head, epochs=self.head_epochs).vector
        return self.divided(client, client.sgd(w, key, part=body))
