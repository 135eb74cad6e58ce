"""Small feed-forward networks trained by the C kernels (training.c).

Most of a PyTorch step on a network of ten thousand weights is call overhead; here a whole epoch is one call.
The arithmetic is float32 as in PyTorch but sums in another order: the last bits differ from PyTorch's, and
are the same on every processor that the kernels support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import nn

from mpifl.core.client import Direction
from mpifl.core.federation import Split, StoredSamples
from mpifl.core.module_checks import untouched
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Layout, Part

from . import bindings
from .bindings import (
    AVG_POOL,
    CONV,
    DENSE,
    DROPOUT,
    FLATTEN,
    LAYER,
    MAX_POOL,
    RELU,
    RELU_AVG_POOL,
    Layer,
    Sgd,
)
from .pooling import AvgPool, MaxPool, declares_sequence, plain

POOLS = {nn.MaxPool2d: MAX_POOL, MaxPool: MAX_POOL, nn.AvgPool2d: AVG_POOL, AvgPool: AVG_POOL}
DROPOUTS = {nn.Dropout: 1, nn.Dropout2d: 3}  # and the dimensions of a sample that they are known for
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
        rates: of the layers of dropout, in order.
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
        dropout, without hooks, methods of their own, buffers or shared weights.

        Args:
            module: the model.
            layout: where its parameters lie in the flat vector.
            shape: of one sample.
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
        """Train; return the new parameters [p], the number of steps, and the mean loss.

        What dropout draws comes from PyTorch's default generator, as it does in PyTorch's layers.

        Args:
            start: parameters [p].
            split: the samples.
            orders: indices of the samples of each epoch, int64 [n].
            batch: samples per step.
            sgd: learning rate, momentum, weight decay.
            direction: replaces the gradient of each step; None leaves it as it is.
            change: replaces the images of each step (augmentation); None leaves them as they are.
            update: moves the weights in each step (Adam); None: SGD.
            kept: an optimiser that goes on; its steps are counted, and of SGD the momentum is kept. None for
                a new one.
            sample_weights: factor of each sample's loss, float32 [n]; None for 1.

        Raises:
            IndexError: a label is no class.
            ValueError: `start`, or what `direction` returns, has another length than p.
        """
        weights, steps, total = self._float32(start).clone(), 0, 0.0
        batch = min(batch, max(len(split), 1))
        workspace = self._workspace_for(batch)
        by_steps = direction is not None or update is not None
        gradient = self.gradient.zero_() if by_steps else None
        pieces = list(_batches(orders, batch) if by_steps else orders)
        before = 0 if kept is None else kept.steps
        if update is None and kept is not None:
            if kept.momentum is None:  # what does not move is kept, too: nothing of other clients
                self.momentum.zero_()
            else:
                self.momentum.copy_(kept.momentum)
        for i, index in enumerate(pieces):
            factors = sample_weights
            if factors is not None and change is not None:
                factors = factors[torch.from_numpy(index)]
            samples, index = _changed(split, index, batch, steps, change)
            total += bindings.train(
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
            if by_steps:
                made = self.gradient if direction is None else direction(self.gradient, weights)
                changed = self._float32(made)
                for s in self.part:
                    if update is None:
                        bindings.sgd_step(weights[s], self.momentum[s], changed[s], sgd, before + steps)
                    else:
                        update(weights, changed, s, before + steps + 1)
            steps += -(-len(index) // batch)
        if kept is not None and steps:
            kept.steps = before + steps
            if update is None:
                kept.momentum = self.momentum.clone()
        return weights, steps, total / steps if steps else 0.0

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
            starts: parameters [p] that each starts from.
            out: float32 [p] each, contiguous; the trained parameters are written there, or their change.
            samples: where those of all are stored, or those of each.
            order: the samples that are taken, visit after visit, numbered as in `samples`, int64 [n].
            lengths: of each visit, int64 [m]: its first place in `order`, how many it takes, and how many of
                them are an epoch.
            batch: samples per step.
            sgd: learning rate, momentum, weight decay.
            mu: weight of a proximal term mu/2 ||w - start||^2; None for none.
            change: write how far the parameters moved.

        Raises:
            IndexError: a label is no class.
            ValueError: a vector has another length than p, or is not contiguous float32 on the CPU.
        """
        visits, table = _visits(samples, len(out))
        vectors = {id(v): self._float32(v) for v in starts}  # equal ones are few
        addresses = {number: v.data_ptr() for number, v in vectors.items()}
        visits["start"] = [addresses[id(v)] for v in starts]
        if any(v.shape != (self.num_weights,) or v.dtype != torch.float32 for v in out):
            raise ValueError(f"what is trained needs vectors of {self.num_weights} float32 numbers")
        visits["weights"] = [v.data_ptr() for v in out]
        visits["first"], visits["count"], visits["epoch"] = lengths
        size = min(batch, max(int(visits["epoch"].max(initial=1)), 1))
        bindings.train_visits(
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
            models: parameters [K, p] for each visit; all have as many.
            samples: where those of all are stored, or those of each.
            order: the samples of one visit after the other, numbered as in `samples`, int64 [n].
            sizes: samples of each visit, int64 [m].

        Raises:
            IndexError: a label is no class.
            ValueError: models have another length than p.
        """
        visits, table = _visits(samples, len(models))
        visits["first"], visits["count"] = np.cumsum(sizes) - sizes, sizes
        distinct = {id(some): some for some in models}  # equal ones are few
        rows = {number: [self._float32(w) for w in some] for number, some in distinct.items()}
        addresses = {number: [w.data_ptr() for w in some] for number, some in rows.items()}
        numbers = np.array([addresses[id(some)] for some in models], np.int64)
        shape = numbers.shape[1], len(order), int(self.layers[-1]["out_channels"])
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        batch = min(EVAL_BATCH, max(int(sizes.max(initial=1)), 1))
        workspace = self._workspace_for(batch)
        bindings.visit_outputs(self.layers, visits, numbers, table, order, batch, out, workspace)
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
        return bindings.forward(layers, self._float32(vector), x, out, batch, self._workspace_for(batch))

    def mean_gradient(self, vector: torch.Tensor, split: Split, batch: int) -> torch.Tensor:
        """Return the gradient [p] of the mean cross-entropy over `split`, `batch` samples at a time."""
        total, vector = _zeros(self.num_weights), self._float32(vector)
        for index in _batches([np.arange(len(split))], batch):
            bindings.train(
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
        """Return the factors of dropout for `count` samples, `batch` at a time; None where nothing drops."""
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
            ValueError: it has another length.
        """
        if vector.shape != (self.num_weights,):
            raise ValueError(f"expected {self.num_weights} numbers, got a tensor of {list(vector.shape)}")
        return vector.to(torch.float32).contiguous()

    def _workspace_for(self, batch: int) -> torch.Tensor:
        if batch > self._max_batch:
            self._max_batch, self._workspace = batch, _zeros(bindings.workspace_size(self.layers, batch))
        return self._workspace


def _visits(samples: StoredSamples | Sequence[Split], count: int) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return `bindings.VISIT` [count] that say where samples are, and the table of stored pixels.

    Args:
        samples: where those of all visits are stored, or those of each.
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
    """Return images and labels, and which of them are taken: `split` and `index`, or changed copies.

    Args:
        split: the samples.
        index: which of them are taken, int64 [n].
        batch: samples per step.
        steps: taken before.
        change: changes the images of a step; None leaves `split` as it is.
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
    """Return where weight and bias of each module begin in the flat vector, and whether `part` has them.

    None if `part` has only some parameters of a module.
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
    """Return the array of `bindings.LAYER`; None if a module is unknown or has weights and occurs twice."""
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
    """Return layers in which a mean contains the ReLU before it (`pooling` has put ReLU behind maxima)."""
    out: list[Layer] = []
    for layer in layers:
        if layer.kind == AVG_POOL and out and out[-1].kind == RELU:
            out[-1] = layer._replace(kind=RELU_AVG_POOL)
        else:
            out.append(layer)
    return out


def _layer(module: nn.Module, offsets: Offsets | None, shape: Shape) -> Layer | None:
    """Return the layer of a module for inputs of `shape`; None if it is unknown."""
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
    """Return whether the kernels know this dropout for inputs of `shape`."""
    return DROPOUTS.get(type(module)) == len(shape) and module.p < 1


def _small(module: nn.Conv2d, shape: Shape) -> bool:
    """Return whether the kernels can compute a convolution, faster than PyTorch."""
    kernel, padding = module.kernel_size[0], module.padding[0]
    square = module.kernel_size[1] == kernel and module.padding in ((padding, padding),)
    usual = (
        module.stride == module.dilation == (1, 1) and module.groups == 1 and module.padding_mode == "zeros"
    )
    if not (square and usual and isinstance(padding, int) and padding < kernel <= MAX_KERNEL):
        return False
    fits = shape[0] == module.in_channels and min(shape[1:]) + 2 * padding >= kernel
    strips = module.in_channels % bindings.STRIP == module.out_channels % bindings.STRIP == 0
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
