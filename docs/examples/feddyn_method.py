"""FedDyn: clients train a corrected loss, and the server keeps a second row, h.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1. Legend: x
server model, y client model, h server state, g client state, N all clients, m those of the round:

    client  y = argmin F_k(w) - <g, w> + alpha/2 ||w - x||^2,    g <- g - alpha (y - x)
    server  h <- h - alpha/N sum_k (y_k - x),    x <- 1/m sum_k y_k - h / alpha
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Message,
    Needs,
    Notes,
    Plan,
    ProblemInfo,
    Report,
    Server,
    State,
)
from mpifl.core.mixing import average
from mpifl.core.options import PositiveFloat


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Table `model`, and table `h` that nobody downloads.

    Attributes:
        alpha: weight of the quadratic term.
    """

    alpha: PositiveFloat = 0.1

    paper = "@inproceedings{acar2021federated, author = {Acar, Durmus Alp Emre and others}, year = {2021}}"
    needs = Needs(client_state=True, server_update=True, every_upload=True)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with h = 0."""
        x = problem.init(0)[None]  # [1, d]
        h = torch.zeros(1, problem.layout.num_parameters)  # [1, p]
        return Server({"model": x, "h": h}, assign=np.zeros(problem.num_clients, np.int64))

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train along the gradient of the corrected loss; keep g."""
        x = message["model"][0]  # [d]
        start = x[: client.layout.num_parameters]  # [p]
        g = state.get("g", torch.zeros_like(start))
        y = client.sgd(x, key, direction=lambda grad, w: grad - g + self.alpha * (w - start))
        g = g - self.alpha * (y.vector[: len(g)] - start)
        return client.report(model=y.vector, metrics={"train_loss": y.loss}), {"g": g}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the models, each client counts once; remember m / N for `server_update`."""
        share = np.array(len(notes) / len(server.assign))
        return Plan([average(notes, weights=np.ones(len(notes)))], algorithm_state={"share": share})

    def server_update(self, old: Server, new: Server) -> Server:
        """Go on from the mean of the uploads, which `new` holds; `old` holds x and h."""
        h = old.tables["h"]
        p = h.shape[1]
        x, mean = old.tables["model"][:, :p], new.tables["model"][:, :p]
        h = h - self.alpha * float(new.algorithm_state["share"]) * (mean - x)
        model = torch.cat([mean - h / self.alpha, new.tables["model"][:, p:]], 1)  # buffers stay means
        return replace(new, tables={**new.tables, "model": model, "h": h})
