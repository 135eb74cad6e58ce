"""Local training: every client alone, no communication.

The baseline of every paper here. A client continues from its own model; all start from the same initial
model, or, as in CCFL's experiments (section 5.1), from the mean of the cluster models, each pre-trained on a
labelled set of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpifl.core.method import Algorithm, Capability, Client, Key, Needs, Plan, ServerEvaluation, declared
from mpifl.core.mixing import updated
from mpifl.core.options import NonNegativeInt
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

from .ccfl import pretrained


@dataclass(frozen=True)
class Local(ServerEvaluation, Algorithm):
    """Every client trains alone.

    Attributes:
        pretrain_epochs: epochs of pre-training on each of the server's labelled sets, whose mean model a
            client downloads at its first visit; 0: all start from the common initial model.
    """

    pretrain_epochs: NonNegativeInt = 0

    paper = "mcmahan2017communication"
    trains_once = True
    setup_from = ("pretrain_epochs",)

    @cached_property
    def needs(self) -> Needs:
        """A client downloads nothing, unless it starts from pre-trained models."""
        return Needs(client_state=True, alone=not self.pretrain_epochs)

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """The server's labelled sets only for `pretrain_epochs`."""
        return declared(type(self)) - (set() if self.pretrain_epochs else {ServerEvaluation})

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from the initial model, or from the mean of the pre-trained ones."""
        start = problem.init(0)
        if self.pretrain_epochs:
            start = pretrained(problem, self.pretrain_epochs, key).mean(0)
        told = {"told": np.zeros(problem.num_clients, bool)} if self.pretrain_epochs else None
        return problem.server(start[None], algorithm_state=told)

    def reads(self, server: Server, k: int) -> Reads:
        """Download nothing, or the pre-trained model before the first visit."""
        return {"model": (0,)} if self.pretrain_epochs and not server.algorithm_state["told"][k] else {}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train on from the client's own model."""
        trained = client.sgd(self.model_of(message, state, client), key)
        return client.report(metrics={"train_loss": trained.loss}), {"model": trained.vector}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Mix nothing; remember who has downloaded the pre-trained model."""
        if not self.pretrain_epochs:
            return Plan([])
        told = updated(server.algorithm_state["told"], notes.client, True)
        return Plan([], algorithm_state={"told": told})

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own model."""
        return state.get("model", message.vectors.get("model", client.init[None])[0])

    def labels(self, server: Server) -> np.ndarray:
        """Return a cluster of its own for every client."""
        return np.arange(len(server.assign))
