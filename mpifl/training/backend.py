"""Requests for local training, and the interface of the backends that train them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from mpifl.core.client import Direction, Loss, Trained, TrainedVisits
from mpifl.core.federation import Split, StoredSamples
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part, bounds
from mpifl.core.progress import Stage
from mpifl.core.rng import Key
from mpifl.core.task import Task
from mpifl.kernels import bindings, training_calls

from .config import LocalConfig


class Request(NamedTuple):
    """One local training: the arguments of `Learner.sgd` as a value.

    This is a tuple because one is made for every visit, and a frozen dataclass takes three times as long.

    Attributes:
        start: the vector [d] to train from.
        split: the training data, on the learner's device.
        config: options of the training.
        key: random key of the order of the samples and of the draws of model and augmentation.
        step: the server step, from 1; it determines the learning rate.
        direction: changes the flat gradient before each step; None leaves it as it is.
        loss: replaces the loss of the task; None keeps it.
        part: the slices of the vector that are trained; None for all parameters.
        kept: optimiser state to continue from and to update; None for a new optimiser.
        stage: its `done` is set to the number of mini-batches trained so far; None reports no progress. The
            kernels, which train in one call, do not update it.
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
    stage: Stage | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that requests must share to be trained in one stack."""
        return self.config, self.step, bounds(self.part), tuple(self.split.x.shape[1:])

    def outcome(self, vector: torch.Tensor, steps: int, loss: float) -> Trained:
        """Return the outcome of this request.

        Args:
            vector: the trained vector [d].
            steps: optimiser steps taken.
            loss: mean loss of the samples of these steps. NaN counts as infinite, unless there is no step.
        """
        loss = math.nan if not steps else math.inf if math.isnan(loss) else loss
        momentum = self.config.momentum if self.config.optimizer == "sgd" else 0.0
        return Trained(vector, steps, loss, self.config.lr_at(self.step), momentum)


class BatchShares:
    """The weights of the batches in the mean loss of a training: their samples, in units of the first batch.

    Batches of one size have weight 1. A loss that is a mean over other terms, such as tokens, is weighted by
    these (`Task.terms`).

    Args:
        task: the task.
        request: the training.
    """

    def __init__(self, task: Task, request: Request) -> None:
        by_terms = request.loss is None and not task.by_samples
        self._terms = task.terms(request.split.y).float() if by_terms else None
        self._unit: torch.Tensor | float = 0.0
        self._sum: torch.Tensor | float = 0.0

    def next(self, index: torch.Tensor | np.ndarray) -> torch.Tensor | float:
        """Return the weight of the next batch, samples `index` [b]: a number, or a scalar on the device."""
        size: torch.Tensor | float = len(index)
        if self._terms is not None:
            size = self._terms[torch.as_tensor(index, device=self._terms.device)].sum()
        if isinstance(self._unit, float) and not self._unit:
            self._unit = size.clamp_min(1) if isinstance(size, torch.Tensor) else float(size)
        share = size / self._unit
        self._sum = self._sum + share
        return share

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._sum)

    def mean(self, total: float) -> float:
        """Return the mean loss from the sum of weight times loss; NaN where no term counts."""
        return total / self.total if self.total else math.nan


class VisitRequests(NamedTuple):
    """Several visits that only train, on the loss of the task; see `Request`.

    Attributes:
        client: client of each visit, int64 [m].
        visit: number of the client's visits before this one, int64 [m].
        starts: the vector [d] that each starts from.
        out: vectors float32 [d] in main memory that receive the trained models, or their changes.
        samples: the training samples: where all of them are stored, or one split for each visit.
        config: options of the training, the same for all visits.
        key: parent of the keys of the visits, which are `key.of(client, visit)`.
        step: the server step, from 1.
        mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
        change: write w - start to `out` instead of w.
    """

    client: np.ndarray
    visit: np.ndarray
    starts: Sequence[torch.Tensor]
    out: Sequence[torch.Tensor]
    samples: StoredSamples | Sequence[Split]
    config: LocalConfig
    key: Key
    step: int
    mu: float | None = None
    change: bool = False


class Backend(ABC):
    """One way to train a request. A learner asks its backends in order and uses the first that accepts."""

    @abstractmethod
    def accepts(self, request: Request) -> bool:
        """Return whether this backend can train `request`."""

    @abstractmethod
    def train(self, request: Request) -> Trained:
        """Train a request that this backend accepts."""

    def train_visits(self, visits: VisitRequests) -> TrainedVisits | None:
        """Train visits that only train, one after the other; return None (default) where this is impossible.

        If None is returned, the contents of `visits.out` are undefined.
        """
        return None


def sizes_of(samples: StoredSamples | Sequence[Split]) -> np.ndarray:
    """Return the number of samples of each visit, int64 [m]."""
    if isinstance(samples, StoredSamples):
        return samples.sizes
    return np.array([len(s) for s in samples], np.int64)


def train_visits(backends: Iterable[Backend], visits: VisitRequests) -> TrainedVisits | None:
    """Return the outcome of visits from the first backend that can train them; None where none can."""
    made = (backend.train_visits(visits) for backend in backends)
    return next((trained for trained in made if trained is not None), None)


def permutations(entropy: bytes, sizes: np.ndarray) -> np.ndarray:
    """Return permutations of 0 .. size - 1, concatenated, each as `Key.numpy().permutation` draws it.

    Args:
        entropy: entropy of the keys, 16 bytes each (`Key.entropies`).
        sizes: size of each permutation, int64 [permutations].

    Returns:
        int64 [sum of sizes].
    """
    if bindings.TRAINING_AVAILABLE and _as_numpy():
        return training_calls.permutations(entropy, sizes)
    parts = [_permutation(entropy[16 * i : 16 * i + 16], size) for i, size in enumerate(sizes.tolist())]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _permutation(entropy: bytes, size: int) -> np.ndarray:
    seed = np.random.SeedSequence(int.from_bytes(entropy, "little"))
    return np.random.Generator(np.random.Philox(seed)).permutation(size)


@cache
def _as_numpy() -> bool:
    """Return whether the kernels permute as the installed NumPy does; a release may change its algorithm."""
    entropy, size = bytes(range(16)), 300
    return np.array_equal(training_calls.permutations(entropy, np.array([size])), _permutation(entropy, size))


def epoch_orders(
    num_samples: int, config: LocalConfig, key: Key, drop_single: bool = False
) -> Iterator[np.ndarray]:
    """Yield the sample indices of each epoch, int64 [n], in training order; `steps` may cut the last epoch.

    Args:
        num_samples: number of samples of the client.
        config: gives the number of epochs or steps, and the batch size.
        key: random key of the permutations.
        drop_single: leave out a last batch of one sample.
    """
    usable = config.num_usable(num_samples, drop_single)
    steps = config.num_steps(num_samples, drop_single)
    for epoch in count():
        if steps <= 0:
            return
        entropy = key.entropies([("epoch", epoch)])
        order = permutations(entropy, np.array([num_samples], np.int64))[:usable]
        order = order[: steps * config.batch_size]
        steps -= ceil(len(order) / config.batch_size)
        yield order
