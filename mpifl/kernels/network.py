"""Small feed-forward networks trained by the C kernels (training.c).

Most of a PyTorch step on a network of ten thousand weights is call overhead; here a whole epoch is one call.
The arithmetic is float32 as in PyTorch, but sums are added in another order: the last bits differ from
PyTorch's. They are the same on every processor that the kernels support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan, prod

import numpy as np
import torch
from torch import nn

from mpifl.core.client import Direction
from mpifl.core.federation import Split, StoredSamples
from mpifl.core.module_checks import untouched
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Layout, Part

from . import bindings, convolutions, training_calls
from .bindings import LAYER, Layer
from .pooling import AvgPool, MaxPool, declares_sequence, plain
from .training_calls import AVG_POOL, CONV, DENSE, DROPOUT, FLATTEN, MAX_POOL, RELU, RELU_AVG_POOL, Sgd

POOLS = {nn.MaxPool2d: MAX_POOL, MaxPool: MAX_POOL, nn.AvgPool2d: AVG_POOL, AvgPool: AVG_POOL}
DROPOUTS = {nn.Dropout: 1, nn.Dropout2d: 3}  # -> dimensions of a sample for which it is supported
MAX_LAYERS, MAX_KERNEL = 64, 12  # limits of training.c
MAX_CHANNEL_PRODUCT = 2048  # input times output channels of a convolution; beyond, PyTorch is faster
EVAL_BATCH = 64  # samples; their activations fit in the L2 cache
KNOWN: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.Linear, nn.Conv2d, nn.ReLU, nn.Flatten),
    *POOLS,
    *DROPOUTS,
)
FORWARDS = [(cls, cls.forward) for cls in KNOWN]
Shape = tuple[int, ...]
Change = Callable[[torch.Tensor, int], torch.Tensor]  # (images of a step, steps before) -> images
Update = Callable[[torch.Tensor, torch.Tensor, slice, int], None]  # (weights, gradient, moving, step from 1)
Offsets = tuple[int, int, int]  # weight_offset, bias_offset, trainable


class Network:
    """A network in the form that the kernels train.

    Args:
        layers: array of `bindings.LAYER` [layers].
        num_weights: p, the length of the flat parameter vector.
        part: the slices that are trained.
        embeds: whether the input of the last layer is the embedding.
        rates: rates of the dropout layers, in order.
    """

    def __init__(
        self, layers: np.ndarray, num_weights: int, part: Part, embeds: bool, rates: Sequence[float] = ()
    ) -> None:
        self.rates = tuple(rates)
        self.layers, self.num_weights, self.part = layers, num_weights, part
        self.embeds = embeds and len(layers) > 1
        self.momentum, self.gradient = _zeros(num_weights), _zeros(num_weights)
        self._workspace, self._max_batch = _zeros(0), 0

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, shape: Shape, part: Part | None = None) -> Network | None:
        """Return the network of a module, or None if the kernels cannot train it.

        The kernels train sequences of dense layers, small convolutions, ReLU, flattening, 2x2 pooling and
        dropout, without hooks, methods set on an instance, buffers or shared weights.

        Args:
            module: the model.
            layout: where its parameters lie in the flat vector.
            shape: shape of one sample.
            part: the slices to train, made of whole layers; None for all.
        """
        modules, part = list(_in_order(module)), (slice(0, layout.size),) if part is None else part
        if not (_only_weights(module, modules, layout) and untouched(module) and unpatched()):
            return None
        offsets = _offsets(module, layout, part)
        layers = None if offsets is None else _layers(modules, offsets, shape)
        if layers is None or not layers["trainable"].any():
            return None
        embeds = declares_sequence(module) and type(getattr(module, "head", None)) is nn.Linear
        rates = [m.p for m in modules if isinstance(m, nn.Dropout | nn.Dropout2d) and m.p]
        return cls(layers, layout.num_parameters, part, embeds, rates)

    def train(
        self,
        start: torch.Tensor,
        split: Split,
        orders: Iterable[np.ndarray],
        batch: int,
        sgd: Sgd,
        direction: Direction | None,
        change: Change | None = None,
        update: Update | None = None,
        kept: KeptOptimizer | None = None,
        sample_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int, float]:
        """Train; return the new parameters [p], the number of steps, and the mean loss (NaN without a step).

        Dropout draws from PyTorch's default generator, as PyTorch's layers do.

        Args:
            start: parameters [p].
            split: the samples.
            orders: indices of the samples of each epoch, int64 [n].
            batch: samples per step.
            sgd: learning rate, momentum, weight decay.
            direction: replaces the gradient of each step; None leaves it unchanged.
            change: replaces the images of each step (augmentation); None leaves them unchanged.
            update: updates the weights in each step (Adam); None for SGD.
            kept: optimiser state to continue from; its number of steps and, with SGD, its momentum are
                updated. None for a new optimiser.
            sample_weights: factor of each sample's loss, float32 [n]; None for 1.

        Raises:
            IndexError: a label is not a class.
            ValueError: `start`, or the result of `direction`, does not have length p.
        """
        weights, steps, total = self._float32(start).clone(), 0, 0.0
        trained = 0  # samples
        batch = min(batch, max(len(split), 1))
        workspace = self._workspace_for(batch)
        by_steps = direction is not None or update is not None
        gradient = self.gradient.zero_() if by_steps else None
        pieces = list(_batches(orders, batch) if by_steps else orders)
        unit = min(batch, len(pieces[0])) if pieces else 0  # samples of the first batch
        before = 0 if kept is None else kept.steps
        if update is None and kept is not None:
            if kept.momentum is None:  # frozen entries are kept, too: no other client's numbers
                self.momentum.zero_()
            else:
                self.momentum.copy_(kept.momentum)
        for i, index in enumerate(pieces):
            factors = sample_weights
            if factors is not None and change is not None:
                factors = factors[torch.from_numpy(index)]
            samples, index = _changed(split, index, batch, steps, change)
            value = training_calls.train(
                self.layers,
                weights,
                self.momentum,
                gradient,
                samples,
                index,
                batch,
                sgd,
                steps_done=before + steps,
                last=kept is None and i == len(pieces) - 1,
                workspace=workspace,
                sample_weights=factors,
                factors=self._drawn(len(index), batch),
            )
            total += value * (len(index) / unit) if by_steps else value
            trained += len(index)
            if by_steps:
                made = self.gradient if direction is None else direction(self.gradient, weights)
                changed = self._float32(made)
                for s in self.part:
                    if update is None:
                        training_calls.sgd_step(weights[s], self.momentum[s], changed[s], sgd, before + steps)
                    else:
                        update(weights, changed, s, before + steps + 1)
            steps += -(-len(index) // batch)
        if kept is not None and steps:
            kept.steps = before + steps
            if update is None:
                kept.momentum = self.momentum.clone()
        return weights, steps, total / (trained / unit) if steps else nan

    def train_visits(
        self,
        starts: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        samples: StoredSamples | Sequence[Split],
        order: np.ndarray,
        lengths: tuple[np.ndarray, np.ndarray, np.ndarray],
        batch: int,
        sgd: Sgd,
        mu: float | None = None,
        change: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Train visits one after the other; return mean losses and largest absolute values, float64 [m].

        Args:
            starts: initial parameters [p] of each visit.
            out: receives the trained parameters of each visit, or their change; float32 [p] each. They must
                be contiguous and on the CPU, which is not checked.
            samples: the stored samples of all visits, or the samples of each visit.
            order: indices into `samples` of the samples to train on, visit after visit, int64 [n].
            lengths: for each visit its first position in `order`, its number of samples, and how many of them
                make an epoch, int64 [m] each.
            batch: samples per step.
            sgd: learning rate, momentum, weight decay.
            mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
            change: whether to write w - start instead of the parameters w.

        Raises:
            IndexError: a label is not a class.
            ValueError: a vector does not have length p, or one of `out` is not float32.
        """
        visits, table = _visits(samples, len(out))
        vectors = {id(v): self._float32(v) for v in starts}  # few are distinct
        addresses = {number: v.data_ptr() for number, v in vectors.items()}
        visits["start"] = [addresses[id(v)] for v in starts]
        if any(v.shape != (self.num_weights,) or v.dtype != torch.float32 for v in out):
            raise ValueError(f"what is trained needs vectors of {self.num_weights} float32 numbers")
        visits["weights"] = [v.data_ptr() for v in out]
        visits["first"], visits["count"], visits["epoch"] = lengths
        size = min(batch, max(int(visits["epoch"].max(initial=1)), 1))
        training_calls.train_visits(
            self.layers,
            visits,
            self.num_weights,
            table,
            order,
            size,
            sgd,
            self.momentum,
            self._workspace_for(size),
            mu,
            change,
        )
        return visits["loss"], visits["max_abs"]

    def visit_outputs(
        self,
        models: Sequence[torch.Tensor],
        samples: StoredSamples | Sequence[Split],
        order: np.ndarray,
        sizes: np.ndarray,
    ) -> torch.Tensor:
        """Return the logits [K, n, L] of several models for the samples of some visits.

        Args:
            models: parameters [K, p] for each visit, with the same K for all.
            samples: the stored samples of all visits, or the samples of each visit.
            order: indices into `samples`, visit after visit, int64 [n].
            sizes: number of samples of each visit, int64 [m].

        Raises:
            IndexError: a label is not a class.
            ValueError: a model does not have length p.
        """
        visits, table = _visits(samples, len(models))
        visits["first"], visits["count"] = np.cumsum(sizes) - sizes, sizes
        distinct = {id(some): some for some in models}  # few are distinct
        rows = {number: [self._float32(w) for w in some] for number, some in distinct.items()}
        addresses = {number: [w.data_ptr() for w in some] for number, some in rows.items()}
        numbers = np.array([addresses[id(some)] for some in models], np.int64)
        shape = numbers.shape[1], len(order), int(self.layers[-1]["out_channels"])
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        batch = min(EVAL_BATCH, max(int(sizes.max(initial=1)), 1))
        workspace = self._workspace_for(batch)
        training_calls.visit_outputs(self.layers, visits, numbers, table, order, batch, out, workspace)
        return out

    def outputs(self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False) -> torch.Tensor:
        """Return the logits [n, L], or the input of the last layer [n, e].

        Args:
            vector: parameters [p].
            x: float32 [n, ...].
            embedding: whether to leave out the last layer.
        """
        layers = self.layers[:-1] if embedding else self.layers
        width = int(self.layers[-1]["in_channels" if embedding else "out_channels"])
        batch = min(EVAL_BATCH, max(len(x), 1))
        out = torch.empty(len(x), width, dtype=torch.float32)
        return training_calls.forward(
            layers, self._float32(vector), x, out, batch, self._workspace_for(batch)
        )

    def mean_gradient(self, vector: torch.Tensor, split: Split, batch: int) -> torch.Tensor:
        """Return the gradient [p] of the mean cross-entropy over `split`, `batch` samples at a time."""
        total, vector = _zeros(self.num_weights), self._float32(vector)
        for index in _batches([np.arange(len(split))], batch):
            training_calls.train(
                self.layers,
                vector,
                self.momentum,
                self.gradient,
                (split.x, split.y),
                index,
                len(index),
                (0.0, 0.0, 0.0),
                steps_done=0,
                last=True,
                workspace=self._workspace_for(len(index)),
            )
            total.add_(self.gradient, alpha=len(index) / len(split))
        return total

    def _drawn(self, count: int, batch: int) -> torch.Tensor | None:
        """Return the factors of dropout for `count` samples, `batch` at a time; None without dropout."""
        if not self.rates:
            return None
        widths = self.layers["out_channels"][self.layers["kind"] == DROPOUT].tolist()
        out, start = torch.empty(count * sum(widths), dtype=torch.float32, device="cpu"), 0
        for first in range(0, count, batch):
            for width, rate in zip(widths, self.rates, strict=True):
                size = width * min(batch, count - first)
                out[start : start + size].bernoulli_(1 - rate).div_(1 - rate)
                start += size
        return out

    def _float32(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a vector [p] as contiguous float32.

        Raises:
            ValueError: it does not have length p.
        """
        if vector.shape != (self.num_weights,):
            raise ValueError(f"expected {self.num_weights} numbers, got a tensor of {list(vector.shape)}")
        return vector.to(torch.float32).contiguous()

    def _workspace_for(self, batch: int) -> torch.Tensor:
        if batch > self._max_batch:
            self._max_batch, self._workspace = (
                batch,
                _zeros(training_calls.workspace_size(self.layers, batch)),
            )
        return self._workspace


def _visits(samples: StoredSamples | Sequence[Split], count: int) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return `bindings.VISIT` [count] with the addresses of the samples, and the table of pixels or None.

    Args:
        samples: the stored samples of all visits, or the samples of each visit.
        count: number of visits.
    """
    visits = np.zeros(count, bindings.VISIT)
    if isinstance(samples, StoredSamples):
        visits["x"], visits["labels"] = samples.inputs.ctypes.data, samples.labels.ctypes.data
        visits["samples"] = len(samples.labels)
        return visits, samples.table
    for field, values in (("x", [s.x for s in samples]), ("labels", [s.y for s in samples])):
        visits[field] = [v.data_ptr() for v in values]
    visits["samples"] = [len(s) for s in samples]
    return visits, None


def can_read(split: Split) -> bool:
    """Return whether the kernels can read samples: contiguous float32 images and int64 labels on the CPU."""
    y = split.y
    return (
        can_read_images(split.x) and y.dtype == torch.int64 and y.device.type == "cpu" and y.is_contiguous()
    )


def can_read_images(x: torch.Tensor) -> bool:
    """Return whether the kernels can read images: contiguous float32 on the CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def unpatched() -> bool:
    """Return whether the `forward` methods of the known layer classes are the original ones."""
    return all(cls.forward is forward for cls, forward in FORWARDS)


def _zeros(size: int) -> torch.Tensor:
    """Return float32 zeros on the CPU, whatever PyTorch's defaults are."""
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _changed(
    split: Split, index: np.ndarray, batch: int, steps: int, change: Change | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], np.ndarray]:
    """Return images, labels and the indices to train on: those of `split` and `index`, or changed copies.

    Args:
        split: the samples.
        index: indices of the samples to train on, int64 [n].
        batch: samples per step.
        steps: number of earlier steps.
        change: changes the images of a step; None leaves `split` unchanged.
    """
    if change is None:
        return (split.x, split.y), index
    taken = torch.from_numpy(index)
    images = [change(split.x[part], steps + i) for i, part in enumerate(taken.split(batch))]
    return (torch.cat(images), split.y[taken]), np.arange(len(index))


