"""EMD-CFL: clients whose data look alike under each other's extractor share a model.

"Clustered Federated Learning via Embedding Distributions", section 3. After the first local training, W[c,
c'] is the earth mover's distance between the embeddings of c's training data and of the data of c' under c's
extractor, minus the client's own distance tau_c between training and validation data. Pairs below epsilon in
both directions are linked; clients with the same neighbourhood share its average.

Readings, where paper and repository differ: cosine ground metric; own training data against the other's
validation data (`against="train"`: the paper); one projection R per client for tau and for all its distances
(`tau="full"`: a square R of its own, the repository); evaluation mode for the extractor (`train_mode=True`:
the repository's batch statistics). With partial participation the clients seen so far look again in every
round with their last model, and the last models of absent members are averaged too; clients never seen stay
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mpifl.clustering.distances import emd
from mpifl.clustering.server_plans import neighbourhood_labels, neighbourhood_plan
from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Look,
    Needs,
    Notes,
    Peer,
    PlannedRun,
    RememberedUploads,
    SecondLook,
    Server,
    Vector,
)
from mpifl.core.mixing import Plan
from mpifl.core.parameters import put, take


@dataclass(frozen=True)
class EMDCFL(RememberedUploads, SecondLook, Algorithm):
    """One row per neighbourhood, found in the first round.

    Attributes:
        epsilon: tolerance on W.
        projection: p / d, share of the embedding's width kept by the random projection.
        sample_cap: most images of a client that enter a distance.
        metric: ground cost, `cosine` or `euclidean`.
        solver: `exact` or `sinkhorn`, with regularisation `reg`.
        against: `val` or `train`, the other client's data.
        tau: `shared` or `full`, the projection under which tau is measured.
        train_mode: embed with batch statistics.
    """

    epsilon: float = 0.025
    projection: float = 0.9
    sample_cap: int = 512
    metric: str = "cosine"
    solver: str = "exact"
    reg: float = 0.1
    against: str = "val"
    tau: str = "shared"
    train_mode: bool = False

    paper = "zhang2025clustered"
    needs = Needs(validation=True)

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "take a positive tolerance, 0.025 in the paper")
        require(0 < self.projection <= 1, "projection", self.projection, "take a share in (0, 1]")
        require(self.sample_cap >= 2, "sample_cap", self.sample_cap, "take at least 2 images")
        require(self.metric in ("cosine", "euclidean"), "metric", self.metric, "take cosine or euclidean")
        require(self.solver in ("exact", "sinkhorn"), "solver", self.solver, "take exact or sinkhorn")
        require(self.reg > 0, "reg", self.reg, "take a positive regularisation")
        require(self.against in ("val", "train"), "against", self.against, "take val or train")
        require(self.tau in ("shared", "full"), "tau", self.tau, "take shared or full")

    def probes(self, server: Server, step: int) -> bool:
        """Look until all clients were seen in the first round."""
        return "frozen" not in server.algorithm_state

    def probe(self, client: Client, own: Mapping[str, Vector], peers: Sequence[Peer], key: Key) -> Look:
        """Return row c of W."""
        extractor = take(own["model"], client.layout.part("body"))
        source, target = (self._embed(client, extractor, name, key) for name in ("train", self.against))
        e = source.shape[1]
        R = _projection(e, max(1, int(self.projection * e)), key)  # [e, p]
        R_tau = R if self.tau == "shared" else _projection(e, e, key.of("tau"))
        if self.against == "train":
            target = self._embed(client, extractor, "val", key)
        tau = self._emd(source @ R_tau, target @ R_tau)
        distance = np.zeros(len(peers))
        for i, peer in enumerate(peers):
            if peer.id != client.id:
                peer.send(source @ R)
                theirs = peer.ask(extractor, lambda c, omega: self._embed(c, omega, self.against, key) @ R)
                distance[i] = round(self._emd(source @ R, theirs) - tau, 4)
        return Look(notes={"tau": tau}, findings={"distance": distance})

    def _embed(self, client: Client, extractor: Vector, split: str, key: Key) -> torch.Tensor:
        """Return Z [n, e] of at most `sample_cap` images of a client under an extractor."""
        x = getattr(client.data, split).x
        chosen = key.of("sample", split, client.id).numpy().permutation(len(x))[: self.sample_cap]
        model = put(client.init, client.layout.part("body"), extractor)
        return client.embed(model, x[torch.from_numpy(chosen)], train_mode=self.train_mode).cpu()

    def _emd(self, Z_s: torch.Tensor, Z_t: torch.Tensor) -> float:
        return emd(Z_s.numpy(), Z_t.numpy(), metric=self.metric, solver=self.solver, reg=self.reg)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Link, name the neighbourhoods, average each."""
        if "distance" in notes.columns:
            W = notes["distance"]  # [m, m]
            linked = (self.epsilon > W) & (self.epsilon > W.T) | np.eye(len(W), dtype=bool)
            plan = neighbourhood_plan(server, notes, linked)
            everyone = np.full((len(server.assign), len(server.assign)), np.nan)
            everyone[np.ix_(notes.client, notes.client)] = W
            frozen = {"frozen": np.ones(1)} if server.version == 0 and not np.isnan(everyone).any() else {}
            return replace(
                plan, algorithm_state={**(plan.algorithm_state or {}), "distance": everyone, **frozen}
            )
        linked = server.algorithm_state["linked"][np.ix_(notes.client, notes.client)].astype(bool)
        return neighbourhood_plan(server, notes, linked)

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Count the second look of those seen so far, or that of round 1 where that is everyone.

        Each ordered pair sends an extractor up and down, and the projected embeddings of both up; each who
        takes part sends tau.
        """
        body = sum(s.stop - s.start for s in run.problem.layout.part("body"))
        width = run.client.embed(run.client.init, run.client.data.train.x[:1]).shape[1]
        p, down, up = max(1, int(self.projection * width)), 0, 0
        images = [np.minimum(run.sizes[:, i], self.sample_cap) for i in (0, int(self.against == "val"))]
        seen = np.zeros(0, np.int64)
        for round_, cohort in enumerate(run.cohorts(), 1):
            if round_ > 1 and len(seen) == run.problem.num_clients == run.num_sampled:
                break
            seen = np.union1d(seen, cohort)
            pairs = len(seen) * (len(seen) - 1)
            numbers = (len(seen) - 1) * p * int(sum(counts[seen].sum() for counts in images))
            down += run.message_bytes(pairs * body, pairs)
            up += run.message_bytes(pairs * body + numbers, 3 * pairs)
            up += run.message_bytes(len(cohort), len(cohort), note=True)
        return down, up

    def labels(self, server: Server) -> np.ndarray:
        """Name the neighbourhoods."""
        return neighbourhood_labels(server)


def _projection(e: int, p: int, key: Key) -> torch.Tensor:
    """Return R [e, p], R_ij ~ N(0, 1) / sqrt(e), every row scaled to unit norm."""
    R = torch.randn(e, p, generator=key.of("projection").torch()) / e**0.5
    return torch.nn.functional.normalize(R, dim=1)
