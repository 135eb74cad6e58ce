"""CFL-GP: spectral clustering of gradients that are accumulated over rounds.

Kim, Kim and de Veciana, "Clustered Federated Learning via Gradient-based Partitioning", ICML 2024, Algorithm
1. Every `period` rounds, up to `last_round`, a client also trains the criterion model (that of cluster 0) and
adds its change v_i to its profile: G_i <- (1 - beta) G_i + beta v_i, beta = 1 / (floor((t + 1) / (K period))
+ 1). With the SVD G = P S Q', the clients' coordinates P_K' G follow from the products G'G alone.
k-means clusters them, and the labels are matched with the old ones (Hungarian algorithm). A cluster's model
moves by the unweighted mean of its members' changes.

As in the authors' code, v_i is the change by one mini-batch step (`protocol="gradient"`, the default) or by a
whole local training (`gap`). The K models start independently, but in round 1 all clients train that of
cluster 0, and a client's change moves the model of its new cluster. New labels count in the same round.
Differs from that code: all clients compute v_i at the criterion model, where the code trains the own
cluster's model twice. If K is unknown, every clustering chooses it anew, where the code fixes it after a
warm-up with one cluster. Clients store their own profiles, and only clients that take part are clustered.

Variant `emdcfl` follows the EMD-CFL repository: every round clusters; all models start alike; v_i is the
change of the whole state dict of the own cluster's model, including batch counters (`num_batches_tracked`),
and enters that cluster's block of the profile; models are averaged by samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge

from mpifl.clustering.partitions import match_labels, spectral, spectral_by_silhouette
from mpifl.core.method import Algorithm, Client, ComparedUploads, Downloads, Key, Needs, Plan, Trained
from mpifl.core.mixing import by_cluster, rows
from mpifl.core.options import NonNegativeInt, NumModelsOrZero, PositiveInt
from mpifl.core.trainer import Gift
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector
from mpifl.training.evaluation import state_change


@dataclass(frozen=True)
class CFLGP(ComparedUploads, Algorithm):
    """K rows.

    Attributes:
        num_clusters: K, number of clusters; 0 takes the number from 2 to `max_clusters` with the largest mean
            silhouette.
        period: rounds between clusterings; variant `emdcfl` clusters in every round.
        last_round: no clustering after this many rounds; variant `emdcfl` ignores it.
        protocol: `gradient` (a visit is one mini-batch step) or `gap` (a visit is a whole local training).
        starts: initial models: `independent` or `alike`. None: independent if K is given, alike if it is
            unknown (`num_clusters` 0) or the variant is `emdcfl`.
        variant: `paper`, or `emdcfl` (the EMD-CFL repository: clustering in every round, changes of whole
            state dicts, averages by samples).
    """

    num_clusters: NumModelsOrZero = 4
    max_clusters: Annotated[int, Ge(2)] = 10
    period: PositiveInt = 2
    last_round: NonNegativeInt = 10
    protocol: Literal["gradient", "gap"] = "gradient"
    starts: Literal["independent", "alike"] | None = None
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "kim2024clustered"
    gram = "profile"
    downloads = Downloads(serves="own")
    traffic_depends_on = (
        "who is in cluster 0, whose model the others download as well when clusters are formed"
    )

    @property
    def asks(self) -> tuple[Gift, ...]:
        """A visit of one step sets its length and momentum."""
        return ("sgd",) if self._takes_one_step else ()

    @cached_property
    def needs(self) -> Needs:
        """Rounds, and a new optimiser in each; exact uploads, of which the server makes the profiles.

        A visit of one step ignores some keys of `local`.
        """
        ignored = ("epochs", "steps", "momentum") if self._takes_one_step else ()
        return Needs(
            client_state=True,
            round_number=True,
            new_optimizer=True,
            averages=True,
            exact_uploads=self._clusters(0),
            ignores=dict.fromkeys(ignored, "algorithm.protocol gap"),
        )

    @property
    def _takes_one_step(self) -> bool:
        """Whether a visit is one step on one mini-batch."""
        return self.variant == "paper" and self.protocol == "gradient"

    def _k(self, num_clients: int) -> int:
        """Return the number of rows."""
        return self.num_clusters or min(self.max_clusters, num_clients)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with everyone in cluster 0."""
        K, sought = self._k(problem.num_clients), not self.num_clusters
        alike = self.starts == "alike" if self.starts else sought or self.variant == "emdcfl"
        return problem.server(problem.alike(K) if alike else K)

    def _clusters(self, t: int) -> bool:
        """Return whether round `t` (from 0) clusters."""
        return self.variant == "emdcfl" or (t % self.period == 0 and t < self.last_round)

    def compares(self, server: Server) -> bool:
        """Compare profiles in rounds that cluster."""
        return self._clusters(server.version)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the own cluster's model, and in rounds that cluster the criterion model."""
        own = int(server.assign[k])
        also = (0,) if own and self.variant == "paper" and self._clusters(server.version) else ()
        return {"model": (own, *also)}

    def _train(self, client: Client, w: Vector, key: Key) -> Trained:
        """Take one mini-batch step, or train a whole visit."""
        if not self._takes_one_step:
            return client.sgd(w, key)
        batch = next(client.batches(key, epochs=1), client.data.train)  # all data, where nothing is trained
        step: dict[str, Any] = {"epochs": 1, "batch_size": len(batch), "momentum": 0.0}
        return client.sgd(w, key, split=batch, **step)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the own cluster's model; in rounds that cluster, add v_i to the profile."""
        start, t, K = message["model"][0], message.step - 1, self.num_clusters or self.max_clusters
        w = self._train(client, start, key)
        metrics, gap = {"train_loss": w.loss}, w.vector - start
        upload: dict[str, Any] = {"model": w.vector} if self.variant == "emdcfl" else {"delta": gap}
        if not self._clusters(t):
            return client.report(metrics=metrics, **upload), state
        blocks, block, v, sent = 1, 0, gap, True
        if self.variant == "emdcfl":
            blocks, block, v = K, message.rows["model"][0], state_change(client, start, w)
        elif len(message["model"]) > 1:
            criterion = message["model"][1]
            v, sent = self._train(client, criterion, key.of("criterion")).vector - criterion, False
        beta = 1 / ((t + 1) // (K * (self.period if self.variant == "paper" else 1)) + 1)
        beta = beta if w.steps else 0.0  # a client that takes no step has nothing to add
        G = state.get("profile", torch.zeros(blocks, len(v))).clone()
        G[block] = (1 - beta) * G[block] + beta * v.to(G)
        unsent = ("profile",) if sent else ()  # the server can compute it from the uploads
        return client.report(metrics=metrics, unsent=unsent, profile=G.reshape(-1), **upload), {"profile": G}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Cluster the clients in rounds that do so, then move each cluster's model."""
        assign, K = server.assign.copy(), len(server.tables["model"])
        if "gram" in notes.columns:
            assign[notes.client] = match_labels(self._labels(notes["gram"], K), assign[notes.client])
        new = assign[notes.client]
        if self.variant == "emdcfl":
            return Plan([by_cluster(new, K, notes.num_samples)], assign=assign)
        gaps = rows((np.arange(K)[:, None] == new).astype(float), of="delta")
        return Plan([replace(gaps, keep=np.ones(K))], assign=assign)

    def _labels(self, gram: np.ndarray, K: int) -> np.ndarray:
        """Return the cluster [m] of each profile."""
        if self.num_clusters:
            return spectral(gram, min(K, len(gram)))
        return spectral_by_silhouette(gram, K).labels
