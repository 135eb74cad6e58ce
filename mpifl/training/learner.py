"""The one training loop: mini-batches over flat buffers, the method's difference passed as a function.

A step is forward, gradient, update: no optimiser object, nothing that grows with the number of parameters but
the gradient itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from math import ceil

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mpifl.core.client import Direction, Loss, Trained
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.module_checks import Untouched
from mpifl.core.parameters import FlatModel, Part, bounds
from mpifl.core.rng import Key
from mpifl.kernels import bindings
from mpifl.kernels.network import Network, as_in_pytorch, takes, takes_images
from mpifl.kernels.pooling import use_fast_pooling

from .augmentation import AUGMENTATIONS
from .batched import RANDOM, LockstepRunner, Request
from .config import LocalConfig
from .cuda_graph import Replay
from .optimizer import Moving, Update


def cross_entropy(module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(module(x), y)


class Learner:
    """A model on a device, ready to train any client; one per rank.

    Args:
        compiled: train by loops in C what they know, where they were built.
    """

    def __init__(self, model: nn.Module, device: str | torch.device = "cpu", compiled: bool = True) -> None:
        self.device = torch.device(device)
        self.flat = FlatModel(use_fast_pooling(model), self.device)
        self.layout = self.flat.layout
        self.untouched = Untouched(self.flat.module)
        self.init = self.flat.vector.clone()  # the vector the model came with
        self.auxiliary: Learner | None = None  # of the network beside the model
        self.lockstep: LockstepRunner | None = (
            None  # where visits wait for each other, to be trained in a stack
        )
        self.dry_run = False  # a plan: no batch is ever handed out
        self.compiled = compiled
        self.graphs = False  # replay captured steps where nothing but the batch changes
        self.momentum = torch.zeros_like(self.flat.weights)
        self.square = torch.zeros_like(self.flat.weights)
        self._networks: dict[Hashable, Network | None] = {}  # by shape of images and part
        self._replays: dict[tuple[object, ...], Replay] = {}
        self._moving: dict[tuple[tuple[int, int], ...] | None, Moving] = {}
        self._norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        # such a mean weighs each batch by how many this rank has seen, of whichever clients
        remedy = "batch norm without momentum depends on which clients a rank trained before; give it one"
        require(all(m.momentum is not None for m in self._norms), "model", "batch norm", remedy)

    def moving(self, part: Part | None) -> Moving:
        """Return what moves when `part` is trained."""
        address = bounds(part)
        if address not in self._moving:
            self._moving[address] = Moving.of(self, part)
        return self._moving[address]

    def sgd(
        self,
        start: torch.Tensor,
        split: Split,
        config: LocalConfig,
        key: Key,
        *,
        step: int = 1,
        direction: Direction | None = None,
        loss: Loss | None = None,
        part: Part | None = None,
    ) -> Trained:
        """Train from `start` [d] on `split`; see `Client.sgd` for the arguments."""
        together = loss is None and self.lockstep is not None and self.lockstep.listening
        if together and self.untouched():
            assert self.lockstep is not None
            trained: Trained = self.lockstep.ask(Request(start, split, config, key, step, direction, part))
            return trained
        known = loss is None and config.optimizer == "sgd" and config.augment == "none" and takes(split)
        network = self._network(split.x, part) if known else None
        if network is not None:
            lr, batch = config.lr_at(step), config.batch_size
            rates = lr, config.momentum, config.weight_decay
            made = network.train(start, split, self._orders(split, config, key), batch, rates, direction)
            return Trained(*made, lr, config.momentum)
        return self._interpreted(start, split, config, key, step, direction, loss, part)

    def _interpreted(
        self,
        start: torch.Tensor,
        split: Split,
        config: LocalConfig,
        key: Key,
        step: int,
        direction: Direction | None,
        loss: Loss | None,
        part: Part | None,
    ) -> Trained:
        """Train by PyTorch; arguments as in `sgd`."""
        module = self.flat.load(start, train=True)
        plain = loss is None and direction is None
        loss, lr = loss or cross_entropy, config.lr_at(step)
        update = Update(self, config, lr, part, direction)
        total, augmented = torch.zeros((), device=self.device), config.augment != "none"
        self._seed(key.of("dropout"))
        with nullcontext() if part is None else _only(module, self.flat, part):
            replay = self._replay(start, split, config, part, lr) if plain and self.graphs else None
            for index in self.batches(split, config, key):
                if replay is not None and len(index) == config.batch_size:
                    replay(split, index)
                    update.steps += 1
                    continue
                x, y = split.x.index_select(0, index), split.y.index_select(0, index)
                if augmented:
                    x = AUGMENTATIONS[config.augment](x, key.of("augment", update.steps))
                value = loss(module, x, y, index)
                update(value)
                total += value.detach()
        if replay is not None:
            total += replay.total
        steps = update.steps
        mean = float(total) / steps if steps else 0.0
        momentum = config.momentum if config.optimizer == "sgd" else 0.0
        return Trained(self.flat.vector.clone(), steps, mean, lr, momentum)

    def outputs(self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False) -> torch.Tensor | None:
        """Return logits or embeddings of images by compiled loops; None where PyTorch makes them."""
        network = self._network(x) if takes_images(x) else None
        if network is None or (embedding and not network.embeds):
            return None
        return network.outputs(vector, x, embedding)

    def _network(self, x: torch.Tensor, part: Part | None = None) -> Network | None:
        """Return the model for such images as compiled loops take it; None where PyTorch does the work."""
        here = self.device.type == "cpu" and not self.dry_run and not self.graphs
        if not (
            here and self.compiled and bindings.TRAINING_AVAILABLE and self.untouched() and as_in_pytorch()
        ):
            return None
        shape = tuple(x.shape[1:])
        address = shape, bounds(part)
        if address not in self._networks:
            self._networks[address] = Network.of(self.flat.module, self.layout, shape, part)
        return self._networks[address]

    def _seed(self, key: Key) -> None:
        """Let what a model draws begin at `key`."""
        generator = torch.default_generator
        if self.device.type == "cuda":
            generator = torch.cuda.default_generators[self.device.index or 0]
        generator.manual_seed(key.entropy >> 65)

    def _replay(
        self, start: torch.Tensor, split: Split, config: LocalConfig, part: Part | None, lr: float
    ) -> Replay | None:
        """Return the captured step for these batches, made where it is new; None where no batch is full, or
        where more than the batch changes from step to step.
        """
        fits = config.optimizer == "sgd" and config.augment == "none" and len(split) >= config.batch_size
        if not fits or not self.untouched() or any(isinstance(m, RANDOM) for m in self.flat.module.modules()):
            return None
        shape = config.batch_size, *split.x.shape[1:]
        address = config.momentum, config.weight_decay, bounds(part), shape
        if address not in self._replays:
            self._replays[address] = Replay(self, config, part, split)
            self.flat.load(start)
        self._replays[address].begin(lr)
        return self._replays[address]

    def batches(self, split: Split, config: LocalConfig, key: Key) -> Iterator[torch.Tensor]:
        """Yield the index of each batch; a lone last sample is left out where batch norm could not take
        it.
        """
        if self.dry_run or min(len(split), config.batch_size) <= bool(self._norms):
            return
        epochs = count() if config.steps is not None else range(config.epochs)
        passes = (self._epoch(split, config, key.of("epoch", epoch)) for epoch in epochs)
        yield from islice(chain.from_iterable(passes), config.steps)

    @staticmethod
    def _orders(split: Split, config: LocalConfig, key: Key) -> Iterator[np.ndarray]:
        """Yield the samples of each pass in the order of `batches`; the last pass may be cut."""
        left = config.epochs * ceil(len(split) / config.batch_size)  # steps
        if config.steps is not None:
            left = config.steps if len(split) else 0
        for epoch in count():
            if left <= 0:
                return
            order = key.of("epoch", epoch).numpy().permutation(len(split))[: left * config.batch_size]
            left -= ceil(len(order) / config.batch_size)
            yield order

    def _epoch(self, split: Split, config: LocalConfig, key: Key) -> Iterator[torch.Tensor]:
        """Yield the batches of one pass."""
        order = torch.from_numpy(key.numpy().permutation(len(split))).to(self.device)
        for index in order.split(config.batch_size):
            if len(index) > 1 or not self._norms:
                yield index

    def gradient(self, vector: torch.Tensor, split: Split, batch_size: int = 256) -> torch.Tensor:
        """Return the gradient [p] of the mean cross-entropy over `split`, in evaluation mode."""
        network = self._network(split.x) if takes(split) else None
        if network is not None:
            return network.mean_gradient(vector, split, batch_size)
        module = self.flat.load(vector, train=False)
        self.flat.grad.zero_()
        for index in torch.arange(len(split), device=self.device).split(batch_size):
            loss = F.cross_entropy(module(split.x[index]), split.y[index], reduction="sum")
            (loss / len(split)).backward()
        return self.flat.grad.clone()


class _only:
    """While active, nothing outside `part` asks for a gradient, and frozen batch norms use their running
    means.
    """

    def __init__(self, module: nn.Module, flat: FlatModel, part: Part) -> None:
        self.frozen: list[nn.Parameter] = []
        slices = flat.layout.slices
        for prefix, owner in module.named_modules():
            names = [f"{prefix}.{n}" if prefix else n for n, _ in owner.named_parameters(recurse=False)]
            fixed = [n for n in names if not any(s.start <= slices[n].start < s.stop for s in part)]
            self.frozen += [p for n in fixed if (p := module.get_parameter(n)).requires_grad]
            if names and fixed == names:
                owner.eval()

    def __enter__(self) -> None:
        for p in self.frozen:
            p.requires_grad_(False)

    def __exit__(self, *_: object) -> None:
        for p in self.frozen:
            p.requires_grad_(True)
