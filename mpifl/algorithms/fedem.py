"""FedEM: every client's distribution is a mixture of K shared ones, found by expectation maximisation.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1.
Legend: theta_k components, pi the client's shares of them, q[k, s] responsibility of component k for sample
s, l loss. Clients predict with the mixture. A client that never took part computes its pi by one E and M step
on its training data, as the authors' code does for new clients. That code keeps an optimiser for each
component of a client (`local.keep_optimizer`). Variant `emdcfl`, the EMD-CFL repository: a client is
evaluated with the last component alone, as trained by that client.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mpifl.core.computation import Asked, Held
from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan
from mpifl.core.mixing import Mixing, componentwise, sample_weights, updated
from mpifl.core.options import NumModels
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State
from mpifl.training.evaluation import component_losses, evaluate_mixture, responsibilities, train_components


@dataclass(frozen=True)
class MixtureOfModels(Algorithm, ABC):
    """K rows, all read and all trained by everyone.

    Attributes:
        variant: `paper` (evaluate the mixture) or `emdcfl` (evaluate the last model as the client trained
            it).
    """

    variant: Literal["paper", "emdcfl"] = "paper"

    asks = ("loss",)
    needs = Needs(
        client_state=True, averages=True, sample_losses=True, different_starts=True, several_models=True
    )
    downloads = Downloads(reads="all")

    def corrected(self, scores: torch.Tensor, message: Message, client: Client) -> torch.Tensor:
        """Return the logarithms of q before they are normalised [K, n], from log pi_k - l(theta_k; s)."""
        return scores

    def further_uploads(self, q: torch.Tensor, message: Message, client: Client) -> dict[str, Any]:
        """Return what a client uploads beside its models. Default: nothing."""
        return {}

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """E step, M step for pi, M step for every component by weighted training."""
        q, pi = self.expect(message, state, client)
        uploads = self.further_uploads(q, message, client)
        theta, loss = train_components(client, message["model"], q, key)
        largest, told = {"component": int(pi.argmax())}, {"train_loss": loss}
        report = client.report(largest, told, unsent=("component",), model=theta, **uploads)
        return report, {"pi": pi} | ({"last": theta[-1]} if self.variant == "emdcfl" else {})

    def expect(self, message: Message, state: State, client: Client) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [K, n] and the new pi [K]."""
        losses = component_losses(client, message["model"])  # [K, n]
        K = len(losses)
        pi = state.get("pi", torch.full((K,), 1 / K))
        scores = pi.to(losses).log()[:, None] - losses
        q = responsibilities(self.corrected(scores, message, client))  # eq. 10
        return q, q.mean(1).cpu()  # eq. 11

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """theta_k <- sum_i n_i theta_ik / n; `assign` only records each client's largest component."""
        n = np.tile(sample_weights(notes), (len(server.tables["model"]), 1))  # [K, m]
        assign = updated(server.assign, notes.client, notes["component"])
        return Plan([Mixing(componentwise(n))], assign=assign)

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate sum_k pi_k softmax(theta_k(x))."""
        if self.variant == "emdcfl":
            return client.evaluate(state.get("last", message["model"][-1]), split)
        pi = state["pi"] if "pi" in state else self.expect(message, state, client)[1]
        return evaluate_mixture(client, message["model"], pi, split)


def losses_and_trainings(held: Held, num_models: int) -> list[Asked]:
    """Return what a visit asks for: the losses and the training of each model."""
    return [Asked("losses", held.train, num_models), Asked("sgd", held.train, num_models)]


@dataclass(frozen=True)
class FedEM(MixtureOfModels):
    """K rows, all read and all trained by everyone.

    Attributes:
        num_components: K, number of components.
    """

    num_components: NumModels = 3

    paper = "marfoq2021federated"

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the losses and the trainings of all components."""
        return losses_and_trainings(held, self.num_components)

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Start from K independent models: equal ones would stay equal."""
        return problem.server(self.num_components)
