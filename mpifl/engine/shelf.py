"""Rows for the uploads of a round, allocated once and used again in the next.

Large tensors that are kept between others that come and go keep the C library from joining what was freed: a
worker's memory grew by half as much again as its uploads, and new memory costs more than the copy.
"""

from __future__ import annotations

from collections import Counter

import torch

from mpifl.core.devices import CPU, staged

LEAST = 1 << 20  # bytes of a round's uploads from which on a copy is worth it
CHUNK = 1 << 22  # numbers that are allocated at a time


class Shelf:
    """Holds uploads from one run of visits to the next."""

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = {}  # width -> rows
        self._taken: Counter[int] = Counter()
        self._room = 0  # bytes that may still stay on a device

    def clear(self, room: int = 0) -> None:
        """Make room: nobody reads the last run's uploads any more.

        Args:
            room: bytes of uploads that may stay on their device; the others come to main memory.
        """
        self._taken.clear()
        self._room = room

    def put(self, vector: torch.Tensor, visits: int) -> list[torch.Tensor]:
        """Return a client's upload [d] or [C, d] as rows in this rank's memory that last until `clear`.

        Args:
            visits: of the run; the others bring as much.
        """
        rows = vector.reshape(-1, vector.shape[-1])
        size = rows.numel() * rows.element_size()
        if rows.device != CPU and size <= self._room:
            self._room -= size
            return list(rows)
        rows = staged(rows)
        if visits * size < LEAST:
            return list(rows)
        return [self._next(rows.shape[1]).copy_(row) for row in rows]

    def _next(self, width: int) -> torch.Tensor:
        rows, number = self._rows.setdefault(width, []), self._taken[width]
        if number == len(rows):
            rows += torch.empty(max(1, CHUNK // width), width).unbind()
        self._taken[width] += 1
        return rows[number]
