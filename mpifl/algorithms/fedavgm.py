"""FedAvgM: FedAvg with momentum at the server.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019, section 4.3: v <- beta v + dw, w <- w + v, dw the mean update weighted by samples. Buffers are averaged.
`server_lr` is the usual extension; beta 0 and server_lr 1 give FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mpifl.core.method import Algorithm, Key, Needs, Notes, PlainVisits, Plan, ProblemInfo, RowUpdates, Server
from mpifl.core.mixing import average
from mpifl.core.options import PositiveFloat, ShareBelowOne


@dataclass(frozen=True)
class FedAvgM(PlainVisits, RowUpdates, Algorithm):
    """Table `model`, and table `momentum` that nobody reads.

    Attributes:
        beta: momentum of the server.
        server_lr: step of the server along its momentum v.
    """

    beta: ShareBelowOne = 0.9
    server_lr: PositiveFloat = 1.0

    paper = "hsu2019measuring"
    needs = Needs(server_update=True, averages=True)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with v = 0."""
        v = torch.zeros(1, problem.layout.num_parameters)
        return problem.server(momentum=v)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def server_update(self, old: Server, new: Server) -> Server:
        """v <- beta v + dw; w <- w + server_lr v."""
        w, v = old.tables["model"], old.tables["momentum"]
        p = v.shape[1]
        v = self.beta * v + (new.tables["model"] - w)[:, :p]
        model = torch.cat([w[:, :p] + self.server_lr * v, new.tables["model"][:, p:]], 1)
        return replace(new, tables={**new.tables, "model": model, "momentum": v})
