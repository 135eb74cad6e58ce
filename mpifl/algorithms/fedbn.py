"""FedBN: FedAvg in which each client keeps its own batch normalisation.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, Algorithm
1. Parameters and running statistics of batch-norm layers are client state; the rest is averaged by samples.
With a model that has no batch norm this is FedAvg.
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
from mpifl.core.parameters import put, take


@dataclass(frozen=True)
class FedBN(RowUpdates, Algorithm):
    """One table, `shared`; batch norm is client state, the common initial one before the first visit."""

    paper = "li2021fedbn"
    needs = Needs(client_state=True, averages=True)

    @property
    def holds(self) -> Mapping[str, str]:
        """Table `shared` holds everything but the norms."""
        return {"shared": "unnormed"}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all shared parts alike."""
        shared = take(problem.init(0), problem.layout.part("unnormed"))
        return Server({"shared": shared[None]}, np.zeros(problem.num_clients, np.int64))

    def reads(self, server: Server, k: int) -> Reads:
        """Download the shared part."""
        return {"shared": (0,)}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train everything; report the shared part, keep batch norm."""
        w = client.sgd(self.model_of(message, state, client), key)
        shared, norm = (take(w.vector, client.layout.part(name)).clone() for name in ("unnormed", "norm"))
        return client.report(shared=shared, metrics={"train_loss": w.loss}), {"norm": norm}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes, into="shared", of="shared")])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the shared model with the client's own batch norm."""
        w = put(client.init, client.layout.part("unnormed"), message["shared"][0])
        return put(w, client.layout.part("norm"), state["norm"]) if "norm" in state else w
