"""Adapters inside flat vectors, and the best adapters of a given rank for a sum of products B A.

An adapter is two factors, A [r, in] and B [out, r], whose product is added to the weights of a layer
(`models/lora.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mpifl.core.parameters import Layout, Part, VectorParts, within

A, B = "lora_A", "lora_B"  # names of the factors in their layer
MIXED = 1e-6  # least length of what an earlier direction adds to the new ones, relative to its own length


@dataclass(frozen=True)
class Factors:
    """Where a vector holds the factors of an adapter.

    Attributes:
        a: slice of A.
        b: slice of B.
        rank: r.
    """

    a: slice
    b: slice
    rank: int

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [n, r, in] and B [n, out, r] of vectors [n, d]; convolutions are matrices, too."""
        n = len(rows)
        return rows[:, self.a].reshape(n, self.rank, -1), rows[:, self.b].reshape(n, -1, self.rank)


class AdapterColumns:
    """Where the vectors of a run hold adapters.

    Args:
        layout: layout of the model.
        layers: names of the layers with adapters.
        parts: what the vectors of the method hold.
    """

    def __init__(self, layout: Layout, layers: Collection[str], parts: VectorParts) -> None:
        self.layout, self.layers, self.parts = layout, tuple(layers), parts
        self._found: dict[tuple[str, int], tuple[Factors, ...]] = {}
        self._beyond: dict[tuple[str, int, int], torch.Tensor | None] = {}

    def factors(self, name: str, size: int) -> tuple[Factors, ...]:
        """Return the adapters that a vector [size] holds; none where it holds no part of the model."""
        if (name, size) not in self._found:
            held = self.parts.held(name, size)
            self._found[name, size] = () if held is None else tuple(self._of(held))
        return self._found[name, size]

    def _of(self, held: Part) -> Iterator[Factors]:
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        for layer in self.layers:
            names = f"{layer}.{A}", f"{layer}.{B}"
            a, b = (within((self.layout.slices[name],), held) for name in names)
            assert len(a) == len(b) <= 1, "a part of a model holds whole layers"
            if a:
                yield Factors(a[0], b[0], shapes[names[0]][0])

    def beyond(self, name: str, size: int, rank: int) -> torch.Tensor | None:
        """Return which numbers of a vector [size] a smaller rank lacks, bool [size]; None for none."""
        if (name, size, rank) not in self._beyond:
            lacks = torch.zeros(size, dtype=torch.bool)
            for f in self.factors(name, size):
                lacks[f.a].view(f.rank, -1)[rank:] = True
                lacks[f.b].view(-1, f.rank)[:, rank:] = True
            self._beyond[name, size, rank] = lacks if bool(lacks.any()) else None
        return self._beyond[name, size, rank]


@dataclass(frozen=True)
class Nearest:
    """The best approximation of a sum of products by one adapter.

    Attributes:
        a: A [r, in], orthonormal rows.
        b: B [out, r], the left singular vectors times the singular values, which descend.
        lost: square of the Frobenius norm of what the approximation lacks.
        total: square of the Frobenius norm of the sum.
    """

    a: torch.Tensor
    b: torch.Tensor
    lost: float
    total: float


def nearest(left: torch.Tensor, right: torch.Tensor, rank: int, before: torch.Tensor) -> Nearest:
    """Return the adapter of a rank that is nearest to `left @ right`; the product is never formed.

    The first s rows of A and columns of B are then the nearest adapter of rank s, for every s (Eckart and
    Young). The largest number of each row of A is positive. Where the product has a smaller rank than
    asked for, columns of B are 0, and rows of A continue the earlier directions: with both at 0 their
    gradients would be 0 for ever.

    Args:
        left: [out, R], factors B side by side, each times its weight.
        right: [R, in], factors A below each other.
        rank: r.
        before: A [n, in] of the old row.
    """
    with _one_thread():  # the bits of a product depend on the number of threads
        (ql, rl), (qr, rr) = torch.linalg.qr(left.double()), torch.linalg.qr(right.double().T)
        u, s, vh = torch.linalg.svd(rl @ rr.T, full_matrices=False)
        squares = s.square()
        noise = float(s[:1].sum()) * max(*left.shape, *right.shape) * torch.finfo(s.dtype).eps
        count = min(rank, int((s > noise).sum()))
        a = vh[:count] @ qr.T
        sign = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
        b = ql @ u[:, :count] * s[:count] * sign[:, 0]
        a = _continued(a * sign, before.double(), rank)
        b = torch.cat([b, b.new_zeros(len(b), rank - count)], 1)
    return Nearest(a, b, float(squares[rank:].sum()), float(squares.sum()))


def _continued(a: torch.Tensor, before: torch.Tensor, rank: int) -> torch.Tensor:
    """Return orthonormal rows [rank, in]: `a`, then others from `before`, then 0 if these run out."""
    for row in before:
        if len(a) == rank:
            break
        rest = row - a.T @ (a @ row)
        rest = rest - a.T @ (a @ rest)  # what rounding has left of the others
        if rest.norm() > MIXED * row.norm():
            a = torch.cat([a, (rest / rest.norm())[None]])
    return torch.cat([a, a.new_zeros(rank - len(a), a.shape[1])])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread in a block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
