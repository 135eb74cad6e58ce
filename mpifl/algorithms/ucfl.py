"""UCFL: each user gets its own mixture of all local models, weighted by similarity of gradients.

Mestoukirdi et al., "User-Centric Federated Learning: Trading off Wireless Resources for Personalization",
IEEE TMLCN 2023, sections IV and V. Before training, client i sends its gradient g_i at the initial model and
the variance sigma_i^2 of its mini-batch gradients; w_ij ~ n_j exp(-||g_i - g_j||^2 / (2 sigma_i^2)), rows
normalised, fixed for the run. With `streams` the rows are the centroids of k-means on W. `parallel` is the
paper's upper bound: every client trains all streams.

Our reading: the kernel uses sigma_i^2 (`kernel="geo"`: sigma_i sigma_j, the repository). The mini-batches for
sigma are a disjoint random partition (eq. 10). sigma falls as n_b grows and is 0 at n_b = n_i, where the one
batch holds all samples: the paper's limit n_b -> n_i is local training, and a client with n_i <= n_b gets its
own model only. Algorithm 2 chooses m_t = argmax over k = 1 .. m of c(k, s_k), with s_k the mean silhouette (0
for one stream, the mean of all rows of W, and for m), and leaves c open; the repository takes s_k. Here
c(k, s) = s - stream_cost k, so that `stream_cost` is the silhouette that each additional stream must gain;
`tradeoff` replaces c by a function of yours. Beyond the paper: under partial participation weights are
normalised over the clients that take part, and with one mixture per user the rows of absent users stay
unchanged. With `max_age` the last models of absent clients are mixed too, into all rows: what the paper's
rounds of all clients become where uploads arrive one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge

from mpifl.clustering.distances import squared_distances
from mpifl.clustering.partitions import kmeans, kmeans_by_silhouette
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
    OneShotStatistics,
    PlainVisit,
    PlainVisits,
    Plan,
    RememberedUploads,
    chosen_rows,
)
from mpifl.core.mixing import componentwise, own_rows, rows
from mpifl.core.options import AtMostClients, NonNegativeFloat, NonNegativeInt, PositiveFloat, Remedy
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

KMEANS_SEED = 1  # the repository's


@dataclass(frozen=True)
class UCFL(OneShotStatistics, RememberedUploads, PlainVisits, Algorithm):
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

    paper = "mestoukirdi2023user"
    asks = ("gradient",)
    statistics_gram = "gradient"
    statistics_from = ("noise_batch",)
    downloads = Downloads(serves="own")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "chooses a number of streams: use streams: -1, or leave it out"
        require(self.streams == -1 or not self.stream_cost, "stream_cost", self.stream_cost, remedy)
        require(self.streams == -1 or self.tradeoff is None, "tradeoff", self.tradeoff, remedy)
        remedy = "replaces stream_cost; use one of the two"
        require(self.tradeoff is None or not self.stream_cost, "tradeoff", self.tradeoff, remedy)

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
        sigma2 = fingerprints["variance"].astype(np.float64)  # [N]
        band = sigma2[:, None] if self.kernel == "paper" else np.sqrt(np.outer(sigma2, sigma2))
        delta /= 2 * np.maximum(band, 1e-300)
        logits = np.subtract(np.log(fingerprints.num_samples)[None], delta, out=delta)  # in place: N x N
        logits -= logits.max(1, keepdims=True)
        W = np.exp(logits, out=logits)
        W /= W.sum(1, keepdims=True)
        algorithm_state = {"collaboration": W}
        assign = np.arange(problem.num_clients)
        if self.streams == -1:
            choice = kmeans_by_silhouette(W, seed=KMEANS_SEED, worth=self.worth)
            assign, algorithm_state["weights"] = choice.labels, choice.centres
            algorithm_state["silhouette"] = np.array(sorted(choice.scores.items()))  # rows (k, s_k)
        elif 0 < self.streams < problem.num_clients:
            assign, algorithm_state["weights"] = kmeans(W, self.streams, seed=KMEANS_SEED)
        models = problem.alike(len(mixtures(algorithm_state)))
        return problem.server(models, np.asarray(assign, np.int64), algorithm_state)

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return true for all clients: they sent statistics before training."""
        return np.ones_like(visited)

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


def mixtures(algorithm_state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mixture weights of each stream [K, N] or, without streams, of each user [N, N]."""
    return algorithm_state.get("weights", algorithm_state["collaboration"])
