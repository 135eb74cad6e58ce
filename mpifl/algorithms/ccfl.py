"""CCFL: clients upload whenever they like; the server answers with the mixture it estimates for them.

Li and Zhu, "Client-Centric Federated Learning under Dynamic Mixtures of Distributions" (later: "Towards
Client Driven Federated Learning"), 2024, Algorithms 1 and 2. Legend: w_m upload, w_k cluster models, D_k the
server's labelled set of cluster k, u_k estimated share, tau the client's time stamp, t the current epoch, t_k
the last epoch in which cluster k changed.

Our reading: l_k is 16 times the mean loss on D_k, that is, the loss summed over the 16 batches of 128 that
the paper's 2000 images make. The factor stays 16 for other sizes of D_k: only that fits the published bars 8,
40 and 70, which the ablations of |D_k| keep. Scores are clamped at 1e-8 after the bar is subtracted. The
sharpened u is used both for the update ratio and for the answer. a2 depends on t_k - tau, as printed.
Distances are over parameters. Cluster models are pre-trained on D_k; for how long, the paper does not say
(5.1, A.1). With one cluster u_1 = 1. Whoever joins during the run (4.1) starts from the mean of the cluster
models as they are then: its shares are 1/K until its first upload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import MinLen

from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Client, ComparedUploads, Key, Needs, Plan, ServerEvaluation
from mpifl.core.mixing import blend, updated
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveShare
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector

BATCHES = 16  # of 128 images in the paper's D_k of 2000: the server's losses are sums over them


@dataclass(frozen=True)
class CCFL(ComparedUploads, ServerEvaluation, Algorithm):
    """K rows; each client reads its own mixture of them.

    Attributes:
        alpha0: alpha_0, the largest mixing rate of an upload.
        a: decay of the staleness factor 1 / (a s + 1), where s is the number of epochs from the client's last
            download to the cluster's last change.
        b: the staleness factor is 1 while s is below this number of epochs.
        rho: weight of the client's proximal term.
        max_lag: tau_0, the largest age of an upload in epochs; older ones are refused. 0: the number of
            clients.
        c1: weight of the loss in the estimate of the shares.
        c2: weight of the loss gap; the parameter distance gets the rest, 1 - c1 - c2.
        sharpen: factors A of the softmaxes that sharpen the shares, applied one after the other.
        bar_loss, bar_gap, bar_distance: value subtracted from each score; -1 subtracts the smallest score.
            Losses are 16 times the mean over D_k.
        adjust_from: from this epoch on, an upload does not change a cluster if one of its three scores for
            that cluster is above the 70th percentile of the cluster's scores so far; 0: never.
        pretrain_epochs: epochs of pre-training on D_k, the server's labelled data, before the first upload.
    """

    alpha0: PositiveShare = 0.025
    a: NonNegativeFloat = 10.0
    b: NonNegativeFloat = 5.0
    rho: NonNegativeFloat = 0.1
    max_lag: NonNegativeInt = 0
    c1: NonNegativeFloat = 0.5
    c2: NonNegativeFloat = 0.25
    sharpen: Annotated[tuple[float, ...], MinLen(1)] = (7.0,)
    bar_loss: float = 8.0
    bar_gap: float = 0.0
    bar_distance: float = 0.0
    adjust_from: int = 0
    pretrain_epochs: NonNegativeInt = 5

    paper = "li2024towards"
    asks = ("direction",)
    trains_once = True
    row_distance = "model"
    setup_from = ("pretrain_epochs",)
    needs = Needs(single_upload=True, weighs_staleness=True, time_stamps=True, classes=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.c1 + self.c2 <= 1, "c1", self.c1, "c1 + c2 may not exceed 1")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Pre-train a model on each D_k; all clients start at their mean."""
        w = pretrained(problem, self.pretrain_epochs, key)  # [K, d]
        K = len(w)
        u, history = np.full((problem.num_clients, K), 1 / K), np.zeros((0, 3, K))
        return problem.server(w, algorithm_state={"u": u, "changed": np.zeros(K), "history": history})

    def reads(self, server: Server, k: int) -> Reads:
        """Download sum_k u_k w_k, the answer to the last upload."""
        return {"model": server.algorithm_state["u"][k]}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train with a proximal term towards the received model."""
        return trained_near(client, message["model"][0], self.rho, key), {}

    def inspect(self, vectors: Mapping[str, Vector], public: Sequence[Client]) -> Mapping[str, Any]:
        """Return l_k = F(w_m; D_k)."""
        return {"l": self._losses(vectors["model"], public)}

    def appraise(self, old: Server | None, new: Server, public: Sequence[Client]) -> Server:
        """Store F(w_k; D_k), computed anew only for clusters that changed."""
        gaps = np.zeros(len(public)) if old is None else new.algorithm_state["own"].copy()
        for k, d in enumerate(public):
            if old is None or not torch.equal(old.tables["model"][k], new.tables["model"][k]):
                gaps[k] = self._losses(new.tables["model"][k], [d])[0]
        return replace(new, algorithm_state={**new.algorithm_state, "own": gaps})

    def _losses(self, w: Vector, public: Sequence[Client]) -> np.ndarray:
        return np.array([BATCHES * d.loss(w) for d in public])

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Estimate u, move the clusters that fit, answer with the mixture."""
        m, t = int(notes.client[0]), server.version + 1
        tau = server.version - int(notes.staleness[0])
        if t - tau > (self.max_lag or len(server.assign)):
            return Plan([])  # refused: the answer is the stored mixture
        loss = notes["l"][0]  # l_k
        scores = np.stack(
            [loss, np.abs(server.algorithm_state["own"] - loss), notes["row_distance"][0]]
        )  # l, d1, d2
        known = np.isfinite(scores).all(0)  # [K]
        if not known.any():  # its model has diverged: it moves no cluster
            return Plan([])
        u = np.zeros(len(known))
        u[known] = self.estimate(scores[:, known])
        below = u < u.mean() * (1 - 1e-12)  # rounding alone puts equal shares below their mean
        ratio = np.where(below, 0.0, u / u.max())
        alpha = self.alpha0 * ratio * lateness(server.algorithm_state["changed"] - tau, self.a, self.b)
        now = np.where(np.isfinite(scores), scores, np.nan)
        history = np.concatenate([server.algorithm_state["history"], now[None]])
        if self.adjust_from and t >= self.adjust_from:
            usual = np.nanpercentile(history[..., known], 70, axis=0)  # [3, known]
            alpha[known] = np.where((scores[:, known] > usual).any(0), 0.0, alpha[known])
        all_u = updated(server.algorithm_state["u"], m, u)
        changed = np.where(alpha > 0, t, server.algorithm_state["changed"])
        algorithm_state = {"u": all_u, "changed": changed, "history": history}
        return Plan([blend(alpha[:, None])], assign=all_u.argmax(1), algorithm_state=algorithm_state)

    def mixtures(self, server: Server) -> np.ndarray:
        """Return u [N, K]."""
        return server.algorithm_state["u"]

    def estimate(self, scores: np.ndarray) -> np.ndarray:
        """Return u [K] from the raw scores [3, K] (Algorithm 2).

        Before the softmax no share exceeds 1 / (K - 1), however well one cluster fits. After it, with the
        paper's A, the largest possible share is 0.95 for K = 2, 0.51 for 3 (A = 3), 0.42 for 4 (A = 7) and
        0.27 for 6 (A = 15). With an A of 15 and 36, which give 0.95, too, K = 3 and 4 come close to the
        published accuracies (papers/ccfl/table1-fashionmnist-readings).
        """
        K = scores.shape[1]
        if K == 1:  # the brackets sum to K - 1
            return np.ones(1)
        total = np.zeros(K)
        bars = (self.bar_loss, self.bar_gap, self.bar_distance)
        for c, bar, x in zip((self.c1, self.c2, 1 - self.c1 - self.c2), bars, scores, strict=True):
            x = np.maximum(x - (x.min() if bar == -1 else bar), 1e-8)
            total += c * (1 - x / x.sum())
        u = total / (K - 1)
        for A in self.sharpen:
            u = np.exp(A * u - (A * u).max())
            u /= u.sum()
        return np.asarray(u)


def pretrained(problem: ProblemInfo, epochs: int, key: Key) -> torch.Tensor:
    """Return a model trained on each D_k [K, d]."""
    start = problem.init(0)
    return torch.stack(
        [d.sgd(start, key.of("pretrain", k), epochs=epochs).vector for k, d in enumerate(problem.public)]
    )


def trained_near(
    client: Client, ref: Vector, rho: float, key: Key, notes: Mapping[str, Any] | None = None
) -> Report:
    """Return the report of a visit with a proximal term towards `ref` [d], from which it starts."""
    start, name = ref[: client.layout.num_parameters], client.task.metric.name
    w = client.sgd(ref, key, direction=lambda g, v: g + rho * (v - start))
    metrics = {"train_loss": w.loss, f"{name}_before": client.evaluate(w.vector)[name]}
    return client.report(notes, metrics, model=w.vector)


def lateness(lag: np.ndarray, a: float, b: float) -> np.ndarray:
    """Return 1 where t_k - tau < b, else 1 / (a (t_k - tau) + 1)."""
    return np.where(lag < b, 1.0, 1 / (a * np.maximum(lag, 0) + 1))
