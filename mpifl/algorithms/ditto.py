"""Ditto: a personal model at each client, held near the global one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1. The
global model w is FedAvg's; the personal model follows v <- v - eta (grad F_k(v) + lambda (v - w)), with w as
received. The authors' code alternates steps of the two trainings; here one training follows the other on the
same batches, which gives the same result because w is fixed. That code averages the global model with equal
weights (`weighted=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpifl.core.client import proximal
from mpifl.core.computation import Asked, Held
from mpifl.core.method import Algorithm, Client, Downloads, Key, Needs, Plan, RowUpdates
from mpifl.core.mixing import average
from mpifl.core.options import NonNegativeFloat
from mpifl.core.types import Message, Notes, ProblemInfo, Report, Server, State


@dataclass(frozen=True)
class Ditto(RowUpdates, Algorithm):
    """One shared row w; each client keeps a personal model v and is evaluated by it.

    Attributes:
        lam: lambda, pull of the personal model towards the global one; 0 is local training.
        weighted: average the global model by samples; otherwise with equal weights.
    """

    lam: NonNegativeFloat = 1.0
    weighted: bool = True

    paper = "li2021ditto"
    asks = ("direction",)
    needs = Needs(client_state=True, averages=True)
    downloads = Downloads(serves="none")

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train w for the server, then v near the w received."""
        w = message["model"][0]
        w_k = client.sgd(w, key)
        v = client.sgd(self.model_of(message, state, client), key, direction=proximal(self.lam, w))
        return client.report(model=w_k.vector, metrics={"train_loss": v.loss}), {"model": v.vector}

    def visit_passes(self, held: Held, problem: ProblemInfo) -> Sequence[Asked]:
        """Return the trainings of the global and of the personal model."""
        return [Asked("sgd", held.train, 2)]

    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Average the trained w."""
        return Plan([average(notes, None if self.weighted else np.ones(len(notes)))])
