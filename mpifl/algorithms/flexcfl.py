"""FlexCFL (FedGroup): groups by the directions of the first updates; newcomers join the most similar one.

Duan et al., "FedGroup: Efficient Federated Learning via Decomposed Similarity-Based Clustering", ISPA 2021,
and "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS 2022. Legend: dw_i
update of client i after a short training from w_0; V = U Sigma of the m largest singular directions of all
dw; EDC E_ij = cos(dw_i, V_j); g_j mean of the dw_i of group j. A sample of alpha m clients is clustered
(k-means on E, or hierarchically on MADC); a group starts from w_0 + g_j. The others do the same training when
they first take part and join argmax_j cos(dw_i, g_j). Inter-group step with rate eta_G: w_j <- (w_j + sum_l
(eta_G / ||w_l||) w_l) / (1 + sum_l eta_G / ||w_l||), l != j. A client whose labels shifted by more than
`migration` (Wasserstein-1, in labels) is grouped anew at its next visit.

Variant `emdcfl`, which shapes that paper's rows: everybody is clustered after a whole local training, and the
inter-group step has rate 5 and no denominator, so that weights grow. That repository counts the first
training as round 1: its T rounds are T - 1 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mpifl.clustering.distances import cosine_matrix, madc, wasserstein1
from mpifl.clustering.partitions import agglomerative, kmeans, principal_coordinates
from mpifl.clustering.server_plans import clustered_plan, clustered_server, joined, pulled
from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Message,
    Needs,
    NewClients,
    Notes,
    ProblemInfo,
    Report,
    Server,
    State,
)
from mpifl.core.mixing import Plan, by_cluster
from mpifl.core.types import Vector


@dataclass(frozen=True)
class FlexCFL(NewClients, Algorithm):
    """One row per group, and the initial model; table `direction` holds the g_j.

    Attributes:
        num_groups: m.
        alpha: clients per group that are clustered at first.
        iterations: mini-batches of the first training.
        measure: `edc` or `madc`.
        eta_g: rate of the inter-group step; None: 0, under `emdcfl` 5.
        migration: shift of labels above which a client is grouped anew; None: never.
        variant: `paper` or `emdcfl`.
    """

    num_groups: int = 3
    alpha: int = 20
    iterations: int = 50
    measure: str = "edc"
    eta_g: float | None = None
    migration: float | None = None
    variant: str = "paper"

    paper = "duan2022flexible"
    statistics_gram = "direction"
    statistics_distance = "direction"
    needs = Needs(client_state=True, server_update=True)

    def __post_init__(self) -> None:
        require(self.num_groups >= 1, "num_groups", self.num_groups, "take at least one group")
        require(self.alpha >= 1, "alpha", self.alpha, "take at least one client per group")
        require(self.iterations >= 1, "iterations", self.iterations, "take at least one mini-batch")
        require(self.measure in ("edc", "madc"), "measure", self.measure, "take edc or madc")
        require(self.eta_g is None or self.eta_g >= 0, "eta_g", self.eta_g, "take a rate, 0 or more")
        require((self.migration or 0) >= 0, "migration", self.migration, "take 0 or more, or null")
        require(self.variant in ("paper", "emdcfl"), "variant", self.variant, "take paper or emdcfl")

    def initial_clients(self, problem: ProblemInfo, present: np.ndarray, key: Key) -> np.ndarray:
        """Draw alpha m clients."""
        if self.variant == "emdcfl":
            return present
        count = min(self.alpha * self.num_groups, len(present))
        return np.sort(key.numpy().choice(present, count, replace=False))

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return dw_i, and its parameters alone for comparisons."""
        w_0, p = shown["init"][0], client.layout.num_parameters
        changes: dict[str, Any] = {"steps": self.iterations} if self.variant == "paper" else {}
        dw = client.sgd(w_0, key, **changes).vector - w_0
        norm = {"norm": float(dw[:p].double().norm())}
        return client.report(norm, unsent=("norm", "direction"), delta=dw, direction=dw[:p])

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the initial_clients."""
        assert fingerprints is not None
        gram, m = fingerprints["gram"], min(self.num_groups, len(fingerprints))
        if self.measure == "madc":
            labels = agglomerative(madc(cosine_matrix(gram)), "complete", n_clusters=m)
        else:
            norms = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
            E = principal_coordinates(gram, m) / norms[:, None]  # [n, m]
            labels = kmeans(E, m, max_iter=20).labels
        server = clustered_server(problem, fingerprints.client, labels)
        directions = torch.zeros(int(labels.max()) + 1, problem.layout.num_parameters)
        return replace(server, tables={**server.tables, "direction": directions})

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """w_j = w_0 + mean dw_i, g_j = mean dw_i."""
        labels, m = server.assign[fingerprints.client], len(server.tables["direction"])
        each = np.ones(len(fingerprints))
        start = by_cluster(labels, m + 1, each, of="delta")
        directions = by_cluster(labels, m, each, into="direction", of="direction")
        return Plan([replace(start, keep=np.ones(m + 1)), directions])

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Join argmin_j (1 - cos(dw_i, g_j)) / 2."""
        g = server.tables["direction"].double().norm(dim=1).numpy()[None]  # [1, m]
        dw, apart = fingerprints["norm"][:, None], fingerprints["row_distance"]  # [n, 1], [n, m]
        cosine = (dw**2 + g**2 - apart**2) / np.maximum(2 * dw * g, 1e-300)
        return joined(server, fingerprints.client, cosine.argmax(1))

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the group's model; tell whether the labels shifted."""
        w = client.sgd(message["model"][0], key)
        metrics = {"train_loss": w.loss}
        if self.migration is None:
            return client.report(model=w.vector, metrics=metrics), {}
        now = torch.bincount(client.data.train.y.cpu())
        old = state.get("labels", now).cpu()
        shifted = wasserstein1(now.numpy(), old.numpy()) > self.migration
        report = client.report({"shifted": float(shifted)}, metrics, model=w.vector)
        return report, {"labels": now if shifted else old}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each group by samples; who shifted is a new client again."""
        plan = clustered_plan(server, notes)
        if self.migration is None:
            return plan
        known = server.algorithm_state["known"].copy()
        known[notes.client] = notes["shifted"] == 0
        return replace(plan, algorithm_state={**server.algorithm_state, "known": known})

    def server_update(self, old: Server, new: Server) -> Server:
        """Take the inter-group step."""
        eta = self.eta_g if self.eta_g is not None else 5.0 * (self.variant == "emdcfl")
        if not eta:
            return new
        w = new.tables["model"].clone()
        w[:-1] = pulled(w[:-1], eta, normalised=self.variant == "paper")
        return replace(new, tables={**new.tables, "model": w})
