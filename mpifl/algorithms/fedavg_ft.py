"""FedAvg with fine-tuning: each client trains the global model a little further before it is evaluated.

The federation is McMahan et al., AISTATS 2017, Algorithm 1. The personalised evaluation is the baseline of
many papers, among them Cheng et al., "Fine-tuning is Fine in Federated Learning", 2021. Clients are
evaluated after fine-tuning (`accuracy`) and before (`accuracy_initial`); the fine-tuned model is not kept.
With `mu` the federation is FedProx (Li et al., MLSys 2020); fine-tuning never has the proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpifl.core.federation import Split
from mpifl.core.method import Algorithm, Client, Needs, PlainVisit, PlainVisits, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeFloat, NonNegativeInt
from mpifl.core.types import Message, Notes, Server, State
from mpifl.training.evaluation import evaluate_tuned

from .fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgFT(PlainVisits, RowUpdates, Algorithm):
    """FedAvg, evaluated after fine-tuning.

    Attributes:
        tune_epochs: epochs of fine-tuning before a client is evaluated.
        tune_part: the part of the model that is fine-tuned: `all`, `body` or `head`.
        tune_sizes: whether to measure how far fine-tuning moves each module of the model.
        mu: weight of FedProx's proximal term, which adds mu (w - x) to the gradients of a visit; x is the
            received model. 0 is FedAvg.
    """

    tune_epochs: NonNegativeInt = 1
    tune_part: Literal["all", "body", "head"] = "all"
    tune_sizes: bool = False
    mu: NonNegativeFloat = 0.0

    paper = FedAvg.paper
    needs = Needs(averages=True)

    def plain_visit(self) -> PlainVisit:
        """Train the model that was received."""
        return PlainVisit(mu=self.mu or None)

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average by samples."""
        return Plan([average(notes)])

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate after fine-tuning, and before (`_initial`)."""
        how = self.tune_epochs, self.tune_part
        return evaluate_tuned(client, message["model"][0], split, *how, sizes=self.tune_sizes)
