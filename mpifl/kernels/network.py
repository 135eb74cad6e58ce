"""Small feed-forward networks, trained by loops in C without a call in between (kernels/training.c).

A step of PyTorch on a network of some ten thousand weights is mostly calls; here a whole epoch is one. The
arithmetic is float32 like PyTorch's, summed in another order: last bits differ, but they are the same on
every processor that has these loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import nn

from mpifl.core.client import Direction
from mpifl.core.federation import Split
from mpifl.core.module_checks import untouched
from mpifl.core.parameters import Layout, Part

from . import bindings
from .pooling import MaxPool, MeanPool, plain

CONV, RELU, MAX_POOL, MEAN_POOL, FLATTEN, DENSE = range(6)  # as in training.c
POOLS = {nn.MaxPool2d: MAX_POOL, MaxPool: MAX_POOL, nn.AvgPool2d: MEAN_POOL, MeanPool: MEAN_POOL}
MOST_LAYERS, WIDEST_KERNEL = 64, 12
EVAL_BATCH = 64  # samples; their activations stay in a core's second cache
LARGE = 2048  # input times output channels of a convolution from which PyTorch is quicker
NOWHERE = 0, 0, 0
KNOWN: tuple[type[nn.Module], ...] = nn.Sequential, nn.Linear, nn.Conv2d, nn.ReLU, nn.Flatten, *POOLS
FORWARDS = [(cls, cls.forward) for cls in KNOWN]
MOVES = 9  # column of the table: whether a layer is trained
Shape = tuple[int, ...]
Place = tuple[int, int, int]  # where weight and bias begin, and whether they are trained


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that are applied one after the other; whatever is no such sequence, as it is."""
    if type(module) is nn.Sequential:
        parts: Iterable[nn.Module] = module  # not its children: these leave out what is in it twice
    elif _names_its_parts(module):
        parts = module.sequence  # type: ignore[assignment]
    else:
        yield module
        return
    for part in parts:
        yield from _in_order(part)


def _names_its_parts(module: nn.Module) -> bool:
    """Return whether a module says itself, in `sequence`, what its `forward` applies one after the other.

    All three methods must stand in its own class (`models.net.Net`): a subclass may do something else.
    """
    return all(_written_in(type(module), name) for name in ("sequence", "embed", "forward"))


def _written_in(cls: type, name: str) -> bool:
    """Return whether a method or property is that of the class statement: not inherited, not set later."""
    method = vars(cls).get(name)
    method = method.fget if isinstance(method, property) else method
    found = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return found == (cls.__module__, f"{cls.__qualname__}.{name}")


def as_in_pytorch() -> bool:
    """Return whether the layers that the loops know are still PyTorch's own."""
    return all(cls.forward is forward for cls, forward in FORWARDS)


