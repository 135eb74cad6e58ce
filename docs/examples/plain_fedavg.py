"""FedAvg as a plain loop, without the engine: python docs/examples/plain_fedavg.py [ROUNDS]

McMahan et al., AISTATS 2017, Algorithm 1, on 12 clients with two hidden rotations of scikit-learn's
digits. The loop uses mpifl's data, model and local training, and addresses randomness by the same keys as
the engine. So it meets the same cohorts, batches and initial weights as `mpifl run
docs/examples/fedavg.yaml`, and ends with the same accuracies. Only last bits of the averages may differ:
this loop adds in float64, the engine adds exact integers.

What the engine adds to these lines: other methods, many ranks, asynchronous time, byte counts,
checkpoints, run folders.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import torch

from mpifl.core.federation import Federation
from mpifl.core.parameters import flatten
from mpifl.core.rng import key
from mpifl.data import SCENARIOS, SOURCES, DataConfig, open_federation
from mpifl.models import MODELS
from mpifl.training.client import LocalClient
from mpifl.training.config import LocalConfig
from mpifl.training.learner import Learner


@dataclass(frozen=True)
class Setup:
    """The numbers of fedavg.yaml.

    Attributes:
        data: source and scenario.
        model: configuration of the network.
        local: how a client trains.
        participation: share of the clients in a round.
        seed: of data, weights, cohorts and batches.
    """

    data: DataConfig = field(
        default_factory=lambda: DataConfig(
            source=SOURCES["digits"](),
            scenario=SCENARIOS["rotated"](angles=(0.0, 180.0), clients=12, validation=0.2),
        )
    )
    model: object = field(default_factory=lambda: MODELS["mlp"](hidden=(32,)))
    local: LocalConfig = field(
        default_factory=lambda: LocalConfig(epochs=2, batch_size=16, lr=0.05, momentum=0.9)
    )
    participation: float = 0.5
    seed: int = 0


def initial_model(setup: Setup, federation: Federation) -> tuple[Learner, torch.Tensor]:
    """Return what trains the network, and its initial weights [d]."""
    torch.manual_seed(key(setup.seed, "init", 0).seed)
    start = flatten(setup.model.build(federation.shape, federation.num_classes))
    return Learner(setup.model.build(federation.shape, federation.num_classes)), start


def cohort(setup: Setup, num_clients: int, step: int) -> np.ndarray:
    """Return the clients of a round [m], drawn without replacement."""
    m = round(setup.participation * num_clients)
    rng = key(setup.seed).of("cohort", step).numpy()
    return np.sort(rng.choice(num_clients, m, replace=False))


def fedavg(setup: Setup, federation: Federation, rounds: int) -> torch.Tensor:
    """Return the global model [d] after some rounds."""
    learner, model = initial_model(setup, federation)
    visits = np.zeros(federation.num_clients, int)  # of each client so far
    for step in range(1, rounds + 1):
        total, weight = torch.zeros(len(model), dtype=torch.float64), 0
        for k in cohort(setup, federation.num_clients, step).tolist():
            client = LocalClient(k, federation, learner, setup.local, int(visits[k]), step)
            trained = client.sgd(model, key(setup.seed).of("visit", k, int(visits[k])))
            total += client.num_samples * trained.vector.double()
            weight += client.num_samples
            visits[k] += 1
        model = (total / weight).float()
        accuracy = accuracies(setup, federation, learner, model)
        print(f"round {step}/{rounds}  accuracy {accuracy.mean():.4f}  worst {accuracy.min():.4f}")
    return model


def accuracies(setup: Setup, federation: Federation, learner: Learner, model: torch.Tensor) -> np.ndarray:
    """Return the accuracy of a model on the test data of each client [N]."""
    clients = (LocalClient(k, federation, learner, setup.local) for k in range(federation.num_clients))
    return np.array([client.evaluate(model)["accuracy"] for client in clients])


def main(rounds: int = 5) -> np.ndarray:
    """Train, and return the accuracy of each client [N] under the final model."""
    torch.set_num_threads(1)
    setup = Setup()
    federation = open_federation(setup.data, setup.seed)
    model = fedavg(setup, federation, rounds)
    return accuracies(setup, federation, initial_model(setup, federation)[0], model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
