"""The workloads of `mpifl bench` (`configs/bench/`), their turns, and the name of its other measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """A measured configuration.

    Attributes:
        config: Name of the configuration.
        what: Description of the training, in a few words.
        turns: Number of turns of each job, unless the user gives one.
    """

    config: str
    what: str
    turns: int = 9


WORKLOADS = {
    "W1": Workload("bench/w1", "100 clients x 600 images, LeNet-5, batch 32, 10 clients a round"),
    "W2": Workload("bench/w2", "100 clients x 600 images, MLP 784-200-10, batch 10, 20 clients a round"),
    "W3": Workload("bench/w3", "1000 clients x 20 images, MLP 784-200-10, batch 10, 100 clients a round"),
    "W4": Workload("bench/w4", "8 clients x 540 images, EMD-CFL's CNN, batch 64", 5),
    "W5": Workload("bench/w5", "4 clients x 500 colour images, ResNet-18, batch 50", 3),
    "W6": Workload("bench/w6", "UCFL, 100 x 600 images, LeNet-5, batch 64: a 100 x 100 mixing a round", 5),
}

SERVER = "server"  # the measurement that is not of a workload
