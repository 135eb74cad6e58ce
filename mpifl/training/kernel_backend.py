"""Training and evaluation of small networks with kernels in C, where they support the model and the data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch

from mpifl.core.client import Trained, TrainedVisits, WeightedLoss
from mpifl.core.federation import Split, StoredSamples
from mpifl.core.metric import least_finite
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part, bounds
from mpifl.core.rng import Key
from mpifl.kernels import bindings
from mpifl.kernels.network import Network, can_read, can_read_images, unpatched

from .augmentation import AUGMENTATIONS
from .backend import Backend, Request, VisitRequests, epoch_orders, permutations, sizes_of
from .config import LocalConfig
from .model_context import ModelContext
from .optimizer import adam
from .precision import FLOAT32


class _Adam:
    """Adam steps on slices of a flat vector; an `Update`.

    Args:
        config: gives the weight decay.
        lr: learning rate.
        size: length of the vector.
        kept: optimiser state to continue from and to update; None for a new optimiser.
    """

    def __init__(self, config: LocalConfig, lr: float, size: int, kept: KeptOptimizer | None = None) -> None:
        self.config, self.lr, self.kept = config, lr, kept
        self.first, self.second = torch.zeros(size, device="cpu"), torch.zeros(size, device="cpu")
        if kept is not None and kept.momentum is not None and kept.square is not None:
            self.first.copy_(kept.momentum)
            self.second.copy_(kept.square)

    def __call__(self, weights: torch.Tensor, gradient: torch.Tensor, part: slice, t: int) -> None:
        w, g, m, v = ([vector[part]] for vector in (weights, gradient, self.first, self.second))
        adam(w, g, m, v, self.config, self.lr, t)
        if self.kept is not None:
            self.kept.momentum, self.kept.square = self.first, self.second


class KernelBackend(Backend):
    """Trains dense layers, small convolutions, ReLU, pooling and dropout by SGD or Adam on cross-entropy.

    Args:
        context: the model, on the CPU. The kernels work on their own vectors and do not change it.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.networks: dict[Hashable, Network | None] = {}  # by shape of an image and part

    def accepts(self, request: Request) -> bool:
        """Return whether the kernels support the model, the loss, the kind of data and the number format."""
        split = request.split
        known = request.loss is None or self._weights(request) is not None
        known = known and request.config.precision == FLOAT32
        return known and can_read(split) and self._network(split.x, request.part) is not None

    def _weights(self, request: Request) -> torch.Tensor | None:
        """Return the weight [n] of each sample in a weighted loss of the task; None for any other loss."""
        loss = request.loss
        if type(loss) is not WeightedLoss or not loss.task.for_kernels:
            return None
        w = loss.weights
        fits = w.dtype == torch.float32 and w.device.type == "cpu" and w.shape == (len(request.split),)
        return w.detach().contiguous() if fits else None

    def train(self, request: Request) -> Trained:
        """Train in one kernel call per epoch, or one per step if there is a direction and for Adam."""
        config, split = request.config, request.split
        network = self._network(split.x, request.part, asked=True)
        assert network is not None
        orders = epoch_orders(len(split), config, request.key)
        lr = config.lr_at(request.step)
        rates = lr, config.momentum, config.weight_decay
        change = None
        if config.augment != "none":
            change = partial(_augmented, AUGMENTATIONS[config.augment], request.key)
        update = _Adam(config, lr, len(request.start), request.kept) if config.optimizer == "adam" else None
        if network.rates:
            self.context.seed(request.key.of("dropout"))
        made = network.train(
            request.start,
            split,
            orders,
            config.batch_size,
            rates,
            request.direction,
            change,
            update,
            request.kept,
            self._weights(request),
        )
        weights, steps, loss = made
        return request.outcome(weights, steps, loss)

    def train_visits(self, visits: VisitRequests) -> TrainedVisits | None:
        """Train visits in one call; return None where the kernels cannot, or if weights are not finite."""
        config, samples, sizes = visits.config, visits.samples, sizes_of(visits.samples)
        if config.optimizer != "sgd" or config.augment != "none" or config.precision != FLOAT32:
            return None
        network = self._network_of(samples)
        if network is None or network.rates:
            return None
        taken = np.array([config.num_trained(n) for n in sizes.tolist()], np.int64)
        epochs = -(-taken // np.maximum(sizes, 1))
        numbers = (visits.client.tolist(), visits.visit.tolist(), epochs.tolist())
        addresses = ((k, v, "epoch", i) for k, v, most in zip(*numbers, strict=True) for i in range(most))
        order = permutations(visits.key.entropies(addresses), np.repeat(sizes, epochs))
        drawn = sizes * epochs
        if isinstance(samples, StoredSamples):
            order = samples.index[np.repeat(np.cumsum(sizes) - sizes, drawn) + order]
        lengths = np.cumsum(drawn) - drawn, taken, np.maximum(sizes, 1)
        rates = config.lr_at(visits.step), config.momentum, config.weight_decay
        try:
            loss, max_abs = network.train_visits(
                visits.starts,
                visits.out,
                samples,
                order,
                lengths,
                config.batch_size,
                rates,
                visits.mu,
                visits.change,
            )
        except IndexError:  # a label is not a class: training one visit at a time reports which
            return None
        return TrainedVisits(sizes, loss, max_abs) if np.isfinite(max_abs).all() else None

    def best_models(
        self, samples: StoredSamples | Sequence[Split], models: Sequence[torch.Tensor]
    ) -> np.ndarray | None:
        """Return the model of each visit with the lowest mean loss, int64 [m]; None where PyTorch must do it.

        Args:
            samples: the training samples: where all of them are stored, or one split for each visit.
            models: models of each visit [K, d].
        """
        sizes, several = sizes_of(samples), {len(some) for some in models}
        network = self._network_of(samples)
        if network is None or len(several) != 1 or not sizes.all():
            return None
        if isinstance(samples, StoredSamples):
            order, labels = samples.index, torch.from_numpy(samples.labels[samples.index])
        else:
            order = np.concatenate([np.arange(n) for n in sizes.tolist()])
            labels = torch.cat([split.y for split in samples])
        try:
            logits = network.visit_outputs(models, samples, order, sizes)
        except IndexError:  # a label is not a class
            return None
        num_models = several.pop()
        losses = self.context.task.losses(logits.flatten(0, 1), labels.repeat(num_models)).double()
        # one sum per visit, as when visits are evaluated alone; a mean would take twice as long
        sums = [part.sum().item() for part in losses.split(sizes.tolist() * num_models)]
        return np.asarray(least_finite(np.array(sums).reshape(num_models, -1) / sizes, 0))

    def outputs(
        self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False, train_mode: bool = False
    ) -> torch.Tensor | None:
        """Return the logits [n, L] or embeddings [n, e] of images `x`; None where PyTorch must do it."""
        network = self._network(x) if can_read_images(x) else None
        if network is None or (embedding and not network.embeds) or (train_mode and network.rates):
            return None
        return network.outputs(vector, x, embedding)

    def mean_gradient(self, vector: torch.Tensor, split: Split, batch_size: int) -> torch.Tensor | None:
        """Return the gradient [p] of the mean cross-entropy; None where PyTorch must do it."""
        network = self._network(split.x) if can_read(split) else None
        return None if network is None else network.mean_gradient(vector, split, batch_size)

    def _network_of(self, samples: StoredSamples | Sequence[Split]) -> Network | None:
        """Return the network for the samples of several visits; None where the kernels cannot read them."""
        if isinstance(samples, StoredSamples):
            return self._network(torch.empty(0, *samples.inputs.shape[1:]))
        shapes = {tuple(s.x.shape[1:]) for s in samples}
        known = len(shapes) == 1 and all(map(can_read, samples))
        return self._network(torch.empty(0, *shapes.pop())) if known else None

    def _network(self, x: torch.Tensor, part: Part | None = None, asked: bool = False) -> Network | None:
        """Return the model as a network of the kernels, for images like `x`; None if they do not support it.

        Args:
            x: images.
            part: the part that is trained.
            asked: skip the check that the model has no hooks and no patched methods; `accepts` made it.
        """
        if not asked and not (bindings.TRAINING_AVAILABLE and self.context.untouched() and unpatched()):
            return None
        shape = tuple(x.shape[1:])
        address = shape, bounds(part)
        if address not in self.networks:
            context = self.context
            self.networks[address] = Network.of(context.flat.module, context.layout, shape, part)
        return self.networks[address]


def _augmented(
    augment: Callable[[torch.Tensor, Key], torch.Tensor], key: Key, x: torch.Tensor, step: int
) -> torch.Tensor:
    """Return the images of a step, augmented as in the PyTorch loop under the same key."""
    return augment(x, key.of("augment", step))
