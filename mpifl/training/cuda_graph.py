"""A step of SGD captured once as a CUDA graph and replayed for every full batch.

A small model's step is dozens of kernels of a few microseconds each, and launching them one by one takes
longer than they do; a graph is one launch. The step works on tensors that stay where they are, with or
without a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mpifl.core.federation import Split
from mpifl.core.parameters import Part

from .config import LocalConfig
from .optimizer import Update

if TYPE_CHECKING:
    from .learner import Learner

WARM_UP = 3  # steps before capture, as PyTorch asks for: libraries allocate and choose in them


class Replay:
    """Steps of SGD on batches of one size.

    Args:
        learner: whose model moves; its weights are changed here.
        config: momentum and weight decay are taken from it.
        part: what moves; None for all parameters.
        split: samples like those to come.
    """

    def __init__(self, learner: Learner, config: LocalConfig, part: Part | None, split: Split) -> None:
        device, size = learner.device, config.batch_size
        self.module, self.momentum = learner.flat.module, learner.momentum
        self.x = split.x.new_zeros(size, *split.x.shape[1:])
        self.y = split.y.new_zeros(size)
        self.total = torch.zeros((), device=device)
        single = device.type == "cuda"  # what the fused update takes there
        self.lr = torch.zeros((), device=device, dtype=torch.float32 if single else torch.float64)
        self.update = Update(learner, config, self.lr, part, None)
        self.update.steps = 1  # no step is the first: the momentum starts at 0
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
        loss = F.cross_entropy(self.module(self.x), self.y)
        self.update(loss)
        self.total += loss.detach()

    def begin(self, lr: float) -> None:
        """Start a visit."""
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
