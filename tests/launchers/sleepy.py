"""FedAvg whose clients take their time, so that a job can be disturbed."""

import time
from dataclasses import dataclass

from mpifl.algorithms.fedavg import FedAvg

HOARD: list[bytes] = []


@dataclass(frozen=True)
class Sleepy(FedAvg):
    """FedAvg whose clients sleep.

    Attributes:
        nap: seconds a visit.
        hoard_mb: memory that each visit takes and keeps.
    """

    nap: float = 0.1
    hoard_mb: int = 0

    def local_update(self, message, state, client, key):
        time.sleep(self.nap)
        HOARD.append(b"x" * (self.hoard_mb << 20))
        return super().local_update(message, state, client, key)
