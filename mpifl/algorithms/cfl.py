"""CFL: FedAvg until the mean update vanishes while some client still moves; then the cluster splits in two.

Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints", TNNLS 2020, Algorithms 1 and 3. Split iff ||mean dw|| < eps1, max ||dw_i|| > eps2, more than two
members and the warm-up is over. The authors' code splits by complete linkage on the negative cosine
similarity. The paper minimises the largest cross-cluster similarity, which is single linkage (`linkage`), and
adds the test gamma_max < sqrt((1 - alpha_cross) / 2), which no code implements (`gamma_max`). Legend: dw_i
update of client i, S cosine matrix, alpha_cross its largest entry across the cut, gamma_i = ||dw_i - mean|| /
||mean|| with the mean over the client's side of the cut.

Clients that are absent when their cluster splits, and clients that never took part, descend the paper's
parameter tree. The server keeps the model w_c that was split and the updates of both halves. At its next
visit such a client trains from w_c and moves to the half that holds the update most similar to its own; it
repeats this in later visits until it reaches a leaf. These visits enter no average. Meanwhile the client is
evaluated with w_c, and all clients waiting there are labelled as one cluster. The authors' code has full
participation, and keeps each client's optimiser (`local.keep_optimizer`).

Beyond the paper: with `max_age`, the criterion and the cut look at the last update of every client of the
cluster, so that clients that are absent move with their half, and a cluster may split at a single arrival.

Norms and cosines are over parameters. Variant `emdcfl` follows the EMD-CFL repository: updates are those of
whole state dicts, including running statistics and batch counters (`num_batches_tracked`); averages are
weighted by samples; the first split can occur in round 2. The counters grow by the number of steps. This
keeps the mean update of a ResNet long and all cosines near 1, so that it never splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from mpifl.clustering.distances import cosine_matrix
from mpifl.clustering.partitions import bipartition, last_uploads
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
from mpifl.core.mixing import Mixing
from mpifl.core.options import NonNegativeFloat, NonNegativeInt
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State, Vector
from mpifl.training.evaluation import counter_weight, state_change


@dataclass(frozen=True)
class CFL(ComparedUploads, RememberedUploads, PlainVisits, Algorithm):
    """K grows by splits; table `update` holds updates of split clusters, for clients still to be placed.

    Attributes:
        eps1: a cluster splits only if the norm of its mean update is below this value (absolute, so it
            depends on the model).
        eps2: a cluster splits only if the largest norm of a member's update is above this value (absolute,
            likewise).
        warmup: server steps before the first split; None: 20, or 1 for variant `emdcfl`.
        linkage: `complete` (authors' code) or `single` (paper).
        gamma_max: a bound in [0, 1] requires gamma_max < sqrt((1 - alpha_cross) / 2) for a split, with
            alpha_cross the largest cosine between the two halves; -1 takes the largest relative deviation
            gamma_i of an update from the mean of its half; None: no such test.
        weighted: average updates by samples; otherwise with equal weights. None: by samples only for variant
            `emdcfl`.
        max_age: oldest update that decides on splits, in server steps since the model that it was computed
            from; 0: those of the step only; null: the last one of each client.
        variant: `paper`, or `emdcfl` (updates of whole state dicts, `warmup` 1, `weighted` true).
    """

    eps1: NonNegativeFloat = 0.4
    eps2: NonNegativeFloat = 1.6
    warmup: NonNegativeInt | None = None
    linkage: Literal["complete", "single"] = "complete"
    gamma_max: float | None = None
    weighted: bool | None = None
    max_age: NonNegativeInt | None = 0
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "sattler2020clustered"
    trains_once = True
    changes = MappingProxyType({"delta": "model"})
    needs = Needs(averages=True)
    gram = "update"
    row_distance = "update"
    remembered = "update"
    mixes_remembered = False  # only compared
    statistics = ("update",)  # kept one by one, to compare absent clients with

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.gamma_max is None or self.gamma_max == -1 or 0 <= self.gamma_max <= 1
        require(good, "gamma_max", self.gamma_max, "use a bound in [0, 1], -1 to measure it, or null")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with one cluster and a tree of one leaf; row 0 of `update` is the zero vector.

        State: `children` [K, 2], the two rows below each row of `model` (-1: a leaf). For each row of
        `update`: `cached` [R, 2], the row of `model` that was split and the side of the cut (-1: the zero
        vector), and `cached_norm` [R], its norm.
        """
        layout, leaf = problem.layout, np.full((1, 2), -1)
        whole = layout.size + (counter_weight(layout) is not None)
        width = whole if self.variant == "emdcfl" else layout.num_parameters
        state = {"children": leaf, "cached": leaf, "cached_norm": np.zeros(1)}
        return problem.server(algorithm_state=state, update=torch.zeros(1, width))

    def plain_visit(self) -> PlainVisit:
        """Report dw; the comparisons use the same vector."""
        return PlainVisit("delta", change=True, unsent=("update",))

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Report dw = w - w_c."""
        w_c = message["model"][0]
        w = client.sgd(w_c, key)
        dw = w.vector - w_c
        emdcfl = self.variant == "emdcfl"
        compared = state_change(client, w_c, w) if emdcfl else dw[: client.layout.num_parameters]
        metrics = {"train_loss": w.loss}
        return client.report(metrics=metrics, unsent=("update",), delta=dw, update=compared), {}

    def unsent_vectors(self, report: Report, arrived: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return the compared update as it arrives; the batch counters are those of the report."""
        dw, update = arrived["delta"], report.vectors["update"]
        return {"update": torch.cat([dw, update[len(dw) :]])[: len(update)]}

    def measures(self, server: Server) -> bool:
        """Measure distances while updates of split clusters are kept."""
        return len(server.algorithm_state["cached"]) > 1

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Split the clusters that meet the criterion, then w_c <- w_c + mean dw over each new cluster."""
        gram = notes["gram"]  # [m, m], of the compared updates
        state, assign = server.algorithm_state, server.assign.copy()
        own, parent = assign[notes.client], list(range(len(server.tables["model"])))  # [m]
        children, cached = state["children"].tolist(), state["cached"].tolist()
        waits = np.array([children[c][0] >= 0 for c in own])  # trained from a model that was split
        placed = np.flatnonzero(waits & notes.fresh)
        for i in placed:
            assign[notes.client[i]] = children[own[i]][_nearer(state, notes["row_distance"][i], own[i])]
        new, uploads = np.where(waits, -1, own), list[int]()  # row of each upload; uploads to cache
        last = last_uploads(notes.client)  # a client may occur twice in a buffer
        for c in np.unique(own[~waits]).tolist():
            members = last[new[last] == c]
            products = gram[np.ix_(members, members)]
            if not self._must_split(products, server.version):
                continue
            side, child = bipartition(cosine_matrix(products), self.linkage), len(parent)
            parent.append(c)
            children.append([-1, -1])
            new[np.isin(notes.client, notes.client[members[side == 1]])] = child
            assign[notes.client[members[side == 1]]] = child
            away = np.setdiff1d(np.flatnonzero(assign == c), notes.client[members])
            if len(away) or _awaited(children, assign, c):
                node = len(parent)  # keeps w_c, and takes the place of c in the tree
                parent.append(c)
                children = [[node if k == c else k for k in below] for below in children] + [[c, child]]
                assign[away] = node
                uploads += members.tolist()
                cached += [[node, int(s)] for s in side]
        by_samples = self.variant == "emdcfl" if self.weighted is None else self.weighted
        n = notes.num_samples.astype(float) if by_samples else np.ones(len(notes))
        weights = (np.arange(len(parent))[:, None] == new[None]) * (n * notes.fresh)
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
        keep = np.eye(len(server.tables["model"]))[parent]  # a child starts from its parent's row
        mixings = [Mixing(weights, keep=keep, of="delta")]
        needed = np.array([node < 0 or _awaited(children, assign, node) for node, _ in cached])
        norms = np.append(state["cached_norm"], np.sqrt(gram.diagonal()[uploads]))
        if uploads or not needed.all():
            old = len(state["cached"])
            rows = np.flatnonzero(needed)
            kept, added = np.eye(old + len(uploads), old)[rows], np.zeros((old + len(uploads), len(notes)))
            added[old + np.arange(len(uploads)), uploads] = 1.0
            mixings.append(Mixing(added[rows], keep=kept, into="update", of="update"))
        tree = {"children": np.array(children), "cached": np.array(cached)[needed]}
        return Plan(mixings, assign=assign, algorithm_state={**tree, "cached_norm": norms[needed]})

    def _must_split(self, gram: np.ndarray, version: int) -> bool:
        """Return whether a cluster with this Gram matrix of updates splits."""
        warmup = self.warmup if self.warmup is not None else 1 if self.variant == "emdcfl" else 20
        if len(gram) <= 2 or version < warmup:
            return False
        mean_norm = np.sqrt(max(gram.mean(), 0.0))  # ||(1/m) sum dw||^2 = mean of all products
        max_norm = np.sqrt(gram.diagonal().max())
        if not (mean_norm < self.eps1 and max_norm > self.eps2):
            return False
        if self.gamma_max is None:
            return True
        cosine = cosine_matrix(gram)
        side = bipartition(cosine, self.linkage)
        alpha_cross = cosine[np.ix_(side == 0, side == 1)].max()
        gamma = (
            self.gamma_max if self.gamma_max >= 0 else max(_noise(gram[np.ix_(s, s)]) for s in _sides(side))
        )
        return bool(gamma < np.sqrt((1 - alpha_cross) / 2))


def _awaited(children: list[list[int]], assign: np.ndarray, row: int) -> bool:
    """Return whether a client waits at the inner node `row`, or above `row` and may descend to it."""
    above: int | None = row if children[row][0] >= 0 else None
    if above is None:
        above = next((a for a, below in enumerate(children) if row in below), None)
    while above is not None and not (assign == above).any():
        above = next((a for a, below in enumerate(children) if above in below), None)
    return above is not None


def _nearer(state: Mapping[str, np.ndarray], apart: np.ndarray, node: int) -> int:
    """Return the side of `node` with the update most similar to one at distances `apart` [R] (cosine)."""
    rows = np.flatnonzero(state["cached"][:, 0] == node)
    length, norms = apart[0], state["cached_norm"][rows]  # row 0 is the zero vector
    cosine = (length**2 + norms**2 - apart[rows] ** 2) / np.maximum(2 * length * norms, 1e-300)
    return int(state["cached"][rows[least(-cosine)], 1])


def _sides(side: np.ndarray) -> list[np.ndarray]:
    """Return the members of both sides."""
    return [np.flatnonzero(side == s) for s in (0, 1)]


def _noise(gram: np.ndarray) -> float:
    """Return max_i ||dw_i - mean|| / ||mean|| from the products of one side."""
    gaps = gram.diagonal() - 2 * gram.mean(1) + gram.mean()
    return float(np.sqrt(max(gaps.max(), 0.0) / max(gram.mean(), 1e-300)))
