"""The learner of a rank: a model on a device, and the backends that train it for its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from mpifl.core.client import Direction, Loss, Trained, WeightedLoss
from mpifl.core.computation import NOTHING, OF_CALL, Asked, Call, ComputationCounter, Purpose, Work
from mpifl.core.devices import split_on
from mpifl.core.errors import MethodError, Missing, UserError, require
from mpifl.core.federation import InputPart, Split, unpacked
from mpifl.core.flat_model import copy_on
from mpifl.core.optimizer_memory import KeptOptimizer
from mpifl.core.parameters import Part
from mpifl.core.progress import Stage
from mpifl.core.rng import Key, key
from mpifl.core.task import Task
from mpifl.core.torch_state import kept
from mpifl.core.trainer import Gift, Samples, Trainer
from mpifl.core.types import shape_or_type

from .backend import Backend, Request
from .batched import LockstepBackend, LockstepRunner, draws, sample_weights, stackable, train_stack
from .config import LocalConfig
from .cuda_graph import CapturedStacks, CudaGraphBackend, Replayed
from .kernel_backend import KernelBackend
from .model_context import ModelContext
from .passes import Form, Passes
from .pytorch_backend import NoTraining, PyTorchBackend, mean_gradient, outputs
from .tasks import Classification
from .trainer_backend import TrainerBackend, check_gives

STACK_SIZES = (4, 16, 64, 256)
T = TypeVar("T")
STACK_GAIN = 1.1  # least speed-up of a stack over training one client after the other


class Learner:
    """A model on a device, ready to train any client; one per rank.

    Args:
        model: the module; its parameters become views of one flat vector.
        device: device of the model.
        kernels: use the kernels in C for what they support, on a CPU where they were built.
        graphs: the steps that are captured and replayed, where nothing but the batch changes; turns the
            kernels off. None for none.
        init: the common initial vector [d]; None: the model's own weights.
        auxiliary: the learner of the auxiliary network (`Algorithm.auxiliary`); None for none.
        task: the task of the model; None: classification. Kernels support cross-entropy only.
        trainer: trains in place of mpifl's own loop; turns kernels, graphs and stacks off. None for the loop.
        rounds: number of server steps of the run, which trainers are told.

    Attributes:
        context: the model and its flat vectors.
        backends: the backends in the order of preference; the first that accepts a request trains it.
        kernels: the backend of the kernels, which also evaluates; None where PyTorch does everything.
        lockstep: runs visits side by side, so that their requests are trained in one stack.
        stacks: trains stacks with captured steps; None if stacks are not replayed.
        device: device of the model.
        layout: position of each named tensor in the vector.
        flat: the module and its flat vector.
        init: the common initial vector [d], on the device.
        auxiliary: the learner of the auxiliary network, or None.
        task: the task of the model.
        computation: counts what clients compute with this learner and with that of the auxiliary network.
        trainer: the trainer, or None.
        parts: the inputs of a sample, if there are several.
        passes: the passes of the model over samples, and their FLOPs.
        dry_run: whether requests return without taking a step.

    Raises:
        UserError: a batch norm layer has no momentum.
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
        trainer: Trainer | None = None,
        rounds: int = 1,
        parts: tuple[InputPart, ...] = (),
    ) -> None:
        self.task, self.trainer, self.parts = task or Classification(), trainer, parts
        known = kernels and graphs is None and self.task.for_kernels and trainer is None
        forward = None if trainer is None else outputs_of(trainer, parts)
        self.context = context = ModelContext(model, device, self.task, known, forward)
        context.counts = trainer is None or "outputs" in trainer.gives
        self.device, self.layout, self.flat = context.device, context.layout, context.flat
        self.init = self.flat.vector.clone() if init is None else init.to(self.device)
        self.auxiliary, self.dry_run = auxiliary, False
        self.passes, self.computation = Passes(context), ComputationCounter()
        if auxiliary is not None:
            auxiliary.computation = self.computation
        self._in_step = False  # whether a method's `direction` or `loss` is being called
        self.kernels = KernelBackend(context) if known and self.device.type == "cpu" else None
        self.stacks = CapturedStacks() if graphs == Replayed() else None
        stacked = LockstepBackend(context, self.stacks or train_stack)
        self.lockstep: LockstepRunner = stacked.runner
        if trainer is not None:
            self.backends: tuple[Backend, ...] = (TrainerBackend(context, trainer, rounds, parts),)
            return
        self.backends = (
            stacked,
            *([self.kernels] if self.kernels is not None else []),
            *([] if graphs is None else [CudaGraphBackend(context, graphs)]),
            PyTorchBackend(context),
        )

    @property
    def drop_single(self) -> bool:
        """Whether batches of one sample are left out; see `ModelContext`."""
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
        """Return a learner of the same model, and of its auxiliary network, that takes no step."""
        dry = copy(self)
        dry.dry_run, dry.kernels, dry.backends = True, None, (NoTraining(self.context),)
        dry.auxiliary = None if self.auxiliary is None else self.auxiliary.without_training()
        return dry

    def count(self, client: int, call: Call, work: Callable[[], Work]) -> None:
        """Count the work of a client's call, if anything is counted now.

        A method's `direction` or `loss` that evaluates other vectors is part of the training.
        """
        if self.computation.is_open:
            purpose: Purpose = "training" if self._in_step else OF_CALL[call]
            self.computation.add(client, purpose, work())

    def work(self, asked: Sequence[Asked], form: Form, local: LocalConfig) -> Work:
        """Return the work of what a method asks a client for, without doing it.

        Args:
            asked: what it asks for.
            form: form of the client's samples.
            local: how the client trains.

        Raises:
            Missing: it asks for an auxiliary network, and there is none.
        """
        found = NOTHING
        for one in asked:
            learner = self.auxiliary if one.auxiliary else self
            if learner is None:
                raise Missing("no network beside the model", "name one: define auxiliary()")
            part = None if one.part == "all" else learner.layout.part(one.part)
            found = found.plus(learner.passes.asked(one, form, local, part))
        return found

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
            UserError: `start` is no vector [d], or `direction` does not return a gradient.
            MethodError: `direction` or `loss` trains with this learner.
        """
        self._check_free("sgd")
        self._check_vector(start)
        if loss is not None and type(loss) is not WeightedLoss:  # which the kernels know
            loss = self._guarded(loss)
        direction = None if direction is None else _checked(self._guarded(direction))
        request = Request(start, split, config, key, step, direction, loss, part, kept, stage)
        for backend in self.backends:
            if backend.accepts(request):
                return backend.train(request)
        raise AssertionError("the last backend accepts every request")

    def batches(self, split: Split, config: LocalConfig, key: Key) -> Iterator[torch.Tensor]:
        """Return the sample indices of each batch, int64 [b], the same as those of `sgd` under the same key.

        There are none in a dry run.
        """
        return iter(()) if self.dry_run else self.context.batches(split, config, key)

    def gradient(self, vector: torch.Tensor, split: Split, batch_size: int = 256) -> torch.Tensor:
        """Return the gradient [p] of the mean loss of `vector` [d] over `split`, in evaluation mode.

        Args:
            vector: the model [d].
            split: samples on the learner's device.
            batch_size: number of samples that are processed at a time.
        """
        self._check_free("gradient")
        self._check_vector(vector)
        made = None if self.kernels is None else self.kernels.mean_gradient(vector, split, batch_size)
        return mean_gradient(self.context, vector, split, batch_size) if made is None else made

    def outputs(
        self, vector: torch.Tensor, x: torch.Tensor, embedding: bool = False, train_mode: bool = False
    ) -> torch.Tensor:
        """Return the outputs [n, ...] of a model: logits [n, L] for classes.

        Args:
            vector: the model [d].
            x: samples [n, ...], on any device.
            embedding: return the embeddings [n, e] instead.
            train_mode: use dropout and batch norm as in training.
        """
        self._check_vector(vector)
        made = None if self.kernels is None else self.kernels.outputs(vector, x, embedding, train_mode)
        if made is not None:
            return made
        if train_mode:
            self._check_free("embed with train_mode")
        return outputs(self._aside if self._in_step else self.context, vector, x, embedding, train_mode)

    def check_gives(self, gift: Gift) -> None:
        """Raise `MethodError` if there is a trainer, and it does not give what a method asks for."""
        if self.trainer is not None:
            check_gives(self.trainer, gift)

    def scores(self, vector: torch.Tensor, split: Split) -> Mapping[str, float]:
        """Return what the trainer evaluates of a model [d] on samples.

        Raises:
            UserError: it returns no mapping.
        """
        self._check_vector(vector)
        trainer, context = self.trainer, self.context
        assert trainer is not None
        module = context.flat.load(vector, train=False)
        x, y = split.x.to(context.device), split.y.to(context.device)
        samples = Samples(x, y, self.task, parts=self.parts)
        try:
            context.flat.without_gradients()
            with kept(), key(0, "outputs").seeded(), torch.no_grad():
                found: Any = trainer.evaluate(module, samples)
        finally:
            context.flat.reattach()
        remedy = f"its evaluate returns {shape_or_type(found)}; return a mapping from names to numbers"
        require(isinstance(found, Mapping), "local.trainer", trainer.name, remedy)
        checked: Mapping[str, float] = found
        return checked

    @cached_property
    def _aside(self) -> ModelContext:
        """A copy of the model, on which a method evaluates other vectors during a training step."""
        return ModelContext(
            copy_on(self.flat.module, self.device),
            self.device,
            self.task,
            self.context.computes_layers,
            self.context.forward,
        )

    def _guarded(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a method's function of a training step, in which this learner does not train."""

        def guarded(*arguments: Any) -> T:
            self._in_step = True
            try:
                return function(*arguments)
            finally:
                self._in_step = False

        return guarded

    def _check_vector(self, vector: Any) -> None:
        """Raise `UserError` unless `vector` is a model [d]."""
        size = self.layout.size
        if not isinstance(vector, torch.Tensor) or vector.shape != (size,):
            remedy = f"a model is a tensor of {size} numbers, as message['model'][0]"
            raise UserError("vector", shape_or_type(vector), remedy)

    def _check_free(self, call: str) -> None:
        """Raise `MethodError` inside a training step, whose weights and gradient a call would overwrite."""
        if self._in_step:
            remedy = "it would overwrite the model in training; compute it before sgd"
            raise MethodError("client.sgd", f"its direction or loss calls client.{call}", remedy)


