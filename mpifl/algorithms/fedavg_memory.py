"""FedAvg over all clients in every step: an absent client counts with the last model it uploaded.

The FedAvg of FLT's repository (Jamali-Rad et al., "Federated Learning with Taskonomy for Non-IID Data", IEEE
TNNLS 2022, `all_clients`): w <- sum_k n_k wbar_k / sum_k n_k over all clients. Legend: wbar_k last upload of
client k, or the initial model w^0 for a client that never took part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm, Key, Needs, PlainVisits, Plan, RememberedUploads
from mpifl.core.mixing import Mixing, updated
from mpifl.core.types import Notes, ProblemInfo, Server


@dataclass(frozen=True)
class FedAvgMemory(PlainVisits, RememberedUploads, Algorithm):
    """One model for all, the average over all clients' last uploads, and the initial model."""

    paper = "jamalirad2022federated"
    needs = Needs(averages=True)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from w^0, which row 1 keeps."""
        return problem.server(problem.alike(2), algorithm_state={"num_samples": problem.num_samples})

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Return w <- (sum_k n_k wbar_k + sum_j n_j w^0) / sum n, j over clients that never took part."""
        n = updated(server.algorithm_state["num_samples"], notes.client, notes.num_samples)
        unseen = n.sum() - n[notes.client].sum()
        weights = np.stack([n[notes.client] / n.sum(), np.zeros(len(notes))])  # [2, m]
        keep = np.array([[0.0, unseen / n.sum()], [0.0, 1.0]])  # [2, 2]
        return Plan([Mixing(weights, keep=keep)], algorithm_state={"num_samples": n})
