"""FedSoft-Async: clients weigh cluster models by their own samples; the server moves each by its share.

The baseline of "Client-Centric Federated Learning under Dynamic Mixtures of Distributions" (CCFL), made from
FedSoft (Ruan and Joe-Wong, AAAI 2022). Legend: w_k cluster models, mu_mk share of client m's samples whose
loss is lowest under w_k, tau version that m read, t_k last step in which cluster k changed. alpha_k = alpha_0
mu_mk a_k with a_k = 1 if t_k - tau < b, else 1 / (a (t_k - tau) + 1); w_k <- (1 - alpha_k) w_k + alpha_k w_m.

Our reading: a client starts from sum_k mu_mk w_k and is evaluated with the same mixture. As in CCFL, the
cluster models are pre-trained on the server's labelled sets D_k. A share is a count of samples and may be 0.
CCFL's paper compares the shares by KL(true || mu) and does not say (5.2) how it treats a 0. Here it stays 0,
and `mixture_kl` uses 1e-12 in its place (27.6 nats for each unit of the true share). A positive `sigma` is
FedSoft's smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan, ServerEvaluation
from mpifl.core.mixing import blend, updated
from mpifl.core.options import NonNegativeFloat, NonNegativeInt, PositiveShare, UnitInterval
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server, State
from mpifl.training.evaluation import component_losses, counts_of_best

from .ccfl import CCFL, lateness, pretrained, trained_near


@dataclass(frozen=True)
class FedSoftAsync(ServerEvaluation, Algorithm):
    """K rows, all read by everyone.

    Attributes:
        alpha0: alpha_0, the largest mixing rate of an upload.
        a: decay of the staleness factor 1 / (a s + 1), where s is the number of steps from the client's last
            download to the cluster's last change.
        b: the staleness factor is 1 while s is below this number of steps.
        rho: weight of the client's proximal term.
        pretrain_epochs: epochs of pre-training on D_k, the server's labelled data, before the first upload.
        sigma: share given to a cluster whose model explains no sample best, in the mixture and in the
            server's step; 1e-4 in FedSoft.
    """

    alpha0: PositiveShare = 0.025
    a: NonNegativeFloat = 10.0
    b: NonNegativeFloat = 5.0
    rho: NonNegativeFloat = 0.1
    pretrain_epochs: NonNegativeInt = 5
    sigma: UnitInterval = 0.0

    paper = CCFL.paper
    asks = ("direction",)
    setup_from = ("pretrain_epochs",)
    needs = Needs(single_upload=True, weighs_staleness=True, time_stamps=True, classes=True)
    downloads = Downloads(reads="all")

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Pre-train a model on each D_k."""
        w = pretrained(problem, self.pretrain_epochs, key)  # [K, d]
        K = len(w)
        mu = np.full((problem.num_clients, K), 1 / K)
        return problem.server(w, algorithm_state={"mu": mu, "changed": np.zeros(K)})

    def serves(self, server: Server, k: int) -> Reads:
        """Evaluate with sum_k mu_k w_k, with the client's last mu."""
        return {"model": server.algorithm_state["mu"][k]}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Count samples, then train with a proximal term towards the mixture."""
        w = message["model"]  # [K, d]
        losses = component_losses(client, w)  # [K, n]
        mu = counts_of_best(losses) / losses.shape[1]
        mu = torch.where(mu == 0, self.sigma, mu)
        return trained_near(client, (mu.to(w) @ w).to(w), self.rho, key, {"mu": mu.numpy()}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Move every cluster by its share."""
        m, mu = int(notes.client[0]), notes["mu"][0]
        tau = server.version - int(notes.staleness[0])
        changed = server.algorithm_state["changed"]
        alpha = self.alpha0 * mu * lateness(changed - tau, self.a, self.b)  # [K]
        all_mu = updated(server.algorithm_state["mu"], m, mu)
        algorithm_state = {"mu": all_mu, "changed": np.where(alpha > 0, server.version + 1, changed)}
        return Plan([blend(alpha[:, None])], assign=all_mu.argmax(1), algorithm_state=algorithm_state)

    def mixtures(self, server: Server) -> np.ndarray:
        """Return mu [N, K]."""
        return server.algorithm_state["mu"]
