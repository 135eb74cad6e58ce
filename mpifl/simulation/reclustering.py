"""When clients send their statistics again, so that methods that look once look again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, Options

# entries of the algorithm's state about the last statistics of each client [N]: server step, visits before
STATISTICS_STEP, STATISTICS_VISITS = "statistics_step", "statistics_visits"


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
        at: server steps in which all statistics from before them are due.
    """

    every: NonNegativeInt = 0
    visits: NonNegativeInt = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = [0, *self.at] == sorted({0, *self.at})
        require(rising, "at", list(self.at), "give server steps from 1 on, ascending")

    def __bool__(self) -> bool:
        return bool(self.every or self.visits or self.at)

    def due(self, taken: np.ndarray, step: int, visits: np.ndarray) -> np.ndarray:
        """Return whose statistics are due in a server step, bool [n].

        Args:
            taken: the step of each client's last statistics, int64 [n]; 0 before training.
            step: number of the step.
            visits: the visits of each client since its last statistics, int64 [n].
        """
        due = step - taken >= self.every if self.every else np.zeros(len(taken), bool)
        if self.visits:
            due |= visits >= self.visits
        for at in self.at:
            due |= (taken < at) & (at <= step)
        return due
