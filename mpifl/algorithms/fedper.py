"""FedPer: a shared body, a private head.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2. Body and head
are trained together; the body is averaged by samples, the head never leaves the client. Papers that compare
personalised models (FedCUAU) fine-tune each client's model before they evaluate it (`tune_epochs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpifl.core.federation import Split
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
from mpifl.training.evaluation import evaluate_tuned


@dataclass(frozen=True)
class FedPer(RowUpdates, Algorithm):
    """One table, `body`; the head is client state, the common initial one before the first visit.

    Attributes:
        tune_epochs: epochs of fine-tuning before a client is evaluated (`accuracy`; before fine-tuning:
            `accuracy_initial`); 0 evaluates the model as it is.
    """

    tune_epochs: NonNegativeInt = 0

    paper = "arivazhagan2019federated"
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
        """Train body and head together; report the body, keep the head."""
        w = client.sgd(self.model_of(message, state, client), key)
        body, head = (take(w.vector, client.layout.part(name)).clone() for name in ("body", "head"))
        return client.report(body=body, metrics={"train_loss": w.loss}), {"head": head}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the bodies by samples."""
        return Plan([average(notes, into="body", of="body")])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the shared body with the client's own head."""
        w = put(client.init, client.layout.part("body"), message["body"][0])
        return put(w, client.layout.part("head"), state["head"]) if "head" in state else w

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate the client's model; with fine-tuning, after it and before it (`_initial`)."""
        w = self.model_of(message, state, client)
        if not self.tune_epochs:
            return client.evaluate(w, split)
        return evaluate_tuned(client, w, split, self.tune_epochs)
