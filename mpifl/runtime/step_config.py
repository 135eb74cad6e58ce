"""What server steps are made of: the objects and settings that every rank builds before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from mpifl.aggregation.client_store import ClientStore
from mpifl.aggregation.collective_choice import Costs
from mpifl.comm.transport import Transport
from mpifl.core.algorithm import Algorithm
from mpifl.core.client import ClientHost
from mpifl.core.federation import Federation
from mpifl.core.mixing import Mixing, Plan
from mpifl.core.parameters import Layout
from mpifl.core.progress import VisitCounter
from mpifl.core.rng import Key
from mpifl.core.types import Message, Notes, ProblemInfo, Reads, Report, Server
from mpifl.traffic.payload import Payload

from .aggregators import RobustMeans


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


class Protection(Protocol):
    """Clips updates, and adds noise to them or to their sums (`private_step.py`).

    Attributes:
        clip: longest update that a client may send in the next round; None for any.
    """

    clip: float | None

    @property
    def adds_noise(self) -> bool:
        """Whether the server adds noise to the rows of every step, also of one without any upload."""

    def protect(self, report: Report, message: Message, clip: float | None, key: Key) -> Report:
        """Return what leaves the client, which downloaded `message`; `clip` None: the configuration's."""

    def plan(self, plan: Plan, server: Server, reads: Mapping[int, Reads], notes: Notes) -> Plan:
        """Return the plan with which sums of clipped updates enter the rows; on rank 0."""

    def plan_of_nobody(self, server: Server, reads: Reads) -> Plan:
        """Return the plan of a round to which nobody was drawn; on rank 0."""

    def noised(self, server: Server) -> Server:
        """Return the server after a step with noise on its rows; on rank 0."""

    def commit(self) -> None:
        """Go on to the next round; on rank 0."""

    def state_dict(self) -> dict[str, float | None]:
        """Return what the next round depends on."""

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore what `state_dict` returned."""


Sent = tuple[int, str, str, int, int]  # client, up or down, name, numbers, bytes


class SecureSums(Protocol):
    """Hides single uploads from the server (`aggregation/secure_sum.py`); on rank 0."""

    def begin(
        self, mixings: Sequence[Mixing], clients: np.ndarray, step: int, widths: Mapping[str, int]
    ) -> tuple[list[Mixing], Sequence[Sent]]:
        """Return the mixings of a round under masks, and what its clients send; see `SecureRounds.begin`."""

    def bytes_of_round(self, clients: int, width: int, header: int) -> tuple[int, int]:
        """Return the bytes (down, up) of a round in which so many clients hide uploads of so many numbers."""

    def commit(self) -> None:
        """Go on to the next round."""

    def figures(self) -> dict[str, int]:
        """Return columns of `metrics.csv`."""

    def state_dict(self) -> dict[str, int]:
        """Return what is counted."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""


class UploadAttack(Protocol):
    """What attackers do to what they upload (`simulation/attacks.py`)."""

    def report(
        self, report: Report, message: Message, layout: Layout, statistics: Sequence[str], key: Key
    ) -> Report:
        """Return what an attacker sends in the place of an honest report."""


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
        protection: clips, and adds noise; None does neither.
        secure: hides single uploads from the server; None hides nothing.
        updates: whether the updates of each round are compared with their mean (`ServerStep.updates`).
        effort: by how much longer each client trains than its samples say [N], to balance the ranks; None:
            all are alike.
        counter: counts the visits of this rank, for whoever watches.
        give_back: gives memory that this rank has freed back to the system, where that is due.
        robust: takes means of uploads by a robust rule; None takes the means.
        attack: what attackers do to what they upload; None where they, if any, upload what they trained.
        attackers: the clients that attack.
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
    protection: Protection | None = None
    secure: SecureSums | None = None
    effort: np.ndarray | None = None
    counter: VisitCounter = field(default_factory=VisitCounter)
    give_back: Callable[[], object] = lambda: None
    robust: RobustMeans | None = None
    attack: UploadAttack | None = None
    attackers: frozenset[int] = frozenset()
