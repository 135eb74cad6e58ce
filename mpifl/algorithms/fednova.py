"""FedNova: updates are normalised by how much each client trained before they are averaged.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
2020, eq. 11. Legend: tau_i local steps, a_i their accumulation, ||a_i||_1 = tau_i for SGD and (tau_i - rho (1
- rho^tau_i) / (1 - rho)) / (1 - rho) with momentum rho, p_i = n_i / n, d_i = (w_i - x) / ||a_i||_1, tau_eff =
sum p_i ||a_i||_1. x <- x + tau_eff sum p_i d_i. Steps of Adam count as steps of SGD; buffers are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from mpifl.core.method import Algorithm, Client, Key, Needs, Plan
from mpifl.core.mixing import add, sample_weights
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State


@dataclass(frozen=True)
class FedNova(Algorithm):
    """One model for all."""

    paper = "wang2020tackling"
    asks = ("rate",)
    trains_once = True
    changes = MappingProxyType({"model": "model"})
    needs = Needs(server_update=True, new_optimizer=True, averages=True)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Store the number of parameters, after which the buffers begin."""
        p = np.array(problem.layout.num_parameters)
        return problem.server(algorithm_state={"num_parameters": p, "tau_eff": np.array(0.0)})

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Report d_i followed by the change of the buffers, and ||a_i||_1."""
        x, p = message["model"][0], client.layout.num_parameters
        w = client.sgd(x, key)
        a = accumulation(w.steps, w.momentum)
        d = torch.cat([(w.vector - x)[:p] / max(a, 1.0), (w.vector - x)[p:]])
        metrics = {"train_loss": w.loss}
        return client.report({"accumulation": a}, metrics, based_on={"model": None}, model=d), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Move x by sum p_i d_i and store tau_eff for `server_update`."""
        p = sample_weights(notes)
        return Plan([add(p)], algorithm_state={"tau_eff": np.array(float(p @ notes["accumulation"]))})

    def server_update(self, old: Server, new: Server) -> Server:
        """x <- x + tau_eff sum p_i d_i."""
        x, moved, p = old.tables["model"], new.tables["model"], int(new.algorithm_state["num_parameters"])
        step = float(new.algorithm_state["tau_eff"]) * (moved - x)[:, :p]
        return replace(new, tables={**new.tables, "model": torch.cat([x[:, :p] + step, moved[:, p:]], 1)})


def accumulation(tau: int, rho: float) -> float:
    """Return ||a||_1: the total weight of the gradients in tau steps with momentum rho."""
    return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
