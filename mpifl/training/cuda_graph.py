"""SGD steps, of one client or of a stack, captured once as a CUDA graph and replayed for every batch.

A step of a small model consists of dozens of kernels that run for a few microseconds each. Launching them one
by one takes longer than running them; a graph needs a single launch. With or without a graph, a step works on
tensors whose addresses do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from mpifl.core.client import Trained
from mpifl.core.federation import Split
from mpifl.core.parameters import Part, bounds

from .backend import Backend, Request, epoch_orders
from .batched import (
    batch_shares,
    evenly,
    longest_first,
    moving_names,
    outcomes,
    sample_weights,
    stacked_gradients,
    train_stack,
    unused_names,
)
from .config import LocalConfig
from .model_context import ModelContext
from .optimizer import OptimizerStep, fused_sgd
from .precision import forward_pass, training_in, under_autocast
from .pytorch_backend import FullBatchStep, train_by_steps

WARM_UP = 3  # steps before capture, as PyTorch requires: libraries allocate memory and choose algorithms


@dataclass(frozen=True)
class Replayed:
    """Which SGD steps are replayed.

    Attributes:
        like: replay only steps of single clients with the batch size, momentum, weight decay and precision
            of this configuration; None replays all steps, including those of stacks.
    """

    like: LocalConfig | None = None


def captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """Return a step as a CUDA graph, after a few warm-up runs; on a CPU run nothing and return None.

    Args:
        step: works on tensors whose addresses do not change.
        device: device of these tensors.
    """
    if device.type != "cuda":
        return None
    aside = _stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        step()
    return graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: cuBLAS keeps 65 MiB of workspace for each stream."""
    return torch.cuda.Stream(device)


def _learning_rate(device: torch.device) -> torch.Tensor:
    """Return a scalar tensor in the number format that the fused step reads on a device."""
    single = device.type == "cuda"
    return torch.zeros((), device=device, dtype=torch.float32 if single else torch.float64)


class CudaGraphBackend(Backend):
    """Replays a captured step where nothing but the batch changes from step to step.

    Args:
        context: the model; on a CPU the same step runs without a graph.
        replayed: which steps to replay.

    Attributes:
        captured: the steps captured so far, by their options and shapes.
    """

    def __init__(self, context: ModelContext, replayed: Replayed) -> None:
        self.context = context
        self.like = None if replayed.like is None else _fixed(replayed.like)
        self.captured: dict[tuple[object, ...], CapturedStep] = {}

    def accepts(self, request: Request) -> bool:
        """Return whether the request is plain SGD with at least one full batch.

        The model must have no hooks and draw no random numbers, and the visit must not turn on autocast.
        """
        config = request.config
        plain = request.loss is None and request.direction is None
        plain = plain and config.optimizer == "sgd" and config.augment == "none"
        plain = plain and not under_autocast() and not self.context.task.redraws
        wanted = self.like in (None, _fixed(config)) and len(request.split) >= config.batch_size
        return plain and wanted and not self.context.draws and self.context.untouched()

    def train(self, request: Request) -> Trained:
        """Train; the ordinary loop takes the steps on batches that are not full."""
        return train_by_steps(self.context, request, lambda: self._step(request))

    def _step(self, request: Request) -> CapturedStep:
        """Return the captured step, reset for a new visit; capture it first if necessary."""
        config, split = request.config, request.split
        x, y = split.x, split.y
        address = *_fixed(config), bounds(request.part), x.shape[1:], x.dtype, y.shape[1:], y.dtype
        if address not in self.captured:
            self.captured[address] = CapturedStep(self.context, config, request.part, split)
            self.context.flat.load(request.start)
        self.captured[address].begin(config.lr_at(request.step))
        return self.captured[address]


def _fixed(config: LocalConfig) -> tuple[object, ...]:
    """Return the options of local training that are fixed in a captured step."""
    return config.batch_size, config.momentum, config.weight_decay, config.precision


