"""When clients send their statistics again, so that methods that look once look again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import FiniteNonNegative, NonNegativeInt, Options

# entries of the algorithm's state about the last statistics of each client [N]: server step, visits before,
# seconds on the run's clock
STATISTICS_STEP, STATISTICS_VISITS, STATISTICS_S = (
    "statistics_step",
    "statistics_visits",
    "statistics_seconds",
)
LOSS = "train_loss"  # what a visit reports and `loss_rise` compares


@dataclass(frozen=True)
class Since:
    """How old the last statistics of some clients are, in a server step.

    Attributes:
        step: number of the step.
        taken: the step of each client's last statistics, int64 [n]; 0 before training.
        visits: the visits of each client since then, int64 [n].
        seconds: seconds on the run's clock since then, float64 [n].
        rises: by how much the training loss of each client's last visit is above that of the one before,
            float64 [n]; NaN before the second.
    """

    step: int
    taken: np.ndarray
    visits: np.ndarray
    seconds: np.ndarray
    rises: np.ndarray


@dataclass(frozen=True)
class Recluster(Options):
    """Statistics that clients send before training are taken again, and the clients assigned anew.

    For methods that take in new clients (PACFL, FedClust, FlexCFL, FLT and others, `NewClients`) and for
    EMD-CFL, whose clients look at each other again, under every policy. A client whose statistics are due
    sends them when it next takes part: in rounds at the start of the round, otherwise before its visit, which
    lasts longer by these messages. They come from the data that it then has, and it is assigned as a new
    client is: to an existing cluster, or to a new one where the method makes some. It keeps what it holds.
    Ledger, virtual time and computation count statistics each time they are sent.

    Attributes:
        every: statistics that are so many server steps old or older are due; 0: statistics never grow old.
        visits: statistics are due after so many visits of the client, the same under every policy; 0: never.
        seconds: statistics that are so many seconds of the run's clock old or older are due; 0: never.
        loss_rise: statistics are due when the training loss of the client's last visit is higher than that of
            the visit before by more than this, which it sees itself (the test by which clients of FedDrift
            detect drift, arXiv:2206.00799, on visits instead of time steps); 0: never.
        at: server steps in which all statistics from before them are due.
    """

    every: NonNegativeInt = 0
    visits: NonNegativeInt = 0
    seconds: FiniteNonNegative = 0.0
    loss_rise: FiniteNonNegative = 0.0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = [0, *self.at] == sorted({0, *self.at})
        require(rising, "at", list(self.at), "give server steps from 1 on, ascending")

    def __bool__(self) -> bool:
        return bool(self.every or self.visits or self.seconds or self.loss_rise or self.at)

    def due(self, since: Since) -> np.ndarray:
        """Return whose statistics are due, bool [n]."""
        due = since.step - since.taken >= self.every if self.every else np.zeros(len(since.taken), bool)
        if self.visits:
            due |= since.visits >= self.visits
        if self.seconds:
            due |= since.seconds >= self.seconds
        if self.loss_rise:
            due |= (since.rises > self.loss_rise) & (since.visits > 0)
        for at in self.at:
            due |= (since.taken < at) & (at <= since.step)
        return due
