"""A step of SGD captured once as a CUDA graph and replayed for every full batch.

A small model's step is dozens of kernels of a few microseconds each, and launching them one by one takes
longer than they do; a graph is one launch. The step works on tensors that stay where they are, with or
without a graph.
"""

from __future__ import annotations

import torch

from mpifl.core.client import Trained
from mpifl.core.federation import Split
from mpifl.core.parameters import Part, bounds

from .backend import Backend, Request
from .config import LocalConfig
from .model_context import ModelContext
from .optimizer import OptimizerStep
from .precision import forward_pass
from .pytorch_backend import FullBatchStep, train_by_steps

WARM_UP = 3  # steps before capture, as PyTorch asks for: libraries allocate and choose in them


class CudaGraphBackend(Backend):
    """Replays a captured step where nothing but the batch changes from step to step.

    Args:
        context: the model; on a CPU the same step is taken without a graph.

    Attributes:
        captured: the steps captured so far, by momentum, weight decay, precision, part and shape of a batch.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.captured: dict[tuple[object, ...], CapturedStep] = {}

    def accepts(self, request: Request) -> bool:
        """Return whether the request is plain SGD on at least one full batch.

        The model must have no hooks and draw no random numbers.
        """
        config = request.config
        plain = request.loss is None and request.direction is None
        plain = plain and config.optimizer == "sgd" and config.augment == "none"
        full = len(request.split) >= config.batch_size
        return plain and full and not self.context.draws and self.context.untouched()

    def train(self, request: Request) -> Trained:
        """Train; a batch that is not full is a step of the ordinary loop."""
        return train_by_steps(self.context, request, lambda: self._step(request))

    def _step(self, request: Request) -> CapturedStep:
        """Return the captured step at the start of a visit; a new one is captured first."""
        config, split = request.config, request.split
        shape = config.batch_size, *split.x.shape[1:]
        address = config.momentum, config.weight_decay, config.precision, bounds(request.part), shape
        if address not in self.captured:
            self.captured[address] = CapturedStep(self.context, config, request.part, split)
            self.context.flat.load(request.start)
        self.captured[address].begin(config.lr_at(request.step))
        return self.captured[address]


class CapturedStep(FullBatchStep):
    """A step of SGD on batches of one size.

    Args:
        context: the model; its weights are changed here.
        config: gives momentum, weight decay, precision and the size of a batch.
        part: what moves; None for all parameters.
        split: samples like those to come.
    """

    def __init__(self, context: ModelContext, config: LocalConfig, part: Part | None, split: Split) -> None:
        device, size = context.device, config.batch_size
        self.module, self.momentum, self.task = context.flat.module, context.momentum, context.task
        self.device, self.precision = device, config.precision
        self.x = split.x.new_zeros(size, *split.x.shape[1:])
        self.y = split.y.new_zeros(size, *split.y.shape[1:])
        self.total = torch.zeros((), device=device)
        single = device.type == "cuda"  # what the fused step takes there
        self.lr = torch.zeros((), device=device, dtype=torch.float32 if single else torch.float64)
        # no step is the first: the momentum starts at 0
        self.update = OptimizerStep(context, config, self.lr, part, None, steps=1)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        with forward_pass(self.precision, self.device):
            loss = self.task.loss(self.module(self.x), self.y)
        self.update(loss)
        self.total += loss.detach()

    def begin(self, lr: float) -> None:
        """Start a visit: set the learning rate, clear momentum and the sum of losses."""
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
