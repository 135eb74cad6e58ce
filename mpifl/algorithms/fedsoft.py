"""FedSoft: soft clusters; every client trains one personal model near the centres that explain its samples.

Ruan and Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022,
Algorithm 1. Legend: c_s centres, u_s share of the client's samples that centre s explains best (sigma if
none), v_is importance of client i in centre s. The local objective is F_i(w) + (lambda/2) sum_s u_s ||w -
c_s||^2; training continues from the client's own w. Differs: all clients of a round train, and the server
draws `selected` of them per centre (0: all, c_s = sum_i v_is w_i). The authors' code keeps each client's Adam
from visit to visit (`local.keep_optimizer`). A client that never took part is evaluated with sum_s u_s c_s.

Variant `emdcfl` follows the EMD-CFL repository: losses are compared per batch of 64 validation samples, in
every round; a centre that explains no batch counts max(1, n_val / 1000) samples; every visit starts from the
mixture of centres; there is no proximal term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mpifl.core.computation import Asked, Held
from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan, PlannedRun
from mpifl.core.mixing import rows
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, NumModels, PositiveInt, PositiveShare
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State, Vector
from mpifl.training.evaluation import component_losses, counts_of_best

VAL_BATCH = 64  # samples; variant emdcfl


@dataclass(frozen=True)
class FedSoft(Algorithm):
    """K rows, all read by everyone; one personal model at each client.

    Attributes:
        num_clusters: K, number of clusters.
        lam: lambda, pull towards the centres.
        sigma: share given to a centre that explains no sample best.
        tau: rounds between two counts of a client's samples; None: 2, or 1 for variant `emdcfl`.
        selected: clients the server draws for each centre; 0: all clients that take part.
        variant: `paper`, or `emdcfl` (validation batches counted in every round, no proximal term, visits
            start from the mixture of centres).
    """

    num_clusters: NumModels = 2
    lam: NonNegativeFloat = 0.1
    sigma: PositiveShare = 1e-4
    tau: PositiveInt | None = None
    selected: NonNegativeInt = 0
    variant: Literal["paper", "emdcfl"] = "paper"

    paper = "ruan2022fedsoft"
    asks = ("direction", "outputs")
    downloads = Downloads(reads="all")

    def ignored_options(self) -> Mapping[str, str]:
        """Variant `emdcfl` has neither a proximal term nor a share for zero counts."""
        if self.variant == "paper":
            return {}
        floor = "variant emdcfl counts zero as a thousandth of the samples"
        return {"lam": "variant emdcfl has no proximal term", "sigma": floor}

    @cached_property
    def needs(self) -> Needs:
        """At least two uploads in a step, and validation data in variant `emdcfl`."""
        return Needs(
            min_cohort=2,
            client_state=True,
            different_starts=True,
            every_upload=True,
            validation=self.variant == "emdcfl",
        )

    @property
    def period(self) -> int:
        """Rounds between two counts."""
        return self.tau or (1 if self.variant == "emdcfl" else 2)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent centres; random draws are addressed by `seed` and version."""
        counts = np.zeros((problem.num_clients, self.num_clusters))
        return problem.server(
            self.num_clusters, algorithm_state={"counts": counts, "seed": np.array(key.seed)}
        )

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Count samples when due, then train near the centres."""
        c = message["model"]  # [K, d]
        due = not state or (message.step - 1) % self.period == 0
        counts = self._counts(c, client) if due else state["counts"]  # [K]
        n = torch.tensor(client.num_samples) if due else state["samples"]  # number of samples counted
        if self.variant == "emdcfl":
            w = client.sgd(_mixed(c, counts), key)
        else:
            u = (counts / n).to(c)
            mean = u @ c  # sum_s u_s c_s
            pull = self.lam * u.sum()
            target = (mean / u.sum())[: client.layout.num_parameters]
            start = state.get("model", client.init)
            w = client.sgd(start, key, direction=lambda g, w: g + pull * (w - target))
        notes = {"counts": counts.numpy()} if due else {}
        report = client.report(notes, {"train_loss": w.loss}, model=w.vector)
        model = state["model"] if state and not w.steps else w.vector
        return report, {"model": model, "counts": counts, "samples": n}

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses of all centres, in every `period`-th round, and a training."""
        split = held.val if self.variant == "emdcfl" else held.train
        return [Asked("losses", split, self.num_clusters, at_most=self.period > 1), Asked("sgd", held.train)]

    def _counts(self, c: torch.Tensor, client: Client) -> torch.Tensor:
        """Return n_is [K]: samples whose loss is lowest under c_s, with a small positive number for none."""
        emdcfl = self.variant == "emdcfl"
        split = client.data.val if emdcfl else client.data.train
        losses = component_losses(client, c, split)  # [K, n]
        if emdcfl:
            counts = torch.zeros(len(c), dtype=torch.float64)
            for batch in losses.split(VAL_BATCH, dim=1):
                counts += counts_of_best(batch.mean(1, keepdim=True)) * batch.shape[1]
            return torch.where(counts == 0, max(1, len(split) // 1000), counts)
        counts = counts_of_best(losses)
        return torch.where(counts == 0, self.sigma * client.num_samples, counts)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """c_s <- sum_i v_is w_i, or the mean of the clients drawn with probabilities v_is."""
        counts = server.algorithm_state["counts"].copy()  # [N, K]
        if "counts" in notes.columns:
            told = ~np.isnan(notes["counts"][:, 0])
            counts[notes.client[told]] = notes["counts"][told]
        v = counts[notes.client].T  # [K, m]
        v = v / v.sum(1, keepdims=True)
        if self.selected:
            v = selection(
                v, min(self.selected, len(notes)), key(int(server.algorithm_state["seed"]), server.version)
            )
        assign = counts.argmax(1).astype(np.int64)
        return Plan([rows(v)], assign=assign, algorithm_state={"counts": counts})

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Subtract counts that are not sent: those of known clients in rounds without a count."""
        seen, left_out = set[int](), 0
        for t, cohort in enumerate(run.cohorts()):
            left_out += len(seen & set(cohort.tolist())) if t % self.period else 0
            seen |= set(cohort.tolist())
        return 0, -left_out * run.message_bytes(self.num_clusters, note=True)

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own model."""
        if "model" in state:
            return state["model"]
        return _mixed(message["model"], self._counts(message["model"], client))


def _mixed(c: torch.Tensor, counts: torch.Tensor) -> Vector:
    """Return sum_s n_s c_s / sum_s n_s."""
    return (counts / counts.sum()).to(c) @ c


def selection(v: np.ndarray, size: int, address: Key) -> np.ndarray:
    """Return ones [K, m] where a client was drawn: `size` for each centre s, by v_s, without replacement."""
    drawn = np.zeros_like(v)
    for s, chances in enumerate(v):
        drawn[s, address.of(s).numpy().choice(len(chances), size, replace=False, p=chances)] = 1.0
    return drawn
