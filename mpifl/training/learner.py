"""The learner of a rank: a model on a device, and the backends that train it for any client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from time import perf_counter

import torch
from torch import nn

from mpifl.core.client import Direction, Loss, Trained
from mpifl.core.devices import split_on
from mpifl.core.federation import Split
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part
from mpifl.core.progress import Stage
from mpifl.core.rng import Key, key
from mpifl.core.task import Task

from .backend import Backend, Request
from .batched import LockstepBackend, LockstepRunner, sample_weights, stackable, train_stack
from .config import LocalConfig
from .cuda_graph import CapturedStacks, CudaGraphBackend, Replayed
from .kernel_backend import KernelBackend
from .model_context import ModelContext
from .pytorch_backend import NoTraining, PyTorchBackend, mean_gradient, outputs
from .tasks import Classification

STACK_SIZES = (4, 16, 64, 256)
STACK_GAIN = 1.1  # a stack must be so many times faster than one client after the other


class Learner:
    """A model on a device, ready to train any client; one per rank.

    Args:
        model: the module; its parameters become views of one flat vector.
        device: where it computes.
        kernels: train by kernels in C what they know, on a CPU where they were built.
        graphs: the steps that are captured and replayed, where nothing but the batch changes; leaves the
            kernels out. None for none.
        init: the common initial vector [d]; None: the one the model came with.
        auxiliary: the learner of the network beside the model (`Algorithm.auxiliary`).
        task: what the model is trained for; None: classification. Kernels know cross-entropy only.

    Attributes:
        context: the model and its flat vectors.
        backends: asked in this order; the first that accepts a request trains it.
        kernels: the backend of the kernels, which also evaluates; None where PyTorch does everything.
        lockstep: runs visits side by side, so that their requests are trained in one stack.
        stacks: trains stacks by captured steps; None where those of stacks are not replayed.
        device: where the model computes.
        layout: where each named tensor lies in the vector.
        flat: the module and its flat vector.
        init: the common initial vector [d], on the device.
        auxiliary: the learner of the network beside the model, or None.
        task: what the model is trained for.
        dry_run: whether no request takes a step.

    Raises:
        UserError: a batch norm has no momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cpu",
        *,
        kernels: bool = True,
        graphs: Replayed | None = None,
        init: torch.Tensor | None = None,
        auxiliary: Learner | None = None,
        task: Task | None = None,
    ) -> None:
        self.task = task or Classification()
        known = kernels and graphs is None and self.task.for_kernels
        self.context = context = ModelContext(model, device, self.task, known)
        self.device, self.layout, self.flat = context.device, context.layout, context.flat
        self.init = self.flat.vector.clone() if init is None else init.to(self.device)
        self.auxiliary, self.dry_run = auxiliary, False
        self.kernels = KernelBackend(context) if known and self.device.type == "cpu" else None
        self.stacks = CapturedStacks() if graphs == Replayed() else None
        stacked = LockstepBackend(context, self.stacks or train_stack)
        self.lockstep: LockstepRunner = stacked.runner
        self.backends: tuple[Backend, ...] = (
            stacked,
            *([self.kernels] if self.kernels is not None else []),
            *([] if graphs is None else [CudaGraphBackend(context, graphs)]),
            PyTorchBackend(context),
        )

    @property
    def drop_single(self) -> bool:
        """Whether batches of one sample are left out, see `ModelContext`."""
        return self.context.drop_single

    @property
    def replays(self) -> bool:
        """Whether steps are captured and replayed, where nothing but the batch changes."""
        return any(isinstance(backend, CudaGraphBackend) for backend in self.backends)

    @property
    def trains_visits(self) -> bool:
        """Whether a backend may train many visits in one call."""
        return self.kernels is not None

    def without_training(self) -> Learner:
        """Return a learner of the same model that takes no step, and none of its auxiliary network."""
        dry = copy(self)
        dry.dry_run, dry.kernels, dry.backends = True, None, (NoTraining(self.context),)
        dry.auxiliary = None if self.auxiliary is None else self.auxiliary.without_training()
        return dry

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
        kept: KeptOptimizer | None = None,
        stage: Stage | None = None,
    ) -> Trained:
        """Train from `start` [d] on `split`; see `Request` for the arguments.

        Raises:
            ValueError: `start` has another length than the model's vector.
        """
        request = Request(start, split, config, key, step, direction, loss, part, kept, stage)
        for backend in self.backends:
            if backend.accepts(request):
                return backend.train(request)
        raise AssertionError("the last backend accepts every request")

    def batches(self, split: Split, config: LocalConfig, key: Key) -> Iterator[torch.Tensor]:
        """Return the sample numbers of each batch, int64 [b], as `sgd` takes them under the same key.

        A learner without training has none.
        """
        return iter(()) if self.dry_run else self.context.batches(split, config, key)

    def gradient(self, vector: torch.Tensor, split: Split, batch_size: int = 256) -> torch.Tensor:
        """Return the gradient [p] of the mean loss of `vector` [d] over `split`, in evaluation mode.

        Args:
            vector: the model [d].
            split: samples on the learner's device.
            batch_size: samples at a time.
        """
        made = None if self.kernels is None else self.kernels.mean_gradient(vector, split, batch_size)
        return mean_gradient(self.context, vector, split, batch_size) if made is None else made

    def outputs(
        self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False, train_mode: bool = False
    ) -> torch.Tensor:
        """Return the outputs [n, ...] of a model: logits [n, L] of classes.

        Args:
            vector: the model [d].
            x: samples [n, ...], on any device.
            embedding: return the embeddings [n, e] instead.
            train_mode: leave dropout and batch norm as in training.
        """
        made = None if self.kernels is None else self.kernels.outputs(vector, x, embedding, train_mode)
        return outputs(self.context, vector, x, embedding, train_mode) if made is None else made


def pick_stack(learner: Learner, split: Split, config: LocalConfig, most: int) -> int:
    """Return the fastest size of a stack for clients like `split`; 1 where one after the other is as fast.

    What a method adds to the gradients is left out, and with it that such steps are not captured.

    Args:
        learner: it trains a few times.
        split: training data of a typical client.
        config: how clients train.
        most: the largest size to try.
    """
    if not stackable(learner.flat.module) or sample_weights(learner.task) is None or most < 2:
        return 1
    start, address, split = learner.init, key(0, "pick"), split_on(split, learner.device)
    single = _seconds(lambda: learner.sgd(start, split, config, address), learner.device)
    best, size = single / STACK_GAIN, 1
    for c in sorted({min(c, most) for c in STACK_SIZES}):
        requests = [Request(start, split, config, address.of(i)) for i in range(c)]
        try:
            each = _seconds(lambda r=requests: learner.lockstep.train_requests(r), learner.device) / c  # type: ignore[misc]
        except torch.OutOfMemoryError:
            break
        if each < best:
            best, size = each, c
    if learner.stacks is not None:
        learner.stacks.captured.clear()  # most are of sizes that do not come again
    return size


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the least time of three, after one to warm up."""
    work()
    found = []
    for _ in range(3):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - start)
    return min(found)
