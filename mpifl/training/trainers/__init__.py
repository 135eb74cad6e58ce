"""The trainers of `local.trainer`, by name; each is imported when it is first used."""

from __future__ import annotations

from mpifl.core.registry import Registry
from mpifl.core.trainer import LocalTrainer

TRAINERS: Registry[type[LocalTrainer]] = Registry(
    "trainers",
    LocalTrainer,
    {
        "own": "core.trainer:OwnLoop",
        "torch": "training.trainers.pytorch:Torch",
        "lightning": "training.trainers.lightning:Lightning",
        "sklearn": "training.trainers.scikit:Sklearn",
    },
    "mpifl",
)