class CapturedStep(FullBatchStep):
    """An SGD step on batches of one size.

    Args:
        context: the model; the constructor changes its weights.
        config: gives momentum, weight decay, precision and batch size.
        part: the slices that are trained; None for all parameters.
        split: samples with the shapes and types of the later ones.
    """

    def __init__(self, context: ModelContext, config: LocalConfig, part: Part | None, split: Split) -> None:
        device, size = context.device, config.batch_size
        self.module, self.momentum, self.task = context.flat.module, context.momentum, context.task
        self.device, self.precision = device, config.precision
        self.x = split.x.new_zeros(size, *split.x.shape[1:])
        self.y = split.y.new_zeros(size, *split.y.shape[1:])
        self.total, self.share = torch.zeros((), device=device), torch.ones((), device=device)
        self.lr = _learning_rate(device)
        # steps=1: no step is treated as the first one; the momentum starts at 0
        self.update = OptimizerStep(context, config, self.lr, part, None, steps=1)
        self.graph = captured(self._step, device)

    def _step(self) -> None:
        with forward_pass(self.precision, self.device):
            loss = self.task.loss(self.module(self.x), self.y)
        self.update(loss)
        self.total += loss.detach() * self.share

    def begin(self, lr: float) -> None:
        """Start a visit: set the learning rate and clear momentum and the sum of losses."""
        self.lr.fill_(lr)
        self.momentum.zero_()
        self.total.zero_()

    def __call__(self, split: Split, index: torch.Tensor) -> None:
        """Take a step on the samples `index` [batch_size]."""
        torch.index_select(split.x, 0, index, out=self.x)
        torch.index_select(split.y, 0, index, out=self.y)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()


