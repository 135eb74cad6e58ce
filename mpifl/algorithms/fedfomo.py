"""FedFomo: every client weighs other clients' models by what they would gain on its validation data.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, Algorithm 1.
Legend: w_i own model at the previous federation, L_i validation loss, P affinities. omega_ij = max((L_i(w_i)
- L_i(w_j)) / ||w_j - w_i||, 0), normalised to sum 1; w_i <- w_i + sum_j omega_ij (w_j - w_i), then local
training; P_i grows by the raw omega. The server sends the M models of largest P_i, or, with probability
epsilon, M at random.

Our reading: a client never receives its own model; ties are broken at random; in the first round all models
are alike and none is sent; a client is evaluated with its own model as trained.

Variant `ucfl` follows the UCFL repository, which produced that paper's FedFomo rows. Losses are measured on
the client's *test* data, so these rows are optimistic, and no validation data are needed. ||w_j - w_i|| is
the sum of the norms over tensors. w_i is the model from the client's last visit but one; the model from its
last visit is a candidate like the others, and the client continues from it if no candidate helps. After round
1 all clients start from the average by samples. A client is evaluated with its mixture before training. In
that repository every client weighs all others, which is `num_models` N - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mpifl.core.errors import require
from mpifl.core.method import Algorithm, Client, Key, Needs, Plan, PlannedRun
from mpifl.core.mixing import own_rows
from mpifl.core.options import NonNegativeFloat, PositiveInt, UnitInterval
from mpifl.core.parameters import Layout
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """N rows, one for each client's last model; clients read the rows of others.

    Attributes:
        num_models: M, models sent to a client.
        epsilon: probability in the first round that the models sent to a client are drawn at random.
        epsilon_decay: subtracted from epsilon after every round.
        variant: `paper`, or `ucfl`, which weighs models on the client's test data.
    """

    num_models: PositiveInt = 5
    epsilon: UnitInterval = 0.3
    epsilon_decay: NonNegativeFloat = 0.05
    variant: Literal["paper", "ucfl"] = "paper"

    paper = "zhang2021personalized"
    asks = ("outputs",)

    @cached_property
    def needs(self) -> Needs:
        """Validation data, except for variant `ucfl`."""
        return Needs(client_state=True, validation=self.variant == "paper", fresh_uploads=True)

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` for fewer than M other clients."""
        remedy = f"there are only {problem.num_clients - 1} other clients; use fewer models"
        require(self.num_models < problem.num_clients, "num_models", self.num_models, remedy)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clients alike, with zero affinities; random draws are addressed by `seed` and version."""
        N = problem.num_clients
        algorithm_state = {"affinity": np.zeros((N, N)), "seed": np.array(key.seed)}
        return problem.server(problem.alike(N), np.arange(N), algorithm_state)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the chosen models of others; in round 2 of variant `ucfl`, the average of all."""
        if not server.version:
            return {}
        if self.variant == "ucfl" and server.version == 1:
            return {"model": server.algorithm_state["shares"]}
        return {"model": tuple(int(j) for j in server.algorithm_state["chosen"][k])}

    def serves(self, server: Server, k: int) -> Reads:
        """Evaluate with the client's own model; in variant `ucfl`, with its mixture of what it reads."""
        return self.reads(server, k) if self.variant == "ucfl" else {}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Mix helpful models into the own model, then train it; a client without a step keeps its own."""
        w, notes = self.mixed(message, state, client)
        trained, own = client.sgd(w, key), state.get("model", client.init)
        if not trained.steps:
            trained, notes = replace(trained, vector=own), {name: 0.0 * gain for name, gain in notes.items()}
        new = {"model": trained.vector}
        if self.variant == "ucfl":
            new["before"] = own if trained.steps else state.get("before", own)
        metrics = {"train_loss": trained.loss}
        based = {} if "model" in message.vectors else {"model": client.init}  # the row that the server has
        return client.report(notes, metrics, based_on=based, model=trained.vector), new

    def mixed(self, message: Message, state: State, client: Client) -> tuple[Vector, dict[str, np.ndarray]]:
        """Return the client's mixture w of its own model and those it reads, and their gains as a note."""
        w = state.get("model", client.init)
        if "model" not in message.vectors:
            return w, {}
        if isinstance(message.rows["model"], np.ndarray):  # the average
            return message["model"][0], {}
        others = message["model"]  # [M, d]
        if self.variant == "paper":
            losses = [client.loss(v, client.data.val) for v in (w, *others)]
            p = client.layout.num_parameters
            distances = [float((v - w)[:p].double().norm()) for v in others]
            raw = gains(np.array(losses), np.array(distances))  # [M]
            if raw.any():
                omega = torch.from_numpy(raw / raw.sum()).to(w)
                w = w + omega @ (others - w)
            return w, {"gain": raw}
        before, candidates = state.get("before", client.init), torch.cat([w[None], others])  # [1 + M, d]
        losses = [client.loss(v, client.data.test) for v in (before, *candidates)]
        raw = gains(np.array(losses), by_tensors(candidates - before, client.layout))  # [1 + M]
        if raw.any():
            w = torch.from_numpy(raw / raw.sum()).to(w) @ candidates
        return w, {"gain": raw[1:]}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Store each model in its client's row, add the gains to P, choose the models to send next."""
        P = server.algorithm_state["affinity"].copy()  # [N, N]
        if "gain" in notes.columns:
            P[notes.client[:, None], server.algorithm_state["chosen"][notes.client]] += notes["gain"]
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * server.version)
        address = key(int(server.algorithm_state["seed"]), server.version)
        chosen = choose(P, self.num_models, epsilon, address)
        mixing = own_rows(np.eye(len(notes)), notes, len(server.assign))
        algorithm_state = {"affinity": P, "chosen": chosen}
        if self.variant == "ucfl" and not server.version:
            n = np.bincount(notes.client, notes.num_samples, len(P))
            algorithm_state["shares"] = n / n.sum()
        return Plan([mixing], algorithm_state=algorithm_state)

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Count M models down and M gains up from round 2 on; variant `ucfl`: instead one average in round 2.

        With several models, a compressed upload is the difference from the nearest one and names it.
        """
        d, M, ucfl = run.problem.layout.size, self.num_models, self.variant == "ucfl"
        visits = max(run.num_rounds - 1 - ucfl, 0) * run.num_sampled
        averages = run.num_sampled * (ucfl and run.num_rounds > 1)
        down = visits * run.row_bytes("model", d, M) + averages * run.row_bytes("model", d, 1)
        return down, visits * run.message_bytes(M, note=True, named_rows=int(M > 1))

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own model; in variant `ucfl`, its mixture."""
        return self.mixed(message, state, client)[0]


