"""The configuration of local training."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from mpifl.core.errors import name_of, require
from mpifl.core.options import (
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    ShareBelowOne,
)
from mpifl.core.trainer import LocalTrainer, OwnLoop, Trainer

# options of SGD and Adam, which trainers replace by their own
OF_SGD = frozenset({"lr", "momentum", "weight_decay", "optimizer", "lr_decay", "milestones", "gamma"})


@dataclass(frozen=True)
class LocalConfig(Options):
    """Options of local training.

    Attributes:
        epochs: passes over the training data in one visit.
        steps: mini-batches in one visit, pass after pass, instead of `epochs`; null uses `epochs`. Trainings
            for which a method sets the number of epochs (tuning, training the head alone, one gradient) keep
            that number.
        batch_size: samples per step; the last batch of an epoch may be smaller. With batch norm, a last batch
            of one sample is left out.
        lr: learning rate of the first server step.
        momentum: momentum of SGD; the buffer is reset at every visit, unless `keep_optimizer` is set.
        weight_decay: coefficient of weight decay; the gradient gets `weight_decay * w` added.
        optimizer: `sgd` or `adam`.
        lr_decay: factor applied to the learning rate after every server step.
        milestones: server steps after which the learning rate is multiplied by `gamma`.
        gamma: factor applied to the learning rate at each milestone.
        keep_optimizer: whether each client keeps its optimiser's momentum, or moments and number of steps,
            for its next visit, as the code of CFL, FedEM, FedSoft and UCFL does; otherwise every visit begins
            with a new optimiser.
        precision: number format of matrix products and convolutions in training steps: `float32`, `tf32` (on
            GPUs) or `bfloat16` (on processors with AVX512-BF16 or AMX, and on GPUs that support it). PyTorch
            computes the last two, not the kernels. Weights, updates, sums and evaluation stay float32
            (`docs/performance.md`).
        augment: `none`, or `crop_flip`: random crops and mirrored images in every batch of the training loop.
        trainer: what trains: `own`, mpifl's loop; `torch`, any optimiser of PyTorch; `lightning`, a
            LightningModule's own steps; `sklearn`, a linear model of scikit-learn; or your own
            `file.py:Class`, a `mpifl.Trainer`.
    """

    epochs: NonNegativeInt = 1
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 0.01
    momentum: ShareBelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr_decay: PositiveFloat = 1.0
    milestones: tuple[int, ...] = ()
    gamma: PositiveFloat = 0.1
    augment: Literal["none", "crop_flip"] = "none"
    steps: NonNegativeInt | None = None
    keep_optimizer: bool = False
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    trainer: LocalTrainer = field(default_factory=OwnLoop)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trainer, OwnLoop):
            return
        name = name_of(self.trainer)
        require(isinstance(self.trainer, Trainer), "trainer", name, "derive it from mpifl.Trainer")
        remedy = f"trainer {name} has a new optimiser at every visit; use false"
        require(not self.keep_optimizer, "keep_optimizer", self.keep_optimizer, remedy)
        remedy = f"is of mpifl's own loop; use an option of trainer {name}, if it has one"
        require(self.precision == "float32", "precision", self.precision, remedy)

    @property
    def remembers(self) -> bool:
        """Whether the optimiser has a state: momentum, or Adam's moments."""
        return self.optimizer == "adam" or self.momentum > 0

    def num_usable(self, num_samples: int, drop_single: bool = False) -> int:
        """Return the number of samples that one pass trains on.

        Args:
            num_samples: number of the client's training samples.
            drop_single: whether batches of one sample are left out (`ModelContext.drop_single`).
        """
        if drop_single:
            return num_samples - (num_samples % self.batch_size == 1) if self.batch_size > 1 else 0
        return num_samples

    def num_steps(self, num_samples: int, drop_single: bool = False) -> int:
        """Return the number of mini-batches of a visit; for the arguments see `num_usable`."""
        usable = self.num_usable(num_samples, drop_single)
        if self.steps is not None:
            return self.steps if usable else 0
        return self.epochs * self.pass_steps(num_samples, drop_single)

    def pass_steps(self, num_samples: int, drop_single: bool = False) -> int:
        """Return the number of mini-batches of one pass; for the arguments see `num_usable`."""
        return ceil(self.num_usable(num_samples, drop_single) / self.batch_size)

    def num_trained(self, num_samples: int, drop_single: bool = False) -> int:
        """Return the number of samples in all mini-batches of a visit; each pass counts them again."""
        usable = self.num_usable(num_samples, drop_single)
        if self.steps is None or not usable:
            return self.epochs * usable
        passes, rest = divmod(self.steps, self.pass_steps(num_samples, drop_single))
        return passes * usable + min(rest * self.batch_size, usable)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of server step `step`, from 1; smaller numbers give that of step 1."""
        passed = sum(step > m for m in self.milestones)
        return self.lr * self.lr_decay ** max(step - 1, 0) * self.gamma**passed