def outputs_of(trainer: Trainer, parts: tuple[InputPart, ...]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return the outputs of a trainer as a function of samples as a federation has them.

    Args:
        trainer: the trainer.
        parts: the inputs of a sample, if there are several, which the trainer gets by name.
    """
    if not parts:
        return trainer.outputs
    return lambda module, x: trainer.outputs(module, unpacked(x, parts))


def _checked(direction: Direction) -> Direction:
    """Return a `direction` that raises `UserError` where it returns no gradient."""

    def checked(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        changed: Any = direction(g, w)
        if not isinstance(changed, torch.Tensor) or changed.shape != g.shape:
            remedy = f"return the changed gradient, {len(g)} numbers as the tensor that it is given"
            raise UserError("direction", shape_or_type(changed), remedy)
        return changed

    return checked


def pick_stack(learner: Learner, split: Split, config: LocalConfig, most: int) -> int:
    """Return the fastest stack size for clients like `split`; 1 if training them one by one is about as fast.

    The measurement ignores what a method adds to the gradients, and that steps with such additions are not
    captured.

    Args:
        learner: the learner to measure; it trains a few times.
        split: training data of a typical client.
        config: options of local training.
        most: the largest size to try.
    """
    if not stackable(learner.flat.module) or sample_weights(learner.task) is None or most < 2:
        return 1
    start, address, split = learner.init, key(0, "pick"), split_on(split, learner.device)
    if draws(learner.flat.module, split.x[:2]):
        return 1
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
        learner.stacks.captured.clear()  # most of their sizes are not used again
    return size


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of three times of `work` in seconds, after one warm-up run."""
    work()
    found = []
    for _ in range(3):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - start)
    return min(found)
