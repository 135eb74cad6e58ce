"""FedPer: a shared body, a private head.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2. Body and head
are trained together; the body is averaged by samples, the head never leaves the client. Papers that compare
personalised models (FedCUAU) fine-tune each client's model before they evaluate it (`tune_epochs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpifl.core.federation import Split
from mpifl.core.method import Client, Message, State
from mpifl.core.options import NonNegativeInt
from mpifl.training.evaluation import evaluate_tuned

from .shared_part import SharedPart


@dataclass(frozen=True)
class FedPer(SharedPart):
    """One table, `body`; the head is client state, the common initial one before the first visit.

    Attributes:
        tune_epochs: epochs of fine-tuning before a client is evaluated (`accuracy`; before fine-tuning:
            `accuracy_initial`); 0 evaluates the model as it is.
    """

    tune_epochs: NonNegativeInt = 0

    paper = "arivazhagan2019federated"

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Evaluate the client's model; with fine-tuning, after it and before it (`_initial`)."""
        w = self.model_of(message, state, client)
        if not self.tune_epochs:
            return client.evaluate(w, split)
        return evaluate_tuned(client, w, split, self.tune_epochs)