class Network:
    """A network as the loops take it.

    Args:
        table: its layers, int64 [layers, 10].
        num_weights: p.
        part: what is trained.
        embeds: whether the input of the last layer is the embedding.
    """

    def __init__(self, table: np.ndarray, num_weights: int, part: Part, embeds: bool) -> None:
        self.table, self.num_weights, self.part = table, num_weights, part
        self.embeds = embeds and len(table) > 1
        self.momentum, self.gradient = zeros(num_weights), zeros(num_weights)
        self._scratch, self._most = zeros(0), 0  # room to work in, and for how many samples

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, shape: Shape, part: Part | None = None) -> Network | None:
        """Return a module that maps images of `shape` as a network; None where it is not made of dense
        layers, small convolutions, ReLU and pooling of 2x2 windows, where it has more than these (hooks,
        methods of its own, buffers, shared weights), or where `part` divides a layer.
        """
        layers, part = list(_in_order(module)), (slice(0, layout.size),) if part is None else part
        if not (_only_weights(module, layers, layout) and untouched(module) and as_in_pytorch()):
            return None
        places = _places(module, layout, part)
        table = None if places is None else _table(layers, places, shape)
        if table is None or not table[:, MOVES].any():
            return None
        embeds = _names_its_parts(module) and type(getattr(module, "head", None)) is nn.Linear
        return cls(table, layout.num_parameters, part, embeds)

    def train(
        self,
        start: torch.Tensor,
        split: Split,
        orders: Iterable[np.ndarray],
        batch: int,
        rates: tuple[float, float, float],
        direction: Direction | None,
    ) -> tuple[torch.Tensor, int, float]:
        """Return what SGD makes of `start` [p], the steps taken, and the mean loss.

        Args:
            orders: the samples of each epoch in their order, int64 [n].
            batch: samples per step.
            rates: learning rate, momentum, weight decay.
            direction: changes the gradient before each step.

        Raises:
            IndexError: a label is no class.
        """
        weights, steps, total = self._read(start).clone(), 0, 0.0
        samples, numbers = (split.x, split.y), np.array(rates, np.float32)
        batch = min(batch, max(len(split), 1))
        scratch = self._room(batch)
        given = None if direction is None else self.gradient.zero_()
        parts = list(orders if direction is None else _batches(orders, batch))
        for i, index in enumerate(parts):
            progress = numbers, steps, i == len(parts) - 1
            total += bindings.train(
                self.table, weights, self.momentum, given, samples, index, batch, *progress, scratch
            )
            if direction is not None:
                changed = self._read(direction(self.gradient, weights))
                for s in self.part:
                    bindings.move(weights[s], self.momentum[s], changed[s], numbers, steps)
            steps += -(-len(index) // batch)
        return weights, steps, total / steps if steps else 0.0

    def outputs(self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False) -> torch.Tensor:
        """Return the logits [n, L] of images, or what the last layer makes them of [n, e]."""
        table = self.table[:-1] if embedding else self.table
        width = int(self.table[-1, 1 if embedding else 4])
        batch = min(EVAL_BATCH, max(len(x), 1))
        out = torch.empty(len(x), width, dtype=torch.float32)
        return bindings.forward(table, self._read(vector), x, out, batch, self._room(batch))

    def mean_gradient(self, vector: torch.Tensor, split: Split, batch: int) -> torch.Tensor:
        """Return the gradient [p] of the mean cross-entropy over `split`, taken `batch` samples at a time."""
        total, nothing = zeros(self.num_weights), np.zeros(3, np.float32)
        vector = self._read(vector)
        for index in _batches([np.arange(len(split))], batch):
            progress = nothing, 0, True, self._room(len(index))
            bindings.train(
                self.table,
                vector,
                self.momentum,
                self.gradient,
                (split.x, split.y),
                index,
                len(index),
                *progress,
            )
            total.add_(self.gradient, alpha=len(index) / len(split))
        return total

    def _read(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a vector [p] as the loops read it.

        Raises:
            ValueError: it has another length.
        """
        if vector.shape != (self.num_weights,):
            raise ValueError(f"expected {self.num_weights} numbers, got a tensor of {list(vector.shape)}")
        return vector.to(torch.float32).contiguous()

    def _room(self, batch: int) -> torch.Tensor:
        if batch > self._most:
            self._most, self._scratch = batch, zeros(bindings.room(self.table, batch))
        return self._scratch


def zeros(size: int) -> torch.Tensor:
    """Return numbers as the loops take them, whatever PyTorch's default kind is."""
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _only_weights(module: nn.Module, layers: Sequence[nn.Module], layout: Layout) -> bool:
    """Return whether the vector holds the trained parameters of these layers and nothing else."""
    tensors = list(module.parameters())
    plain = all(type(p) is nn.Parameter and p.requires_grad for p in tensors)
    inside = {id(p) for layer in layers for p in layer.parameters()} == {id(p) for p in tensors}
    whole = layout.size == layout.num_parameters == sum(p.numel() for p in tensors)
    return plain and inside and whole and not any(True for _ in module.buffers())


def _batches(orders: Iterable[np.ndarray], batch: int) -> Iterator[np.ndarray]:
    """Yield the samples of each step."""
    for order in orders:
        yield from (order[i : i + batch] for i in range(0, len(order), batch))


def takes(split: Split) -> bool:
    """Return whether samples lie as the loops read them."""
    y = split.y
    return takes_images(split.x) and y.dtype == torch.int64 and y.device.type == "cpu" and y.is_contiguous()


def takes_images(x: torch.Tensor) -> bool:
    """Return whether images lie as the loops read them."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def _places(module: nn.Module, layout: Layout, part: Part) -> dict[nn.Module, Place] | None:
    """Return where weight and bias of each layer begin in the flat vector, and whether they are in `part`.

    None where a layer is in it only in parts.
    """
    slices, found = layout.slices, dict[nn.Module, Place]()
    for prefix, owner in module.named_modules():
        names = [f"{prefix}.{n}" if prefix else n for n in ("weight", "bias")]
        if all(n in slices for n in names):
            inside = [sum(_shared(slices[n], s) for s in part) for n in names]
            if inside not in ([0, 0], [slices[n].stop - slices[n].start for n in names]):
                return None
            found[owner] = slices[names[0]].start, slices[names[1]].start, int(inside[0] > 0)
    return found


def _shared(a: slice, b: slice) -> int:
    """Return how many numbers two slices share."""
    return int(max(0, min(a.stop, b.stop) - max(a.start, b.start)))


def _table(layers: list[nn.Module], places: Mapping[nn.Module, Place], shape: Shape) -> np.ndarray | None:
    """Return the layers, one a row; None where one of them is not known here."""
    rows: list[tuple[int, ...]] = []
    seen: set[nn.Module] = set()
    for layer in layers:
        row = _row(layer, places.get(layer), shape)
        if row is None or (layer in seen and layer in places):
            return None
        if row[0] != FLATTEN or len(shape) > 1:  # what is flat stays as it is
            rows.append(row)
        seen.add(layer)
        shape = _shape_after(row, shape)
    if any(r[0] == CONV for r in rows):
        fits = rows[0][0] in (CONV, MAX_POOL, MEAN_POOL)
    else:
        rows = [(*r[:1], prod(r[1:4]), 1, 1, *r[4:]) for r in rows if r[0] != FLATTEN]
        fits = bool(rows) and rows[0][0] == DENSE
    known = fits and rows[-1][0] == DENSE and len(rows) <= MOST_LAYERS
    return np.array(rows, np.int64) if known else None


def _row(layer: nn.Module, place: Place | None, shape: Shape) -> tuple[int, ...] | None:
    """Return kind, input shape, outputs, kernel, margin and place of a layer; None where it is unknown."""
    image = (*shape, 1, 1)[:3]
    if type(layer) is nn.ReLU:
        return (RELU, *image, 0, 1, 0, *NOWHERE)
    if type(layer) is nn.Flatten and shape and (layer.start_dim, layer.end_dim) == (1, -1):
        return (FLATTEN, *image, 0, 1, 0, *NOWHERE)
    if type(layer) in POOLS and len(shape) == 3 and min(shape[1:]) > 1 and plain(layer):
        return (POOLS[type(layer)], *image, 0, 1, 0, *NOWHERE)
    if type(layer) is nn.Linear and place and shape == (layer.in_features,):
        return (DENSE, *image, layer.out_features, 1, 0, *place)
    if type(layer) is nn.Conv2d and place and len(shape) == 3 and _small(layer, shape):
        side, margin = layer.kernel_size[0], int(layer.padding[0])
        return (CONV, *image, layer.out_channels, side, margin, *place)
    return None


def _small(layer: nn.Conv2d, shape: Shape) -> bool:
    """Return whether the loops take a convolution, and are quicker at it than PyTorch."""
    side, margin = layer.kernel_size[0], layer.padding[0]
    square = layer.kernel_size[1] == side and layer.padding in ((margin, margin),)
    usual = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    if not (square and usual and isinstance(margin, int) and margin < side <= WIDEST_KERNEL):
        return False
    fits = shape[0] == layer.in_channels and min(shape[1:]) + 2 * margin >= side
    return fits and layer.in_channels * layer.out_channels <= LARGE


def _shape_after(row: tuple[int, ...], shape: Shape) -> Shape:
    kind, channels, height, width, outputs, side, margin = row[:7]
    if kind == CONV:
        return outputs, height + 2 * margin - side + 1, width + 2 * margin - side + 1
    if kind in (MAX_POOL, MEAN_POOL):
        return channels, height // 2, width // 2
    if kind == FLATTEN:
        return (channels * height * width,)
    return (outputs,) if kind == DENSE else shape
