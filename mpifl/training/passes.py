"""The passes of a network over samples, and their FLOPs, from the shapes of what is asked for.

FLOPs are those of PyTorch's own counter (`torch.utils.flop_counter`): of matrix products, convolutions and
attention, two for a multiplication and an addition. They are counted on a copy of the network, and are the
same on every device and for every backend.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpifl.core.computation import NOTHING, Asked, Work
from mpifl.core.federation import Split
from mpifl.core.flat_model import copy_on
from mpifl.core.module_calls import embedding_of
from mpifl.core.parameters import Part, bounds
from mpifl.core.rng import key
from mpifl.core.torch_state import kept

from .config import LocalConfig
from .model_context import ModelContext
from .pytorch_backend import EVAL_BATCH, STATISTICS_BATCH

CPU, META = torch.device("cpu"), torch.device("meta")
FUSED = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
SMALL, SMALL_SAMPLE = 1 << 23, 1 << 14  # parameters of a network, numbers of a sample
FEW = (2, 3, 4)  # batch sizes that are measured; the FLOPs of nearly all networks are linear in them
Sizes = list[tuple[int, int]]  # (number of batches, samples in each)
Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of a sample


class FlopCounter(TorchDispatchMode):
    """Adds up FLOPs as `torch.utils.flop_counter.FlopCounterMode` does, by its formulas.

    That class also tracks modules, and loads PyTorch's compiler, which takes longer than a small run.

    Attributes:
        flops: FLOPs of all operations inside the context.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the compiler is loaded to be told so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it, or the operations that it consists of."""
        kwargs = kwargs or {}
        formula = flop_registry.get(func.overloadpacket) if isinstance(func, torch._ops.OpOverload) else None
        if formula is not None:
            out = func(*args, **kwargs)
            self.flops += formula(*args, **kwargs, out_val=out)
            return out
        with self:
            parts = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if parts is NotImplemented else parts


class Passes:
    """The passes of one network; measures FLOPs once for each kind of pass.

    Args:
        context: the network.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self._flops: dict[Hashable, int] = {}
        self._lines: dict[Hashable, tuple[int, int] | None] = {}  # (FLOPs of no sample, of each)
        self._known: dict[Hashable, Work] = {}

    def training(self, split: Split, config: LocalConfig, part: Part | None = None) -> Work:
        """Return the work of a training on `split`.

        Args:
            split: the samples.
            config: gives the batches.
            part: the part that is trained; None for all parameters.
        """
        return self.trainings(_form(split.x), len(split), config, part)

    def trainings(self, form: Form, num_samples: int, config: LocalConfig, part: Part | None = None) -> Work:
        """Return the work of a training on `num_samples` samples of a form; see `training`."""
        drops = self.context.drop_single
        at = "sgd", form, num_samples, config.epochs, config.steps, config.batch_size, bounds(part)
        if at not in self._known:
            steps, size = config.num_steps(num_samples, drops), config.batch_size
            trained = config.num_trained(num_samples, drops)
            rest = config.num_usable(num_samples, drops) % size
            short = (steps * size - trained) // (size - rest) if rest else 0  # batches of `rest` samples
            self._known[at] = self._backward(form, [(steps - short, size), (short, rest)], True, part)
        return self._known[at]

    def trained(
        self, form: Form, num_samples: int, steps: int, batch_size: int, part: Part | None = None
    ) -> Work:
        """Return the work of a training that took `steps` steps on `num_samples` samples in all.

        Args:
            form: form of the samples.
            num_samples: samples in all steps.
            steps: steps taken, each on about as many samples.
            batch_size: samples of a full batch.
            part: the part that was trained; None for all parameters.
        """
        rest = num_samples - (steps - 1) * batch_size
        if steps > 0 and 0 < rest <= batch_size:
            sizes = [(steps - 1, batch_size), (1, rest)]
        else:
            size, more = divmod(num_samples, max(steps, 1))
            sizes = [(steps - more, size), (more, size + 1)] if steps else []
        return self._backward(form, sizes, True, part)

    def gradient(self, split: Split) -> Work:
        """Return the work of the gradient of the mean loss over `split`."""
        return self.gradients(_form(split.x), len(split))

    def gradients(self, form: Form, num_samples: int) -> Work:
        """Return the work of the gradient of a mean loss over `num_samples` samples of a form."""
        at = "gradient", form, num_samples
        if at not in self._known:
            size = EVAL_BATCH if self.context.task.has_total else max(num_samples, 1)
            self._known[at] = self._backward(form, _batches(num_samples, size), False, None)
        return self._known[at]

    def outputs(self, x: torch.Tensor, embedding: bool = False, train_mode: bool = False) -> Work:
        """Return the work of the outputs, or embeddings, of samples."""
        return self.forward(_form(x), len(x), embedding, train_mode)

    def forward(
        self, form: Form, num_samples: int, embedding: bool = False, train_mode: bool = False
    ) -> Work:
        """Return the work of the outputs of `num_samples` samples of a form; see `outputs`."""
        at = "outputs", form, num_samples, embedding, train_mode
        if at not in self._known:
            sizes = _batches(num_samples, STATISTICS_BATCH if train_mode else EVAL_BATCH)
            if train_mode and self.context.drop_single and len(sizes) > 1 and sizes[-1] == (1, 1):
                full = sizes[0][0]  # the single sample joins the last full batch
                sizes = [(full - 1, STATISTICS_BATCH), (1, STATISTICS_BATCH + 1)]
            kind = "embed" if embedding else "forward"
            flops = sum(count * self._of(kind, form, size, train_mode) for count, size in sizes if count)
            passes = sum(count for count, _ in sizes)
            self._known[at] = Work(passes, num_samples, 0, 0, flops)
        return self._known[at]

    def asked(self, asked: Asked, form: Form, local: LocalConfig, part: Part | None = None) -> Work:
        """Return the work of what a method asks a client for.

        Args:
            asked: what it asks for.
            form: form of the client's samples.
            local: how the client trains.
            part: the part that `asked` names; None for all.
        """
        n = asked.samples
        if asked.call == "sgd":
            once = self.trainings(form, n, replace(local, **asked.changes), part)
        elif asked.call == "gradient":
            once = self.gradients(form, n)
        else:
            once = self.forward(form, n, asked.call == "embed")
        return once.times(asked.times)

    def _backward(self, form: Form, sizes: Sizes, train_mode: bool, part: Part | None) -> Work:
        found = [(count, size) for count, size in sizes if count]
        if not found:
            return NOTHING
        passes, samples = sum(count for count, _ in found), sum(count * size for count, size in found)
        flops = sum(count * self._of("backward", form, size, train_mode, part) for count, size in found)
        return Work(0, 0, passes, samples, flops)

    def _of(self, kind: str, form: Form, size: int, train_mode: bool, part: Part | None = None) -> int:
        """Return the FLOPs of a pass over a batch of `size` samples."""
        at = kind, form, train_mode, bounds(part)
        if at not in self._lines:
            first, second, third = self._measured(kind, form, FEW, train_mode, part)
            straight = third - second == second - first
            each = second - first
            self._lines[at] = (first - FEW[0] * each, each) if straight else None
        line = self._lines[at]
        if line is not None:
            return line[0] + line[1] * size
        if (*at, size) not in self._flops:
            (self._flops[*at, size],) = self._measured(kind, form, (size,), train_mode, part)
        return self._flops[*at, size]

    def _measured(
        self, kind: str, form: Form, sizes: Sequence[int], train_mode: bool, part: Part | None
    ) -> list[int]:
        """Return what PyTorch counts in passes over so many samples each, computed or not.

        Passes of small networks are computed, in milliseconds: device `meta` loads PyTorch's compiler, which
        takes a second. Layers that processors fuse, so that there is nothing to count, stay there.
        """
        context = self.context
        if not context.counts and kind != "embed":
            return [0] * len(sizes)
        small = context.flat.layout.num_parameters <= SMALL and math.prod(form[0]) <= SMALL_SAMPLE
        small = small and not any(isinstance(m, FUSED) for m in context.flat.module.modules())
        asked = kind, form, sizes, train_mode, part
        with kept():
            try:
                return self._counted(*asked, CPU if small else META)
            except Exception:  # code of a network that reads numbers, or is written for one device
                return self._counted(*asked, context.device)

    def _counted(
        self,
        kind: str,
        form: Form,
        sizes: Sequence[int],
        train_mode: bool,
        part: Part | None,
        device: torch.device,
    ) -> list[int]:
        module = copy_on(self.context.flat.module, device).train(train_mode)
        trained = None if part is None else {id(p) for p in self.context.moving(part).params}
        for param, own in zip(module.parameters(), self.context.flat.module.parameters(), strict=True):
            param.requires_grad_(own.requires_grad and (trained is None or id(own) in trained))
        shape, dtype = form
        function = partial(embedding_of if kind == "embed" else self.context.forward, module)
        found = []
        for size in sizes:
            x = torch.zeros(size, *shape, dtype=dtype, device=device)
            seeded, differentiated = self.context.seeded(key(0, "flops")), kind == "backward"
            with seeded, FlopCounter() as counter, torch.set_grad_enabled(differentiated):
                out = function(x)
                if differentiated and out.requires_grad:
                    moving = [p for p in module.parameters() if p.requires_grad]
                    torch.autograd.grad(out.sum(), moving, allow_unused=True)
            found.append(int(counter.flops))
        return found


def _form(x: torch.Tensor) -> Form:
    return tuple(x.shape[1:]), x.dtype


def form_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Form:
    """Return the form of samples of a shape."""
    return tuple(shape), dtype


def _batches(num_samples: int, size: int) -> Sizes:
    full, rest = divmod(num_samples, size)
    return [(n, of) for n, of in ((full, size), (int(rest > 0), rest)) if n]


def figures(works: list[Work]) -> np.ndarray:
    """Return works as rows, int64 [m, 5]."""
    return np.array(works, np.int64).reshape(-1, len(NOTHING))