def _batches(orders: Iterable[np.ndarray], batch: int) -> Iterator[np.ndarray]:
    """Yield the indices of each step."""
    for order in orders:
        yield from (order[i : i + batch] for i in range(0, len(order), batch))


# -- from modules to layers ----------------------------------------------------------------------------------


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are applied one after the other."""
    if type(module) is nn.Sequential:
        parts: Iterable[nn.Module] = module  # children() would list a module that occurs twice only once
    elif declares_sequence(module):
        parts = module.sequence  # type: ignore[assignment]
    else:
        yield module
        return
    for part in parts:
        yield from _in_order(part)


def _only_weights(module: nn.Module, modules: Sequence[nn.Module], layout: Layout) -> bool:
    """Return whether the flat vector holds the trainable parameters of these modules and nothing else."""
    tensors = list(module.parameters())
    plain = all(type(p) is nn.Parameter and p.requires_grad for p in tensors)
    inside = {id(p) for m in modules for p in m.parameters()} == {id(p) for p in tensors}
    whole = layout.size == layout.num_parameters == sum(p.numel() for p in tensors)
    return plain and inside and whole and not any(True for _ in module.buffers())


def _offsets(module: nn.Module, layout: Layout, part: Part) -> dict[nn.Module, Offsets] | None:
    """Return where weight and bias of each module begin in the flat vector, and whether they are in `part`.

    None if `part` contains only some parameters of a module.
    """
    slices, found = layout.slices, dict[nn.Module, Offsets]()
    for prefix, owner in module.named_modules():
        names = [f"{prefix}.{n}" if prefix else n for n in ("weight", "bias")]
        if all(n in slices for n in names):
            inside = [sum(_overlap(slices[n], s) for s in part) for n in names]
            if inside not in ([0, 0], [slices[n].stop - slices[n].start for n in names]):
                return None
            found[owner] = slices[names[0]].start, slices[names[1]].start, int(inside[0] > 0)
    return found


def _overlap(a: slice, b: slice) -> int:
    """Return how many elements two slices have in common."""
    return int(max(0, min(a.stop, b.stop) - max(a.start, b.start)))


def _layers(
    modules: list[nn.Module], offsets: Mapping[nn.Module, Offsets], shape: Shape
) -> np.ndarray | None:
    """Return the array of `bindings.LAYER`; None if the kernels do not support these modules.

    A module with weights must not occur twice.
    """
    layers: list[Layer] = []
    seen: set[nn.Module] = set()
    for module in modules:
        layer = _layer(module, offsets.get(module), shape)
        if layer is None or (module in seen and module in offsets):
            return None
        idle = (layer.kind == FLATTEN and len(shape) == 1) or (layer.kind == DROPOUT and not module.p)
        if not idle:
            layers.append(layer)
        seen.add(module)
        shape = _shape_after(layer, shape)
    if any(layer.kind == CONV for layer in layers):
        fits = layers[0].kind in (CONV, MAX_POOL, AVG_POOL)
    else:  # samples are rows from the start
        layers = [
            layer._replace(in_channels=prod(layer[1:4]), in_height=1, in_width=1)
            for layer in layers
            if layer.kind != FLATTEN
        ]
        fits = bool(layers) and layers[0].kind == DENSE
    known = fits and layers[-1].kind == DENSE and len(layers) <= MAX_LAYERS
    return np.array(_with_means(layers), LAYER) if known else None


def _with_means(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with each ReLU merged into the average pooling that follows it.

    With max pooling, `pooling` has already moved the ReLU behind it.
    """
    out: list[Layer] = []
    for layer in layers:
        if layer.kind == AVG_POOL and out and out[-1].kind == RELU:
            out[-1] = layer._replace(kind=RELU_AVG_POOL)
        else:
            out.append(layer)
    return out


