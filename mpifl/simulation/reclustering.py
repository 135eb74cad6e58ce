"""When clients send their statistics again, so that methods that look once look again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpifl.core.errors import require
from mpifl.core.options import NonNegativeInt, Options

STATISTICS_STEP = "statistics_step"  # entry of the algorithm's state: step of each client's statistics [N]


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
        at: server steps in which all statistics from before them are due.
    """

    every: NonNegativeInt = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = [0, *self.at] == sorted({0, *self.at})
        require(rising, "at", list(self.at), "give server steps from 1 on, ascending")

    def __bool__(self) -> bool:
        return bool(self.every or self.at)

    def due(self, taken: np.ndarray, step: int) -> np.ndarray:
        """Return whose statistics are due in a server step, bool [n].

        Args:
            taken: the step of each client's last statistics, int64 [n]; 0 before training.
            step: number of the step.
        """
        due = step - taken >= self.every if self.every else np.zeros(len(taken), bool)
        for at in self.at:
            due |= (taken < at) & (at <= step)
        return due
