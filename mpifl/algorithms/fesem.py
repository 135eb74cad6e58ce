"""FeSEM (FedSEM): k-means on the clients' weights, taking turns with local training.

Long et al., "Multi-Center Federated Learning: Clients Clustering for Better Personalization", World Wide Web
2023, Algorithm 1. E: k_i = argmin_k ||w_i - c_k||; M: c_k = mean of its members; clients of cluster k train
from c_k.

Three implementations differ. `flt` (FLT's repository, default): every step runs a complete k-means on the
last models of all clients seen so far, first with 20 starts and later from the previous centres of k-means,
in which all members have equal weight. Cluster models are averages by samples, including absent members.
`flexcfl` (FlexCFL's repository): the initial centres are independent; every round takes one E and one M step
over the clients that take part, with equal weights. `emdcfl` (EMD-CFL's repository): one E and one M step
over all clients seen so far, weighted by samples, after a random first assignment (there: k-means on
numerical noise). A penalty sum_l ||w_l - c_l|| over tensors l holds clients near their centre. Distances are
over whole state dicts, including running statistics and batch counters (`num_batches_tracked`). That
repository takes both steps before the training of a round and never aggregates the last training: its T
rounds are T - 1 here.

With `initial_models`, clients that never took part count in k-means and in the averages with the initial
model w^0, as in FLT's repository, and belong to the centre that k-means assigns them to. Otherwise such a
client has no w_i; it is evaluated with the centre of lowest training loss. (The centre nearest to the model
it would train is mostly the one it would start from.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mpifl.clustering.partitions import kmeans_of_gram
from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    Client,
    ComparedUploads,
    Key,
    Needs,
    PlainVisit,
    PlainVisits,
    Plan,
    RememberedUploads,
)
from mpifl.core.metric import least
from mpifl.core.mixing import Mixing, by_cluster, rows, updated
from mpifl.core.options import NonNegativeFloat, NumModels
from mpifl.core.parameters import Layout
from mpifl.core.trainer import Gift
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector
from mpifl.training.corrections import unsquared
from mpifl.training.evaluation import counter_weight, fitting_model


@dataclass(frozen=True)
class FeSEM(PlainVisits, RememberedUploads, ComparedUploads, Algorithm):
    """K rows, the centres; `flt` appends the centres of k-means, `emdcfl` a batch counter to each vector.

    Attributes:
        num_clusters: K, number of clusters.
        variant: the repository that is followed: `flt`, `flexcfl` or `emdcfl`.
        mu: weight of the penalty that holds clients near their centre, for variant `emdcfl`.
        initial_models: let clients that never took part count with the initial model (variant `flt`), which
            an additional last row of the table keeps.
    """

    num_clusters: NumModels = 4
    variant: Literal["flt", "flexcfl", "emdcfl"] = "flt"
    mu: NonNegativeFloat = 0.1
    initial_models: bool = False

    paper = "long2023multi"
    evaluates_rows = True
    trains_once = True
    needs = Needs(averages=True)
    gram = "model"
    row_distance = "model"

    @property
    def mixes_remembered(self) -> bool:
        """Whether absent clients count in the centres: not under `flexcfl`."""
        return self.variant != "flexcfl"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"has no effect under variant {self.variant}; use variant flt"
        require(not self.initial_models or self.variant == "flt", "initial_models", True, remedy)

    def ignored_options(self) -> Mapping[str, str]:
        """`mu` belongs to variant `emdcfl`."""
        return {} if self.variant == "emdcfl" else {"mu": "only variant emdcfl has a penalty"}

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` for more centres than clients, or `initial_models` with running statistics."""
        super().check(problem)
        plain = problem.layout.size == problem.layout.num_parameters
        remedy = "the model has running statistics, which distances leave out; use a model without"
        require(plain or not self.initial_models, "initial_models", True, remedy)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start the centres alike, or independently under `flexcfl`."""
        own = self.variant == "flexcfl"
        centres = torch.stack([problem.init(j if own else 0) for j in range(self.num_clusters)])
        if self._counts(problem.layout):
            centres = torch.nn.functional.pad(centres, (0, 1))
        drawn = key.numpy().integers(self.num_clusters, size=problem.num_clients)
        if self.variant != "flt":
            return problem.server(centres, drawn)
        if not self.initial_models:
            return problem.server(torch.cat([centres, centres]))
        state = {"num_samples": problem.num_samples, "moved": np.zeros(self.num_clusters)}
        return problem.server(torch.cat([centres, centres, problem.alike(1)]), algorithm_state=state)

    def serves_unseen(self, server: Server, k: int) -> Reads:
        """Evaluate with the best-fitting of all centres; under `initial_models` with the assigned one."""
        if self.initial_models:
            return self.serves(server, k)
        return {"model": tuple(range(self.num_clusters))}

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the served centre, or the best-fitting of several."""
        return fitting_model(client, message["model"][:, : client.layout.size])

    def compares(self, server: Server) -> bool:
        """Compare models only under `flt`, whose k-means reads the products."""
        return self.variant == "flt"

    @property
    def asks(self) -> tuple[Gift, ...]:
        """The penalty of `emdcfl` is added to gradients."""
        return ("direction",) if self.variant == "emdcfl" else ()

    def plain_visit(self) -> PlainVisit | None:
        """Train from the centre; None under `emdcfl`, which adds a penalty."""
        return PlainVisit() if self.variant != "emdcfl" else None

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train from the centre."""
        c, d = message["model"][0], client.layout.size
        pull = unsquared(self.mu, c, client.layout) if self.variant == "emdcfl" else None
        w = client.sgd(c[:d], key, direction=pull)
        model = w.vector
        if weight := self._counts(client.layout):
            batches = int(float(c[d]) / weight + 1e-3) + w.steps  # an integer there: means are truncated
            model = torch.cat([model, model.new_tensor([weight * batches])])
        return client.report(model=model, metrics={"train_loss": w.loss}), {}

    def _counts(self, layout: Layout) -> float:
        """Return the weight of the batch counter behind a vector; 0 without one."""
        return (counter_weight(layout) or 0.0) if self.variant == "emdcfl" else 0.0

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Take the E and the M step."""
        if self.initial_models:
            return self._with_everyone(server, notes)
        K, k = self.num_clusters, self._nearest(server, notes)  # k [m]
        assign = updated(server.assign, notes.client, k)
        if self.variant == "flexcfl":
            assign = updated(server.assign, notes.client[notes.fresh], k[notes.fresh])
            return Plan([by_cluster(k, K, notes.fresh.astype(float))], assign=assign)
        if self.variant == "emdcfl":
            return Plan([by_cluster(k, K, notes.num_samples)], assign=assign)
        members = (np.arange(K)[:, None] == k).astype(float)
        return Plan([rows(np.concatenate([members * notes.num_samples, members]))], assign=assign)

    def _nearest(self, server: Server, notes: Notes) -> np.ndarray:
        """Return k_i [m] of each report."""
        apart = notes["row_distance"]  # [m, K]
        if self.variant == "emdcfl" and server.version == 0:
            return np.asarray(server.assign[notes.client])
        if self.variant != "flt":
            return np.asarray(least(apart))
        return self._kmeans(server.version, notes["gram"], apart[:, self.num_clusters :])

    def _kmeans(self, version: int, gram: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """Return the cluster [m] of each model.

        Args:
            version: of the server.
            gram: products of the models [m, m].
            apart: their distances from the previous centres [m, K].
        """
        K = min(self.num_clusters, len(gram))
        if version == 0 or self.num_clusters > K:
            return kmeans_of_gram(gram, K, n_init=20)
        return kmeans_of_gram(gram, K, groups=_nearest_to(apart))

    def _with_everyone(self, server: Server, notes: Notes) -> Plan:
        """Take both steps over all N clients; clients that never took part are at w^0, the last row.

        All vectors are relative to w^0. `moved` [K] holds the distances of the k-means centres from w^0.
        """
        K, m, state = self.num_clusters, len(notes), server.algorithm_state
        unseen = np.setdiff1d(np.arange(len(server.assign)), notes.client)
        gram, far = notes["gram"], notes["row_distance"][:, -1]  # |w_i - w^0| [m]
        squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram  # |w_i - w_j|^2
        products = (far[:, None] ** 2 + far**2 - squares) / 2  # (w_i - w^0)'(w_j - w^0) [m, m]
        still = np.broadcast_to(state["moved"], (len(unseen), K))
        apart = np.concatenate([notes["row_distance"][:, K:-1], still])
        k = self._kmeans(server.version, np.pad(products, (0, len(unseen))), apart)
        assign, n = server.assign.copy(), state["num_samples"].copy()
        assign[notes.client], assign[unseen] = k[:m], k[m:]
        n[notes.client] = notes.num_samples
        members = (np.arange(K)[:, None] == k).astype(float)  # [K, m + u]
        share = np.concatenate([members * np.concatenate([n[notes.client], n[unseen]]), members])
        total = share.sum(1, keepdims=True)
        share = share / np.where(total > 0, total, 1.0)  # [2 K, m + u]
        last = len(share)
        keep = np.zeros((last + 1, last + 1))
        keep[np.arange(last), np.arange(last)] = total[:, 0] == 0  # a centre without members stays
        keep[:last, last], keep[last, last] = share[:, m:].sum(1), 1.0
        weights = np.concatenate([share[:, :m], np.zeros((1, m))])
        own = share[K:, :m]
        length = np.sqrt(np.maximum(np.einsum("ki,ij,kj->k", own, products, own), 0.0))
        moved = np.where(total[K:, 0] > 0, length, state["moved"])
        return Plan([Mixing(weights, keep=keep)], assign, {"num_samples": n, "moved": moved})


def _nearest_to(apart: np.ndarray) -> np.ndarray:
    """Return the members, bool [K, m], of centres at distances `apart` [m, K]: one step of k-means.

    A centre that is nearest to no point takes the point farthest from its own centre, also as its own.
    """
    nearest, far = least(apart), np.argsort(-apart.min(1), kind="stable")
    lonely = iter(far)
    members = nearest == np.arange(apart.shape[1])[:, None]
    for group in members:
        if not group.any():
            group[next(lonely)] = True
    return np.asarray(members)
