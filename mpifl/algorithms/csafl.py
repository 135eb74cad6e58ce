"""CSAFL: groups by spectral clustering of the first gradients, and semi-asynchronous steps inside each group.

Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN 2021. Legend: g_i
gradient of client i at the common initial model, w_c model of group c, lag_i server steps since client i
read w_c, s(x) = (1 + x)^-a. Before training all clients send g_i, and the server clusters them once. Then it
steps with the uploads of a time window (policy `waves` with `every_s`) or with a number of uploads
(`buffer`): those of clients that began after the last step are fresh, those of slower clients are stale.
w_c <- w_c + sum_i p_i s(lag_i) (w_i - w_c) over the uploads of the group's members, p_i their shares of the
samples in this step.

Of the paper only the abstract and summaries could be read here. From them are: spectral clustering by the
directions of gradients; one model for each group; uploads that are synchronous within a fixed time and
asynchronous beyond it; control of staleness. Our reading: the gradients (over all samples, at the initial
model), the similarity (cosines; k-means on their K first principal coordinates), p_i and s, and the number of
groups. A bound on staleness is `policy.max_staleness`. Differs: the paper groups by the clients' delays, too;
delays are no part of the statistics here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpifl.clustering.distances import cosine_matrix
from mpifl.clustering.partitions import spectral
from mpifl.core.computation import Asked, Held
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Needs,
    Notes,
    OneShotStatistics,
    PlainVisits,
    Plan,
    ProblemInfo,
    Report,
    Server,
    Vector,
)
from mpifl.core.mixing import Mixing
from mpifl.core.options import NonNegativeFloat, NumModels


@dataclass(frozen=True)
class CSAFL(OneShotStatistics, PlainVisits, Algorithm):
    """One row per group, changed by the uploads of a time window or of a buffer.

    Attributes:
        num_groups: K, number of groups.
        staleness_a: a in s(x) = (1 + x)^-a; 0 ignores staleness.
    """

    num_groups: NumModels = 4
    staleness_a: NonNegativeFloat = 0.5

    paper = "zhang2021csafl"
    policies = ("waves", "buffer")
    asks = ("gradient",)
    statistics_gram = "gradient"
    statistics_from = ()
    needs = Needs(weighs_staleness=True)

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return g_i."""
        return client.report(gradient=client.gradient(shown["init"][0]))

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the gradient."""
        return [Asked("gradient", held.train)]

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the directions of the gradients; all groups start from the common model."""
        assert fingerprints is not None
        assign = np.zeros(problem.num_clients, np.int64)
        assign[fingerprints.client] = spectral(cosine_matrix(fingerprints["gram"]), self.num_groups)
        return problem.server(problem.alike(self.num_groups), assign)

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return true for all clients: they have groups before training."""
        return np.ones_like(visited)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Move each group's model towards the uploads of its members, the less the staler they are."""
        own = np.arange(len(server.tables["model"]))[:, None] == server.assign[notes.client]  # [K, m]
        n = own * notes.num_samples.astype(np.float64)
        p = n / np.maximum(n.sum(1, keepdims=True), 1.0)
        s = (1.0 + notes.staleness) ** -self.staleness_a  # [m]
        return Plan([Mixing(p * s, keep=np.where(n.any(1), p @ (1.0 - s), 1.0))])
