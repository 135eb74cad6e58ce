"""A model as one flat vector, and the named parts of that vector.

The vector [d] holds the weights, which are the parameters in the order of `named_parameters`, then the
statistics, which are the floating buffers that a state dict holds (running means and variances of batch
norm): they are averaged, and nothing else is done with them. Constants are not part of the vector, so they
are never sent: buffers that are not persistent, buffers that begin with infinity or NaN (masks of attention),
integer buffers, and the buffers that the model names in `frozen`. A part is a tuple of slices of the vector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def beyond(part: Part, whole: Part) -> Part:
    """Return where a vector holds `part`, slices of another vector that holds only its `whole`."""
    out, start = [], 0
    for w in whole:
        size = w.stop - w.start
        for s in part:
            lo, hi = max(s.start, start), min(s.stop, start + size)
            if lo < hi:
                out.append(slice(w.start + lo - start, w.start + hi - start))
        start += size
    return tuple(out)


def put(vector: torch.Tensor, part: Part, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `vector` [..., d] whose `part` is replaced by `values` [..., width]."""
    return put_(vector.clone(), part, values)


def put_(vector: torch.Tensor, part: Part, values: torch.Tensor) -> torch.Tensor:
    """Replace the `part` of `vector` [..., d] by `values` [..., width], in place; return `vector`."""
    start = 0
    for s in part:
        size = s.stop - s.start
        vector[..., s] = values[..., start : start + size]
        start += size
    return vector


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
        tied: names of one parameter that several modules share, for each such parameter; the vector holds it
            under the first.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_parameters: int
    blocks: tuple[str, ...] = ("head",)
    frozen: tuple[str, ...] = ()
    num_outputs: int = 0
    tied: tuple[tuple[str, ...], ...] = ()

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
            tied=_tied_names(model),
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
            UserError: all tensors of the part are frozen, the model has no head to split it at, or a tensor
                belongs both to the part and to the rest.
            Missing: there is no part of that name.
        """
        if name not in ("all", "parameters", "buffers"):
            self._need_apart(name)
        found = self._names_of(name, self.names)
        if not found and self._names_of(name, self.frozen):
            remedy = (
                "the method works on that part of the model; name its modules in model.lora.train or train"
            )
            raise UserError("model", f"frozen {name}", remedy)
        if name in ("head", "body") and not any(n.startswith("head.") for n in (*self.names, *self.frozen)):
            remedy = "its last layer is needed apart; name it (model.head), or build a mpifl.models.Net"
            raise UserError("model.name", "a network without `head`", remedy)
        return _joined(self.slices[n] for n in self.names if n in found)

    def _need_apart(self, part: str) -> None:
        """Raise `UserError` if a parameter that modules share lies both in a named part and in the rest."""
        for names in self.tied:
            inside = sorted(self._names_of(part, names))
            outside = [n for n in names if n not in inside]
            if inside and outside:
                pair = ("head", "body") if part in ("head", "body") else (part, "the rest")
                shared = f"{pair[0]} and {pair[1]} share weights: {inside[0]} is {outside[0]}"
                remedy = "the method treats them apart; use a model whose head has weights of its own"
                raise UserError("model.name", shared, f"{remedy}, or a method for whole models")

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


class VectorParts:
    """What the vectors of a run hold, by name and width: weights of the model, statistics, or something else.

    Statistics (running means and variances) are means of what arrives. They are neither compressed nor
    attacked, no noise is added to them, and no step leads beyond the values that arrived: a variance would
    become negative.

    Args:
        layout: layout of the model.
        holds: vector -> the named part of the model that it holds (`Algorithm.holds`); any other vector holds
            the whole model, or all parameters, if it is as long.
        no_weights: names of vectors that hold no weights at all (`Algorithm.statistics`).
    """

    def __init__(
        self, layout: Layout, holds: Mapping[str, str] | None = None, no_weights: Collection[str] = ()
    ) -> None:
        self.layout, self.no_weights = layout, tuple(no_weights)
        self._held = {name: layout.part(part) for name, part in (holds or {}).items()}
        self._statistics: dict[tuple[str, int], Part] = {}

    def held(self, name: str, size: int) -> Part | None:
        """Return the slices of the model that a vector [size] holds; None if it holds something else."""
        if name in self.no_weights:
            return None
        if name in self._held and width(self._held[name]) == size:
            return self._held[name]
        whole = size in (self.layout.size, self.layout.num_parameters)
        return (slice(0, size),) if whole else None

    def statistics(self, name: str, size: int) -> Part:
        """Return the slices of a vector [size] that hold statistics."""
        if name in self.no_weights:
            return (slice(0, size),)
        found = self._statistics.get((name, size))
        if found is None:
            held, p, d = self.held(name, size), self.layout.num_parameters, self.layout.size
            buffers: Part = (slice(p, d),) if p < d else ()
            found = self._statistics[name, size] = () if held is None else within(buffers, held)
        return found

    def weights(self, name: str, size: int) -> Part:
        """Return the slices of a vector [size] that hold no statistics."""
        edges = [0, *(at for s in self.statistics(name, size) for at in (s.start, s.stop)), size]
        return tuple(slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)

    def tensor_at(self, name: str, size: int, place: int) -> str:
        """Return the name of the model's tensor that holds a number of a vector [size]; empty for none."""
        held = self.held(name, size)
        if held is None:
            return ""
        at = beyond((slice(place, place + 1),), held)[0].start
        return next((n for n, s in self.layout.slices.items() if s.start <= at < s.stop), "")

    def first_not_finite(self, name: str, rows: torch.Tensor) -> str:
        """Return ` (in TENSOR)` for the first number of rows [..., size] that is not finite, else nothing."""
        size = rows.shape[-1]
        bad = (~torch.isfinite(rows.reshape(-1, size))).any(0).nonzero()
        found = self.tensor_at(name, size, int(bad[0])) if len(bad) else ""
        return f" (in {found})" if found else ""


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that a model declares as frozen."""
    return frozenset(getattr(model, "frozen", ()))


def _tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that several modules share."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return tuple(tuple(some) for some in names.values() if len(some) > 1)


def _persistent_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that a state dict holds."""
    return frozenset(
        f"{prefix}.{key}" if prefix else key
        for prefix, owner in model.named_modules()
        for key in owner._buffers.keys() - owner._non_persistent_buffers_set
    )


def infinite_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the floating buffers of a state dict that begin with infinity or NaN."""
    held = _persistent_names(model) - frozen_names(model)
    return frozenset(
        name
        for name, b in model.named_buffers()
        if name in held and b.is_floating_point() and not b.is_meta and not bool(torch.isfinite(b).all())
    )


def constant_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that belong to no vector: integer, frozen, not persistent, infinite."""
    held = _persistent_names(model) - frozen_names(model) - infinite_names(model)
    return frozenset(n for n, b in model.named_buffers() if n not in held or not b.is_floating_point())


def floating_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the named buffers that belong to the vector: its statistics."""
    constant = constant_names(model)
    return [(n, b) for n, b in model.named_buffers() if n not in constant]


def flatten(model: nn.Module) -> torch.Tensor:
    """Return a copy of the model's state as a flat float32 vector [d]."""
    tensors = [*model.parameters(), *(b for _, b in floating_buffers(model))]
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])
