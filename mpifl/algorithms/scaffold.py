"""SCAFFOLD: local steps corrected by control variates.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm
1, option II. Legend: x server model, y local model, c server control, c_k client control, S local steps, eta
local rate.

With momentum beta (UCFL runs it so) the corrected gradient g_s - c_k + c enters the buffer: v <- beta v + g_s
- c_k + c, y <- y - eta v. Then x - y = eta sum_s a_s (g_s - c_k + c), and option II divides by eta and the
sum a of the weights a_s (FedNova's ||a||_1; S without momentum), not by eta S: c_k stays a mean of the
client's gradients. Every visit begins with an empty buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan
from mpifl.core.mixing import add
from mpifl.core.options import PositiveFloat
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State

from .fednova import accumulation


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """Two tables, `model` and `control`; each client keeps its own control.

    Attributes:
        server_lr: eta_g, step of the server along the mean update; running statistics are averaged.
    """

    server_lr: PositiveFloat = 1.0

    paper = "karimireddy2020scaffold"
    asks = ("direction",)
    trains_once = True
    changes = MappingProxyType({"model": "model"})
    needs = Needs(client_state=True, sgd="any", new_optimizer=True, averages=True, every_upload=True)
    downloads = Downloads(reads="all", serves="own")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with c = 0."""
        c = torch.zeros(1, problem.layout.num_parameters)
        return problem.server(control=c)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train along g - c_k + c; then c_k+ = c_k - c + (x - y) / (a eta)."""
        x, c = message["model"][0], message["control"][0]
        c_k = state.get("control", torch.zeros_like(c))
        drift = c - c_k
        y = client.sgd(x, key, direction=lambda g, _: g + drift)
        p = client.layout.num_parameters
        c_new = c_k  # of a client that takes no step
        if y.steps:
            a = accumulation(y.steps, y.momentum)  # S without momentum
            c_new = c_k - c + (x - y.vector)[:p] / (a * y.lr)  # Alg. 1, option II
        changes, metrics = {"model": None, "control": None}, {"train_loss": y.loss}
        report = client.report({}, metrics, based_on=changes, model=y.vector - x, control=c_new - c_k)
        return report, {"control": c_new}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """x <- x + eta_g mean(dy); c <- c + (1/N) sum dc."""
        m, num_clients = len(notes), len(server.assign)
        dx = np.full((1, m), self.server_lr / m)
        dc = np.full((1, m), 1 / num_clients)
        return Plan([add(dx), add(dc, into="control", of="control")])
