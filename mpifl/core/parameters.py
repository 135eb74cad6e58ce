"""A model as one flat vector, and the named parts of that vector.

The vector [d] holds the parameters in the order of `named_parameters`, then the floating buffers (running
means of batch norm). Integer buffers are not part of it. Neither are the buffers that the model
names in `frozen`, which are the same for all and never sent. A part is a tuple of slices of the vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn

from .errors import Missing, UserError, nearest, require

Part = tuple[slice, ...]


def width(part: Part) -> int:
    """Return how many numbers a part holds."""
    return sum(s.stop - s.start for s in part)


def bounds(part: Part | None) -> tuple[tuple[int, int], ...] | None:
    """Return start and stop of each slice of a part, usable as the key of a mapping; None for all."""
    return None if part is None else tuple((s.start, s.stop) for s in part)


def take(vector: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the numbers of `vector` [..., d] that lie in `part`: [..., width], a view of a single slice."""
    pieces = [vector[..., s] for s in part or (slice(0, 0),)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def within(part: Part, whole: Part) -> Part:
    """Return the slices of `part` inside a vector that holds only `whole`, of which it is a part."""
    out, start = [], 0
    for w in whole:
        out += [
            slice(start + max(s.start, w.start) - w.start, start + min(s.stop, w.stop) - w.start)
            for s in part
            if s.start < w.stop and w.start < s.stop
        ]
        start += w.stop - w.start
    return tuple(out)


def put(vector: torch.Tensor, part: Part, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `vector` [d] whose `part` is replaced by `values` [width]."""
    out, start = vector.clone(), 0
    for s in part:
        size = s.stop - s.start
        out[s] = values[start : start + size]
        start += size
    return out


def _joined(slices: Iterable[slice]) -> Part:
    """Return the slices with neighbours merged."""
    out: list[slice] = []
    for s in slices:
        if out and out[-1].stop == s.start:
            out[-1] = slice(out[-1].start, s.stop)
        else:
            out.append(s)
    return tuple(out)


@dataclass(frozen=True)
class Layout:
    """Where each named tensor of a model lives in the flat vector.

    Attributes:
        names: names of the tensors, parameters first.
        shapes: shapes of the tensors, in the same order.
        num_parameters: p, the trainable prefix of the vector.
        blocks: module-name prefixes of the cluster block (FedCUAU), head included.
        frozen: names of the tensors that no vector holds, because they never change.
        num_outputs: L, the width of the last layer; 0 where the model has no `head`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_parameters: int
    blocks: tuple[str, ...] = ("head",)
    frozen: tuple[str, ...] = ()
    num_outputs: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of `model`."""
        tensors = [*model.named_parameters(), *floating_buffers(model)]
        return cls(
            names=tuple(name for name, _ in tensors),
            shapes=tuple(tuple(t.shape) for _, t in tensors),
            num_parameters=sum(p.numel() for p in model.parameters()),
            blocks=tuple(getattr(model, "blocks", ("head",))),
            frozen=tuple(sorted(frozen_names(model))),
            num_outputs=getattr(getattr(model, "head", None), "out_features", 0),
        )

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each named tensor."""
        sizes = [int(torch.Size(shape).numel()) for shape in self.shapes]
        ends = list(accumulate(sizes))
        return {name: slice(end - size, end) for name, size, end in zip(self.names, sizes, ends, strict=True)}

    @property
    def num_classes(self) -> int:
        """`num_outputs`, for methods that need it.

        Raises:
            UserError: the model does not say it.
        """
        remedy = "it says the number of classes; build a mpifl.models.Net(body, head), head an nn.Linear"
        require(self.num_outputs > 0, "model.name", "a network without `head.out_features`", remedy)
        return self.num_outputs

    @property
    def size(self) -> int:
        """d, the length of the vector."""
        return max((s.stop for s in self.slices.values()), default=0)

    def tensors(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of models [C, d] by name, each [C, *shape]."""
        return {
            name: vectors[:, s].reshape(len(vectors), *shape)
            for (name, s), shape in zip(self.slices.items(), self.shapes, strict=True)
        }

    def part(self, name: str) -> Part:
        """Return a named part.

        `all`, `parameters`, `buffers`; `head` (last layer) and `body` (the rest); `block` (cluster block with
        the head) and `trunk` (the rest); `stage` (cluster block without the head); `norm` (the modules that
        keep running statistics) and `unnormed` (the rest); `encoder` of an autoencoder.

        Raises:
            UserError: all tensors of the part are frozen, or the model has no head to split it at.
            Missing: there is no part of that name.
        """
        found = self._names_of(name, self.names)
        if not found and self._names_of(name, self.frozen):
            remedy = "the method works on that part of the model; name its modules in model.lora.train"
            raise UserError("model.lora", f"frozen {name}", remedy)
        if name in ("head", "body") and not any(n.startswith("head.") for n in (*self.names, *self.frozen)):
            remedy = "its last layer is needed apart from the rest; build a mpifl.models.Net(body, head)"
            raise UserError("model.name", "a network without `head`", remedy)
        return _joined(self.slices[n] for n in self.names if n in found)

    def _names_of(self, part: str, names: tuple[str, ...]) -> set[str]:
        """Return those of the names that belong to a named part."""
        in_head = {n for n in names if n.startswith("head.")}
        in_block = {n for n in names if any(n == b or n.startswith(f"{b}.") for b in self.blocks)} | in_head
        normed = {n.rpartition(".")[0] for n in names if n.endswith(".running_mean")}
        in_norm = {n for n in names if n.rpartition(".")[0] in normed}
        inside = {n: self.slices[n] for n in names if n in self.slices}
        parts = {
            "all": set(names),
            "parameters": {n for n, s in inside.items() if s.stop <= self.num_parameters},
            "buffers": {n for n, s in inside.items() if s.start >= self.num_parameters},
            "head": in_head,
            "body": set(names) - in_head,
            "block": in_block,
            "trunk": set(names) - in_block,
            "stage": in_block - in_head,
            "norm": in_norm,
            "encoder": {n for n in names if n.startswith("encoder.")},
            "unnormed": set(names) - in_norm,
        }
        if part not in parts:
            raise Missing(f"no part {part!r} of the layout", nearest(part, [*parts]))
        return parts[part]

    def module_parts(self) -> dict[str, Part]:
        """Return the parameters of each module of the body, by its name there, and of `head`; no buffers."""
        found: dict[str, list[slice]] = {}
        for name, s in self.slices.items():
            if s.stop <= self.num_parameters:
                first, *rest = name.split(".")
                found.setdefault(rest[0] if first == "body" and len(rest) > 1 else first, []).append(s)
        return {name: _joined(slices) for name, slices in found.items()}


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that a model declares as frozen."""
    return frozenset(getattr(model, "frozen", ()))


def floating_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the named buffers that belong to the vector."""
    frozen = frozen_names(model)
    return [(n, b) for n, b in model.named_buffers() if b.is_floating_point() and n not in frozen]


def flatten(model: nn.Module) -> torch.Tensor:
    """Return a copy of the model's state as a flat float32 vector [d]."""
    tensors = [*model.parameters(), *(b for _, b in floating_buffers(model))]
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


class FlatModel:
    """A module whose parameters, gradients and floating buffers are views into flat buffers.

    Integer buffers, which are not in the vector, are reset to their initial values whenever a vector is
    loaded: their counts belong to another client.

    Attributes:
        module: the module.
        layout: layout of its flat vector.
        vector: its state [d].
        weights: the trainable prefix [p] of `vector`.
        grad: its gradient [p].
    """

    def __init__(self, module: nn.Module, device: str | torch.device = "cpu") -> None:
        self.module = module.to(device)
        self._modules = list(module.modules())
        self.layout = Layout.of(module)
        self.vector = flatten(module)
        self.weights = self.vector[: self.layout.num_parameters]
        self.grad = torch.zeros_like(self.weights)
        slices = self.layout.slices
        for name, p in module.named_parameters():
            p.data = self.vector[slices[name]].view(p.shape)
            p.grad = self.grad[slices[name]].view(p.shape)
        buffers = floating_buffers(module)
        views = {id(b): self.vector[slices[name]].view(b.shape) for name, b in buffers}
        places = [
            (owner._buffers, f"{prefix}.{key}" if prefix else key, key)
            for prefix, owner in module.named_modules()
            for key in owner._buffers
        ]
        for place, _, key in places:  # several modules may hold the same one
            place[key] = views.get(id(place[key]), place[key])
        frozen = frozen_names(module)
        self._buffers = [(*place, b) for place in places if (b := place[0][place[2]]) is not None]
        self._counters = [
            (b, b.clone())
            for n, b in module.named_buffers()
            if not b.is_floating_point() and n not in frozen and not n.endswith("num_batches_tracked")
        ]  # num_batches_tracked has no effect

    def check_buffers(self) -> None:
        """Check that the module writes its buffers in place, where the vector and the next client find them.

        Raises:
            UserError: it has replaced a buffer by another tensor.
        """
        for place, name, key, buffer in self._buffers:
            if place.get(key) is not buffer:
                place[key] = buffer
                remedy = f"its code replaces the buffer; write into it: self.{key}.copy_(...)"
                raise UserError("model", name, remedy)

    def load(self, vector: torch.Tensor, train: bool | None = None) -> nn.Module:
        """Copy `vector` [d] into the module and return it, in training mode or not (None: unchanged).

        Raises:
            ValueError: it has another length; a single number would be broadcast to all places.
            UserError: the module has replaced a buffer.
        """
        self.check_buffers()
        if vector.shape != self.vector.shape:
            raise ValueError(f"expected {len(self.vector)} numbers, got a tensor of {list(vector.shape)}")
        self.vector.copy_(vector)
        for counter, initial in self._counters:
            counter.copy_(initial)
        if train is not None:
            for module in self._modules:  # faster than Module.train, which sets every module
                if module.training is not train:
                    module.training = train
        return self.module
