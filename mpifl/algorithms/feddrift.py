"""FedDrift: clients detect drift by their loss, leave for a model of their own, and like models are merged.

Jothimurugesan et al., "Federated Learning under Distributed Concept Drift", AISTATS 2023. Time runs in steps,
in which data may change. At the beginning of one, client c compares the models m on its new data. If even the
best fits worse than the best of the step before, min_m l_cm > l_c + delta, it leaves for a new model, which
it trains alone in this step; otherwise it trains the best model. The server then merges models by complete
linkage while D_ij = max(L_ij - L_ii, L_ji - L_jj, 0) <= delta'; L_ij is the loss of model i on the data of
model j's clients. Models that are trained alone are left out until the next step. FedAvg per model follows.
Variant `eager` (FedDrift-Eager) is for one new concept at a time: all clients that detect drift in a step
share one new model, and nothing is merged.

Our reading: of the paper only the abstract could be read, and the authors' code (microsoft/FedDrift,
`cluster_hierarchical` and `cluster_mmacc2`). The code compares error rates instead of losses (`measure`),
takes delta' = delta in its commands, copies the best model into a new one, merges models weighted by how many
clients trained each in how many steps, limits the number of models (the one that is unused for longest makes
room), and can let every client begin alone (`start: own`, there option F).

Differs: a time step is `period` server steps. Losses travel with the first upload of a client in it, so that
models are merged after its first round. Clients train on the data that they hold; the code goes on training
on the data of earlier steps. There, the data of a step are new to all models; here models may have trained on
them, which makes L_ii small and keeps like models apart. `select_on: val` compares on data that no model has
trained on. A client that is absent at the beginning compares the models at its first visit in the step; L is
then taken again, over those who have compared by then. Models whose clients have not, and those merged in the
step, merge no more in it. The same holds under policies whose steps take few uploads, with `period` in these
steps: the server keeps the losses of a time step. An upload is left out if the model that it was trained from
has been replaced or merged meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mpifl.clustering.partitions import merge_closest
from mpifl.core.computation import Asked, Held
from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan
from mpifl.core.metric import least_finite
from mpifl.core.mixing import by_cluster, carry
from mpifl.core.options import NonNegativeFloat, PositiveInt
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class FedDrift(Algorithm):
    """One row per model, and rows that wait for a new one.

    Attributes:
        period: server steps (rounds) of a time step.
        delta: rise of the loss of the best model that counts as drift, in units of `measure`.
        merge_delta: delta', distance up to which models are merged; None: `delta`.
        measure: what models are compared by: `error`, the share of wrong classes (authors' code), or `loss`.
        select_on: data on which models are compared: `train` or `val`.
        start: `shared`, one model for all, or `own`, one for each client, which are merged in the second time
            step; for groups that differ from the beginning.
        max_models: R, the largest number of models; no client leaves for a new one while R have clients.
        variant: `feddrift` or `eager`.
    """

    period: PositiveInt = 5
    delta: NonNegativeFloat = 0.1
    merge_delta: NonNegativeFloat | None = None
    measure: Literal["error", "loss"] = "error"
    select_on: Literal["train", "val"] = "train"
    start: Literal["shared", "own"] = "shared"
    max_models: PositiveInt = 10
    variant: Literal["feddrift", "eager"] = "feddrift"

    paper = "jothimurugesan2023federated"
    traffic_depends_on = "the number of models: clients download all of them once in a time step"
    asks = ("outputs",)
    downloads = Downloads(serves="own")

    @cached_property
    def needs(self) -> Needs:
        """Classes if models are compared by errors; validation data if on these."""
        return Needs(
            client_state=True,
            averages=True,
            new_rows=True,
            classes=self.measure == "error",
            validation=self.select_on == "val",
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.start == "shared" or self.variant == "feddrift"
        require(fits, "start", self.start, "variant eager merges no models, so that all remain; use shared")

    def ignored_options(self) -> Mapping[str, str]:
        """Nothing is merged under `eager`."""
        return {"merge_delta": "variant eager merges nothing"} if self.variant == "eager" else {}

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` if clients begin alone and are more than there may be models."""
        super().check(problem)
        fits = self.start == "shared" or self.max_models >= problem.num_clients
        remedy = f"with start: own each of the {problem.num_clients} clients has a model; use as many or more"
        require(fits, "max_models", self.max_models, remedy)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start with one model, or one for each client.

        State of clients: `compared` [N], time step in which they last compared the models (-1: never),
        `losses` [N, R] that they found, `samples` [N]. Of rows: `born` [R], time step in which the model was
        made (-1: before all), `used` [R], the last in which it was the best of a client (-1: a free row),
        `since` [R], server version from which on the row holds this model, `visits` [R], how many clients
        trained it, summed over time steps.
        """
        N, R, own = problem.num_clients, self.max_models, self.start == "own"
        first = np.arange(R) < (N if own else 1)
        state = {
            "compared": np.full(N, -1),
            "losses": np.full((N, R), np.nan),
            "samples": np.ones(N),
            "born": np.where(first & own, 0, -1),
            "used": np.where(first, 0, -1),
            "since": np.zeros(R, np.int64),
            "visits": np.zeros(R),
        }
        return problem.server(problem.alike(R), np.arange(N) * own, state)

    def reads(self, server: Server, k: int) -> Reads:
        """Download all models at the first visit of a time step, except those that others train alone."""
        state, t = server.algorithm_state, server.version // self.period
        own = int(server.assign[k])
        if state["compared"][k] >= t:
            return {"model": (own,)}
        known = (state["used"] >= 0) & (state["born"] < t)
        known[own] = True
        return {"model": tuple(np.flatnonzero(known).tolist())}

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses of at most all models, and a training."""
        call: Literal["logits", "loss"] = "logits" if self.measure == "error" else "loss"
        n = held.train if self.select_on == "train" else held.val
        compared = Asked(call, n, self.max_models, at_most=True)
        return [compared, Asked("sgd", held.train)]

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Compare the models if a time step begins, detect drift, train the best model."""
        models, rows = message["model"], np.asarray(message.rows["model"])
        t, first = message.version // self.period, state.get("time", torch.tensor(-1))
        losses, j, drift = np.full(self.max_models, np.nan), 0, np.nan
        if len(models) > 1 or int(first) < t:
            losses[rows] = [self._loss(client, w) for w in models]
            j = int(least_finite(losses[rows]))
            best, last = losses[rows[j]], state.get("loss", torch.tensor(torch.inf))
            drift = float(best > float(last) + self.delta)  # l_c^(t) > l_c^(t-1) + delta
            state = {"time": torch.tensor(t), "loss": torch.tensor(best)}
        w = client.sgd(models[j], key)
        notes = {"cluster": int(rows[j]), "drift": drift, "losses": losses}
        unsent = ("drift", "losses") if np.isnan(drift) else ()
        return client.report(notes, {"train_loss": w.loss}, unsent, model=w.vector), state

    def _loss(self, client: Client, w: Vector) -> float:
        """Return the loss of a model, or its share of wrong classes."""
        data = client.data.train if self.select_on == "train" else client.data.val
        if self.measure == "loss":
            return client.loss(w, data)
        return float((client.logits(w, data.x).argmax(-1) != data.y).double().mean())

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Take in what was compared, average each model by samples, then merge those that are alike."""
        s = {name: values.copy() for name, values in server.algorithm_state.items()}
        assign, row = server.assign.copy(), notes["cluster"].astype(int)  # [m]
        read = server.version - notes.staleness  # [m], the versions that were downloaded
        row = np.where(s["since"][row] <= read, row, -1)  # -1: the row holds another model by now
        compared = np.flatnonzero(~np.isnan(notes["drift"]) & (row >= 0))
        for i in compared:
            k, j, t = notes.client[i], row[i], read[i] // self.period
            assign[k], s["compared"][k], s["used"][j] = j, t, t
            s["losses"][k] = np.where(s["since"] <= read[i], notes["losses"][i], np.nan)
            s["samples"][k] = max(notes.num_samples[i], 1)
        origin = np.arange(self.max_models)  # the row from which each row begins in this step
        for i in compared[notes["drift"][compared] > 0]:
            k, t = notes.client[i], read[i] // self.period
            new, joins = self._new_row(s, assign, t)
            if new is None:
                continue
            if not joins:
                row[row == new], origin[new], s["losses"][:, new] = -1, row[i], np.nan
                s["born"][new], s["used"][new], s["visits"][new], s["since"][new] = (
                    t,
                    t,
                    0,
                    server.version + 1,
                )
            row[i] = assign[k] = new
        np.add.at(s["visits"], row[compared], 1)
        mixings = [carry(np.eye(self.max_models)[origin])] if (origin != np.arange(len(origin))).any() else []
        mixings.append(by_cluster(row, self.max_models, notes.num_samples))
        if self.variant == "feddrift" and len(compared):
            into = self._merged(s, assign, server.version // self.period)  # [R]
            if (into != np.arange(len(into))).any():
                mixings.append(carry(_merge(s, into, server.version + 1)))
                assign = into[assign]
        return Plan(mixings, assign=assign, algorithm_state=s)

    def _new_row(self, s: Mapping[str, np.ndarray], assign: np.ndarray, t: int) -> tuple[int | None, bool]:
        """Return the row of a model that begins in time step `t`, and whether others have begun it already.

        It is a free row, or that of the model that is unused for longest; None if every one has clients.
        """
        begun = np.flatnonzero((s["born"] == t) & (s["used"] >= 0))
        if self.variant == "eager" and len(begun):
            return int(begun[0]), True
        idle = np.flatnonzero((s["used"] < t) & ~np.isin(np.arange(self.max_models), assign))
        return (int(idle[s["used"][idle].argmin()]) if len(idle) else None), False

    def _merged(self, s: Mapping[str, np.ndarray], assign: np.ndarray, t: int) -> np.ndarray:
        """Return the row [R] of which each row is a part after time step `t` merges models."""
        into = np.arange(self.max_models)
        members = (assign == into[:, None]) & (s["compared"] == t)  # [R, N]
        rows = np.flatnonzero(members.any(1) & (s["born"] < t))
        if len(rows) < 2:
            return into
        L = np.empty((len(rows), len(rows)))  # L_ij, of model i on the data of the clients of model j
        for j, k in enumerate(members[rows]):
            L[:, j] = np.average(s["losses"][k][:, rows], axis=0, weights=s["samples"][k])
        apart = L - L.diagonal()[:, None]  # L_ij - L_ii
        D = np.maximum(np.maximum(apart, apart.T), 0.0)
        alike = merge_closest(D, self.delta if self.merge_delta is None else self.merge_delta, "maximum")
        for group in np.unique(alike):
            into[rows[alike == group]] = rows[alike == group][0]
        return into


def _merge(s: Mapping[str, np.ndarray], into: np.ndarray, version: int) -> np.ndarray:
    """Return the rows [R, R] that each row becomes as rows move `into` [R] others; rows that move are free.

    A model counts by its visits.
    """
    gone, keep = into != np.arange(len(into)), np.eye(len(into))
    for base in np.unique(into[gone]):
        visits = np.where(into == base, s["visits"], 0.0)
        keep[base], s["visits"][base] = visits / visits.sum(), visits.sum()
        s["losses"][:, into == base] = np.nan
    s["used"][gone], s["born"][gone], s["visits"][gone], s["since"][gone] = -1, -1, 0, version
    return keep
