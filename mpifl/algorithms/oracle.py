"""Oracle: FedAvg inside the true groups, the upper bound of clustered methods.

The baseline of EMD-CFL and UCFL ("Clustered Federated Learning via Embedding Distributions", section 4): the
same loop as EMD-CFL with the true neighbourhoods. The last models of absent members are averaged too; clients
never seen stay alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.clustering.server_plans import neighbourhood_labels, neighbourhood_plan
from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Key, Needs, PlainVisits, Plan, RememberedUploads
from mpifl.core.types import Notes, ProblemInfo, Server


@dataclass(frozen=True)
class Oracle(PlainVisits, RememberedUploads, Algorithm):
    """One row per true group."""

    paper = "zhang2025clustered"
    needs = Needs(groups=True, averages=True, new_rows=True)

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` if the true groups are unknown."""
        require(problem.groups is not None, "name", "oracle", "this scenario has no true groups; use another")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from one model; store the true groups."""
        assert problem.groups is not None
        return problem.server(algorithm_state={"groups": problem.groups})

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average per true group."""
        group = server.algorithm_state["groups"][notes.client]
        return neighbourhood_plan(server, notes, group[:, None] == group[None, :])

    def labels(self, server: Server) -> np.ndarray:
        """Return the group [N] of each client; a client never seen is alone."""
        return neighbourhood_labels(server)