def gains(losses: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return max((L(w_i) - L(w_j)) / ||w_j - w_i||, 0) [M] from losses [1 + M], own first (0 if equal).

    A model with a loss that is not finite gains nothing. If it is the own one, all others are better by 1:
    the mixture is then that of the limit of a large loss.
    """
    known = np.isfinite(losses)
    of = np.where(known, losses, 0.0)
    better = np.maximum(of[0] - of[1:], 0.0) if known[0] else np.ones(len(losses) - 1)
    better = np.where(known[1:], better, 0.0)
    return np.asarray(np.divide(better, distances, out=np.zeros_like(better), where=distances > 0))


def by_tensors(differences: torch.Tensor, layout: Layout) -> np.ndarray:
    """Return sum_l ||v_l|| over the tensors l of each difference v: [M] from [M, d]."""
    norms = [differences[:, s].double().norm(dim=1) for s in layout.slices.values()]
    return np.asarray(torch.stack(norms).sum(0))


def choose(P: np.ndarray, size: int, epsilon: float, address: Key) -> np.ndarray:
    """Return the clients [N, M] whose models each client gets: the most helpful, or some at random."""
    chosen = np.empty((len(P), size), np.int64)
    for k, row in enumerate(P):
        rng = address.of(k).numpy()
        others = rng.permutation(np.delete(np.arange(len(P)), k))
        greedy = rng.random() >= epsilon
        order = np.argsort(-row[others], kind="stable") if greedy else np.arange(len(others))
        chosen[k] = others[order[:size]]
    return chosen
