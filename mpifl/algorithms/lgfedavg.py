"""LG-FedAvg: private representations, a shared head.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020,
Algorithm 1. The mirror image of FedPer: body and head are trained together, the head is averaged by samples,
the body never leaves the client. The authors start from a model trained by FedAvg; here all clients start
from the common initial model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
from mpifl.core.parameters import put, take

PRIVATE = {"head": "body", "block": "trunk"}  # what is shared -> what stays


@dataclass(frozen=True)
class LGFedAvg(RowUpdates, Algorithm):
    """One table, `shared`; the rest is client state, the common initial one before the first visit.

    Attributes:
        shared: the part that is averaged: `head` (last layer) or `block` (last stage and head).
    """

    shared: Literal["head", "block"] = "head"

    paper = "liang2020think"
    needs = Needs(client_state=True, averages=True)

    @property
    def holds(self) -> Mapping[str, str]:
        """Table `shared` holds the head or the cluster block."""
        return {"shared": self.shared}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all shared parts alike."""
        shared = take(problem.init(0), problem.layout.part(self.shared))
        return Server({"shared": shared[None]}, np.zeros(problem.num_clients, np.int64))

    def reads(self, server: Server, k: int) -> Reads:
        """Download the shared part."""
        return {"shared": (0,)}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train everything; report the shared part, keep the rest."""
        w = client.sgd(self.model_of(message, state, client), key)
        shared, private = (
            take(w.vector, client.layout.part(name)).clone() for name in (self.shared, PRIVATE[self.shared])
        )
        return client.report(shared=shared, metrics={"train_loss": w.loss}), {"private": private}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the shared parts by samples."""
        return Plan([average(notes, into="shared", of="shared")])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own representation under the shared head."""
        w = put(client.init, client.layout.part(self.shared), message["shared"][0])
        private = client.layout.part(PRIVATE[self.shared])
        return put(w, private, state["private"]) if "private" in state else w
