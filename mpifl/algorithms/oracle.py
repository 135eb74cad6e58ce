"""Oracle: FedAvg inside the true groups, the upper bound of clustered methods.

The baseline of EMD-CFL and UCFL ("Clustered Federated Learning via Embedding Distributions", section 4): the
same loop as EMD-CFL with the true neighbourhoods. The last models of absent members are averaged too; clients
never seen stay alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpifl.clustering.server_plans import neighbourhood_labels, neighbourhood_plan
from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Downloads, Key, Needs, PlainVisits, Plan, RememberedUploads
from mpifl.core.types import Notes, ProblemInfo, Reads, Server


@dataclass(frozen=True)
class Oracle(PlainVisits, RememberedUploads, Algorithm):
    """One row per true group."""

    paper = "zhang2025clustered"
    needs = Needs(groups=True, averages=True, new_rows=True)
    downloads = Downloads(serves="own")

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` if the true groups are unknown."""
        require(problem.groups is not None, "name", "oracle", "this scenario has no true groups; use another")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from one model; store the true groups, and those from later steps on."""
        assert problem.groups is not None
        state, later = {"groups": problem.groups}, problem.regrouped
        if later:
            state |= {"since": np.array([*later]), "later": np.stack([*later.values()])}
        return problem.server(algorithm_state=state)

    def with_groups(self, server: Server, step: int, groups: np.ndarray) -> Server:
        """Store the true groups from a step on, which was not known before the run."""
        state = server.algorithm_state
        since, later = [*state.get("since", ()), step], [*state.get("later", ()), groups]
        told = {"since": np.array(since, np.int64), "later": np.stack(later)}
        return replace(server, algorithm_state={**state, **told})

    def reads(self, server: Server, k: int) -> Reads:
        """Download the own row; a client whose group has just changed takes that of its new group."""
        if not len(server.algorithm_state.get("since", ())):
            return super().reads(server, k)
        before, now = (true_groups(server, step) for step in (server.version, server.version + 1))
        there = np.flatnonzero(before == now[k])
        moved = before[k] != now[k] and len(there) > 0
        return {"model": (int(server.assign[there[0] if moved else k]),)}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average per true group."""
        group = true_groups(server, server.version + 1)[notes.client]
        return neighbourhood_plan(server, notes, group[:, None] == group[None, :])

    def labels(self, server: Server) -> np.ndarray:
        """Return the group [N] of each client; a client never seen is alone."""
        return neighbourhood_labels(server)


def true_groups(server: Server, step: int) -> np.ndarray:
    """Return the true groups [N] at a step."""
    state = server.algorithm_state
    passed = int(np.searchsorted(state["since"], step, "right")) if "since" in state else 0
    return np.asarray(state["later"][passed - 1] if passed else state["groups"])
