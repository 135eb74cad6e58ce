"""UCFL: each user gets its own mixture of all local models, weighted by similarity of gradients.

Mestoukirdi et al., "User-Centric Federated Learning: Trading off Wireless Resources for Personalization",
IEEE TMLCN 2023, sections IV and V. Before training, client i sends its gradient g_i at the initial model and
the variance sigma_i^2 of its mini-batch gradients; w_ij ~ n_j exp(-||g_i - g_j||^2 / (2 sigma_i^2)), rows
normalised, fixed for the run. With `streams` the rows are the centroids of k-means on W (of more than 256
users: along its principal axes, see `partitions.kmeans`). `parallel` is the paper's upper bound: every client
trains all streams.

Our reading: the kernel uses sigma_i^2 (`kernel="geo"`: sigma_i sigma_j, the repository). The mini-batches for
sigma are a disjoint random partition (eq. 10). sigma falls as n_b grows and is 0 at n_b = n_i, where the one
batch holds all samples: the paper's limit n_b -> n_i is local training, and a client with n_i <= n_b gets its
own model only. Algorithm 2 chooses m_t = argmax over k = 1 .. m of c(k, s_k), with s_k the mean silhouette (0
for one stream, the mean of all rows of W, and for m), and leaves c open; the repository takes s_k. Here
c(k, s) = s - stream_cost k, so that `stream_cost` is the silhouette that each additional stream must gain;
`tradeoff` replaces c by a function of yours. Beyond the paper: under partial participation weights are
normalised over the clients that take part, and with one mixture per user the rows of absent users stay
unchanged. With `max_age` the last models of absent clients are mixed too, into all rows: what the paper's
rounds of all clients become where uploads arrive one by one. With `keep_gradients` the server keeps all g_i,
so that clients may send theirs later (newcomers) or again (section `recluster`): W is computed anew, and a
new stream starts from the mean of the streams that its users had.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge

from mpifl.clustering.distances import squared_distances, submatrix
from mpifl.clustering.partitions import kmeans, kmeans_by_silhouette
from mpifl.core.capabilities import Capability
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import UserError, require
from mpifl.core.federation import Split
from mpifl.core.imports import load_object
from mpifl.core.method import (
    Algorithm,
    Client,
    Downloads,
    Key,
    Needs,
    NewClients,
    PlainVisit,
    PlainVisits,
    Plan,
    RememberedUploads,
    chosen_rows,
)
from mpifl.core.mixing import Mixing, carry, componentwise, own_rows, rows, updated
from mpifl.core.options import AtMostClients, NonNegativeFloat, NonNegativeInt, PositiveFloat, Remedy
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

KMEANS_SEED = 1  # the repository's


@dataclass(frozen=True)
class UCFL(NewClients, RememberedUploads, PlainVisits, Algorithm):
    """N rows, or as many as there are streams.

    Attributes:
        streams: 0 for one mixture per user, k for k mixtures, -1 for the k of largest c(k, s_k), where s_k is
            the mean silhouette.
        kernel: `paper` (sigma_i^2) or `geo` (sigma_i sigma_j).
        noise_batch: n_b, samples per mini-batch for sigma; below 1, a share of the client's samples.
        parallel: train all streams at every client.
        stream_cost: cost of a stream in units of the silhouette, in c(k, s) = s - stream_cost k.
        tradeoff: function that replaces c(k, s) = s - stream_cost k, `file.py:name` or
            `package.module:name`.
        max_age: oldest model of an absent client that is mixed, in server steps since the rows that it was
            trained from; 0: models of the step only; null: the last one of each client.
        keep_gradients: keep the gradients at the server, one vector for each client; they are needed if
            clients send statistics after training has begun.
    """

    streams: Annotated[
        int, Ge(-1), AtMostClients(), Remedy("use 0 (one per user), a number, or -1 (silhouette)")
    ] = 0
    kernel: Literal["paper", "geo"] = "paper"
    noise_batch: PositiveFloat = 100.0
    parallel: bool = False
    stream_cost: NonNegativeFloat = 0.0
    tradeoff: str | None = None
    max_age: NonNegativeInt | None = 0
    keep_gradients: bool = False

    paper = "mestoukirdi2023user"
    asks = ("gradient",)
    statistics_gram = "gradient"
    statistics = ("gradient",)
    statistics_from = ("noise_batch",)
    acts_with = MappingProxyType({"keep_gradients": ("newcomers", "recluster")})
    downloads = Downloads(serves="own")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "chooses a number of streams: use streams: -1, or leave it out"
        require(self.streams == -1 or not self.stream_cost, "stream_cost", self.stream_cost, remedy)
        require(self.streams == -1 or self.tradeoff is None, "tradeoff", self.tradeoff, remedy)
        remedy = "replaces stream_cost; use one of the two"
        require(self.tradeoff is None or not self.stream_cost, "tradeoff", self.tradeoff, remedy)

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """Clients are taken in later if gradients are kept."""
        return super().capabilities - (frozenset() if self.keep_gradients else {NewClients})

    @property
    def statistics_distance(self) -> str | None:  # type: ignore[override]
        """New gradients are compared with those that are kept."""
        return "gradient" if self.keep_gradients else None

    @property
    def needs(self) -> Needs:
        """Several models to mix, unless those of earlier steps are."""
        return Needs(min_cohort=2 if self.max_age == 0 else 1, row_per_client=True)

    @property
    def traffic_depends_on(self) -> str:
        """The number of streams, if it is chosen by the statistics and every client moves all of them."""
        return "how many streams the statistics give" if self.parallel and self.streams == -1 else ""

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` for more streams than users, or a `tradeoff` that does not work."""
        super().check(problem)
        self.worth(2, 0.5)

    def worth(self, k: int, s: float) -> float:
        """Return c(k, s), the value of k streams with mean silhouette s.

        Raises:
            UserError: the function of the user cannot be loaded, raises, or returns no finite number.
        """
        if self.tradeoff is None:
            return s - self.stream_cost * k
        function = load_object(self.tradeoff, "tradeoff")
        try:
            value = float(function(k, s))
        except Exception as error:
            remedy = f"c({k}, {s:g}) raises {type(error).__name__}: {error}"
            raise UserError("tradeoff", self.tradeoff, remedy) from error
        remedy = f"c({k}, {s:g}) = {value}; return a finite number"
        require(np.isfinite(value), "tradeoff", self.tradeoff, remedy)
        return value

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return g_i and sigma_i^2 = (1/B) sum_b ||g_i^(b) - g_i||^2 over B disjoint batches."""
        data, n, theta0 = client.data.train, client.num_samples, shown["init"][0]
        g = client.gradient(theta0)
        size = self._batch(n)
        order = torch.from_numpy(key.numpy().permutation(n))
        batches = [order[b * size : (b + 1) * size] for b in range(max(1, n // size))]
        gaps = [client.gradient(theta0, Split(data.x[b], data.y[b])) - g for b in batches]
        sigma2 = float(np.mean([float(gap.double().square().sum()) for gap in gaps]))
        return client.report({"variance": sigma2}, gradient=g)

    def _batch(self, num_samples: int) -> int:
        """Return n_b of a client, at least one sample."""
        return max(1, int(self.noise_batch if self.noise_batch >= 1 else self.noise_batch * num_samples))

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Turn distances of gradients into collaboration weights W [N, N], and W into streams."""
        assert fingerprints is not None
        alone = sum(n <= self._batch(n) for n in fingerprints.num_samples.tolist())
        if alone:
            few = f"{alone} of {len(fingerprints)} clients hold no more samples than that"
            limit = (
                "their sigma is 0 and they get their own model only: n_b -> n_i is the paper's limit of local"
            )
            text = f"algorithm.noise_batch = {self.noise_batch}: {few}; {limit} training; use less"
            warnings.warn(text, stacklevel=2)
        delta = squared_distances(fingerprints["gram"])
        everyone, N, kept = fingerprints.client, problem.num_clients, dict[str, np.ndarray]()
        if self.keep_gradients:
            kept = {"known": np.zeros(N, bool), "apart": np.zeros((N, N)), "variance": np.zeros(N)}
            kept["num_samples"] = np.zeros(N, np.int64)
            kept |= _taken(kept, fingerprints, delta)
        W = self._weights(delta, fingerprints["variance"].astype(np.float64), fingerprints.num_samples)
        assign, state = self._streams(_of_all(W, everyone, N), everyone)
        tables = {"gradient": torch.zeros(N, problem.layout.num_parameters)} if self.keep_gradients else {}
        return problem.server(problem.alike(len(mixtures(state))), assign, {**state, **kept}, **tables)

    def _weights(self, delta: np.ndarray, sigma2: np.ndarray, num_samples: np.ndarray) -> np.ndarray:
        """Return W [n, n] of users with squared distances delta [n, n], which is overwritten."""
        band = sigma2[:, None] if self.kernel == "paper" else np.sqrt(np.outer(sigma2, sigma2))
        delta /= 2 * np.maximum(band, 1e-300)
        logits = np.subtract(np.log(num_samples)[None], delta, out=delta)  # in place: N x N
        logits -= logits.max(1, keepdims=True)
        W: np.ndarray = np.exp(logits, out=logits)
        W /= W.sum(1, keepdims=True)
        return W

    def _streams(self, W: np.ndarray, everyone: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the row [N] of each user, and the weights, from W [N, N] of the users `everyone`."""
        state, assign = {"collaboration": W}, np.arange(len(W))
        theirs = W if len(everyone) == len(W) else W[everyone]
        if self.streams == -1:
            choice = kmeans_by_silhouette(theirs, seed=KMEANS_SEED, worth=self.worth)
            labels, state["weights"] = choice.labels, choice.centres
            state["silhouette"] = np.array(sorted(choice.scores.items()))  # rows (k, s_k)
        elif 0 < self.streams < len(W):
            found = kmeans(theirs, min(self.streams, len(everyone)), seed=KMEANS_SEED)
            labels, state["weights"] = found.labels, found.centres
        else:
            return assign, state
        assign = np.zeros(len(W), np.int64)
        assign[everyone] = labels
        return assign, state

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """Keep the gradients, if they are kept."""
        return Plan([_kept(server, fingerprints)] if self.keep_gradients else [])

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Replace the gradients of those who sent them, and compute W and the streams anew."""
        apart = fingerprints["row_distance"] ** 2  # [n, N]
        apart[:, fingerprints.client] = squared_distances(fingerprints["gram"])
        kept = _taken(server.algorithm_state, fingerprints, apart)
        everyone, N = np.flatnonzero(kept["known"]), len(server.assign)
        delta = submatrix(kept["apart"], everyone)
        W = self._weights(delta, kept["variance"][everyone], kept["num_samples"][everyone])
        assign, state = self._streams(_of_all(W, everyone, N), everyone)
        mixings = [_kept(server, fingerprints)]
        if "weights" in state:
            rows_of = (np.arange(len(state["weights"]))[:, None] == assign[everyone]).astype(float)  # [K, n]
            had = server.assign[everyone][:, None] == np.arange(len(server.tables["model"]))  # [n, K0]
            mixings.append(carry(rows_of @ had / rows_of.sum(1, keepdims=True)))
        return Plan(mixings, assign=assign, algorithm_state={**state, **kept})

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return true for all clients, which sent statistics before training, or for those that have."""
        return super().placed(server, visited) if self.keep_gradients else np.ones_like(visited)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the own mixture, or all streams."""
        return chosen_rows("all" if self.parallel else "own", server, k)

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked] | None:
        """Return a training of each stream that is read; None if the statistics decide how many there are."""
        if self.parallel and self.streams == -1:
            return None
        streams = (self.streams or problem.num_clients) if self.parallel else 1
        return [Asked("sgd", held.train, streams)]

    def statistics_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the gradients of all samples and of the mini-batches for sigma."""
        size = min(self._batch(held.train), held.train)
        batches = max(1, held.train // size) if size else 1
        return [Asked("gradient", held.train), Asked("gradient", size, batches)]

    def plain_visit(self) -> PlainVisit | None:
        """Train the one model that was downloaded."""
        return PlainVisit() if not self.parallel else None

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train what was downloaded: one model, or every stream."""
        keys = [key.of("stream", s) if self.parallel else key for s in range(len(message["model"]))]
        trained = [client.sgd(w, k) for w, k in zip(message["model"], keys, strict=True)]
        models = torch.stack([t.vector for t in trained])  # [C, d]
        loss = float(np.mean([t.loss for t in trained]))
        return client.report(model=models, metrics={"train_loss": loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """theta_s <- sum_j w_sj theta_j over the clients that took part."""
        W, k = mixtures(server.algorithm_state), notes.client  # [K, N], [m]
        if len(W) == len(server.assign) and not self.parallel:
            return Plan([own_rows(W[np.ix_(k, k)], notes, len(W))])
        return Plan([rows(componentwise(W[:, k]) if self.parallel else W[:, k])])


def _taken(state: Mapping[str, np.ndarray], sent: Notes, apart: np.ndarray) -> dict[str, np.ndarray]:
    """Return the entries of the state about gradients, with those of new statistics.

    Args:
        state: the entries before.
        sent: the statistics.
        apart: squared distances of the new gradients to those of all users [n, N], or, before there are any,
            among each other [n, n].
    """
    k, known = sent.client, updated(state["known"], sent.client, True)
    distances = state["apart"].copy()
    if not state["known"].any():
        distances[np.ix_(k, k)] = apart
    else:
        distances[k], distances[:, k] = apart, apart.T
    return {
        "known": known,
        "apart": distances,
        "variance": updated(state["variance"], k, sent["variance"]),
        "num_samples": updated(state["num_samples"], k, sent.num_samples),
    }


def _of_all(W: np.ndarray, everyone: np.ndarray, num_clients: int) -> np.ndarray:
    """Return the weights [N, N] of all users; those of the others than `everyone` are 0."""
    if len(W) == num_clients:
        return W
    out = np.zeros((num_clients, num_clients))
    out[np.ix_(everyone, everyone)] = W
    return out


def _kept(server: Server, sent: Notes) -> Mixing:
    """Return the mixing that replaces the gradients of those who sent them."""
    return own_rows(np.eye(len(sent)), sent, len(server.assign), into="gradient", of="gradient")


def mixtures(algorithm_state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mixture weights of each stream [K, N] or, without streams, of each user [N, N]."""
    return algorithm_state.get("weights", algorithm_state["collaboration"])
