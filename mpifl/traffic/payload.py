"""The form in which numbers are sent between the clients and the server of a federation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from mpifl.core.errors import NotFinite
from mpifl.core.options import NonNegativeInt, Options
from mpifl.core.types import Report

Count = TypeVar("Count", int, "np.ndarray", "int | np.ndarray")
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number in a vector
NOTE_BYTES = 4  # bytes of a number in a note, float32 or int32: labels and seeds cannot be rounded


@dataclass(frozen=True)
class NumberFormat(Options):
    """The form in which numbers are sent.

    Attributes:
        dtype: number format of vectors, in both directions: `float32`, `float16` or `bfloat16`.
        header_bytes: bytes of the header of each message.
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    header_bytes: NonNegativeInt = 0

    @property
    def number_bytes(self) -> int:
        """Size of a number in a vector, in bytes."""
        return SIZES[self.dtype]

    def size(self, numbers: Count, messages: int = 1, note: bool = False) -> Count:
        """Return the size of uncompressed messages in bytes.

        Args:
            numbers: count of numbers in all messages; an array [c] for several clients.
            messages: number of messages.
            note: whether they are notes.
        """
        return numbers * (NOTE_BYTES if note else self.number_bytes) + messages * self.header_bytes

    def row_bytes(self, name: str, width: int, rows: int, whole: bool) -> int:
        """Return the size in bytes of rows that a client downloads.

        Args:
            name: name of the table.
            width: length of a row.
            rows: number of rows; each is a message.
            whole: whether its numbers are never rounded nor coded, and have the size of those in notes.
        """
        return self.size(width * rows, rows, whole)

    def vector_bytes(self, report: Report) -> dict[str, int]:
        """Return the size in bytes of each vector that a report sends as it is, number by number."""
        return {name: self.size(x.numel()) for name, x in report.vectors.items() if name not in report.unsent}

    def rounded(self, x: torch.Tensor, name_at: Callable[[int], str] | None = None) -> torch.Tensor:
        """Return a vector rounded to the payload's type, in float32.

        Args:
            x: vectors [..., width].
            name_at: returns what a number is part of, from its place in a vector; for the error.

        Raises:
            NotFinite: a number is too large for the type.
        """
        if self.dtype == "float32":
            return x
        kind: torch.dtype = getattr(torch, self.dtype)
        out = x.to(kind).float()
        lost = torch.isinf(out) & torch.isfinite(x)
        if bool(lost.any()):
            place = int(lost.nonzero()[0][-1])
            name = "" if name_at is None else f" of {name_at(place)}"
            what = f"too large a number{name}: {float(x[lost][0]):.3g}, and {self.dtype} ends at"
            remedy = "use float32" if self.dtype == "bfloat16" else "use bfloat16 or float32"
            raise NotFinite(f"payload.dtype {self.dtype}", f"{what} {torch.finfo(kind).max:.6g}", remedy)
        return out