class CapturedStacks:
    """Trains stacks of clients with captured steps where nothing but the batches changes from step to step.

    Attributes:
        captured: the stacks captured so far, the least recently used first.
    """

    MOST = 8  # number of captured stacks that are kept

    def __init__(self) -> None:
        self.captured: dict[tuple[object, ...], CapturedStack] = {}

    def __call__(self, context: ModelContext, requests: Sequence[Request]) -> list[Trained]:
        """Train requests of one `kind`; those that are not plain SGD go to `batched.train_stack`."""
        first, config = requests[0], requests[0].config
        plain = config.optimizer == "sgd" and config.augment == "none"
        directed = any(r.direction is not None for r in requests)
        if not plain or directed or sample_weights(context.task) is not evenly:
            return train_stack(context, requests)
        x, y = first.split.x, first.split.y
        largest = max(len(r.split) for r in requests)
        size = min(config.batch_size, _power_of_two(largest))  # no batch is larger
        address = (
            *(len(requests), size, config.momentum, config.weight_decay, config.precision),
            *(bounds(first.part), x.shape[1:], x.dtype, y.shape[1:], y.dtype),
        )
        stack = self.captured.pop(address, None) or CapturedStack(context, first, len(requests), size)
        with training_in(config.precision, context.device):
            trained = stack.train(requests)
        self.captured[address] = stack  # a stack that fails, for example for lack of memory, is not kept
        while len(self.captured) > self.MOST:
            del self.captured[next(iter(self.captured))]
        return trained


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`; 1 for 0."""
    return 1 << max(least - 1, 0).bit_length()


class CapturedStack:
    """Clients of one kind, trained side by side by a step that is captured once for all stacks of its size.

    Every batch is padded to the same size; the padding has weight 0. The rows are sorted by the clients'
    number of steps, most first. When the last clients have no steps left, a graph of fewer rows continues:
    the smallest power of two that holds the others. The computation therefore depends on the clients of the
    stack alone.

    Args:
        context: the model.
        request: a request of the same kind and shapes as the later ones.
        count: C, number of clients in a stack.
        size: b, the size to which batches are padded.

    Attributes:
        graphs: number of rows -> the captured step; None on a CPU, which runs the step without a graph.
    """

    def __init__(self, context: ModelContext, request: Request, count: int, size: int) -> None:
        self.context, self.count, self.size, self.config = context, count, size, request.config
        device = context.device
        split, layout = request.split, context.layout
        self.tensors = {
            name: torch.zeros(count, *shape, device=device)
            for name, shape in zip(layout.slices, layout.shapes, strict=True)
        }
        unused = unused_names(context, split, self.config)
        self.moving = [name for name in moving_names(context, request.part) if name not in unused]
        self.momenta = [torch.zeros_like(self.tensors[name]) for name in self.moving]
        self.x = split.x.new_zeros(count, size, *split.x.shape[1:])
        self.y = split.y.new_zeros(count, size, *split.y.shape[1:])
        self.weight = torch.zeros(count, size, device=device)
        self.losses = torch.zeros(count, device=device)
        self.share = torch.zeros(count, device=device)  # weight of each row's loss in its sum
        self.lr = _learning_rate(device)
        self.gradients = stacked_gradients(context.flat.module, context.task.losses, self.config.precision)
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}

    def train(self, requests: Sequence[Request]) -> list[Trained]:
        """Train C requests; return their outcomes in the same order."""
        asked, batches = requests, [self._batches(r) for r in requests]
        order = longest_first(batches)
        requests, batches = [asked[i] for i in order], [batches[i] for i in order]
        active = [sum(len(b) > step for b in batches) for step in range(len(batches[0]))]
        self.context.flat.module.train()
        for rows in dict.fromkeys(map(self._rows, active)):
            if rows not in self.graphs:
                self.graphs[rows] = captured(partial(self._step, rows), self.context.device)
        vectors = torch.stack([r.start.to(self.context.device) for r in requests])  # [C, d]
        self._begin(vectors, requests[0].config.lr_at(requests[0].step))
        x, y = (torch.cat([getattr(r.split, name) for r in requests]) for name in ("x", "y"))
        index, weight = self._plan([len(r.split) for r in requests], batches)
        shares, share = batch_shares(self.context.task, requests, batches, self.count, self.context.device)
        for step, now in enumerate(active):
            rows = self._rows(now)
            torch.index_select(x, 0, index[step, :rows].flatten(), out=self.x[:rows].flatten(0, 1))
            torch.index_select(y, 0, index[step, :rows].flatten(), out=self.y[:rows].flatten(0, 1))
            self.weight[:rows] = weight[step, :rows]
            self.share[:rows] = share[step, :rows]
            graph = self.graphs[rows]
            if graph is None:
                self._step(rows)
            else:
                graph.replay()
            left = active[step + 1] if step + 1 < len(active) else 0
            if left < now:  # the rows that end here are in no later graph, or have weight 0 there
                self._read(slice(left, now), vectors)
        return outcomes(asked, order, vectors.unbind(), [*map(len, batches)], self.ended.tolist(), shares)

    def _rows(self, active: int) -> int:
        """Return the number of rows of a step in which `active` clients still train."""
        return min(_power_of_two(active), self.count)

    def _batches(self, request: Request) -> list[np.ndarray]:
        """Return the sample indices of each batch, int64 [b]."""
        orders = epoch_orders(len(request.split), request.config, request.key, self.context.drop_single)
        size = request.config.batch_size
        return [order[i : i + size] for order in orders for i in range(0, len(order), size)]

    def _plan(
        self, sizes: Sequence[int], batches: Sequence[Sequence[np.ndarray]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples [T, C, b] of all batches, numbered over all clients, and their weights."""
        shape = len(batches[0]), self.count, self.size
        index, weight = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        first = 0
        for row, size in enumerate(sizes):
            index[:, row] = first if size else 0  # the client's first sample pads its batches
            for step, batch in enumerate(batches[row]):
                index[step, row, : len(batch)] = batch + first
                weight[step, row, : len(batch)] = 1.0 / len(batch)
            first += size
        device = self.context.device
        return torch.from_numpy(index).to(device), torch.from_numpy(weight).to(device)

    def _begin(self, starts: torch.Tensor, lr: float) -> None:
        """Copy the initial vectors [C, d] of a stack to its rows; clear momenta and sums of losses."""
        for name, values in self.context.layout.tensors(starts).items():
            self.tensors[name].copy_(values)
        torch._foreach_zero_(self.momenta)
        self.losses.zero_()
        self.ended = torch.zeros_like(self.losses)
        self.lr.fill_(lr)

    def _read(self, rows: slice, vectors: torch.Tensor) -> None:
        """Write the trained vectors of some rows to `vectors` [C, d], and their loss sums to `ended`."""
        vectors[rows] = torch.cat([t[rows].flatten(1) for t in self.tensors.values()], 1)
        self.ended[rows] = self.losses[rows]

    def _step(self, rows: int) -> None:
        tensors = {name: t[:rows] for name, t in self.tensors.items()}
        moving = {name: tensors.pop(name) for name in self.moving}
        grads, values = self.gradients(moving, tensors, self.x[:rows], self.y[:rows], self.weight[:rows])
        self.losses[:rows] += values * self.share[:rows]
        found = [grads[name].contiguous() for name in self.moving]
        with torch.no_grad():
            momenta = [m[:rows] for m in self.momenta]
            fused_sgd([*moving.values()], found, momenta, self.config, self.lr, False)  # they start at 0
