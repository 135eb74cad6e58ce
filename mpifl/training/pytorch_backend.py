"""The PyTorch training loop: mini-batches over flat buffers, with a method's changes passed as functions.

A step is forward pass, gradient and update. There is no optimiser object, and apart from the gradient nothing
is allocated in proportion to the number of parameters. Evaluation uses batches of a fixed size, which does
not depend on where it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from mpifl.core.client import Loss, Trained
from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.module_calls import embedding_of
from mpifl.core.rng import key
from mpifl.core.torch_state import kept

from .augmentation import change_of
from .backend import Backend, BatchShares, Request
from .model_context import ModelContext
from .optimizer import OptimizerStep
from .precision import FLOAT32, forward_pass, training_in

EVAL_BATCH = 256  # samples
STATISTICS_BATCH = 64  # samples per batch where batch norm uses batch statistics, as in EMD-CFL's repository


def loss_of(context: ModelContext) -> Loss:
    """Return the mean loss of a batch, as the task defines it, as a `Loss`."""
    task, forward = context.task, context.forward

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return task.loss(forward(module, x), y)

    return loss


class FullBatchStep(ABC):
    """Takes the steps on full batches instead of the loop.

    Attributes:
        total: sum of the losses of its steps, each times `share`, a scalar; the loop adds its own steps.
        share: the weight of the next step's loss in `total`, a scalar.
    """

    total: torch.Tensor
    share: torch.Tensor

    @abstractmethod
    def __call__(self, split: Split, index: torch.Tensor) -> None:
        """Take a step on the samples `index` [batch_size]."""


class PyTorchBackend(Backend):
    """Trains any request, step by step."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def accepts(self, request: Request) -> bool:
        """Return True."""
        return True

    def train(self, request: Request) -> Trained:
        """Train with the loop."""
        return train_by_steps(self.context, request)


class NoTraining(Backend):
    """Answers every request after zero steps, for a forecast of the traffic of a run."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def accepts(self, request: Request) -> bool:
        """Return True."""
        return True

    def train(self, request: Request) -> Trained:
        """Return the start vector after checking its length."""
        self.context.flat.load(request.start)
        return request.outcome(self.context.flat.vector.clone(), 0, 0.0)


def train_by_steps(
    context: ModelContext, request: Request, full_batch: Callable[[], FullBatchStep] | None = None
) -> Trained:
    """Train a request step by step.

    Args:
        context: the model; its vector changes.
        request: the request.
        full_batch: creates the object that takes the steps on full batches; None: the loop takes all steps.

    Raises:
        UserError: there is nothing to train, because all parameters are frozen.
    """
    config, split, part = request.config, request.split, request.part
    if config.num_steps(len(split), context.drop_single):
        context.check_free(part)
    module = context.flat.load(request.start, train=True)
    loss = request.loss or loss_of(context)
    lr = config.lr_at(request.step)
    update = OptimizerStep(context, config, lr, part, request.direction, kept=request.kept)
    total = torch.zeros((), device=context.device)
    change = change_of(context.task, config.augment, request.key)
    shares = BatchShares(context.task, request)
    context.seed(request.key.of("dropout"))
    kernels = context.kernels() if config.precision == FLOAT32 else nullcontext()
    precision = training_in(config.precision, context.device)
    with kept(), precision, kernels, nullcontext() if part is None else context.only(part):
        replacement = None if full_batch is None else full_batch()
        if replacement is not None:
            update.load()  # `replacement` has cleared the optimiser state
            total = replacement.total  # losses are added in the order of the steps
        for number, index in enumerate(context.batches(split, config, request.key)):
            if request.stage is not None:
                request.stage.done = number
            share = shares.next(index)
            if replacement is not None and len(index) == config.batch_size:
                if isinstance(share, torch.Tensor):  # otherwise 1
                    replacement.share.copy_(share)
                replacement(split, index)
                update.steps += 1
                continue
            x, y = split.x.index_select(0, index), split.y.index_select(0, index)
            if change is not None:
                x, y = change(x, y, update.steps)
            with forward_pass(config.precision, context.device):
                value = loss(module, x, y, index)
            update(value)
            total += value.detach() * share
    steps = update.steps
    context.flat.check_buffers()
    update.save()
    return request.outcome(context.flat.vector.clone(), steps, shares.mean(float(total)))


def mean_gradient(context: ModelContext, vector: torch.Tensor, split: Split, batch_size: int) -> torch.Tensor:
    """Return the gradient [p] of the mean loss of `vector` [d] over `split`, in evaluation mode.

    If the task defines only the loss of a batch, all samples are one batch.
    """
    flat, task = context.flat, context.task
    module = flat.load(vector, train=False)
    flat.grad.zero_()
    count, size = max(task.count(split.y), 1), batch_size if task.has_total else max(len(split), 1)
    with kept(), context.seeded(key(0, "gradient")):
        for index in torch.arange(len(split), device=context.device).split(size):
            with context.kernels():
                output, y = context.forward(module, split.x[index]), split.y[index]
                loss = task.total_loss(output, y) / count if task.has_total else task.loss(output, y)
            loss.backward()
    flat.check_buffers()
    return flat.grad.clone()


@torch.no_grad()
def outputs(
    context: ModelContext, vector: torch.Tensor, x: torch.Tensor, embedding: bool, train_mode: bool
) -> torch.Tensor:
    """Return the outputs [n, ...] or embeddings [n, ...] of samples [n, ...] under `vector` [d].

    The module draws the same random numbers in every call, so that they do not depend on what the rank did
    before: dropout under `train_mode`, and a network of a user perhaps always. With batch norm, a last batch
    of one sample, which has no statistics, joins the one before it.

    Raises:
        UserError: there is only one sample, with batch norm and `train_mode`; or the module has no embedding.
    """
    module = context.flat.load(vector, train=train_mode)
    function = partial(embedding_of if embedding else context.forward, module)
    with kept(), context.kernels(), context.seeded(key(0, "outputs")):
        found = [function(batch.to(context.device)) for batch in _batches_of(context, x, train_mode)]
    context.flat.check_buffers()
    return torch.cat(found)


def _batches_of(context: ModelContext, x: torch.Tensor, train_mode: bool) -> list[torch.Tensor]:
    """Return samples in batches."""
    batches = list(x.split(STATISTICS_BATCH if train_mode else EVAL_BATCH))
    if train_mode and context.drop_single and len(batches[-1]) == 1:
        remedy = "has no statistics, which this method takes of the samples of each client; use more samples"
        require(len(batches) > 1, "data.scenario", "a client with one sample", remedy)
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches
