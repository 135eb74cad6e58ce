"""FlexCFL (FedGroup): groups by the directions of the first updates; new clients join the most similar.

Duan et al., "FedGroup: Efficient Federated Learning via Decomposed Similarity-Based Clustering", ISPA 2021,
and "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS 2022. Legend: dw_i
update of client i after a short training from w_0; V = U Sigma of the m largest singular directions of all
dw; EDC E_ij = cos(dw_i, V_j); g_j mean of the dw_i of group j. A sample of alpha m clients is clustered
(k-means on E, or hierarchically on MADC); a group starts from w_0 + g_j. The others do the same training when
they first take part and join argmax_j cos(dw_i, g_j). Inter-group step with rate eta_G: w_j <- (w_j + sum_l
(eta_G / ||w_l||) w_l) / (1 + sum_l eta_G / ||w_l||), l != j. A client whose labels shifted by more than
`migration` (Wasserstein-1, in labels) is regrouped at its next visit; its model trained on the new labels
enters no group. (The repository checks the labels before a round and regroups at once. Its distance is
between the values of the label counts, so it detects a change in the number of samples, not in their labels.)

Variant `emdcfl` follows the EMD-CFL repository, which produced that paper's FlexCFL rows. The first training
is a whole local training and is round 1, after which a group's model is the unweighted mean of its members.
Updates are those of whole state dicts, including batch counters (`num_batches_tracked`). From round 2 the
inter-group step has rate 5 and no denominator, so that weights grow, but slowly if the counters dominate the
norm of a state dict. A client that comes later spends its first visit on the first training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from mpifl.clustering.distances import cosine_matrix, madc, wasserstein1
from mpifl.clustering.partitions import agglomerative, kmeans, principal_coordinates
from mpifl.clustering.server_plans import clustered_plan, clustered_server, joined, pulled
from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    Capability,
    Client,
    ComparedUploads,
    Key,
    Needs,
    NewClients,
    PlainVisit,
    PlainVisits,
    Plan,
    declared,
)
from mpifl.core.metric import least
from mpifl.core.mixing import Mixing, by_cluster, updated
from mpifl.core.options import NonNegativeFloat, NumModels, PositiveInt
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State, Vector
from mpifl.training.evaluation import change_on_arrival, counter_weight, state_change


@dataclass(frozen=True)
class FlexCFL(NewClients, ComparedUploads, PlainVisits, Algorithm):
    """One row per group, and the initial model; table `direction` holds the g_j.

    Attributes:
        num_groups: m, number of groups.
        alpha: clients per group that are clustered before training. Asynchronous policies cluster all clients
            then; variant `emdcfl` clusters those that take part in round 1 instead.
        iterations: mini-batches of the first training; for variant `emdcfl` it is a visit like all others.
        measure: `edc` (k-means on cosines with the main singular directions of the updates) or `madc`
            (hierarchical clustering on mean absolute differences of cosines).
        eta_g: rate of the inter-group step; None: 0, or 5 for variant `emdcfl`.
        migration: Wasserstein-1 distance, in labels, by which a client's labels must shift for it to be
            regrouped. None: never; variant `emdcfl` allows only this.
        variant: `paper`, or `emdcfl` (the first training is round 1, updates of whole state dicts, `eta_g` 5
            without a denominator).
    """

    num_groups: NumModels = 3
    alpha: PositiveInt = 20
    iterations: PositiveInt = 50
    measure: Literal["edc", "madc"] = "edc"
    eta_g: NonNegativeFloat | None = None
    migration: NonNegativeFloat | None = None
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "duan2022flexible"
    statistics_gram = gram = "direction"
    statistics_from = ("iterations",)
    acts_with = MappingProxyType({"migration": ("drift",)})
    statistics_distance = row_distance = "direction"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.migration is None or self.variant == "paper"
        require(fits, "migration", self.migration, "variant emdcfl groups nobody anew; use null")

    @cached_property
    def needs(self) -> Needs:
        """Rounds under `migration`, which regroups clients at the beginning of a round."""
        return Needs(
            client_state=True,
            server_update=True,
            averages=True,
            classes=True,
            round_number=self.migration is not None,
        )

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """Statistics before training, or under `emdcfl` a comparison of the uploads of round 1."""
        if self.variant == "emdcfl":
            return frozenset({ComparedUploads})
        return declared(type(self)) - {ComparedUploads}

    def initial_clients(self, problem: ProblemInfo, present: np.ndarray, key: Key) -> np.ndarray:
        """Draw alpha m clients."""
        count = min(self.alpha * self.num_groups, len(present))
        return np.sort(key.numpy().choice(present, count, replace=False))

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return dw_i, and its parameters alone for comparisons."""
        w_0, p = shown["init"][0], client.layout.num_parameters
        dw = client.sgd(w_0, key, steps=self.iterations).vector - w_0
        norm = {"norm": float(dw[:p].double().norm())}
        return client.report(norm, unsent=("norm", "direction"), delta=dw, direction=dw[:p])

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cluster the initial clients; under `emdcfl` nobody has a group yet."""
        if self.variant == "emdcfl":
            return self._ungrouped(problem)
        assert fingerprints is not None
        labels = self._groups(fingerprints["gram"])
        server = clustered_server(problem, fingerprints.client, labels)
        directions = torch.zeros(int(labels.max()) + 1, problem.layout.num_parameters)
        return replace(server, tables={**server.tables, "direction": directions})

    def _ungrouped(self, problem: ProblemInfo) -> Server:
        """Return m groups without members, and the initial model, which everyone reads."""
        N, m, weight = problem.num_clients, self.num_groups, counter_weight(problem.layout)
        width = problem.layout.size + (weight is not None)
        state = {"known": np.zeros(N, bool), "batches": np.zeros(m), "counter": np.array(weight or 0.0)}
        return problem.server(problem.alike(m + 1), np.full(N, m), state, direction=torch.zeros(m, width))

    def _groups(self, gram: np.ndarray) -> np.ndarray:
        """Return the group [n] of each update, from their products."""
        m = min(self.num_groups, len(gram))
        if self.measure == "madc":
            return agglomerative(madc(cosine_matrix(gram)), "complete", n_clusters=m)
        norms = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
        E = principal_coordinates(gram, m) / norms[:, None]  # [n, m]
        return kmeans(E, m, max_iter=20).labels

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """w_j = w_0 + mean dw_i, g_j = mean dw_i."""
        labels, m = server.assign[fingerprints.client], len(server.tables["direction"])
        each = np.ones(len(fingerprints))
        start = by_cluster(labels, m + 1, each, of="delta")
        directions = by_cluster(labels, m, each, into="direction", of="direction")
        return Plan([replace(start, keep=np.ones(m + 1)), directions])

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Join argmin_j (1 - cos(dw_i, g_j)) / 2."""
        return joined(server, fingerprints.client, _nearest(server, fingerprints))

    def compares(self, server: Server) -> bool:
        """Compare updates in round 1, and while a client has no group: they tell its update's length."""
        return not server.algorithm_state["known"].all()

    def plain_visit(self) -> PlainVisit | None:
        """Train the group's model; None under `migration` and `emdcfl`, which report more."""
        return PlainVisit() if self.migration is None and self.variant == "paper" else None

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the group's model; report whether the labels shifted."""
        w = client.sgd(message["model"][0], key)
        metrics = {"train_loss": w.loss}
        if self.variant == "emdcfl":
            dw = state_change(client, message["model"][0], w)
            notes = {"norm": float(dw.double().norm()), "steps": w.steps}
            unsent = ("norm", "steps", "direction")
            return client.report(notes, metrics, unsent, model=w.vector, direction=dw), {}
        if self.migration is None:
            return client.report(model=w.vector, metrics=metrics), {}
        now = torch.bincount(client.data.train.y.cpu())
        old = state.get("labels", now).cpu()
        shifted = wasserstein1(now.numpy(), old.numpy()) > self.migration
        report = client.report({"shifted": float(shifted)}, metrics, model=w.vector)
        return report, {"labels": now if shifted else old}

    def unsent_vectors(self, report: Report, arrived: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return the compared update as it arrives; the batch counters are those of the report."""
        dw = report.vectors["direction"]
        if "delta" in arrived:  # the first training
            return {"direction": arrived["delta"][: len(dw)]}
        return {"direction": change_on_arrival(dw, report.vectors["model"], arrived["model"])}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average each group by samples; a client whose labels shifted is a new client again."""
        if self.variant == "emdcfl":
            return self._first(server, notes) if server.version == 0 else self._later(server, notes)
        if self.migration is None:
            return clustered_plan(server, notes)
        stays = notes["shifted"] == 0
        labels = np.where(stays, server.assign[notes.client], -1)
        mixing = by_cluster(labels, len(server.tables["model"]), notes.num_samples)
        known = updated(server.algorithm_state["known"], notes.client, stays)
        return Plan([mixing], algorithm_state={"known": known})

    def _first(self, server: Server, notes: Notes) -> Plan:
        """Group the step's clients by their updates; w_j is the mean of their models, g_j of their dw."""
        labels, m = self._groups(notes["gram"]), self.num_groups
        each = np.ones(len(notes))
        mixings = [
            by_cluster(labels, m + 1, each),
            by_cluster(labels, m, each, into="direction", of="direction"),
        ]
        return self._grouped(server, notes, mixings, labels, labels, each)

    def _later(self, server: Server, notes: Notes) -> Plan:
        """Average each group by samples; a client that trained from the initial model only joins a group."""
        known = server.algorithm_state["known"][notes.client]
        own = server.assign[notes.client]
        trained = np.where(known, own, -1)
        mixings = [by_cluster(trained, self.num_groups + 1, notes.num_samples)]
        labels = np.where(known, own, _nearest(server, notes))
        return self._grouped(server, notes, mixings, labels, trained, notes.num_samples)

    def _grouped(
        self,
        server: Server,
        notes: Notes,
        mixings: list[Mixing],
        labels: np.ndarray,
        trained: np.ndarray,
        weights: np.ndarray,
    ) -> Plan:
        """Return a plan after which the clients of the step are in groups `labels` [m].

        A group's batch counter is averaged like its model: over uploads of group `trained`, by `weights`.
        """
        batches = server.algorithm_state["batches"].copy()
        for j in np.unique(trained[trained >= 0]):
            some = trained == j
            seen = np.average(notes["steps"][some], weights=weights[some])
            batches[j] = int(batches[j] + seen + 1e-9)  # an integer there: means are truncated
        known = updated(server.algorithm_state["known"], notes.client, True)
        assign = updated(server.assign, notes.client, labels)
        return Plan(mixings, assign=assign, algorithm_state={"known": known, "batches": batches})

    def server_update(self, old: Server, new: Server) -> Server:
        """Take the inter-group step; under `emdcfl` from round 2."""
        emdcfl = self.variant == "emdcfl"
        eta = self.eta_g if self.eta_g is not None else 5.0 * emdcfl
        if not eta or (emdcfl and new.version == 1):
            return new
        w, state, norms = new.tables["model"].clone(), dict(new.algorithm_state), None
        if emdcfl and state["counter"] > 0:
            counted = torch.from_numpy(state["counter"] * state["batches"])
            norms = torch.hypot(w[:-1].double().norm(dim=1), counted)
            state["batches"] = pulled_counts(state["batches"], eta, norms.numpy())
        w[:-1] = pulled(w[:-1], eta, normalised=not emdcfl, norms=norms)
        return replace(new, tables={**new.tables, "model": w}, algorithm_state=state)


def pulled_counts(batches: np.ndarray, eta: float, norms: np.ndarray) -> np.ndarray:
    """Return the groups' batch counters [m] after the inter-group step, which treats them as weights."""
    scaled = eta * batches / norms
    return np.asarray(np.floor(batches + scaled.sum() - scaled + 1e-9))


def _nearest(server: Server, notes: Notes) -> np.ndarray:
    """Return argmax_j cos(dw_i, g_j) [n] from the lengths of dw and their distances to g.

    A length is that of the update as it arrived; a group without members has g = 0 and cosine 0.
    """
    g = server.tables["direction"].double().norm(dim=1).numpy()[None]  # [1, m]
    arrived = np.sqrt(notes["gram"].diagonal()) if "gram" in notes.columns else notes["norm"]
    dw, apart = arrived[:, None], notes["row_distance"]  # [n, 1], [n, m]
    cosine = (dw**2 + g**2 - apart**2) / np.maximum(2 * dw * g, 1e-300)
    return np.asarray(least(-np.where(g > 0, cosine, 0.0)))
