"""What server steps are made of: the objects and settings that every rank builds before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.collective_choice import Costs
from mpifl.comm.transport import Transport
from mpifl.core.algorithm import Algorithm
from mpifl.core.client import ClientHost
from mpifl.core.federation import Federation
from mpifl.core.rng import Key
from mpifl.core.types import ProblemInfo
from mpifl.traffic.payload import Payload


class ShownCache(Protocol):
    """Keeps what the server trains for one-shot statistics (`OneShotStatistics.shows`) for later runs."""

    def get(
        self,
        algorithm: Algorithm,
        problem: ProblemInfo,
        key: Key,
        make: Callable[[], Mapping[str, torch.Tensor]],
    ) -> Mapping[str, torch.Tensor]:
        """Return what an earlier run left, or what `make` returns."""


@dataclass(frozen=True)
class StepConfig:
    """What server steps are made of, the same on every rank.

    Attributes:
        transport: the ranks.
        algorithm: the method.
        federation: the clients' data.
        clients: makes the clients of this rank.
        problem: what the method may know.
        store: what clients keep between visits.
        seed: the training seed's key.
        exact: int64 sums, equal for any number of ranks; otherwise float32 sums.
        collective: the collective that every mixing takes; None chooses.
        shuffle: a key that places tasks at random; None balances them.
        absent: clients that are not there before training.
        finetune_epochs: epochs of training before a client is evaluated a second time; 0 for none.
        evaluates_training: whether clients are evaluated on their training data, too.
        payload: how numbers are encoded on the way.
        costs: measured or given costs that choose the collective; None chooses by bytes.
        stack: clients that are trained together.
        drops: whether a client that fails twice is left out; otherwise it ends the run.
        direct: whether MPI is given the memory of GPUs.
        measures: whether the clients' models are compared in the step of a number; None: in none.
        shown_cache: where what the server trains for one-shot statistics is kept for later runs; None keeps
            nothing.
        synchronous: False where uploads reach rank 0 one by one: all tables stay there, and nobody joins
            after the first step.
        updates: whether the updates of each round are compared with their mean (`ServerStep.updates`).
    """

    transport: Transport
    algorithm: Algorithm
    federation: Federation
    clients: ClientHost
    problem: ProblemInfo
    store: ClientStore
    seed: Key
    exact: bool = True
    collective: str | None = None
    shuffle: Key | None = None
    absent: Sequence[int] = ()
    finetune_epochs: int = 0
    evaluates_training: bool = False
    payload: Payload = field(default_factory=Payload)
    costs: Costs | None = None
    stack: int = 1
    drops: bool = False
    direct: bool = False
    measures: Callable[[int], bool] | None = None
    shown_cache: ShownCache | None = None
    synchronous: bool = True
    updates: bool = False
