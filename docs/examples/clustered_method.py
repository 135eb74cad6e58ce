"""ConfusionClusters: clients that make the same mistakes under a common model share a model.

An example, not a paper. All clients train one model for `warmup` rounds. In the next round each client
also sends the mean prediction of the common model for each of its classes: L x L numbers, its *confusion*.
Clients whose data are transformed alike (rotated, say) make the same mistakes. The server groups the
confusions by agglomerative clustering and gives each cluster a copy of the common model; from then on
uploads are averaged within clusters.

    mpifl run docs/examples/clustered.yaml
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mpifl.clustering.distances import euclidean_matrix
from mpifl.clustering.partitions import agglomerative
from mpifl.core.method import Algorithm, Client, Key, Message, Notes, Plan, Report, Server, State
from mpifl.core.mixing import average, by_cluster, carry
from mpifl.core.options import PositiveInt


@dataclass(frozen=True)
class ConfusionClusters(Algorithm):
    """One model, then one model per cluster of confusions.

    All clients must take part in every round.

    Attributes:
        num_clusters: K, clusters after the warm-up.
        warmup: rounds with one common model.
    """

    num_clusters: PositiveInt = 4
    warmup: PositiveInt = 2

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the downloaded model; once, note the mistakes that it makes before."""
        w = message["model"][0]
        notes = {"confusion": confusion(client, w)} if message.step == self.warmup + 1 else {}
        trained = client.sgd(w, key)
        return client.report(notes, {"train_loss": trained.loss}, model=trained.vector), state

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average all uploads, or those of each cluster; form the clusters once."""
        step, assign = server.version + 1, server.assign
        if step <= self.warmup:
            return Plan([average(notes)])
        if step == self.warmup + 1:
            rows = notes["confusion"].reshape(len(notes), -1)  # [N, L * L]
            assign = agglomerative(euclidean_matrix(rows), n_clusters=self.num_clusters)
            split = carry(np.ones((self.num_clusters, 1)))  # each cluster starts from the common model
            return Plan([split, by_cluster(assign, self.num_clusters, notes.num_samples)], assign=assign)
        return Plan([by_cluster(assign[notes.client], self.num_clusters, notes.num_samples)])


def confusion(client: Client, w: torch.Tensor) -> np.ndarray:
    """Return the mean prediction [L, L] of `w` for each class of the training data (zeros if absent)."""
    predicted = client.logits(w, client.data.train.x).softmax(1).cpu().numpy()  # [n, L]
    labels = client.data.train.y.cpu().numpy()
    num_classes = predicted.shape[1]
    return np.stack(
        [
            predicted[labels == c].mean(0) if (labels == c).any() else np.zeros(num_classes)
            for c in range(num_classes)
        ]
    )