def _layer(module: nn.Module, offsets: Offsets | None, shape: Shape) -> Layer | None:
    """Return the layer of a module for inputs of `shape`; None if the kernels do not support it."""
    channels, height, width = (*shape, 1, 1)[:3]
    image = channels, height, width
    if type(module) is nn.ReLU:
        return Layer(RELU, *image)
    if type(module) is nn.Flatten and shape and (module.start_dim, module.end_dim) == (1, -1):
        return Layer(FLATTEN, *image)
    if type(module) in POOLS and len(shape) == 3 and min(shape[1:]) > 1 and plain(module):
        return Layer(POOLS[type(module)], *image)
    if isinstance(module, nn.Dropout | nn.Dropout2d) and _drops(module, shape):
        return Layer(DROPOUT, *image, channels)
    if type(module) is nn.Linear and offsets and shape == (module.in_features,):
        return Layer(DENSE, *image, module.out_features, 1, 0, *offsets)
    if type(module) is nn.Conv2d and offsets and len(shape) == 3 and _small(module, shape):
        kernel, padding = module.kernel_size[0], int(module.padding[0])
        return Layer(CONV, *image, module.out_channels, kernel, padding, *offsets)
    return None


def _drops(module: nn.Dropout | nn.Dropout2d, shape: Shape) -> bool:
    """Return whether the kernels support this dropout for inputs of `shape`."""
    return DROPOUTS.get(type(module)) == len(shape) and module.p < 1


