"""FedCUAU: clusters clients by how non-IID they are; knowledge flows only from even clients to skewed ones.

"FedCUAU: Clustered Federated Learning Using Weight Divergence", Algorithm 1. Legend: CU_k update of the last
layer after E local epochs from the common w_0, AU their mean by samples, CUAU_k = ||CU_k - AU||; cluster i
(here 0 .. C-1) by quantiles of CUAU. w^s trunk, w^{Cj} copies of the cluster block. A client of cluster i
trains (w^s, w^{CC}) together, then, with its new trunk frozen, each w^{Cj}, j >= i, alone. Copy j < C is
averaged over the clients of clusters <= j, trunk and last copy over all clients. Trunk and last copy
therefore evolve as the underlying method (`over`) does without clusters.

Our reading: averages are convex and weighted by samples. A copy is averaged over the clients that trained it.
The trunk is frozen at its new local value, in evaluation mode. Stage 2 starts from w_0 again, so that trunk
and last copy agree with the underlying method bit for bit. Initial accuracy is that of (w^s, w^{C1}) on the
entire test set, the test data of all clients together (`accuracy_initial_pooled`). Over FedPer the private
head is trained with the trunk and frozen with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from mpifl.clustering.partitions import quantile_groups
from mpifl.core.client import proximal
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Key, Needs, OneShotStatistics, Plan, Trained
from mpifl.core.mixing import Mixing, average, by_cluster
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, NumModels
from mpifl.core.parameters import Layout, Part, put, take, within
from mpifl.core.trainer import Gift
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector
from mpifl.training.evaluation import evaluate_tuned


@dataclass(frozen=True)
class FedCUAU(OneShotStatistics, Algorithm):
    """Tables `trunk` (one row) and `block` (C rows).

    Attributes:
        over: underlying method: fedavg, fedprox, fedbabu (head frozen) or fedper (head private).
        num_clusters: C, number of clusters; 1 is the underlying method.
        mu: weight of the proximal term, if the underlying method is fedprox.
        tune_epochs: epochs of fine-tuning before the personalised accuracy is measured.
        evaluate_copies: also evaluate every copy at every client, as it is (`accuracy_copy0_initial`) and
            after fine-tuning (`accuracy_copy0`), and so on (table 4).
    """

    over: Literal["fedavg", "fedprox", "fedbabu", "fedper"] = "fedavg"
    num_clusters: NumModels = 2
    mu: NonNegativeFloat = 0.001
    tune_epochs: NonNegativeInt = 5
    evaluate_copies: bool = False

    paper = "fedcuau"
    statistics_gram = "last_layer"
    statistics_from = ()
    needs = Needs(client_state=True, averages=True)
    traffic_depends_on = (
        "who is in which cluster: cluster i of C moves the trunk and the blocks of copies i to C"
    )

    @property
    def asks(self) -> tuple[Gift, ...]:
        """The block of further copies is trained alone; fedprox adds its term."""
        return ("direction", "part") if self.over == "fedprox" else ("part",)

    @property
    def evaluates_rows(self) -> bool:
        """The trunk and a copy of the block are the whole model, unless the head is private or frozen."""
        return self.over in ("fedavg", "fedprox")

    def ignored_options(self) -> Mapping[str, str]:
        """`mu` belongs to fedprox."""
        return {} if self.over == "fedprox" else {"mu": "only fedprox has a proximal term"}

    @property
    def holds(self) -> Mapping[str, str]:
        """The trunk, the copies of the block, and, as `model`, all that is averaged."""
        whole = self.over in ("fedavg", "fedprox")
        block = "block" if whole else "stage"
        copies = {f"copy{j}": block for j in range(self.num_clusters - 1)}
        return {"trunk": "trunk", "block": block, "model": "all" if whole else "body", **copies}

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` for more clusters than clients, or a model without the block `over` needs."""
        super().check(problem)
        remedy = "the model names no block below its head; use a model that does, or over fedavg"
        require(bool(self._block(problem.layout)), "over", self.over, remedy)

    def _shared(self, layout: Layout) -> Part:
        """Return what is averaged: all, or all but the head."""
        return layout.part("all" if self.over in ("fedavg", "fedprox") else "body")

    def _block(self, layout: Layout) -> Part:
        """Return the cluster block."""
        return layout.part("block" if self.over in ("fedavg", "fedprox") else "stage")

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send only the seed of w_0."""
        return {"seed": torch.zeros(1, 1)}

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return CU_k after the local epochs."""
        w = client.sgd(client.init, key).vector
        return client.report(last_layer=take(w - client.init, client.layout.part("head")).clone())

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Cut CUAU at its quantiles; all copies start alike."""
        assert fingerprints is not None
        gram, share = fingerprints["gram"], fingerprints.num_samples / fingerprints.num_samples.sum()
        # `update_statistics` of a run's observer has the same formula in another order: other last bits
        cuau = np.sqrt(np.maximum(gram.diagonal() - 2 * gram @ share + share @ gram @ share, 0.0))
        assign = quantile_groups(cuau, self.num_clusters)
        shared, block = self._shared(problem.layout), self._block(problem.layout)
        trunk, w_0 = problem.layout.part("trunk"), problem.init(0)
        tables = {"trunk": take(w_0, trunk)[None], "block": take(w_0, block).expand(self.num_clusters, -1)}
        parts = {"trunk_part": within(trunk, shared), "block_part": within(block, shared)}
        algorithm_state = {name: np.array([(s.start, s.stop) for s in part]) for name, part in parts.items()}
        return Server(tables, assign, {"cuau": cuau, **algorithm_state})

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return true for all clients: they sent statistics before training."""
        return np.ones_like(visited)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the trunk and the copies of the own cluster and of all higher ones."""
        return {"trunk": (0,), "block": tuple(range(int(server.assign[k]), self.num_clusters))}

    def serves(self, server: Server, k: int) -> Reads:
        """Evaluate the trunk with the first copy (initial) and the own one (personalised), which is last."""
        copies = range(self.num_clusters if self.evaluate_copies else 1)
        return {"trunk": (0,), "block": (*copies, int(server.assign[k]))}

    def _model(self, trunk: Vector, copy: Vector, state: State, client: Client) -> Vector:
        """Return a whole model: trunk, one copy, and the private head if there is one."""
        w = put(client.init, client.layout.part("trunk"), trunk)
        w = put(w, self._block(client.layout), copy)
        return put(w, client.layout.part("head"), state["head"]) if "head" in state else w

    def _train(self, client: Client, w: Vector, key: Key, part: Part | None) -> Trained:
        """Train as the underlying method does."""
        return client.sgd(
            w, key, part=part, direction=proximal(self.mu, w) if self.over == "fedprox" else None
        )

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train trunk and last copy, then other copies from the own cluster upwards under the new trunk."""
        copies, layout, block = message["block"], client.layout, self._block(client.layout)
        first = self.num_clusters - len(copies)  # the client's cluster
        body = layout.part("body") if self.over == "fedbabu" else None
        received, shared = self._model(message["trunk"][0], copies[-1], state, client), self._shared(layout)
        w = self._train(client, received, key, body)
        uploads, bases = {"model": take(w.vector, shared).clone()}, {"model": take(received, shared)}
        for j in range(self.num_clusters - 1):
            uploads[f"copy{j}"] = torch.zeros_like(copies[0])
            if j >= first:
                bases[f"copy{j}"] = copies[j - first]
                w_j = put(w.vector, block, copies[j - first])
                uploads[f"copy{j}"] = take(self._train(client, w_j, key.of("copy", j), block).vector, block)
        untrained = tuple(f"copy{j}" for j in range(first))
        kept = {"head": take(w.vector, layout.part("head")).clone()} if self.over == "fedper" else {}
        return client.report({}, {"train_loss": w.loss}, untrained, bases, **uploads), kept

    def unsent_vectors(self, report: Report, arrived: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return none: copies that were not trained are zeros, which nobody reads."""
        return {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average trunk and last copy over all clients, copy j over the clients of clusters <= j."""
        trunk, block = (
            tuple(slice(int(a), int(b)) for a, b in server.algorithm_state[name])
            for name in ("trunk_part", "block_part")
        )
        last, everyone = self.num_clusters - 1, average(notes)
        one_row = np.eye(self.num_clusters)[last]
        weights = one_row[:, None] * everyone.weights
        mixings = [
            replace(everyone, into="trunk", part=trunk),
            Mixing(weights, keep=1 - one_row, into="block", part=block),
        ]
        for j in range(last):
            own = np.where(server.assign[notes.client] <= j, j, -1)
            mixings.append(by_cluster(own, self.num_clusters, notes.num_samples, into="block", of=f"copy{j}"))
        return Plan(mixings)

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the trunk with the own copy."""
        return self._model(message["trunk"][0], message["block"][-1], state, client)

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate the own copy after fine-tuning, and (w^s, w^{C1}) as it is (`_initial`)."""
        trunk, copies = message["trunk"][0], message["block"]
        scores = evaluate_tuned(client, self.model_of(message, state, client), split, self.tune_epochs)
        first = self._model(trunk, copies[0], state, client)
        scores |= {f"{name}_initial": value for name, value in client.evaluate(first, split).items()}
        for j, copy in enumerate(copies[:-1] if self.evaluate_copies else ()):
            w = self._model(trunk, copy, state, client)
            for name, value in evaluate_tuned(client, w, split, self.tune_epochs).items():
                what, _, initial = name.partition("_")
                scores[f"{what}_copy{j}" + (initial and f"_{initial}")] = value
        return scores
