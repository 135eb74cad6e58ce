"""A model on its device, with the flat vectors that training works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from mpifl.core.errors import require
from mpifl.core.federation import Split
from mpifl.core.flat_model import FlatModel
from mpifl.core.module_checks import Untouched
from mpifl.core.parameters import Part, bounds, floating_buffers
from mpifl.core.rng import Key
from mpifl.core.task import Task
from mpifl.kernels.pooling import use_fast_pooling
from mpifl.kernels.wide_layers import ChannelsLast, has_wide_convolutions

from .backend import epoch_orders
from .config import LocalConfig
from .precision import set_tf32
from .tasks import Classification

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)  # modules that draw random numbers
KNOWN = ("torch", "torchvision", "mpifl")  # packages whose modules draw from PyTorch's generators alone
RANDOM_NAMES = ("StochasticDepth",)  # the same in torchvision, which is not imported here


def is_random(module: nn.Module) -> bool:
    """Return whether a module itself draws random numbers in training."""
    return isinstance(module, RANDOM) or type(module).__name__ in RANDOM_NAMES


def _call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(x)
    return found


@dataclass(frozen=True)
class MovingPart:
    """The parameters that are updated when a part of a model is trained.

    Attributes:
        slices: slices of the parameters [p].
        params: the module's parameters inside the slices.
        weights: for each parameter, a view of the flat weights in its shape.
        gradients: for each parameter, a view of the flat gradient in its shape.
        momenta: for each parameter, a view of the momentum in its shape.
    """

    slices: list[slice]
    params: list[torch.Tensor]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    momenta: list[torch.Tensor]


class ModelContext:
    """A model on a device, shared by everything that trains or evaluates it.

    Args:
        model: the module; its parameters become views of one flat vector.
        device: device of the model.
        task: the task of the model; None: classification.
        kernels: whether kernels may compute layers inside PyTorch's loop; the last bits then differ.
        forward: (module, samples [b, ...]) -> outputs [b, ...] of a trainer; None: module(samples).

    Attributes:
        device: device of the model.
        task: the task of the model, which defines the loss.
        flat: the module, its vector [d], weights [p] and gradient [p].
        layout: position of each named tensor in the vector.
        momentum: momentum of SGD, or Adam's first moment [p].
        square: Adam's second moment [p].
        forward: (module, samples [b, ...]) -> outputs [b, ...].
        counts: whether outputs can be computed of samples alone, so that the FLOPs of a pass are known.
        untouched: returns whether the module has neither hooks nor methods overridden on an instance.
        computes_layers: whether kernels compute layers inside PyTorch's loop.
        draws: whether the module draws random numbers.
        foreign: whether a part of the module is a user's, which may also draw by means of NumPy and Python.
        drop_single: whether batches of one sample, which batch norm cannot train on, are left out.

    Raises:
        UserError: a batch norm layer has no momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cpu",
        task: Task | None = None,
        kernels: bool = False,
        forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.task, self.forward, self.counts = task or Classification(), forward or _call, True
        self.flat = FlatModel(use_fast_pooling(model), torch.device(device))
        self.device = self.flat.vector.device  # with an index, also where `device` is "cuda"
        set_tf32(self.device, False)  # PyTorch's default uses it in convolutions
        self.layout = self.flat.layout
        self.momentum = torch.zeros_like(self.flat.weights)
        self.square = torch.zeros_like(self.flat.weights)
        self.untouched = Untouched(self.flat.module)
        self.computes_layers = kernels and self.device.type == "cpu" and has_wide_convolutions(model)
        self.draws = any(is_random(m) for m in model.modules())
        self.foreign = any(type(m).__module__.partition(".")[0] not in KNOWN for m in model.modules())
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.drop_single = bool(norms)
        # without momentum the weight of a batch depends on how many this rank has seen, of any client
        remedy = "batch norm without momentum depends on which clients a rank trained before; give it one"
        require(all(m.momentum is not None for m in norms), "model", "batch norm", remedy)
        self._moving: dict[tuple[tuple[int, int], ...] | None, MovingPart] = {}
        self._edges = {0, *(s.stop for s in self.layout.slices.values())}
        self._checked: set[tuple[tuple[int, int], ...] | None] = set()

    def kernels(self) -> AbstractContextManager[object]:
        """Return a context in which the kernels compute the layers that they support.

        The kernels have one thread: if PyTorch has more, it computes all layers.
        """
        return ChannelsLast() if self.computes_convolutions else nullcontext()

    @property
    def computes_convolutions(self) -> bool:
        """Whether the kernels compute wide convolutions of the model."""
        return self.computes_layers and torch.get_num_threads() == 1

    def check(self, part: Part) -> None:
        """Raise `UserError` unless a part consists of whole tensors and contains a parameter."""
        address = bounds(part)
        if address in self._checked:
            return
        remedy = "cuts a tensor; use whole ones, by client.layout.part(...) or client.layout.slices"
        require(all({s.start, s.stop} <= self._edges for s in part), "part", address, remedy)
        trains = any(s.start < min(s.stop, self.layout.num_parameters) for s in part)
        require(trains, "part", address, "holds no parameter to train; use one that does, or leave sgd out")
        self._checked.add(address)

    def check_free(self, part: Part | None) -> None:
        """Raise `UserError` if `requires_grad` freezes all parameters of `part` (None: of the model)."""
        moving, p = self.moving(part), self.layout.num_parameters
        for name, at in () if moving.params else self.layout.slices.items():
            inside = part is None or any(s.start <= at.start < s.stop for s in part)
            remedy = "the method trains this part of the model, all of which is frozen; free some of it"
            require(not inside or at.start >= p, "model", f"frozen {name}", remedy)

    def moving(self, part: Part | None) -> MovingPart:
        """Return the parameters of `part` (None: of the model) that training updates: those not frozen."""
        address = bounds(part)
        if address not in self._moving:
            self._moving[address] = self._find_moving(part)
        return self._moving[address]

    def _find_moving(self, part: Part | None) -> MovingPart:
        flat, p = self.flat, self.layout.num_parameters
        slices = (
            [slice(0, p)] if part is None else [slice(s.start, min(s.stop, p)) for s in part if s.start < p]
        )
        places = self.layout.slices
        moving = [
            (places[name], param)
            for name, param in flat.module.named_parameters()
            if param.requires_grad and any(s.start <= places[name].start < s.stop for s in slices)
        ]
        if not all(param.requires_grad for param in flat.module.parameters()):
            slices = [s for s, _ in moving]
        vectors = (flat.weights, flat.grad, self.momentum)
        views = ([v[s].view(q.shape) for s, q in moving] for v in vectors)
        return MovingPart(slices, [param for _, param in moving], *views)

    def batches(self, split: Split, config: LocalConfig, key: Key) -> Iterator[torch.Tensor]:
        """Yield the sample indices of each batch, int64 [b], on the device."""
        for order in epoch_orders(len(split), config, key, self.drop_single):
            yield from torch.from_numpy(order).to(self.device).split(config.batch_size)

    def seed(self, key: Key) -> None:
        """Seed the generators that the module draws from: the device's, and others if it is a user's."""
        self._generator.manual_seed(key.seed)
        if self.foreign:
            key.seed_others()

    @contextmanager
    def seeded(self, key: Key) -> Iterator[None]:
        """Seed as `seed` does for a block, and restore the state of the device's generator afterwards.

        Nothing happens if the module draws no random numbers.
        """
        if not (self.draws or self.foreign):
            yield
            return
        before = self._generator.get_state()
        self.seed(key)
        try:
            yield
        finally:
            self._generator.set_state(before)

    @property
    def _generator(self) -> torch.Generator:
        """The device's default generator."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    @contextmanager
    def only(self, part: Part) -> Iterator[None]:
        """Freeze everything outside `part` in a block; norms whose running means are outside it use them.

        A module with parameters of its own is in evaluation mode, with all below it, if none is trained.
        """
        module, slices = self.flat.module, self.layout.slices
        # by identity: a tensor that several modules share is in the layout once, under its first name
        tensors = [*module.named_parameters(), *floating_buffers(module)]
        places = {id(t): slices[name].start for name, t in tensors}
        inside = {i for i, at in places.items() if any(s.start <= at < s.stop for s in part)}
        outside = places.keys() - inside
        frozen: list[nn.Parameter] = []
        for owner in module.modules():
            params = list(owner.parameters(recurse=False))
            frozen += [p for p in params if id(p) in outside and p.requires_grad]
            normed = isinstance(owner, nn.modules.batchnorm._NormBase) and id(owner.running_mean) in outside
            if normed or (params and inside.isdisjoint(map(id, (*owner.parameters(), *owner.buffers())))):
                owner.eval()
        for p in frozen:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)
