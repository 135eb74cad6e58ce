"""A cache of splits as tensors, bounded in memory: the oldest are dropped first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from mpifl.core import devices
from mpifl.core.federation import Split

NUM_BLOCKS = 8  # a block has 1 / NUM_BLOCKS of the limit, at most BLOCK_BYTES; a larger split has its own
BLOCK_BYTES = 64 << 20


class SampleCache:
    """A cache of the splits that were read last.

    Splits lie side by side in a few large blocks, and the oldest block is dropped as a whole. Dropping splits
    one by one would fragment the memory between large temporary tensors.

    Args:
        limit: size in bytes; 0 disables the cache.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._splits: dict[Hashable, Split] = {}
        self._blocks: deque[tuple[torch.Tensor, list[Hashable]]] = deque()
        self._filled = 0  # bytes of the last block

    def get(self, address: Hashable, read: Callable[[], Split]) -> Split:
        """Return the split at `address`; call `read` if it is not cached."""
        split = self._splits.get(address)
        if split is None:
            split = read()
            if (size := _aligned_bytes(split.x) + _aligned_bytes(split.y)) <= self.limit:
                block, inside = self._block(size)
                split = Split(self._placed(split.x, block), self._placed(split.y, block))
                self._splits[address] = split
                inside.append(address)
        return split

    def _block(self, size: int) -> tuple[torch.Tensor, list[Hashable]]:
        """Return a block with room for `size` bytes, and the list of the addresses in it."""
        if not self._blocks or self._filled + size > len(self._blocks[-1][0]):
            total = max(size, min(self.limit // NUM_BLOCKS, BLOCK_BYTES))
            while self._blocks and self.held + total > self.limit:
                oldest, inside = self._blocks.popleft()
                self.held -= len(oldest)
                for address in inside:
                    del self._splits[address]
            self._blocks.append((torch.empty(total, dtype=torch.uint8), []))
            self.held += total
            self._filled = 0
        return self._blocks[-1]

    def _placed(self, values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Copy `values` to the next free place of the block and return the copy."""
        start = self._filled
        self._filled += _aligned_bytes(values)
        place = block[start : start + values.nbytes].view(values.dtype).view(values.shape)
        return place.copy_(values)


def _aligned_bytes(values: torch.Tensor) -> int:
    return -(-values.nbytes // devices.ALIGNMENT) * devices.ALIGNMENT
