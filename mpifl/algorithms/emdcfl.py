"""EMD-CFL: clients whose data look alike under each other's extractor share a model.

Zhang, Toni and Williams, "Clustered Federated Learning via Embedding Distributions", 2025, section 3. After
the first local training, W[c, c'] is the earth mover's distance between the embeddings of c's training data
and of the data of c' under c's extractor, minus the client's own distance tau_c between training and
validation data. Pairs below epsilon in both directions are linked; clients with the same neighbourhood share
its average.

Our reading, where paper and repository differ: the ground metric is cosine. A client's training data are
compared with the other's validation data (`against="train"`: the paper). Each client uses one projection R
for tau and for all its distances (`tau="plain"`: tau of unprojected embeddings, as the paper prints it;
`tau="full"`: a square R of its own for tau, as in the repository). The extractor is in evaluation mode
(`train_mode=True`: batch statistics, as in the repository). At most `sample_cap` images of a split enter a
distance, and at most the share `sample_share` of the client's images (the paper, 3.1: the lesser of 512 and
10 %, `sample_share=0.1`; the repository: 512). `noise` is the paper's remark on differential privacy
(section 3): Gaussian noise on the projected embeddings before they are sent (Kenthapadi et al., 2012).
`samples="server"` is its remark for many clients (3.1): each client stores the samples that enter distances
at the server when it first takes part. The server has the uploaded models, so it computes all embeddings
itself, with one R: O(C |w|) bytes instead of O(C^2 |w|), and no extractor or embedding is sent.

Partial participation: two clients are compared once, in the first round after which both have taken part; an
absent client counts with its last model (the paper: a pair without a distance is compared, and no other). A
stricter reading is `looks="together"`: once, in the first round in which both take part; until then they are
not linked. `looks="seen"` is the rule of the repository, which produced the paper's tables: in every round
all clients seen so far are compared again with their last models. The last models of absent members are
averaged too; clients never seen stay alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge

from mpifl.clustering.distances import emd
from mpifl.clustering.server_plans import neighbourhood_labels, neighbourhood_plan
from mpifl.core.computation import Asked, Held
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    LookSizes,
    Needs,
    Plan,
    PlannedLook,
    PlannedRun,
    Question,
    RememberedUploads,
    SecondLook,
)
from mpifl.core.options import NonNegativeFloat, PositiveFloat, PositiveShare
from mpifl.core.parameters import put, take
from mpifl.core.types import Notes, Server, Vector


@dataclass(frozen=True)
class EMDCFL(RememberedUploads, SecondLook, Algorithm):
    """One row per neighbourhood, found in the first round.

    Attributes:
        epsilon: two clients are linked if their corrected distances in both directions are below this value.
        projection: p / d, share of the embedding's width kept by the random projection.
        sample_cap: largest number of images of a client's split that enter a distance.
        sample_share: largest number of images of a client's split that enter a distance, as a share of the
            client's training and validation images; 0.1 in the paper.
        metric: ground cost, `cosine` or `euclidean`.
        solver: `exact` or `sinkhorn`, with regularisation `reg`.
        against: the other client's data that enter a distance: `val` or `train`.
        tau: projection under which the client's own distance tau is measured: `shared` (that of its other
            distances), `full` (a square one of its own) or `plain` (none).
        noise: standard deviation of Gaussian noise on the projected embeddings that a client sends.
        train_mode: compute embeddings with batch statistics.
        samples: where the compared samples are kept: at the `clients`, or at the `server` (see above).
        looks: which pairs of clients are compared in a round: `once` (pairs seen so far that have not been
            compared), `together` (pairs that take part and have not been compared) or `seen` (all pairs seen
            so far).
    """

    epsilon: PositiveFloat = 0.025
    projection: PositiveShare = 0.9
    sample_cap: Annotated[int, Ge(2)] = 512
    sample_share: PositiveShare = 1.0
    metric: Literal["cosine", "euclidean"] = "cosine"
    solver: Literal["exact", "sinkhorn"] = "exact"
    reg: PositiveFloat = 0.1
    against: Literal["val", "train"] = "val"
    tau: Literal["shared", "full", "plain"] = "shared"
    noise: NonNegativeFloat = 0.0
    train_mode: bool = False
    samples: Literal["clients", "server"] = "clients"
    looks: Literal["once", "together", "seen"] = "once"

    paper = "zhang2025clustered"
    trained_from = ()
    looked_from = (
        *("projection", "sample_cap", "sample_share", "metric", "solver", "reg"),
        *("against", "tau", "noise", "train_mode", "samples"),
    )
    needs = Needs(validation=True, averages=True, new_rows=True)
    question = "extractor"
    forgets = True

    def ignored_options(self) -> Mapping[str, str]:
        """`reg` belongs to solver `sinkhorn`, `noise` to embeddings that are sent."""
        ignored = {} if self.solver == "sinkhorn" else {"reg": "only solver sinkhorn is regularised"}
        return ignored | ({"noise": "no embeddings are sent with samples: server"} if self.at_server else {})

    @property
    def at_server(self) -> bool:
        """Whether the server has the samples."""
        return self.samples == "server"

    def store(self, client: Client, key: Key) -> torch.Tensor:
        """Return the training and validation images that enter the distances of a client."""
        return torch.cat([self._sample(client, split, key) for split in ("train", "val")])

    def probes(self, server: Server, step: int) -> bool:
        """Compare until every pair has a distance; under `seen` stop only if round 1 had all clients."""
        return not server.algorithm_state.get("frozen", np.zeros(1)).any()

    def forget(self, server: Server, clients: np.ndarray) -> Server:
        """Drop the distances of clients whose data may have changed."""
        W = _distances(server)
        W[clients], W[:, clients] = np.nan, np.nan
        frozen = {"frozen": np.zeros(1)} if "frozen" in server.algorithm_state else {}
        return replace(server, algorithm_state={**server.algorithm_state, "distance": W, **frozen})

    def pairs(self, server: Server, clients: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Return the pairs to compare: all, or those without a distance."""
        return self._pairs(_distances(server)[np.ix_(clients, clients)], fresh)

    def _pairs(self, W: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Return which of the clients seen so far are compared with which, bool [m, m].

        Args:
            W: their distances so far [m, m], NaN where there is none.
            fresh: whether each of them takes part in this step, bool [m].
        """
        if self.looks == "seen":
            return np.ones(W.shape, bool)
        together = fresh[:, None] & fresh[None, :] if self.looks == "together" else True
        return np.asarray(np.isnan(W) & together & ~np.eye(len(W), dtype=bool))

    def ask(self, client: Client, own: Mapping[str, Vector], key: Key) -> Question:
        """Return omega_c for the others; Z_c|c R and tau_c for the server (Algorithm 1, lines 10 to 15)."""
        extractor = take(own["model"], client.layout.part("body"))
        source, val = (self._embed(client, extractor, name, key) for name in ("train", "val"))
        e = source.shape[1]
        projected = source @ self._own_projection(e, key)
        if self.tau == "plain":
            tau = self._emd(source, val)
        elif self.tau == "shared":
            tau = self._emd(projected, val @ self._own_projection(e, key))
        else:
            R_tau = _projection(e, e, key.of("tau"))
            tau = self._emd(source @ R_tau, val @ R_tau)
        return Question(extractor, projected, {"tau": tau})

    def show(self, shown: torch.Tensor, asker: int, peer: int, key: Key) -> torch.Tensor:
        """Return Z_c|c R with noise of its own for each other client."""
        return self._noisy(shown, key.of("noise", asker, peer))

    def answer(self, client: Client, payload: torch.Tensor, key: Key) -> torch.Tensor:
        """Return Z_c'|c R, the embeddings of c' under the extractor of c, with the R of c."""
        Z = self._embed(client, payload, self.against, key)
        return self._noisy(Z @ self._own_projection(Z.shape[1], key), key.of("answer", client.id))

    def compare(
        self, shown: torch.Tensor | None, answered: torch.Tensor, notes: Mapping[str, Any]
    ) -> Mapping[str, float]:
        """Return W[c, c'] = W1(Z_c|c R, Z_c'|c R) - tau_c (Algorithm 1, line 16)."""
        assert shown is not None
        return {"distance": round(self._emd(shown, answered) - notes["tau"], 4)}

    def _own_projection(self, e: int, key: Key) -> torch.Tensor:
        """Return R [e, p] of the client with this key."""
        return _projection(e, max(1, int(self.projection * e)), key)

    def _noisy(self, Z: torch.Tensor, key: Key) -> torch.Tensor:
        """Return Z [n, p] with noise, if there is any."""
        if not self.noise or self.at_server:
            return Z
        return Z + self.noise * torch.randn(Z.shape, generator=key.torch())

    def _embed(self, client: Client, extractor: Vector, split: str, key: Key) -> torch.Tensor:
        """Return Z [n, e] of a sample of a client's images under an extractor."""
        model = put(client.init, client.layout.part("body"), extractor)
        x = self._sample(client, split, key)
        return client.embed(model, x, train_mode=self.train_mode).flatten(1).cpu()

    def _sample(self, client: Client, split: str, key: Key) -> torch.Tensor:
        """Return a sample of a client's images."""
        x: torch.Tensor = getattr(client.data, split).x
        most = self._most(client.num_samples, len(client.data.val))
        chosen = key.of("sample", split, client.id).numpy().permutation(len(x))[:most]
        return x[torch.from_numpy(chosen)]

    def _most(self, train: int, val: int) -> int:
        """Return how many images of a split may enter, for a client with `train` and `val` images."""
        return min(self.sample_cap, max(2, int(self.sample_share * (train + val))))

    def _emd(self, Z_s: torch.Tensor, Z_t: torch.Tensor) -> float:
        return emd(Z_s.numpy(), Z_t.numpy(), metric=self.metric, solver=self.solver, reg=self.reg)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Link clients, number the neighbourhoods, average each."""
        if "distance" in notes.columns:
            W, here = self._known(server, notes), np.ix_(notes.client, notes.client)
            linked = (self.epsilon > W[here]) & (self.epsilon > W[here].T) | np.eye(len(notes), dtype=bool)
            plan = neighbourhood_plan(server, notes, linked)
            first = server.version == 0 or self.looks != "seen" or "frozen" in server.algorithm_state
            frozen = {"frozen": np.ones(1)} if first and not np.isnan(W).any() else {}
            return replace(plan, algorithm_state={**(plan.algorithm_state or {}), "distance": W, **frozen})
        linked = server.algorithm_state.get("linked", np.eye(len(server.assign)))
        linked = linked[np.ix_(notes.client, notes.client)].astype(bool)
        return neighbourhood_plan(server, notes, linked)

    def _known(self, server: Server, notes: Notes) -> np.ndarray:
        """Return the distances known after a step [N, N]; NaN for the others."""
        W = _distances(server)
        if self.looks == "seen":
            W[:] = np.nan
        looked = ~np.isnan(notes["peer"]).any(1)
        peers = notes["peer"][looked][0].astype(np.int64)  # the same for all; some may have dropped out
        here = np.ix_(notes.client, peers)
        W[here] = np.where(np.isnan(notes["distance"]), W[here], notes["distance"])
        W[notes.client, notes.client] = 0.0
        return W

    def look_sizes(self, run: PlannedRun) -> LookSizes:
        """Return the sizes of omega_c, of Z_c|c R and Z_c'|c R, and of tau."""
        body = sum(s.stop - s.start for s in run.problem.layout.part("body"))
        width = run.client.embed(run.client.init, run.client.data.train.x[:1]).flatten(1).shape[1]
        p = max(1, int(self.projection * width))
        most = [self._most(int(train), int(val)) for train, val in run.sizes[:, :2]]
        own, val = (np.minimum(run.sizes[:, i], most) for i in (0, 1))
        stored = (own + val) * run.client.data.train.x[0].numel() if self.at_server else None
        return LookSizes(body, p * own, p * (val if self.against == "val" else own), 1, stored)

    def planned_looks(self, run: PlannedRun) -> Iterator[PlannedLook]:
        """Yield the pairs of each round, until every pair has a distance."""
        n = run.problem.num_clients
        W, seen = np.full((n, n), np.nan), np.zeros(0, np.int64)
        for round_, cohort in enumerate(run.cohorts(), 1):
            if not np.isnan(W).any() and (self.looks != "seen" or run.num_sampled == n) and round_ > 1:
                return
            seen = np.union1d(seen, cohort)
            fresh, here = np.isin(seen, cohort), np.ix_(seen, seen)
            pairs = self._pairs(W[here], fresh)
            W[here] = np.where(pairs, 0.0, W[here])
            W[seen, seen] = 0.0
            yield PlannedLook(seen, fresh, pairs)

    def look_passes(self, held: Held) -> tuple[Sequence[Asked], Sequence[Asked]]:
        """Return the embeddings of the own data for a question, and of one split for an answer."""
        most = self._most(held.train, held.val)
        train, val = (Asked("embed", min(n, most)) for n in (held.train, held.val))
        return [train, val], [val if self.against == "val" else train]

    def labels(self, server: Server) -> np.ndarray:
        """Return the neighbourhood [N] of each client."""
        return neighbourhood_labels(server)


@lru_cache(maxsize=16)
def _projection(e: int, p: int, key: Key) -> torch.Tensor:
    """Return R [e, p], R_ij ~ N(0, 1) / sqrt(e), every row scaled to unit norm; remembered for all peers."""
    R = torch.randn(e, p, generator=key.of("projection").torch()) / e**0.5
    return torch.nn.functional.normalize(R, dim=1)


def _distances(server: Server) -> np.ndarray:
    """Return a copy of the known distances [N, N]; NaN for the others."""
    n = len(server.assign)
    return np.array(server.algorithm_state.get("distance", np.full((n, n), np.nan)))
