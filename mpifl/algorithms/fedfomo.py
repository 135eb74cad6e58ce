"""FedFomo: every client weighs other clients' models by what they would gain on its validation data.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
Algorithm 1.
Legend: w_i own model at the previous federation, L_i validation loss, P affinities. omega_ij = max((L_i(w_i)
- L_i(w_j)) / ||w_j - w_i||, 0), normalised to sum 1; w_i <- w_i + sum_j omega_ij (w_j - w_i), then local
training; P_i grows by the raw omega. The server sends the M models of largest P_i, or, with probability
epsilon, M at random.

Readings: a client is never sent its own model; ties are broken at random; before the first round all models
are alike and nothing is sent; a client is evaluated by its own model, as trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mpifl.core.errors import require
from mpifl.core.method import (
    Algorithm,
    Client,
    Key,
    Message,
    Needs,
    Notes,
    PlannedRun,
    ProblemInfo,
    Report,
    Server,
    State,
)
from mpifl.core.mixing import Plan, own_rows
from mpifl.core.rng import key
from mpifl.core.types import Reads, Vector


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """N rows, one for each client's last model; clients read the rows of others.

    Attributes:
        num_models: M, models sent to a client.
        epsilon: chance that they are drawn at random, in the first round.
        epsilon_decay: taken off epsilon after every round.
    """

    num_models: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05

    paper = "zhang2021personalized"
    needs = Needs(client_state=True, validation=True, fresh_uploads=True)

    def __post_init__(self) -> None:
        require(self.num_models >= 1, "num_models", self.num_models, "take at least one model")
        require(0 <= self.epsilon <= 1, "epsilon", self.epsilon, "take a chance in [0, 1]")
        require(self.epsilon_decay >= 0, "epsilon_decay", self.epsilon_decay, "take 0 or more")

    def check(self, problem: ProblemInfo) -> None:
        """There must be M other clients."""
        remedy = f"there are only {problem.num_clients - 1} other clients; take fewer models"
        require(self.num_models < problem.num_clients, "num_models", self.num_models, remedy)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start all clients alike, with no affinity; draws are addressed by `seed` and version."""
        num_clients = problem.num_clients
        algorithm_state = {
            "affinity": np.zeros((num_clients, num_clients)),
            "seed": np.array(key.entropy >> 65),
        }
        models = problem.init(0)[None].expand(num_clients, -1)
        return Server({"model": models}, np.arange(num_clients), algorithm_state)

    def reads(self, server: Server, k: int) -> Reads:
        """Download the chosen models of others."""
        return {"model": tuple(int(j) for j in server.algorithm_state["chosen"][k])} if server.version else {}

    def serves(self, server: Server, k: int) -> Reads:
        """Judge by the client's own model."""
        return {}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Mix what helps into the own model, then train it."""
        w = self.model_of(message, state, client)
        raw, notes = np.zeros(0), {}
        if "model" in message.vectors:
            others = message["model"]  # [M, d]
            losses = [client.loss(v, client.data.val) for v in (w, *others)]
            distances = [float((v - w).double().norm()) for v in others]
            raw = gains(np.array(losses), np.array(distances))  # [M]
            notes = {"gain": raw}
        if raw.any():
            omega = torch.from_numpy(raw / raw.sum()).to(w)
            w = w + omega @ (others - w)
        trained = client.sgd(w, key)
        metrics = {"train_loss": trained.loss}
        return client.report(notes, metrics, model=trained.vector), {"model": trained.vector}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Remember each model in its client's row, add the gains to P, choose what to send next."""
        P = server.algorithm_state["affinity"].copy()  # [N, N]
        if "gain" in notes.columns:
            P[notes.client[:, None], server.algorithm_state["chosen"][notes.client]] += notes["gain"]
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * server.version)
        address = key(int(server.algorithm_state["seed"]), server.version)
        chosen = choose(P, self.num_models, epsilon, address)
        mixing = own_rows(np.eye(len(notes)), notes, len(server.assign))
        return Plan([mixing], algorithm_state={**server.algorithm_state, "affinity": P, "chosen": chosen})

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Count M models down and M gains up from round 2 on."""
        visits, M = (run.num_rounds - 1) * run.num_sampled, self.num_models
        models, gains = M * run.problem.layout.size, M
        return visits * run.message_bytes(models, M), visits * run.message_bytes(gains, note=True)

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the client's own model."""
        return state.get("model", client.init)


def gains(losses: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return max((L(w_i) - L(w_j)) / ||w_j - w_i||, 0) [M] from losses [1 + M], own first; 0 if equal."""
    better = np.maximum(losses[0] - losses[1:], 0.0)
    return np.asarray(np.divide(better, distances, out=np.zeros_like(better), where=distances > 0))


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
