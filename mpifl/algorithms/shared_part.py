"""What methods have in common that average a part of the model and keep the rest at the clients."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from mpifl.core.method import Algorithm, Client, Key, Needs, Plan, RowUpdates, Trained
from mpifl.core.mixing import average
from mpifl.core.parameters import put, take
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector


class SharedPart(RowUpdates, Algorithm, ABC):
    """One table with the shared part; the rest is client state, the initial one before the first visit.

    Attributes:
        names: names of the table and of the client state.
    """

    names: ClassVar[tuple[str, str]] = ("body", "head")
    trains_once = True
    needs = Needs(client_state=True, averages=True)

    @property
    def parts(self) -> tuple[str, str]:
        """The parts of the model that are shared, and kept."""
        return "body", "head"

    @property
    def holds(self) -> Mapping[str, str]:
        """The table holds the shared part."""
        return {self.names[0]: self.parts[0]}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all shared parts alike."""
        shared = take(problem.init(0), problem.layout.part(self.parts[0]))
        return Server({self.names[0]: shared[None]}, np.zeros(problem.num_clients, np.int64))

    def reads(self, server: Server, k: int) -> Reads:
        """Download the shared part."""
        return {self.names[0]: (0,)}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train everything; report the shared part, keep the rest."""
        return self.divided(client, client.sgd(self.model_of(message, state, client), key))

    def divided(self, client: Client, trained: Trained) -> tuple[Report, State]:
        """Return the report of the shared part, and what the client keeps of a trained model."""
        shared, kept = (take(trained.vector, client.layout.part(name)).clone() for name in self.parts)
        report = client.report(metrics={"train_loss": trained.loss})
        return replace(report, vectors={self.names[0]: shared}), {self.names[1]: kept}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes, into=self.names[0], of=self.names[0])])

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the shared part with what the client keeps."""
        shared, kept = map(client.layout.part, self.parts)
        w = put(client.init, shared, message[self.names[0]][0])
        return put(w, kept, state[self.names[1]]) if self.names[1] in state else w
