"""FedAvg whose clients take their time, so that a job can be disturbed."""

import time
from dataclasses import dataclass

from mpifl.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Sleepy(FedAvg):
    """FedAvg whose clients sleep.

    Attributes:
        nap: seconds a visit.
    """

    nap: float = 0.1

    def local_update(self, message, state, client, key):
        time.sleep(self.nap)
        return super().local_update(message, state, client, key)
