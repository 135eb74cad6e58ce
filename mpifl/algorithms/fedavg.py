"""FedAvg: the average of the clients' models, weighted by samples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpifl.core.method import Algorithm, Needs, Notes, PlainVisits, Plan, RowUpdates, Server
from mpifl.core.mixing import average


@dataclass(frozen=True)
class FedAvg(PlainVisits, RowUpdates, Algorithm):
    """One model for all: w <- sum_k n_k w_k / sum_k n_k."""

    paper = "mcmahan2017communication"
    needs = Needs(averages=True)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])
