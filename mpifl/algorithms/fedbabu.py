"""FedBABU: clients jointly train only the body, under a fixed common random head, and fine-tune at the end.

Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm
1. Clients are evaluated twice: with the common head (`accuracy_initial`) and after fine-tuning on their
training data (`accuracy`). The authors' code averages sampled clients with equal weights (`weighted=False`);
the paper averages by samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpifl.core.computation import Asked, Held
from mpifl.core.federation import Split
from mpifl.core.method import Client, Key, Message, Needs, Notes, Plan, ProblemInfo, Report, Server, State
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeInt
from mpifl.core.parameters import take
from mpifl.training.evaluation import evaluate_tuned

from .shared_part import SharedPart


@dataclass(frozen=True)
class FedBABU(SharedPart):
    """One table, `body`; the head is the initial one, known to all from the seed.

    Attributes:
        tune_epochs: epochs of fine-tuning before a client is evaluated.
        tune_part: the part of the model that is fine-tuned: `all`, `body` or `head`.
        weighted: average bodies by samples; otherwise with equal weights.
    """

    tune_epochs: NonNegativeInt = 5
    tune_part: Literal["all", "body", "head"] = "all"
    weighted: bool = True

    paper = "oh2022fedbabu"
    asks = ("part",)
    needs = Needs(averages=True)

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the training of the body."""
        return [Asked("sgd", held.train, part="body")]

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train the body under the frozen head."""
        part = client.layout.part("body")
        w = client.sgd(self.model_of(message, state, client), key, part=part)
        return client.report(body=take(w.vector, part).clone(), metrics={"train_loss": w.loss}), {}

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the bodies."""
        return Plan([average(notes, None if self.weighted else np.ones(len(notes)), into="body", of="body")])

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate after fine-tuning, and before (`_initial`)."""
        w = self.model_of(message, state, client)
        return evaluate_tuned(client, w, split, self.tune_epochs, self.tune_part)
