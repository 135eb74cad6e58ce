"""MyPluginCodec: one byte for each number, between the smallest and the largest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval

from mpifl.core.rng import Key
from mpifl.traffic.compression import Codec

ENDS = np.dtype("<f4")  # smallest and largest number, before the levels
LEVELS = np.dtype("u1")


@dataclass(frozen=True)
class MyPluginCodec(Codec):
    """Round at random to levels between the smallest and the largest number.

    Attributes:
        levels: number of levels.
    """

    levels: Annotated[int, Interval(ge=2, le=256)] = 256

    paper = "author2026my_plugin"

    def size(self, d: int, number_bytes: int) -> int:
        """Return the size of both ends and of d levels in bytes."""
        return 2 * ENDS.itemsize + d * LEVELS.itemsize

    def encode(self, x: torch.Tensor, key: Key, unbiased: bool) -> bytes:
        """Return the ends and the levels; if not unbiased, each number goes to its nearest level."""
        low, high = float(x.min()), float(x.max())
        step = (high - low) / (self.levels - 1) or 1.0
        shift = torch.rand(len(x), generator=key.torch()) if unbiased else 0.5
        levels = ((x - low) / step + shift).floor().clamp(0, self.levels - 1)
        return np.array([low, high], ENDS).tobytes() + levels.numpy().astype(LEVELS).tobytes()

    def decode(self, data: bytes, d: int) -> torch.Tensor:
        """Return the numbers of the levels."""
        low, high = np.frombuffer(data, ENDS, 2)
        levels = np.frombuffer(data, LEVELS, d, 2 * ENDS.itemsize).astype(np.float32)
        return torch.from_numpy(low + levels * ((high - low) / (self.levels - 1)))
