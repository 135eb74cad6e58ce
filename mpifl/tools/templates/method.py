"""MyMethod: a method of your own.

    mpifl run quickstart --algorithm '{name: "my_method.py:MyMethod"}'
    mpifl check my_method.py:MyMethod

As it stands, it clusters: clients whose models are close after the first training, which all begin with one
model, share a model from then on. `docs/writing-a-method.md` explains the six hooks that most methods need,
`mpifl/core/algorithm.py` all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.clustering.distances import squared_distances
from mpifl.clustering.partitions import agglomerative
from mpifl.core.method import (
    Algorithm,
    Client,
    ComparedUploads,
    Key,
    Message,
    Notes,
    Plan,
    Report,
    Server,
    State,
)
from mpifl.core.mixing import by_cluster, updated
from mpifl.core.options import NumModels
from mpifl.core.types import ProblemInfo


@dataclass(frozen=True)
class MyMethod(ComparedUploads, Algorithm):
    """What it does, in one sentence.

    Attributes:
        num_clusters: K, models of the server; 1 is FedAvg.
    """

    num_clusters: NumModels = 4
    paper = "@misc{my_method, author = {Author}, title = {Title}, year = {2026}}"
    gram = "model"  # the products of all pairs of these uploads come with the notes, where `compares` says so

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Begin with K equal rows: a row is one model of the server."""
        return problem.server(problem.alike(self.num_clusters))

    def compares(self, server: Server) -> bool:
        """Compare models in the first step."""
        return server.version == 0

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the downloaded model, which is the row of the client's cluster, and upload it."""
        trained = client.sgd(message["model"][0], key)  # float32 [d]
        return client.report(model=trained.vector, metrics={"train_loss": trained.loss}), state

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Cluster in the first step; average the uploads of each cluster by samples."""
        assign = server.assign  # [N], the row of each client; absent clients keep theirs
        if self.compares(server):
            distances = np.sqrt(squared_distances(notes["gram"]))  # [m, m], in the order of notes.client
            labels = agglomerative(distances, "average", n_clusters=min(self.num_clusters, len(notes)))
            assign = updated(assign, notes.client, labels)
        return Plan([by_cluster(assign[notes.client], self.num_clusters, notes.num_samples)], assign=assign)
