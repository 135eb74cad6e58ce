"""What a client asks to be trained, and the interface of whatever trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from mpifl.core.client import Direction, Loss, Trained
from mpifl.core.federation import Split
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part, bounds
from mpifl.core.rng import Key

from .config import LocalConfig


class Request(NamedTuple):
    """One local training: the arguments of `Learner.sgd` as a value.

    A tuple, because one is made for every visit, and a frozen dataclass takes three times as long.

    Attributes:
        start: the vector [d] to train from.
        split: the training data, on the learner's device.
        config: how to train.
        key: addresses the order of the samples, and what a model or an augmentation draws.
        step: the server step, from 1; it decides the learning rate.
        direction: changes the flat gradient before each step; None leaves it as it is.
        loss: replaces the loss of the task; None for that.
        part: the slices of the vector that move; None for all parameters.
        kept: the optimiser that goes on, and is changed; None for a new one.
    """

    start: torch.Tensor
    split: Split
    config: LocalConfig
    key: Key
    step: int = 1
    direction: Direction | None = None
    loss: Loss | None = None
    part: Part | None = None
    kept: KeptOptimizer | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What requests have in common that can be trained in one stack."""
        return self.config, self.step, bounds(self.part), tuple(self.split.x.shape[1:])

    def outcome(self, vector: torch.Tensor, steps: int, loss: float) -> Trained:
        """Return the outcome of this request.

        Args:
            vector: the trained vector [d].
            steps: optimiser steps taken.
            loss: mean loss of these steps.
        """
        momentum = self.config.momentum if self.config.optimizer == "sgd" else 0.0
        return Trained(vector, steps, loss, self.config.lr_at(self.step), momentum)


class Backend(ABC):
    """One way to train a request. A learner asks its backends in order; the first that accepts trains."""

    @abstractmethod
    def accepts(self, request: Request) -> bool:
        """Return whether this backend can train `request`."""

    @abstractmethod
    def train(self, request: Request) -> Trained:
        """Train a request that was accepted."""


def epoch_orders(
    num_samples: int, config: LocalConfig, key: Key, drop_single: bool = False
) -> Iterator[np.ndarray]:
    """Yield the samples of each epoch, int64 [n], in the order of training; `steps` may cut the last epoch.

    Args:
        num_samples: samples of the client.
        config: gives the number of epochs or steps, and the size of a batch.
        key: addresses the permutations.
        drop_single: leave out a batch of one sample.
    """
    usable = num_samples
    if drop_single:
        usable = num_samples - (num_samples % config.batch_size == 1) if config.batch_size > 1 else 0
    steps = config.epochs * ceil(usable / config.batch_size) if config.steps is None else config.steps
    for epoch in count():
        if steps <= 0 or not usable:
            return
        order = key.of("epoch", epoch).numpy().permutation(num_samples)[:usable]
        order = order[: steps * config.batch_size]
        steps -= ceil(len(order) / config.batch_size)
        yield order