def _small(module: nn.Conv2d, shape: Shape) -> bool:
    """Return whether the kernels can compute a convolution and are faster than PyTorch."""
    kernel, padding = module.kernel_size[0], module.padding[0]
    square = module.kernel_size[1] == kernel and module.padding in ((padding, padding),)
    usual = (
        module.stride == module.dilation == (1, 1) and module.groups == 1 and module.padding_mode == "zeros"
    )
    if not (square and usual and isinstance(padding, int) and padding < kernel <= MAX_KERNEL):
        return False
    fits = shape[0] == module.in_channels and min(shape[1:]) + 2 * padding >= kernel
    strips = module.in_channels % convolutions.STRIP == module.out_channels % convolutions.STRIP == 0
    wide = kernel == 5 and strips  # faster in PyTorch's loop (wide_layers.py)
    return fits and not wide and module.in_channels * module.out_channels <= MAX_CHANNEL_PRODUCT


def _shape_after(layer: Layer, shape: Shape) -> Shape:
    """Return the shape of the output of a layer."""
    channels, height, width = layer.in_channels, layer.in_height, layer.in_width
    if layer.kind == CONV:
        growth = 2 * layer.padding - layer.kernel + 1
        return layer.out_channels, height + growth, width + growth
    if layer.kind in (MAX_POOL, AVG_POOL):
        return channels, height // 2, width // 2
    if layer.kind == FLATTEN:
        return (channels * height * width,)
    return (layer.out_channels,) if layer.kind == DENSE else shape
