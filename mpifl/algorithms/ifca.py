"""IFCA: K models; each client trains the one that fits its data best.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1. Model
averaging, or (`variant="gradient"`) w_k <- w_k - (gamma / M) sum of the members' gradients, M the number of
all clients that take part. With weight sharing (`share="body"`, section 5) only the last layer is per cluster
and the body is averaged over all clients.

Differs: at test time a client uses its last training choice (the repository peeks at test labels); a client
that never took part chooses when it is evaluated, as in a visit. Under `gradient` a visit is one plain step
along the gradient over all training data. `restarts` is the repository's search for initial models: without
it two groups often choose the same model. Variant `emdcfl`, the EMD-CFL repository: clients choose on
validation data by the mean of batch means, in which a short last batch counts as much as the others, and
averages are weighted by samples.

With `warm_rounds` (section 5: weight sharing after FedAvg) all clients train one model for that many rounds.
Then the clusters begin: they share its body, and each has a head as drawn at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from mpifl.core.computation import Asked, Held
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.method import (
    Algorithm,
    Capability,
    Client,
    Key,
    Needs,
    OneShotStatistics,
    PlainVisit,
    PlainVisits,
    Plan,
    RowUpdates,
    declared,
)
from mpifl.core.mixing import add, by_cluster, updated
from mpifl.core.options import NonNegativeInt, NumModels, UnitInterval
from mpifl.core.parameters import put, take
from mpifl.core.trainer import Gift
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector
from mpifl.training.evaluation import best_model

ONE_STEP = ("epochs", "steps", "batch_size", "momentum", "optimizer")  # of `local`, which `gradient` ignores
LOSS_BATCH = 64  # samples; variant emdcfl


@dataclass(frozen=True)
class IFCA(OneShotStatistics, PlainVisits, RowUpdates, Algorithm):
    """K rows, all read by everyone; with weight sharing K heads and one body.

    Attributes:
        num_clusters: K, number of clusters.
        select_on: data on which a client compares the models: `train` or `val`. None: `train`, or `val` for
            variant `emdcfl`.
        loss_batch: compare models by the mean of the mean losses of batches of this many samples; 0: by the
            mean over samples. None: 0, or 64 for variant `emdcfl`.
        weighted: average a cluster by samples; otherwise with equal weights. None: by samples only for
            variant `emdcfl`.
        variant: `averaging`, `gradient`, or `emdcfl` (averaging with other defaults: `select_on` val,
            `loss_batch` 64, `weighted` true).
        share: the part that all clusters share: `none` or `body`.
        warm_rounds: rounds of FedAvg before the clusters begin; needs `share: body` and two clusters or more.
        restarts: number of sets of initial models that all clients try before the first round; the first set
            is taken in which every model is chosen by at least a share `least` of the clients, otherwise the
            set that comes closest. 0: the first set, without a trial.
    """

    num_clusters: NumModels = 4
    select_on: Literal["train", "val"] | None = None
    loss_batch: NonNegativeInt | None = None
    weighted: bool | None = None
    variant: Literal["averaging", "gradient", "emdcfl"] = "averaging"
    share: Literal["none", "body"] = "none"
    warm_rounds: NonNegativeInt = 0
    restarts: NonNegativeInt = 0
    least: UnitInterval = 0.1

    paper = "ghosh2020efficient"
    trained = "cluster"
    evaluates_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "needs share: body, whose body the clusters take over, and num_clusters of 2 or more"
        fits = not self.warm_rounds or (self.share == "body" and self.num_clusters > 1)
        require(fits, "warm_rounds", self.warm_rounds, remedy)

    @property
    def asks(self) -> tuple[Gift, ...]:
        """Losses of the models; `gradient` takes a step of its own."""
        return ("outputs", "sgd") if self.variant == "gradient" else ("outputs",)

    @property
    def traffic_depends_on(self) -> str:
        """The rounds before the clusters begin, if there are any."""
        return "the round: with warm_rounds a client first downloads one head" if self.warm_rounds else ""

    def ignored_options(self) -> Mapping[str, str]:
        """`least` belongs to `restarts`."""
        return {} if self.restarts else {"least": "without restarts, no set of models is tried"}

    @cached_property
    def needs(self) -> Needs:
        """Validation data if models are compared on them; `gradient` ignores several keys of `local`."""
        return Needs(
            validation=self._on == "val",
            new_optimizer=self.variant == "gradient",
            ignores=dict.fromkeys(ONE_STEP if self.variant == "gradient" else (), ""),
            averages=True,
            different_starts=True,
        )

    @property
    def _on(self) -> str:
        """The data on which models are compared."""
        return self.select_on or ("val" if self.variant == "emdcfl" else "train")

    @property
    def capabilities(self) -> frozenset[type[Capability]]:
        """One-shot statistics only with `restarts`, row updates not with `gradient` or `warm_rounds`."""
        unused: set[type[Capability]] = set() if self.restarts else {OneShotStatistics}
        unused |= {RowUpdates} if self.variant == "gradient" or self.warm_rounds else set()
        return declared(type(self)) - unused

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Send all sets of initial models."""
        return {"models": torch.stack([problem.init(j) for j in range(self.restarts * self.num_clusters)])}

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report:
        """Return which model of each set fits best."""
        sets = shown["models"].split(self.num_clusters)
        return client.report({"tried": np.array([self._best(client, w) for w in sets])})

    def _best(self, client: Client, models: Sequence[Vector] | torch.Tensor) -> int:
        """Return argmin_j F(w_j)."""
        batch = self.loss_batch if self.loss_batch is not None else LOSS_BATCH * (self.variant == "emdcfl")
        return best_model(client, models, self._split(client), batch)

    def _split(self, client: Client) -> Split:
        """Return the data on which models are compared."""
        return client.data.train if self._on == "train" else client.data.val

    @property
    def changes(self) -> Mapping[str, str]:
        """Under variant `gradient` all uploads are changes."""
        names = ("body", "head") if self.share == "body" else ("model",)
        return {name: name for name in names if self.variant == "gradient"}

    @property
    def holds(self) -> Mapping[str, str]:
        """With a shared body, the tables hold the parts of their names."""
        return {name: name for name in ("body", "head") if self.share == "body"}

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models: the first set that spreads the clients, or the best one tried."""
        first = 0
        if fingerprints is not None:
            fewest = np.array(
                [np.bincount(k, minlength=self.num_clusters).min() for k in fingerprints["tried"].T]
            )
            good = fewest >= self.least * len(fingerprints)
            first = self.num_clusters * int(good.argmax() if good.any() else fewest.argmax())
        warm = int(self.warm_rounds > 0)  # FedAvg's head is the last row
        models = torch.stack([problem.init(first + j) for j in range(self.num_clusters + warm)])
        assign, layout = np.full(problem.num_clients, warm * self.num_clusters, np.int64), problem.layout
        if self.share == "none":
            return Server({"model": models}, assign)
        body, head = take(models[:1], layout.part("body")), take(models, layout.part("head"))
        return Server({"body": body, "head": head}, assign)

    def reads(self, server: Server, k: int) -> Reads:
        """Download all K models; in the first `warm_rounds` rounds that of FedAvg."""
        if server.version < self.warm_rounds:
            return {"body": (0,), "head": (self.num_clusters,)}
        return {n: tuple(range(min(len(rows), self.num_clusters))) for n, rows in server.tables.items()}

    def serves(self, server: Server, k: int) -> Reads:
        """Evaluate with the model chosen last."""
        own = (int(server.assign[k]),)
        return {name: (0,) if name == "body" else own for name in server.tables}

    def serves_unseen(self, server: Server, k: int) -> Reads:
        """Evaluate with the best-fitting of all models."""
        return self.reads(server, k)

    def _models(self, message: Message, client: Client) -> list[Vector]:
        """Return the models that were downloaded, in order."""
        if self.share == "none":
            return list(message["model"])
        w = put(client.init, client.layout.part("body"), message["body"][0])
        return [put(w, client.layout.part("head"), head) for head in message["head"]]

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the served model, or the best-fitting of several."""
        models = self._models(message, client)
        return models[self._best(client, models) if len(models) > 1 else 0]

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses of all models, and a training; without choice in the first `warm_rounds`."""
        split = held.train if self._on == "train" else held.val
        losses = Asked("loss", split, self.num_clusters, at_most=self.warm_rounds > 0)
        step = {"epochs": 1, "steps": None, "batch_size": max(held.train, 1)}
        return [losses] * (self.num_clusters > 1) + [
            Asked("sgd", held.train, changes=step if self.variant == "gradient" else {})
        ]

    def plain_visit(self) -> PlainVisit | None:
        """Choose by the loss on the training data, and train a whole model."""
        plain = self.variant == "averaging" and self.share == "none"
        return PlainVisit(choice="cluster") if plain and self._on == "train" and not self.loss_batch else None

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Choose k = argmin_j F_i(w_j), train w_k."""
        models = self._models(message, client)
        alone = bool(self.warm_rounds) and len(models) == 1
        k = self._best(client, models) if len(models) > 1 else 0
        step: dict[str, Any] = {}
        if self.variant == "gradient":
            step = {"epochs": 1, "batch_size": client.num_samples, "momentum": 0.0, "optimizer": "sgd"}
        w = client.sgd(models[k], key, **step)
        upload = w.vector - models[k] if self.variant == "gradient" else w.vector
        parts = ("body", "head") if self.share == "body" else ("all",)
        vectors: dict[str, Any] = {
            "model" if p == "all" else p: take(upload, client.layout.part(p)).clone() for p in parts
        }
        changes = dict.fromkeys(vectors) if self.variant == "gradient" else None
        chosen = self.num_clusters if alone else k
        return client.report({"cluster": chosen}, {"train_loss": w.loss}, based_on=changes, **vectors), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average per cluster, and the body over all clients; an empty cluster stays as it is."""
        k = notes["cluster"].astype(int)  # [m]
        by_samples = self.variant == "emdcfl" if self.weighted is None else self.weighted
        weights = notes.num_samples if by_samples else np.ones(len(notes))
        mixings = []
        for name, rows in server.tables.items():
            row = k if name != "body" else np.zeros(len(notes), np.int64)
            one = by_cluster(row, len(rows), weights, into=name, of=name)
            if self.variant == "gradient":
                members = (np.arange(len(rows))[:, None] == row) * weights
                one = add(members / weights.sum(), into=name, of=name)
            mixings.append(one)
        return Plan(mixings, assign=updated(server.assign, notes.client, k))
